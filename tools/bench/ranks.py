"""`tiermem bench ranks`: a training step on several ranks with everything in memory, beside FSDP2's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tiermem
from tiermem import OffloadPolicy
from tiermem.tools.machine import caption, machine_facts
from tiermem.tools.words import check_outputs, stopped_by_sigterm
from tiermem.zero.joining import hold_no_group

# ---- What each rank of `tiermem bench ranks` runs: the same model sharded twice, by tiermem and by FSDP2, stepped ----
# in turn
#
#     steps      forward, backward and optimizer of a tower of blocks; each loop is one step of ours, then one of theirs
#     overhead   forward and backward of units that compute next to nothing: seconds of this thread's CPU beyond the same
#                modules unsharded, per unit and pass, each loop one pass of the plain modules, of ours and of theirs
#                python   over a group whose collectives return at once and move nothing: what the Python around a unit costs
#                  gloo     the same with gloo's calls
#
# A script for torch.multiprocessing: `run_rank` is called in every process. Imports torch.

_TIMEOUT = timedelta(seconds=120)
_EMPTY_NUMEL = 8
_PHASES = ("forward", "backward", "step")


class Job(NamedTuple):
    """What is measured."""

    store_file: str
    num_ranks: int
    loops: int
    num_blocks: int
    width: int
    num_samples: int
    num_empty: int


class Block(nn.Module):
    """Four matrices of a transformer's shape, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + moved


class Empty(nn.Module):
    """A unit whose compute is one addition of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_EMPTY_NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Tower(nn.Module):
    """Modules one after the other."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_rank(rank: int, job: Job, answers: Any) -> None:
    """Measures on one rank; rank 0 puts the answer, a dict of lists of seconds, into the queue."""
    torch.set_num_threads(max(1, torch.get_num_threads() // job.num_ranks))
    hold_no_group()
    store = torch._C._distributed_c10d.FileStore(job.store_file, job.num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.num_ranks, timeout=_TIMEOUT)
    group, idle = dist.group.WORLD, _idle_group()
    assert group is not None
    steps, overhead = _steps(job, group), {"gloo": _overhead(job, group)}
    if idle is not None:
        overhead["python"] = _overhead(job, idle)
    if rank == 0:
        answers.put({"steps": steps, "overhead": overhead})
    dist.barrier()
    dist.destroy_process_group()


def _idle_group() -> dist.ProcessGroup | None:
    """A group of all ranks whose collectives return at once and move nothing between them; None where torch has no such."""
    with contextlib.suppress(ImportError):  # of torch's own tests, so private
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        group: dist.ProcessGroup = dist.new_group(backend="fake")
        return group
    return None


def _steps(job: Job, group: dist.ProcessGroup) -> dict[str, list[dict[str, float]]]:
    """Of each contestant, the seconds of every step's phases."""
    ours, theirs = _tower(job), _tower(job)
    shards = tiermem.shard(ours, OffloadPolicy(stage=3, persistence_numel=0), group=group)
    _fully_shard(theirs, group)
    optims = {"tiermem": tiermem.AdamW(ours.parameters()), "fsdp2": torch.optim.AdamW(theirs.parameters(), fused=True)}
    x = torch.randn(job.num_samples, job.width)
    found: dict[str, list[dict[str, float]]] = {"tiermem": [], "fsdp2": []}
    for loop in range(job.loops + 2):
        for name, model in (("tiermem", ours), ("fsdp2", theirs)):
            dist.barrier()
            seconds = _step(model, optims[name], x)
            if loop >= 2:  # the first learn the order and warm memory
                found[name].append(seconds)
    shards.close()
    return found


def _step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, float]:
    marks = [time.perf_counter()]
    loss = model(x).square().mean()
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optim.step()
    optim.zero_grad()
    marks.append(time.perf_counter())
    phases = dict(zip(_PHASES, (end - start for start, end in itertools.pairwise(marks)), strict=True))
    return phases | {"whole": marks[-1] - marks[0]}


def _overhead(job: Job, group: dist.ProcessGroup) -> dict[str, list[dict[str, float]]]:
    """Of each contestant, CPU seconds of this thread per unit in forward and in backward, beyond the plain modules'."""
    plain, ours, theirs = (Tower([Empty() for _ in range(job.num_empty)]) for _ in range(3))
    shards = tiermem.shard(ours, OffloadPolicy(stage=3, persistence_numel=0), group=group)
    _fully_shard(theirs, group)
    x = torch.randn(2, _EMPTY_NUMEL)
    found: dict[str, list[dict[str, float]]] = {"tiermem": [], "fsdp2": []}
    for loop in range(job.loops + 2):
        bare = _pass(plain, x, time.thread_time)
        for name, model in (("tiermem", ours), ("fsdp2", theirs)):
            dist.barrier()
            seconds = _pass(model, x, time.thread_time)
            if loop >= 2:
                found[name].append({phase: (seconds[phase] - bare[phase]) / job.num_empty for phase in bare})
            for param in model.parameters():
                param.grad = None
    shards.close()
    return found


def _pass(model: nn.Module, x: torch.Tensor, clock: Callable[[], float]) -> dict[str, float]:
    start = clock()
    loss = model(x).sum()
    middle = clock()
    loss.backward()
    return {"forward": middle - start, "backward": clock() - middle}


def _tower(job: Job) -> Tower:
    torch.manual_seed(0)
    return Tower([Block(job.width) for _ in range(job.num_blocks)])


def _fully_shard(model: Tower, group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


# ---- `tiermem bench ranks`: a training step on several ranks with everything in memory, beside FSDP2's, and what -----
# Python costs
#
# Both shard the same model over the same gloo processes and step in turn in the same run, so that what disturbs one
# disturbs the other; medians are compared (ranks.py is what the ranks run). What the Python around a unit costs is
# measured with the collectives taken out, since those are the backend's; beside it stands the same with gloo's.

MADE_BY = "tiermem bench ranks"
_COLUMNS = ("forward", "backward", "step", "whole")
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
        who: {phase: statistics.median(loop[phase] for loop in loops) for phase in _COLUMNS}
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
    for name in ("", *(f"{phase} ms" for phase in _COLUMNS)):
        table.add_column(name, justify="right" if name else "left")
    for who, seconds in report["step_s"].items():
        table.add_row(who, *(f"{seconds[phase] * 1e3:.2f}" for phase in _COLUMNS))
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
