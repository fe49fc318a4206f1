"""Stream: the bytes of one state of one parameter, in the order of its elements, wherever their pieces lie.

    elements    0 ........ start ................. numel        of the whole parameter, row-major
    bytes       [ piece 0 ][ piece 1 ][ piece 2 ... ]           as if they lay in one piece: what checksums are of
    places      file 3     file 0     file 3                    of several ranks and paths

Which bytes a range of elements takes depends on the kind (kinds.py): scales are counted from the first element of their
piece, so that a range that begins within a block of 64 begins at that block.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.checkpoint.format.kinds import BLOCK, CODE_SCALES, CODES, PACKED, PACKED_SCALES, bytes_of
from tiermem.checkpoint.format.manifest import Piece
from tiermem.swap.read_ahead import FileRange

_SCALED = frozenset({CODES, PACKED})
_SCALES = frozenset({CODE_SCALES, PACKED_SCALES})


class Span(NamedTuple):
    """Elements [start, start + numel) of a state that lie in one piece, and their bytes in the stream."""

    start: int
    numel: int
    first_byte: int
    num_bytes: int


class Stream:
    """One state of one parameter.

    Args:
        param, state: their names, for errors.
        pieces: in the order of their elements, which they cover once (cover.py), each with the path of its file.
    """

    def __init__(self, param: str, state: str, pieces: Sequence[tuple[Path, Piece]]) -> None:
        self.param = param
        self.state = state
        self.kind = pieces[0][1].kind
        self.numel = sum(piece.numel for _, piece in pieces)
        self._pieces = pieces
        self._starts = [piece.start for _, piece in pieces]
        self._bytes = [0]
        for _, piece in pieces:
            self._bytes.append(self._bytes[-1] + piece.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return self._bytes[-1]

    def spans(self, start: int, numel: int) -> Iterator[Span]:
        """The elements of a range, piece by piece; in 8 bits from the block of 64 that holds the first one."""
        stop, number = start + numel, bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            piece = self._pieces[number][1]
            first = start - piece.start
            if self.kind in _SCALED or self.kind in _SCALES:
                first -= first % BLOCK
            last = min(stop - piece.start, piece.numel)
            begin = bytes_of(self.kind, first)
            end = bytes_of(self.kind, last)
            yield Span(piece.start + first, last - first, self._bytes[number] + begin, end - begin)
            start, number = piece.start + last, number + 1

    def ranges(self, first_byte: int, last_byte: int) -> Iterator[FileRange]:
        """Where bytes [first_byte, last_byte) of the stream lie, in order; neighbours in a file are one range."""
        due: FileRange | None = None
        for each in self._ranges(first_byte, last_byte):
            if due is not None and due.path == each.path and due.offset + due.num_bytes == each.offset:
                due = due._replace(num_bytes=due.num_bytes + each.num_bytes)
                continue
            if due is not None:
                yield due
            due = each
        if due is not None:
            yield due

    def elements_of(self, first_byte: int, last_byte: int) -> tuple[int, int]:
        """The first element, and the one behind the last, of those that bytes of the stream are of."""
        first = bisect.bisect_right(self._bytes, first_byte) - 1
        last = bisect.bisect_left(self._bytes, last_byte) - 1
        return self._element(first, first_byte), self._element(last, last_byte, is_end=True)

    def ends(self) -> dict[Path, int]:
        """The files that hold it, and how many bytes each has to have for that."""
        found: dict[Path, int] = {}
        for path, piece in self._pieces:
            found[path] = max(found.get(path, 0), piece.offset + piece.num_bytes)
        return found

    def _ranges(self, first_byte: int, last_byte: int) -> Iterator[FileRange]:
        number = bisect.bisect_right(self._bytes, first_byte) - 1
        while first_byte < last_byte:
            path, piece = self._pieces[number]
            skipped, stop = first_byte - self._bytes[number], min(last_byte, self._bytes[number + 1])
            yield FileRange(path, piece.offset + skipped, stop - first_byte)
            first_byte, number = stop, number + 1

    def _element(self, number: int, byte: int, is_end: bool = False) -> int:
        piece, inside = self._pieces[number][1], byte - self._bytes[number]
        if self.kind in _SCALES:
            each = inside // bytes_of(self.kind, 1) * BLOCK
        else:
            each = -(-inside // bytes_of(self.kind, 1)) if is_end else inside // bytes_of(self.kind, 1)
        return piece.start + min(each, piece.numel)
