"""The cases that gather_on_ranks.py runs: one key each, beside a base. Shared by the tests and the
script under torchrun."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

RANKS = 3
NUM_STEPS = 3
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
NVME = {"offload_param": {"device": "nvme", "nvme_path": "NVME", "buffer_count": 3}}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the keys that its config adds."""

    zero: dict[str, Any] = dataclasses.field(default_factory=dict)
    top: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = "tower"

    def config(self, nvme: Path) -> dict[str, Any]:
        """The whole config; paths are put in place."""
        zero = {"stage": 3, "stage3_param_persistence_threshold": 100} | self.zero
        if "offload_param" in zero:
            zero["offload_param"] = zero["offload_param"] | {"nvme_path": str(nvme)}
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": optimizer,
            "zero_optimization": zero,
        } | self.top


CASES = {
    "base": Case(),
    "nvme": Case(NVME),
    "single": Case({"stage3_allgather_single_param": True}),
    "all reduce": Case({"stage3_use_all_reduce_for_fetch_params": True}),
    "no prefetch": Case({"stage3_prefetch_bucket_size": 0}),
    "prefetch of one": Case({"stage3_prefetch_bucket_size": 10_000}),
    "few live": Case({"stage3_max_live_parameters": 13_000}),
    "no reuse": Case({"stage3_max_reuse_distance": 0}),
    "nothing persists": Case({"stage3_param_persistence_threshold": 0}),
    "little persists": Case({"stage3_model_persistence_threshold": 300}),
    "wandering": Case(model="wandering"),
    "wandering nvme": Case(NVME, model="wandering"),
    "autocast": Case(top=AUTOCAST),
    "autocast nvme": Case(NVME, top=AUTOCAST),
    "autocast, no safe modules": Case(
        top={"torch_autocast": AUTOCAST["torch_autocast"] | {"lower_precision_safe_modules": []}}
    ),
    "autocast, no safe modules, sent in bf16": Case(
        top={
            "torch_autocast": AUTOCAST["torch_autocast"] | {"lower_precision_safe_modules": []},
            "communication_data_type": "bf16",
        }
    ),
    "autocast, sent in bf16": Case(top=AUTOCAST | {"communication_data_type": "bf16"}),
    "autocast tied": Case(top=AUTOCAST, model="tied"),
}
