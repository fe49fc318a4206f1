"""RunFolder: the folder that one run owns on one path, its lock file, and the folders of killed
runs.

    <path>/tiermem-<run id>          folder of a run with one rank
    <path>/tiermem-<run id>.<rank>   folder of one of several ranks; all have the same run id
        lock                         names the run's process, while the run lives
        segment.bin                  states on NVMe                                        files.py
        manifest-*.json, part-*-*.json, data-*.bin    files of checkpoints; this file only knows their names

The lock file contains {"pid", "host", "started"}, and on a further path of the process "first": its
folder on the first path, which holds the files of its checkpoints. Its process holds it by flock:

    held        the run lives: other processes get an error with pid and host
    not held    the run was killed, and the kernel released its locks: another process takes it over, with a warning
    missing     the run was closed in order and its folder kept: the first process that asks takes it

The lock file of a new folder is locked under another name and then renamed, so it is held from its
first moment. A takeover does the same while it holds the old file; if several processes try, one of
them succeeds. flock decides, because the system reuses pids; pid and start time are information for
people. On a file system that several machines mount, another host's flock may be invisible, so its
lock file is never taken over there.

A process that only reads a kept run shares its folder (`share`: flock of the folder itself).
Several ranks or jobs can then resume from one checkpoint, and no process takes over or removes the
folder meanwhile. A forked child inherits descriptors and would keep the lock after its parent's
end: it closes its copies at once, and never unlocks or removes a file.

A run that saved leaves its folders without a lock file. A killed run leaves them with a lock file
that no process holds. Other runs leave no folder. tiermem removes only files of the names above in
folders of runs. It removes manifests first, so that an interrupted removal leaves nothing that
looks like a checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import functools
import json
import logging
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.swap.base.errors import printable
from tiermem.swap.disk import durable
from tiermem.swap.disk.direct import file_system_of

LOCK = "lock"
_NEW_LOCK = LOCK + durable.NEW_SUFFIX
_ONE_HOST = frozenset(  # file systems that only one kernel mounts, so that it sees all locks
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "f2fs",
        "bcachefs",
        "zfs",
        "tmpfs",
        "ramfs",
        "vfat",
        "exfat",
        "overlay",
    }
)
_MOST_LOCK_BYTES = 1 << 16
_LOOK_S = 0.01
_MOST_LOOKS = 10
_BIRTH_S = 5.0

logger = logging.getLogger("tiermem")


class RunOwner(NamedTuple):
    """The process that wrote a lock file; `started` is its start time in UTC, to the second, as ISO
    8601."""

    pid: int
    host: str
    started: str

    def __str__(self) -> str:
        if self == UNKNOWN:
            return "a process that it does not name"
        return f"process {self.pid} on {self.host}, started {self.started}"


UNKNOWN = RunOwner(0, "", "")
"""The owner of an unreadable lock file: its process was killed, or the machine stopped, while it
wrote the file."""


@contextlib.contextmanager
def share(folder: Path, run_id: str | None = None) -> Iterator[None]:
    """Prevents takeover and removal of a folder while the block reads it. Never writes there.

    run_id: a run whose live folders may be read, too: this process's own run.

    Raises OSError: EBUSY when the run lives, or may live on another host, or a process has taken
    the folder over.
    """
    with durable.opened(folder) as fd:
        _flock_folder(fd, folder, fcntl.LOCK_SH)
        owner = owner_of(folder)
        if owner is not None and not (
            run_id and folder.name.partition("-")[2].partition(".")[0] == run_id
        ):
            if is_live(folder):
                raise _lives(folder)
            _check_host(folder, owner)
        yield


def owner_of(folder: Path) -> RunOwner | None:
    """Returns the process that a folder's lock file names; UNKNOWN if the file is unreadable, None
    if there is none."""
    try:
        told = _told(folder)
        return RunOwner(
            int(told["pid"]), printable(str(told["host"])), printable(str(told.get("started", "")))
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return UNKNOWN


def _told(folder: Path) -> Any:
    return json.loads(durable.read_file(folder / LOCK, _MOST_LOCK_BYTES) or b"{}")


def _first_of(folder: Path) -> str:
    """The folder that holds the checkpoints of a folder's process, if that is another one; else
    empty."""
    try:
        return str(_told(folder).get("first", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def is_live(folder: Path) -> bool:
    """Whether a process of this machine, this one included, holds a folder's lock."""
    return is_held(folder / LOCK) or (
        not os.path.lexists(folder / LOCK) and is_held(folder / _NEW_LOCK)
    )


def is_dead(folder: Path) -> bool:
    """Whether a folder's process was killed: no process holds its lock file. False for an
    unreadable file of another user."""
    return (os.access(folder / LOCK, os.R_OK) and not is_held(folder / LOCK)) or is_stillborn(
        folder
    )


def is_stillborn(folder: Path) -> bool:
    """Whether a folder's process was killed before it had a lock file.

    Then the folder holds no file, or only an unheld lock.new, and did not change for 5 seconds.
    """
    try:
        return (
            {file.name for file in folder.iterdir()} <= {_NEW_LOCK}
            and time.time() - folder.stat().st_mtime > _BIRTH_S
            and not is_held(folder / _NEW_LOCK)
        )
    except OSError:  # gone, or another user's
        return False


def is_of_one_host(folder: Path) -> bool:
    """Whether only this kernel mounts a folder's file system, so that it sees every lock there."""
    return file_system_of(folder) in _ONE_HOST


def leads_to(path: Path, fd: int) -> bool:
    """Whether a path names the file or folder that a descriptor has open; False when it names
    none."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(fd))
    return False


def this_process() -> RunOwner:
    """Returns the owner that a lock file of this process names."""
    return RunOwner(os.getpid(), socket.gethostname(), _started(os.getpid()))


def _lock(folder: Path, first: str = "") -> int:
    """Puts a lock file that this process holds in place of any other one; returns its descriptor.

    Only the maker of the folder or the holder of its lock file may call this. Raises OSError; then
    the lock file is as it was.
    """
    new = folder / _NEW_LOCK
    new.unlink(missing_ok=True)  # left by a process that was killed at this point
    try:
        own = durable.Owned([durable.create(new, mode=0o600)])
        fd = own[0]
        with durable.named(new):
            # at most `is_live` of another process holds it, for a moment
            fcntl.flock(fd, fcntl.LOCK_EX)
            told = this_process()._asdict() | ({"first": first} if first else {})
            durable.write_all(fd, json.dumps(told).encode(), new)
        durable.rename(new, folder / LOCK)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return own.pop()


def _take_over(folder: Path) -> durable.Owned:
    """Locks the folder of a run that was closed or killed; a warning names a killed owner.

    Returns the descriptors of the lock file and of the folder. Raises OSError: EBUSY when the run
    lives, or may live on another host, or a process reads the folder.
    """
    while True:
        owner = None  # of an empty file: there was none, or its run was killed before it wrote it
        with contextlib.ExitStack() as undo:
            with durable.Owned(
                [durable.open_regular(folder / LOCK, os.O_RDWR | os.O_CREAT)]
            ) as old:
                _hold(old, folder)
                # another process took it over and has ended since: try again
                if not leads_to(folder / LOCK, old):
                    continue
                if os.fstat(old).st_size:
                    owner = owner_of(folder) or UNKNOWN
                    _check_host(folder, owner)
                else:
                    undo.callback((folder / LOCK).unlink, missing_ok=True)
                own = durable.opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                _flock_folder(own[0], folder, fcntl.LOCK_EX)
                own.insert(0, _lock(folder, _first_of(folder)))
            undo.pop_all()
        if owner is not None:
            logger.warning(
                "%s was left by %s, which has ended: its lock is taken over", folder, owner
            )
        return own


def _hold(fd: int, folder: Path) -> None:
    for patience in range(_MOST_LOOKS, -1, -1):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not patience:
                raise _lives(folder) from None
            time.sleep(_LOOK_S)  # the holder may be another process in `is_live`
        except OSError as error:
            raise durable.naming(error, folder / LOCK) from None


def _lives(folder: Path) -> OSError:
    return OSError(
        errno.EBUSY,
        f"its run lives: {owner_of(folder) or UNKNOWN} holds {LOCK}. Wait for its end, or stop it, "
        "or use another folder",
        str(folder),
    )


def _flock_folder(fd: int, folder: Path, kind: int) -> None:
    """Locks a folder itself, if its file system can (NFS cannot lock for writers). Raises OSError
    (EBUSY)."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        doing = (
            "another process reads it"
            if kind == fcntl.LOCK_EX
            else "another process has taken it over"
        )
        raise OSError(errno.EBUSY, f"{doing}: wait for its end", str(folder)) from None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
            raise


def _check_host(folder: Path, owner: RunOwner) -> None:
    here = socket.gethostname()
    kind = file_system_of(folder)
    if owner != UNKNOWN and owner.host != here and not is_of_one_host(folder):
        raise OSError(
            errno.EBUSY,
            f"it belongs to {owner}, and it cannot be seen from {here} whether that lives: this is "
            f"{kind}, which several machines may share. Open it on {owner.host}; or, when that "
            f"process has ended for certain, remove the file {LOCK}",
            str(folder),
        )


def is_held(file: Path) -> bool:
    """Whether a process holds the lock of a file; False for what cannot be opened or is no file."""
    try:
        own = durable.Owned([durable.open_regular(file)])
    except OSError:  # none, another user's, or no lock
        return False
    with own as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except OSError:
            return True


def _started(pid: int) -> str:
    """Returns the start time of a process of this machine; empty if /proc does not tell it."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text().splitlines()
        booted = int(next(line for line in lines if line.startswith("btime ")).split()[1])
        at = datetime.datetime.fromtimestamp(
            booted + ticks // os.sysconf("SC_CLK_TCK"), datetime.timezone.utc
        )
        return at.isoformat()
    return ""


_inherited = weakref.WeakKeyDictionary[Any, Callable[[Any], object]]()


def call_in_child(owner: Any, act: Callable[[Any], object]) -> None:
    """Calls `act(owner)` at the start of every child that is forked while the owner lives."""
    _watch_forks()
    _inherited[owner] = act


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_act_in_child)


def _act_in_child() -> None:
    for owner, act in tuple(_inherited.items()):
        act(owner)


FOLDER_PREFIX = "tiermem-"
SEGMENT = "segment.bin"
_RUN_ID = r"[A-Za-z0-9_-]{1,64}"
_FOLDER = re.compile(rf"{FOLDER_PREFIX}({_RUN_ID})(?:\.(\d{{1,9}}))?")
_OF_COMMIT = re.compile(
    rf"{durable.NEW_PREFIX}?(?:manifest-\d+\.json|part-\d+-\d+\.json|data-\d+\.bin)(?:\.new)?"
)
_MADE = re.compile(rf"segment\.bin|lock(?:\.new)?|{_OF_COMMIT.pattern}")
_STATES = re.compile(r"(?:segment|data-\d+)\.bin")
_SAVED = re.compile(r"(?:manifest-\d+|part-\d+-\d+)\.json")
_MANIFEST = re.compile(r"manifest-\d+\.json")


class RunName(NamedTuple):
    """The name of a run's folders: the run id, and the rank if there are several ranks."""

    run_id: str
    rank: int | None = None

    @classmethod
    def new(cls) -> RunName:
        """Makes a new random name."""
        return cls(secrets.token_hex(6))

    @classmethod
    def of(cls, folder: Path) -> RunName | None:
        """Returns the name that a folder was made with; None for a folder that is no run's."""
        found = _FOLDER.fullmatch(folder.name)
        return None if found is None else cls(found[1], None if found[2] is None else int(found[2]))

    @property
    def folder_name(self) -> str:
        """The name of the folder below each path. Raises ValueError for an invalid run id or
        rank."""
        name = f"{FOLDER_PREFIX}{self.run_id}" + ("" if self.rank is None else f".{self.rank}")
        if RunName.of(Path(name)) != self:
            raise ValueError(
                f"run id {self.run_id!r} and rank {self.rank!r} name no folder; allowed: "
                f"{_RUN_ID}, 0 or more"
            )
        return name


class RunFolder:
    """A folder whose lock this process holds: a new one (`new`), or one that an earlier run left
    (`claim`)."""

    def __init__(self, folder: Path, own: durable.Owned) -> None:
        self.folder = folder
        # of the lock file, and of a folder that was taken over: its flock keeps others from sharing
        # it
        self._own = own
        self._pid = os.getpid()
        self._made: list[str] = []  # files that this object made
        call_in_child(self, RunFolder._unlock)

    @classmethod
    def new(cls, path: Path, run: RunName, first: Path | None = None) -> RunFolder:
        """Makes a run's folder in an existing, writable folder. Raises OSError; then the new folder
        is removed.

        first: the first path of the process, if this is a further one.
        """
        folder = path / run.folder_name
        try:
            with durable.step("folder", folder), durable.named(folder):
                folder.mkdir(mode=0o700)
            told = "" if first is None else str(first / run.folder_name)
            return cls(folder, durable.Owned([_lock(folder, told)]))
        except FileExistsError:
            raise
        except BaseException:  # an interrupt may come when the lock file is there
            for name in (_NEW_LOCK, LOCK):
                (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()
            raise

    @classmethod
    def claim(cls, folder: Path) -> RunFolder:
        """Takes over the folder of a closed or killed run, to read or to remove it.

        Raises OSError: EBUSY when the run lives or may live on another host; ENOENT when the folder
        is no run's.
        """
        is_left = any((folder / name).exists() for name in (LOCK, SEGMENT)) or is_stillborn(folder)
        if RunName.of(folder) is None or not is_left:
            raise FileNotFoundError(
                errno.ENOENT, "this is no folder that a run has left", str(folder)
            )
        return cls(folder, _take_over(folder))

    def make(self, name: str, flags: int) -> int:
        """Makes a new file, open for reading and writing with `flags`. Returns its descriptor,
        which the caller closes.

        Raises OSError.
        """
        self._made.append(name)
        return durable.create(self.folder / name, flags=flags, mode=0o600)

    def close(self, keep: bool) -> None:
        """Removes the lock file; without `keep` also removes the files that runs make, and the
        folder.

        Never raises OSError: a warning names files that cannot be removed and files that were
        missing already. Does nothing in a forked child.
        """
        if not self._own or os.getpid() != self._pid:
            return
        if not keep:
            _remove_made(self.folder, self._made)
        try:
            remove(self.folder / LOCK, syncs=False, is_expected=True)
        finally:
            self._unlock()
        if not keep:
            _remove_folder(self.folder)

    def _unlock(self) -> None:
        while self._own:
            with contextlib.suppress(OSError):  # the descriptor is closed nevertheless
                self._own.close()


def remove_dead_runs(paths: Iterable[Path], pid: int) -> list[Path]:
    """Removes the folders that a killed process left on its paths, except folders with
    checkpoints; returns them.

    The process that started the killed one calls it. A warning names a folder that cannot be taken
    over.
    """
    left = []
    for folder in (folder for path in paths for folder in run_folders(path)):
        owner = owner_of(folder)
        is_its = owner is not None and (owner.pid, owner.host) == (pid, socket.gethostname())
        if is_its and is_dead(folder) and not has_saved(folder):
            left.append(folder)
    removed = []
    for folder in left:
        try:
            RunFolder.claim(folder).close(keep=False)
            removed.append(folder)
        except OSError as error:  # another user's, which only claims to be of that process
            logger.warning("%s is left: %s", folder, error.strerror)
    return removed


def report_dead_runs(path: Path) -> None:
    """Warns about the folders of killed runs on a path; the user resumes or removes them."""
    dead = [folder for folder in run_folders(path) if is_dead(folder)]
    if dead:
        size = sum(_size_of(folder / SEGMENT) for folder in dead)
        logger.warning(
            "%s holds %d bytes of runs that ended without closing: %s",
            path,
            size,
            ", ".join(folder.name for folder in dead),
        )


def run_folders(path: Path) -> list[Path]:
    """Returns the folders of runs on a path, sorted. A link is none, wherever it leads."""
    found = (each for each in path.glob(f"{FOLDER_PREFIX}*") if RunName.of(each) is not None)
    return sorted(each for each in found if not each.is_symlink() and each.is_dir())


def is_made(name: str) -> bool:
    """Whether runs make files of this name in their folders; these are removed with the folder."""
    return _MADE.fullmatch(name) is not None


def holds_states(name: str) -> bool:
    """Whether files of this name hold states: those on NVMe, or those in memory that a checkpoint
    saves."""
    return _STATES.fullmatch(name) is not None


def is_of_commit(name: str) -> bool:
    """Whether checkpoints make files of this name."""
    return _OF_COMMIT.fullmatch(name) is not None


def has_saved(folder: Path) -> bool:
    """Whether a folder, or its process's folder on the first path, holds part of a checkpoint: a
    manifest (only in rank 0's folder) or a rank's part. True where that cannot be seen: the disk of
    the first path may not be mounted."""
    try:
        return any(
            _SAVED.fullmatch(file.name)
            for each in filter(None, (str(folder), _first_of(folder)))
            for file in Path(each).iterdir()
        )
    except OSError:
        return True


def _remove_made(folder: Path, expected: list[str]) -> None:
    """Removes every file that runs make, except the lock file. Removes and syncs manifests first;
    while one stays, all stay."""
    try:
        names = {name for name in os.listdir(folder) if is_made(name) and name != LOCK}
    except FileNotFoundError:
        names = set()
    except OSError as error:
        logger.warning("%s is left: %s", folder, error.strerror)
        return
    for name in sorted(
        names.union(expected), key=lambda name: (not _MANIFEST.fullmatch(name), name)
    ):
        if name in expected:
            expected.remove(name)  # first: if an interrupt follows, no second call misses it
        is_manifest = _MANIFEST.fullmatch(name) is not None
        if not remove(folder / name, syncs=is_manifest, is_expected=True) and is_manifest:
            return


def remove(file: Path, syncs: bool = True, is_expected: bool = False) -> bool:
    """Removes a file of a run or a checkpoint if it exists; returns whether it is gone. Never
    raises OSError. Blocks.

    A warning names a file that cannot be removed, a folder that cannot be synced, and a missing
    file that is expected. While a manifest exists, the files that it names stay and its slots are
    not written to.
    """
    try:
        durable.remove(file, syncs)
    except FileNotFoundError:
        if is_expected:
            logger.warning("%s had been removed while the run used it", file)
    except OSError as error:
        logger.warning("%s is left: %s", error.filename, error.strerror)
        return str(error.filename) != str(file)  # but of the folder, whose sync failed
    return True


def _remove_folder(folder: Path) -> None:
    try:
        with durable.step("remove", folder):
            folder.rmdir()
    except FileNotFoundError:
        pass  # `_remove_made` has warned already
    except OSError as error:
        logger.warning("%s is left: %s", folder, error.strerror)


def _size_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:  # removed in the meantime
        return 0
