"""Pieces: the file ranges that a rank saves, as arrays, and the checksums of their bytes."""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES, PartState
from tiermem.swap.checksum import Crcs, PieceTable, Sums, crc32c
from tiermem.swap.entry import Freeze
from tiermem.swap.native import Workers, crc32c_combine, crc32c_join
from tiermem.swap.ranges import Numbers, round_up, spread
from tiermem.swap.stream import FileWriter

CHUNK_BYTES = 4 << 20

Chunks = Callable[[], Iterator[torch.Tensor]]
"""Returns the bytes in order: uint8 tensors, contiguous, on the CPU. Each is valid until the next one is requested."""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Elements [start, start + numel) of one state of a parameter, in one byte range of this rank.

    A stretch on NVMe lies in an entry of the store; the freeze keeps its bytes, and they are not copied. A stretch in memory
    is read in chunks while it is written to a file.

    Attributes:
        first_byte: position of the stretch in the bytes of the whole state.
        place: on NVMe: (entry, byte offset in it). In memory: the bytes, on any device, or a function that returns them.
    """

    param: str
    state: str
    kind: str
    start: int
    numel: int
    first_byte: int
    place: tuple[str, int] | torch.Tensor | Chunks

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements."""
        return kinds.bytes_of(self.kind, self.numel)

    def chunks(self) -> Iterator[torch.Tensor]:
        """The bytes of a stretch in memory. Raises ValueError if their number is not `num_bytes`."""
        place, done = self.place, 0
        assert not isinstance(place, tuple), f"{self.state} of {self.param} rests on NVMe"
        for data in _cut(place[: self.num_bytes]) if isinstance(place, torch.Tensor) else place():
            done += data.numel()
            if done > self.num_bytes:
                break
            yield data
        if done != self.num_bytes:
            raise ValueError(
                f"{self.param}: {self.state} has {done} bytes or more; {self.numel} elements take {self.num_bytes}"
            )


def in_memory(data: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """The bytes of a tensor from byte `offset` on: uint8, flat, on the tensor's device."""
    return data.detach().reshape(-1).view(torch.uint8)[offset:]


def _cut(data: torch.Tensor) -> Iterator[torch.Tensor]:
    return (data[at : at + CHUNK_BYTES].cpu() for at in range(0, data.numel(), CHUNK_BYTES))


# ---- rows: pieces as arrays ------------------------------------------------------------------------------------------

Key = tuple[str, str, str]
"""Parameter, state, kind."""


class Rows(NamedTuple):
    """Pieces as flat int64 arrays of one length, because a model has tens of thousands; manifest.Piece is one piece.

    Row i holds elements [start, start + numel) of the state `keys[key]`, in `num_bytes` bytes from `offset` of file `file`, an
    index into the files of a part.
    """

    keys: Sequence[Key]
    key: Numbers
    start: Numbers
    numel: Numbers
    file: Numbers
    offset: Numbers
    num_bytes: Numbers

    def states(self) -> tuple[PartState, ...]:
        """The rows as a part lists them: keys in their order, each with its rows in the order of elements."""
        order = np.lexsort((self.start, self.key))
        table = np.stack((self.start, self.numel, self.file, self.offset), 1)[order].tolist()
        edges = [0, *np.cumsum(np.bincount(self.key, minlength=len(self.keys))).tolist()]
        found = zip(self.keys, itertools.pairwise(edges), strict=True)
        return tuple(PartState(*key, table[start:end]) for key, (start, end) in found if start < end)


def rows_of(keys: Sequence[Key], rows: Sequence[tuple[int, int, int, int, int, int]]) -> Rows:
    """Rows from tuples (key, start, numel, file, offset, bytes)."""
    return Rows(keys, *np.array(rows, np.int64).reshape(-1, 6).T)


def joined_rows(several: Sequence[Rows]) -> Rows:
    """All rows of several Rows. A key may occur in more than one."""
    numbers: dict[Key, int] = {}
    for rows in several:
        for key in rows.keys:
            numbers.setdefault(key, len(numbers))
    mapped = [np.array([numbers[key] for key in rows.keys], np.int64)[rows.key] for rows in several if len(rows.key)]
    columns = zip(*(rows[2:] for rows in several if len(rows.key)), strict=True)
    if not mapped:
        return rows_of([], [])
    return Rows(list(numbers), np.concatenate(mapped), *(np.concatenate(each) for each in columns))


# ---- the checksums of a state, one per MiB ---------------------------------------------------------------------------
#
#     one rank's pieces    [ a ][   b   ][ c ]        crc(A + B) is computed from crc(A), crc(B) and len(B)
#     another rank's                         [ d ]
#     blocks of 1 MiB      |---------|---------|---   one checksum each; they do not depend on the pieces
#
# Bytes are counted in the order of the whole parameter's elements, as if they lay in one piece.


class Run(NamedTuple):
    """Consecutive bytes of a state, and one checksum for the bytes in each block of 1 MiB."""

    start: int
    num_bytes: int
    crcs: list[int]


def cuts(start: int, num_bytes: int) -> list[tuple[int, int]]:
    """(start, bytes) of the part of a range in each block of 1 MiB."""
    found, end = [], start + num_bytes
    while start < end:
        stop = min(end, (start // CHECKSUM_BYTES + 1) * CHECKSUM_BYTES)
        found.append((start, stop - start))
        start = stop
    return found


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same bytes in the fewest runs."""
    found: list[Run] = []
    for each in sorted(runs, key=lambda run: run.start):
        last = found[-1] if found else None
        if last is None or last.start + last.num_bytes != each.start:
            found.append(Run(each.start, each.num_bytes, list(each.crcs)))
            continue
        shared = each.start % CHECKSUM_BYTES
        if shared:
            num_bytes = min(each.num_bytes, CHECKSUM_BYTES - shared)
            last.crcs[-1] = crc32c_combine(last.crcs[-1], each.crcs[0], num_bytes)
        last.crcs.extend(each.crcs[1:] if shared else each.crcs)
        found[-1] = last._replace(num_bytes=last.num_bytes + each.num_bytes)
    return found


def run_of(start: int, tensors: Sequence[torch.Tensor], workers: Workers | None) -> Run:
    """The checksums of tensors of bytes that follow one another from byte `start` of a state. Blocks; GIL free."""
    ranges: list[tuple[int, int]] = []
    parts: list[torch.Tensor] = []
    for data in tensors:
        own = cuts(start, data.numel())
        start += data.numel()
        ranges += own
        parts += data.split([num_bytes for _, num_bytes in own])
    [run] = joined(Run(*at, [crc]) for at, crc in zip(ranges, crc32c(parts, workers), strict=True))
    return run


def checksums(runs: Iterable[Run], what: str) -> tuple[int, ...]:
    """The checksum of every block of a state. Raises RuntimeError unless the runs hold every byte exactly once."""
    found = joined(runs)
    if len(found) != 1 or found[0].start:
        places = ", ".join(f"{run.start} to {run.start + run.num_bytes}" for run in found[:4])
        raise RuntimeError(f"{what}: bytes {places} are saved; a state is saved once and whole")
    return tuple(found[0].crcs)


# ---- stretches on NVMe -----------------------------------------------------------------------------------------------

ReadEntry = Callable[[str, int, int], torch.Tensor]
"""(entry, start, stop) -> the bytes [start, stop) of an entry, uint8."""


class Resting:
    """Stretches on NVMe, in any order, as arrays; `place` of each is (entry, offset).

        stretches -> one row each: key, elements, entry, offset         once, until a state moves between tiers
                  -> ranges that have one checksum each, by state       once, until a state moves between tiers
        freeze    -> the file ranges of each row                        in every save
        checksums -> one for every MiB of every state                   in every save

    A save of states on NVMe costs a sync and the last two lines; hence no Python loop over rows.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        keys: dict[Key, int] = {}
        entries: dict[str, int] = {}
        numbers = array.array("q")  # rows in one flat array: no Python object per row
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
        """The file ranges of all stretches in a freeze; `file` is an index into the store's paths."""
        found = freeze.find(self.entries, self._entry, self._offset, self._num_bytes)
        row, grain = found.request, self._grain_bytes[found.request]
        skipped = (found.start - self._offset[row]) // grain * self._grain_numel[row]
        numel = np.minimum(found.num_bytes // grain * self._grain_numel[row], self._numel[row] - skipped)
        start = self._start[row] + skipped
        return Rows(self.keys, self._key[row], start, numel, found.path_index, found.file_offset, found.num_bytes)

    def sums(self, known: Sums, read: ReadEntry, workers: Workers) -> dict[tuple[str, str], list[Run]]:
        """The checksums of every (parameter, state), in the fewest runs.

        Blocks only for a checksum that the store does not know: it is computed from the bytes and kept. Raises OSError.
        """
        crcs = self._crcs(known, read, workers)[self._order]
        blocks = crc32c_join(self._block_first, crcs, self._block_lengths)
        found: dict[tuple[str, str], list[Run]] = {}
        all_crcs = blocks.tolist()
        for key, first_block, last_block, start, num_bytes in self._runs:
            param, state, _ = self.keys[key]
            found.setdefault((param, state), []).append(Run(start, num_bytes, all_crcs[first_block:last_block]))
        return found

    # ---- checksums ------------------------------------------------------------------------------------------------------

    def _cut_at_blocks(self) -> None:
        """Cuts the rows at every MiB of their state, and sorts the results by state and position."""
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
        runs = key[run_first].tolist(), run_blocks[:-1], run_blocks[1:], first[run_first].tolist(), run_bytes
        self._runs = list(zip(*runs, strict=True))

    def _crcs(self, sums: Sums, read: ReadEntry, workers: Workers) -> Crcs:
        """The checksum of every range: combined from the store's checksums, else computed from the bytes."""
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
    """The pieces in the store's tables that make up each range [start[i], stop[i]) of entry[i], if there are such pieces."""

    def __init__(self, tables: Sequence[PieceTable | None], entry: Numbers, start: Numbers, stop: Numbers) -> None:
        self._pieces = [None if table is None else table.pieces for table in tables]
        held = [(number, pieces) for number, pieces in enumerate(self._pieces) if pieces is not None]
        size = 1 + max([0, *stop.tolist(), *(int(pieces.stops[-1]) for _, pieces in held if len(pieces.stops))])
        none = [np.zeros(0, np.int64)]  # entries are numbered as if they lay one after another, `size` bytes each
        starts = np.concatenate(none + [pieces.starts + number * size for number, pieces in held])
        stops = np.concatenate(none + [pieces.stops + number * size for number, pieces in held])
        low, high = start + entry * size, stop + entry * size
        first = np.searchsorted(starts, low, "left")
        counts = np.maximum(0, np.searchsorted(stops, high, "right") - first)
        self._range, self._chosen = spread(first, counts)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self._lengths = (stops - starts)[self._chosen]
        self._num_ranges = len(start)
        # Pieces do not overlap: if the pieces inside a range have its total length, they cover it.
        self._is_covered = np.bincount(self._range, self._lengths, self._num_ranges) == stop - start

    def is_of(self, tables: Sequence[PieceTable | None]) -> bool:
        """Whether these tables still have the same pieces."""
        return all(
            (None if table is None else table.pieces) is pieces
            for table, pieces in zip(tables, self._pieces, strict=True)
        )

    def unknown(self, tables: Sequence[PieceTable | None]) -> Numbers:
        """The ranges that contain a piece whose checksum is not known."""
        is_known = np.concatenate([np.zeros(0, np.bool_), *(table.is_known for table in tables if table is not None)])
        unknown: Numbers = self._range[~is_known[self._chosen]]
        return unknown

    def look_up(self, tables: Sequence[PieceTable | None]) -> tuple[Crcs, npt.NDArray[np.bool_]]:
        """The checksum of each range, and whether that checksum is known."""
        crcs = np.concatenate([np.zeros(0, np.uint32), *(table.crcs for table in tables if table is not None)])
        joined = crc32c_join(self._first, crcs[self._chosen], self._lengths)
        is_known = self._is_covered.copy()
        is_known[self.unknown(tables)] = False
        return joined, is_known


# ---- the data file of a rank -----------------------------------------------------------------------------------------
#
#     on NVMe      rows of the store's own files, one for each byte range; no data is copied
#     in memory    written once to a data file, one stretch after another, each at a multiple of 64 bytes
#
# Memory use is one chunk of CHUNK_BYTES and the writer's buffers, for states of any size.

_ALIGN = 64  # bytes

Runs = Mapping[tuple[str, str], Sequence[Run]]
"""Checksums of the bytes that a rank holds of each (parameter, state)."""


class Placed(NamedTuple):
    """A rank's pieces and the checksums of their bytes."""

    rows: Rows
    sums: Runs


def put_together(placed: Sequence[Placed]) -> Placed:
    """The pieces of several files as one. A state may have pieces in each file."""
    sums: dict[tuple[str, str], list[Run]] = {}
    for each in placed:
        for key, runs in each.sums.items():
            sums.setdefault(key, []).extend(runs)
    return Placed(joined_rows([each.rows for each in placed]), {key: joined(runs) for key, runs in sums.items()})


def write_data(
    stretches: Sequence[Stretch],
    path: Path,
    file: int,
    workers: Workers | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Placed:
    """Writes stretches in memory to a new file, number `file` of the part, and makes it durable. Blocks.

    progress: called with the number of bytes just written. Raises OSError, and ValueError as `Stretch.chunks`; then the file
    does not exist.
    """
    keys: dict[Key, int] = {}
    rows = []
    sums: dict[tuple[str, str], list[Run]] = {}
    with FileWriter(path, data_bytes(stretches)) as out:
        for stretch in stretches:
            out.skip_to(round_up(out.position, _ALIGN))
            key = keys.setdefault((stretch.param, stretch.state, stretch.kind), len(keys))
            rows.append((key, stretch.start, stretch.numel, file, out.position, stretch.num_bytes))
            at, found = stretch.first_byte, sums.setdefault((stretch.param, stretch.state), [])
            for data in stretch.chunks():
                out.put(data)
                found.append(run_of(at, [data], workers))
                at += data.numel()
                progress(data.numel())
    return Placed(rows_of(list(keys), rows), {key: joined(runs) for key, runs in sums.items()})


def data_bytes(stretches: Iterable[Stretch]) -> int:
    """Size in bytes of the file that `write_data` writes."""
    end = 0
    for stretch in stretches:
        end = round_up(end, _ALIGN) + stretch.num_bytes
    return end
