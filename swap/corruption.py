"""CorruptionError: bytes that came back from a file are not those that were written there."""

from __future__ import annotations

import errno


class CorruptionError(OSError):
    """What was read has another checksum than what was written: errno EIO, where, what it is, and what to do.

    Attributes:
        filename: the file.
        offset, length: where in the file the piece begins, and its bytes; a piece may go on elsewhere in it.
        entry, entry_offset: which tensor of the store, and where in it.
        piece: what its owner calls it; None when nobody said.
        written, seen: CRC-32C of what was written and of what came.
    """

    def __init__(
        self,
        filename: str,
        offset: int,
        length: int,
        entry: str,
        entry_offset: int,
        piece: object,
        written: int,
        seen: int,
        advice: str,
    ) -> None:
        what = "" if piece is None else f"{piece}: "
        super().__init__(
            errno.EIO,
            f"{what}{length} bytes at offset {offset} are not those that were written (CRC-32C {seen:#010x}, written "
            f"{written:#010x}; bytes {entry_offset} to {entry_offset + length} of {entry!r}). {advice}",
            filename,
        )
        self.offset, self.length = offset, length
        self.entry, self.entry_offset = entry, entry_offset
        self.piece = piece
        self.written, self.seen = written, seen
        self._advice = advice

    def anew(self) -> CorruptionError:
        """The same error without a traceback, to be raised once more."""
        place = (str(self.filename), self.offset, self.length, self.entry, self.entry_offset)
        return CorruptionError(*place, self.piece, self.written, self.seen, self._advice)
