"""Launched by test_huggingface.py: trains with the plain Trainer (DDP) and with TiermemTrainer on all ranks.

trainings_on_ranks.py FOLDER WORK NAME...     every rank writes {name: (log of the plain run, logs of the other runs)}
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from trainings import TiermemTrainer, Trainer, on_nvme, train

from tiermem import OffloadPolicy


def main() -> None:
    out, work, *names = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    rank = os.environ["RANK"]
    found = {}
    for name in names:
        saved = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
        plain = train(Trainer, name, work / name / "plain", **saved)
        ours = work / name / "ours"
        runs = {
            "on NVMe": train(TiermemTrainer, name, ours, tiermem=on_nvme(work / "nvme"), **saved),
            "resumed": train(TiermemTrainer, name, ours, str(ours / "checkpoint-5"), tiermem=OffloadPolicy(), **saved),
            "resumed from plain": train(
                TiermemTrainer,
                name,
                ours,
                str(work / name / "plain" / "checkpoint-5"),
                tiermem=OffloadPolicy(),
                **saved,
            ),
        }
        found[name] = plain, runs
    torch.save(found, out / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
