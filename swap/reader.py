"""FileReader: byte ranges of somebody else's file, through a queue of its own, past the page cache.

For checkpoints that are loaded: never mmapped, never the whole file in memory. Reads over-read to the alignment that
O_DIRECT asks for and copy out what was asked; what direct.py finds unfit for O_DIRECT is read buffered.
"""

from __future__ import annotations

import collections
import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from tiermem.swap.arena import Arena
from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.extents import round_up
from tiermem.swap.native import READ, Op, Queue
from tiermem.swap.read_file import ReadFile

_PIECE_BYTES = 4 << 20
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
            arena = Arena(_PIECE_BYTES * _NUM_PIECES)
            opened.callback(arena.close)
            self._pieces = [arena.take(_PIECE_BYTES, "a read buffer").tensor for _ in range(_NUM_PIECES)]
            self._queue = Queue(depth=32, path_of=lambda fd: str(self.path), files=[self._file.fd])
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
            for number, offset in enumerate(range(start // ALIGNMENT * ALIGNMENT, stop, _PIECE_BYTES)):
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
        length = min(_PIECE_BYTES, round_up(wanted.stop - offset, ALIGNMENT), self.num_bytes - offset)
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
