"""What of a tile's states has a checksum: every part of every parameter in it (zero/state_pieces.py), codes and scales apart.

    [ master: a, b, c | moment 0: a, b, c | moment 1 codes: a, b, c | its scales: a, b, c ]

Every part that has a place has checksums, whether the rule of its parameter keeps that moment or not: it is written and read
with the rest, and a rule may be known later.
"""

from __future__ import annotations

from collections.abc import Iterator

from tiermem.optim.layout import MASTER, StatePart
from tiermem.optim.tile import Segment, Tile
from tiermem.optim.tile_moves import MomentsOf
from tiermem.swap.parts import Q8_BLOCK, num_scales
from tiermem.zero.state_pieces import SCALES, Run


def tile_runs(tile: Tile, shard_rank: int, moments_of: MomentsOf) -> Iterator[Run]:
    """What a tile's entry holds, in the order in which it lies there."""
    for part in tile.layout.parts:
        ranges = [tile.layout.ranges(part, tile.numel, segment.start, segment.numel) for segment in tile.segments]
        for kind in range(2 if part.kind == "8bit" else 1):  # numbers or codes, then scales
            for segment, places in zip(tile.segments, ranges, strict=True):
                state = _StateName(tile, part, segment, moments_of, is_scales=kind == 1)
                first = tile.first_element(segment, shard_rank)
                if kind == 1:
                    per_rank = num_scales(segment.shard.shard_numel)
                    inside = num_scales(first - segment.shard.shard_numel * shard_rank)
                    first_byte, grain = shard_rank * per_rank + inside, (1, Q8_BLOCK)
                else:
                    itemsize = 1 if part.kind == "8bit" else part.num_bytes(1)
                    first_byte, grain = itemsize * first, (itemsize, 1)
                yield Run(segment.shard, state, places[kind].offset, first_byte, places[kind].num_bytes, *grain)


class _StateName:
    """The name of a part's state, as torch names it: asked for when it is needed."""

    def __init__(self, tile: Tile, part: StatePart, segment: Segment, moments_of: MomentsOf, is_scales: bool) -> None:
        self._number = part.place - (tile.layout.master is not None)
        self._shard = segment.shard
        self._moments_of = moments_of
        self._suffix = SCALES if is_scales else ""

    def __call__(self) -> str | None:
        if self._number < 0:
            return MASTER
        names = self._moments_of(self._shard)
        return names[self._number] + self._suffix if self._number < len(names) else None
