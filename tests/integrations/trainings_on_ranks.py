"""Launched by test_huggingface.py: trains with the plain Trainer (DDP) and with TiermemTrainer on
all ranks.

trainings_on_ranks.py FOLDER WORK NAME...     every rank writes the logs and the tokens that `generated` returns

The logs are {(name, precision): (of the plain run, {run: its log})}.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import build
from trainings import TiermemTrainer, closing, kinds_of, on_nvme, saves_of, train, trainer_of

from tiermem import OffloadPolicy


def generated(name: str, work: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of the plain model, and those of the sharded one. The ranks generate different
    numbers of them."""
    rank = dist.get_rank()
    prompt, asked = (
        torch.arange(1 + rank, 7 + rank)[None],
        {"max_new_tokens": 3 + 4 * rank, "do_sample": False},
    )
    expected = build(name).eval().generate(prompt, **asked)
    with closing(
        trainer_of(TiermemTrainer, name, work, {}, tiermem=on_nvme(work / "nvme"))
    ) as trainer:
        trainer.evaluate()
        return expected, trainer.model.generate(prompt, **asked)


def main() -> None:
    out, work, *names = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    found = {}
    for name in names:
        plain, sharded = kinds_of(name, 2)
        saves, ours, theirs = saves_of(name), work / name / "ours", work / name / "plain"
        expected = train(plain, name, theirs, **saves)
        runs = {
            "on NVMe": train(sharded, name, ours, tiermem=on_nvme(work / "nvme"), **saves),
            "resumed": train(
                sharded, name, ours, str(ours / "checkpoint-5"), tiermem=OffloadPolicy(), **saves
            ),
            "from plain": train(
                sharded, name, ours, str(theirs / "checkpoint-5"), tiermem=OffloadPolicy(), **saves
            ),
        }
        found[name, "fp32"] = expected, runs
        if name == "clip":  # autocast is a part of forward, which its sharded trainer does not call
            continue
        ours, asked = (
            work / name / "bf16",
            {**saves, "bf16": True, "gradient_accumulation_steps": 1},
        )
        expected = train(plain, name, theirs, **asked)
        runs = {
            "on NVMe": train(sharded, name, ours, tiermem=on_nvme(work / "nvme"), **asked),
            "resumed": train(
                sharded, name, ours, str(ours / "checkpoint-5"), tiermem=OffloadPolicy(), **asked
            ),
        }
        found[name, "bf16"] = expected, runs
    torch.save((found, generated("gpt2", work)), out / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
