"""`bench ranks`: a training step on several ranks with everything in memory, beside FSDP2's."""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

import tiermem
from bench.options import RanksBenchOptions
from bench.phases import timed
from bench.small_training import Block, Tower
from tiermem import OffloadPolicy
from tiermem.ranks.joining import hold_no_group
from tiermem.tools.measure.machine import caption, machine_facts
from tiermem.tools.record.reports import table
from tiermem.tools.record.run_record import PHASES

# ---- what each rank runs -------------------------------------------------------------------------
#
#     steps      forward, backward and optimizer of a tower of blocks; a loop is one step of ours, then one of FSDP2's
#     overhead   forward and backward of units that compute next to nothing: CPU seconds of this thread beyond the same
#                modules unsharded, per unit and pass; a loop is one pass of the plain modules, of
#                ours and of FSDP2's
#                  python   over a group whose collectives return at once and move nothing: the Python around a unit
#                  gloo     the same with gloo's calls

_EMPTY_NUMEL = 8
_WARM_UP_LOOPS = 2

Loops = list[dict[str, float]]
"""Seconds of each phase, of each loop."""


class Empty(nn.Module):
    """A unit whose compute is one addition of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_EMPTY_NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def run_rank(rank: int, options: RanksBenchOptions, folder: Path) -> None:
    """Measures on one rank; rank 0 writes the answer, lists of seconds, into measured.json."""
    torch.set_num_threads(max(1, torch.get_num_threads() // options.num_ranks))
    hold_no_group()
    store = torch._C._distributed_c10d.FileStore(str(folder / "store"), options.num_ranks)
    patience = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=options.num_ranks, timeout=patience
    )
    group = dist.group.WORLD
    idle = _idle_group()
    assert group is not None
    steps = _steps(options, group)
    overhead = {"gloo": _overhead(options, group)}
    if idle is not None:
        overhead["python"] = _overhead(options, idle)
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps({"steps": steps, "overhead": overhead}))
    dist.barrier()
    dist.destroy_process_group()


def _idle_group() -> dist.ProcessGroup | None:
    """A group of all ranks whose collectives return at once and move nothing between them; None
    where torch has no such."""
    with contextlib.suppress(ImportError):  # of torch's own tests, so private
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        group: dist.ProcessGroup = dist.new_group(backend="fake")
        return group
    return None


def _steps(options: RanksBenchOptions, group: dist.ProcessGroup) -> dict[str, Loops]:
    """Of each contestant, the seconds of every step's phases."""
    ours = _tower(options)
    theirs = _tower(options)
    x = torch.randn(options.num_samples, options.width)
    with _sharded(ours, theirs, group):
        first = tiermem.AdamW(ours.parameters())
        second = torch.optim.AdamW(theirs.parameters(), fused=True)
        return _in_turn(
            options, tiermem=lambda: _step(ours, first, x), fsdp2=lambda: _step(theirs, second, x)
        )


def _step(model: nn.Module, optim: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, float]:
    _, seconds = timed(
        time.perf_counter, lambda: model(x).square().mean(), optim.step, optim.zero_grad
    )
    return seconds | {"whole": sum(seconds.values())}


def _overhead(options: RanksBenchOptions, group: dist.ProcessGroup) -> dict[str, Loops]:
    """Of each contestant, CPU seconds of this thread per unit in forward and in backward, beyond
    the plain modules'."""
    plain, ours, theirs = (Tower([Empty() for _ in range(options.num_empty)]) for _ in range(3))
    x = torch.randn(2, _EMPTY_NUMEL)
    with _sharded(ours, theirs, group):
        found = _in_turn(
            options,
            plain=lambda: _pass(plain, x),
            tiermem=lambda: _pass(ours, x),
            fsdp2=lambda: _pass(theirs, x),
        )
    bare = found.pop("plain")
    return {
        who: [
            {phase: (seconds[phase] - without[phase]) / options.num_empty for phase in _PASSES}
            for seconds, without in zip(loops, bare, strict=True)
        ]
        for who, loops in found.items()
    }


def _pass(model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    return timed(time.thread_time, lambda: model(x).sum(), model.zero_grad)[1]


def _in_turn(
    options: RanksBenchOptions, **contestants: Callable[[], dict[str, float]]
) -> dict[str, Loops]:
    """What each contestant gave in every loop; the first two loops learn the order and warm
    memory."""
    found: dict[str, Loops] = {name: [] for name in contestants}
    for _ in range(options.loops + _WARM_UP_LOOPS):
        for name, measure_once in contestants.items():
            dist.barrier()
            found[name].append(measure_once())
    return {name: loops[_WARM_UP_LOOPS:] for name, loops in found.items()}


def _tower(options: RanksBenchOptions) -> Tower:
    torch.manual_seed(0)
    return Tower([Block(options.width, nn.functional.gelu) for _ in range(options.num_blocks)])


@contextlib.contextmanager
def _sharded(ours: Tower, theirs: Tower, group: dist.ProcessGroup) -> Iterator[None]:
    """Within: one tower is sharded by tiermem. The other is sharded by FSDP2, also afterwards."""
    mesh = DeviceMesh.from_group(group, "cpu")
    with tiermem.shard(ours, OffloadPolicy(stage=3, persistence_numel=0), group=group):
        for layer in theirs.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(theirs, mesh=mesh)
        yield


# ---- the command ---------------------------------------------------------------------------------
#
# Both systems shard the same model over the same gloo processes and step in turn, so that a
# disturbance meets both; medians are compared.

_COLUMNS = (*PHASES, "whole")
_PASSES = ("forward", "backward")
_WAYS = {"python": "Python", "gloo": "with gloo"}
_MOST_US = 150
"""What we allow ourselves for the Python around a unit, in a forward and in a backward."""
_PATIENCE_S = 1800.0


def bench_ranks(options: RanksBenchOptions, console: Console) -> int:
    """Measures, prints and writes what was asked for; returns the exit status. Raises ValueError,
    OSError, RuntimeError."""
    start = time.monotonic()
    with console.status(f"stepping on {options.num_ranks} ranks"):
        measured = measure(options)
    report = options.report(machine_facts(), start, **summary(measured), loops=measured)
    print_report(report, console)
    options.save_json(report)
    return 0


def measure(options: RanksBenchOptions) -> dict[str, Any]:
    """Seconds of every loop, as rank 0 saw them. Blocks; raises RuntimeError when a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_processes(run_rank, (options, Path(folder)), options.num_ranks, join=False)
        assert ranks is not None
        deadline = time.monotonic() + _PATIENCE_S
        while not ranks.join(timeout=0.2):  # raises what a rank raised
            if time.monotonic() > deadline:
                for process in ranks.processes:
                    process.kill()
                raise RuntimeError(f"no answer from the ranks in {_PATIENCE_S:.0f} s")
        measured: dict[str, Any] = json.loads((Path(folder) / "measured.json").read_text())
        return measured


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians of the loops, and what they mean."""
    overhead = {
        way: _medians(contestants, 1e6) for way, contestants in measured["overhead"].items()
    }
    ratios = [
        ours["whole"] / theirs["whole"]
        for ours, theirs in zip(
            measured["steps"]["tiermem"], measured["steps"]["fsdp2"], strict=True
        )
    ]
    return {
        "step_s": _medians(measured["steps"]),
        "ratio": statistics.median(ratios),
        "overhead_us_per_unit_and_pass": overhead,
    }


def _medians(contestants: dict[str, Loops], scale: float = 1.0) -> dict[str, dict[str, float]]:
    return {
        who: {phase: statistics.median(loop[phase] for loop in loops) * scale for phase in loops[0]}
        for who, loops in contestants.items()
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Prints the medians as tables, and what they say."""
    options = report["options"]
    model = f"{options['num_blocks']} blocks of width {options['width']}"
    title = f"{options['num_ranks']} ranks, {model}: medians of {options['loops']} loops in turn"
    facts = caption(report["machine"])
    shown = table(title, "", *(f">{phase} ms" for phase in _COLUMNS), caption=facts)
    for who, seconds in report["step_s"].items():
        shown.add_row(who, *(f"{seconds[phase] * 1e3:.2f}" for phase in _COLUMNS))
    console.print(shown)
    console.print(
        f"a step of ours takes {report['ratio']:.3f} of FSDP2's (median of ratios, loop by loop)"
    )
    _print_overhead(report["overhead_us_per_unit_and_pass"], options["num_empty"], console)


def _print_overhead(overhead: dict[str, Any], num_units: int, console: Console) -> None:
    title = f"CPU microseconds per unit and pass, of {num_units} units, beyond the plain modules'"
    ways = [way for way in _WAYS if way in overhead]
    shown = table(title, "", *(f">{_WAYS[way]}, {each}" for way in ways for each in _PASSES))
    for who in overhead["gloo"]:
        shown.add_row(who, *(f"{overhead[way][who][each]:.0f}" for way in ways for each in _PASSES))
    console.print(shown)
    if "python" in overhead:
        ours = overhead["python"]["tiermem"]
        is_met = all(ours[each] <= _MOST_US for each in _PASSES)
        console.print(
            f"Python around a unit of ours: {ours['forward']:.0f} us forward, "
            f"{ours['backward']:.0f} us backward: "
            f"{'within' if is_met else 'more than'} the {_MOST_US} us that we allow"
        )
    else:
        console.print("this torch has no group that moves nothing: Python alone was not measured")
