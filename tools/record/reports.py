"""Reports of a run: progress while it runs, on a console and for TensorBoard; then tables of
memory, time and predictions."""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tiermem.swap.base.errors import printable
from tiermem.tools.job.launcher import Message, Observer, Sample
from tiermem.tools.measure.machine import WrittenOnPath, endurance_lines
from tiermem.tools.record.run_record import (
    PHASES,
    Figures,
    IoCounts,
    RunRecord,
    describe_device,
    median_after_warm_up,
    planned_bytes,
    seconds_of,
)
from tiermem.tools.words import format_bytes, format_seconds, numbered

# ---- progress: a live panel on a terminal, plain lines elsewhere ---------------------------------
#
# In brief it shows the run's size, its prediction and a few steps; --verbose shows phases, the plan
# and every step. A step has loss, tokens per second, memory compared with the cap and on the
# accelerator, GB/s compared with the disk's measured rate, and the seconds and reasons of waits.

_REFRESH_S = 0.25
_BAR_WIDTH = 40


class Progress(RunRecord):
    """Records one run and shows it; a context manager, since a live panel must be taken down."""

    def __init__(
        self,
        console: Console,
        title: str,
        num_steps: int,
        limit_bytes: int | None,
        limit_kind: str,
        is_verbose: bool = True,
    ) -> None:
        super().__init__()
        self._is_verbose = is_verbose
        self._console = console
        self._title = title
        self._num_steps = num_steps
        self._limit_bytes = limit_bytes
        self._limit_kind = limit_kind
        self._phase = "start"
        self._sample: Sample | None = None
        self._peak_bytes = 0
        self._drawn = 0.0
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def on_message(self, message: Message) -> None:
        super().on_message(message)
        kind = message["kind"]
        if kind == "phase":
            self._phase = message["name"]
            if self._live is None and self._is_verbose and " of step " not in self._phase:
                self._line(self._phase)
        elif kind == "ready":
            self._num_steps = message.get("num_steps", self._num_steps)
            if message.get("plan"):
                self._show_ready(message)
        elif kind == "warning":
            self._line(message["text"])
        elif (
            kind == "step"
            and self._live is None
            and (self._is_verbose or self._is_shown(message["step"]))
        ):
            told = [f"{about} {words}" for about, words in self._describe_step(message).items()]
            self._line(" · ".join([f"step {message['step']}/{self._num_steps}", *told]))

    def _show_ready(self, ready: Message) -> None:
        if self._is_verbose:
            self._console.print(plan_table(ready))
            if ready.get("choice"):
                self._console.print(ready["choice"])
        else:
            self._line(describe_ready(ready))
        for line in (*ready.get("placement", ()), ready.get("compute")):
            if line:
                self._line(line)

    def _is_shown(self, step: int) -> bool:
        """Whether a step has a line in brief: 1, 2, 5, 10, 20, 50, ... and the last."""
        return step == self._num_steps or str(step).rstrip("0") in ("1", "2", "5")

    def on_sample(self, sample: Sample) -> None:
        super().on_sample(sample)
        self._sample = sample
        self._peak_bytes = max(self._peak_bytes, sample.held_bytes)
        if self._live and time.monotonic() - self._drawn > _REFRESH_S:
            self._drawn = time.monotonic()
            self._live.update(self._panel(), refresh=True)

    def _describe_step(self, step: Message) -> dict[str, str]:
        """What a step took, in words, by what they are about."""
        seconds = seconds_of(step)
        phases = " ".join(f"{phase} {step[f'{phase}_s']:.2f}" for phase in PHASES)
        waits = [
            f"{s:.2f} s for {name}"
            for name, s in list(step.get("waits", {}).items())[:3]
            if s >= 0.005
        ]
        told = {
            "loss": f"{step['loss']:.4f}",
            "speed": f"{step['tokens'] / seconds:.1f} tokens/s, {phases} s",
            "disk": self._describe_disk(seconds),
            "waited": ", ".join(waits),
            "limited by": step.get("limited_by"),
            "device": describe_device(step["device_memory"]) if "device_memory" in step else "",
            "memory": self._describe_memory(),
        }
        return {about: words for about, words in told.items() if words}

    def _describe_memory(self) -> str:
        now = format_bytes(self._sample.held_bytes) if self._sample else "?"
        cap = (
            f" of {format_bytes(self._limit_bytes)} ({self._limit_kind})"
            if self._limit_bytes
            else ""
        )
        return f"{now}{cap}, peak {format_bytes(self._peak_bytes)}"

    def _describe_disk(self, seconds: float) -> str:
        moved = self._moved_last()
        if not any(moved):
            return ""
        ceiling = self.ready.get("ceiling")
        read, written = (num_bytes / seconds / 1e9 for num_bytes in moved)
        if not ceiling:
            return f"{read:.2f} read + {written:.2f} write GB/s"
        least = (
            moved.read_bytes / ceiling["read_bytes_s"]
            + moved.written_bytes / ceiling["write_bytes_s"]
        )
        bound = f"{ceiling['read_bytes_s'] / 1e9:.1f} and {ceiling['write_bytes_s'] / 1e9:.1f}"
        return (
            f"{read:.2f} read + {written:.2f} write GB/s (ceilings {bound}: busy "
            f"{least / seconds:.0%})"
        )

    def _moved_last(self) -> IoCounts:
        """NVMe bytes of the last step."""
        start = IoCounts(self.ready.get("read_bytes", 0), self.ready.get("written_bytes", 0))
        ends = (
            IoCounts(s.get("nvme_read_bytes", 0), s.get("nvme_written_bytes", 0))
            for s in self.steps[-2:]
        )
        before, now = [start, *ends][-2:]
        return now.since(before)

    def _panel(self) -> Table:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column()
        step = self.steps[-1] if self.steps else None
        done = step["step"] if step else 0
        rows.add_row(Text(self._title), ProgressBar(self._num_steps, done, width=_BAR_WIDTH))
        rows.add_row("", f"step {done}/{self._num_steps}, now {self._phase}")
        told = self._describe_step(step) if step else {"memory": self._describe_memory()}
        for about, words in told.items():
            rows.add_row(about, words)
        if self._limit_bytes and self._sample:
            part = self._sample.held_bytes / self._limit_bytes
            style = "green" if part < 0.85 else "yellow" if part < 0.97 else "red"
            rows.add_row(
                "",
                ProgressBar(
                    self._limit_bytes,
                    self._sample.held_bytes,
                    width=_BAR_WIDTH,
                    complete_style=style,
                ),
            )
        return rows

    def _line(self, text: str) -> None:
        self._console.print(f"{self._title}: {text}", highlight=False, markup=False, soft_wrap=True)


# ---- TensorBoard ---------------------------------------------------------------------------------

SCALARS = (
    "loss",
    "grad_norm",
    "lr",
    "forward_s",
    "backward_s",
    "step_s",
    "read_gb_s",
    "written_gb_s",
    "waited_s",
)
"""Figures of a step's message that are written as they are."""


class TensorBoardLog(Observer):
    """Writes the figures of every step into a folder for TensorBoard. Imports torch, which the
    launcher does without otherwise.

    `train/` has loss, norm and rate, `tiermem/` the seconds of each phase, tokens a second, GB/s,
    waiting, resident memory, and what limited the step, as text. The folder is new: TensorBoard's
    own writer follows links. Raises FileExistsError for one that exists, ImportError where
    tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
        self._resident_bytes = 0

    def on_message(self, message: Message) -> None:
        if message["kind"] != "step":
            return
        step = message["step"]
        for name in SCALARS:
            if name in message:
                place = "train" if name in ("loss", "grad_norm", "lr") else "tiermem"
                self._writer.add_scalar(f"{place}/{name}", message[name], step)
        self._writer.add_scalar(
            "tiermem/tokens_per_s", message["tokens"] / seconds_of(message), step
        )
        self._writer.add_scalar("tiermem/resident_gib", self._resident_bytes / (1 << 30), step)
        if "limited_by" in message:
            self._writer.add_text("tiermem/limited_by", message["limited_by"], step)
        self._writer.flush()

    def on_sample(self, sample: Sample) -> None:
        self._resident_bytes = sample.resident_bytes

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


# ---- tables --------------------------------------------------------------------------------------

_WIDTH = 150  # of tables that go to a file


class _Terminal(Console):
    """Escapes what would steer the terminal: names and texts may be those of other users."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """The segments, with escapes as texts."""
        for each in super().render(renderable, options):
            yield each if each.control else each._replace(text=printable(each.text))


def open_console(is_aside: bool = False) -> Console:
    """A console on stdout, wide where there is no terminal to be wide as; it prints texts as they
    are, brackets too. is_aside: on stderr, since stdout is for JSON."""
    stream = sys.stderr if is_aside else sys.stdout
    width = None if stream.isatty() else _WIDTH
    return _Terminal(markup=False, highlight=False, width=width, stderr=is_aside)


def table(title: str, *columns: str, **how: Any) -> Table:
    """A table without borders, its title above it on the left. A column whose name begins with ">"
    is aligned right."""
    made = Table(
        title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False, **how
    )
    for name in columns:
        made.add_column(
            name.removeprefix(">"), justify="right" if name[:1] == ">" else "left", overflow="fold"
        )
    return made


def plan_table(ready: Message) -> Table:
    """The plan (what rests and passes where) and, under a cap, the arithmetic that led to its
    budget."""
    shown = table("where each byte lives", "what", "tier", ">size", "why")
    shown.columns[-1].style = "dim"
    for what, tier, num_bytes, why in ready.get("plan", []):
        shown.add_row(what, tier, format_bytes(num_bytes), why)
    if "device_memory" in ready:
        card = ready["device_memory"]
        on = (
            f"of {format_bytes(card['total_bytes'])} of {card['device']}, "
            f"{format_bytes(card['free_bytes'])} free now"
        )
        shown.add_row(
            "= DEVICE",
            "DEVICE",
            format_bytes(planned_bytes(ready.get("plan", []))),
            on,
            style="bold",
        )
    if ready.get("budget"):
        shown.add_section()
        for name, num_bytes, why in ready["budget"]:
            shown.add_row(name, "cap", format_bytes(num_bytes), why)
    return shown


def result_table(run: Figures) -> Table:
    """What a run took: our figures beside the kernel's."""
    shown = table(f"{run['name']}: {run['outcome']}", "", ">measured", ">kernel", "")
    losses = run["losses"]
    if losses:
        shown.add_row(
            "loss", f"{losses[0]:.4f} → {losses[-1]:.4f}", "", numbered(len(losses), "step")
        )
        shown.add_row(
            "forward / backward / step",
            " / ".join(map(_seconds, _medians(run).values())),
            "",
            "medians, the first step left out",
        )
        shown.add_row("tokens per second", f"{run['tokens_per_s']:.1f}", "", "")
    if run["num_params"]:
        shown.add_row(
            "parameters",
            f"{run['num_params']:,}",
            "",
            f"{format_bytes(run['state_bytes'])} of states",
        )
    for what in ("read", "written"):
        ours = run.get(f"nvme_{what}_bytes")
        kernel = run.get(f"kernel_{what}_bytes")
        if ours or kernel:
            shown.add_row(
                f"NVMe bytes {what}", _size(ours), _size(kernel), _difference(ours, kernel)
            )
    shown.add_row(
        "host memory carved", _size(run.get("host_peak_bytes")), "", "peak of the store's arena"
    )
    card = run.get("device_memory")
    if card is not None:
        shown.add_row(
            f"memory of {card['device']}",
            _size(card["peak_allocated_bytes"]),
            "",
            f"peak; {_size(card['allocated_bytes'])} at the end, {_size(card['plan_bytes'])} of "
            "them planned to rest there",
        )
        shown.add_row(
            "reserved there by torch",
            _size(card["peak_reserved_bytes"]),
            "",
            f"peak; {_size(card['reserved_bytes'])} at the end, of {_size(card['total_bytes'])}, "
            f"{_size(card['free_bytes'])} free",
        )
    shown.add_row(
        "resident", "", _size(run["peak_rss_bytes"]), "peak over the process tree (VmHWM)"
    )
    if run["cgroup_peak_bytes"] is not None:
        shown.add_row(
            "cgroup",
            "",
            _size(run["cgroup_peak_bytes"]),
            f"with page cache; without {_size(run['cgroup_anonymous_peak_bytes'])} at the largest "
            "sample",
        )
    if run["memory_limit_bytes"]:
        shown.add_row("cap", _size(run["memory_limit_bytes"]), "", run["limit_kind"])
    if run.get("engine") not in (None, "none yet"):
        shown.add_row("engine", run["engine"], "", run["engine_why"])
    return shown


def describe_ready(ready: Message) -> str:
    """One line before the first step: the model, its states, where the bytes rest, and the
    prediction."""
    by_tier = Counter[str]()
    for _, tier, num_bytes, _ in ready["plan"]:
        by_tier[tier] += num_bytes
    places = ", ".join(
        f"{format_bytes(num_bytes)} on {tier}" for tier, num_bytes in by_tier.items() if num_bytes
    )
    said = ready.get("predicted") or {}
    parts = [
        f"{ready['num_params']:,} parameters",
        f"{format_bytes(ready['state_bytes'])} of states",
        places,
    ]
    if "forward_s" in said:  # not where nothing was measured
        parts.append(f"predicted {seconds_of(said):.2f} s a step")
    if late := said.get("late"):
        parts[-1] += f", {seconds_of(late):.2f} s where gradients are clipped"
    return "; ".join(parts)


def summary_lines(
    ready: Message, num_steps: int, num_rows: int, num_tokens: float, tbw_bytes: int | None
) -> list[str]:
    """What a run of so many steps is to take: tokens, hours, memory, bytes written.

    num_rows: of a step, of all ranks; num_tokens: of a row, the mean.
    """
    said = ready["predicted"]
    seconds = num_steps * sum(said.get(f"{phase}_s", 0.0) for phase in PHASES)
    lasts = f"about {format_seconds(seconds)}"
    if "not_made" in said:
        lasts = f"no prediction of time: {said['not_made']}"
    tokens = num_rows * num_tokens
    lines = [
        f"{numbered(num_steps, 'step')} of {numbered(num_rows, 'row')} with about "
        f"{tokens:,.0f} tokens, {num_steps * tokens:,.0f} tokens in all: {lasts}"
    ]
    peak_bytes = said["peak_bytes"] or said["resident_bytes"] + said["host_bytes"]
    lines.append(f"memory: about {format_bytes(peak_bytes)} at the peak, a rank")
    if said["device_bytes"]:
        lines[-1] += f", {format_bytes(said['device_bytes'])} on {ready['device']}"
    if ready["paths"]:
        num_bytes = int(num_steps * said["nvme_written_bytes"] * ready["num_ranks"])
        written = WrittenOnPath(", ".join(ready["paths"]), num_bytes)
        lines += endurance_lines([written], num_steps, seconds, tbw_bytes)
        lines[-1] = f"predicted, without checkpoints: {lines[-1]}"
    return lines


def result_lines(run: Figures) -> list[str]:
    """What a run took, on two lines: time beside its prediction, and memory and disk beside the
    kernel's counts."""
    medians = _medians(run)
    said = run.get("predicted") or {}
    times = [f"{run['outcome']}"]
    if run["losses"]:
        shown = " / ".join(map(_seconds, medians.values()))
        num_steps = len(run["losses"])
        times += [
            f"loss {run['losses'][0]:.4f} → {run['losses'][-1]:.4f} in "
            f"{numbered(num_steps, 'step')}"
        ]
        times += [f"forward / backward / step {shown} s", f"{run['tokens_per_s']:.1f} tokens/s"]
        if f"{next(iter(medians))}_s" in said:
            times.append(
                f"predicted {' / '.join(_seconds(said[f'{phase}_s']) for phase in medians)}"
            )
    cap = (
        f" of {_size(run['memory_limit_bytes'])} ({run['limit_kind']})"
        if run["memory_limit_bytes"]
        else ""
    )
    peak_bytes = run["cgroup_peak_bytes"] or run["peak_rss_bytes"]
    memory = [f"memory: peak {_size(peak_bytes)}{cap}"]
    for what in ("read", "written"):
        ours = run.get(f"nvme_{what}_bytes")
        kernel = run.get(f"kernel_{what}_bytes")
        if ours:
            beside = f" ({_difference(ours, kernel)})" if kernel is not None else ""
            memory.append(f"NVMe {what} {_size(ours)}{beside}")
    if _device_peak(run) is not None:
        memory.append(f"{run['device_memory']['device']} peak {_size(_device_peak(run))}")
    return [", ".join(times), ", ".join(memory)]


def predicted_table(run: Figures) -> Table | None:
    """What was predicted before the first step beside what it was; None for a run without a
    prediction or an end."""
    said = run.get("predicted")
    if not said or "not_made" in said or not run["losses"]:
        return None
    shown = table(
        "predicted before the first step, and real", "", ">predicted", ">real", ">predicted / real"
    )
    real = _medians(run)
    times = {phase: (said[f"{phase}_s"], seconds or 0.0) for phase, seconds in real.items()}
    said_s, real_s = map(sum, zip(*times.values(), strict=True))
    times["together"] = said_s, real_s
    for phase, both in times.items():
        shown.add_row(phase, *map(_seconds, both), _ratio(*both))
    for what, predicted, measured in (
        ("NVMe bytes read a step", said["nvme_read_bytes"], run["nvme_read_bytes_a_step"]),
        ("NVMe bytes written a step", said["nvme_written_bytes"], run["nvme_written_bytes_a_step"]),
        ("states on NVMe", said["disk_bytes"], run["nvme_peak_bytes"]),
        ("host memory of the store", said["host_bytes"], run["host_peak_bytes"]),
        ("resident at the peak", said["peak_bytes"], run["peak_rss_bytes"]),
        ("accelerator's memory at the peak", said.get("device_bytes"), _device_peak(run)),
    ):
        if predicted or measured:
            shown.add_row(what, _size(predicted), _size(measured), _ratio(predicted, measured))
    return shown


def _medians(run: Figures) -> dict[str, float | None]:
    """Seconds of each phase of the median step."""
    return {phase: median_after_warm_up(run[f"{phase}_s"]) for phase in PHASES}


def _device_peak(run: Figures) -> int | None:
    card = run.get("device_memory")
    return card["peak_allocated_bytes"] if card is not None else None


def _difference(ours: int | None, kernel: int | None) -> str:
    if not ours or kernel is None:
        return ""
    return f"kernel {(kernel - ours) / ours:+.2%}"


def _ratio(predicted: float | None, real: float | None) -> str:
    return f"{predicted / real:.3f}" if predicted is not None and real else ""


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
