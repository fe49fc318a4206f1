"""`tiermem bench adam`: how fast AdamW steps in every precision, beside the memory's own speed and beside peers.

    for every row (adam_rows.py):  prepare everybody  ->  loops x (ours, torch, peer, yardstick in turn)  ->  medians

ns per parameter, GB/s by the bytes that must move, and the share of the yardstick's rate over the same arrays in the same
run: medians of the loops' own ratios, since memory is not equally fast from one second to the next. Each loop counts a
contestant's fastest pass of five. A whole step goes from bf16 gradients with a loss scale and
clipping to bf16 parameters; the peers' are written with their parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiermem.tools.adam_rows import ROWS, AdamRow
from tiermem.tools.byte_size import format_bytes
from tiermem.tools.machine import available_bytes, caption, machine_facts, num_cores
from tiermem.tools.outputs import check_outputs
from tiermem.tools.stopping import stopped_by_sigterm

MADE_BY = "tiermem bench adam"
_UNIT = 1024  # the yardstick takes multiples of it
_MEMORY_FRACTION = 0.8
_MOST_HELD_BYTES = {"ours": 18, "torch": 4, "yardstick": 18, "peer": 20}  # per parameter, in their largest row


@dataclasses.dataclass(frozen=True)
class AdamBenchOptions:
    """What was asked for on the command line. Raises ValueError for what cannot be measured."""

    num_params: int = 128_000_000
    loops: int = 9
    threads: int | None = None
    rows: Sequence[str] = ()
    """Parts of names: rows that hold one of them. None given: all."""
    json_file: Path | None = None
    yardstick: Path | None = None
    peer_python: Path | None = None

    def __post_init__(self) -> None:
        if self.num_params < _UNIT:
            raise ValueError(f"--params is {self.num_params}; it must be at least {_UNIT}")
        if self.loops < 1:
            raise ValueError(f"--loops is {self.loops}; it must be at least 1")
        if self.threads is not None and not 1 <= self.threads <= num_cores():
            raise ValueError(f"--threads is {self.threads}; allowed are 1 to {num_cores()}, the cores")
        if not self.chosen_rows:
            names = "; ".join(row.name for row in ROWS)
            raise ValueError(f"--row {', '.join(self.rows)} is part of no row's name; they are: {names}")

    @property
    def numel(self) -> int:
        """Parameters to step: a multiple of what the yardstick takes."""
        return self.num_params // _UNIT * _UNIT

    @property
    def chosen_rows(self) -> list[AdamRow]:
        """The rows to measure."""
        return [row for row in ROWS if not self.rows or any(part in row.name for part in self.rows)]


def bench_adam(options: AdamBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError and OSError."""
    check_everything(options)
    start = time.monotonic()
    with stopped_by_sigterm():
        rows = measure(options, console)
    facts = machine_facts()
    _print_rows(rows, options, caption(facts), console)
    if options.json_file is not None:
        report = {
            "made_by": MADE_BY,
            "machine": facts,
            "options": {key: _plain(value) for key, value in dataclasses.asdict(options).items()},
            "seconds": time.monotonic() - start,
            "rows": rows,
        }
        options.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def check_everything(options: AdamBenchOptions) -> None:
    """Refuses what would fail later: outputs that are not ours, missing programs, too little memory."""
    if options.json_file is not None and options.json_file.suffix != ".json":
        raise ValueError(f"--json: {options.json_file} must end in .json")
    check_outputs([options.json_file], MADE_BY)
    for option, program in (("--yardstick", options.yardstick), ("--peer-python", options.peer_python)):
        if program is not None and not (program.is_file() and os.access(program, os.X_OK)):
            raise FileNotFoundError(errno.ENOENT, f"{option}: no such program", str(program))
    present = {"ours": True, "torch": True, "yardstick": options.yardstick, "peer": options.peer_python}
    needed = options.numel * sum(held for who, held in _MOST_HELD_BYTES.items() if present[who])
    if needed > _MEMORY_FRACTION * available_bytes():
        raise ValueError(
            f"--params {options.num_params} takes up to {format_bytes(needed)} at once, {format_bytes(available_bytes())} of "
            "memory are available: ask for fewer"
        )


def measure(options: AdamBenchOptions, console: Console) -> list[dict[str, Any]]:
    """Every chosen row."""
    from tiermem.tools.adam_contestants import Contestant, Ours, Peer, Streams, Torch
    from tiermem.zero.ranks.topology import fair_cores, fair_threads

    threads = options.threads or fair_threads()
    with contextlib.ExitStack() as closing:
        ours = Ours(threads, fair_cores())
        contestants: list[Contestant] = [ours, Torch(threads, ours)]
        if options.peer_python is not None:
            contestants.append(Peer(options.peer_python, threads))
        if options.yardstick is not None:
            contestants.append(Streams(options.yardstick, threads))
        for contestant in contestants:
            closing.callback(contestant.close)
        rows = []
        for row in options.chosen_rows:
            with console.status(f"measuring {row.name}"):
                for contestant in contestants:
                    contestant.release()
                present = [each for each in contestants if each.prepare(row, options.numel)]
                seconds: dict[str, list[float]] = {each.name: [] for each in present}
                for _ in range(options.loops):
                    for each in present:
                        seconds[each.name].append(each.seconds())
            rows.append(row_of(row, options.numel, seconds, threads))
        return rows


def row_of(row: AdamRow, numel: int, seconds: dict[str, list[float]], threads: int) -> dict[str, Any]:
    """A row of the report from everybody's seconds per loop: medians, and of what compares two, of the loops' ratios."""
    medians = {name: statistics.median(series) for name, series in seconds.items()}
    ratios = {
        name: statistics.median(their / our for their, our in zip(series, seconds["tiermem"], strict=True))
        for name, series in seconds.items()
    }
    own = medians.pop("tiermem")
    bare = medians.pop("yardstick", None)
    return {
        "name": row.name,
        "kind": "whole" if row.is_whole else "kernel",
        "weight": row.weight,
        "master": row.master or row.weight,
        "moments": row.moments,
        "grads": row.grads,
        "rounding": row.rounding,
        "threads": threads,
        "num_params": numel,
        "bytes_per_param": row.bytes_per_param,
        "ns_per_param": own / numel * 1e9,
        "ns_per_param_loops": [each / numel * 1e9 for each in seconds["tiermem"]],
        "gbps": row.bytes_per_param * numel / own / 1e9,
        "stream_gbps": None if bare is None else row.bytes_per_param * numel / bare / 1e9,
        "stream_fraction": ratios.get("yardstick"),
        "peers": {name: {"ns_per_param": s / numel * 1e9, "speedup": ratios[name]} for name, s in medians.items()},
    }


def _print_rows(rows: Sequence[dict[str, Any]], options: AdamBenchOptions, facts: str, console: Console) -> None:
    title = f"AdamW over {options.numel:,} parameters, {rows[0]['threads']} threads, medians of {options.loops} loops"
    table = Table(title=title, title_justify="left", caption=facts, caption_justify="left", box=None, pad_edge=False)
    names = ("weight + master / moments", "bytes", "ns", "GB/s", "of the stream", "torch ns", "DeepSpeed ns")
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        share = "-" if row["stream_fraction"] is None else f"{row['stream_fraction']:.1%}"
        told = [_peer(row["peers"].get(name)) for name in ("torch", "deepspeed")]
        figures = (f"{row['bytes_per_param']:.4g}", f"{row['ns_per_param']:.4f}", f"{row['gbps']:.1f}", share, *told)
        table.add_row(row["name"], *figures)
    console.print(table)


def _peer(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['ns_per_param']:.4f} ({figures['speedup']:.2f}x)"


def _plain(value: Any) -> Any:
    """As JSON takes it."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
