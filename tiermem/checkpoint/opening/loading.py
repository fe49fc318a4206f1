"""Loading: a saved step becomes the state of a sharded model and its optimizer, for both faces.

    find what there is -> open it on every rank -> fit names, groups, states -> put everything in place

Up to there nothing is changed, and what does not fit is told. With `allow_older` a step that is not whole, or turns out to be
damaged while it is read, gives way to the next older one; without, the error says which one that is.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.checkpoint.format.finding import Found, NothingSaved, find, read_latest, tags_of
from tiermem.checkpoint.format.manifest import ManifestError
from tiermem.checkpoint.format.places import named_folder
from tiermem.checkpoint.format.plain import decode
from tiermem.checkpoint.opening.custom import SavedWeights
from tiermem.checkpoint.opening.filling import Wants
from tiermem.checkpoint.opening.fitting import Fitted, fit
from tiermem.checkpoint.opening.ordinary import check_ordinary, put_ordinary
from tiermem.checkpoint.opening.restore import restore
from tiermem.checkpoint.opening.resuming import Group, check_moments, put_groups, put_rng, saved_groups
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.saving.saver import saver_of
from tiermem.checkpoint.together import DAMAGE, everywhere
from tiermem.optim.base import NativeOptimizer
from tiermem.swap.run_lock import Owner, this_process
from tiermem.zero.ranks.agreement import agree
from tiermem.zero.ranks.collectives import exchange
from tiermem.zero.shards import Shards

logger = logging.getLogger("tiermem")

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""What an engine has saved of itself."""

CustomLoad = Callable[..., Any]
"""Called with src=(the saved weights, a mapping) and dst=(the model): puts the weights in place itself."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A step that was opened, and what was saved beside its states."""

    path: Path  # the tag's folder, else the manifest
    tag: str | None
    step: int  # optimizer steps
    world: int  # ranks that saved it
    client_state: Any
    engine: Mapping[str, Any]
    has_states: bool  # masters, moments and counts were taken as well


class Asked(NamedTuple):
    """What of a saved step is asked for: the arguments of `load`."""

    is_strict: bool
    takes_states: bool
    module_only: bool
    custom_load: CustomLoad | None
    beside: tuple[tuple[str, Any], ...]  # (field of the manifest or part, what has a state of that kind)


def load(
    shards: Shards,
    optimizer: NativeOptimizer | None,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: CustomLoad | None = None,
    allow_older: bool = False,
    newest: bool = False,
    scheduler: Any = None,
    loss_scaler: Any = None,
    loader: Any = None,
) -> Loaded | None:
    """Opens what `save` saved, on any number of ranks, tiers, tile sizes, paths and precisions.

    Args:
        optimizer: the one that steps the model; None: weights alone are taken.
        load_dir: what was given to `save`, or the folder of a tag, a run or a manifest.
        tag: default: what `latest` names. newest: where there is no `latest`, the newest tag.
        load_module_strict: names that only the model or only the checkpoint has are an error with both lists; else a warning.
        load_optimizer_states: False: moments and counts stay as they are, new in a new optimizer.
        load_module_only: weights and buffers, and nothing else; masters are made from the weights, as they are where the
            policy's `loads_masters` is false.
        custom_load_fn: called with src= (a mapping of saved weights, each read when asked for) and dst= (the model) in place of
            taking the weights; masters are then made from what it leaves. Collective, as what it calls may be.
        allow_older: take the next older step when this one is not whole, or damaged.
        scheduler, loss_scaler, loader: what goes on from its saved state by `load_state_dict`.

    Returns None, with a warning, when no tag is given and nothing is saved there. On as many ranks as there were generators and
    the position in the data are put back too, and training goes on to the bit.

    Collective; blocks. Every byte is verified. Raises NothingSaved (a FileNotFoundError), which lists the tags there are, for a
    tag that is not there, and where there are tags and no `latest`, unless `newest` is set; ValueError for an empty load_dir;
    ManifestError and ValueError for what does not fit, before anything is changed; DamagedState and OSError for what cannot be
    read: then the model is a mixture that no step touches until another load has gone well.
    """
    beside = (("scheduler", scheduler), ("loss_scaler", loss_scaler), ("data", loader))
    asked = Asked(load_module_strict, load_optimizer_states, load_module_only, custom_load_fn, beside)
    candidates = _candidates(shards, named_folder("load_dir", load_dir), tag, newest)
    own = frozenset(Owner(*json.loads(each)) for each in exchange(shards.topology, json.dumps(this_process())))
    for number, each in enumerate(candidates):
        older = candidates[number + 1 :]
        try:
            return _open(shards, optimizer, each, older, own, asked)
        except DAMAGE as error:
            if not allow_older or not older:
                raise
            logger.warning("%s is not whole, an older step is opened: %s", each, error)
    return None


def _candidates(shards: Shards, where: Path, tag: str | None, newest: bool) -> list[Found]:
    """What there is on every rank. Collective."""

    def look() -> list[Found]:
        try:
            return find(where, tag)
        except NothingSaved as error:
            tags = tags_of(where) if where.is_dir() else []
            if newest and tags and tag is None and read_latest(where) is None:
                return find(where, tags[0])
            if tag is not None or (where.is_dir() and read_latest(where) is not None):
                raise
            if tags:
                raise NothingSaved(
                    error.errno, f"{error.strerror}; or give newest=True, for the first", str(where)
                ) from None
            logger.warning("nothing is opened: %s", error)
            return []

    found = everywhere(shards.topology, "looking for the checkpoint", look)
    agree(shards.topology, {"number of saved steps": len(found)}, "load_checkpoint")
    return found


def _open(
    shards: Shards,
    optimizer: NativeOptimizer | None,
    found: Found,
    older: list[Found],
    own: frozenset[Owner],
    asked: Asked,
) -> Loaded:
    topology = shards.topology
    source = everywhere(topology, f"opening {found}", lambda: Source.of(found, older, own))
    with source:
        manifest = source.manifest
        agree(topology, {"saved step": f"run {manifest.run_id}, commit {manifest.commit}"}, "load_checkpoint")
        wants = _wants(source, shards, optimizer, asked)
        fitted = fit(shards, source, asked.is_strict)
        groups = _check_optimizer(source, shards, optimizer, fitted) if wants.states else []
        loaded = _loaded(source, wants)
        rest = [] if asked.module_only else _rest(source, shards, wants, asked)
        if asked.custom_load is not None:
            asked.custom_load(src=SavedWeights(source), dst=shards.model)
        restore(shards, source, fitted, wants)
        if wants.states:
            assert optimizer is not None
            put_groups(optimizer, groups)
            if manifest.optimizer is not None:
                put_ordinary(source, optimizer, topology)
        if not asked.module_only:
            _put_rest(source, shards, rest)
        if wants.states and wants.weights:
            saver_of(shards).commits.went_on_from(source.file, manifest)
        return loaded


def _wants(source: Source, shards: Shards, optimizer: NativeOptimizer | None, asked: Asked) -> Wants:
    has_states = asked.takes_states and not asked.module_only and optimizer is not None
    if has_states and source.manifest.optimizer is None:
        logger.warning("%s holds no optimizer: its weights are opened, and states begin anew", source.file)
    has_masters = asked.custom_load is None and not asked.module_only and shards.policy.loads_masters
    return Wants(weights=asked.custom_load is None, states=has_states, masters=has_masters)


def _check_optimizer(
    source: Source, shards: Shards, optimizer: NativeOptimizer | None, fitted: Fitted
) -> list[tuple[Group, Group]]:
    assert optimizer is not None
    if source.manifest.optimizer is None:
        return []
    groups = saved_groups(source, optimizer, fitted)
    check_moments(source, shards, fitted)
    check_ordinary(source, optimizer)
    return groups


def _rest(source: Source, shards: Shards, wants: Wants, asked: Asked) -> list[tuple[Any, Any, str]]:
    """(owner, its saved state, where that is): schedule, loss scale, position in the data. Changes nothing.

    Raises ManifestError for a state of another type than the owner saves.
    """
    rank, manifest, found = shards.topology.rank, source.manifest, []
    is_same_world = manifest.world == shards.topology.world
    for name, owner in asked.beside:
        saved = getattr(source.parts[rank], name) if name == "data" and is_same_world else getattr(manifest, name, None)
        if saved is not None and hasattr(owner, "load_state_dict") and (wants.states or name != "loss_scaler"):
            state, own = decode(saved, f"{source.file}: {name}"), owner.state_dict()
            if isinstance(own, Mapping) and not isinstance(state, Mapping):
                raise ManifestError(
                    f"{source.file}: {name}: is a {type(state).__name__}; what {type(owner).__name__} saves is due, which has "
                    f"{', '.join(map(str, own))}"
                )
            found.append((owner, state, f"{source.file}: {name}"))
    return found


def _put_rest(source: Source, shards: Shards, rest: list[tuple[Any, Any, str]]) -> None:
    """Generators, and what `_rest` has found. Raises ManifestError for what an owner cannot go on from."""
    rank, manifest = shards.topology.rank, source.manifest
    is_same_world = manifest.world == shards.topology.world
    if not is_same_world and rank == 0:
        text = "%s was saved on %d ranks and is opened on %d: generators and the position in the data are not put back"
        logger.info(text, source.file, manifest.world, shards.topology.world)
    if is_same_world:
        put_rng(source.parts[rank].rng, f"{source.file}: rng of rank {rank}", shards.device)
    for owner, state, where in rest:
        try:
            owner.load_state_dict(state)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ManifestError(f"{where}: is not what {type(owner).__name__} saves: {error!r}") from error


def _loaded(source: Source, wants: Wants) -> Loaded:
    manifest = source.manifest
    engine = decode(manifest.engine, f"{source.file}: engine")
    engine = {} if engine is None else engine
    if not isinstance(engine, dict):
        raise ManifestError(f"{source.file}: engine: is a {type(engine).__name__}; an object with its counters is due")
    for name in COUNTERS:
        if type(engine.get(name, 0)) is not int or engine.get(name, 0) < 0:
            raise ManifestError(f"{source.file}: engine: {name} is {engine[name]!r:.80}; a count of 0 or more is due")
    return Loaded(
        path=source.place,
        tag=manifest.tag,
        step=manifest.step,
        world=manifest.world,
        client_state=decode(manifest.client_state, f"{source.file}: client_state"),
        engine=engine,
        has_states=wants.states and manifest.optimizer is not None,
    )
