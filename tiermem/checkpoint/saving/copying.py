"""Copying: ranges of the store's files into a complete copy, past memory, while training goes on.

    frozen ranges of all paths -> extents (whole 4096-byte blocks, neighbours as one) -> one behind the other in a data file

    reflink            FICLONERANGE: the copy shares the blocks; nothing is moved
    copy_file_range    where several hosts may have mounted the file system: its server may do it
    read and write     past the page cache; copy_file_range would go through it, at 0.4 of the speed and 5 times the CPU (ext4)

The first that works is used for the file; each falls back to the next. Frozen ranges do not change (swap/slots.py), so the
copy is of one moment, however long it takes. While training goes on it takes no more than a share of the time (Pace): a disk
that training waits for is not taken from it.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiermem.checkpoint.saving.rows import Rows
from tiermem.swap import direct, durable
from tiermem.swap.direct import ALIGNMENT, open_direct
from tiermem.swap.run_lock import is_of_one_host

_FICLONERANGE = 0x4020940D
_STEP_BYTES = 4 << 20
_NOT_HERE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY}


class Extent(NamedTuple):
    """Whole blocks of one source file and their place in the copy."""

    file: int
    offset: int
    num_bytes: int
    place: int


class Pace:
    """How much of its time a copy copies, until somebody waits for it: from then on all.

    busy_share: more than 0, at most 1. What training loses to the copy is about as much of its time, whatever it waits for.
    """

    def __init__(self, busy_share: float = 1.0) -> None:
        self._rest_per_busy = 1.0 / busy_share - 1.0
        self._is_awaited = threading.Event()

    def hurry(self) -> None:
        """Somebody waits. Never blocks; any thread may call it."""
        self._is_awaited.set()

    def rest(self, busy_s: float) -> None:
        """Blocks for what is due after so many seconds of copying, or until somebody waits."""
        self._is_awaited.wait(busy_s * self._rest_per_busy)


def lay_out(rows: Rows, start: int, file: int) -> tuple[list[Extent], Rows]:
    """The extents that hold these rows, one behind the other in the copy from byte `start` on (a multiple of 4096), and the
    rows where the copy has them: in its file number `file`."""
    order = np.lexsort((rows.offset, rows.file))
    source, offset = rows.file[order], rows.offset[order]
    first = offset // ALIGNMENT * ALIGNMENT
    stop = -(-(offset + rows.num_bytes[order]) // ALIGNMENT) * ALIGNMENT
    is_new = np.concatenate(([True], (source[1:] != source[:-1]) | (first[1:] > stop[:-1])))[: len(order)]
    heads = np.flatnonzero(is_new)
    ends = np.append(heads, len(order))[1:] - 1
    sizes = stop[ends] - first[heads]  # rows do not overlap, so the last one of an extent ends it
    places = start + np.cumsum(sizes) - sizes
    moved = np.empty_like(offset)
    moved[order] = offset + (places - first[heads])[np.cumsum(is_new) - 1]
    columns = zip(source[heads].tolist(), first[heads].tolist(), sizes.tolist(), places.tolist(), strict=True)
    return [Extent(*each) for each in columns], rows._replace(file=np.full_like(rows.file, file), offset=moved)


def take_room(path: Path, extents: Sequence[Extent]) -> None:
    """Gives the copy the blocks for its extents. Raises OSError (ENOSPC) with the arithmetic."""
    if not extents:
        return
    start, stop = extents[0].place, extents[-1].place + extents[-1].num_bytes
    with durable.named(path):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        direct.take_room(fd, start, stop - start, path)
    finally:
        os.close(fd)


def copy(sources: Sequence[Path], extents: Sequence[Extent], path: Path, pace: Pace) -> None:
    """Copies extents of the sources into an existing file and makes it durable. Blocks, GIL free. Raises OSError."""
    target, _ = open_direct(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, _STEP_BYTES) as buffer:  # page-aligned, as O_DIRECT asks
            for number, source in enumerate(sources):
                due = [each for each in extents if each.file == number]
                if due:
                    _copy_from(source, due, target, path, pace, buffer)
        durable.sync(target, path)
    finally:
        os.close(target)


def _copy_from(source: Path, extents: Sequence[Extent], target: int, path: Path, pace: Pace, buffer: mmap.mmap) -> None:
    fd, _ = open_direct(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        ways = [_clone] if is_of_one_host(path.parent) else [_clone, _copy_range]
        ways.append(functools.partial(_read_and_write, buffer))
        for each in extents:
            done = 0
            while done < each.num_bytes:
                length = min(_STEP_BYTES, each.num_bytes - done) if ways[0] is not _clone else each.num_bytes - done
                start_s = time.monotonic()
                try:
                    done += ways[0](fd, each.offset + done, length, target, each.place + done)
                except OSError as error:
                    if len(ways) == 1 or error.errno not in _NOT_HERE:
                        with durable.named(path):
                            raise OSError(error.errno, f"copying {source}: {error.strerror}") from None
                    ways.pop(0)
                pace.rest(time.monotonic() - start_s)
    finally:
        os.close(fd)


def _clone(source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, offset, num_bytes, place))
    return num_bytes


def _copy_range(source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    done = os.copy_file_range(source, target, num_bytes, offset, place)
    if not done:
        raise OSError(errno.ENODATA, f"the file ends at byte {offset}: something truncated it")
    os.fdatasync(target)
    for fd, start in ((source, offset), (target, place)):  # through the page cache: not to be kept there
        os.posix_fadvise(fd, start, done, os.POSIX_FADV_DONTNEED)
    return done


def _read_and_write(buffer: mmap.mmap, source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    with memoryview(buffer) as whole, whole[:num_bytes] as view:
        done = os.preadv(source, [view], offset)
        if done < num_bytes:
            raise OSError(errno.ENODATA, f"the file ends at byte {offset + done}: something truncated it")
        written = 0
        while written < num_bytes:
            with view[written:] as rest:
                written += os.pwrite(target, rest, place + written)
    return num_bytes
