"""A rank of a benchmark: a process that obeys Jobs, so that nothing but the measuring is in what is measured.

    benchmark  -- Job -->      rank    opens the files, the queues and their memory
               <-- ready --            (or why it cannot)
               -- start -->            one moment for all ranks: a barrier
               <-- Outcome --          (or what broke)

It ends when the benchmark does: then its pipe is closed. Ctrl-C is the benchmark's to handle; SIGTERM unwinds, so that a
store's folder goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from tiermem.swap.native import READ, WRITE, Counters, Queue
from tiermem.swap.passes import Pass, Passes, Quota, memory_bytes
from tiermem.swap.queues import Queues
from tiermem.swap.settings import IoSettings
from tiermem.tools.counts import kernel_counts
from tiermem.tools.sweep_job import Failed, Job, Outcome
from tiermem.tools.sweep_tensors import TensorPass

READY = "ready"
_POINT_BYTES = 1 << 30  # between two points of a sustained series
_LEAST_POINTS = 16


def serve(connection: Connection) -> None:
    """Obeys until the other end closes. The entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("tiermem").setLevel(logging.ERROR)  # what there is to say of a path the benchmark says, once
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _obey(connection, connection.recv())


def _unwind(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: unwinding is not to be cut short
    sys.exit(1)


def _obey(connection: Connection, job: Job) -> None:
    is_prepared = False
    signal.signal(signal.SIGTERM, _unwind)
    try:
        with prepare(job) as run:
            connection.send(READY)
            start_s = connection.recv()
            if start_s is None:  # another rank cannot
                return
            is_prepared = True
            time.sleep(max(0.0, start_s - time.monotonic()))
            outcome = run()
        connection.send(outcome)
    except ConnectionError:  # the benchmark has ended
        raise
    except (OSError, ValueError, MemoryError) as error:
        connection.send(Failed(_words(error), getattr(error, "errno", None), is_prepared))
    finally:
        if signal.getsignal(signal.SIGTERM) is _unwind:  # nothing is open: the process may end where it stands
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def prepare(job: Job) -> Iterator[Callable[[], Outcome]]:
    """Opens what a job needs; yields what does it. Raises OSError and ValueError."""
    io = IoSettings(job.engine, job.block_bytes, job.depth, job.threads)
    with contextlib.ExitStack() as closing:
        descriptors = [_open(job, file, closing) for file in job.files]
        if job.mode == "tensors":
            pair = closing.enter_context(Passes(descriptors[0], job.file_bytes, io)) if len(descriptors) == 1 else None
            tensors = closing.enter_context(TensorPass(job.folders, job.num_bytes, io, job.seed))
            yield lambda: _measure_tensors(tensors, pair, job)
            return
        several = [closing.enter_context(Passes(fd, job.file_bytes, io)) for fd in descriptors]
        yield lambda: _measure(several, job)


def _open(job: Job, file: str, closing: contextlib.ExitStack) -> int:
    fd = os.open(file, os.O_RDWR | (os.O_DIRECT if job.is_direct else 0))
    closing.callback(os.close, fd)
    if not job.is_direct:  # the page cache would answer
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def _measure(several: list[Passes], job: Job) -> Outcome:
    """Moves the job's bytes on all files at once; each takes what it can of them."""
    quota, mode = Quota(job.num_bytes), job.mode
    if mode == "sustained":
        ahead = len(several) * memory_bytes(IoSettings(job.engine, job.block_bytes, job.depth))
        quota, mode = _Metered(job.num_bytes, job.seconds, ahead), "write"

    def run(number: int) -> Pass:
        return several[number].run(mode, quota, job.sync, job.seed + number)

    with _Gauge([p.queue for p in several]) as gauge:
        if len(several) == 1:
            passes = [run(0)]
        else:
            with ThreadPoolExecutor(len(several)) as threads:
                passes = list(threads.map(run, range(len(several))))
    read, written = sum(p.read_bytes for p in passes), sum(p.written_bytes for p in passes)
    series = tuple(quota.series) if isinstance(quota, _Metered) else ()
    return gauge.outcome(read, written, series=series)


def _measure_tensors(tensors: TensorPass, pair: Passes | None, job: Job) -> Outcome:
    """Tensors through the store, and beside each kind of pass the sequential one that moves as much."""
    shares = [("put", tensors.put(), pair.run("write", tensors.num_bytes).gbps if pair else 0.0)]
    tensors.settle()
    with _Gauge([tensors.queues]) as gauge:
        fetched = tensors.fetch()
    outcome = gauge.outcome(tensors.num_bytes, 0)
    shares.append(("fetch", fetched, pair.run("read", tensors.num_bytes).gbps if pair else 0.0))
    changed = tensors.change()
    shares.append(("change", changed, pair.run("mixed", tensors.num_bytes).gbps if pair else 0.0))
    return outcome._replace(shares=tuple(shares))


class _Metered(Quota):
    """Bytes to write until they are written or the time is over; notes when how many had been asked for.

    What is asked for runs ahead of what is written by the memory of the passes: the series begins when that is full.
    """

    def __init__(self, num_bytes: int, seconds: float | None, ahead_bytes: int) -> None:
        super().__init__(num_bytes)
        self._end_s = None if seconds is None else time.monotonic() + seconds
        self._next_bytes = ahead_bytes  # at which the next point is due
        self._point_bytes = min(_POINT_BYTES, max(1, (num_bytes - ahead_bytes) // _LEAST_POINTS))
        self._taken_bytes = 0
        self._noting = threading.Lock()
        self.series: list[tuple[int, float]] = []

    def take(self, most_bytes: int) -> int:
        """As Quota's; 0 as well when the time is over."""
        with self._noting:
            now = time.monotonic()
            if self._taken_bytes and self._end_s is not None and now > self._end_s:
                return 0
            if self._taken_bytes >= self._next_bytes:
                self.series.append((self._taken_bytes, now))
                self._next_bytes = self._taken_bytes + self._point_bytes
            taken = super().take(most_bytes)
            self._taken_bytes += taken
            return taken


class _Gauge:
    """Reads clocks and counters before and after a pass."""

    def __init__(self, queues: list[Queue] | list[Queues]) -> None:
        self._queues: list[Any] = list(queues)

    def __enter__(self) -> _Gauge:
        self._latencies, self._counters = self._look()
        self._kernel = kernel_counts()
        self._usage, self._start_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_s = time.monotonic()
        self._usage_after = resource.getrusage(resource.RUSAGE_SELF)
        self._kernel_after = kernel_counts()
        self._latencies_after, self._counters_after = self._look()

    def outcome(self, read: int, written: int, series: tuple[tuple[int, float], ...] = ()) -> Outcome:
        """What was read and written between the two looks, and at what cost."""
        kernel, seconds = self._kernel_after.since(self._kernel), self._end_s - self._start_s
        pairs = list(zip(self._counters, self._counters_after, strict=True))
        busy_s = sum(after.busy_ns - before.busy_ns for before, after in pairs) / 1e9
        engines = dict.fromkeys(queue.engine for queue in self._queues)
        return Outcome(
            start_s=self._start_s,
            end_s=self._end_s,
            read_bytes=read,
            written_bytes=written,
            user_s=self._usage_after.ru_utime - self._usage.ru_utime,
            system_s=self._usage_after.ru_stime - self._usage.ru_stime,
            idle_fraction=max(0.0, 1 - busy_s / (seconds * len(pairs))),
            latencies=(self._latencies_after - self._latencies).tolist(),
            engine=", ".join(engines),
            kernel_read_bytes=kernel.read_bytes,
            kernel_written_bytes=kernel.written_bytes,
            num_blocks=sum(after.blocks - before.blocks for before, after in pairs),
            series=series,
        )

    def _look(self) -> tuple[npt.NDArray[np.int64], list[Counters]]:
        counters: list[Counters] = []
        for queue in self._queues:
            counters += queue.counters_by_path() if isinstance(queue, Queues) else [queue.counters()]
        counts = [queue.latencies(kind).astype(np.int64) for queue in self._queues for kind in (READ, WRITE)]
        return np.sum(counts, axis=0, dtype=np.int64), counters


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return str(error) or type(error).__name__
