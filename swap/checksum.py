"""Checksums: the CRC-32C of bytes, and the table of checksums of an entry's pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.native import Workers, crc32c_combine, crc32c_join, crc32c_of
from tiermem.swap.ranges import Numbers

# ---- Checksums: the CRC-32C of bytes in memory, by the processor's own instructions, on threads that kernels ---------
# share
#
#     crc(A + B) = combine(crc(A), crc(B), len(B))
#
# so that bytes which are written, moved and kept in pieces have one checksum, whatever the pieces are. CRC-32C is
# iSCSI's (RFC 3720): it finds every burst of errors of up to 32 bits, and any other with a chance of 2**-32 to miss it.
#
# What is well kept and fast was looked for ready-made first: Debian's ISA-L has no archive to link into a module, its
# Abseil no CRC yet, and google-crc32c takes a call of Python for each piece. So the loops are native/checksum*.cpp,
# held to the published vectors by tests/native/test_checksum.cpp.

Crcs = npt.NDArray[np.uint32]
"""Checksums, a flat array."""


def crc32c(tensors: Sequence[torch.Tensor], workers: Workers | None = None) -> list[int]:
    """The CRC-32C of the bytes of each tensor: contiguous, on the CPU, of any dtype. Blocks; GIL free."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"a checksum is that of a contiguous CPU tensor, not of {tuple(tensor.shape)} on {tensor.device}"
            )
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    num_bytes = np.array([tensor.nbytes for tensor in tensors], np.uint64)
    return [int(crc) for crc in crc32c_of(addresses, num_bytes, workers)]


def combine(a: int, b: int, b_bytes: int) -> int:
    """The CRC-32C of A and B behind it, from those of A and of B, which is `b_bytes` long."""
    return crc32c_combine(a, b, b_bytes)


def join(first: Numbers, crcs: Crcs, num_bytes: Numbers) -> Crcs:
    """The CRC-32C of messages first[i] to first[i + 1] behind one another, for all i, from theirs and their lengths."""
    return crc32c_join(first.astype(np.uint64), crcs, num_bytes.astype(np.uint64))


# ---- Pieces: the byte ranges of an entry that have a checksum each, and the table of those checksums as last ---------
# written
#
#     entry     [ piece 0 | piece 1 |  gap  | piece 2 | ... ]       ranges in order, that do not overlap; gaps have none
#
#     a write of           a piece's checksum
#     the whole piece      is known: that of the bytes that are written
#     a part of it         is unknown, until the whole piece is written or somebody reads it and tells (`put`)
#     a write that failed  stays that of what should have been written: what lies there is not taken for it
#
# A piece is whatever its owner checks as one; the table knows it by number, and asks the owner for its name when
# something has to be said about it. Nothing is done piece by piece in Python.

ROTATION = 16  # with verify="sample" one read of so many is checked


class Pieces(NamedTuple):
    """Ranges [starts[i], stops[i]) of an entry's bytes: flat, ascending, none empty."""

    starts: Numbers
    stops: Numbers
    name: Callable[[int], object] = "piece {}".format
    """What piece i is, in its owner's words; its str() goes into errors."""


class PieceTable:
    """The pieces of one entry with their checksums; unknown at first. Its owner's lock guards it.

    serial: tells entries apart, so that of many that are read in turn another sixteenth is checked each time.

    Raises ValueError for pieces that are empty, out of order or overlap.
    """

    def __init__(self, pieces: Pieces, serial: int = 0) -> None:
        starts, stops = pieces.starts, pieces.stops
        if (
            starts.shape != stops.shape
            or starts.ndim != 1
            or (stops <= starts).any()
            or (starts[1:] < stops[:-1]).any()
        ):
            raise ValueError("pieces are ranges in order, none empty, that do not overlap")
        self.pieces = pieces
        self.crcs: Crcs = np.zeros(len(starts), np.uint32)
        self.is_known: npt.NDArray[np.bool_] = np.zeros(len(starts), np.bool_)
        self._serial = serial
        self._num_reads = np.zeros(len(starts), np.int64)

    def inside(self, offset: int, num_bytes: int) -> slice:
        """The pieces that lie in a range of the entry whole."""
        first = int(np.searchsorted(self.pieces.starts, offset, "left"))
        last = int(np.searchsorted(self.pieces.stops, offset + num_bytes, "right"))
        return slice(first, max(first, last))

    def touching(self, offset: int, num_bytes: int) -> slice:
        """The pieces of which a range of the entry has at least a byte: none of an empty range."""
        first = int(np.searchsorted(self.pieces.stops, offset, "right"))
        last = int(np.searchsorted(self.pieces.starts, offset + num_bytes, "left"))
        return slice(first, max(first, last) if num_bytes else first)

    def put(self, which: slice | Numbers, crcs: Crcs) -> None:
        """These pieces are known to have these checksums."""
        self.crcs[which], self.is_known[which] = crcs, True

    def overwrite(self, offset: int, num_bytes: int, crcs: Crcs) -> None:
        """A range is written: these are the checksums of what lies in it whole, what it cuts is unknown from now on."""
        self.is_known[self.touching(offset, num_bytes)] = False
        self.put(self.inside(offset, num_bytes), crcs)

    def due(self, offset: int, num_bytes: int, rotates: bool) -> Numbers:
        """The numbers of those pieces inside a range that are known and to be checked when it is read now.

        rotates: a read of the range in ROTATION, another one for each entry.
        """
        inside = self.inside(offset, num_bytes)
        chosen = self.is_known[inside].copy()
        if rotates:
            self._num_reads[inside] += 1
            chosen &= (self._num_reads[inside] + self._serial) % ROTATION == 0
        numbers: Numbers = inside.start + np.flatnonzero(chosen)
        return numbers

    def unknown(self) -> Numbers:
        """The numbers of the pieces whose checksum is not known."""
        return np.flatnonzero(~self.is_known)

    def take_over(self, other: PieceTable) -> None:
        """Keeps what another table of this entry knows about pieces that both have."""
        if not len(other.pieces.starts):
            return
        at = np.searchsorted(other.pieces.starts, self.pieces.starts).clip(max=len(other.pieces.starts) - 1)
        same = (other.pieces.starts[at] == self.pieces.starts) & (other.pieces.stops[at] == self.pieces.stops)
        self.crcs = np.where(same, other.crcs[at], 0).astype(np.uint32)
        self.is_known = same & other.is_known[at]
