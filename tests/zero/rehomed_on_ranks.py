"""Run once per rank by test_rehoming.py: states and weights move on 2 ranks.

rehomed_on_ranks.py OUT FOLDER     writes OUT/<rank>.pt: weights with and without moves, and the refusal of moves that differ
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from programs.models import Tower
from programs.twins import seeded, train_steps
from test_rehoming import BASES, MOVES, WITH_WEIGHTS

import tiermem
from tiermem import OffloadPolicy, Tier


def train(rank: int, moves: list[dict[str, Any]], folder: Path) -> dict[str, torch.Tensor]:
    model = seeded(Tower)
    own = folder / str(rank)  # as where each rank has a drive of its own
    own.mkdir(exist_ok=True)
    policy = OffloadPolicy(paths=[own], persistence_numel=50, **BASES["nvme"])
    with tiermem.shard(model, policy, device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number, move in enumerate(moves):
            shards.rehome(dataclasses.replace(shards.policy, **move))
            train_steps(model, optim, range(100 * rank + 2 * number, 100 * rank + 2 * number + 2))
        return dict(model.state_dict())


def differing(rank: int, folder: Path) -> str:
    model = seeded(Tower)
    policy = OffloadPolicy(paths=[folder], **BASES["nvme"])
    with tiermem.shard(model, policy, device="cpu") as shards:
        try:
            optim = Tier.NVME if rank else Tier.HOST
            shards.rehome(dataclasses.replace(shards.policy, optim=optim))
        except ValueError as error:
            return str(error)
    return ""


def main() -> None:
    with as_rank() as (rank, out, [folder]):
        moves = [*MOVES, *WITH_WEIGHTS]
        found: dict[str, Any] = {
            "moves": train(rank, moves, Path(folder)),
            "stays": train(rank, [{}] * len(moves), Path(folder)),
            "differing": differing(rank, Path(folder)),
        }
        torch.save(found, out)


if __name__ == "__main__":
    main()
