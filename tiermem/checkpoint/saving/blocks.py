"""Blocks: the checksums of a state by MiB of its bytes, put together from those of pieces.

    one rank's pieces    [ a ][   b   ][ c ]        crc(A + B) from crc(A), crc(B) and len(B)
    another's                              [ d ]
    blocks of 1 MiB      |---------|---------|---   one checksum each, whatever the pieces were

Bytes are counted in the order of a state's elements, of the whole parameter, as if they lay in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES
from tiermem.swap.checksum import combine


class Run(NamedTuple):
    """Bytes of a state, and the checksum of what each block holds of them."""

    start: int
    num_bytes: int
    crcs: list[int]


def cuts(start: int, num_bytes: int) -> list[tuple[int, int]]:
    """(start, bytes) of what each block holds of a range."""
    found, end = [], start + num_bytes
    while start < end:
        stop = min(end, (start // CHECKSUM_BYTES + 1) * CHECKSUM_BYTES)
        found.append((start, stop - start))
        start = stop
    return found


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same bytes in as few runs as there are."""
    found: list[Run] = []
    for each in sorted(runs, key=lambda run: run.start):
        last = found[-1] if found else None
        if last is None or last.start + last.num_bytes != each.start:
            found.append(Run(each.start, each.num_bytes, list(each.crcs)))
            continue
        shared = each.start % CHECKSUM_BYTES
        if shared:
            num_bytes = min(each.num_bytes, CHECKSUM_BYTES - shared)
            last.crcs[-1] = combine(last.crcs[-1], each.crcs[0], num_bytes)
        last.crcs.extend(each.crcs[1:] if shared else each.crcs)
        found[-1] = last._replace(num_bytes=last.num_bytes + each.num_bytes)
    return found


def checksums(runs: Iterable[Run], what: str) -> tuple[int, ...]:
    """The checksum of every block of a state, from runs that hold all of it once. Raises RuntimeError otherwise."""
    found = joined(runs)
    if len(found) != 1 or found[0].start:
        places = ", ".join(f"{run.start} to {run.start + run.num_bytes}" for run in found[:4])
        raise RuntimeError(f"{what}: bytes {places} are saved; a state is saved once and whole")
    return tuple(found[0].crcs)
