"""Files: the segments of one run on all its paths, and the extents dealt over them.

    <path>/tiermem-<run id>/lock          held while the run lives             run_folder.py
    <path>/tiermem-<run id>/segment.bin   preallocated, one on each path       segment.py

An extent is a range of one segment. It goes to the path that holds least for its weight and has room: a path that is full,
or holds its cap, passes it on to the others. Room for a whole run is asked for once, at the start, and refused with the
arithmetic; then nothing of it stays taken.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Sequence
from typing import NamedTuple

from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.extents import round_up
from tiermem.swap.paths import AnyPath, as_paths
from tiermem.swap.run_folder import RunName, report_dead_runs
from tiermem.swap.segment import FULL, GROWTH_BYTES, Segment
from tiermem.swap.shares import deal_shares

_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"}

logger = logging.getLogger("tiermem")


class Extent(NamedTuple):
    """A range of one path's segment; `num_bytes` is a multiple of ALIGNMENT."""

    path_index: int
    offset: int
    num_bytes: int


class Files:
    """The segments of one run on all its paths. Its owner's lock guards it.

    Args:
        paths: existing folders with their caps and weights (None: 1); the same folder twice is refused.
        limit_bytes: most bytes of extents on all paths together; None: no bound but the disk's.
        run: names the run's folders; None: a new name.
    """

    def __init__(
        self, paths: AnyPath | Sequence[AnyPath], limit_bytes: int | None = None, run: RunName | None = None
    ) -> None:
        known = as_paths(paths)
        resolved = [each.path.resolve() for each in known]
        if len(set(resolved)) != len(resolved):
            raise ValueError(f"a path is listed twice: {', '.join(str(each.path) for each in known)}")
        self.run = run or RunName.new()
        self._limit_bytes = limit_bytes
        self.segments: list[Segment] = []
        try:
            for each in known:
                report_dead_runs(each.path)
                self.segments.append(Segment(each, self.run))
        except BaseException:
            self.close(keep=False)
            raise
        self._warn_once()

    def allocate(self, num_bytes: int, near: int | None = None) -> Extent:
        """A free extent of at least num_bytes, on the path that holds least for its weight and has room.

        near: the index of a path that is tried before the others.
        """
        size = round_up(max(num_bytes, 1), ALIGNMENT)
        most_growth = min(GROWTH_BYTES, self._check_limit(size))
        errors: list[OSError] = []
        for index in sorted(range(len(self.segments)), key=lambda index: (index != near, self._fill_of(index))):
            try:
                return Extent(index, self.segments[index].allocate(size, most_growth), size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        raise OSError(errno.ENOSPC, "; ".join(f"{error.filename}: {error.strerror}" for error in errors))

    def reserve(self, num_bytes: int) -> None:
        """Preallocates room for num_bytes more, dealt by weight within the paths' caps.

        Raises OSError (ENOSPC) with the arithmetic of the path, or of the caps, that are too small. Nothing stays taken then.
        """
        self._check_limit(num_bytes)
        shares = self._shares(num_bytes)
        sizes = [segment.size_bytes for segment in self.segments]
        try:
            for index, share in enumerate(shares):
                self._reserve_share(index, share, num_bytes)
        except BaseException:
            for segment, size in zip(self.segments, sizes, strict=True):
                segment.take_back(size)
            raise

    def reweigh(self, weights: Sequence[float]) -> None:
        """Gives every path another weight, for what is allocated from now on."""
        for segment, weight in zip(self.segments, weights, strict=True):
            segment.weight = weight

    def free(self, extent: Extent) -> None:
        """Returns an extent to its path."""
        self.segments[extent.path_index].free(extent.offset, extent.num_bytes)

    def fd(self, extent: Extent) -> int:
        """The descriptor that an extent is read and written through."""
        return self.segments[extent.path_index].fd

    def check_whole(self, extent: Extent) -> None:
        """Raises OSError (ENODATA) when somebody has truncated the file that an extent lies in."""
        self.segments[extent.path_index].check_whole()

    def sync(self) -> None:
        """Blocks until what was written is on the disk, on every path. Raises OSError that names the file."""
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
        """Closes every segment; removes what this run made unless it is to be kept."""
        with contextlib.ExitStack() as closing:  # one that fails does not keep the others open
            for segment in self.segments:
                closing.callback(segment.close, keep)

    def _fill_of(self, index: int) -> float:
        return self.segments[index].used_bytes / self.segments[index].weight

    def _shares(self, num_bytes: int) -> list[int]:
        rooms = [segment.room_bytes for segment in self.segments]
        bounded = [room for room in rooms if room is not None]
        if len(bounded) == len(rooms) and sum(bounded) < num_bytes:
            caps = ", ".join(f"{s.facts.path} {s.room_bytes} (max_bytes={s.max_bytes})" for s in self.segments)
            raise OSError(
                errno.ENOSPC,
                f"{num_bytes} bytes are needed, the paths' caps leave {sum(bounded)}: {caps}. Raise a cap or add a path",
            )
        return deal_shares(num_bytes, [segment.weight for segment in self.segments], rooms)

    def _reserve_share(self, index: int, share: int, num_bytes: int) -> None:
        segment = self.segments[index]
        try:
            segment.reserve(share)
        except OSError as error:
            if len(self.segments) == 1:
                raise
            sharing = [s for s in self.segments[:index] if s.facts.device == segment.facts.device]
            shared = f" ({', '.join(str(s.facts.path) for s in sharing)} took theirs there first)" if sharing else ""
            total = sum(s.weight for s in self.segments)
            raise OSError(
                error.errno,
                f"its share is {share} of {num_bytes} bytes (weight {segment.weight:g} of {total:g}): "
                f"{error.strerror}{shared}; or cap this path with max_bytes, or give it less weight",
                str(segment.facts.path),
            ) from None

    def _check_limit(self, num_bytes: int) -> int:
        """Bytes that the files may still grow by. Raises ValueError without a path, OSError beyond disk_bytes."""
        if not self.segments and num_bytes:
            raise ValueError(f"nothing can rest on NVME ({num_bytes} bytes): no path was given")
        if self._limit_bytes is None:
            return GROWTH_BYTES
        if self.used_bytes + num_bytes > self._limit_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{num_bytes} bytes more than the {self.used_bytes} held would exceed disk_bytes={self._limit_bytes}",
                ", ".join(str(s.facts.path) for s in self.segments),
            )
        return max(0, self._limit_bytes - sum(s.size_bytes for s in self.segments))

    def _warn_once(self) -> None:
        """What is slow or no disk at all, said once per file system."""
        for facts in {segment.facts.device: segment.facts for segment in reversed(self.segments)}.values():
            if not facts.is_direct:
                logger.warning("%s (%s) is used buffered: %s", facts.path, facts.file_system, facts.why_buffered)
            if facts.file_system in _MEMORY_FILE_SYSTEMS:
                logger.warning("%s is %s: what rests there is memory, not disk", facts.path, facts.file_system)
