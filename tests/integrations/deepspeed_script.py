"""A user's script with TrainingArguments(deepspeed=...), which knows nothing of tiermem;
as_deepspeed runs it.

deepspeed_script.py FOLDER     writes {run: log} to FOLDER/logs.json
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import deepspeed
from tiny_models import build, samples
from transformers import Trainer, TrainingArguments

ZERO3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
CONFIG = {**dict.fromkeys(SIZES, "auto"), "bf16": {"enabled": "auto"}, "zero_optimization": ZERO3}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = {
    "type": "WarmupLR",
    "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}


def run(folder: Path, config: dict[str, Any], resume: str | None = None) -> list[list[float]]:
    args = TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        warmup_steps=2,
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        deepspeed=config,
    )
    trainer = Trainer(
        build("llama"), args, train_dataset=samples("llama"), eval_dataset=samples("llama", 8)
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    steps = [each for each in trainer.state.log_history if "loss" in each]
    return [[each[key] for key in ("loss", "grad_norm", "learning_rate")] for each in steps]


def refused(act: Any) -> str:
    try:
        act()
    except (AttributeError, ImportError) as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    logs: dict[str, Any] = {"version": importlib.metadata.version("deepspeed")}
    logs["AttributeError"] = refused(lambda: deepspeed.moe)
    logs["ImportError"] = refused(lambda: importlib.import_module("deepspeed.pipe"))
    logs["Trainer's optimizer"] = run(folder / "plain", CONFIG)
    logs["resumed"] = run(folder / "plain", CONFIG, str(folder / "plain" / "checkpoint-3"))
    logs["config's optimizer"] = run(
        folder / "own", {**CONFIG, "optimizer": ADAMW, "scheduler": WARMUP}
    )
    (folder / "logs.json").write_text(json.dumps(logs), "utf-8")
