"""RunFolder: the folder that one run owns on one path, and what runs leave that die.

    <path>/tiermem-<run id>          of a run of one rank
    <path>/tiermem-<run id>.<rank>   of one rank of several; the run id is the same for all
        lock                         while the run lives; says which process            run_lock.py
        segment.bin                  what rests on NVMe                                 segment.py
        manifest-*.json, part-*-*.json, data-*.bin    what a checkpoint adds, on another floor; here only their names are known

A run that saved leaves its folders without a lock; one that was killed leaves them with a lock that nobody holds; any other
leaves nothing. Nothing outside the run's own folders is ever touched, and in them only files of those names are removed:
manifests first, so that a removal that is cut short leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from tiermem.swap import durable
from tiermem.swap.run_lock import LOCK, is_dead, is_stillborn, lock_new, owner_of, take_over

FOLDER_PREFIX = "tiermem-"
SEGMENT = "segment.bin"
_RUN_ID = r"[A-Za-z0-9_-]{1,64}"
_FOLDER = re.compile(rf"{FOLDER_PREFIX}({_RUN_ID})(?:\.(\d{{1,9}}))?")
_MADE = re.compile(r"(?:segment\.bin|lock|manifest-\d+\.json|part-\d+-\d+\.json|data-\d+\.bin)(?:\.new)?")
_STATES = re.compile(r"(?:segment|data-\d+)\.bin")
_OF_COMMIT = re.compile(r"(?:manifest-\d+\.json|part-\d+-\d+\.json|data-\d+\.bin)(?:\.new)?")
_PART = re.compile(r"part-\d+-\d+\.json")
_MANIFEST = re.compile(r"manifest-\d+\.json")

logger = logging.getLogger("tiermem")


class RunName(NamedTuple):
    """What names a run's folders: the run, and the rank when there are several."""

    run_id: str
    rank: int | None = None

    @classmethod
    def new(cls) -> RunName:
        """A name that no other run has."""
        return cls(secrets.token_hex(6))

    @classmethod
    def of(cls, folder: Path) -> RunName | None:
        """The name that a folder was made with; None when it is no run's."""
        found = _FOLDER.fullmatch(folder.name)
        return None if found is None else cls(found[1], None if found[2] is None else int(found[2]))

    @property
    def folder_name(self) -> str:
        """The folder's, below each path. Raises ValueError for a name that is none."""
        name = f"{FOLDER_PREFIX}{self.run_id}" + ("" if self.rank is None else f".{self.rank}")
        if RunName.of(Path(name)) != self:
            raise ValueError(
                f"run id {self.run_id!r} and rank {self.rank!r} name no folder; allowed: {_RUN_ID}, 0 or more"
            )
        return name


class RunFolder:
    """A folder that this process holds the lock of: a new one, or one that a run has left (`claim`).

    Args:
        path: an existing, writable folder.
        run: names the run's folder below it.

    Raises OSError, and then nothing is left of it.
    """

    def __init__(self, path: Path, run: RunName) -> None:
        self.folder = path / run.folder_name
        with durable.step("folder", self.folder):
            self.folder.mkdir()
        self._made: list[str] = []  # files that must be there
        try:
            self._lock = lock_new(self.folder)
        except BaseException:
            self.folder.rmdir()
            raise

    @classmethod
    def claim(cls, folder: Path) -> RunFolder:
        """Takes over what a run has left, killed or kept, to read or to remove it.

        Raises OSError: EBUSY when its run lives, or may live on another host; ENOENT when this is no run's folder.
        """
        is_left = any((folder / name).exists() for name in (LOCK, SEGMENT)) or is_stillborn(folder)
        if RunName.of(folder) is None or not is_left:
            raise FileNotFoundError(errno.ENOENT, "this is no folder that a run has left", str(folder))
        claimed = cls.__new__(cls)
        claimed.folder, claimed._made, claimed._lock = folder, [], take_over(folder)
        return claimed

    def make(self, name: str, flags: int) -> int:
        """A new file in the folder, open for reading and writing with `flags`; the caller closes it. Raises OSError."""
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
        self._made.append(name)
        return fd

    def close(self, keep: bool) -> None:
        """Gives up the lock; unless it is to be kept, removes what runs make in it, and the folder.

        Never raises OSError: what cannot be removed is left, and what somebody else has removed already is said. In a
        forked child it does nothing.
        """
        if not self._lock.is_held:
            return
        if not keep:
            _remove_made(self.folder, self._made)
        try:
            self._lock.remove()
        except FileNotFoundError:
            logger.warning("%s had been removed by somebody else while the run used it", self.folder / LOCK)
        except OSError as error:
            logger.warning("%s is left: %s", self.folder / LOCK, error.strerror)
        if not keep:
            _remove_folder(self.folder)


def remove_dead_runs(path: Path, pid: int) -> list[str]:
    """Removes what runs of one process that has died left in a folder, and names it; a run that has saved is spared.

    For whoever started that process; raises OSError when something cannot be removed.
    """
    removed = []
    for folder in run_folders(path):
        owner = owner_of(folder)
        if owner is None or (owner.pid, owner.host) != (pid, socket.gethostname()) or not is_dead(folder):
            continue
        if not has_saved(folder):
            RunFolder.claim(folder).close(keep=False)
            removed.append(folder.name)
    return removed


def report_dead_runs(path: Path) -> None:
    """Says once which folders killed runs left behind; they are the user's to resume or remove."""
    dead = [folder for folder in run_folders(path) if is_dead(folder)]
    if dead:
        size = sum(_size_of(folder / SEGMENT) for folder in dead)
        names = ", ".join(f.name for f in dead)
        logger.warning("%s holds %d bytes of runs that ended without closing: %s", path, size, names)


def run_folders(path: Path) -> list[Path]:
    """The folders of runs on a path, in order."""
    return sorted(folder for folder in path.glob(f"{FOLDER_PREFIX}*") if RunName.of(folder) is not None)


def is_made(name: str) -> bool:
    """Whether a file of this name in a run's folder is one that runs make, and may be removed with it."""
    return _MADE.fullmatch(name) is not None


def holds_states(name: str) -> bool:
    """Whether a file of this name in a run's folder holds states: what rests on NVMe, or what a checkpoint adds of memory."""
    return _STATES.fullmatch(name) is not None


def is_of_commit(name: str) -> bool:
    """Whether it is one that a checkpoint adds."""
    return _OF_COMMIT.fullmatch(name) is not None


def has_saved(folder: Path) -> bool:
    """Whether a folder holds part of a checkpoint: a manifest, which only the first rank's does, or a rank's part."""
    return any(_MANIFEST.fullmatch(file.name) or _PART.fullmatch(file.name) for file in folder.iterdir())


def _remove_made(folder: Path, expected: list[str]) -> None:
    """Removes every file that a run makes but the lock; manifests first, and for good before the rest goes."""
    try:
        names = [file.name for file in folder.iterdir() if _MADE.fullmatch(file.name) and file.name != LOCK]
    except FileNotFoundError:
        names = []
    for name in sorted({*names, *expected}, key=lambda name: (not _MANIFEST.fullmatch(name), name)):
        try:
            durable.remove(folder / name, syncs=_MANIFEST.fullmatch(name) is not None)
        except FileNotFoundError:
            logger.warning("%s had been removed by somebody else while the run used it", folder / name)
        except OSError as error:
            logger.warning("%s is left: %s", folder / name, error.strerror)


def _remove_folder(folder: Path) -> None:
    try:
        with durable.step("remove", folder):
            folder.rmdir()
    except FileNotFoundError:
        pass  # said of its files
    except OSError as error:
        logger.warning("%s is left: %s", folder, error.strerror)


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed while we look
        return 0
