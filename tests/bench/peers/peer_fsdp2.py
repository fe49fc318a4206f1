"""FSDP2 (`fully_shard`), one process: parameters, gradients and optimizer states offloaded to
pinned memory of the CPU.

Its fp32 parameters are the masters; they are cast to the job's precision as they are gathered, and
torch's fused AdamW steps them on the CPU, after clipping by their global norm. Without a GPU
nothing is offloaded. Imports torch and transformers only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

plain: Any = importlib.import_module("peer_plain")  # beside this file, where peer_main.py finds it

PACKAGES = ("torch", "transformers")
_DTYPES = {"bf16": torch.bfloat16, "fp32": None}


def build(job: dict[str, Any], setting: dict[str, Any]) -> Any:
    """The job's model in fp32, on the CPU."""
    return plain.built(job, torch.float32)


class Training:
    """The sharded model and its optimizer, with accumulation."""

    def __init__(self, model: Any, job: dict[str, Any], setting: dict[str, Any]) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        _join(self.device)
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(self.device, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=_DTYPES[job["precision"]]),
            "offload_policy": CPUOffloadPolicy() if self.device == "cuda" else OffloadPolicy(),
        }
        for layer in max(
            (each for each in model.modules() if isinstance(each, torch.nn.ModuleList)), key=len
        ):
            fully_shard(layer, **settings)
        self._model = fully_shard(model, **settings)
        self._num_micro = int(job["config"].get("gradient_accumulation_steps", 1))
        self._micro = 0
        self._clipping = float(job["config"].get("gradient_clipping", 0.0))
        self._optimizer = plain.optimizer_of(model.parameters(), job)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self._model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._num_micro if self._num_micro > 1 else loss).backward()

    def step(self) -> None:
        self._micro += 1
        if self._micro % self._num_micro:
            return
        if self._clipping:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        torch.distributed.destroy_process_group()


def _join(device: str) -> None:
    """A process group of one that meets in its own memory; norms of offloaded gradients are summed
    on the CPU."""
    store: Any = vars(torch.distributed)["HashStore"]()
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
