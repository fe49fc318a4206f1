"""CRC-32C of a manifest's own bytes, and its sum of two neighbours: crc(A + B) from crc(A), crc(B) and len(B).

Polynomial 0x1EDC6F41, reflected, as iSCSI has it (RFC 3720, B.4). Texts of some kilobytes pass through here, in plain
Python; states are summed by native code.
"""

from __future__ import annotations

import functools

_POLYNOMIAL = 0x82F63B78  # reflected


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """The CRC-32C of bytes that follow others whose CRC-32C is `before`."""
    table, crc = _table(), before ^ 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32C of two runs of bytes, one behind the other, from those of each and the length of the second."""
    power = 0
    while second_bytes:
        if second_bytes & 1:
            first = _times(_shift(power), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


@functools.cache
def _shift(power: int) -> tuple[int, ...]:
    """The matrix over GF(2) that appends 2 ** power zero bytes to a CRC; a column per bit."""
    if power == 0:
        columns = tuple(_POLYNOMIAL if bit == 0 else 1 << (bit - 1) for bit in range(32))  # one zero bit
        for _ in range(3):
            columns = tuple(_times(columns, column) for column in columns)
        return columns
    half = _shift(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(columns: tuple[int, ...], vector: int) -> int:
    found = 0
    for column in columns:
        if vector & 1:
            found ^= column
        vector >>= 1
    return found
