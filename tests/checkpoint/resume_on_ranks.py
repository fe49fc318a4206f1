"""Checkpoints that pass from one number of ranks to another; run in 4 processes by
test_resume_on_ranks.py.

The group of each stage is the first ranks; the others wait. What rank 0 finds out is written:
losses, states before and after.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import as_rank
from programs.models import VOCAB, Tower
from programs.twins import seeded
from saved_by_hand import pieces_of

import tiermem
from tiermem import OffloadPolicy, Shards, Tier, checkpoint
from tiermem.precision import Precision
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

SAMPLES = 12  # of a step, over all ranks
WAYS: dict[str, dict[str, Any]] = {
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME},
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "stage 1": {"stage": 1, "optim": Tier.NVME},
}


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (SAMPLES, 12), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(world)[rank]
    return mine[:, :-1], mine[:, 1:]


@contextlib.contextmanager
def trained(
    world: int, folder: Path, way: str, tile_numel: int, preset: str
) -> Iterator[tuple[Shards, tiermem.AdamW]]:
    group = GROUPS[world]
    model = seeded(Tower, 11)
    if preset != "fp32":
        model = model.bfloat16()
    precision = Precision() if preset == "fp32" else Precision.preset(preset)
    fields = {
        "paths": [folder],
        "tile_numel": tile_numel,
        "persistence_numel": 100,
        "precision": precision,
    }
    with tiermem.shard(model, OffloadPolicy(**(fields | WAYS[way])), group=group) as shards:
        yield shards, tiermem.AdamW(model.parameters(), lr=1e-2)


def step(shards: Shards, optim: tiermem.AdamW, number: int) -> None:
    inputs, targets = batch(number, shards.topology.rank, shards.topology.world)
    loss = F.cross_entropy(shards.model(inputs).flatten(0, 1).float(), targets.flatten())
    loss.backward()
    optim.step()
    optim.zero_grad()


def states(shards: Shards) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in shards.model.named_parameters():
        found[f"{name}.fp32"] = safe_get_full_fp32_param(param)
        found[f"{name}.weight"] = shards.weight(param)
        for state in ("exp_avg", "exp_avg_sq"):
            value = safe_get_full_optimizer_state(param, state)
            assert value is not None
            found[f"{name}.{state}"] = value
    return found


def passed_on(
    rank: int, folder: Path, nvme: Path, worlds: list[int], ways: list[str], preset: str
) -> dict[str, Any]:
    """One step on each number of ranks; states after each step, and after each opening."""
    found: dict[str, Any] = {"stepped": [], "opened": []}
    for number, (world, way) in enumerate(zip(worlds, ways, strict=True)):
        if rank < world:
            with trained(world, nvme, way, 4096 * (1 + number % 2), preset) as (shards, optim):
                if number:
                    loaded = checkpoint.load(shards, optim, folder)
                    assert loaded is not None
                    assert loaded.step == number
                    found["opened"].append(states(shards))
                step(shards, optim, number)
                found["stepped"].append(states(shards))
                assert checkpoint.save(shards, optim, folder)
        dist.barrier()
    return found


def one_fails(rank: int, folder: Path, nvme: Path) -> dict[str, str]:
    """Rank 1 cannot read its part of the newest tag: an error on all, no step; the older one opens,
    on all."""
    said = {}
    if rank < 2:
        with trained(2, nvme, "nvme", 4096, "fp32") as (shards, optim):
            step(shards, optim, 0)
            checkpoint.save(shards, optim, folder, "old", copy=True)
            checkpoint.wait(shards)
            before = states(shards)
            step(shards, optim, 1)
            checkpoint.save(shards, optim, folder, "new", copy=True)
            checkpoint.wait(shards)
            dist.barrier(GROUPS[2])
            if rank == 0:
                spoil(folder)
            dist.barrier(GROUPS[2])
            try:
                checkpoint.load(shards, optim, folder)
            except OSError as error:
                said["load"] = f"{type(error).__name__}: {error}"
            try:
                step(shards, optim, 2)
            except RuntimeError as error:
                said["step"] = str(error)
                optim.zero_grad()
            loaded = checkpoint.load(shards, optim, folder, allow_older=True)
            assert loaded is not None
            after = states(shards)
            said["older"] = str(
                all(torch.equal(before[name], after[name]) for name in before) and loaded.tag
            )
    dist.barrier()
    return said


def spoil(folder: Path) -> None:
    """Flips a bit of the last elements of a moment, which rank 1 holds."""
    with checkpoint.Source.open(folder) as source:
        part = source.parts[1]
        piece = next(
            each
            for each in pieces_of(part)
            if (each.param, each.state) == ("head.weight", "exp_avg")
        )
        file = source.file.parent / part.files[piece.file]
    with open(file, "r+b") as stream:
        stream.seek(piece.offset)
        byte = stream.read(1)[0]
        stream.seek(piece.offset)
        stream.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    with as_rank() as (rank, out, words):
        torch.set_num_threads(1)
        nvme = Path(words[0])
        # torch names groups by how many a rank is in
        alone = [dist.new_group([each]) for each in range(4)]
        GROUPS = {1: alone[rank]} | {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
        found = {
            "fp32": passed_on(
                rank, nvme / "a", nvme, [2, 4, 1, 3], ["nvme", "host", "nvme", "stage 1"], "fp32"
            ),
            "compact": passed_on(rank, nvme / "b", nvme, [3, 2], ["nvme", "nvme"], "compact"),
            "one fails": one_fails(rank, nvme / "c", nvme),
        }
        torch.save(found, out)
