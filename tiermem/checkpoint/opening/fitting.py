"""Fitting: which saved tensor belongs to which parameter and buffer of a model.

A parameter is known by any of its names, so that weights tied here and saved apart, or the other way round, find each other.
Everything is told at once, before anything is changed: what is missing, what is left over, what has another shape.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tiermem.checkpoint.format.manifest import Parameter
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.saving.capture import buffers
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard

logger = logging.getLogger("tiermem")


class Fitted(NamedTuple):
    """What was found: saved names by parameter, and by buffer."""

    params: Mapping[Shard, str]
    buffers: Sequence[tuple[torch.Tensor, str]]
    is_complete: bool  # nothing of the model is missing in what was saved


def fit(shards: Shards, source: Source, is_strict: bool) -> Fitted:
    """Finds every tensor of a model in a source.

    is_strict: names that only one of them has are a ValueError with both lists; else a warning, and the rest is fitted. Frozen
    parameters that were left out on purpose when they were saved are not missing. Raises ValueError for another shape.
    """
    own = [(shard, names) for shard, names in _parameters(shards)]
    held = buffers(shards.model)
    params = {shard: found.name for shard, names in own if (found := _found(source, names)) is not None}
    placed = [(tensor, found.name) for names, tensor in held if (found := _found(source, names)) is not None]
    used = {*params.values(), *(name for _, name in placed)}
    used.update(name for shard, names in own if shard in params for name in names)  # tied here, saved apart
    excluded = set(source.manifest.excluded)
    missing = [names[0] for shard, names in own if shard not in params and not excluded.intersection(names)]
    missing += [names[0] for names, _ in held if _found(source, names) is None]
    extra = [each.name for each in source.manifest.parameters if each.name not in used and each.role != "ordinary"]
    _check_shapes(source, [(shard.shape, name) for shard, name in params.items()])
    _check_shapes(source, [(tensor.shape, name) for tensor, name in placed])
    if missing or extra:
        lists = f"Missing in the checkpoint: {shown(missing)}. Not in the model: {shown(extra)}"
        if is_strict:
            raise ValueError(
                f"{source.file} does not fit the model. {lists}. load_module_strict=False loads what fits and leaves the "
                "rest as it is"
            )
        logger.warning("%s fits the model in part. %s", source.file, lists)
    return Fitted(params, placed, len(params) == len(own))


def shown(names: Sequence[str]) -> str:
    """A list of names for a person."""
    return ", ".join(names) or "none"


def _parameters(shards: Shards) -> list[tuple[Shard, list[str]]]:
    """Every partitioned parameter with all its names, its own first."""
    names: dict[int, list[str]] = {}
    for name, param in shards.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [(shard, [shard.name, *names.get(id(shard.param), ())]) for _, shard in shards.parameters()]


def _found(source: Source, names: Sequence[str]) -> Parameter | None:
    """What was saved under one of these names. A state dict of another system does not say which of it are buffers."""
    for name in names:
        found = source.find(name)
        if found is not None and found.role != "ordinary":
            return found
    return None


def _check_shapes(source: Source, found: Sequence[tuple[torch.Size, str]]) -> None:
    wrong = [
        f"{name} is {tuple(source.parameters[name].shape)} in the checkpoint and {tuple(shape)} in the model"
        for shape, name in found
        if tuple(source.parameters[name].shape) != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{source.file} does not fit the model: {'; '.join(wrong)}")
