"""Durable: every sync, rename, removal and small file of tiermem, so that their results survive a
crash.

    read_file    a small file's bytes; raises an error at once for anything but a regular file
    NewFile      a file in the making; until it is whole it is named <random>.NAME.new in the same folder
    write_file   bytes -> NewFile -> sync -> rename to NAME -> sync the folder
    remove       unlink -> sync the folder
    make_folder  mkdir -> sync the folder above
    sync         puts the bytes written through a descriptor, and the file's length, on the disk

So NAME has the complete old content or the complete new content, whenever the machine stops. A
killed process may leave a `.new` file; tiermem never reads it, and the next save removes it
(checkpoint/saving/publish.py).

Others may have written into the folder: a stranger's archive was unpacked there, or users share it.
So a new file never opens what is there. Its folder is opened once, its name is random and taken
with O_EXCL and O_NOFOLLOW, and a rename replaces a link without following it.

Observers get each step before and after it is done; tests stop a program at every step. Freezes,
thaws and changes of slots also change what a crash leaves on the disk; their code announces them
with `step`. If an observer raises, the step fails. The list of observers is the only state here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tiermem.swap.base.errors import remedy

Kind = Literal["sync", "write", "rename", "remove", "folder", "freeze", "thaw", "slot"]

NEW_SUFFIX = ".new"  # of a file that is being written
NEW_PREFIX = r"(?:[0-9a-f]{12}\.)"  # the pattern of what stands before its name


class Step(NamedTuple):
    """A change on the disk, before or after it is done."""

    when: Literal["before", "after"]
    kind: Kind
    name: str  # the path, or what the freeze, thaw or slot is of


Observer = Callable[[Step], None]

_observers: list[Observer] = []


@contextlib.contextmanager
def watch(observer: Observer) -> Iterator[None]:
    """Calls an observer for every step of any thread within the block. The step raises the
    observer's exception."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def is_watched() -> bool:
    """Whether there is an observer."""
    return bool(_observers)


@contextlib.contextmanager
def step(kind: Kind, name: str | os.PathLike[str]) -> Iterator[None]:
    """Announces what the block does: before, and after unless it raised."""
    _announce("before", kind, name)
    yield
    _announce("after", kind, name)


@contextlib.contextmanager
def named(name: Path) -> Iterator[None]:
    """Makes every OSError of the block name this path and say what to do."""
    try:
        yield
    except OSError as error:
        raise naming(error, name) from None


def open_regular(path: Path, flags: int = os.O_RDONLY, follows: bool = False) -> int:
    """Opens a regular file and returns its descriptor; never waits, as opening a FIFO does.

    follows: a link in the place of the file may lead to it. The files of runs and checkpoints are
        no links; folders above them may be, and what a user names or another system wrote.

    Raises OSError that names the path: ELOOP for a link, EINVAL for a FIFO, a device or a socket,
    EISDIR for a folder.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW)
    with named(path):
        try:
            opened = Owned([os.open(path, flags, 0o600)])
        except OSError as error:
            if error.errno == errno.ELOOP and path.is_symlink():
                raise OSError(
                    errno.ELOOP, "is a symbolic link where a regular file is due"
                ) from None
            raise
        check_regular(opened[0])
    return opened.pop()


def check_regular(fd: int) -> None:
    """Raises OSError unless a descriptor that was opened with O_NONBLOCK is a regular file's; takes
    O_NONBLOCK off it."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "is a folder where a regular file is due")
    if not stat.S_ISREG(mode):
        kind = (
            "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        )
        raise OSError(errno.EINVAL, f"is {kind} where a regular file is due")
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)


def exists(path: Path) -> bool:
    """Whether a name is taken, also by a link that leads nowhere. Raises OSError where that cannot
    be seen, by EIO for one."""
    try:
        path.lstat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def read_file(path: Path, most_bytes: int, follows: bool = False) -> bytes:
    """Returns the first most_bytes + 1 bytes of a file; the extra byte shows that it is longer.
    Blocks. Raises OSError."""
    with open(open_regular(path, follows=follows), "rb") as file, named(path):
        # it takes this much memory at once
        return file.read(min(os.fstat(file.fileno()).st_size, most_bytes) + 1)


class Owned(list[int]):
    """Descriptors that are closed once: at the end of a `with` block, which gets the first, or when
    this object is gone.

    `Owned([os.open(...)])` is one expression of C: an interrupt at a later line finds the owner.
    """

    # an interpreter that ends empties modules before it collects the last objects
    _close_one = staticmethod(os.close)

    def __enter__(self) -> int:
        return self[0]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes them; a second call does nothing. Raises OSError."""
        while self:
            self._close_one(self.pop())

    __del__ = close


def new_name(path: Path) -> Path:
    """A random name beside a path, for what gets its name when it is whole. No longer than a file
    system takes: 255 bytes."""
    short = os.fsencode(path.name)[:200].decode(errors="ignore")
    return path.with_name(f"{secrets.token_hex(6)}.{short}{NEW_SUFFIX}")


def left_of(path: Path) -> Iterator[Path]:
    """What has, or had, a name of `new_name` for a path. Raises OSError."""
    random, _, rest = new_name(path).name.partition(".")
    yield from path.parent.glob(f"{'[0-9a-f]' * len(random)}.{glob.escape(rest)}")


class NewFile:
    """A file in the making: `sync` makes its bytes durable, `place` gives it the name `path`,
    `close` removes it before that.

    Attributes:
        name: the random one. Its process holds a flock on the file while it writes.

    Raises OSError that names the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = new_name(path)
        self._is_placed = False
        self._own = Owned()
        self._own_folder = Owned()
        with named(path):
            self._own_folder.append(
                os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            )
            self._own.append(create(self.name, self._own_folder[0]))
            with contextlib.suppress(OSError):  # without locks no save removes unfinished files
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fd(self) -> int:
        """Its descriptor, open for reading and writing until `close`."""
        return self._own[0]

    @property
    def by_descriptor(self) -> Path:
        """A path that opens this very file, whatever has its name meanwhile."""
        return Path(f"/proc/self/fd/{self.fd}")

    def write(self, data: bytes) -> None:
        """Writes all its bytes, and syncs them. Blocks; raises OSError that names the path."""
        with named(self.path):
            write_all(self.fd, data, self.name)
            self.sync()

    def sync(self) -> None:
        """Blocks until its bytes are on the disk. Raises OSError."""
        sync(self.fd, self.name)

    def place(self) -> None:
        """Renames it, in place of what has the name; not synced: see `sync_names`. Raises
        OSError."""
        with named(self.path), step("rename", self.path):
            os.rename(
                self.name.name,
                self.path.name,
                src_dir_fd=self._own_folder[0],
                dst_dir_fd=self._own_folder[0],
            )
        self._is_placed = True

    def sync_names(self) -> None:
        """Blocks until the names in its folder are on the disk. Raises OSError."""
        _sync_names(self._own_folder[0], self.path.parent)

    def close(self) -> None:
        """Removes the file unless it has been placed. Never raises OSError; calling it twice does
        nothing."""
        with contextlib.suppress(OSError):
            if self._own and not self._is_placed:
                os.unlink(self.name.name, dir_fd=self._own_folder[0])
        for own in (self._own, self._own_folder):
            with contextlib.suppress(OSError):
                own.close()


def create(path: Path, folder: int | None = None, flags: int = 0, mode: int = 0o666) -> int:
    """Makes a file, which must not exist, and returns its descriptor, open for reading and writing.

    folder: a descriptor of the folder, where it is open already. mode: before the umask. Raises
        OSError.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path if folder is None else path.name, flags, mode, dir_fd=folder)


def create_anew(path: Path) -> int:
    """Makes an empty file in place of what has the name, which is not opened; returns its
    descriptor. Raises OSError."""
    with named(path), opened(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return create(path, folder)


def write_file(path: Path, data: bytes) -> None:
    """Makes or replaces a small file; whole and on the disk on return. Blocks. Raises OSError that
    names the path.

    After an error `path` is as it was, unless the error is that of the folder's sync: the folder is
    opened before the rename.
    """
    with NewFile(path) as new:
        new.write(data)
        new.place()
        new.sync_names()


def write_all(fd: int, data: bytes, name: Path) -> None:
    """Writes bytes through a descriptor, all of them. Raises OSError that names the file."""
    with named(name), step("write", name):
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]


def sync(fd: int, name: Path) -> None:
    """Blocks until what was written through a descriptor is on the disk; GIL free. Raises OSError
    that names the file.

    After an error, any bytes written since the last successful sync may be missing on the disk.
    """
    with named(name), step("sync", name):
        os.fdatasync(fd)


def sync_folder(folder: Path) -> None:
    """Blocks until the names in a folder are on the disk. Raises OSError that names it."""
    with named(folder), opened(folder) as fd:
        _sync_names(fd, folder)


def opened(path: Path, flags: int = os.O_RDONLY | os.O_DIRECTORY) -> Owned:
    """Opens a folder, or with other flags a file, for a `with` block, which gets the descriptor.
    Raises OSError."""
    return Owned([os.open(path, flags | os.O_CLOEXEC, 0o600)])


def rename(old: Path, new: Path) -> None:
    """Gives a file another name, in place of what has it; not synced: see `sync_folder`. Raises
    OSError."""
    with named(new), step("rename", new):
        old.rename(new)


def remove(path: Path, syncs: bool = True) -> None:
    """Removes a file, and syncs its folder unless told not to. Raises OSError; FileNotFoundError
    when there is none."""
    with named(path), step("remove", path):
        path.unlink()
    if syncs:
        sync_folder(path.parent)


def check_folder(path: Path, advice: str = "") -> None:
    """Raises OSError that names the path, unless it is a folder: ENOTDIR for a file in its place,
    ENOENT, with the advice, for nothing there."""
    if path.is_dir():
        return
    if exists(path):
        raise OSError(errno.ENOTDIR, "is a file or a lost link where a folder is due", str(path))
    raise OSError(errno.ENOENT, f"no such folder{advice}", str(path))


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it that are missing, and syncs each one's parent. One that
    exists already is fine.

    Raises OSError that names the folder which could not be made.
    """
    if folder.is_dir():
        return
    if exists(folder):
        check_folder(folder)
    if folder.parent != folder:
        make_folder(folder.parent)
    with named(folder), step("folder", folder):
        folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Removes an empty folder and syncs the one above it. Raises OSError."""
    with named(folder), step("remove", folder):
        folder.rmdir()
    sync_folder(folder.parent)


def _announce(when: Literal["before", "after"], kind: Kind, name: str | os.PathLike[str]) -> None:
    for observer in tuple(_observers):
        observer(Step(when, kind, os.fspath(name)))


def _sync_names(fd: int, folder: Path) -> None:
    with named(folder), step("sync", folder):
        try:
            os.fsync(fd)
        except OSError as error:
            # some file systems keep no folders to sync
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def naming(error: OSError, name: Path) -> OSError:
    """The same error, told of a path, with what to do about it."""
    text = error.strerror or str(error)
    advice = remedy(error.errno)
    if advice and advice not in text:
        text = f"{text} ({advice})"
    return OSError(error.errno, text, os.fspath(name))
