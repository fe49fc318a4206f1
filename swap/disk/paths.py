"""Paths: the folders of the tier NVME, their caps and weights, and the division of bytes over
them."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Real
from pathlib import Path

from tiermem.swap.base.ranges import ALIGNMENT, round_up


@dataclasses.dataclass(frozen=True)
class NvmePath:
    """One folder for NVME. Raises ValueError for a cap or weight that is not positive.

    "/mnt/nvme0"                                              a plain path means no cap and a measured weight
    NvmePath("/mnt/nvme1", max_bytes=200 << 30, weight=2.5)   at most 200 GiB on this node; gets 2.5 parts
    """

    path: Path
    """Made absolute at once, so that a program may change its working directory."""
    max_bytes: int | None = None
    """Most bytes that may rest here, for all ranks of the node together. None: the free bytes of
    the file system."""
    weight: float | None = None
    """The path's share of the bytes, relative to other paths. None: measured when several paths are
    opened."""

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise _no_path(self.path)
        object.__setattr__(self, "path", Path(self.path).absolute())
        most, weight = self.max_bytes, self.weight
        if most is not None and (not isinstance(most, Real) or most < 1):
            raise ValueError(
                f"{self.path}: max_bytes is {most!r}; it must be at least 1, or None for no cap"
            )
        if weight is not None and not (isinstance(weight, Real) and 0 < weight < math.inf):
            raise ValueError(
                f"{self.path}: weight is {weight!r}; it must be more than 0, or None to measure it"
            )


AnyPath = str | os.PathLike[str] | NvmePath


def as_paths(paths: AnyPath | Sequence[AnyPath]) -> tuple[NvmePath, ...]:
    """Returns one path or several, given in any type, as NvmePath values. Raises ValueError for
    what is no path."""
    is_one = not isinstance(paths, Iterable) or isinstance(paths, (str, os.PathLike, Mapping))
    several: Iterable[AnyPath] = (paths,) if is_one else paths  # type: ignore[assignment]
    for path in several:
        if not isinstance(path, (str, os.PathLike, NvmePath)):
            raise _no_path(path)
    return tuple(path if isinstance(path, NvmePath) else NvmePath(Path(path)) for path in several)


def _no_path(given: object) -> ValueError:
    return ValueError(
        f'a path is {given!r}; give a folder, such as "/mnt/nvme0", or NvmePath(folder, max_bytes, '
        "weight)"
    )


def deal_shares(num_bytes: int, weights: Sequence[float], rooms: Sequence[int | None]) -> list[int]:
    """Divides num_bytes over paths by weight; no path gets more than its room in bytes (None: no
    bound).

        100 GiB over weights 1 : 1 : 2          25    25    50
        the third has room for 20 only          40    40    20     the others get the rest

    Rooms must be multiples of ALIGNMENT; shares are rounded up to it. Raises ValueError when all
    rooms together are too small.
    """
    shares = [0] * len(weights)
    exact = [Fraction(weight) for weight in weights]
    takers = list(range(len(weights)))
    left = num_bytes
    while left > 0:
        if not takers:
            raise ValueError(f"{left} of {num_bytes} bytes have no room")
        total = sum(exact[i] for i in takers)
        wished = {i: left * exact[i] / total for i in takers}
        full = [(i, room) for i in takers if (room := rooms[i]) is not None and wished[i] > room]
        if not full:
            for i in takers:
                shares[i] = round_up(math.ceil(wished[i]), ALIGNMENT)
            break
        for i, room in full:
            shares[i] = room
            left -= room
            takers.remove(i)
    return shares
