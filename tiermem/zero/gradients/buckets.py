"""Buckets: how the gradients of a unit are cut and packed for reductions over ranks. Arithmetic and copies, no calls.

    parameter a, 5 elements, 2 ranks    share 3    a0 a1 a2 | a3 a4 .
    parameter b, 4 elements             share 2    b0 b1    | b2 b3

    bucket                              a0 a1 a2 b0 b1 | a3 a4 . b2 b3       one column for each rank, one after the other

Column r holds every parameter's share for rank r, so that one reduce-scatter leaves on every rank its own parts. A share is
ceil(numel / shards) elements; what the last ones lack is zeros. A bucket holds at most `limit_numel` elements, all columns
together: a parameter that does not fit goes on in the next bucket. With one shard there is one column, for an all-reduce.

Which elements of two ranks are added up does not depend on where a bucket is cut, and neither does the order in which
reduce.py adds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tiermem.zero.unit import Shard, Unit


class Piece(NamedTuple):
    """Elements [start, stop) of each rank's share of a parameter, and where they begin in a bucket's column."""

    shard: Shard
    start: int
    stop: int
    place: int

    @property
    def is_whole(self) -> bool:
        """Whether the parameter is in this bucket alone."""
        return self.start == 0 and self.stop == self.shard.shard_numel

    @property
    def is_last(self) -> bool:
        """Whether the parameter ends here."""
        return self.stop == self.shard.shard_numel


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What one reduction takes."""

    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    column_numel: int
    num_columns: int

    @property
    def number(self) -> int:
        """Of the parameter that it begins with: the same on every rank, and another in buckets of other units."""
        return self.pieces[0].shard.index

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns: what a rank hands to the reduction."""
        return self.column_numel * self.num_columns * self.dtype.itemsize


def cut(unit: Unit, num_shards: int, limit_numel: int, is_packed: bool = True) -> list[Bucket]:
    """Cuts a unit's gradients into buckets, in the order of its parameters and of what they are added up in.

    Args:
        limit_numel: most elements of a bucket, all columns together; a column holds one element at least.
        is_packed: False: every parameter has buckets of its own.
    """
    room = max(1, limit_numel // num_shards)
    buckets: list[Bucket] = []
    for dtype, alike in _by_dtype(unit.shards).items():
        for group in [alike] if is_packed else [[shard] for shard in alike]:
            buckets += _fill(dtype or unit.dtype, group, num_shards, room)
    return buckets


def largest_bucket(unit: Unit, num_shards: int, limit_numel: int, dtype: torch.dtype) -> int:
    """Bytes of the largest bucket that a unit can be cut into, whatever its parameters are added up in up to `dtype`."""
    shares = sum(shard.shard_numel for shard in unit.shards)
    return min(shares, max(1, limit_numel // num_shards)) * num_shards * dtype.itemsize


def put_in(bucket: Bucket, piece: Piece, grad: torch.Tensor | None, flat: torch.Tensor) -> None:
    """Copies what a piece holds of a gradient into every column of a bucket's flat memory; zeros for None."""
    columns = flat.view(bucket.num_columns, bucket.column_numel)
    columns = columns[:, piece.place : piece.place + piece.stop - piece.start]
    if grad is None:
        columns.zero_()
        return
    share, source = piece.shard.shard_numel, grad.reshape(-1)
    num_full, rest = divmod(piece.shard.numel, share)
    columns[:num_full].copy_(source[: num_full * share].view(num_full, share)[:, piece.start : piece.stop])
    if num_full < bucket.num_columns:
        rest = min(max(0, rest - piece.start), piece.stop - piece.start)
        begin = num_full * share + piece.start
        columns[num_full, :rest].copy_(source[begin : begin + rest])
        columns[num_full, rest:].zero_()
        columns[num_full + 1 :].zero_()


def _by_dtype(shards: Sequence[Shard]) -> dict[torch.dtype | None, list[Shard]]:
    kinds: dict[torch.dtype | None, list[Shard]] = {}
    for shard in shards:
        if shard.shard_numel:
            kinds.setdefault(shard.reduce_dtype, []).append(shard)
    return kinds


def _fill(dtype: torch.dtype, shards: Sequence[Shard], num_shards: int, room: int) -> Iterator[Bucket]:
    pieces: list[Piece] = []
    place = 0
    for shard in shards:
        start = 0
        while start < shard.shard_numel:
            stop = min(shard.shard_numel, start + room - place)
            pieces.append(Piece(shard, start, stop, place))
            place += stop - start
            start = stop
            if place == room:
                yield Bucket(dtype, tuple(pieces), place, num_shards)
                pieces, place = [], 0
    if pieces:
        yield Bucket(dtype, tuple(pieces), place, num_shards)
