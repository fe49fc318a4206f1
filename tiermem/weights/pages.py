"""Pages: which bytes of a unit are there, where its fused experts come by rows.

A unit is read from its file into a buffer of its size, at the same places. A read takes whole pages
of 4096 bytes. A page that is there is never read again, because a module may have written to it.

    unit      | attention, norms | expert 0 | expert 1 | expert 2 | ... |     the layout of unit.py
    fetch     [ every page of the rest ]                                      `missing(())`
    use                          [ expert 1 ]                                 `missing([1])`
    all       [ every page that is not there ]                                `missing(None)`

Rows whose pages are not there hold what the buffer held before. No implementation of experts reads
them; all other code finds the parameter resting, and a read of it brings all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tiermem.swap.base.ranges import ALIGNMENT
from tiermem.units.unit import Unit


class UnitPages:
    """The pages of a unit whose shard is its full layout.

    fused: numbers of the parameters that consist of rows.
    """

    def __init__(self, unit: Unit) -> None:
        self.fused = [index for index, shard in enumerate(unit.shards) if shard.num_rows]
        self.num_rows = unit.shards[self.fused[0]].num_rows
        self.is_whole = False
        size = unit.dtype.itemsize
        num_pages = unit.shard_bytes // ALIGNMENT
        self._is_there = np.zeros(num_pages, np.bool_)
        self._is_rest = np.ones(num_pages, np.bool_)
        # of the experts in each parameter: the first byte in the unit, and the bytes of one
        self._rows: list[tuple[int, int]] = []
        for shard in (unit.shards[index] for index in self.fused):
            start = shard.shard_offset * size
            self._rows.append((start, shard.numel * size // shard.num_rows))
            self._is_rest[-(-start // ALIGNMENT) : (start + shard.numel * size) // ALIGNMENT] = (
                False
            )

    def missing(self, rows: Iterable[int] | None) -> list[slice]:
        """The bytes to read, so that the rest and these rows are there; None: all rows."""
        wanted = np.ones_like(self._is_rest) if rows is None else self._is_rest.copy()
        for row in rows or ():
            for start, row_bytes in self._rows:
                first = start + row * row_bytes
                wanted[first // ALIGNMENT : -(-(first + row_bytes) // ALIGNMENT)] = True
        edges = np.flatnonzero(np.diff(wanted & ~self._is_there, prepend=False, append=False))
        return [
            slice(int(first) * ALIGNMENT, int(last) * ALIGNMENT)
            for first, last in edges.reshape(-1, 2)
        ]

    def note(self, found: Sequence[slice]) -> None:
        """Notes that bytes of `missing` are there."""
        for each in found:
            self._is_there[each.start // ALIGNMENT : each.stop // ALIGNMENT] = True
        self.is_whole = bool(self._is_there.all())

    def clear(self) -> None:
        """Notes that no byte is there."""
        self._is_there[:] = False
        self.is_whole = False
