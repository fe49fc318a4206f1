"""A torch.distributed.checkpoint folder as a Foreign: what FSDP2, DDP and plain torch save, with the optimizer's states.

    model.<name>                          weights and buffers            ("model": get_model_state_dict(...))
    optim.state.<name>.exp_avg, .step     states by name                 ("optim": get_optimizer_state_dict(...))
    optim.param_groups.<n>.lr             groups; or by name, from flatten_optimizer_state_dict

Keys may have other names (from_torch.py), a common first part ("app.model..."), or none at all: then all tensors are weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tiermem.checkpoint.interchange.dcp_files import METADATA, Path_, Plain, Stored, Tensor, read_stored
from tiermem.checkpoint.interchange.foreign import (
    STATES,
    STEP,
    WEIGHT,
    Foreign,
    ForeignParameter,
    ForeignState,
    is_buffer_like,
    steps_in,
)
from tiermem.checkpoint.interchange.from_torch import MODEL_KEYS, OPTIMIZER_KEYS, STEP_KEYS

_SCHEDULER_KEYS = ("scheduler", "lr_scheduler", "sched")
_STATE, _GROUPS = "state", "param_groups"


def is_dcp(path: Path) -> bool:
    """Whether a folder is a torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


def read_dcp(path: Path) -> Foreign:
    """Opens a folder; reads sizes and scalars, no weights yet.

    Raises ValueError when it is damaged, not understood or would execute something, OSError when it cannot be read.
    """
    return _Reader(path, _without_common_key(read_stored(path))).foreign()


class _Reader:
    """What is stored, sorted into weights, states, groups and the rest."""

    def __init__(self, path: Path, stored: Stored) -> None:
        self._path = path
        self._left_behind: set[str] = set()
        self._weights: dict[str, Tensor] = {}
        self._states: dict[str, dict[str, Tensor | Plain]] = {}
        self._settings: dict[Any, dict[str, Any]] = {}  # of groups, by number or by parameter
        self._rest: dict[Path_, Tensor | Plain] = {}
        has_model = any(keys[0] in MODEL_KEYS for keys in stored)
        for keys, value in stored.items():
            if keys[0] in OPTIMIZER_KEYS and len(keys) > 1:
                self._take_optimizer(keys[1:], value)
            elif has_model and keys[0] in MODEL_KEYS:
                self._take_weight(keys[1:], value)
            elif not has_model and isinstance(value, Tensor):
                self._take_weight(keys, value)
            else:
                self._rest[keys] = value

    def foreign(self) -> Foreign:
        unknown = [name for name in self._states if name not in self._weights]
        if unknown:
            raise ValueError(f"{self._path}: there are states of {', '.join(unknown[:5])}, which is no weight of it")
        groups, group_of = self._groups()
        parameters = [self._parameter(name, weight, group_of.get(name)) for name, weight in self._weights.items()]
        client = {
            keys[0]: value.load() for keys, value in self._rest.items() if len(keys) == 1 and isinstance(value, Plain)
        }
        steps = [client.pop(key) for key in STEP_KEYS if key in client]
        most = max((p.num_steps for p in parameters), default=0)
        scheduler = {
            str(keys[1]): value.load()
            for keys, value in self._rest.items()
            if len(keys) == 2 and keys[0] in _SCHEDULER_KEYS and isinstance(value, Plain)
        }
        deeper = {str(keys[0]) for keys in self._rest if len(keys) > 1 and keys[0] not in _SCHEDULER_KEYS}
        return Foreign(
            kind="torch.distributed.checkpoint",
            parameters=parameters,
            groups=groups,
            global_steps=steps_in(steps[0], f"{self._path}: step") if steps else most,
            scheduler=scheduler or None,
            client_state=client,
            left_behind=[*sorted(self._left_behind), *(f"{key!r} of the checkpoint" for key in sorted(deeper))],
        )

    def _take_weight(self, keys: Path_, value: Tensor | Plain) -> None:
        name = ".".join(map(str, keys))
        if isinstance(value, Tensor):
            self._weights[name] = value
        else:
            self._left_behind.add(f"{name!r} of the model, which is no tensor")

    def _take_optimizer(self, keys: Path_, value: Tensor | Plain) -> None:
        if len(keys) == 1:  # flattened: "state.<name>.exp_avg", "param_groups.<name>.lr"
            kind, _, rest = str(keys[0]).partition(".")
            name, _, key = rest.rpartition(".")
        elif len(keys) == 3:
            kind, name, key = keys
        else:
            kind, name, key = str(keys[0]), "", ""
        if kind == _STATE and name and key:
            self._states.setdefault(str(name), {})[str(key)] = value
        elif kind == _GROUPS and key:
            loaded = value.load() if isinstance(value, Plain) else _number(value)
            self._settings.setdefault(name, {})[str(key)] = loaded
        else:
            self._left_behind.add(f"{'.'.join(map(str, keys))!r} of the optimizer")

    def _groups(self) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
        """The groups, and which one each parameter is of."""
        if all(isinstance(key, int) for key in self._settings):
            ordered = [self._settings[number] for number in sorted(self._settings)]
            group_of = {name: i for i, group in enumerate(ordered) for name in _names(group.get("params"))}
            return [{**group, "params": list(_names(group.get("params")))} for group in ordered], group_of
        groups: list[Mapping[str, Any]] = []
        group_of = {}
        for name, settings in self._settings.items():
            if settings not in groups:
                groups.append(settings)
            group_of[str(name)] = groups.index(settings)
        return groups, group_of

    def _parameter(self, name: str, weight: Tensor, group: int | None) -> ForeignParameter:
        states = {WEIGHT: ForeignState(weight.dtype, weight.pieces)}
        kept = self._states.get(name, {})
        for key, value in kept.items():
            if key not in STATES:
                if key != STEP:
                    self._left_behind.add(f"state {key!r} of the optimizer")
                continue
            if not isinstance(value, Tensor) or math.prod(value.shape) != math.prod(weight.shape):
                shown = value.shape if isinstance(value, Tensor) else "no tensor"
                raise ValueError(f"{self._path}: {key} of {name} is {shown} where {weight.shape} is due")
            states[key] = ForeignState(value.dtype, value.pieces)
        step = kept.get(STEP)
        steps = 0 if step is None else steps_in(_number(step), f"{self._path}: {name}")
        is_buffer = group is None and not kept and is_buffer_like(name, weight.dtype)
        is_trainable = bool(kept) or group is not None or not self._settings
        return ForeignParameter(
            name, weight.shape, states, is_buffer=is_buffer, is_trainable=is_trainable, num_steps=steps, group=group
        )


def _names(params: Any) -> Iterable[str]:
    return [str(name) for name in params] if isinstance(params, list | tuple) else ()


def _number(value: Tensor | Plain) -> Any:
    """A stored number."""
    if isinstance(value, Plain):
        return value.load()
    found = list(value.pieces()) if math.prod(value.shape) == 1 else []
    if len(found) != 1:
        raise ValueError(f"{value.key} is {value.shape} of {value.dtype} where a number is due")
    return found[0].item()


def _without_common_key(stored: Stored) -> Stored:
    """Without a first key that all share, when what is behind it is a model or an optimizer: {"app": {"model": ...}}."""
    firsts = {keys[0] for keys in stored}
    if len(firsts) != 1 or firsts & {*MODEL_KEYS, *OPTIMIZER_KEYS} or any(len(keys) < 2 for keys in stored):
        return stored
    inner = {keys[1:]: value for keys, value in stored.items()}
    return inner if any(keys[0] in (*MODEL_KEYS, *OPTIMIZER_KEYS) for keys in inner) else stored
