"""Casts: the dtypes in which an engine's model computes, where the config wants others than the user's.

    once, before the model is sharded     parameters to bf16, fp16 or fp32; buffers to data_types.buffer_dtype
    in every forward                      inputs to fp16 (fp16.auto_cast); torch.autocast (torch_autocast)

What autocast lowers is gathered in its dtype already (zero/weights/lowering), and crosses ranks in it on its way back.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tiermem.config import TiermemConfig
from tiermem.precision import DTYPES
from tiermem.zero import registry
from tiermem.zero.shards import Shards

_CAST_TO = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}  # None: as the user built them


def cast_model(model: nn.Module, config: TiermemConfig) -> None:
    """Casts floating-point parameters to the config's precision, and buffers if it asks for that.

    Parameters keep their identity, and so do buffers. Raises ValueError when zero.Init built parameters in another dtype.
    """
    _cast_parameters(model, _CAST_TO[config.precision])
    _cast_buffers(model, config.data_types.buffer_dtype)


def to_half(values: Any) -> Any:
    """Arguments of a forward, floating-point tensors in fp16; anything else as it is."""
    return tree_map(_to_half, values)


class Autocast(NamedTuple):
    """torch.autocast as a config asks for it, on one kind of device."""

    device: str
    dtype: torch.dtype | None
    """What forward is lowered to; None when it is not."""
    classes: tuple[type[nn.Module], ...]
    """Modules that are safe in it."""

    @classmethod
    def of(cls, config: TiermemConfig, device: str) -> Autocast:
        """As the section torch_autocast says; without a dtype there, torch's default for the device."""
        section = config.torch_autocast
        if not section.enabled:
            return cls(device, None, ())
        dtype = DTYPES[section.dtype] if section.dtype is not None else torch.get_autocast_dtype(device)
        return cls(device, dtype, section.safe_classes)

    def policy_fields(self) -> dict[str, Any]:
        """The policy's fields for a forward under it: what it lowers is gathered in its dtype."""
        if self.dtype is None:
            return {}
        name = next(name for name, each in DTYPES.items() if each is self.dtype)
        return {"gather_dtype": name, "lowered_modules": self.classes}

    def set_reduced_dtypes(self, model: nn.Module, shards: Shards) -> None:
        """Makes gradients of modules that it lowers cross ranks in its dtype."""
        if self.dtype is None:
            return
        by_param = {state.param: state for _, state in shards.parameters()}
        for module in model.modules():
            for param in module.parameters(recurse=False) if type(module) in self.classes else ():
                by_param[param].reduce_dtype = self.dtype

    def block(self) -> AbstractContextManager[Any]:
        """The context of a forward; without torch's cache, which would keep a copy of every weight."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


def _cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    for param in model.parameters():
        is_resting = registry.keeper_of(param) is not None
        if dtype is not None and param.dtype.is_floating_point and param.dtype != dtype:
            if is_resting:
                raise ValueError(
                    f"zero.Init built parameters as {param.dtype}, the config asks for {dtype}: give both the same"
                )
            param.data = param.data.to(dtype)


def _cast_buffers(model: nn.Module, dtype: str | None) -> None:
    """Unasked, buffers keep their dtype: rotary frequencies need fp32."""
    if dtype is None:
        return
    for buffer in model.buffers():
        if buffer.dtype.is_floating_point:
            buffer.data = buffer.data.to(DTYPES[dtype])


def _to_half(value: Any) -> Any:
    return value.half() if torch.is_tensor(value) and value.is_floating_point() else value
