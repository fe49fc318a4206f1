"""Ranges: parts of an entry on NVME as transfers, checked before the disk is asked.

An offset, a length or an address that O_DIRECT would refuse is refused here, in the words of whoever gave it. A range whose
bytes lie in several slots becomes several transfers; blocks are looked up all at once, and cut only where slots meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.entry import Entry
from tiermem.swap.home import NvmeHome, Place
from tiermem.swap.native import READ, Op
from tiermem.swap.queues import Blocks

Int64s = npt.NDArray[np.int64]


def check_range(entry: Entry, offset: int, buffer: torch.Tensor) -> None:
    """Raises ValueError for a range outside the entry or odd to the disk."""
    home, length, address = home_of(entry), buffer.numel(), buffer.data_ptr()
    if offset < 0 or offset + length > home.num_bytes:
        raise ValueError(f"bytes {offset} to {offset + length} lie outside {entry.name!r} ({home.num_bytes} bytes)")
    _check_bytes(entry, buffer)
    if offset % ALIGNMENT or length % ALIGNMENT or address % ALIGNMENT:
        raise ValueError(
            f"{entry.name!r}: offset {offset}, length {length} and address {address:#x} must be multiples of "
            f"{ALIGNMENT}; odd ranges pass through a Bounce"
        )


def transfers_of(kind: int, places: Iterable[Place], offset: int, buffer: torch.Tensor) -> list[Op]:
    """One transfer for each place, between the files and a buffer that begins at the entry's byte `offset`."""
    base = buffer.data_ptr() - offset
    return [Op(kind, place.fd, base + place.start, place.num_bytes, place.file_offset) for place in places]


def blocks_of(entry: Entry, offsets: Int64s, block_bytes: int, into: torch.Tensor) -> list[Blocks]:
    """Reads of equal blocks of an entry, one behind the other into a buffer; none when there are none.

    Raises ValueError as `check_range`; nothing is looked at block by block.
    """
    home, address = home_of(entry), into.data_ptr()
    if offsets.dtype != np.int64 or offsets.ndim != 1:
        raise ValueError(f"{entry.name!r}: offsets are a flat int64 array, not {offsets.ndim}-d {offsets.dtype}")
    if block_bytes <= 0 or block_bytes % ALIGNMENT or address % ALIGNMENT:
        raise ValueError(
            f"{entry.name!r}: blocks of {block_bytes} bytes at address {address:#x}; both must be multiples of {ALIGNMENT}"
        )
    _check_bytes(entry, into)
    if into.numel() != len(offsets) * block_bytes:
        raise ValueError(
            f"{entry.name!r}: {len(offsets)} blocks of {block_bytes} bytes need a buffer of {len(offsets) * block_bytes}, "
            f"not {into.numel()}"
        )
    if not len(offsets):
        return []
    first, last = int(offsets.min()), int(offsets.max())
    if first < 0 or last + block_bytes > home.num_bytes:
        raise ValueError(
            f"blocks at {first} to {last + block_bytes} lie outside {entry.name!r} ({home.num_bytes} bytes)"
        )
    if int(np.bitwise_or.reduce(offsets)) % ALIGNMENT:
        odd = int(offsets[offsets % ALIGNMENT != 0][0])
        raise ValueError(f"{entry.name!r}: offset {odd} is no multiple of {ALIGNMENT}")
    return _in_files(home.reads(first, last + block_bytes), offsets, block_bytes, address)


def home_of(entry: Entry) -> NvmeHome:
    """Where an entry rests on NVME. Raises RuntimeError when it rests elsewhere."""
    if entry.nvme is None:
        raise RuntimeError(f"{entry.name!r} rests on {entry.home.name}: there is no file to read or write")
    return entry.nvme


def _in_files(places: list[Place], offsets: Int64s, block_bytes: int, address: int) -> list[Blocks]:
    """The reads of each file, of blocks that do not cross from one place to the next."""
    starts = np.array([place.start for place in places], np.int64)
    addresses = address + np.arange(len(offsets), dtype=np.int64) * block_bytes
    found = np.searchsorted(starts, offsets, "right") - 1
    if len(places) > 1 and bool((np.searchsorted(starts, offsets + block_bytes - 1, "right") - 1 != found).any()):
        offsets, addresses, block_bytes = _cut(starts, offsets, addresses, block_bytes)
        found = np.searchsorted(starts, offsets, "right") - 1
    shifts = np.array([place.file_offset - place.start for place in places], np.int64)
    fds = np.array([place.fd for place in places])
    in_file = offsets + shifts[found]
    if len(set(fds.tolist())) == 1:
        return [Blocks(READ, int(fds[0]), addresses, in_file, block_bytes)]
    return [
        Blocks(READ, fd, addresses[chosen], in_file[chosen], block_bytes)
        for fd in sorted(set(fds.tolist()))
        if (chosen := fds[found] == fd).any()
    ]


def _cut(starts: Int64s, offsets: Int64s, addresses: Int64s, block_bytes: int) -> tuple[Int64s, Int64s, int]:
    """The same blocks in smaller ones of one length, none of which crosses a start."""
    length = block_bytes
    for start in starts.tolist():
        inside = offsets[(offsets < start) & (offsets + block_bytes > start)]
        length = math.gcd(length, *(start - inside).tolist())
    parts = np.arange(0, block_bytes, length, dtype=np.int64)
    return (offsets[:, None] + parts).reshape(-1), (addresses[:, None] + parts).reshape(-1), length


def _check_bytes(entry: Entry, buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
        raise ValueError(f"{entry.name!r}: a buffer is a contiguous uint8 tensor, not {buffer.dtype}")
