"""Resident memory of a process and its descendants, read from /proc.

VmRSS is what each holds now, VmHWM the most it ever held. Pages shared by two processes are counted twice: a tree's sum
is an upper bound, which is the safe side for a cap.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_SAMPLES_PER_WALK = 10


class Resident(NamedTuple):
    """Bytes held now, and the most ever held as far as is known."""

    now_bytes: int
    peak_bytes: int


class ProcessTree:
    """Watches one process and what it starts. Descendants are looked for at every tenth sample."""

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._pids = [pid]
        self._num_samples = 0
        self._peak_bytes = 0

    def sample(self) -> Resident:
        """Sums VmRSS over the tree. A process that has ended counts nothing."""
        if self._num_samples % _SAMPLES_PER_WALK == 0:
            self._pids = _descendants(self._root)
        self._num_samples += 1
        now = 0
        for pid in self._pids:
            rss, high = _resident(pid)
            now += rss
            self._peak_bytes = max(self._peak_bytes, high)
        self._peak_bytes = max(self._peak_bytes, now)
        return Resident(now, self._peak_bytes)

    def raise_peak(self, num_bytes: int) -> None:
        """Takes note of a VmHWM that a process read of itself, later than the last sample."""
        self._peak_bytes = max(self._peak_bytes, num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The larger of the largest sum seen and the largest VmHWM of one process."""
        return self._peak_bytes


def own_resident() -> Resident:
    """VmRSS and VmHWM of this process."""
    return Resident(*_resident("self"))


def _resident(pid: int | str) -> tuple[int, int]:
    rss = high = 0
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM:"):
                    high = int(line.split()[1]) * 1024
                elif line.startswith(b"VmRSS:"):
                    rss = int(line.split()[1]) * 1024
                    break
    except (OSError, ValueError, IndexError):
        return 0, 0
    return rss, high


def _descendants(root: int) -> list[int]:
    found = [root]
    for pid in found:  # grows while it is walked
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found
