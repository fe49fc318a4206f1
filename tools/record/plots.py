"""Pictures of a run: `python -m tiermem.tools.record.plots runs/<id>` draws loss.png, memory.png
and timeline.png.

Run as a process of its own after the run, outside the cap: matplotlib would cost the trainer
memory. Everything comes from run.json and events.jsonl, so a picture can be drawn again at any
time.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermem.swap.disk import durable
from tiermem.tools.job.launcher import Message
from tiermem.tools.record.run_record import (
    PHASES,
    TAIL,
    Figures,
    Span,
    covered,
    lanes_of,
    read_spans,
    rows_of,
    together_ns,
    with_tails,
    within,
    without_waits,
)
from tiermem.tools.words import numbered, read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 1 << 20
GIB = 1 << 30
_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#b279a2",
    "step": "#f58518",
    "unit": "#4c78a8",
    "compute": "#54a24b",
    "check": "#d67195",
    "read": "#72b7b2",
    "write": "#eeca3b",
    "gather": "#9d755d",
    "reduce": "#bab0ac",
    "wait": "#e45756",
}
_GREY = "#888888"
_EDGED = ("read", "write", "wait")
"""Lanes whose bars have white edges."""
_MAX_ROWS = 6
_BAND_GAP = 0.5
_LABELS = {
    "unit": "maths",
    "gather": "link",
    "read": "disk reads",
    "write": "disk writes",
    "compute": "kernels",
}
"""What the picture calls a lane, where it is not the lane's name."""
_MAX_READABLE_SPANS = 250
_LEAST_NAMED = 0.04  # of the width: a phase that has room for its name


def main(arguments: list[str] | None = None) -> int:
    """Draws the pictures of one run folder and names them."""
    parser = argparse.ArgumentParser(prog="tiermem.tools.record.plots", description=__doc__)
    parser.add_argument("folder", type=Path, help="runs/<id>")
    for file in draw_run(parser.parse_args(arguments).folder):
        print(file)
    return 0


def draw_run(folder: Path) -> list[Path]:
    """Draws what the run's files allow; returns the PNGs. Raises OSError when run.json is
    missing."""
    run = read_json(folder / "run.json")
    spans = read_spans(folder / "events.jsonl")
    drawn = []
    for name, figure in (
        ("loss", draw_loss(run)),
        ("memory", draw_memory(run)),
        ("timeline", draw_timeline(run, spans)),
    ):
        if figure is not None:
            save_figure(figure, folder / f"{name}.png", "tiermem")
            drawn.append(folder / f"{name}.png")
    return drawn


def draw_loss(run: Figures) -> Figure | None:
    """Loss over steps."""
    from matplotlib.ticker import MaxNLocator

    steps = run["pictures"]["steps"]
    if not steps:
        return None
    figure, (ax,) = new_figure(7.5, 4.2)
    numbers = [s["step"] for s in steps]
    losses = [s["loss"] for s in steps]
    ax.plot(
        numbers,
        losses,
        color=_COLOURS["forward"],
        marker="o" if len(steps) <= 50 else "",
        markersize=4,
    )
    ax.set(xlabel="step", ylabel="loss (nats per token)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(alpha=0.25)
    ax.annotate(
        f"{losses[-1]:.4f}",
        (numbers[-1], losses[-1]),
        textcoords="offset points",
        xytext=(0, 8),
        ha="center",
    )
    ax.margins(x=0.06, y=0.1)
    figure.suptitle(f"{run['name']}: loss over {numbered(len(steps), 'step')}", fontsize=12)
    return figure


def draw_memory(run: Figures) -> Figure | None:
    """Memory over time: resident, charged to the cgroup and carved by the store, under the cap;
    below it the accelerator's, if there is one, and NVMe in use."""
    samples = run["pictures"]["samples"]
    if not samples:
        return None
    origin = samples[0][0]
    told = sorted(
        [*run["pictures"]["phases"], *run["pictures"]["steps"]], key=lambda p: int(p["time_ns"])
    )
    on_device = [p for p in told if "device_memory" in p]
    figure, axes = new_figure(10, 8.0, (3, 2, 1)) if on_device else new_figure(10, 6.2, (3, 1))
    top, *middle, bottom = axes
    for ax in middle:
        _draw_device_memory(ax, on_device, origin)
    times = [(s[0] - origin) / 1e9 for s in samples]
    charged = [(t, s[2] / MIB) for t, s in zip(times, samples, strict=True) if s[2] is not None]
    if charged:
        top.plot(
            *zip(*charged, strict=True),
            color=_GREY,
            linewidth=1.2,
            label="charged to the cgroup (with page cache)",
        )
    top.plot(
        times,
        [s[1] / MIB for s in samples],
        color=_COLOURS["forward"],
        linewidth=1.6,
        label="resident (VmRSS)",
    )
    marks = [p for p in told if "host_bytes" in p]
    at = [(p["time_ns"] - origin) / 1e9 for p in marks]
    if marks:
        host = [p["host_bytes"] / MIB for p in marks]
        top.fill_between(
            at, host, step="post", color=_COLOURS["compute"], alpha=0.35, label="HOST tier (carved)"
        )
        nvme = [p["nvme_bytes"] / GIB for p in marks]
        bottom.fill_between(at, nvme, step="post", color=_COLOURS["write"], alpha=0.6)
    cap = run.get("memory_limit_bytes")
    if cap:
        top.axhline(cap / MIB, color=_COLOURS["wait"], linestyle="--", linewidth=1.4)
        top.text(
            times[-1],
            cap / MIB,
            f"cap {cap / MIB:.0f} MiB ({run['limit_kind']})",
            color=_COLOURS["wait"],
            ha="right",
            va="bottom",
            fontsize=9,
        )
    highest = max(cap or 0, *(max(s[1], s[2] or 0) for s in samples))
    top.set(ylim=(0, highest / MIB * 1.32), ylabel="memory (MiB)")
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9, frameon=False)
    bottom.set(ylabel="NVMe tier\n(GiB in use)", ylim=(0, None), xlabel="time (s)")
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.set_xlim(0, times[-1] or 1)
    _name_stretches(top, run, origin)
    peak = run.get("peak_rss_bytes")
    title = f"{run['name']}: memory per tier, peak resident {(peak or 0) / MIB:.0f} MiB"
    if on_device:
        card = on_device[-1]["device_memory"]
        title += f", {card['device']} {card['peak_allocated_bytes'] / MIB:.0f} MiB"
    figure.suptitle(title, fontsize=12)
    return figure


def _draw_device_memory(ax: Axes, marks: Sequence[Message], origin: int) -> None:
    """The accelerator's memory as each phase began: tensors, what torch has reserved, and the peak
    so far."""
    at = [(mark["time_ns"] - origin) / 1e9 for mark in marks]
    told = [mark["device_memory"] for mark in marks]
    held = {
        key: [each[f"{key}_bytes"] / MIB for each in told]
        for key in ("allocated", "reserved", "peak_allocated")
    }
    ax.fill_between(
        at,
        held["allocated"],
        step="post",
        color=_COLOURS["forward"],
        alpha=0.35,
        label="in tensors",
    )
    ax.step(
        at, held["reserved"], where="post", color=_GREY, linewidth=1.2, label="reserved by torch"
    )
    ax.step(
        at,
        held["peak_allocated"],
        where="post",
        color=_COLOURS["wait"],
        linestyle=":",
        linewidth=1.4,
        label="most in tensors so far",
    )
    ax.set_ylim(0, max(*held["reserved"], *held["peak_allocated"]) * 1.3 or 1)
    ax.set_ylabel(f"{told[0]['device']} (MiB\nof {told[0]['total_bytes'] / MIB:,.0f})")
    ax.legend(loc="upper left", ncols=3, fontsize=9, frameon=False)


def draw_timeline(run: Figures, spans: Sequence[Span]) -> Figure | None:
    """One step, the one of median length after the warm-up: what ran, moved and waited when; a
    dense one magnified too."""
    step = _typical_step(run["pictures"]["steps"], spans)
    if step is None:
        return None
    start = step["start_ns"]
    end = step["end_ns"]
    spans = without_waits(within(with_tails(spans), start, end))
    stretches = [(start, end)]
    tiles = [span for span in spans if span.lane not in PHASES]
    if len(tiles) > _MAX_READABLE_SPANS:
        middle = tiles[len(tiles) * 3 // 4].start_ns
        stretches.append(
            (middle, min(end, middle + (end - start) * _MAX_READABLE_SPANS // len(tiles) // 2))
        )
    parts = [_bands_of(within(spans, *stretch), *stretch) for stretch in stretches]
    # the phases' own is 2
    heights = [sum(height for _, _, height in bands) - 1.0 for bands in parts]
    figure, axes = new_figure(
        13, 1.4 + 0.36 * sum(heights) + 0.8 * len(parts), heights, is_shared=False
    )
    for ax, bands, stretch in zip(axes, parts, stretches, strict=True):
        draw_bands(ax, bands, stretch, start, lambda span: _COLOURS.get(span.lane, _GREY))
        _name_phases(ax, bands[0], start)
    axes[0].set_title("the step", fontsize=9, loc="left")
    if len(axes) > 1:
        axes[1].set_title("a part of it, magnified", fontsize=9, loc="left")
    axes[-1].set_xlabel("time since the step began (ms)")
    disk = run.get("disk")
    rates = ""
    if disk:
        rates = (
            f"; disk measured {disk['read_bytes_s'] / 1e9:.1f} read, "
            f"{disk['write_bytes_s'] / 1e9:.1f} write GB/s"
        )
    together = (
        "; two or more of maths, link, disk and kernels at once: "
        f"{together_ns(spans) / (end - start):.0%}"
    )
    figure.suptitle(
        f"{run['name']}: step {step['step']}, {(end - start) / 1e9:.2f} s{rates}{together}",
        fontsize=12,
    )
    return figure


Band = tuple[str, list[list[Span]], float]
"""Its label, its rows of spans, and its height."""


def _bands_of(spans: Sequence[Span], start_ns: int, end_ns: int) -> list[Band]:
    """The lanes of a stretch of time, from top to bottom: the phases in one band, then a band for
    each other lane."""
    lanes = lanes_of(spans)
    phases = rows_of([span for span in spans if span.lane in PHASES]) or [[]]
    bands = [("phase", phases, 2.0 * len(phases))]
    for lane, members in lanes.items():
        if lane not in PHASES:
            rows = rows_of(members)[:_MAX_ROWS]
            bands.append(
                (_lane_label(lane, members, (end_ns - start_ns) / 1e9), rows, max(2.0, len(rows)))
            )
    return bands


def draw_bands(
    ax: Axes,
    bands: Sequence[Band],
    stretch: tuple[int, int],
    origin: int,
    colour_of: Callable[[Span], Any],
) -> None:
    """Bands below each other over a stretch of time, a bar for each span; times are shown since
    `origin`, in ms."""
    heights = [height + _BAND_GAP for _, _, height in bands]
    *tops, end = itertools.accumulate(heights, initial=0.0)
    for top, (_, rows, height) in zip(tops, bands, strict=True):
        ax.axhline(top + height + _BAND_GAP / 2, color="#dddddd", linewidth=0.8)
        row_height = height / len(rows)
        for number, row in enumerate(rows):
            bars = [((s.start_ns - origin) / 1e6, (s.end_ns - s.start_ns) / 1e6) for s in row]
            colours = [colour_of(span) for span in row]
            # thin bars must not drown in their edges
            edges = ["white" if s.lane in _EDGED else c for s, c in zip(row, colours, strict=True)]
            place = (top + (number + 0.04) * row_height, 0.92 * row_height)
            ax.broken_barh(bars, place, facecolors=colours, edgecolors=edges, linewidth=0.3)
    ax.set_ylim(end - _BAND_GAP / 2, -_BAND_GAP / 2)
    middles = [top + height / 2 for top, (_, _, height) in zip(tops, bands, strict=True)]
    ax.set_yticks(middles, [label for label, _, _ in bands], fontsize=9)
    ax.set_xlim((stretch[0] - origin) / 1e6, (stretch[1] - origin) / 1e6)
    ax.grid(axis="x", alpha=0.25)


def _name_phases(ax: Axes, band: Band, origin: int) -> None:
    """The names of phases and their times, in the uppermost band, where there is room."""
    _, rows, height = band
    left, right = ax.get_xlim()
    for number, row in enumerate(rows):
        for span in row:
            duration_ms = (span.end_ns - span.start_ns) / 1e6
            if duration_ms >= _LEAST_NAMED * (right - left):
                name = TAIL if span.name == TAIL else span.lane
                ax.text(
                    (span.start_ns - origin) / 1e6 + duration_ms / 2,
                    (number + 0.5) * height / len(rows),
                    f"{name}\n{duration_ms:.0f} ms",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color="white",
                )


def _lane_label(lane: str, spans: Sequence[Span], seconds: float) -> str:
    """A lane's name, how long it was busy, and what it moved."""
    busy = covered(spans)
    label = f"{_LABELS.get(lane, lane)}\n{busy / 1e9 / seconds:.0%} busy"
    moved = sum(span.num_bytes for span in spans)
    if moved and lane in ("read", "write"):
        label += f"\n{moved / 1e9:.2f} GB at {moved / max(busy, 1):.1f} GB/s"
    return label


def _typical_step(steps: list[Message], spans: Sequence[Span]) -> Message | None:
    if not steps or not spans:
        return None
    first = spans[0].start_ns
    covered = [s for s in steps if s["start_ns"] >= first] or steps[-1:]
    later = covered[1:] or covered
    middle = statistics.median_low([s["end_ns"] - s["start_ns"] for s in later])
    return next(s for s in later if s["end_ns"] - s["start_ns"] == middle)


def _name_stretches(ax: Axes, run: Figures, origin: int) -> None:
    """Thin lines where a new stretch begins: imports, build, initialize, each step when there are
    few."""
    steps = run["pictures"]["steps"]
    marks = [
        (p["time_ns"], p["name"]) for p in run["pictures"]["phases"] if " of step " not in p["name"]
    ]
    marks += [(steps[0]["start_ns"], "step 1")] if steps else []
    marks += [(step["start_ns"], "") for step in steps[1:]] if len(steps) <= 30 else []
    marks.sort()
    width = ax.get_xlim()[1]
    for (time_ns, name), (following_ns, _) in itertools.pairwise([*marks, (1 << 63, "")]):
        x = (time_ns - origin) / 1e9
        ax.axvline(x, color=_GREY, linewidth=0.8 if name else 0.5, alpha=0.7 if name else 0.4)
        # no room for two names beside each other
        if (following_ns - time_ns) / 1e9 > 0.018 * width:
            ax.text(
                x,
                ax.get_ylim()[1] * 0.985,
                f" {name}",
                rotation=90,
                va="top",
                fontsize=7.5,
                color="#444444",
            )


def open_pyplot() -> Any:
    """matplotlib's pyplot, which draws without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def new_figure(
    width: float, height: float, heights: Sequence[float] = (1,), is_shared: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure of axes below each other, drawn without a display; they share their x where
    `is_shared`."""
    figure, axes = open_pyplot().subplots(
        len(heights),
        1,
        figsize=(width, height),
        squeeze=False,
        sharex=is_shared and len(heights) > 1,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    return figure, [ax for row in axes for ax in row]


def save_figure(figure: Figure, file: Path, made_by: str) -> None:
    """Writes a PNG with a command's mark, and lets the figure go. Raises OSError."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format="png", metadata={"Software": made_by})
    durable.write_file(file, picture.getvalue())
    open_pyplot().close(figure)


if __name__ == "__main__":
    sys.exit(main())
