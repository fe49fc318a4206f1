"""`bench overlap`: an iteration whose step goes on under the next forward, held to the same maths
beside a bare loop.

    for each round:    none     a turn of iterations, each step before the next forward    a process of its own, capped
                       window   a turn of iterations, each step under the next forward     a process of its own, capped
                       maths    the forward and backward of plain PyTorch, from memory     this process, not capped
                       yardstick, for each setting: that maths beside a bare loop, which moves the
                       least bytes of the window (iterations.py); both start together, and the time
                       is that until both have ended

All take the same tokens, dtype and threads, and take turns, because a disk that others use drifts;
medians are compared. A turn of the trainings begins with one iteration that is not timed: its step
is what goes on under the first timed forward.

    bytes        ours <= 1.02 of the least, by what backward steps before it is timed; ours and the kernel's
                 (/proc/self/io) agree
    iteration    <= 1.1 of the yardstick, or <= 0.70 of `none` where that is more
    Python       the CPU time of Python in steps <= 2 % of the iteration (iterations.py)

Bytes of an iteration are those of a turn without those of a turn of one iteration, whose forward no
step runs under.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench import python_path
from bench.iterations import Least, Turn
from bench.options import OverlapBenchOptions
from tiermem.precision import DTYPES
from tiermem.swap.base.ranges import ALIGNMENT
from tiermem.swap.disk.queue import busiest
from tiermem.swap.disk.run_folder import remove_dead_runs
from tiermem.tools.bench.stepped_model import SETTINGS, BareSetting, Roofline
from tiermem.tools.bench.witnesses import LineProgram
from tiermem.tools.corpus import Corpus
from tiermem.tools.job.launcher import CHILD_ENVIRONMENT, Job, large_blocks_mapped
from tiermem.tools.job.train_job import make_job
from tiermem.tools.measure.files import check_room
from tiermem.tools.measure.machine import caption, machine_facts
from tiermem.tools.memory_limit import MemoryLimit, open_limit
from tiermem.tools.options import TrainOptions
from tiermem.tools.plan.budget import state_bytes
from tiermem.tools.plan.planned import hf_config, transformers
from tiermem.tools.plan.prediction import made_ready, settle_compute
from tiermem.tools.record.reports import table
from tiermem.tools.record.run_record import IoCounts, disagreements
from tiermem.tools.words import format_bytes

EXIT_MISSED = 1
MOST_BYTES, MOST_OF_YARDSTICK, MOST_OF_NONE, MOST_PYTHON = 1.02, 1.1, 0.70, 0.02

# ---- the trainings -------------------------------------------------------------------------------


class Trained(contextlib.AbstractContextManager["Trained"]):
    """A process that trains under a cap, and what is measured of it. A context manager.

    Making it builds the model there and creates the states. Blocks; raises ValueError with the
    process's words when it cannot train, OSError when it ends.

    Args:
        overlap: of its policy.
        count: iterations that are timed in a turn.
        folder: for the job's file.
    """

    def __init__(self, overlap: str, job: Job, count: int, folder: Path) -> None:
        self.overlap = overlap
        self.turns: list[Turn] = []
        self._count = count
        self._paths = job.nvme_paths
        # nothing is saved
        own = {**job.config.get("tiermem", {}), "overlap": overlap, "durability": "none"}
        file = folder / f"{overlap}.json"
        dataclasses.replace(job, config={**job.config, "tiermem": own}, events_file=None).save(file)
        variables = {**CHILD_ENVIRONMENT, "PYTHONPATH": python_path()}
        environment = [f"{name}={value}" for name, value in variables.items()]
        program = [sys.executable, "-m", "bench.iterations", str(file)]
        with contextlib.ExitStack() as opened:
            self.limit: MemoryLimit = opened.enter_context(open_limit(job.memory_limit_bytes))
            command = ["env", *environment, *self.limit.wrap(program)]
            self._program = LineProgram(command, f"the training with overlap={overlap}")
            opened.callback(self._end)
            self.limit.attach(self._program.pid)
            self.facts: dict[str, Any] = self._say("facts")
            self._turn(2)
            self._before = self._turn(2)
            self._first = self._turn(1)
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def least(self) -> Least:
        """The least bytes of an iteration, by what backward has stepped in the turns so far,
        medians of them."""
        least = Least(*(IoCounts(*counts) for counts in self.facts["least"].values()))
        if self.facts["overlap"] != "backward":
            return least
        turns = self.turns or [self._before]
        return least.with_steps_in_backward(
            round(statistics.median(each.written_in_backward_bytes for each in turns))
        )

    @property
    def first_by_path(self) -> list[IoCounts]:
        """Bytes on each path in a turn of one iteration."""
        return self._first.by_path

    def measure(self) -> None:
        """A turn, after one iteration that is not timed. Blocks."""
        self.turns.append(self._turn(1 + self._count))

    def moved(self) -> tuple[IoCounts, IoCounts, list[IoCounts]]:
        """Bytes of an iteration as the store counts them, as the kernel does, and on each path;
        medians over the turns."""
        by_path = [
            self._each([turn.by_path[place] for turn in self.turns], first)
            for place, first in enumerate(self._first.by_path)
        ]
        ours = self._each([turn.store for turn in self.turns], self._first.store)
        return ours, self._each([turn.kernel for turn in self.turns], self._first.kernel), by_path

    def _each(self, several: Sequence[IoCounts], first: IoCounts) -> IoCounts:
        each = [counts.since(first) for counts in several]
        return IoCounts(
            *(round(statistics.median(way) / self._count) for way in zip(*each, strict=True))
        )

    def _turn(self, count: int) -> Turn:
        given = self._say(f"turn {count}")
        given |= {name: IoCounts(*given[name]) for name in ("store", "kernel")}
        return Turn(**given | {"by_path": [IoCounts(*each) for each in given["by_path"]]})

    def _say(self, line: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._program.say(line))
        except OSError as error:
            if self.limit.charge(in_full=True).num_kills:
                raise OSError(
                    f"{self._program.name} was killed at its cap: {self.limit.why}"
                ) from error
            raise
        return answer

    def _end(self) -> None:
        self._program.close()
        remove_dead_runs(map(Path, self._paths), self._program.pid)


# ---- the yardstick -------------------------------------------------------------------------------


class Beside(NamedTuple):
    """Seconds of an iteration's maths and of the bare loop beside it, both from their common
    start."""

    maths_s: float
    loop_s: float

    @property
    def seconds(self) -> float:
        """Until both had ended."""
        return max(self)


class PlainMaths:
    """The forward and backward of plain PyTorch, with everything in memory: no step, and gradients
    are dropped.

    job: the dtype is that of its products.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._data = Corpus([Path(path) for path in job.data], job.seq, job.seed)
        self._num_batches = 0
        with large_blocks_mapped():  # the heap is then as in the trainings
            torch.manual_seed(job.seed)
            model = transformers().AutoModelForCausalLM.from_config(hf_config(job.shape))
            model = model.to(DTYPES[job.compute])
            self._model = made_ready(model, job)

    def run(self, count: int) -> float:
        """Seconds of one of so many passes. Blocks."""
        start = time.monotonic()
        for _ in range(count):
            batch = self._data.batch(self._num_batches, self._job.batch, torch.device("cpu"))
            self._num_batches += 1
            self._model(**batch).loss.backward()
            self._model.zero_grad()
        return (time.monotonic() - start) / count


class Yardstick(contextlib.AbstractContextManager["Yardstick"]):
    """The maths, alone and beside a loop that moves bytes. A context manager.

    Args:
        load: the bytes of an iteration, on each path.
        count: iterations that are timed in a turn.
        bare_loop: tests/native/bare_loop, built; None: our own queue.
    """

    def __init__(
        self, job: Job, load: Sequence[IoCounts], count: int, bare_loop: Path | None
    ) -> None:
        self._maths = PlainMaths(job)
        self._count = count
        self._load = [IoCounts(*(count * each for each in moved)) for moved in load]
        self._loop = Roofline([Path(path) for path in job.nvme_paths], [load], bare_loop, "auto")
        self.alone: list[float] = []
        self.beside: dict[BareSetting, list[Beside]] = {setting: [] for setting in SETTINGS}
        self._maths.run(1)

    def __exit__(self, *_: object) -> None:
        self._loop.__exit__()

    def measure(self) -> None:
        """A turn alone, and one with each setting of the loop. Blocks; raises OSError."""
        self.alone.append(self._maths.run(self._count))
        for setting, found in self.beside.items():
            with ThreadPoolExecutor(1) as thread:
                loop = thread.submit(self._loop.measure, self._load, setting)
                maths_s = self._maths.run(self._count)
                found.append(Beside(maths_s, loop.result() / self._count))

    def best(self) -> tuple[BareSetting, float]:
        """The fastest setting, by the median seconds of an iteration."""
        medians = {
            setting: statistics.median(each.seconds for each in found)
            for setting, found in self.beside.items()
        }
        return min(medians.items(), key=lambda item: item[1])


# ---- the verdict ---------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What is held to what."""

    bytes_ratio: float  # moved / least
    of_yardstick: float  # the iteration / the yardstick's
    of_none: float  # the iteration / that with overlap=none
    bound_s: float  # of an iteration
    python_part: float  # of the iteration

    @staticmethod
    def of(
        moved: IoCounts,
        least: IoCounts,
        window_s: float,
        yardstick_s: float,
        none_s: float,
        python_s: float,
    ) -> Verdict:
        """From the bytes of an iteration and medians of its seconds."""
        bound_s = max(MOST_OF_YARDSTICK * yardstick_s, MOST_OF_NONE * none_s)
        bytes_ratio = sum(moved) / max(1, sum(least))
        return Verdict(
            bytes_ratio, window_s / yardstick_s, window_s / none_s, bound_s, python_s / window_s
        )

    def misses(self, window_s: float) -> Iterator[str]:
        """A sentence for each bound that does not hold."""
        if self.bytes_ratio > MOST_BYTES:
            yield (
                f"an iteration moves {self.bytes_ratio:.3f} of the least bytes; {MOST_BYTES} is "
                "allowed"
            )
        if window_s > self.bound_s:
            yield (
                f"an iteration takes {window_s:.3f} s: {self.of_yardstick:.2f} of the yardstick "
                f"and {self.of_none:.2f} of "
                f"overlap=none, where {MOST_OF_YARDSTICK} or {MOST_OF_NONE:.2f} is allowed, "
                "whichever is more"
            )
        if self.python_part > MOST_PYTHON:
            yield (
                f"Python takes {self.python_part:.1%} of an iteration for its step; "
                f"{MOST_PYTHON:.0%} is allowed"
            )


# ---- the command ---------------------------------------------------------------------------------


def bench_overlap(options: OverlapBenchOptions, console: Console) -> int:
    """Measures, shows the figures and the verdict, writes JSON. Leaves nothing on the paths.
    Blocks.

    Returns 0, or EXIT_MISSED where a bound does not hold. Raises OSError and ValueError.
    """
    start = time.monotonic()
    job = _job_of(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-overlap-")))
        trained = []
        for overlap in ("none", options.overlap):
            with console.status(
                f"building the model and making its first steps, overlap={overlap}"
            ):
                trained.append(
                    opened.enter_context(Trained(overlap, job, options.iterations, folder))
                )
        none, window = trained
        if window.facts["overlap"] != options.overlap:
            raise ValueError(
                f"--overlap is {options.overlap}, and steps of this model run with "
                f"{window.facts['overlap']!r}: a step goes on "
                "where its weights are large enough to be fetched"
            )
        with console.status("building the yardstick"):
            load = _spread(window.least.total, window.first_by_path)
            yardstick = opened.enter_context(
                Yardstick(job, load, options.iterations, options.yardstick)
            )
        for number in range(options.rounds):
            for name, each in (
                ("none", none),
                (options.overlap, window),
                ("the yardstick", yardstick),
            ):
                with console.status(f"round {number + 1} of {options.rounds}: {name}"):
                    each.measure()
        figures = _figures(options, job, (none, window), yardstick)
    facts = machine_facts(options.paths)
    print_figures(figures, console)
    console.print(caption(facts))
    options.save_json(options.report(facts, start, **figures))
    return EXIT_MISSED if figures["misses"] else 0


def _job_of(options: OverlapBenchOptions) -> Job:
    """The job of both trainings, without their overlap. Raises ValueError and OSError, also where a
    path has no room."""
    given = TrainOptions(
        preset=None if options.model is not None else options.preset,
        model=options.model,
        data=options.data,
        offload="nvme",
        nvme=options.paths,
        memory_bytes=options.memory_bytes,
        seq=options.seq,
        batch=options.batch,
        precision=options.precision,
        states=options.states,
        is_checkpointing=options.is_checkpointing,
        threads=options.threads,
    )
    job = make_job(given, "overlap", Path(options.paths[0]))
    clipping = options.clipping
    if clipping is None and options.overlap == "backward":
        clipping = 0.0  # a step that is clipped is made after backward
    config = job.config if clipping is None else {**job.config, "gradient_clipping": clipping}
    job = dataclasses.replace(job, config=settle_compute(config, job.shape)[0])
    model = transformers().AutoModelForCausalLM
    with torch.device("meta"):
        num_params = sum(
            param.numel() for param in model.from_config(hf_config(job.shape)).parameters()
        )
    each = state_bytes(num_params, job.precision) + num_params * DTYPES[job.precision].itemsize
    num_paths = len(options.paths)
    check_room(
        options.paths,
        [("two trainings", 2 * each // num_paths), ("the bare loop's file", each // num_paths)],
    )
    return job


def _spread(total: IoCounts, by_path: Sequence[IoCounts]) -> list[IoCounts]:
    """Bytes on each path, in the proportion in which a training has moved its own, in whole blocks
    of a disk."""
    whole = ALIGNMENT * sum(map(sum, by_path))
    return [
        IoCounts(*(ALIGNMENT * round(way * sum(each) / whole) for way in total)) for each in by_path
    ]


def _figures(
    options: OverlapBenchOptions, job: Job, trained: Sequence[Trained], yardstick: Yardstick
) -> dict[str, Any]:
    none, window = trained
    rows = [_row(each) for each in trained]
    setting, yardstick_s = yardstick.best()
    moved, _, _ = window.moved()
    none_s, window_s = (row["iteration_s_median"] for row in rows)
    verdict = Verdict.of(
        moved, window.least.total, window_s, yardstick_s, none_s, rows[1]["python_s"]
    )
    misses = list(verdict.misses(window_s))
    ours, kernel = (
        IoCounts.total(getattr(turn, who) for turn in window.turns) for who in ("store", "kernel")
    )
    misses += disagreements(ours, kernel, "in all turns the store", 0.01)
    if [turn.loss for turn in none.turns] != [turn.loss for turn in window.turns]:
        misses.append("the losses differ, and overlap may change no bit")
    return {
        "model": options.preset if options.model is None else str(options.model),
        "num_params": window.facts["num_params"],
        "precision": job.precision,
        "compute": job.compute,
        "states": options.states,
        "batch": job.batch,
        "seq": job.seq,
        "threads": torch.get_num_threads(),
        "limit_kind": window.limit.kind,
        "rows": rows,
        "maths_s": yardstick.alone,
        "yardstick": [
            {
                "by": setting.name,
                "maths_s": [each.maths_s for each in found],
                "loop_s": [each.loop_s for each in found],
            }
            for setting, found in yardstick.beside.items()
        ],
        "yardstick_s": yardstick_s,
        "yardstick_by": f"{'bare loop' if options.yardstick else 'our own queue'}, {setting.name}",
        "verdict": verdict._asdict(),
        "misses": misses,
    }


def _row(trained: Trained) -> dict[str, Any]:
    turns, (moved, kernel, by_path) = trained.turns, trained.moved()
    limits = [turn.limits_s for turn in turns if turn.limits_s]
    limits_s = {
        name: statistics.median(each[name] for each in limits)
        for name in (limits[0] if limits else ())
    }
    seconds = [turn.iteration_s for turn in turns]
    return {
        "overlap": trained.overlap,
        "iteration_s": seconds,
        "iteration_s_median": statistics.median(seconds),
        **{
            name: statistics.median(turn.phases_s[name] for turn in turns)
            for name in turns[0].phases_s
        },
        "python_s": statistics.median(turn.python_s for turn in turns),
        "limits_s": limits_s,
        "limited_by": busiest(limits_s) if limits_s else None,
        "least": {name: counts._asdict() for name, counts in trained.least._asdict().items()},
        "least_bytes": trained.least.total._asdict(),
        "moved_bytes": moved._asdict(),
        "kernel_bytes": kernel._asdict(),
        "paths": [counts._asdict() for counts in by_path],
        "peak_rss_bytes": max(turn.peak_rss_bytes for turn in turns),
        "losses": [turn.loss for turn in turns],
        **{
            name: trained.facts[name]
            for name in ("engine", "plan_host_bytes", "resident_state_bytes")
        },
    }


# ---- tables --------------------------------------------------------------------------------------

_TERMS = {
    "states": "optimizer states",
    "forward": "weights, forward",
    "backward": "weights, backward",
    "step": "weights, step",
    "gradients": "gradients",
}


def print_figures(figures: Mapping[str, Any], console: Console) -> None:
    """Shows everything; the verdict comes last."""
    console.print(_seconds_table(figures))
    console.print(_bytes_table(figures))
    verdict = figures["verdict"]
    console.print(
        f"bytes / least: {verdict['bytes_ratio']:.3f} (at most {MOST_BYTES})\n"
        f"iteration / yardstick: {verdict['of_yardstick']:.3f} (at most {MOST_OF_YARDSTICK}), "
        "iteration / none: "
        f"{verdict['of_none']:.3f} (or at most {MOST_OF_NONE:.2f})\n"
        f"Python in steps / iteration: {verdict['python_part']:.2%} (at most {MOST_PYTHON:.0%})"
    )
    for miss in figures["misses"]:
        console.print(f"! {miss}", style="bold red")
    if not figures["misses"]:
        console.print("verdict: all bounds hold")


def _seconds_table(figures: Mapping[str, Any]) -> Table:
    columns = (
        "run",
        ">iteration, median (min to max)",
        ">forward",
        ">backward",
        ">step",
        "limited by",
        ">peak RSS",
    )
    title = (
        f"{figures['num_params'] / 1e6:.1f} M parameters in {figures['precision']}, products in "
        f"{figures['compute']}, states "
        f"{figures['states']} on NVMe, {figures['batch']} x {figures['seq']} tokens, "
        f"{figures['threads']} threads; cap: "
        f"{figures['limit_kind']}"
    )
    shown = table(title, *columns)
    for row in figures["rows"]:
        phases = (f"{row[f'{phase}_s']:.3f} s" for phase in ("forward", "backward", "step"))
        peak = format_bytes(row["peak_rss_bytes"])
        shown.add_row(
            f"overlap={row['overlap']}",
            _spread_of(row["iteration_s"]),
            *phases,
            row["limited_by"],
            peak,
        )
    shown.add_row("maths from memory, alone", _spread_of(figures["maths_s"]))
    for each in figures["yardstick"]:
        both = [max(pair) for pair in zip(each["maths_s"], each["loop_s"], strict=True)]
        shown.add_row(f"  beside the loop, {each['by']}", _spread_of(both))
    shown.add_row(
        f"yardstick ({figures['yardstick_by']})", f"{figures['yardstick_s']:.3f} s", style="bold"
    )
    return shown


def _bytes_table(figures: Mapping[str, Any]) -> Table:
    row = figures["rows"][1]
    shown = table(
        f"bytes of an iteration with overlap={row['overlap']}, in GB", "what", ">read", ">written"
    )
    for name, said in _TERMS.items():
        shown.add_row(said, *_gigabytes(row["least"][name]))
    shown.add_section()
    for said, key in (
        ("least", "least_bytes"),
        ("moved", "moved_bytes"),
        ("moved, by the kernel", "kernel_bytes"),
    ):
        shown.add_row(said, *_gigabytes(row[key]))
    return shown


def _gigabytes(counts: Mapping[str, int]) -> list[str]:
    return [f"{counts[way] / 1e9:.3f}" for way in ("read_bytes", "written_bytes")]


def _spread_of(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"
