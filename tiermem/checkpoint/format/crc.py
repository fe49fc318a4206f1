"""CRC-32C of a file's text; those of states, and how two are combined: swap/checksum.py."""

from __future__ import annotations

import numpy as np

from tiermem.swap.native import crc32c_of


def crc32c(data: bytes | memoryview) -> int:
    """The CRC-32C of bytes (iSCSI's: RFC 3720, B.4)."""
    view = np.frombuffer(data, np.uint8)
    return int(crc32c_of(np.array([view.ctypes.data], np.uint64), np.array([len(data)], np.uint64))[0])
