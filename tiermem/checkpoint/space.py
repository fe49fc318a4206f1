"""Space: what the files of runs take on the disk, told by who needs it.

    durable   blocks that a durable step names; its own are those that no other step names: what dropping it would free
    live      of a run that goes on, what else has been written: the slots that its steps write to. Which of them are free
              for the next step only its process knows
    free      reserved and never written; of a run that does not go on, all that no step names
    unclear   what would be free, were there not a step that cannot be read, which may name it
    records   manifests, parts, the lock, what a killed process has left half-written, and what is not ours

Blocks are of 4096 bytes. The five of a folder are together what stat says that its files take, whatever the file system makes
of them: where it squeezes what it keeps, less is told than was named. Nothing is read but where a file has data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.checkpoint.format.finding import real
from tiermem.checkpoint.format.manifest import Part
from tiermem.swap.run_folder import holds_states

BLOCK_BYTES = 4096

Ranges = Sequence[tuple[int, int]]
"""(start, stop) of bytes, sorted, none touching another."""


class Space(NamedTuple):
    """Bytes on the disk."""

    durable_bytes: int = 0
    live_bytes: int = 0
    free_bytes: int = 0
    unclear_bytes: int = 0
    record_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What stat says."""
        return sum(self)

    def plus(self, other: Space) -> Space:
        """Both together."""
        return Space(*(a + b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class StepSpace:
    """What a durable step names in one folder: a run's, or a tag's."""

    folder: Path
    durable_bytes: int
    own_bytes: int  # of them, named by no other step that was found


class Named:
    """Which blocks of which files durable steps name, of the steps that were found."""

    def __init__(self) -> None:
        self._steps: set[Path] = set()
        self._by_file: dict[Path, dict[Path, list[tuple[int, int]]]] = {}  # file, then the step's manifest

    def add(self, step: Path, parts: Iterable[tuple[Path, Part]]) -> None:
        """Takes note of a step, known by its manifest: the pieces of its parts, each with the folder it lies in."""
        self._steps.add(step)
        found: dict[Path, list[tuple[int, int]]] = {}
        for place, part in parts:
            files = [real(place / name) for name in part.files]
            for piece in part.pieces:
                found.setdefault(files[piece.file], []).append((piece.offset, piece.offset + piece.num_bytes))
        for file, ranges in found.items():
            self._by_file.setdefault(file, {})[step] = ranges

    def knows(self, step: Path) -> bool:
        """Whether a step's parts could be read."""
        return step in self._steps

    def blocks_of(self, file: Path, without: Path | None = None) -> Ranges:
        """The blocks that any step names; `without` one of them."""
        steps = self._by_file.get(real(file), {})
        return blocks(each for step, ranges in steps.items() if step != without for each in ranges)

    def by_folder(self, step: Path) -> tuple[StepSpace, ...]:
        """What a step names, in each folder."""
        found: dict[Path, list[int]] = {}
        for file, steps in self._by_file.items():
            if step in steps:
                sums = found.setdefault(file.parent, [0, 0])
                sums[0] += length(blocks(steps[step]))
                sums[1] += length(self.blocks_of(file)) - length(self.blocks_of(file, without=step))
        return tuple(StepSpace(folder, *sums) for folder, sums in sorted(found.items()))


def space_of(files: Iterable[Path], named: Named, goes_on: bool, is_clear: bool) -> Space:
    """What files of a run take. Files that vanish meanwhile take nothing. Raises OSError.

    goes_on: the run is live, or nobody can tell. is_clear: every step of it could be read.
    """
    total = Space()
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total = total.plus(_of_file(file, named, goes_on, is_clear))
    return total


def blocks(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges as whole blocks, sorted and joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        first, last = start // BLOCK_BYTES * BLOCK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def length(ranges: Ranges) -> int:
    """Bytes."""
    return sum(stop - start for start, stop in ranges)


def _of_file(file: Path, named: Named, goes_on: bool, is_clear: bool) -> Space:
    taken = file.stat().st_blocks * 512
    if not holds_states(file.name):
        return Space(record_bytes=taken)
    frozen = named.blocks_of(file)
    durable_bytes = min(length(frozen), taken)
    live_bytes = 0
    if goes_on:
        written = blocks(_data_of(file))
        live_bytes = min(length(blocks([*frozen, *written])) - length(frozen), taken - durable_bytes)
    rest = taken - durable_bytes - live_bytes
    return Space(durable_bytes, live_bytes, rest if is_clear else 0, 0 if is_clear else rest)


def _data_of(file: Path) -> Iterator[tuple[int, int]]:
    """Where a file has been written: what is reserved and was not is a hole to whoever asks. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stop, end = 0, os.fstat(fd).st_size
        while stop < end:
            try:
                start = os.lseek(fd, stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            stop = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, stop
    finally:
        os.close(fd)
