"""Forked ranks: many small worlds at once, each of a few ranks, from one process that has imported
everything already.

    run_worlds({"name": World(body, num_ranks)}, folder)  ->  {"name": [Ended, one per rank]}

A rank is a fork: it joins its world (gloo), runs `body(rank, folder)` and reports how it ended:
what it raised, and which descriptors and threads are left behind by then. A rank that has not ended
in time is killed and reported as hung. Nothing of torch has run in the parent, so that a fork has
no threads to miss.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.optim imports it when first used: here once, not in every rank
import torch.distributed as dist
from forks import forked, free_port

import tiermem.engine
import tiermem.optim  # noqa: F401

_LONGEST_S = 90.0
_LASTING = ("pt_autograd", "pt_", "OMP", "libgomp")  # threads that torch keeps
Body = Callable[[int, Path], Any]


class World(NamedTuple):
    """What the ranks of one world run."""

    body: Body
    num_ranks: int = 2


class Ended(NamedTuple):
    """How a rank ended."""

    how: str
    """"returned", "raised", "killed" or "hung"."""
    kind: str
    """The class of what it raised."""
    message: str
    """Its words."""
    trace: str
    """Where that was."""
    left: list[str]
    """Descriptors and threads that it left behind."""
    result: Any
    """What the body returned."""


def run_worlds(worlds: Mapping[str, World], folder: Path) -> dict[str, list[Ended]]:
    """Runs all worlds at once; returns when every rank has ended."""
    deadline = time.monotonic() + _LONGEST_S
    pids = {}
    for number, (name, world) in enumerate(worlds.items()):
        port, place = free_port(), folder / str(number)
        (place / "nvme").mkdir(parents=True)
        pids[name] = [
            forked(functools.partial(_be_a_rank, rank, world, port, place))
            for rank in range(world.num_ranks)
        ]
    return {
        name: [
            _ended(pid, folder / str(number) / f"{rank}.json", deadline)
            for rank, pid in enumerate(pids[name])
        ]
        for number, name in enumerate(worlds)
    }


def die() -> None:
    """Ends this rank as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _be_a_rank(rank: int, world: World, port: int, place: Path) -> None:
    torch.set_num_threads(1)
    stacks = (place / f"{rank}.stacks").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world.num_ranks),
        "LOCAL_WORLD_SIZE": str(world.num_ranks),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = _held()
    said: dict[str, Any] = {
        "how": "returned",
        "kind": "",
        "message": "",
        "trace": "",
        "result": None,
    }
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        # of the rendezvous server, which torch keeps
        before |= {each for each in _held() if "pipe:" in each}
        said["result"] = world.body(rank, place / "nvme")
    except Exception as error:
        said |= {
            "how": "raised",
            "kind": type(error).__name__,
            "message": str(error),
            "trace": traceback.format_exc(),
        }
        error.__traceback__ = None  # frames hold tensors and stores
    dist.destroy_process_group()
    said["left"] = _left(before)
    (place / f"{rank}.json").write_text(json.dumps(said))


def _ended(pid: int, report: Path, deadline: float) -> Ended:
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            return _hung(pid, report.with_suffix(".stacks"))
        time.sleep(0.01)
    return (
        Ended(**json.loads(report.read_text()))
        if report.exists()
        else Ended("killed", "", "", "", [], None)
    )


def _hung(pid: int, stacks: Path) -> Ended:
    """Kills a rank that does not end; its trace is where its threads were."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return Ended("hung", "", "", stacks.read_text() if stacks.exists() else "", [], None)


def _left(before: set[str]) -> list[str]:
    """What is held now and was not before; looked at for a moment, because the kernel ends some
    threads a little later."""
    gc.collect()
    deadline = time.monotonic() + 3.0
    while (left := _held() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(left)


def _held() -> set[str]:
    return {
        f"descriptor {fd}: {_name(f'/proc/self/fd/{fd}')}"
        for fd in os.listdir("/proc/self/fd")
        if _exists(fd)
    } | {f"thread {tid}: {name}" for tid in os.listdir("/proc/self/task") if (name := _thread(tid))}


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _name(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def _thread(tid: str) -> str:
    try:
        name = Path(f"/proc/self/task/{tid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if name.startswith(_LASTING) or tid == str(os.getpid()) else name
