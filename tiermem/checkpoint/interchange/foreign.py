"""Foreign: the values of another system's checkpoint, in one form for all readers.

    from_torch.py   from_deepspeed.py   from_dcp.py   ->   Foreign   ->   write.py: a tiermem checkpoint

Values are read in pieces when they are written, so a checkpoint may be larger than memory. This
module opens no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tiermem.checkpoint.format.fields import Json, decode, encode
from tiermem.checkpoint.format.manifest import WEIGHT
from tiermem.checkpoint.opening.source import Source
from tiermem.optimizers import KEPT_MOMENTS, PARAMS
from tiermem.optimizers.base import IMPLEMENTATION
from tiermem.units.state_layout import EXP_AVG_SQ, MASTER

# ---- the form ------------------------------------------------------------------------------------

STEP = "step"
STEP_KEYS = ("global_step", "global_steps", "step")
"""Keys of a file under which it may say how many steps were made."""
STATES = {MASTER, *KEPT_MOMENTS}
"""States of a parameter that are imported, under torch's and tiermem's names. Others are left out
and listed."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Pieces = Callable[[], Iterator[torch.Tensor]]


class ForeignState(NamedTuple):
    """The values of one state of one parameter, or of a buffer.

    `pieces` yields flat CPU tensors of `dtype`; in order they are the values. Each piece may be
    freed before the next is requested. It raises OSError, or ValueError when the values do not
    match the description.
    """

    dtype: torch.dtype
    pieces: Pieces


class ForeignParameter(NamedTuple):
    """One parameter or one buffer, under its first name. `states` holds at least `weight`."""

    name: str
    shape: tuple[int, ...]
    states: Mapping[str, ForeignState]
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False
    is_trainable: bool = True
    num_steps: int = 0
    group: int | None = None  # index in `Foreign.groups`

    @property
    def dtype(self) -> torch.dtype:
        """The weight's dtype."""
        return self.states[WEIGHT].dtype

    @property
    def moments(self) -> frozenset[str]:
        """The names of its states beside weight and master."""
        return frozenset(self.states) - {WEIGHT, MASTER}


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A whole checkpoint. Scalars are plain Python values.

    `groups` are those of a torch optimizer. If a group has `params`, it lists the names of its
    parameters in order.
    """

    kind: str  # shown to the user: "DeepSpeed ZeRO-3, 2 ranks"
    parameters: Sequence[ForeignParameter]
    groups: Sequence[Mapping[str, Any]] = ()
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    loss_scale: Json = None  # the state dict of a LossScaler; None: no loss is scaled
    scheduler: Mapping[str, Any] | None = None
    client_state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_behind: Sequence[str] = ()  # descriptions of values that tiermem cannot keep


def of_tensor(value: torch.Tensor) -> ForeignState:
    """A state with the values of a tensor; the state keeps the tensor alive."""
    return ForeignState(value.dtype, lambda: iter((value.detach().reshape(-1),)))


def is_buffer_like(name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of a state dict is probably a buffer: not floating-point, or named like a
    buffer of torch's norms."""
    return not dtype.is_floating_point or name.rpartition(".")[2] in _BUFFERS


def steps_in(value: Any, what: str) -> int:
    """A step count from a number, or from a tensor of one number. Raises ValueError for anything
    else."""
    number = _plain(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not number >= 0 or number != int(number) or number >= 1 << 53:
        raise ValueError(f"{what}: the step is {number!r:.80}, which counts no steps")
    return int(number)


def steps_of(entry: Mapping[Any, Any], group: Mapping[str, Any], what: str) -> int:
    """The steps that a parameter's states have seen: their own count, or their group's, where apex
    and earlier DeepSpeed keep it. Raises ValueError where Adam's moments have no count."""
    for kept in (entry, group):
        if STEP in kept:
            return steps_in(kept[STEP], what)
    if EXP_AVG_SQ in entry:
        raise ValueError(
            f"{what}: {EXP_AVG_SQ} is there and no {STEP}, by which Adam corrects it: neither its "
            "states nor its group count steps"
        )
    return 0


def global_steps_of(
    found: Mapping[str, Any], parameters: Iterable[ForeignParameter], what: str
) -> int:
    """The number of steps that a file says, else the most steps that a parameter has seen. Raises
    ValueError."""
    said = [found[key] for key in STEP_KEYS if key in found]
    return (
        steps_in(said[0], f"{what}: step")
        if said
        else max((p.num_steps for p in parameters), default=0)
    )


def is_extra(key: Any) -> bool:
    """Whether a key of a state dict is that of a module's extra state."""
    return str(key).rpartition(".")[2] == "_extra_state"


def states_in(entry: Mapping[Any, Any], left_behind: set[str]) -> dict[str, Any]:
    """The imported states of a parameter's entry in an optimizer's state dict; describes the others
    in `left_behind`."""
    left_behind.update(
        f"state {name!r} of the optimizer" for name in entry if name not in (*STATES, STEP)
    )
    return {name: value for name, value in entry.items() if name in STATES}


def check_state(name: str, state: str, value: Any, numel: int) -> torch.Tensor:
    """`value`. Raises ValueError unless it is a tensor of `numel` elements in a dtype that tiermem
    can keep."""
    if not isinstance(value, torch.Tensor) or value.numel() != numel or value.dtype not in _FLOATS:
        found = (
            f"{tuple(value.shape)} of {value.dtype}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        allowed = ", ".join(str(dtype) for dtype in _FLOATS)
        raise ValueError(
            f"{name}: {state} is {found} where {numel} elements are due; allowed are {allowed}"
        )
    return value


def check_moments(foreign: Foreign, what: str) -> None:
    """Raises ValueError where a parameter has some of the moments of its group and lacks others: a
    missing moment would be taken as zeros."""
    fullest: dict[int | None, ForeignParameter] = {}
    for p in foreign.parameters:
        if len(p.moments) > len(fullest.setdefault(p.group, p).moments):
            fullest[p.group] = p
    for p in foreign.parameters:
        missing = fullest[p.group].moments - p.moments
        if p.moments and missing:
            raise ValueError(
                f"{what}: {p.name} has no {', '.join(sorted(missing))}, which "
                f"{fullest[p.group].name} of the same group has: the optimizer's states are "
                "damaged, or of two saves"
            )


def tie(parameters: Iterable[ForeignParameter], ties: Mapping[str, str]) -> list[ForeignParameter]:
    """The parameters with their aliases; `ties` maps alias -> first name. Raises ValueError for an
    unknown first name."""
    others: dict[str, list[str]] = {}
    for alias, name in ties.items():
        others.setdefault(name, []).append(alias)
    found = [p._replace(aliases=tuple(others.pop(p.name, ()))) for p in parameters]
    if others:
        raise ValueError(
            f"{', '.join(others)}: other names are tied to it, and it is not there itself"
        )
    return found


# ---- parameter groups ----------------------------------------------------------------------------
#
# import    the class is inferred from states and settings; a group keeps the settings that an optimizer here may have
# export    a group gets every setting of torch's optimizer of that class, because dcp.load asks for each of them

_SETTINGS = {"initial_lr", "decoupled_weight_decay", "ns_coefficients", "adjust_lr_fn"}.union(
    *(kind().settings() for kind in PARAMS.values())
)
"""Settings of torch's optimizers that have a counterpart here, without those of the
implementation."""


def class_of(foreign: Foreign) -> str:
    """The name of the optimizer that these states and settings belong to; AdamW if they do not
    tell."""
    marks = {name for p in foreign.parameters for name in p.states} | {
        key for group in foreign.groups for key in group
    }
    return next((name for name, kind in PARAMS.items() if marks.intersection(kind.marks)), "AdamW")


def optimizer_of(foreign: Foreign, lost: list[str]) -> Json:
    """The field `optimizer` of a manifest; None without groups and moments. Adds the names of
    settings that cannot be kept to `lost`."""
    if not foreign.groups and not any(p.moments for p in foreign.parameters):
        return None
    names: list[dict[str, None]] = [{} for _ in foreign.groups]
    for p in foreign.parameters:
        if p.group is not None:
            names[p.group][p.name] = None
    groups = []
    for number, (group, params) in enumerate(zip(foreign.groups, names, strict=True)):
        unknown = sorted(
            str(key) for key in group if key not in _SETTINGS and not _says_nothing(key, group)
        )
        lost += [f"{key} of group {number}" for key in unknown]
        values = {
            key: encode(_plain(value), f"group {number}: {key}")
            for key, value in group.items()
            if key in _SETTINGS
        }
        said = [name for name in group.get("params", ()) if name in params]
        groups.append(
            {"values": values, "params": said if len(said) == len(params) else list(params)}
        )
    return {"name": class_of(foreign), "groups": groups}


def torch_groups(source: Source) -> list[dict[str, Any]]:
    """The groups of a saved step as in a torch optimizer's state dict; `params` are names."""
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
    """The default settings of torch's optimizer of a name; empty if this module knows none of that
    name."""
    if name not in PARAMS or name == "Muon" or not hasattr(torch.optim, name):
        return {}
    group = getattr(torch.optim, name)([torch.zeros(1)], lr=1e-3).param_groups[0]
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _says_nothing(key: Any, group: Mapping[str, Any]) -> bool:
    """Whether a setting selects only an implementation, or is false (None, False, 0, empty)."""
    return (
        key in IMPLEMENTATION
        or key in ("step", "bias_correction", "params", "param_names")
        or not group[key]
    )


def _plain(value: Any) -> Any:
    """A setting as a number, if it is a tensor of one number: a capturable learning rate, for
    example."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
