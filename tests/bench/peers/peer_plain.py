"""Plain PyTorch, everything in memory: the peer that shows what the hardware does when the states
fit.

Low-precision parameters, fp32 masters stepped by torch's fused AdamW, gradients clipped by their
global norm, masters copied back. With fp32 the parameters are their own masters. Imports torch and
transformers only.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

transformers: Any = importlib.import_module("transformers")  # Any: it is typed in parts only

PACKAGES = ("torch", "transformers")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(job: dict[str, Any], setting: dict[str, Any]) -> Any:
    """The job's model: built in fp32 from its seed, then its parameters cast (buffers stay, as
    everywhere)."""
    return built(job, _DTYPES[job["precision"]]).to("cuda" if torch.cuda.is_available() else "cpu")


def built(job: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model on the CPU, its parameters in a dtype."""
    transformers.logging.set_verbosity_error()
    if job["checkpoint"] is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job["checkpoint"], dtype=torch.float32
        )
        model.config.use_cache = False
    else:
        torch.manual_seed(job["seed"])
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**job["shape"])
        )
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


def optimizer_of(params: Any, job: dict[str, Any]) -> torch.optim.AdamW:
    """torch's fused AdamW with the job's settings."""
    settings = job["config"]["optimizer"]["params"]
    return torch.optim.AdamW(
        params,
        lr=settings["lr"],
        betas=tuple(settings.get("betas", (0.9, 0.999))),
        eps=settings.get("eps", 1e-8),
        weight_decay=settings.get("weight_decay", 0.0),
        fused=True,
    )


class Training:
    """Masters, optimizer, accumulation."""

    def __init__(self, model: Any, job: dict[str, Any], setting: dict[str, Any]) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._is_low = job["precision"] != "fp32"
        self._masters = [p.detach().float() for p in self._params] if self._is_low else self._params
        self._num_micro = int(job["config"].get("gradient_accumulation_steps", 1))
        self._micro = 0
        self._clipping = float(job["config"].get("gradient_clipping", 0.0))
        self._optimizer = optimizer_of(self._masters, job)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self._model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._num_micro if self._num_micro > 1 else loss).backward()

    def step(self) -> None:
        self._micro += 1
        if self._micro % self._num_micro:
            return
        if self._is_low:
            for master, param in zip(self._masters, self._params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
                param.grad = None
        if self._clipping:
            torch.nn.utils.clip_grad_norm_(self._masters, self._clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._is_low:
            with torch.no_grad():
                for master, param in zip(self._masters, self._params, strict=True):
                    param.copy_(master)

    def close(self) -> None:
        pass
