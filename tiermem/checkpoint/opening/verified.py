"""Verified: the bytes of saved states in the order of their elements, compared with their checksums and read ahead."""

from __future__ import annotations

import bisect
import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tiermem.checkpoint.format.kinds import BLOCK, OF_SCALES, SCALED, bytes_of
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES, Piece
from tiermem.swap.arena import Arena
from tiermem.swap.checksum import crc32c
from tiermem.swap.errors import CorruptionError
from tiermem.swap.native import Workers, crc32c_combine
from tiermem.swap.ranges import FileRange
from tiermem.swap.stream import ReadAhead, Reading

# ---- DamagedState: a saved state is not what it was when it was saved ------------------------------------------------


class DamagedState(CorruptionError):
    """Bytes of a state have another checksum than its manifest says: errno EIO, where, what they are, and what to do.

    Attributes:
        filename, offset, length: the first bytes of the block, which may go on elsewhere; the checksums are of all of it.
        param, state, start, stop: the elements that they hold.
        step: the durable step that is damaged.
    """

    def __init__(
        self,
        places: list[FileRange],
        param: str,
        state: str,
        start: int,
        stop: int,
        step: int,
        written: int,
        seen: int,
        advice: str,
    ) -> None:
        first, *rest = places
        elsewhere = f" (and {len(rest)} other places, {rest[0].path}@{rest[0].offset} the next)" if rest else ""
        what = (
            f"{state} of {param}, elements {start} to {stop}, is not what was saved at step {step}: {first.num_bytes} bytes at "
            f"offset {first.offset}{elsewhere} have another CRC-32C ({seen:#010x}, saved {written:#010x}). {advice}"
        )
        super().__init__(what, str(first.path), first.offset, first.num_bytes, written, seen)
        self.param, self.state, self.start, self.stop, self.step = param, state, start, stop, step


# ---- Stream: the bytes of one state of one parameter, in the order of its elements, wherever their pieces lie --------
#
#     elements    0 ........ start ................. numel        of the whole parameter, row-major
#     bytes       [ piece 0 ][ piece 1 ][ piece 2 ... ]           as if they lay in one piece: what checksums are of
#     places      file 3     file 0     file 3                    of several ranks and paths
#
# Which bytes a range of elements takes depends on the kind (fields.py): scales are counted from the first element of
# their piece, so that a range that begins within a block of 64 begins at that block.


class Span(NamedTuple):
    """Elements [start, start + numel) of a state that lie in one piece, and their bytes in the stream."""

    stream: Stream
    start: int
    numel: int
    first_byte: int
    num_bytes: int


class Stream:
    """One state of one parameter.

    Args:
        param, state: their names, for errors.
        pieces: in the order of their elements, which they cover once (finding.py), each with the path of its file.
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
            if self.kind in SCALED or self.kind in OF_SCALES:
                first -= first % BLOCK
            last = min(stop - piece.start, piece.numel)
            begin = bytes_of(self.kind, first)
            end = bytes_of(self.kind, last)
            yield Span(self, piece.start + first, last - first, self._bytes[number] + begin, end - begin)
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
        if self.kind in OF_SCALES:
            each = inside // bytes_of(self.kind, 1) * BLOCK
        else:
            each = -(-inside // bytes_of(self.kind, 1)) if is_end else inside // bytes_of(self.kind, 1)
        return piece.start + min(each, piece.numel)


# ---- Verified: the bytes of streams, in whole blocks of 1 MiB that are compared with their checksums, read ahead -----
#
#     follow   what will be asked for, as an iterator     a chunk: up to 4 blocks of one stream
#     start    [ chunk ][ chunk ][ chunk ] ...            as many as the memory holds, under way
#     copy     waits for its chunks | CRC-32C of each block | into place | room for the next
#
# What is followed is a hint: what was not told, or is asked for in another order, is read all the same. No byte is
# handed out of a block that is not as it was saved. Of a block that was used in part the rest is kept for the neighbour
# that asks next.
#
# Memory: what is lent, else 16 MiB of its own; and at most 8 blocks whose rest is kept.

LEAST_AREA_BYTES = 2 << 20
"""Of memory that is lent: room for a block and what is read around it."""

_CHUNK_BLOCKS = 4
_NUM_EDGES = 8  # blocks
_OWN_BYTES = 16 << 20

Checksums = Mapping[str, Mapping[str, Sequence[int]]]
Damage = Callable[[Stream, int, int, int, int], DamagedState]


class Verified:
    """What is read of one source's streams, for one thread at a time.

    Args:
        checksums: of each parameter and state, each block's.
        workers: the threads that sum, when there is something to sum.
        damage: the error for bytes of a stream, from a first to a last one: their checksum as saved, and as seen.
    """

    def __init__(self, checksums: Checksums, workers: Callable[[], Workers], damage: Damage) -> None:
        self._checksums = checksums
        self._workers = workers
        self._damage = damage
        self._told: Iterator[Span] = iter(())
        self._due: collections.deque[_Chunk] = collections.deque()  # in line
        self._coming: dict[_Chunk, Reading] = {}  # under way, in the order of their start
        self._known: dict[tuple[Stream, int], _Chunk] = {}  # by block: those in line and under way
        self._edges: collections.OrderedDict[tuple[Stream, int], torch.Tensor] = collections.OrderedDict()
        self._ahead: ReadAhead | None = None
        self._arena: Arena | None = None  # the memory, when it is its own

    def follow(self, told: Iterator[Span]) -> None:
        """What will be asked for from now on, in order; looked at as far ahead as there is memory. Raises OSError."""
        self._told = told
        self._start_next()

    def copy(self, stream: Stream, first_byte: int, out: torch.Tensor) -> None:
        """Fills a flat uint8 tensor with bytes of a stream, from `first_byte` on. Blocks; raises DamagedState, OSError."""
        done, stop = 0, first_byte + out.numel()
        self._expect(stream, first_byte, stop)
        self._start_next()
        while done < out.numel():
            at = first_byte + done
            block = at // CHECKSUM_BYTES
            edge = self._edges.get((stream, block))
            if edge is not None:
                skipped = at - block * CHECKSUM_BYTES
                taken = edge[skipped : skipped + out.numel() - done]
                out[done : done + taken.numel()] = taken
                done += taken.numel()
                if skipped + taken.numel() == edge.numel():
                    del self._edges[stream, block]
                continue
            chunk = self._known.get((stream, block)) or _Chunk(stream, block, block + 1)
            with self._taken(chunk) as pieces:
                for begin, data in pieces:
                    piece = data[max(0, at - begin) : max(0, stop - begin)]
                    start = max(begin, at) - first_byte
                    out[start : start + piece.numel()] = piece
                    done += piece.numel()
                self._keep_rest(chunk, pieces, stop)
            self._start_next()

    def verify(self, stream: Stream) -> Iterator[int]:
        """Compares every block of a stream, a chunk for each item: its bytes. Raises DamagedState, OSError."""
        self._expect(stream, 0, stream.num_bytes)
        self._start_next()
        for first in range(-(-stream.num_bytes // CHECKSUM_BYTES)):
            if (stream, first) in self._known:
                with self._taken(self._known[stream, first]) as pieces:
                    num_bytes = sum(data.numel() for _, data in pieces)
                self._start_next()
                yield num_bytes

    @contextlib.contextmanager
    def lent(self, areas: Sequence[torch.Tensor]) -> Iterator[None]:
        """Reads through the caller's memory within the block: page-aligned, of LEAST_AREA_BYTES or more each."""
        self.close()
        if areas:
            self._ahead = ReadAhead(areas)
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Ends what is under way, forgets what is expected, and gives memory and files up; what is read next takes new ones."""
        self._told = iter(())
        self._due.clear()
        self._coming.clear()
        self._known.clear()
        self._edges.clear()
        ahead, self._ahead = self._ahead, None
        arena, self._arena = self._arena, None
        try:
            if ahead is not None:
                ahead.close()
        finally:
            if arena is not None:
                arena.close()

    # ---- chunks --------------------------------------------------------------------------------------------------------

    def _expect(self, stream: Stream, first_byte: int, last_byte: int) -> None:
        """Puts the blocks of these bytes in line that are not there yet."""
        first, last = None, -(-last_byte // CHECKSUM_BYTES)
        for block in range(first_byte // CHECKSUM_BYTES, last + 1):
            is_new = block < last and (stream, block) not in self._known and (stream, block) not in self._edges
            if first is not None and (not is_new or block - first == _CHUNK_BLOCKS):
                chunk, first = _Chunk(stream, first, block), None
                self._due.append(chunk)
                self._known.update(dict.fromkeys(chunk.blocks(), chunk))
            if is_new and first is None:
                first = block

    def _start_next(self) -> None:
        """Starts what is next in line, as far as there is room."""
        while True:
            while not self._due:
                told = next(self._told, None)
                if told is None:
                    return
                self._expect(told.stream, told.first_byte, told.first_byte + told.num_bytes)
            reading = self._reader().start(self._due[0].ranges())
            if reading is None:
                return
            self._coming[self._due.popleft()] = reading

    @contextlib.contextmanager
    def _taken(self, chunk: _Chunk) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """A chunk's verified bytes, in order, each piece with its first byte's number in the stream. Then they are gone."""
        for key in chunk.blocks():
            self._known.pop(key, None)
        reading = self._coming.pop(chunk, None)
        if reading is None:
            with contextlib.suppress(ValueError):  # of a chunk that was never in line
                self._due.remove(chunk)
            reading = self._start_now(chunk)
        try:
            parts = reading.wait() if reading is not None else self._one_by_one(chunk)
            pieces, begin = [], chunk.first * CHECKSUM_BYTES
            for data in parts:
                pieces.append((begin, data))
                begin += data.numel()
            self._compare(chunk, parts)
            yield pieces
        finally:
            if reading is not None:
                reading.release()

    def _start_now(self, chunk: _Chunk) -> Reading | None:
        """Starts a chunk before those in line, and in place of those under way when there is no room beside them.

        None when the memory is too small for it even alone.
        """
        reader, ranges = self._reader(), chunk.ranges()
        reading = reader.start(ranges)
        if reading is None:
            for other, each in self._coming.items():  # what was told is not what is asked for
                each.release()
                for key in other.blocks():
                    self._known.pop(key, None)
            self._coming.clear()
            reading = reader.start(ranges)
        return reading

    def _one_by_one(self, chunk: _Chunk) -> list[torch.Tensor]:
        """The bytes of a chunk that lies in so many pieces that all of them, with what is read around them, have no room."""
        found = []
        for each in chunk.ranges():
            reading = self._reader().start([each])
            assert reading is not None  # one range of a chunk fits where nothing else is
            try:
                found.append(reading.wait()[0].clone())
            finally:
                reading.release()
        return found

    def _compare(self, chunk: _Chunk, ranges: Sequence[torch.Tensor]) -> None:
        """Raises DamagedState for the first block that is not as it was saved."""
        stream, parts, of_block = chunk.stream, [], []
        at = chunk.first * CHECKSUM_BYTES
        for data in ranges:
            start = 0
            while start < data.numel():
                length = min(data.numel() - start, CHECKSUM_BYTES - at % CHECKSUM_BYTES)
                parts.append(data[start : start + length])
                of_block.append(at // CHECKSUM_BYTES)
                start, at = start + length, at + length
        found: dict[int, int] = {}
        for block, part, crc in zip(of_block, parts, crc32c(parts, self._workers()), strict=True):
            found[block] = crc32c_combine(found[block], crc, part.numel()) if block in found else crc
        due = self._checksums[stream.param][stream.state]
        for block, crc in found.items():
            if crc != due[block]:
                begin = block * CHECKSUM_BYTES
                raise self._damage(stream, begin, min(begin + CHECKSUM_BYTES, stream.num_bytes), due[block], crc)

    def _keep_rest(self, chunk: _Chunk, pieces: Sequence[tuple[int, torch.Tensor]], stop: int) -> None:
        """Remembers the blocks of a chunk that are not used up when bytes up to `stop` are taken."""
        end = min(chunk.last * CHECKSUM_BYTES, chunk.stream.num_bytes)
        for block in range(stop // CHECKSUM_BYTES, chunk.last) if stop < end else ():
            begin, behind = block * CHECKSUM_BYTES, min((block + 1) * CHECKSUM_BYTES, end)
            parts = [data[max(0, begin - at) : max(0, behind - at)] for at, data in pieces]
            self._edges[chunk.stream, block] = torch.cat(parts)
            while len(self._edges) > _NUM_EDGES:
                self._edges.popitem(last=False)

    def _reader(self) -> ReadAhead:
        if self._ahead is None:
            self._arena = Arena(_OWN_BYTES)
            self._ahead = ReadAhead([self._arena.take(_OWN_BYTES, "what a checkpoint is read through").tensor])
        return self._ahead


class _Chunk(NamedTuple):
    """Blocks [first, last) of a stream."""

    stream: Stream
    first: int
    last: int

    def blocks(self) -> list[tuple[Stream, int]]:
        return [(self.stream, block) for block in range(self.first, self.last)]

    def ranges(self) -> list[FileRange]:
        end = min(self.last * CHECKSUM_BYTES, self.stream.num_bytes)
        return list(self.stream.ranges(self.first * CHECKSUM_BYTES, end))
