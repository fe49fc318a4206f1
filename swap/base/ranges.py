"""Ranges: byte ranges, sets of free ranges, columns of numbers, and things chosen by their
sizes."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
"""A column of a table: byte offsets, lengths, element starts or row numbers. A model has tens of
thousands of ranges, so one numpy operation handles all of them."""

N = TypeVar("N", int, Numbers)

ALIGNMENT = 4096
"""Bytes; offsets, lengths and addresses of transfers to and from NVME are multiples of it."""


def spread(first: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Repeats each row number i counts[i] times; returns these numbers and, beside them, first[i],
    first[i] + 1, ..."""
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return row, first[row] + np.arange(len(row)) - before[row]


class ByteRange(NamedTuple):
    """A range of bytes: of memory, from an address, or of a file or an entry, from an offset."""

    offset: int
    num_bytes: int


class Column(NamedTuple):
    """A state, the weights or the gradients of a tile in its bytes, one element behind the
    other."""

    bytes: ByteRange
    strip_bytes: int  # of each strip: a range of the tile's elements


class FileRange(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    offset: int
    num_bytes: int


class FreeRanges:
    """The free ranges of the arena's memory or of a segment on disk, sorted and merged. At first no
    range is free.

        [ held ][ free ][ held ][      free      )      first fit: the lowest free range that is long enough is cut

    Not thread-safe: the owner's lock guards it.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (start, stop)

    def add(self, start: int, num_bytes: int) -> None:
        """Makes a range free. Raises RuntimeError when part of it is free already."""
        stop = start + num_bytes
        at = bisect.bisect(self._ranges, (start, stop))
        before = self._ranges[max(at - 1, 0) : at]
        behind = self._ranges[at : at + 1]
        if (before and before[0][1] > start) or (behind and behind[0][0] < stop):
            raise RuntimeError(
                f"bytes {start} to {stop} are free already: they were given back twice"
            )
        first = last = at
        if before and before[0][1] == start:
            first = at - 1
            start = before[0][0]
        if behind and behind[0][0] == stop:
            last = at + 1
            stop = behind[0][1]
        self._ranges[first:last] = [(start, stop)]

    def take(self, num_bytes: int) -> int | None:
        """Cuts the lowest range that is long enough and returns its start; None when there is
        none."""
        for i, (start, stop) in enumerate(self._ranges):
            if stop - start >= num_bytes:
                rest = start + num_bytes
                self._ranges[i : i + 1] = [(rest, stop)] if rest < stop else []
                return start
        return None

    @property
    def longest(self) -> int:
        """Bytes of the longest free range."""
        return max((stop - start for start, stop in self._ranges), default=0)

    def tail(self, end: int) -> int:
        """Bytes of the free range that ends at `end`."""
        return end - self._ranges[-1][0] if self._ranges and self._ranges[-1][1] == end else 0

    def drop_tail(self, start: int) -> None:
        """Removes all free bytes from `start` on. `start` must lie in the last free range."""
        first, _ = self._ranges.pop()
        assert first <= start
        if first < start:
            self._ranges.append((first, start))

    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of every free range, in order."""
        return list(self._ranges)


def round_up(value: N, unit: int) -> N:
    """The least multiple of `unit` that is not less than `value`, a number or a column of them."""
    return -(-value // unit) * unit


def within(sizes: Sequence[int], num_bytes: int) -> list[bool]:
    """Chooses things of these sizes, evenly spread, that take at most `num_bytes` together; those
    of no size in any case."""
    due = 0
    total = sum(sizes)
    chosen = []
    for size in sizes:
        due += size * num_bytes
        chosen.append(due >= size * total)
        due -= size * total * chosen[-1]
    return chosen


def first_within(sizes: Sequence[int], num_bytes: int) -> list[bool]:
    """Chooses the first things of these sizes that take at most `num_bytes` together, and those of
    no size."""
    ends = itertools.accumulate(sizes)
    return [end <= num_bytes or not size for size, end in zip(sizes, ends, strict=True)]
