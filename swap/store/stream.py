"""Streams: move byte ranges of entries and files through a few aligned buffers, past the page
cache.

    Bounce        bytes of a store's entries, at any offset and in any memory
    Parts         elements of a store's entries, where they rest
    ReadAhead     ranges of files into a fixed memory, several groups of them at once
    FileReader    ranges of one file
    FileWriter    a new file of a known size, from front to back

O_DIRECT needs aligned offsets, lengths and memory. A read covers whole blocks, and the requested
bytes are copied out of them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.base.native import READ, WRITE, Op, Queue
from tiermem.swap.base.ranges import ALIGNMENT, FileRange, FreeRanges, round_up
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk import durable
from tiermem.swap.disk.direct import open_direct, take_room
from tiermem.swap.disk.queue import InFlight
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore


class Bounce:
    """A few small buffers for transfers between entries and ordinary memory, or at unaligned
    offsets. For one thread at a time.

    The store's own transfers go directly between arena and disk. A user's tensor is not in the
    arena and may lack the alignment that O_DIRECT needs. It is copied through these buffers in
    pieces, several of them in flight.

    Args:
        store: the store of the entries; its arena lends the buffers for its whole life.
        piece_bytes: bytes of each buffer, a multiple of 4096.
        count: number of buffers, that is of pieces in flight.
    """

    def __init__(self, store: TensorStore, piece_bytes: int = 1 << 20, count: int = 4) -> None:
        if piece_bytes <= 0 or piece_bytes % ALIGNMENT or count < 1:
            raise ValueError(
                f"{count} buffers of {piece_bytes} bytes; give at least one, of a multiple of "
                f"{ALIGNMENT}"
            )
        self._store = store
        self._pieces = [
            store.arena.take(piece_bytes, "a bounce buffer").tensor for _ in range(count)
        ]
        self._piece_bytes = piece_bytes
        self._is_used = False

    def read(self, entry: str, start: int, stop: int, into: torch.Tensor) -> None:
        """Copies bytes [start, stop) of an entry on NVME into a uint8 tensor of that length.
        Blocks; raises OSError."""
        _check_range(start, stop, into)
        check = self._store.check_of(entry, start, into)  # of pieces that no buffer holds whole
        with self._in_use() as in_flight:
            for offset, piece in self._cut(start, stop):
                move = self._store.read([(entry, offset, piece)], entry, is_checked=False)
                in_flight.add(functools.partial(_copy_out, move, offset - start, piece, into))
        if check is not None and (damage := check()) is not None:
            raise damage

    def write(self, entry: str, start: int, data: torch.Tensor) -> None:
        """Copies a uint8 tensor into an entry on NVME from byte `start` on. Blocks; raises OSError.

        Other bytes in the same 4096-byte blocks do not change.
        """
        stop = start + data.numel()
        _check_range(start, stop, data)
        with self._store.sums.patching(entry, start, data), self._in_use() as in_flight:
            for offset, piece in self._cut(start, stop):
                first = max(start, offset)
                last = min(stop, offset + piece.numel())
                if last - first < piece.numel():
                    # Not verified: damaged bytes may be the ones to overwrite, and the others keep
                    # their checksums.
                    self._store.read([(entry, offset, piece)], entry, is_checked=False).wait()
                piece[first - offset : last - offset] = data[first - start : last - start]
                in_flight.add(self._store.write([(entry, offset, piece)], entry).wait)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[InFlight]:
        """A block that uses the buffers. After an interrupt the next one waits for transfers that
        are left in them."""
        if self._is_used:
            self._store.end_transfers()
        self._is_used = True
        with InFlight(len(self._pieces)) as in_flight:
            yield in_flight
        self._is_used = False

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (offset, buffer) of each piece of the aligned range around [start, stop); it uses
        the buffers in turn."""
        base = start // ALIGNMENT * ALIGNMENT
        for number, offset in enumerate(
            range(base, stop, self._piece_bytes) if start < stop else ()
        ):
            length = min(self._piece_bytes, round_up(stop - offset, ALIGNMENT))
            yield offset, self._pieces[number % len(self._pieces)][:length]


_COPIED_BYTES = 4 << 20  # between an accelerator and NVMe at once


@dataclasses.dataclass(eq=False)
class Parts:
    """Reads and writes elements of a store's entries, in memory or on NVMe.

    bounce: moves those of entries on NVME; None: there are none.
    """

    _store: TensorStore
    _bounce: Bounce | None

    def read_part(self, entry: str, dtype: torch.dtype, part: slice) -> torch.Tensor:
        """A copy of elements of an entry, on the CPU. Blocks; raises OSError. On NVMe the pieces
        that the elements cut are read whole and verified."""
        if self._store.home_of(entry) is not Tier.NVME:
            return self._store.view(entry).view(dtype)[part].to("cpu", copy=True)
        start = part.start * dtype.itemsize
        stop = part.stop * dtype.itemsize
        whole = self._store.sums.around(entry, start, stop)
        out = torch.empty(whole.stop - whole.start, dtype=torch.uint8)
        assert self._bounce is not None
        self._bounce.read(entry, whole.start, whole.stop, out)
        return out[start - whole.start : stop - whole.start].view(dtype)

    def write_part(self, entry: str, start: int, values: torch.Tensor) -> None:
        """Writes elements of an entry from element `start` on, in its dtype. Blocks; raises
        OSError."""
        if self._store.home_of(entry) is not Tier.NVME:
            at_home = self._store.view(entry).view(values.dtype)
            at_home[start : start + values.numel()].copy_(values)
            return
        assert self._bounce is not None
        self._bounce.write(entry, start * values.itemsize, values.contiguous().view(torch.uint8))

    def copy(self, entry: str, to: str) -> None:
        """Copies the bytes of an entry to another one of that size. Blocks; raises OSError."""
        homes = self._store.home_of(entry), self._store.home_of(to)
        num_bytes = self._store.num_bytes(entry)
        if Tier.NVME not in homes:
            self._store.view(to).copy_(self._store.view(entry))
            return
        assert self._bounce is not None
        if homes[1] is Tier.HOST:
            self._bounce.read(entry, 0, num_bytes, self._store.view(to).view(torch.uint8))
        elif homes[0] is Tier.HOST:
            self._bounce.write(to, 0, self._store.view(entry).view(torch.uint8))
        else:
            on_nvme = to if homes[1] is Tier.NVME else entry
            for part in self._store.sums.cuts(on_nvme, num_bytes, _COPIED_BYTES):
                self.write_part(to, part.start, self.read_part(entry, torch.uint8, part))


def _check_range(start: int, stop: int, data: torch.Tensor) -> None:
    if start < 0 or data.dtype != torch.uint8 or data.numel() != stop - start:
        raise ValueError(
            f"bytes {start} to {stop} pass through a uint8 tensor of that length, not "
            f"{data.numel()} {data.dtype}"
        )


def _copy_out(move: Move, shift: int, piece: torch.Tensor, into: torch.Tensor) -> None:
    """Waits for a piece and copies its requested bytes. The piece begins at byte `shift` of `into`
    (negative: before it)."""
    move.wait()
    first = max(0, shift)
    last = min(into.numel(), shift + piece.numel())
    into[first:last] = piece[first - shift : last - shift]


# ---- reading files -------------------------------------------------------------------------------

_MOST_FILES = 8  # files that stay open


class ReadFile:
    """An open regular file; its path may be a link. Raises OSError when it cannot be opened.

        file    [ block ][ block ] ... [ block ][ tail ]        blocks of 4096 bytes; the tail is read without the queue

    Reads raise OSError (ENODATA) when the file is now shorter than at opening; they never return
    fewer bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = durable.Owned()
        try:
            open_direct(path, os.O_RDONLY | os.O_NONBLOCK, self._own)
            self.fd = self._own[0]
            with durable.named(path):
                durable.check_regular(self.fd)
            self.num_bytes = os.fstat(self.fd).st_size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes it; a second call does nothing."""
        self._own.close()

    def check(self, start: int, stop: int) -> None:
        """Raises OSError (ENODATA) when bytes [start, stop) extend past the end of the file."""
        if stop > self.num_bytes:
            raise self._past_end(start, stop, self.num_bytes)

    def read_tail(self, offset: int, num_bytes: int, buffer: torch.Tensor) -> None:
        """Reads the file's last bytes, less than a block, into a buffer of a block. Blocks; raises
        OSError."""
        num_read = os.preadv(self.fd, [buffer.numpy()], offset)  # type: ignore[list-item]  # numpy is a buffer
        if num_read < num_bytes:
            raise self._past_end(offset, offset + num_bytes, offset + num_read)

    def _past_end(self, start: int, stop: int, end: int) -> OSError:
        return OSError(
            errno.ENODATA,
            f"bytes {start} to {stop} are asked for, the file ends at {end}: it is truncated, "
            "or another file is meant",
            str(self.path),
        )


class ReadAhead:
    """Reads ranges of files into a fixed memory, several groups of ranges at once. For one thread
    at a time.

        start(ranges)      carves memory and submits the reads; returns a Reading, or None while there is too little memory
        Reading.wait()     blocks and returns the bytes of each range, in that memory
        Reading.release()  gives the memory back

    One queue serves all files. The caller releases each Reading, also after an error.

    Args:
        areas: uint8 tensors, page-aligned, of whole pages. The caller must not use them until
            `close`.
    """

    def __init__(self, areas: Sequence[torch.Tensor]) -> None:
        self._areas = [(area, FreeRanges()) for area in areas]
        for area, free in self._areas:
            free.add(0, area.numel())
        self._files = collections.OrderedDict[Path, ReadFile]()
        # ranges that are not released
        self._num_users = collections.Counter[Path]()
        self._names: dict[int, str] = {}
        self._queue: Queue | None = None

    def start(self, ranges: Sequence[FileRange]) -> Reading | None:
        """Starts reading; returns None while unreleased readings leave too little memory for all
        ranges.

        Raises OSError: a file that cannot be opened, or has fewer bytes (ENODATA).
        """
        parts: list[_StreamPart] = []
        try:
            for each in ranges:
                part = self._carve(each)
                if part is None:
                    self._give_back(parts)
                    return None
                parts.append(part)
            ops = [
                Op(READ, part.file.fd, part.buffer.data_ptr(), part.num_whole, part.base)
                for part in parts
                if part.num_whole
            ]
            in_flight = None
            if ops:
                assert self._queue is not None  # opened with the first file
                in_flight = self._queue, self._queue.submit(ops)
            return Reading(in_flight, parts, self._give_back)
        except BaseException:
            self._give_back(parts)
            raise

    def open(self, path: Path) -> ReadFile:
        """Opens a file, or returns the open one. Raises OSError, also when no queue can be opened.

        At most 8 unused files stay open. The first file always stays open: the queue chose its
        engine for that file system, and the kernel may have registered the file.
        """
        if path not in self._files:
            unused = [each for each in self._files if not self._num_users[each]]
            for each in unused[: max(0, len(self._files) + 1 - _MOST_FILES)]:
                closed = self._files.pop(each)
                del self._names[closed.fd]
                closed.close()
            opened = self._files[path] = ReadFile(path)
            self._names[opened.fd] = str(path)
        self._files.move_to_end(path)
        if self._queue is None:
            self._num_users.update(list(self._files))
            self._queue = Queue(files=self._names)
        return self._files[path]

    def close(self) -> None:
        """Ends reads in flight and closes the files. Readings are invalid afterwards."""
        try:
            if self._queue is not None:
                self._queue.close()
        finally:
            while self._files:
                self._files.popitem()[1].close()
            self._areas.clear()

    def _carve(self, wanted: FileRange) -> _StreamPart | None:
        file = self.open(wanted.path)
        start = wanted.offset
        stop = start + wanted.num_bytes
        file.check(start, stop)
        base = start // ALIGNMENT * ALIGNMENT
        size = round_up(stop - base, ALIGNMENT)
        for index, (area, free) in enumerate(self._areas):
            at = free.take(size)
            if at is not None:
                self._num_users[file.path] += 1
                buffer = area[at : at + size]
                return _StreamPart(
                    file, index, at, buffer, base, buffer[start - base : stop - base]
                )
        return None

    def _give_back(self, parts: Sequence[_StreamPart]) -> None:
        for part in parts:
            self._num_users[part.file.path] -= 1
            if self._areas:
                self._areas[part.area][1].add(part.at, part.buffer.numel())


@dataclasses.dataclass
class Reading:
    """Ranges that are being read into the memory of a ReadAhead, until `release`. ReadAhead makes
    it."""

    _in_flight: tuple[Queue, int] | None  # a queue and its tag, until they are waited for
    _parts: list[_StreamPart]
    _give_back: Callable[[Sequence[_StreamPart]], None]

    def wait(self) -> list[torch.Tensor]:
        """Returns the bytes of each range, valid until `release`. Blocks; raises OSError that names
        the file."""
        if self._in_flight is not None:
            queue, tag = self._in_flight
            queue.finish(tag)
            self._in_flight = None
        for part in self._parts:
            part.read_tail()
        return [part.data for part in self._parts]

    def release(self) -> None:
        """Gives the memory back, after it has cancelled or waited for reads in flight. A second
        call does nothing."""
        if self._in_flight is not None:
            queue, tag = self._in_flight
            # ENOENT: it was answered, and its error was raised or an interrupt came
            with contextlib.suppress(OSError):
                queue.cancel(tag)
                queue.wait(tag)
            self._in_flight = None
        parts = self._parts
        self._parts = []
        self._give_back(parts)


class _StreamPart(NamedTuple):
    """One range: whole blocks around it, and itself."""

    file: ReadFile
    area: int
    at: int
    buffer: torch.Tensor
    base: int  # of the buffer, in the file
    data: torch.Tensor

    @property
    def num_whole(self) -> int:
        """Bytes of the buffer that are whole blocks of the file."""
        return min(self.buffer.numel(), (self.file.num_bytes - self.base) // ALIGNMENT * ALIGNMENT)

    def read_tail(self) -> None:
        """Reads those bytes of the range that lie after the file's last whole block."""
        whole = self.num_whole
        num_bytes = min(self.buffer.numel(), self.file.num_bytes - self.base) - whole
        if num_bytes > 0:
            self.file.read_tail(
                self.base + whole, num_bytes, self.buffer[whole : whole + ALIGNMENT]
            )


_READ_PIECE_BYTES = 4 << 20
_NUM_PIECES = 4


class FileReader(contextlib.AbstractContextManager["FileReader"]):
    """An open file with its own queue, for reading checkpoints. Use it in a `with` block.

    It does not use mmap, and never holds the whole file in memory. Raises OSError when the file
    cannot be opened. Thread-safe: reads of several threads take turns, and the end of the block
    waits for the read that goes on.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._turn = threading.Lock()
        with contextlib.ExitStack() as opened:
            arena = Arena(_READ_PIECE_BYTES * _NUM_PIECES)
            opened.callback(arena.close)
            self._ahead = ReadAhead([arena.take(arena.limit_bytes, "read buffers").tensor])
            opened.callback(self._ahead.close)
            self._file = self._ahead.open(self.path)
            self.num_bytes = self._file.num_bytes
            self._closing = opened.pop_all()
        self._is_closed = False

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._is_closed = True
            self._closing.close()

    def read(self, start: int, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor with bytes [start, start + num_bytes).

        Blocks. Raises OSError (ENODATA) past the end, ValueError for no range, and after the end of
        the `with` block.
        """
        with self._turn, InFlight(_NUM_PIECES) as in_flight:
            if self._is_closed:
                raise ValueError(f"{self.path} is closed")
            stop = start + num_bytes
            if start < 0 or num_bytes < 0:
                raise ValueError(f"bytes {start} to {stop} of {self.path} are no range")
            self._file.check(start, stop)
            out = torch.empty(num_bytes, dtype=torch.uint8)
            base = start // ALIGNMENT * ALIGNMENT
            for offset in range(base, stop, _READ_PIECE_BYTES) if num_bytes else ():
                first = max(offset, start)
                last = min(offset + _READ_PIECE_BYTES, stop)
                reading = self._ahead.start([FileRange(self.path, first, last - first)])
                assert reading is not None  # the memory holds as many pieces as are in flight
                in_flight.add(
                    functools.partial(_take_out, reading, out[first - start : last - start])
                )
        return out


def _take_out(reading: Reading, into: torch.Tensor) -> None:
    try:
        for data in reading.wait():
            into.copy_(data)
    finally:
        reading.release()


# ---- writing files -------------------------------------------------------------------------------

_WRITE_PIECE_BYTES = 1 << 20


class FileWriter(contextlib.AbstractContextManager["FileWriter"]):
    """A new file that is written from front to back, by one thread at a time. After an error the
    file is removed.

        put(bytes) -> a few aligned buffers in turn -> the queue -> disk        close: last bytes, exact length, sync

    It writes states that have no home on disk, once, when they are saved. It takes the disk space
    first, so that a full disk raises before the first write. `abandon`, or an error in the `with`
    block, removes the file.

    Args:
        path: must not exist.
        num_bytes: the final length; 0 makes an empty file.

    Raises OSError when the file exists, the folder does not exist, or the disk is too full.
    """

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        self.path = Path(path)
        self.num_bytes = num_bytes
        self._offset = 0  # of the present buffer, in the file
        self._filled = 0  # bytes in the present buffer
        self._in_flight = InFlight(_NUM_PIECES)
        self._is_ended = False
        with contextlib.ExitStack() as opened:
            with durable.named(self.path):
                own = durable.Owned([durable.create(self.path)])
            opened.callback(self.path.unlink, missing_ok=True)
            closing = contextlib.ExitStack()
            opened.push(closing)
            found = durable.Owned()
            closing.callback(found.close)
            with own as made:
                open_direct(Path(f"/proc/self/fd/{made}"), os.O_RDWR, found)
            self._fd = found[0]
            if num_bytes:
                take_room(self._fd, 0, round_up(num_bytes, ALIGNMENT), self.path)
            arena = Arena(_WRITE_PIECE_BYTES * _NUM_PIECES)
            closing.callback(arena.close)
            self._pieces = [
                arena.take(_WRITE_PIECE_BYTES, "a write buffer").tensor.numpy()
                for _ in range(_NUM_PIECES)
            ]
            self._queue = Queue(files={self._fd: str(self.path)})
            closing.callback(self._queue.close)
            opened.pop_all()
        self._closing = closing

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def position(self) -> int:
        """Number of bytes put so far."""
        return self._offset + self._filled

    def put(self, data: torch.Tensor | npt.NDArray[np.uint8]) -> None:
        """Adds a flat uint8 CPU tensor or array; the caller may change it after the return.

        Blocks while all buffers are in flight. Raises OSError of this or an earlier write,
        ValueError beyond num_bytes.
        """
        data = data.numpy() if isinstance(data, torch.Tensor) else data
        num_bytes = len(data)
        done = 0
        if self.position + num_bytes > self.num_bytes:
            raise ValueError(
                f"{self.path}: byte {self.position + num_bytes} of a file of {self.num_bytes} bytes"
            )
        while done < num_bytes:
            taken = min(num_bytes - done, _WRITE_PIECE_BYTES - self._filled)
            self._piece()[self._filled : self._filled + taken] = data[done : done + taken]
            self._filled += taken
            done += taken
            if self._filled == _WRITE_PIECE_BYTES:
                self._write()

    def skip_to(self, position: int) -> None:
        """Writes zeros up to a position."""
        if position != self.position:
            self.put(np.zeros(position - self.position, np.uint8))

    def close(self) -> None:
        """Ends every write and syncs the file. Its name is durable after a sync of the folder.
        Blocks.

        Raises OSError, or ValueError when fewer than num_bytes were put; then the file is removed.
        """
        try:
            if self.position != self.num_bytes:
                raise ValueError(f"{self.path}: {self.position} of {self.num_bytes} bytes were put")
            if self._filled:
                self._piece()[self._filled :] = 0
                self._write()
            self._in_flight.finish()
            os.ftruncate(self._fd, self.num_bytes)
            durable.sync(self._fd, self.path)
        except BaseException:
            self.abandon()
            raise
        self._end()

    def abandon(self) -> None:
        """Ends every write and removes the file. Never raises; does nothing after `close`."""
        if self._is_ended:
            return
        self._in_flight.abandon()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._end()

    def _end(self) -> None:
        self._is_ended = True
        self._pieces.clear()
        self._closing.close()

    def _piece(self) -> npt.NDArray[np.uint8]:
        """Returns the present buffer; no write of it is in flight."""
        return self._pieces[self._offset // _WRITE_PIECE_BYTES % _NUM_PIECES]

    def _write(self) -> None:
        """Starts writing the present buffer, in whole blocks."""
        length = round_up(self._filled, ALIGNMENT)
        tag = self._queue.submit(
            [Op(WRITE, self._fd, self._piece().ctypes.data, length, self._offset)]
        )
        self._offset += self._filled
        self._filled = 0
        self._in_flight.add(functools.partial(self._queue.finish, tag))
