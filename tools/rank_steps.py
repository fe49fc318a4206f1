"""What each rank of `tiermem bench ranks` runs: the same model sharded twice, by tiermem and by FSDP2, stepped in turn.

    steps      forward, backward and optimizer of a tower of blocks; each loop is one step of ours, then one of theirs
    overhead   forward and backward of units that compute next to nothing: seconds of this thread's CPU beyond the same
               modules unsharded, per unit and pass, each loop one pass of the plain modules, of ours and of theirs
                 python   over a group whose collectives return at once and move nothing: what the Python around a unit costs
                 gloo     the same with gloo's calls

A script for torch.multiprocessing: `run_rank` is called in every process. Imports torch.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tiermem
from tiermem import OffloadPolicy
from tiermem.zero.ranks.joining import hold_no_group

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
