"""Sustained: the rates of disks past their fast caches, and where a series of rates drops for good.

A drive takes writes fast until its cache (SLC flash, or memory) is full, and then at the rate of
its main flash. A training writes for days, so that rate counts. The file is written from its start
to its end, never twice in one place: a drive may drop from its cache what is overwritten.
"""

from __future__ import annotations

import errno
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.base.native import IoSettings
from tiermem.swap.disk.passes import Passes, Quota
from tiermem.tools.measure.files import BLOCK_BYTES, DEPTH, BenchFiles, DiskRate, rate_of_all
from tiermem.tools.words import format_bytes

# ---- the knee: where a series of rates drops for good, as a drive does when its fast cache is full -------------------
#
# The series is cut in two where two levels fit it best (least squares). It is a knee when the
# second level is at least a fifth lower, and two points or more, three quarters of those behind the
# cut, lie that low; anything less is noise.

_LEAST_DROP = 0.2
_LEAST_POINTS = 2


class Knee(NamedTuple):
    """The number of points before the drop, and the mean rate on either side."""

    num_before: int
    before: float
    after: float


def find_knee(rates: Sequence[float]) -> Knee | None:
    """The drop, if there is one."""
    cuts = range(_LEAST_POINTS, len(rates) - _LEAST_POINTS + 1)
    if not cuts:
        return None
    parts = min(
        ((rates[:cut], rates[cut:]) for cut in cuts),
        key=lambda parts: sum(len(p) * statistics.pvariance(p) for p in parts),
    )
    before, after = map(statistics.fmean, parts)
    most = before * (1 - _LEAST_DROP)
    low = sum(rate < most for rate in parts[1])
    is_knee = after < most and low >= max(_LEAST_POINTS, 0.75 * len(parts[1]))
    return Knee(len(parts[0]), before, after) if is_knee else None


# ---- writing until there is a plateau ------------------------------------------------------------

_NUM_POINTS = 128  # of a whole series
_PLATEAU_POINTS = 12  # behind the knee
_MOST_SPREAD = 0.15  # of a plateau's points: standard deviation / mean
LEAST_BYTES = 512 << 20
_MOST_READ_BYTES = 2 << 30


def has_plateau(rates: Sequence[float]) -> bool:
    """Whether the rates have dropped and stay where they are."""
    knee = find_knee(rates)
    last = rates[-_PLATEAU_POINTS:]
    if knee is None or len(rates) - knee.num_before < _PLATEAU_POINTS:
        return False
    return statistics.pstdev(last) <= _MOST_SPREAD * statistics.fmean(last)


class _Series(Quota):
    """Bytes to write until they are written or a plateau is reached; keeps the rate of each
    point."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.rates: list[float] = []
        self._point_bytes = num_bytes // _NUM_POINTS
        self._taken_bytes = 0
        self._since = 0, time.monotonic()  # bytes and seconds at the last point

    def take(self, most_bytes: int) -> int:
        """As Quota's; the next piece is asked for when one has ended, so that points are as far
        apart as ends are."""
        num_bytes, since_s = self._since
        if self._taken_bytes - num_bytes >= self._point_bytes:
            now_s = time.monotonic()
            self.rates.append((self._taken_bytes - num_bytes) / (now_s - since_s))
            self._since = self._taken_bytes, now_s
            if has_plateau(self.rates):
                return 0
        taken = super().take(most_bytes)
        self._taken_bytes += taken
        return taken


def measure_sustained(folder: Path, share: float) -> DiskRate:
    """Writes in `folder` until the rate has fallen to a plateau, or `share` of its free space is
    written; then reads. Blocks.

    The rate of writes is that of the plateau, or of all writes where it does not fall. Nothing is
    left in the folder. Raises OSError: ENOSPC, before anything is written, where the share of the
    free space is too small for a series.
    """
    stats = os.statvfs(folder)
    free_bytes = stats.f_bavail * stats.f_frsize
    num_bytes = int(share * free_bytes) // BLOCK_BYTES * BLOCK_BYTES
    if num_bytes < LEAST_BYTES:
        reason = (
            f"--sustained writes {format_bytes(LEAST_BYTES)} at least, and {share:.0%} of the "
            f"{format_bytes(free_bytes)} that "
            f"are free are {format_bytes(num_bytes)}: free some space, or give a larger share"
        )
        raise OSError(errno.ENOSPC, reason, str(folder))
    io = IoSettings(block_bytes=BLOCK_BYTES, depth=DEPTH)
    with (
        BenchFiles([folder], 1, num_bytes) as files,
        Passes(files.descriptor(0), num_bytes, io) as passes,
    ):
        series = _Series(num_bytes)
        written = passes.run("write", series)
        read = passes.run("read", min(written.written_bytes, _MOST_READ_BYTES))
        knee = find_knee(series.rates)
        rate = written.written_bytes / written.seconds if knee is None else knee.after
        said = f"{written.written_bytes / 1e9:.1f} GB written: "
        said += (
            "the rate did not fall"
            if knee is None
            else f"{knee.before / 1e9:.2f} GB/s fell to {knee.after / 1e9:.2f}"
        )
        engine = passes.queue.engine, passes.queue.why
        return DiskRate(read.read_bytes / read.seconds, rate, *engine, files.is_direct([0]), said)


def measure_sustained_disks(folders: Sequence[Path], share: float) -> DiskRate:
    """Several folders together, as `files.measure_disks`; `share` of what is free on each file
    system. Blocks."""
    return rate_of_all(folders, lambda folder: measure_sustained(folder, share))
