"""Our counts beside the kernel's: bytes moved to and from disk, as the store says and as /proc/self/io says.

The kernel counts all block I/O of the process: beside the store's also pages of program code that come in late, or come
back after the cap pushed them out. That is why reads are allowed SLACK_BYTES on top.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from tiermem.tools.byte_size import format_bytes

if TYPE_CHECKING:
    from tiermem.swap.store import TensorStore

TOLERANCE = 0.02
SLACK_BYTES = 32 << 20
_ARRIVAL_S = 0.2


class IoCounts(NamedTuple):
    """Bytes read and written."""

    read_bytes: int
    written_bytes: int

    def since(self, before: IoCounts) -> IoCounts:
        """What was added after `before`."""
        return IoCounts(self.read_bytes - before.read_bytes, self.written_bytes - before.written_bytes)


def kernel_counts() -> IoCounts:
    """Block I/O of this process so far, all threads."""
    with open("/proc/self/io", encoding="ascii") as table:
        counts = dict(line.split(": ") for line in table.read().splitlines())
    return IoCounts(int(counts["read_bytes"]), int(counts["write_bytes"]))


def store_counts(store: TensorStore) -> IoCounts:
    """Bytes that the store has moved so far."""
    stats = store.stats()
    return IoCounts(stats.nvme_read_bytes, stats.nvme_written_bytes)


def written_by_path(store: TensorStore) -> dict[str, int]:
    """Bytes written to each path since the store was made."""
    return {str(each.path): each.written_bytes for each in store.stats().paths}


def counts_at_rest(store: TensorStore) -> IoCounts:
    """Counts with nothing under way: writes are waited for, reads ahead of a step that never comes arrive by themselves."""
    store.settle()
    before, counts = IoCounts(-1, -1), store_counts(store)
    while counts != before:
        time.sleep(_ARRIVAL_S)
        before, counts = counts, store_counts(store)
    return counts


def disagreements(ours: IoCounts, kernel: IoCounts) -> list[str]:
    """A sentence with both numbers for each count that differs by more than 2 %."""
    found = []
    for what, mine, theirs, slack in (
        ("read", ours.read_bytes, kernel.read_bytes, SLACK_BYTES),
        ("written", ours.written_bytes, kernel.written_bytes, 1 << 20),
    ):
        too_few = theirs < mine * (1 - TOLERANCE)
        too_many = theirs > mine * (1 + TOLERANCE) + slack
        if too_few or too_many:
            found.append(
                f"bytes {what}: the store counts {mine} ({format_bytes(mine)}), the kernel {theirs} "
                f"({format_bytes(theirs)}); they may differ by {TOLERANCE:.0%}"
            )
    return found
