"""Results of `tiermem bench io`: rows, the best of each mode, a table, a heat map, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import statistics
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from tiermem.swap.base.native import latency_edges
from tiermem.swap.disk import durable
from tiermem.tools.bench.io_ranks import RankOutcome, Setting
from tiermem.tools.measure.sustained import find_knee
from tiermem.tools.record.plots import open_pyplot, save_figure
from tiermem.tools.record.reports import table
from tiermem.tools.record.run_record import IoCounts, disagreements
from tiermem.tools.words import csv_mark, numbered

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ---- latencies -----------------------------------------------------------------------------------

_LEAST = 1e-9  # part of a block: the rank of quantile 0 lies in the first bucket that holds one


def latency_quantiles(counts: npt.NDArray[np.uint64], quantiles: Sequence[float]) -> list[float]:
    """The latencies, in microseconds, that these fractions of the blocks did not exceed; NaN where
    none was counted.

    Counts of several queues, or of one since an earlier moment, may be added and subtracted before.
    A bucket is a sixteenth of an octave; within it blocks are taken as evenly spread.
    """
    total = float(counts.sum())
    if total == 0:
        return [math.nan] * len(quantiles)
    edges = latency_edges()
    at_most = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
    found = []
    for quantile in quantiles:
        rank = max(quantile * total, _LEAST)
        bucket = int(np.searchsorted(at_most, rank)) - 1
        part = (rank - at_most[bucket]) / (at_most[bucket + 1] - at_most[bucket])
        found.append(float(edges[bucket] + part * (edges[bucket + 1] - edges[bucket])))
    return found


# ---- rows: the results of a sweep, as JSON and CSV have them -------------------------------------

Row = dict[str, Any]


@dataclasses.dataclass
class MeasuredRow:
    """What came of one setting: an outcome per rank and loop, or why there is none."""

    setting: Setting
    is_direct: bool
    outcomes: list[list[RankOutcome]] = dataclasses.field(default_factory=list)
    error: str | None = None

    def gbps(self) -> list[float]:
        """The total rate of each loop, all ranks and both directions together, from the first start
        to the last end."""
        return [
            sum(IoCounts.total(o.moved for o in ranks))
            / (max(o.end_s for o in ranks) - min(o.start_s for o in ranks))
            / 1e9
            for ranks in self.outcomes
        ]


def row_of(measured: MeasuredRow) -> Row:
    """The row as JSON takes it."""
    row = dict.fromkeys(CSV_COLUMNS) | measured.setting._asdict()
    rates = measured.gbps()
    del row["path_indices"]
    row |= {"is_direct": measured.is_direct, "error": measured.error}
    if not rates:
        return row
    outcomes = [outcome for loop in measured.outcomes for outcome in loop]
    moved = sum(IoCounts.total(o.moved for o in outcomes))
    latencies = np.array([o.latencies for o in outcomes], dtype=np.uint64).sum(axis=0)
    p50, p99, p999 = (
        None if math.isnan(value) else value
        for value in latency_quantiles(latencies, (0.5, 0.99, 0.999))
    )
    row |= {
        **_spread_of(rates),
        "p50_us": p50,
        "p99_us": p99,
        "p999_us": p999,
        "iops": statistics.median(rates) * 1e9 / measured.setting.block_bytes,
        "cpu_s_per_gb": sum(o.user_s + o.system_s for o in outcomes) / moved * 1e9,
        "idle_fraction": statistics.fmean(o.idle_fraction for o in outcomes),
        "first_gbps": rates[0] if measured.setting.mode in ("read", "random") else None,
        "user_us_per_block": sum(o.user_s for o in outcomes)
        / max(1, sum(o.num_blocks for o in outcomes))
        * 1e6,
        "engine_used": outcomes[0].engine,
        "loops_gbps": rates,
    }
    return row | _shares(outcomes) | _sustained(outcomes[0], row)


def add_witness(
    row: Row,
    fio: Sequence[float],
    yardstick: Sequence[float],
    peer: Sequence[float],
    bare_user_us: float | None,
) -> None:
    """Enters what witnesses reached, in GB/s, and what part of it is ours: yardstick and peer loop
    by loop.

    A part is the median of the loops' own: a disk that moves from one loop to the next moves both
    of a pair.
    """
    row |= {
        "fio_gbps": _median(fio),
        "yardstick_gbps": _median(yardstick),
        "peer_gbps": _median(peer),
    }
    if row["gbps_median"] is None:
        return
    row["fraction"] = _paired(row["loops_gbps"], yardstick)
    row["peer_fraction"] = _paired(row["loops_gbps"], peer)
    if row["mode"] == "random" and bare_user_us is not None:
        row["user_us_beyond_bare"] = row["user_us_per_block"] - bare_user_us


def _median(rates: Sequence[float]) -> float | None:
    return statistics.median(rates) if rates else None


def _paired(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The median ratio of loops that both have measured."""
    return _median([mine / other for mine, other in zip(ours, theirs, strict=False)])


def best_of(rows: Sequence[Row]) -> dict[str, Row]:
    """The row with the highest median of each mode, whose rows follow each other."""
    measured = (row for row in rows if row["gbps_median"] is not None)
    return {
        mode: max(of_mode, key=itemgetter("gbps_median"))
        for mode, of_mode in itertools.groupby(measured, key=itemgetter("mode"))
    }


def byte_counts(measured: Sequence[MeasuredRow]) -> tuple[IoCounts, IoCounts]:
    """Bytes moved past the page cache, as the passes count them and as the kernel does."""
    direct = [
        outcome
        for each in measured
        if each.is_direct
        for outcomes in each.outcomes
        for outcome in outcomes
    ]
    return IoCounts.total(o.moved for o in direct), IoCounts.total(o.kernel for o in direct)


def _spread_of(rates: Sequence[float]) -> dict[str, float]:
    return {"gbps_median": statistics.median(rates), "gbps_min": min(rates), "gbps_max": max(rates)}


def _shares(outcomes: Sequence[RankOutcome]) -> Row:
    """What tensors through the store reach of the sequential pass beside them: medians of each
    kind."""
    found: Row = {}
    for kind in zip(*(outcome.shares for outcome in outcomes), strict=True):
        (what, *_), rates, besides = zip(*kind, strict=True)
        rate = statistics.median(rates)
        beside = statistics.median(besides)
        found[f"{what}_gbps"] = rate
        if beside:
            found[f"{what}_share"] = rate / beside
    return found


def _sustained(outcome: RankOutcome, row: Row) -> Row:
    """The series of a sustained write, its spread as the row's, and where it drops."""
    if len(outcome.series) < 2:
        return {}
    points = [
        {"written_bytes": after[0], "gbps": (after[0] - before[0]) / (after[1] - before[1]) / 1e9}
        for before, after in itertools.pairwise(outcome.series)
    ]
    rates = [point["gbps"] for point in points]
    knee = find_knee(rates)
    return {
        **_spread_of(rates),
        "gbps_overall": row["gbps_median"],
        "series": points,
        "knee_bytes": points[knee.num_before - 1]["written_bytes"] if knee else None,
        "gbps_before_knee": knee.before if knee else None,
        "gbps_after_knee": knee.after if knee else None,
    }


# ---- the picture ---------------------------------------------------------------------------------
#
# Settings of one mode share a scale of colours. A sustained write is a line instead: GB/s over GB
# written. The caption says which machine, file system and mount it was, and when. Drawn from rows
# alone, so that it can be drawn again from the JSON.

_MOST_COLUMNS = 4
_COLOURS = "viridis"


def draw_heatmap(rows: Sequence[Row], caption: str, file: Path, made_by: str) -> None:
    """Draws and saves the picture. Raises OSError; needs matplotlib."""
    panels = panels_of(rows)
    lines = _lines(panels)
    num_columns = max(map(len, lines))
    # inches of a panel
    width = 3.6
    height = 2.7
    columns = int(150 * max(2, num_columns) / _MOST_COLUMNS)  # characters of the caption
    folded = [part for line in caption.splitlines() for part in textwrap.wrap(line, columns)]
    size = width * max(2, num_columns), height * len(lines) + 0.5 + 0.16 * len(folded)
    mosaic = [line + ["."] * (num_columns - len(line)) for line in lines]
    figure, axes = open_pyplot().subplot_mosaic(mosaic, figsize=size, layout="constrained")
    for title, ax in axes.items():
        ax.set_title(title, fontsize=9)
        mode = panels[title][0]["mode"]
        if mode == "sustained":
            _draw_series(ax, panels[title])
        else:
            _draw_map(ax, panels[title], _scale(rows, mode))
    figure.suptitle("GB/s by block size and blocks in flight", fontsize=11)
    figure.supxlabel("\n".join(folded), fontsize=7, color="#555555")
    save_figure(figure, file, made_by)


def panels_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by title: mode, engine, and the number of ranks and the path where these differ between
    panels."""
    differ = [key for key in ("ranks", "path") if len({row[key] for row in rows}) > 1]
    found: dict[str, list[Row]] = {}
    for row in rows:
        words = {
            "ranks": numbered(row["ranks"], "rank"),
            "path": str(row["path"]),
        }
        found.setdefault(
            ", ".join([row["mode"], row["engine"], *map(words.__getitem__, differ)]), []
        ).append(row)
    return found


def _lines(panels: dict[str, list[Row]]) -> list[list[str]]:
    """Titles as panels stand: a mode begins a new line, long lines are folded."""
    by_mode = itertools.groupby(panels, key=lambda title: panels[title][0]["mode"])
    modes = [list(titles) for _, titles in by_mode]
    return [
        line[i : i + _MOST_COLUMNS] for line in modes for i in range(0, len(line), _MOST_COLUMNS)
    ]


def _scale(rows: Sequence[Row], mode: str) -> tuple[float, float]:
    rates = [
        row["gbps_median"] for row in rows if row["mode"] == mode and row["gbps_median"] is not None
    ]
    return (min(rates), max(rates)) if rates else (0.0, 1.0)


def _draw_map(ax: Axes, rows: Sequence[Row], scale: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    blocks = sorted({row["block_bytes"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    values = np.full((len(blocks), len(depths)), np.nan)
    for row in rows:
        if row["gbps_median"] is not None:
            values[blocks.index(row["block_bytes"]), depths.index(row["depth"])] = row[
                "gbps_median"
            ]
    low, high = scale
    ax.imshow(
        values,
        cmap=_COLOURS,
        vmin=low,
        vmax=max(high, low * 1.0001 + 1e-9),
        aspect="auto",
        origin="lower",
    )
    for (y, x), value in np.ndenumerate(values):
        is_dark = not np.isnan(value) and (value - low) <= 0.6 * (high - low) and high > low
        text = (
            "cannot\nrun" if np.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"
        )
        ax.text(
            x, y, text, ha="center", va="center", fontsize=8, color="white" if is_dark else "black"
        )
        if value == high:
            ax.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#e45756", linewidth=2.5)
            )
    ax.set_xticks(range(len(depths)), [str(depth) for depth in depths], fontsize=8)
    ax.set_yticks(range(len(blocks)), [block_label(block) for block in blocks], fontsize=8)
    ax.set_xlabel("blocks in flight", fontsize=8)


def _draw_series(ax: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        points = row.get("series") or []
        ax.plot(
            [p["written_bytes"] / 1e9 for p in points],
            [p["gbps"] for p in points],
            marker=".",
            linewidth=1,
        )
        if row.get("knee_bytes"):
            ax.axvline(row["knee_bytes"] / 1e9, color="#e45756", linestyle="--", linewidth=1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("GB written", fontsize=8)
    ax.set_ylabel("GB/s", fontsize=8)
    ax.tick_params(labelsize=8)


def block_label(num_bytes: int) -> str:
    """A block size without a fraction where that is exact: "256 KiB", "4 MiB"."""
    return f"{num_bytes >> 20} MiB" if num_bytes % (1 << 20) == 0 else f"{num_bytes / 1024:g} KiB"


# ---- table, CSV and notes ------------------------------------------------------------------------
#
# The notes say what a reader must know before believing a figure: caches that warm, engines that
# cannot run, files that are not direct, bytes that the kernel counts otherwise, yardsticks that
# were slower than what they judge.

CSV_COLUMNS = (
    "mode",
    "engine",
    "block_bytes",
    "depth",
    "ranks",
    "path",
    "gbps_median",
    "gbps_min",
    "gbps_max",
    "p50_us",
    "p99_us",
    "p999_us",
    "iops",
    "cpu_s_per_gb",
    "idle_fraction",
    "first_gbps",
    "fio_gbps",
    "yardstick_gbps",
    "fraction",
    "peer_gbps",
    "peer_fraction",
    "user_us_per_block",
    "engine_used",
    "is_direct",
    "error",
)
_MOST_FRACTION = 1.02
_TOLERANCE = 0.01
_UNSTEADY = 1.5
_SLACK = IoCounts(1 << 20, 1 << 20)


def notes_of(rows: Sequence[Row], ours: IoCounts, kernel: IoCounts) -> list[str]:
    """One sentence for each thing that the rows themselves do not say."""
    notes = []
    for engine, reason in dict.fromkeys(
        (row["engine"], row["error"]) for row in rows if row["error"]
    ):
        notes.append(f"{engine} cannot run here: {reason}")
    for row in rows:
        if (row["fraction"] or 0) > _MOST_FRACTION:
            notes.append(
                f"an error of the yardstick: {_name(row)} is {row['fraction']:.3f} of its rate; "
                f"above {_MOST_FRACTION} "
                "it was not the fastest loop, or the disk moved between the two"
            )
    for row in rows:  # a cache answered all passes but the first
        rates = row.get("loops_gbps", [])
        later = statistics.median(rates[1:]) if len(rates) > 2 else 0.0
        if row["first_gbps"] is not None and row["first_gbps"] < 0.8 * later:
            notes.append(
                f"{_name(row)}: the first pass reached {row['first_gbps']:.2f} GB/s, later ones "
                f"{later:.2f}: the host's or the device's cache warms"
            )
    for row in best_of(rows).values():
        if "series" not in row and row["gbps_max"] > _UNSTEADY * row["gbps_min"]:
            notes.append(
                f"{_name(row)}: passes reached {row['gbps_min']:.2f} to {row['gbps_max']:.2f} GB/s: "
                "others use the disk, or it is slow at times; measure again, with more --loops"
            )
    notes += disagreements(ours, kernel, "the queues", _TOLERANCE, _SLACK)
    for path in dict.fromkeys(row["path"] for row in rows if not row["is_direct"]):
        notes.append(
            f"{path}: buffered, O_DIRECT is refused: the page cache is dropped before each pass "
            "and still helps"
        )
    for row in rows:
        if row.get("knee_bytes"):
            notes.append(
                f"sustained write on {row['path']}: {row['gbps_before_knee']:.2f} GB/s up to "
                f"{row['knee_bytes'] / 1e9:.1f} GB, then {row['gbps_after_knee']:.2f} GB/s"
            )
    return notes


def print_rows(
    rows: Sequence[Row], best: dict[str, Row], notes: Sequence[str], caption: str, console: Console
) -> None:
    """The table, the best of each mode in bold and with a star, and the notes."""
    shown = [column for column in _COLUMNS if _is_shown(column, rows)]
    printed = table(
        "tiermem bench io",
        *(("" if title in ("mode", "engine", "path") else ">") + title for title, _, _ in shown),
    )
    for column in printed.columns:
        column.no_wrap = column.header != "path"
    for _, of_mode in itertools.groupby(rows, key=itemgetter("mode")):
        for row in of_mode:
            is_best = best.get(row["mode"]) is row
            style = "bold green" if is_best else "dim" if row["error"] else ""
            cells = [Text(cell(row)) for _, cell, _ in shown]
            cells[0].append(" *" if is_best else "")
            printed.add_row(*cells, style=style)
        printed.add_section()
    console.print(printed)
    console.print(caption, style="dim")
    for row in rows:
        shares = [
            f"{what} {row[f'{what}_share']:.0%}"
            for what in ("put", "fetch", "change")
            if f"{what}_share" in row
        ]
        if shares:
            console.print(f"{_name(row)}: of the sequential rate {', '.join(shares)}")
    for note in notes:
        console.print(f"note: {note}", style="yellow")


def save_csv(file: Path, made_by: str, rows: Sequence[Row]) -> None:
    """Writes our mark, the header and the rows. Raises OSError."""
    with durable.named(file), file.open("w", encoding="utf-8", newline="") as out:
        out.write(csv_mark(made_by) + "\n")
        writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _is_shown(column: tuple[str, Any, str], rows: Sequence[Row]) -> bool:
    _, cell, when = column
    if when == "differs":
        return len({cell(row) for row in rows}) > 1
    return when == "always" or any(cell(row) for row in rows)


def _name(row: Row) -> str:
    words = f"{row['mode']} {row['engine']} {block_label(row['block_bytes'])} x {row['depth']}"
    return f"{words}, {numbered(row['ranks'], 'rank')}, {row['path']}"


def _figure(key: str, digits: int, scale: float = 1.0) -> Any:
    def cell(row: Row) -> str:
        value = row.get(key)
        return "" if value is None else f"{value * scale:.{digits}f}"

    return cell


def _engine(row: Row) -> str:
    used = row["engine_used"]
    return row["engine"] if used in (None, row["engine"]) else f"{row['engine']} ({used})"


def _rate(row: Row) -> str:
    if row["error"]:
        return "cannot run"
    return f"{row['gbps_median']:.2f}" if row["gbps_median"] >= 0.1 else f"{row['gbps_median']:.4f}"


def _spread(row: Row) -> str:
    return "" if row["error"] else f"{row['gbps_min']:.2f}-{row['gbps_max']:.2f}"


_COLUMNS: tuple[tuple[str, Any, str], ...] = (  # title, what stands in it, when it is shown
    ("mode", lambda row: row["mode"] + ("" if row["is_direct"] else ", buffered"), "always"),
    ("engine", _engine, "always"),
    ("block", lambda row: block_label(row["block_bytes"]), "always"),
    ("depth", lambda row: str(row["depth"]), "always"),
    ("ranks", lambda row: str(row["ranks"]), "differs"),
    ("path", lambda row: str(row["path"]), "differs"),
    ("GB/s", _rate, "always"),
    ("min-max", _spread, "always"),
    ("p50 us", _figure("p50_us", 0), "always"),
    ("p99 us", _figure("p99_us", 0), "always"),
    ("p99.9", _figure("p999_us", 0), "always"),
    ("IOPS", _figure("iops", 0), "always"),
    ("CPU s/GB", _figure("cpu_s_per_gb", 3), "always"),
    ("idle %", _figure("idle_fraction", 1, 100), "always"),
    ("over bare", _figure("user_us_beyond_bare", 1), "filled"),
    ("fio", _figure("fio_gbps", 2), "filled"),
    ("bare", _figure("yardstick_gbps", 2), "filled"),
    ("fraction", _figure("fraction", 3), "filled"),
    ("aio_handle", _figure("peer_gbps", 2), "filled"),
    ("times it", _figure("peer_fraction", 3), "filled"),
)
