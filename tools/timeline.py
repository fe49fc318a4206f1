"""Timeline: a run's events as lanes, and within a lane as rows of events that do not overlap.

Transfers under way at once share a lane; a picture or a trace viewer needs them side by side. Rows are filled first fit
in order of start: a lane has as many rows as transfers were ever under way together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

PHASES = ("forward", "backward", "step")
LANES = (*PHASES, "compute", "check", "read", "write", "gather", "reduce", "wait")


class Span(NamedTuple):
    """One event as a file holds it: CLOCK_MONOTONIC nanoseconds."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    num_bytes: int


def read_spans(file: Path) -> list[Span]:
    """The events of a run, in order of start; empty when the run left none."""
    if not file.exists():
        return []
    with open(file, encoding="utf-8") as lines:
        return sorted((Span(*json.loads(line)) for line in lines), key=lambda span: span.start_ns)


def lanes_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans by lane, in the order of LANES, then others by name; lanes without spans are absent."""
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    known = {lane: i for i, lane in enumerate(LANES)}
    return {lane: lanes[lane] for lane in sorted(lanes, key=lambda lane: (known.get(lane, len(known)), lane))}


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans of one lane, in order of start, split into rows without overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        row = next((row for row in rows if row[-1].end_ns <= span.start_ns), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def within(spans: Iterable[Span], start_ns: int, end_ns: int) -> list[Span]:
    """Spans that overlap a stretch of time, cut to it."""
    return [
        span._replace(start_ns=max(span.start_ns, start_ns), end_ns=min(span.end_ns, end_ns))
        for span in spans
        if span.end_ns > start_ns and span.start_ns < end_ns
    ]
