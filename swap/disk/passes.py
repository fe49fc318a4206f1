"""Passes: moves the bytes of one file through a queue in one pattern and times it; measures the
weights of paths."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from tiermem.swap.base.native import READ, SYNC, WRITE, Blocks, IoSettings, Map, Op, Queue
from tiermem.swap.base.ranges import ALIGNMENT, ByteRange, round_up
from tiermem.swap.disk.direct import open_unnamed, preallocate
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.disk.queue import InFlight

MODES = ("read", "write", "mixed", "random", "random-write")
_PIECE_BYTES = 4 << 20  # of one submission; larger blocks are pieces of their own
_MIN_SPARE_PIECES = 4
_MAX_SPARE_BYTES = 256 << 20
_RANDOM_BATCHES = 4  # under way at a time


class Pass(NamedTuple):
    """What one pass took and moved."""

    seconds: float
    read_bytes: int
    written_bytes: int

    @property
    def gbps(self) -> float:
        """GB (1e9 bytes) per second, both directions together."""
        return (self.read_bytes + self.written_bytes) / self.seconds / 1e9


class Quota:
    """A number of bytes left to move. Concurrent passes on several paths may share one; a faster
    pass takes more of it."""

    def __init__(self, num_bytes: int) -> None:
        self._left_bytes = num_bytes
        self._lock = threading.Lock()

    def take(self, most_bytes: int) -> int:
        """Takes up to most_bytes from the quota and returns their number; 0 ends the pass."""
        with self._lock:
            taken = min(most_bytes, self._left_bytes)
            self._left_bytes -= taken
            return taken


class Passes(AbstractContextManager["Passes"]):
    """Moves the bytes of one open file through a queue in one pattern, and times it. A context
    manager; for one thread.

        read     the file in order
        write    the file in order
        mixed    both at once, as the optimizer's step does: a piece is read while one half a file away is written
        random, random-write    single blocks at random offsets, read or written by batch calls

    Disk benchmarks use it, and `weigh` measures paths with it. The window of memory holds `depth`
    blocks and about the same number of spare blocks, so that the queue stays full while the next
    piece waits for the oldest: a disk ends pieces in any order. Each piece has its own part of the
    window. The memory holds random bytes, so that disks which compress or skip zeros give real
    rates. Times include the last answer and, on request, a sync.

    Args:
        fd: open for reading and writing, with O_DIRECT where that is measured; stays the caller's.
        file_bytes: how much of it may be read and overwritten; allocated by the caller.
        io: engine, block size and depth.

    Raises OSError when the engine cannot run here, ValueError when a block is larger than the file.
    """

    def __init__(self, fd: int, file_bytes: int, io: IoSettings) -> None:
        self._fd = fd
        self._block_bytes = io.block_bytes
        self._piece_bytes, self._num_pieces = _window(io)
        self._file_bytes = file_bytes // io.block_bytes * io.block_bytes
        if not self._file_bytes:
            raise ValueError(f"blocks of {io.block_bytes} bytes do not fit a file of {file_bytes}")
        self._depth = io.depth
        self._memory = Map(self._num_pieces * self._piece_bytes)
        try:
            self._memory.commit(0, self._memory.num_bytes)
            pieces = self._memory.tensor().numpy().reshape(self._num_pieces, self._piece_bytes)
            pieces[:] = np.frombuffer(
                np.random.default_rng().bytes(self._piece_bytes), dtype=np.uint8
            )
            region = ByteRange(self._memory.address, self._memory.num_bytes)
            self.queue = Queue(io, files={fd: f"descriptor {fd}"}, regions=[region])
        except BaseException:
            self._memory.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, mode: str, num_bytes: int | Quota | None = None, sync: bool = False, seed: int = 0
    ) -> Pass:
        """Moves num_bytes (default: the file once; mixed: once each way), from the start again at
        its end. Blocks.

        A number is rounded up to whole blocks; a Quota holds a multiple of them, and a pass may
        find it empty. Raises OSError when a transfer fails or the file is shorter than promised.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; allowed are {', '.join(MODES)}")
        if num_bytes is None:
            num_bytes = self._file_bytes
        quota = (
            num_bytes
            if isinstance(num_bytes, Quota)
            else Quota(round_up(num_bytes, self._block_bytes))
        )
        start = time.monotonic()
        if mode in ("random", "random-write"):
            moved = self._run_random(quota, seed, READ if mode == "random" else WRITE)
        else:
            moved = self._run_in_order(quota, mode != "write", mode != "read")
        if sync:
            self.queue.finish(self.queue.submit([Op(SYNC, self._fd, 0, 0, 0)]))
        return Pass(
            time.monotonic() - start,
            moved if mode in ("read", "mixed", "random") else 0,
            moved if mode in ("write", "mixed", "random-write") else 0,
        )

    def close(self) -> None:
        """Ends what is under way and gives the memory back."""
        self.queue.close()
        self._memory.close()

    def _run_in_order(self, quota: Quota, reads: bool, writes: bool) -> int:
        """Both ways share the window: reads take its even buffers, writes its odd ones. Returns the
        bytes of one way."""
        stride = 2 if reads and writes else 1
        num_buffers = self._num_pieces // stride
        far = self._file_bytes // 2 // self._block_bytes * self._block_bytes if reads else 0
        done = 0
        with InFlight(num_buffers) as in_flight:
            for number in itertools.count():
                offset = done % self._file_bytes
                length = quota.take(min(self._piece_bytes, self._file_bytes - offset))
                if not length:
                    break
                address = self._memory.address + number % num_buffers * stride * self._piece_bytes
                ops = [Op(READ, self._fd, address, length, offset)] if reads else []
                if writes:
                    address += (stride - 1) * self._piece_bytes
                    ops += self._write_at((offset + far) % self._file_bytes, address, length)
                in_flight.add(functools.partial(self.queue.finish, self.queue.submit(ops)))
                done += length
        return done

    def _write_at(self, offset: int, address: int, length: int) -> list[Op]:
        """One write, or two where the file's end cuts it."""
        first = min(length, self._file_bytes - offset)
        ops = [Op(WRITE, self._fd, address, first, offset)]
        if first < length:
            ops.append(Op(WRITE, self._fd, address + first, length - first, 0))
        return ops

    def _run_random(self, quota: Quota, seed: int, kind: int) -> int:
        """Batches of blocks, several under way: a buffer is used again when its batch has ended.
        Returns the bytes moved."""
        num_buffers = self._memory.num_bytes // self._block_bytes
        batch = max(1, min(num_buffers // _RANDOM_BATCHES, max(self._depth, 256)))
        generator = np.random.default_rng(seed)
        file_blocks = self._file_bytes // self._block_bytes
        buffers = self._memory.address + np.arange(num_buffers, dtype=np.int64) * self._block_bytes
        done = 0
        with InFlight(_RANDOM_BATCHES) as in_flight:
            for number in itertools.count():
                num_blocks = quota.take(batch * self._block_bytes) // self._block_bytes
                if not num_blocks:
                    break
                offsets = (
                    generator.integers(0, file_blocks, num_blocks, dtype=np.int64)
                    * self._block_bytes
                )
                start = number % _RANDOM_BATCHES * batch
                addresses = buffers[start : start + num_blocks]
                tag = self.queue.submit_blocks(
                    Blocks(kind, self._fd, addresses, offsets, self._block_bytes)
                )
                in_flight.add(functools.partial(self.queue.finish, tag))
                done += num_blocks * self._block_bytes
        return done


def memory_bytes(io: IoSettings) -> int:
    """Memory that a Passes with these settings takes."""
    piece_bytes, num_pieces = _window(io)
    return piece_bytes * num_pieces


def mixed_rate(fd: int, file_bytes: int, io: IoSettings, seconds: float) -> float:
    """Bytes per second, both directions together, that a file takes when read and written at once.
    Blocks for about `seconds`; raises OSError. What the file held is overwritten."""
    with Passes(fd, file_bytes, io) as passes:
        passes.run("write")  # first writes to preallocated blocks are slower
        rates: list[float] = []
        end = time.monotonic() + seconds
        while not rates or time.monotonic() < end:
            done = passes.run("mixed")
            rates.append((done.read_bytes + done.written_bytes) / done.seconds)
        return sorted(rates)[len(rates) // 2]


def _window(io: IoSettings) -> tuple[int, int]:
    """Bytes of a piece, and pieces in memory: the blocks in flight and those that wait."""
    piece_bytes = max(io.block_bytes, _PIECE_BYTES // io.block_bytes * io.block_bytes)
    in_flight = round_up(io.depth * io.block_bytes, piece_bytes) // piece_bytes
    return piece_bytes, in_flight + max(
        _MIN_SPARE_PIECES, min(in_flight, _MAX_SPARE_BYTES // piece_bytes)
    )


_FILE_BYTES = 32 << 20
_SECONDS = 0.25
# bounds the memory that measuring takes: 32 MiB for each path
_MOST_BLOCK_BYTES = 1 << 20
_MOST_DEPTH = 16

logger = logging.getLogger("tiermem")


def weigh(paths: Sequence[NvmePath], io: IoSettings) -> list[float]:
    """Each path's weight: how much of the bytes it gets. Blocks while it measures.

    It writes a small unnamed file on each path once, and then reads and writes it at the same time,
    as the optimizer's step does, on all paths at once. So two paths on one disk get about equal
    weights. The slowest path has weight 1. The measurement takes less than a second and leaves no
    file. Given weights are returned unchanged, and a single path is not measured. A path that
    cannot be measured gets weight 1, with a warning; its first use raises the error.

    Raises ValueError when only some weights are given.
    """
    given = [path.weight for path in paths if path.weight is not None]
    if len(given) == len(paths):
        return given
    if given:
        missing = ", ".join(str(path.path) for path in paths if path.weight is None)
        raise ValueError(
            f"weights are given for some paths and not for {missing}: give all of them, or none to "
            "measure them"
        )
    if len(paths) == 1:
        return [1.0]
    small = dataclasses.replace(
        io, block_bytes=min(io.block_bytes, _MOST_BLOCK_BYTES), depth=min(io.depth, _MOST_DEPTH)
    )
    with ThreadPoolExecutor(len(paths)) as together:
        rates = list(together.map(lambda path: _rate(path, small), paths))
    slowest = min((rate for rate in rates if rate), default=1.0)
    weights = [round((rate or slowest) / slowest, 3) for rate in rates]
    figures = ", ".join(
        f"{path.path} {'not measured' if rate is None else f'{rate / 1e9:.2f} GB/s'} (weight "
        f"{weight:g})"
        for path, rate, weight in zip(paths, rates, weights, strict=True)
    )
    logger.info("mixed reads and writes, all paths at once: %s", figures)
    return weights


def _rate(path: NvmePath, io: IoSettings) -> float | None:
    """Bytes per second both ways, or None, with a warning, when the path cannot be measured."""
    num_bytes = (
        _FILE_BYTES
        if path.max_bytes is None
        else min(_FILE_BYTES, path.max_bytes // ALIGNMENT * ALIGNMENT)
    )
    try:
        if num_bytes < 2 * io.block_bytes:
            raise OSError(errno.ENOSPC, f"max_bytes={path.max_bytes} leaves no room to measure")
        with open_unnamed(path.path)[0] as fd:
            preallocate(fd, 0, num_bytes)
            return mixed_rate(fd, num_bytes, io, _SECONDS)
    except OSError as error:
        logger.warning(
            "%s could not be measured and weighs 1: %s", path.path, error.strerror or error
        )
        return None
