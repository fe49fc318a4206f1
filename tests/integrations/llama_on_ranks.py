"""Launched by test_memory.py: opens, trains, saves and resumes a Llama on all ranks, and takes the
peak of each phase.

llama_on_ranks.py FOLDER WORK     every rank writes {phase: the most bytes that were resident at once, less those at the start}

A small model does the same first, so that the start counts every module that the Trainer imports.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import Samples, language
from trainings import arguments

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.integrations import models  # noqa: F401  # imported before the ranks are forked
from tiermem.integrations.huggingface import TiermemTrainer


def resident(word: str) -> int:
    """Resident bytes: VmRSS are those now, VmHWM the most since `begin`."""
    return 1024 * int(re.findall(rf"{word}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def begin() -> None:
    """Makes VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def run(work: Path, resume: str | None) -> dict[str, Any]:
    phase, found = "resumed" if resume else "trained", {}
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[work / "nvme"], host_bytes=140 << 20
    )
    model = tiermem.from_pretrained(work / "made", policy=policy)
    found[f"opened to be {phase}"] = resident("VmHWM")
    args = arguments(
        work / "out",
        max_steps=2,
        gradient_accumulation_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
    )
    trainer = TiermemTrainer(model, args, train_dataset=Samples(language), tiermem=policy)
    trainer.train(resume_from_checkpoint=resume)
    found[phase] = resident("VmHWM")
    trainer.save_model(str(work / "saved"))
    found[f"{phase} and saved"] = resident("VmHWM")
    trainer.close()
    return found


def main() -> None:
    out, work = Path(sys.argv[1]), Path(sys.argv[2])
    for folder in (work / "small", work / "large"):
        begin()
        before = resident("VmRSS")
        found = run(folder, None) | run(folder, str(folder / "out" / "checkpoint-1"))
    torch.save(
        {phase: peak - before for phase, peak in found.items()}, out / f"{os.environ['RANK']}.pt"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
