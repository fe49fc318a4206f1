"""Power: what a disk would hold if it failed now, where every sync is known.

    file      its bytes at its last sync                 folder    its names at its last sync
    and since then                                        each page and each folder may have arrived, or not

A run tells of its syncs (tiermem.swap.durable); `Disk` notes beside the run's folders what each of them made lasting. After
the run's death `fail` makes the folders what a power failure would have left of them: nothing that was not synced, or a
random part of it, page by page. A folder's names lead to files by inode, so that a rename that was not synced is undone.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from pathlib import Path
from typing import Literal

PAGE = 4096
Loss = Literal["all", "some"]


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
                self.synced(path)

    def synced(self, path: Path) -> None:
        """A file or folder has been synced: what it is now will last."""
        if not any(root == path or root in path.parents for root in self._roots) or not path.exists():
            return
        with (self._notes.with_suffix(".lock")).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks note what they sync in one place
            note = self._notes / f"{path.stat().st_ino}.new"
            if path.is_dir():
                note.write_text(json.dumps(_names_in(path)))
            else:
                shutil.copyfile(path, note)
            os.replace(note, self._notes / f"{path.stat().st_ino}.{'names' if path.is_dir() else 'bytes'}")
            self._forget()

    def _forget(self) -> None:
        """Drops notes of files that are gone for good: another may get the same inode."""
        known = {number for root in self._roots for number in _by_inode(root)}
        known |= {root.stat().st_ino for root in self._roots}
        for names in self._notes.glob("*.names"):
            known.update(json.loads(names.read_text()).values())
        for note in self._notes.iterdir():
            if int(note.stem) not in known:
                note.unlink()

    def fail(self, loss: Loss, chance: random.Random) -> None:
        """The power fails: unsynced writes are gone, all of them or some. The run must be dead."""
        for root in self._roots:
            fresh = root.with_name(root.name + ".failed")
            self._rebuild(root, root.stat().st_ino, fresh, loss, chance, _by_inode(root))
            shutil.rmtree(root)
            fresh.rename(root)

    def _rebuild(
        self, old: Path | None, inode: int, new: Path, loss: Loss, chance: random.Random, found: dict[int, Path]
    ) -> None:
        new.mkdir()
        note = self._notes / f"{inode}.names"
        names: dict[str, int] = json.loads(note.read_text()) if note.exists() else {}
        if loss == "some" and old is not None and chance.random() < 0.5:
            names = _names_in(old)
        for name, number in names.items():
            at = found.get(number)
            if (self._notes / f"{number}.names").exists() or (at is not None and at.is_dir()):
                self._rebuild(at, number, new / name, loss, chance, found)
            else:
                (new / name).write_bytes(self._surviving(number, at, loss, chance))

    def _surviving(self, inode: int, at: Path | None, loss: Loss, chance: random.Random) -> bytes:
        note = self._notes / f"{inode}.bytes"
        synced = note.read_bytes() if note.exists() else b""
        if loss == "all" or at is None:
            return synced
        now = at.read_bytes()
        length = chance.choice([len(synced), len(now)])
        padded, since = synced.ljust(length, b"\0")[:length], now.ljust(length, b"\0")[:length]
        pages = [(since if chance.random() < 0.5 else padded)[i : i + PAGE] for i in range(0, length, PAGE)]
        return b"".join(pages)


def _names_in(folder: Path) -> dict[str, int]:
    return {each.name: each.inode() for each in os.scandir(folder)}


def _by_inode(root: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for folder, _, _ in os.walk(root):
        found.update({number: Path(folder) / name for name, number in _names_in(Path(folder)).items()})
    return found
