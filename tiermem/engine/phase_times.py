"""PhaseTimes: how long forward, backward and step took since the last line of progress (`wall_clock_breakdown`).

On a CPU the host's clock tells. On an accelerator the host only hands work over, so each phase is marked by two events on its
stream, and the line that needs their times waits for those events, for nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tiermem.swap.accelerator import current_stream, is_accelerator, new_event

_PHASES = ("forward", "backward", "step")


class _Span(NamedTuple):
    phase: str
    start: float | torch.Event
    end: float | torch.Event

    @property
    def seconds(self) -> float:
        """Its length; blocks until an accelerator has got there."""
        if isinstance(self.start, torch.Event) and isinstance(self.end, torch.Event):
            self.end.synchronize()
            return float(self.start.elapsed_time(self.end)) / 1e3
        assert isinstance(self.start, float) and isinstance(self.end, float)
        return self.end - self.start


class PhaseTimes:
    """The spans of each phase since the last line.

    Args:
        is_on: when not, nothing is noted and the line is empty.
        device: where the maths runs.
    """

    def __init__(self, is_on: bool, device: torch.device) -> None:
        self._is_on = is_on
        self._device = device
        self._spans: list[_Span] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Notes what its body takes as a part of a phase: forward, backward or step."""
        if not self._is_on:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._spans.append(_Span(name, start, self._now()))

    def line(self, num_steps: int) -> str:
        """ ", forward 12.0 ms, backward 30.1 ms, step 4.0 ms" on the average of so many steps; empty when off. Starts anew."""
        spans, self._spans = self._spans, []
        totals = {name: sum(span.seconds for span in spans if span.phase == name) for name in _PHASES}
        return "".join(f", {name} {1e3 * total / num_steps:.1f} ms" for name, total in totals.items() if total)

    def _now(self) -> float | torch.Event:
        if not is_accelerator(self._device):
            return time.perf_counter()
        event = new_event(self._device, enable_timing=True)
        event.record(current_stream(self._device))
        return event
