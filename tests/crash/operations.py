"""Operations: thousands of short runs on one folder, chosen at random, that leave nothing behind.

    train on 1 to 3 ranks and save | be killed at a durable step or at any moment | fsck | inspect | export
    tidy: what a user does who looks after a folder: removes the dead, and complete copies but for
        the newest

After every operation what lies below the folder is looked at: files of known names and no more
bytes than the runs and copies there are may take. A run that has saved leaves in the folders of
tags nothing that no pointer names. Every run looks at its own descriptors before it ends. States
come out of a save, on whatever number of ranks, as they went in, to the bit. At the end, after one
more run and a tidying, one run and what it has saved are left.

    python operations.py FOLDER --count 2000 --seed 1 --totals totals.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import tiermem

sys.path.insert(0, str(Path(__file__).parent))
import sabotage
from killed_ranks import Begin, Death, errors_of, fresh, in_fork, run_ranks
from small_run import PHASES, Plan, Said, Small, config_of, digest, lines_of, step_once

from tiermem.checkpoint.format.finding import known_latest
from tiermem.swap.disk.run_folder import has_saved
from tiermem.tools.cli import main as tiermem_command

_NEW = r"([0-9a-f]{12}\.)?"
_KNOWN = re.compile(
    r"(nvme|saved|out.*|(said|errors|turns|phases|died)\.\d+"
    rf"|nvme/tiermem-[0-9a-f]+(\.\d+)?"
    rf"(/(segment\.bin|lock(\.new)?|{_NEW}(data|manifest|part)-\d+(-\d+)?\.(bin|json)(\.new)?))?"
    rf"|saved/{_NEW}latest(\.new)?"
    rf"|saved/global_step\d+(/(README\.txt|{_NEW}(tiermem|(manifest|part|data)-[0-9a-f]+-\d+(-\d+)?)\.(json|bin)(\.new)?))?)"
)
# three slots and a copy of states of a fifth of a megabyte, in whole blocks
_MOST_RUN_BYTES = 3 << 19
_MOST_COPIES = 3


class World:
    """The folder that everything happens on, and what is known of it."""

    def __init__(self, place: Path, chance: random.Random) -> None:
        self.place, self.chance = fresh(place), chance
        self.totals = Counter[str]()
        self.digest_at: dict[int, str] = {}  # of the states saved at a step
        self.most_bytes = 0  # that a folder held
        self.num_dead = 0  # runs since the last tidying
        self.num_copies = 0  # that may be there
        # runs killed since one saved in its store and ended: each may have left an older one
        self.num_late = 0

    def train(self) -> None:
        """Trains a few steps on some ranks from `latest`, saves, and ends, or is killed on the
        way."""
        num_ranks, num_steps = self.chance.choice((1, 1, 1, 2, 3)), self.chance.choice((1, 2))
        durability = self.chance.choice(("checkpoint", "checkpoint", "step"))
        # else its last step is left as well
        copies = durability == "checkpoint" and self.chance.random() < 0.3
        plan = Plan(durability, copies=copies, keep=self.chance.choice((1, 2)), num_steps=num_steps)
        death = self.chance.choice((None, self._death(num_ranks)))
        ended = run_ranks(self.place, plan, num_ranks, train_on, death)
        if not ended.is_killed and ended.how != ["ended"] * num_ranks:
            raise AssertionError(f"a run nobody killed: {ended}\n{errors_of(self.place)}")
        for rank in range(num_ranks):
            self._check_said(self.place / f"said.{rank}")
        self.num_dead += ended.is_killed
        self.num_late = self.num_late + 1 if ended.is_killed else self.num_late * copies
        self.num_copies += copies
        if not ended.is_killed:
            self._check_tags()
        self.totals[
            f"train on {num_ranks}, {'killed while ' + ended.phase if ended.is_killed else 'ended'}"
        ] += 1

    def look(self) -> None:
        """fsck or inspect: never a traceback, and never anything changed."""
        before = _listing(self.place)
        words = self.chance.choice((["fsck"], ["fsck", "--verify"], ["inspect"]))
        where = self.chance.choice(("nvme", "saved"))
        status = command([words[0], str(self.place / where), *words[1:]], self.place)
        assert status in (0, 1, 2, 3, 4), (
            f"{words} on {where}: status {status}\n{errors_of(self.place)}"
        )
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

    def tidy(self) -> None:
        """fsck --remove takes the dead that hold nothing durable, and the others that it is told to
        take."""
        command(["fsck", str(self.place / "nvme"), "--remove"], self.place)
        pointers = [file.read_text() for file in self.place.glob("saved/*/tiermem.json")]
        for folder in sorted((self.place / "nvme").iterdir()):
            run = folder.name.split(".")[0]
            if (folder / "lock").exists() and not any(run in pointer for pointer in pointers):
                command(["fsck", str(folder), "--remove"], self.place)
        left = {
            folder.name.split(".")[0]
            for folder in (self.place / "nvme").iterdir()
            if not has_saved(folder)
        }
        # killed a moment ago, before they had a lock: that may still be a run that begins
        self.num_dead = len(left)
        latest = known_latest(self.place / "saved")
        tags = sorted(
            (self.place / "saved").glob("global_step*"), key=lambda tag: int(tag.name[11:])
        )
        copies = [
            tag
            for tag in tags
            if list(tag.glob("manifest-*.json")) and tag.name != (latest and latest.tag)
        ]
        for tag in copies[:-_MOST_COPIES]:
            shutil.rmtree(tag)
        for tag in tags:
            if tag.exists() and not list(tag.iterdir()):
                tag.rmdir()  # a save was killed before it wrote anything
        self.num_copies = min(len(copies), _MOST_COPIES) + 1
        self.totals["tidy"] += 1

    def finish(self) -> None:
        """One more run, and then the folder holds no more than that needs."""
        assert run_ranks(self.place, Plan(), 1, train_on).how == ["ended"], errors_of(self.place)
        for _ in range(60):
            self.tidy()
            if not self.num_dead:
                break
            time.sleep(0.1)  # until it is certain that they are dead: see is_stillborn
        assert command(["fsck", str(self.place / "nvme"), "--verify"], self.place) == 0, errors_of(
            self.place
        )
        [run] = (self.place / "nvme").iterdir()
        assert sorted(re.sub(r"\d+", "N", file.name) for file in run.iterdir()) == [
            "manifest-N.json",
            "part-N-N.json",
            "segment.bin",
        ]
        stores = [
            tag
            for tag in (self.place / "saved").glob("*/tiermem.json")
            if not list(tag.parent.glob("manifest*"))
        ]
        assert len(stores) == 1, f"tags of runs that are gone: {stores}"
        self.check()

    def check(self) -> None:
        """Only files that are known, and no more of them, and no more bytes, than there are
        runs."""
        odd = [name for name in _listing(self.place) if not _KNOWN.fullmatch(name)]
        assert not odd, f"unknown files: {odd}"
        runs = {folder.name.split(".")[0] for folder in (self.place / "nvme").iterdir()}
        most = self.num_dead + self.num_late + 3
        assert len(runs) <= most, f"{len(runs)} runs after {self.num_dead} deaths: {sorted(runs)}"
        tags = [tag.name for tag in (self.place / "saved").glob("global_step*")]
        most = self.num_dead + self.num_late + self.num_copies + 2
        assert len(tags) <= most, f"tags after {self.num_dead} deaths: {sorted(tags)}"
        for folder in [
            *(self.place / "nvme").iterdir(),
            *(self.place / "saved" / tag for tag in tags),
        ]:
            held = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
            assert held <= _MOST_RUN_BYTES, f"{folder.name} holds {held} bytes"
            self.most_bytes = max(self.most_bytes, held)

    def _check_tags(self) -> None:
        """In the folder of a tag lies its pointer and, if that points there, the copy that it
        names."""
        for tag in (self.place / "saved").glob("global_step*"):
            names = {file.name for file in tag.iterdir()} - {"tiermem.json", "README.txt"}
            if (tag / "tiermem.json").exists():
                pointer = json.loads((tag / "tiermem.json").read_text())
                names = {
                    name
                    for name in names
                    if f"-{pointer['run_id']}-{pointer['commit']}" not in name
                }
            elif any(name.startswith("manifest") for name in names):
                continue  # a whole copy, killed just before its pointer
            assert not names, f"{tag.name}: no pointer names {sorted(names)}"

    def _death(self, num_ranks: int) -> Death:
        rank = self.chance.randrange(num_ranks)
        if self.chance.random() < 0.5:
            return Death(rank, self.chance.randrange(120))
        phase = self.chance.choice((*PHASES[:4], PHASES[-1]))
        return Death(
            self.chance.choice((rank, None)), phase=phase, after_s=self.chance.uniform(0.0, 0.1)
        )

    def _check_said(self, file: Path) -> None:
        for line in lines_of(file):
            if "opened" in line and line["opened"] in self.digest_at:
                assert line["digest"] == self.digest_at[line["opened"]], (
                    f"{line}: not what was saved"
                )
            if "saved" in line:
                self.digest_at[line["saved"]] = line["digest"]
            assert not line.get("left"), f"left open: {line['left']}"
        file.unlink(missing_ok=True)


def train_on(place: Path, plan: Plan, rank: int, begin: Begin) -> None:
    """Opens the latest save, trains so many steps and saves. Every rank calls it."""
    said = Said(place / f"said.{rank}")
    begin("opening")
    before = _descriptors()
    engine, *_ = tiermem.initialize(model=Small(), config=config_of(place, plan))
    if (place / "saved" / "latest").exists():
        engine.load_checkpoint(str(place / "saved"))
        said(opened=engine.global_steps, digest=digest(engine))
    begin("training")
    for _ in range(plan.num_steps):
        step_once(engine, rank)
    found = digest(engine)
    begin("saving")
    # said before, so that whoever finds it knows what it must be
    said(saved=engine.global_steps, digest=found)
    engine.save_checkpoint(str(place / "saved"), **({"copy": True} if plan.copies else {}))
    begin("ending")
    engine.destroy()
    said(left=sorted(name for fd, name in _descriptors().items() if fd not in before))


def _descriptors() -> dict[int, str]:
    """What this process has open; on several ranks without what belongs to their process groups,
    which outlive an engine."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    is_alone = not dist.is_initialized()
    return {
        fd: name
        for fd, name in found.items()
        if is_alone or not name.startswith(("socket:", "pipe:", "anon_inode:[event"))
    }


def command(words: list[str], place: Path) -> int:
    """Runs a command of ours in a fork; returns its exit status."""

    def act() -> int:
        tiermem_command(words)
        return 0

    return in_fork(place, act)


def _listing(place: Path) -> list[str]:
    return sorted(
        str(path.relative_to(place))
        for path in place.rglob("*")
        if not path.name.startswith(("errors", "turns", "phases"))
    )


def main() -> None:
    """Runs what it is asked for, and writes the seed and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--totals", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument(
        "--sabotage",
        choices=sorted(sabotage.WAYS),
        help="break the library first: an operation must fail",
    )
    args = parser.parse_args()
    if args.sabotage:
        sabotage.WAYS[args.sabotage]()
    started, world = time.monotonic(), World(args.folder / "world", random.Random(args.seed))
    operations: list[Callable[[], None]] = (
        [world.train] * 6 + [world.look] * 2 + [world.export, world.tidy]
    )
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(args.count):
        if number % 100 == 0:
            print(f"{number} operations in {time.monotonic() - started:.0f} s", flush=True)
        operation = world.chance.choice(operations)
        try:
            operation()
            world.check()
        except AssertionError as error:
            raise AssertionError(
                f"seed {args.seed}, operation {number} ({operation.__name__}): {error}"
            ) from None
    world.finish()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    said = {
        "seed": args.seed,
        "operations": args.count,
        "seconds": round(time.monotonic() - started),
    }
    said |= {
        "most_bytes_of_a_folder": world.most_bytes,
        "totals": dict(sorted(world.totals.items())),
    }
    args.totals.write_text(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
