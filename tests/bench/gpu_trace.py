"""GpuTrace: a profiler's trace of a training, and the share of its copies over the link that lie
under kernels.

    kernels      |■■■■■■■■■■■■■   ■■■■■■|
    to device    |  ■■■■    ■■■■■       |      hidden: the microseconds of copies in which a kernel runs, too
    to host      |         ■■■       ■■■|

A copy under a kernel costs no time of its own. Kernels shorter than the copies can hide no more
than their own time, so the share is given beside the most that could be hidden. Copies within the
device are neither: they use no link.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tiermem.tools.words import read_json, save_json

LANES = ("kernels", "to device", "to host")
WAYS = LANES[1:]
"""Directions of copies."""
MADE_BY = "bench gpu"

Span = tuple[float, float]
"""Start and end in microseconds."""

_COPY = "gpu_memcpy"
_KEPT = (
    "kernel",
    _COPY,
    "gpu_memset",
    "cuda_runtime",
    "cuda_driver",
    "user_annotation",
    "gpu_user_annotation",
)
_WAY = (
    ("to device", re.compile(r"HtoD|HostToDevice|H2D|M2D", re.IGNORECASE)),
    ("to host", re.compile(r"DtoH|DeviceToHost|D2H|D2M", re.IGNORECASE)),
)
_UNSEEN_STEPS = 2


def split(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Span]]:
    """The spans of each of LANES in the events of a Chrome trace, in the order of their starts."""
    lanes: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for event in events:
        lane = _lane_of(event)
        if lane is not None:
            lanes[lane].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    return {lane: sorted(spans) for lane, spans in lanes.items()}


def hidden_share(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of kernels, and of copies each way: how many, their bytes, their seconds, those under
    kernels, their share.

    Copies of one direction that run at once count once. `share` is None where there are no copies;
    `most_share` is the part of the copies' time for which there are kernels at all.
    """
    lanes = split(events)
    kernels = _merged(lanes["kernels"])
    kernel_s = _seconds(kernels)
    found: dict[str, Any] = {"kernel_s": kernel_s}
    for what, ways in (*((way, (way,)) for way in WAYS), ("both", WAYS)):
        copies = _merged(sorted(span for way in ways for span in lanes[way]))
        copy_s = _seconds(copies)
        hidden_s = _overlap_s(copies, kernels)
        found[what] = {
            "num_copies": sum(len(lanes[way]) for way in ways),
            "num_bytes": sum(_bytes_of(event) for event in events if _lane_of(event) in ways),
            "copy_s": copy_s,
            "hidden_s": hidden_s,
            "share": hidden_s / copy_s if copy_s else None,
            "most_share": min(1.0, kernel_s / copy_s) if copy_s else None,
        }
    return found


def profiled(train: Callable[..., dict[str, Any]], num_steps: int, file: Path) -> dict[str, Any]:
    """Calls `train(after_step=...)` under torch's profiler, writes the device's part of the trace;
    returns the training's figures and, under "hidden", those of `hidden_share`. The first two steps
    are not traced. Raises ValueError, OSError.
    """
    if num_steps <= _UNSEEN_STEPS:
        raise ValueError(
            f"{num_steps} steps are to be traced; give at least {_UNSEEN_STEPS + 1}: the first two "
            "are not"
        )
    events: list[dict[str, Any]] = []

    def keep(profiler: Any) -> None:
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            whole = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(whole))
            events.extend(each for each in read_json(whole)["traceEvents"] if _is_kept(each))

    steps = torch.profiler.schedule(wait=1, warmup=1, active=num_steps - _UNSEEN_STEPS, repeat=1)
    kinds = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=kinds, schedule=steps, on_trace_ready=keep) as profiler:
        figures = train(after_step=profiler.step)
    save_json(file, {"made_by": MADE_BY, "traceEvents": events})
    return {
        **figures,
        "hidden": hidden_share(events),
        "num_traced_steps": num_steps - _UNSEEN_STEPS,
    }


def read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace; empty if there is no such file. Raises ValueError for a file
    that is none."""
    if not file.is_file():
        return []
    found = read_json(file)
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{file} is no Chrome trace: it must be an object with traceEvents")
    return events


def _is_kept(event: Mapping[str, Any]) -> bool:
    """Whether an event is the device's, or a call of its driver, or a name of a row."""
    return event.get("ph") == "M" or event.get("cat") in _KEPT


def _lane_of(event: Mapping[str, Any]) -> str | None:
    if event.get("ph") != "X" or "ts" not in event or "dur" not in event:
        return None
    if event.get("cat") == "kernel":
        return "kernels"
    if event.get("cat") != _COPY:
        return None
    return next((way for way, pattern in _WAY if pattern.search(str(event.get("name", "")))), None)


def _bytes_of(event: Mapping[str, Any]) -> int:
    return int((event.get("args") or {}).get("bytes", 0))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The union of sorted spans, as spans that do not touch."""
    union: list[Span] = []
    for start, end in spans:
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def _seconds(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans) * 1e-6


def _overlap_s(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in which both unions have a span."""
    shared: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            shared.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return _seconds(shared)
