"""Roofline: the shortest time in which this machine could make a step: its bytes moved at once, or its memory traffic.

    disk     a bare loop (tests/native/bare_loop, built by `make yardsticks`) reads and writes as many bytes on each path, all
             at the same time, in files that lie beside the store. Several settings take turns between the steps; the
             best median counts. Without the program the queue moves the bytes (swap/passes.py), which is said.
    memory   what Adam reads and writes in memory, at the rate of a vector loop over memory of its own

No step can be faster, so a fraction above `MOST_FRACTION` says that the yardstick is wrong.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tiermem.swap.extents import round_up
from tiermem.swap.passes import Passes
from tiermem.swap.settings import IoSettings
from tiermem.tools.bare_loop import BareLoop
from tiermem.tools.bench_files import BenchFiles
from tiermem.tools.counts import IoCounts

MOST_FRACTION = 1.02
_FILE_UNIT = 4 << 20
_STREAM_NUMEL = 1 << 24
_NUM_STREAMS = 5


class BareSetting(NamedTuple):
    """How the yardstick keeps the disk busy."""

    block_bytes: int
    depth: int  # each way

    @property
    def name(self) -> str:
        """As a table says it."""
        return f"{self.block_bytes >> 20} MiB x {self.depth} each way"


SETTINGS = (BareSetting(1 << 20, 16), BareSetting(1 << 20, 32), BareSetting(4 << 20, 8))


class Roofline:
    """What moves the bytes of a step without its arithmetic. A context manager.

    Args:
        paths: those of the store.
        loads: of each model that is stepped, its bytes on each path; the files are made large enough for all.
        yardstick: tests/native/bare_loop, built; None: the queue.
        engine: of the queue.

    Raises OSError when a path has too little room, or the yardstick cannot be started.
    """

    def __init__(
        self, paths: Sequence[Path], loads: Sequence[Sequence[IoCounts]], yardstick: Path | None, engine: str
    ) -> None:
        self._paths = list(paths)
        self._engine = engine
        self._loops: list[BareLoop] = []
        self._open = contextlib.ExitStack()
        largest = max((max(moved) for load in loads for moved in load), default=0)
        self._file_bytes = round_up(max(largest, _FILE_UNIT), _FILE_UNIT)
        self._files = self._open.enter_context(BenchFiles(paths, 1, self._file_bytes))
        try:
            for place in range(len(paths)):
                file = Path(self._files.name(place, 0, "mixed"))
                if yardstick is not None:
                    self._loops.append(self._open.enter_context(BareLoop(yardstick, file)))
            self._write_once()
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Roofline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def measure(self, load: Sequence[IoCounts], setting: BareSetting) -> float:
        """Seconds in which a step's bytes are read and written, on all paths at once. Blocks; raises OSError."""
        busy = [(place, moved) for place, moved in enumerate(load) if moved.read_bytes or moved.written_bytes]
        if not busy:
            return 0.0
        with ThreadPoolExecutor(len(busy)) as threads:
            return max(threads.map(lambda item: self._move(item[0], item[1], setting), busy))

    def close(self) -> None:
        """Ends the yardsticks; the files are gone."""
        self._open.close()

    def _move(self, place: int, moved: IoCounts, setting: BareSetting) -> float:
        if self._loops:
            return self._bare(self._loops[place], moved, setting)
        io = IoSettings(self._engine, setting.block_bytes, 2 * setting.depth)
        with self._passes(place, io) as passes:
            both = min(moved)
            seconds = passes.run("mixed", both).seconds if both else 0.0
            if moved.read_bytes > both:
                seconds += passes.run("read", moved.read_bytes - both).seconds
            if moved.written_bytes > both:
                seconds += passes.run("write", moved.written_bytes - both).seconds
            return seconds

    def _bare(self, loop: BareLoop, moved: IoCounts, setting: BareSetting) -> float:
        if moved.read_bytes and moved.written_bytes:
            return loop.run("mixed", *setting, *moved).seconds
        if moved.read_bytes:
            return loop.run("read", *setting, moved.read_bytes).seconds
        return loop.run("write", *setting, moved.written_bytes).seconds

    def _write_once(self) -> None:
        """First writes to preallocated blocks are slower: not what a step does."""
        for place in range(len(self._paths)):
            with self._passes(place, IoSettings(self._engine)) as passes:
                passes.run("write")

    @contextlib.contextmanager
    def _passes(self, place: int, io: IoSettings) -> Iterator[Passes]:
        fd = os.open(self._files.name(place, 0, "mixed"), os.O_RDWR | self._direct_flag(place))
        try:
            with Passes(fd, self._file_bytes, io) as passes:
                yield passes
        finally:
            os.close(fd)

    def _direct_flag(self, place: int) -> int:
        return os.O_DIRECT if self._files.is_direct([place]) else 0


class Ceiling(NamedTuple):
    """The shortest time of a step, and what sets it."""

    seconds: float
    what: str


def ceiling(yardstick: Path | None, series: Sequence[tuple[BareSetting, Sequence[float]]], memory_s: float) -> Ceiling:
    """The best median of the disk's settings, or the memory's time if that is longer."""
    best, seconds = min(((s, statistics.median(times)) for s, times in series), key=lambda item: item[1])
    if memory_s > seconds:
        return Ceiling(memory_s, "memory traffic of Adam")
    by = "bare loop" if yardstick is not None else "by the queue without arithmetic"
    return Ceiling(seconds, f"{by}, {best.name}")


def memory_rate() -> float:
    """Bytes per second that memory takes when one vector is added to another in place, all threads; the best of a few."""
    a, b = torch.zeros(_STREAM_NUMEL), torch.ones(_STREAM_NUMEL)
    seconds = []
    for _ in range(_NUM_STREAMS):
        start = time.monotonic()
        a.add_(b)
        seconds.append(time.monotonic() - start)
    return 3 * a.nbytes / min(seconds)
