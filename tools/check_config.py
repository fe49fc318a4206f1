"""`tiermem check --config ds.json`: what becomes of every key of a config, or everything that is wrong with it.

The rows are those of the config's own report (docs/keys.md explains the words). Keys that the file leaves out are counted, and
listed with --all. Nothing is started and no folder is touched.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tiermem.config import Problem, ReportRow

EXIT_REFUSED = 2
_STYLES = {"honoured": "green", "computed": "yellow", "default": "dim"}


def check_config(file: Path, console: Console, shows_all: bool = False) -> int:
    """Prints the report and returns 0, or the problems and returns 2. Raises OSError when the file cannot be read."""
    from tiermem.config import ConfigError, load_config

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeprecationWarning)
        try:
            config = load_config(file)
        except ConfigError as error:
            _print_problems(file, error.problems, console)
            return EXIT_REFUSED
    _print_report(file, config.report(), console, shows_all)
    for warning in caught:
        console.print(Text(f"deprecated: {warning.message}", style="yellow"))
    return 0


def _print_problems(file: Path, problems: Sequence[Problem], console: Console) -> None:
    table = Table(title=f"{file}: refused", title_justify="left", box=None, pad_edge=False)
    table.add_column("key", style="bold red", overflow="fold")
    table.add_column("why", overflow="fold")
    for problem in problems:
        table.add_row(Text(problem.path or "the config"), Text(problem.message))
    console.print(table)


def _print_report(file: Path, rows: Sequence[ReportRow], console: Console, shows_all: bool) -> None:
    table = Table(title=f"{file}: accepted", title_justify="left", box=None, pad_edge=False)
    for name in ("key", "value", "here", "note"):
        table.add_column(name, overflow="fold")
    shown = [row for row in rows if shows_all or row.is_set]
    for row in shown:
        table.add_row(Text(row.key), Text(str(row.value)), Text(row.how, style=_STYLES[row.how]), Text(row.note))
    console.print(table)
    left_out = len(rows) - len(shown)
    if left_out:
        console.print(Text(f"{left_out} keys are not set and stay at their defaults or are planned (--all lists them)"))
