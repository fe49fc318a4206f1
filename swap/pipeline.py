"""Pipeline: reads some tiles, computes one and writes others back at the same time, through a fixed number of buffers.

    buffers   B buffers of one pool; a tile holds one from the start of its read to the end of its write
    read      starts in the given order, as many tiles ahead as there are free buffers (without `read_ahead`: one tile at a
              time)
    compute   one tile at a time: the first in order whose bytes have arrived
    write     runs while the next tiles are computed (without `write_behind`: ends before the next tile); the first write
              that ends frees its buffer first

Tiles are independent of each other. Tiles from fast paths overtake a tile on a slow path, and the results do not depend on the
order. The work is Python's: it serves passes whose tiles get more into their buffers than the store reads. Where a tile's work
is native, a program runs it (program.py).

After an error, the pipeline cancels reads in flight and waits for writes, then raises the error. So no buffer is given back
while the kernel may still use it, and no computed tile is partly written. The pipeline knows no optimizer: the caller defines
the tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move, wait_for_any

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class TileWork(Protocol[T_contra]):
    """The caller's functions for a tile; each gets the buffer that the tile holds."""

    def read(self, tile: T_contra, slot: Slot) -> Move:
        """Starts filling the buffer."""

    def compute(self, tile: T_contra, slot: Slot) -> None:
        """Changes the buffer in place; blocks."""

    def write(self, tile: T_contra, slot: Slot) -> Move:
        """Starts writing the buffer back."""


def run_pipeline(
    tiles: Iterable[T], work: TileWork[T], pool: Pool, read_ahead: bool = True, write_behind: bool = True
) -> None:
    """Reads, computes and writes every tile. Blocks until the last write has ended.

    Raises OSError when a transfer fails, RuntimeError when the pool has no free buffer at the start.
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


@dataclasses.dataclass
class _Run(Generic[T]):
    """One run. Every buffer is free in the pool, coming (its tile is being read) or leaving (its tile is being written)."""

    tiles: Iterator[T]
    work: TileWork[T]
    pool: Pool
    num_ahead: int
    write_behind: bool
    coming: list[tuple[T, Slot, Move]] = dataclasses.field(default_factory=list)
    leaving: list[tuple[Slot, Move]] = dataclasses.field(default_factory=list)

    def start_reads(self) -> None:
        """Starts the next reads, as many as are allowed and have a buffer."""
        for number in reversed(range(len(self.leaving))):
            if self.leaving[number][1].is_done():
                self._take_back(number)
        while not self._fill():
            if self.coming:
                return
            if not self.leaving:
                what = f"{self.pool.count} buffers of {self.pool.slot_bytes} bytes"
                raise RuntimeError(f"none of the {what} is free")
            self._take_back(wait_for_any([[move] for _, move in self.leaving]))  # only a write can free a buffer now

    def step(self) -> None:
        """Computes the first tile that has arrived and starts its write; if a write ends earlier, takes its buffer back."""
        wanted = [move for _, move in self.leaving] if len(self.coming) < self.num_ahead else []
        number = wait_for_any([*((move,) for _, _, move in self.coming), *((move,) for move in wanted)])
        if number >= len(self.coming):
            self._take_back(number - len(self.coming))
            return
        tile, slot, move = self.coming[number]
        move.wait()  # raises what went wrong
        self.start_reads()  # verifying the bytes took time, in which writes may have ended
        self.work.compute(tile, slot)
        write = self.work.write(tile, slot)
        del self.coming[number]
        self.leaving.append((slot, write))
        if not self.write_behind:
            self.end_writes()

    def end_writes(self) -> None:
        """Waits for every write and takes the buffers back."""
        while self.leaving:
            self._take_back(0)

    def give_back_all(self) -> None:
        """Ends every transfer after an error, and gives all buffers back."""
        while self.coming:
            _, slot, move = self.coming.pop()
            move.cancel()
            self.pool.give_back(slot)
        for slot, move in self.leaving:
            with contextlib.suppress(OSError):  # not the first error; the store raises it when it settles
                move.wait()
            self.pool.give_back(slot)

    def _fill(self) -> bool:
        """Starts reads until `num_ahead` tiles are coming or no tile is left. False: no buffer is free before."""
        while len(self.coming) < self.num_ahead:
            slot = self.pool.take()
            if slot is None:
                return False
            with contextlib.ExitStack() as unless_started:
                unless_started.callback(self.pool.give_back, slot)
                for tile in self.tiles:
                    self.coming.append((tile, slot, self.work.read(tile, slot)))
                    unless_started.pop_all()
                    break
                else:
                    return True
        return True

    def _take_back(self, number: int) -> None:
        slot, move = self.leaving[number]
        move.wait()
        del self.leaving[number]
        self.pool.give_back(slot)
