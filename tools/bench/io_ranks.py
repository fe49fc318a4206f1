"""The processes of `tiermem bench io` that measure, started once and told jobs; all of them begin
at one moment."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.base.native import READ, WRITE, Counters, IoSettings, Queue
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.passes import Pass, Passes, Quota, memory_bytes
from tiermem.swap.disk.queue import InFlight, Queues
from tiermem.swap.disk.run_folder import remove_dead_runs
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore
from tiermem.tools.measure.sustained import WriteSeries
from tiermem.tools.record.run_record import IoCounts, kernel_counts
from tiermem.tools.words import handling, message_of, numbered

# ---- what passes between the benchmark and its processes -----------------------------------------


class Setting(NamedTuple):
    """What a row of the report is about. `path_indices` are the indices of the paths that take part,
    `path` is their name in it."""

    mode: str
    engine: str
    block_bytes: int
    depth: int
    ranks: int
    path: str
    path_indices: tuple[int, ...]

    def describe(self) -> str:
        """The setting on one line."""
        ranks = numbered(self.ranks, "rank")
        return (
            f"{self.mode} {self.engine}, {self.block_bytes >> 10} KiB x {self.depth}, {ranks}, "
            f"{self.path}"
        )


class RankJob(NamedTuple):
    """One pass of one rank. Its files are opened by these names, which may be those of descriptors
    in /proc."""

    setting: Setting
    files: tuple[str, ...]  # one on each path that takes part
    folders: tuple[str, ...]  # the paths themselves, where "tensors" opens its store
    file_bytes: int  # of each file
    num_bytes: int  # to move in all, "mixed" and "tensors": each way
    is_direct: bool
    threads: int = 0  # of the threads engine; 0 lets it choose
    sync: bool = False
    seed: int = 0
    seconds: float = math.inf  # after which "sustained" ends

    @property
    def io(self) -> IoSettings:
        """Of its queues. Raises ValueError."""
        return IoSettings(
            self.setting.engine, self.setting.block_bytes, self.setting.depth, self.threads
        )


class RankOutcome(NamedTuple):
    """What a pass took. Times of day are CLOCK_MONOTONIC, the same for all processes."""

    start_s: float
    end_s: float
    moved: IoCounts
    user_s: float  # CPU time of the process, its queues' threads included
    system_s: float
    idle_fraction: float  # of the time, without a block in flight; mean over the queues
    latencies: list[int]  # blocks per bucket, see io_report.latency_quantiles
    engine: str  # that ran: what "auto" took
    kernel: IoCounts  # of /proc/self/io
    num_blocks: int
    series: tuple[tuple[int, float], ...] = ()  # "sustained": bytes written so far, and when
    # "tensors": what, its GB/s, and the sequential GB/s beside it
    shares: tuple[tuple[str, float, float], ...] = ()


# ---- tensors of 4 MiB through the TensorStore, in random order -----------------------------------
#
#     put      each tensor is copied into the store's memory and written                   beside a sequential write
#     fetch    each is fetched and released                                                beside a sequential read
#     change   each is fetched and released as changed, so that it is written back         beside a mixed pass
#
# The order is drawn anew for each. The store's budget holds as many tensors as keep its queue full,
# and a few more.

TENSOR_BYTES = 4 << 20


class TensorPass(AbstractContextManager["TensorPass"]):
    """A store on some folders and tensors for it. A context manager: the store's files go with it.

    Raises OSError when the engine cannot run, or a folder is not usable.
    """

    def __init__(self, folders: Sequence[str], num_bytes: int, io: IoSettings, seed: int) -> None:
        self.num_bytes = max(1, num_bytes // TENSOR_BYTES) * TENSOR_BYTES
        self._names = [f"tensor {number}" for number in range(self.num_bytes // TENSOR_BYTES)]
        self._generator = np.random.default_rng(seed)
        self._window = -(-io.depth * io.block_bytes // TENSOR_BYTES) * len(folders) + 4
        self.store = TensorStore(folders, host_bytes=2 * self._window * TENSOR_BYTES, io=io)
        try:
            self.store.reserve_disk(self.num_bytes)
            self._tensor = torch.from_numpy(
                self._generator.integers(0, 256, TENSOR_BYTES, dtype=np.uint8)
            )
            # first writes to preallocated blocks are slower, and memory is registered when it is
            # known
            self._put_all()
            self.store.flush()
        except BaseException:
            self.store.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def put(self) -> float:
        """Puts every tensor anew; GB/s."""
        for name in self._names:
            self.store.drop(name)
        return self._rate(self._put_all)

    def fetch(self) -> float:
        """Fetches every tensor; GB/s."""
        return self._rate(functools.partial(self._visit, dirty=False))

    def change(self) -> float:
        """Fetches every tensor and writes it back; GB/s, both directions together."""
        return 2 * self._rate(functools.partial(self._visit, dirty=True))

    def _put_all(self) -> None:
        for name in self._in_random_order():
            self.store.put(name, self._tensor, Tier.NVME)

    def _visit(self, dirty: bool) -> None:
        with InFlight(self._window) as in_flight:
            for name in self._in_random_order():
                in_flight.add(functools.partial(self._leave, name, self.store.fetch(name), dirty))

    def _leave(self, name: str, move: Move, dirty: bool) -> None:
        move.wait()
        self.store.release(name, dirty)

    def _in_random_order(self) -> list[str]:
        return [self._names[index] for index in self._generator.permutation(len(self._names))]

    def _rate(self, work: Callable[[], None]) -> float:
        """GB/s of one direction, the last write-back included."""
        start = time.monotonic()
        work()
        self.store.flush()
        return self.num_bytes / (time.monotonic() - start) / 1e9


# ---- the processes, as the benchmark sees them ---------------------------------------------------
#
# A rank that dies, or a benchmark that is interrupted, leaves none behind and no store's folder.

_START_IN_S = 0.002  # from the word to the start: enough for every rank to have heard it
_STOP_S = 20.0


class CannotRun(Exception):
    """A job that no rank can prepare, with the reason: the engine cannot run here, or memory is
    missing."""


class Ranks(AbstractContextManager["Ranks"]):
    """Processes of one benchmark. A context manager.

    Args:
        num_ranks: how many; each imports what it needs while the others do.
        folders: where a rank that is killed may leave a store's folder.
    """

    def __init__(self, num_ranks: int, folders: Sequence[Path] = ()) -> None:
        self._folders = folders
        self._ranks: list[_Rank] = []
        context = multiprocessing.get_context("spawn")
        try:
            # Ctrl-C does not reach them, not even while Python starts
            with handling({signal.SIGINT: signal.SIG_IGN}):
                for number in range(num_ranks):
                    ours, theirs = context.Pipe()
                    process = context.Process(
                        target=serve, args=(theirs,), name=f"rank {number}", daemon=True
                    )
                    process.start()
                    theirs.close()
                    self._ranks.append(_Rank(process, ours))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: Sequence[RankJob]) -> list[RankOutcome]:
        """Does a job on each of the first ranks, together. Blocks.

        Raises CannotRun, then nothing was moved; OSError when a transfer failed or a rank died.
        """
        taking_part = self._ranks[: len(jobs)]
        for rank, job in zip(taking_part, jobs, strict=True):
            with contextlib.suppress(BrokenPipeError):  # it died: hearing from it says so
                rank.connection.send(job)
        answers = [_hear(rank) for rank in taking_part]
        refusals = [answer for answer in answers if isinstance(answer, OSError)]
        start_s = None if refusals else time.monotonic() + _START_IN_S
        for rank, answer in zip(taking_part, answers, strict=True):
            if not isinstance(answer, OSError):
                rank.connection.send(start_s)
        if refusals:
            raise CannotRun(refusals[0].args[-1])
        outcomes = [_hear(rank) for rank in taking_part]
        for outcome in outcomes:
            if isinstance(outcome, OSError):
                raise outcome
        return outcomes

    def close(self) -> None:
        """Ends every process, in order where it can be had, and removes what a killed one left."""
        for rank in self._ranks:
            rank.connection.close()
            if rank.process.is_alive():
                rank.process.terminate()
        for rank in self._ranks:
            rank.process.join(_STOP_S)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            assert rank.process.pid is not None
            remove_dead_runs(self._folders, rank.process.pid)
            rank.process.close()
        self._ranks.clear()


class _Rank(NamedTuple):
    process: SpawnProcess
    connection: Connection


def _hear(rank: _Rank) -> Any:
    try:
        return rank.connection.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join(_STOP_S)
        raise OSError(f"{rank.process.name} ended with status {rank.process.exitcode}") from None


# ---- a process, from within ----------------------------------------------------------------------
#
#     benchmark  -- Job -->      rank    opens the files, the queues and their memory
#                <-- ready --            (or why it cannot)
#                -- start -->            one moment for all ranks: a barrier
#                <-- Outcome --          (or what broke)
#
# It ends when the benchmark does: then its pipe is closed. Ctrl-C is the benchmark's to handle;
# SIGTERM unwinds, so that a store's folder goes.

READY = "ready"
_POINT_BYTES = 1 << 30  # between two points of a sustained series
_LEAST_POINTS = 16


def serve(connection: Connection) -> None:
    """Obeys until the other end closes. The entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # what there is to say of a path the benchmark says, once
    logging.getLogger("tiermem").setLevel(logging.ERROR)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            _obey(connection, connection.recv())


def _unwind(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: unwinding is not to be cut short
    sys.exit(1)


def _obey(connection: Connection, job: RankJob) -> None:
    signal.signal(signal.SIGTERM, _unwind)
    try:
        with prepare(job) as run:
            connection.send(READY)
            try:
                start_s = connection.recv()
            # the benchmark has ended, and its SIGTERM is not to cut the unwinding short either
            except EOFError:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                raise
            if start_s is None:  # another rank cannot
                return
            time.sleep(max(0.0, start_s - time.monotonic()))
            outcome = run()
        connection.send(outcome)
    except ConnectionError:  # the benchmark has ended
        raise
    except (OSError, ValueError, MemoryError) as error:
        number = getattr(error, "errno", None)
        said = message_of(error)
        connection.send(OSError(number, said) if number else OSError(said))
    finally:
        # nothing is open: the process may end where it stands
        if signal.getsignal(signal.SIGTERM) is _unwind:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def prepare(job: RankJob) -> Iterator[Callable[[], RankOutcome]]:
    """Opens what a job needs; yields what does it. Raises OSError and ValueError."""
    io = job.io
    with contextlib.ExitStack() as closing:
        descriptors = [_open(job, file, closing) for file in job.files]
        if job.setting.mode == "tensors":
            pair = (
                closing.enter_context(Passes(descriptors[0], job.file_bytes, io))
                if len(descriptors) == 1
                else None
            )
            tensors = closing.enter_context(TensorPass(job.folders, job.num_bytes, io, job.seed))
            yield lambda: _measure_tensors(tensors, pair)
            return
        several = [closing.enter_context(Passes(fd, job.file_bytes, io)) for fd in descriptors]
        yield lambda: _measure(several, job)


def _open(job: RankJob, file: str, closing: contextlib.ExitStack) -> int:
    fd = os.open(file, os.O_RDWR | (os.O_DIRECT if job.is_direct else 0))
    closing.callback(os.close, fd)
    if not job.is_direct:  # the page cache would answer
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def _measure(several: list[Passes], job: RankJob) -> RankOutcome:
    """Moves the job's bytes on all files at once; each takes what it can of them."""
    quota = Quota(job.num_bytes)
    mode = job.setting.mode
    if mode == "sustained":
        ahead_bytes = len(several) * memory_bytes(job.io)
        point_bytes = min(_POINT_BYTES, max(1, (job.num_bytes - ahead_bytes) // _LEAST_POINTS))
        quota = WriteSeries(job.num_bytes, point_bytes, ahead_bytes, job.seconds)
        mode = "write"

    def run(number: int) -> Pass:
        return several[number].run(mode, quota, job.sync, job.seed + number)

    gauge = _Gauge([p.queue for p in several])
    with ThreadPoolExecutor(len(several)) as threads:
        passes = list(threads.map(run, range(len(several)))) if len(several) > 1 else [run(0)]
    outcome = gauge.outcome(
        IoCounts(sum(p.read_bytes for p in passes), sum(p.written_bytes for p in passes))
    )
    return (
        outcome._replace(series=tuple(quota.points)) if isinstance(quota, WriteSeries) else outcome
    )


def _measure_tensors(tensors: TensorPass, pair: Passes | None) -> RankOutcome:
    """Tensors through the store, and beside each kind of pass the sequential one that moves as
    much."""

    def beside(mode: str) -> float:
        return pair.run(mode, tensors.num_bytes).gbps if pair else 0.0

    put = ("put", tensors.put(), beside("write"))
    gauge = _Gauge([tensors.store.queues])
    fetched = tensors.fetch()
    outcome = gauge.outcome(IoCounts(tensors.num_bytes, 0))
    return outcome._replace(
        shares=(
            put,
            ("fetch", fetched, beside("read")),
            ("change", tensors.change(), beside("mixed")),
        )
    )


class _Gauge:
    """Clocks and counters as they stand before a pass."""

    def __init__(self, queues: Sequence[Queue] | Sequence[Queues]) -> None:
        self._queues = queues
        self._latencies, self._counters = self._look()
        self._kernel = kernel_counts()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._start_s = time.monotonic()

    def outcome(self, moved: IoCounts) -> RankOutcome:
        """What was read and written from then to now, and at what cost."""
        end_s = time.monotonic()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        kernel = kernel_counts().since(self._kernel)
        latencies, counters = self._look()
        pairs = list(zip(self._counters, counters, strict=True))
        busy_s = sum(after.busy_ns - before.busy_ns for before, after in pairs) / 1e9
        return RankOutcome(
            start_s=self._start_s,
            end_s=end_s,
            moved=moved,
            user_s=usage.ru_utime - self._usage.ru_utime,
            system_s=usage.ru_stime - self._usage.ru_stime,
            idle_fraction=max(0.0, 1 - busy_s / ((end_s - self._start_s) * len(pairs))),
            latencies=(latencies - self._latencies).tolist(),
            engine=", ".join(dict.fromkeys(queue.engine for queue in self._queues)),
            kernel=kernel,
            num_blocks=sum(after.blocks - before.blocks for before, after in pairs),
        )

    def _look(self) -> tuple[npt.NDArray[np.int64], list[Counters]]:
        counters: list[Counters] = []
        for queue in self._queues:
            counters += (
                queue.counters_by_path() if isinstance(queue, Queues) else [queue.counters()]
            )
        counts = [
            queue.latencies(kind).astype(np.int64)
            for queue in self._queues
            for kind in (READ, WRITE)
        ]
        return np.sum(counts, axis=0, dtype=np.int64), counters
