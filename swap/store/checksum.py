"""Checksums: the CRC-32C of a store's entries, computed when bytes are written and compared when
they are read.

    protect(entry, pieces)     gives an entry's pieces checksums from now on
    write     computes checksums before the write starts; the bytes must not change until the write has ended
    read      keeps the expected checksums when the read starts, and computes those of the bytes before the caller gets them.
              If they differ, the Move fails with DamagedEntry, which names file, offset and piece

The kernels' threads compute checksums while the disk makes other transfers. Reads of a part of a
piece are not verified.

    crc(A + B) = combine(crc(A), crc(B), len(B))

So the checksum of a message does not depend on the pieces in which it was written. CRC-32C is the
CRC of iSCSI (RFC 3720). It detects every error burst of up to 32 bits, and misses other errors with
a probability of 2**-32. native/checksum*.cpp computes it; tests/native/test_checksum.cpp checks it
with the published vectors. Other libraries do not fit: Debian's ISA-L has no static archive,
Debian's Abseil has no CRC yet, and google-crc32c needs a Python call for each piece.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.base.errors import DamagedEntry, Place
from tiermem.swap.base.native import Op, Workers, check, crc32c_of, lib, rows_of
from tiermem.swap.base.ranges import FileRange, Numbers
from tiermem.swap.base.tile_program import (
    PieceRows,
    aim_rows,
    join_rows,
    moved_rows,
    piece_rows,
)
from tiermem.swap.disk.queue import Recorder

ROTATION = 16
"""With verify="sample", one in ROTATION reads of a piece is verified."""

Crcs = npt.NDArray[np.uint32]
"""Checksums, a flat array."""

Verify = Literal["always", "sample", "resume"]
"""The reads that are verified: "always" all; "sample" one in 16 of each piece, another sixteenth of
the entries each time; "resume" none."""

Check = Callable[[], DamagedEntry | None]
"""Compares the checksums of a read that has come; returns the error of damaged bytes."""

Range = tuple[str, int, torch.Tensor]
"""An entry, a byte offset in it, and the uint8 buffer that is read into or written from."""


def crc32c(tensors: Sequence[torch.Tensor], workers: Workers | None = None) -> list[int]:
    """The CRC-32C of the bytes of each tensor: contiguous, on the CPU, of any dtype. Blocks; GIL
    free."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"a checksum is that of a contiguous CPU tensor, not of {tuple(tensor.shape)} on "
                f"{tensor.device}"
            )
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    num_bytes = np.array([tensor.nbytes for tensor in tensors], np.uint64)
    return [int(crc) for crc in crc32c_of(addresses, num_bytes, workers)]


def crc32c_join(first: Numbers, crcs: Crcs, num_bytes: Numbers) -> Crcs:
    """The CRC-32C of messages first[i] to first[i + 1] behind one another, from theirs and their
    lengths. Flat arrays."""
    if crcs.shape != num_bytes.shape or not len(first) or int(first[-1]) > len(crcs):
        raise ValueError(
            f"{len(crcs)} checksums of {len(num_bytes)} messages, joined up to {first[-1:]}"
        )
    joined = np.empty(len(first) - 1, np.uint32)
    dtypes = np.uint64, np.uint32, np.uint64
    given = [
        np.ascontiguousarray(row, dtype)
        for row, dtype in zip((first, crcs, num_bytes), dtypes, strict=True)
    ]
    kinds = "const uint64_t *", "const uint32_t *", "const uint64_t *", "uint32_t *"
    check(lib.tm_crc32c_join(len(joined), *rows_of(kinds, *given, joined)), "joining checksums")
    return joined


def crc32c_combine(a: int, b: int, b_bytes: int) -> int:
    """The CRC-32C of two messages as one, from theirs and the length of the second."""
    return int(lib.tm_crc32c_combine(a, b, b_bytes))


class Pieces(NamedTuple):
    """Ranges [starts[i], stops[i]) of an entry's bytes: flat, ascending, none empty."""

    starts: Numbers
    stops: Numbers
    name: Callable[[int], object] = "piece {}".format
    """What piece i is, in its owner's words; its str() goes into errors."""


class PieceTable:
    """The pieces of one entry with their checksums; unknown at first. The store's lock guards it.

        entry     [ piece 0 | piece 1 |  gap  | piece 2 | ... ]       ranges in order, that do not overlap; gaps have none

        a write of the whole piece    makes its checksum known
        a write of a part of it       makes it unknown, until it is `put`, or written whole or in parts from its first byte on
        a write that fails            leaves the intended checksum, so that a later read of those bytes fails verification

    A piece is a range with one checksum; the table knows it by its number. numpy handles all pieces
    at once.

    entry: its name; serial: a number of it, so that each round of reads verifies another sixteenth
        of the entries.

    Raises ValueError for pieces that are empty, out of order or overlap.
    """

    def __init__(self, pieces: Pieces, entry: str, serial: int) -> None:
        starts = pieces.starts
        stops = pieces.stops
        if (
            starts.shape != stops.shape
            or starts.ndim != 1
            or (stops <= starts).any()
            or (starts[1:] < stops[:-1]).any()
        ):
            raise ValueError("pieces are ranges in order, none empty, that do not overlap")
        self.pieces = pieces
        self.entry = entry
        self.crcs: Crcs = np.zeros(len(starts), np.uint32)
        self.is_known: npt.NDArray[np.bool_] = np.zeros(len(starts), np.bool_)
        self.is_due = np.zeros_like(self.is_known)
        self.begun: dict[int, tuple[int, int]] = {}
        """Pieces whose first bytes the last writes have set: where these end, their checksum."""
        self._rows = piece_rows(starts, stops - starts, self.crcs, self.is_known)
        self._serial = serial
        self._num_reads = np.zeros(len(starts), np.int64)

    def inside(self, offset: int, num_bytes: int) -> slice:
        """Returns the pieces that lie completely in a range of the entry."""
        first = int(self.pieces.starts.searchsorted(offset, "left"))
        last = int(self.pieces.stops.searchsorted(offset + num_bytes, "right"))
        return slice(first, max(first, last))

    def touching(self, offset: int, num_bytes: int) -> slice:
        """Returns the pieces that share at least one byte with a range of the entry; none for an
        empty range."""
        first = int(self.pieces.stops.searchsorted(offset, "right"))
        last = int(self.pieces.starts.searchsorted(offset + num_bytes, "left"))
        return slice(first, max(first, last) if num_bytes else first)

    def put(self, which: slice | Numbers, crcs: Crcs) -> None:
        """Sets the checksums of these pieces; they are known from now on."""
        self.crcs[which] = crcs
        self.is_known[which] = True

    def due(self, inside: slice, rotates: bool) -> Numbers:
        """Returns the numbers of those pieces that a read now must verify.

        rotates: verifies one in ROTATION reads of a piece only, and what is due still.
        """
        chosen = self.is_known[inside].copy()
        if rotates:
            self._num_reads[inside] += 1
            is_turn = (self._num_reads[inside] + self._serial) % ROTATION == 0
            chosen &= is_turn | self.is_due[inside]
        numbers: Numbers = inside.start + np.flatnonzero(chosen)
        return numbers

    def turn(self, inside: slice, rotates: bool) -> None:
        """Notes the pieces that a read now must verify, as `due`, in `is_due`, until the read
        counts."""
        due = self.due(inside, rotates)
        self.is_due[inside] = False
        self.is_due[due] = True

    def rows(self, which: slice, base: int) -> PieceRows:
        """These pieces for a program, with the checksums and flags of the table. base: the address
        at which the entry would begin."""
        return moved_rows(self._rows[which], base)

    def take_over(self, other: PieceTable) -> None:
        """Copies the known checksums of another table of this entry for the pieces that both
        have."""
        if not len(other.pieces.starts):
            return
        at = np.searchsorted(other.pieces.starts, self.pieces.starts).clip(
            max=len(other.pieces.starts) - 1
        )
        same = (other.pieces.starts[at] == self.pieces.starts) & (
            other.pieces.stops[at] == self.pieces.stops
        )
        self.crcs[:] = np.where(same, other.crcs[at], 0)
        self.is_known[:] = same & other.is_known[at]


class Sums:
    """The tables of one store's entries; none at first. Its methods are called under the store's
    lock, but for `of_write`.

    Args:
        recorder: gets an event on lane "check" for every read and write that is summed.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # returns a sentence of advice about damaged bytes at a place
        self.advice: Callable[[Place], str] = lambda _: "Go back to the last checkpoint"
        self._tables: dict[str, PieceTable] = {}
        self._workers: Workers | None = None
        self.verify: Verify = "always"
        self.version = 0  # another one when an entry is dropped, and when `verify` or pieces change
        # (entry, start, stop) of pieces that a read has found damaged; a save reads them again
        self.suspects: dict[tuple[str, int, int], None] = {}

    def use(self, workers: Workers | None, verify: Verify) -> None:
        """Chooses the threads that sum, and which reads are checked. Raises ValueError for a word
        that is not allowed."""
        if verify not in get_args(Verify):
            raise ValueError(
                f"verify is {verify!r}; allowed are {', '.join(map(repr, get_args(Verify)))}"
            )
        self._workers = workers
        self.verify = verify
        self.version += 1

    def protect(self, entry: str, pieces: Pieces) -> None:
        """From now on an entry's pieces have checksums: unknown ones, until they are written.

        Pieces that it has already keep what is known of them.
        """
        table = PieceTable(pieces, entry, len(self._tables))
        before = self._tables.get(entry)
        if before is not None:
            table.take_over(before)
        self._tables[entry] = table
        self.version += 1

    def forget(self, entry: str) -> None:
        """Drops an entry's table."""
        self._tables.pop(entry, None)
        for suspect in [each for each in self.suspects if each[0] == entry]:
            del self.suspects[suspect]
        self.version += 1

    def of(self, entry: str) -> PieceTable | None:
        """An entry's table; None when it has no checksums."""
        return self._tables.get(entry)

    def cuts(self, entry: str, num_bytes: int, most_bytes: int) -> Iterator[slice]:
        """Cuts an entry into ranges of at most so many bytes, between pieces where these are no
        longer."""
        table = self._tables.get(entry)
        start = 0
        while start < num_bytes:
            stop = min(start + most_bytes, num_bytes)
            if table is not None and stop < num_bytes:
                whole = table.inside(start, stop - start)
                stop = int(table.pieces.stops[whole][-1]) if whole.stop > whole.start else stop
            yield slice(start, stop)
            start = stop

    def around(self, entry: str, start: int, stop: int) -> slice:
        """The bytes [start, stop) of an entry and the rest of the pieces that they cut, so that a
        read of them verifies all."""
        table = self._tables.get(entry)
        if table is None or self.verify == "resume":
            return slice(start, stop)
        touched = table.touching(start, stop - start)
        firsts = table.pieces.starts[touched].tolist()
        ends = table.pieces.stops[touched].tolist()
        return slice(min([start, *firsts]), max([stop, *ends]))

    def complete(self, entry: str, read: Callable[[int, int], torch.Tensor]) -> PieceTable | None:
        """Makes every checksum of an entry known, by reading what was written in parts. Blocks;
        raises what `read` raises.

        read: (start, stop) -> those bytes of the entry.
        """
        table = self._tables.get(entry)
        if table is not None:
            for number in np.flatnonzero(~table.is_known):
                data = read(int(table.pieces.starts[number]), int(table.pieces.stops[number]))
                table.put(np.array([number]), np.array(crc32c([data], self._workers), np.uint32))
        return table

    def of_write(self, ranges: Iterable[Range]) -> list[WrittenBytes]:
        """Sums what is about to be written, for `keep`. Needs no lock. Blocks."""
        due = self.pieces_of(ranges)
        if not due:
            return []
        inside = [each.expected for each in due]
        crcs = self._sum(inside)
        own = np.split(crcs, np.cumsum([len(each.numbers) for each in inside])[:-1])
        return [WrittenBytes(*pair) for pair in zip(due, own, strict=True)]

    def keep(self, written: Iterable[WrittenBytes]) -> None:
        """Records checksums of `of_write` when their write starts. Pieces that it cuts become
        unknown."""
        for pieces, crcs in written:
            pieces.begin()
            pieces.table.put(pieces.inside, crcs)

    @contextlib.contextmanager
    def patching(self, entry: str, offset: int, data: torch.Tensor) -> Iterator[None]:
        """Encloses writes of whole blocks that change `data` at `offset` of an entry; their other
        bytes were read before.

        Pieces fully inside `data` get new checksums, and so do those that are written in parts from
        their first byte on, with no other write between. Other pieces partly inside lose theirs.
        Others keep theirs: the bytes that were read around `data` are not summed.
        """
        table = self._tables.get(entry)
        if table is None:
            yield
            return
        crcs = table.crcs.copy()
        is_known = table.is_known.copy()
        touched = table.touching(offset, data.numel())
        begun = {each: end for each, end in table.begun.items() if not is_known[each]}
        try:
            yield
        finally:
            crcs[touched] = table.crcs[touched]
            is_known[touched] = False
            table.crcs[:] = crcs
            table.is_known[:] = is_known
            table.begun.clear()
        self.keep(self.of_write([(entry, offset, data)]))
        cut = touched.start + np.flatnonzero(~table.is_known[touched])
        for number in cut.tolist():
            start = int(table.pieces.starts[number])
            stop = int(table.pieces.stops[number])
            first = max(start, offset)
            end, crc = begun.pop(number, (start, 0)) if first > start else (start, 0)
            if first == end:  # the write begins the piece, or goes on with it
                part = data[first - offset : stop - offset]
                end += part.numel()
                crc = crc32c_combine(crc, crc32c([part], self._workers)[0], part.numel())
                begun[number] = end, crc
                table.crcs[number] = crc
                table.is_known[number] = end == stop
        table.begun.update(begun)

    def check_of(
        self, ranges: Iterable[Range], ops: Sequence[Op], files: Callable[[], Mapping[int, str]]
    ) -> Check | None:
        """What is to be compared when a read that starts now has come; None when nothing is.

        ops, files: the transfers, and what tells the files behind their descriptors, for the error.
        """
        expected = []
        is_sample = self.verify == "sample"
        for table, base, inside, _ in self.pieces_of(ranges) if self.verify != "resume" else ():
            due = table.due(inside, is_sample)
            table.is_due[due] |= is_sample  # until it is verified: the read may be cancelled
            if len(due):
                expected.append(_Expected(table, due, table.crcs[due], base))
        return functools.partial(self._check, expected, ops, files) if expected else None

    def pieces_of(self, ranges: Iterable[Range]) -> list[PiecesIn]:
        """The pieces of ranges of those entries that have checksums."""
        found = []
        for entry, offset, data in ranges:
            if (table := self._tables.get(entry)) is not None:
                place = offset, data.numel()
                found.append(
                    PiecesIn(
                        table,
                        data.data_ptr() - offset,
                        table.inside(*place),
                        table.touching(*place),
                    )
                )
        return found

    def checked(self, pieces: Sequence[PiecesIn], is_cut: bool) -> PieceRows:
        """The pieces that a program compares whenever it reads them, if they are known then; after
        `turn`, if that says so.

        is_cut: `PiecesIn.begin` makes some of them unknown before they are read.
        """
        rows = [each.rows() for each in pieces if self.verify != "resume"]
        if rows and (self.verify == "sample" or is_cut):
            for each, own in zip(pieces, rows, strict=True):
                aim_rows(own, each.table.crcs[each.inside], each.table.is_due[each.inside])
        return join_rows(rows)

    def turn(self, pieces: Iterable[PiecesIn], is_cut: bool) -> None:
        """Before a program reads pieces that `checked` has given it; before `PiecesIn.begin`."""
        is_sample = self.verify == "sample"
        for each in pieces if is_sample or (is_cut and self.verify == "always") else ():
            each.table.turn(each.inside, is_sample)

    def settle(self, pieces: Iterable[PiecesIn]) -> None:
        """Notes that reads of `turn` count. Those of a program that is dropped do not: it tells
        nobody of damage."""
        for each in pieces if self.verify == "sample" else ():
            each.table.is_due[each.inside] = False

    def damage(
        self,
        expected: Expected,
        number: int,
        seen: int,
        num_wrong: int,
        ops: Sequence[Op],
        files: Mapping[int, str],
    ) -> DamagedEntry:
        """The error for a piece of a read that is not what was written.

        number: of the piece, through all that were expected; num_wrong: how many are wrong.
        """
        each = expected[0]
        for each in expected:
            if number < len(each.numbers):
                break
            number -= len(each.numbers)
        start = int(each.starts[number])
        length = int(each.num_bytes[number])
        place = Place(
            each.table.entry, start, length, _in_files(each.base + start, length, ops, files)
        )
        self.suspects[place.entry, start, start + length] = None
        piece = each.table.pieces.name(int(each.numbers[number]))
        written = int(each.crcs[number])
        others = (
            f"{num_wrong - 1} more pieces of this read are wrong as well. " if num_wrong > 1 else ""
        )
        return DamagedEntry(place, piece, written, seen, f"{others}{self.advice(place)}")

    def _check(
        self, expected: Expected, ops: Sequence[Op], files: Callable[[], Mapping[int, str]]
    ) -> DamagedEntry | None:
        """Sums what has come; an error for the first piece that is not what was written. Blocks;
        needs no lock."""
        seen = self._sum(expected)
        wrong = np.flatnonzero(seen != np.concatenate([each.crcs for each in expected]))
        if not len(wrong):
            for each in expected if self.verify == "sample" else ():
                each.table.is_due[each.numbers] = False
            return None
        return self.damage(expected, int(wrong[0]), int(seen[wrong[0]]), len(wrong), ops, files())

    def _sum(self, held: Expected) -> Crcs:
        """The checksums of the bytes that lie in memory at the places of these pieces, all at
        once."""
        start_ns = time.monotonic_ns()
        addresses = np.concatenate([each.base + each.starts for each in held])
        lengths = np.concatenate([each.num_bytes for each in held]).astype(np.uint64)
        crcs = crc32c_of(addresses.astype(np.uint64), lengths, self._workers)
        self._recorder.add(
            "check", f"{len(crcs)} pieces", start_ns, time.monotonic_ns(), int(lengths.sum())
        )
        return crcs


class PiecesIn(NamedTuple):
    """The pieces of a range of an entry."""

    table: PieceTable
    base: int  # address at which the entry would begin
    inside: slice  # those that lie in it completely
    touching: slice  # those that share a byte with it

    @property
    def expected(self) -> _Expected:
        """Those inside, as a read must find them."""
        numbers = np.arange(self.inside.start, self.inside.stop)
        return _Expected(self.table, numbers, self.table.crcs[self.inside], self.base)

    def new_crcs(self) -> Crcs:
        """Room for the checksums of those inside."""
        return np.zeros(self.inside.stop - self.inside.start, np.uint32)

    def rows(self, crcs: Crcs | None = None) -> PieceRows:
        """Those inside for a program. crcs: has their checksums; None: the table has them, with its
        flags."""
        rows = self.table.rows(self.inside, self.base)
        return rows if crcs is None else aim_rows(rows, crcs)

    def begin(self) -> None:
        """Before a write that changes the table: pieces that the range cuts become unknown."""
        if self.inside != self.touching:
            self.table.is_known[self.touching] = False
            self.table.begun.clear()


class WrittenBytes(NamedTuple):
    """The checksums of the pieces inside a range that is about to be written."""

    pieces: PiecesIn
    crcs: Crcs


class _Expected(NamedTuple):
    """Pieces of one entry that a read brings, with their checksums when it started."""

    table: PieceTable
    numbers: Numbers
    crcs: Crcs
    base: int  # address at which the entry would begin

    @property
    def starts(self) -> Numbers:
        return self.table.pieces.starts[self.numbers]

    @property
    def num_bytes(self) -> Numbers:
        return self.table.pieces.stops[self.numbers] - self.starts


Expected = list[_Expected]
"""The pieces that a read must bring, entry by entry."""


def _in_files(
    address: int, num_bytes: int, ops: Sequence[Op], files: Mapping[int, str]
) -> tuple[FileRange, ...]:
    """The ranges of files that memory was filled from, in order."""
    found = []
    for op in sorted(ops, key=lambda op: op.address):
        first = max(address, op.address)
        last = min(address + num_bytes, op.address + op.length)
        if first < last:
            path = Path(files.get(op.fd, f"descriptor {op.fd}"))
            found.append(FileRange(path, op.offset + first - op.address, last - first))
    return tuple(found)
