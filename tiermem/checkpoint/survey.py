"""Survey: what a place holds, read only: runs, durable steps, the space they take, and files of others."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tiermem.checkpoint.format.fields import ManifestError
from tiermem.checkpoint.format.finding import (
    Found,
    NothingSaved,
    find,
    read_latest,
    read_manifest,
    read_parts,
    read_pointer,
    real,
    tags_of,
)
from tiermem.checkpoint.format.manifest import LATEST_FILE, POINTER_FILE, Part
from tiermem.checkpoint.interchange.from_deepspeed import is_deepspeed
from tiermem.checkpoint.opening.source import Source
from tiermem.checkpoint.opening.verified import DamagedState
from tiermem.checkpoint.saving.publish import alone, is_removed, remove_pointer, remove_unfinished
from tiermem.swap import durable
from tiermem.swap.run_folder import RunName, holds_states, is_live, is_made, is_stillborn, owner_of, run_folders, share

# ---- Space: what the files of runs take on the disk, told by who needs it --------------------------------------------
#
#     durable   blocks that a durable step names; its own are those that no other step names: what dropping it would free
#     live      of a run that goes on, what else has been written: the slots that its steps write to. Which of them are free
#               for the next step only its process knows
#     free      reserved and never written; of a run that does not go on, all that no step names
#     unclear   what would be free, were there not a step that cannot be read, which may name it
#     records   manifests, parts, the lock, what a killed process has left half-written, and what is not ours
#
# Blocks are of 4096 bytes. The five of a folder are together what stat says that its files take, whatever the file
# system makes of them: where it squeezes what it keeps, less is told than was named. Nothing is read but where a file
# has data.

BLOCK_BYTES = 4096

Ranges = Sequence[tuple[int, int]]
"""(start, stop) of bytes, sorted, none touching another."""


class Space(NamedTuple):
    """Bytes on the disk."""

    durable_bytes: int = 0
    live_bytes: int = 0
    free_bytes: int = 0
    unclear_bytes: int = 0
    record_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What stat says."""
        return sum(self)

    def plus(self, other: Space) -> Space:
        """Both together."""
        return Space(*(a + b for a, b in zip(self, other, strict=True)))


@dataclasses.dataclass(frozen=True)
class StepSpace:
    """What a durable step names in one folder: a run's, or a tag's."""

    folder: Path
    durable_bytes: int
    own_bytes: int  # of them, named by no other step that was found


class Named:
    """Which blocks of which files durable steps name, of the steps that were found."""

    def __init__(self) -> None:
        self._steps: set[Path] = set()
        self._by_file: dict[Path, dict[Path, list[tuple[int, int]]]] = {}  # file, then the step's manifest

    def add(self, step: Path, parts: Iterable[tuple[Path, Part]]) -> None:
        """Takes note of a step, known by its manifest: the pieces of its parts, each with the folder it lies in."""
        self._steps.add(step)
        found: dict[Path, list[tuple[int, int]]] = {}
        for place, part in parts:
            files = [real(place / name) for name in part.files]
            for piece in part.pieces:
                found.setdefault(files[piece.file], []).append((piece.offset, piece.offset + piece.num_bytes))
        for file, ranges in found.items():
            self._by_file.setdefault(file, {})[step] = ranges

    def knows(self, step: Path) -> bool:
        """Whether a step's parts could be read."""
        return step in self._steps

    def blocks_of(self, file: Path, without: Path | None = None) -> Ranges:
        """The blocks that any step names; `without` one of them."""
        steps = self._by_file.get(real(file), {})
        return blocks(each for step, ranges in steps.items() if step != without for each in ranges)

    def by_folder(self, step: Path) -> tuple[StepSpace, ...]:
        """What a step names, in each folder."""
        found: dict[Path, list[int]] = {}
        for file, steps in self._by_file.items():
            if step in steps:
                sums = found.setdefault(file.parent, [0, 0])
                sums[0] += length(blocks(steps[step]))
                sums[1] += length(self.blocks_of(file)) - length(self.blocks_of(file, without=step))
        return tuple(StepSpace(folder, *sums) for folder, sums in sorted(found.items()))


def space_of(files: Iterable[Path], named: Named, goes_on: bool, is_clear: bool) -> Space:
    """What files of a run take. Files that vanish meanwhile take nothing. Raises OSError.

    goes_on: the run is live, or may be. is_clear: every step of it could be read.
    """
    total = Space()
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total = total.plus(_of_file(file, named, goes_on, is_clear))
    return total


def blocks(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges as whole blocks, sorted and joined."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        first, last = start // BLOCK_BYTES * BLOCK_BYTES, -(-stop // BLOCK_BYTES) * BLOCK_BYTES
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def length(ranges: Ranges) -> int:
    """Bytes."""
    return sum(stop - start for start, stop in ranges)


def _of_file(file: Path, named: Named, goes_on: bool, is_clear: bool) -> Space:
    taken = file.stat().st_blocks * 512
    if not holds_states(file.name):
        return Space(record_bytes=taken)
    frozen = named.blocks_of(file)
    durable_bytes = min(length(frozen), taken)
    live_bytes = 0
    if goes_on:
        written = blocks(_data_of(file))
        live_bytes = min(length(blocks([*frozen, *written])) - length(frozen), taken - durable_bytes)
    rest = taken - durable_bytes - live_bytes
    return Space(durable_bytes, live_bytes, rest if is_clear else 0, 0 if is_clear else rest)


def _data_of(file: Path) -> Iterator[tuple[int, int]]:
    """Where a file has been written: reserved blocks that were not written are holes. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stop, end = 0, os.fstat(fd).st_size
        while stop < end:
            try:
                start = os.lseek(fd, stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                raise
            stop = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, stop
    finally:
        os.close(fd)


# ---- Survey: what a place holds, looked at and left alone: runs, durable steps, the space they take, what is not -----
# ours
#
#     DIR     a store's path, a run's folder, a folder of checkpoints, a tag's; what lies one folder below is looked at too
#
# A run       live: a process holds its lock     dead: no process does, it was killed     kept: it was closed in order
#             unseen: it is of another host, and cannot be seen from here
# A step      whole: manifest and parts are valid, every file is there and long enough (verified: and every checksum is
# right)
#           live: of a run that goes on, so only its manifest was looked at   broken: why is said   damaged: a checksum differs
#             removed: its manifest went and its pointer stayed, because the removal was cut short; another step is the latest
#             unread: this process lacks what reading it takes (memory, threads, descriptors, a permission), as is said
#
# Reading takes a shared lock on what it reads, as resuming does; nothing is written or taken over but by `repair`.

RunState = Literal["live", "dead", "kept", "unseen"]
StepState = Literal["whole", "live", "broken", "damaged", "removed", "unread"]

_OF_THE_FILES = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENXIO,
        errno.ENAMETOOLONG,
        errno.ENODATA,
        errno.EIO,
        errno.EBADMSG,
        errno.EUCLEAN,
        errno.EREMOTEIO,
        errno.ESTALE,
    }
)
"""What is wrong with files or their disk; other errors are about this process and what the machine lets it have."""

Progress = Callable[[int], None]
"""Told how many bytes more have been verified."""


@dataclasses.dataclass(frozen=True)
class RunReport:
    """The folder of one rank of a run on one path."""

    folder: Path
    run_id: str
    rank: int | None
    state: RunState
    owner: str  # as its lock says; empty without one
    file_bytes: int  # that its files take on the disk: what follows, together
    durable_bytes: int  # named by durable steps that were found
    live_bytes: int  # written by a run that goes on, beside them
    free_bytes: int  # neither: unused, or reserved and not written yet
    unclear_bytes: int  # what would be free, were there not a step that cannot be read
    record_bytes: int  # manifests, parts, the lock, files that are not ours
    unknown: tuple[str, ...]  # files that no run makes


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One durable step, or what is said to be one."""

    place: Path  # the tag's folder, or the manifest
    manifest: Path  # what a pointer points at, where that can be told
    tag: str | None
    is_latest: bool  # whether `latest` names it
    state: StepState
    why: str  # empty for a whole one
    step: int | None = None
    run_id: str | None = None
    world: int | None = None
    num_parameters: int | None = None
    num_bytes: int | None = None  # of states
    is_verified: bool = False
    places: tuple[StepSpace, ...] = ()  # what it names on the disk

    @property
    def durable_bytes(self) -> int:
        """Bytes on the disk that it names."""
        return sum(place.durable_bytes for place in self.places)

    @property
    def own_bytes(self) -> int:
        """Of them, those that no other step names."""
        return sum(place.own_bytes for place in self.places)


@dataclasses.dataclass(frozen=True)
class PathReport:
    """What the folders of all runs on one path take."""

    path: Path
    file_bytes: int
    durable_bytes: int
    live_bytes: int
    free_bytes: int
    unclear_bytes: int
    record_bytes: int


@dataclasses.dataclass(frozen=True)
class Survey:
    """All of it; `faults` are about no step: a `latest` that names nothing. `unread` are folders, and why."""

    where: Path
    runs: tuple[RunReport, ...]
    paths: tuple[PathReport, ...]
    steps: tuple[StepReport, ...]
    faults: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def is_damaged(self) -> bool:
        """Whether something durable is not whole."""
        return bool(self.faults) or any(step.state in ("broken", "damaged") for step in self.steps)

    @property
    def is_unread(self) -> bool:
        """Whether something could not be looked at."""
        return bool(self.unread) or any(step.state == "unread" for step in self.steps)

    @property
    def dead(self) -> tuple[RunReport, ...]:
        """The runs that were killed."""
        return tuple(run for run in self.runs if run.state == "dead")

    def steps_of(self, run_id: str) -> tuple[StepReport, ...]:
        """The steps of one run that can be opened, or may be, by a process that has what this one lacks."""
        return tuple(
            step for step in self.steps if _run_id_of(step) == run_id and step.state in ("whole", "live", "unread")
        )


def survey(where: Path, verifies: bool = False, progress: Progress | None = None) -> Survey:
    """Looks at a place. Blocks; with `verifies` every byte of every whole step is read. Raises OSError for no such folder."""
    if not where.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "no such folder", str(where))
    named = Named()
    runs: list[Path] = []
    steps: list[StepReport] = []
    faults: list[str] = []
    unread: list[str] = []
    for folder in _folders(where):
        try:
            own = [folder] if RunName.of(folder) is not None else run_folders(folder)
            found, wrong = _found(folder)
        except PermissionError as error:  # lost+found, or another user's
            unread.append(_said(error))
            continue
        runs += own
        faults += wrong
        steps += [_step(each, is_latest, verifies, progress, named) for each, is_latest in found]
    for folder in runs:
        if folder != where:
            steps += [_step(each, False, verifies, progress, named) for each, _ in _found(folder)[0]]
    unique = {real(step.manifest): step for step in reversed(steps)}  # a tag, before the manifest it points at
    unknown = {_run_id_of(step) for step in unique.values() if not named.knows(step.manifest)}
    reports = tuple(_run(folder, named, unknown) for folder in runs)
    placed = [dataclasses.replace(step, places=named.by_folder(step.manifest)) for step in reversed(unique.values())]
    why = "its manifest is removed, and its pointer is left: --repair removes that too"
    told = tuple(
        dataclasses.replace(step, state="removed", why=why) if _is_cut_short(step, placed) else step for step in placed
    )
    return Survey(where, reports, _paths(reports), told, tuple(faults), tuple(unread))


def repair(found: Survey) -> list[str]:
    """Does again what was cut short, and nothing else; says what. Blocks; raises OSError.

    A step that is `removed` loses its pointer. Where tags lie and `latest` names none of them, it names the newest whole one.
    What killed saves have left goes (publish.py). A folder that a run saves into, or may, is left as it is.
    """
    done: list[str] = []
    of_folder: dict[Path, list[StepReport]] = {}
    for step in found.steps:
        if step.place.is_dir() and RunName.of(step.place) is None and step.place != found.where:
            of_folder.setdefault(step.place.parent, []).append(step)
    for folder, steps in of_folder.items():
        if is_deepspeed(folder) or any(step.state in ("live", "unread") for step in steps):
            continue
        for step in steps:
            with alone(step.place) as is_alone:
                if is_alone and step.state == "removed":
                    remove_pointer(step.place / POINTER_FILE)
                    done.append(f"{step.place}: the pointer of a removed step is removed")
        whole = [step.place.name for step in steps if step.state == "whole"]
        if whole and not any(step.is_latest for step in steps):
            newest = next(tag for tag in tags_of(folder) if tag in whole)
            durable.write_file(folder / LATEST_FILE, newest.encode())
            done.append(f"{folder / LATEST_FILE}: names {newest!r} again")
        remove_unfinished(folder)
    return done


def _is_cut_short(step: StepReport, steps: Iterable[StepReport]) -> bool:
    """Whether a step went before its pointer did, which a removal that ends takes away as well (saving/commit.py)."""
    if step.state != "broken" or step.is_latest or step.manifest.name != POINTER_FILE:
        return False
    if not any(
        each.is_latest and each.place.parent == step.place.parent for each in steps if each.state in ("whole", "live")
    ):
        return False
    try:
        return is_removed(read_pointer(step.manifest)[1])
    except (ManifestError, OSError):
        return False


def _folders(where: Path) -> list[Path]:
    """The place itself, and folders below it that are neither a run's nor a tag's."""
    if RunName.of(real(where)) is not None:
        return [where]
    tags = set(tags_of(where))
    below = [each for each in sorted(where.iterdir()) if each.is_dir() and not each.is_symlink()]
    return [where, *(each for each in below if RunName.of(each) is None and each.name not in tags)]


def _found(folder: Path) -> tuple[list[tuple[Found, bool]], list[str]]:
    """The steps of one folder, each with whether `latest` names it, and what is wrong with `latest`."""
    try:
        latest = read_latest(folder)
        return [(each, latest is not None and each.tag == latest) for each in find(folder)], []
    except NothingSaved:
        is_ours = latest is not None and not is_deepspeed(folder)
        wrong = [f"{folder / 'latest'} names {latest!r}, which is not there"] if is_ours else []
    except (ManifestError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _OF_THE_FILES:
            raise
        wrong = [_said(error)]
    return [(each, False) for tag in tags_of(folder)[:1] for each in find(folder, tag)], wrong


def _step(found: Found, is_latest: bool, verifies: bool, progress: Progress | None, named: Named) -> StepReport:
    place = found.file if found.tag is None else found.file.parent
    report = StepReport(place, found.file, found.tag, is_latest, "broken", "")
    try:
        opened = read_manifest(found)
        manifest = opened.manifest
        report = dataclasses.replace(
            report,
            manifest=real(opened.file),
            tag=manifest.tag if found.tag is None else found.tag,
            step=manifest.step,
            run_id=manifest.run_id,
            world=manifest.world,
            num_parameters=len(manifest.parameters),
        )
        named.add(report.manifest, read_parts(opened))
        with Source(opened) as source:
            if verifies:
                for param in source.parameters:
                    for each in source.states(param):
                        for num_bytes in source.verify(param, each):
                            if progress is not None:
                                progress(num_bytes)
            return dataclasses.replace(report, state="whole", num_bytes=source.num_bytes, is_verified=verifies)
    except DamagedState as error:
        return dataclasses.replace(report, state="damaged", why=_said(error))
    except OSError as error:
        state: StepState = "broken" if error.errno in _OF_THE_FILES else "unread"
        state = "live" if error.errno == errno.EBUSY else state
        return dataclasses.replace(report, state=state, why=_said(error))
    except ManifestError as error:
        return dataclasses.replace(report, why=_said(error))


def _said(error: OSError | ManifestError) -> str:
    """An error in words, with its file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return str(error)


def _run_id_of(step: StepReport) -> str | None:
    """The run that a step is of, where its manifest or the folder that this lies in tells."""
    name = RunName.of(step.manifest.parent)
    return step.run_id or (None if name is None else name.run_id)


def _run(folder: Path, named: Named, unread: Collection[str | None]) -> RunReport:
    name = RunName.of(real(folder))
    assert name is not None  # it was found by its name
    owner = owner_of(folder)
    files, state = [file for file in folder.iterdir() if file.is_file()], _state(folder)
    space = space_of(files, named, state in ("live", "unseen"), name.run_id not in unread)
    return RunReport(
        folder=folder,
        run_id=name.run_id,
        rank=name.rank,
        state=state,
        owner="" if owner is None else str(owner),
        file_bytes=space.total_bytes,
        **space._asdict(),
        unknown=tuple(sorted(each.name for each in folder.iterdir() if not (each.is_file() and is_made(each.name)))),
    )


def _paths(runs: Iterable[RunReport]) -> tuple[PathReport, ...]:
    """The runs' figures, path by path."""
    found: dict[Path, Space] = {}
    for run in runs:
        own = Space(*(getattr(run, field) for field in Space._fields))
        found[run.folder.parent] = found.get(run.folder.parent, Space()).plus(own)
    return tuple(PathReport(path, space.total_bytes, *space) for path, space in sorted(found.items()))


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
