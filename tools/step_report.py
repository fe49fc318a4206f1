"""What `tiermem bench step` says: tables of a model's figures, of the pipeline switched on and off, of the models beside
each other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Figures = Mapping[str, Any]

_DIFFERENCES = {"preset": "smaller states", "resident_bytes": "resident states", "verify": "unverified states"}


def print_figures(figures: Figures, console: Console) -> None:
    """Shows everything; what is wrong with the figures comes last."""
    console.print(_main_table(figures))
    if figures["compare"]:
        console.print(_compare_table(figures["compare"]))
    if len(figures["rows"]) > 1:
        console.print(_models_table(figures["rows"]))
    for line in figures["endurance"]:
        console.print(line)
    for number, row in enumerate(figures["rows"]):
        for note in row["notes"]:
            whose = f"model {number + 1}: " if len(figures["rows"]) > 1 else ""
            console.print(f"! {whose}{note}", style="bold red")


def _main_table(figures: Figures) -> Table:
    resident = f", {figures['resident_fraction']:.0%} of the states resident" if figures["resident_bytes"] else ""
    title = (
        f"optimizer step, {figures['num_params'] / 1e6:.1f} M parameters in {figures['precision']}, states "
        f"{figures['preset']} on NVMe{resident}"
    )
    table = _table(title, "figure", "value")
    table.add_row("step, median (min to max)", _spread(figures["step_s"]))
    per_param = figures["state_bytes"] / figures["num_params"]
    table.add_row("states", f"{figures['state_bytes'] / 1e9:.3f} GB, {per_param:.2f} bytes per parameter")
    table.add_row("read", f"{figures['read_bytes'] / 1e9:.3f} GB at {figures['read_gbps']:.2f} GB/s")
    table.add_row("written", f"{figures['written_bytes'] / 1e9:.3f} GB at {figures['written_gbps']:.2f} GB/s")
    if len(figures["paths"]) > 1:
        for part in figures["paths"]:
            said = f"{part['read_bytes'] / 1e9:.3f} GB read, {part['written_bytes'] / 1e9:.3f} GB written"
            table.add_row(f"  {part['path']}", said)
    table.add_row("computing / waiting", f"{figures['compute_s']:.3f} s / {figures['wait_s']:.3f} s")
    table.add_row("disk idle", f"{figures['disk_idle_fraction']:.1%} of the step")
    for each in figures["rooflines"]:
        table.add_row(f"the same bytes, {each['by']}", _spread(each["seconds"]))
    table.add_row("memory traffic of Adam", f"{figures['memory_s']:.3f} s at {figures['memory_gbps']:.1f} GB/s")
    table.add_row(f"roofline ({figures['roofline_by']})", f"{figures['roofline_s']:.3f} s")
    table.add_row("fraction reached", f"{figures['roofline_fraction']:.3f}")
    return table


def _compare_table(rows: Sequence[Figures]) -> Table:
    table = _table(
        "what the pipeline is worth, steps in turn", "pipeline", "step, median (min to max)", "against both on"
    )
    for row in rows:
        table.add_row(row["name"], _spread(row["step_s"]), f"{row['slower']:.2f} x")
    return table


def _models_table(rows: Sequence[Figures]) -> Table:
    """Time and bytes beside each other: what is smaller, or rests in memory, is neither read nor written."""
    columns = (
        "resident",
        "verified",
        "step, median (min to max)",
        "faster",
        "time saved",
        "bytes saved",
        "fraction of its roofline",
    )
    worth = " and ".join(name for key, name in _DIFFERENCES.items() if len({row[key] for row in rows}) > 1)
    table = _table(f"what {worth or 'nothing'} are worth, steps in turn", "states", *columns)
    first = rows[0]
    for row in rows:
        table.add_row(
            row["preset"],
            f"{row['resident_fraction']:.1%}",
            "never" if row["verify"] == "resume" else row["verify"],
            _spread(row["step_s"]),
            f"{first['step_s_median'] / row['step_s_median']:.2f} x",
            f"{1 - row['step_s_median'] / first['step_s_median']:.1%}",
            f"{1 - _moved(row) / max(1, _moved(first)):.1%}",
            f"{row['roofline_fraction']:.3f}",
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


def _moved(row: Figures) -> int:
    return int(row["read_bytes"] + row["written_bytes"])


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
