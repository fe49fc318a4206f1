"""Resting: what a rank saves of that which rests on NVMe, as arrays, and what a freeze and the store's checksums say of it.

    stretches -> a row each: key, elements, entry and offset       once, as long as nothing moves between tiers
              -> pieces that have a checksum each, by state        the same
    freeze    -> where each row lies: one piece of a file or more  in every save
    checksums -> of every MiB of every state                       in every save

A save of a step that rests on the disk costs a sync and what is done here, so nothing of it is done row by row in Python.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES
from tiermem.checkpoint.saving.blocks import Run
from tiermem.checkpoint.saving.rows import Key, Rows
from tiermem.checkpoint.saving.stretch import Stretch
from tiermem.swap.checksum import Crcs, crc32c, join
from tiermem.swap.freeze import Freeze
from tiermem.swap.native import Workers
from tiermem.swap.numbers import Numbers, spread
from tiermem.swap.pieces import PieceTable
from tiermem.swap.sums import Sums

ReadEntry = Callable[[str, int, int], torch.Tensor]
"""(entry, start, stop) -> those bytes of it, uint8."""


class Resting:
    """Stretches on NVMe, which may come in any order; their `place` is an entry and an offset."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        keys: dict[Key, int] = {}
        entries: dict[str, int] = {}
        numbers = array.array("q")  # a row behind the other: no object is kept for each
        for each in stretches:
            assert isinstance(each.place, tuple), f"{each.state} of {each.param} is in memory"
            entry, offset = each.place
            key = keys.setdefault((each.param, each.state, each.kind), len(keys))
            number = entries.setdefault(entry, len(entries))
            numbers.extend((number, offset, key, each.start, each.numel, each.first_byte, each.num_bytes))
        table = np.array(numbers, np.int64).reshape(-1, 7)
        self.entries, self.keys = list(entries), list(keys)
        columns = table[np.lexsort((table[:, 1], table[:, 0]))].T  # by entry, then by offset
        self._entry, self._offset, self._key, self._start, self._numel, self._first_byte, self._num_bytes = columns
        grains = np.array([kinds.grain_of(kind) for _, _, kind in keys], np.int64).reshape(-1, 2)
        self._grain_bytes, self._grain_numel = grains[self._key].T
        self._known: _Known | None = None
        self._cut_at_blocks()

    def rows(self, freeze: Freeze) -> Rows:
        """Where everything lies, frozen; `file` counts the paths of the store."""
        found = freeze.find(self.entries, self._entry, self._offset, self._num_bytes)
        row, grain = found.request, self._grain_bytes[found.request]
        skipped = (found.start - self._offset[row]) // grain * self._grain_numel[row]
        numel = np.minimum(found.num_bytes // grain * self._grain_numel[row], self._numel[row] - skipped)
        start = self._start[row] + skipped
        return Rows(self.keys, self._key[row], start, numel, found.path_index, found.file_offset, found.num_bytes)

    def sums(self, known: Sums, read: ReadEntry, workers: Workers) -> dict[tuple[str, str], list[Run]]:
        """The checksums of every (parameter, state), in as few runs as there are.

        Blocks only where the store does not know one: then the bytes are read, and it knows from then on. Raises OSError.
        """
        crcs = self._crcs(known, read, workers)[self._order]
        blocks = join(self._block_first, crcs, self._block_lengths)
        found: dict[tuple[str, str], list[Run]] = {}
        all_crcs = blocks.tolist()
        for key, first_block, last_block, start, num_bytes in self._runs:
            param, state, _ = self.keys[key]
            found.setdefault((param, state), []).append(Run(start, num_bytes, all_crcs[first_block:last_block]))
        return found

    # ---- checksums ------------------------------------------------------------------------------------------------------

    def _cut_at_blocks(self) -> None:
        """Cuts the rows at every MiB of their state, and puts what results in the order of the states."""
        stop = self._first_byte + self._num_bytes
        first_block, last_block = self._first_byte // CHECKSUM_BYTES, (stop - 1) // CHECKSUM_BYTES
        row, block = spread(first_block, last_block - first_block + 1)
        first = np.maximum(self._first_byte[row], block * CHECKSUM_BYTES)
        length = np.minimum(stop[row], (block + 1) * CHECKSUM_BYTES) - first
        self._piece_start = self._offset[row] + first - self._first_byte[row]  # in the entry
        self._piece_stop = self._piece_start + length
        self._piece_entry = self._entry[row]
        self._order = np.lexsort((first, self._key[row]))
        key, first, length = self._key[row][self._order], first[self._order], length[self._order]
        goes_on = (key[1:] == key[:-1]) & (first[1:] == first[:-1] + length[:-1])
        is_run = np.concatenate(([True], ~goes_on))[: len(key)]
        is_block = is_run | (first % CHECKSUM_BYTES == 0)
        block_first = np.flatnonzero(is_block)
        self._block_first = np.append(block_first, len(key))
        self._block_lengths = length
        run_first = np.flatnonzero(is_run)
        run_blocks = np.append(np.searchsorted(block_first, run_first), len(block_first)).tolist()
        run_bytes = np.add.reduceat(length, run_first).tolist() if len(key) else []
        self._runs = list(
            zip(
                key[run_first].tolist(),
                run_blocks[:-1],
                run_blocks[1:],
                first[run_first].tolist(),
                run_bytes,
                strict=True,
            )
        )

    def _crcs(self, sums: Sums, read: ReadEntry, workers: Workers) -> Crcs:
        """The checksum of every piece: put together from those that the store has of its bytes, else of the bytes."""
        tables = [sums.of(entry) for entry in self.entries]
        if self._known is None or not self._known.is_of(tables):
            self._known = _Known(tables, self._piece_entry, self._piece_start, self._piece_stop)
        for number in np.unique(self._piece_entry[self._known.unknown(tables)]).tolist():
            sums.complete(self.entries[number], functools.partial(read, self.entries[number]))
        crcs, is_known = self._known.look_up(tables)
        for number in np.flatnonzero(~is_known).tolist():
            entry = self.entries[self._piece_entry[number]]
            data = read(entry, int(self._piece_start[number]), int(self._piece_stop[number]))
            crcs[number] = crc32c([data], workers)[0]
        return crcs


class _Known:
    """Which pieces of the store's tables make up each range [start[i], stop[i]) of entry[i], if any do."""

    def __init__(self, tables: Sequence[PieceTable | None], entry: Numbers, start: Numbers, stop: Numbers) -> None:
        self._pieces = [None if table is None else table.pieces for table in tables]
        held = [(number, pieces) for number, pieces in enumerate(self._pieces) if pieces is not None]
        size = 1 + max([0, *stop.tolist(), *(int(pieces.stops[-1]) for _, pieces in held if len(pieces.stops))])
        none = [np.zeros(0, np.int64)]  # entries as if they lay behind one another, `size` bytes each
        starts = np.concatenate(none + [pieces.starts + number * size for number, pieces in held])
        stops = np.concatenate(none + [pieces.stops + number * size for number, pieces in held])
        low, high = start + entry * size, stop + entry * size
        first = np.searchsorted(starts, low, "left")
        counts = np.maximum(0, np.searchsorted(stops, high, "right") - first)
        self._range, self._chosen = spread(first, counts)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self._lengths = (stops - starts)[self._chosen]
        self._num_ranges = len(start)
        # Pieces do not overlap, so those inside a range that have its length are all of it.
        self._is_covered = np.bincount(self._range, self._lengths, self._num_ranges) == stop - start

    def is_of(self, tables: Sequence[PieceTable | None]) -> bool:
        """Whether these tables still have the same pieces."""
        return all(
            (None if table is None else table.pieces) is pieces
            for table, pieces in zip(tables, self._pieces, strict=True)
        )

    def unknown(self, tables: Sequence[PieceTable | None]) -> Numbers:
        """The ranges that tables have pieces of, of which one is not known."""
        is_known = np.concatenate([np.zeros(0, np.bool_), *(table.is_known for table in tables if table is not None)])
        unknown: Numbers = self._range[~is_known[self._chosen]]
        return unknown

    def look_up(self, tables: Sequence[PieceTable | None]) -> tuple[Crcs, npt.NDArray[np.bool_]]:
        """The checksum of each range, and whether it is known."""
        crcs = np.concatenate([np.zeros(0, np.uint32), *(table.crcs for table in tables if table is not None)])
        joined = join(self._first, crcs[self._chosen], self._lengths)
        is_known = self._is_covered.copy()
        is_known[self.unknown(tables)] = False
        return joined, is_known
