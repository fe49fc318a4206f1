"""Files: folders and preallocated segments on the NVMe paths, and the extents inside them.

    <path>/tiermem-<run id>/lock          held (flock) while the run lives, gone when it has closed; says which process
    <path>/tiermem-<run id>/segment.bin   grows by posix_fallocate: a full disk is refused before a run, as ENOSPC

Each path has one segment, opened once with O_DIRECT; where the file system refuses that, buffered, said once. Extents
are ranges of a segment, cut at its alignment. They are dealt over the paths by what each already holds in proportion to
its weight. Nothing outside the run's own folders is ever touched, and only files made here are removed.

The lock appears already held: it is locked under a temporary name and then renamed. A lock that nobody holds is thus
what a killed run left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.extents import FreeRanges, round_up

ALIGNMENT = 4096  # of offsets, lengths and memory; what every file system with O_DIRECT accepts here
FOLDER_PREFIX = "tiermem-"
_LOCK, _NEW_LOCK = "lock", "lock.new"
_MAX_BLOCK_BYTES = 1 << 30  # below what one system call transfers
_GROWTH_BYTES = 64 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # what posix_fallocate answers when there is no more room
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}

logger = logging.getLogger("tiermem")


@dataclasses.dataclass(frozen=True)
class IoSettings:
    """How the queue moves blocks. Engine: "auto", "uring", "aio" or "threads"; `threads` 0 lets the engine choose."""

    engine: str = "auto"
    block_bytes: int = 1 << 20
    depth: int = 32
    threads: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ("auto", "uring", "aio", "threads"):
            raise ValueError(f"engine is {self.engine!r}; allowed are auto, uring, aio and threads")
        if not ALIGNMENT <= self.block_bytes <= _MAX_BLOCK_BYTES or self.block_bytes % ALIGNMENT:
            raise ValueError(
                f"block_bytes is {self.block_bytes}; allowed are multiples of {ALIGNMENT} up to {_MAX_BLOCK_BYTES}"
            )
        if not 1 <= self.depth <= 4096:
            raise ValueError(f"depth is {self.depth}; allowed are 1 to 4096 blocks in flight")
        if not 0 <= self.threads <= 1024:
            raise ValueError(f"threads is {self.threads}; allowed are 0 (the engine chooses) to 1024")


class PathFacts(NamedTuple):
    """What a path offers: free bytes for this user, file system type, whether it takes O_DIRECT."""

    path: Path
    free_bytes: int
    file_system: str
    is_direct: bool


class Extent(NamedTuple):
    """A range of one path's segment; `num_bytes` is a multiple of ALIGNMENT."""

    path_index: int
    offset: int
    num_bytes: int


def probe_path(path: Path) -> PathFacts:
    """Looks at a folder: it must exist and be writable. Raises OSError that names it and says what to do."""
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder: make it first, or correct nvme_path", str(path))
    name = path / f".tiermem-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise OSError(error.errno, f"cannot write here: {os.strerror(error.errno or 0)}", str(path)) from None
    os.close(fd)
    try:
        is_direct = _takes_direct(name)
    finally:
        name.unlink()
    stats = os.statvfs(path)
    return PathFacts(path, stats.f_bavail * stats.f_frsize, file_system_of(path), is_direct)


def file_system_of(path: Path) -> str:
    """The type of the file system that holds a path ("ext4", "tmpfs", ...), or "unknown"."""
    resolved, best, kind = path.resolve(), -1, "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in mounts:
        point, fs_type = line.split()[1:3]
        mount = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:  # of two on one point the later covers
            best, kind = len(mount.parts), fs_type
    return kind


class Segment:
    """One path's folder, lock and preallocated file; extents are allocated first fit and the file grows for more.

    Args:
        path: an existing, writable folder.
        run_id: names the run's folder below it.
        weight: its part of the bytes, relative to other paths.
    """

    def __init__(self, path: Path, run_id: str, weight: float = 1.0) -> None:
        self.facts = probe_path(path)
        self.weight = weight
        self.used_bytes = 0
        self.size_bytes = 0  # of the file
        self.folder = path / f"{FOLDER_PREFIX}{run_id}"
        self.file = self.folder / "segment.bin"
        self.fd = -1
        self._lock_fd = -1
        self._free = FreeRanges()
        self.folder.mkdir()
        try:
            self._lock_fd = _lock(self.folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.facts.is_direct else 0)
            self.fd = os.open(self.file, flags, 0o600)
        except BaseException:
            self.close(keep=False)
            raise
        if not self.facts.is_direct:
            logger.warning("%s (%s) refuses O_DIRECT: buffered", path, self.facts.file_system)
        if self.facts.file_system in _MEMORY_FILE_SYSTEMS:
            logger.warning("%s is %s: what rests there is memory, not disk", path, self.facts.file_system)

    def allocate(self, num_bytes: int, most_growth: int = _GROWTH_BYTES) -> int:
        """The offset of a free range; the file grows by most_growth at most, or by what is needed if that is more.

        Raises OSError (ENOSPC) with needed and free bytes when the disk is full.
        """
        offset = self._free.take(num_bytes)
        if offset is None:
            self._grow(num_bytes - self._free.tail(self.size_bytes), most_growth)
            offset = self._free.take(num_bytes)
        assert offset is not None  # the file has just grown by what was missing
        self.used_bytes += num_bytes
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Returns a range; the file keeps its size. Raises RuntimeError when it is returned twice."""
        self._free.add(offset, num_bytes)
        self.used_bytes -= num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Grows the file once so that num_bytes more can be allocated, in one piece or several."""
        missing = round_up(num_bytes, ALIGNMENT) - self._free.tail(self.size_bytes)
        if missing > 0:
            self._extend(missing)

    def close(self, keep: bool) -> None:
        """Closes; removes the lock, and the file and the folder unless they are to be kept."""
        names = (_LOCK, _NEW_LOCK) if keep else (_LOCK, _NEW_LOCK, self.file.name)
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        for fd in (self.fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lock_fd = -1
        if not keep and self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError as error:
                logger.warning("%s is left: %s", self.folder, error.strerror)

    def _grow(self, missing: int, most_growth: int) -> None:
        more = min(round_up(missing, _GROWTH_BYTES), most_growth)
        if more > missing:
            try:
                self._extend(more)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
            else:
                return
        self._extend(missing)

    def _extend(self, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, self.size_bytes, num_bytes)
        except OSError as error:
            os.ftruncate(self.fd, self.size_bytes)  # what a refused request has taken already
            free = os.statvfs(self.folder)
            raise OSError(
                error.errno,
                f"{num_bytes} bytes are needed beyond the {self.size_bytes} already held, "
                f"{free.f_bavail * free.f_frsize} are free: {os.strerror(error.errno or 0)}. "
                "Free some space or add a path",
                str(self.facts.path),
            ) from None
        self._free.add(self.size_bytes, num_bytes)
        self.size_bytes += num_bytes


class Files:
    """The segments of one run on all its paths. Its owner's lock guards it.

    Args:
        paths: existing folders; the same folder twice is refused.
        limit_bytes: most bytes of extents on all paths together; None: no bound but the disk's.
    """

    def __init__(self, paths: Sequence[Path], limit_bytes: int | None = None) -> None:
        resolved = [path.resolve() for path in paths]
        if len(set(resolved)) != len(resolved):
            raise ValueError(f"a path is listed twice: {', '.join(map(str, paths))}")
        self.run_id = secrets.token_hex(6)
        self._limit_bytes = limit_bytes
        self.segments: list[Segment] = []
        try:
            for path in paths:
                _report_dead_runs(path)
                self.segments.append(Segment(path, self.run_id))
        except BaseException:
            self.close(keep=False)
            raise

    def allocate(self, num_bytes: int) -> Extent:
        """A free extent of at least num_bytes, on the path that holds least for its weight and has room."""
        size = round_up(max(num_bytes, 1), ALIGNMENT)
        most_growth = min(_GROWTH_BYTES, self._check_limit(size))
        errors: list[OSError] = []
        for index in sorted(range(len(self.segments)), key=self._fill_of):
            try:
                return Extent(index, self.segments[index].allocate(size, most_growth), size)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        raise OSError(errno.ENOSPC, "; ".join(f"{error.filename}: {error.strerror}" for error in errors))

    def reserve(self, num_bytes: int) -> None:
        """Preallocates room for num_bytes more, split over the paths by weight. Raises OSError (ENOSPC) per path."""
        self._check_limit(num_bytes)
        total = sum(s.weight for s in self.segments)
        for segment in self.segments:
            segment.reserve(math.ceil(num_bytes * segment.weight / total))

    def free(self, extent: Extent) -> None:
        """Returns an extent to its path."""
        self.segments[extent.path_index].free(extent.offset, extent.num_bytes)

    def fd(self, extent: Extent) -> int:
        """The descriptor that an extent is read and written through."""
        return self.segments[extent.path_index].fd

    def path_of(self, fd: int) -> str:
        """The file behind a descriptor, for errors."""
        return next((str(s.file) for s in self.segments if s.fd == fd), f"descriptor {fd}")

    @property
    def used_bytes(self) -> int:
        """Bytes of extents in use on all paths."""
        return sum(s.used_bytes for s in self.segments)

    def close(self, keep: bool) -> None:
        """Closes every segment; removes what this run made unless it is to be kept."""
        with contextlib.ExitStack() as closing:  # one that fails does not keep the others open
            while self.segments:
                closing.callback(self.segments.pop().close, keep)

    def _fill_of(self, index: int) -> float:
        return self.segments[index].used_bytes / self.segments[index].weight

    def _check_limit(self, num_bytes: int) -> int:
        """Bytes that the files may still grow by. Raises ValueError without a path, OSError beyond disk_bytes."""
        if not self.segments and num_bytes:
            raise ValueError(f"nothing can rest on NVME ({num_bytes} bytes): no path was given")
        if self._limit_bytes is None:
            return _GROWTH_BYTES
        if self.used_bytes + num_bytes > self._limit_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{num_bytes} bytes more than the {self.used_bytes} held would exceed disk_bytes={self._limit_bytes}",
                ", ".join(str(s.facts.path) for s in self.segments),
            )
        return max(0, self._limit_bytes - sum(s.size_bytes for s in self.segments))


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


def remove_dead_runs(path: Path, pid: int) -> list[str]:
    """Removes what runs of one process that has died left in a folder, and names it. Only files that a run makes go.

    For whoever started that process; raises OSError when something cannot be removed.
    """
    removed = []
    for folder in path.glob(f"{FOLDER_PREFIX}*"):
        if _is_dead(folder) and json.loads((folder / _LOCK).read_text()) == _owner(pid):
            (folder / "segment.bin").unlink(missing_ok=True)
            (folder / _LOCK).unlink()
            folder.rmdir()
            removed.append(folder.name)
    return removed


def _owner(pid: int) -> dict[str, object]:
    """What a lock says of the process that holds it."""
    return {"pid": pid, "host": socket.gethostname()}


def _report_dead_runs(path: Path) -> None:
    """Says once which folders a killed run left behind; they are the user's to resume or remove."""
    dead = [folder for folder in path.glob(f"{FOLDER_PREFIX}*") if _is_dead(folder)]
    if dead:
        size = sum(_size_of(folder / "segment.bin") for folder in dead)
        names = ", ".join(f.name for f in dead)
        logger.warning("%s holds %d bytes of runs that ended without closing: %s", path, size, names)


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


def _takes_direct(name: Path) -> bool:
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True
