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
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiermem.tools.bench.files import BenchFiles, check_memory, check_room
from tiermem.tools.bench.io_ranks import Ranks
from tiermem.tools.bench.io_report import (
    add_witness,
    best_of,
    byte_counts,
    draw_heatmap,
    notes_of,
    print_rows,
    row_of,
    save_csv,
)
from tiermem.tools.bench.sweep import Setting, count_passes, is_witnessed, jobs_of, settings_of, sweep
from tiermem.tools.bench.witnesses import FioWitness, LoopWitness, bare_witness, peer_witness
from tiermem.tools.machine import MEMORY_FILE_SYSTEMS, caption, machine_facts, place_of, try_engines
from tiermem.tools.options import IoBenchOptions
from tiermem.tools.words import format_bytes, stopped_by_sigterm

EXIT_FAILED = 1
_FILL_BLOCKS = (1 << 20, 1 << 16, 4096)
_FILL_DEPTH = 32


def bench_io(options: IoBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError and OSError."""
    settings = settings_of(options)
    _check_memory(settings)
    check_room(options.paths, _room(options))
    start = time.monotonic()
    with stopped_by_sigterm():
        rows, notes = measure(options, settings, console)
    best = best_of(rows)
    facts = machine_facts(options.paths)
    facts["engines"] = {name: why for name, (_, why) in try_engines().items()}
    print_rows(rows, best, notes, caption(facts), console)
    options.save_json(options.report(facts, start, rows=rows, best=best, notes=notes), allows_nan=False)
    if options.csv_file is not None:
        save_csv(options.csv_file, options.MADE_BY, rows)
    if options.plot_file is not None:
        draw_heatmap(rows, caption(facts), options.plot_file, options.MADE_BY)
    return 0 if best else EXIT_FAILED


def measure(
    options: IoBenchOptions, settings: Sequence[Setting], console: Console
) -> tuple[list[dict[str, Any]], list[str]]:
    """Every setting in every loop; rows and notes. Nothing is left on the paths, however it ends."""
    with contextlib.ExitStack() as closing:
        num_ranks, sustained = max(options.ranks), _sustained_bytes(options)
        files = closing.enter_context(BenchFiles(options.paths, num_ranks, options.size_bytes, sustained))
        ranks = closing.enter_context(Ranks(num_ranks, options.paths))
        program = shutil.which("fio") if options.has_fio else None
        notes = ["fio is not installed: its column is absent"] if options.has_fio and program is None else []
        fio = FioWitness(program, files, options.sync) if program else None
        bare = bare_witness(options.yardstick, files, options.sync) if options.yardstick else None
        peer = peer_witness(options.peer_python, files, options.sync) if options.peer_python else None
        loops = [closing.enter_context(witness) for witness in (bare, peer) if witness is not None]
        witnesses: list[FioWitness | LoopWitness] = [*loops, *([fio] if fio else [])]
        with _progress(count_passes(settings, options.loops, witnesses), console) as told:
            told("writing the files once")
            _fill(options, files, ranks)
            measured = sweep(settings, options, files, ranks, witnesses, told)
        rows = [row_of(each) for each in measured]
        for row, setting in zip(rows, settings, strict=True):
            if is_witnessed(setting):
                beside, other = ([] if each is None else each.loops_gbps(setting) for each in (bare, peer))
                rate, user_us = fio.gbps(setting) if fio else None, bare.user_us(setting) if bare else None
                add_witness(row, rate, beside, other, user_us)
        notes += [note for witness in witnesses for note in witness.notes]
        in_memory = [path for path in options.paths if place_of(path).file_system in MEMORY_FILE_SYSTEMS]
        notes += [f"{path} lies in memory: no disk was measured" for path in in_memory]
        return rows, notes_of(rows, *(byte_counts([] if in_memory else measured))) + notes


def _fill(options: IoBenchOptions, files: BenchFiles, ranks: Ranks) -> None:
    """Writes every file once: first writes to preallocated blocks are slower, and reads of them touch no disk."""
    block = next(size for size in _FILL_BLOCKS if options.size_bytes % size == 0)
    for place, path in enumerate(options.paths):
        setting = Setting("write", "auto", block, _FILL_DEPTH, max(options.ranks), str(path), (place,))
        ranks.run(jobs_of(setting, options, files))


def _sustained_bytes(options: IoBenchOptions) -> int:
    return options.sustained_bytes if "sustained" in options.modes else 0


def _room(options: IoBenchOptions) -> list[tuple[str, int]]:
    """What each path must have room for."""
    num_ranks = max(options.ranks)
    files = (f"{num_ranks} files of {format_bytes(options.size_bytes)}", num_ranks * options.size_bytes)
    stores = num_ranks * options.size_bytes if "tensors" in options.modes else 0
    return [files, ("the tensors' stores", stores), ("sustained writes (--bytes)", _sustained_bytes(options))]


def _check_memory(settings: Sequence[Setting]) -> None:
    """Sees that the buffers of the largest setting fit. Raises ValueError with the arithmetic."""
    largest = max(settings, key=_buffer_bytes)
    needed = _buffer_bytes(largest)
    said = f"{format_bytes(needed)} of buffers are needed for {largest.describe()}"
    check_memory(needed, said, "ask for smaller blocks, less depth or fewer ranks")


def _buffer_bytes(setting: Setting) -> int:
    copies = 3 if setting.mode == "tensors" else 1  # its store's memory, and the sequential pass beside it
    return setting.block_bytes * setting.depth * setting.ranks * len(setting.places) * copies


@contextlib.contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar; what it yields is called with what is being measured, before each pass. Drawn seldom: it costs CPU time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=total + 1)
        yield lambda what: bar.update(task, description=what, advance=1)
