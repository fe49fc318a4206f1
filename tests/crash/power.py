"""Power: what a disk would hold if it failed now, where every sync is known.

    file      its bytes when its last sync began         folder    its names when its last sync began
    and since then    each sector may have arrived                 and each change of its names, up to any of them

A run tells of its durable steps (tiermem.swap.disk.durable); `Disk` notes beside the run's folders
what each sync has made lasting, and what the names were after each change. After the run's death
`fail` makes the folders what a power failure would have left of them: nothing that was not synced,
or a random part of it, sector by sector, and the changes of each folder up to a random one. A
folder's names lead to files by inode, so that a rename that was not synced is undone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tiermem.swap.disk import durable

SECTOR = 512
Loss = Literal["all", "some"]
Names = dict[str, tuple[int, bool]]
"""The inode of each name in a folder, and whether it is a folder."""


class Disk:
    """Notes what has been synced below some folders, which themselves are taken to last.

    Args:
        roots: what the run writes below.
        notes: an empty folder for the notes, on another disk so to say.
    """

    def __init__(self, roots: list[Path], notes: Path) -> None:
        self._roots, self._notes = roots, notes
        notes.mkdir(exist_ok=True)
        for root in roots:
            for path in (root, *root.rglob("*")):
                self._note(path, is_over=False)
                self._note(path, is_over=True)

    def saw(self, step: durable.Step) -> None:
        """Notes what a step of a run is to the disk. Called before and after each, by any rank."""
        path = Path(step.name)
        if not any(root == path or root in path.parents for root in self._roots):
            return
        if step.kind == "sync":
            with self._alone():
                self._note(path, is_over=step.when == "after")
        elif step.when == "after" and step.kind in ("write", "rename", "remove", "folder"):
            with self._alone():
                self._note_names(path.parent)
                # it may have the inode of one that is gone
                if step.kind == "folder" and path.is_dir():
                    (self._notes / f"{path.stat().st_ino}.names").unlink(missing_ok=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with (self._notes.with_suffix(".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks note what they sync in one place
            yield

    def _note(self, path: Path, is_over: bool) -> None:
        """Takes down what will last once a sync has ended, or that it has."""
        if not path.exists():
            return
        note = self._notes / f"{path.stat().st_ino}.{'names' if path.is_dir() else 'bytes'}"
        begun = note.with_name(f"{note.name}.{os.getpid()}.begun")
        if is_over:
            if begun.exists():
                os.replace(begun, note)
        elif path.is_dir():
            begun.write_text(json.dumps([self._hold(path)]))
        else:
            shutil.copy2(path, begun)

    def _note_names(self, folder: Path) -> None:
        """Its names have changed: `fail` may leave them as they are now."""
        if folder.is_dir():
            note = self._notes / f"{folder.stat().st_ino}.names"
            seen = json.loads(note.read_text()) if note.exists() else [{}]
            changed = note.with_name(f"{note.name}.{os.getpid()}.begun")
            changed.write_text(json.dumps([*seen, self._hold(folder)]))
            os.replace(changed, note)

    def _hold(self, folder: Path) -> Names:
        """The names in a folder; no other file gets the inode of one of its files, whatever becomes
        of it."""
        names = _names_in(folder)
        for name, (inode, _) in names.items():
            # a folder; gone meanwhile
            with contextlib.suppress(FileExistsError, FileNotFoundError, PermissionError):
                os.link(folder / name, self._notes / f"{inode}.held")
        return names

    def fail(self, loss: Loss, chance: random.Random) -> None:
        """The power fails: unsynced writes are gone, all of them or some. The run must be dead."""
        for root in self._roots:
            fresh = root.with_name(root.name + ".failed")
            self._rebuild(root, root.stat().st_ino, fresh, loss, chance, _by_inode(root))
            shutil.rmtree(root)
            fresh.rename(root)

    def _rebuild(
        self,
        old: Path | None,
        inode: int,
        new: Path,
        loss: Loss,
        chance: random.Random,
        found: dict[int, Path],
    ) -> None:
        new.mkdir()
        note = self._notes / f"{inode}.names"
        seen: list[Names] = json.loads(note.read_text()) if note.exists() else [{}]
        if old is not None:
            seen.append(_names_in(old))
        names = chance.choice(seen) if loss == "some" else seen[0]
        for name, (number, is_folder) in names.items():
            at = found.get(number)
            # a folder that is gone, whose inode has another use
            if at is not None and at.is_dir() != is_folder:
                at = None
            if is_folder:
                self._rebuild(at, number, new / name, loss, chance, found)
            else:
                (new / name).write_bytes(self._surviving(number, at, loss, chance))
                dated = self._notes / f"{number}.bytes" if at is None else at
                if dated.exists():  # a file system keeps a file's time with its name
                    os.utime(new / name, ns=(dated.stat().st_mtime_ns,) * 2)

    def _surviving(self, inode: int, at: Path | None, loss: Loss, chance: random.Random) -> bytes:
        note = self._notes / f"{inode}.bytes"
        synced = note.read_bytes() if note.exists() else b""
        if loss == "all" or at is None:
            return synced
        now = at.read_bytes()
        length = chance.choice([len(synced), len(now)])
        padded, since = synced.ljust(length, b"\0")[:length], now.ljust(length, b"\0")[:length]
        sectors = range(0, length, SECTOR)
        return b"".join(
            (since if chance.random() < 0.5 else padded)[at : at + SECTOR] for at in sectors
        )


def _names_in(folder: Path) -> Names:
    return {
        each.name: (each.inode(), each.is_dir(follow_symlinks=False)) for each in os.scandir(folder)
    }


def _by_inode(root: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for folder, _, _ in os.walk(root):
        found.update(
            {number: Path(folder) / name for name, (number, _) in _names_in(Path(folder)).items()}
        )
    return found
