"""Loading: puts a saved step into a sharded model, its optimizer and its generators.

    find the steps -> open one on every rank -> match names, groups, states -> put everything in
    place

Nothing is changed before the last arrow; mismatches are raised before it. With `allow_older`, a
step that is not whole, or is found damaged while it is read, is replaced by the next older step.
Without, the error names an older whole step.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.checkpoint.format.fields import Json, ManifestError, decode
from tiermem.checkpoint.format.finding import (
    Found,
    NothingSaved,
    find,
    named_folder,
    read_latest,
    tags_of,
)
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT
from tiermem.checkpoint.opening.restore import Fitted, Wants, fit, restore, shown_names
from tiermem.checkpoint.opening.source import Source, state_of_rank, weights_of
from tiermem.checkpoint.saving.capture import ordinary_of
from tiermem.checkpoint.saving.saver import saver_of, wait
from tiermem.checkpoint.together import DAMAGE, everywhere
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.ordinary import STEP
from tiermem.optim.sharded import enable_training_of
from tiermem.optim.tiles import tiles_of
from tiermem.optimizers.base import IMPLEMENTATION
from tiermem.plans.agreement import agree
from tiermem.policy import Tier
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import Topology
from tiermem.run.shards import Shards
from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.swap.disk.run_folder import RunOwner, this_process
from tiermem.swap.memory.accelerator import set_generators

# ---- saved weights as a mapping ------------------------------------------------------------------


class SavedWeights(Mapping[str, torch.Tensor]):
    """Weights and buffers by name, aliases of tied tensors included, as in a `state_dict`. Valid
    while the source is open.

    Each access reads the whole tensor and keeps nothing: a dict of all items takes memory for all
    of them.
    """

    def __init__(self, source: Source) -> None:
        self._weights = {name: each for each in weights_of(source) for name in each.names}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


# ---- ordinary parameters: stepped by the optimizer beside the sharded model, whole on every rank ---------------------
#
# They are saved as `optimizer.<name>`, or their number if the optimizer knows no name. If ranks had
# different values and the number of ranks is equal, each rank takes its own value; else all ranks
# take rank 0's.

_ROLE = "ordinary"


def check_ordinary(source: Source, optimizer: NativeOptimizer) -> None:
    """Raises ValueError, with both lists, when the saved ordinary parameters are not those that the
    optimizer steps."""
    own = ordinary_of(optimizer)
    saved = {each.name: each for each in source.manifest.parameters if each.role == _ROLE}
    missing = [n for n in own if n not in saved]
    extra = [n for n in saved if n not in own]
    if missing or extra:
        raise ValueError(
            f"{source.file} does not fit what the optimizer steps beside the sharded model. "
            "Missing in the checkpoint: "
            f"{shown_names(missing)}. Not in the optimizer: {shown_names(extra)}"
        )
    wrong = [name for name, param in own.items() if tuple(param.shape) != saved[name].shape]
    if wrong:
        raise ValueError(
            f"{source.file}: {shown_names(wrong)} has another shape than in the optimizer"
        )


def _entry(source: Source, name: str, param: nn.Parameter, topology: Topology) -> dict[str, Any]:
    """Fills a parameter's weight and returns its states, as a state dict holds them."""
    states = source.states(name)

    def values(state: str) -> torch.Tensor:
        own = state_of_rank(source, name, state, topology)
        return source.fp32(name, own, 0, param.numel()).view(param.shape)

    if param.numel():
        call_with_grad(False, param.copy_, values(WEIGHT))
    num_steps = source.parameters[name].num_steps
    kept = source.moments(name)
    found: dict[str, Any] = {STEP: torch.tensor(float(num_steps))} | {
        each: values(each) for each in kept
    }
    if MASTER in states:
        found[MASTER] = values(MASTER)
    return found if num_steps or kept else {}


# ---- parameter groups and random generators ------------------------------------------------------

_ALIKE = ({"Adam", "AdamW"},)  # classes that can load each other's states
_NO_STATES = (
    "load_optimizer_states=False takes the weights alone; so does from_pretrained of a Trainer's "
    "checkpoint, without resume_from_checkpoint"
)

Group = dict[str, Any]


def saved_groups(
    source: Source, optimizer: NativeOptimizer, fitted: Fitted
) -> list[tuple[Group, Group]]:
    """(group of the optimizer, saved values) of every group that was saved.

    A group takes the values (lr, betas, ...) of the saved group that held its parameters, under any
    index. Changes nothing.

    Raises ValueError when another class of optimizer was saved, the parameters of a group were in
    several saved groups, or groups that differ now were one; ManifestError for JSON that no
    optimizer saves.
    """
    saved = source.manifest.optimizer
    _check_class(saved, optimizer, source)
    groups, number_of = _saved_values(saved, source)
    names = {id(shard.param): name for shard, name in fitted.params.items()}
    names |= {id(param): name for name, param in ordinary_of(optimizer).items()}
    found: list[tuple[Group, Group]] = []
    holder: dict[int, int] = {}  # of each saved group, the first group that steps parameters of it
    for number, group in enumerate(optimizer.param_groups):
        own = [names.get(id(param)) for param in group["params"]]
        numbers = {number_of[name] for name in own if name in number_of}
        if len(numbers) > 1:
            raise ValueError(
                f"{source.file}: group {number} of the optimizer steps parameters of the saved "
                f"groups {shown_names([str(each) for each in sorted(numbers)])}, which may differ "
                f"in lr and the rest: make the groups as they were; {_NO_STATES}"
            )
        for each in numbers:
            first = holder.setdefault(each, number)
            other = optimizer.param_groups[first]
            differing = [key for key in groups[each] if group.get(key) != other.get(key)]
            if differing:
                raise ValueError(
                    f"{source.file}: groups {first} and {number} of the optimizer differ in "
                    f"{', '.join(differing)}, and their parameters were in one saved group, "
                    f"{each}: make the groups as they were; {_NO_STATES}"
                )
            found.append((group, groups[each]))
    return found


def check_moments(source: Source, shards: Shards, fitted: Fitted) -> None:
    """Raises ValueError that names states which this optimizer keeps and the checkpoint lacks for
    stepped parameters."""
    tiles = tiles_of(shards)
    lacking = []
    for shard, name in fitted.params.items():
        live, _ = shards.find(shard.param)
        if (
            tiles is None
            or not live.unit.is_trainable
            or not source.parameters[name].num_steps
            or not shard.numel
        ):
            continue
        lacking += [
            f"{state} of {name}" for state in tiles.names(shard) if source.kind(name, state) is None
        ]
    if lacking:
        raise ValueError(
            f"{source.file} has no "
            f"{shown_names(lacking[:4])}{' and others' if len(lacking) > 4 else ''}: it was saved "
            "by an optimizer with other settings (amsgrad, momentum). Set them as they were; "
            f"{_NO_STATES}"
        )


def put_groups(optimizer: NativeOptimizer, groups: list[tuple[Group, Group]]) -> None:
    """Sets groups to their saved values. Raises ValueError for values that the optimizer
    refuses."""
    how = {name: value for name, (value, _) in IMPLEMENTATION.items() if name in optimizer.defaults}
    for group, values in groups:
        optimizer.check_group({**group, **values, **how})
        # options of the implementation (foreach, fused) stay this optimizer's
        group.update({**values, **how})


def put_rng(saved: Json, where: str, device: torch.device) -> None:
    """Restores this rank's random generators. Raises ManifestError for JSON that no generator
    saves."""
    if saved is None:
        return
    state = decode(saved, where)
    try:
        set_generators(device, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ManifestError(
            f"{where}: is no state of this machine's generators: {error}"
        ) from error


def _check_class(saved: Json, optimizer: NativeOptimizer, source: Source) -> None:
    name = saved.get("name") if isinstance(saved, dict) else None
    own = type(optimizer).__name__
    if name != own and not any({name, own} <= alike for alike in _ALIKE):
        raise ValueError(
            f"{source.file} was saved by {name}, and this optimizer is {own}: make it {name} again; "
            f"{_NO_STATES}"
        )


def _saved_values(saved: Json, source: Source) -> tuple[list[Group], dict[str, int]]:
    """The values of each saved group, and each parameter's index of its group. Raises
    ManifestError."""
    try:
        groups = [decode(each["values"], f"{source.file}: optimizer") for each in saved["groups"]]
        number_of = {
            str(name): number
            for number, each in enumerate(saved["groups"])
            for name in each["params"]
        }
        if not all(isinstance(values, dict) for values in groups):
            raise TypeError("values are no object")
    except (KeyError, TypeError) as error:
        raise ManifestError(
            f"{source.file}: optimizer: is not what an optimizer saves: {error!r}"
        ) from error
    return groups, number_of


# ---- loading -------------------------------------------------------------------------------------

logger = logging.getLogger("tiermem")

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""The counters that an engine saves."""

CustomLoad = Callable[..., Any]
"""Called with src=(a mapping of the saved weights) and dst=(the model); it puts the weights in
place itself."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of `load`: the opened step, and the values saved beside its states."""

    path: Path
    """The tag's folder, else the manifest."""
    tag: str | None
    """None: a durable step without a tag."""
    step: int
    """Optimizer steps."""
    world: int
    """Ranks that saved it."""
    client_state: Any
    """As it was given to `save`."""
    engine: Mapping[str, Any]
    """The engine's counters."""
    has_states: bool
    """Whether moments, step counts and masters were restored."""


class Asked(NamedTuple):
    """The arguments of `load` that select saved values."""

    is_strict: bool
    takes_states: bool
    module_only: bool
    custom_load: CustomLoad | None
    beside: tuple[tuple[str, Any], ...]  # (field of the manifest or part, object with that state)


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
    """Opens a step that `save` saved, from any number of ranks, tiers, tile sizes, paths and
    precisions.

    Args:
        optimizer: the optimizer that steps the model; None: only weights and buffers are loaded.
        load_dir: the save_dir of `save`, the folder of a tag or a run, or a manifest file.
        tag: default: the tag that `latest` names. newest: if there is no `latest`, the newest tag.
        load_module_strict: names that only the model or only the checkpoint has raise ValueError;
            if False they are logged.
        load_optimizer_states: False: moments and step counts stay as they are.
        load_module_only: only weights and buffers are loaded. Masters are made from the weights, as
            they are if the policy's `loads_masters` is False.
        custom_load_fn: loads the weights itself: called with src= (a mapping; each access reads a
            saved weight) and dst= (the model). Masters are then made from the model's weights.
            Called on every rank, so it may call collectives.
        allow_older: loads the next older step when this one is not whole, or damaged.
        scheduler, loss_scaler, loader: objects whose saved state is restored with
            `load_state_dict`.

    Returns None, with a warning, when no tag is given and nothing is saved there. On as many ranks
    as saved, random generators and the loader's position are restored too, and training continues
    bit by bit.

    Collective; blocks, also until a copy of this model that is being written is whole. Every byte
    is verified. Raises NothingSaved (a FileNotFoundError) that lists the tags, when the tag does
    not exist, or when there are tags, no `latest`, and `newest` is False; ValueError for an empty
    load_dir; ManifestError and ValueError for a mismatch, before anything is changed; DamagedState
    and OSError when reading fails; RuntimeError after `close`. After a failed read the model holds
    a mixture of values, and steps refuse to run until another load succeeds.
    """
    beside = (("scheduler", scheduler), ("loss_scaler", loss_scaler), ("data", loader))
    asked = Asked(
        load_module_strict, load_optimizer_states, load_module_only, custom_load_fn, beside
    )
    where = named_folder("load_dir", load_dir)
    shards.store.check_usable()
    try:
        wait(shards)  # before the newest step, or a copy's tag, is looked for
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("the last save did not end well: %s", error)
    candidates = _candidates(shards, where, None if tag is None else str(tag), newest)
    own = frozenset(exchange(shards.topology, this_process()))
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
    """The steps of the place, the requested one first; equal in number on every rank.
    Collective."""

    def look() -> list[Found]:
        try:
            return find(where, tag)
        except NothingSaved as error:
            if tag is not None or (where.is_dir() and read_latest(where) is not None):
                raise
            tags = tags_of(where) if where.is_dir() else []
            if newest and tags:
                return find(where, tags[0])
            if tags:
                raise NothingSaved(
                    error.errno,
                    f"{error.strerror}; or give newest=True, for the first",
                    str(where),
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
    own: frozenset[RunOwner],
    asked: Asked,
) -> Loaded:
    topology = shards.topology
    source = everywhere(topology, f"opening {found}", lambda: Source.of(found, older, own))
    with source:
        manifest = source.manifest
        agree(
            topology,
            {"saved step": f"run {manifest.run_id}, commit {manifest.commit}"},
            "load_checkpoint",
        )
        wants = _wants(source, shards, optimizer, asked)
        _check_compute(source, shards, wants)
        _check_streamed(source, shards, wants)
        fitted = fit(shards, source, asked.is_strict)
        shards.enable_training()
        groups: list[tuple[Group, Group]] = []
        if wants.states and manifest.optimizer is not None:
            assert optimizer is not None
            groups = saved_groups(source, optimizer, fitted)
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            stepped = [
                shard.param
                for shard, name in fitted.params.items()
                if source.parameters[name].num_steps and id(shard.param) in held
            ]
            enable_training_of(shards, stepped, str(source.file))
            check_moments(source, shards, fitted)
            check_ordinary(source, optimizer)
        loaded = _loaded(source, wants)
        rest = [] if asked.module_only else _rest(source, shards, wants, asked)
        if asked.custom_load is not None:
            asked.custom_load(src=SavedWeights(source), dst=shards.model)
        restore(shards, source, fitted, wants)
        if wants.states:
            assert optimizer is not None
            put_groups(optimizer, groups)
            if manifest.optimizer is not None:
                entries = {
                    param: _entry(source, name, param, topology)
                    for name, param in ordinary_of(optimizer).items()
                }
                optimizer.restore(entries, str(source.file))
            optimizer.show_state()
        if not asked.module_only:
            _put_rest(source, shards, rest)
            shards.keep_overlap(source.manifest.overlap)
        if wants.states and wants.weights:
            saver_of(shards).commits.went_on_from(source.file, manifest)
        return loaded


def _wants(
    source: Source, shards: Shards, optimizer: NativeOptimizer | None, asked: Asked
) -> Wants:
    has_states = asked.takes_states and not asked.module_only and optimizer is not None
    if has_states and source.manifest.optimizer is None:
        logger.warning(
            "%s holds no optimizer: its weights are opened, and states begin anew", source.file
        )
    has_masters = (
        asked.custom_load is None and not asked.module_only and shards.policy.loads_masters
    )
    return Wants(weights=asked.custom_load is None, states=has_states, masters=has_masters)


def _check_compute(source: Source, shards: Shards, wants: Wants) -> None:
    """Warns when training goes on with another compute dtype than the save's; raises ValueError
    when a measurement chose it."""
    saved = source.manifest.compute_dtype
    now = shards.compute
    if not wants.states or saved == now.dtype:
        return
    said = (
        f"{source.file} was trained with compute_dtype {saved!r}, and this start computes with "
        f"{now.dtype!r} ({now.why})"
    )
    if now.is_measured:
        raise ValueError(
            f'{said}: set "tiermem": {{"compute_dtype": "{saved}"}} to go on with the same bits'
        )
    logger.warning("%s: losses differ from those of the run that saved it", said)


def _check_streamed(source: Source, shards: Shards, wants: Wants) -> None:
    """Warns when the save's tiles were stepped on an accelerator in another part than now, and the
    policy leaves that open."""
    saved = source.manifest.streamed_part
    now = shards.plan.streamed_part
    if (
        wants.states
        and saved != now
        and shards.policy.streamed_ratio is None
        and shards.plan.states is not Tier.DEVICE
    ):
        logger.warning(
            '%s was trained with streamed_ratio %s, and this start with %s: set "tiermem": '
            '{"streamed_ratio": %s} to step the same tiles on the accelerator',
            source.file, saved, now, saved,
        )  # fmt: skip


def _rest(source: Source, shards: Shards, wants: Wants, asked: Asked) -> list[tuple[Any, Any, str]]:
    """(owner, saved state, its place for errors) of the scheduler, the loss scaler and the loader.
    Changes nothing.

    Raises ManifestError for a state of another type than the owner saves.
    """
    part = source.part_of(shards.topology)
    found = []
    for name, owner in asked.beside:
        saved = getattr(part if name == "data" else source.manifest, name, None)
        if (
            saved is not None
            and hasattr(owner, "load_state_dict")
            and (wants.states or name != "loss_scaler")
        ):
            state = decode(saved, f"{source.file}: {name}")
            own = owner.state_dict()
            if isinstance(own, Mapping) and not isinstance(state, Mapping):
                raise ManifestError(
                    f"{source.file}: {name}: is a {type(state).__name__}; what "
                    f"{type(owner).__name__} saves is due, which has {', '.join(map(str, own))}"
                )
            found.append((owner, state, f"{source.file}: {name}"))
    return found


def _put_rest(source: Source, shards: Shards, rest: list[tuple[Any, Any, str]]) -> None:
    """Restores generators and the states that `_rest` found. Raises ManifestError for a state that
    its owner refuses."""
    topology = shards.topology
    part = source.part_of(topology)
    if part is not None:
        put_rng(part.rng, f"{source.file}: rng of rank {topology.rank}", shards.device)
    elif topology.rank == 0:
        logger.info(
            "%s was saved on %d ranks and is opened on %d: generators and the position in the "
            "data are not put back",
            source.file,
            source.manifest.world,
            topology.world,
        )
    for owner, state, where in rest:
        try:
            owner.load_state_dict(state)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ManifestError(
                f"{where}: is not what {type(owner).__name__} saves: {error!r}"
            ) from error


def _loaded(source: Source, wants: Wants) -> Loaded:
    manifest = source.manifest
    engine = decode(manifest.engine, f"{source.file}: engine")
    engine = {} if engine is None else engine
    if not isinstance(engine, dict):
        raise ManifestError(
            f"{source.file}: engine: is a {type(engine).__name__}; an object with its counters is "
            "due"
        )
    for name in COUNTERS:
        if type(engine.get(name, 0)) is not int or engine.get(name, 0) < 0:
            raise ManifestError(
                f"{source.file}: engine: {name} is {engine[name]!r:.80}; a count of 0 or more is "
                "due"
            )
    return Loaded(
        path=source.place,
        tag=manifest.tag,
        step=manifest.step,
        world=manifest.world,
        client_state=decode(manifest.client_state, f"{source.file}: client_state"),
        engine=engine,
        has_states=wants.states and manifest.optimizer is not None,
    )
