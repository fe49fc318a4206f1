"""StatePieces: what a checksum is of. An entry on NVMe holds parts of several parameters and states; each part is cut at
every MiB of its state's bytes, counted from the first element of the WHOLE parameter:

    exp_avg of a parameter     |   1 MiB   |   1 MiB   |   1 MiB   | rest |       blocks: a manifest's checksums
    ranks                      [       rank 0       |       rank 1        ]
    tiles                      [ tile | tile | tile ][ tile | tile | tile ]
    pieces                     [  |   |    |  |     ][   |  |    | |      ]

A piece lies in one block, one tile and one rank, so that it is written and read whole; CRC-32C combines, so the pieces of a
block give its one checksum, whatever tiles and ranks there are (checkpoint/saving/blocks.py). Pieces are cut with arrays, a
run of bytes at a time. Padding between parameters has no checksum, nor has what rests in memory, nor gradients.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tiermem.policy import OffloadPolicy
from tiermem.swap.extents import round_up
from tiermem.swap.numbers import Numbers
from tiermem.swap.pieces import Pieces
from tiermem.zero.ranks.quantised import BLOCK, byte_ranges
from tiermem.zero.unit import Shard, Unit

BLOCK_BYTES = 1 << 20
WEIGHT, SCALES = "weight", ".scales"


class Run(NamedTuple):
    """Bytes of an entry that lie side by side in one state of one parameter as well."""

    shard: Shard
    state: Callable[[], str | None]  # asked when it is needed: a rule may be known later; None: of no rule
    offset: int  # in the entry
    first_byte: int  # in the state of the whole parameter
    num_bytes: int
    grain_bytes: int  # bytes that hold ...
    grain_numel: int = 1  # ... so many elements


class StatePiece(NamedTuple):
    """Elements of one state of one parameter; its str() is what errors say."""

    param: str
    state: str
    start: int
    stop: int
    num_steps: int  # optimizer steps of the parameter, the one under way included

    def __str__(self) -> str:
        return f"{self.state} of {self.param}, elements {self.start} to {self.stop}, at step {self.num_steps}"


def keeps_sums(policy: OffloadPolicy) -> bool:
    """Whether what rests on NVMe has checksums: something is to be verified, or made durable."""
    return policy.verify != "resume" or policy.durability != "none"


class StatePieces:
    """The pieces of one entry.

    runs: in the order in which they lie in the entry.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = [run for run in runs if run.num_bytes]
        cut = [_cut(run) for run in self.runs]
        self._first_piece = np.cumsum([0, *map(len, cut)]).tolist()
        self.first_bytes: Numbers = np.concatenate([*cut, np.zeros(0, np.int64)])
        ends = [np.append(each[1:], run.first_byte + run.num_bytes) for each, run in zip(cut, self.runs, strict=True)]
        self.num_bytes: Numbers = np.concatenate([*ends, np.zeros(0, np.int64)]) - self.first_bytes
        shifts = [run.offset - run.first_byte for run in self.runs]
        starts = self.first_bytes + np.repeat(np.array(shifts, np.int64), [len(each) for each in cut])
        self.pieces = Pieces(starts, starts + self.num_bytes, self.name)

    def name(self, number: int) -> StatePiece:
        """What a piece is."""
        run = self.runs[bisect.bisect_right(self._first_piece, number) - 1]
        first = int(self.first_bytes[number])
        start, stop = _element(run, first), _element(run, first + int(self.num_bytes[number]))
        return StatePiece(run.shard.name, run.state() or "an unused state", start, stop, run.shard.num_steps)


def weight_runs(unit: Unit, shard_rank: int, cuts: Sequence[int] = ()) -> Iterator[Run]:
    """What a unit's entry on NVMe holds of this rank's weights.

    cuts: elements of its shard layout, ascending, at which tiles write it in parts.
    """
    if unit.is_packed:
        yield from _packed_runs(unit, shard_rank)
        return
    itemsize, edges = unit.dtype.itemsize, [*cuts, unit.shard_numel]
    for shard in unit.shards:
        start, stop = shard.shard_offset, shard.shard_offset + own_numel(shard, shard_rank)
        while start < stop:
            end = min(stop, edges[bisect.bisect_right(edges, start)])
            first = shard_rank * shard.shard_numel + start - shard.shard_offset
            yield Run(shard, _weight, start * itemsize, first * itemsize, (end - start) * itemsize, itemsize)
            start = end


def own_numel(shard: Shard, shard_rank: int) -> int:
    """Elements of a rank's part of a parameter, without its padding."""
    return min(shard.shard_numel, max(0, shard.numel - shard.shard_numel * shard_rank))


def _packed_runs(unit: Unit, shard_rank: int) -> Iterator[Run]:
    """Codes of all parameters, then their scales; a scale of 4 bytes for each block of a rank's part."""
    places = [byte_ranges(unit.packed_numel, s.shard_offset, s.shard_offset + s.shard_numel) for s in unit.shards]
    for shard, (codes, _) in zip(unit.shards, places, strict=True):
        first = shard_rank * shard.shard_numel
        yield Run(shard, _weight, codes.start, first, own_numel(shard, shard_rank), 1)
    for shard, (_, scales) in zip(unit.shards, places, strict=True):
        first, own = shard_rank * -(-shard.shard_numel // BLOCK), -(-own_numel(shard, shard_rank) // BLOCK)
        yield Run(shard, _weight_scales, scales.start, first * 4, own * 4, 4, BLOCK)


def _weight() -> str:
    return WEIGHT


def _weight_scales() -> str:
    return WEIGHT + SCALES


def _cut(run: Run) -> Numbers:
    """Where its pieces begin, in the state of the whole parameter."""
    inner = np.arange(round_up(run.first_byte + 1, BLOCK_BYTES), run.first_byte + run.num_bytes, BLOCK_BYTES)
    return np.concatenate(([run.first_byte], inner)).astype(np.int64)


def _element(run: Run, byte: int) -> int:
    """The element at a byte of a state; blocks of elements that share a scale are counted on each rank from its first."""
    return min(byte // run.grain_bytes * run.grain_numel, run.shard.numel)
