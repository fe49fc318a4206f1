"""Deaths: runs are killed, their disk may forget what was not synced, and they are opened again.

    scene        what a run begins with: a fresh folder, or what one has left that was killed in its last save
    reference    the run that nobody kills, of each scene: its losses, its last digest, its turns (before and after each of its
                 durable steps), its phases
    case         a run is killed at one of these turns, or at a random moment of a phase; then the power may fail; then what is
                 left is verified, and another run opens it and trains to the end (and may be killed
                 first, too)

Every loss that any of them says must be the reference's, to the bit, and so the digest at the end;
a run must open the last state that was said to be durable, or a later one; every manifest that a
death leaves must speak of whole states. A case's chances are those of its number and the seed, so
that it can be run alone.

    python deaths.py FOLDER --count 100 --seed 1 --totals totals.json [--only 1234 --workers 1]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import sabotage
from forks import forked
from killed_ranks import Death, Ended, errors_of, fresh, in_fork, phases_of, run_ranks, turns_of
from power import Disk, Loss
from small_run import PHASES, Plan, lines_of, train

from tiermem.checkpoint.survey import survey

Scene = Literal["fresh", "left"]
_DIED = '{"died": 1}\n'

PLANS = (
    Plan(),
    Plan(durability="step", save_every=0, num_steps=3),
    Plan(durability="step", save_every=1, keep=2, precision="tiny", num_steps=3, overlap="none"),
    Plan(copies=True, precision="exact", save_every=1, num_steps=3),
    Plan(keep=2, save_every=1, num_steps=3, tile_numel=8192),
    # undoes one step
    Plan(durability="step", save_every=0, num_steps=8, overlap="backward", clipping=100.0, steep=5),
    Plan(
        save_every=3,
        num_steps=8,
        overlap="backward",
        clipping=100.0,
        steep=5,
        precision="exact",
        params="cpu",
    ),
    # weights go to a file of the commit
    Plan(durability="step", save_every=3, keep=2, num_steps=7, params="cpu"),
)


class Case(NamedTuple):
    """One run and all that happens to it."""

    plan: Plan
    num_ranks: int
    scene: Scene
    deaths: tuple[Death, ...]
    loss: Loss | None


class Reference(NamedTuple):
    """What a run says that nobody kills, by rank."""

    losses: list[dict[int, str]]
    end: str
    turns: list[list[str]]
    phases: list[list[tuple[str, float]]]  # each with seconds
    dies_at: int  # the turn of the run that has left something

    def has(self, phase: str) -> bool:
        """Whether every rank comes to a phase."""
        return all(phase in dict(of_rank) for of_rank in self.phases)


def refer(plan: Plan, num_ranks: int, scene: Scene, folder: Path, dies_at: int) -> Reference:
    """Runs once, undisturbed."""
    place = set_out(plan, num_ranks, scene, folder, dies_at)
    ended = run_ranks(place, plan, num_ranks, train)
    assert ended.how == ["ended"] * num_ranks, (
        f"the reference run of {plan} ended as {ended}\n{errors_of(place)}"
    )
    said = [lines_of(place / f"said.{rank}") for rank in range(num_ranks)]
    losses = [{line["step"]: line["loss"] for line in lines if "step" in line} for lines in said]
    turns = [turns_of(place, rank) for rank in range(num_ranks)]
    phases = [phases_of(place, rank) for rank in range(num_ranks)]
    return Reference(losses, said[0][-1]["end"], turns, phases, dies_at)


def set_out(plan: Plan, num_ranks: int, scene: Scene, folder: Path, dies_at: int) -> Path:
    """The place that a case begins with. What a killed run leaves is made once, for pointers are
    absolute in each folder.

    dies_at: the turn at which that run is killed.
    """
    place, left = fresh(folder / "case"), folder / f"left-{PLANS.index(plan)}-{num_ranks}"
    if scene == "fresh":
        return place
    if not left.exists():
        ended = run_ranks(place, plan, num_ranks, train, Death(0, dies_at))
        assert ended.is_killed and list(place.glob("*/*/*manifest*")), (
            f"{plan}: {ended}\n{errors_of(place)}"
        )
        _mark_dead(place, num_ranks)
        shutil.copytree(place, left)
        return place
    shutil.copytree(left, place, dirs_exist_ok=True)
    return place


def last_save(plan: Plan, reference: Reference) -> int:
    """The turn at which the last training step begins to be saved."""
    freezes = [at for at, turn in enumerate(reference.turns[0]) if turn == "before freeze"]
    # a step, and then its tag
    return freezes[-2 if plan.durability == "step" and plan.save_every else -1]


def run_case(case: Case, reference: Reference, folder: Path, chance: random.Random) -> list[Ended]:
    """Goes through a case; returns how the runs before the last one ended. Raises AssertionError
    with what went wrong."""
    place = set_out(case.plan, case.num_ranks, case.scene, folder, reference.dies_at)
    before, found = set[str](), list[Ended]()
    for death in (*case.deaths, None):
        shutil.rmtree(folder / "notes", ignore_errors=True)
        before = {each.name for each in (place / "nvme").iterdir()}
        disk = (
            Disk([place / "nvme", place / "saved"], folder / "notes")
            if case.loss and death
            else None
        )
        ended = run_ranks(place, case.plan, case.num_ranks, train, death, disk)
        if death is None or not ended.is_killed:
            assert ended.how == ["ended"] * case.num_ranks, f"ranks {ended}\n{errors_of(place)}"
            found += [ended] if death else []
            break
        found.append(ended)
        if disk is not None and case.loss is not None:
            disk.fail(case.loss, chance)
        _mark_dead(place, case.num_ranks)
        _check_whole(place)
    _check_said(case, reference, place)
    _check_left(case, before, place)
    return found


def _mark_dead(place: Path, num_ranks: int) -> None:
    for rank in range(num_ranks):
        with (place / f"said.{rank}").open("a") as said:
            said.write(_DIED)


def _check_whole(place: Path) -> None:
    """What looks like a durable step in the stores is one, to the last byte."""

    def look() -> int:
        wrong = [
            each for each in survey(place / "nvme", verifies=True).steps if each.state != "whole"
        ]
        print(*wrong, sep="\n")
        return len(wrong)

    assert in_fork(place, look) == 0, f"something that is not whole was left:\n{errors_of(place)}"


def _check_said(case: Case, reference: Reference, place: Path) -> None:
    for rank in range(case.num_ranks):
        lines = lines_of(place / f"said.{rank}")
        is_durable = 0
        for line in lines:
            if "step" in line:
                expected = reference.losses[rank][line["step"]]
                assert line["loss"] == expected, f"rank {rank}, {line}, not {expected}\n{lines}"
            if "opened" in line:
                assert line["opened"] >= is_durable, (
                    f"step {is_durable} was durable; opened {line}\n{lines}"
                )
            is_durable = max(is_durable, line.get("durable", 0))
        assert lines[-1].get("end") == reference.end, f"rank {rank} ended with {lines[-1]}"


def _check_left(case: Case, before: set[str], place: Path) -> None:
    """No more runs' states are left than `keep` asks for, and one for each that died before it
    could be found by its tag.

    before: the folders that were there when the last run began: killed ones may leave what they
        were writing.
    """
    runs = list((place / "nvme").iterdir())
    saved = {
        folder.name.partition(".")[0] for folder in runs if list(folder.glob("manifest-*.json"))
    }
    num_deaths = len(case.deaths) + (case.scene == "left")
    most = case.plan.keep + (case.plan.durability == "step") + num_deaths
    assert len(saved) <= most, f"{len(saved)} runs' states are kept: {sorted(saved)}"
    closed = [folder for folder in runs if folder.name not in before]
    odd = [
        str(file)
        for folder in closed
        for file in folder.iterdir()
        if file.name == "lock" or file.suffix == ".new"
    ]
    odd += [str(file) for file in (place / "saved").rglob("*.new")][num_deaths:]
    assert not odd, f"left behind: {odd}"


# ---- many of them --------------------------------------------------------------------------------


def every_turn(plan: Plan, num_ranks: int, scene: Scene, reference: Reference) -> Iterator[Case]:
    """A death at every turn of every rank. After a sync all that was not synced is lost."""
    losses: Iterator[Loss | None] = itertools.cycle((None, "some", "all"))
    for rank in range(num_ranks):
        for at, turn in enumerate(reference.turns[rank]):
            loss = "all" if turn.startswith("after sync") else next(losses)
            yield Case(plan, num_ranks, scene, (Death(rank, at),), loss)


def at_random(
    plan: Plan,
    num_ranks: int,
    count: int,
    references: dict[Scene, Reference],
    chance: random.Random,
) -> Iterator[Case]:
    """Deaths at any moment of a phase, of each of its phases but the last as many; one in four dies
    once more, opening."""
    phases = [each for each in PHASES[:-1] if references["fresh"].has(each)]
    for number in range(count):
        phase = phases[number % len(phases)]
        scenes: list[Scene] = [
            each for each, reference in references.items() if reference.has(phase)
        ]
        scene: Scene = "left" if phase == "opening" else chance.choice(scenes)
        deaths = [_moment(phase, num_ranks, references[scene], chance)]
        if chance.random() < 0.25:
            deaths.append(_moment("opening", num_ranks, references["left"], chance))
        losses: tuple[Loss | None, ...] = (None, "all", "some")
        yield Case(plan, num_ranks, scene, tuple(deaths), chance.choice(losses))


def _moment(phase: str, num_ranks: int, reference: Reference, chance: random.Random) -> Death:
    rank = chance.choice((None, *range(num_ranks)))
    lengths = [seconds for each, seconds in reference.phases[rank or 0] if each == phase]
    nth = chance.randrange(len(lengths))
    return Death(rank, phase=phase, nth=nth, after_s=chance.uniform(0.0, lengths[nth]))


class Totals:
    """What has been done, counted; adds up over workers."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("cases", "moments", "turns")
        }
        self.failures: list[str] = []

    def add(self, case: Case, found: list[Ended]) -> None:
        """Counts a case that went well."""
        ranks = f"{case.num_ranks} rank" + "s" * (case.num_ranks > 1)
        power = {
            None: "power stays",
            "all": "all that is not synced is lost",
            "some": "some of it is lost",
        }[case.loss]
        kind = "at a turn" if case.deaths[0].at is not None else "at a moment"
        self.counts["cases"][f"{ranks}, {case.scene} folder, {kind}, {power}"] += 1
        for death, ended in zip(case.deaths, found, strict=False):
            where = (
                f"{ranks}, {ended.phase}"
                if ended.is_killed
                else f"{ranks}, ended before it was to die"
            )
            if death.at is None:
                self.counts["moments"][where] += 1
            else:
                self.counts["turns"][f"{ranks}, {ended.turn or 'ended before it'}"] += 1

    def write(self, file: Path) -> None:
        """Writes what has been counted."""
        file.write_text(json.dumps({"counts": self.counts, "failures": self.failures}))

    def merge(self, file: Path) -> None:
        """Adds what a worker has written."""
        told = json.loads(file.read_text())
        for name, counts in told["counts"].items():
            self.counts[name].update(counts)
        self.failures += told["failures"]


def cases_of(args: argparse.Namespace) -> Iterator[tuple[int, Case, Reference]]:
    """Every case, with its number; runs the references on the way."""
    numbers = itertools.count()
    for plan in (PLANS[number] for number in args.plans):
        for num_ranks in args.ranks:
            chance = random.Random(f"{args.seed} {plan} {num_ranks}")
            first = refer(plan, num_ranks, "fresh", args.folder, 0)
            second = refer(plan, num_ranks, "left", args.folder, last_save(plan, first))
            references: dict[Scene, Reference] = {"fresh": first, "left": second}
            for scene, reference in references.items():
                known = list(every_turn(plan, num_ranks, scene, reference))
                known = (
                    chance.sample(known, max(1, int(len(known) * args.share)))
                    if args.share < 1
                    else known
                )
                yield from zip(numbers, known, itertools.repeat(reference))
            for case in at_random(plan, num_ranks, args.count, references, chance):
                yield next(numbers), case, references[case.scene]


def work(
    args: argparse.Namespace, cases: Iterable[tuple[int, Case, Reference]], folder: Path
) -> None:
    """Goes through cases; a failure is noted, and the next one follows. Says now and then how far
    it is."""
    totals, started = Totals(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    for done, (number, case, reference) in enumerate(cases):
        if done % 100 == 0:
            totals.write(folder / "totals")
            print(f"{folder.name}: {done} cases in {time.monotonic() - started:.0f} s", flush=True)
        try:
            totals.add(
                case, run_case(case, reference, folder, random.Random(f"{args.seed} {number}"))
            )
        except Exception:  # one of a thousand: the others are to be known as well
            totals.failures.append(
                f"seed {args.seed}, case {number}: {case}\n{traceback.format_exc()[-6000:]}"
            )
            print(totals.failures[-1], file=sys.stderr, flush=True)
            if args.sabotage:  # that is what was to be seen
                break
    totals.write(folder / "totals")


def main() -> int:
    """Runs what it is asked for, in several processes, and writes the seed and the totals."""
    args = _arguments()
    started, totals = time.monotonic(), Totals()
    args.folder = args.folder / "deaths"
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    if args.sabotage:
        sabotage.WAYS[args.sabotage]()
    cases = [each for each in cases_of(args) if not args.only or each[0] in args.only]
    pids = []
    for worker in range(args.workers):
        folder = args.folder / f"worker-{worker}"
        pids.append(forked(functools.partial(work, args, cases[worker :: args.workers], folder)))
    for worker, pid in enumerate(pids):
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise RuntimeError(
                f"worker {worker} has ended before its time: what it printed says why"
            )
        totals.merge(args.folder / f"worker-{worker}" / "totals")
    said = {
        "seed": args.seed,
        "seconds": round(time.monotonic() - started),
        "failed": len(totals.failures),
    }
    sorted_counts = {name: dict(sorted(counts.items())) for name, counts in totals.counts.items()}
    args.totals.write_text(json.dumps({**said, **sorted_counts}, indent=1))
    shutil.rmtree(args.folder)
    return 1 if totals.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--totals", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--plans", type=int, nargs="+", default=list(range(len(PLANS))))
    parser.add_argument(
        "--count", type=int, default=100, help="random moments for each plan and number of ranks"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the deaths at known steps")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="cases, by number")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--sabotage",
        choices=sorted(sabotage.WAYS),
        help="break the library first: a case must fail",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
