"""Looks at a model's weights and gradients from outside; run once per rank by
test_outside_on_ranks.py. Every rank sees the same batches, so that weights are the same on any
number of ranks.

outside_on_ranks.py OUT NVME     writes OUT/<rank>.pt: {case: {"averages", "applied", "back", "exported", "clipped", "refused"}}
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from programs.models import Tower
from programs.twins import loss_of, seeded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_

import tiermem
from tiermem import OffloadPolicy, Tier

CASES: dict[str, dict[str, Any] | None] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME},
    "stage 1": {"stage": 1},
    "fsdp2": None,
}


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone()
        for n, v in state.items()
    }


def looked_at(case: str, nvme: Path) -> dict[str, Any]:
    model, fields = seeded(Tower), CASES[case]
    if fields is None:
        for layer in model.layers:
            fully_shard(layer)
        return found_in(fully_shard(model))
    with tiermem.shard(
        model,
        OffloadPolicy(paths=[nvme], persistence_numel=50, timeout_s=60, **fields),
        device="cpu",
    ):
        torch.set_num_threads(1)
        return found_in(model)


def found_in(model: nn.Module) -> dict[str, Any]:
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    ema = tiermem.EMA(model, 0.9)
    for step in range(3):
        loss_of(model, step).backward()
        clip_grad_value_(model.parameters(), 1e-3)
        norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
        clipped = max(float(norm) for norm in full(norms).values())
        optim.step()
        optim.zero_grad()
        ema.update()
    found: dict[str, Any] = {"clipped": clipped, "averages": full(ema.state_dict()["averages"])}
    before = copy.deepcopy(full(model.state_dict()))
    with ema.applied():
        found["applied"] = full(model.state_dict())
    found["back"] = all(
        torch.equal(value, before[name]) for name, value in full(model.state_dict()).items()
    )
    found["exported"] = full(dict(tiermem.export_weights(model)))
    found["current"] = before
    loss_of(model, 3).backward()
    try:
        found["refused"] = str(float(model.head.weight.grad.abs().max()))
    except RuntimeError as error:
        found["refused"] = str(error)
    ema.load_state_dict(ema.state_dict())
    found["loaded"] = full(ema.state_dict()["averages"])
    ema.close()
    return found


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme,)):
        torch.set_num_threads(1)
        torch.save({case: looked_at(case, Path(nvme)) for case in CASES}, out)
