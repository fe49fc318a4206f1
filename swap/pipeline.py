"""Pipeline: reads some tiles, computes one and writes others back at the same time, through a fixed number of buffers.

    buffers   B buffers of one pool; a tile holds one from the start of its read to the end of its write
    read      starts in the given order, as many tiles ahead as there are free buffers (without `read_ahead`: one tile at a
              time)
    compute   one tile at a time: the first in order whose bytes have arrived
    write     runs while the next tiles are computed (without `write_behind`: ends before the next tile); the first write
              that ends frees its buffer first

Tiles are independent of each other. Tiles from fast paths overtake a tile on a slow path, and the results do not depend on the
order.

        HeadStart.begin                 run_pipeline
    ... backward ........................| read the rest | compute | write |
        read the first tiles ............|

A head start begins the first reads before the run itself, into buffers that are idle until then.

After an error, the pipeline cancels reads in flight and waits for writes, then raises the error. So no buffer is given back
while the kernel may still use it, and no computed tile is partly written. The pipeline knows no optimizer: the caller defines
the tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move, wait_for_any

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class TileWork(Protocol[T_contra]):
    """The caller's functions for a tile; each gets the buffer that the tile holds."""

    def read(self, tile: T_contra, slot: Slot) -> Move:
        """Starts filling the buffer."""

    def read_rest(self, tile: T_contra, slot: Slot) -> Move:
        """Starts reading the bytes that the tile's head start left out."""

    def compute(self, tile: T_contra, slot: Slot) -> None:
        """Changes the buffer in place; blocks."""

    def write(self, tile: T_contra, slot: Slot) -> Move:
        """Starts writing the buffer back."""


class _Coming(NamedTuple, Generic[T]):
    """A tile that is being read into its buffer."""

    tile: T
    slot: Slot
    moves: tuple[Move, ...]


class HeadStart(Generic[T]):
    """The first tiles of a run, read before the run into idle buffers. For one thread at a time.

    A caller that changes these tiles at home must call `drop`; the run then reads them again. The run raises errors of the
    reads.

    Args:
        pool: lends the buffers, until their tiles are written or dropped.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.coming: list[_Coming[T]] = []
        """Tiles that are being read, or have arrived."""

    @property
    def tiles(self) -> list[T]:
        """The tiles that have been begun, in order."""
        return [each.tile for each in self.coming]

    def begin(self, tiles: Iterable[T], read: Callable[[T, Slot], Move]) -> None:
        """Starts reading the first tiles, one for each buffer. Does nothing if a head start has begun already."""
        if not self.coming:
            self.fill(iter(tiles), read, self.pool.count)

    def fill(self, tiles: Iterator[T], read: Callable[[T, Slot], Move], num_ahead: int) -> bool:
        """Starts reads until `num_ahead` tiles are coming or no tile is left; returns False when no buffer is free before."""
        while len(self.coming) < num_ahead:
            slot = self.pool.take()
            if slot is None:
                return False
            with contextlib.ExitStack() as unless_started:
                unless_started.callback(self.pool.give_back, slot)
                for tile in tiles:
                    self.coming.append(_Coming(tile, slot, (read(tile, slot),)))
                    unless_started.pop_all()
                    break
                else:
                    return True
        return True

    def drop(self) -> None:
        """Cancels the reads and gives the buffers back. Blocks for transfers in flight; never raises OSError."""
        while self.coming:
            each = self.coming.pop()
            for move in each.moves:
                move.cancel()
            self.pool.give_back(each.slot)


def run_pipeline(
    tiles: Iterable[T],
    work: TileWork[T],
    pool: Pool,
    read_ahead: bool = True,
    write_behind: bool = True,
    head_start: HeadStart[T] | None = None,
) -> None:
    """Reads, computes and writes every tile. Blocks until the last write has ended.

    Tiles of the head start go first; without read-ahead they are dropped and read again. Raises OSError when a transfer
    fails, RuntimeError when the pool has no free buffer at the start.
    """
    reads = HeadStart[T](pool) if head_start is None else head_start
    if not read_ahead:
        reads.drop()
    done = reads.tiles
    run = _Run(reads, (tile for tile in tiles if tile not in done), work, pool.count if read_ahead else 1, write_behind)
    try:
        run.read_rest_of_head_start()
        run.start_reads()
        while reads.coming:
            run.step()
            run.start_reads()
        run.end_writes()
    finally:
        run.give_back_all()


@dataclasses.dataclass
class _Run(Generic[T]):
    """One run. Every buffer is free in the pool, coming (its tile is being read) or leaving (its tile is being written)."""

    reads: HeadStart[T]
    tiles: Iterator[T]
    work: TileWork[T]
    num_ahead: int
    write_behind: bool
    leaving: list[tuple[Slot, Move]] = dataclasses.field(default_factory=list)

    def read_rest_of_head_start(self) -> None:
        """Starts reading the bytes that could not be read before the run."""
        for number, each in enumerate(self.reads.coming):
            rest = self.work.read_rest(each.tile, each.slot)
            self.reads.coming[number] = each._replace(moves=(*each.moves, rest))

    def start_reads(self) -> None:
        """Starts the next reads, as many as are allowed and have a buffer."""
        for number in reversed(range(len(self.leaving))):
            if self.leaving[number][1].is_done():
                self._take_back(number)
        while not self.reads.fill(self.tiles, self.work.read, self.num_ahead):
            if self.reads.coming:
                return
            if not self.leaving:
                what = f"{self.reads.pool.count} buffers of {self.reads.pool.slot_bytes} bytes"
                raise RuntimeError(f"none of the {what} is free")
            self._take_back(wait_for_any([[move] for _, move in self.leaving]))  # only a write can free a buffer now

    def step(self) -> None:
        """Computes the first tile that has arrived and starts its write; if a write ends earlier, takes its buffer back."""
        wanted = [move for _, move in self.leaving] if len(self.reads.coming) < self.num_ahead else []
        number = wait_for_any([*(each.moves for each in self.reads.coming), *((move,) for move in wanted)])
        if number >= len(self.reads.coming):
            self._take_back(number - len(self.reads.coming))
            return
        tile, slot, moves = self.reads.coming[number]
        for move in moves:
            move.wait()  # raises what went wrong
        self.start_reads()  # verifying the bytes took time, in which writes may have ended
        self.work.compute(tile, slot)
        write = self.work.write(tile, slot)
        del self.reads.coming[number]
        self.leaving.append((slot, write))
        if not self.write_behind:
            self.end_writes()

    def end_writes(self) -> None:
        """Waits for every write and takes the buffers back."""
        while self.leaving:
            self._take_back(0)

    def give_back_all(self) -> None:
        """Ends every transfer after an error, and gives all buffers back."""
        self.reads.drop()
        for slot, move in self.leaving:
            with contextlib.suppress(OSError):  # not the first error; the store raises it when it settles
                move.wait()
            self.reads.pool.give_back(slot)

    def _take_back(self, number: int) -> None:
        slot, move = self.leaving[number]
        move.wait()
        del self.leaving[number]
        self.reads.pool.give_back(slot)
