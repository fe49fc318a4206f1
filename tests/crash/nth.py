"""Nth: a small run opens, trains and saves, and its nth system call fails, or its nth allocation,
for every n.

    reference    the run of a plan in which nothing fails: its losses, the digest of its states after each step, its calls
    case         the run of a plan in which one call fails (once), or that call and all later ones of its kind (for good)

A run begins with what another one has saved. It goes on after a save that fails, as a user's
program may, and saves once more after a step that fails. It must go on or raise an exception of
docs/errors.md; then fsck finds nothing broken, and a process of its own opens the last step that
was durable, or a later one, to the bit. Kinds of calls: supervisor.py, allocations.cpp.

    python nth.py FOLDER --totals totals.json --seed 1 [--sample 20 --plans 0 --only 17 --workers 1]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import sabotage
import torch
from forks import forked
from killed_ranks import errors_of, fresh
from small_run import (
    Plan,
    Said,
    Small,
    config_of,
    digest,
    lines_of,
    newest,
    open_newest,
    say_durable,
    step_once,
)
from supervisor import CALLS, Entry, Rule, Supervised, Supervisor, hold, rules_for

import tiermem
from tiermem.checkpoint.survey import survey
from tiermem.config.load import load_config
from tiermem.swap.base import native
from tiermem.swap.disk import queue

LONGEST_S = 60.0
ALLOCATIONS = (
    "new",
    "new (nothrow)",
    "calloc",
    "mmap of the module",
    "thread of the module",
)  # in allocations.cpp's order
# of a block, whatever the engine: the queue's own fault engine answers in the kernel's place
COMPLETION = "completion"
_MOST = (1 << 31) - 1
_ROUNDS = tuple(call for call in CALLS if call.startswith("io_") or call in ("eventfd", "mmap"))


class Scene(NamedTuple):
    """What a case is a variation of."""

    plan: Plan
    calls: tuple[str, ...]  # the kinds that fail
    buffered: bool = False  # the file system has no O_DIRECT


_THREADS = Plan(engine="threads", save_every=1, num_steps=2)
_FILES = tuple(call for call in CALLS if call not in _ROUNDS)
SCENES = (
    Scene(_THREADS, (*_FILES, "mmap", *ALLOCATIONS)),
    Scene(_THREADS._replace(copies=True), _FILES),
    Scene(_THREADS._replace(durability="step", save_every=0), _FILES),
    Scene(_THREADS._replace(engine="uring"), (*_ROUNDS, *ALLOCATIONS[1:], COMPLETION)),
    Scene(_THREADS._replace(engine="aio"), (*_ROUNDS, *ALLOCATIONS[1:], COMPLETION)),
    Scene(
        _THREADS._replace(engine="auto"), ("io_uring_setup", "eventfd", "mmap", *ALLOCATIONS[1:])
    ),
    Scene(_THREADS, ("fsync", "fdatasync", "pwrite", "write"), buffered=True),
    Scene(
        _THREADS._replace(num_steps=4),
        ("fsync", "fdatasync", "rename", "renameat", "unlink", "unlinkat"),
    ),
)


class Reference(NamedTuple):
    """What a run says in which nothing fails."""

    losses: dict[int, str]
    digests: dict[int, str]  # of the states after each step
    counts: Counter[str]


class Case(NamedTuple):
    """One run and what fails in it."""

    scene: int
    rule: Rule


# ---- the run -------------------------------------------------------------------------------------


def go(place: Path, plan: Plan, said: Said, folder: Path | None, has_digests: bool = False) -> None:
    """Opens, trains to the last step and saves; says what it did and what was raised."""

    def tried(part: str, act: Callable[[], Any]) -> bool:
        try:
            act()
        except Exception as error:
            said(raised=type(error).__name__, part=part, **_told(error))
            return False
        return True

    engine: Any = None
    copied = 0

    def begin() -> None:
        nonlocal engine
        torch.manual_seed(7)
        engine, *_ = tiermem.initialize(model=Small(), config=config_of(place, plan))
        open_newest(engine, folder)
        said(opened=engine.global_steps)

    def step() -> None:
        loss = step_once(engine, 0, after_backward=lambda: say_durable(engine, plan, said))
        said(step=engine.global_steps, loss=loss.hex())

    def save() -> None:
        nonlocal copied
        before, copied = copied, 0
        engine.save_checkpoint(str(place / "saved"), **({"copy": True} if plan.copies else {}))
        said(durable=before if plan.copies else engine.global_steps)
        copied = engine.global_steps

    is_open = is_sound = tried("opening", begin)
    while is_sound and engine.global_steps < plan.num_steps:
        is_sound = tried("step", step)
        if has_digests:
            said(at=engine.global_steps, digest=digest(engine))
        if is_sound and plan.save_every and not tried("save", save):
            # the save may end a step, which then has failed
            is_sound = not engine.shards.steps.is_torn
            if is_sound:
                tried("save again", save)
    if is_open and not is_sound:
        tried("last save", save)
    if engine is not None and tried("end", engine.destroy):
        if plan.copies:
            said(durable=copied)
        elif is_sound:
            say_durable(engine, plan, said)


def _told(error: Exception) -> dict[str, Any]:
    """What is to be known of an exception, and of those that it stands for."""
    kinds = [each.__name__ for each in type(error).__mro__]
    code, file = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
    trace = "".join(traceback.format_exception(error))[-4000:]
    return {
        "kinds": kinds,
        "errno": code,
        "file": None if file is None else str(file),
        "text": str(error),
        "trace": trace,
    }


def _shown(line: dict[str, Any]) -> str:
    return f"{ {key: value for key, value in line.items() if key not in ('trace', 'kinds')} }\n{line.get('trace', '')}"


def documented() -> set[str]:
    """The exceptions that docs/errors.md lists."""
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text("utf-8")
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def _is_in_order(line: dict[str, Any], known: set[str]) -> bool:
    """Whether an exception is one of the list, or the OSError that its text promises, and names a
    path or an error.

    After a step that failed a model may refuse to be saved, and says so. Where an old step could
    not be removed, as a warning has said, its bytes are not written over.
    """
    if line["raised"] == ("RuntimeError" if line["part"] == "last save" else "NoSlotError"):
        return True
    is_known = line["raised"] in known or ("OSError" in line["kinds"] and line["errno"])
    names = line["file"] or "/" in line["text"] or line["errno"] or "Errno" in line["text"]
    return bool(is_known and names)


class _Queues:
    """Counts the completions of every queue that this process opens from now on, and lets them fail
    by a rule."""

    def __init__(self, rule: Rule | None) -> None:
        self.num_completions = 0  # of queues that were closed
        owner = self

        class Lying(native.Queue):
            def __init__(
                self, *args: Any, faults: Sequence[native.Fault] = (), **more: Any
            ) -> None:
                super().__init__(*args, faults=(*faults, *owner._faults(rule)), **more)

            def close(self) -> int:
                owner.num_completions += self.counters().blocks
                return super().close()

        queue.Queue = Lying  # type: ignore[misc]

    def _faults(self, rule: Rule | None) -> list[native.Fault]:
        first = -1 if rule is None else rule.nth - 1 - self.num_completions
        if rule is None or (first < 0 and not rule.is_for_good):
            return []
        return [native.Fault(max(first, 0), "error", rule.code, _MOST if rule.is_for_good else 1)]


# ---- a case --------------------------------------------------------------------------------------


class Bench:
    """One worker's folder, with what the runs of each scene begin with and the reference of
    each."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder, self._place, self._library = folder, folder / "case", library
        self._references: dict[int, Reference] = {}

    def reference(self, number: int) -> Reference:
        """The run of a scene in which nothing fails."""
        if number not in self._references:
            self._make_left(SCENES[number].plan)
            found = self._open(number)
            ended = self._run(number, None, has_digests=True)
            lines = lines_of(self._place / "said.0")
            losses = {line["step"]: line["loss"] for line in lines if "step" in line}
            digests = {line["at"]: line["digest"] for line in lines if "at" in line} | {
                1: found["digest"]
            }
            known = set(range(1, SCENES[number].plan.num_steps + 1))
            assert ended.status == 0 and set(digests) == known, f"{lines}\n{errors_of(self._place)}"
            ended = self._run(number, None)
            counts = ended.counts()
            counts.update(
                next(
                    line["counts"] for line in lines_of(self._place / "said.0") if "counts" in line
                )
            )
            self._references[number] = Reference(losses, digests, counts)
        return self._references[number]

    def run(self, case: Case, seed: int) -> str:
        """Goes through a case and returns how it ended. Raises AssertionError with what went
        wrong."""
        reference = self.reference(case.scene)
        ended = self._run(case.scene, case.rule, seed=seed)
        lines = lines_of(self._place / "said.0")
        shown = "\n".join([*map(_shown, lines), errors_of(self._place)])
        assert ended.status is not None, f"it hung for {LONGEST_S} s\n{shown}"
        assert ended.status == 0, f"it ended with status {ended.status}\n{shown}"
        known = documented()
        for line in lines:
            if "step" in line:
                assert line["loss"] == reference.losses[line["step"]], (
                    f"wrong bits: {line}\n{shown}"
                )
            if "raised" in line:
                assert _is_in_order(line, known), (
                    f"not in docs/errors.md: {line['raised']} from {line['part']}: "
                    f"{line['text']}\n{line['trace']}"
                )
            assert not line.get("left") or case.rule.is_for_good, (
                f"left open: {line['left']}\n{shown}"
            )
        durable = [line["durable"] for line in lines if "durable" in line]
        self.check(case.scene, max([1, *durable]), shown)
        has_failed = ended.num_failed or any(line.get("failed") for line in lines)
        raised = [f"{line['raised']} from {line['part']}" for line in lines if "raised" in line]
        return (
            "not reached" if not has_failed else " then ".join(dict.fromkeys(raised)) or "went on"
        )

    def check(self, number: int, durable: int, shown: str) -> int:
        """What is left is whole, and opens at this step or a later one, to the bit. Returns
        which."""
        found = self._open(number, shown)
        assert found["opened"] >= durable, (
            f"step {durable} was durable, step {found['opened']} was opened\n{shown}"
        )
        digest_then = self.reference(number).digests[found["opened"]]
        assert found["digest"] == digest_then, f"wrong bits in what was opened: {found}\n{shown}"
        return int(found["opened"])

    def log(self, number: int) -> list[Entry]:
        """All that the run of a scene gives to the kernel for its files."""
        self.reference(number)
        found: list[Entry] = []
        assert self._run(number, None, log=found).status == 0, errors_of(self._place)
        return found

    def begin(self, number: int) -> list[Path]:
        """Puts what a scene's run begins with in its place; returns the folders that it writes
        to."""
        shutil.rmtree(self._place)
        shutil.copytree(self._folder / f"left-{_name(SCENES[number].plan)}", self._place)
        (self._place / "said.0").unlink()
        return [self._place / "nvme", self._place / "saved"]

    def _make_left(self, plan: Plan) -> None:
        place = fresh(self._place)
        one = plan._replace(num_steps=1, save_every=1 if plan.durability == "checkpoint" else 0)
        pid = forked(lambda: go(place, one, Said(place / "said.0"), None), place / "errors.0")
        assert os.waitpid(pid, 0)[1] == 0 and not [
            line for line in lines_of(place / "said.0") if "raised" in line
        ]
        left = self._folder / f"left-{_name(plan)}"
        shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(place, left)

    def _run(
        self,
        number: int,
        rule: Rule | None,
        has_digests: bool = False,
        seed: int = 0,
        log: list[Entry] | None = None,
    ) -> Supervised:
        scene, roots = SCENES[number], self.begin(number)
        kinds = {rule.call} if rule is not None else set(scene.calls)
        calls = [call for call in CALLS if call in kinds | ({"open"} if scene.buffered else set())]
        if rule is not None and rule.call in ("fsync", "fdatasync"):
            calls = [*dict.fromkeys([*calls, "fsync", "fdatasync"])]
        act = functools.partial(self._be_the_run, scene, rule, calls, has_digests)
        pid = forked(act, self._place / "errors.0")
        roots += [] if log is None else [self._place / "said.0"]
        return Supervisor(pid, calls, roots, rule, scene.buffered, seed, log).watch(LONGEST_S)

    def _be_the_run(
        self, scene: Scene, rule: Rule | None, calls: list[str], has_digests: bool
    ) -> None:
        torch.set_num_threads(1)
        library = ctypes.CDLL(str(self._library))
        library.allocations_count.restype = ctypes.c_uint64
        assert library.allocations_patch(b"_tiermem_native") >= len(ALLOCATIONS)
        said, folder = Said(self._place / "said.0"), newest(self._place, scene.plan)
        if rule is not None and rule.call in ALLOCATIONS:
            library.allocations_fail(
                ALLOCATIONS.index(rule.call), ctypes.c_uint64(rule.nth), int(rule.is_for_good)
            )
        queues = _Queues(rule if rule is not None and rule.call == COMPLETION else None)
        hold(calls)
        go(self._place, scene.plan, said, folder, has_digests)
        gc.collect()  # of what the exceptions held
        said(left=[name for name in _open_files() if name.startswith(str(self._place / "nvme"))])
        counts = {
            name: int(library.allocations_count(number)) for number, name in enumerate(ALLOCATIONS)
        }
        counts[COMPLETION] = queues.num_completions
        said(counts=counts, failed=rule is not None and counts.get(rule.call, 0) >= rule.nth)

    def _open(self, number: int, shown: str = "") -> dict[str, Any]:
        """What a process of its own finds and opens."""
        place, plan = self._place, SCENES[number].plan

        def look() -> None:
            for where in (place / "nvme", place / "saved"):
                found = survey(where, verifies=True)
                said(
                    wrong=[
                        str(step) for step in found.steps if step.state not in ("whole", "removed")
                    ]
                )
                said(wrong=list(found.faults))
            torch.set_num_threads(1)
            engine, *_ = tiermem.initialize(model=Small(), config=config_of(place, plan))
            open_newest(engine, newest(place, plan))
            said(opened=engine.global_steps, digest=digest(engine))
            engine.destroy()

        (place / "said.0").unlink(missing_ok=True)
        said = Said(place / "said.0")
        status = os.waitpid(forked(look, place / "errors.1"), 0)[1]
        lines = lines_of(place / "said.0")
        wrong = [each for line in lines for each in line.get("wrong", ())]
        assert not wrong, f"fsck finds broken: {wrong}\n{shown}"
        assert status == 0, (
            f"what is left cannot be opened: status {status}\n{errors_of(place)}\n{shown}"
        )
        return lines[-1]


def _open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def _name(plan: Plan) -> str:
    return "-".join(map(str, plan))


# ---- many of them --------------------------------------------------------------------------------


def cases_of(calls: list[str], bench: Bench, scenes: list[int]) -> Iterator[Case]:
    """Every case of some scenes. calls: only these kinds; empty: all."""
    for number in scenes:
        counts = bench.reference(number).counts
        for call in [call for call in SCENES[number].calls if not calls or call in calls]:
            for nth in range(1, counts[call] + 1):
                yield from (Case(number, rule) for rule in _rules(call, nth))


def _rules(call: str, nth: int) -> Iterator[Rule]:
    if call in ALLOCATIONS:
        yield from (Rule(call, nth, 0, is_for_good) for is_for_good in (False, True))
    elif call == COMPLETION:
        yield Rule(call, nth, errno.EINTR, is_for_good=False)
        yield from (Rule(call, nth, errno.EIO, is_for_good) for is_for_good in (False, True))
    else:
        yield from rules_for(call, nth)


def work(
    args: argparse.Namespace,
    cases: list[tuple[int, Any]],
    bench: Any,
    kind: Callable[[Any], str],
    file: Path,
) -> None:
    """Goes through cases; a failure is noted, and the next one follows. Says now and then how far
    it is."""
    totals, failures, started = Counter[str](), list[str](), time.monotonic()
    for done, (number, case) in enumerate(cases):
        if done % 50 == 0:
            print(
                f"{file.name}: {done} of {len(cases)} cases in {time.monotonic() - started:.0f} s",
                flush=True,
            )
        try:
            totals[f"{kind(case)}: {bench.run(case, args.seed + number)}"] += 1
        except Exception:  # one of thousands: the others are to be known as well
            reason = traceback.format_exc().partition("Error: ")[2][:9000]
            failures.append(f"seed {args.seed}, case {number}: {case}\n{reason}")
            print(failures[-1], file=sys.stderr, flush=True)
        file.write_text(json.dumps({"totals": totals, "failures": failures}))


def run_all(
    args: argparse.Namespace,
    bench: Any,
    cases_of: Callable[..., Iterator[Any]],
    kind: Callable[[Any], str],
) -> int:
    """Goes through all cases that were asked for, in several processes; writes the seed and the
    totals.

    bench: makes what `run`s a case, from a folder and the compiled library. kind: what a case is
        counted as.
    """
    started, folder = time.monotonic(), args.folder / Path(sys.argv[0]).stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    library = compiled(folder)
    load_config(config_of(folder, Plan()))  # compiles pydantic's schemas, once for all forks
    gc.freeze()
    if args.sabotage:
        sabotage.WAYS[args.sabotage]()
    first = bench(_made(folder / "worker-0"), library)
    cases = list(enumerate(cases_of(first, args.scenes)))
    whole = len(cases)
    if args.only:
        cases = [cases[number] for number in args.only]
    else:  # in any order, so that a look at the first ones tells of all
        cases = random.Random(args.seed).sample(cases, args.sample or whole)
    pids, files = [], [folder / f"totals-{number}" for number in range(args.workers)]
    for number, file in enumerate(files):
        own = bench(_made(folder / f"worker-{number}"), library) if number else first
        pids.append(
            forked(functools.partial(work, args, cases[number :: args.workers], own, kind, file))
        )
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    totals, failures = Counter[str](), list[str]()
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # it had no case
            found = json.loads(file.read_text())
            totals.update(found["totals"])
            failures += found["failures"]
    said = {
        "seed": args.seed,
        "cases": sum(totals.values()) + len(failures),
        "of": whole,
        "failed": len(failures),
    }
    said |= {
        "seconds": round(time.monotonic() - started),
        "totals": dict(sorted(totals.items())),
        "failures": failures,
    }
    args.totals.write_text(json.dumps(said, indent=1))
    shutil.rmtree(folder)
    return 1 if failures or any(statuses) else 0


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> int:
    """Runs what it is asked for and writes the seed and the totals."""

    def kind(case: Case) -> str:
        return f"{case.rule.call}, {'for good' if case.rule.is_for_good else 'once'}"

    parser = parser_of(__doc__, range(len(SCENES)))
    parser.add_argument(
        "--calls",
        nargs="+",
        choices=(*CALLS, *ALLOCATIONS, COMPLETION),
        default=[],
        help="only these kinds",
    )
    args = parser.parse_args()
    return run_all(args, Bench, functools.partial(cases_of, args.calls), kind)


def compiled(folder: Path) -> Path:
    """The library that lets allocations fail. Raises CalledProcessError when the compiler refuses
    it."""
    library, source = folder / "allocations.so", Path(__file__).with_name("allocations.cpp")
    options = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [os.environ.get("CXX", "c++"), *options, "-o", str(library), str(source)], check=True
    )
    return library


def parser_of(text: str | None, scenes: Iterable[int]) -> argparse.ArgumentParser:
    """Of the command line. scenes: those that are gone through unless others are named."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--totals", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenes", type=int, nargs="+", default=list(scenes))
    parser.add_argument(
        "--sample", type=int, default=0, help="so many cases, chosen by the seed; 0: all"
    )
    parser.add_argument("--only", type=int, nargs="+", default=[], help="cases, by number")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--sabotage",
        choices=sorted(sabotage.WAYS),
        help="break the library first: a case must fail",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
