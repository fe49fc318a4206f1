"""RunRecord: everything a run told, kept small, and saved as runs/<id>/run.json for pictures and comparisons.

It hears the launcher (memory samples) and the channel (phases, steps, counts) and keeps bounded lists of both. Floats are
written so that they read back to the bit: two runs are equal when their `losses` are.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiermem.swap import durable
from tiermem.tools.channel import Message
from tiermem.tools.counts import IoCounts, disagreements
from tiermem.tools.device_memory import planned_bytes
from tiermem.tools.launcher import Observer, Outcome, Sample

_MAX_SAMPLES = 4096
_MAX_PHASES = 20_000
_PATH_KEYS = ("path", "written_bytes", "since_made_bytes")
NUM_WARM_UP = 1


class Series:
    """Samples over time in bounded memory: when it is full, neighbours are merged and their larger figures kept."""

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
        self._pending, self._num_pending = None, 0
        if len(self.samples) >= self._max_samples:
            self.samples = [_larger(a, b) for a, b in zip(self.samples[::2], self.samples[1::2], strict=False)]
            self._stride *= 2


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
        kind = message["kind"]
        if kind == "phase":
            if len(self.phases) < _MAX_PHASES:
                self.phases.append(message)
        elif kind == "step":
            self.steps.append(message)
        elif kind == "ready":
            self.ready = message
        elif kind == "done":
            self.done = message
        elif kind == "error":
            self.error = message

    def on_sample(self, sample: Sample) -> None:
        self.series.add(sample)

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step["loss"] for step in self.steps]

    def tokens_per_s(self) -> float | None:
        """Tokens per second of the median step."""
        seconds = median_after_warm_up([step["forward_s"] + step["backward_s"] + step["step_s"] for step in self.steps])
        return self.steps[-1]["tokens"] / seconds if seconds else None

    def disagreements(self) -> list[str]:
        """Where our counts differ from the kernel's; empty for a run that did not get to its end."""
        if "kernel_read_bytes" not in self.done:
            return []
        ours = IoCounts(self.done["nvme_read_bytes"], self.done["nvme_written_bytes"])
        kernel = IoCounts(self.done["kernel_read_bytes"], self.done["kernel_written_bytes"])
        if self.done.get("is_every_step_durable"):  # manifests, and what rests in memory, are not the store's to count
            kernel = kernel._replace(written_bytes=ours.written_bytes)
        return disagreements(ours, kernel)

    def summary(self) -> dict[str, Any]:
        """The figures of the run, as `--json` writes them."""
        outcome, done, ready = self.outcome, self.done, self.ready
        last = self.steps[-1] if self.steps else {}
        figures: dict[str, Any] = {
            "losses": self.losses,
            "forward_s": [step["forward_s"] for step in self.steps],
            "backward_s": [step["backward_s"] for step in self.steps],
            "step_s": [step["step_s"] for step in self.steps],
            "grad_norms": [step.get("grad_norm") for step in self.steps],
            "tokens_per_s": self.tokens_per_s(),
            "training_s": self._training_s(),
            "num_params": ready.get("num_params"),
            "state_bytes": ready.get("state_bytes"),
            "nvme_read_bytes": self._moved("read"),
            "nvme_written_bytes": self._moved("written"),
            "kernel_read_bytes": done.get("kernel_read_bytes"),
            "kernel_written_bytes": done.get("kernel_written_bytes"),
            "paths": [dict(zip(_PATH_KEYS, each, strict=True)) for each in done.get("paths", [])],
            "host_peak_bytes": done.get("host_peak_bytes"),
            "device_memory": self._device_memory(),
            "engine": last.get("engine"),
            "engine_why": last.get("engine_why"),
            "threads": ready.get("threads"),
            "device": ready.get("device"),
            "versions": ready.get("versions", {}),
            "disk": ready.get("ceiling"),
            "predicted": ready.get("predicted"),
            "choice": ready.get("choice"),
            "nvme_read_bytes_a_step": self._moved_a_step("read"),
            "nvme_written_bytes_a_step": self._moved_a_step("written"),
            "nvme_peak_bytes": max((step.get("nvme_bytes", 0) for step in self.steps), default=None),
            "disagreements": self.disagreements(),
            "error": self.error,
        }
        if outcome is not None:
            figures |= {
                "peak_rss_bytes": outcome.peak_rss_bytes,
                "memory_limit_bytes": outcome.limit_bytes,
                "limit_kind": outcome.limit_kind,
                "cgroup_peak_bytes": outcome.charge.peak_bytes,
                "cgroup_anonymous_peak_bytes": outcome.anonymous_peak_bytes,
                "cap_hits": outcome.charge.num_hits,
                "is_killed_at_cap": outcome.is_killed_at_cap,
                "exit_code": outcome.exit_code,
                "phase": outcome.phase,
                "is_interrupted": outcome.is_interrupted,
                "outcome": outcome.describe(),
                "wall_s": outcome.wall_s,
            }
        return figures

    def _device_memory(self) -> dict[str, Any] | None:
        """The last figures of the accelerator's memory, beside what the plan has there; None for a run on the CPU."""
        told = [message for message in (self.ready, *self.steps[-1:], self.done) if "device_memory" in message]
        if not told:
            return None
        return {**told[-1]["device_memory"], "plan_bytes": planned_bytes(self.ready.get("plan", []))}

    def _training_s(self) -> float:
        """Seconds from the start of the first step to the end of the last."""
        return (self.steps[-1].get("end_ns", 0) - self.steps[0].get("start_ns", 0)) * 1e-9 if self.steps else 0.0

    def _moved(self, what: str) -> int | None:
        """NVMe bytes of the training part: at its end, else, for a run that did not get there, at its last step."""
        key = f"nvme_{what}_bytes"
        if key in self.done or not self.steps:
            return self.done.get(key)
        return int(self.steps[-1].get(key, 0)) - int(self.ready.get(f"{what}_bytes", 0))

    def _moved_a_step(self, what: str) -> float | None:
        """NVMe bytes between the ends of two steps, the median; None without three steps."""
        totals = [step.get(f"nvme_{what}_bytes", 0) for step in self.steps[NUM_WARM_UP:]]
        return (
            statistics.median(after - before for before, after in itertools.pairwise(totals))
            if len(totals) > 1
            else None
        )

    def pictures(self) -> dict[str, Any]:
        """What the pictures need beside the figures: memory over time, phases and steps."""
        return {
            "samples": [list(sample) for sample in self.series.samples],
            "phases": self.phases,
            "steps": self.steps,
            "plan": self.ready.get("plan", []),
            "budget": self.ready.get("budget", []),
        }


def median_after_warm_up(values: Sequence[float]) -> float | None:
    """The median of a figure per step, the first step left out when there is more; None without any."""
    return statistics.median(values[NUM_WARM_UP:] or values) if values else None


def machine() -> dict[str, Any]:
    """This machine in a few words: processor, cores, memory, kernel."""
    processor = next((value for key, value in _colon_table("/proc/cpuinfo") if key == "model name"), platform.machine())
    memory = next((value for key, value in _colon_table("/proc/meminfo") if key == "MemTotal"), "0")
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory.split()[0]) * 1024,
        "kernel": platform.release(),
    }


def stamp(command: Sequence[str]) -> dict[str, Any]:
    """What identifies a run: when, where, how."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": now, "machine": machine(), "command": list(command)}


def save_json(file: Path, content: dict[str, Any]) -> None:
    """Writes JSON under a temporary name first, so that a reader never sees a part."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with durable.named(file):
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)


def _larger(a: Sample, b: Sample) -> Sample:
    charges = [c for c in (a.charged_bytes, b.charged_bytes) if c is not None]
    return Sample(b.time_ns, max(a.resident_bytes, b.resident_bytes), max(charges, default=None))


def _colon_table(file: str) -> list[tuple[str, str]]:
    with open(file, encoding="utf-8") as lines:
        pairs = (line.partition(":") for line in lines)
        return [(key.strip(), value.strip()) for key, _, value in pairs]
