"""zero_to_fp32: the reference system's functions that extract weights, for tiermem's checkpoints.

They have the same names, arguments and results; tiermem.utils.zero_to_fp32 exports them. A
checkpoint of DeepSpeed itself must be converted with `tiermem import` first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.interchange.export import export_weights
from tiermem.checkpoint.opening.source import Source, Weight, weights_of
from tiermem.section import Bytes, DtypeName

PathLike = str | os.PathLike[str]


class LazyTensor:
    """A tensor of a checkpoint. Each `contiguous()` call opens the checkpoint's files and reads the
    tensor."""

    def __init__(self, where: Path, tag: str | None, weight: Weight) -> None:
        self._where = where
        self._tag = tag
        self._name = weight.parameter.name
        self.shape = torch.Size(weight.parameter.shape)
        self.dtype = weight.dtype

    def contiguous(self) -> torch.Tensor:
        """The tensor, on the CPU. Blocks; raises DamagedState, OSError."""
        with Source.open(self._where, self._tag) as source:
            return next(
                weight.whole()
                for weight in weights_of(source, torch.float32)
                if weight.parameter.name == self._name
            )


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Returns the fp32 masters, the float buffers on the CPU and the extra states of modules, by
    name; tied names share a tensor. Blocks; not collective.

    lazy_mode: tensors are LazyTensor; each is read by its `contiguous()`. Raises ManifestError,
        DamagedState, OSError.
    """
    where = Path(checkpoint_dir)
    found: dict[str, Any] = {}
    with Source.open(where, tag) as source:
        for weight in weights_of(source, torch.float32, exclude_frozen_parameters):
            value = LazyTensor(where, tag, weight) if lazy_mode else weight.whole()
            found.update(dict.fromkeys(weight.names, value))
        return {**found, **source.extra_states()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes fp32 weights as pytorch_model.bin, or model.safetensors with safe_serialization.
    Blocks; not collective.

    max_shard_size: bytes, or for example "5GB"; larger weights are split into several files.
        Weights are streamed.
    """
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """The same in a float dtype: a torch.dtype, or a name such as "bf16" or "float16". Raises
    ValueError for other dtypes."""
    allowed = f"max_shard_size is {max_shard_size!r}; write bytes, or for example 5GB or 500MiB"
    most = _valid(Bytes | None, max_shard_size, allowed)
    with Source.open(Path(checkpoint_dir), tag) as source:
        weights = weights_of(source, dtype_of(dtype), exclude_frozen_parameters)
        export_weights(weights, Path(output_dir), most, safe_serialization)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: PathLike, tag: str | None = None
) -> nn.Module:
    """Moves an ordinary model to the CPU and loads the fp32 weights whose names it has; returns the
    model. Blocks."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def dtype_of(given: torch.dtype | str) -> torch.dtype:
    """The dtype of a name. Raises ValueError that lists the allowed names."""
    return kinds.dtype_of(
        _valid(DtypeName, given, f"the dtype is {given!r}; allowed are fp32, bf16 and fp16")
    )


def _valid(kind: Any, value: Any, otherwise: str) -> Any:
    """A value as a config takes it. Raises ValueError."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        raise ValueError(otherwise) from None
