"""DiskRate: how fast a folder's disk reads and writes through the queue, measured now: the ceiling that a run is held to.

The file is unnamed (O_TMPFILE, or unlinked at once where the file system has no such thing), so nothing is left behind
whatever happens. It is written once before the clock starts, since first writes to preallocated blocks are slower. A disk
that others use, or a host that caches it, makes the figure move from run to run: compare within one.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.native import READ, WRITE, Map, Op, Queue

BLOCK_BYTES = 1 << 20
DEPTH = 32
_PIECE_BYTES = 16 << 20
_NUM_PIECES = 2


class DiskRate(NamedTuple):
    """Bytes per second each way, and what measured them."""

    read_bytes_s: float
    write_bytes_s: float
    engine: str
    why: str
    is_direct: bool


def measure_disk(folder: Path, seconds: float, file_bytes: int = 256 << 20) -> DiskRate:
    """Reads and writes `file_bytes` in `folder` again and again for about `seconds`. Blocks; raises OSError."""
    fd, is_direct = open_unnamed(folder)
    try:
        os.posix_fallocate(fd, 0, file_bytes)
        memory = Map(_PIECE_BYTES * _NUM_PIECES)
        try:
            memory.commit(0, memory.num_bytes)
            queue = Queue("auto", DEPTH, BLOCK_BYTES, regions=[(memory.address, memory.num_bytes)])
            try:
                _pass(queue, fd, WRITE, memory.address, file_bytes)
                write = _rate(queue, fd, WRITE, memory.address, file_bytes, seconds / 2)
                read = _rate(queue, fd, READ, memory.address, file_bytes, seconds / 2)
                return DiskRate(read, write, queue.engine, queue.why, is_direct)
            finally:
                queue.close()
        finally:
            memory.close()
    finally:
        os.close(fd)


def open_unnamed(folder: Path) -> tuple[int, bool]:
    """An open file without a name in `folder`, and whether it is direct. Raises OSError; the caller closes it."""
    for direct in (os.O_DIRECT, 0):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | direct, 0o600), bool(direct)
        except OSError:
            name = folder / f".tiermem-rate-{os.getpid()}-{secrets.token_hex(4)}"
            try:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o600)
            except OSError:
                name.unlink(missing_ok=True)  # some file systems make the file before they refuse O_DIRECT
                if not direct:
                    raise
                continue
            name.unlink()
            return fd, bool(direct)
    raise AssertionError("the second try returns or raises")


def _rate(queue: Queue, fd: int, kind: int, address: int, file_bytes: int, seconds: float) -> float:
    started, moved = time.monotonic(), 0
    while time.monotonic() - started < seconds or not moved:
        _pass(queue, fd, kind, address, file_bytes)
        moved += file_bytes
    return moved / (time.monotonic() - started)


def _pass(queue: Queue, fd: int, kind: int, address: int, file_bytes: int) -> None:
    """Moves the whole file, two pieces under way at a time."""
    under_way: list[int] = []
    for number, offset in enumerate(range(0, file_bytes, _PIECE_BYTES)):
        if len(under_way) == _NUM_PIECES:
            _finish(queue, under_way.pop(0))
        piece = address + number % _NUM_PIECES * _PIECE_BYTES
        under_way.append(queue.submit([Op(kind, fd, piece, min(_PIECE_BYTES, file_bytes - offset), offset)]))
    for tag in under_way:
        _finish(queue, tag)


def _finish(queue: Queue, tag: int) -> None:
    answer = queue.wait(tag)
    assert answer is not None
    queue.raise_for(answer)
