"""The matrix: stage x where things rest x precision x micro-batches per step, as configs, and the
part of it always run.

Every case is trained on 1, 2 and 4 ranks beside its twins (twin_on_ranks.py). The selection has
each stage with each home on each number of ranks, and over it each pair of any two values of the
matrix: precision and accumulation change from case to case as in a Latin square.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch

LR, DECAY, MAX_NORM = 1e-2, 0.01, 0.5
NUM_STEPS = 3
NUM_RANKS = (1, 2, 4)
PRECISIONS = ("fp32", "bf16", "fp16")
ACCUMULATIONS = (1, 3)
LOSS_SCALE = 128.0  # of fp16

# What rests where: offload_optimizer and, with stage 3, offload_param too, and what else is asked
# for.
_OPTIMIZER = ("none", "cpu", "nvme")
_EVERYTHING = (
    "cpu, weights too",
    "nvme, weights too",
    "nvme, weights and gradients",
    "nvme, two buffers",
)
_BUILT_IN_PARTS = ("cpu, weights too, by Init", "nvme, weights too, by Init")
HOMES = {0: ("none",), 1: _OPTIMIZER, 2: _OPTIMIZER, 3: _OPTIMIZER + _EVERYTHING + _BUILT_IN_PARTS}


class Case(NamedTuple):
    stage: int
    home: str
    precision: str
    accumulation: int

    def __str__(self) -> str:
        return f"stage {self.stage}; {self.home}; {self.precision}; x{self.accumulation}"

    @property
    def is_built_by_init(self) -> bool:
        return "by Init" in self.home

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in self.home


@dataclasses.dataclass
class Run:
    """What a training leaves behind."""

    losses: list[float]  # of this rank, by micro-batch
    norms: list[float]  # of gradients, by step, before clipping
    weights: dict[str, torch.Tensor]
    read_bytes: int = 0


PLACES = [(stage, home) for stage, homes in HOMES.items() for home in homes]
ALL = [
    Case(*place, *how) for place in PLACES for how in itertools.product(PRECISIONS, ACCUMULATIONS)
]


def selection(num_ranks: int) -> list[Case]:
    """The cases that are always run on so many ranks."""
    shift = NUM_RANKS.index(num_ranks)
    return [
        Case(*place, PRECISIONS[(i + i // 3 + shift) % 3], ACCUMULATIONS[(i + i // 6 + shift) % 2])
        for i, place in enumerate(PLACES)
    ]


def config_of(case: Case, nvme: Path) -> dict[str, Any]:
    """The config that a user would write for a case."""
    device = case.home.split(",")[0]
    zero: dict[str, Any] = {
        "stage": case.stage,
        "stage3_param_persistence_threshold": 50,
        "sub_group_size": 4096,
    }
    if device != "none":
        section = {"device": device} | ({"nvme_path": str(nvme)} if device == "nvme" else {})
        zero["offload_optimizer"] = section
        if "," in case.home:
            zero["offload_param"] = section | (
                {"buffer_count": 2} if "two buffers" in case.home else {}
            )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": zero,
        "tiermem": {"timeout_s": 60, "strict": True}
        | ({"grads": "nvme"} if "gradients" in case.home else {}),
    }
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
    elif case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    return config
