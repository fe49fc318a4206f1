"""Foreign: what another system's checkpoint holds, in the form that every reader here gives it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tiermem.checkpoint.format.fields import Json, decode, encode
from tiermem.checkpoint.format.manifest import WEIGHT
from tiermem.checkpoint.opening.source import Source
from tiermem.optim.rules import IMPLEMENTATION
from tiermem.zero.state_layout import EXP_AVG, EXP_AVG_SQ, MASTER

# ---- Foreign: what another system's checkpoint holds, as every reader of this room hands it on -----------------------
#
#     from_torch.py   from_deepspeed.py   from_dcp.py   ->   Foreign   ->   write.py: a tiermem checkpoint
#
# Values are read when they are asked for, piece by piece, so that a checkpoint larger than memory passes through.
# Nothing here opens a file.

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
    """A loss scaler between two steps, as other systems keep it."""

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
    left_behind: Sequence[str] = ()  # in words; tiermem has no place for it


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


# ---- Parameter groups, on their way in and out: whose optimizer they are, and which of their settings mean -----------
# something there
#
# in     the class is known by its states and settings; a group keeps what any optimizer here may hold
# out    a group gets every setting that torch's optimizer of that class has, since dcp.load asks for each of them

_SETTINGS = frozenset(
    (
        "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay", "momentum",
        "dampening", "nesterov", "lr_decay", "initial_accumulator_value", "ns_steps", "ns_coefficients", "adjust_lr_fn",
    )
)  # fmt: skip
"""What groups of torch's optimizers that have a counterpart here hold, beside how they compute."""


def class_of(foreign: Foreign) -> str:
    """The name of the optimizer that these states and settings are of; AdamW where nothing says more."""
    states = {name for p in foreign.parameters for name in p.states}
    keys = {key for group in foreign.groups for key in group}
    if EXP_AVG_SQ in states:
        return "AdamW"
    if EXP_AVG in states:
        return "Lion"
    if "sum" in states or "lr_decay" in keys:
        return "Adagrad"
    if "ns_steps" in keys:
        return "Muon"
    if "momentum_buffer" in states or "momentum" in keys:
        return "SGD"
    return "AdamW"


def optimizer_of(foreign: Foreign, lost: list[str]) -> Json:
    """The field `optimizer` of a manifest; None without groups. What cannot be kept is added to `lost`."""
    if not foreign.groups:
        return None
    names: list[list[str]] = [[] for _ in foreign.groups]
    for p in foreign.parameters:
        if p.group is not None:
            names[p.group].append(p.name)
    groups = []
    for number, (group, params) in enumerate(zip(foreign.groups, names, strict=True)):
        unknown = sorted(str(key) for key in group if key not in _SETTINGS and not _says_nothing(key, group))
        lost += [f"{key} of group {number}" for key in unknown]
        values = {
            key: encode(_plain(value), f"group {number}: {key}") for key, value in group.items() if key in _SETTINGS
        }
        said = [name for name in group.get("params", ()) if name in params]
        groups.append({"values": values, "params": said if len(said) == len(params) else params})
    return {"name": class_of(foreign), "groups": groups}


def torch_groups(source: Source) -> list[dict[str, Any]]:
    """The groups of a saved step as a torch optimizer's state dict has them, `params` by name."""
    saved = source.manifest.optimizer
    if not isinstance(saved, dict):
        return []
    defaults = _defaults(str(saved.get("name")))
    known = {each.name for each in source.manifest.parameters if each.role == "parameter"}
    found = []
    for number, each in enumerate(saved.get("groups", ())):
        values = decode(each["values"], f"{source.file}: optimizer: group {number}")
        params = [name for name in each["params"] if name in known]
        found.append({**defaults, **values, "params": params, "param_names": params})
    return found


def _defaults(name: str) -> Mapping[str, Any]:
    """Every setting that torch's optimizer of a name has; of one that torch has not, none."""
    made = {
        "AdamW": torch.optim.AdamW,
        "Adam": torch.optim.Adam,
        "Adagrad": torch.optim.Adagrad,
        "SGD": torch.optim.SGD,
    }
    if name not in made:
        return {}
    group = made[name]([torch.zeros(1)], lr=1e-3).param_groups[0]
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _says_nothing(key: Any, group: Mapping[str, Any]) -> bool:
    """Whether a setting only says how, or that there is nothing special."""
    return key in IMPLEMENTATION or key in ("step", "bias_correction", "params", "param_names") or not group[key]


def _plain(value: Any) -> Any:
    """A setting as a number where it is a tensor of one, as torch keeps a learning rate that it compiles."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
