"""StepMix: the disk time of an optimizer step's bytes, for given paths and settings of the queue. `tiermem tune` uses it.

    a parameter of a bf16 model trained with fp32 states, everything on NVMe, per step:

        read     fp32 master 4 + momentum 4 + variance 4                      = 12 bytes  |  at once, tile by tile:
        written  fp32 master 4 + momentum 4 + variance 4 + bf16 weight 2      = 14 bytes  |  the mixed pass
        read     bf16 weight 2 in forward + 2 in backward                     =  4 bytes     the read pass

        cost = 26 bytes / mixed rate + 4 bytes / read rate                    nanoseconds of disk per parameter and step

Several paths are used at once, as in training: each moves its own bytes, and the rates add up. The files have no names, so
none is left behind. They are written once at the start, because reads of unwritten blocks do not reach the disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from tiermem.swap.native import IoSettings
from tiermem.swap.passes import Passes
from tiermem.tools.bench.files import BenchFiles, check_room

STEP_BYTES, FETCH_BYTES = 26, 4
_MIXED_PART = 0.7  # of a turn's time; the rest reads
_FIRST_BYTES = 64 << 20  # written to see how fast a path is

R = TypeVar("R")


class Turn(NamedTuple):
    """GB (1e9 bytes) per second of each path in one turn, all paths at once; mixed counts both directions."""

    mixed_gbps: tuple[float, ...]
    read_gbps: tuple[float, ...]

    @property
    def cost_ns(self) -> float:
        """Nanoseconds of disk per parameter and step."""
        return STEP_BYTES / sum(self.mixed_gbps) + FETCH_BYTES / sum(self.read_gbps)


class Refused(OSError):
    """These settings cannot run here, as the queue says: too many requests for Linux AIO, an engine that is forbidden."""


class StepMix:
    """Unnamed files on some paths, and turns on them. A context manager; for one thread.

    Args:
        paths: existing folders.
        file_bytes: of each file.
        io: settings to write the files with and to have the first turn.
        seconds: that writing them may take, about: on a slow path a part of the file is used.

    Raises OSError: a path cannot be written or has too little room.
    """

    def __init__(self, paths: Sequence[Path], file_bytes: int, io: IoSettings, seconds: float) -> None:
        check_room(paths, [("a file to measure on (--size)", file_bytes)])
        self._closing = contextlib.ExitStack()
        self._file_bytes: list[int] = []
        self._first = Turn((0.0,) * len(paths), (0.0,) * len(paths))
        self._latest: dict[IoSettings, Turn] = {}  # says how many bytes settings move in the time of a turn
        try:
            files = self._closing.enter_context(BenchFiles(paths, 1, file_bytes))
            self._fds = [files.descriptor(place) for place in range(len(paths))]
            self.is_direct = [files.is_direct([place]) for place in range(len(paths))]
            self._pool = self._closing.enter_context(concurrent.futures.ThreadPoolExecutor(len(paths)))
            self._file_bytes = self._on_all(lambda i: _write_once(self._fds[i], file_bytes, io, seconds))
            self._first = self.turn(io, 0.0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StepMix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file_bytes(self) -> int:
        """What is used of the smallest file."""
        return min(self._file_bytes)

    def turn(self, io: IoSettings, seconds: float) -> Turn:
        """Moves bytes for about `seconds`, and never fewer than fill the queue. Blocks; raises Refused and OSError."""
        window, known = io.block_bytes * io.depth, self._latest.get(io, self._first)
        mixed_bytes = [max(window, int(rate * 5e8 * seconds * _MIXED_PART)) for rate in known.mixed_gbps]
        read_bytes = [max(window, int(rate * 1e9 * seconds * (1 - _MIXED_PART))) for rate in known.read_gbps]
        with contextlib.ExitStack() as closing:
            try:
                passes = [
                    closing.enter_context(Passes(fd, size, io))
                    for fd, size in zip(self._fds, self._file_bytes, strict=True)
                ]
            except OSError as error:
                raise Refused(error.errno, error.strerror or str(error)) from error
            mixed = self._on_all(lambda i: passes[i].run("mixed", mixed_bytes[i]).gbps)
            read = self._on_all(lambda i: passes[i].run("read", read_bytes[i]).gbps)
        self._latest[io] = Turn(tuple(mixed), tuple(read))
        return self._latest[io]

    def turn_s(self, io: IoSettings, seconds: float) -> float:
        """How long a turn of about `seconds` would take with these settings, at the rates of the first."""
        window = io.block_bytes * io.depth
        rates = zip(self._first.mixed_gbps, self._first.read_gbps, strict=True)
        return max(max(seconds * _MIXED_PART, 2e-9 * window / m) + 1e-9 * window / r for m, r in rates)

    def close(self) -> None:
        """Ends what is under way; the files are gone with their descriptors."""
        self._closing.close()

    def _on_all(self, work: Callable[[int], R]) -> list[R]:
        """On every path at once; waits for all before the first error is raised."""
        futures = [self._pool.submit(work, i) for i in range(len(self._fds))]
        try:
            concurrent.futures.wait(futures)
        finally:
            concurrent.futures.wait(futures)  # an interrupt must not close what a worker still uses
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _write_once(fd: int, file_bytes: int, io: IoSettings, seconds: float) -> int:
    """Writes the file, or so much of it as the time allows; returns how much."""
    first_bytes = min(file_bytes, _FIRST_BYTES)
    with Passes(fd, file_bytes, io) as passes:
        first = passes.run("write", first_bytes)
        most = int(seconds * first.written_bytes / first.seconds)
        used = min(file_bytes, max(first_bytes, most))
        if used > first_bytes:
            passes.run("write", used)
        return used
