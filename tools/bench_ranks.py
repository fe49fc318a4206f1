"""`tiermem bench ranks`: a training step on several ranks with everything in memory, beside FSDP2's, and what Python costs.

Both shard the same model over the same gloo processes and step in turn in the same run, so that what disturbs one disturbs
the other; medians are compared (rank_steps.py is what the ranks run). What the Python around a unit costs is measured with
the collectives taken out, since those are the backend's; beside it stands the same with gloo's.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tiermem.tools.machine import caption, machine_facts
from tiermem.tools.outputs import check_outputs
from tiermem.tools.stopping import stopped_by_sigterm

MADE_BY = "tiermem bench ranks"
_PHASES = ("forward", "backward", "step", "whole")
_PASSES = ("forward", "backward")
_WAYS = {"python": "Python", "gloo": "with gloo"}
_MOST_US = 150
"""What we allow ourselves for the Python around a unit, in a forward and in a backward."""
_PATIENCE_S = 1800.0


@dataclasses.dataclass(frozen=True)
class RanksBenchOptions:
    """What was asked for on the command line. Raises ValueError for what cannot be measured."""

    num_ranks: int = 2
    loops: int = 15
    num_blocks: int = 8
    width: int = 512
    num_samples: int = 512
    """Rows of each rank's batch."""
    num_empty: int = 64
    """Units that compute next to nothing, for the overhead."""
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"--ranks is {self.num_ranks}; it must be at least 2")
        for name in ("loops", "num_blocks", "width", "num_samples", "num_empty"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.json_file is not None and self.json_file.suffix != ".json":
            raise ValueError(f"--json: {self.json_file} must end in .json")


def bench_ranks(options: RanksBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError, OSError, RuntimeError."""
    check_outputs([options.json_file], MADE_BY)
    start = time.monotonic()
    with stopped_by_sigterm(), console.status(f"stepping on {options.num_ranks} ranks"):
        measured = measure(options)
    report = {
        "made_by": MADE_BY,
        "machine": machine_facts(),
        "options": {key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(options).items()},
        "seconds": time.monotonic() - start,
        **summary(measured),
        "loops": measured,
    }
    print_report(report, console)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(options: RanksBenchOptions) -> dict[str, Any]:
    """Seconds of every loop, as rank 0 saw them. Blocks; raises RuntimeError when a rank fails."""
    from torch import multiprocessing
    from torch.multiprocessing.spawn import start_processes

    from tiermem.tools.rank_steps import Job, run_rank

    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            str(Path(folder) / "store"),
            options.num_ranks,
            options.loops,
            options.num_blocks,
            options.width,
            options.num_samples,
            options.num_empty,
        )
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        ranks = start_processes(run_rank, (job, answers), options.num_ranks, join=False)
        assert ranks is not None
        deadline = time.monotonic() + _PATIENCE_S
        while answers.empty():  # joining raises what a rank raised
            if ranks.join(timeout=0.2) and answers.empty():
                raise RuntimeError("the ranks have ended without an answer")
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise RuntimeError(f"no answer from the ranks in {_PATIENCE_S:.0f} s")
        measured: dict[str, Any] = answers.get()
        while not ranks.join(timeout=1.0):
            pass
        return measured


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians of the loops, and what they mean."""
    steps = {
        who: {phase: statistics.median(loop[phase] for loop in loops) for phase in _PHASES}
        for who, loops in measured["steps"].items()
    }
    overhead = {
        way: {
            who: {phase: statistics.median(loop[phase] for loop in loops) * 1e6 for phase in _PASSES}
            for who, loops in contestants.items()
        }
        for way, contestants in measured["overhead"].items()
    }
    ratios = [
        ours["whole"] / theirs["whole"]
        for ours, theirs in zip(measured["steps"]["tiermem"], measured["steps"]["fsdp2"], strict=True)
    ]
    return {"step_s": steps, "ratio": statistics.median(ratios), "overhead_us_per_unit_and_pass": overhead}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Prints the medians as tables, and what they say."""
    options = report["options"]
    model = f"{options['num_blocks']} blocks of width {options['width']}"
    title = f"{options['num_ranks']} ranks, {model}: medians of {options['loops']} loops in turn"
    facts = caption(report["machine"])
    table = Table(title=title, title_justify="left", caption=facts, caption_justify="left", box=None, pad_edge=False)
    for name in ("", *(f"{phase} ms" for phase in _PHASES)):
        table.add_column(name, justify="right" if name else "left")
    for who, seconds in report["step_s"].items():
        table.add_row(who, *(f"{seconds[phase] * 1e3:.2f}" for phase in _PHASES))
    console.print(table)
    console.print(f"a step of ours takes {report['ratio']:.3f} of FSDP2's (median of ratios, loop by loop)")
    _print_overhead(report["overhead_us_per_unit_and_pass"], options["num_empty"], console)


def _print_overhead(overhead: dict[str, Any], num_units: int, console: Console) -> None:
    title = f"CPU microseconds per unit and pass, of {num_units} units, beyond the plain modules'"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    ways = [way for way in _WAYS if way in overhead]
    for name in ("", *(f"{_WAYS[way]}, {each}" for way in ways for each in _PASSES)):
        table.add_column(name, justify="right" if name else "left")
    for who in overhead["gloo"]:
        table.add_row(who, *(f"{overhead[way][who][each]:.0f}" for way in ways for each in _PASSES))
    console.print(table)
    if "python" in overhead:
        ours = overhead["python"]["tiermem"]
        is_met = all(ours[each] <= _MOST_US for each in _PASSES)
        console.print(
            f"Python around a unit of ours: {ours['forward']:.0f} us forward, {ours['backward']:.0f} us backward: "
            f"{'within' if is_met else 'more than'} the {_MOST_US} us that we allow"
        )
    else:
        console.print("this torch has no group that moves nothing: Python alone was not measured")
