"""Sustained: the rates of disks past their fast caches, and where a series of rates drops for good.

A drive takes writes fast until its cache (SLC flash, or memory) is full, and then at the rate of
its main flash. A training writes for days, so that rate counts. The file is written from its start
to its end, never twice in one place: a drive may drop from its cache what is overwritten.
"""

from __future__ import annotations

import errno
import itertools
import math
import shutil
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.base.native import IoSettings
from tiermem.swap.disk.passes import Passes, Quota
from tiermem.tools.measure.files import BLOCK_BYTES, DEPTH, BenchFiles, DiskRate, measure_disk
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


class WriteSeries(Quota):
    """Bytes to write until they are written, the time is over or a plateau is reached; notes how
    many had been asked for, and when, at points `point_bytes` apart.

    What is asked for runs ahead of what is written by the memory of the passes: the series begins
    when `ahead_bytes` have filled that.
    """

    def __init__(
        self,
        num_bytes: int,
        point_bytes: int,
        ahead_bytes: int = 0,
        seconds: float = math.inf,
        ends_at_plateau: bool = False,
    ) -> None:
        super().__init__(num_bytes)
        self.points: list[tuple[int, float]] = []
        self._point_bytes = point_bytes
        self._next_bytes = ahead_bytes  # at which the next point is due
        self._end_s = time.monotonic() + seconds
        self._ends_at_plateau = ends_at_plateau
        self._taken_bytes = 0
        self._noting = threading.Lock()

    @property
    def rates(self) -> list[float]:
        """Bytes a second between two points."""
        return [
            (then[0] - before[0]) / (then[1] - before[1])
            for before, then in itertools.pairwise(self.points)
        ]

    def take(self, most_bytes: int) -> int:
        """As Quota's; 0 as well when the series is over. The next piece is asked for when one has
        ended, so that points are as far apart as ends are."""
        with self._noting:
            now_s = time.monotonic()
            if self._taken_bytes and now_s > self._end_s:
                return 0
            if self._taken_bytes >= self._next_bytes:
                self.points.append((self._taken_bytes, now_s))
                self._next_bytes = self._taken_bytes + self._point_bytes
                if self._ends_at_plateau and has_plateau(self.rates):
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
    free_bytes = shutil.disk_usage(folder).free
    num_bytes = int(share * free_bytes) // BLOCK_BYTES * BLOCK_BYTES
    if num_bytes < LEAST_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"--sustained writes {format_bytes(LEAST_BYTES)} at least, and {share:.0%} of the "
            f"{format_bytes(free_bytes)} that "
            f"are free are {format_bytes(num_bytes)}: free some space, or give a larger share",
            str(folder),
        )
    io = IoSettings(block_bytes=BLOCK_BYTES, depth=DEPTH)
    with (
        BenchFiles([folder], [num_bytes]) as files,
        Passes(files.descriptor(0), num_bytes, io) as passes,
    ):
        series = WriteSeries(num_bytes, num_bytes // _NUM_POINTS, ends_at_plateau=True)
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
        return DiskRate(
            read.read_bytes / read.seconds,
            rate,
            passes.queue.engine,
            passes.queue.why,
            files.is_direct([0]),
            said,
        )


def measure_disks(folders: Sequence[Path], share: float | None, seconds: float = 1.0) -> DiskRate:
    """The rates of several folders together: the sum of one folder of each file system, measured
    one after the other.

    Two folders of one file system share its disk, so that the second adds nothing. What file
    systems share below (a disk, a bus) is not looked up. What measured is the first folder's; it is
    direct where all are. Raises OSError, and ValueError without folders. Blocks.

    Args:
        share: of what is free on each file system, written to get past its fast cache; None: about
            `seconds` of reads and writes.
    """
    if not folders:
        raise ValueError("there is no folder to measure: give at least one")
    first_of: dict[int, Path] = {}
    for folder in folders:
        first_of.setdefault(folder.stat().st_dev, folder)
    rates = [
        measure_disk(folder, seconds) if share is None else measure_sustained(folder, share)
        for folder in first_of.values()
    ]
    said = [rate.sustained for rate in rates if rate.sustained is not None]
    return rates[0]._replace(
        read_bytes_s=sum(rate.read_bytes_s for rate in rates),
        write_bytes_s=sum(rate.write_bytes_s for rate in rates),
        is_direct=all(rate.is_direct for rate in rates),
        sustained="; ".join(said) if said else None,
    )
