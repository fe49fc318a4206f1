"""A Llama from safetensors through the Trainer, in a process whose memory has a cap: run by
test_memory.py.

    capped_llama.py make FOLDER      writes 1.3 B random weights in bf16
    capped_llama.py train FOLDER     three steps, a checkpoint after the second, and the model as safetensors
    capped_llama.py resume FOLDER    the third step again, from the checkpoint

Each writes FOLDER/<word>.json; the last two {"losses": [...], "peaks": {phase: most resident bytes
so far}}
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from random_llama import write_llama
from tiny_models import Samples, tokens
from transformers import LlamaConfig, TrainerCallback, TrainingArguments

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.integrations.huggingface import TiermemTrainer
from tiermem.precision import Precision

CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5504,
    num_hidden_layers=24,
    num_attention_heads=16,
    max_position_embeddings=2048,
)
NUM_TOKENS = 128


class SaveAt(TrainerCallback):
    """Asks for a checkpoint after one step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = state.global_step == self._step
        return control


def peak_bytes() -> int:
    """The most memory that was resident at once since the process started."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def sample(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = tokens(generator, NUM_TOKENS)
    return {"input_ids": ids, "labels": ids}


def run(folder: Path, resume: str | None) -> dict[str, Any]:
    peaks = {"imports": peak_bytes()}
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        paths=[folder / "nvme"],
        host_bytes=1 << 30,
        precision=Precision.preset("compact"),
        durability="none",  # a checkpoint is a copy; the run and its checkpoint take 25 GB of disk
    )
    model = tiermem.from_pretrained(folder / "made", policy=policy)
    peaks["from_pretrained"] = peak_bytes()
    args = TrainingArguments(
        str(folder / "out"),
        max_steps=3,
        per_device_train_batch_size=1,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = TiermemTrainer(
        model,
        args,
        train_dataset=Samples(sample),
        callbacks=[SaveAt(2 if resume is None else 0)],
        tiermem=policy,
    )
    trainer.train(resume_from_checkpoint=resume)
    peaks["train"] = peak_bytes()
    if resume is None:
        trainer.save_model(str(folder / "saved"))
        peaks["save_model"] = peak_bytes()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    trainer.close()
    return {"losses": losses, "peaks": peaks}


def main() -> None:
    word, folder = sys.argv[1], Path(sys.argv[2])
    if word == "make":
        (folder / "nvme").mkdir()
        found = {"bytes": write_llama(folder / "made", CONFIG, torch.bfloat16)}
    else:
        found = run(folder, str(folder / "out" / "checkpoint-2") if word == "resume" else None)
    (folder / f"{word}.json").write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
