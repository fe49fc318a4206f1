"""Queues: one native queue per path behind one interface; its counters and events; streams of
pieces in flight."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiermem.swap.base.native import (
    NORMAL,
    URGENT,
    Answer,
    Blocks,
    Counters,
    Fault,
    IoSettings,
    Op,
    Queue,
)
from tiermem.swap.base.ranges import ByteRange


class Event(NamedTuple):
    """One span of time on a lane: "read", "write", "compute", "check" (checksums; native steps of
    tiles have theirs in "compute"), "wait", "gather", "reduce", "unit" (held by its module's
    forward or backward) or a phase's name."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int


_Row = tuple[str, str, int, int, int]
"""The fields of an Event. Python's collector forgets such a tuple, and would go over all Events
that are kept."""


class Recorder:
    """The newest events, for pictures and reports, and the seconds of waiting so far.

    Every transfer, tile step, phase and wait adds one Event. Times are CLOCK_MONOTONIC nanoseconds,
    the clock of the native queue's answers, so that events of all lanes are comparable. Old events
    are dropped, so memory is bounded in long runs.

    Args:
        max_events: how many of the newest events are kept.
    """

    def __init__(self, max_events: int = 50_000) -> None:
        self._rows = collections.deque[_Row](maxlen=max_events)
        self.num_added = 0  # events so far, dropped ones too
        self.wait_s = 0.0  # sum over lane "wait", which old events cannot give

    def add(self, lane: str, name: str, start_ns: int, end_ns: int, num_bytes: int = 0) -> None:
        """Adds one event; never blocks."""
        self._rows.append((lane, name, start_ns, end_ns, num_bytes))
        self.num_added += 1
        if lane == "wait":
            self.wait_s += (end_ns - start_ns) * 1e-9

    def add_rows(self, lane: str, rows: Sequence[_Row]) -> None:
        """Adds events of one lane; never blocks."""
        self._rows.extend(rows)
        self.num_added += len(rows)
        if lane == "wait":
            self.wait_s += sum(end_ns - start_ns for _, _, start_ns, end_ns, _ in rows) * 1e-9

    @property
    def events(self) -> list[Event]:
        """Those that are kept, the oldest first."""
        return list(map(Event._make, self.newest()))

    def newest(self, count: int | None = None) -> list[_Row]:
        """The fields of the newest events that are kept, at most so many, the oldest first."""
        rows = list(self._rows)
        return rows if count is None else rows[max(0, len(rows) - count) :]

    def forget(self) -> None:
        """Drops the events that are kept."""
        self._rows.clear()

    @contextlib.contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Records the time that its body takes, also when the body raises."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(lane, name, start_ns, time.monotonic_ns())


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
    bytes_under_way: int = 0  # most of an optimizer step at once, by now


class Figures(NamedTuple):
    """What a store did in a stretch of time, beside the thread that computes with its tensors."""

    seconds: float
    read_bytes_s: float  # from NVMe
    written_bytes_s: float
    limits_s: Mapping[str, float]
    """Seconds for which each resource was busy; what works while something else does is counted for
    both.

    compute   the program, without its waits and its optimizer steps     link      gathers between ranks
    disk      reads and writes, what overlaps counted once               kernels   steps of tiles, and checksums

    On an accelerator its link is part of "compute".
    """
    waited_s: float
    """Seconds of waiting for the disk and for other ranks."""
    waits_s: Mapping[str, float]
    """Seconds of waiting by the kind of thing waited for, the longest first: an event's name up to
    its first slash."""

    @property
    def limited_by(self) -> str:
        """The resource that was busy longest."""
        return busiest(self.limits_s)

    def as_logged(self) -> dict[str, float | str]:
        """For a log: rates in GB/s (1e9 bytes), seconds of waiting, and what limited."""
        return {
            "read_gb_s": round(self.read_bytes_s / 1e9, 3),
            "written_gb_s": round(self.written_bytes_s / 1e9, 3),
            "waited_s": round(self.waited_s, 3),
            "limited_by": self.limited_by,
        }


def busiest(limits_s: Mapping[str, float]) -> str:
    """The resource with the most seconds; of equal ones the first."""
    return max(limits_s, key=lambda name: limits_s[name])


# their lanes
_RESOURCES = {"disk": ("read", "write"), "link": ("gather",), "kernels": ("compute", "check")}


class Meter:
    """Figures of a store from one look to the next; the first look begins when the meter is made.

    An event counts in the look that follows its end: those of a step that goes on under a forward
    are told when it has ended.

    Args:
        recorder: of the store.
        stats: the store's totals.
    """

    def __init__(self, recorder: Recorder, stats: Callable[[], StoreStats]) -> None:
        self._recorder = recorder
        self._stats = stats
        self._seen_ns = time.monotonic_ns()
        self._num_seen = recorder.num_added
        self._totals = stats()

    def look(self) -> Figures:
        """The figures since the look before. Where events were dropped meanwhile, they are of the
        newest."""
        before_ns = self._seen_ns
        before = self._totals
        self._seen_ns, self._totals = time.monotonic_ns(), self._stats()
        num_new = self._recorder.num_added - self._num_seen
        self._num_seen = self._recorder.num_added
        rows = self._recorder.newest(num_new)
        begin_ns = max(before_ns, rows[0][2]) if rows and len(rows) < num_new else before_ns
        spans = collections.defaultdict[str, list[tuple[int, int]]](list)  # by lane
        by_kind = collections.Counter[str]()
        for lane, name, start_ns, end_ns, _ in rows:
            spans[lane].append((start_ns, end_ns))
            if lane == "wait":
                by_kind[name.partition("/")[0]] += end_ns - max(start_ns, begin_ns)
        # helper threads wait at the same time
        aside_ns = _covered_ns([*spans["wait"], *spans["step"]], begin_ns)
        limits_s = {"compute": max(0, self._seen_ns - begin_ns - aside_ns) * 1e-9}
        limits_s |= {
            name: _covered_ns(span for lane in lanes for span in spans[lane]) * 1e-9
            for name, lanes in _RESOURCES.items()
        }
        seconds = max(1, self._seen_ns - before_ns) * 1e-9
        return Figures(
            seconds,
            (self._totals.nvme_read_bytes - before.nvme_read_bytes) / seconds,
            (self._totals.nvme_written_bytes - before.nvme_written_bytes) / seconds,
            limits_s,
            _covered_ns(spans["wait"], begin_ns) * 1e-9,
            {name: spent_ns * 1e-9 for name, spent_ns in by_kind.most_common()},
        )


def _covered_ns(spans: Iterable[tuple[int, int]], since_ns: int = 0) -> int:
    """How many nanoseconds some spans cover together, after a moment."""
    total = 0
    until = since_ns
    for start_ns, end_ns in sorted(spans):
        total += max(0, end_ns - max(start_ns, until))
        until = max(until, end_ns)
    return total


Transfers = Sequence[Op] | Sequence[Blocks]


class InFlight(contextlib.AbstractContextManager["InFlight"]):
    """The pieces of a stream in flight, at most `count`; they end in the order in which they
    started.

    A piece is a function that waits for its transfer and then uses the bytes. It is a context
    manager: on leaving, it ends all pieces. After an error it ends them, too, and drops their
        errors, so that their buffers can be used again.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces = collections.deque[Callable[[], object]]()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def add(self, piece: Callable[[], object]) -> None:
        """Adds a started piece, and ends the oldest piece if no buffer is free for the next one.
        Raises OSError."""
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
    """The queues of one store, one for each path, so that a slow or failing path does not delay the
    others.

                         +-- queue of /mnt/nvme0   own thread, own depth, its segment and the arena registered
        one tag -- parts +
                         +-- queue of /mnt/nvme1   independent of the other

    The methods are those of Queue. A transfer goes to the queue of its descriptor. A tag with
    transfers on several paths has one part in each queue. It is answered when all parts have ended,
    with the first error among them, the earliest start and the latest end. Thread-safe; one thread
    at a time waits for a tag.

    Args:
        files: every open file's descriptor and name; the files stay open until the queues are
            closed.
        io: engine, block size and depth of each queue.
        regions: memory to register with the kernel for each queue, if it allows that.
        faults: faults that each queue produces, for tests.
        recorder: receives the events of moves through these queues; None: a new one.

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
        self.files = dict(files)  # the name of each open file, by descriptor
        self._queues: dict[int, Queue] = {}  # by descriptor, in the order of the paths
        self._tags = itertools.count(1)  # its next() is one step, whichever thread asks
        self._under_way: dict[int, list[_QueuePart]] = {}  # by tag, until it is answered
        try:
            for fd, name in self.files.items():
                try:
                    self._queues[fd] = Queue(io, files={fd: name}, regions=regions, faults=faults)
                except OSError as error:
                    raise OSError(error.errno, error.strerror or str(error), name) from None
        except BaseException:
            self.close()
            raise

    @property
    def engine(self) -> str:
        """The engines in use."""
        return ", ".join(dict.fromkeys(queue.engine for queue in self._queues.values()))

    @property
    def why(self) -> str:
        """The reasons for the engines: one line, or one for each path if paths differ."""
        lines: dict[str, str] = {self.files[fd]: queue.why for fd, queue in self._queues.items()}
        if len(set(lines.values())) == 1:
            return next(iter(lines.values()))
        return "; ".join(f"{path}: {why}" for path, why in lines.items())

    def submit(self, transfers: Transfers, priority: int = NORMAL) -> int:
        """Starts transfers and returns the one tag that answers for all of them. Never waits for
        I/O. Raises OSError.

        When a later path's queue refuses its part, it first cancels the earlier parts and waits for
        them.
        """
        tag = next(self._tags)
        parts = list[_QueuePart]()
        # before a queue has them: `end_all` finds them also after an interrupt
        self._under_way[tag] = parts
        ops: dict[int, list[Op]] = {}  # by descriptor, in their order
        try:
            for each in transfers:
                if isinstance(each, Op):
                    ops.setdefault(each.fd, []).append(each)
                else:
                    parts.append(part := _QueuePart(self.queue_of(each.fd)))
                    part.queue.submit_blocks(each, priority, part.tag)
            for fd, own in ops.items():
                parts.append(part := _QueuePart(self.queue_of(fd)))
                part.queue.submit(own, priority, part.tag)
        except BaseException:
            for part in parts:
                part.drop()
            for part in parts:
                part.look(None)
            self.end(tag)
            raise
        return tag

    def wait(self, tag: int, timeout_s: float | None = None) -> Answer | None:
        """Blocks until every part has ended; returns None after timeout_s. The answer may hold an
        error: see `error_of`.

        It may be asked again until `end`.

        Unless timeout_s is 0, all parts become urgent: they go before prefetches and write-backs.
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
        for part in parts:
            if part.failure is not None:
                raise part.failure
        return _joined([part.answer for part in parts if part.answer is not None])

    def end(self, tag: int) -> None:
        """Forgets a tag that was answered. A second call does nothing."""
        self._under_way.pop(tag, None)

    def end_all(self) -> None:
        """Blocks until the kernel has none of the transfers any more; each tag keeps its answer.
        Raises no OSError."""
        for part in [part for parts in list(self._under_way.values()) for part in parts]:
            part.look(None)

    def promote(self, tag: int) -> None:
        """Makes blocks that the kernel does not have yet urgent, on every path."""
        for part in self._parts(tag):
            part.promote()

    def cancel(self, tag: int) -> None:
        """Drops blocks that the kernel does not have yet, on every path. The caller must still wait
        for the tag."""
        for part in self._parts(tag):
            part.drop()

    def counters_by_path(self) -> list[Counters]:
        """Totals so far of each path's queue."""
        return [queue.counters() for queue in self._queues.values()]

    def latencies(self, kind: int) -> npt.NDArray[np.uint64]:
        """Blocks of a kind per bucket of latency, all paths together; see
        `native.latency_edges`."""
        counts: npt.NDArray[np.uint64] = np.sum(
            [q.latencies(kind) for q in self._queues.values()], axis=0, dtype=np.uint64
        )
        return counts

    def close(self) -> int:
        """Finishes what was submitted and stops the threads; returns how many errors were not
        waited for."""
        queues = self._queues
        self._queues = {}
        errors: list[int] = []
        with contextlib.ExitStack() as closing:  # one that fails does not keep the others open
            for queue in queues.values():
                closing.callback(lambda queue: errors.append(queue.close()), queue)
        return sum(errors)

    def queue_of(self, fd: int) -> Queue:
        """The queue of a descriptor. Raises OSError."""
        queue = self._queues.get(fd)
        if queue is None and fd in self.files:
            raise OSError(errno.ESHUTDOWN, "this I/O queue is closed")
        if queue is None:
            raise OSError(errno.EBADF, "no queue was opened for this file")
        return queue

    def _parts(self, tag: int) -> list[_QueuePart]:
        parts = self._under_way.get(tag)
        if parts is None:
            raise OSError(errno.ENOENT, f"no transfer has tag {tag}, or it was answered already")
        return parts


def add_counters(several: Sequence[Counters]) -> Counters:
    """Totals of several queues."""
    zero = Counters(*[0] * len(Counters._fields))
    return Counters(*map(sum, zip(zero, *several, strict=True)))


class _QueuePart:
    """The part of a tag in one path's queue, and its answer after its end."""

    def __init__(self, queue: Queue) -> None:
        self.answer: Answer | None = None
        self.failure: OSError | None = None  # of the queue itself
        self.queue = queue
        self.tag = queue.new_tag()
        self._told = queue.new_answer()  # an interrupt after the queue has told it does not lose it

    @property
    def has_ended(self) -> bool:
        return self.answer is not None or self.failure is not None

    def look(self, timeout_s: float | None) -> None:
        """Waits up to timeout_s for the part's end and keeps its answer or its error."""
        if self.has_ended:
            return
        try:
            self.answer = self.queue.wait(self.tag, timeout_s, self._told)
        except OSError as error:
            self.failure = error

    def promote(self) -> None:
        if not self.has_ended:
            with contextlib.suppress(OSError):  # ENOENT: it has just been answered
                self.queue.promote(self.tag, URGENT)

    def drop(self) -> None:
        if not self.has_ended:
            with contextlib.suppress(OSError):
                self.queue.cancel(self.tag)


def _joined(answers: list[Answer]) -> Answer:
    """Joins the answers of several parts. A disk's error wins over ECANCELED of parts that were
    dropped because of it."""
    if len(answers) == 1:
        return answers[0]
    failed = [answer for answer in answers if answer.error]
    told = next(
        (a for a in failed if a.error != errno.ECANCELED), failed[0] if failed else answers[0]
    )
    return told._replace(
        num_bytes=sum(a.num_bytes for a in answers),
        submitted_ns=min(a.submitted_ns for a in answers),
        started_ns=min((a.started_ns for a in answers if a.started_ns), default=0),
        finished_ns=max(a.finished_ns for a in answers),
    )
