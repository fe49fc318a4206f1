"""Freeze: where the bytes of a store's entries lay at one moment, in which nobody writes them until they are thawed.

A value that the store makes (`TensorStore.freeze`) and takes back (`thaw`): it answers for every durable entry that rested on
NVME then, also for those that were dropped since. Where an entry's bytes lie now is the store's affair.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiermem.swap.numbers import Numbers, spread


class FrozenRange(NamedTuple):
    """Bytes of one path's segment that nobody writes."""

    path_index: int
    file_offset: int
    num_bytes: int


class FrozenRows(NamedTuple):
    """Where many ranges lie: flat int64 arrays, a row for each piece of a range, ranges in order and each by its bytes."""

    request: Numbers  # which range
    start: Numbers  # byte of the entry
    path_index: Numbers
    file_offset: Numbers
    num_bytes: Numbers


class FrozenPart(NamedTuple):
    """A range of an entry, from byte `start` on, and where it lies."""

    start: int
    place: FrozenRange


@dataclasses.dataclass(frozen=True)
class Freeze:
    """One moment of a store. `parts` are in the order of the entry's bytes and cover it, up to whole 4096-byte blocks."""

    number: int
    paths: tuple[Path, ...]
    parts: Mapping[str, Sequence[FrozenPart]] = dataclasses.field(repr=False)

    def entries(self) -> list[str]:
        """The names of what is frozen."""
        return list(self.parts)

    def files(self) -> tuple[Path, ...]:
        """The segment file of each path; a range's `path_index` counts them."""
        return self.paths

    def find(self, entries: Sequence[str], entry: Numbers, offset: Numbers, num_bytes: Numbers) -> FrozenRows:
        """Where bytes [offset[i], offset[i] + num_bytes[i]) of entries[entry[i]] lie, for all i at once.

        Raises KeyError for what is not frozen, ValueError for bytes outside it.
        """
        parts = [part for name in entries for part in self.parts[name]]
        table = np.array([(start, *place) for start, place in parts], np.int64).reshape(-1, 4)
        ends = np.cumsum([len(self.parts[name]) for name in entries], dtype=np.int64)
        sizes = table[ends - 1, 0] + table[ends - 1, 3]
        outside = np.flatnonzero((offset < 0) | (num_bytes < 0) | (offset + num_bytes > sizes[entry]))
        if len(outside):
            i = outside[0]
            name, size = entries[entry[i]], sizes[entry[i]]
            raise ValueError(f"bytes {offset[i]} to {offset[i] + num_bytes[i]} lie outside {name!r} ({size} bytes)")
        bases = np.cumsum(sizes) - sizes  # as if all entries lay behind one another
        own = np.repeat(bases, np.diff(ends, prepend=0))
        starts, (first, path_index, file_offset, _) = table[:, 0] + own, table.T
        stops = np.append(starts[1:], sizes.sum())
        low, high = bases[entry] + offset, bases[entry] + offset + num_bytes
        at = np.searchsorted(starts, low, "right") - 1
        counts = np.where(num_bytes > 0, np.searchsorted(starts, high, "left") - at, 0)
        request, part = spread(at, counts)
        begin, end = np.maximum(low[request], starts[part]), np.minimum(high[request], stops[part])
        within = begin - starts[part]
        return FrozenRows(request, first[part] + within, path_index[part], file_offset[part] + within, end - begin)

    def ranges(self, entry: str, offset: int, num_bytes: int) -> list[FrozenRange]:
        """Where bytes [offset, offset + num_bytes) of an entry lie, in order; any bytes, not whole blocks alone.

        Raises KeyError for what is not frozen, ValueError for bytes outside it.
        """
        found = self.find([entry], *np.array([[0], [offset], [num_bytes]], np.int64))
        columns = zip(found.path_index.tolist(), found.file_offset.tolist(), found.num_bytes.tolist(), strict=True)
        return [FrozenRange(*each) for each in columns]
