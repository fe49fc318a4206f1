"""Pipeline: read tile k+1 | compute tile k | write tile k-1, through a fixed number of buffers.

    buffers   B of them, from one pool; a tile holds one from the start of its read to the end of its write
    read      starts as many tiles ahead as there are free buffers (none ahead when `read_ahead` is off)
    compute   one tile at a time, in the order given
    write     ends behind the computation (before the next tile when `write_behind` is off)

When something fails, reads still under way are cancelled and writes ended before the error is raised: no buffer is
handed back while the kernel may still touch it, and no tile that was computed is left half written. The pipeline knows no
optimizer: a tile is whatever its callers understand.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class TileWork(Protocol[T_contra]):
    """What is done with a tile; each of the three gets the buffer that the tile holds."""

    def read(self, tile: T_contra, slot: Slot) -> Move:
        """Starts filling the buffer."""

    def compute(self, tile: T_contra, slot: Slot) -> None:
        """Changes the buffer in place; blocks."""

    def write(self, tile: T_contra, slot: Slot) -> Move:
        """Starts writing the buffer back."""


def run_pipeline(
    tiles: Iterable[T], work: TileWork[T], pool: Pool, read_ahead: bool = True, write_behind: bool = True
) -> None:
    """Takes every tile through read, compute and write. Blocks until the last write has ended.

    Raises OSError when a transfer fails, RuntimeError when the pool has no buffer to begin with.
    """
    run = _Run(iter(tiles), work, pool, pool.count if read_ahead else 1, write_behind)
    try:
        run.start_reads()
        while run.coming:
            run.step()
            run.start_reads()
        run.end_writes()
    finally:
        run.give_back_all()


class _Run(Generic[T]):
    """Where every buffer of one run is: free in the pool, coming with a tile, or leaving behind one."""

    def __init__(self, tiles: Iterator[T], work: TileWork[T], pool: Pool, num_ahead: int, write_behind: bool) -> None:
        self.coming: collections.deque[tuple[T, Slot, Move]] = collections.deque()
        self.leaving: collections.deque[tuple[Slot, Move]] = collections.deque()
        self._tiles = tiles
        self._work = work
        self._pool = pool
        self._num_ahead = num_ahead
        self._write_behind = write_behind

    def start_reads(self) -> None:
        """Starts the next reads, as many as are allowed and have a buffer."""
        while len(self.coming) < self._num_ahead:
            slot = self._free_slot()
            if slot is None:
                return
            with contextlib.ExitStack() as unless_started:
                unless_started.callback(self._pool.give_back, slot)
                for tile in self._tiles:
                    self.coming.append((tile, slot, self._work.read(tile, slot)))
                    unless_started.pop_all()
                    break
                else:
                    return

    def step(self) -> None:
        """Computes the oldest tile that comes and starts its write."""
        tile, slot, move = self.coming[0]
        move.wait()
        self._work.compute(tile, slot)
        write = self._work.write(tile, slot)
        self.coming.popleft()
        self.leaving.append((slot, write))
        if not self._write_behind:
            self.end_writes()

    def end_writes(self) -> None:
        """Waits for every write and takes the buffers back."""
        while self.leaving:
            self._take_back()

    def give_back_all(self) -> None:
        """After an error: lets every transfer end, so that its buffer can be used again."""
        for _, slot, move in self.coming:
            move.cancel()
            self._pool.give_back(slot)
        for slot, move in self.leaving:
            with contextlib.suppress(OSError):  # not the first error; the store raises it when it settles
                move.wait()
            self._pool.give_back(slot)

    def _free_slot(self) -> Slot | None:
        while self.leaving and self.leaving[0][1].is_done():
            self._take_back()
        slot = self._pool.take()
        if slot is None and not self.coming:  # nothing else can go on
            if not self.leaving:
                raise RuntimeError(f"none of the {self._pool.count} buffers of {self._pool.slot_bytes} bytes is free")
            self._take_back()
            slot = self._pool.take()
        return slot

    def _take_back(self) -> None:
        slot, move = self.leaving[0]
        move.wait()
        self.leaving.popleft()
        self._pool.give_back(slot)
