"""Pieces of a part: what a rank captured, as ranges of files, with the checksums of their bytes.

    on NVMe      frozen: rows of the store's own files, one for each run of bytes; nothing is copied (resting.py)
    in memory    written once to a data file, one stretch behind the other, each at a multiple of 64 bytes

Memory: a chunk of CHUNK_BYTES and the writer's buffers, whatever the size of the states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tiermem.checkpoint.saving.blocks import Run, cuts, joined
from tiermem.checkpoint.saving.rows import Key, Rows, joined_rows, rows_of
from tiermem.checkpoint.saving.stretch import Stretch
from tiermem.swap.checksum import crc32c
from tiermem.swap.extents import round_up
from tiermem.swap.native import Workers
from tiermem.swap.writer import FileWriter

CHUNK_BYTES = 4 << 20
_ALIGN = 64  # bytes

Runs = Mapping[tuple[str, str], Sequence[Run]]
"""Checksums of what a rank holds of each (parameter, state)."""


class Placed(NamedTuple):
    """A rank's pieces and the checksums of their bytes."""

    rows: Rows
    sums: Runs


def put_together(placed: Sequence[Placed]) -> Placed:
    """Pieces from several files; a state may have some in each."""
    sums: dict[tuple[str, str], list[Run]] = {}
    for each in placed:
        for key, runs in each.sums.items():
            sums.setdefault(key, []).extend(runs)
    return Placed(joined_rows([each.rows for each in placed]), _merged(sums))


def write_data(stretches: Sequence[Stretch], path: Path, file: int, workers: Workers) -> Placed:
    """Writes stretches in memory to a new file, which is number `file` of the part, and makes it durable. Blocks.

    Raises OSError, and then there is no such file.
    """
    keys: dict[Key, int] = {}
    rows = []
    sums: dict[tuple[str, str], list[Run]] = {}
    with FileWriter(path, data_bytes(stretches)) as out:
        for stretch in stretches:
            out.skip_to(round_up(out.position, _ALIGN))
            key = keys.setdefault((stretch.param, stretch.state, stretch.kind), len(keys))
            rows.append((key, stretch.start, stretch.numel, file, out.position, stretch.num_bytes))
            found = sums.setdefault((stretch.param, stretch.state), [])
            for start, data in _chunks(stretch):
                out.put(data)
                found.append(_sum(start, data, workers))
    return Placed(rows_of(list(keys), rows), _merged(sums))


def data_bytes(stretches: Iterable[Stretch]) -> int:
    """Bytes of the file that `write_data` makes."""
    end = 0
    for stretch in stretches:
        end = round_up(end, _ALIGN) + stretch.num_bytes
    return end


def _sum(start: int, data: torch.Tensor, workers: Workers) -> Run:
    """The checksums of bytes that begin at `start` of their state."""
    parts = [data[at - start : at - start + num_bytes] for at, num_bytes in cuts(start, data.numel())]
    return Run(start, data.numel(), crc32c(parts, workers))


def _chunks(stretch: Stretch) -> Iterator[tuple[int, torch.Tensor]]:
    """(byte of the whole state, bytes) of a stretch, a chunk at a time."""
    assert not isinstance(stretch.place, tuple), f"{stretch.state} of {stretch.param} rests on NVMe"
    for offset in range(0, stretch.num_bytes, CHUNK_BYTES):
        num_bytes = min(CHUNK_BYTES, stretch.num_bytes - offset)
        yield stretch.first_byte + offset, stretch.place(offset, num_bytes)


def _merged(sums: Mapping[tuple[str, str], list[Run]]) -> Runs:
    return {key: joined(runs) for key, runs in sums.items()}
