"""A training loop of Accelerate, plain and sharded, on one rank or launched on several.

accelerated.py FOLDER WORK     every rank writes {"plain": losses, "sharded": losses, "resumed": losses, "parts": losses}
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tiny_models import build, samples
from torch.utils.data import DataLoader

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.integrations.accelerate import prepare
from tiermem.run.shards import owner_of


def loop(
    folder: Path, policy: OffloadPolicy | None, resume: str | None = None, is_sharded: bool = False
) -> list[float]:
    """Six micro-batches, two to a step, a state saved after the fourth. Returns [loss, norm, rate,
    ...]."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, found = build("llama"), []
    if is_sharded:
        tiermem.shard(model, policy)
    kind: Any = tiermem.AdamW if is_sharded else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    objects = model, optimizer, DataLoader(samples("llama", 24), 2), schedule
    prepared = (
        accelerator.prepare(*objects)
        if policy is None
        else prepare(accelerator, *objects, policy=policy)
    )
    model, optimizer, loader, schedule = prepared
    if resume is not None:
        accelerator.load_state(resume)
    for number, batch in enumerate(loader):
        if number == 6:
            break
        if resume is not None and number < 4:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found += [float(accelerator.gather(loss.detach()).mean()), schedule.get_last_lr()[0]]
        if number == 3 and resume is None:
            accelerator.save_state(str(folder))
    if policy is not None:
        owner_of(model).close()
    accelerator.free_memory()
    return found


def run(work: Path) -> dict[str, list[float]]:
    (work / "nvme").mkdir(exist_ok=True)
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[work / "nvme"], persistence_numel=50
    )
    return {
        "plain": loop(work / "plain", None),
        "sharded": loop(work / "sharded", policy),
        "sharded before": loop(work / "before", policy, is_sharded=True),
        "resumed": loop(work, policy, str(work / "sharded")),
        "resumed from plain": loop(work, policy, str(work / "plain")),
    }


def main() -> None:
    torch.save(run(Path(sys.argv[2])), Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
