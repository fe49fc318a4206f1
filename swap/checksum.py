"""Checksums: the CRC-32C of bytes in memory, by the processor's own instructions, on threads that kernels share.

    crc(A + B) = combine(crc(A), crc(B), len(B))

so that bytes which are written, moved and kept in pieces have one checksum, whatever the pieces are. CRC-32C is iSCSI's
(RFC 3720): it finds every burst of errors of up to 32 bits, and any other with a chance of 2**-32 to miss it.

What is well kept and fast was looked for ready-made first: Debian's ISA-L has no archive to link into a module, its Abseil no
CRC yet, and google-crc32c takes a call of Python for each piece. So the loops are native/checksum*.cpp, held to the published
vectors by tests/native/test_checksum.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tiermem.swap.native import Workers, crc32c_combine, crc32c_join, crc32c_of
from tiermem.swap.numbers import Numbers

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
