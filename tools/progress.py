"""Progress: what a person sees while a run goes on. A live panel on a terminal, plain lines elsewhere.

Loss, tokens per second, memory against the cap and on the accelerator, GB/s against the disk's measured ceiling, seconds
waited and for what.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tiermem.tools.byte_size import format_bytes
from tiermem.tools.channel import Message
from tiermem.tools.device_memory import describe_device
from tiermem.tools.launcher import Observer, Sample

_REFRESH_S = 0.25
_BAR_WIDTH = 40


class Progress(Observer):
    """Shows one run; a context manager, since a live panel must be taken down."""

    def __init__(self, console: Console, title: str, num_steps: int, limit_bytes: int | None, limit_kind: str) -> None:
        self._console = console
        self._title = title
        self._num_steps = num_steps
        self._limit_bytes = limit_bytes
        self._limit_kind = limit_kind
        self._phase = "start"
        self._ceiling: dict[str, Any] | None = None
        self._step: Message | None = None
        self._moved = (0, 0)  # NVMe bytes read and written in the last step
        self._before = (0, 0)
        self._sample: Sample | None = None
        self._peak_bytes = 0
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def on_message(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "phase":
            self._phase = message["name"]
            if self._live is None and " of step " not in self._phase:
                self._line(self._phase)
        elif kind == "ready":
            self._ceiling = message.get("ceiling")
            self._before = (message.get("read_bytes", 0), message.get("written_bytes", 0))
        elif kind == "step":
            now = (message.get("nvme_read_bytes", 0), message.get("nvme_written_bytes", 0))
            self._moved = (now[0] - self._before[0], now[1] - self._before[1])
            self._before = now
            self._step = message
            if self._live is None:
                self._line(self._describe_step(message))

    def on_sample(self, sample: Sample) -> None:
        self._sample = sample
        self._peak_bytes = max(self._peak_bytes, sample.resident_bytes)
        if self._live and time.monotonic() - self._drawn > _REFRESH_S:
            self._drawn = time.monotonic()
            self._live.update(self._panel(), refresh=True)

    def _describe_step(self, step: Message) -> str:
        seconds = _seconds(step)
        parts = [
            f"step {step['step']}/{self._num_steps}",
            f"loss {step['loss']:.4f}",
            f"{step['tokens'] / seconds:.1f} tokens/s",
            f"forward {step['forward_s']:.2f} backward {step['backward_s']:.2f} step {step['step_s']:.2f} s",
            f"memory {self._describe_memory()}",
        ]
        if "device_memory" in step:
            parts.append(describe_device(step["device_memory"]))
        if any(self._moved):
            parts.append(self._describe_disk(seconds))
        if waits := self._describe_waits(step):
            parts.append(f"waited {waits}")
        return " · ".join(parts)

    def _describe_memory(self) -> str:
        now = format_bytes(self._sample.resident_bytes) if self._sample else "?"
        cap = f" of {format_bytes(self._limit_bytes)} ({self._limit_kind})" if self._limit_bytes else ""
        return f"{now}{cap}, peak {format_bytes(self._peak_bytes)}"

    def _describe_disk(self, seconds: float) -> str:
        read, written = (moved / seconds / 1e9 for moved in self._moved)
        if not self._ceiling:
            return f"disk {read:.2f} read + {written:.2f} write GB/s"
        least = self._moved[0] / self._ceiling["read_bytes_s"] + self._moved[1] / self._ceiling["write_bytes_s"]
        bound = f"{self._ceiling['read_bytes_s'] / 1e9:.1f} and {self._ceiling['write_bytes_s'] / 1e9:.1f}"
        return f"disk {read:.2f} read + {written:.2f} write GB/s (ceilings {bound}: busy {least / seconds:.0%})"

    def _describe_waits(self, step: Message) -> str:
        return ", ".join(f"{s:.2f} s for {name}" for name, s in list(step.get("waits", {}).items())[:3] if s >= 0.005)

    def _panel(self) -> Table:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column()
        step = self._step
        done = step["step"] if step else 0
        rows.add_row(Text(self._title), ProgressBar(self._num_steps, done, width=_BAR_WIDTH))
        rows.add_row("", f"step {done}/{self._num_steps}, now {self._phase}")
        if step:
            seconds = _seconds(step)
            rows.add_row("loss", f"{step['loss']:.4f}")
            rows.add_row("speed", f"{step['tokens'] / seconds:.1f} tokens/s, {seconds:.2f} s a step")
            if any(self._moved):
                rows.add_row("disk", self._describe_disk(seconds).removeprefix("disk "))
            rows.add_row("waited", self._describe_waits(step) or "no time worth naming")
        rows.add_row("memory", self._describe_memory())
        if step and "device_memory" in step:
            rows.add_row("device", describe_device(step["device_memory"]))
        if self._limit_bytes and self._sample:
            part = self._sample.resident_bytes / self._limit_bytes
            style = "green" if part < 0.85 else "yellow" if part < 0.97 else "red"
            bar = ProgressBar(self._limit_bytes, self._sample.resident_bytes, width=_BAR_WIDTH, complete_style=style)
            rows.add_row("", bar)
        return rows

    def _line(self, text: str) -> None:
        self._console.print(f"{self._title}: {text}", highlight=False, markup=False, soft_wrap=True)


def _seconds(step: Message) -> float:
    return max(1e-9, float(step["forward_s"] + step["backward_s"] + step["step_s"]))
