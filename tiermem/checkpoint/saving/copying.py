"""Copying: ranges of the store's files into a complete copy, past memory, while training goes on.

    frozen ranges of all paths -> extents (whole 4096-byte blocks, neighbours as one) -> one behind the other in a data file

    reflink            FICLONERANGE: the copy shares the blocks; nothing is moved
    copy_file_range    the kernel moves them, or the file system's server does
    read and write     through a buffer

The first that works is used for the file; each falls back to the next. Frozen ranges do not change (swap/slots.py), so the
copy is of one moment, however long it takes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.checkpoint.format.manifest import Piece
from tiermem.swap import direct, durable
from tiermem.swap.direct import ALIGNMENT, open_direct
from tiermem.swap.extents import round_up

_FICLONERANGE = 0x4020940D
_STEP_BYTES = 16 << 20
_NOT_HERE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY}


class Extent(NamedTuple):
    """Whole blocks of one source file and their place in the copy."""

    file: int
    offset: int
    num_bytes: int
    place: int


def lay_out(pieces: Iterable[Piece], start: int) -> list[Extent]:
    """The extents that hold these pieces, one behind the other in the copy from byte `start` on (a multiple of 4096)."""
    found: list[Extent] = []
    for piece in sorted(pieces, key=lambda each: (each.file, each.offset)):
        first = piece.offset // ALIGNMENT * ALIGNMENT
        stop = round_up(piece.offset + piece.num_bytes, ALIGNMENT)
        last = found[-1] if found else None
        if last is not None and last.file == piece.file and first <= last.offset + last.num_bytes:
            found[-1] = last._replace(num_bytes=max(stop, last.offset + last.num_bytes) - last.offset)
        else:
            found.append(Extent(piece.file, first, stop - first, 0))
    placed = []
    for each in found:
        placed.append(each._replace(place=start))
        start += each.num_bytes
    return placed


def moved(pieces: Iterable[Piece], extents: Sequence[Extent], file: int) -> list[Piece]:
    """The same pieces where the copy has them: in its file number `file`."""
    found, at = [], 0
    for piece in sorted(pieces, key=lambda each: (each.file, each.offset)):
        while not _holds(extents[at], piece):
            at += 1
        found.append(piece._replace(file=file, offset=piece.offset - extents[at].offset + extents[at].place))
    return found


def end_of(extents: Sequence[Extent], start: int) -> int:
    """The copy's length with these extents in it."""
    return extents[-1].place + extents[-1].num_bytes if extents else start


def take_room(path: Path, extents: Sequence[Extent]) -> None:
    """Gives the copy the blocks for its extents. Raises OSError (ENOSPC) with the arithmetic."""
    if not extents:
        return
    start, stop = extents[0].place, end_of(extents, 0)
    with durable.named(path):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        direct.take_room(fd, start, stop - start, path)
    finally:
        os.close(fd)


def copy(sources: Sequence[Path], extents: Sequence[Extent], path: Path) -> None:
    """Copies extents of the sources into an existing file and makes it durable. Blocks, GIL free. Raises OSError."""
    target, _ = open_direct(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for number, source in enumerate(sources):
            due = [each for each in extents if each.file == number]
            if due:
                _copy_from(source, due, target, path)
        durable.sync(target, path)
    finally:
        os.close(target)


def _copy_from(source: Path, extents: Sequence[Extent], target: int, path: Path) -> None:
    fd, _ = open_direct(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        ways = [_clone, _copy_range, _read_and_write]
        for each in extents:
            done = 0
            while done < each.num_bytes:
                length = min(_STEP_BYTES, each.num_bytes - done) if ways[0] is not _clone else each.num_bytes - done
                try:
                    done += ways[0](fd, each.offset + done, length, target, each.place + done)
                except OSError as error:
                    if len(ways) == 1 or error.errno not in _NOT_HERE:
                        with durable.named(path):
                            raise OSError(error.errno, f"copying {source}: {error.strerror}") from None
                    ways.pop(0)
    finally:
        os.close(fd)


def _clone(source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, offset, num_bytes, place))
    return num_bytes


def _copy_range(source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    done = os.copy_file_range(source, target, num_bytes, offset, place)
    if not done:
        raise OSError(errno.ENODATA, f"the file ends at byte {offset}: something truncated it")
    for fd, start in ((source, offset), (target, place)):  # through the page cache: not to be kept there
        if fd == target:
            os.fdatasync(target)
        os.posix_fadvise(fd, start, done, os.POSIX_FADV_DONTNEED)
    return done


def _read_and_write(source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    import mmap

    num_bytes = min(num_bytes, 4 << 20)
    with mmap.mmap(-1, num_bytes) as buffer:  # page-aligned, as O_DIRECT asks
        done = os.preadv(source, [buffer], offset)
        if done < num_bytes:
            raise OSError(errno.ENODATA, f"the file ends at byte {offset + done}: something truncated it")
        with memoryview(buffer) as view:
            written = 0
            while written < num_bytes:
                written += os.pwrite(target, view[written:], place + written)
    return num_bytes


def _holds(extent: Extent, piece: Piece) -> bool:
    return extent.file == piece.file and extent.offset <= piece.offset < extent.offset + extent.num_bytes
