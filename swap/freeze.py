"""Freeze: where the bytes of a store's entries lay at one moment, in which nobody writes them until they are thawed.

A value that the store makes (`TensorStore.freeze`) and takes back (`thaw`): it answers for every durable entry that rested on
NVME then, also for those that were dropped since. Where an entry's bytes lie now is the store's affair.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class FrozenRange(NamedTuple):
    """Bytes of one path's segment that nobody writes."""

    path_index: int
    file_offset: int
    num_bytes: int


class FrozenPart(NamedTuple):
    """A range of an entry, from byte `start` on, and where it lies."""

    start: int
    place: FrozenRange


@dataclasses.dataclass(frozen=True)
class Freeze:
    """One moment of a store. `parts` are in the order of the entry's bytes and cover it, up to whole 4096-byte blocks."""

    number: int
    paths: tuple[Path, ...]
    parts: Mapping[str, Sequence[FrozenPart]] = dataclasses.field(repr=False)

    def entries(self) -> list[str]:
        """The names of what is frozen."""
        return list(self.parts)

    def files(self) -> tuple[Path, ...]:
        """The segment file of each path; a range's `path_index` counts them."""
        return self.paths

    def ranges(self, entry: str, offset: int, num_bytes: int) -> list[FrozenRange]:
        """Where bytes [offset, offset + num_bytes) of an entry lie, in order; any bytes, not whole blocks alone.

        Raises KeyError for what is not frozen, ValueError for bytes outside it.
        """
        parts, stop = self.parts[entry], offset + num_bytes
        end = parts[-1].start + parts[-1].place.num_bytes
        if offset < 0 or num_bytes < 0 or stop > end:
            raise ValueError(f"bytes {offset} to {stop} lie outside {entry!r} ({end} bytes)")
        found = []
        at = bisect.bisect_right(parts, offset, key=lambda part: part.start) - 1
        while offset < stop:
            start, place = parts[at]
            skipped = offset - start
            length = min(stop - offset, place.num_bytes - skipped)
            found.append(FrozenRange(place.path_index, place.file_offset + skipped, length))
            offset, at = offset + length, at + 1
        return found
