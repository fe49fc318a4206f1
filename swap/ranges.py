"""Ranges: parts of an entry on NVME as transfers, checked before the disk is asked.

An offset, a length or an address that O_DIRECT would refuse is refused here, in the words of whoever gave it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.entry import Entry
from tiermem.swap.files import Extent
from tiermem.swap.native import READ, Op
from tiermem.swap.queues import Blocks


def range_of(kind: int, entry: Entry, fd: int, offset: int, buffer: torch.Tensor) -> list[Op]:
    """One transfer between a buffer and the entry's bytes from `offset` on; none when the buffer is empty.

    Raises ValueError for a range outside the entry or odd to the disk.
    """
    extent, length, address = extent_of(entry), buffer.numel(), buffer.data_ptr()
    if offset < 0 or offset + length > extent.num_bytes:
        raise ValueError(f"bytes {offset} to {offset + length} lie outside {entry.name!r} ({extent.num_bytes} bytes)")
    _check_bytes(entry, buffer)
    if offset % ALIGNMENT or length % ALIGNMENT or address % ALIGNMENT:
        raise ValueError(
            f"{entry.name!r}: offset {offset}, length {length} and address {address:#x} must be multiples of "
            f"{ALIGNMENT}; odd ranges pass through a Bounce"
        )
    return [Op(kind, fd, address, length, extent.offset + offset)] if length else []


def blocks_of(
    entry: Entry, fd: int, offsets: npt.NDArray[np.int64], block_bytes: int, into: torch.Tensor
) -> Blocks | None:
    """Reads of equal blocks of an entry, one behind the other into a buffer; None when there are none.

    Raises ValueError as `range_of`; nothing is looked at block by block.
    """
    extent, address = extent_of(entry), into.data_ptr()
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
        return None
    first, last = int(offsets.min()), int(offsets.max())
    if first < 0 or last + block_bytes > extent.num_bytes:
        raise ValueError(
            f"blocks at {first} to {last + block_bytes} lie outside {entry.name!r} ({extent.num_bytes} bytes)"
        )
    if int(np.bitwise_or.reduce(offsets)) % ALIGNMENT:
        odd = int(offsets[offsets % ALIGNMENT != 0][0])
        raise ValueError(f"{entry.name!r}: offset {odd} is no multiple of {ALIGNMENT}")
    addresses = address + np.arange(len(offsets), dtype=np.int64) * block_bytes
    return Blocks(READ, fd, addresses, offsets + extent.offset, block_bytes)


def extent_of(entry: Entry) -> Extent:
    """Where an entry rests on NVME. Raises RuntimeError when it rests elsewhere."""
    if entry.extent is None:
        raise RuntimeError(f"{entry.name!r} rests on {entry.home.name}: there is no file to read or write")
    return entry.extent


def _check_bytes(entry: Entry, buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
        raise ValueError(f"{entry.name!r}: a buffer is a contiguous uint8 tensor, not {buffer.dtype}")
