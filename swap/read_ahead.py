"""ReadAhead: ranges of other people's files on their way into a fixed memory, several groups of them at once.

    start(ranges)  ->  Reading     carved out of the memory, submitted, not waited for; None: there is no room just now
    Reading.wait() ->  the bytes of each range, where they lie in the memory    release() -> room for the next

One queue serves all files, past the page cache; what of a block was not asked for is read and left out. Whoever starts a
reading releases it, also after an error. For one thread at a time.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.extents import FreeRanges, round_up
from tiermem.swap.native import READ, Op, Queue
from tiermem.swap.read_file import ReadFile

_MOST_FILES = 8  # that stay open while nothing of them is under way


class FileRange(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    num_bytes: int


class ReadAhead:
    """Files, a queue and the memory that bytes come into.

    Args:
        areas: uint8 tensors, page-aligned and of whole pages; the caller's, for this alone until it is closed.

    Raises OSError when no queue can be had.
    """

    def __init__(self, areas: Sequence[torch.Tensor]) -> None:
        self._areas = [(area, FreeRanges()) for area in areas]
        for area, free in self._areas:
            free.add(0, area.numel())
        self._files: collections.OrderedDict[Path, _OpenFile] = collections.OrderedDict()
        self._names: dict[int, str] = {}
        self._queue = Queue(depth=32, path_of=lambda fd: self._names.get(fd, f"descriptor {fd}"))

    def start(self, ranges: Sequence[FileRange]) -> Reading | None:
        """Starts reading; None when the memory has no room for all of it beside what is not released yet.

        Raises OSError: a file that cannot be opened, or has fewer bytes (ENODATA).
        """
        parts: list[_Part] = []
        try:
            for each in ranges:
                part = self._carve(each)
                if part is None:
                    self._give_back(parts)
                    return None
                parts.append(part)
            ops = [op for part in parts for op in part.ops()]
            tag = self._queue.submit(ops) if ops else None
        except BaseException:
            self._give_back(parts)
            raise
        return Reading(self, parts, tag)

    def close(self) -> None:
        """Ends what is under way and closes the files. Readings are over."""
        try:
            self._queue.close()
        finally:
            with contextlib.ExitStack() as closing:
                for opened in self._files.values():
                    closing.callback(opened.file.close)
            self._files.clear()
            self._areas.clear()

    def _carve(self, wanted: FileRange) -> _Part | None:
        opened = self._open(wanted.path)
        start, stop = wanted.offset, wanted.offset + wanted.num_bytes
        opened.file.check(start, stop)
        base = start // ALIGNMENT * ALIGNMENT
        size = round_up(stop - base, ALIGNMENT)
        for index, (area, free) in enumerate(self._areas):
            at = free.take(size)
            if at is not None:
                opened.num_users += 1
                buffer = area[at : at + size]
                return _Part(opened, index, at, buffer, base, buffer[start - base : stop - base])
        return None

    def _open(self, path: Path) -> _OpenFile:
        if path not in self._files:
            unused = [each for each, opened in self._files.items() if not opened.num_users]
            for each in unused[: max(0, len(self._files) + 1 - _MOST_FILES)]:
                closed = self._files.pop(each).file
                self._names.pop(closed.fd)
                closed.close()
            opened = _OpenFile(ReadFile(path))
            self._files[path], self._names[opened.file.fd] = opened, str(path)
        self._files.move_to_end(path)
        return self._files[path]

    def _give_back(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.opened.num_users -= 1
            if self._areas:
                self._areas[part.area][1].add(part.at, part.buffer.numel())


class Reading:
    """Ranges that are on their way, and then there until they are released."""

    def __init__(self, owner: ReadAhead, parts: list[_Part], tag: int | None) -> None:
        self._owner = owner
        self._parts = parts
        self._tag = tag

    def wait(self) -> list[torch.Tensor]:
        """The bytes of each range, not to be used after `release`. Blocks; raises OSError that names the file."""
        if self._tag is not None:
            queue, tag, self._tag = self._owner._queue, self._tag, None
            answer = queue.wait(tag)
            assert answer is not None  # no time-out was given
            queue.raise_for(answer)
        for part in self._parts:
            part.read_tail()
        return [part.data for part in self._parts]

    def release(self) -> None:
        """Gives the memory back; what is under way is dropped, or ends first. Twice does nothing."""
        if self._tag is not None:
            queue, tag, self._tag = self._owner._queue, self._tag, None
            queue.cancel(tag)
            queue.wait(tag)
        parts, self._parts = self._parts, []
        self._owner._give_back(parts)


class _OpenFile:
    def __init__(self, file: ReadFile) -> None:
        self.file = file
        self.num_users = 0  # readings that are not released


class _Part(NamedTuple):
    """One range: whole blocks around it, and itself."""

    opened: _OpenFile
    area: int
    at: int
    buffer: torch.Tensor
    base: int  # of the buffer, in the file
    data: torch.Tensor

    def ops(self) -> list[Op]:
        whole = self._num_whole()
        return [Op(READ, self.opened.file.fd, self.buffer.data_ptr(), whole, self.base)] if whole else []

    def read_tail(self) -> None:
        """Reads what of the range lies behind the file's last whole block."""
        file, whole = self.opened.file, self._num_whole()
        num_bytes = min(self.buffer.numel(), file.num_bytes - self.base) - whole
        if num_bytes > 0:
            file.read_tail(self.base + whole, num_bytes, self.buffer[whole : whole + ALIGNMENT])

    def _num_whole(self) -> int:
        return min(self.buffer.numel(), (self.opened.file.num_bytes - self.base) // ALIGNMENT * ALIGNMENT)
