"""`tiermem bench io`: how fast a folder's disk is through the queue, for every engine, block size, depth and pattern asked for.

    read, write, mixed   in order; mixed reads one half of a file while it writes the other, as the optimizer's step does
    random               small blocks by batch calls
    tensors              4 MiB tensors through the TensorStore, beside sequential passes
    sustained            writes past the drive's fast cache, as a series

    options -> checks (outputs, room, memory) -> BenchFiles -> Ranks (processes) -> sweep -> rows -> table, JSON, CSV, PNG

Several paths are measured each alone and then all at once, each with a queue and a depth of its own.
Whatever is wrong with the options is said before anything is measured; however the benchmark ends, no file is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiermem.tools.bench.io_ranks import ENGINES, MODES
from tiermem.tools.bench.io_report import (
    add_witness,
    best_of,
    byte_counts,
    notes_of,
    print_rows,
    row_of,
    save_csv,
    save_json,
)
from tiermem.tools.bench.sweep import Bounds, Measured, Setting, count_passes, jobs_of, settings_of, sweep
from tiermem.tools.bench.witnesses import find_fio
from tiermem.tools.machine import MEMORY_FILE_SYSTEMS, available_bytes, caption, machine_facts, place_of, try_engines
from tiermem.tools.words import check_outputs, format_bytes, parse_bytes, stopped_by_sigterm

MADE_BY = "tiermem bench io"
EXIT_FAILED = 1
_PAGE_BYTES = 4096
_FILL_BLOCKS = (1 << 20, 1 << 16, _PAGE_BYTES)
_FILL_DEPTH = 32
_MOST_DEPTH = 4096
_MEMORY_FRACTION = 0.8


@dataclasses.dataclass(frozen=True)
class IoBenchOptions:
    """What was asked for on the command line. Raises ValueError for what cannot be measured."""

    paths: Sequence[Path]
    size_bytes: int = 2 << 30
    blocks: Sequence[int] = (1 << 18, 1 << 20, 1 << 22)
    depths: Sequence[int] = (1, 8, 32)
    engines: Sequence[str] = ("auto",)
    modes: Sequence[str] = ("read", "write", "mixed", "random")
    ranks: Sequence[int] = (1,)
    loops: int = 5
    random_block_bytes: int = _PAGE_BYTES
    sync: bool = False
    threads: int = 0
    sustained_bytes: int = 64 << 30
    sustained_s: float | None = None
    json_file: Path | None = None
    csv_file: Path | None = None
    plot_file: Path | None = None
    has_fio: bool = False
    yardstick: Path | None = None
    peer_python: Path | None = None

    def __post_init__(self) -> None:
        for what, given, allowed in (("--engine", self.engines, ENGINES), ("--mode", self.modes, MODES)):
            unknown = [name for name in given if name not in allowed]
            if unknown:
                raise ValueError(f"{what} is {unknown[0]!r}; allowed are {', '.join(allowed)}")
        for name in ("paths", "blocks", "depths", "engines", "modes", "ranks"):
            if not getattr(self, name):
                raise ValueError(f"--{name.removesuffix('s')} is empty; give at least one")
        used = [*self.blocks, *([self.random_block_bytes] if "random" in self.modes else [])]
        for size in (self.size_bytes, *used):
            if size < _PAGE_BYTES or size % _PAGE_BYTES:
                raise ValueError(f"a size or block of {size} bytes is given; allowed are multiples of {_PAGE_BYTES}")
        if max(used) > self.size_bytes:
            raise ValueError(f"--block {format_bytes(max(used))} is larger than --size {format_bytes(self.size_bytes)}")
        for what, numbers, most in (("--depth", self.depths, _MOST_DEPTH), ("--ranks", self.ranks, 1024)):
            wrong = [number for number in numbers if not 1 <= number <= most]
            if wrong:
                raise ValueError(f"{what} is {wrong[0]}; allowed are 1 to {most}")
        if self.loops < 1:
            raise ValueError(f"--loops is {self.loops}; it must be at least 1")
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"--threads is {self.threads}; allowed are 0 (the engine chooses) to 1024")
        if self.sustained_s is not None and not self.sustained_s > 0:
            raise ValueError(f"--seconds is {self.sustained_s}; it must be more than 0")
        if "sustained" in self.modes and self.sustained_bytes < max(self.blocks):
            raise ValueError(f"--bytes {self.sustained_bytes} is less than a block of {max(self.blocks)} bytes")
        resolved = [path.resolve() for path in self.paths]
        if len(set(resolved)) < len(resolved):
            raise ValueError(f"a path is given twice: {', '.join(map(str, self.paths))}")


def parse_list(text: str, option: str, parse: Callable[[str], Any] = str) -> tuple[Any, ...]:
    """Reads "256KiB,1MiB" with a parser for each part; each is kept once. Raises ValueError naming the option."""
    found = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        try:
            found.append(parse(part))
        except ValueError:
            kind = "a size, such as 1MiB" if parse is parse_bytes else "a whole number"
            raise ValueError(f"{option}: {part!r} is not {kind}") from None
    return tuple(dict.fromkeys(found))


def bench_io(options: IoBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError and OSError."""
    settings = settings_of(
        options.modes,
        options.engines,
        options.blocks,
        options.depths,
        options.ranks,
        [str(path) for path in options.paths],
        options.random_block_bytes,
    )
    check_everything(options, settings)
    start = time.monotonic()
    with stopped_by_sigterm():
        rows, notes = measure(options, settings, console)
    best = best_of(rows)
    facts = machine_facts(options.paths)
    facts["engines"] = {name: why for name, (_, why) in try_engines().items()}
    print_rows(rows, best, notes, caption(facts), console)
    report = {
        "machine": facts,
        "options": {key: _plain(value) for key, value in dataclasses.asdict(options).items()},
        "seconds": time.monotonic() - start,
        "rows": rows,
        "best": best,
        "notes": notes,
    }
    if options.json_file is not None:
        save_json(options.json_file, MADE_BY, report)
    if options.csv_file is not None:
        save_csv(options.csv_file, MADE_BY, rows)
    if options.plot_file is not None:
        from tiermem.tools.bench.io_report import draw_heatmap

        draw_heatmap(rows, caption(facts), options.plot_file, MADE_BY)
    return 0 if best else EXIT_FAILED


def check_everything(options: IoBenchOptions, settings: Sequence[Setting]) -> None:
    """Refuses what would fail later: outputs that are not ours, paths without room, too much memory, missing programs."""
    outputs = (options.json_file, options.csv_file, options.plot_file)
    for option, file, suffix in zip(("--json", "--csv", "--plot"), outputs, (".json", ".csv", ".png"), strict=True):
        if file is not None and file.suffix != suffix:
            raise ValueError(f"{option}: {file} must end in {suffix}")
    check_outputs(outputs, MADE_BY)
    if options.plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'tiermem[plots]'")
    for option, program in (("--yardstick", options.yardstick), ("--peer-python", options.peer_python)):
        if program is not None and not (program.is_file() and os.access(program, os.X_OK)):
            raise FileNotFoundError(errno.ENOENT, f"{option}: no such program", str(program))
    for path in options.paths:
        if not path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder: make it first, or correct --path", str(path))
    _check_memory(options, settings)
    from tiermem.tools.bench.files import check_room

    check_room(options.paths, _room(options))


def measure(
    options: IoBenchOptions, settings: Sequence[Setting], console: Console
) -> tuple[list[dict[str, Any]], list[str]]:
    """Every setting in every loop; rows and notes. Nothing is left on the paths, however it ends."""
    from tiermem.tools.bench.files import BenchFiles
    from tiermem.tools.bench.io_ranks import Ranks
    from tiermem.tools.bench.witnesses import FioWitness, LoopWitness, bare_witness, peer_witness

    with contextlib.ExitStack() as closing:
        num_ranks = max(options.ranks)
        sustained = options.sustained_bytes if "sustained" in options.modes else 0
        files = closing.enter_context(BenchFiles(options.paths, num_ranks, options.size_bytes, sustained))
        ranks = closing.enter_context(Ranks(num_ranks, options.paths))
        notes: list[str] = []
        fio_program = find_fio() if options.has_fio else None
        if options.has_fio and fio_program is None:
            notes.append("fio is not installed: its column is absent")
        fio = FioWitness(fio_program, files, options.sync) if fio_program else None
        bare = bare_witness(options.yardstick, files, options.sync) if options.yardstick else None
        peer = peer_witness(options.peer_python, files, options.sync) if options.peer_python else None
        loops = [witness for witness in (bare, peer) if witness is not None]
        for loop in loops:
            closing.enter_context(loop)
        witnesses: list[FioWitness | LoopWitness] = [*loops, *([fio] if fio else [])]
        bounds = Bounds(options.size_bytes, options.threads, options.sync, sustained, options.sustained_s)
        with _progress(count_passes(settings, options.loops, len(witnesses)), console) as told:
            told("writing the files once")
            fill(options, files, ranks)
            measured = sweep(settings, options.loops, bounds, files, ranks, witnesses, told)
        rows = [row_of(each, _quantiles) for each in measured]
        for each, row in zip(measured, rows, strict=True):
            _enter_witnesses(each, row, fio, bare, peer)
        notes += [note for witness in witnesses for note in witness.notes]
        in_memory = [path for path in options.paths if place_of(path).file_system in MEMORY_FILE_SYSTEMS]
        notes += [f"{path} lies in memory: no disk was measured" for path in in_memory]
        return rows, notes_of(rows, *(byte_counts([] if in_memory else measured))) + notes


def fill(options: IoBenchOptions, files: Any, ranks: Any) -> None:
    """Writes every file once: first writes to preallocated blocks are slower, and reads of them touch no disk."""
    block = next(size for size in _FILL_BLOCKS if options.size_bytes % size == 0)
    for place, path in enumerate(options.paths):
        setting = Setting("write", "auto", block, _FILL_DEPTH, max(options.ranks), str(path), (place,))
        ranks.run(jobs_of(setting, Bounds(options.size_bytes), files))


def _enter_witnesses(measured: Measured, row: dict[str, Any], fio: Any, bare: Any, peer: Any) -> None:
    from tiermem.tools.bench.sweep import is_witnessed

    if not is_witnessed(measured.setting):
        return
    setting = measured.setting
    bare_loops, peer_loops = ([] if witness is None else witness.loops_gbps(setting) for witness in (bare, peer))
    fio_rate = fio.gbps(setting) if fio is not None else None
    add_witness(row, fio_rate, bare_loops, peer_loops, bare.user_us(setting) if bare is not None else None)


def _room(options: IoBenchOptions) -> list[tuple[str, int]]:
    """What each path must have room for."""
    num_ranks = max(options.ranks)
    files = (f"{num_ranks} files of {format_bytes(options.size_bytes)}", num_ranks * options.size_bytes)
    stores = num_ranks * options.size_bytes if "tensors" in options.modes else 0
    sustained = options.sustained_bytes if "sustained" in options.modes else 0
    return [files, ("the tensors' stores", stores), ("sustained writes (--bytes)", sustained)]


def _check_memory(options: IoBenchOptions, settings: Sequence[Setting]) -> None:
    """Sees that the buffers of the largest setting fit. Raises ValueError with the arithmetic."""
    largest = max(settings, key=_buffer_bytes)
    needed, available = _buffer_bytes(largest), available_bytes()
    if needed > _MEMORY_FRACTION * available:
        raise ValueError(
            f"{format_bytes(needed)} of buffers are needed for {largest.describe()}, {format_bytes(available)} of memory "
            "are available: ask for smaller blocks, less depth or fewer ranks"
        )


def _buffer_bytes(setting: Setting) -> int:
    copies = 3 if setting.mode == "tensors" else 1  # its store's memory, and the sequential pass beside it
    return setting.block_bytes * setting.depth * setting.ranks * len(setting.places) * copies


def _quantiles(counts: list[int]) -> list[Any]:
    import numpy as np

    from tiermem.swap.native import latency_quantiles

    found = latency_quantiles(np.array(counts, dtype=np.uint64), (0.5, 0.99))
    return [None if math.isnan(value) else value for value in found]


def _plain(value: Any) -> Any:
    """As JSON takes it."""
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


@contextlib.contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar; what it yields is called with what is being measured, before each pass. Drawn seldom: it costs CPU time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=total + 1)
        yield lambda what: bar.update(task, description=what, advance=1)
