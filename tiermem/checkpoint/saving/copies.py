"""Copies: complete checkpoints in <dir>/<tag>/, apart from the store, made while training goes on."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from tiermem.checkpoint.format.finding import copy_name, pointer_path, tag_folder
from tiermem.checkpoint.saving.commit import Commits
from tiermem.checkpoint.saving.pieces import Placed, Rows, data_bytes, put_together, write_data
from tiermem.checkpoint.saving.publish import (
    OURS,
    Content,
    SavingInto,
    frozen,
    manifest_of,
    publish,
    remove,
    write_part,
)
from tiermem.checkpoint.together import Talk, talk_over, together
from tiermem.swap import direct, durable
from tiermem.swap.direct import open_direct
from tiermem.swap.entry import Freeze
from tiermem.swap.ranges import round_up
from tiermem.swap.run_folder import is_of_one_host
from tiermem.swap.tier import ALIGNMENT
from tiermem.zero.shards import Shards
from tiermem.zero.topology import Topology, group_aside

# ---- Copying: ranges of the store's files into a complete copy, past memory, while training goes on ------------------
#
#     frozen ranges of all paths -> extents (whole 4096-byte blocks, neighbours as one) -> one behind the other in a data file
#
#     reflink            FICLONERANGE: the copy shares the blocks; nothing is moved
#     copy_file_range    where several hosts may have mounted the file system: its server may do it
#   read and write     past the page cache; copy_file_range would go through it, at 0.4 of the speed and 5 times the CPU (ext4)
#
# The first that works is used for the file; each falls back to the next. Frozen ranges do not change (swap/entry.py),
# so the copy is of one moment, however long it takes. While training goes on it takes no more than a share of the time
# (Pace): a disk that training waits for is not taken from it.

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
    """The share of its time that a copy copies; all of it as soon as a thread waits for the copy.

    busy_share: more than 0, at most 1. What training loses to the copy is about as much of its time, whatever it waits for.
    """

    def __init__(self, busy_share: float = 1.0) -> None:
        self._rest_per_busy = 1.0 / busy_share - 1.0
        self._is_awaited = threading.Event()

    def hurry(self) -> None:
        """A thread waits for the copy. Never blocks; any thread may call it."""
        self._is_awaited.set()

    def rest(self, busy_s: float) -> None:
        """Blocks for what is due after so many seconds of copying, or until a thread waits for the copy."""
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


# ---- Copies: complete checkpoints in <dir>/<tag>/, apart from the store, made while training goes on -----------------
#
#     at once      freeze -> states in memory to the data file -> room for the rest of it        together
#     behind       frozen ranges -> data file (copies.py) -> part                               together
#                  rank 0: manifest -> pointer -> latest                                         together, then thawed
#
# What is behind runs in a thread of its own, and its ranks talk over a process group of its own, so that it meets no
# collective of the training. It may only while steps have a slot to write to; else, and with nothing on NVMe, all is
# done at once. A copy that fails takes away what it wrote; what was there before is untouched. Who waits (the next
# save, `wait`, the end) gets its error. Names are of a run and a commit, so that a tag is replaced by its pointer and
# at no other moment.

logger = logging.getLogger("tiermem")

WHAT = "copying the checkpoint"
_BUSY_SHARE = 0.08
"""Of the time, while training goes on: it is to lose no more than a tenth to a copy."""


class _Work(NamedTuple):
    """A copy that has been begun on this rank."""

    content: Content
    commit: int
    folder: Path
    held: SavingInto
    data: Path
    freeze: Freeze | None
    sources: tuple[Path, ...]
    extents: list[Extent]
    placed: Placed  # where the pieces are in the end
    undo: contextlib.ExitStack


class Copies:
    """The copies of one sharded model, one at a time.

    commits: those in the store; one whose tag a copy takes is dropped.
    """

    def __init__(self, shards: Shards, commits: Commits) -> None:
        self._shards = shards
        self._commits = commits
        self._run_id = commits.run_id
        self._thread: threading.Thread | None = None
        self._pace = Pace()
        self._error: BaseException | None = None

    def make(self, content: Content, commit: int, is_behind: bool) -> None:
        """Copies the states as they are now. Collective; blocks until what is in memory is written.

        is_behind: whether the rest may be done while training goes on; the same on every rank. Raises OSError.
        """
        topology = self._shards.topology
        self._pace = Pace(_BUSY_SHARE if is_behind else 1.0)
        with contextlib.ExitStack() as undo:
            begun: list[_Work] = []

            def begin() -> bool:
                begun.append(self._begin(content, commit, undo))
                return bool(begun[0].extents)

            has_rest = any(together(talk_over(topology), WHAT, begin))
            work = begun[0]._replace(undo=undo.pop_all())
        if not (has_rest and is_behind):
            self._end(work, talk_over(topology))
            return
        talk = self._talk_aside(topology)
        self._thread = threading.Thread(target=self._run, args=(work, talk), name="tiermem-copy", daemon=True)
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        """Whether a copy has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Blocks until no copy is under way, which no longer rests. Raises what the last one failed with, once."""
        self._pace.hurry()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # ---- one copy -------------------------------------------------------------------------------------------------------

    def _begin(self, content: Content, commit: int, undo: contextlib.ExitStack) -> _Work:
        """Writes what lies in memory and takes room for what is frozen."""
        shards, rank = self._shards, self._shards.topology.rank
        assert content.save_dir is not None and content.tag is not None
        folder = tag_folder(content.save_dir, content.tag)
        held = SavingInto(folder, undo)
        undo.callback(held.close)
        freeze, placed = None, []
        sources: tuple[Path, ...] = ()
        if content.resting.entries:
            freeze = shards.store.freeze()
            undo.callback(shards.store.thaw, freeze)
            placed, sources = [frozen(shards, content, freeze)], freeze.files()
        data = folder / copy_name(self._run_id, commit, rank, "bin")
        undo.callback(remove, data)
        in_memory = write_data(content.in_memory, data, 0, shards.workers)
        extents: list[Extent] = []
        for number, each in enumerate(placed):
            extents, rows = lay_out(each.rows, round_up(data_bytes(content.in_memory), ALIGNMENT), file=0)
            placed[number] = each._replace(rows=rows)
        take_room(data, extents)
        whole = put_together([in_memory, *placed])
        return _Work(content, commit, folder, held, data, freeze, sources, extents, whole, undo)

    def _run(self, work: _Work, talk: Talk) -> None:
        """In the thread."""
        try:
            self._end(work, talk)
        except BaseException as error:  # raised by `wait`
            self._error = error

    def _end(self, work: _Work, talk: Talk) -> None:
        """Copies what is frozen and makes the whole known; thaws however it ends. Collective over `talk`; blocks."""
        content, topology = work.content, self._shards.topology
        assert content.save_dir is not None and content.tag is not None
        replaced = self._commits.in_place_of(pointer_path(content.save_dir, content.tag))
        with contextlib.closing(work.held), work.undo:
            told = together(talk, WHAT, lambda: self._copy_own(work))

            def save_all() -> None:
                if topology.rank == 0:
                    self._check_seen(told)
                    manifest = manifest_of(content, self._run_id, work.commit, topology, told, work.folder)
                    name = copy_name(self._run_id, work.commit, None, "json")
                    publish(content, manifest, work.folder / name, work.undo)
                    for each in replaced:
                        remove(each.manifest)

            def unheard(went_well: bool) -> None:
                if topology.rank or went_well:  # a manifest may name what is here
                    work.undo.pop_all()

            together(talk, WHAT, save_all, unheard)
            work.undo.pop_all()
        self._commits.forget(replaced)
        if work.freeze is not None:
            self._shards.store.thaw(work.freeze)
        remove_other_copies(work.folder, f"{self._run_id}-{work.commit}", topology)

    def _copy_own(self, work: _Work) -> Any:
        if work.extents:
            copy(work.sources, work.extents, work.data, self._pace)
        rank, content = self._shards.topology.rank, work.content
        path = work.folder / copy_name(self._run_id, work.commit, rank, "json")
        work.undo.callback(remove, path)
        return write_part(path, self._run_id, work.commit, rank, content, [work.data.name], work.placed)

    def _check_seen(self, told: list[Any]) -> None:
        """Raises OSError when a rank has written to a folder that is not this one."""
        for rank, each in enumerate(told):
            if not (Path(each["folder"]) / each["file"]).is_file():
                raise FileNotFoundError(
                    2,
                    f"rank {rank} has written {each['file']}, which rank 0 does not see: a copy needs a folder that all ranks "
                    "share. Save on the paths of the store, or to a shared file system",
                    each["folder"],
                )

    def _talk_aside(self, topology: Topology) -> Talk:
        """Over a group of its own. Collective when it is first needed."""
        if topology.group is None:
            return lambda text: [text]
        group = group_aside(topology)

        def talk(text: str) -> list[str]:
            found: list[Any] = [None] * topology.world
            dist.all_gather_object(found, text, group=group)
            return found

        return talk


def remove_other_copies(folder: Path, kept: str, topology: Topology) -> None:
    """Removes this rank's files of other copies from a tag's folder; rank 0 also their manifests, and those of ranks that are
    no more. `kept` is the run and commit of the copy that stays, if any."""
    for file in sorted(folder.iterdir()):
        match = OURS.fullmatch(file.name)
        if match is None or match[1] == kept:
            continue
        owner = 0 if match[2] is None or int(match[2]) >= topology.world else int(match[2])
        if owner == topology.rank:
            remove(file)
