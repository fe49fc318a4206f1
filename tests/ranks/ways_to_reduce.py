"""The cases of test_grads_on_ranks.py: fields of the policy and what the run does. Shared with the
script under torchrun."""

from __future__ import annotations

from typing import Any

from tiermem import Tier

NUM_STEPS = 3
NUM_MICRO = 3
BUCKET_NUMEL = 1 << 20
NVME = {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.NVME}

SAME_BITS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, nvme": {"stage": 2, "optim": Tier.NVME, "grads": Tier.NVME},
    "stage 3, nvme": NVME,
    "buckets of 1000": {"reduce_bucket_numel": 1000},
    "buckets of 1000, nvme": {**NVME, "reduce_bucket_numel": 1000},
    "buckets of 64, stage 2": {"stage": 2, "reduce_bucket_numel": 64},
    "updates of 1000, stage 1": {"stage": 1, "allgather_bucket_numel": 1000},
    "updates of 70, stage 2": {"stage": 2, "allgather_bucket_numel": 70},
    "step in backward": {**NVME, "grads": None, "step_in_backward": True},
    "step in backward, stage 2": {"stage": 2, "optim": Tier.NVME, "step_in_backward": True},
}
"""Ways to reduce that change no bit."""

CASES: dict[str, dict[str, Any]] = {
    **{name: {"fields": fields} for name, fields in SAME_BITS.items()},
    "stage 0": {"fields": {"stage": 0}},
    "stage 0, buckets of 1000": {"fields": {"stage": 0, "reduce_bucket_numel": 1000}},
    "predivide by 4": {"fields": {"predivide_factor": 4.0}},
    "predivide by ranks": {"fields": {"predivide_factor": "ranks", "stage": 1}},
    "sum": {"fields": {"reduce_op": "sum"}},
    **{
        f"broken, stage {stage}": {"fields": {"stage": stage}, "breaks": True} for stage in range(4)
    },
    "broken, nvme": {"fields": NVME, "breaks": True},
    **{
        f"accumulated, stage {stage}": {"fields": {"stage": stage}, "micro": NUM_MICRO}
        for stage in range(4)
    },
    **{
        f"no_sync, stage {s}": {"fields": {"stage": s}, "micro": NUM_MICRO, "no_sync": True}
        for s in range(4)
    },
    **{
        f"left to the step, stage {s}": {"fields": {"stage": s}, "no_sync": True, "leaves": True}
        for s in range(4)
    },
    **{
        f"ranks differ, stage {stage}": {"fields": {"stage": stage}, "model": "branches"}
        for stage in range(3)
    },
    **{
        f"parameters differ, stage {stage}": {"fields": {"stage": stage}, "model": "ways"}
        for stage in range(4)
    },
    "parameters differ, nvme": {"fields": {**NVME, "persistence_numel": 0}, "model": "ways"},
    "parameters differ, step in backward": {"fields": {"step_in_backward": True}, "model": "ways"},
    "unused is an error": {"fields": {"stage": 2, "ignore_unused": False}, "model": "branches"},
    "unused is an error, stage 3": {"fields": {"ignore_unused": False}, "model": "ways"},
    "used is no error": {"fields": {"ignore_unused": False}},
    "graphs kept by one rank, stage 3": {"keeps": True},
    "graphs kept by one rank, one unit streamed": {
        "fields": {"persistence_numel": 2000},
        "keeps": True,
        "model": "one block",
    },
}

ALWAYS = (
    *(f"stage {stage}" for stage in range(4)),
    "buckets of 64, stage 2",
    "unused is an error",
    "unused is an error, stage 3",
    "graphs kept by one rank, stage 3",
    "graphs kept by one rank, one unit streamed",
)
"""What tests of single cases look at, and what others are compared with."""
