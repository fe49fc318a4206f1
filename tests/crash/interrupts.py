"""Interrupts: a small run is interrupted at a line of the library, goes on, and is compared with
one that was not.

    record       a run of a setting in which nothing is interrupted notes the lines that each part of it executes
    case         the run of a setting in which an exception is raised at one of these lines; then it goes on as a user's next
                 cell of a notebook does: zero_grad, and two more steps
    held         losses and weights are to the bit those of a run without an interrupt, in which the interrupted step was made
                 or was not; or an error says that the model is torn, and opening a checkpoint, or
                 closing, is as it says
    two ranks    one rank or both are interrupted; each goes on to the bit, or says that the model or the other rank is lost

A place is a line, in its first execution and in a later one that the seed chooses, and each opcode
of the functions that commit (COMMITS). After a run no file, thread, folder or buffer of it may be
left. Exceptions are a signal's KeyboardInterrupt, and SystemExit, CancelledError and MemoryError
raised in place; the seed chooses.

    python interrupts.py FOLDER --totals totals.json --seed 1 [--sample 20 --settings 0 --parts
    train --only 17]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import dis
import faulthandler
import functools
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import sabotage
import torch
import torch.distributed as dist
from forks import forked, free_port
from small_run import Said, Small, lines_of

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.ranks.failures import RankLost

LONGEST_S = 60
PARTS = ("train", "evaluate", "gather", "save", "load", "rehome", "close", "build")
KINDS = ("signal", "SystemExit", "CancelledError", "MemoryError")
_COMMITTING = (
    "ShardedModel.step StateTiles.step StateTiles._accept StepRun.start StepRun.finish_tiles "
    "TentativeStep.end "
    "LiveUnit.land LiveUnit.drop LiveUnit.hold LiveUnit.let_go LiveUnit.let_all_go "
    "LiveUnit.exchange LiveUnit._become "
    "UnitMemory.free UnitMemory.allocate_slot UnitMemory.take_slot UnitMemory._end_loan Pool.take "
    "Pool.give_back "
    "Move._ask Move._end Queues.wait Program.start Program.commit Program.drop Program.finish "
    "TileRow._choose "
    "Prefetcher._evict"
)
COMMITS = frozenset(_COMMITTING.split())
_LIBRARY = tuple({f"{Path(module.__file__ or '').parent}/" for module in (tiermem, tiermem.swap)})


class Setting(NamedTuple):
    """How a run trains."""

    params: str = "nvme"
    states: str = "nvme"
    overlap: str = "none"
    stage: int = 3
    has_engine: bool = False
    dtype: str = "float32"
    clipping: float = 0.0  # so low that what backward has stepped is undone
    buffers: int | None = None
    in_backward: bool = False
    world: int = 1


SETTINGS = (
    Setting(),
    Setting("nvme", "nvme", "forward", has_engine=True, dtype="bfloat16"),
    Setting("nvme", "nvme", "backward", dtype="bfloat16"),
    Setting("nvme", "nvme", "backward", has_engine=True, clipping=0.01),
    Setting("host", "host", "none", dtype="bfloat16", has_engine=True),
    Setting("host", "host", "forward"),
    Setting("host", "nvme", "backward", clipping=0.01),
    Setting("host", "nvme", "forward", dtype="bfloat16", buffers=2),
    Setting("device", "host", "none", stage=1, dtype="bfloat16"),
    Setting("device", "device", "none", stage=0, has_engine=True),
    Setting("device", "nvme", "forward", stage=2),
    Setting("nvme", "host", "none", in_backward=True, dtype="bfloat16"),
    Setting("nvme", "nvme", "forward", world=2),
    Setting("device", "host", "none", stage=1, world=2),
)
_TIMEOUT_S = 4.0
"""The longest wait of a rank for the other."""


class Place(NamedTuple):
    """A line, or an opcode of a function that commits, in its nth execution."""

    file: str  # below the library
    line: int
    opcode: int  # -1: the line
    nth: int
    function: str


_NOWHERE = Place("", 0, -1, 1, "")


class Case(NamedTuple):
    """A place in a part of a setting's run, and what is raised there."""

    setting: int
    part: str
    place: Place
    kind: str
    ranks: tuple[int, ...] = (0,)


# ---- the run -------------------------------------------------------------------------------------


class Run:
    """A run of a setting, as a notebook has it."""

    def __init__(self, place: Path, setting: Setting) -> None:
        self.setting = setting
        self.engine: Any = None
        self.shards: Any = None
        self._place = place
        self._tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(3))

    def build(self) -> None:
        """Builds the model and its optimizer."""
        torch.manual_seed(7)
        setting = self.setting
        self.model: Any = Small()
        if setting.has_engine:
            self.engine, *_ = tiermem.initialize(model=self.model, config=self._config())
            self.shards, self.optim = self.engine.shards, self.engine.optimizer
            return
        self.model = self.model.to(getattr(torch, setting.dtype))
        self.shards = tiermem.shard(self.model, self.policy(), device="cpu")
        self.optim = tiermem.AdamW(self.model.parameters(), lr=0.01)

    def policy(self) -> OffloadPolicy:
        """That of the setting, without an engine."""
        setting, nvme = self.setting, [self._place / "nvme"]
        tiers = {name: Tier[getattr(setting, name).upper()] for name in ("params", "states")}
        return OffloadPolicy(
            stage=setting.stage, params=tiers["params"], optim=tiers["states"], paths=nvme, persistence_numel=0,
            overlap=setting.overlap, unit_buffers=setting.buffers, tile_numel=4096, step_in_backward=setting.in_backward,
            timeout_s=_TIMEOUT_S,
        )  # fmt: skip

    def _config(self) -> dict[str, Any]:
        setting, nvme = self.setting, {"device": "nvme", "nvme_path": str(self._place / "nvme")}
        homes = {"nvme": nvme, "host": {"device": "cpu"}, "device": {"device": "none"}}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": setting.dtype == "bfloat16"},
            "gradient_clipping": setting.clipping,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {
                "stage": setting.stage, "sub_group_size": 4096, "offload_optimizer": homes[setting.states],
                "offload_param": homes[setting.params], "stage3_param_persistence_threshold": 0,
            },
            "tiermem": {"overlap": setting.overlap, "strict": True},
        }  # fmt: skip

    def train(self) -> float:
        """One step on data that is the same in every step; returns its loss."""
        loss: torch.Tensor = (self.engine or self.model)(self._tokens)
        if self.engine is not None:
            self.engine.backward(loss)
            self.engine.step()
            return float(loss.detach())
        loss.backward()
        if self.setting.clipping:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clipping)
        self.optim.step()
        self.optim.zero_grad()
        return float(loss.detach())

    def evaluate(self) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            self.model(self._tokens)

    def gather(self) -> None:
        """A look at gathered weights."""
        with tiermem.zero.GatheredParameters(list(self.model.parameters())):
            sum(float(param.detach().float().sum()) for param in self.model.parameters())

    def save(self) -> None:
        """Saves a checkpoint."""
        if self.engine is not None:
            self.engine.save_checkpoint(str(self._place / "saved"))
        else:
            self.kept = self.optim.state_dict()

    def load(self) -> None:
        """Opens the checkpoint that was saved."""
        if self.engine is not None:
            self.engine.load_checkpoint(str(self._place / "saved"))
        else:
            self.model.load_state_dict(self.weights)
            self.optim.load_state_dict(self.kept)

    def rehome(self) -> None:
        """Moves the states, and weights that are fetched, to another tier, and back."""
        policy = self.shards.policy
        moved = {}
        if self.setting.stage:
            goes_there = self.setting.states != "nvme" and policy.paths
            moved["optim"] = Tier.NVME if goes_there else Tier.HOST
        if self.shards.plan.unit_homes:
            moved["params"] = Tier.HOST if policy.params is Tier.NVME else Tier.NVME
        self.shards.rehome(dataclasses.replace(policy, **moved))
        self.settle()

    def settle(self) -> None:
        """Has states and weights where the setting has them."""
        setting = self.setting
        homes = {"optim": Tier[setting.states.upper()], "params": Tier[setting.params.upper()]}
        policy = dataclasses.replace(self.shards.policy, **homes)
        if policy != self.shards.policy:
            self.shards.rehome(policy)

    def close(self) -> None:
        """Ends the run."""
        (self.engine.destroy if self.engine is not None else self.shards.close)()

    def keep(self) -> None:
        """Keeps what `load` opens."""
        self.save()
        if self.engine is None:
            self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def digest(self) -> str:
        """Of every weight and state, with the count of steps."""
        found = hashlib.sha256()
        states = self.optim.state_dict()["state"]
        for name, value in self.model.state_dict().items():
            found.update(
                name.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        for _, entry in sorted(states.items()):
            for key in sorted(entry):
                found.update(key.encode() + entry[key].contiguous().numpy().tobytes())
        return found.hexdigest()

    def footprint(self) -> dict[str, Any]:
        """The buffers in use when no module runs, and the memory that is carved. An exception may
        be kept, and its frames."""
        shards = self.shards
        shards.check_whole()
        shards.program.drop()
        shards.homes.store.flush()
        shards.prefetcher.empty()
        pools = {name: pool for name, pool in shards._pools._asdict().items() if pool is not None}
        free = {name: f"{len(pool._free)} of {pool.count}" for name, pool in pools.items()}
        users = sum(live.num_users for live in shards.units)
        return {"free": free, "carved": shards.store.arena.carved_bytes, "users": users}


def files_beside(tracer: Tracer) -> int:
    """How many files are open when the exception is gone, and its frames with what they own."""
    tracer.raised = None
    gc.collect()
    return len(open_files())


def open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if "/nvme/" in name]


# ---- the interrupt -------------------------------------------------------------------------------


@functools.cache
def ends_of_blocks(code: types.CodeType) -> frozenset[int]:
    """The offsets at which a `with` block that went well calls `__exit__`.

    No signal and no exception for a thread comes between the block and that call: CPython looks for
    them after calls, at jumps back and where functions begin, so that a lock is released. Only a
    trace function can raise there.
    """
    found = list(dis.get_instructions(code))
    starts = [
        number
        for number, (*three, _) in enumerate(
            zip(found, found[1:], found[2:], found[3:], strict=False)
        )
        if all(each.opname == "LOAD_CONST" and each.argval is None for each in three)
    ]
    offsets = set[int]()
    for start in starts:
        end = next(number for number in range(start, len(found)) if found[number].opname == "CALL")
        is_return = found[start - 1].opname == "SWAP"  # the value that is returned
        if found[end].arg == 2:
            offsets |= {each.offset for each in found[start - is_return : end + 1]}
    return frozenset(offsets)


class Tracer:
    """Counts the executions of lines and opcodes of the library, and raises in one of them."""

    def __init__(self, case: Case | None = None) -> None:
        self.seen: Counter[tuple[str, int, int, str]] = Counter()
        self.raised: BaseException | None = None
        self._case = case
        self._wanted = (
            None if case is None else (case.place.file, case.place.line, case.place.opcode)
        )
        self._left = 0 if case is None else case.place.nth
        self._names: dict[types.CodeType, str | None] = {}

    def __enter__(self) -> Tracer:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: types.FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code not in self._names:
            home = next((home for home in _LIBRARY if code.co_filename.startswith(home)), None)
            self._names[code] = None if home is None else code.co_filename
        if self._names[code] is None or (
            self._wanted is not None and self._wanted[0] != code.co_filename
        ):
            return None
        frame.f_trace_opcodes = code.co_qualname in COMMITS
        return self._trace

    def _trace(self, frame: types.FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if event not in ("line", "opcode") or frame.f_lasti in ends_of_blocks(code):
            return self._trace
        place = code.co_filename, frame.f_lineno, frame.f_lasti if event == "opcode" else -1
        if self._wanted is None:
            self.seen[(*place, code.co_qualname)] += 1
        elif place == self._wanted:
            self._left -= 1
            if self._left == 0:
                self._raise()
        return self._trace

    def _raise(self) -> None:
        assert self._case is not None
        self._left = -1
        kind = self._case.kind
        made = {
            "SystemExit": SystemExit,
            "CancelledError": asyncio.CancelledError,
            "MemoryError": MemoryError,
        }
        self.raised = KeyboardInterrupt() if kind == "signal" else made[kind]("interrupted here")
        if kind != "signal":
            raise self.raised
        signal.raise_signal(signal.SIGINT)


def is_of(error: BaseException | None, tracer: Tracer) -> bool:
    """Whether an exception is the interrupt, or was caused by it."""
    seen = 0
    while error is not None and seen < 20:
        if type(error) is type(tracer.raised):
            return True
        if "interrupted here" in str(error):  # torch's load_state_dict makes a text of an exception
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def ended(act: Callable[[], Any], tracer: Tracer) -> str:
    """Does what is interrupted; returns how it ended. Raises what it raises but for the
    interrupt."""
    try:
        with tracer:
            act()
    except BaseException as error:
        if not is_of(error, tracer):
            raise
        return "raised"
    return "not reached" if tracer.raised is None else "went on"


def end_step(run: Run) -> None:
    """With step_in_backward: a backward that has ended has made its step. Raises RuntimeError after
    one that has not."""
    run.optim.step()
    run.optim.zero_grad()


def go_on(run: Run) -> float:
    """A step. After an interrupt between a backward that steps and its `step`, an error may say
    that the step was made."""
    try:
        return run.train()
    except RuntimeError as error:
        if not run.setting.in_backward or "the step was made: go on with the next one" not in str(
            error
        ):
            raise
    run.optim.zero_grad()
    return run.train()


def again(run: Run, said: Said) -> None:
    """After half a load: a forward says so, or nothing was changed; then what was to be loaded is
    loaded."""
    try:
        run.evaluate()
    except RuntimeError as error:
        if not says_torn(error):
            raise
        said(refused=str(error))
    run.load()


TORN = ("half-way", "torn")


def says_torn(error: BaseException) -> bool:
    """Whether an error says that the model is torn, and how to go on."""
    text = str(error)
    return (
        isinstance(error, RuntimeError)
        and any(word in text for word in TORN)
        and "open a checkpoint" in text
    )


def is_told(error: BaseException, setting: Setting) -> bool:
    """Whether an error says that the model is torn; on two ranks also that the other rank is
    lost."""
    return says_torn(error) or (setting.world > 1 and isinstance(error, RankLost))


def go(
    place: Path, case: Case | None, setting: Setting, said: Said, part: str, num_steps: int
) -> None:
    """The run of a case: says what it found. case: None: nothing is interrupted here; `part` is
    recorded."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run, tracer = Run(place, setting), Tracer(case)
    losses = []
    if part == "build":
        said(how=ended(run.build, tracer))
        if tracer.raised is not None:
            tracer.raised = None  # with its frames
            del run
            gc.collect()
            run = Run(place, setting)
            run.build()
    else:
        run.build()
    losses += [run.train(), run.train()]
    run.keep()
    try:
        if part == "close":
            run.train()
        elif part != "build":
            said(how=ended(getattr(run, part), tracer))
            if part == "load" and not setting.has_engine and tracer.raised is not None:
                again(run, said)
        elif case is None:
            said(how="recorded")
        if case is None:
            said(seen=[[*key, count] for key, count in tracer.seen.items()])
        if part != "close":
            run.optim.zero_grad()
            if setting.in_backward and part == "train":
                with contextlib.suppress(RuntimeError):
                    end_step(run)
            for _ in range(num_steps):
                losses.append(go_on(run))
            run.settle()
            said(
                losses=[loss.hex() for loss in losses],
                digest=run.digest(),
                footprint=run.footprint(),
                files=files_beside(tracer),
            )
    except RuntimeError as error:
        if not is_told(error, setting):
            raise
        said(torn=str(error))
        said(torn_at=traceback.format_exc()[-2000:])
        if part == "rehome" and "two plans" in str(error):
            with contextlib.suppress(RuntimeError):
                run.load()
                raise AssertionError("a checkpoint was opened between two plans") from None
        elif setting.has_engine:
            run.load()
            losses = losses[:2]
            for _ in range(num_steps):
                losses.append(run.train())
            run.settle()
            said(
                losses=[loss.hex() for loss in losses],
                digest=run.digest(),
                footprint=run.footprint(),
                files=files_beside(tracer),
            )
    if part == "close":
        with contextlib.suppress(RankLost):
            said(how=ended(run.close, tracer))
        if case is None:
            said(seen=[[*key, count] for key, count in tracer.seen.items()])
    with contextlib.suppress(*([RuntimeError] if part == "close" or setting.world > 1 else [])):
        run.close()
    kept = setting.has_engine or setting.world > 1
    del run
    tracer.raised = None
    gc.collect()
    end_s = time.monotonic() + 5
    while threads_left() and time.monotonic() < end_s:
        time.sleep(0.01)
    folders = [] if kept else [each.name for each in (place / "nvme").glob("tiermem-*")]
    said(left=[*open_files(), *threads_left(), *folders])


def threads_left() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("tiermem")]


# ---- cases ---------------------------------------------------------------------------------------


class Bench:
    """A worker's folder, with the run of each setting that was not interrupted."""

    def __init__(self, folder: Path) -> None:
        self._place = folder / "case"
        self._references: dict[int, list[list[dict[str, Any]]]] = {}

    def recorded(self, setting: int, part: str) -> list[tuple[Place, int]]:
        """The places of a part, in their first execution, each with the number of its
        executions."""
        lines = self._run(None, setting, part, 2)[0]
        seen = next((line["seen"] for line in lines if "seen" in line), None)
        assert seen is not None, f"{setting} {part}: {lines}\n{self._errors()}"
        return [
            (Place(file, line, opcode, 1, function), count)
            for file, line, opcode, function, count in seen
        ]

    def references(self, setting: int) -> list[list[dict[str, Any]]]:
        """What each rank says in runs of two and three further steps."""
        if setting not in self._references:
            ranks: list[list[dict[str, Any]]] = [[] for _ in range(SETTINGS[setting].world)]
            for num_steps in (2, 3):
                for lines, found in zip(
                    self._run(None, setting, "evaluate", num_steps), ranks, strict=True
                ):
                    said = next((line for line in lines if "digest" in line), None)
                    assert said is not None, f"{setting}: {lines}\n{self._errors()}"
                    found.append(said)
            self._references[setting] = ranks
        return self._references[setting]

    def run(self, case: Case) -> str:
        """Goes through a case and returns how it ended. Raises AssertionError with what went
        wrong."""
        references = self.references(case.setting)
        ranks = self._run(case, case.setting, case.part, 2)
        shown = "\n".join([*map(str, ranks), self._errors()])
        assert self._status == 0, (
            f"status {self._status}, {self._errors().strip().rpartition(chr(10))[2][:150]}\n{shown}"
        )
        hows, is_torn, made = [], False, set()
        for lines, due in zip(ranks, references, strict=True):
            hows += [line["how"] for line in lines if "how" in line]
            is_torn |= any("torn" in line for line in lines)
            made |= {self._compare(line, due, shown) for line in lines if "digest" in line}
            left = next(line["left"] for line in lines if "left" in line)
            assert not left, f"left: {left}\n{shown}"
        assert len(made) < 2, f"ranks are at different steps\n{shown}"
        how = next((how for how in ("raised", "went on") if how in hows), "not reached")
        return f"{how}, torn" if is_torn else how

    def _compare(self, said: dict[str, Any], references: list[dict[str, Any]], shown: str) -> bool:
        """Whether the interrupted step was made. Raises AssertionError where a run has gone on
        otherwise."""
        repeated, made = references
        same = said["losses"] == repeated["losses"] and said["digest"] == repeated["digest"]
        is_ahead = said["losses"][2:] == made["losses"][3:] and said["digest"] == made["digest"]
        assert same or is_ahead, f"wrong bits\n{shown}\nrepeated {repeated}\nmade {made}"
        for left in ("footprint", "files"):
            assert said[left] == repeated[left], (
                f"leaked: instead of {left} {repeated[left]}\n{shown}"
            )
        return is_ahead and not same

    def _run(
        self, case: Case | None, setting: int, part: str, num_steps: int
    ) -> list[list[dict[str, Any]]]:
        """Runs a case; returns the lines that each rank has said."""
        shutil.rmtree(self._place, ignore_errors=True)
        (self._place / "nvme").mkdir(parents=True)
        world = SETTINGS[setting].world
        port = free_port() if world > 1 else 0

        def be(rank: int) -> None:
            faulthandler.dump_traceback_later(LONGEST_S, exit=True)
            if world > 1:
                at = f"tcp://127.0.0.1:{port}"
                dist.init_process_group("gloo", init_method=at, rank=rank, world_size=world)
            mine = case if case is None or rank in case.ranks else case._replace(place=_NOWHERE)
            go(
                self._place,
                mine,
                SETTINGS[setting],
                Said(self._place / f"said.{rank}"),
                part,
                num_steps,
            )
            faulthandler.cancel_dump_traceback_later()

        pids = [
            forked(functools.partial(be, rank), self._place / f"printed.{rank}")
            for rank in range(world)
        ]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        self._status = next((end for end in ends if end), 0)
        return [lines_of(self._place / f"said.{rank}") for rank in range(world)]

    def _errors(self) -> str:
        return "\n".join(file.read_text()[-5000:] for file in sorted(self._place.glob("printed.*")))


def cases_of(
    bench: Bench, settings: list[int], parts: list[str], functions: list[str], seed: int
) -> Iterator[Case]:
    """Every case: each place in its first execution, and in a later one if there is one. functions:
    only theirs; empty: all."""
    for setting in settings:
        for part in [each for each in parts if each != "build" or SETTINGS[setting].world == 1]:
            for place, count in bench.recorded(setting, part):
                if functions and place.function not in functions:
                    continue
                chosen = random.Random(f"{seed} {setting} {part} {place}")
                ranks = chosen.choice([(0,), (1,), (0, 1)]) if SETTINGS[setting].world > 1 else (0,)
                yield Case(setting, part, place, chosen.choice(KINDS), ranks)
                if count > 1:
                    later = place._replace(nth=chosen.randint(2, count))
                    yield Case(setting, part, later, chosen.choice(KINDS), ranks)


def work(args: argparse.Namespace, cases: list[tuple[int, Case]], bench: Bench, file: Path) -> None:
    """Goes through cases; a failure is noted, and the next one follows."""
    totals, failures, started = Counter[str](), list[str](), time.monotonic()
    for done, (number, case) in enumerate(cases):
        if args.seconds and time.monotonic() - started > args.seconds:
            break
        if done % 200 == 0:
            print(
                f"{file.name}: {done} of {len(cases)} cases in {time.monotonic() - started:.0f} s",
                flush=True,
            )
        try:
            totals[f"{case.part}, {case.kind}: {bench.run(case)}"] += 1
        except Exception:
            reason = traceback.format_exc().partition("Error: ")[2][:9000]
            failures.append(f"seed {args.seed}, case {number}: {case}\n{reason}")
        file.write_text(json.dumps({"totals": totals, "failures": failures}))


def arguments(text: str | None) -> argparse.ArgumentParser:
    """What every program of interrupts is asked: where it works, where totals go, the seed, and
    some of SETTINGS."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--totals", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settings", type=int, nargs="+", default=list(range(len(SETTINGS))))
    return parser


def main() -> int:
    """Goes through the cases that it is asked for and writes the seed and the totals."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--functions", nargs="+", default=[], help="only places in these")
    parser.add_argument(
        "--sample", type=int, default=0, help="so many cases, chosen by the seed; 0: all"
    )
    parser.add_argument("--only", type=int, nargs="+", default=[], help="cases, by number")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="ends after so long; 0: with the last case"
    )
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--sabotage",
        choices=sorted(sabotage.WAYS),
        help="break the library first: a case must fail",
    )
    args = parser.parse_args()
    started, folder = time.monotonic(), args.folder / "interrupts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if args.sabotage:
        sabotage.WAYS[args.sabotage]()
    import torch._dynamo  # noqa: F401  (the first optimizer of a process would)

    gc.freeze()
    first = Bench(folder / "worker-0")
    cases = list(enumerate(cases_of(first, args.settings, args.parts, args.functions, args.seed)))
    whole = len(cases)
    chosen = random.Random(args.seed).sample(cases, min(whole, args.sample or whole))
    cases = [cases[number] for number in args.only] if args.only else chosen
    files, pids = [folder / f"totals-{number}" for number in range(args.workers)], []
    for number, file in enumerate(files):
        bench = Bench(folder / f"worker-{number}")
        pids.append(
            forked(functools.partial(work, args, cases[number :: args.workers], bench, file))
        )
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    totals, failures = Counter[str](), list[str]()
    for file in files:
        with contextlib.suppress(FileNotFoundError):
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
    print("\n".join(each[:1500] for each in failures[:4]), file=sys.stderr)
    return 1 if failures or any(statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
