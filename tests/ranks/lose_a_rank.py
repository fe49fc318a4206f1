"""Run once per rank by test_lost_ranks.py: something goes wrong on one rank.

lose_a_rank.py WHAT WHO NVME     WHAT: "dies", "raises", "hangs", "policy", "model" or "config"; WHO: the rank it happens to
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import zoo
from twins import seeded

import tiermem
from tiermem import OffloadPolicy, Tier


def main(what: str, who: int, nvme: Path) -> None:
    dist.init_process_group("gloo")
    is_me = dist.get_rank() == who
    if what == "config":
        start_engine(is_me, nvme)
    model: nn.Module = seeded(zoo.NanoGPT if what == "model" and is_me else zoo.Tower)
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        paths=[nvme],
        persistence_numel=51 if what == "policy" and is_me else 50,
        timeout_s=4.0 if what == "hangs" else 60.0,
    )
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            if step == 2 and is_me:
                go_wrong(what)
            zoo.loss_of(model, step).backward()
            optim.step()
            optim.zero_grad()


def start_engine(is_me: bool, nvme: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2 if is_me else 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }
    tiermem.initialize(model=seeded(zoo.Tower), config=config)


def go_wrong(what: str) -> None:
    if what == "dies":
        os._exit(3)
    if what == "raises":
        raise RuntimeError("this rank's own trouble")
    if what == "hangs":
        time.sleep(40)
        os._exit(3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
