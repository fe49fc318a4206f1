"""Trains and saves adapters with the plain Trainer and a DeepSpeed config of stage 3; as_deepspeed
runs it.

peft_under_deepspeed.py BASE FOLDER NAME...     saves the adapters of BUILDS[NAME] in FOLDER/<its number>/saved
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_peft_save import saved
from transformers import Trainer

ZERO3 = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
         "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)

if __name__ == "__main__":
    base, folder, *names = sys.argv[1:]
    for number, name in enumerate(names):
        config = {**dict.fromkeys(SIZES, "auto"), "zero_optimization": ZERO3}
        saved(name, Path(base), Path(folder) / str(number), Trainer, deepspeed=config)
        print(name, "saved", flush=True)
