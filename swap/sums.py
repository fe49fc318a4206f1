"""Sums: the checksums of a store's entries, taken when their bytes are written and compared when these are read.

    protect(entry, pieces)     from now on its pieces have checksums (pieces.py)
    write     the bytes are summed before they are given to the disk: nobody may change them under it
    read      what is expected is kept when the read starts; when the bytes have come they are summed, before anybody sees
              them. A difference is the Move's failure: DamagedEntry, which names file, offset and piece

What is summed lies in memory that has just been computed or has just come, on the threads that kernels share, while the disk
goes on with other transfers. Reads of a part of a piece are not checked. Whoever knows what to do about a corruption gives
the sentence (`advise`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.checksum import Crcs, Pieces, PieceTable, crc32c
from tiermem.swap.errors import DamagedEntry
from tiermem.swap.native import Op, Workers, crc32c_of
from tiermem.swap.queue import Recorder
from tiermem.swap.ranges import Numbers

Verify = Literal["always", "sample", "resume"]
"""Which reads are checked: all, of each piece one in 16 (another sixteenth of the entries each time), none."""

Range = tuple[str, int, torch.Tensor]
"""An entry, a byte offset in it, and the uint8 buffer that is read into or written from."""

Files = Callable[[], Mapping[int, str]]


class FileRange(NamedTuple):
    """Bytes of a file."""

    file: str
    offset: int
    num_bytes: int


class Place(NamedTuple):
    """Where a piece that came wrong lies: in an entry, and in files, in order."""

    entry: str
    offset: int
    num_bytes: int
    ranges: tuple[FileRange, ...]


class Sums:
    """The tables of one store's entries; none at first. Its methods are called under the store's lock, but for `of_write`.

    Args:
        recorder: gets an event on lane "check" for every read and write that is summed.

    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._advice: Callable[[Place], str] = lambda _: "Go back to the last checkpoint"
        self._tables: dict[str, PieceTable] = {}
        self._workers: Workers | None = None
        self._verify: Verify = "always"

    def advise(self, advice: Callable[[Place], str]) -> None:
        """`advice` says from here on what to do about a corruption at a place, in a sentence."""
        self._advice = advice

    def use(self, workers: Workers | None, verify: Verify) -> None:
        """Chooses the threads that sum, and which reads are checked. Raises ValueError for a word that is not allowed."""
        if verify not in get_args(Verify):
            raise ValueError(f"verify is {verify!r}; allowed are {', '.join(map(repr, get_args(Verify)))}")
        self._workers, self._verify = workers, verify

    def protect(self, entry: str, pieces: Pieces) -> None:
        """From now on an entry's pieces have checksums: unknown ones, until they are written.

        Pieces that it has already keep what is known of them.
        """
        table, before = PieceTable(pieces, serial=len(self._tables)), self._tables.get(entry)
        if before is not None:
            table.take_over(before)
        self._tables[entry] = table

    def forget(self, entry: str) -> None:
        """An entry is gone."""
        self._tables.pop(entry, None)

    def of(self, entry: str) -> PieceTable | None:
        """An entry's table; None when it has no checksums."""
        return self._tables.get(entry)

    def complete(self, entry: str, read: Callable[[int, int], torch.Tensor]) -> PieceTable | None:
        """Makes every checksum of an entry known, by reading what was written in parts. Blocks; raises what `read` raises.

        read: (start, stop) -> those bytes of the entry.
        """
        table = self._tables.get(entry)
        for number in table.unknown() if table is not None else ():
            assert table is not None
            data = read(int(table.pieces.starts[number]), int(table.pieces.stops[number]))
            table.put(np.array([number]), np.array(crc32c([data], self._workers), np.uint32))
        return table

    def of_write(self, ranges: Iterable[Range]) -> list[Written]:
        """Sums what is about to be written, of which `keep` is told when it is. Needs no lock. Blocks."""
        due = [(self._tables[entry], offset, data) for entry, offset, data in ranges if entry in self._tables]
        addresses, num_bytes, counts = [], [], []
        for table, offset, data in due:
            inside = table.inside(offset, data.numel())
            starts, stops = table.pieces.starts[inside], table.pieces.stops[inside]
            addresses.append(starts + (data.data_ptr() - offset))
            num_bytes.append(stops - starts)
            counts.append(len(starts))
        if not due:
            return []
        crcs = _sum(_joined(addresses), _joined(num_bytes), self._workers, self._recorder)  # of all ranges at once
        own = np.split(crcs, np.cumsum(counts)[:-1])
        return [Written(table, at, data.numel(), each) for (table, at, data), each in zip(due, own, strict=True)]

    def keep(self, written: Iterable[Written]) -> None:
        """What has been summed is on its way to the disk."""
        for each in written:
            each.table.overwrite(each.offset, each.num_bytes, each.crcs)

    @contextlib.contextmanager
    def patching(self, entry: str, offset: int, data: torch.Tensor) -> Iterator[None]:
        """Round writes of whole blocks that change no more of an entry than `data` at `offset`: what else they hold had been
        read before.

        What lies in `data` whole is known afterwards, what it cuts is not, and the rest keeps its checksums: they are not
        those of what was read.
        """
        table = self._tables.get(entry)
        if table is None:
            yield
            return
        crcs, is_known, touched = table.crcs.copy(), table.is_known.copy(), table.touching(offset, data.numel())
        try:
            yield
        finally:
            crcs[touched], is_known[touched] = table.crcs[touched], False
            table.crcs, table.is_known = crcs, is_known
        self.keep(self.of_write([(entry, offset, data)]))

    def check_of(self, ranges: Iterable[Range], ops: Sequence[Op], files: Files) -> Check | None:
        """What is to be compared when a read that starts now has come; None when nothing is.

        ops, files: the transfers, and what tells the files behind their descriptors, for the error.
        """
        if self._verify == "resume":
            return None
        expected = []
        for entry, offset, data in ranges:
            table = self._tables.get(entry)
            if table is not None:
                due = table.due(offset, data.numel(), rotates=self._verify == "sample")
                if len(due):
                    expected.append(_Expected(entry, table.pieces, due, table.crcs[due], data.data_ptr() - offset))
        return Check(expected, ops, files, self._workers, self._recorder, self._advice) if expected else None


class Written(NamedTuple):
    """What the pieces inside a range will have, once it is written."""

    table: PieceTable
    offset: int
    num_bytes: int
    crcs: Crcs


class _Expected(NamedTuple):
    """Pieces of one entry that a read brings, with their checksums when it started."""

    entry: str
    pieces: Pieces
    numbers: Numbers
    crcs: Crcs
    base: int  # address at which the entry would begin

    @property
    def starts(self) -> Numbers:
        return self.pieces.starts[self.numbers]

    @property
    def num_bytes(self) -> Numbers:
        return self.pieces.stops[self.numbers] - self.starts


class Check:
    """A comparison that is due when a read's bytes have come. It holds no lock and may run on any thread."""

    def __init__(
        self,
        expected: Sequence[_Expected],
        ops: Sequence[Op],
        files: Files,
        workers: Workers | None,
        recorder: Recorder,
        advice: Callable[[Place], str],
    ) -> None:
        self._expected = expected
        self._ops = ops
        self._files = files
        self._workers = workers
        self._recorder = recorder
        self._advice = advice

    def __call__(self) -> DamagedEntry | None:
        """Sums what has come; an error for the first piece that is not what was written. Blocks."""
        addresses = _joined([each.base + each.starts for each in self._expected])
        num_bytes = _joined([each.num_bytes for each in self._expected])
        seen = _sum(addresses, num_bytes, self._workers, self._recorder)
        wrong = np.flatnonzero(seen != np.concatenate([each.crcs for each in self._expected]))
        if not len(wrong):
            return None
        return self._error(int(wrong[0]), int(seen[wrong[0]]), len(wrong) - 1)

    def _error(self, number: int, seen: int, num_others: int) -> DamagedEntry:
        each = self._expected[0]
        for each in self._expected:
            if number < len(each.numbers):
                break
            number -= len(each.numbers)
        start, length = int(each.starts[number]), int(each.num_bytes[number])
        place = Place(each.entry, start, length, tuple(self._ranges(each.base + start, length)))
        others = f"{num_others} more pieces of this read are wrong as well. " if num_others else ""
        piece, written = each.pieces.name(int(each.numbers[number])), int(each.crcs[number])
        file, offset, _ = place.ranges[0]
        advice = f"{others}{self._advice(place)}"
        return DamagedEntry(file, offset, length, each.entry, start, piece, written, seen, advice)

    def _ranges(self, address: int, num_bytes: int) -> Iterator[FileRange]:
        """What of which files memory was filled from."""
        files = self._files()
        for op in sorted(self._ops, key=lambda op: op.address):
            first, last = max(address, op.address), min(address + num_bytes, op.address + op.length)
            if first < last:
                file = files.get(op.fd, f"descriptor {op.fd}")
                yield FileRange(file, op.offset + first - op.address, last - first)


def _sum(
    addresses: npt.NDArray[np.uint64], num_bytes: npt.NDArray[np.uint64], workers: Workers | None, recorder: Recorder
) -> Crcs:
    start_ns = time.monotonic_ns()
    crcs = crc32c_of(addresses, num_bytes, workers)
    recorder.add("check", f"{len(crcs)} pieces", start_ns, time.monotonic_ns(), int(num_bytes.sum()))
    return crcs


def _joined(rows: Sequence[Numbers]) -> npt.NDArray[np.uint64]:
    return np.concatenate(rows).astype(np.uint64)
