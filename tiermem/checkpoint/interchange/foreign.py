"""Foreign: what another system's checkpoint holds, as every reader of this room hands it on.

    from_torch.py   from_deepspeed.py   from_dcp.py   ->   Foreign   ->   write.py: a tiermem checkpoint

Values are read when they are asked for, piece by piece, so that a checkpoint larger than memory passes through. Nothing here
opens a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tiermem.optim.layout import EXP_AVG, EXP_AVG_SQ, MASTER

WEIGHT = "weight"
STEP = "step"
STATES = (MASTER, EXP_AVG, EXP_AVG_SQ, "max_exp_avg_sq", "sum", "momentum_buffer")
"""States of a parameter that are taken over, as torch and we name them; others are left behind, and named."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Pieces = Callable[[], Iterator[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class ForeignState:
    """The values of one state of one parameter, or of a buffer.

    `pieces` gives flat CPU tensors of `dtype` that are the values when put one behind the other; each is free to go before
    the next is asked for. It raises OSError, or ValueError when what it finds is not what was announced.
    """

    dtype: torch.dtype
    pieces: Pieces


@dataclasses.dataclass(frozen=True)
class ForeignParameter:
    """One parameter, or one buffer, under its first name; `states` holds at least `weight`."""

    name: str
    shape: tuple[int, ...]
    states: Mapping[str, ForeignState]
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False
    is_trainable: bool = True
    num_steps: int = 0
    group: int | None = None  # of `Foreign.groups`

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.states[WEIGHT].dtype


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A loss scaler between two steps, as everybody who scales knows it."""

    scale: float
    is_dynamic: bool
    good_steps: int = 0  # since the last overflow, or since the scale grew
    hysteresis: int | None = None  # overflows left before the scale falls


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A whole checkpoint. Scalars are plain Python values.

    `groups` are those of a torch optimizer; a `params` among a group's settings is the names of its parameters, in order.
    """

    kind: str  # said to the user: "DeepSpeed ZeRO-3, 2 ranks"
    parameters: Sequence[ForeignParameter]
    groups: Sequence[Mapping[str, Any]] = ()
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    loss_scale: LossScale | None = None
    scheduler: Mapping[str, Any] | None = None
    client_state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_behind: Sequence[str] = ()  # what of it tiermem has no place for, in words


def of_tensor(value: torch.Tensor) -> ForeignState:
    """The state that a tensor is; the tensor stays alive as long."""
    return ForeignState(value.dtype, lambda: iter((value.detach().reshape(-1),)))


def is_buffer_like(name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of a state dict, which does not say it, is a buffer: no float, or one of torch's own norms."""
    return not dtype.is_floating_point or name.rpartition(".")[2] in _BUFFERS


def steps_in(value: Any, what: str) -> int:
    """A step count as optimizers keep it: a number, or a tensor of one. Raises ValueError for anything else."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not number >= 0 or number != int(number) or number >= 1 << 53:
        raise ValueError(f"{what}: the step is {number!r}, which counts no steps")
    return int(number)


def check_state(name: str, state: str, value: Any, numel: int) -> None:
    """Raises ValueError unless this is a tensor of a parameter's so many elements that tiermem can keep."""
    if not isinstance(value, torch.Tensor) or value.numel() != numel or value.dtype not in _FLOATS:
        found = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        allowed = ", ".join(str(dtype) for dtype in _FLOATS)
        raise ValueError(f"{name}: {state} is {found} where {numel} elements are due; allowed are {allowed}")


def tie(parameters: Iterable[ForeignParameter], ties: Mapping[str, str]) -> list[ForeignParameter]:
    """The parameters with the other names that they go by: alias -> first name. Raises ValueError for a name unknown."""
    others: dict[str, list[str]] = {}
    for alias, name in ties.items():
        others.setdefault(name, []).append(alias)
    found = [dataclasses.replace(p, aliases=tuple(others.pop(p.name, ()))) for p in parameters]
    if others:
        raise ValueError(f"{', '.join(others)}: other names are tied to it, and it is not there itself")
    return found
