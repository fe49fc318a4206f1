"""`tiermem train` and `tiermem sft`: the launcher's side, from options to pictures.

    options -> Job -> launcher (cap) -> trainer process -> RunRecord -> run.json, table, --json,
    trace.json, PNGs

Every mistake that can be found without starting a process raises ValueError or OSError before a
folder is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from tiermem.swap.disk import durable
from tiermem.swap.disk.run_folder import remove_dead_runs
from tiermem.tools.job.launcher import (
    CHANNEL_FD,
    CHILD_ENVIRONMENT,
    Job,
    Observer,
    launch,
    num_ranks,
)
from tiermem.tools.job.train_job import (
    LIST_OF_STEPS,
    Resumed,
    find_resumed,
    make_job,
    with_saved,
)
from tiermem.tools.measure.machine import lines_of_run
from tiermem.tools.memory_limit import open_limit
from tiermem.tools.options import YAML, RunOptions, SftOptions, TrainOptions
from tiermem.tools.plan.seen import keep_record
from tiermem.tools.presets import ModelSizes
from tiermem.tools.record.reports import (
    Progress,
    TensorBoardLog,
    predicted_table,
    result_lines,
    result_table,
    table,
)
from tiermem.tools.record.run_record import read_spans, stamp, write_trace
from tiermem.tools.words import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USER,
    Mistake,
    numbered,
    read_json,
    save_json,
)

EXIT_COUNTS = 3
EXIT_KILLED = 137

Run = dict[str, Any]
"""The record of a run, as --json has it."""


def train(
    options: TrainOptions,
    console: Console,
    others_of: Callable[[Job], Callable[[Job, Path, Run], Run]] = lambda job: lambda *_: {},
) -> int:
    """Runs the training, reports, and returns the exit status.

    0 finished · 1 failed · 3 our counts and the kernel's differ · 130 stopped by Ctrl-C · 137
    killed at the cap.

    Args:
        others_of: an instrument's, called before anything is started; raises ValueError or OSError
            for a job that other trainings cannot be given. What it returns runs them, and is given
            the job, the run's folder and our record; it returns what --json has beside that.

    Raises:
        ValueError, OSError: options that cannot be met.
    """
    if options.resume == Path(LIST_OF_STEPS):
        return list_steps(options, console)
    resumed = find_resumed(options.resume) if options.resume is not None else None
    if resumed is not None:
        options = with_saved(options, resumed)
    name = _run_name(options, resumed)
    with of_this_rank(options, name, console) as (folder, options, console, is_first):
        job = make_job(options, name, folder, resumed)
        _check_memory(job, console)
        run_others = others_of(job)
        if not is_first:
            job = dataclasses.replace(job, events_file=None)
        if not (job.checkpoint or job.resume):
            console.print("weights: made at random")
        console.print(job.source, soft_wrap=True)
        if resumed is not None:
            console.print(f"going on from step {resumed.step} of {resumed.path}")
        run = run_reported(job, f"tiermem {name}", folder, options, console, is_first)
        if is_first:
            if options.tuned is not None:
                _keep_record(options.tuned, run, console)
            job = dataclasses.replace(job, is_checkpointing=run["is_checkpointing"])  # as chosen
            run |= run_others(job, folder, run)
        options.save_json(run)
        return status_of(run, options.MADE_BY)


def sft(options: SftOptions, console: Console) -> int:
    """Runs the fine-tuning, reports, and returns the exit status, as `train` does.

    Raises ValueError and OSError for options that cannot be met, and for arguments that TRL does
    not take.
    """
    if importlib.util.find_spec("trl") is None:
        raise ValueError("trl is not installed: pip install 'tiermem[sft]'")
    config = options.config
    is_yaml = config is not None and config.suffix in YAML
    words = ["--config", str(config)] if is_yaml else []
    with of_this_rank(options, "sft", console) as (folder, options, console, is_first):
        job = Job(
            options.MADE_BY,
            config=read_json(config) if config is not None and not is_yaml else {},
            memory_limit_bytes=options.memory_bytes,
            nvme_paths=[str(path.absolute()) for path in options.nvme],
            events_file=str(folder / "events.jsonl") if is_first else None,
            sft={
                "arguments": [*options.arguments, *words],
                **{
                    name: getattr(options, name)
                    for name in ("offload", "states", "frozen", "tbw_bytes")
                },
            },
        )
        run = run_reported(job, options.MADE_BY, folder, options, console, is_first)
        options.save_json(run)
        return status_of(run, options.MADE_BY)


def _keep_record(tuned: Path, run: Run, console: Console) -> None:
    """Keeps what a run has seen of its disks. The run has ended, so an error is told and no
    more."""
    try:
        if keep_record(tuned, run):
            console.print(
                f"{tuned} keeps what this run has seen of its disks: tiermem plan --rates "
                + shlex.quote(str(tuned))
            )
    except (OSError, ValueError) as error:
        console.print(
            f"what this run has seen of its disks is not kept in {tuned}: {error}",
            markup=False,
            soft_wrap=True,
        )


@contextlib.contextmanager
def of_this_rank(
    options: RunOptions, name: str, console: Console
) -> Iterator[tuple[Path, Any, Console, bool]]:
    """A run's folder, which is to be made, options and console, and whether this launcher is that
    of the first rank, which reports. Those of another rank say nothing and keep no file; their
    errors name the rank."""
    folder = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"
    if num_ranks() == 1 or os.environ.get("RANK", "0") == "0":
        yield options.runs / folder, options, console, True
        return
    with tempfile.TemporaryDirectory(prefix="tiermem-") as runs:
        options = dataclasses.replace(options, runs=Path(runs), tensorboard=None, json_file=None)
        try:
            yield options.runs / folder, options, Console(quiet=True), False
        except ValueError as error:  # rank 0 may say the same, with the command to write instead
            raise ValueError(f"rank {os.environ['RANK']}: {error}") from error


def run_reported(
    job: Job,
    title: str,
    folder: Path,
    options: RunOptions,
    console: Console,
    is_first: bool,
) -> Run:
    """Makes the folder, runs the job's trainer and reports what it took. Returns the run, as
    `run_one` does."""
    folder.mkdir(parents=True)
    console.print(f"run {folder}")
    trainer = [
        sys.executable,
        "-m",
        "tiermem.tools.train.trainer",
        str(folder / "job.json"),
        "--channel",
        CHANNEL_FD,
    ]
    run = run_one(job, trainer, title, folder, options, console)
    if is_first:
        report(run, folder, options, console)
    return run


def list_steps(options: TrainOptions, console: Console) -> int:
    """Prints the newest durable step of every run in `--runs`, and of every folder of checkpoints
    here; returns 0."""
    runs = options.runs
    found: dict[Path, Resumed] = {}
    for folder in sorted(
        {*runs.glob("*/"), *Path().glob("*/")}, key=lambda each: each.stat().st_mtime, reverse=True
    ):
        with contextlib.suppress(ValueError, OSError):  # nothing to go on from
            each = find_resumed(folder)
            found.setdefault(each.path.resolve(), each._replace(path=folder))
    options.save_json(
        {
            "steps": [
                {"place": folder, "step": each.step, "name": each.name, "resume": each.path}
                for folder, each in found.items()
            ]
        }
    )
    if not found:
        console.print(
            f"nothing to resume in {runs.absolute()} or here: a run keeps its steps with "
            "--save-every or --save"
        )
        return 0
    shown = table("what can be resumed, the newest first", ">step", "run", "saved", "command")
    for folder, each in found.items():
        when = datetime.datetime.fromtimestamp(folder.stat().st_mtime)
        shown.add_row(
            str(each.step),
            each.name,
            f"{when:%Y-%m-%d %H:%M}",
            f"tiermem train --resume {shlex.quote(str(each.path))}",
        )
    console.print(shown)
    return 0


_TRAINER_BYTES = 300 << 20  # resident in every trainer: torch and transformers, imported


def _check_memory(job: Job, console: Console) -> None:
    """Raises Mistake, with the smallest cap that works, for a cap below a bound that needs no
    import.

    A cap between this bound and that is refused by the trainer when it has imported torch, before
    it measures.
    """
    least = _TRAINER_BYTES
    with contextlib.suppress(ValueError):  # a model of a family that the arithmetic does not know
        least += ModelSizes.of(job.shape).unit_numel * (4 if job.precision == "fp32" else 2)
    if job.memory_limit_bytes is None or job.memory_limit_bytes >= least:
        return
    with console.status("looking for the smallest --memory that works"):
        # torch: the launcher does without
        from tiermem.tools.plan.budget import INTERPRETER
        from tiermem.tools.plan.prediction import settle_compute
        from tiermem.tools.plan.settle import settle_by_room

        settled = dataclasses.replace(job, config=settle_compute(job.config, job.shape)[0])
        settle_by_room(settled, _resident_of_trainer(job) or INTERPRETER.num_bytes)


_MEASURE = (
    "import sys, pathlib; from tiermem.tools.job.launcher import Job; "
    "from tiermem.tools.train.training import load_model_classes; "
    "print(load_model_classes(Job.load(pathlib.Path(sys.argv[1]))))"
)


def _resident_of_trainer(job: Job) -> int | None:
    """Bytes resident in the job's trainer when it plans, measured in a process that imports the
    same; None: that failed. Blocks for seconds."""
    with tempfile.TemporaryDirectory(prefix="tiermem-") as folder:
        file = Path(folder) / "job.json"
        job.save(file)
        measure = [sys.executable, "-c", _MEASURE, str(file)]
        env = {**CHILD_ENVIRONMENT, **os.environ}
        done = subprocess.run(measure, env=env, capture_output=True, text=True, check=False)
    return None if done.returncode else int(done.stdout.split()[-1])


class _Log(Observer):
    """Writes a child's output to a file, which is made with the first line, and to a console where
    there is one."""

    def __init__(self, file: Path, console: Console | None) -> None:
        self._file = file
        self._stream: TextIO | None = None
        self._console = console

    def on_output(self, line: str) -> None:
        if self._stream is None:
            self._stream = open(durable.create_anew(self._file), "w", encoding="utf-8")  # noqa: SIM115  (closed by close)
        print(line, file=self._stream, flush=True)
        if self._console is not None:
            self._console.print(line)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def run_one(
    job: Job,
    command: Sequence[str],
    title: str,
    folder: Path,
    options: RunOptions,
    console: Console,
    patience_s: float | None = None,
) -> Run:
    """One capped process from job to run.json; returns the run as saved, without what only pictures
    need."""
    job.save(folder / "job.json")
    is_verbose = options.is_verbose or options.is_debug
    with open_limit(job.memory_limit_bytes) as limit:
        if is_verbose or limit.kind == "watch":
            console.print(f"memory limit: {limit.why}")
        with (
            Progress(
                console, title, job.steps, limit.limit_bytes, limit.kind, is_verbose
            ) as record,
            contextlib.closing(
                _Log(folder / "output.log", console if options.is_debug else None)
            ) as log,
            contextlib.ExitStack() as closing,
        ):
            observers: list[Observer] = [record, log]
            if options.tensorboard is not None:
                board = TensorBoardLog(options.tensorboard / folder.relative_to(options.runs))
                observers.append(closing.enter_context(contextlib.closing(board)))
            record.outcome = launch(command, limit, observers, CHILD_ENVIRONMENT, patience_s)
    # a trainer that was killed left a folder there; one that closed left nothing
    paths = {*map(Path, job.nvme_paths), *map(Path, record.ready.get("paths", ()))}
    for left in remove_dead_runs(paths, record.outcome.pid):
        console.print(f"removed {left.name}, which the killed trainer left in {left.parent}")
    if record.error and record.outcome.exit_code == EXIT_USER and not record.steps:
        # the run never began: nothing else is in its folder
        for file in ("job.json", "output.log"):
            (folder / file).unlink(missing_ok=True)
        folder.rmdir()
        message = record.error["trace"] if options.is_debug else record.error["message"]
        instead = record.error.get("instead")
        raise Mistake(message, instead) if instead else ValueError(message)
    run = {"name": title, **stamp(), **record.summary(), "data": job.source}
    save_json(folder / "run.json", {**run, "pictures": record.pictures()})
    return run


def report(run: Run, folder: Path, options: RunOptions, console: Console) -> None:
    """Prints what a run took, draws its pictures and writes its trace."""
    is_verbose = options.is_verbose or options.is_debug
    if is_verbose:
        console.print(result_table(run))
        predicted = predicted_table(run)
        if predicted is not None:
            console.print(predicted)
        elif run.get("predicted"):
            why = run["predicted"].get("not_made", "the run ended before its first step did")
            console.print(f"no prediction to compare: {why}")
    else:
        for line in result_lines(run):
            console.print(line, soft_wrap=True)
    for line in lines_of_run(run, options.tbw_bytes):
        console.print(line, soft_wrap=True)
    spans = read_spans(folder / "events.jsonl")
    if spans:
        write_trace(folder / "trace.json", spans)
    files = _draw(folder, options.is_debug, console)
    if spans:
        files.append(f"{folder / 'trace.json'} (opens in ui.perfetto.dev)")
    if not is_verbose:
        console.print(
            f"{folder}: figures, {numbered(len(files), 'file')} of pictures and traces; "
            "--verbose prints the tables",
            soft_wrap=True,
        )
        return
    for file in files:
        console.print(f"  {file}")


def _draw(folder: Path, is_debug: bool, console: Console) -> list[str]:
    """Draws a run's pictures, or says why not; returns their files."""
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no pictures: matplotlib is not installed: pip install matplotlib")
        return []
    draw = [sys.executable, "-m", "tiermem.tools.record.plots", str(folder)]
    drawn = subprocess.run(draw, capture_output=True, text=True, check=False)
    if drawn.returncode:
        lines = drawn.stderr.strip().splitlines() or ["unknown reason"]
        console.print(f"no pictures: {lines[-1]}")
        if is_debug:
            console.print(drawn.stderr)
    return [line for line in drawn.stdout.splitlines() if line]


def status_of(run: Run, command: str) -> int:
    """The exit status of our own run, with the reason when it is not 0."""
    reasons: list[str] = []
    if run["is_killed_at_cap"]:
        reasons = [run["outcome"]]
        status = EXIT_KILLED
    elif run["error"]:
        reasons = [f"{run['error']['type']}: {run['error']['message']}"]
        status = EXIT_FAILED
    elif run["exit_code"]:
        reasons = [run["outcome"]]
        status = EXIT_FAILED
    elif run["disagreements"]:
        reasons = run["disagreements"]
        status = EXIT_COUNTS
    else:
        status = EXIT_INTERRUPTED if run["is_interrupted"] else 0
    for reason in reasons:
        print(f"{command}: {reason}", file=sys.stderr)
    return status


def _run_name(options: TrainOptions, resumed: Resumed | None) -> str:
    if resumed is not None and (options.preset or options.model) is None:
        return resumed.name
    model = options.preset or (options.model or Path("model")).resolve().stem
    layers = f"-{options.layers}layers" if options.layers is not None else ""
    states = f"-{options.states}" if options.states is not None else ""
    return f"{model}{layers}{states}-{options.offload or ('config' if options.config else 'auto')}"
