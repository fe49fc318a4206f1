"""Run once per rank by test_quantised_frozen.py: frozen matrices in blocks, on 2 ranks and then on
1, beside a twin.

frozen_on_ranks.py OUT FOLDER     writes OUT/<rank>.pt: what differed, and the number of cases
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frozen_blocks import blocked, policy_of
from launch import as_rank
from programs import models
from programs.twins import seeded
from test_compute_dtype import loss_of

import tiermem
from tiermem import Shards, Tier, checkpoint

CASES: dict[str, dict[str, Any]] = {
    "host, fp32": {"tier": Tier.HOST},
    "nvme, bf16 in fp32": {"tier": Tier.NVME, "compute_dtype": "fp32"},
}


def step(model: Any, optim: Any, number: int, rank: int, casts: bool = False) -> float:
    loss = loss_of(model, 10 * number + rank, casts)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def trained(parameters: Any) -> list[Any]:
    return [param for param in parameters if param.requires_grad]


def differing(shards: Shards, twin: torch.nn.Module) -> list[str]:
    pairs = [
        (name, shards.weight(shards.model.get_parameter(name)), param)
        for name, param in twin.named_parameters()
    ]
    return [name for name, mine, its in pairs if not torch.equal(mine, its)]


def main() -> None:
    with as_rank() as (rank, out, [folder]):
        alone, wrong, cases = dist.new_group([0]), list[str](), 0
        for form in ("int8", "nf4"):
            for name, fields in CASES.items():
                cases += 1
                place = Path(folder) / f"{form} {name}"
                place.mkdir(exist_ok=True)
                wrong += [
                    f"{form}, {name}: {each}"
                    for each in passed_on(rank, place, alone, form, **fields)
                ]
        for tier in (Tier.HOST, Tier.NVME):
            wrong += [
                f"built under Init, {tier}: {each}" for each in built_under_init(Path(folder), tier)
            ]
        torch.save({"wrong": wrong, "cases": cases}, out)


def passed_on(
    rank: int, folder: Path, alone: Any, form: str, tier: Tier, **fields: Any
) -> list[str]:
    """Two ranks train and save, rank 0 opens and saves alone, two ranks open again: what
    differed."""
    dtype, casts = (torch.bfloat16, True) if fields else (torch.float32, False)
    policy, wrong = policy_of(form, tier, folder, **fields), list[str]()
    model = seeded(models.frozen_tower).to(dtype)
    twin = blocked(model, form)
    adam = tiermem.AdamW(trained(twin.parameters()), lr=1e-2)
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(trained(model.parameters()), lr=1e-2)
        for number in range(3):
            mine, its = step(model, optim, number, rank), twin_step(twin, adam, number, rank, casts)
            wrong += [f"step {number}: {mine} {its}"] if mine != its else []
        wrong += [f"two ranks: {name}" for name in differing(shards, twin)]
        checkpoint.save(shards, optim, folder, "two")
    if rank == 0:
        model = seeded(models.frozen_tower, 1).to(dtype)
        with tiermem.shard(model, policy, group=alone) as shards:
            optim = tiermem.AdamW(trained(model.parameters()), lr=1e-2)
            checkpoint.load(shards, optim, folder)
            wrong += [f"one rank: {name}" for name in differing(shards, twin)]
            checkpoint.save(shards, optim, folder, "one")
    dist.barrier()
    model = seeded(models.frozen_tower, 2).to(dtype)
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(trained(model.parameters()), lr=1e-2)
        opened = checkpoint.load(shards, optim, folder)
        wrong += [] if opened is not None and opened.tag == "one" else [f"opened {opened}"]
        wrong += [f"two ranks again: {name}" for name in differing(shards, twin)]
        mine, its = step(model, optim, 3, rank), twin_step(twin, adam, 3, rank, casts)
        wrong += [f"after opening: {mine} {its}"] if mine != its else []
    return wrong


def built_under_init(folder: Path, tier: Tier) -> list[str]:
    """Rank 0's values count; each rank keeps another part of a parameter while the model is built
    than in its blocks."""
    policy = policy_of("nf4", tier, folder)
    torch.manual_seed(dist.get_rank())
    with tiermem.zero.Init(policy=policy):
        model = models.frozen_tower()
    with tiermem.shard(model, policy) as shards:
        return differing(shards, blocked(seeded(models.frozen_tower), "nf4"))


def twin_step(twin: Any, adam: Any, number: int, rank: int, casts: bool) -> float:
    """A step of a plain model whose gradients are the mean over the ranks."""
    loss = loss_of(twin, 10 * number + rank, casts)
    loss.backward()
    for param in trained(twin.parameters()):
        dist.all_reduce(param.grad)
        param.grad /= 2
    adam.step()
    adam.zero_grad()
    return loss.item()


if __name__ == "__main__":
    sys.exit(main())
