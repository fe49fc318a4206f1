"""StoreStats: what a store has moved and holds, in all and on each path. Values; bytes are the kernel's completions."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class PathStats:
    """One path's part in a store."""

    path: Path
    weight: float  # its part of the bytes, relative to the other paths
    read_bytes: int
    written_bytes: int
    used_bytes: int  # extents in use


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Totals of a store, in bytes and seconds."""

    nvme_read_bytes: int
    nvme_written_bytes: int
    nvme_bytes: int  # extents in use on all paths
    host_bytes: int  # carved out of the arena now
    host_peak_bytes: int
    wait_s: float  # spent waiting for transfers
    engine: str
    engine_why: str
    paths: tuple[PathStats, ...] = ()
