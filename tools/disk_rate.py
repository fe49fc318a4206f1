"""DiskRate: how fast a folder's disk reads and writes through the queue, measured now: the ceiling that a run is held to.

The file is unnamed, so nothing is left behind whatever happens. It is written once before the clock starts, since first
writes to preallocated blocks are slower. A disk that others use, or a host that caches it, makes the figure move from run
to run: compare within one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.direct import open_unnamed, preallocate
from tiermem.swap.passes import Passes
from tiermem.swap.settings import IoSettings

BLOCK_BYTES = 1 << 20
DEPTH = 32


class DiskRate(NamedTuple):
    """Bytes per second each way, and what measured them."""

    read_bytes_s: float
    write_bytes_s: float
    engine: str
    why: str
    is_direct: bool


def measure_disk(folder: Path, seconds: float, file_bytes: int = 256 << 20) -> DiskRate:
    """Reads and writes `file_bytes` in `folder` again and again for about `seconds`. Blocks; raises OSError."""
    fd, is_direct = open_unnamed(folder)
    try:
        preallocate(fd, 0, file_bytes)
        with Passes(fd, file_bytes, IoSettings(block_bytes=BLOCK_BYTES, depth=DEPTH)) as passes:
            passes.run("write")
            write = _rate(passes, "write", seconds / 2)
            read = _rate(passes, "read", seconds / 2)
            return DiskRate(read, write, passes.queue.engine, passes.queue.why, is_direct)
    finally:
        os.close(fd)


def measure_disks(folders: Sequence[Path], seconds: float, file_bytes: int = 256 << 20) -> DiskRate:
    """The rates of several folders together: the sum of one folder of each file system, measured one after the other.

    Two folders of one file system share its disk, so that the second adds nothing. What file systems share below (a disk, a
    bus) is not looked up. What measured is the first folder's; it is direct where all are. Blocks for about `seconds` for
    each file system; raises OSError, and ValueError without folders.
    """
    if not folders:
        raise ValueError("there is no folder to measure: give at least one")
    first_of: dict[int, Path] = {}
    for folder in folders:
        first_of.setdefault(device_of(folder), folder)
    rates = [measure_disk(folder, seconds, file_bytes) for folder in first_of.values()]
    return rates[0]._replace(
        read_bytes_s=sum(rate.read_bytes_s for rate in rates),
        write_bytes_s=sum(rate.write_bytes_s for rate in rates),
        is_direct=all(rate.is_direct for rate in rates),
    )


def device_of(folder: Path) -> int:
    """The number of the file system that a folder lies on. Raises OSError."""
    return os.stat(folder).st_dev


def _rate(passes: Passes, mode: str, seconds: float) -> float:
    start, moved = time.monotonic(), 0
    while time.monotonic() - start < seconds or not moved:
        done = passes.run(mode)
        moved += done.read_bytes + done.written_bytes
    return moved / (time.monotonic() - start)
