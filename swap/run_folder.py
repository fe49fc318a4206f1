"""RunFolder: the folder that one run owns on one path, its lock, and what runs leave that die.

    <path>/tiermem-<run id>/lock     held (flock) while the run lives, gone when it has closed; says which process

The lock appears already held: it is locked under a temporary name and then renamed. A lock that nobody holds is thus
what a killed run left. Nothing outside the run's own folders is ever touched, and only files made here are removed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from pathlib import Path

FOLDER_PREFIX = "tiermem-"
SEGMENT = "segment.bin"
_LOCK, _NEW_LOCK = "lock", "lock.new"

logger = logging.getLogger("tiermem")


class RunFolder:
    """A new, locked folder. Raises OSError, and then nothing is left of it.

    Args:
        path: an existing, writable folder.
        run_id: names the run's folder below it.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.folder = path / f"{FOLDER_PREFIX}{run_id}"
        self.folder.mkdir()
        self._names = [_LOCK]  # of files made here
        try:
            self._lock_fd = _lock(self.folder)
        except BaseException:
            (self.folder / _NEW_LOCK).unlink(missing_ok=True)
            self.folder.rmdir()
            raise

    def make(self, name: str, flags: int) -> int:
        """A new file in the folder, open for reading and writing with `flags`; the caller closes it. Raises OSError."""
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o600)
        self._names.append(name)
        return fd

    def close(self, keep: bool) -> None:
        """Removes the lock; unless they are to be kept, also the files made here and the folder.

        Never raises: what cannot be removed is left, and what somebody else has removed already is said.
        """
        try:
            for name in self._names[:1] if keep else self._names:
                self._remove(name)
            if not keep:
                self._remove_folder()
        finally:
            lock_fd, self._lock_fd, self._names = self._lock_fd, -1, []
            if lock_fd >= 0:
                os.close(lock_fd)

    def _remove(self, name: str) -> None:
        try:
            (self.folder / name).unlink()
        except FileNotFoundError:
            logger.warning("%s had been removed by somebody else while the run used it", self.folder / name)
        except OSError as error:
            logger.warning("%s is left: %s", self.folder / name, error.strerror)

    def _remove_folder(self) -> None:
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            pass  # said of its files
        except OSError as error:
            logger.warning("%s is left: %s", self.folder, error.strerror)


def remove_dead_runs(path: Path, pid: int) -> list[str]:
    """Removes what runs of one process that has died left in a folder, and names it. Only files that a run makes go.

    For whoever started that process; raises OSError when something cannot be removed.
    """
    removed = []
    for folder in path.glob(f"{FOLDER_PREFIX}*"):
        if _is_dead(folder) and json.loads((folder / _LOCK).read_text()) == _owner(pid):
            (folder / SEGMENT).unlink(missing_ok=True)
            (folder / _LOCK).unlink()
            folder.rmdir()
            removed.append(folder.name)
    return removed


def report_dead_runs(path: Path) -> None:
    """Says once which folders killed runs left behind; they are the user's to resume or remove."""
    dead = [folder for folder in path.glob(f"{FOLDER_PREFIX}*") if _is_dead(folder)]
    if dead:
        size = sum(_size_of(folder / SEGMENT) for folder in dead)
        names = ", ".join(f.name for f in dead)
        logger.warning("%s holds %d bytes of runs that ended without closing: %s", path, size, names)


def _lock(folder: Path) -> int:
    fd = os.open(folder / _NEW_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, json.dumps(_owner(os.getpid())).encode())
        (folder / _NEW_LOCK).rename(folder / _LOCK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _owner(pid: int) -> dict[str, object]:
    """What a lock says of the process that holds it."""
    return {"pid": pid, "host": socket.gethostname()}


def _is_dead(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK, os.O_RDONLY)
    except OSError:  # no lock: closed in order, or just starting; not readable: somebody else's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed while we look
        return 0
