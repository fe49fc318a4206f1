"""Verified: reads the bytes of saved states in the order of their elements, ahead of use, and
compares their checksums."""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tiermem.checkpoint.format.kinds import BLOCK, OF_SCALES, SCALED, bytes_of, grain_of
from tiermem.checkpoint.format.manifest import CHECKSUM_BYTES, Manifest, Piece
from tiermem.checkpoint.saving.pieces import run_of
from tiermem.swap.base.errors import CorruptionError
from tiermem.swap.base.native import Workers
from tiermem.swap.base.ranges import FileRange
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.stream import ReadAhead, Reading

# ---- the error -----------------------------------------------------------------------------------


class DamagedState(CorruptionError):
    """The bytes of a saved state do not match the checksum in its manifest. errno is EIO; the text
    says what to do.

    Attributes:
        filename, offset, length: the first byte range of the block. The block may continue
            elsewhere; the checksums are of all of it.
        param, state, start, stop: the elements that the block holds.
        step: the damaged durable step.
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
        elsewhere = (
            f" (and {len(rest)} other places, {rest[0].path}@{rest[0].offset} the next)"
            if rest
            else ""
        )
        what = (
            f"{state} of {param}, elements {start} to {stop}, is not what was saved at step "
            f"{step}: {first.num_bytes} bytes at offset {first.offset}{elsewhere} have another "
            f"CRC-32C ({seen:#010x}, saved {written:#010x}). {advice}"
        )
        super().__init__(what, str(first.path), first.offset, first.num_bytes, written, seen)
        self.param = param
        self.state = state
        self.start = start
        self.stop = stop
        self.step = step


# ---- streams -------------------------------------------------------------------------------------


class VerifiedSpan(NamedTuple):
    """Elements [start, start + numel) of a state that lie in one piece, and their byte range in the
    stream."""

    stream: VerifiedStream
    start: int
    numel: int
    first_byte: int
    num_bytes: int


class VerifiedStream:
    """The bytes of one state of one parameter, in the order of its elements, from the pieces that
    hold them.

        elements    0 ........ start ................. numel        of the whole parameter, row-major
        bytes       [ piece 0 ][ piece 1 ][ piece 2 ... ]           as if they lay in one piece; checksums are of these
        places      file 3     file 0     file 3                    of several ranks and paths

    The kind (kinds.py) decides which bytes a range of elements takes. Scales belong to blocks of 64
    elements, counted from the first element of their piece: a range that begins inside a block is
    extended to the start of the block.

    Args:
        param, state: their names, for errors.
        pieces: (path of the file, piece) in the order of elements; together they hold every element
            once (finding.py).
    """

    def __init__(self, param: str, state: str, pieces: Sequence[tuple[Path, Piece]]) -> None:
        self.param = param
        self.state = state
        self.kind = pieces[0][1].kind
        self._pieces = pieces
        self._starts = [piece.start for _, piece in pieces]
        sizes = (piece.num_bytes for _, piece in pieces)
        self._bytes = list(itertools.accumulate(sizes, initial=0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return self._bytes[-1]

    def spans(self, start: int, numel: int) -> Iterator[VerifiedSpan]:
        """The elements of a range, piece by piece; for quantised states and scales, from the start
        of a block of 64."""
        stop = start + numel
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            piece = self._pieces[number][1]
            first = start - piece.start
            if self.kind in SCALED or self.kind in OF_SCALES:
                first -= first % BLOCK
            last = min(stop - piece.start, piece.numel)
            begin = bytes_of(self.kind, first)
            end = bytes_of(self.kind, last)
            yield VerifiedSpan(
                self, piece.start + first, last - first, self._bytes[number] + begin, end - begin
            )
            start = piece.start + last
            number += 1

    def ranges(self, first_byte: int, last_byte: int) -> list[FileRange]:
        """The file ranges of bytes [first_byte, last_byte) of the stream, in order; adjacent ranges
        are joined."""
        found: list[FileRange] = []
        number = bisect.bisect_right(self._bytes, first_byte) - 1
        while first_byte < last_byte:
            path, piece = self._pieces[number]
            stop = min(last_byte, self._bytes[number + 1])
            offset = piece.offset + first_byte - self._bytes[number]
            num_bytes = stop - first_byte
            before = found[-1] if found else None
            if before is not None and (before.path, before.offset + before.num_bytes) == (
                path,
                offset,
            ):
                found[-1] = before._replace(num_bytes=before.num_bytes + num_bytes)
            else:
                found.append(FileRange(path, offset, num_bytes))
            first_byte = stop
            number += 1
        return found

    def elements_of(self, first_byte: int, last_byte: int) -> tuple[int, int]:
        """(start, stop) of the elements that bytes [first_byte, last_byte) of the stream hold."""
        first = bisect.bisect_right(self._bytes, first_byte) - 1
        last = bisect.bisect_left(self._bytes, last_byte) - 1
        return self._element(first, first_byte), self._element(last, last_byte, is_end=True)

    def _element(self, number: int, byte: int, is_end: bool = False) -> int:
        piece = self._pieces[number][1]
        inside = byte - self._bytes[number]
        num_bytes, numel = grain_of(self.kind)
        grains = -(-inside // num_bytes) if is_end else inside // num_bytes
        return piece.start + min(grains * numel, piece.numel)


# ---- verified reads ------------------------------------------------------------------------------

LEAST_AREA_BYTES = 2 << 20
"""Least size of a lent memory area: room for a block of 1 MiB and the page-aligned read around
it."""

_CHUNK_BLOCKS = 4
_NUM_EDGES = 8  # blocks of which a part is still unread
_OWN_BYTES = 16 << 20


class Verified:
    """Reads the streams of one source in whole blocks of 1 MiB and verifies each. For one thread at
    a time.

        follow   the next reads, as an iterator         a chunk: up to 4 blocks of one stream
        start    [ chunk ][ chunk ][ chunk ] ...        as many reads at once as the memory holds
        copy     waits for its chunks | CRC-32C of each block | copies into place | frees the room

    The announced reads are a hint: other reads, or another order, give the same bytes. No byte is
    returned from a block whose checksum differs. The unread rest of a block is kept for the next
    read.

    Memory: the lent areas, or else 16 MiB of its own; and at most 8 blocks whose rest is kept.

    Args:
        step: it has the CRC-32C of each block.
        workers: returns the threads for checksums; called at the first checksum.
        advice: returns the last sentence of an error.
    """

    def __init__(
        self, step: Manifest, workers: Callable[[], Workers], advice: Callable[[], str]
    ) -> None:
        self._manifest = step
        self._workers = workers
        self._advice = advice
        self._told: Iterator[VerifiedSpan] = iter(())
        self._due: collections.deque[_Chunk] = collections.deque()  # waiting for room
        self._coming: dict[_Chunk, Reading] = {}  # being read, in the order of their start
        # by block: chunks in `_due` and `_coming`
        self._known: dict[tuple[VerifiedStream, int], _Chunk] = {}
        self._edges: collections.OrderedDict[tuple[VerifiedStream, int], torch.Tensor] = (
            collections.OrderedDict()
        )
        """The blocks of which a part is unread, by (stream, block), oldest first."""
        self._ahead: ReadAhead | None = None
        self._closing = contextlib.ExitStack()  # the reads, then own memory, if none is lent

    def follow(self, told: Iterator[VerifiedSpan]) -> None:
        """Announces the next reads, in order. As many are started as the memory holds. Raises
        OSError."""
        self._told = told
        self._start_next()

    def copy(self, stream: VerifiedStream, first_byte: int, out: torch.Tensor) -> None:
        """Fills a flat uint8 CPU tensor with bytes of a stream, from `first_byte` on. Blocks;
        raises DamagedState, OSError."""
        done = 0
        stop = first_byte + out.numel()
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

    def verify(self, stream: VerifiedStream) -> Iterator[int]:
        """Compares every block of a stream with its checksum; yields bytes per chunk. Raises
        DamagedState, OSError."""
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
        """Within the block, reads into the caller's memory: page-aligned areas of at least
        LEAST_AREA_BYTES each."""
        self.close()
        with contextlib.closing(self):
            if areas:
                self._read_through(areas)
            yield

    def close(self) -> None:
        """Ends all reads and releases memory and files. A later read allocates new ones. Calling it
        twice does nothing."""
        self._told = iter(())
        self._due.clear()
        self._coming.clear()
        self._known.clear()
        self._edges.clear()
        closing = self._closing
        self._closing = contextlib.ExitStack()
        self._ahead = None
        closing.close()

    # ---- chunks ----------------------------------------------------------------------------------

    def _expect(self, stream: VerifiedStream, first_byte: int, last_byte: int) -> None:
        """Appends the blocks of these bytes to `_due`, unless they are known or kept."""
        first = None
        last = -(-last_byte // CHECKSUM_BYTES)
        for block in range(first_byte // CHECKSUM_BYTES, last + 1):
            is_new = (
                block < last
                and (stream, block) not in self._known
                and (stream, block) not in self._edges
            )
            if first is not None and (not is_new or block - first == _CHUNK_BLOCKS):
                chunk = _Chunk(stream, first, block)
                first = None
                self._due.append(chunk)
                self._known.update(dict.fromkeys(chunk.blocks(), chunk))
            if is_new and first is None:
                first = block

    def _start_next(self) -> None:
        """Starts announced chunks while there is room."""
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
        """Yields a chunk's verified bytes in order, each piece with its first byte's position in
        the stream; then frees it."""
        for key in chunk.blocks():
            self._known.pop(key, None)
        reading = self._coming.pop(chunk, None)
        if reading is None:
            with contextlib.suppress(ValueError):  # this chunk was not announced
                self._due.remove(chunk)
            reading = self._start_now(chunk)
        try:
            parts = reading.wait() if reading is not None else self._one_by_one(chunk)
            self._compare(chunk, parts)
            sizes = (data.numel() for data in parts)
            begins = itertools.accumulate(sizes, initial=chunk.first * CHECKSUM_BYTES)
            yield list(zip(begins, parts, strict=False))  # the last one is the end
        finally:
            if reading is not None:
                reading.release()

    def _start_now(self, chunk: _Chunk) -> Reading | None:
        """Starts a chunk before all others. If there is no room, cancels the chunks that are being
        read.

        Returns None when the memory is too small for the chunk alone.
        """
        reader = self._reader()
        ranges = chunk.ranges()
        reading = reader.start(ranges)
        if reading is None:
            for other, each in self._coming.items():  # the announced order was wrong
                each.release()
                for key in other.blocks():
                    self._known.pop(key, None)
            self._coming.clear()
            reading = reader.start(ranges)
        return reading

    def _one_by_one(self, chunk: _Chunk) -> list[torch.Tensor]:
        """The bytes of a chunk with so many pieces that their page-aligned reads do not fit into
        memory at once."""
        found = []
        for each in chunk.ranges():
            reading = self._reader().start([each])
            assert reading is not None  # one range always fits into the empty memory
            try:
                found.append(reading.wait()[0].clone())
            finally:
                reading.release()
        return found

    def _compare(self, chunk: _Chunk, ranges: Sequence[torch.Tensor]) -> None:
        """Raises DamagedState for the first block whose checksum differs."""
        stream = chunk.stream
        due = self._manifest.checksums[stream.param][stream.state]
        seen = run_of(chunk.first * CHECKSUM_BYTES, ranges, self._workers()).crcs
        for block, crc in enumerate(seen, chunk.first):
            if crc != due[block]:
                begin = block * CHECKSUM_BYTES
                stop = min(begin + CHECKSUM_BYTES, stream.num_bytes)
                raise DamagedState(
                    stream.ranges(begin, stop),
                    stream.param,
                    stream.state,
                    *stream.elements_of(begin, stop),
                    self._manifest.step,
                    due[block],
                    crc,
                    self._advice(),
                )

    def _keep_rest(
        self, chunk: _Chunk, pieces: Sequence[tuple[int, torch.Tensor]], stop: int
    ) -> None:
        """Keeps the blocks of a chunk that have bytes after `stop`."""
        end = min(chunk.last * CHECKSUM_BYTES, chunk.stream.num_bytes)
        for block in range(stop // CHECKSUM_BYTES, chunk.last) if stop < end else ():
            begin = block * CHECKSUM_BYTES
            behind = min((block + 1) * CHECKSUM_BYTES, end)
            parts = [data[max(0, begin - at) : max(0, behind - at)] for at, data in pieces]
            self._edges[chunk.stream, block] = torch.cat(parts)
            while len(self._edges) > _NUM_EDGES:
                self._edges.popitem(last=False)

    def _reader(self) -> ReadAhead:
        if self._ahead is None:
            arena = Arena(_OWN_BYTES)
            self._closing.callback(arena.close)
            return self._read_through(
                [arena.take(_OWN_BYTES, "what a checkpoint is read through").tensor]
            )
        return self._ahead

    def _read_through(self, areas: Sequence[torch.Tensor]) -> ReadAhead:
        self._ahead = ReadAhead(areas)
        self._closing.callback(self._ahead.close)
        return self._ahead


class _Chunk(NamedTuple):
    """Blocks [first, last) of a stream."""

    stream: VerifiedStream
    first: int
    last: int

    def blocks(self) -> list[tuple[VerifiedStream, int]]:
        return [(self.stream, block) for block in range(self.first, self.last)]

    def ranges(self) -> list[FileRange]:
        end = min(self.last * CHECKSUM_BYTES, self.stream.num_bytes)
        return self.stream.ranges(self.first * CHECKSUM_BYTES, end)
