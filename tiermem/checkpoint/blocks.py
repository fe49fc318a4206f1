"""Blocks: the checksums of a state by MiB of its bytes, put together from those of pieces.

    one rank's pieces    [ a ][   b   ][ c ]        crc(A + B) from crc(A), crc(B) and len(B)
    another's                              [ d ]
    blocks of 1 MiB      |---------|---------|---   one checksum each, whatever the pieces were

Bytes are counted in the order of a state's elements, of the whole parameter, as if they lay in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiermem.checkpoint.manifest import CHECKSUM_BYTES
from tiermem.swap.checksum import combine


class Fragment(NamedTuple):
    """The checksum of bytes of a state that lie within one block."""

    start: int
    num_bytes: int
    crc: int


def cuts(start: int, num_bytes: int) -> list[tuple[int, int]]:
    """(start, bytes) of what each block holds of a range."""
    found, end = [], start + num_bytes
    while start < end:
        stop = min(end, (start // CHECKSUM_BYTES + 1) * CHECKSUM_BYTES)
        found.append((start, stop - start))
        start = stop
    return found


def merge(fragments: Iterable[Fragment]) -> list[Fragment]:
    """The same bytes in fewer fragments: neighbours within a block become one."""
    found: list[Fragment] = []
    for each in sorted(fragments):
        last = found[-1] if found else None
        if last is not None and last.start + last.num_bytes == each.start and each.start % CHECKSUM_BYTES:
            found[-1] = Fragment(
                last.start, last.num_bytes + each.num_bytes, combine(last.crc, each.crc, each.num_bytes)
            )
        else:
            found.append(each)
    return found


def checksums(fragments: Iterable[Fragment], what: str) -> tuple[int, ...]:
    """The checksum of every block of a state, from fragments that hold all of it once. Raises RuntimeError otherwise."""
    found = merge(fragments)
    _check_whole(found, what)
    return tuple(each.crc for each in found)


def _check_whole(fragments: Sequence[Fragment], what: str) -> None:
    end = 0
    for each in fragments:
        if each.start != end or (each.start % CHECKSUM_BYTES and each.start):
            raise RuntimeError(f"{what}: byte {min(end, each.start)} is saved twice, or by no rank")
        end += each.num_bytes
