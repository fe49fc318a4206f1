"""Recorder: what happened when, for pictures and reports.

Every transfer, tile step, phase and stall adds one Event. Times are CLOCK_MONOTONIC nanoseconds, the clock that the
native queue stamps its answers with, so that events of all lanes line up. The newest events are kept, the oldest
forgotten: memory stays bounded whatever the length of the run. Nothing here prints or draws.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class Event(NamedTuple):
    """One span of time on a lane: "read", "write", "compute", "check" (checksums), "wait", "gather", "reduce", "unit" (held
    by its module's forward or backward) or a phase's name."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int


class Recorder:
    """A bounded list of events and the seconds stalled so far.

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
