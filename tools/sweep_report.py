"""What a benchmark of a disk tells: a table for a person, JSON and CSV for a program.

The notes say what a reader must know before believing a figure: caches that warm, engines that cannot run, files that are
not direct, bytes that the kernel counts otherwise, yardsticks that were slower than what they judge.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiermem.swap import durable
from tiermem.tools.byte_size import format_bytes
from tiermem.tools.counts import IoCounts
from tiermem.tools.heatmap import block_label
from tiermem.tools.outputs import csv_mark

CSV_COLUMNS = (
    *("mode", "engine", "block_bytes", "depth", "ranks", "path", "gbps_median", "gbps_min", "gbps_max"),
    *("p50_us", "p99_us", "cpu_s_per_gb", "idle_fraction", "first_gbps", "fio_gbps", "yardstick_gbps", "fraction"),
    *("peer_gbps", "peer_fraction", "user_us_per_block", "engine_used", "is_direct", "error"),
)
_MOST_FRACTION = 1.02
_COLD_FRACTION = 0.8
_TOLERANCE, _SLACK_BYTES = 0.01, 1 << 20

Row = dict[str, Any]


def notes_of(rows: Sequence[Row], ours: IoCounts, kernel: IoCounts) -> list[str]:
    """One sentence for each thing that the rows themselves do not say."""
    notes = []
    for engine, reason in dict.fromkeys((row["engine"], row["error"]) for row in rows if row["error"]):
        notes.append(f"{engine} cannot run here: {reason}")
    for row in rows:
        if (row["fraction"] or 0) > _MOST_FRACTION:
            notes.append(
                f"an error of the yardstick: {_name(row)} is {row['fraction']:.3f} of its rate; above {_MOST_FRACTION} "
                "it was not the fastest loop, or the disk moved between the two"
            )
    notes += _cold_notes(rows) + _count_notes(ours, kernel)
    for path in dict.fromkeys(row["path"] for row in rows if not row["is_direct"]):
        notes.append(
            f"{path}: buffered, O_DIRECT is refused: the page cache is dropped before each pass and still helps"
        )
    for row in rows:
        if row.get("knee_bytes"):
            notes.append(
                f"sustained write on {row['path']}: {row['gbps_before_knee']:.2f} GB/s up to "
                f"{row['knee_bytes'] / 1e9:.1f} GB, then {row['gbps_after_knee']:.2f} GB/s"
            )
    return notes


def print_rows(rows: Sequence[Row], best: dict[str, Row], notes: Sequence[str], caption: str, console: Console) -> None:
    """The table, the best of each mode in bold, and the notes."""
    shown = [column for column in _COLUMNS if _is_shown(column, rows)]
    table = Table(title="tiermem bench io", title_justify="left", box=None, pad_edge=False)
    for title, _, _ in shown:
        is_word = title in ("mode", "engine", "path")
        table.add_column(title, justify="left" if is_word else "right", overflow="fold", no_wrap=title != "path")
    last = None
    for row in rows:
        if last not in (None, row["mode"]):
            table.add_section()
        last = row["mode"]
        style = "bold green" if best.get(row["mode"]) is row else "dim" if row["error"] else ""
        table.add_row(*(Text(cell(row)) for _, cell, _ in shown), style=style)
    console.print(table)
    console.print(caption, style="dim")
    for row in rows:
        shares = [f"{what} {row[f'{what}_share']:.0%}" for what in ("put", "fetch", "change") if f"{what}_share" in row]
        if shares:
            console.print(f"{_name(row)}: of the sequential rate {', '.join(shares)}")
    for note in notes:
        console.print(f"note: {note}", style="yellow")


def save_json(file: Path, made_by: str, report: dict[str, Any]) -> None:
    """Writes {"made_by", ...}. Raises OSError."""
    with durable.named(file):
        file.write_text(json.dumps({"made_by": made_by, **report}, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def save_csv(file: Path, made_by: str, rows: Sequence[Row]) -> None:
    """Writes our mark, the header and the rows. Raises OSError."""
    with durable.named(file), file.open("w", encoding="utf-8", newline="") as out:
        out.write(csv_mark(made_by) + "\n")
        writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _cold_notes(rows: Sequence[Row]) -> list[str]:
    """Rows whose first pass was slow: whoever answered the later ones had the bytes in memory."""
    found = []
    for row in rows:
        rates = row.get("loops_gbps", [])
        if row["first_gbps"] is None or len(rates) < 3:
            continue
        later = statistics.median(rates[1:])
        if row["first_gbps"] < _COLD_FRACTION * later:
            found.append(
                f"{_name(row)}: the first pass reached {row['first_gbps']:.2f} GB/s, later ones {later:.2f}: "
                "the host's or the device's cache warms"
            )
    return found


def _count_notes(ours: IoCounts, kernel: IoCounts) -> list[str]:
    found = []
    for what, mine, theirs in (
        ("read", ours.read_bytes, kernel.read_bytes),
        ("written", ours.written_bytes, kernel.written_bytes),
    ):
        if abs(theirs - mine) > _TOLERANCE * mine + _SLACK_BYTES:
            found.append(
                f"bytes {what}: the queues count {mine} ({format_bytes(mine)}), the kernel {theirs} "
                f"({format_bytes(theirs)}); they may differ by {_TOLERANCE:.0%}"
            )
    return found


def _is_shown(column: tuple[str, Any, str], rows: Sequence[Row]) -> bool:
    _, cell, when = column
    if when == "differs":
        return len({cell(row) for row in rows}) > 1
    return when == "always" or any(cell(row) for row in rows)


def _name(row: Row) -> str:
    words = f"{row['mode']} {row['engine']} {block_label(row['block_bytes'])} x {row['depth']}"
    return f"{words}, {row['ranks']} {'rank' if row['ranks'] == 1 else 'ranks'}, {row['path']}"


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
    ("CPU s/GB", _figure("cpu_s_per_gb", 3), "always"),
    ("idle %", _figure("idle_fraction", 1, 100), "always"),
    ("first", _figure("first_gbps", 2), "filled"),
    ("us/block", lambda row: _figure("user_us_per_block", 1)(row) if row["mode"] == "random" else "", "filled"),
    ("over bare", _figure("user_us_beyond_bare", 1), "filled"),
    ("fio", _figure("fio_gbps", 2), "filled"),
    ("bare", _figure("yardstick_gbps", 2), "filled"),
    ("fraction", _figure("fraction", 3), "filled"),
    ("aio_handle", _figure("peer_gbps", 2), "filled"),
    ("times it", _figure("peer_fraction", 3), "filled"),
)
