"""Run under torchrun by test_ranks.py: trains every case on all ranks, beside a DistributedDataParallel twin.

train_on_ranks.py OUT NVME     writes OUT/<rank>.json: {case: {"losses", "twin", "norms", "twin_norms", "same_weights"}}
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo
from cases import CASES, DTYPES, NUM_STEPS, policy_of
from twins import seeded

import tiermem
from tiermem.zero import Init


def main(out: Path, nvme: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {}
    for dtype, accumulation in itertools.product(DTYPES, (1, 3)):
        twin = train_twin(getattr(torch, dtype), accumulation)
        for case in CASES:
            found[f"{case} {dtype} x{accumulation}"] = twin | train(case, nvme, getattr(torch, dtype), accumulation)
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def train_twin(dtype: torch.dtype, accumulation: int) -> dict[str, Any]:
    model = DistributedDataParallel(seeded(zoo.tied_tower).to(dtype))
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        for micro in range(accumulation):
            model.require_backward_grad_sync = micro == accumulation - 1
            losses.append(micro_batch(model, step, micro, accumulation))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optim.step()
        optim.zero_grad()
    weights = {name: value.tolist() for name, value in model.module.state_dict().items()}
    return {"twin": losses, "twin_norms": norms, "twin_head": weights["head.weight"][0]}


def train(case: str, nvme: Path, dtype: torch.dtype, accumulation: int) -> dict[str, Any]:
    policy = policy_of(case, nvme)
    torch.manual_seed(dist.get_rank())  # rank 0's weights win
    if case.startswith("init"):
        with Init(policy=policy, dtype=dtype):
            model: nn.Module = zoo.tied_tower() if dist.get_rank() else seeded(zoo.tied_tower)
    else:
        model = (zoo.tied_tower() if dist.get_rank() else seeded(zoo.tied_tower)).to(dtype)
    losses, norms = [], []
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(NUM_STEPS):
            losses += [micro_batch(model, step, micro, accumulation) for micro in range(accumulation)]
            optim.step()
            optim.zero_grad()
            norms.append(optim.grad_norm)
        weights = copy.deepcopy(model.state_dict())
        read_bytes = shards.store.stats().nvme_read_bytes
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: value.tolist() for name, value in weights.items()})
    return {
        "losses": losses,
        "norms": norms,
        "head": weights["head.weight"][0].tolist(),
        "same_weights": all(each == everywhere[0] for each in everywhere),
        "read_bytes": read_bytes,
    }


def micro_batch(model: nn.Module, step: int, micro: int, accumulation: int) -> float:
    loss = zoo.loss_of(model, dist.get_rank() + 10 * micro + 100 * step) / accumulation
    loss.backward()
    return loss.item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
