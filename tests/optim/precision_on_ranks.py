"""Trains a few steps in several precisions and writes what came of it; run once per rank, and
alone, by test_precision_on_ranks.py. Every rank sees the same batches, so that gradients are the
same on any number of ranks.

precision_on_ranks.py OUT NVME     writes OUT/<rank>.pt: {case: {"losses", "weights", "states": this rank's parts}}
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from programs.models import Tower
from programs.twins import seeded, states_of, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.precision import PRESETS, Precision

NUM_STEPS = 4


class Even(nn.Module):
    """Every parameter is cut at a multiple of 64 elements on two ranks: 8-bit blocks are the same
    as on one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(3)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x @ torch.ones(128, 64, dtype=x.dtype).tril()


ON_NVME: dict[str, Any] = {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME}
CASES: dict[str, tuple[Callable[[], nn.Module], Precision, dict[str, Any]]] = {
    "exact": (Tower, PRESETS["exact"], {}),
    "compact": (Tower, PRESETS["compact"], {}),
    "compact, on NVMe": (Tower, PRESETS["compact"], ON_NVME),
    "compact, under backward": (
        Tower,
        PRESETS["compact"],
        ON_NVME | {"grads": Tier.HOST, "overlap": "backward"},
    ),
    "compact, fp32 gradients": (Tower, Precision("split", "bf16", "fp32"), {}),
    "stochastic bf16": (
        Tower,
        Precision("bf16", "bf16"),
        {"params": Tier.NVME, "optim": Tier.NVME},
    ),
    "bf16": (Tower, PRESETS["bf16"], {"stage": 2, "params": Tier.DEVICE}),
    "tiny": (Even, PRESETS["tiny"], {}),
}


def train(name: str, nvme: Path) -> dict[str, Any]:
    build, precision, fields = CASES[name]
    settings = {
        "params": Tier.HOST,
        "optim": Tier.HOST,
        "paths": [nvme],
        "persistence_numel": 100,
        "tile_numel": 4096,
    }
    model = seeded(build).bfloat16()
    with tiermem.shard(model, OffloadPolicy(precision=precision, **(settings | fields))) as shards:
        # forward and backward are torch's, whose sums depend on how many threads share them
        torch.set_num_threads(1)
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        commit, committed = shards.program.commit, []

        def count(tiles: Any, work: Any) -> None:
            committed.append(len(shards.program.attempted))
            commit(tiles, work)

        shards.program.commit = count  # type: ignore[method-assign]
        losses = train_steps(model, optim, range(NUM_STEPS))
        found = {
            "losses": losses,
            "weights": dict(model.state_dict()),
            "states": states_of(shards, optim),
        }
        return found | {"committed": committed}


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme,)):
        torch.save({name: train(name, Path(nvme)) for name in CASES}, out)
