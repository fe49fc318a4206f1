"""RunRecord: the record of a run, of bounded size, saved as runs/<id>/run.json; its timeline, trace
and device memory."""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.swap.base.proc import read_table
from tiermem.swap.disk import durable
from tiermem.tools.job.launcher import Message, Observer, Outcome, Sample
from tiermem.tools.measure.machine import WrittenOnPath, cpu_model, memory_bytes, num_cores
from tiermem.tools.words import format_bytes

Figures = dict[str, Any]
"""The figures of a run, or a part of them, as JSON has them."""

# ---- counts of bytes: the store's compared with the kernel's (/proc/self/io) ---------------------
#
# The kernel counts all block I/O of the process. That includes pages of program code that are read
# late, or again after the cap evicted them. So the kernel's reads may exceed the store's by
# SLACK_BYTES.

TOLERANCE = 0.02


class IoCounts(NamedTuple):
    """Bytes read and written."""

    read_bytes: int
    written_bytes: int

    @staticmethod
    def total(counts: Iterable[IoCounts]) -> IoCounts:
        """The sum; zeros for none."""
        return IoCounts(*map(sum, zip((0, 0), *counts, strict=True)))

    @staticmethod
    def mean(counts: Sequence[IoCounts]) -> IoCounts:
        """In whole bytes."""
        return IoCounts(*(each // len(counts) for each in IoCounts.total(counts)))

    def since(self, before: IoCounts) -> IoCounts:
        """What was added after `before`."""
        return IoCounts(
            self.read_bytes - before.read_bytes, self.written_bytes - before.written_bytes
        )


SLACK = IoCounts(32 << 20, 1 << 20)


def kernel_counts() -> IoCounts:
    """Block I/O of this process so far, all threads."""
    counts = read_table("/proc/self/io")
    return IoCounts(int(counts["read_bytes"]), int(counts["write_bytes"]))


def disagreements(
    ours: IoCounts,
    kernel: IoCounts,
    who: str = "the store",
    tolerance: float = TOLERANCE,
    slack: IoCounts = SLACK,
) -> list[str]:
    """A sentence with both numbers for each count that the kernel has otherwise; it may have
    `slack` bytes more."""
    return [
        f"bytes {what}: {who} counts {mine} ({format_bytes(mine)}), the kernel {theirs} "
        f"({format_bytes(theirs)}); they may differ by {tolerance:.0%}"
        for what, mine, theirs, more in zip(("read", "written"), ours, kernel, slack, strict=True)
        if not mine * (1 - tolerance) <= theirs <= mine * (1 + tolerance) + more
    ]


# ---- timeline: events as lanes, and a lane as rows of events that do not overlap -----------------
#
# Concurrent transfers share a lane; a picture or a trace viewer needs them in separate rows. Each
# event goes to the first free row, in order of start, so a lane has as many rows as the most
# concurrent transfers.

PHASES = ("forward", "backward", "step")
LANES = (*PHASES, "unit", "gather", "reduce", "read", "write", "compute", "check", "wait")
RESOURCES = {
    "compute": ("unit",),
    "link": ("gather",),
    "disk": ("read", "write"),
    "kernels": ("compute", "check"),
}
"""The lanes of what a step may keep busy: the maths of modules, links, disks, and kernels of steps
and checksums."""
TAIL = "step under the forward"
"""The name of the part of a step that goes on after its return."""


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
        return in_order(Span(*json.loads(line)) for line in lines)


def in_order(spans: Iterable[Span]) -> list[Span]:
    """Spans in order of start."""
    return sorted(spans, key=lambda span: span.start_ns)


def lanes_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans by lane, in the order of LANES, then others by name; lanes without spans are absent."""
    lanes: dict[str, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    order = [*LANES, *sorted(lanes.keys() - set(LANES))]
    return {lane: lanes[lane] for lane in order if lane in lanes}


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


def covered(spans: Iterable[Span]) -> float:
    """How many nanoseconds some spans cover together."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted((span.start_ns, span.end_ns) for span in spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def with_tails(spans: Sequence[Span]) -> list[Span]:
    """The spans, and one in the lane "step" for each step that went on under the next forward: from
    its return to its end.

    spans: in order of start. The kernels of a step's tiles are in the lane "compute", and "write"
        has their names.
    """
    steps = [span for span in spans if span.lane == "step"]
    tiles = [span for span in spans if span.lane == "compute"]
    names = {span.name for span in tiles}
    tiles += [span for span in spans if span.lane == "write" and span.name in names]
    found = list(spans)
    for number, step in enumerate(steps):
        before_ns = steps[number + 1].start_ns if number + 1 < len(steps) else float("inf")
        end_ns = max(
            (tile.end_ns for tile in tiles if step.start_ns <= tile.start_ns < before_ns), default=0
        )
        if end_ns > step.end_ns:
            found.append(Span("step", TAIL, step.end_ns, end_ns, 0))
    return in_order(found)


def without_waits(spans: Sequence[Span]) -> list[Span]:
    """The spans of the lane "unit" cut by the waits inside them: a module that waits computes
    nothing. Others as they are."""
    aside = [
        span for span in spans if span.lane == "wait" or (span.lane == "step" and span.name != TAIL)
    ]
    waits = sorted((span.start_ns, span.end_ns) for span in aside)
    found = []
    for span in spans:
        start_ns = span.start_ns
        for wait_ns, until_ns in waits if span.lane == "unit" else ():
            if until_ns > start_ns and wait_ns < span.end_ns:
                if wait_ns > start_ns:
                    found.append(span._replace(start_ns=start_ns, end_ns=wait_ns))
                start_ns = max(start_ns, until_ns)
        if start_ns < span.end_ns or span.lane != "unit":
            found.append(span._replace(start_ns=start_ns))
    return in_order(found)


def together_ns(spans: Sequence[Span]) -> float:
    """How many nanoseconds at least two resources were busy together."""
    edges: list[tuple[int, int]] = []
    for lanes in RESOURCES.values():
        until = 0
        for start_ns, end_ns in sorted(
            (span.start_ns, span.end_ns) for span in spans if span.lane in lanes
        ):
            edges += [(max(start_ns, until), 1), (end_ns, -1)] if end_ns > until else []
            until = max(until, end_ns)
    total = 0
    num_busy = 0
    since_ns = 0
    for time_ns, change in sorted(edges):
        total += time_ns - since_ns if num_busy > 1 else 0
        num_busy = num_busy + change
        since_ns = time_ns
    return total


def busy_fraction(spans: Iterable[Span], start_ns: int, end_ns: int) -> float:
    """The part of a stretch of time in which at least one of the spans goes on."""
    return covered(within(spans, start_ns, end_ns)) / max(1, end_ns - start_ns)


# ---- trace.json: opens in Perfetto (ui.perfetto.dev) or chrome://tracing -------------------------
#
# Each lane's rows become threads of one process, so that concurrent transfers are shown side by
# side. Source: "Trace Event Format", complete events ("X"), microseconds.

_PROCESS = 1


def write_trace(file: Path, spans: Sequence[Span]) -> None:
    """Writes all spans, the first at time zero."""
    origin = min((span.start_ns for span in spans), default=0)
    events: list[dict[str, Any]] = [_about("process_name", 0, name="tiermem")]
    thread = 0
    for lane, members in lanes_of(spans).items():
        for number, row in enumerate(rows_of(members)):
            thread += 1
            events.append(
                _about("thread_name", thread, name=lane if number == 0 else f"{lane} {number + 1}")
            )
            events.append(_about("thread_sort_index", thread, sort_index=thread))
            events += [_complete(span, thread, origin) for span in row]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
    durable.write_file(file, text.encode())


def _complete(span: Span, thread: int, origin: int) -> dict[str, Any]:
    duration = span.end_ns - span.start_ns
    moved = {"bytes": span.num_bytes, "GB/s": round(span.num_bytes / max(duration, 1), 3)}
    return {
        "ph": "X",
        "cat": span.lane,
        "name": span.name,
        "pid": _PROCESS,
        "tid": thread,
        "ts": (span.start_ns - origin) / 1e3,
        "dur": duration / 1e3,
        "args": moved if span.num_bytes else {},
    }


def _about(kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": arguments}


# ---- the accelerator's memory --------------------------------------------------------------------
#
#     allocated   bytes of tensors                     reserved   bytes that torch took from the driver, its cache included
#     free        bytes that can still be allocated    total      bytes of the device
#
# Messages and run.json have the figures under `device_memory`. A run on the CPU has no such key and
# prints no such line.


class OutOfDeviceMemory(RuntimeError):
    """The accelerator's memory does not hold what the run needs; the message says what to
    change."""


def describe_device(figures: Figures) -> str:
    """Now, at the peak, and the card: on one line."""
    now, reserved, peak, peak_reserved, total = (
        format_bytes(figures[f"{key}_bytes"])
        for key in ("allocated", "reserved", "peak_allocated", "peak_reserved", "total")
    )
    return (
        f"{figures['device']} {now} ({reserved} reserved) of {total}, peak {peak} ({peak_reserved})"
    )


def planned_bytes(plan: Sequence[Sequence[Any]]) -> int:
    """Bytes that a plan's rows (what, tier, bytes, why) have on DEVICE."""
    return sum(num_bytes for _, tier, num_bytes, _ in plan if tier == "DEVICE")


# ---- the record: runs/<id>/run.json --------------------------------------------------------------
#
# It takes memory samples from the launcher, and phases, steps and counts from the channel, and
# keeps bounded lists of both. Floats keep every bit in the file: two runs are equal when their
# `losses` are equal.

_MAX_SAMPLES = 4096
_MAX_PHASES = 20_000
NUM_WARM_UP = 1
_OF_DONE = (
    "steps_early", "steps_redone", "redone_bytes", "copied_bytes", "kernel_read_bytes", "kernel_written_bytes",
    "host_peak_bytes",
)  # fmt: skip
_OF_READY = (
    "num_params",
    "state_bytes",
    "threads",
    "device",
    "choice",
    "placement",
    "compute",
    "is_checkpointing",
    "num_kept",
)
_OF_OUTCOME = (
    "peak_rss_bytes",
    "limit_kind",
    "is_killed_at_cap",
    "exit_code",
    "phase",
    "is_interrupted",
    "wall_s",
)


def median_limits(steps: Sequence[Message]) -> dict[str, float] | None:
    """Seconds for which each resource was busy in an iteration (swap/disk/queue.py), the median
    after the warm-up."""
    told = [step["limits_s"] for step in steps if "limits_s" in step]
    found = told[NUM_WARM_UP:] or told
    return (
        {name: statistics.median(each[name] for each in found) for name in found[0]}
        if found
        else None
    )


class Series:
    """Samples over time in bounded memory: when it is full, neighbours are merged and their larger
    figures kept."""

    def __init__(self, max_samples: int = _MAX_SAMPLES) -> None:
        self.samples: list[Sample] = []
        self._max_samples = max_samples
        self._stride = 1
        self._num_pending = 0
        self._pending: Sample | None = None

    def add(self, sample: Sample) -> None:
        """Adds one sample."""
        self._pending = sample if self._pending is None else _larger(self._pending, sample)
        self._num_pending += 1
        if self._num_pending < self._stride:
            return
        self.samples.append(self._pending)
        self._pending = None
        self._num_pending = 0
        if len(self.samples) >= self._max_samples:
            self.samples = [
                _larger(a, b) for a, b in zip(self.samples[::2], self.samples[1::2], strict=False)
            ]
            self._stride *= 2


def seconds_of(step: Message) -> float:
    """How long a step took, or is predicted to take, from its message."""
    return max(1e-9, float(sum(step[f"{phase}_s"] for phase in PHASES)))


class RunRecord(Observer):
    """Collects one run. Attributes are what the reports read."""

    def __init__(self) -> None:
        self.series = Series()
        self.phases: list[Message] = []
        self.steps: list[Message] = []
        self.ready: Message = {}
        self.done: Message = {}
        self.error: Message | None = None
        self.outcome: Outcome | None = None

    def on_message(self, message: Message) -> None:
        match message["kind"]:
            case "phase" if len(self.phases) < _MAX_PHASES:
                self.phases.append(message)
            case "step":
                self.steps.append(message)
            case "ready":
                self.ready = message
            case "done":
                self.done = message
            case "error":
                self.error = message

    def on_sample(self, sample: Sample) -> None:
        self.series.add(sample)

    def disagreements(self) -> list[str]:
        """Where our counts differ from the kernel's; empty for a run that did not get to its end,
        or that used no disk.

        A run without a disk still reads program code, and an accelerator's libraries write caches.
        """
        if "kernel_read_bytes" not in self.done or not self.done.get("paths", True):
            return []
        ours = IoCounts(self.done["nvme_read_bytes"], self.done["nvme_written_bytes"])
        kernel = IoCounts(self.done["kernel_read_bytes"], self.done["kernel_written_bytes"])
        # manifests, and what rests in memory, are not the store's to count
        if self.done.get("is_every_step_durable"):
            kernel = kernel._replace(written_bytes=ours.written_bytes)
        return disagreements(ours, kernel)

    def _predicted(self) -> Figures | None:
        """What was predicted, of steps as most of them were: begun under backward, or not, which
        shows in the run alone."""
        said = self.ready.get("predicted")
        is_late = 2 * self.done.get("steps_early", len(self.steps)) < len(self.steps)
        return {**said, **said["late"]} if said and said.get("late") and is_late else said

    def summary(self) -> Figures:
        """The figures of the run, as `--json` writes them."""
        outcome = self.outcome
        done = self.done
        ready = self.ready
        limits = median_limits(self.steps)
        first = self.steps[0] if self.steps else {}
        last = self.steps[-1] if self.steps else {}
        figures: Figures = {
            "losses": [step["loss"] for step in self.steps],
            **{
                key: [step[key] for step in self.steps]
                for key in ("forward_s", "backward_s", "step_s")
            },
            "iteration_s": [
                (step["end_ns"] - step["start_ns"]) * 1e-9
                for step in self.steps
                if "end_ns" in step
            ],
            "limits_s": limits,
            **{key: done.get(key) for key in _OF_DONE},
            "limited_by": max(limits, key=lambda name: limits[name]) if limits else None,
            "grad_norms": [step.get("grad_norm") for step in self.steps],
            "tokens_per_s": median_after_warm_up(
                [step["tokens"] / seconds_of(step) for step in self.steps]
            ),
            # from the start of the first step to the end of the last
            "training_s": (last.get("end_ns", 0) - first.get("start_ns", 0)) * 1e-9,
            **{key: ready.get(key) for key in _OF_READY},
            "predicted": self._predicted(),
            "nvme_read_bytes": self._moved("read"),
            "nvme_written_bytes": self._moved("written"),
            "paths": [WrittenOnPath(*each)._asdict() for each in done.get("paths", [])],
            "device_memory": self._device_memory(),
            **{key: last.get(key) for key in ("engine", "engine_why")},
            "versions": ready.get("versions", {}),
            "disk": ready.get("ceiling"),
            "nvme_read_bytes_a_step": self._moved_a_step("read"),
            "nvme_written_bytes_a_step": self._moved_a_step("written"),
            "nvme_peak_bytes": max(
                (step.get("nvme_bytes", 0) for step in self.steps), default=None
            ),
            "disagreements": self.disagreements(),
            "error": self.error,
        }
        if outcome is not None:
            figures |= {key: getattr(outcome, key) for key in _OF_OUTCOME}
            figures |= {
                "memory_limit_bytes": outcome.limit_bytes,
                "cgroup_peak_bytes": outcome.charge.peak_bytes,
                "cgroup_anonymous_peak_bytes": outcome.anonymous_peak_bytes,
                "cap_hits": outcome.charge.num_hits,
                "outcome": outcome.describe(),
            }
        return figures

    def _device_memory(self) -> Figures | None:
        """The last figures of the accelerator's memory, beside what the plan has there; None for a
        run on the CPU."""
        told = [
            message
            for message in (self.ready, *self.steps[-1:], self.done)
            if "device_memory" in message
        ]
        if not told:
            return None
        return {
            **told[-1]["device_memory"],
            "plan_bytes": planned_bytes(self.ready.get("plan", [])),
        }

    def _moved(self, what: str) -> int | None:
        """NVMe bytes of the training part: at its end, else, for a run that did not get there, at
        its last step."""
        key = f"nvme_{what}_bytes"
        if key in self.done or not self.steps:
            return self.done.get(key)
        return int(self.steps[-1].get(key, 0)) - int(self.ready.get(f"{what}_bytes", 0))

    def _moved_a_step(self, what: str) -> float | None:
        """NVMe bytes between the ends of two steps, the median; None without three steps."""
        totals = [step.get(f"nvme_{what}_bytes", 0) for step in self.steps[NUM_WARM_UP:]]
        moved = [after - before for before, after in itertools.pairwise(totals)]
        return statistics.median(moved) if moved else None

    def pictures(self) -> Figures:
        """What the pictures need beside the figures: memory over time, phases and steps."""
        return {
            "samples": [list(sample) for sample in self.series.samples],
            "phases": self.phases,
            "steps": self.steps,
            "plan": self.ready.get("plan", []),
            "budget": self.ready.get("budget", []),
        }


def median_after_warm_up(values: Sequence[float]) -> float | None:
    """The median of a figure per step, the first step left out when there is more; None without
    any."""
    return statistics.median(values[NUM_WARM_UP:] or values) if values else None


def stamp() -> Figures:
    """What identifies a run: when, where, how."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "processor": cpu_model(),
            "cores": num_cores(),
            "memory_bytes": memory_bytes(),
            "kernel": platform.release(),
        },
        "command": ["tiermem", *sys.argv[1:]],
    }


def _larger(a: Sample, b: Sample) -> Sample:
    charges = [c for c in (a.charged_bytes, b.charged_bytes) if c is not None]
    return Sample(b.time_ns, max(a.resident_bytes, b.resident_bytes), max(charges, default=None))
