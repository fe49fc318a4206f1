"""`tiermem bench io`: how fast a folder's disk is through the queue, for every engine, block size,
depth and pattern asked for.

    read, write, mixed   in order; mixed reads one half of a file while it writes the other, as the optimizer's step does
    random, random-write small blocks by batch calls
    tensors              4 MiB tensors through the TensorStore, beside sequential passes
    sustained            writes past the drive's fast cache, as a series

    options -> checks (outputs, room, memory) -> BenchFiles -> Ranks (processes) -> sweep -> rows ->
    table, JSON, CSV, PNG

Every setting is measured in turn, loop after loop:

    for each mode:  loop 1: A B C w(A) ...   loop 2: A B C w(A) ...        A, B, C settings; w a witness of the same file

The rate of a disk drifts, and so does that of a host that others use. Settings of one mode are
comparable because they take turns, and their medians are compared. Witnesses (fio, a bare loop, a
peer) are measured in the same loops, after the settings with their block and depth.

Several paths are measured each alone and then all at once, each with a queue and a depth of its
own. Whatever is wrong with the options is said before anything is measured; however the benchmark
ends, no file is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tiermem.tools.bench import io_report
from tiermem.tools.bench.io_ranks import CannotRun, RankJob, Ranks, Setting
from tiermem.tools.bench.witnesses import (
    WRITING,
    FioWitness,
    LoopWitness,
    Witness,
    bare_witness,
    peer_program,
)
from tiermem.tools.measure.files import (
    BenchFiles,
    check_memory,
    check_room,
    memory_backed,
    say_memory,
    why_unmeasured,
)
from tiermem.tools.measure.machine import caption, machine_facts, try_engines
from tiermem.tools.options import RANDOM, IoBenchOptions
from tiermem.tools.words import EXIT_FAILED, format_bytes, numbered, read_json


def run(path: str | Path, **options: Any) -> dict[str, Any]:
    """Measures a folder's disk, and returns what `tiermem bench io --json` writes.

    The command runs in a process of its own, so a script needs no `__main__` guard. Blocks.

    Args:
        path: a folder; nothing is left there.
        options: those of the command, without dashes: `mode="read,random"`, `size="256MiB"`,
            `random_block="4KiB"`; True for one without a value, such as `fio`.

    Raises ValueError for wrong options, OSError where nothing could be measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/io.json"
        command = ["-m", "tiermem.tools.cli", "bench", "io", "--path", str(path), "--json", file]
        for name, value in options.items():
            said = f"--{name.replace('_', '-')}"
            command += [said] if value is True else [said, str(value)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if done.returncode:
            raise (ValueError if done.returncode == 2 else OSError)(done.stderr + done.stdout)
        return dict(read_json(Path(file)))


def bench_io(options: IoBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError
    and OSError."""
    say_memory(options.paths, console)
    options = _without_small_disks(options, console)
    settings = settings_of(options)
    largest = max(settings, key=_buffer_bytes)
    check_memory(
        _buffer_bytes(largest),
        f"{format_bytes(_buffer_bytes(largest))} of buffers are needed for {largest.describe()}",
        "ask for smaller blocks, less depth or fewer ranks",
    )
    check_room(options.paths, _room(options))
    start = time.monotonic()
    rows, notes = measure(options, settings, console)
    best = io_report.best_of(rows)
    facts = machine_facts(options.paths)
    facts["engines"] = {name: why for name, (_, why) in try_engines().items()}
    io_report.print_rows(rows, best, notes, caption(facts), console)
    options.save_json(
        options.report(facts, start, rows=rows, best=best, notes=notes), allows_nan=False
    )
    if options.csv_file is not None:
        io_report.save_csv(options.csv_file, options.MADE_BY, rows)
    if options.plot_file is not None:
        io_report.draw_heatmap(rows, caption(facts), options.plot_file, options.MADE_BY)
    return 0 if best else EXIT_FAILED


def _without_small_disks(options: IoBenchOptions, console: Console) -> IoBenchOptions:
    """The options without the folders that have no room, each named, where another has."""
    file_bytes = sum(size for _, size in _room(options))
    large = []
    for path in options.paths:
        if memory_backed(path) or (why := why_unmeasured([path], file_bytes)) is None:
            large.append(path)
        elif len(options.paths) > 1:
            console.print(f"not measured: {why}")
    return dataclasses.replace(options, paths=large) if large else options


def measure(
    options: IoBenchOptions, settings: Sequence[Setting], console: Console
) -> tuple[list[io_report.Row], list[str]]:
    """Every setting in every loop; rows and notes. Nothing is left on the paths, however it
    ends."""
    with contextlib.ExitStack() as closing:
        num_ranks = max(options.ranks)
        sizes = [options.size_bytes] * num_ranks
        if "sustained" in options.modes:
            sizes.append(options.sustained_bytes)
        files = closing.enter_context(BenchFiles(options.paths, sizes))
        ranks = closing.enter_context(Ranks(num_ranks, options.paths))
        program = shutil.which("fio") if options.has_fio else None
        notes = (
            ["fio is not installed: its column is absent"]
            if options.has_fio and program is None
            else []
        )
        judges: dict[str, Witness] = {}
        if options.yardstick:
            judges["yardstick"] = closing.enter_context(
                bare_witness(options.yardstick, files, options.sync)
            )
        if options.peer_python:
            # DeepSpeed's operator compiles before the first answer
            command = peer_program(options.peer_python, "aio")
            peer = LoopWitness("aio_handle", command, files, ("read", "write"), options.sync)
            judges["peer"] = closing.enter_context(peer)
        if program:
            judges["fio"] = FioWitness(program, files, options.sync)
        witnesses = list(judges.values())
        absent = Witness("none")
        num_passes = sum(1 for _ in _turns(settings, options.loops, witnesses))
        with _progress(num_passes, console) as told:
            told("writing the files once")
            _fill(options, files, ranks)
            measured = sweep(settings, options, files, ranks, witnesses, told)
        rows = [io_report.row_of(each) for each in measured]
        for row, setting in zip(rows, settings, strict=True):
            if is_witnessed(setting):
                loops = {
                    name: judges.get(name, absent).loops_gbps(setting)
                    for name in ("fio", "yardstick", "peer")
                }
                io_report.add_witness(
                    row, **loops, bare_user_us=judges.get("yardstick", absent).user_us(setting)
                )
        notes += [note for witness in witnesses for note in witness.notes]
        in_memory = [path for path in options.paths if memory_backed(path)]
        notes += [f"{path} lies in memory: no disk was measured" for path in in_memory]
        return rows, io_report.notes_of(
            rows, *io_report.byte_counts([] if in_memory else measured)
        ) + notes


def _fill(options: IoBenchOptions, files: BenchFiles, ranks: Ranks) -> None:
    """Writes every file once: first writes to preallocated blocks are slower, and reads of them
    touch no disk."""
    block = next(size for size in (1 << 20, 1 << 16, 4096) if options.size_bytes % size == 0)
    for index, path in enumerate(options.paths):
        setting = Setting("write", "auto", block, 32, max(options.ranks), str(path), (index,))
        ranks.run(jobs_of(setting, options, files))


def _room(options: IoBenchOptions) -> list[tuple[str, int]]:
    """What each path must have room for."""
    num_ranks = max(options.ranks)
    parts = [
        (
            f"{numbered(num_ranks, 'file')} of {format_bytes(options.size_bytes)} (--size)",
            num_ranks * options.size_bytes,
        )
    ]
    if "tensors" in options.modes:
        parts.append(("the tensors' stores", num_ranks * options.size_bytes))
    if "sustained" in options.modes:
        parts.append(("sustained writes (--bytes)", options.sustained_bytes))
    return parts


def _buffer_bytes(setting: Setting) -> int:
    """Bytes of the memory that a setting's blocks pass through."""
    # its store's memory, and the sequential pass beside it
    copies = 3 if setting.mode == "tensors" else 1
    return setting.block_bytes * setting.depth * setting.ranks * len(setting.path_indices) * copies


@contextlib.contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar; what it yields is called with what is being measured, before each pass. Drawn seldom:
    it costs CPU time."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=2,
    ) as bar:
        task = bar.add_task("starting", total=total + 1)
        yield lambda what: bar.update(task, description=what, advance=1)


# ---- the sweep -----------------------------------------------------------------------------------


def settings_of(options: IoBenchOptions) -> list[Setting]:
    """Every setting, those of one block and depth together. Several paths: each alone, then "all"
    at once.

    The random modes have their own block; "sustained" is measured once per path, on one rank, with the largest
    block and depth.
    """
    single = [(str(path), (number,)) for number, path in enumerate(options.paths)]
    everywhere = [("all", tuple(range(len(single))))] if len(single) > 1 else []
    found = []
    for mode, (path, where) in itertools.product(options.modes, [*single, *everywhere]):
        sizes = options.blocks
        depths = options.depths
        ranks = options.ranks
        engines = options.engines
        if mode == "sustained":
            sizes = [max(sizes)]
            depths = [max(depths)]
            ranks = [1]
            engines = engines[:1]
        elif mode in RANDOM:
            sizes = [options.random_block_bytes]
        found += [
            Setting(mode, engine, block, depth, num_ranks, path, where)
            for block, depth, num_ranks, engine in itertools.product(sizes, depths, ranks, engines)
        ]
    return found


def sweep(
    settings: Sequence[Setting],
    options: IoBenchOptions,
    files: BenchFiles,
    ranks: Ranks,
    witnesses: Sequence[Witness] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[io_report.MeasuredRow]:
    """Measures every setting in every loop ("sustained": once). Blocks; raises OSError when a
    transfer fails.

    A setting whose engine cannot run gets its reason and is not tried again.
    """
    measured = {
        setting: io_report.MeasuredRow(setting, files.is_direct(setting.path_indices))
        for setting in settings
    }
    for setting, witness, loop in _turns(settings, options.loops, witnesses):
        if witness is not None:
            progress(f"{witness.name}, {setting.describe()}")
            witness.measure(setting, bytes_of(setting, options), loop)
            continue
        progress(setting.describe())
        found = measured[setting]
        if found.error is None:
            try:
                found.outcomes.append(ranks.run(jobs_of(setting, options, files, loop)))
            except CannotRun as refusal:
                found.error = str(refusal)
    return list(measured.values())


def _turns(
    settings: Sequence[Setting], loops: int, witnesses: Sequence[Witness]
) -> Iterator[tuple[Setting, Witness | None, int]]:
    """Whose turn it is: a setting's own, or a witness's of it, and in which loop."""
    for mode, of_mode in itertools.groupby(settings, key=lambda each: each.mode):
        rows = list(of_mode)
        for loop in range(1 if mode == "sustained" else loops):
            for _, group in itertools.groupby(
                rows, key=lambda each: (each.path, each.block_bytes, each.depth)
            ):
                together = list(group)
                yield from ((setting, None, loop) for setting in together)
                judged = next(filter(is_witnessed, together), None)
                if judged is not None:
                    yield from ((judged, witness, loop) for witness in witnesses)


def is_witnessed(setting: Setting) -> bool:
    """Whether witnesses can measure the same: one process on one file."""
    return (
        setting.ranks == 1
        and len(setting.path_indices) == 1
        and setting.mode not in ("tensors", "sustained")
    )


def jobs_of(
    setting: Setting, options: IoBenchOptions, files: BenchFiles, seed: int = 0
) -> list[RankJob]:
    """The job of each rank. A path's last file is that of "sustained", which has one rank."""
    numbers = [-1] if setting.mode == "sustained" else range(setting.ranks)
    return [
        RankJob(
            setting,
            files=tuple(files.name(index, number) for index in setting.path_indices),
            folders=tuple(str(files.paths[index]) for index in setting.path_indices),
            file_bytes=files.sizes[number],
            num_bytes=bytes_of(setting, options),
            is_direct=files.is_direct(setting.path_indices),
            threads=options.threads,
            sync=options.sync and setting.mode in (*WRITING, "sustained"),
            seed=seed * 1000 + rank,
            seconds=options.sustained_s or math.inf,
        )
        for rank, number in enumerate(numbers)
    ]


def bytes_of(setting: Setting, options: IoBenchOptions) -> int:
    """Bytes that one rank moves in a pass: each way when it goes both ways. Whole blocks."""
    block = setting.block_bytes
    if setting.mode == "sustained":
        return options.sustained_bytes // block * block
    if setting.mode in RANDOM:
        most = 2048 * min(setting.depth, 32) * block  # 2048 blocks for each block in flight
        return min(most, options.size_bytes // block * block)
    if setting.mode == "mixed":  # one half of the file is read while the other is written
        return max(block, options.size_bytes // 2 // block * block)
    return options.size_bytes // block * block
