"""Tile: a range of one unit's shard layout whose states are read, stepped and written as one.

A tile may cut through a parameter; a Segment is the part of one parameter that a tile holds. The states of a tile lie side by
side in one entry of the store, so that a tile is one read and one write (zero/state_layout.py draws the entry). In a buffer:

    [ states | parameters | gradients ]    the last two where they rest on NVME; each begins at a multiple of 4096 bytes
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
from tiermem.zero.state_layout import MASTER, SCALES, Run, StateLayout
from tiermem.zero.unit import UNIT_ALIGN, Shard, Unit
from tiermem.zero.unit_state import LiveUnit

MomentsOf = Callable[[Shard], Sequence[str]]
"""The names of a parameter's moments, as torch names them, in the order of swap.parts.MOMENTS."""


class Segment(NamedTuple):
    """The elements of one parameter inside a tile; `start` counts from the tile's first element."""

    shard: Shard
    start: int
    numel: int


@dataclasses.dataclass(eq=False)
class Tile:
    """A range of one unit's shard layout and the home of its states."""

    live: LiveUnit
    start: int  # elements, a multiple of 4096, as numel is
    numel: int
    layout: StateLayout
    room_bytes: int  # of a buffer, for its states and what they are made from
    entry: str
    home: Tier
    segments: Sequence[Segment]
    is_started: bool = False  # its states have been written once

    @property
    def dtype(self) -> torch.dtype:
        """Of its parameters."""
        return self.live.unit.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of its gradients."""
        return self.layout.precision.grad_dtype(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of its states at home."""
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
        """Its place in the unit's shard layout."""
        return slice(self.start, self.start + self.numel)

    def first_element(self, segment: Segment, shard_rank: int) -> int:
        """Where a segment begins in its whole parameter."""
        shard = segment.shard
        return shard.shard_numel * shard_rank + self.start + segment.start - shard.shard_offset


def stepped_ranges(
    unit: Unit, step: int, shard_rank: int, whole: Sequence[Shard] = ()
) -> Iterator[tuple[int, int, list[Segment]]]:
    """(start, elements, what of which parameter) of a unit's tiles: those that hold more than padding."""
    for start, numel in _ranges(unit.shard_numel, step, whole):
        segments = [s for s in (_overlap(part, start, numel, shard_rank) for part in unit.shards) if s.numel > 0]
        if segments:
            yield start, numel, segments


def rests_on_host(sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Of tiles of these bytes, which stay on HOST: so many bytes of them at most, spread evenly."""
    due, total, stays = 0, sum(sizes), []
    for size in sizes:
        due += size * resident_bytes
        stays.append(due >= size * total)
        due -= size * total * stays[-1]
    return stays


def _ranges(total: int, step: int, whole: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """(start, number) of at most `step` elements, cut at multiples of 4096 and through none of the whole parameters."""
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
    """The whole parameter that a tile's end would cut."""
    return next((s for s in whole if s.shard_offset < end < s.shard_offset + s.shard_numel), None)


def _overlap(part: Shard, start: int, numel: int, shard_rank: int) -> Segment:
    """The elements of a parameter inside [start, start + numel) of its unit's shard layout; none of its padding."""
    before = part.shard_numel * shard_rank
    valid = min(part.shard_numel, max(0, part.numel - before))
    first, last = max(start, part.shard_offset), min(start + numel, part.shard_offset + valid)
    return Segment(part, first - start, last - first)


# ---- Checksums of a tile: one for each part of each parameter in it, codes and scales apart --------------------------
#
#     [ master: a, b, c | moment 0: a, b, c | moment 1 codes: a, b, c | its scales: a, b, c ]
#
# Every part has checksums, also where the rule of its parameter does not keep that moment: the part is written and read
# with the rest, and the rule may be known later.


def tile_runs(tile: Tile, shard_rank: int, moments_of: MomentsOf) -> Iterator[Run]:
    """What a tile's entry holds, in the order in which it lies there."""
    for part in tile.layout.parts:
        ranges = [tile.layout.ranges(part, tile.numel, segment.start, segment.numel) for segment in tile.segments]
        for kind, suffix in enumerate(("", SCALES) if part.kind == "8bit" else ("",)):  # numbers or codes, then scales
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
    """The name of a part's state, as torch names it; number: of a moment, -1 of the master. None: no rule keeps it."""
    if number < 0:
        return MASTER
    names = moments_of(shard)
    return names[number] + suffix if number < len(names) else None
