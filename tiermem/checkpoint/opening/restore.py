"""Restore: saved states matched to a model's parameters, converted, and put where the model's states rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT, Parameter
from tiermem.checkpoint.opening.source import CHUNK_NUMEL, Elements, Source
from tiermem.checkpoint.opening.verified import LEAST_AREA_BYTES
from tiermem.checkpoint.saving.capture import buffers, names_of
from tiermem.checkpoint.together import everywhere
from tiermem.optim.tile import Tile
from tiermem.optim.tile_step import Places
from tiermem.optim.tiles import tiles_of
from tiermem.swap.arena import PAGE_BYTES, Slot
from tiermem.swap.native import Workers, narrow_part
from tiermem.swap.parts import Moment, Quantised
from tiermem.zero.shards import Shards
from tiermem.zero.state_layout import is_positive
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Shard
from tiermem.zero.unit_state import LiveUnit
from tiermem.zero.values import initial_master

# ---- Fitting: which saved tensor belongs to which parameter and buffer of a model ------------------------------------
#
# A parameter is known by any of its names, so that weights tied here and saved apart, or the other way round, find each
# other. Everything is told at once, before anything is changed: what is missing, what is left over, what has another
# shape.

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
    aliases = names_of(shards.model)
    own = [(shard, [shard.name, *aliases.get(id(shard.param), ())]) for _, shard in shards.parameters()]
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
        lists = f"Missing in the checkpoint: {shown_names(missing)}. Not in the model: {shown_names(extra)}"
        if is_strict:
            raise ValueError(
                f"{source.file} does not fit the model. {lists}. load_module_strict=False loads what fits and leaves the "
                "rest as it is"
            )
        logger.warning("%s fits the model in part. %s", source.file, lists)
    return Fitted(params, placed, len(params) == len(own))


def shown_names(names: Sequence[str]) -> str:
    """A list of names for a person."""
    return ", ".join(names) or "none"


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


# ---- Filling: saved states put in the formats that they are kept in here, piece by piece -----------------------------
#
#     kept here as they were saved          bytes are read into place
#     kept in another format                through fp32: exact where the new format has room for it, rounded where it has not
#
#     here                 weight                                    master
#     weight is master     the saved weight, if of one dtype;        -
#                          else the saved master
#     fp32 master          the same                                  the saved master, else the weight
#     split master         upper half of the saved master            lower half of it
#
# Which conversions were made is remembered, to be told once. Where saved masters are not wanted, masters are made from
# the weights; where states are not, moments stay as they are.


class Wants(NamedTuple):
    """Which of a saved step's values are put in place."""

    weights: bool = True
    states: bool = True  # moments and counts of steps
    masters: bool = True  # saved masters; else they are made from the weights


class Filling:
    """Fills the places of a model from a source.

    Args:
        source: the opened step.
        names: the saved name of each parameter that is filled; others are left alone.
        workers: for what is converted.
        wants: what is taken from the source.
    """

    def __init__(self, source: Source, names: Mapping[Shard, str], workers: Workers, wants: Wants) -> None:
        self._source = source
        self._names = names
        self._workers = workers
        self._wants = wants
        self.conversions: set[tuple[str, str, str]] = set()  # (state, saved as, kept as)
        self.has_moments: set[Shard] = set()  # parameters never stepped with a moment that is not all zero

    def reads(self, tile: Tile, shard_rank: int) -> Iterator[Elements]:
        """What `fill` reads for a tile, in order."""
        for segment in tile.segments:
            name = self._names.get(segment.shard)
            if name is None:
                continue
            states, first = self._states_of(name, tile), tile.first_element(segment, shard_rank)
            for start in range(0, segment.numel, CHUNK_NUMEL):
                numel = min(CHUNK_NUMEL, segment.numel - start)
                yield from (Elements(name, state, first + start, numel) for state in states)

    def fill(self, places: Places) -> None:
        """Fills elements of one parameter. Blocks; raises OSError."""
        name = self._names.get(places.shard)
        if name is None:
            return
        for piece in places.cut(CHUNK_NUMEL):
            if self._wants.weights:
                self._put_weight(name, piece)
            elif piece.master is not None:
                self._master_from_weight(piece)
            for moment, place in piece.moments.items() if self._wants.states else ():
                self._put_moment(name, moment, piece, place)

    def weight(self, name: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of a weight in a dtype: as saved, if it was that of the weight, else made of the saved master."""
        self._note(WEIGHT, self._source.kind(name, WEIGHT), kinds.name_of(dtype))
        return self._source.weight(name, start, numel, dtype)

    def _states_of(self, name: str, tile: Tile) -> list[str]:
        """The saved states that are read for a parameter in a tile."""
        found, saved = [], self._source.kind(name, WEIGHT)
        master = tile.layout.master
        if self._wants.weights and not self._is_weight_of_master(name, master is not None and master.kind == "split"):
            found.append(WEIGHT if saved == kinds.name_of(tile.dtype) else MASTER)
        if self._wants.weights and self._wants.masters and master is not None:
            found.append(MASTER)
        if self._wants.states:
            moments = (each for each in self._source.states(name) if each not in (WEIGHT, MASTER))
            found += [each for each in moments if not each.endswith(kinds.SCALES)]
        return found

    def _is_weight_of_master(self, name: str, is_split: bool) -> bool:
        """Whether the weight is the upper half of a split master that is made of another saved one."""
        return is_split and self._wants.masters and self._source.kind(name, MASTER) != kinds.SPLIT

    def _put_weight(self, name: str, places: Places) -> None:
        """The weight and its master."""
        master, weight = places.master, places.weight
        is_of_master = self._is_weight_of_master(name, master is not None and master.dtype == torch.int16)
        if not is_of_master:
            if self._source.kind(name, WEIGHT) == kinds.name_of(weight.dtype):
                self._source.read_into(name, WEIGHT, places.first, weight)
            else:
                weight.copy_(self.weight(name, places.first, places.numel, weight.dtype))
        if master is None:
            return
        if self._wants.masters:
            self._put(name, MASTER, places, master, weight if is_of_master else None)
        else:
            self._master_from_weight(places)

    def _master_from_weight(self, places: Places) -> None:
        assert places.master is not None
        if places.master.dtype == torch.int16:
            places.master.zero_()  # bits that a bf16 number does not have
        else:
            places.master.copy_(places.weight)

    def _put_moment(self, name: str, moment: str, places: Places, place: Moment) -> None:
        stored = place if isinstance(place, Quantised) else (place,)
        if self._source.kind(name, moment) is None:
            for each in stored:
                each.zero_()
            return
        self._put(name, moment, places, place)
        is_new = self._source.parameters[name].num_steps == 0  # `has_moments` is for these alone
        if is_new and places.shard not in self.has_moments and stored[0].any():
            self.has_moments.add(places.shard)

    def _put(self, name: str, state: str, places: Places, place: Moment, weight: torch.Tensor | None = None) -> None:
        """A state in the format of its place. weight: becomes the upper half of a split master."""
        saved, kept = self._source.kind(name, state), kinds.CODES
        if isinstance(place, torch.Tensor):
            kept = kinds.SPLIT if place.dtype == torch.int16 else kinds.name_of(place.dtype)
        if isinstance(place, torch.Tensor) and saved == kept:
            self._source.read_into(name, state, places.first, place)
        else:
            values = self._source.fp32(name, state, places.first, places.numel)
            narrow_part(self._workers, values, place, weight, is_positive=is_positive(state))
        self._note(state, saved, kept)

    def _note(self, state: str, saved: str | None, kept: str) -> None:
        if saved != kept:
            self.conversions.add((state, saved or "the weight", kept))


def shown_conversions(conversions: Collection[tuple[str, str, str]]) -> str:
    """Conversions in a line."""
    return ", ".join(f"{state} {saved} -> {kept}" for state, saved, kept in sorted(conversions))


# ---- Restore: a saved step put where a model's states rest, on any number of ranks, tiers, tiles and precisions ------
#
#     fit     names and shapes, both lists told before anything is changed      restore.py
#     put     this rank's part of every weight and state                        restore.py      every rank by itself
#     agree   whether that has gone well everywhere                             exchange
#     show    counts of steps, buffers, and what is held present                                all ranks together
#
# A rank reads its own elements and the blocks around them, tile by tile: no parameter is ever whole in memory. The next
# tiles are read while one is filled and others are written, all within the buffers that the optimizer's tiles have.
# When a rank fails, all raise; then the model is a mixture of old and new, which no step touches until another restore
# has gone well.

_LENT_OF = 4  # buffers of tiles, one is lent to what is read ahead


def restore(shards: Shards, source: Source, fitted: Fitted, wants: Wants) -> None:
    """Puts weights, buffers and states in place. Collective; blocks.

    Raises DamagedState and OSError where reading fails, RuntimeError on the other ranks.
    """
    filling = Filling(source, fitted.params, shards.workers, wants)
    with shards.changing_all(overwrites=True):
        shards.residency.empty()
        everywhere(shards.topology, "restoring its part", lambda: _put(shards, source, fitted, wants, filling))
        _show(shards, source, fitted, wants, filling)
    if filling.conversions and shards.topology.rank == 0:
        logger.info("restored in other formats than were saved: %s", shown_conversions(filling.conversions))


def _put(shards: Shards, source: Source, fitted: Fitted, wants: Wants, filling: Filling) -> None:
    """This rank's part."""
    shards.drop_head_start()
    untiled = [
        (live, shard)
        for live, shard in shards.parameters()
        if wants.weights and shard in fitted.params and not (shards.states is not None and live.unit.is_trainable)
    ]
    with _reading_ahead(shards, source):
        source.follow(_in_order(shards, source, fitted, filling, untiled))
        tiles = tiles_of(shards)
        if tiles is not None:
            keeps = not (wants.weights and wants.states) or not fitted.is_complete
            tiles.fill(filling.fill, keeps)
        for live, shard in untiled:
            _put_weight(shards, live, shard, fitted.params[shard], filling)
        for tensor, name in fitted.buffers if wants.weights else ():
            _put_buffer(tensor, name, source, shards.topology)


@contextlib.contextmanager
def _reading_ahead(shards: Shards, source: Source) -> Iterator[None]:
    """Lends the source a part of the buffers that tiles pass through, where they are large enough: nothing more is taken."""
    pool, slots = shards.tile_pool, list[Slot]()
    try:
        for _ in range(pool.count // _LENT_OF if pool is not None and pool.slot_bytes >= LEAST_AREA_BYTES else 0):
            assert pool is not None
            slot = pool.take()
            assert slot is not None  # nothing passes through the buffers now
            slots.append(slot)
        with source.lent([slot.tensor[: slot.num_bytes // PAGE_BYTES * PAGE_BYTES] for slot in slots]):
            yield
    finally:
        for slot in slots:
            assert pool is not None
            pool.give_back(slot)


def _in_order(
    shards: Shards, source: Source, fitted: Fitted, filling: Filling, untiled: Sequence[tuple[LiveUnit, Shard]]
) -> Iterator[Elements]:
    """What is read, in order: tiles, then the weights of what has none."""
    rank = shards.topology.shard_rank
    tiles = tiles_of(shards)
    for tile in tiles.tiles if tiles is not None else ():
        yield from filling.reads(tile, rank)
    for live, shard in untiled:
        name, first, numel = fitted.params[shard], shard.shard_numel * rank, shards.values.num_mine(shard)
        state = WEIGHT if source.kind(name, WEIGHT) == kinds.name_of(live.unit.dtype) else MASTER
        for start in range(0, numel, CHUNK_NUMEL):
            yield Elements(name, state, first + start, min(CHUNK_NUMEL, numel - start))


def _put_weight(shards: Shards, live: LiveUnit, shard: Shard, name: str, filling: Filling) -> None:
    """The weight of a parameter that has no tiles, in pieces; with the fp32 value that its master will start from."""
    first, numel = shard.shard_numel * shards.topology.shard_rank, shards.values.num_mine(shard)
    if initial_master(live.unit) in shards.store:
        shards.values.put_initial_master(live.unit, shard, filling.weight(name, first, numel, torch.float32))
    for start in range(0, numel, CHUNK_NUMEL):
        values = filling.weight(name, first + start, min(CHUNK_NUMEL, numel - start), live.unit.dtype)
        shards.values.put_elements(live, shard.shard_offset + start, values)


def _put_buffer(tensor: torch.Tensor, name: str, source: Source, topology: Topology) -> None:
    """A buffer: this rank's own where ranks had different ones and are as many as they were, else rank 0's."""
    own = f"{WEIGHT}.rank{topology.rank}"
    state = own if own in source.states(name) and source.manifest.world == topology.world else WEIGHT
    if tensor.numel():
        saved = source.read(name, state, 0, tensor.numel()).view(tensor.shape)
        with torch.no_grad():
            tensor.copy_(saved)


def _show(shards: Shards, source: Source, fitted: Fitted, wants: Wants, filling: Filling) -> None:
    """Counts, and what ranks hold present of one another's parts. Collective."""
    for live in shards.units:
        shards.refresh(live.unit.shards[0].param)
        for shard in live.unit.shards if live.unit.is_trainable else ():
            name = fitted.params.get(shard)
            if name is None:
                continue
            if wants.states:
                shard.num_steps = source.parameters[name].num_steps
                shard.has_moments = shard.num_steps == 0 and shard in filling.has_moments
            keeps_master = shards.policy.precision.master_of(live.unit.dtype) is not None
            is_wider = (
                source.kind(name, MASTER) is not None or source.kind(name, WEIGHT) == "fp32"
            )  # than the weight here
            shard.has_master = wants.masters and shard.num_steps == 0 and keeps_master and is_wider
