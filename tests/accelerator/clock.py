"""The clock: replays a recording with a cost per operation, and says how long it takes and what
hides behind what.

    torch.sim.record(True); step(); torch.sim.record(False)
    replay = clock.replay(torch.sim.recording(), RATES)
    replay.makespan_s, replay.busy_s["compute"], replay.hidden_share("to device", behind="compute")

A recording has the order in which the host issued things. Its entries are dicts: `id`, `kind`,
`name`, `thread`, and

    operation     lane, place, bytes, flops     runs after what stands before it in its stream
    stream_wait   place, after                  what follows in its stream also runs after the mark `after`
    host_wait     after                         what the thread issues next, it issues when the mark is reached
    host_work     lane, bytes, flops, needs     runs after the entries `needs`; `blocks`: its thread waits for its end

A mark is (device, stream, index): a place in a stream. Times are virtual: an operation starts when
all that it runs after has ended and its lane is free; a lane serves one operation at a time, in the
order in which they become ready. The main thread and autograd's are one thread, since one waits for
the other. What else one thread waits for of another is not in the recording unless host work says
so.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]
Span = tuple[float, float]
"""Seconds from the start: (first, last)."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """What a lane does in a second. An operation takes the latency, and the longer of its bytes and
    its arithmetic."""

    bytes_per_s: float = math.inf
    flops_per_s: float = math.inf
    latency_s: float = 0.0
    shared: str = ""
    """Lanes that name the same resource here take turns: the two directions of a disk that serves
    one at a time."""

    def seconds(self, num_bytes: float, flops: float) -> float:
        return self.latency_s + max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


Rates = Mapping[str, Rate]
"""By lane: compute, to device, to host, between devices, collective, and the lanes of host work
that the caller named."""

CARD_24GB: Rates = {
    "compute": Rate(bytes_per_s=900e9, flops_per_s=150e12),
    "to device": Rate(bytes_per_s=22e9),
    "to host": Rate(bytes_per_s=22e9),
    "disk read": Rate(bytes_per_s=7e9, shared="disk"),
    "disk write": Rate(bytes_per_s=5e9, shared="disk"),
    "cpu": Rate(bytes_per_s=65e9),
}
"""A card of 24 GB and its machine, as in DESIGN, "Numbers to aim at"."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Something that takes time on one resource, after other work of the same list."""

    name: str
    lane: str = ""  # empty: takes no resource
    seconds: float = 0.0
    needs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Replay:
    """When each work ran."""

    works: Sequence[Work]
    spans: Sequence[Span]

    @property
    def makespan_s(self) -> float:
        return max((end for _, end in self.spans), default=0.0)

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds in which each lane worked."""
        lanes = {work.lane for work in self.works if work.lane}
        return {lane: sum(end - start for start, end in self.busy_spans(lane)) for lane in lanes}

    def busy_spans(self, lane: str) -> list[Span]:
        """When a lane worked, in order."""
        return sorted(
            span
            for work, span in zip(self.works, self.spans, strict=True)
            if work.lane == lane and span[1] > span[0]
        )

    def hidden_share(self, lane: str, behind: str = "compute") -> float:
        """The share of a lane's busy time in which another lane is busy, too. 1.0 for a lane that
        is never busy."""
        total = sum(end - start for start, end in self.busy_spans(lane))
        hidden = sum(
            max(0.0, min(end, other_end) - max(start, other_start))
            for (start, end), (other_start, other_end) in itertools.product(
                self.busy_spans(lane), self.busy_spans(behind)
            )
        )
        return hidden / total if total else 1.0


def replay(
    recording: Sequence[Entry], rates: Rates, issue_s: float = 0.0, size_of: SizeOf | None = None
) -> Replay:
    """Replays a recording.

    issue_s: what it costs a host thread to issue an operation.
    size_of: gives the bytes and flops that an entry stands for, where the recorded shapes are
        shrunk.
    """
    return run(
        works_of(recording, rates, issue_s, size_of),
        {lane: rate.shared for lane, rate in rates.items()},
    )


SizeOf = Callable[[Entry], tuple[float, float]]


# ---- a recording as works ------------------------------------------------------------------------


def works_of(
    recording: Sequence[Entry], rates: Rates, issue_s: float = 0.0, size_of: SizeOf | None = None
) -> list[Work]:
    """The works of a recording; its entries keep their numbers, the costs of issuing come after
    them."""
    works: list[Work] = []
    issues: list[Work] = []
    # (index, entry), by device and stream
    in_stream: dict[tuple[int, int], list[tuple[int, int]]] = {}
    in_thread: dict[Any, int] = {}  # what the thread's next entry waits for

    def reached(mark: tuple[int, int, int]) -> Iterator[int]:
        """The last entry of a stream that a mark includes."""
        device, stream, index = mark
        for place, number in reversed(in_stream.get((device, stream), [])):
            if place <= index:
                yield number
                return

    for number, entry in enumerate(recording):
        kind, thread = entry["kind"], _thread_of(entry)
        needs = [in_thread[thread]] if thread in in_thread else []
        lane, seconds = "", 0.0
        if kind in ("operation", "stream_wait"):
            device, stream, index = entry["place"]
            if issue_s and kind == "operation":
                in_thread[thread] = len(recording) + len(issues)
                issues.append(
                    Work(f"issue {entry['name']}", f"host {thread}", issue_s, tuple(needs))
                )
                needs = [in_thread[thread]]
            needs += reached(entry["place"])
            in_stream.setdefault((device, stream), []).append((index, number))
        if kind in ("stream_wait", "host_wait"):
            needs += reached(entry["after"])
        if kind in ("operation", "host_work"):
            lane = entry["lane"]
            seconds = _seconds(entry, rates, size_of)
        if kind == "host_work":
            needs += entry["needs"]
        if kind == "host_wait" or entry.get("blocks"):
            in_thread[thread] = number
        works.append(Work(entry["name"], lane, seconds, tuple(needs)))
    return works + issues


def _thread_of(entry: Entry) -> Any:
    name, identity = entry["thread"]
    return "main" if name in ("main", "autograd") else identity


def _seconds(entry: Entry, rates: Rates, size_of: SizeOf | None) -> float:
    if not entry["lane"]:
        return 0.0
    if entry["lane"] not in rates:
        raise ValueError(
            f"no rate for lane {entry['lane']!r} of {entry['name']!r}: rates has {sorted(rates)}"
        )
    num_bytes, flops = size_of(entry) if size_of else (entry["bytes"], entry["flops"])
    return rates[entry["lane"]].seconds(num_bytes, flops)


# ---- works in virtual time -----------------------------------------------------------------------


def run(works: Sequence[Work], shared: Mapping[str, str] | None = None) -> Replay:
    """Runs works on their lanes; `shared` names the resource of lanes that take turns. Raises
    ValueError for a circle."""
    followers: list[list[int]] = [[] for _ in works]
    num_missing = [0] * len(works)
    for number, work in enumerate(works):
        for need in set(work.needs):
            followers[need].append(number)
            num_missing[number] += 1
    ready = [(0.0, number) for number, missing in enumerate(num_missing) if not missing]
    heapq.heapify(ready)
    spans: list[Span | None] = [None] * len(works)
    free_at: dict[str, float] = {}
    while ready:
        at, number = heapq.heappop(ready)
        work = works[number]
        resource = (shared or {}).get(work.lane) or work.lane
        start = max(at, free_at.get(resource, 0.0)) if resource else at
        end = start + work.seconds
        if resource:
            free_at[resource] = end
        spans[number] = start, end
        for follower in followers[number]:
            num_missing[follower] -= 1
            if not num_missing[follower]:
                ready_at = max(spans[need][1] for need in works[follower].needs)  # type: ignore[index]
                heapq.heappush(ready, (ready_at, follower))
    if None in spans:
        raise ValueError(
            f"work {spans.index(None)} ({works[spans.index(None)].name}) waits for itself"
        )
    return Replay(works, [span for span in spans if span is not None])
