"""Tile timeline: one optimizer step as a picture: when each tile was read, computed and written, and how busy the disk was.

    GB/s      bytes on their way, in and out, over time
    read      a bar per tile, from its first block to its last; bars of tiles that were on their way together lie below
    compute   each other; the colour is the tile's place in the model's order, so that a tile can be followed down
    write     the lanes

Below the whole step a part of it is magnified. Drawn from the spans of one step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiermem.tools.stepped_model import StepRun
from tiermem.tools.timeline import Span, rows_of, within

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LANES = ("read", "compute", "write")
_PREFIX = "gradients of "  # of a tile whose other bytes were read before the step
_MAGNIFIED_TILES = 24
_NUM_BINS = 200
_COLOURS = "viridis"
_READ_COLOUR, _WRITE_COLOUR, _GREY = "#2a788e", "#e07b39", "#666666"


def draw_tiles(
    step: StepRun, tile_names: Sequence[str], figures: Mapping[str, Any], caption: str, file: Path, made_by: str
) -> None:
    """Draws and saves the picture of one step. Raises OSError; needs matplotlib.

    Args:
        step: its spans.
        tile_names: of the model's tiles, in order.
        figures: of the benchmark, for the title.
        caption: machine and date.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spans = [span for span in step.spans if span.lane in _LANES]
    order = {name: number for number, name in enumerate(tile_names)}
    stretches = _stretches(step, spans)
    heights = [height for _ in stretches for height in (1.0, 2.6)]
    figure, axes = pyplot.subplots(
        len(heights),
        1,
        figsize=(13, 1.2 + 4.2 * len(stretches)),
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    for number, stretch in enumerate(stretches):
        rates, lanes = axes[2 * number], axes[2 * number + 1]
        part = within(spans, *stretch)
        _draw_rates(rates, part, stretch, step)
        _draw_lanes(lanes, part, stretch, step, order)
        rates.set_title("a part of it, magnified" if number else "the whole step", fontsize=9, loc="left")
    axes[-1].set_xlabel(f"time since the step began (ms)\n\n{caption}", fontsize=8, color=_GREY)
    figure.suptitle(_title(step, figures), fontsize=12)
    figure.savefig(file, dpi=130, format="png", metadata={"Software": made_by})
    pyplot.close(figure)


def _title(step: StepRun, figures: Mapping[str, Any]) -> str:
    resident = f", {figures['resident_fraction']:.0%} of states resident" if figures["resident_bytes"] else ""
    return (
        f"one optimizer step of {figures['num_params'] / 1e6:.0f} M parameters in {figures['precision']}{resident}: "
        f"{step.seconds:.3f} s\n"
        f"median of {len(figures['step_s'])}: {figures['step_s_median']:.3f} s; roofline {figures['roofline_s']:.3f} s "
        f"({figures['roofline_by']}); fraction reached {figures['roofline_fraction']:.2f}; "
        f"disk idle {step.idle_fraction():.1%}"
    )


def _stretches(step: StepRun, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The whole step, and, when that is dense, a part from its middle with a few tiles."""
    whole = (step.start_ns, step.end_ns)
    computed = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.start_ns)
    if len(computed) < 2 * _MAGNIFIED_TILES:
        return [whole]
    first = len(computed) // 2
    return [whole, (computed[first].start_ns, computed[first + _MAGNIFIED_TILES].end_ns)]


def _draw_rates(ax: Axes, spans: Sequence[Span], stretch: tuple[int, int], step: StepRun) -> None:
    """Read and written GB/s: a transfer's bytes are spread evenly over its time."""
    start, end = stretch
    width = (end - start) / _NUM_BINS
    edges = [(start - step.start_ns + (number + 0.5) * width) / 1e6 for number in range(_NUM_BINS)]
    for lane, colour in (("read", _READ_COLOUR), ("write", _WRITE_COLOUR)):
        rates = [0.0] * _NUM_BINS
        for span in (span for span in step.spans if span.lane == lane and span.end_ns > span.start_ns):
            rate = span.num_bytes / (span.end_ns - span.start_ns)
            first, last = (span.start_ns - start) / width, (span.end_ns - start) / width
            for number in range(max(0, int(first)), min(_NUM_BINS, int(last) + 1)):
                rates[number] += rate * max(0.0, min(last, number + 1) - max(first, number))
        ax.plot(edges, rates, color=colour, linewidth=1.2, label=f"{lane}, {_gigabytes(spans, lane)}")
        ax.fill_between(edges, rates, color=colour, alpha=0.15)
    ax.set_ylabel("GB/s", fontsize=9)
    ax.set_ylim(bottom=0)
    ax.set_xlim((start - step.start_ns) / 1e6, (end - step.start_ns) / 1e6)
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False)
    ax.tick_params(labelbottom=False)
    ax.grid(alpha=0.25)


def _draw_lanes(
    ax: Axes, spans: Sequence[Span], stretch: tuple[int, int], step: StepRun, order: Mapping[str, int]
) -> None:
    """Each lane's bars, rows of tiles that were on their way together below each other."""
    import matplotlib

    colours = matplotlib.colormaps[_COLOURS]
    numbers = [order[name] for span in spans if (name := span.name.removeprefix(_PREFIX)) in order] or [0]
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(min(numbers), max(numbers)), colours)
    top, ticks = 0.0, []
    for lane in _LANES:
        members = sorted((span for span in spans if span.lane == lane), key=lambda span: span.start_ns)
        rows = rows_of(members) or [[]]
        height = {"compute": 2.0}.get(lane, max(2.0, float(len(rows))))
        for number, row in enumerate(rows):
            y, each = top + number * height / len(rows), height / len(rows)
            bars = [((s.start_ns - step.start_ns) / 1e6, (s.end_ns - s.start_ns) / 1e6) for s in row]
            shades = scale.to_rgba(np.array([order.get(s.name.removeprefix(_PREFIX), 0) for s in row], dtype=float))
            ax.broken_barh(bars, (y + 0.06 * each, 0.88 * each), facecolors=shades, edgecolor="white", linewidth=0.2)
        ticks.append((top + height / 2, f"{lane}\n{_busy(members, stretch):.0%} busy"))
        top += height + 0.6
        ax.axhline(top - 0.3, color="#dddddd", linewidth=0.8)
    ax.set_ylim(top - 0.3, -0.3)
    ax.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=9)
    ax.set_xlim((stretch[0] - step.start_ns) / 1e6, (stretch[1] - step.start_ns) / 1e6)
    ax.grid(axis="x", alpha=0.25)
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.01, aspect=18)
    bar.set_label("tile", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def _busy(spans: Sequence[Span], stretch: tuple[int, int]) -> float:
    """The part of a stretch in which at least one of the spans, in order of start, goes on."""
    busy, last = 0, stretch[0]
    for span in spans:
        busy += max(0, span.end_ns - max(span.start_ns, last))
        last = max(last, span.end_ns)
    return busy / max(1, stretch[1] - stretch[0])


def _gigabytes(spans: Sequence[Span], lane: str) -> str:
    """What a lane's transfers carry that touch the stretch."""
    return f"{sum(span.num_bytes for span in spans if span.lane == lane) / 1e9:.2f} GB"
