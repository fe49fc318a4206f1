"""Queues: one native queue per path behind one face, what it counts and records, and streams of pieces over it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiermem.swap.native import (
    NORMAL,
    URGENT,
    Answer,
    Counters,
    Fault,
    IoSettings,
    Op,
    Queue,
    TransferError,
    error_of,
)
from tiermem.swap.ranges import ByteRange


class Event(NamedTuple):
    """One span of time on a lane: "read", "write", "compute", "check" (checksums), "wait", "gather", "reduce", "unit" (held
    by its module's forward or backward) or a phase's name."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int


class Recorder:
    """The newest events, for pictures and reports, and the seconds stalled so far.

    Every transfer, tile step, phase and stall adds one Event. Times are CLOCK_MONOTONIC nanoseconds, the clock that the native
    queue stamps its answers with, so that events of all lanes line up. Older events are dropped: memory stays bounded whatever
    the length of the run.

    Args:
        max_events: how many of the newest events are kept.
    """

    def __init__(self, max_events: int = 50_000) -> None:
        self.events: collections.deque[Event] = collections.deque(maxlen=max_events)
        self.wait_s = 0.0  # sum over lane "wait": kept apart because events are forgotten

    def add(self, lane: str, name: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        """Adds one event; never blocks."""
        self.events.append(Event(lane, name, start_ns, end_ns, num_bytes))
        if lane == "wait":
            self.wait_s += (end_ns - start_ns) * 1e-9

    @contextlib.contextmanager
    def span(self, lane: str, name: str, num_bytes: int = 0) -> Iterator[None]:
        """Records the time that its body takes, also when the body raises."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(lane, name, start_ns, time.monotonic_ns(), num_bytes)


@dataclasses.dataclass(frozen=True)
class PathStats:
    """One path's part in a store."""

    path: Path
    weight: float  # its part of the bytes, relative to the other paths
    read_bytes: int
    written_bytes: int
    used_bytes: int  # extents in use


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Totals of a store; bytes are those of the kernel's completions."""

    nvme_read_bytes: int
    nvme_written_bytes: int
    nvme_bytes: int  # extents in use on all paths
    host_bytes: int  # carved out of the arena now
    host_peak_bytes: int
    wait_s: float  # spent waiting for transfers
    engine: str
    engine_why: str
    paths: tuple[PathStats, ...] = ()


class Blocks(NamedTuple):
    """Many transfers of one length between memory and one file, as arrays: int64, one place for each."""

    kind: int
    fd: int
    addresses: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    length: int


Transfers = Sequence[Op] | Sequence[Blocks]


class InFlight:
    """The pieces of a stream that are in flight, at most `count`; they end in the order in which they were started.

    A piece is the call that waits for its transfer and then does what is due with the bytes. A context manager: leaving it ends
    all pieces. After an error their own errors are dropped; they end all the same, before their buffers are used again.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: collections.deque[Callable[[], object]] = collections.deque()

    def __enter__(self) -> InFlight:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def add(self, piece: Callable[[], object]) -> None:
        """Keeps a piece that has been started, and ends the oldest if there is no buffer for another one. Raises OSError."""
        self._pieces.append(piece)
        if len(self._pieces) == self._count:
            self._end_oldest()

    def finish(self) -> None:
        """Ends every piece. Raises the first OSError."""
        try:
            while self._pieces:
                self._end_oldest()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends every piece. Never raises OSError."""
        while self._pieces:
            with contextlib.suppress(OSError):
                self._pieces[0]()
            self._pieces.popleft()

    def _end_oldest(self) -> None:
        self._pieces[0]()
        self._pieces.popleft()


class Queues:
    """The queues of one store, one for each path, so that a slow or failing path never holds up another.

                         +-- queue of /mnt/nvme0   own thread, own depth, its segment and the arena registered
        one tag -- parts +
                         +-- queue of /mnt/nvme1   knows nothing of the other

    The verbs are those of Queue. A transfer goes to the queue of its descriptor; a tag whose transfers lie on several paths has
    a part with each and is answered when all parts have ended: with the first error among them, the earliest start and the
    latest end. Safe to use from several threads; one thread at a time waits for a tag.

    Args:
        files: every open file's descriptor and name; they stay open until the queues are closed.
        io: engine, block size and depth, of each queue.
        regions: memory to register with the kernel where it allows, with each queue.
        faults: lies for tests, told by each queue.
        recorder: receives what the moves through these queues took; None: a new one.

    Raises OSError, naming the path, when a queue cannot be opened; none is left open then.
    """

    def __init__(
        self,
        files: Mapping[int, str],
        io: IoSettings,
        regions: Sequence[ByteRange] = (),
        faults: Sequence[Fault] = (),
        recorder: Recorder | None = None,
    ) -> None:
        self.recorder = recorder or Recorder()
        self._files = dict(files)
        self._queues: dict[int, Queue] = {}  # by descriptor, in the order of the paths
        self._tags = itertools.count(1)  # its next() is one step, whichever thread asks
        self._under_way: dict[int, list[_Part]] = {}  # by tag, until it is answered
        try:
            for fd in self._files:
                self._queues[fd] = self._open(fd, io, regions, faults)
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> str:
        """The engines in use."""
        return ", ".join(dict.fromkeys(queue.engine for queue in self._queues.values()))

    @property
    def why(self) -> str:
        """What chose them: one line, or one for each path where paths differ."""
        lines: dict[str, str] = {self._files[fd]: queue.why for fd, queue in self._queues.items()}
        if len(set(lines.values())) == 1:
            return next(iter(lines.values()))
        return "; ".join(f"{path}: {why}" for path, why in lines.items())

    def submit(self, transfers: Transfers, priority: int = NORMAL) -> int:
        """Starts transfers and returns the one tag that answers for all of them. Never waits for I/O. Raises OSError.

        When a later path's queue refuses its part, what the earlier ones have got is ended first.
        """
        parts: list[_Part] = []
        ops: dict[int, list[Op]] = {}  # by descriptor, in their order
        try:
            for each in transfers:
                if isinstance(each, Op):
                    ops.setdefault(each.fd, []).append(each)
                else:
                    queue = self._queue_of(each.fd)
                    parts.append(_Part(queue, queue.submit_blocks(*each, priority)))
            for fd, own in ops.items():
                queue = self._queue_of(fd)
                parts.append(_Part(queue, queue.submit(own, priority)))
        except BaseException:
            for part in parts:
                part.drop()
            for part in parts:
                part.look(None)
            raise
        tag = next(self._tags)
        self._under_way[tag] = parts
        return tag

    def wait(self, tag: int, timeout_s: float | None = None) -> Answer | None:
        """Blocks until every part has ended; None after timeout_s. The answer may hold an error: see `error_of`.

        Unless timeout_s is 0, all parts go before prefetches and write-backs from now on.
        """
        parts = self._parts(tag)
        if timeout_s != 0:
            for part in parts[1:]:  # the first is raised by waiting for it
                part.promote()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for part in parts:
            part.look(None if end_s is None else max(0.0, end_s - time.monotonic()))
        if not all(part.has_ended for part in parts):
            return None
        del self._under_way[tag]
        for part in parts:
            if part.failure is not None:
                raise part.failure
        return _joined([part.answer for part in parts if part.answer is not None])

    def error_of(self, answer: Answer) -> TransferError | None:
        """The error that the answer holds, if any."""
        return error_of(answer, self._files)

    def promote(self, tag: int) -> None:
        """Moves what the kernel has not yet got before prefetches and write-backs, on every path."""
        for part in self._parts(tag):
            part.promote()

    def cancel(self, tag: int) -> None:
        """Drops what the kernel has not yet got, on every path. The tag must still be waited for."""
        for part in self._parts(tag):
            part.drop()

    def counters(self) -> Counters:
        """Totals so far; times are sums over the queues."""
        return add_counters(self.counters_by_path())

    def counters_by_path(self) -> list[Counters]:
        """Totals so far of each path's queue."""
        return [queue.counters() for queue in self._queues.values()]

    def latencies(self, kind: int) -> npt.NDArray[np.uint64]:
        """Blocks of a kind per bucket of latency, all paths together; see `native.latency_quantiles`."""
        counts: npt.NDArray[np.uint64] = np.sum(
            [q.latencies(kind) for q in self._queues.values()], axis=0, dtype=np.uint64
        )
        return counts

    def close(self) -> int:
        """Finishes what was submitted and stops the threads; returns how many errors were not waited for."""
        queues, self._queues = self._queues, {}
        errors: list[int] = []
        with contextlib.ExitStack() as closing:  # one that fails does not keep the others open
            for queue in queues.values():
                closing.callback(lambda queue: errors.append(queue.close()), queue)
        return sum(errors)

    def _open(self, fd: int, io: IoSettings, regions: Sequence[ByteRange], faults: Sequence[Fault]) -> Queue:
        try:
            return Queue(io, files={fd: self._files[fd]}, regions=regions, faults=faults)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), self._files[fd]) from None

    def _queue_of(self, fd: int) -> Queue:
        queue = self._queues.get(fd)
        if queue is None and fd in self._files:
            raise OSError(errno.ESHUTDOWN, "this I/O queue is closed")
        if queue is None:
            raise OSError(errno.EBADF, "no queue was opened for this file")
        return queue

    def _parts(self, tag: int) -> list[_Part]:
        parts = self._under_way.get(tag)
        if parts is None:
            raise OSError(errno.ENOENT, f"no transfer has tag {tag}, or it was answered already")
        return parts


def add_counters(several: Sequence[Counters]) -> Counters:
    """Totals of several queues."""
    zero = Counters(*[0] * len(Counters._fields))
    return Counters(*map(sum, zip(zero, *several, strict=True)))


class _Part:
    """What of a tag one path's queue has; its answer once it has ended."""

    def __init__(self, queue: Queue, tag: int) -> None:
        self.answer: Answer | None = None
        self.failure: OSError | None = None  # of the queue itself
        self._queue = queue
        self._tag = tag

    @property
    def has_ended(self) -> bool:
        return self.answer is not None or self.failure is not None

    def look(self, timeout_s: float | None) -> None:
        """Waits that long for the part's end, and keeps what became of it."""
        if self.has_ended:
            return
        try:
            self.answer = self._queue.wait(self._tag, timeout_s)
        except OSError as error:
            self.failure = error

    def promote(self) -> None:
        if not self.has_ended:
            with contextlib.suppress(OSError):  # ENOENT: it has just been answered
                self._queue.promote(self._tag, URGENT)

    def drop(self) -> None:
        if not self.has_ended:
            with contextlib.suppress(OSError):
                self._queue.cancel(self._tag)


def _joined(answers: list[Answer]) -> Answer:
    """One answer for several parts; an error of the disk counts before a part that was dropped because of it."""
    if len(answers) == 1:
        return answers[0]
    failed = [answer for answer in answers if answer.error]
    told = next((a for a in failed if a.error != errno.ECANCELED), failed[0] if failed else answers[0])
    return told._replace(
        num_bytes=sum(a.num_bytes for a in answers),
        submitted_ns=min(a.submitted_ns for a in answers),
        started_ns=min((a.started_ns for a in answers if a.started_ns), default=0),
        finished_ns=max(a.finished_ns for a in answers),
    )
