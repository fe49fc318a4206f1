"""Copies: complete checkpoints in <dir>/<tag>/, apart from the store, written while training goes
on.

    at once           freeze -> states in memory to the data file -> reserve space for the rest     together
    in the thread     frozen ranges -> data file -> part                                           together
                      rank 0: manifest -> pointer -> latest                                         together, then thaw

The thread uses a process group of its own, so that its collectives never mix with those of
training. It is used only while optimizer steps have another slot to write to. Otherwise, and if no
state rests on NVMe, the caller does all the work at once.

A copy that fails removes the files that it wrote; earlier files are unchanged. Its error is raised
by the next save, by `wait`, by the next durable step when that is on the disk, or by the end of the
run. File names contain the run and the commit: a
tag that is saved again changes only with its pointer.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from typing import Any, NamedTuple

import numpy as np

from tiermem.checkpoint.format.finding import Rows, copy_name, real
from tiermem.checkpoint.format.manifest import POINTER_FILE
from tiermem.checkpoint.saving.commit import COPYING, Commits
from tiermem.checkpoint.saving.pieces import Placed, packed, write_data
from tiermem.checkpoint.saving.publish import (
    OURS,
    Content,
    SavingInto,
    frozen,
    tidy,
    write_part,
)
from tiermem.checkpoint.together import together
from tiermem.ranks.failures import Traffic
from tiermem.ranks.topology import Topology, group_aside
from tiermem.run.shards import Shards
from tiermem.swap.base.ranges import ALIGNMENT, round_up
from tiermem.swap.base.side_threads import Flag, start_thread
from tiermem.swap.disk import direct, durable
from tiermem.swap.disk.direct import open_direct
from tiermem.swap.disk.run_folder import SEGMENT, is_of_one_host, remove
from tiermem.swap.store.entry import Freeze

# ---- copying file ranges -------------------------------------------------------------------------
#
#     frozen ranges of all paths -> extents (whole 4096-byte blocks, adjacent ones joined) -> one
#     after another in a data file
#
# Three methods. `copy` uses the first that the file systems support, for one source file after the
# other:
#
#     reflink            FICLONERANGE: the copy shares the blocks; no data is moved
#     copy_file_range    only on a file system that several hosts may have mounted: its server may copy the data itself
#     read and write     with O_DIRECT; copy_file_range goes through the page cache, at 0.4 of the speed and 5 times the CPU
#                        time (ext4)
#
# Frozen ranges do not change (swap/store/entry.py), so a slow copy still holds one moment.

_FICLONERANGE = 0x4020940D
_STEP_BYTES = 4 << 20
_NOT_HERE = {
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.ETXTBSY,
}


class CopyExtent(NamedTuple):
    """Whole 4096-byte blocks of a source file: index of the file, offset there, size in bytes,
    offset in the copy."""

    file: int
    offset: int
    num_bytes: int
    place: int


class Pace:
    """Limits the share of time in which a copy moves data, until a thread waits for the copy.
    Training needs the disk too.

    busy_share: more than 0, at most 1. Training loses at most about this share of its time.
    """

    def __init__(self, busy_share: float = 1.0) -> None:
        self._rest_per_busy = 1.0 / busy_share - 1.0
        self._is_awaited = Flag()

    def hurry(self) -> None:
        """Ends the limit, because a thread waits for the copy. Never blocks; any thread may call
        it."""
        self._is_awaited.set()

    def rest(self, busy_s: float) -> None:
        """Blocks for the pause that is due after `busy_s` seconds of copying, or until `hurry` is
        called."""
        self._is_awaited.wait_for(busy_s * self._rest_per_busy)


def lay_out(rows: Rows, start: int) -> tuple[list[CopyExtent], Rows]:
    """The extents that hold these rows, one after another in the copy from byte `start` (a multiple
    of 4096), and the rows with their places in the copy, which is the part's first file."""
    order = np.lexsort((rows.offset, rows.file))
    source = rows.file[order]
    offset = rows.offset[order]
    first = offset // ALIGNMENT * ALIGNMENT
    stop = -(-(offset + rows.num_bytes[order]) // ALIGNMENT) * ALIGNMENT
    is_new = (source[1:] != source[:-1]) | (first[1:] > stop[:-1])
    # rows do not overlap, so the last one of an extent ends it
    heads, ends, places, shifts = packed(is_new, first, stop, ALIGNMENT)
    moved = np.empty_like(offset)
    moved[order] = offset + start + shifts
    columns = source[heads], first[heads], stop[ends] - first[heads], start + places
    extents = [CopyExtent(*each) for each in np.stack(columns, 1).tolist()]
    return extents, rows._replace(file=np.zeros_like(rows.file), offset=moved)


def take_room(path: Path, extents: Sequence[CopyExtent]) -> None:
    """Allocates the blocks for the extents. Raises OSError (ENOSPC) that says how much is needed
    and free."""
    if not extents:
        return
    start = extents[0].place
    stop = extents[-1].place + extents[-1].num_bytes
    with durable.Owned([durable.open_regular(path, os.O_RDWR)]) as fd:
        direct.take_room(fd, start, stop - start, path)


def copy(
    sources: Sequence[Path],
    extents: Sequence[CopyExtent],
    path: Path,
    pace: Pace,
    opened: Sequence[int] = (),
) -> None:
    """Copies extents of the sources into an existing file and syncs it. Blocks, without the GIL.
    Raises OSError.

    opened: descriptors of the sources, whose names may lead nowhere by now.
    """
    with open_direct(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)[0] as target:
        with mmap.mmap(-1, _STEP_BYTES) as buffer:  # page-aligned, as O_DIRECT requires
            for number, source in enumerate(sources):
                due = [each for each in extents if each.file == number]
                if due:
                    fd = opened[number] if opened else None
                    _copy_from(source, fd, due, target, path, pace, buffer)
        durable.sync(target, path)


def _copy_from(
    source: Path,
    opened: int | None,
    extents: Sequence[CopyExtent],
    target: int,
    path: Path,
    pace: Pace,
    buffer: mmap.mmap,
) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    own = open_direct(source, flags)[0] if opened is None else durable.Owned([os.dup(opened)])
    with own as fd:
        ways = [_clone] if is_of_one_host(path.parent) else [_clone, _copy_range]
        ways.append(functools.partial(_read_and_write, buffer))
        end = os.fstat(fd).st_size
        for each in extents:
            done = 0
            num_bytes = each.num_bytes
            # a data file
            if 0 < each.offset + num_bytes - end < ALIGNMENT and source.name != SEGMENT:
                num_bytes = end - each.offset
            while done < num_bytes:
                length = (
                    min(_STEP_BYTES, num_bytes - done)
                    if ways[0] is not _clone
                    else num_bytes - done
                )
                start_s = time.monotonic()
                try:
                    done += ways[0](fd, each.offset + done, length, target, each.place + done)
                except OSError as error:
                    if len(ways) == 1 or error.errno not in _NOT_HERE:
                        with durable.named(path):
                            raise OSError(
                                error.errno, f"copying {source}: {error.strerror}"
                            ) from None
                    ways.pop(0)
                pace.rest(time.monotonic() - start_s)


def _clone(source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, offset, num_bytes, place))
    return num_bytes


def _copy_range(source: int, offset: int, num_bytes: int, target: int, place: int) -> int:
    done = os.copy_file_range(source, target, num_bytes, offset, place)
    if not done:
        raise OSError(errno.ENODATA, f"the file ends at byte {offset}: something truncated it")
    os.fdatasync(target)
    for fd, start in ((source, offset), (target, place)):  # drop these pages from the page cache
        os.posix_fadvise(fd, start, done, os.POSIX_FADV_DONTNEED)
    return done


def _read_and_write(
    buffer: mmap.mmap, source: int, offset: int, num_bytes: int, target: int, place: int
) -> int:
    with memoryview(buffer) as whole, whole[: round_up(num_bytes, ALIGNMENT)] as view:
        done = os.preadv(source, [view], offset)
        if done < num_bytes:
            raise OSError(
                errno.ENODATA, f"the file ends at byte {offset + done}: something truncated it"
            )
        view[done:] = bytes(len(view) - done)
        written = 0
        while written < len(view):
            with view[written:] as rest:
                written += os.pwrite(target, rest, place + written)
    return num_bytes


# ---- one copy at a time --------------------------------------------------------------------------

_BUSY_SHARE = 0.08
"""Share of time in which the thread moves data while training goes on, so that training loses less
than a tenth."""


class _Work(NamedTuple):
    """A copy that this rank has begun."""

    content: Content
    commit: int
    held: SavingInto
    data: Path
    freeze: Freeze | None
    extents: list[CopyExtent]
    placed: list[Placed]  # the pieces, at their places in the finished copy
    undo: contextlib.ExitStack


class Copies:
    """The copies of one sharded model, one at a time.

    commits: the steps in the store. A copy that takes over a tag drops the step that had it.
    """

    def __init__(self, shards: Shards, commits: Commits) -> None:
        self._shards = shards
        self._commits = commits
        self._thread: threading.Thread | None = None
        self._pace = Pace()
        self._error: BaseException | None = None

    def make(self, content: Content, commit: int, is_behind: bool) -> None:
        """Copies the states as they are now. Collective; blocks until the states in memory are
        written. Raises OSError.

        is_behind: whether a thread may copy the states on NVMe while training goes on; equal on all
            ranks.
        """
        topology = self._shards.topology
        self._pace = Pace(_BUSY_SHARE if is_behind else 1.0)
        with contextlib.ExitStack() as undo:
            work, has_rest = together(
                topology,
                COPYING,
                lambda: self._begin(content, commit, undo),
                tell=lambda work: bool(work.extents),
            )
            work = work._replace(undo=undo.pop_all())
        if not (any(has_rest) and is_behind):
            self._end(work, topology)
            return
        # The thread's collectives use a group of their own; the watch explains, and ranks compare,
        # those of the main group.
        group = None if topology.group is None else group_aside(topology)
        aside = dataclasses.replace(topology, group=group, watch=None, traffic=Traffic())
        thread = threading.Thread(
            target=self._run, args=(work, aside), name="tiermem-copy", daemon=True
        )
        start_thread(thread)
        self._thread = thread

    def end(self) -> None:
        """Blocks until no copy is running; the copy pauses no more. `wait` raises its error."""
        self._pace.hurry()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """`end`, then raises the error of a failed copy, once."""
        self.end()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    # ---- one copy --------------------------------------------------------------------------------

    def _begin(self, content: Content, commit: int, undo: contextlib.ExitStack) -> _Work:
        """Writes the states in memory and reserves space for the frozen ones."""
        shards = self._shards
        assert content.pointer is not None
        folder = content.pointer.parent
        held = SavingInto(folder, undo)
        undo.callback(held.close)
        freeze = None
        if content.resting.entries:
            freeze = shards.store.freeze(is_kept=False)
            undo.callback(shards.store.thaw, freeze)
        data = folder / copy_name(self._commits.run_id, commit, content.part.rank, "bin")
        undo.callback(remove, data)
        placed = [write_data(content.in_memory, data, 0, shards.workers)]
        extents: list[CopyExtent] = []
        if freeze is not None:
            rest = frozen(shards, content, freeze)
            extents, rows = lay_out(rest.rows, round_up(data.stat().st_size, ALIGNMENT))
            placed.append(rest._replace(rows=rows))
        take_room(data, extents)
        return _Work(content, commit, held, data, freeze, extents, placed, undo)

    def _run(self, work: _Work, topology: Topology) -> None:
        """The thread's function."""
        try:
            self._end(work, topology)
        except BaseException as error:  # raised by `wait`
            self._error = error

    def _end(self, work: _Work, topology: Topology) -> None:
        """Copies the frozen ranges and publishes the copy. Thaws on success and on error.
        Collective in the group of `topology`; blocks."""
        commits = self._commits
        path = work.data.with_name(copy_name(commits.run_id, work.commit, None, "json"))
        pointer = real(path.parent) / POINTER_FILE
        replaced = [each for each in commits.steps if each.pointer == pointer]
        with contextlib.closing(work.held), work.undo:
            _, told = together(topology, COPYING, lambda: self._copy_own(work))
            if self._shards.topology.rank:
                work.held.close()  # rank 0's lock stays: it removes what it finds alone
            gone = commits.publish_together(
                topology, work.content, work.commit, path, told, replaced, work.undo, is_copy=True
            )
        commits.forget(gone)
        if work.freeze is not None:
            self._shards.store.thaw(work.freeze)
        remove_other_copies(path.parent, commits.run_id, work.commit, self._shards.topology)

    def _copy_own(self, work: _Work) -> Any:
        if work.extents:
            assert work.freeze is not None  # the extents are of its files
            opened = self._shards.store.descriptors()
            copy(work.freeze.files, work.extents, work.data, self._pace, opened)
        path = work.data.with_name(
            copy_name(self._commits.run_id, work.commit, work.content.part.rank, "json")
        )
        work.undo.callback(remove, path)
        return write_part(path, work.commit, work.content, [work.data.name], work.placed)


def remove_other_copies(folder: Path, run_id: str, commit: int, topology: Topology) -> None:
    """Removes this rank's files of the run's other copies from a tag's folder; 0 as `commit`: of
    all. Rank 0 also removes manifests, files of ranks that this run does not have, and those of
    other runs that the pointer does not name, unless a process saves into the folder."""
    for file in sorted(folder.iterdir()):
        match = OURS.fullmatch(file.name)
        if match is None or match[1].split("-")[0] != run_id or match[1] == f"{run_id}-{commit}":
            continue
        owner = 0 if match[2] is None or int(match[2]) >= topology.world else int(match[2])
        if owner == topology.rank:
            remove(file)
    if topology.rank == 0:
        tidy(folder)
