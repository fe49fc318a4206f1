"""Pieces: the file ranges that a rank saves, as arrays, and the checksums of their bytes."""

from __future__ import annotations

import array
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.finding import Key, Rows, grains, sized_rows
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES
from tiermem.swap.base.native import Workers, crc32c_of
from tiermem.swap.base.ranges import Numbers, round_up, spread
from tiermem.swap.store.checksum import Crcs, Sums, crc32c, crc32c_combine, crc32c_join
from tiermem.swap.store.entry import Freeze
from tiermem.swap.store.stream import FileWriter

CHUNK_BYTES = 4 << 20
_ALIGN = 64  # bytes
_MOST_GAP = 256  # bytes: more than lie between two parameters of a tile

Chunks = Callable[[], Iterator[torch.Tensor]]
"""Returns the bytes in order: uint8 tensors, contiguous, on the CPU. Each is valid until the next
one is requested."""


class Stretch(NamedTuple):
    """Elements [start, start + numel) of one state of a parameter, in one byte range of this rank.

    A stretch on NVMe lies in an entry of the store; the freeze keeps its bytes, and they are not
    copied. A stretch in memory is read in chunks while it is written to a file.

    Attributes:
        first_byte: position of the stretch in the bytes of the whole state.
        place: on NVMe: (entry, byte offset in it). In memory: (flat uint8 tensor on any device,
            byte offset in it), or a function that returns the bytes.
    """

    param: str
    state: str
    kind: str
    start: int
    numel: int
    first_byte: int
    place: tuple[str | torch.Tensor, int] | Chunks

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements."""
        return kinds.bytes_of(self.kind, self.numel)

    def chunks(self) -> Iterator[torch.Tensor]:
        """The bytes of a stretch in memory. Raises ValueError if their number is not
        `num_bytes`."""
        place = self.place
        done = 0
        for data in _cut(*place, self.num_bytes) if isinstance(place, tuple) else place():
            done += data.numel()
            if done > self.num_bytes:
                break
            yield data
        if done != self.num_bytes:
            raise ValueError(
                f"{self.param}: {self.state} has {done} bytes or more; {self.numel} elements take "
                f"{self.num_bytes}"
            )


def in_memory(data: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: uint8, flat, on the tensor's device."""
    return data.detach().reshape(-1).view(torch.uint8)


def _cut(held: str | torch.Tensor, offset: int, num_bytes: int) -> Iterator[torch.Tensor]:
    assert isinstance(held, torch.Tensor), f"{held} rests on NVMe"
    data = held[offset : offset + num_bytes]
    return (data[at : at + CHUNK_BYTES].cpu() for at in range(0, data.numel(), CHUNK_BYTES))


# ---- the checksums of a state, one per MiB -------------------------------------------------------
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
    found = []
    end = start + num_bytes
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
    """The checksums of tensors of bytes that follow one another from byte `start` of a state.
    Blocks; GIL free."""
    ranges: list[tuple[int, int]] = []
    parts: list[torch.Tensor] = []
    for data in tensors:
        own = cuts(start, data.numel())
        start += data.numel()
        ranges += own
        parts += data.split([num_bytes for _, num_bytes in own])
    [run] = joined(Run(*at, [crc]) for at, crc in zip(ranges, crc32c(parts, workers), strict=True))
    return run


def checksums(runs: Sequence[Sequence[Any]], *what: str) -> tuple[int, ...]:
    """The checksum of every block of a state, from runs or lists of their values.

    Raises RuntimeError unless the runs hold every byte exactly once; its text begins with the words
    `what`.
    """
    found = joined(map(Run._make, runs)) if len(runs) != 1 else runs
    if len(found) != 1 or found[0][0]:
        places = ", ".join(f"{start} to {start + num_bytes}" for start, num_bytes, _ in found[:4])
        raise RuntimeError(
            f"{' '.join(what)}: bytes {places} are saved; a state is saved once and whole"
        )
    return tuple(found[0][2])


class Group(NamedTuple):
    """Rows that are written as one: their offset in the file, their bytes, the stretch and the
    ranges of the first row."""

    place: int
    data: npt.NDArray[np.uint8]
    first: int
    ranges: slice


ReadEntry = Callable[[str, int, int], torch.Tensor]
"""(entry, start, stop) -> the bytes [start, stop) of an entry, uint8."""

# ---- stretches as arrays -------------------------------------------------------------------------
#
#     stretches -> one row each: key, elements, holder, offset     once, for those on NVMe until a state moves between tiers
#               -> ranges that have one checksum each, by state    as often
#               -> checksums of every MiB of every state           in every save
#
# Hence no Python code runs per row when states on NVMe are saved, and little for states in memory.


class PackedRows(NamedTuple):
    """Rows of files in groups, and the groups one behind another in a new file.

    firsts, lasts: the first and the last row of each group. places: of each group in the new file.
    shifts: of each row, from its old offset to its new one.
    """

    firsts: Numbers
    lasts: Numbers
    places: Numbers
    shifts: Numbers


def packed(is_new: npt.NDArray[np.bool_], start: Numbers, stop: Numbers, unit: int) -> PackedRows:
    """Packs bytes [start, stop) of rows in their order, each group at a multiple of `unit`.

    is_new: whether a row begins a group, without the first row, which does.
    """
    firsts = np.flatnonzero(np.append(True, is_new)[: len(start)])
    lasts = np.append(firsts, len(start))[1:] - 1
    sizes = round_up(stop[lasts] - start[firsts], unit)
    places = np.cumsum(sizes) - sizes
    shifts = np.repeat(places - start[firsts], lasts - firsts + 1)
    return PackedRows(firsts, lasts, places, shifts)


class Resting:
    """Stretches in any order, as rows by holder and offset. `held` are the entries and tensors
    that hold them: the files of these rows.

    `order` is the place of each row in the stretches that were given.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        keys: dict[Key, int] = {}
        held: dict[object, tuple[int, str | torch.Tensor]] = {}
        numbers = array.array("q")  # rows in one flat array: no Python object per row
        seen: dict[int, tuple[int, object]] = {}  # by the holder's id; it keeps the holder
        for param, state, kind, start, numel, first_byte, place in stretches:
            # a function returns its bytes
            holder, offset = place if type(place) is tuple else ("", 0)
            if (known := seen.get(id(holder))) is None:
                name = holder if isinstance(holder, str) else holder.data_ptr()
                known = seen[id(holder)] = held.setdefault(name, (len(held), holder))[0], holder
            key = keys.setdefault((param, state, kind), len(keys))
            numbers.extend((known[0], offset, key, start, numel, first_byte))
        self.held = [holder for _, holder in held.values()]
        self.entries = [holder for holder in self.held if isinstance(holder, str)]
        table = np.array(numbers, np.int64).reshape(-1, 6)
        self.order = np.lexsort((table[:, 1], table[:, 0]))
        holder, offset, key, start, numel, self._first_byte = table[self.order].T
        self._rows = sized_rows(list(keys), key, start, numel, holder, offset)
        self._stops = offset + self._rows.num_bytes
        self._cut_at_blocks()

    def rows(self, freeze: Freeze) -> Rows:
        """The file ranges of all stretches in a freeze; `file` is an index into the store's
        paths."""
        whole = self._rows
        found = freeze.find(self.entries, whole.file, whole.offset, whole.num_bytes)
        row = found.request
        key = whole.key[row]
        grain_bytes, grain_numel = (each[key] for each in grains(whole.keys))
        skipped = (found.start - whole.offset[row]) // grain_bytes * grain_numel
        numel = np.minimum(found.num_bytes // grain_bytes * grain_numel, whole.numel[row] - skipped)
        start = whole.start[row] + skipped
        place = found.path_index, found.file_offset, found.num_bytes
        return Rows(whole.keys, key, start, numel, *place)

    def sums(
        self, known: Sums, read: ReadEntry, workers: Workers
    ) -> dict[tuple[str, str], list[Run]]:
        """The checksums of every (parameter, state), in the fewest runs.

        Blocks only for a checksum that the store does not know: it is computed from the bytes and
        kept. Raises OSError.
        """
        return self.runs(self._crcs(known, read, workers))

    def rows_at(self, file: int) -> Rows:
        """The rows in a data file."""
        offset = self._rows.offset + self.placed.shifts
        return self._rows._replace(file=np.full_like(offset, file), offset=offset)

    @functools.cached_property
    def placed(self) -> PackedRows:
        """The data file as groups of rows, each a copy of memory with the gaps between its rows,
        and each at a multiple of `_ALIGN`."""
        holder = self._rows.file
        offset = self._rows.offset
        stop = self._stops
        gap = offset[1:] - stop[:-1]
        same = (holder[1:] == holder[:-1]) & (gap >= 0) & (gap < _MOST_GAP) & self._is_there[1:]
        return packed(~(same & self._is_there[:-1]), offset, stop, _ALIGN)

    @property
    def data_bytes(self) -> int:
        """Size in bytes of the file that `write_data` writes."""
        return int((self._stops + self.placed.shifts)[-1:].sum())

    def in_memory(self, workers: Workers | None) -> tuple[list[Group], Crcs]:
        """The groups of `placed`, and the checksum of every range. Blocks; GIL free.

        A row without bytes in the CPU's memory, or with too few, is a group without bytes. Its
        checksums have no meaning.
        """
        is_there = np.repeat(self._is_there, np.diff(self._first_piece))
        lengths = np.where(is_there, self._piece_stop - self._piece_start, 0).astype(np.uint64)
        addresses = np.array([each.ctypes.data for each in self._bytes], np.uint64)[
            self._piece_holder
        ]
        crcs = crc32c_of(addresses + self._piece_start.astype(np.uint64), lengths, workers)
        firsts, lasts, places, _ = self.placed
        starts = self._rows.offset[firsts]
        stops = np.where(self._is_there[firsts], self._stops[lasts], starts)
        pieces = map(
            slice, self._first_piece[firsts].tolist(), self._first_piece[firsts + 1].tolist()
        )
        columns = (places, self._rows.file[firsts], starts, stops, self.order[firsts])
        groups = zip(*(each.tolist() for each in columns), pieces, strict=True)
        return [
            Group(place, self._bytes[each][start:stop], *rest)
            for place, each, start, stop, *rest in groups
        ], crcs

    @functools.cached_property
    def _bytes(self) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each holder in the CPU's memory: none of those that lie elsewhere."""
        return [
            each.numpy()
            if isinstance(each, torch.Tensor) and each.device.type == "cpu"
            else np.zeros(0, np.uint8)
            for each in self.held
        ]

    @functools.cached_property
    def _is_there(self) -> npt.NDArray[np.bool_]:
        """Whether all bytes of a row are in the CPU's memory."""
        sizes = np.array([len(each) for each in self._bytes], np.int64)
        found: npt.NDArray[np.bool_] = self._stops <= sizes[self._rows.file]
        return found

    def runs(self, crcs: Crcs) -> dict[tuple[str, str], list[Run]]:
        """The checksums of every (parameter, state), in the fewest runs, from those of the
        ranges."""
        blocks = crc32c_join(self._block_first, crcs[self._order], self._block_lengths).tolist()
        found: dict[tuple[str, str], list[Run]] = {}
        names = [key[:2] for key in self._rows.keys]
        for key, first_block, last_block, start, num_bytes in self._runs:
            found.setdefault(names[key], []).append(
                Run(start, num_bytes, blocks[first_block:last_block])
            )
        return found

    def _cut_at_blocks(self) -> None:
        """Cuts the rows at every MiB of their state, and sorts the results by state and
        position."""
        stop = self._first_byte + self._rows.num_bytes
        first_block = self._first_byte // CHECKSUM_BYTES
        last_block = (stop - 1) // CHECKSUM_BYTES
        row, block = spread(first_block, last_block - first_block + 1)
        self._first_piece = np.searchsorted(row, np.arange(len(stop) + 1))
        first = np.maximum(self._first_byte[row], block * CHECKSUM_BYTES)
        length = np.minimum(stop[row], (block + 1) * CHECKSUM_BYTES) - first
        self._piece_start = self._rows.offset[row] + first - self._first_byte[row]  # in the entry
        self._piece_stop = self._piece_start + length
        self._piece_holder = self._rows.file[row]
        key = self._rows.key[row]
        self._order = np.lexsort((first, key))
        key = key[self._order]
        first = first[self._order]
        length = length[self._order]
        goes_on = (key[1:] == key[:-1]) & (first[1:] == first[:-1] + length[:-1])
        is_run = np.concatenate(([True], ~goes_on))[: len(key)]
        is_block = is_run | (first % CHECKSUM_BYTES == 0)
        block_first = np.flatnonzero(is_block)
        self._block_first = np.append(block_first, len(key))
        self._block_lengths = length
        run_first = np.flatnonzero(is_run)
        run_blocks = np.append(np.searchsorted(block_first, run_first), len(block_first)).tolist()
        run_bytes = np.add.reduceat(length, run_first).tolist() if len(key) else []
        runs = (
            key[run_first].tolist(),
            run_blocks[:-1],
            run_blocks[1:],
            first[run_first].tolist(),
            run_bytes,
        )
        self._runs = list(zip(*runs, strict=True))

    def _crcs(self, sums: Sums, read: ReadEntry, workers: Workers) -> Crcs:
        """The checksum of every range: combined from the store's checksums, else computed from the
        bytes."""
        tables = [sums.of(entry) for entry in self.entries]
        held = [(number, table) for number, table in enumerate(tables) if table is not None]
        starts = self._piece_start
        stops = self._piece_stop
        # Entries are numbered as if they lay one after another, `size` bytes each.
        size = 1 + max(
            [
                int(stops.max(initial=0)),
                *(int(table.pieces.stops.max(initial=0)) for _, table in held),
            ]
        )
        none = [np.zeros(0, np.int64)]
        own_starts = np.concatenate(
            none + [table.pieces.starts + number * size for number, table in held]
        )
        own_stops = np.concatenate(
            none + [table.pieces.stops + number * size for number, table in held]
        )
        first = np.searchsorted(own_starts, starts + self._piece_holder * size, "left")
        counts = np.maximum(
            0, np.searchsorted(own_stops, stops + self._piece_holder * size, "right") - first
        )
        row, chosen = spread(first, counts)
        lengths = (own_stops - own_starts)[chosen]
        # Pieces do not overlap: if the pieces inside a range have its total length, they cover it.
        is_known = np.bincount(row, lengths, len(starts)) == stops - starts

        def unknown() -> Numbers:
            known = np.concatenate([np.zeros(0, np.bool_), *(table.is_known for _, table in held)])
            found: Numbers = row[~known[chosen]]
            return found

        for number in np.unique(self._piece_holder[unknown()]).tolist():
            sums.complete(self.entries[number], functools.partial(read, self.entries[number]))
        is_known[unknown()] = False
        own_crcs = np.concatenate([np.zeros(0, np.uint32), *(table.crcs for _, table in held)])
        crcs = crc32c_join(np.append(0, np.cumsum(counts)), own_crcs[chosen], lengths)
        for number in np.flatnonzero(~is_known).tolist():
            data = read(
                self.entries[self._piece_holder[number]], int(starts[number]), int(stops[number])
            )
            crcs[number] = crc32c([data], workers)[0]
        return crcs


# ---- the data file of a rank ---------------------------------------------------------------------
#
#     on NVMe      rows of the store's own files, one for each byte range; no data is copied
#     in memory    written once to a data file, which is a copy of the memory that holds them
#
# Memory use is one chunk of CHUNK_BYTES and the writer's buffers, for states of any size.


class Placed(NamedTuple):
    """Pieces of a rank, and the checksums of their bytes by (parameter, state)."""

    rows: Rows
    sums: Mapping[tuple[str, str], Sequence[Run]]


def write_data(
    stretches: Sequence[Stretch],
    path: Path,
    file: int,
    workers: Workers | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Placed:
    """Writes stretches in memory to a new file, number `file` of the part, and makes it durable.
    Blocks.

    progress: called with the number of bytes just written. Raises OSError, and ValueError as
        `Stretch.chunks`; then the file does not exist.
    """
    rest = Resting(stretches)
    with FileWriter(path, rest.data_bytes) as out:
        groups, crcs = rest.in_memory(workers)
        for place, held, first, ranges in groups:
            out.skip_to(place)
            if len(held):
                out.put(held)
                progress(len(held))
                continue
            at = stretches[first].first_byte
            runs = list[Run]()
            for data in stretches[first].chunks():
                out.put(data)
                runs.append(run_of(at, [data], workers))
                at += data.numel()
                progress(data.numel())
            crcs[ranges] = joined(runs)[0].crcs
    return Placed(rest.rows_at(file), rest.runs(crcs))
