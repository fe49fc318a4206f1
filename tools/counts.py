"""Our counts beside the kernel's: bytes moved to and from disk, as the store says and as /proc/self/io says.

The kernel counts all block I/O of the process: beside the store's also pages of program code that come in late, or come
back after the cap pushed them out. That is why reads are allowed SLACK_BYTES on top.
"""

from __future__ import annotations

from typing import NamedTuple

from tiermem.tools.byte_size import format_bytes

TOLERANCE = 0.02
SLACK_BYTES = 32 << 20


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
