"""Resuming: what a step saved beside its states is put back: parameter groups and random generators.

A group of the optimizer takes the values (lr, betas, ...) of the saved group that its parameters were in, whatever number it
has now. What would be put in a place that means something else is refused before anything is changed.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tiermem.checkpoint.format.manifest import ManifestError
from tiermem.checkpoint.format.plain import Json, decode
from tiermem.checkpoint.opening.fitting import Fitted, shown
from tiermem.checkpoint.opening.source import Source
from tiermem.optim.arguments import IMPLEMENTATION
from tiermem.optim.base import NativeOptimizer
from tiermem.swap.accelerator import is_accelerator, set_rng_state
from tiermem.zero.shards import Shards

_ALIKE = ({"Adam", "AdamW"},)  # classes whose states mean the same
_NO_STATES = "load_optimizer_states=False takes the weights alone"

Group = dict[str, Any]


def saved_groups(source: Source, optimizer: NativeOptimizer, fitted: Fitted) -> list[tuple[Group, Group]]:
    """(group of the optimizer, saved values) of every group that has been saved.

    Raises ValueError when the saved optimizer is another one, or a group now steps parameters of several saved ones;
    ManifestError for what no optimizer has saved.
    """
    saved = source.manifest.optimizer
    _check_class(saved, optimizer, source)
    groups, number_of = _saved_values(saved, source)
    names = {id(shard.param): name for shard, name in fitted.params.items()}
    names |= {id(param): f"optimizer.{name}" for name, param in optimizer.named() if id(param) not in names}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        numbers = {number_of[names[id(p)]] for p in group["params"] if names[id(p)] in number_of}
        if len(numbers) > 1:
            raise ValueError(
                f"{source.file}: group {number} of the optimizer steps parameters of the saved groups "
                f"{shown([str(each) for each in sorted(numbers)])}, which may differ in lr and the rest: make the groups as "
                f"they were; {_NO_STATES}"
            )
        found += [(group, groups[each]) for each in numbers]
    return found


def check_moments(source: Source, shards: Shards, fitted: Fitted) -> None:
    """Raises ValueError when a parameter that was stepped lacks a state that is kept of it now, naming some."""
    tiles, lacking = shards.states, []
    for shard, name in fitted.params.items():
        live, _ = shards.find(shard.param)
        if tiles is None or not live.unit.is_trainable or not source.parameters[name].num_steps or not shard.numel:
            continue
        lacking += [f"{state} of {name}" for state in tiles.names(shard) if source.kind(name, state) is None]
    if lacking:
        raise ValueError(
            f"{source.file} has no {shown(lacking[:4])}{' and others' if len(lacking) > 4 else ''}: it was saved by an "
            f"optimizer with other settings (amsgrad, momentum). Set them as they were; {_NO_STATES}"
        )


def put_groups(optimizer: NativeOptimizer, groups: list[tuple[Group, Group]]) -> None:
    """Gives groups their saved values. Raises ValueError for values that the optimizer does not take."""
    how = {name: value for name, (value, _) in IMPLEMENTATION.items() if name in optimizer.defaults}
    for group, values in groups:
        optimizer.check_group({**group, **values, **how})
        group.update({**values, **how})  # how another program computed is not how we do


def put_rng(saved: Json, where: str, device: torch.device) -> None:
    """Puts this rank's generators back where they were. Raises ManifestError for what no generator has saved."""
    if saved is None:
        return
    state = decode(saved, where)
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if is_accelerator(device) and device.type in state:
            set_rng_state(device, state[device.type])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ManifestError(f"{where}: is no state of this machine's generators: {error}") from error


def _check_class(saved: Json, optimizer: NativeOptimizer, source: Source) -> None:
    name, own = saved.get("name") if isinstance(saved, dict) else None, type(optimizer).__name__
    if name != own and not any({name, own} <= alike for alike in _ALIKE):
        raise ValueError(
            f"{source.file} was saved by {name}, and this optimizer is {own}: build a {name}; {_NO_STATES}"
        )


def _saved_values(saved: Json, source: Source) -> tuple[list[Group], dict[str, int]]:
    """The values of each saved group, and the number of the group that each parameter was in."""
    try:
        groups = [decode(each["values"], f"{source.file}: optimizer") for each in saved["groups"]]
        number_of = {str(name): number for number, each in enumerate(saved["groups"]) for name in each["params"]}
        if not all(isinstance(values, dict) for values in groups):
            raise TypeError("values are no object")
    except (KeyError, TypeError) as error:
        raise ManifestError(f"{source.file}: optimizer: is not what an optimizer saves: {error!r}") from error
    return groups, number_of
