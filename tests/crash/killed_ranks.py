"""KilledRanks: a run of one or several ranks, each a fork of this process, that may be killed on
the way.

    at a step      a rank kills itself before or after one of its durable steps (tiermem.swap.disk.durable): at a turn, by
    number at a moment    so long after a phase of a rank has begun: opening, training, saving, ending

Forks are of a process that has imported everything and computed nothing, so that a run takes a
fraction of a second. Ranks share one page of memory in which each writes the phase that it is in,
so that whoever kills knows what was hit.

    <place>/turns.<rank>     its turns: "before sync of manifest-N.json.new"     <place>/errors.<rank>    what it has printed
    <place>/phases.<rank>    its phases and when they began, in seconds
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import mmap
import os
import re
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # torch.optim imports it when first used: here once, not in every run
import torch.distributed as dist

import tiermem.engine
import tiermem.optim  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from forks import forked, free_port
from power import Disk
from small_run import PHASES, Plan

from tiermem.swap.disk import durable

_LONGEST_S = 60.0
_PATIENCE_S = 0.2  # that a launcher has with ranks whose neighbour is gone
Begin = Callable[[str], None]
Body = Callable[[Path, Plan, int, Begin], None]


class Death(NamedTuple):
    """When a rank is killed (None: all of them): at one of its turns, or so long after the nth time
    of a phase."""

    rank: int | None = None
    at: int | None = None
    phase: str = PHASES[0]
    nth: int = 0
    after_s: float = 0.0


class Ended(NamedTuple):
    """How a run has ended."""

    how: list[str]  # by rank: "ended", "raised", "killed"
    phase: str  # in which the rank that was to be killed was then
    turn: str  # at which it was killed; empty: at none

    @property
    def is_killed(self) -> bool:
        """Whether any rank was."""
        return "killed" in self.how


def run_ranks(
    place: Path,
    plan: Plan,
    num_ranks: int,
    body: Body,
    death: Death | None = None,
    disk: Disk | None = None,
) -> Ended:
    """Runs until every rank has ended. Blocks."""
    with _Phases(num_ranks) as phases:
        port = free_port()
        pids = []
        for rank in range(num_ranks):
            act = functools.partial(
                _be_a_rank, place, plan, rank, num_ranks, port, death, disk, body, phases
            )
            pids.append(forked(act, place / f"errors.{rank}"))
        ended = _watch(pids, phases, death, disk is not None)
        dying = 0 if death is None or death.rank is None else death.rank
        turn = place / f"died.{dying}"
        how = [_word(ended[rank]) for rank in range(num_ranks)]
        found = Ended(how, phases.of(dying), turn.read_text() if turn.exists() else "")
    turn.unlink(missing_ok=True)
    return found


def fresh(place: Path) -> Path:
    """An empty place with what a run expects below it."""
    shutil.rmtree(place, ignore_errors=True)
    for name in ("nvme", "saved"):
        (place / name).mkdir(parents=True)
    return place


def errors_of(place: Path) -> str:
    """What ranks have printed."""
    return "\n".join(
        f"{file.name}: {file.read_text()[-3000:]}" for file in sorted(place.glob("errors.*"))
    )


def turns_of(place: Path, rank: int) -> list[str]:
    """Before and after each durable step of the last run that ended by itself, in order."""
    return (place / f"turns.{rank}").read_text().splitlines()


def phases_of(place: Path, rank: int) -> list[tuple[str, float]]:
    """The phases of the last run that ended by itself, each with how long it took, in order."""
    began = json.loads((place / f"phases.{rank}").read_text())
    return [(phase, stop - start) for (phase, start), (_, stop) in itertools.pairwise(began)]


class _Phases:
    """The phase of each rank and how often each one has begun, in memory that forks share. Use it
    in a `with` block."""

    def __init__(self, num_ranks: int) -> None:
        self._shared = mmap.mmap(-1, mmap.PAGESIZE * num_ranks)

    def __enter__(self) -> _Phases:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.close()

    def begin(self, rank: int, phase: str) -> None:
        """A rank goes into a phase."""
        number = PHASES.index(phase)
        self._put(rank, 1 + number, self._get(rank, 1 + number) + 1)
        self._put(rank, 0, number)

    def of(self, rank: int) -> str:
        """The phase that a rank is in; the first one before it has begun any."""
        return PHASES[self._get(rank, 0)]

    def count(self, rank: int, phase: str) -> int:
        """How often a rank has begun a phase."""
        return self._get(rank, 1 + PHASES.index(phase))

    def _get(self, rank: int, index: int) -> int:
        return int(struct.unpack_from("i", self._shared, mmap.PAGESIZE * rank + 4 * index)[0])

    def _put(self, rank: int, index: int, value: int) -> None:
        struct.pack_into("i", self._shared, mmap.PAGESIZE * rank + 4 * index, value)


def _watch(
    pids: list[int], phases: _Phases, death: Death | None, fails_power: bool
) -> dict[int, int]:
    """Waits for all ranks and kills who is to die; returns each one's status."""
    ended: dict[int, int] = {}
    deadline, kills_at = time.monotonic() + _LONGEST_S, None
    while len(ended) < len(pids):
        for rank, pid in enumerate(pids):
            found, status = (0, 0) if rank in ended else os.waitpid(pid, os.WNOHANG)
            if found:
                ended[rank] = status
                if os.WIFSIGNALED(status):  # the power of all, or the patience of a launcher
                    deadline = min(
                        deadline, time.monotonic() + (0.0 if fails_power else _PATIENCE_S)
                    )
        now = time.monotonic()
        if death is not None and death.at is None:
            if kills_at is None and phases.count(death.rank or 0, death.phase) > death.nth:
                kills_at = now + death.after_s
            if kills_at is not None and now >= kills_at:
                _kill(
                    pids if death.rank is None else pids[death.rank : death.rank + 1],
                    [pids[rank] for rank in ended],
                )
        if now > deadline:
            _kill(pids, [pids[rank] for rank in ended])
        time.sleep(0.001)
    return ended


def _kill(pids: list[int], ended: list[int]) -> None:
    for pid in pids:
        if pid not in ended:
            os.kill(pid, signal.SIGKILL)


def _word(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "killed"
    return "raised" if os.WEXITSTATUS(status) else "ended"


def _be_a_rank(
    place: Path,
    plan: Plan,
    rank: int,
    num_ranks: int,
    port: int,
    death: Death | None,
    disk: Disk | None,
    body: Body,
    phases: _Phases,
) -> None:
    with (
        _noted(place, rank, phases) as begin,
        _watched(place, rank, death, disk, begin),
        _ranks(rank, num_ranks, port),
    ):
        body(place, plan, rank, begin)


def in_fork(place: Path, act: Callable[[], int]) -> int:
    """Does something in a fork of its own, which prints to errors.0; returns the exit status,
    RAISED after an exception."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(act, place / "errors.0"), 0)[1])


@contextlib.contextmanager
def _noted(place: Path, rank: int, phases: _Phases) -> Iterator[Begin]:
    """Takes note of the phases of this rank."""
    began: list[tuple[str, float]] = []

    def begin(phase: str) -> None:
        if not began or began[-1][0] != phase:
            phases.begin(rank, phase)
            began.append((phase, time.monotonic()))

    yield begin
    (place / f"phases.{rank}").write_text(json.dumps([*began, ("", time.monotonic())]))


@contextlib.contextmanager
def _watched(
    place: Path, rank: int, death: Death | None, disk: Disk | None, begin: Begin
) -> Iterator[None]:
    """Counts turns, notes what is synced, and dies where it is told to."""
    names: list[str] = []
    at = death.at if death is not None and death.rank == rank else None

    def look(step: durable.Step) -> None:
        if step.kind == "freeze":  # also within a training step
            begin("saving")
        if disk is not None:
            disk.saw(step)
        names.append(f"{step.when} {named(step)}")
        if at is not None and len(names) > at:
            (place / f"died.{rank}").write_text(names[at])
            os.kill(os.getpid(), signal.SIGKILL)

    with durable.watch(look):
        yield
    (place / f"turns.{rank}").write_text("\n".join(names))


def named(step: durable.Step) -> str:
    """What a step does, without what differs from run to run: "sync of part-N-N.json.new"."""
    if step.kind in ("slot", "freeze", "thaw"):
        return step.kind
    name = re.sub(f"^{durable.NEW_PREFIX}", "", Path(step.name).name)
    name = re.sub(r"\d+", "N", re.sub(r"(?<=-)[0-9a-f]{12}", "ID", name))
    return f"{step.kind} of {name}"


@contextlib.contextmanager
def _ranks(rank: int, num_ranks: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    if num_ranks == 1:
        yield
        return
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LONGEST_S))
    yield
    dist.destroy_process_group()
