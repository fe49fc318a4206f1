"""Bounce: a few small aligned buffers for bytes that lie in ordinary memory, or at odd offsets.

What the store moves for its own sake goes straight between arena and disk. A user's tensor has neither the alignment
that O_DIRECT asks for nor a place in the arena; it passes through these buffers piece by piece, several in flight.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator

import torch

from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.move import Move
from tiermem.swap.store import TensorStore


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
