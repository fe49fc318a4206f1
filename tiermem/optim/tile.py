"""Tile: a range of one unit's shard layout whose states are read, stepped and written as one.

A tile may cut a parameter. A Segment is the part of one parameter inside a tile. The states of a tile lie in one entry of the
store, so a tile is one read and one write (zero/state_layout.py draws the entry). A buffer holds:

    [ states | parameters | gradients ]    the last two only if they rest on NVMe; each begins at a multiple of 4096 bytes
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from tiermem.policy import Tier
from tiermem.swap.parts import Q8_BLOCK, num_scales
from tiermem.swap.ranges import round_up
from tiermem.zero.state_layout import MASTER, SCALES, Run, StateLayout, own_numel
from tiermem.zero.unit import UNIT_ALIGN, Shard, Unit
from tiermem.zero.unit_state import LiveUnit

MomentsOf = Callable[[Shard], Sequence[str]]
"""Returns the names of a parameter's moments, as in torch, in the order of swap.parts.MOMENTS."""


class Segment(NamedTuple):
    """The elements of one parameter inside a tile; `start` is counted from the tile's first element."""

    shard: Shard
    start: int
    numel: int


@dataclasses.dataclass(eq=False)
class Tile:
    """A range of one unit's shard layout, and the tier on which its states rest."""

    live: LiveUnit
    start: int  # in elements; start and numel are multiples of 4096
    numel: int
    layout: StateLayout
    room_bytes: int  # in a buffer, for its states and the values that they are made from
    entry: str
    home: Tier
    segments: Sequence[Segment]
    is_started: bool = False  # whether its states have been written

    def mark_started(self) -> None:
        """Notes that its states have been written."""
        self.is_started = True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters."""
        return self.live.unit.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of its gradients."""
        return self.layout.precision.grad_dtype(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of its states where they rest."""
        return self.layout.total_bytes(self.numel)

    @property
    def slice_bytes(self) -> int:
        """Bytes of its slice of the parameters."""
        return self.numel * self.dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of its slice of the gradients."""
        return self.numel * self.grad_dtype.itemsize

    @property
    def elements(self) -> slice:
        """Its range of elements in the unit's shard layout."""
        return slice(self.start, self.start + self.numel)

    def first_element(self, segment: Segment, shard_rank: int) -> int:
        """The index in the whole parameter of a segment's first element."""
        shard = segment.shard
        return shard.shard_numel * shard_rank + self.start + segment.start - shard.shard_offset


def stepped_ranges(
    unit: Unit, step: int, shard_rank: int, whole: Sequence[Shard] = ()
) -> Iterator[tuple[int, int, list[Segment]]]:
    """(start, elements, segments) of each tile of a unit. Tiles that hold only padding are left out."""
    for start, numel in _ranges(unit.shard_numel, step, whole):
        segments = [s for s in (_overlap(part, start, numel, shard_rank) for part in unit.shards) if s.numel > 0]
        if segments:
            yield start, numel, segments


def rests_on_host(sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Which tiles of these sizes stay in host memory: evenly spread, at most `resident_bytes` together."""
    due, total, stays = 0, sum(sizes), []
    for size in sizes:
        due += size * resident_bytes
        stays.append(due >= size * total)
        due -= size * total * stays[-1]
    return stays


def _ranges(total: int, step: int, whole: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """(start, number) of ranges of at most `step` elements, cut at multiples of 4096 and never inside a whole parameter."""
    start = 0
    while start < total:
        end = min(start + step, total)
        while end > start and (inside := _cut_by(end, whole)) is not None:
            end = inside.shard_offset // UNIT_ALIGN * UNIT_ALIGN
        if end <= start:
            due = start + step
            while (inside := _cut_by(due, whole)) is not None:
                due = round_up(inside.shard_offset + inside.shard_numel, UNIT_ALIGN)
            held = [s for s in whole if s.shard_offset < due and s.shard_offset + s.shard_numel > start]
            largest = max(held, key=lambda shard: shard.shard_numel)
            raise ValueError(
                f"{largest.name} has {largest.shard_numel} elements and is stepped as a whole matrix, which no tile may cut; "
                f"with what shares its pages that is {due - start} elements, and a tile's buffer holds {step}. Shard with "
                f"OffloadPolicy(tile_numel={due - start}), or step this parameter elementwise (use_muon=False)"
            )
        yield start, end - start
        start = end


def _cut_by(end: int, whole: Sequence[Shard]) -> Shard | None:
    """The whole parameter that a tile ending at `end` would cut; None if there is none."""
    return next((s for s in whole if s.shard_offset < end < s.shard_offset + s.shard_numel), None)


def _overlap(part: Shard, start: int, numel: int, shard_rank: int) -> Segment:
    """The elements of a parameter inside [start, start + numel) of its unit's shard layout, without padding."""
    first = max(start, part.shard_offset)
    last = min(start + numel, part.shard_offset + own_numel(part, shard_rank))
    return Segment(part, first - start, last - first)


# ---- checksums -------------------------------------------------------------------------------------------------------


def tile_runs(tile: Tile, shard_rank: int, moments_of: MomentsOf) -> Iterator[Run]:
    """The byte ranges of a tile's entry that get a checksum each, in the order of the entry.

        [ master: a, b, c | moment 0: a, b, c | moment 1 codes: a, b, c | its scales: a, b, c ]    of segments a, b, c

    A moment that a parameter's rule does not keep has checksums too: its bytes are written and read with the others, and the
    rule may become known later.
    """
    for part in tile.layout.parts:
        ranges = [tile.layout.ranges(part, tile.numel, segment.start, segment.numel) for segment in tile.segments]
        for kind, suffix in enumerate(("", SCALES) if part.kind == "8bit" else ("",)):  # values or codes, then scales
            for segment, places in zip(tile.segments, ranges, strict=True):
                number = part.place - (tile.layout.master is not None)
                state = functools.partial(_state_name, moments_of, segment.shard, number, suffix)
                first = tile.first_element(segment, shard_rank)
                if kind == 1:
                    per_rank = num_scales(segment.shard.shard_numel)
                    inside = num_scales(first - segment.shard.shard_numel * shard_rank)
                    first_byte, grain = shard_rank * per_rank + inside, (1, Q8_BLOCK)
                else:
                    itemsize = 1 if part.kind == "8bit" else part.num_bytes(1)
                    first_byte, grain = itemsize * first, (itemsize, 1)
                yield Run(segment.shard, state, places[kind].offset, first_byte, places[kind].num_bytes, *grain)


def _state_name(moments_of: MomentsOf, shard: Shard, number: int, suffix: str) -> str | None:
    """The name of a part's state, as in torch. number: of a moment, or -1 for the master. None: no rule keeps it."""
    if number < 0:
        return MASTER
    names = moments_of(shard)
    return names[number] + suffix if number < len(names) else None
