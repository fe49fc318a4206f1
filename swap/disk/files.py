"""Files: one preallocated segment on each path of a run, and the extents allocated over them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.swap.base.ranges import ALIGNMENT, FreeRanges, round_up
from tiermem.swap.disk import durable
from tiermem.swap.disk.direct import MEMORY_FILE_SYSTEMS, give_back, probe_path, take_room
from tiermem.swap.disk.paths import AnyPath, NvmePath, as_paths, deal_shares
from tiermem.swap.disk.run_folder import SEGMENT, RunFolder, RunName, leads_to, report_dead_runs

GROWTH_BYTES = 64 << 20
# what posix_fallocate answers when there is no more room
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Segment:
    """One path's folder and preallocated file; ranges are allocated first fit and the file grows
    for more.

        <path>/tiermem-<run id>/segment.bin      [ held ][ free ][ held ][ free ]|  grows by posix_fallocate

    So a full disk raises ENOSPC before a run, and not during a write. The file is opened once, past
    the page cache where that is possible (direct.py). It does not shrink while the run lives,
    except when a reservation is undone.

    If the folder is deleted during a run, the open file remains usable, but a checkpoint in it is
    impossible. If the file is truncated, the bytes after its new end are lost: reads of them raise
    ENODATA. `check_whole` refuses writes then, because a write would extend the file, and later
    reads would return zeros for lost bytes. (Writes that are in the kernel at that moment still
    extend it. Unless one of them writes the file's last block, the next `check_whole` finds the
    file too short.)

    Args:
        path: an existing, writable folder; its cap bounds the file.
        run: names the run's folder below it.
        first: the first path of the process, if this is a further one.

    Raises OSError when the path cannot be used.
    """

    def __init__(self, path: NvmePath, run: RunName, first: Path | None = None) -> None:
        self.facts = probe_path(path.path)
        self.max_bytes = None if path.max_bytes is None else path.max_bytes // ALIGNMENT * ALIGNMENT
        self.used_bytes = 0
        self.size_bytes = 0  # of the file
        self._own = durable.Owned()
        self._free = FreeRanges()
        self._has_lasting_name = False  # the folders above the file have been synced
        self._has_dropped_pages = False  # a sync of a file that is used buffered has failed
        self._folder: RunFolder | None = None
        try:
            self._folder = RunFolder.new(path.path, run, first)
            self.folder = self._folder.folder
            self.file = self.folder / SEGMENT
            self._own.append(self._folder.make(SEGMENT, os.O_DIRECT if self.facts.is_direct else 0))
        except BaseException:
            self.close(keep=False)
            raise

    @property
    def fd(self) -> int:
        """The file's descriptor until `close`, then -1."""
        return self._own[0] if self._own else -1

    @property
    def room_bytes(self) -> int | None:
        """Bytes that its cap leaves for extents, in one piece, beyond what is held. None: no
        cap."""
        return (
            None
            if self.max_bytes is None
            else self.max_bytes - self.size_bytes + self._free.tail(self.size_bytes)
        )

    def allocate(self, num_bytes: int, most_growth: int = GROWTH_BYTES) -> int:
        """The offset of a free range; the file grows by most_growth at most, or by what is needed
        if that is more.

        Raises OSError (ENOSPC) with needed and free bytes when the disk or the path's cap is full.
        """
        offset = self._free.take(num_bytes)
        if offset is None:
            self._grow(num_bytes - self._free.tail(self.size_bytes), most_growth)
            offset = self._free.take(num_bytes)
        assert offset is not None  # the file has just grown by what was missing
        self.used_bytes += num_bytes
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Returns a range; the file keeps its size. Raises RuntimeError when it is returned
        twice."""
        self._free.add(offset, num_bytes)
        self.used_bytes -= num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Grows the file once so that num_bytes more can be allocated, in one piece or several."""
        missing = round_up(num_bytes, ALIGNMENT) - self._free.tail(self.size_bytes)
        if missing > 0:
            self._extend(missing)

    def take_back(self, size_bytes: int) -> None:
        """Undoes a reservation: the file ends at size_bytes again. Nothing may have been allocated
        since."""
        if size_bytes < self.size_bytes:
            self._free.drop_tail(size_bytes)
            self.size_bytes = size_bytes
            os.ftruncate(self.fd, size_bytes)

    def check_whole(self) -> None:
        """Raises OSError (ENODATA) when the file has been truncated."""
        length = os.fstat(self.fd).st_size
        if length < self.size_bytes:
            raise OSError(
                errno.ENODATA,
                f"the file has {length} of its {self.size_bytes} bytes: something truncated it, "
                "and what rested behind "
                "its end is lost. Nothing more is written here; close the store",
                str(self.file),
            )

    def sync(self) -> None:
        """Blocks until all written bytes and the file's name are on the disk. GIL free.

        Raises OSError that names the file, also when it was truncated (ENODATA) or its name leads
        to no or another file (ENOENT). After a failed sync of direct writes the caller may sync
        again. After a failed sync of a buffered file the kernel drops the unwritten pages and marks
        them clean, so every later sync raises EIO.
        """
        if self._has_dropped_pages:
            raise OSError(
                errno.EIO,
                "a sync has failed before, after which the kernel may have dropped what was "
                f"written; this path is used buffered ({self.facts.why_buffered}). Save a copy "
                "elsewhere (copy=True), or resume from the last checkpoint",
                str(self.file),
            )
        self.check_whole()
        if not leads_to(self.file, self.fd):
            raise FileNotFoundError(
                errno.ENOENT,
                "this file was removed or replaced while the run uses it: its states could not "
                "be found again. Save a copy elsewhere (copy=True)",
                str(self.file),
            )
        try:
            durable.sync(self.fd, self.file)
        except OSError:
            self._has_dropped_pages = not self.facts.is_direct
            raise
        if not self._has_lasting_name:
            for folder in (self.folder, self.folder.parent):
                durable.sync_folder(folder)
            self._has_lasting_name = True

    def _shrink(self, fd: int) -> None:
        """Gives the free ranges back to the disk, if its file system can."""
        with contextlib.suppress(OSError):  # on an error the file only stays larger than necessary
            end = self.size_bytes - self._free.tail(self.size_bytes)
            if end < self.size_bytes <= os.fstat(fd).st_size:
                os.ftruncate(fd, end)
            for start, stop in self._free.ranges():
                if stop <= end:
                    give_back(fd, start, stop - start)

    def close(self, keep: bool) -> None:
        """Closes the file and removes the lock file; with `keep` gives free space back, else
        removes file and folder."""
        self.used_bytes = 0
        try:
            if keep and self._own:
                self._shrink(self.fd)
            if self._folder is not None:
                self._folder.close(keep)
        finally:
            self._own.close()

    def _grow(self, missing: int, most_growth: int) -> None:
        more = min(round_up(missing, GROWTH_BYTES), most_growth)
        if self.max_bytes is not None:
            more = min(more, self.max_bytes - self.size_bytes)
        if more > missing:
            try:
                self._extend(more)
                return
            except OSError as error:
                if error.errno not in FULL:
                    raise
        self._extend(missing)

    def _extend(self, num_bytes: int) -> None:
        if self.max_bytes is not None and self.size_bytes + num_bytes > self.max_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{num_bytes} bytes are needed beyond the {self.size_bytes} already held, "
                f"max_bytes={self.max_bytes} leaves {self.max_bytes - self.size_bytes}. Raise it "
                "or add a path",
                str(self.facts.path),
            )
        try:
            take_room(self.fd, self.size_bytes, num_bytes, self.facts.path)
        except OSError:
            with contextlib.suppress(OSError):  # raise the first error, not this one
                # gives back blocks that the failed request took
                os.ftruncate(self.fd, self.size_bytes)
            raise
        self._free.add(self.size_bytes, num_bytes)
        self.size_bytes += num_bytes


logger = logging.getLogger("tiermem")


class Extent(NamedTuple):
    """A range of one path's segment; `num_bytes` is a multiple of ALIGNMENT."""

    path_index: int
    offset: int
    num_bytes: int


class Files:
    """The segments of one run on all its paths. The store's lock guards it.

    An extent goes to the path with the fewest bytes per weight; if that path is full or at its cap,
    to the next one. A run reserves all its space once, at the start. If that fails, the error has
    the arithmetic, and no space stays taken.

    Args:
        paths: existing folders with their caps and weights (None: 1); the same folder twice is
            refused.
        limit_bytes: most bytes of extents on all paths together; None: no bound but the disk's.
        run: names the run's folders; None: a new name.
    """

    def __init__(
        self,
        paths: AnyPath | Sequence[AnyPath],
        limit_bytes: int | None = None,
        run: RunName | None = None,
    ) -> None:
        known = as_paths(paths)
        resolved = [each.path.resolve() for each in known]
        if len(set(resolved)) != len(resolved):
            raise ValueError(
                f"a path is listed twice: {', '.join(str(each.path) for each in known)}"
            )
        self.run = run or RunName.new()
        self._limit_bytes = limit_bytes
        self.segments: list[Segment] = []
        self.weights = [each.weight or 1.0 for each in known]  # of later allocations
        try:
            for each in known:
                report_dead_runs(each.path)
                first = self.segments[0].facts.path if self.segments else None
                self.segments.append(Segment(each, self.run, first))
            self._warn_once()
        except BaseException:
            self.close(keep=False)
            raise

    def allocate(self, num_bytes: int, near: int | None = None) -> Extent:
        """Allocates an extent of at least num_bytes, on the path with the fewest bytes per weight
        that has space.

        near: the index of a path that is tried first. Raises OSError (ENOSPC), or ValueError when
            there is no path.
        """
        size = round_up(max(num_bytes, 1), ALIGNMENT)
        most_growth = min(GROWTH_BYTES, self._check_limit(size))
        errors: list[OSError] = []
        for index in sorted(
            range(len(self.segments)),
            key=lambda i: (i != near, self.segments[i].used_bytes / self.weights[i]),
        ):
            try:
                return Extent(index, self.segments[index].allocate(size, most_growth), size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        raise OSError(
            errno.ENOSPC, "; ".join(f"{error.filename}: {error.strerror}" for error in errors)
        )

    def reserve(self, num_bytes: int) -> contextlib.ExitStack:
        """Preallocates space for num_bytes more, divided by weight within the paths' caps.

        Closing what it returns gives that space back, if nothing was allocated since. Raises
        OSError (ENOSPC) with the arithmetic of the path or the caps; then no space stays taken.
        """
        self._check_limit(num_bytes)
        with contextlib.ExitStack() as undo:
            for index, share in enumerate(self._shares(num_bytes)):
                undo.callback(self.segments[index].take_back, self.segments[index].size_bytes)
                self._reserve_share(index, share, num_bytes)
            return undo.pop_all()

    def segment_of(self, extent: Extent) -> Segment:
        """The segment that an extent lies in."""
        return self.segments[extent.path_index]

    def free(self, extent: Extent) -> None:
        """Returns an extent to its path."""
        self.segment_of(extent).free(extent.offset, extent.num_bytes)

    def check_whole(self) -> None:
        """Raises OSError (ENODATA) when a file has been truncated."""
        for segment in self.segments:
            segment.check_whole()

    def sync(self) -> None:
        """Blocks until all written bytes are on the disk, on every path. Raises OSError that names
        the file."""
        for segment in self.segments:
            segment.sync()

    def by_descriptor(self) -> dict[int, str]:
        """Every descriptor and the file behind it, in the order of the paths."""
        return {segment.fd: str(segment.file) for segment in self.segments}

    @property
    def used_bytes(self) -> int:
        """Bytes of extents in use on all paths."""
        return sum(s.used_bytes for s in self.segments)

    def close(self, keep: bool) -> None:
        """Closes every segment; without `keep` removes its file and folder."""
        with contextlib.ExitStack() as closing:  # after an error, the others are closed, too
            for segment in self.segments:
                closing.callback(segment.close, keep)

    def _shares(self, num_bytes: int) -> list[int]:
        rooms = [segment.room_bytes for segment in self.segments]
        bounded = [room for room in rooms if room is not None]
        if len(bounded) == len(rooms) and sum(bounded) < num_bytes:
            caps = ", ".join(
                f"{s.facts.path} {s.room_bytes} (max_bytes={s.max_bytes})" for s in self.segments
            )
            raise OSError(
                errno.ENOSPC,
                f"{num_bytes} bytes are needed, the paths' caps leave {sum(bounded)}: {caps}. "
                "Raise a cap or add a path",
            )
        return deal_shares(num_bytes, self.weights, rooms)

    def _reserve_share(self, index: int, share: int, num_bytes: int) -> None:
        segment = self.segments[index]
        try:
            segment.reserve(share)
        except OSError as error:
            if len(self.segments) == 1:
                raise
            sharing = [s for s in self.segments[:index] if s.facts.device == segment.facts.device]
            shared = (
                f" ({', '.join(str(s.facts.path) for s in sharing)} took theirs there first)"
                if sharing
                else ""
            )
            raise OSError(
                error.errno,
                f"its share is {share} of {num_bytes} bytes (weight {self.weights[index]:g} of "
                f"{sum(self.weights):g}): {error.strerror}{shared}; or cap this path with "
                "max_bytes, or give it less weight",
                str(segment.facts.path),
            ) from None

    def _check_limit(self, num_bytes: int) -> int:
        """Bytes that the files may still grow by. Raises ValueError without a path, OSError beyond
        disk_bytes."""
        if not self.segments and num_bytes:
            raise ValueError(f"nothing can rest on NVME ({num_bytes} bytes): no path was given")
        if self._limit_bytes is None:
            return GROWTH_BYTES
        if self.used_bytes + num_bytes > self._limit_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{num_bytes} bytes more than the {self.used_bytes} held would exceed "
                f"disk_bytes={self._limit_bytes}",
                ", ".join(str(s.facts.path) for s in self.segments),
            )
        return max(0, self._limit_bytes - sum(s.size_bytes for s in self.segments))

    def _warn_once(self) -> None:
        """Warns, once per file system, about buffered paths and about paths in memory."""
        for facts in {
            segment.facts.device: segment.facts for segment in reversed(self.segments)
        }.values():
            if not facts.is_direct:
                logger.warning(
                    "%s (%s) is used buffered: %s",
                    facts.path,
                    facts.file_system,
                    facts.why_buffered,
                )
            if facts.file_system in MEMORY_FILE_SYSTEMS:
                logger.warning(
                    "%s is %s: what rests there is memory, not disk", facts.path, facts.file_system
                )
