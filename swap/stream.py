"""Streams: files in other formats, read and written past the page cache through a few aligned buffers."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from tiermem.swap import durable
from tiermem.swap.arena import Arena
from tiermem.swap.direct import open_direct, take_room
from tiermem.swap.move import Move
from tiermem.swap.native import READ, WRITE, Op, Queue
from tiermem.swap.ranges import ALIGNMENT, FreeRanges, round_up
from tiermem.swap.store import TensorStore

# ---- Bounce: a few small aligned buffers for bytes that lie in ordinary memory, or at odd offsets --------------------
#
# What the store moves for its own sake goes straight between arena and disk. A user's tensor has neither the alignment
# that O_DIRECT asks for nor a place in the arena; it passes through these buffers piece by piece, several in flight.


class Bounce:
    """Buffers carved from a store's arena, for as long as the store lives. For one thread at a time.

    Args:
        store: whose entries are read and written.
        piece_bytes: of each buffer, a multiple of 4096.
        count: buffers, the pieces in flight.
    """

    def __init__(self, store: TensorStore, piece_bytes: int = 1 << 20, count: int = 4) -> None:
        if piece_bytes <= 0 or piece_bytes % ALIGNMENT or count < 1:
            raise ValueError(f"{count} buffers of {piece_bytes} bytes; give at least one, of a multiple of {ALIGNMENT}")
        self._store = store
        self._pieces = [store.arena.take(piece_bytes, "a bounce buffer").tensor for _ in range(count)]
        self._piece_bytes = piece_bytes

    def read(self, entry: str, start: int, stop: int, into: torch.Tensor) -> None:
        """Copies bytes [start, stop) of an entry on NVME into a uint8 tensor of that length. Blocks; raises OSError."""
        _check_range(start, stop, into)
        under_way: collections.deque[tuple[int, torch.Tensor, Move]] = collections.deque()
        try:
            for offset, piece in self._cut(start, stop):
                if len(under_way) == len(self._pieces):
                    _take_out(under_way, start, stop, into)
                under_way.append((offset, piece, self._store.read([(entry, offset, piece)], entry)))
            while under_way:
                _take_out(under_way, start, stop, into)
        finally:
            for _, _, move in under_way:
                move.cancel()  # after an error: the buffers are used again

    def write(self, entry: str, start: int, data: torch.Tensor) -> None:
        """Copies a uint8 tensor into an entry on NVME from byte `start` on. Blocks; raises OSError.

        What shares a 4096-byte block with the range is kept.
        """
        _check_range(start, start + data.numel(), data)
        with self._store.sums.patching(entry, start, data):
            self._write(entry, start, data)

    def _write(self, entry: str, start: int, data: torch.Tensor) -> None:
        stop = start + data.numel()
        moves: collections.deque[Move] = collections.deque()
        try:
            for offset, piece in self._cut(start, stop):
                if len(moves) == len(self._pieces):
                    moves.popleft().wait()
                first, last = max(start, offset), min(stop, offset + piece.numel())
                if last - first < piece.numel():
                    # Not checked: what is wrong may be about to be overwritten, and the rest keeps its checksums.
                    self._store.read([(entry, offset, piece)], entry, is_checked=False).wait()
                piece[first - offset : last - offset] = data[first - start : last - start]
                moves.append(self._store.write([(entry, offset, piece)], entry))
            while moves:
                moves.popleft().wait()
        finally:
            for move in moves:
                with contextlib.suppress(OSError):  # not the first error; the store raises it when it settles
                    move.wait()

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset, buffer) of each piece of an aligned range that covers [start, stop), buffers in turn."""
        base = start // ALIGNMENT * ALIGNMENT
        for number, offset in enumerate(range(base, stop, self._piece_bytes) if start < stop else ()):
            length = min(self._piece_bytes, -(-(stop - offset) // ALIGNMENT) * ALIGNMENT)
            yield offset, self._pieces[number % len(self._pieces)][:length]


def _check_range(start: int, stop: int, data: torch.Tensor) -> None:
    if start < 0 or data.dtype != torch.uint8 or data.numel() != stop - start:
        raise ValueError(
            f"bytes {start} to {stop} pass through a uint8 tensor of that length, not {data.numel()} {data.dtype}"
        )


def _take_out(
    under_way: collections.deque[tuple[int, torch.Tensor, Move]], start: int, stop: int, into: torch.Tensor
) -> None:
    offset, piece, move = under_way[0]
    move.wait()
    under_way.popleft()
    first, last = max(start, offset), min(stop, offset + piece.numel())
    into[first - start : last - start] = piece[first - offset : last - offset]


# ---- ReadFile: somebody else's file, open to be read past the page cache ---------------------------------------------
#
#     file    [ block ][ block ] ... [ block ][ tail ]        of 4096 bytes; what is less than one is read at once
#
# Its bytes may be fewer than they were when it was opened: that is an error (ENODATA), never a short answer.


class ReadFile:
    """An open regular file, also through a link. Raises OSError when it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd, _ = open_direct(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with durable.named(path):
                durable.check_regular(self.fd)
            self.num_bytes = os.fstat(self.fd).st_size
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Closes it; once."""
        os.close(self.fd)

    def check(self, start: int, stop: int) -> None:
        """Raises OSError (ENODATA) for bytes [start, stop) that the file has not."""
        if stop > self.num_bytes:
            raise self._past_end(start, stop, self.num_bytes)

    def read_tail(self, offset: int, num_bytes: int, buffer: torch.Tensor) -> None:
        """Reads the file's last bytes, less than a block, into a buffer of a block. Blocks; raises OSError."""
        num_read = os.preadv(self.fd, [buffer.numpy()], offset)  # type: ignore[list-item]  # numpy is a buffer
        if num_read < num_bytes:
            raise self._past_end(offset, offset + num_bytes, offset + num_read)

    def _past_end(self, start: int, stop: int, end: int) -> OSError:
        what = (
            f"bytes {start} to {stop} are asked for, the file ends at {end}: it is truncated, or another file is meant"
        )
        return OSError(errno.ENODATA, what, str(self.path))


# ---- FileReader: byte ranges of somebody else's file, through a queue of its own, past the page cache ----------------
#
# For checkpoints that are loaded: never mmapped, never the whole file in memory. Reads over-read to the alignment that
# O_DIRECT asks for and copy out what was asked; what direct.py finds unfit for O_DIRECT is read buffered.

_READ_PIECE_BYTES = 4 << 20
_NUM_PIECES = 4


class FileReader:
    """An open file, for one thread at a time. Use it in a `with` block.

    Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with contextlib.ExitStack() as opened:
            self._file = ReadFile(self.path)
            opened.callback(self._file.close)
            self.num_bytes = self._file.num_bytes
            arena = Arena(_READ_PIECE_BYTES * _NUM_PIECES)
            opened.callback(arena.close)
            self._pieces = [arena.take(_READ_PIECE_BYTES, "a read buffer").tensor for _ in range(_NUM_PIECES)]
            self._queue = Queue(files={self._file.fd: str(self.path)})
            opened.callback(self._queue.close)
            self._closing = opened.pop_all()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pieces.clear()
        self._closing.close()

    def read(self, start: int, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor with bytes [start, start + num_bytes). Blocks; raises OSError (ENODATA) past the end."""
        stop = start + num_bytes
        if start < 0 or num_bytes < 0:
            raise ValueError(f"bytes {start} to {stop} of {self.path} are no range")
        self._file.check(start, stop)
        wanted = _Wanted(start, stop, torch.empty(num_bytes, dtype=torch.uint8))
        under_way: collections.deque[_Piece] = collections.deque()
        try:
            for number, offset in enumerate(range(start // ALIGNMENT * ALIGNMENT, stop, _READ_PIECE_BYTES)):
                if len(under_way) == _NUM_PIECES:
                    self._take_out(under_way, wanted)
                self._start(offset, self._pieces[number % _NUM_PIECES], wanted, under_way)
            while under_way:
                self._take_out(under_way, wanted)
        finally:
            for piece in under_way:  # after an error: the buffers are used again
                self._queue.wait(piece.tag)
        return wanted.out

    def _start(self, offset: int, buffer: torch.Tensor, wanted: _Wanted, under_way: collections.deque[_Piece]) -> None:
        """Starts reading whole blocks; what is behind the file's last whole block is read at once."""
        length = min(_READ_PIECE_BYTES, round_up(wanted.stop - offset, ALIGNMENT), self.num_bytes - offset)
        whole = length // ALIGNMENT * ALIGNMENT
        if whole:
            tag = self._queue.submit([Op(READ, self._file.fd, buffer.data_ptr(), whole, offset)])
            under_way.append(_Piece(offset, buffer[:whole], tag))
        if length > whole:
            tail = buffer[whole : whole + ALIGNMENT]
            self._file.read_tail(offset + whole, length - whole, tail)
            wanted.keep(offset + whole, tail[: length - whole])

    def _take_out(self, under_way: collections.deque[_Piece], wanted: _Wanted) -> None:
        offset, buffer, tag = under_way.popleft()
        answer = self._queue.wait(tag)
        assert answer is not None  # no time-out was given
        self._queue.raise_for(answer)
        wanted.keep(offset, buffer)


class _Wanted(NamedTuple):
    """The range asked for and where it goes."""

    start: int
    stop: int
    out: torch.Tensor

    def keep(self, offset: int, piece: torch.Tensor) -> None:
        """Copies out what of a piece, read from `offset` on, was asked for."""
        first, last = max(self.start, offset), min(self.stop, offset + piece.numel())
        if last > first:
            self.out[first - self.start : last - self.start] = piece[first - offset : last - offset]


class _Piece(NamedTuple):
    """A buffer that is being filled from `offset` on."""

    offset: int
    buffer: torch.Tensor
    tag: int


# ---- FileWriter: a new file of a known size, filled from front to back past the page cache, whole or not there -------
#
#     put(bytes) -> a few aligned buffers in turn -> the queue -> disk        close: the rest, its true length, sync
#
# For what has no home on disk and is written once, when it is saved. Its room is taken first, so that a full disk is an
# error before anything is written. Until `close` has returned it is nobody's: `abandon`, or an error in the `with`
# block, removes it.

_WRITE_PIECE_BYTES = 1 << 20


class FileWriter:
    """A file that is being filled, by one thread at a time.

    Args:
        path: must not exist.
        num_bytes: its length in the end; 0 makes an empty file.

    Raises OSError: it exists, the folder does not, the disk is too full.
    """

    def __init__(self, path: str | os.PathLike[str], num_bytes: int) -> None:
        self.path = Path(path)
        self.num_bytes = num_bytes
        self._offset = 0  # of the buffer at hand, in the file
        self._filled = 0  # bytes in it
        self._tags: list[int | None] = [None] * _NUM_PIECES
        self._closing: contextlib.ExitStack | None = None
        with contextlib.ExitStack() as opened:
            with durable.named(self.path):
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            opened.callback(self.path.unlink, missing_ok=True)
            self._fd, _ = open_direct(self.path, os.O_RDWR)
            closing = contextlib.ExitStack()
            opened.push(closing)
            closing.callback(os.close, self._fd)
            if num_bytes:
                take_room(self._fd, 0, round_up(num_bytes, ALIGNMENT), self.path)
            arena = Arena(_WRITE_PIECE_BYTES * _NUM_PIECES)
            closing.callback(arena.close)
            self._pieces = [arena.take(_WRITE_PIECE_BYTES, "a write buffer").tensor for _ in range(_NUM_PIECES)]
            self._queue = Queue(files={self._fd: str(self.path)})
            closing.callback(self._queue.close)
            opened.pop_all()
        self._closing = closing

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def position(self) -> int:
        """Bytes that have been put."""
        return self._offset + self._filled

    def put(self, data: torch.Tensor) -> None:
        """Adds a flat uint8 CPU tensor, which may change as soon as this returns. Blocks while all buffers are under way.

        Raises OSError of this or an earlier write, ValueError beyond the size that was told.
        """
        if self.position + data.numel() > self.num_bytes:
            raise ValueError(f"{self.path}: byte {self.position + data.numel()} of a file of {self.num_bytes} bytes")
        done = 0
        while done < data.numel():
            piece = self._piece()
            taken = min(data.numel() - done, piece.numel() - self._filled)
            piece[self._filled : self._filled + taken] = data[done : done + taken]
            self._filled += taken
            done += taken
            if self._filled == piece.numel():
                self._write(piece)

    def skip_to(self, position: int) -> None:
        """Fills up with zeros."""
        self.put(torch.zeros(position - self.position, dtype=torch.uint8))

    def close(self) -> None:
        """Ends every write and makes the file durable; its name is when the folder is synced. Blocks; raises OSError.

        What fails removes the file.
        """
        try:
            if self.position != self.num_bytes:
                raise ValueError(f"{self.path}: {self.position} of {self.num_bytes} bytes were put")
            if self._filled:
                piece = self._piece()
                piece[self._filled :].zero_()
                self._write(piece[: round_up(self._filled, ALIGNMENT)])
            for number in range(_NUM_PIECES):
                self._await(number)
            os.ftruncate(self._fd, self.num_bytes)
            durable.sync(self._fd, self.path)
        except BaseException:
            self.abandon()
            raise
        self._end()

    def abandon(self) -> None:
        """Ends every write and removes the file. Never raises; does nothing after `close`."""
        if self._closing is None:
            return
        for number in range(_NUM_PIECES):
            with contextlib.suppress(OSError):  # the first error is on its way already
                self._await(number)
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._end()

    def _end(self) -> None:
        closing, self._closing = self._closing, None
        self._pieces.clear()
        if closing is not None:
            closing.close()

    def _piece(self) -> torch.Tensor:
        """The buffer at hand, once what it held before is written."""
        number = self._offset // _WRITE_PIECE_BYTES % _NUM_PIECES
        self._await(number)
        return self._pieces[number]

    def _write(self, piece: torch.Tensor) -> None:
        number = self._offset // _WRITE_PIECE_BYTES % _NUM_PIECES
        op = Op(WRITE, self._fd, piece.data_ptr(), piece.numel(), self._offset)
        self._tags[number] = self._queue.submit([op])
        self._offset += self._filled
        self._filled = 0

    def _await(self, number: int) -> None:
        tag, self._tags[number] = self._tags[number], None
        if tag is not None:
            answer = self._queue.wait(tag)
            assert answer is not None  # no time-out was given
            self._queue.raise_for(answer)


# ---- ReadAhead: ranges of other people's files on their way into a fixed memory, several groups of them at once ------
#
#     start(ranges)  ->  Reading     carved out of the memory, submitted, not waited for; None: there is no room just now
#     Reading.wait() ->  the bytes of each range, where they lie in the memory    release() -> room for the next
#
# One queue serves all files, past the page cache; what of a block was not asked for is read and left out. Whoever
# starts a reading releases it, also after an error. For one thread at a time.

_MOST_FILES = 8  # that stay open while nothing of them is under way


class FileRange(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    num_bytes: int


class ReadAhead:
    """Files, a queue and the memory that bytes come into.

    Args:
        areas: uint8 tensors, page-aligned and of whole pages; the caller's, for this alone until it is closed.

    Raises OSError when no queue can be had.
    """

    def __init__(self, areas: Sequence[torch.Tensor]) -> None:
        self._areas = [(area, FreeRanges()) for area in areas]
        for area, free in self._areas:
            free.add(0, area.numel())
        self._files: collections.OrderedDict[Path, _OpenFile] = collections.OrderedDict()
        self._names: dict[int, str] = {}
        self._queue = Queue(files=self._names)

    def start(self, ranges: Sequence[FileRange]) -> Reading | None:
        """Starts reading; None when the memory has no room for all of it beside what is not released yet.

        Raises OSError: a file that cannot be opened, or has fewer bytes (ENODATA).
        """
        parts: list[_Part] = []
        try:
            for each in ranges:
                part = self._carve(each)
                if part is None:
                    self._give_back(parts)
                    return None
                parts.append(part)
            ops = [op for part in parts for op in part.ops()]
            tag = self._queue.submit(ops) if ops else None
        except BaseException:
            self._give_back(parts)
            raise
        return Reading(self, parts, tag)

    def close(self) -> None:
        """Ends what is under way and closes the files. Readings are over."""
        try:
            self._queue.close()
        finally:
            with contextlib.ExitStack() as closing:
                for opened in self._files.values():
                    closing.callback(opened.file.close)
            self._files.clear()
            self._areas.clear()

    def _carve(self, wanted: FileRange) -> _Part | None:
        opened = self._open(wanted.path)
        start, stop = wanted.offset, wanted.offset + wanted.num_bytes
        opened.file.check(start, stop)
        base = start // ALIGNMENT * ALIGNMENT
        size = round_up(stop - base, ALIGNMENT)
        for index, (area, free) in enumerate(self._areas):
            at = free.take(size)
            if at is not None:
                opened.num_users += 1
                buffer = area[at : at + size]
                return _Part(opened, index, at, buffer, base, buffer[start - base : stop - base])
        return None

    def _open(self, path: Path) -> _OpenFile:
        if path not in self._files:
            unused = [each for each, opened in self._files.items() if not opened.num_users]
            for each in unused[: max(0, len(self._files) + 1 - _MOST_FILES)]:
                closed = self._files.pop(each).file
                self._names.pop(closed.fd)
                closed.close()
            opened = _OpenFile(ReadFile(path))
            self._files[path], self._names[opened.file.fd] = opened, str(path)
        self._files.move_to_end(path)
        return self._files[path]

    def _give_back(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.opened.num_users -= 1
            if self._areas:
                self._areas[part.area][1].add(part.at, part.buffer.numel())


class Reading:
    """Ranges that are on their way, and then there until they are released."""

    def __init__(self, owner: ReadAhead, parts: list[_Part], tag: int | None) -> None:
        self._owner = owner
        self._parts = parts
        self._tag = tag

    def wait(self) -> list[torch.Tensor]:
        """The bytes of each range, not to be used after `release`. Blocks; raises OSError that names the file."""
        if self._tag is not None:
            queue, tag, self._tag = self._owner._queue, self._tag, None
            answer = queue.wait(tag)
            assert answer is not None  # no time-out was given
            queue.raise_for(answer)
        for part in self._parts:
            part.read_tail()
        return [part.data for part in self._parts]

    def release(self) -> None:
        """Gives the memory back; what is under way is dropped, or ends first. Twice does nothing."""
        if self._tag is not None:
            queue, tag, self._tag = self._owner._queue, self._tag, None
            queue.cancel(tag)
            queue.wait(tag)
        parts, self._parts = self._parts, []
        self._owner._give_back(parts)


class _OpenFile:
    def __init__(self, file: ReadFile) -> None:
        self.file = file
        self.num_users = 0  # readings that are not released


class _Part(NamedTuple):
    """One range: whole blocks around it, and itself."""

    opened: _OpenFile
    area: int
    at: int
    buffer: torch.Tensor
    base: int  # of the buffer, in the file
    data: torch.Tensor

    def ops(self) -> list[Op]:
        whole = self._num_whole()
        return [Op(READ, self.opened.file.fd, self.buffer.data_ptr(), whole, self.base)] if whole else []

    def read_tail(self) -> None:
        """Reads what of the range lies behind the file's last whole block."""
        file, whole = self.opened.file, self._num_whole()
        num_bytes = min(self.buffer.numel(), file.num_bytes - self.base) - whole
        if num_bytes > 0:
            file.read_tail(self.base + whole, num_bytes, self.buffer[whole : whole + ALIGNMENT])

    def _num_whole(self) -> int:
        return min(self.buffer.numel(), (self.opened.file.num_bytes - self.base) // ALIGNMENT * ALIGNMENT)
