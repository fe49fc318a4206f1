"""Filling: saved states put in the formats that they are kept in here, piece by piece.

    kept here as they were saved          bytes are read into place
    kept in another format                through fp32: exact where the new format has room for it, rounded where it has not

    here                 weight                                    master
    weight is master     the saved weight, if of one dtype;        -
                         else the saved master
    fp32 master          the same                                  the saved master, else the weight
    split master         upper half of the saved master            lower half of it

Which conversions were made is remembered, to be told once. Where saved masters are not wanted, masters are made from the
weights; where states are not, moments stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT
from tiermem.checkpoint.opening.source import CHUNK_NUMEL, Elements, Source
from tiermem.optim.layout import is_positive
from tiermem.optim.tile import Tile
from tiermem.optim.tile_fill import Places
from tiermem.swap.native import Workers, narrow_part
from tiermem.swap.parts import Moment, Quantised
from tiermem.zero.unit import Shard


class Wants(NamedTuple):
    """What of a saved step is put in place."""

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
        self._has_weights = wants.weights
        self._has_masters = wants.masters
        self._has_states = wants.states
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
            if self._has_weights:
                self._put_weight(name, piece)
            elif piece.master is not None:
                self._master_from_weight(piece)
            for moment, place in piece.moments.items() if self._has_states else ():
                self._put_moment(name, moment, piece, place)

    def weight(self, name: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements of a weight in a dtype: as saved, if it was that of the weight, else made of the saved master."""
        if self._source.kind(name, WEIGHT) == kinds.name_of(dtype):
            return self._source.read(name, WEIGHT, start, numel)
        values = self._source.fp32(name, MASTER, start, numel)
        self._note(WEIGHT, self._source.kind(name, WEIGHT), kinds.name_of(dtype))
        return values.to(dtype)

    def _states_of(self, name: str, tile: Tile) -> list[str]:
        """The saved states that are read for a parameter in a tile."""
        found, saved = [], self._source.kind(name, WEIGHT)
        master = tile.layout.master
        is_from_master = (
            master is not None and master.kind == "split" and self._source.kind(name, MASTER) != kinds.SPLIT
        )
        if self._has_weights and not (is_from_master and self._has_masters):
            found.append(WEIGHT if saved == kinds.name_of(tile.dtype) else MASTER)
        if self._has_weights and self._has_masters and master is not None:
            found.append(MASTER)
        if self._has_states:
            moments = (each for each in self._source.states(name) if each not in (WEIGHT, MASTER))
            found += [each for each in moments if not each.endswith(kinds.SCALES)]
        return found

    def _put_weight(self, name: str, places: Places) -> None:
        """The weight and its master."""
        master, is_split = places.master, places.master is not None and places.master.dtype == torch.int16
        if is_split and self._has_masters and self._source.kind(name, MASTER) != kinds.SPLIT:
            assert master is not None
            values = self._source.fp32(name, MASTER, places.first, places.numel)
            narrow_part(self._workers, values, master, places.weight)
            self._note(MASTER, self._source.kind(name, MASTER), kinds.SPLIT)
            return
        self._put_own_weight(name, places)
        if master is None:
            return
        if not self._has_masters:
            self._master_from_weight(places)
        elif is_split or self._source.kind(name, MASTER) == "fp32":
            self._source.read_into(name, MASTER, places.first, master)
        else:
            master.copy_(self._source.fp32(name, MASTER, places.first, places.numel))
            self._note(MASTER, self._source.kind(name, MASTER), "fp32")

    def _put_own_weight(self, name: str, places: Places) -> None:
        if self._source.kind(name, WEIGHT) == kinds.name_of(places.weight.dtype):
            self._source.read_into(name, WEIGHT, places.first, places.weight)
        else:
            places.weight.copy_(self.weight(name, places.first, places.numel, places.weight.dtype))

    def _master_from_weight(self, places: Places) -> None:
        assert places.master is not None
        if places.master.dtype == torch.int16:
            places.master.zero_()  # bits that a bf16 number does not have
        else:
            places.master.copy_(places.weight)

    def _put_moment(self, name: str, moment: str, places: Places, place: Moment) -> None:
        saved = self._source.kind(name, moment)
        if saved is None:
            _zero(place)
            return
        kept = kinds.CODES if isinstance(place, Quantised) else kinds.name_of(place.dtype)
        if isinstance(place, torch.Tensor) and saved == kept:
            self._source.read_into(name, moment, places.first, place)
        else:
            values = self._source.fp32(name, moment, places.first, places.numel)
            narrow_part(self._workers, values, place, is_positive=is_positive(moment))
        if saved != kept:
            self._note(moment, saved, kept)
        is_new = self._source.parameters[name].num_steps == 0  # of what was stepped nobody asks
        if is_new and places.shard not in self.has_moments and _any(place):
            self.has_moments.add(places.shard)

    def _note(self, state: str, saved: str | None, kept: str) -> None:
        self.conversions.add((state, saved or "the weight", kept))


def shown(conversions: Collection[tuple[str, str, str]]) -> str:
    """Conversions in a line."""
    return ", ".join(f"{state} {saved} -> {kept}" for state, saved, kept in sorted(conversions))


def _zero(place: Moment) -> None:
    for each in place if isinstance(place, Quantised) else (place,):
        each.zero_()


def _any(place: Moment) -> bool:
    return bool((place.codes if isinstance(place, Quantised) else place).any())
