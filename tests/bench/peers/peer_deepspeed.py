"""DeepSpeed, ZeRO-3 with offload, one process: the peer that does the same job by its own means.

Built under its zero.Init, with the setting that the sweep hands in. Imports torch, transformers and
deepspeed only; its extensions compile at first use, which `python -I peer_deepspeed.py` does ahead
of any measurement.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")
for _name, _value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_SIZE", "1")):
    os.environ.setdefault(_name, _value)

deepspeed: Any = importlib.import_module("deepspeed")
transformers: Any = importlib.import_module("transformers")

PACKAGES = ("deepspeed", "torch", "transformers")


def build(job: dict[str, Any], setting: dict[str, Any]) -> Any:
    """The job's model, each parameter divided as soon as it is made."""
    transformers.logging.set_verbosity_error()
    _join()
    shape = transformers.AutoConfig.for_model(**job["shape"])
    # what building imports must come in before zero.Init has replaced torch's constructors
    with torch.device("meta"):
        transformers.AutoModelForCausalLM.from_config(shape)
    torch.manual_seed(job["seed"])
    with deepspeed.zero.Init(config_dict_or_path=_config(job, setting)):
        return transformers.AutoModelForCausalLM.from_config(shape)


class Training:
    """DeepSpeed's engine."""

    def __init__(self, model: Any, job: dict[str, Any], setting: dict[str, Any]) -> None:
        config = _config(job, setting)
        self._engine = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )[0]
        self.device = (
            "cpu" if str(self._engine.device).startswith("cpu") else str(self._engine.device)
        )
        self.backward = self._engine.backward
        self.step = self._engine.step
        self.close = self._engine.destroy

    def forward(self, tokens: torch.Tensor) -> Any:
        return self._engine(input_ids=tokens, labels=tokens).loss


def _config(job: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    ours = ("tiermem", "zero_optimization", "aio")
    return {key: value for key, value in job["config"].items() if key not in ours} | setting


def compile_extensions() -> None:
    """Builds what DeepSpeed compiles at first use, without a cap and before any clock."""
    builders: Any = importlib.import_module("deepspeed.ops.op_builder")
    for builder in (builders.CPUAdamBuilder(), builders.AsyncIOBuilder()):
        builder.load()
        print(f"{builder.name} is ready")


def _join() -> None:
    """A process group of one that meets in its own memory: no port or file that another run might
    hold."""
    store: Any = vars(torch.distributed)["HashStore"]()
    backend = (
        "nccl"
        if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
        else "gloo"
    )
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend)


if __name__ == "__main__":
    compile_extensions()
