"""Heat map: one picture of a disk: block size by depth for each mode and engine, GB/s in the cells, the best one framed.

Settings of one mode share a scale of colours. A sustained write is a line instead: GB/s over GB written. The caption says
which machine, file system and mount it was, and when. Drawn from rows alone, so that it can be drawn again from the JSON.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_COLUMNS = 4
_PANEL_INCHES = (3.6, 2.7)
_COLOURS = "viridis"
_CAPTION_WIDTH = 150

Row = dict[str, Any]


class Panel(NamedTuple):
    """The rows of one little map."""

    title: str
    mode: str
    rows: list[Row]


def draw_heatmap(rows: Sequence[Row], caption: str, file: Path, made_by: str) -> None:
    """Draws and saves the picture. Raises OSError; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [list(line) for line in _lines(panels_of(rows))]
    num_columns = max(map(len, lines))
    width, height = _PANEL_INCHES
    folded = _fold(caption, int(_CAPTION_WIDTH * max(2, num_columns) / _MOST_COLUMNS))
    figure, axes = pyplot.subplots(
        len(lines),
        num_columns,
        figsize=(width * max(2, num_columns), height * len(lines) + 0.5 + 0.16 * len(folded.splitlines())),
        squeeze=False,
        layout="constrained",
    )
    for line, row_axes in zip(lines, axes, strict=True):
        for number, ax in enumerate(row_axes):
            if number >= len(line):
                ax.set_axis_off()
            elif line[number].mode == "sustained":
                _draw_series(ax, line[number])
            else:
                _draw_map(ax, line[number], _scale(rows, line[number].mode))
    figure.suptitle("GB/s by block size and blocks in flight", fontsize=11)
    figure.supxlabel(folded, fontsize=7, color="#555555")
    figure.savefig(file, dpi=130, format="png", metadata={"Software": made_by})
    pyplot.close(figure)


def panels_of(rows: Sequence[Row]) -> list[Panel]:
    """Rows by mode, engine, path and number of ranks; a title names what differs between panels."""
    shown = [key for key in ("path", "ranks") if len({row[key] for row in rows}) > 1]
    found: dict[tuple[Any, ...], Panel] = {}
    for row in rows:
        key = (row["mode"], row["engine"], row["path"], row["ranks"])
        words = [row["mode"], row["engine"]]
        if "ranks" in shown:
            words.append("1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks")
        if "path" in shown:
            words.append(str(row["path"]))
        found.setdefault(key, Panel(", ".join(words), row["mode"], [])).rows.append(row)
    return list(found.values())


def _lines(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Panels as they stand: a mode begins a new line, long ones are folded."""
    lines = []
    for _, of_mode in itertools.groupby(panels, key=lambda panel: panel.mode):
        together = list(of_mode)
        lines += [together[i : i + _MOST_COLUMNS] for i in range(0, len(together), _MOST_COLUMNS)]
    return lines


def _scale(rows: Sequence[Row], mode: str) -> tuple[float, float]:
    rates = [row["gbps_median"] for row in rows if row["mode"] == mode and row["gbps_median"] is not None]
    return (min(rates), max(rates)) if rates else (0.0, 1.0)


def _draw_map(ax: Axes, panel: Panel, scale: tuple[float, float]) -> None:
    import numpy as np
    from matplotlib.patches import Rectangle

    blocks = sorted({row["block_bytes"] for row in panel.rows})
    depths = sorted({row["depth"] for row in panel.rows})
    values = np.full((len(blocks), len(depths)), np.nan)
    for row in panel.rows:
        if row["gbps_median"] is not None:
            values[blocks.index(row["block_bytes"]), depths.index(row["depth"])] = row["gbps_median"]
    low, high = scale
    ax.imshow(values, cmap=_COLOURS, vmin=low, vmax=max(high, low * 1.0001 + 1e-9), aspect="auto", origin="lower")
    for (y, x), value in np.ndenumerate(values):
        is_dark = not np.isnan(value) and (value - low) <= 0.6 * (high - low) and high > low
        text = "cannot\nrun" if np.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"
        ax.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if is_dark else "black")
        if value == high:
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#e45756", linewidth=2.5))
    ax.set_xticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
    ax.set_yticks(range(len(blocks)), [block_label(block) for block in blocks], fontsize=8)
    ax.set_xlabel("blocks in flight", fontsize=8)
    ax.set_title(panel.title, fontsize=9)


def _draw_series(ax: Axes, panel: Panel) -> None:
    for row in panel.rows:
        points = row.get("series") or []
        ax.plot([p["written_bytes"] / 1e9 for p in points], [p["gbps"] for p in points], marker=".", linewidth=1)
        if row.get("knee_bytes"):
            ax.axvline(row["knee_bytes"] / 1e9, color="#e45756", linestyle="--", linewidth=1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("GB written", fontsize=8)
    ax.set_ylabel("GB/s", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.set_title(panel.title, fontsize=9)


def block_label(num_bytes: int) -> str:
    """A block size without a fraction where that is exact: "256 KiB", "4 MiB"."""
    return f"{num_bytes >> 20} MiB" if num_bytes % (1 << 20) == 0 else f"{num_bytes / 1024:g} KiB"


def _fold(text: str, width: int) -> str:
    import textwrap

    return "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, width))
