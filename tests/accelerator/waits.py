"""Waits of the host for the device in a training step, by phase and thread; also run on each rank
by test_waits.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from programs.models import Tower
from programs.twins import batch, seeded
from torch import nn
from torch.nn import functional as F

import tiermem
from accelerator import device
from tiermem import OffloadPolicy, Tier

HOMES: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME},
    "states on host": {"params": Tier.DEVICE, "optim": Tier.HOST},
    "gradients on nvme": {"params": Tier.HOST, "optim": Tier.HOST, "grads": Tier.NVME},
    "half of the states there": {"params": Tier.HOST, "optim": Tier.HOST, "optim_ratio": 0.5},
}
THERE: dict[str, Any] = {"params": Tier.DEVICE, "optim": Tier.DEVICE}
GRADIENTS_THERE: dict[str, Any] = {"params": Tier.HOST, "optim": Tier.HOST, "grads": Tier.DEVICE}

Counts = dict[str, dict[str, int]]
"""By phase: waits of the threads main, autograd and other, and copies from or to pageable
memory."""


def count(where: str, folder: Path, clips: str = "", **fields: Any) -> Counts:
    """The third of three steps of a model of ten units."""
    sim, counts = device.load(), {}
    model = seeded(lambda: Tower(num_blocks=8))
    policy = OffloadPolicy(
        paths=[folder],
        persistence_numel=50,
        unit_buffers=3,
        tile_numel=8192,
        timeout_s=60,
        **fields,
    )
    with tiermem.shard(model, policy, device=where):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(torch.device(where).type, enabled="scaler" in clips)
        for step in range(3):
            tokens, targets = (
                each.pin_memory().to(where, non_blocking=True) for each in batch(step)
            )
            sim.reset_counts()
            logits = model(tokens)
            _note(counts, "forward")
            loss = scaler.scale(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            sim.reset_counts()
            loss.backward()
            _note(counts, "backward")
            if scaler.is_enabled():
                scaler.unscale_(optim)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            _note(counts, "clipping")
            if clips == "scaler, stepped":
                scaler.step(optim)
            else:
                optim.step()
            _note(counts, "step")
            scaler.update()
            optim.zero_grad()
    return counts


def _note(counts: Counts, phase: str) -> None:
    counts[phase] = device.host_waits() | {"pageable": device.copies()["num_pageable"]}
    device.reset_counts()


def main() -> None:
    backend, *homes = sys.argv[2:]
    with as_rank(backend) as (rank, out, _):
        found = {}
        device.set_schedule("late")
        for home in homes:
            folder = Path(out.parent, f"{home}-{rank}".replace(" ", "_"))
            folder.mkdir()
            found[home] = count(f"sim:{rank % 2}", folder, **HOMES[home])
        torch.save(found, out)


if __name__ == "__main__":
    device.load()
    main()
