"""`tiermem inspect DIR`: the tensors of a durable step like `ls -l`: shape, formats, bytes, and in which files they lie.

One line for each parameter, buffer and tensor of the optimizer; totals of each state at the end. --match takes glob patterns of
names. Manifest and parts are validated; states are not read.
"""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiermem.tools.byte_size import format_bytes

if TYPE_CHECKING:
    from tiermem.checkpoint.format.manifest import Parameter
    from tiermem.checkpoint.opening.source import Source

MADE_BY = "tiermem inspect"


class Row(NamedTuple):
    """One tensor of the model or the optimizer."""

    name: str
    aliases: tuple[str, ...]
    role: str
    shape: tuple[int, ...]
    dtype: str
    is_trainable: bool
    num_steps: int
    states: dict[str, str]  # state -> kind
    state_bytes: dict[str, int]
    files: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Of all states."""
        return sum(self.state_bytes.values())


def inspect_checkpoint(
    where: Path, console: Console, tag: str | None = None, patterns: Sequence[str] = (), shows_json: bool = False
) -> int:
    """Prints the step and returns 0. Blocks; raises ValueError and OSError for what cannot be opened or matches nothing."""
    from tiermem.checkpoint.opening.source import Source

    with Source.open(where, tag) as source:
        rows = [row for row in _rows(source) if not patterns or any(fnmatch.fnmatchcase(row.name, p) for p in patterns)]
        if patterns and not rows:
            raise ValueError(f"--match: no tensor of {source.place} is named {' or '.join(patterns)}")
        head = {
            name: getattr(source.manifest, name) for name in ("step", "tag", "run_id", "commit", "world", "num_shards")
        }
        head["place"] = str(source.place)
        excluded = source.manifest.excluded
    if shows_json:
        tensors = [{**row._asdict(), "num_bytes": row.num_bytes} for row in rows]
        print(
            json.dumps(
                {"made_by": MADE_BY, **head, "excluded": excluded, "tensors": tensors, "totals": totals(rows)}, indent=2
            )
        )
        return 0
    _print(rows, head, excluded, console)
    return 0


def totals(rows: Sequence[Row]) -> dict[str, int]:
    """Bytes of each state over all rows."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update(row.state_bytes)
    return dict(found)


def _rows(source: Source) -> list[Row]:
    return [_row(source, each) for each in source.manifest.parameters]


def _row(source: Source, each: Parameter) -> Row:
    states = source.states(each.name)
    files = dict.fromkeys(str(file) for state in states for file in source.files(each.name, state))
    return Row(
        each.name,
        each.aliases,
        each.role,
        each.shape,
        each.dtype,
        each.is_trainable,
        each.num_steps,
        {state: source.kind(each.name, state) or "" for state in states},
        {state: source.bytes_of(each.name, state) for state in states},
        tuple(files),
    )


def _print(rows: Sequence[Row], head: dict[str, Any], excluded: Sequence[str], console: Console) -> None:
    tag = f", tag {head['tag']}" if head["tag"] else ""
    ranks = f"{head['world']} rank{'s' if head['world'] > 1 else ''}"
    console.print(Text(f"{head['place']}: step {head['step']}{tag}, saved by {ranks}, run {head['run_id']}"))
    roots = {file: f"[{number}]" for number, file in enumerate(dict.fromkeys(f for row in rows for f in row.files))}
    table = Table(box=None, pad_edge=False)
    for name in ("", "shape", "dtype", "states", "bytes", "steps", "file", "name"):
        table.add_column(name, justify="right" if name in ("bytes", "steps") else "left", overflow="fold")
    for row in rows:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        states = " ".join(f"{state}:{kind}" for state, kind in row.states.items())
        name = row.name + (f" = {', '.join(row.aliases)}" if row.aliases else "")
        cells = (
            _mode(row),
            shape,
            row.dtype,
            states,
            f"{row.num_bytes:,}",
            str(row.num_steps),
            " ".join(roots[f] for f in row.files),
        )
        table.add_row(*map(Text, (*cells, name)))
    console.print(table)
    for file, mark in roots.items():
        console.print(Text(f"{mark} {file}", style="dim"))
    found = totals(rows)
    parts = ", ".join(f"{state} {format_bytes(num_bytes)}" for state, num_bytes in found.items())
    console.print(Text(f"{len(rows)} tensors, {format_bytes(sum(found.values()))}: {parts or 'nothing'}"))
    if excluded:
        console.print(Text(f"left out when it was saved, frozen: {', '.join(excluded)}", style="dim"))


def _mode(row: Row) -> str:
    """What it is, in three letters: p parameter, b buffer, o ordinary; t trainable; s stepped."""
    return row.role[0] + ("t" if row.is_trainable else "-") + ("s" if row.num_steps else "-")
