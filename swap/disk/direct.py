"""Direct: opens files past the page cache (O_DIRECT) where possible, preallocates them, and reads
facts about a folder.

Transfers are aligned to ALIGNMENT. A file system that does not support O_DIRECT, or needs a larger
alignment, is used buffered; `why_buffered` says why:

    open with O_DIRECT   refused               buffered
    STATX_DIOALIGN       (0, 0)                buffered: not this file (encrypted, or data in the journal)
                         more than ALIGNMENT   buffered, with the numbers
                         not reported          direct: the open with O_DIRECT worked, and old kernels report no more
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.base.ranges import ALIGNMENT
from tiermem.swap.disk.durable import Owned, check_folder, create, naming, opened

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")
_CHUNK_BYTES = 1 << 20
# modes of fallocate(2)
_KEEP_SIZE = 1
_PUNCH_HOLE = 2


def open_direct(file: Path, flags: int, own: Owned | None = None) -> tuple[Owned, str]:
    """Opens an existing file, direct where that is possible; the descriptor, and why it is buffered
    ("": it is not).

    own: gets the descriptor, and is returned; its holder closes it after an interrupt. Raises
        OSError.
    """
    own = Owned() if own is None else own
    try:
        own.append(os.open(file, flags | os.O_DIRECT))
    except OSError:
        own.append(os.open(file, flags))  # or raises what is wrong beside that
        return own, "it takes no O_DIRECT"
    why = why_buffered(own[0])
    if why:
        fcntl.fcntl(own[0], fcntl.F_SETFL, fcntl.fcntl(own[0], fcntl.F_GETFL) & ~os.O_DIRECT)
    return own, why


def open_unnamed(folder: Path) -> tuple[Owned, str]:
    """Opens a file without a name; as `open_direct`.

    Where the file system has no O_TMPFILE, the file has a name while it is opened.
    """
    name = None
    try:
        own = Owned([os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)])
    except OSError:
        name = folder / f".tiermem-unnamed-{os.getpid()}-{secrets.token_hex(4)}"
        own = Owned([create(name, mode=0o600)])
    try:
        with own as made:  # not left to __del__, where Python drops an interrupt
            return open_direct(name or Path(f"/proc/self/fd/{made}"), os.O_RDWR)
    finally:
        if name is not None:
            name.unlink()


def preallocate(fd: int, start: int, num_bytes: int) -> None:
    """Gives a range of a file its blocks, as posix_fallocate. Raises OSError.

    If the file system cannot preallocate (ext2, vfat, NFS 3), libc writes a byte into every block
    instead. A direct descriptor refuses single bytes, so a buffered descriptor is used, and its
    pages are dropped from the cache. If there is no such system call (ENOSYS: a sandbox), the range
    is written again, with zeros where it has no bytes, at the disk's speed.
    """
    try:
        os.posix_fallocate(fd, start, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        same = Path(f"/proc/self/fd/{fd}")  # also when the file has no name any more
        with opened(same, os.O_RDWR) as buffered:
            if error.errno == errno.ENOSYS:
                _write_again(buffered, start, num_bytes)
            else:
                os.posix_fallocate(buffered, start, num_bytes)
            os.fdatasync(buffered)  # some file systems find out only now that they are full
            os.posix_fadvise(buffered, start, num_bytes, os.POSIX_FADV_DONTNEED)


def _write_again(fd: int, start: int, num_bytes: int) -> None:
    """Writes a range of a file as it is, zeros where it has no bytes, so that all of it has
    blocks."""
    while num_bytes:
        data = os.pread(fd, min(num_bytes, _CHUNK_BYTES), start)
        data += bytes(min(num_bytes, _CHUNK_BYTES) - len(data))
        written = os.pwrite(fd, data, start)
        start += written
        num_bytes -= written


def take_room(fd: int, start: int, num_bytes: int, name: Path) -> None:
    """As `preallocate`; its OSError names the file, the needed and the free bytes, and what to
    do."""
    try:
        preallocate(fd, start, num_bytes)
    except OSError as error:
        free = os.fstatvfs(fd)
        held = f" beyond the {start} already held" if start else ""
        what = (
            f"{num_bytes} bytes are needed{held}, {free.f_bavail * free.f_frsize} are free: "
            f"{os.strerror(error.errno or 0)}"
        )
        raise naming(OSError(error.errno, what), name) from None


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises OSError with the arithmetic when a folder has no space for num_bytes; it takes the
    space and gives it back.

    For files that other libraries write there, whose own errors say less.
    """
    with open_unnamed(folder)[0] as fd:
        take_room(fd, 0, num_bytes, folder)


def give_back(fd: int, start: int, num_bytes: int) -> None:
    """Frees the blocks of a range of a file; the file keeps its length and reads zeros there.

    Raises OSError: EOPNOTSUPP if the file system cannot. It calls libc because Python has no
    fallocate that frees blocks.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(
        fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(num_bytes)
    ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def why_buffered(fd: int) -> str:
    """Returns why an open file cannot have direct transfers at ALIGNMENT; empty if it can."""
    from tiermem.swap.base import native  # brings torch, which naming a folder goes without

    asked = native.file_alignment(fd)
    if asked is None:
        return ""
    memory, offset = asked
    if not memory or not offset:
        return "its files take no direct I/O, says the kernel (STATX_DIOALIGN)"
    if max(memory, offset) > ALIGNMENT:
        return (
            f"O_DIRECT asks for memory at multiples of {memory} and offsets of {offset} bytes, "
            f"more than {ALIGNMENT}"
        )
    return ""


class PathFacts(NamedTuple):
    """Facts about a path: free bytes for this user, type of its file system, whether transfers go
    past the page cache."""

    path: Path
    free_bytes: int
    file_system: str
    is_direct: bool
    why_buffered: str = ""
    device: int = 0  # of the file system: two paths with the same one share their free bytes


def probe_path(path: Path) -> PathFacts:
    """Reads the facts about a folder; makes an unnamed file in it for that.

    Raises OSError that names the folder and says what to do, when it does not exist or is not
    writable.
    """
    check_folder(path, ": make it first, or correct nvme_path")
    try:
        own, why = open_unnamed(path)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write here: {os.strerror(error.errno or 0)}", str(path)
        ) from None
    own.close()
    stats = os.statvfs(path)
    return PathFacts(
        path,
        stats.f_bavail * stats.f_frsize,
        file_system_of(path),
        not why,
        why,
        path.stat().st_dev,
    )


def file_system_of(path: Path) -> str:
    """The type of the file system that holds a path ("ext4", "tmpfs", ...), or "unknown"."""
    resolved = path.resolve()
    best = -1
    kind = "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in mounts:
        point, fs_type = line.split()[1:3]
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point))
        # of two on one point the later covers
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best = len(mount.parts)
            kind = fs_type
    return kind
