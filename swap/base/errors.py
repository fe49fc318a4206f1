"""Errors: exceptions for bytes that fail their checksum, and advice about system errors."""

from __future__ import annotations

import errno
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # ranges imports numpy, and some commands only look at folders
    from tiermem.swap.base.ranges import FileRange


class CorruptionError(OSError):
    """Bytes that were read do not have the checksum of the bytes that were written. The errno is
    EIO.

        CorruptionError        the base class: catch this one
            DamagedEntry       in the store of a run that trains
            DamagedState       in a saved step that is opened, exported or verified: checkpoint/opening/verified.py

    A damaged manifest, part or pointer raises a ManifestError instead, because it holds no bytes of
    states.

    Attributes:
        filename: the file.
        offset, length: the first byte in the file, and the number of bytes; some of them may lie in
            another range.
        written, seen: CRC-32C of the bytes written and of the bytes read.
    """

    def __init__(
        self, what: str, filename: str, offset: int, length: int, written: int, seen: int
    ) -> None:
        super().__init__(errno.EIO, what, filename)
        self.offset = offset
        self.length = length
        self.written = written
        self.seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), (self.errno, self.strerror, self.filename), self.__dict__)


class Place(NamedTuple):
    """Bytes of a store's entry and the file ranges that hold them, in order."""

    entry: str
    offset: int
    num_bytes: int
    ranges: tuple[FileRange, ...]


class DamagedEntry(CorruptionError):
    """Damaged bytes of a store's entry. `filename` and `offset` are those of their first file
    range.

    Attributes:
        entry, entry_offset: the tensor's name in the store, and the first damaged byte in it.
        piece: the piece's name, from its owner; None for a piece without name.
    """

    def __init__(self, place: Place, piece: object, written: int, seen: int, advice: str) -> None:
        first = place.ranges[0]
        length = place.num_bytes
        what = "" if piece is None else f"{piece}: "
        what += (
            f"{length} bytes at offset {first.offset} are not those that were written (CRC-32C "
            f"{seen:#010x}, written {written:#010x}; bytes {place.offset} to "
            f"{place.offset + length} of {place.entry!r}). {advice}"
        )
        super().__init__(what, str(first.path), first.offset, length, written, seen)
        self.entry = place.entry
        self.entry_offset = place.offset
        self.piece = piece


def _again(
    kind: type[CorruptionError], told: tuple[Any, ...], attributes: dict[str, Any]
) -> CorruptionError:
    """Restores an error from the values that copying and pickling keep."""
    error = kind.__new__(kind)
    OSError.__init__(error, *told)
    error.__dict__.update(attributes)
    return error


_REMEDIES = MappingProxyType(
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


def printable(text: str) -> str:
    """A text with every character that is none to look at as its escape, so that it does not steer
    a terminal.

    Lines stay lines. Names of files, lock files and manifests may be another user's.
    """
    if text.isprintable():
        return text
    lines = text.split("\n")
    if all(map(str.isprintable, lines)):
        return text
    return "\n".join(
        "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
        for line in lines
    )


def remedy(code: int | None) -> str:
    """Returns short advice about a system error for the end of its text; empty for an error that
    needs none."""
    return "" if code is None else _REMEDIES.get(code, "")
