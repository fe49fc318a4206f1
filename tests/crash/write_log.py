"""Write log: what a disk may hold if the power fails after any write of a run, from one log of all
that the run wrote.

    a supervised run --> log: every write with its bytes, every change of a name or a length, every
    sync, in their order a cut of the log --> what was synced before the cut lasts; of what came
    since, each sector of each write may have arrived or
                         not, in any order; a folder has the names of any moment since its last sync

power.py does this where a run was killed, with what its files held then. The log also knows what
was written in between: a sector that is written twice between two syncs may keep the first of both.
After each cut fsck must find nothing broken, and a process must open the last step that was durable
then, or a later one, to the bit.

    python write_log.py FOLDER --totals totals.json --seed 1 [--sample 20 --only 17 --workers 1]
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from nth import Bench, parser_of, run_all
from power import SECTOR, Loss
from supervisor import Entry

_TEMPORARY, _PUNCH = 0o20000000, 2  # __O_TMPFILE, FALLOC_FL_PUNCH_HOLE
_KEEP_SIZE, _ZERO = 1, 16


class Write(NamedTuple):
    """Bytes that go to a place in a file, or (no bytes) a new length."""

    offset: int
    data: bytes | None


class File:
    """What is known of a file's bytes."""

    def __init__(self, synced: bytes, age: int) -> None:
        self.synced, self.age, self.since = synced, age, list[Write]()

    def sync(self) -> None:
        """All that was written lasts."""
        self.synced, self.since = _applied(self.synced, self.since, None), []

    def surviving(self, chance: random.Random | None) -> bytes:
        """The bytes after a power failure; without a chance nothing but what was synced."""
        return self.synced if chance is None else _applied(self.synced, self.since, chance)


def _applied(before: bytes, writes: Iterable[Write], chance: random.Random | None) -> bytes:
    """Bytes after some writes; with a chance after any of their sectors, torn where it falls."""
    found = bytearray(before)
    for offset, data in writes:
        if data is None:
            if chance is None or chance.random() < 0.5:
                found[offset:] = bytes(max(0, offset - len(found)))
            continue
        share = 1.0 if chance is None else chance.choice((0.0, 0.5, 1.0))
        for at in range(0, len(data), SECTOR):
            if share == 1.0 or (chance is not None and chance.random() < share):
                start, piece = offset + at, data[at : at + SECTOR]
                found += bytes(max(0, start - len(found)))
                found[start : start + len(piece)] = piece
    return bytes(found)


class Disk:
    """What the log says of the files below some folders, which themselves last."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._roots = [str(root) for root in roots]
        self._files: dict[int, File] = {}
        self._now: dict[str, int] = {}  # by path; of a folder -1
        self._seen: dict[
            str, list[dict[str, int]]
        ] = {}  # by folder: its names at its last sync and after each change since
        for root in self._roots:
            for folder, names, files in os.walk(root):
                self._now |= {os.path.join(folder, name): -1 for name in names}
                for name in files:
                    path = os.path.join(folder, name)
                    self._add(path, Path(path).read_bytes(), os.stat(path).st_mtime_ns)
        for folder in [*self._roots, *(path for path, number in self._now.items() if number < 0)]:
            self._seen[folder] = [self._names(folder)]
        self._start = max((file.age for file in self._files.values()), default=0) + 1

    def play(self, entries: Iterable[Entry]) -> None:
        """Goes on by some entries."""
        for entry in entries:
            self._start += 1_000_000
            self._play(entry)

    def _play(self, entry: Entry) -> None:
        call, name, arguments = entry.call.removesuffix("at"), entry.name, entry.arguments
        file = self._files.get(self._now.get(name, -1))
        if call in ("fsync", "fdatasync"):
            if file is not None:
                file.sync()
            elif name in self._seen:
                self._seen[name] = self._seen[name][-1:]
        elif call in ("write", "pwrite") and file is not None:
            file.since.append(Write(entry.offset, entry.data))
            file.age = self._start
        elif call == "ftruncate" and file is not None:
            file.since.append(Write(arguments[1], None))
        elif call == "fallocate" and file is not None:
            self._allocate(file, *arguments[1:4])
        elif call == "open" and arguments[2] & os.O_CREAT and not arguments[2] & _TEMPORARY:
            if file is None:
                self._add(name, b"", self._start)
                self._change(name)
            elif arguments[2] & os.O_TRUNC:
                file.since.append(Write(0, None))
        elif call == "mkdir" and name not in self._now:
            self._now[name], self._seen[name] = -1, [{}]
            self._change(name)
        elif call == "rename" and name in self._now:
            self._now[entry.other] = self._now.pop(name)
            self._change(entry.other)
        elif call in ("unlink", "rmdir") and name in self._now and not self._names(name):
            del self._now[name]
            self._change(name)

    def fail(self, loss: Loss, chance: random.Random) -> None:
        """Makes the folders what they would be after a power failure at this point of the log."""
        for root in self._roots:
            shutil.rmtree(root)
            self._build(root, chance if loss == "some" else None)

    def _build(self, folder: str, chance: random.Random | None) -> None:
        os.mkdir(folder)
        seen = self._seen[folder]
        for name, number in (seen[0] if chance is None else chance.choice(seen)).items():
            path = os.path.join(folder, name)
            if number < 0:
                self._build(path, chance)
            else:
                Path(path).write_bytes(self._files[number].surviving(chance))
                os.utime(path, ns=(self._files[number].age,) * 2)

    def _add(self, path: str, data: bytes, age: int) -> None:
        self._now[path] = len(self._files)
        self._files[len(self._files)] = File(data, age)

    def _allocate(self, file: File, mode: int, offset: int, length: int) -> None:
        if mode & (_PUNCH | _ZERO):
            file.since.append(Write(offset, bytes(length)))
        elif not mode & _KEEP_SIZE:
            size = len(_applied(file.synced, file.since, None))
            file.since += [Write(offset + length, None)] if offset + length > size else []

    def _change(self, path: str) -> None:
        folder = os.path.dirname(path)
        self._seen.setdefault(folder, [{}]).append(self._names(folder))

    def _names(self, folder: str) -> dict[str, int]:
        start = folder + "/"
        paths = [
            path for path in self._now if path.startswith(start) and "/" not in path[len(start) :]
        ]
        return {path[len(start) :]: self._now[path] for path in paths}


# ---- every cut -----------------------------------------------------------------------------------

_CHANGES = frozenset(
    (
        "open",
        "write",
        "pwrite",
        "fsync",
        "fdatasync",
        "rename",
        "renameat",
        "unlink",
        "unlinkat",
        "mkdir",
        "mkdirat",
    )
) | {"rmdir", "ftruncate", "fallocate"}
# scenes of nth.py with different plans, on threads: the log sees system calls, not completions
PLANS = (0, 1, 2)


class Cut(NamedTuple):
    """A power failure after so many entries of the log of a scene's run."""

    scene: int
    at: int
    loss: Loss


class Cuts:
    """One worker's folder, with the log of each scene."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._bench = Bench(folder, library)
        self._logs: dict[int, list[Entry]] = {}

    def log(self, scene: int) -> list[Entry]:
        """All that the run of a scene writes."""
        if scene not in self._logs:
            entries = self._bench.log(scene)
            makes = [
                entry.call != "open" or bool(entry.arguments[2] & (os.O_CREAT | os.O_TRUNC))
                for entry in entries
            ]
            changes = [
                each
                for each, is_made in zip(entries, makes, strict=True)
                if each.call in _CHANGES and is_made
            ]
            self._logs[scene] = changes
        return self._logs[scene]

    def run(self, cut: Cut, seed: int) -> str:
        """Makes what a cut leaves and opens it. Raises AssertionError with what went wrong."""
        entries = self.log(cut.scene)[: cut.at]
        disk = Disk(self._bench.begin(cut.scene))
        disk.play(entries)
        disk.fail(cut.loss, random.Random(seed))
        durable = [line["durable"] for line in lines_in(entries) if "durable" in line]
        opened = self._bench.check(
            cut.scene, max([1, *durable]), f"after {entries[-1].call} of {entries[-1].name}"
        )
        return f"{cut.loss} lost: step {opened} opened"


def lines_in(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """What the run had said by then."""
    return [json.loads(entry.data) for entry in entries if entry.name.endswith("said.0")]


def cuts_of(cuts: Cuts, scenes: list[int]) -> Iterator[Cut]:
    """A cut after each entry: nothing arrived that was not synced, or some of it, in two ways."""
    for scene in scenes:
        for at in range(1, len(cuts.log(scene)) + 1):
            yield from (Cut(scene, at, loss) for loss in ("all", "some", "some"))


def main() -> int:
    """Runs what it is asked for and writes the seed and the totals."""
    return run_all(parser_of(__doc__, PLANS).parse_args(), Cuts, cuts_of, lambda cut: "a cut")


if __name__ == "__main__":
    sys.exit(main())
