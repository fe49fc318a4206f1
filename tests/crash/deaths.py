"""Deaths: runs are killed, their disk may forget what was not synced, and they are opened again.

    reference    the run that nobody kills: its losses and its last digest, and how many durable steps it goes through
    case         a run is killed at one of these steps, before or after it, or at a random moment; then the power may fail;
                 then another run opens what is left and trains to the end (and may be killed as well, first)

Every loss that any of them says must be the reference's, to the bit, and so the digest at the end; a run must open the last
state that was said to be durable, or a later one. Runs are forks of one process that has imported everything and computed
nothing, so that a case takes a fraction of a second.

    python deaths.py FOLDER --count 300 --seed 1 --totals totals.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch.optim imports it when first used: here once, not in every run
import torch.distributed as dist

import tiermem.engine
import tiermem.optim  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent))
from power import Disk, Loss
from small_run import Plan, lines_of, train

from tiermem.swap import durable

_LONGEST_S = 60.0
Body = Callable[[Path, Plan, int], None]


class Death(NamedTuple):
    """When a rank is killed: at one of its durable steps, or so long after its start."""

    rank: int
    at: int | None = None
    when: str = "before"
    after_s: float = 0.0


class Case(NamedTuple):
    """One run and all that happens to it."""

    plan: Plan
    num_ranks: int
    deaths: tuple[Death, ...]
    loss: Loss | None


class Reference(NamedTuple):
    """What a run says that nobody kills."""

    losses: list[dict[int, str]]  # by rank
    end: str
    num_steps: list[int]  # durable ones, by rank
    seconds: float


def refer(plan: Plan, num_ranks: int, folder: Path) -> Reference:
    """Runs once, undisturbed."""
    place, start = fresh(folder / "reference"), time.monotonic()
    how = run_ranks(place, plan, num_ranks)
    assert how == ["ended"] * num_ranks, f"the reference run of {plan} ended as {how}"
    said = [lines_of(place / f"said.{rank}") for rank in range(num_ranks)]
    losses = [{line["step"]: line["loss"] for line in lines if "step" in line} for lines in said]
    counts = [int((place / f"steps.{rank}").read_text()) for rank in range(num_ranks)]
    return Reference(losses, said[0][-1]["end"], counts, time.monotonic() - start)


def run_case(case: Case, reference: Reference, folder: Path, chance: random.Random) -> str:
    """Goes through a case; returns how the first run ended. Raises AssertionError with what went wrong."""
    place = fresh(folder / "case")
    first = ""
    for death in (*case.deaths, None):
        shutil.rmtree(folder / "notes", ignore_errors=True)
        disk = Disk([place / "nvme", place / "saved"], folder / "notes") if case.loss else None
        how = run_ranks(place, case.plan, case.num_ranks, death, disk)
        first = first or ("killed" if "killed" in how else "ended")
        if death is not None and "killed" in how:
            if disk is not None and case.loss is not None:
                disk.fail(case.loss, chance)
            for rank in range(case.num_ranks):
                (place / f"said.{rank}").open("a").write('{"died": 1}\n')
            continue
        assert how == ["ended"] * case.num_ranks, f"{case}: ranks {how}\n" + errors_of(place)
        break
    _check_said(case, reference, place)
    _check_left(case, place)
    return first


def _check_said(case: Case, reference: Reference, place: Path) -> None:
    for rank in range(case.num_ranks):
        lines = lines_of(place / f"said.{rank}")
        is_durable = 0
        for line in lines:
            if "step" in line:
                expected = reference.losses[rank][line["step"]]
                assert line["loss"] == expected, f"{case}: rank {rank}, {line}, not {expected}\n{lines}"
            if "opened" in line:
                assert line["opened"] >= is_durable, f"{case}: step {is_durable} was durable; opened {line}\n{lines}"
            is_durable = max(is_durable, line.get("durable", 0))
        assert lines[-1].get("end") == reference.end, f"{case}: rank {rank} ended with {lines[-1]}"


def _check_left(case: Case, place: Path) -> None:
    """No more runs' states are left than `keep` asks for, and one for each that died before it could be found by its tag."""
    saved = [folder for folder in (place / "nvme").iterdir() if list(folder.glob("manifest-*.json"))]
    most = case.plan.keep + (case.plan.durability == "step") + len(case.deaths)
    assert len(saved) <= most, f"{case}: {len(saved)} runs' states are kept: {[folder.name for folder in saved]}"
    closed = [folder for folder in saved if case.loss is None and not (folder / "lock").exists()]
    odd = [str(file) for folder in (place / "saved", *closed) for file in folder.rglob("*.new")]
    assert not odd, f"{case}: left behind: {odd}"


def run_ranks(
    place: Path,
    plan: Plan,
    num_ranks: int,
    death: Death | None = None,
    disk: Disk | None = None,
    body: Body = train,
) -> list[str]:
    """Runs until every rank has ended; says how each did: "ended", "raised", "killed"."""
    port = _free_port()
    pids = [_fork(place, plan, rank, num_ranks, port, death, disk, body) for rank in range(num_ranks)]
    ended: dict[int, int] = {}
    deadline, started = time.monotonic() + _LONGEST_S, time.monotonic()
    while len(ended) < num_ranks:
        for rank, pid in enumerate(pids):
            if rank not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[rank] = status
                    if os.WIFSIGNALED(status):  # the power of all, or the patience of a launcher
                        deadline = min(deadline, time.monotonic() + (0.0 if disk is not None else 0.3))
        if death is not None and death.at is None and time.monotonic() - started > death.after_s:
            _kill(pids, ended)
        if time.monotonic() > deadline:
            _kill(pids, ended)
        time.sleep(0.002)
    return [_word(ended[rank]) for rank in range(num_ranks)]


def _kill(pids: list[int], ended: dict[int, int]) -> None:
    for rank, pid in enumerate(pids):
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)


def _word(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "killed"
    return "raised" if os.WEXITSTATUS(status) else "ended"


def _fork(
    place: Path, plan: Plan, rank: int, num_ranks: int, port: int, death: Death | None, disk: Disk | None, body: Body
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        errors = os.open(place / f"errors.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        with _watched(place, rank, death, disk), _ranks(rank, num_ranks, port):
            body(place, plan, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _watched(place: Path, rank: int, death: Death | None, disk: Disk | None) -> Iterator[None]:
    """Counts durable steps, notes what is synced, and dies where it is told to."""
    count = 0

    def look(step: durable.Step) -> None:
        nonlocal count
        if disk is not None and step.when == "after" and step.kind == "sync":
            disk.synced(Path(step.name))
        is_mine = death is not None and death.at is not None and death.rank == rank
        if is_mine and death is not None and count == death.at and step.when == death.when:
            os.kill(os.getpid(), signal.SIGKILL)
        count += step.when == "after"

    with durable.watch(look):
        yield
    (place / f"steps.{rank}").write_text(str(count))


@contextlib.contextmanager
def _ranks(rank: int, num_ranks: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    if num_ranks == 1:
        yield
        return
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=_LONGEST_S))
    yield
    dist.destroy_process_group()


def fresh(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    for name in ("nvme", "saved"):
        (place / name).mkdir(parents=True)
    return place


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def errors_of(place: Path) -> str:
    return "\n".join(f"{file.name}: {file.read_text()[-3000:]}" for file in sorted(place.glob("errors.*")))


# ---- many of them -------------------------------------------------------------------------------------------------------

PLANS = (
    Plan(),
    Plan(durability="step", save_every=0),
    Plan(durability="step", save_every=3, keep=2, precision="tiny"),
    Plan(copies=True, precision="exact", save_every=1, num_steps=4),
    Plan(keep=2, save_every=1, num_steps=4, tile_numel=8192),
)


def every_step(plan: Plan, num_ranks: int, reference: Reference) -> Iterator[Case]:
    """A death before and one after every durable step of every rank; two of three are power failures."""
    losses: Iterator[Loss | None] = itertools.cycle((None, "all", "some"))
    for rank in range(num_ranks):
        for at in range(reference.num_steps[rank]):
            for when in ("before", "after"):
                yield Case(plan, num_ranks, (Death(rank, at, when),), next(losses))


def at_random(plan: Plan, num_ranks: int, reference: Reference, chance: random.Random) -> Iterator[Case]:
    """Deaths at any moment, some of them twice in a row, while training, saving or opening."""
    while True:
        deaths = [
            Death(chance.randrange(num_ranks), after_s=chance.uniform(0.0, reference.seconds))
            for _ in range(chance.choice((1, 1, 2)))
        ]
        yield Case(plan, num_ranks, tuple(deaths), chance.choice((None, "all", "some")))


def main() -> None:
    """Runs what it is asked for, and writes the seed and the totals."""
    args = _arguments()
    chance, totals = random.Random(args.seed), Counter[str]()
    args.folder.mkdir(parents=True, exist_ok=True)
    for plan in PLANS[: args.plans]:
        for num_ranks in args.ranks:
            reference = refer(plan, num_ranks, args.folder)
            known = list(every_step(plan, num_ranks, reference))
            if args.share < 1:
                known = chance.sample(known, max(1, int(len(known) * args.share)))
            moments = at_random(plan, num_ranks, reference, chance)
            for case in [*known, *(next(moments) for _ in range(args.count))]:
                kind = "at a step" if case.deaths[0].at is not None else "at a moment"
                how = run_case(case, reference, args.folder, chance)
                totals[f"{num_ranks} ranks, {kind}, power {case.loss or 'stays'}: {how}"] += 1
    said: dict[str, Any] = {"seed": args.seed, "cases": sum(totals.values()), "totals": dict(totals)}
    args.totals.write_text(json.dumps(said, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--totals", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--plans", type=int, default=len(PLANS))
    parser.add_argument(
        "--count", type=int, default=100, help="deaths at random moments for each plan and number of ranks"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the deaths at known steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
