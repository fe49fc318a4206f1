"""A run's events as a Chrome trace: trace.json opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

Each lane's rows become threads of one process, so that transfers under way together lie side by side. Source: "Trace Event
Format", complete events ("X"), microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiermem.tools.timeline import Span, lanes_of, rows_of

_PROCESS = 1


def write_trace(file: Path, spans: Sequence[Span]) -> None:
    """Writes all spans, the first at time zero."""
    origin = min((span.start_ns for span in spans), default=0)
    events: list[dict[str, Any]] = [_about("process_name", 0, name="tiermem")]
    thread = 0
    for lane, members in lanes_of(spans).items():
        for number, row in enumerate(rows_of(members)):
            thread += 1
            events.append(_about("thread_name", thread, name=lane if number == 0 else f"{lane} {number + 1}"))
            events.append(_about("thread_sort_index", thread, sort_index=thread))
            events += [_complete(span, thread, origin) for span in row]
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def _complete(span: Span, thread: int, origin: int) -> dict[str, Any]:
    duration = span.end_ns - span.start_ns
    arguments: dict[str, Any] = {}
    if span.num_bytes:
        arguments = {"bytes": span.num_bytes, "GB/s": round(span.num_bytes / max(duration, 1), 3)}
    return {
        "ph": "X",
        "cat": span.lane,
        "name": span.name,
        "pid": _PROCESS,
        "tid": thread,
        "ts": (span.start_ns - origin) / 1e3,
        "dur": duration / 1e3,
        "args": arguments,
    }


def _about(kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": arguments}
