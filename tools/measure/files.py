"""Files of a benchmark, and the rate of a folder's disk."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tiermem.swap.base.native import IoSettings
from tiermem.swap.disk.direct import MEMORY_FILE_SYSTEMS, file_system_of, open_unnamed, preallocate
from tiermem.swap.disk.passes import Passes
from tiermem.swap.memory.free import free_host_bytes
from tiermem.tools.words import format_bytes

# ---- files: as many on each path, preallocated, without a name ----------- -------------------------
#
# Nothing can be left behind, however the benchmark ends: a file lives as long as a process holds it
# open. Other processes (ranks, fio, a bare loop) open it as /proc/<pid>/fd/<n>, with a position and
# flags of their own.


class BenchFiles(AbstractContextManager["BenchFiles"]):
    """Open files, as many on each path. A context manager: they are gone at its end.

    Args:
        paths: existing, writable folders.
        sizes: of the files of a path, in bytes.

    Raises OSError naming the path, and then nothing stays taken.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int]) -> None:
        self.paths = tuple(paths)
        self.sizes = tuple(sizes)
        # of each path, as in `sizes`
        self._descriptors: list[list[int]] = []
        self._is_direct: list[bool] = []
        with ExitStack() as opened:
            for path in paths:
                self._descriptors.append([])
                self._is_direct.append(True)
                for size in sizes:
                    self._make(path, size, opened)
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def name(self, index: int, number: int = 0) -> str:
        """A name by which any process of this user can open a file of a path, while it is open
        here."""
        return f"/proc/{os.getpid()}/fd/{self._descriptors[index][number]}"

    def descriptor(self, index: int) -> int:
        """The first open file on a path."""
        return self._descriptors[index][0]

    def is_direct(self, path_indices: Sequence[int]) -> bool:
        """Whether all of these paths take O_DIRECT."""
        return all(self._is_direct[index] for index in path_indices)

    def _make(self, path: Path, num_bytes: int, opened: ExitStack) -> None:
        own, why_buffered = open_unnamed(path)
        opened.callback(own.close)
        fd = own[0]
        self._descriptors[-1].append(fd)
        self._is_direct[-1] &= not why_buffered
        try:
            preallocate(fd, 0, num_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"a file of {format_bytes(num_bytes)} cannot be made: "
                f"{os.strerror(error.errno or 0)}",
                str(path),
            ) from None


def check_room(paths: Sequence[Path], parts: Sequence[tuple[str, int]]) -> None:
    """Sees that every path has room for its parts (what, bytes); paths on one file system share
    what is free there.

    Raises OSError (ENOSPC) with the arithmetic.
    """
    together: dict[int, list[Path]] = {}
    for path in paths:
        together.setdefault(path.stat().st_dev, []).append(path)
    for on_one in together.values():
        free = shutil.disk_usage(on_one[0]).free
        needed = len(on_one) * sum(size for _, size in parts)
        if needed <= free:
            continue
        said = " + ".join(f"{format_bytes(size)} for {what}" for what, size in parts if size)
        said = f"({said}) x {len(on_one)} paths on this file system" if len(on_one) > 1 else said
        raise OSError(
            errno.ENOSPC,
            f"{format_bytes(needed)} are needed, {format_bytes(free)} are free: {said}. Free "
            "space, or ask for less",
            ", ".join(map(str, on_one)),
        )


def check_memory(num_bytes: int, needed: str, advice: str) -> None:
    """Sees that memory leaves some room beside what a benchmark takes. Raises ValueError with the
    arithmetic."""
    available = free_host_bytes()
    if num_bytes > 0.8 * available:
        raise ValueError(f"{needed}, {format_bytes(available)} of memory are available: {advice}")


# ---- the rate of a folder's disk -----------------------------------------------------------------
#
# The ceiling that a run is held to. The file is written once before the clock starts, since first
# writes to preallocated blocks are slower. A disk that others use, or a host that caches it, moves
# the figure from run to run: compare within one.

BLOCK_BYTES = 1 << 20
DEPTH = 32
DISK_FILE_BYTES = 256 << 20


class DiskRate(NamedTuple):
    """Bytes per second each way, and what measured them."""

    read_bytes_s: float
    write_bytes_s: float
    engine: str
    why: str
    is_direct: bool
    sustained: str | None = None
    """What was written to get past the disk's fast cache, and what came of it; None: it was not
    asked for."""


def why_unmeasured(folders: Sequence[Path], file_bytes: int = DISK_FILE_BYTES) -> str | None:
    """Why the disks of some folders cannot be measured with a file of so many bytes in each; None:
    they can."""
    for folder in folders:
        if (kind := memory_backed(folder)) is not None:
            return (
                f"{folder} lies in memory ({kind}), where what rests takes memory: name a "
                "folder on a disk"
            )
        if (free := shutil.disk_usage(folder).free) < file_bytes:
            return (
                f"{folder} has {format_bytes(free)} free, and a file of "
                f"{format_bytes(file_bytes)} is needed"
            )
    return None


def memory_backed(folder: Path) -> str | None:
    """The type of a file system that keeps its files in memory; None for any other."""
    kind = file_system_of(folder)
    return kind if kind in MEMORY_FILE_SYSTEMS else None


def say_memory(folders: Sequence[Path], console: Console) -> None:
    """Names the folders whose files are kept in memory."""
    for folder in folders:
        if (kind := memory_backed(folder)) is not None:
            console.print(f"{folder} lies in memory ({kind}): its figures are not a disk's")


def measure_disk(folder: Path, seconds: float, file_bytes: int = DISK_FILE_BYTES) -> DiskRate:
    """Reads and writes `file_bytes` in `folder` again and again for about `seconds`. Blocks; raises
    OSError."""
    io = IoSettings(block_bytes=BLOCK_BYTES, depth=DEPTH)
    with (
        BenchFiles([folder], [file_bytes]) as files,
        Passes(files.descriptor(0), file_bytes, io) as passes,
    ):
        passes.run("write")
        write = _rate(passes, "write", seconds / 2)
        read = _rate(passes, "read", seconds / 2)
        return DiskRate(read, write, passes.queue.engine, passes.queue.why, files.is_direct([0]))


def _rate(passes: Passes, mode: str, seconds: float) -> float:
    start = time.monotonic()
    moved = 0
    while time.monotonic() - start < seconds or not moved:
        done = passes.run(mode)
        moved += done.read_bytes + done.written_bytes
    return moved / (time.monotonic() - start)
