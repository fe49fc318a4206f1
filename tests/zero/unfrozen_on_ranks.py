"""Run once per rank by test_unfreezing.py: unfreezing on 2 ranks, beside plain training on both
ranks' data.

unfrozen_on_ranks.py OUT FOLDER     writes OUT/<rank>.pt: what every case gave, and what plain training gives
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from programs.twins import loss_of
from test_unfreezing import groups_from_the_start, head_only, policy_of, trained_alone, unfreeze

import tiermem
from tiermem import OffloadPolicy, checkpoint

HOMES = ("host", "nvme", "device", "stage 2", "stage 1", "stage 0")
NUM_STEPS = 6


def train(model: Any, optim: Any, ranks: list[int], steps: range = range(NUM_STEPS)) -> None:
    """Steps on the mean over these ranks' data; unfreezes a block, an embedding between
    micro-batches, and freezes again."""
    for step in steps:
        for micro in range(2):
            if (step, micro) == (1, 0):
                unfreeze(optim, model.layers[1], lr=5e-3)
            if (step, micro) == (3, 1):
                unfreeze(optim, model.embed, lr=2e-3)
                model.layers[1].up.requires_grad_(False)
            for rank in ranks:
                (loss_of(model, 100 * step + 10 * micro + rank) / len(ranks)).backward()
        optim.step()
        optim.zero_grad()


def resumed(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Trains, with a break after the first unfreezing: another model opens the checkpoint and goes
    on."""
    for steps in (range(2), range(2, NUM_STEPS)):
        model = head_only(seed=steps.start)
        with tiermem.shard(model, policy_of("nvme", folder), device="cpu") as shards:
            optim = groups_from_the_start(model)
            if steps.start:
                model.layers[1].requires_grad_(True)
                checkpoint.load(shards, optim, folder / "saved")
            train(model, optim, [rank], steps)
            if not steps.start:
                checkpoint.save(shards, optim, folder / "saved")
            weights = dict(model.state_dict())
    return weights


def main() -> None:
    with as_rank() as (rank, out, [folder]):
        found: dict[str, Any] = {}
        for build in (groups_from_the_start, trained_alone):
            plain = head_only()
            train(plain, build(plain), [0, 1])
            found[f"plain, {build.__name__}"] = dict(plain.state_dict())
            for home in HOMES:
                model = head_only()
                with tiermem.shard(model, policy_of(home, Path(folder)), device="cpu"):
                    train(model, build(model), [rank])
                    found[f"{home}, {build.__name__}"] = dict(model.state_dict())
        found["resumed, groups_from_the_start"] = resumed(rank, Path(folder))
        model = head_only()
        with tiermem.shard(model, policy_of("nvme", Path(folder)), device="cpu"):
            model.layers[rank].requires_grad_(True)
            try:
                loss_of(model, rank)
            except ValueError as error:
                found["differing"] = str(error)
        for stage in (0, 1, 3):
            model = head_only().requires_grad_(False)
            with tiermem.shard(model, OffloadPolicy(stage=stage), device="cpu"):
                optim = tiermem.AdamW(model.parameters(), lr=1e-2)
                optim.step(max_norm=1.0)
                norms = (
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item(),
                    optim.grad_norm,
                )
            found.setdefault("norms of nothing", []).extend(norms)
        torch.save(found, out)


if __name__ == "__main__":
    main()
