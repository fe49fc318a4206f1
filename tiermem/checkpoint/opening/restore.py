"""Restore: matches saved states with a model's parameters, converts them, and puts them where the
model's states rest.

    fit       names and shapes are compared, before anything is changed
    put       each rank fills its part of every weight and state
    agree     ranks exchange whether that succeeded
    show      step counts, buffers, and gathered parameters are updated       all ranks together

The saved step may come from any number of ranks, tiers, tile sizes and precisions. A rank reads its
own elements and the 1 MiB blocks around them, tile by tile, and gathers no parameter. The next
tiles are read while one tile is filled and others are written, all within the buffers of the
optimizer's tiles. Only a buffer of the model is read at once.

When a rank fails, all ranks raise. The model then holds a mixture of old and new values, and every
step refuses to run until another restore succeeds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT, Parameter
from tiermem.checkpoint.opening.source import CHUNK_NUMEL, Elements, Source, state_of_rank
from tiermem.checkpoint.opening.verified import LEAST_AREA_BYTES
from tiermem.checkpoint.saving.capture import buffers, modules_with_extra
from tiermem.checkpoint.together import everywhere
from tiermem.optim.tile import Tile
from tiermem.optim.tile_work import ParamViews
from tiermem.optim.tiles import tiles_of
from tiermem.run.shards import Shards
from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.swap.base.native import Workers, narrow_part
from tiermem.swap.base.parts import Moment, Quantised
from tiermem.swap.memory.arena import PAGE_BYTES, Slot
from tiermem.units.state_layout import is_positive
from tiermem.units.unit import Shard
from tiermem.weights.unit_state import LiveUnit
from tiermem.weights.values import initial_master
from tiermem.weights_io import names_of

# ---- matching saved tensors with parameters and buffers ------------------------------------------

logger = logging.getLogger("tiermem")


class Fitted(NamedTuple):
    """What was found: the saved name of each parameter and of each buffer, and extra states."""

    params: Mapping[Shard, str]
    buffers: Sequence[tuple[torch.Tensor, str]]
    extra: Sequence[tuple[nn.Module, Any]]  # modules, and their saved extra state
    is_complete: bool  # every parameter of the model was found


def fit(shards: Shards, source: Source, is_strict: bool) -> Fitted:
    """Finds every tensor of a model in a source.

    A parameter matches under any of its names, so weights may be tied here and saved apart, or the
    reverse. Nothing is changed.

    is_strict: names that only the model or only the source has raise ValueError, with both lists;
        else they are logged and the rest is matched. Frozen parameters that the save left out are
        not missing. Raises ValueError for different shapes.
    """
    aliases = names_of(shards.model)
    own = [
        (shard, [shard.name, *aliases.get(id(shard.param), ())]) for _, shard in shards.parameters()
    ]
    held = buffers(shards.model)
    params = {
        shard: found.name for shard, names in own if (found := _found(source, names)) is not None
    }
    placed = [
        (tensor, found.name)
        for names, tensor in held
        if (found := _found(source, names)) is not None
    ]
    used = {*params.values(), *(name for _, name in placed)}
    # tied in the model, saved apart
    used.update(name for shard, names in own if shard in params for name in names)
    excluded = set(source.manifest.excluded)
    missing = [
        names[0] for shard, names in own if shard not in params and not excluded.intersection(names)
    ]
    missing += [names[0] for names, _ in held if _found(source, names) is None]
    extra = [
        each.name
        for each in source.manifest.parameters
        if each.name not in used and each.role != "ordinary"
    ]
    modules = modules_with_extra(shards.model)
    saved = source.extra_states(source.part_of(shards.topology))
    extra += [name for name in saved if name not in modules]
    if lacking := [name for name in modules if name not in saved]:
        logger.warning("%s has no %s", source.file, shown_names(lacking))
    _check_shapes(source, [(shard.shape, name) for shard, name in params.items()])
    _check_shapes(source, [(tensor.shape, name) for tensor, name in placed])
    if missing or extra:
        lists = (
            f"Missing in the checkpoint: {shown_names(missing)}. Not in the model: "
            f"{shown_names(extra)}"
        )
        if is_strict:
            raise ValueError(
                f"{source.file} does not fit the model. {lists}. load_module_strict=False loads "
                "what fits and leaves the rest as it is"
            )
        logger.warning("%s fits the model in part. %s", source.file, lists)
    states = [(module, saved[name]) for name, module in modules.items() if name in saved]
    return Fitted(params, placed, states, len(params) == len(own))


def shown_names(names: Sequence[str]) -> str:
    """A list of names as text."""
    return ", ".join(names) or "none"


def _found(source: Source, names: Sequence[str]) -> Parameter | None:
    """The tensor saved under one of these names. Its role is ignored: state dicts do not mark
    buffers."""
    for name in names:
        found = source.find(name)
        if found is not None and found.role != "ordinary":
            return found
    return None


def _check_shapes(source: Source, found: Sequence[tuple[torch.Size, str]]) -> None:
    wrong = [
        (
            f"{name} is {tuple(source.parameters[name].shape)} in the checkpoint and "
            f"{tuple(shape)} in the model"
        )
        for shape, name in found
        if tuple(source.parameters[name].shape) != tuple(shape)
    ]
    if wrong:
        raise ValueError(f"{source.file} does not fit the model: {'; '.join(wrong)}")


# ---- converting saved states to the formats of this model ----------------------------------------
#
#     same format as saved                  bytes are read into place
#     another format                        converted through fp32: exact where the new format can hold it, else rounded
#
#     format here          weight                                    master
#     weight is master     the saved weight, if its dtype is equal;  -
#                          else the saved master
#     fp32 master          the same                                  the saved master, else the weight
#     split master         upper half of the saved master            lower half of the saved master


class Wants(NamedTuple):
    """Which saved values are restored. Values that are not restored stay as they are."""

    weights: bool = True
    states: bool = True  # moments and step counts
    masters: bool = True  # saved masters; if False, masters are made from the weights


class Filling:
    """Fills a model from a source.

    Args:
        source: the opened step.
        names: the saved name of each parameter to fill; other parameters are left alone.
        workers: threads for conversions.
        wants: the values to restore.
    """

    def __init__(
        self, source: Source, names: Mapping[Shard, str], workers: Workers, wants: Wants
    ) -> None:
        self._source = source
        self._names = names
        self._workers = workers
        self._wants = wants
        # an earlier save without an optimizer, or import without groups, does not say whose its
        # moments are
        self.opens_states = wants.states and source.manifest.optimizer is not None
        # (state, saved as, kept as), for one log line
        self.conversions: set[tuple[str, str, str]] = set()
        # parameters without steps that have a moment other than zero
        self.has_moments: set[Shard] = set()

    def reads(self, tile: Tile, shard_rank: int) -> Iterator[Elements]:
        """The reads of `fill` for a tile, in order."""
        for part in tile.ranges:
            name = self._names.get(part.shard)
            if name is None:
                continue
            states = self._states_of(name, tile)
            for piece in part.cut(CHUNK_NUMEL):
                first = piece.first_element(shard_rank)
                yield from (Elements(name, state, first, piece.numel) for state in states)

    def fill(self, views: ParamViews) -> None:
        """Fills elements of one parameter. Blocks; raises OSError."""
        name = self._names.get(views.shard)
        if name is None:
            return
        for piece in views.cut(CHUNK_NUMEL):
            if self._wants.weights:
                self._put_weight(name, piece)
            elif piece.master is not None:
                self._master_from_weight(piece)
            for moment, target in piece.moments.items() if self._wants.states else ():
                self._put_moment(name, moment, piece, target)

    def weight(self, name: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of a weight in a dtype: as saved if the weight has that dtype, else from the
        saved master."""
        self._note(WEIGHT, self._source.kind(name, WEIGHT), kinds.name_of(dtype))
        return self._source.weight(name, start, numel, dtype)

    def _states_of(self, name: str, tile: Tile) -> list[str]:
        """The saved states that `fill` reads for a parameter in a tile."""
        found = []
        saved = self._source.kind(name, WEIGHT)
        master = tile.layout.master
        if self._wants.weights and not self._is_weight_of_master(
            name, master is not None and master.kind == "split"
        ):
            found.append(WEIGHT if saved == kinds.name_of(tile.dtype) else MASTER)
        if self._wants.weights and self._wants.masters and master is not None:
            found.append(MASTER)
        if self.opens_states:
            found += self._source.moments(name)
        return found

    def _is_weight_of_master(self, name: str, is_split: bool) -> bool:
        """Whether the weight is the upper half of a split master that is converted from another
        kind of master."""
        return is_split and self._wants.masters and self._source.kind(name, MASTER) != kinds.SPLIT

    def _put_weight(self, name: str, views: ParamViews) -> None:
        """The weight and its master."""
        master = views.master
        weight = views.weight
        is_of_master = self._is_weight_of_master(
            name, master is not None and master.dtype == torch.int16
        )
        if not is_of_master:
            self._note(WEIGHT, self._source.kind(name, WEIGHT), kinds.name_of(weight.dtype))
            self._source.weight_into(name, views.first, weight)
        if master is None:
            return
        if self._wants.masters:
            self._put(name, MASTER, views, master, weight if is_of_master else None)
        else:
            self._master_from_weight(views)

    def _master_from_weight(self, views: ParamViews) -> None:
        assert views.master is not None
        if views.master.dtype == torch.int16:
            views.master.zero_()  # the bits of an fp32 number that bf16 does not have
        else:
            views.master.copy_(views.weight)

    def _put_moment(self, name: str, moment: str, views: ParamViews, target: Moment) -> None:
        stored = target if isinstance(target, Quantised) else (target,)
        if not self.opens_states or self._source.kind(name, moment) is None:
            for each in stored:
                each.zero_()
            return
        self._put(name, moment, views, target)
        # `has_moments` is only for these parameters
        is_new = self._source.parameters[name].num_steps == 0
        if is_new and views.shard not in self.has_moments and stored[0].any():
            self.has_moments.add(views.shard)

    def _put(
        self,
        name: str,
        state: str,
        views: ParamViews,
        target: Moment,
        weight: torch.Tensor | None = None,
    ) -> None:
        """Puts a state into its target, converted if needed. weight: receives the upper half of a
        split master."""
        saved = self._source.kind(name, state)
        kept = kinds.CODES
        if isinstance(target, torch.Tensor):
            kept = kinds.SPLIT if target.dtype == torch.int16 else kinds.name_of(target.dtype)
        if isinstance(target, torch.Tensor) and saved == kept:
            self._source.read_into(name, state, views.first, target)
        else:
            values = self._source.fp32(name, state, views.first, views.numel)
            narrow_part(self._workers, values, target, weight, is_positive=is_positive(state))
        self._note(state, saved, kept)

    def _note(self, state: str, saved: str | None, kept: str) -> None:
        if saved != kept:
            self.conversions.add((state, saved or "the weight", kept))


# ---- putting a step in place ---------------------------------------------------------------------

_LENT_OF = 4  # of each 4 tile buffers, 1 is lent to the source for prefetching


def restore(shards: Shards, source: Source, fitted: Fitted, wants: Wants) -> None:
    """Puts weights, buffers and states in place. Collective; blocks.

    A rank where reading fails raises DamagedState or OSError. Other ranks raise DamageElsewhere (an
    OSError) or RuntimeError.
    """
    filling = Filling(source, fitted.params, shards.workers, wants)
    shards.steps.abandon()
    shards.check_may_change()
    shards.end_gathers(shards.units)
    with shards.steps.changing_all():
        shards.prefetcher.empty()
        everywhere(
            shards.topology,
            "restoring its part",
            lambda: _put(shards, source, fitted, wants, filling),
        )
        _show(shards, source, fitted, wants, filling)
    if filling.conversions and shards.topology.rank == 0:
        shown = ", ".join(
            f"{state} {saved} -> {kept}" for state, saved, kept in sorted(filling.conversions)
        )
        logger.info("restored in other formats than were saved: %s", shown)


def _put(shards: Shards, source: Source, fitted: Fitted, wants: Wants, filling: Filling) -> None:
    """Fills this rank's part, and the buffers."""
    shards.drop_head_start()
    untiled = [
        (live, shard)
        for live, shard in shards.parameters()
        if wants.weights
        and shard in fitted.params
        and not (shards.states is not None and live.unit.is_trainable)
    ]
    with _reading_ahead(shards, source):
        source.follow(_in_order(shards, source, fitted, filling, untiled))
        tiles = tiles_of(shards)
        if tiles is not None:
            keeps = not (wants.weights and wants.states) or not fitted.is_complete
            tiles.fill(filling.fill, keeps)
        for live, shard in untiled:
            _put_weight(shards, live, shard, fitted.params[shard], source, filling)
        for tensor, name in fitted.buffers if wants.weights else ():
            if tensor.numel():
                state = state_of_rank(source, name, WEIGHT, shards.topology)
                saved = source.read(name, state, 0, tensor.numel()).view(tensor.shape)
                call_with_grad(False, tensor.copy_, saved)
        for module, state in fitted.extra if wants.weights else ():
            module.set_extra_state(state)


@contextlib.contextmanager
def _reading_ahead(shards: Shards, source: Source) -> Iterator[None]:
    """Lends some of the tile buffers to the source for prefetching, if they are large enough.
    Allocates no memory."""
    pool = shards.tile_pool
    lent = list[Slot]()
    with contextlib.ExitStack() as returning:
        if pool is not None and pool.slot_bytes >= LEAST_AREA_BYTES:
            give_back = pool.give_back
            returning.callback(lambda: [give_back(slot) for slot in lent])
            lent.extend(itertools.islice(iter(pool.take, None), pool.count // _LENT_OF))
        with source.lent(
            [slot.tensor[: slot.num_bytes // PAGE_BYTES * PAGE_BYTES] for slot in lent]
        ):
            yield


def _in_order(
    shards: Shards,
    source: Source,
    fitted: Fitted,
    filling: Filling,
    untiled: Sequence[tuple[LiveUnit, Shard]],
) -> Iterator[Elements]:
    """All reads in order: tiles, then the weights of parameters without tiles."""
    rank = shards.topology.shard_rank
    tiles = tiles_of(shards)
    for tile in tiles.tiles if tiles is not None else ():
        yield from filling.reads(tile, rank)
    for live, shard in untiled:
        name = fitted.params[shard]
        first = shard.shard_numel * rank
        numel = shards.values.num_mine(shard)
        state = WEIGHT if source.kind(name, WEIGHT) == kinds.name_of(live.unit.dtype) else MASTER
        for start in range(0, numel, CHUNK_NUMEL):
            yield Elements(name, state, first + start, min(CHUNK_NUMEL, numel - start))


def _put_weight(
    shards: Shards, live: LiveUnit, shard: Shard, name: str, source: Source, filling: Filling
) -> None:
    """Fills the weight of a parameter without tiles, in pieces, and the fp32 values that its master
    will start from.

    A weight that rests in blocks gets the saved blocks themselves, where they are of the same form.
    """
    first = shard.shard_numel * shards.topology.shard_rank
    numel = shards.values.num_mine(shard)
    keeps_initial = initial_master(live.unit) in shards.store
    for start in range(0, numel, CHUNK_NUMEL):
        due = (name, first + start, min(CHUNK_NUMEL, numel - start))
        offset = shard.shard_offset + start
        if live.unit.blocks is not None:
            packed = source.blocks(*due, live.unit.blocks)
            if packed is not None:
                shards.values.put_blocks(live, slice(offset, offset + due[2]), packed)
                continue
        if keeps_initial:
            shards.values.put_initial_master(
                live.unit, shard, filling.weight(*due, torch.float32), start
            )
        shards.values.put_elements(live, offset, filling.weight(*due, live.unit.dtype))


def _show(shards: Shards, source: Source, fitted: Fitted, wants: Wants, filling: Filling) -> None:
    """Updates step counts, and the gathered copies of other ranks' shards. Collective."""
    for live in shards.units:
        shards.refresh(live.unit.shards[0].param)
        for shard in live.unit.shards if live.unit.is_trainable else ():
            name = fitted.params.get(shard)
            if name is None:
                continue
            num_steps = shard.num_steps
            has_moments = shard.has_moments
            if wants.states:
                num_steps = source.parameters[name].num_steps if filling.opens_states else 0
                has_moments = shard in filling.has_moments
            keeps_master = shards.policy.precision.master_of(live.unit.dtype) is not None
            # "Wider" than the weight in this model.
            is_wider = source.kind(name, MASTER) is not None or source.kind(name, WEIGHT) == "fp32"
            shard.set_steps(num_steps, has_moments, wants.masters and keeps_master and is_wider)
