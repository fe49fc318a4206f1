"""DiskRate: how fast a folder's disk reads and writes through the queue, measured now: the ceiling that a run is held to.

The file is unnamed, so nothing is left behind whatever happens. It is written once before the clock starts, since first
writes to preallocated blocks are slower. A disk that others use, or a host that caches it, makes the figure move from run
to run: compare within one.
"""

from __future__ import annotations

import os
import time
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


def _rate(passes: Passes, mode: str, seconds: float) -> float:
    start, moved = time.monotonic(), 0
    while time.monotonic() - start < seconds or not moved:
        done = passes.run(mode)
        moved += done.read_bytes + done.written_bytes
    return moved / (time.monotonic() - start)
