"""Errors: bytes that fail their checksum, and what to do about a system error."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # brings numpy, which commands that only look at folders go without
    from tiermem.swap.ranges import FileRange


class CorruptionError(OSError):
    """Bytes that were read have another checksum than those that were written: errno EIO, where, what they are, what to do.

        CorruptionError        any of these: catch this one
            DamagedEntry       of a run's own store, while it trains
            DamagedState       of a saved step, while it is opened, exported or verified: checkpoint/opening/verified.py

    A damaged manifest, part or pointer is a ManifestError: it holds no bytes of states.

    Attributes:
        filename: the file.
        offset, length: where in the file the bytes begin, and how many there are; they may go on elsewhere.
        written, seen: CRC-32C of what was written and of what came.
    """

    def __init__(self, what: str, filename: str, offset: int, length: int, written: int, seen: int) -> None:
        super().__init__(errno.EIO, what, filename)
        self.offset, self.length = offset, length
        self.written, self.seen = written, seen

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), (self.errno, self.strerror, self.filename), self.__dict__)


class Place(NamedTuple):
    """Bytes of a store's entry, and the ranges of files that hold them, in order."""

    entry: str
    offset: int
    num_bytes: int
    ranges: tuple[FileRange, ...]


class DamagedEntry(CorruptionError):
    """Bytes of a store's entry; its first range of a file is named.

    Attributes:
        entry, entry_offset: which tensor of the store, and where in it.
        piece: its name, from its owner; None when it has none.
    """

    def __init__(self, place: Place, piece: object, written: int, seen: int, advice: str) -> None:
        first, length = place.ranges[0], place.num_bytes
        what = "" if piece is None else f"{piece}: "
        what += (
            f"{length} bytes at offset {first.offset} are not those that were written (CRC-32C {seen:#010x}, written "
            f"{written:#010x}; bytes {place.offset} to {place.offset + length} of {place.entry!r}). {advice}"
        )
        super().__init__(what, str(first.path), first.offset, length, written, seen)
        self.entry, self.entry_offset = place.entry, place.offset
        self.piece = piece


def _again(kind: type[CorruptionError], told: tuple[Any, ...], attributes: dict[str, Any]) -> CorruptionError:
    """Makes the same error from what copying and pickling keep."""
    error = kind.__new__(kind)
    OSError.__init__(error, *told)
    error.__dict__.update(attributes)
    return error


_REMEDIES: Mapping[int, str] = MappingProxyType(
    {
        errno.ENOSPC: "the file system is full: free some space or add a path",
        errno.EDQUOT: "the quota is used up: free some space, ask for more, or use another path",
        errno.ENODATA: "the file is shorter than what was written to it: something truncated it",
        errno.EIO: "the device reports a failure: see the kernel log",
        errno.EROFS: "the file system has turned read-only: see the kernel log",
        errno.ENOLCK: "the file system keeps no locks, or their server is down: mount it with locks, or use another one",
        errno.EFBIG: "the file may not grow so long: see ulimit -f",
    }
)


def remedy(code: int | None) -> str:
    """What is best done about a system error, in a few words, for the end of its text; empty where the error says it all."""
    return "" if code is None else _REMEDIES.get(code, "")
