"""Operations: thousands of short runs on one folder, chosen at random, that leave nothing behind.

    train on 1 to 3 ranks and save | be killed at a durable step or at any moment | fsck | inspect | export | remove the dead

After every operation what lies below the folder is looked at: files of known names and no more bytes than the runs there are
may take. Every run looks at its own descriptors before it ends. States come out of a save, on whatever number of ranks, as
they went in, to the bit. At the end the dead are removed, and what is left is one durable state.

    python operations.py FOLDER --count 2000 --seed 1 --totals totals.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tiermem

sys.path.insert(0, str(Path(__file__).parent))
from deaths import Death, errors_of, fresh, run_ranks
from small_run import Plan, Said, Small, config_of, digest, lines_of, step_once

from tiermem.swap.run_folder import has_saved
from tiermem.tools.cli import main as tiermem_command

_KNOWN = re.compile(
    r"(nvme|saved|out.*|(said|errors|steps)\.\d+"
    r"|nvme/tiermem-[0-9a-f]+(\.\d+)?(/(segment\.bin|lock(\.new)?|(data|manifest|part)-\d+(-\d+)?\.(bin|json)(\.new)?))?"
    r"|saved/latest|saved/global_step\d+(/.*)?)"
)
_MOST_RUN_BYTES = (
    8 << 20
)  # of one run's folder: two or three slots of a model of half a megabyte, rounded up to the disk's


class World:
    """The folder that everything happens on, and what is known of it."""

    def __init__(self, place: Path, chance: random.Random) -> None:
        self.place, self.chance = fresh(place), chance
        self.totals = Counter[str]()
        self.digest_at: dict[int, str] = {}  # of the states saved at a step
        left = {folder.name.split(".")[0] for folder in (self.place / "nvme").iterdir() if not has_saved(folder)}
        self.num_dead = len(left)  # killed a moment ago, before they had a lock: that may still be a run that begins

    def train(self) -> None:
        """Trains a few steps on some ranks from `latest`, saves, and ends, or is killed on the way."""
        num_ranks, num_steps = self.chance.choice((1, 1, 1, 2, 3)), self.chance.choice((1, 2))
        durability = self.chance.choice(("checkpoint", "checkpoint", "step"))
        copies = durability == "checkpoint" and self.chance.random() < 0.3  # else its last step is left as well
        plan = Plan(durability, copies=copies, keep=self.chance.choice((1, 2)), num_steps=num_steps)
        death = self.chance.choice((None, None, self._death(num_ranks)))
        how = run_ranks(self.place, plan, num_ranks, death, body=train_on)
        if death is None and how != ["ended"] * num_ranks:
            raise AssertionError(f"a run nobody killed: {how}\n{errors_of(self.place)}")
        for rank in range(num_ranks):
            self._check_said(self.place / f"said.{rank}")
        self.num_dead += "killed" in how or "raised" in how
        self.totals[f"train on {num_ranks}, {'killed' if 'killed' in how else 'ended'}"] += 1

    def look(self) -> None:
        """fsck or inspect: never a traceback, and never anything changed."""
        before = _listing(self.place)
        words = self.chance.choice((["fsck"], ["fsck", "--verify"], ["inspect"]))
        where = self.chance.choice(("nvme", "saved"))
        status = command([words[0], str(self.place / where), *words[1:]], self.place)
        assert status in (0, 1, 2, 3, 4), f"{words} on {where}: status {status}\n{errors_of(self.place)}"
        assert _listing(self.place) == before, f"{words} changed something"
        self.totals[words[0]] += 1

    def export(self) -> None:
        """Weights leave as safetensors."""
        out = self.place / "out"
        status = command(["export", str(self.place / "saved"), str(out)], self.place)
        has_one = (self.place / "saved" / "latest").exists()
        assert (status == 0) == has_one, f"export: status {status}\n{errors_of(self.place)}"
        assert not has_one or list(out.glob("*.safetensors"))
        shutil.rmtree(out, ignore_errors=True)
        self.totals["export"] += 1

    def bury(self) -> None:
        """fsck --remove takes what dead runs have left that holds nothing durable, and the others that it is told to take."""
        command(["fsck", str(self.place / "nvme"), "--remove"], self.place)
        pointers = [file.read_text() for file in self.place.glob("saved/*/tiermem.json")]
        for folder in sorted((self.place / "nvme").iterdir()):
            run = folder.name.split(".")[0]
            if (folder / "lock").exists() and not any(run in pointer for pointer in pointers):
                command(["fsck", str(folder), "--remove"], self.place)
        left = {folder.name.split(".")[0] for folder in (self.place / "nvme").iterdir() if not has_saved(folder)}
        self.num_dead = len(left)  # killed a moment ago, before they had a lock: that may still be a run that begins
        self.totals["remove"] += 1

    def check(self) -> None:
        """Only files that are known, and no more of them, and no more bytes, than there are runs."""
        odd = [name for name in _listing(self.place) if not _KNOWN.fullmatch(name)]
        assert not odd, f"unknown files: {odd}"
        runs = {folder.name.split(".")[0] for folder in (self.place / "nvme").iterdir()}
        assert len(runs) <= self.num_dead + 3, f"{len(runs)} runs after {self.num_dead} deaths: {sorted(runs)}"
        for folder in (self.place / "nvme").iterdir():
            held = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
            assert held <= _MOST_RUN_BYTES, f"{folder.name} holds {held} bytes"

    def _death(self, num_ranks: int) -> Death:
        rank = self.chance.randrange(num_ranks)
        if self.chance.random() < 0.5:
            return Death(rank, self.chance.randrange(120), self.chance.choice(("before", "after")))
        return Death(rank, after_s=self.chance.uniform(0.0, 1.5))

    def _check_said(self, file: Path) -> None:
        for line in lines_of(file):
            if "opened" in line and line["opened"] in self.digest_at:
                assert line["digest"] == self.digest_at[line["opened"]], f"{line}: not what was saved"
            if "saved" in line:
                self.digest_at[line["saved"]] = line["digest"]
            assert not line.get("left"), f"left open: {line['left']}"
        file.unlink(missing_ok=True)


def train_on(place: Path, plan: Plan, rank: int) -> None:
    """Opens the latest save, trains so many steps and saves. Every rank calls it."""
    said = Said(place / f"said.{rank}")
    engine, *_ = tiermem.initialize(model=Small(), config=config_of(place, plan))
    if (place / "saved" / "latest").exists():
        engine.load_checkpoint(str(place / "saved"))
        said(opened=engine.global_steps, digest=digest(engine))
    for _ in range(plan.num_steps):
        step_once(engine, rank)
    found = digest(engine)
    said(saving=engine.global_steps)
    said(saved=engine.global_steps, digest=found)  # said before, so that whoever finds it knows what it must be
    engine.save_checkpoint(str(place / "saved"), **({"copy": True} if plan.copies else {}))
    engine.destroy()
    names = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    said(left=[name for name in names if name.startswith((str(place / "nvme"), str(place / "saved")))])


def command(words: list[str], place: Path) -> int:
    """Runs a command of ours in a fork; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        out = os.open(place / "errors.0", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        status = 99
        try:
            tiermem_command(words)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _listing(place: Path) -> list[str]:
    return sorted(
        str(path.relative_to(place)) for path in place.rglob("*") if not path.name.startswith(("errors", "steps"))
    )


def main() -> None:
    """Runs what it is asked for, and writes the seed and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--totals", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    world = World(args.folder / "world", random.Random(args.seed))
    operations: list[Callable[[], None]] = [world.train] * 6 + [world.look] * 2 + [world.export, world.bury]
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(args.count):
        operation = world.chance.choice(operations)
        try:
            operation()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {args.seed}, operation {number} ({operation.__name__}): {error}") from None
    assert len(os.listdir("/proc/self/fd")) == descriptors
    said = {"seed": args.seed, "operations": args.count, "totals": dict(world.totals)}
    args.totals.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
