"""The attributes that a partitioned parameter shows: the documented ones, and no other.

    ds_id       its number          ds_shape, ds_numel   of the whole          ds_status   whether its values are there now
    ds_tensor   this rank's part: flat, ceil(numel / ranks) elements. A view of the bytes where they rest in memory; on
                NVMe, and while zero.Init builds, NaN of that size that takes no memory

They are there in stage 3, from zero.Init or `shard` on until the shards are closed. They are for looking: setting one does
nothing. Whoever wants values uses tiermem.zero.GatheredParameters or the functions of tiermem.utils.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
from torch import nn

_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status")


class ZeroParamType(enum.Enum):
    """What a parameter is to ZeRO."""

    NORMAL = 1  # whole on every rank
    PARTITIONED = 2  # each rank keeps a part
    REMOTE = 3  # kept by one rank alone; nothing here is


class ZeroParamStatus(enum.Enum):
    """Whether a partitioned parameter's values are there."""

    AVAILABLE = 1  # the whole is in memory
    NOT_AVAILABLE = 2  # nothing but the parts, where they rest
    INFLIGHT = 3  # on their way


def describe(param: nn.Parameter, number: int, shape: torch.Size, part: torch.Tensor, status: ZeroParamStatus) -> None:
    """Gives a parameter its attributes."""
    param.__dict__.update(ds_id=number, ds_shape=shape, ds_numel=shape.numel(), ds_tensor=part, ds_status=status)


def mark(params: Iterable[nn.Parameter], status: ZeroParamStatus) -> None:
    """Says where the values of parameters that have attributes are now."""
    for param in params:
        if "ds_status" in param.__dict__:
            param.__dict__["ds_status"] = status


def undescribe(param: nn.Parameter) -> None:
    """Takes a parameter's attributes away."""
    for name in _NAMES:
        param.__dict__.pop(name, None)


def absent_part(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Stands for a part that is not in memory."""
    nothing = torch.full((), float("nan"), dtype=dtype) if dtype.is_floating_point else torch.zeros((), dtype=dtype)
    return nothing.expand(numel)
