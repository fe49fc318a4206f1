"""Saves and resumes optimizers of sharded models; run once per rank by
test_state_dicts_on_ranks.py. Every rank sees the same batches, so that states are the same on any
number of ranks.

state_dicts_on_ranks.py OUT NVME     writes OUT/<rank>.pt: {case: {"saved": state dict, "went_on", "resumed": losses}}
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from programs.models import Tower
from programs.twins import seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier

CASES: dict[str, tuple[torch.dtype, str, dict[str, Any]]] = {
    "fp32": (torch.float32, "exact", {}),
    "exact": (torch.bfloat16, "exact", {"stage": 2, "params": Tier.DEVICE}),
    "compact": (torch.bfloat16, "compact", {}),
    "compact, on NVMe": (
        torch.bfloat16,
        "compact",
        {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME},
    ),
}


def save_and_resume(name: str, nvme: Path) -> dict[str, Any]:
    dtype, preset, fields = CASES[name]
    settings = {
        "params": Tier.HOST,
        "optim": Tier.HOST,
        "paths": [nvme],
        "persistence_numel": 100,
        "tile_numel": 4096,
    }
    policy = OffloadPolicy(precision=Precision.preset(preset), **(settings | fields))
    model = seeded(Tower).to(dtype)
    with tiermem.shard(model, policy):
        torch.set_num_threads(1)
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(3))
        weights, saved = copy.deepcopy((model.state_dict(), optim.state_dict()))
        went_on = train_steps(model, optim, range(3, 5))
    other = seeded(Tower).to(dtype)
    other.load_state_dict(weights)
    with tiermem.shard(other, policy):
        torch.set_num_threads(1)
        optim = tiermem.AdamW(other.parameters())
        optim.load_state_dict(saved)
        resumed = train_steps(other, optim, range(3, 5))
    return {"saved": saved, "went_on": went_on, "resumed": resumed}


def refusal_of_muon() -> str:
    model = seeded(Tower)
    with tiermem.shard(model):
        try:
            tiermem.Muon(model.parameters())
        except ValueError as error:
            return str(error)
    return "none"


def visited_before_the_first_step() -> dict[str, Any]:
    """The state dict after a visit that sets only the first element of each parameter, which rank 0
    holds."""
    model = seeded(Tower)

    def set_first(values: dict[str, torch.Tensor], param: nn.Parameter, elements: slice) -> None:
        if elements.start == 0:
            values["exp_avg"][0] = 1.0

    with tiermem.shard(model, OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, timeout_s=20)):
        optim = tiermem.AdamW(model.parameters())
        tiermem.utils.safe_update_local_states_vectorized(model.parameters(), set_first)
        return copy.deepcopy(optim.state_dict())


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme,)):
        torch.save(
            {name: save_and_resume(name, Path(nvme)) for name in CASES}
            | {"muon": refusal_of_muon(), "visited": visited_before_the_first_step()},
            out,
        )
