"""NvmePath: a folder that bytes may rest in, how much of it may be taken, and its share of what is dealt over several.

"/mnt/nvme0"                                              a plain path means no cap and a measured weight
NvmePath("/mnt/nvme1", max_bytes=200 << 30, weight=2.5)   at most 200 GiB on this node; gets 2.5 parts
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class NvmePath:
    """One folder for NVME. Raises ValueError for a cap or weight that is not positive."""

    path: Path
    max_bytes: int | None = None
    """Most bytes that may rest here, all ranks of the node together. None: what the file system has free."""
    weight: float | None = None
    """Its part of the bytes, relative to other paths. None: measured when several paths are opened."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"{self.path}: max_bytes is {self.max_bytes}; it must be at least 1, or None for no cap")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"{self.path}: weight is {self.weight}; it must be more than 0, or None to measure it")


AnyPath = str | os.PathLike[str] | NvmePath


def as_paths(paths: AnyPath | Sequence[AnyPath]) -> tuple[NvmePath, ...]:
    """One path or several, in any spelling, as NvmePath values."""
    several: Iterable[AnyPath] = (paths,) if isinstance(paths, (str, os.PathLike, NvmePath)) else paths
    return tuple(path if isinstance(path, NvmePath) else NvmePath(Path(path)) for path in several)
