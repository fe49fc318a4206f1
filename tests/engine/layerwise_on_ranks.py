"""Accumulation by layers and by batches on several ranks; run once per rank by test_layerwise.py.

layerwise_on_ranks.py OUT NVME     writes OUT/<rank>.pt
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from launch import as_rank
from layerwise_runs import Run, train
from programs import models
from programs.twins import seeded


def runs_on(rank: int, nvme: Path) -> dict[str, list[Run]]:
    """By batches and by layers."""
    found = {}
    for name, build, device, num_micro in (
        ("tied", models.tied_tower, "nvme", 3),
        ("plain", models.ShortTower, "cpu", 2),
    ):
        model = seeded(build)
        found[name] = [
            train(copy.deepcopy(model), order, num_micro, device, nvme, rank=rank)
            for order in ("batches", "layers")
        ]
    return found


if __name__ == "__main__":
    with as_rank() as (rank, out, (nvme,)):
        torch.save(runs_on(rank, Path(nvme)), out)
