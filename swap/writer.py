"""FileWriter: a new file of a known size, filled from front to back past the page cache, whole or not there.

    put(bytes) -> a few aligned buffers in turn -> the queue -> disk        close: the rest, its true length, sync

For what has no home on disk and is written once, when it is saved. Its room is taken first, so that a full disk is an error
before anything is written. Until `close` has returned it is nobody's: `abandon`, or an error in the `with` block, removes it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

import torch

from tiermem.swap import durable
from tiermem.swap.arena import Arena
from tiermem.swap.direct import ALIGNMENT, open_direct, take_room
from tiermem.swap.extents import round_up
from tiermem.swap.native import WRITE, Op, Queue

_PIECE_BYTES = 1 << 20
_NUM_PIECES = 4


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
            arena = Arena(_PIECE_BYTES * _NUM_PIECES)
            closing.callback(arena.close)
            self._pieces = [arena.take(_PIECE_BYTES, "a write buffer").tensor for _ in range(_NUM_PIECES)]
            self._queue = Queue(depth=32, path_of=lambda fd: str(self.path), files=[self._fd])
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
        number = self._offset // _PIECE_BYTES % _NUM_PIECES
        self._await(number)
        return self._pieces[number]

    def _write(self, piece: torch.Tensor) -> None:
        number = self._offset // _PIECE_BYTES % _NUM_PIECES
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
