"""Pieces of a part: what a rank captured, as ranges of files, with the checksums of their bytes.

    on NVMe      frozen: a stretch becomes pieces of the store's own files, one for each run of bytes; nothing is copied
    in memory    written once to a data file, one stretch behind the other, each at a multiple of 64 bytes
    checksums    those that the store took when bytes were written; of what is in memory, when it is written here

Memory: a chunk of CHUNK_BYTES and the writer's buffers, whatever the size of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import Piece
from tiermem.checkpoint.saving.blocks import Run, cuts, joined, run_of
from tiermem.checkpoint.saving.stretch import Stretch
from tiermem.swap.checksum import crc32c
from tiermem.swap.extents import round_up
from tiermem.swap.native import Workers
from tiermem.swap.pieces import PieceTable
from tiermem.swap.writer import FileWriter

CHUNK_BYTES = 4 << 20
_ALIGN = 64  # bytes

Runs = Mapping[tuple[str, str], Sequence[Run]]
"""Checksums of what a rank holds of each (parameter, state)."""

TableOf = Callable[[str], PieceTable | None]
"""The checksums of an entry of the store, all of them known; None when it has none."""


class FrozenRange(Protocol):
    """Bytes of the file on one path."""

    @property
    def path_index(self) -> int:
        """Which path."""

    @property
    def file_offset(self) -> int:
        """Where in its file."""

    @property
    def num_bytes(self) -> int:
        """How many."""


RangesOf = Callable[[str, int, int], Sequence[FrozenRange]]
"""(entry, offset, bytes) -> where they lie, frozen."""


class Placed(NamedTuple):
    """A rank's pieces and the checksums of their bytes."""

    pieces: list[Piece]
    sums: Runs


def frozen_pieces(stretches: Sequence[Stretch], ranges_of: RangesOf, table_of: TableOf, workers: Workers) -> Placed:
    """The pieces of stretches on NVMe, by the number of the path whose file they lie in. Blocks only where a checksum is
    not known: then the bytes are read. Raises OSError."""
    pieces: list[Piece] = []
    sums: dict[tuple[str, str], list[Run]] = {}
    tables: dict[str, PieceTable | None] = {}
    for stretch in stretches:
        assert stretch.entry is not None
        pieces += _pieces_of(stretch, ranges_of(stretch.entry, stretch.offset, stretch.num_bytes))
        if stretch.entry not in tables:
            tables[stretch.entry] = table_of(stretch.entry)
        known = _known(stretch, tables[stretch.entry])
        found = [known] if known is not None else [_sum(start, data, workers) for start, data in _chunks(stretch)]
        sums.setdefault((stretch.param, stretch.state), []).extend(found)
    return Placed(pieces, _merged(sums))


def write_data(stretches: Sequence[Stretch], path: Path, file: int, workers: Workers) -> Placed:
    """Writes stretches in memory to a new file, which is number `file` of the part, and makes it durable. Blocks.

    Raises OSError, and then there is no such file.
    """
    pieces: list[Piece] = []
    sums: dict[tuple[str, str], list[Run]] = {}
    with FileWriter(path, data_bytes(stretches)) as out:
        for stretch in stretches:
            out.skip_to(round_up(out.position, _ALIGN))
            pieces.append(_piece(stretch, 0, stretch.numel, file, out.position))
            found = sums.setdefault((stretch.param, stretch.state), [])
            for start, data in _chunks(stretch):
                out.put(data)
                found.append(_sum(start, data, workers))
    return Placed(pieces, _merged(sums))


def data_bytes(stretches: Sequence[Stretch]) -> int:
    """Bytes of the file that `write_data` makes."""
    end = 0
    for stretch in stretches:
        end = round_up(end, _ALIGN) + stretch.num_bytes
    return end


def _pieces_of(stretch: Stretch, ranges: Sequence[FrozenRange]) -> Iterator[Piece]:
    done = 0
    for each in ranges:
        numel = min(stretch.numel - done, kinds.numel_of(stretch.kind, each.num_bytes))
        yield _piece(stretch, done, numel, each.path_index, each.file_offset)
        done += numel
    assert done == stretch.numel, f"{stretch.state} of {stretch.param}: {done} of {stretch.numel} elements are frozen"


def _piece(stretch: Stretch, first: int, numel: int, file: int, offset: int) -> Piece:
    num_bytes = kinds.bytes_of(stretch.kind, numel)
    return Piece(stretch.param, stretch.state, stretch.kind, stretch.start + first, numel, file, offset, num_bytes)


def _known(stretch: Stretch, table: PieceTable | None) -> Run | None:
    """What the store knows of a stretch, if it knows all of it."""
    if table is None:
        return None
    inside = table.inside(stretch.offset, stretch.num_bytes)
    starts, stops = table.pieces.starts[inside], table.pieces.stops[inside]
    if not len(starts) or not table.is_known[inside].all():
        return None
    if starts[0] != stretch.offset or stops[-1] != stretch.offset + stretch.num_bytes:
        return None
    shift = stretch.first_byte - stretch.offset
    return run_of(starts + shift, stops + shift, table.crcs[inside].tolist())


def _sum(start: int, data: torch.Tensor, workers: Workers) -> Run:
    """The checksums of bytes that begin at `start` of their state."""
    parts = [data[at - start : at - start + num_bytes] for at, num_bytes in cuts(start, data.numel())]
    return Run(start, data.numel(), crc32c(parts, workers))


def _chunks(stretch: Stretch) -> Iterator[tuple[int, torch.Tensor]]:
    """(byte of the whole state, bytes) of a stretch, a chunk at a time."""
    for offset in range(0, stretch.num_bytes, CHUNK_BYTES):
        num_bytes = min(CHUNK_BYTES, stretch.num_bytes - offset)
        yield stretch.first_byte + offset, stretch.read(offset, num_bytes)


def _merged(sums: Mapping[tuple[str, str], list[Run]]) -> Runs:
    return {key: joined(runs) for key, runs in sums.items()}
