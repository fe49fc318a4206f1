"""Survey: lists the contents of a place, read only: runs, durable steps, the disk space they take,
unknown files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from tiermem.checkpoint.format.fields import ManifestError, no_collection
from tiermem.checkpoint.format.finding import (
    Found,
    NothingSaved,
    dir_of,
    find,
    is_named,
    known_latest,
    read_manifest,
    read_parts,
    read_pointer,
    real,
    rows_of_part,
    tags_of,
)
from tiermem.checkpoint.format.manifest import LATEST_FILE, POINTER_FILE, Part
from tiermem.checkpoint.interchange.from_deepspeed import is_deepspeed
from tiermem.checkpoint.opening.source import Progress, Source, verify_all
from tiermem.checkpoint.opening.verified import DamagedState
from tiermem.checkpoint.saving.publish import (
    alone,
    is_removed,
    remove_pointer,
    remove_unfinished,
    said_of,
)
from tiermem.swap.base.ranges import Numbers
from tiermem.swap.disk import durable
from tiermem.swap.disk.run_folder import (
    RunName,
    has_saved,
    holds_states,
    is_live,
    is_made,
    is_stillborn,
    owner_of,
    run_folders,
    share,
)

# ---- disk space ----------------------------------------------------------------------------------

BLOCK_BYTES = 4096

_MOST_BYTES = 1 << 62  # more than any file has; a whole block beyond it has a number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """Bytes on the disk, by use.

    file      the blocks that stat reports for the files: the sum of the next five
    durable   blocks of 4096 bytes that a durable step names
    live      of a run that is live or may be: other blocks that were written. Its steps write to these slots. Only its process
              knows which of them are free for the next step
    free      reserved and never written; of a run that has ended, all blocks that no step names
    unclear   blocks that would count as free, but a step that cannot be read may name them
    record    manifests, parts, the lock, files that a killed process left incomplete, unknown files

    On a file system that compresses, `durable` may be less than the blocks that steps name.
    """

    file_bytes: int = 0
    durable_bytes: int = 0
    live_bytes: int = 0
    free_bytes: int = 0
    unclear_bytes: int = 0
    record_bytes: int = 0


def total_of(spaces: Collection[Space]) -> Space:
    """The sums over several spaces."""
    return Space(
        **{
            field.name: sum(getattr(each, field.name) for each in spaces)
            for field in dataclasses.fields(Space)
        }
    )


@dataclasses.dataclass(frozen=True)
class StepSpace:
    """The space of a durable step in one folder, a run's or a tag's."""

    folder: Path
    durable_bytes: int
    own_bytes: int  # of these, bytes that no other known step names: dropping the step frees them


class Named:
    """The blocks of files that durable steps name."""

    def __init__(self) -> None:
        # the step's manifest, then the file
        self.steps: dict[Path, dict[Path, list[Numbers]]] = {}

    def add(self, step: Path, parts: Iterable[tuple[Path, Part]]) -> None:
        """Adds a step, identified by its manifest: its parts, each with the folder of the part."""
        found = self.steps[step] = defaultdict(list)
        for place, part in parts:
            rows = rows_of_part(part)
            ranges = np.stack((rows.offset, rows.offset + rows.num_bytes), 1)
            for number in set(rows.file.tolist()):
                found[real(place / part.files[number])].append(ranges[rows.file == number])

    def blocks_of(self, file: Path, without: Path | None = None) -> Numbers:
        """The blocks that any step names, except the step `without`."""
        named = (files.get(real(file), ()) for step, files in self.steps.items() if step != without)
        return blocks([each for ranges in named for each in ranges])

    def by_folder(self, step: Path) -> tuple[StepSpace, ...]:
        """The space of a step in each folder."""
        found: dict[Path, list[int]] = {}
        for file, ranges in self.steps.get(step, {}).items():
            sums = found.setdefault(file.parent, [0, 0])
            sums[0] += length(blocks(ranges))
            sums[1] += length(self.blocks_of(file)) - length(self.blocks_of(file, without=step))
        return tuple(StepSpace(folder, *sums) for folder, sums in sorted(found.items()))


def space_of(files: Iterable[Path], named: Named, goes_on: bool, is_clear: bool) -> Space:
    """The space of a run's files. Files that vanish meanwhile take nothing. Blocks; raises OSError.

    goes_on: whether the run is live, or may be. is_clear: whether every step of the run has been
        read.
    """
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            found.append(_of_file(file, named, goes_on, is_clear))
    return total_of(found)


def blocks(several: Sequence[Numbers]) -> Numbers:
    """All ranges as whole blocks, sorted and joined. A range is a row (start, stop)."""
    ranges = np.minimum(np.concatenate([np.zeros((0, 2), np.int64), *several]), _MOST_BYTES)
    starts, stops = ranges[np.argsort(ranges[:, 0])].T
    starts = starts // BLOCK_BYTES * BLOCK_BYTES
    stops = np.maximum.accumulate(-(-stops // BLOCK_BYTES) * BLOCK_BYTES)  # the farthest so far
    firsts = np.flatnonzero(np.append(True, starts[1:] > stops[:-1])[: len(starts)])
    return np.stack((starts[firsts], stops[np.append(firsts, len(stops))[1:] - 1]), 1)


def length(ranges: Numbers) -> int:
    """Total bytes of ranges."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _of_file(file: Path, named: Named, goes_on: bool, is_clear: bool) -> Space:
    taken = file.lstat().st_blocks * 512
    if not holds_states(file.name):
        return Space(file_bytes=taken, record_bytes=taken)
    frozen = named.blocks_of(file)
    durable_bytes = min(length(frozen), taken)
    live_bytes = 0
    if goes_on:
        written = np.array(list(_data_of(file)), np.int64).reshape(-1, 2)
        live_bytes = min(length(blocks([frozen, written])) - length(frozen), taken - durable_bytes)
    rest = taken - durable_bytes - live_bytes
    unnamed = {"free_bytes" if is_clear else "unclear_bytes": rest}
    return Space(file_bytes=taken, durable_bytes=durable_bytes, live_bytes=live_bytes, **unnamed)


def _data_of(file: Path) -> Iterator[tuple[int, int]]:
    """The ranges that were written; reserved blocks that were never written are holes. Raises
    OSError."""
    with open(durable.open_regular(file), "rb", buffering=0) as opened:
        stop = 0
        end = os.fstat(opened.fileno()).st_size
        while stop < end:
            try:
                start = opened.seek(stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            stop = opened.seek(start, os.SEEK_HOLE)
            yield start, stop


# ---- runs and steps of a place -------------------------------------------------------------------

RunState = Literal["live", "dead", "kept", "unseen"]
"""live: a process holds its lock. dead: its process was killed. kept: it was closed in order.
unseen: it belongs to another host, and this host cannot see whether it lives."""
StepState = Literal["whole", "live", "broken", "damaged", "removed", "unread"]
"""whole: manifest and parts are valid, every file exists and is long enough; verified: also every
checksum matches. live: of a run that is in use, only its manifest and parts were read. broken:
invalid or incomplete; `why` says more. damaged: a checksum differs. removed: a removal was cut
short after the manifest and before the pointer, and another step is the latest. unread: this
process lacks memory, threads, descriptors or a permission to read it; `why` says which."""

_OF_THE_FILES = frozenset(
    (
        errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG,
        errno.ENODATA, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO, errno.ESTALE,
    )
)  # fmt: skip
"""Errors of the files or their disk. Other errors concern this process and its limits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport(Space):
    """The folder of one rank of a run on one path, and the disk space of its files."""

    folder: Path
    run_id: str
    rank: int | None
    state: RunState
    owner: str  # from its lock; empty without one
    unknown: tuple[str, ...]  # files that no run makes


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One durable step, or a place that should hold one."""

    place: Path  # the tag's folder, or the manifest
    # the manifest that a pointer names, if the pointer can be read; else the pointer
    manifest: Path
    tag: str | None
    is_latest: bool  # whether `latest` names it
    state: StepState
    why: str  # empty for a whole step
    step: int | None = None
    run_id: str | None = None
    world: int | None = None
    num_parameters: int | None = None
    num_bytes: int | None = None  # of states
    is_verified: bool = False
    places: tuple[StepSpace, ...] = ()  # its disk space by folder

    @property
    def save_dir(self) -> Path:
        """The folder of checkpoints that its tag's folder lies in."""
        return dir_of(self.place, self.tag or self.place.name)

    @property
    def durable_bytes(self) -> int:
        """Disk space in bytes of the blocks that it names."""
        return sum(place.durable_bytes for place in self.places)

    @property
    def own_bytes(self) -> int:
        """Of these, bytes that no other step names."""
        return sum(place.own_bytes for place in self.places)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathReport(Space):
    """Disk space of the folders of all runs on one path."""

    path: Path


@dataclasses.dataclass(frozen=True)
class Survey:
    """The result of `survey`. `faults` concern `latest` files that name no tag; `unread` are
    folders and the reasons."""

    where: Path
    runs: tuple[RunReport, ...]
    paths: tuple[PathReport, ...]
    steps: tuple[StepReport, ...]
    faults: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def is_damaged(self) -> bool:
        """Whether a durable step or a `latest` file is not whole."""
        return bool(self.faults) or any(step.state in ("broken", "damaged") for step in self.steps)

    @property
    def is_unread(self) -> bool:
        """Whether a folder or a step could not be read."""
        return bool(self.unread) or any(step.state == "unread" for step in self.steps)

    @property
    def dead(self) -> tuple[RunReport, ...]:
        """The runs that were killed."""
        return tuple(run for run in self.runs if run.state == "dead")

    def steps_of(self, run_id: str) -> tuple[StepReport, ...]:
        """The steps of one run that can be opened, or may be by a process with more memory or
        permissions."""
        return tuple(
            step
            for step in self.steps
            if _run_id_of(step) == run_id and step.state in ("whole", "live", "unread")
        )


@no_collection()
def survey(where: Path, verifies: bool = False, progress: Progress = lambda _: None) -> Survey:
    """Lists the contents of a folder: a store's path, a run's folder, a folder of checkpoints, or a
    tag's folder.

    Folders one level below are listed too. Reading takes shared locks, as resuming does. Writes
    nothing and takes no run over.

    verifies: reads every byte of every whole step. Blocks. Raises OSError if the folder does not
        exist.
    """
    durable.check_folder(where)
    # the user's own; links in it are not followed
    where = real(where) if where.is_symlink() else where
    named = Named()
    runs: list[Path] = []
    steps: list[StepReport] = []
    faults: list[str] = []
    unread: list[str] = []
    for folder in _folders(where):
        try:
            runs += [folder] if RunName.of(folder) is not None else run_folders(folder)
            found, wrong = _found(folder)
        except PermissionError as error:  # lost+found, or another user's
            unread.append(_said(error))
            continue
        faults += wrong
        places = {step.place for step in steps}  # a tag of two parts is found in two folders
        new = [each for each in found if each.file.parent not in places]
        steps += [_step(each, verifies, progress, named) for each in new]
    for folder in tuple(runs):
        try:
            if folder != where:
                steps += [_step(each, verifies, progress, named) for each in _found(folder)[0]]
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        except OSError as error:  # another user's, or it was removed meanwhile
            runs.remove(folder)
            unread += [] if error.errno == errno.ENOENT else [_said(durable.naming(error, folder))]
    # a tag's report replaces that of its manifest
    unique = {real(step.manifest): step for step in reversed(steps)}
    unknown = {_run_id_of(step) for step in unique.values() if step.manifest not in named.steps}
    known = {_run_id_of(step) for step in unique.values()}
    names = [RunName.of(real(folder)) for folder in runs if has_saved(folder)]
    unknown |= {name.run_id for name in names if name is not None} - known
    reports = tuple(_run(folder, named, unknown) for folder in runs)
    placed = [
        dataclasses.replace(step, places=named.by_folder(step.manifest))
        for step in reversed(unique.values())
    ]
    why = "its manifest is removed, and its pointer is left: --repair removes that too"
    told = tuple(
        dataclasses.replace(step, state="removed", why=why) if _is_cut_short(step, placed) else step
        for step in placed
    )
    return Survey(where, reports, _paths(reports), told, tuple(faults), tuple(unread))


def repair(found: Survey) -> list[str]:
    """Completes removals and saves that were cut short; returns what it did, one line each. Blocks;
    raises OSError.

    A `removed` step loses its pointer. A `latest` that is lost, damaged, stale, or names a tag that
    is not there, is written anew for the newest whole tag. Files that killed saves left are removed
    (saving/publish.py). Nothing else is changed: a `latest` that names a broken tag stays. A folder
    that a process saves into is left as it is.

    Raises OSError (EBUSY) before it changes anything if a run lives here, or may live on another
    host.
    """
    live = [run.folder for run in found.runs if run.state in ("live", "unseen")]
    live += [step.place for step in found.steps if step.state == "live"]
    if live:
        raise OSError(
            errno.EBUSY,
            "its run lives, or may live on another host: --repair changes nothing here before "
            "the run's end",
            str(live[0]),
        )
    done: list[str] = []
    of_folder = defaultdict[Path, list[StepReport]](list)
    for step in found.steps:
        if (
            step.place.is_dir()
            and RunName.of(step.place) is None
            and step.save_dir.is_relative_to(found.where.absolute())
        ):
            of_folder[step.save_dir].append(step)
    for folder, steps in of_folder.items():
        if is_deepspeed(folder) or any(step.state == "unread" for step in steps):
            continue
        for step in steps:
            with alone(step.place) as is_alone:
                if is_alone and step.state == "removed":
                    remove_pointer(step.place / POINTER_FILE)
                    done.append(f"{step.place}: the pointer of a removed step is removed")
        whole = {step.tag: step.manifest for step in steps if step.state == "whole"}
        newest = next((tag for tag in tags_of(folder) if tag in whole), None)
        if newest is not None and not any(step.is_latest for step in steps):
            durable.write_file(folder / LATEST_FILE, said_of(whole[newest], folder, newest))
            done.append(f"{folder / LATEST_FILE}: names {newest!r} again")
        for each in {folder, *(step.place.parent for step in steps)}:
            remove_unfinished(each)
    return done


def _is_cut_short(step: StepReport, steps: Iterable[StepReport]) -> bool:
    """Whether a removal ended after it removed the manifest and before it removed the pointer
    (saving/publish.py)."""
    of_latest = (
        each.save_dir for each in steps if each.is_latest and each.state in ("whole", "live")
    )
    is_pointer = (
        step.state == "broken" and not step.is_latest and step.manifest.name == POINTER_FILE
    )
    if is_pointer and step.save_dir in of_latest:
        with contextlib.suppress(ManifestError, OSError):
            pointer, manifest = read_pointer(step.manifest)
            return pointer.tag in ("", step.tag) and is_removed(pointer, manifest)
    return False


def _folders(where: Path) -> list[Path]:
    """The place itself, and the folders below it that belong to no run and no tag."""
    if RunName.of(real(where)) is not None:
        return [where]
    tags = set(tags_of(where))
    below = [each for each in sorted(where.iterdir()) if each.is_dir() and not each.is_symlink()]
    return [where, *(each for each in below if RunName.of(each) is None and each.name not in tags)]


def _found(folder: Path) -> tuple[list[Found], list[str]]:
    """The steps of one folder, and the faults of its `latest`, which then names none of them."""
    wrong: list[str] = []
    try:
        return find(folder), wrong
    except NothingSaved:
        latest = known_latest(folder)
        if latest is not None and not is_deepspeed(folder):
            wrong.append(f"{folder / LATEST_FILE} names {latest.tag!r}, which is not there")
    except (ManifestError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _OF_THE_FILES:
            raise
        wrong.append(_said(error))
    return [
        each._replace(latest=None) for tag in tags_of(folder)[:1] for each in find(folder, tag)
    ], wrong


def _step(found: Found, verifies: bool, progress: Progress, named: Named) -> StepReport:
    place = found.file if found.tag is None else found.file.parent
    report = StepReport(place, found.file, found.tag, found.latest is not None, "broken", "")
    try:
        opened = read_manifest(found)
        manifest = opened.manifest
        report = dataclasses.replace(
            report,
            manifest=real(opened.file),
            tag=manifest.tag if found.tag is None or is_named(place, manifest.tag) else found.tag,
            step=manifest.step,
            run_id=manifest.run_id,
            world=manifest.world,
            num_parameters=len(manifest.parameters),
        )
        opened = opened._replace(parts=read_parts(opened))
        named.add(report.manifest, opened.parts)
        with Source(opened) as source:
            if verifies:
                verify_all(source, progress)
            return dataclasses.replace(
                report, state="whole", num_bytes=source.num_bytes, is_verified=verifies
            )
    except DamagedState as error:
        return dataclasses.replace(report, state="damaged", why=_said(error))
    except OSError as error:
        state: StepState = "broken" if error.errno in _OF_THE_FILES else "unread"
        state = "live" if error.errno == errno.EBUSY else state
        return dataclasses.replace(report, state=state, why=_said(error))
    except ManifestError as error:
        return dataclasses.replace(report, why=_said(error))


def _said(error: OSError | ManifestError) -> str:
    """The text of an error, with its file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return str(error)


def _run_id_of(step: StepReport) -> str | None:
    """The run of a step, from its manifest or from the folder of its manifest."""
    name = RunName.of(step.manifest.parent)
    return step.run_id or (None if name is None else name.run_id)


def _run(folder: Path, named: Named, unread: Collection[str | None]) -> RunReport:
    name = RunName.of(real(folder))
    assert name is not None  # it was found by its name
    owner = owner_of(folder)
    names = sorted(os.listdir(folder))
    state = _state(folder)
    files = [folder / name for name in names if stat.S_ISREG(_mode_of(folder / name))]
    space = space_of(files, named, state in ("live", "unseen"), name.run_id not in unread)
    return RunReport(
        folder=folder,
        run_id=name.run_id,
        rank=name.rank,
        state=state,
        owner="" if owner is None else str(owner),
        **vars(space),
        unknown=tuple(name for name in names if folder / name not in files or not is_made(name)),
    )


def _mode_of(file: Path) -> int:
    """What a name is, links not followed; 0 for one that was removed meanwhile."""
    with contextlib.suppress(OSError):
        return file.lstat().st_mode
    return 0


def _paths(runs: Iterable[RunReport]) -> tuple[PathReport, ...]:
    """The sums over runs, by path."""
    found = defaultdict[Path, list[RunReport]](list)
    for run in runs:
        found[run.folder.parent].append(run)
    return tuple(
        PathReport(path=path, **vars(total_of(own))) for path, own in sorted(found.items())
    )


def _state(folder: Path) -> RunState:
    if is_live(folder):
        return "live"
    if is_stillborn(folder):
        return "dead"
    if owner_of(folder) is None:
        return "kept"
    try:
        with share(folder):
            return "dead"
    except OSError:
        return "live" if is_live(folder) else "unseen"
