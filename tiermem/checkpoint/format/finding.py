"""Finding: the durable steps of a place, the paths of their files, and the pieces of all parts as
arrays, checked.

This module opens manifests, parts, pointers and `latest`. It never opens the files of states;
opening/source.py does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import (
    LARGEST,
    MOST_BYTES,
    ManifestError,
    crc32c,
    no_collection,
)
from tiermem.checkpoint.format.manifest import (
    CHECKSUM_BYTES,
    LATEST_FILE,
    MASTER,
    POINTER_FILE,
    WEIGHT,
    Manifest,
    Parameter,
    Part,
    PartState,
    Piece,
    Pointer,
    parse_manifest,
    parse_part,
    parse_pointer,
)
from tiermem.swap.base.ranges import Numbers
from tiermem.swap.disk import durable

# ---- rows: pieces as arrays ----------------------------------------------------------------------

Key = tuple[str, str, str]
"""Parameter, state, kind."""


class Rows(NamedTuple):
    """Pieces as flat int64 arrays of one length, because a model has hundreds of thousands;
    manifest.Piece is one piece.

    Row i holds elements [start, start + numel) of the state `keys[key]`, in `num_bytes` bytes from
    `offset` of file `file`, an index into the files of a part, or of all parts one after another.
    """

    keys: Sequence[Key]
    key: Numbers
    start: Numbers
    numel: Numbers
    file: Numbers
    offset: Numbers
    num_bytes: Numbers

    def states(self) -> tuple[PartState, ...]:
        """The rows as a part lists them: keys in their order, each with its rows in the order of
        elements."""
        order = np.lexsort((self.start, self.key))
        table = np.stack((self.start, self.numel, self.file, self.offset), 1)[order].tolist()
        edges = [0, *np.cumsum(np.bincount(self.key, minlength=len(self.keys))).tolist()]
        found = zip(self.keys, itertools.pairwise(edges), strict=True)
        return tuple(
            PartState(*key, table[start:end]) for key, (start, end) in found if start < end
        )


def rows_of_part(part: Part) -> Rows:
    """The pieces of a part, in their order."""
    states = [each for each in part.states if each.pieces]
    keys = [(each.param, each.state, each.kind) for each in states]
    counts = [len(each.pieces) for each in states]
    pieces = itertools.chain.from_iterable([each.pieces for each in states])
    columns = np.fromiter(itertools.chain.from_iterable(pieces), np.int64).reshape(-1, 4).T
    return sized_rows(keys, np.repeat(np.arange(len(keys)), counts), *columns)


def sized_rows(
    keys: Sequence[Key],
    key: Numbers,
    start: Numbers,
    numel: Numbers,
    file: Numbers,
    offset: Numbers,
) -> Rows:
    """Rows with the bytes that their elements take."""
    grain_bytes, grain_numel = (each[key] for each in grains(keys))
    num_bytes = -(-numel // grain_numel) * grain_bytes
    return Rows(keys, key, start, numel, file, offset, num_bytes)


def joined_rows(several: Sequence[Rows]) -> Rows:
    """All rows of several Rows. A key may occur in more than one."""
    if len(several) == 1:
        return several[0]
    keys = dict.fromkeys(key for rows in several for key in rows.keys)
    numbers = dict(zip(keys, range(len(keys)), strict=True))
    tables = [
        np.stack((np.array([numbers[key] for key in rows.keys], np.int64)[rows.key], *rows[2:]))
        for rows in several
    ]
    return Rows(list(keys), *np.concatenate([np.zeros((6, 0), np.int64), *tables], 1))


def grains(keys: Sequence[Key]) -> tuple[Numbers, Numbers]:
    """The smallest unit of each key's kind, in bytes and in elements."""
    table = np.array([kinds.grain_of(kind) for _, _, kind in keys], np.int64)
    num_bytes, numel = table.reshape(-1, 2).T
    return num_bytes, numel


# ---- cover: the parts of a manifest hold every state once and whole ------------------------------


class StepStates:
    """The pieces of every state of all parts.

    A model may have a million states. The pieces are rows of one table, and one operation handles a
    column of it. An object is made for a piece when it is asked for.

    Attributes:
        numbers: of each (parameter, state).
        rows: by state, then in the order of elements. Files are numbered one part after another.
        number: of each row's state. firsts: the first row of each state.
        kinds, num_bytes: of each state. With mixed kinds, the first.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.files = [(part.rank, file) for part in parts for file in part.files]
        first_files = itertools.accumulate((len(part.files) for part in parts), initial=0)
        moved = [
            (rows_of_part(part), first) for part, first in zip(parts, first_files, strict=False)
        ]
        rows = joined_rows([each._replace(file=each.file + first) for each, first in moved])
        names = [key[:2] for key in rows.keys]
        self.numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        number = np.array([self.numbers[name] for name in names], np.int64)[rows.key]
        order = np.lexsort((rows.start, number))
        self._table = np.stack(rows[1:], 1)[order]
        self.rows = Rows(rows.keys, *self._table.T)
        self.number = number[order]
        self.firsts = np.flatnonzero(np.diff(self.number, prepend=-1))
        self._edges = [*self.firsts.tolist(), len(number)]
        self.kinds = [rows.keys[key][2] for key in self.rows.key[self.firsts].tolist()]
        sizes = self.rows.num_bytes
        if sizes.sum(dtype=float) > LARGEST:  # of a hostile part: int64 would wrap around
            sizes = sizes.astype(object)
        self.num_bytes: list[int] = (
            np.add.reduceat(sizes, self.firsts).tolist() if len(number) else []
        )

    def pieces(self, param: str, state: str) -> list[Piece]:
        """The pieces of a state in the order of elements. Raises KeyError for a state without
        pieces."""
        number = self.numbers[param, state]
        return [self.piece(row) for row in range(self._edges[number], self._edges[number + 1])]

    def piece(self, row: int) -> Piece:
        """One piece."""
        key, *rest = self._table[row].tolist()
        return Piece(*self.rows.keys[key], *rest)


def cover(manifest: Manifest, parts: Sequence[Part], source: str) -> StepStates:
    """Checks the pieces of all parts and returns them by state.

    Pieces of a state are compared in the order of their elements; pieces of a file are compared in
    the order of their bytes.

    Raises ManifestError: a part is of another commit, a piece names an unknown parameter, a state
    has a hole, an overlap or ends at another element than its parameter, a state mixes kinds, a
    weight is missing, the number of checksums is wrong.
    """
    _check_parts(manifest, parts, source)
    parameters = {each.name: each for each in manifest.parameters}
    states = StepStates(parts)
    for param, state in states.numbers:
        if param not in parameters:
            rank, _ = states.files[states.pieces(param, state)[0].file]
            raise ManifestError(f"{source}: part {rank}: {param[:80]!r} is none of the parameters")
    _check_files(states, source)
    _check_states(states, parameters, source)
    _check_due(manifest, states, parameters, source)
    return states


def _check_parts(manifest: Manifest, parts: Sequence[Part], source: str) -> None:
    for due, part in zip(manifest.parts, parts, strict=True):
        if (part.run_id, part.commit, part.rank) != (manifest.run_id, manifest.commit, due.rank):
            raise ManifestError(
                f"{source}: {due.file} is of run {part.run_id}, commit {part.commit}, rank "
                f"{part.rank}; the manifest is of run "
                f"{manifest.run_id}, commit {manifest.commit}, rank {due.rank}"
            )


def _check_files(states: StepStates, source: str) -> None:
    rows = states.rows
    order = np.lexsort((rows.offset, rows.file))
    file = rows.file[order]
    offset = rows.offset[order]
    stop = (rows.offset + rows.num_bytes)[order]
    overlaps = (file[1:] == file[:-1]) & (offset[1:] < stop[:-1])
    for row in order[1:][overlaps].tolist():
        piece = states.piece(row)
        rank, name = states.files[piece.file]
        raise ManifestError(
            f"{source}: part {rank}: {piece.state} of {piece.param[:80]!r} overlaps another piece "
            f"at byte {piece.offset} of {name}"
        )


def _check_states(states: StepStates, parameters: Mapping[str, Parameter], source: str) -> None:
    rows = states.rows
    firsts = states.firsts
    stops = rows.start + rows.numel
    due = np.append(0, stops)[: len(stops)]
    due[firsts] = 0
    is_mixed = rows.key != rows.key[firsts][states.number]
    lasts = np.append(firsts[1:], len(stops))[: len(firsts)] - 1
    numel_of = {name: each.numel for name, each in parameters.items()}
    numel = np.array([numel_of[param] for param, _ in states.numbers], np.int64)
    is_wrong = (rows.start != due) | is_mixed
    is_wrong[lasts[stops[lasts] != numel]] = True
    for row in np.flatnonzero(is_wrong).tolist():
        param, state, kind, start, _, file, _, _ = states.piece(row)
        what = f"{source}: {state} of {param[:80]!r}"
        first = int(firsts[states.number[row]])
        if start != due[row]:
            word = "is missing" if start > due[row] else "is there twice"
            raise ManifestError(
                f"{what}: element {min(due[row], start)} {word} (part {states.files[file][0]})"
            )
        if is_mixed[row]:
            raise ManifestError(f"{what}: mixes {states.piece(first).kind} and {kind}")
        raise ManifestError(
            f"{what}: its pieces hold {stops[row]} elements; the parameter has "
            f"{parameters[param].numel}"
        )


def _check_due(
    manifest: Manifest, states: StepStates, parameters: Mapping[str, Parameter], source: str
) -> None:
    for parameter in manifest.parameters:
        if (parameter.name, WEIGHT) not in states.numbers and parameter.numel:
            raise ManifestError(f"{source}: {parameter.name[:80]!r} has no weight")
    wrong_form = functools.cache(_wrong_form)  # a model has few forms of states
    forms = {name: (each.dtype, each.at_rest) for name, each in parameters.items()}
    checksums = manifest.checksums
    for (param, state), kind, num_bytes in zip(
        states.numbers, states.kinds, states.num_bytes, strict=True
    ):
        wrong = wrong_form(state, kind, *forms[param])
        due = -(-num_bytes // CHECKSUM_BYTES)
        sums = checksums[param].get(state) if param in checksums else None
        if (
            wrong is None
            and kind in kinds.SCALED
            and (param, kinds.scales_of(state)) not in states.numbers
        ):
            wrong = " is quantised and has no scales"
        if wrong is not None:
            raise ManifestError(f"{source}: {state} of {param[:80]!r}{wrong}")
        if sums is None or len(sums) != due:
            has = "no" if sums is None else len(sums)
            raise ManifestError(
                f"{source}: checksums: {state} of {param[:80]!r} has {has} checksums; {due} are "
                f"due for {num_bytes} bytes"
            )
    if sum(map(len, checksums.values())) > len(states.numbers):
        param, state = next(
            (p, s) for p, found in checksums.items() for s in found if (p, s) not in states.numbers
        )
        raise ManifestError(f"{source}: checksums: {param[:80]!r} has no {state[:80]!r}")


def _wrong_form(state: str, kind: str, dtype: str, at_rest: str | None) -> str | None:
    """What is wrong with a kind for a state of a parameter of this dtype and form at rest."""
    base = state.split(".")[0]
    allowed = (kinds.AT_REST[at_rest],) if at_rest else (dtype, kinds.PACKED)
    if base == WEIGHT and kinds.SCALES not in state and kind not in allowed:
        return f": is {kind}; the parameter is {at_rest or dtype}"
    is_split_of_other = kind == kinds.SPLIT and (base != MASTER or dtype != "bf16")
    if is_split_of_other or (kind in kinds.OF_SCALES) != (kinds.SCALES in state):
        return f": is {kind}, which no such state is"
    return None


# ---- the paths of a checkpoint's files -----------------------------------------------------------


def written(path: Path, base: Path) -> str:
    """A path as a file in `base` names it. Both may be relative to the working directory, or
    contain links.

    The result is relative where both lie in one folder, or in two folders beside each other, so
    that the folders can be moved together. Else it is absolute.
    """
    path = real(path)
    base = real(base)
    if path == base:
        return "."
    if path.parent == base:
        return path.name
    if path.parent == base.parent:
        return f"../{path.name}"
    if path.parent.parent == base.parent:
        return f"../{path.parent.name}/{path.name}"
    return str(path)


def named_folder(argument: str, folder: str | os.PathLike[str]) -> Path:
    """The folder that the user gave. Raises ValueError for what is no path, and for an empty one.

    pathlib would read an empty one as the working directory.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise ValueError(f"{argument} is {folder!r}; give the folder of checkpoints, a path")
    if not os.fspath(folder):
        raise ValueError(
            f"{argument} is empty; give the folder of checkpoints, '.' for the working directory"
        )
    return Path(folder)


def plain_tag(tag: str) -> str:
    """A tag without "./" and without a "/" at its end. Raises ValueError for a tag that does not
    name a folder below the checkpoint's."""
    if not is_tag(tag):
        raise ValueError(
            f"tag is {tag!r}; allowed are names of a folder below the checkpoint's, such as "
            "'global_step10'"
        )
    return str(Path(tag))


def pointer_path(save_dir: Path, tag: str) -> Path:
    """The pointer of a tag: the file that names the tag's manifest."""
    return save_dir / plain_tag(tag) / POINTER_FILE


def dir_of(folder: Path, tag: str) -> Path:
    """The folder of checkpoints that a tag's folder lies in; a tag may have several parts."""
    return folder.absolute().parents[len(Path(tag).parts) - 1]


def is_named(folder: Path, tag: str | None) -> bool:
    """Whether the path of a folder ends with a tag."""
    parts = Path(tag or "").parts
    return folder.absolute().parts[-len(parts) :] == parts


def copy_name(run_id: str, commit: int, rank: int | None, suffix: str) -> str:
    """The file name of a complete copy's manifest (rank None), part or data. Every run and commit
    has its own names."""
    if rank is None:
        return f"manifest-{run_id}-{commit}.{suffix}"
    return f"{'data' if suffix == 'bin' else 'part'}-{run_id}-{commit}-{rank}.{suffix}"


# ---- the durable steps of a place ----------------------------------------------------------------
#
# A save writes the manifest, then the tag's pointer, then `latest`. A crash between two of them
# leaves
#
#     a manifest that no pointer names    the tag has the step before, or none
#     a pointer newer than `latest`       of a new tag: `latest` names an older tag, which opens
#                                         of the tag that `latest` names: the newer step opens
#
# In both cases of the second line the pointer's number is that of `latest` plus 1, and so it is
# after a save with save_latest=False. What no crash leaves is an error: a pointer, manifest or
# folder of another tag or step; a pointer that is older than `latest` says; a `latest` that is
# older than two pointers written one after the other.

_MANIFEST = re.compile(r"manifest-(?:[^-]{1,64}-)?(\d{1,18})\.json")
MOST_POINTER_BYTES = 1 << 16  # of a pointer or `latest`: two names of 4096 characters and more


class Found(NamedTuple):
    """A place that should hold a durable step: a manifest, or a pointer to one."""

    file: Path
    tag: str | None = None  # the folder's name, if the folder is a tag's
    latest: Pointer | None = None  # the content of `latest`, if it names this tag

    def __str__(self) -> str:
        return f"tag {self.tag!r}" if self.tag is not None else str(self.file)


class Opened(NamedTuple):
    """A manifest that has been read and validated; its paths are relative to the folder of
    `file`."""

    file: Path
    manifest: Manifest
    place: Path  # the tag's folder, else the manifest
    parts: Sequence[tuple[Path, Part]] = ()  # with their folders, once they are read


class NothingSaved(FileNotFoundError):
    """The place holds no durable step."""


def find(where: Path, tag: str | None = None) -> list[Found]:
    """The durable steps of a place: the requested step first, then the others, newest first.

    where               first                                               then
    DIR (of tags)       `tag`, else the tag that DIR/latest names           the other tags
    DIR/TAG             its pointer, else its newest manifest (a copy's)    its other manifests
    a run folder        its newest commit                                   its other commits
    a file              that manifest or pointer                            -

    A tag that is found by its name must have that name: `read_manifest` compares. Beside a
    `latest`, this holds for DIR/TAG too; a folder that was moved elsewhere may have any name.

    The other steps are for callers that may fall back to them. This function reads `latest`,
    pointers and file names only. Manifests, pointers and `latest` must be regular files: a FIFO or
    a link in their place is an error when it is read. Folders may be links, and so may the file
    that the user names.

    Raises NothingSaved (a FileNotFoundError) when there is no step, or not that tag; the text lists
    the tags. Without `tag` raises ManifestError as `read_latest`.
    """
    tag = None if tag is None else plain_tag(tag)
    if where.is_file():
        return [Found(real(where))]
    if not where.is_dir():
        raise NothingSaved(2, "there is no such checkpoint", str(where))
    tags = tags_of(where)
    latest = read_latest(where) if tag is None else known_latest(where)
    first = tag if tag is not None else None if latest is None else latest.tag
    if first is not None:
        if not _is_of_tag(where / first):
            known = ", ".join(tags) or "none"
            what = f"there is no tag {tag!r} here; those there are: {known}"
            if tag is None:
                what = f"latest names {first!r}, which is not there; other tags: {known}"
            raise NothingSaved(2, _of_deepspeed(where / first) or what, str(where))
        names = [first, *(other for other in tags if other != first)]
        said = {} if latest is None else {latest.tag: latest}
        return [Found(_in_folder(where / name)[0].file, name, said.get(name)) for name in names]
    own = _in_folder(where)
    place = real(where)
    if own and not place.name.startswith("tiermem-") and durable.exists(place.parent / LATEST_FILE):
        named = find(place.parent, place.name)[0]
        return [named._replace(file=own[0].file), *own[1:]]
    if not own:
        others = f"; name one of its tags: {', '.join(tags)}" if tags else ""
        what = f"holds no file named {LATEST_FILE}, and no manifest{others}"
        raise NothingSaved(2, _of_deepspeed(where) or what, str(where))
    return own


OTHER_STAGES = (
    "of stages 1 and 2 DeepSpeed's own zero_to_fp32.py makes a pytorch_model.bin, and the weights of "
    "stage 0 are in mp_rank_00_model_states.pt: tiermem import reads both files"
)


def _of_deepspeed(folder: Path) -> str:
    """What to do with a tag that DeepSpeed saved; empty for another folder."""
    if not any(folder.glob("*_model_states.pt")):
        return ""
    return (
        f"{folder.name!r} was saved by DeepSpeed: engine.load_checkpoint opens ZeRO-3, and tiermem "
        f"import makes a checkpoint of it; {OTHER_STAGES}"
    )


def is_tag(tag: str) -> bool:
    """Whether a tag is a relative path of 1 to 255 characters that stays below its folder. A
    manifest holds it as UTF-8."""
    parts = Path(tag).parts
    return (
        0 < len(tag) <= 255
        and "\0" not in tag
        and tag == tag.encode(errors="ignore").decode()
        and bool(parts)
        and ".." not in parts
        and not Path(tag).is_absolute()
    )


def read_latest(where: Path) -> Pointer | None:
    """The content of `latest`, a copy of a tag's pointer; None: no such file. The text of version 1
    is a pointer's tag alone.

    Raises ManifestError if it is damaged, names no tag, or a save must have replaced it by a newer
    one; OSError.
    """
    file = where / LATEST_FILE
    if not durable.exists(file) or file.is_dir():
        return None
    data = _read(file, MOST_POINTER_BYTES)
    text = data.decode(errors="replace").strip()
    latest = (
        parse_pointer(data, str(file))
        if data.startswith(b"{")
        else Pointer("", 0, "", "", 0, 0, text)
    )
    if not is_tag(latest.tag):
        raise ManifestError(f"{file}: {latest.tag[:80]!r} is no tag")
    for _, each, _ in pointers_of(where):
        if each.number > latest.number + 1 and latest.series in ("", each.series):
            if _read(file, MOST_POINTER_BYTES) != data:  # a run saves meanwhile
                return read_latest(where)
            raise ManifestError(
                f"{file}: names {latest.tag!r} and is older than {each.tag!r} (step {each.step}): "
                "it was put in the place of a newer one. Open a tag by its name, or let tiermem "
                f"fsck --repair write {LATEST_FILE} anew"
            )
    return latest


def known_latest(where: Path) -> Pointer | None:
    """As `read_latest`; None where that raises an error."""
    with contextlib.suppress(ManifestError, OSError):
        return read_latest(where)
    return None


def pointers_of(where: Path) -> list[tuple[Path, Pointer, Path]]:
    """(pointer file, pointer, manifest path) of the tags below a folder, newest first. Skips
    invalid files. Raises OSError."""
    found = []
    for file in [where / tag / POINTER_FILE for tag in tags_of(where)]:
        with contextlib.suppress(ManifestError, OSError):
            found.append((file, *read_pointer(file)))
    return found


def real(path: Path) -> Path:
    """The absolute path without links. Links that form a circle are followed as far as they
    lead."""
    return Path(os.path.realpath(path))


def read_pointer(file: Path) -> tuple[Pointer, Path]:
    """A tag's pointer, and the path of its manifest, which may no longer exist. Raises
    ManifestError, OSError."""
    pointer = parse_pointer(_read(file), str(file))
    return pointer, file.parent / pointer.folder / pointer.file


@no_collection()
def read_manifest(found: Found) -> Opened:
    """The manifest of a place; a pointer is followed. Raises OSError, and ManifestError for a step
    of another tag or time."""
    if found.file.name != POINTER_FILE:
        manifest = parse_manifest(_read(found.file), str(found.file))
        _check_place(found, manifest, manifest.choices is None)
        return Opened(found.file, manifest, found.file if found.tag is None else found.file.parent)
    pointer, file = read_pointer(found.file)
    _check_place(found, pointer, not pointer.tag)
    try:
        data = _read_whole(file, pointer.num_bytes, pointer.crc32c, str(found.file))
    except FileNotFoundError:
        newer = newer_of(pointer, file)
        if newer is None:
            raise _lost(file, found.file) from None
        raise ManifestError(
            f"{found.file}: is of {_name(pointer)}; beside that lies {_name(newer)}{_OLDER}"
        ) from None
    manifest = parse_manifest(data, str(file))
    # version 1 says run and commit
    num_said = 4 if pointer.tag or manifest.choices is not None else 2
    if _identity(pointer)[:num_said] != _identity(manifest)[:num_said]:
        raise ManifestError(f"{found.file}: is of {_name(pointer)}; {file} is of {_name(manifest)}")
    return Opened(file, manifest, found.file.parent)


def _lost(file: Path, by: Path) -> FileNotFoundError:
    """The error for a file of a step that is not there, named by a pointer or a manifest."""
    place = real(file).parent
    now = "which is not there" if not file.parent.is_dir() else "which holds it no more"
    return FileNotFoundError(
        2,
        f"is missing: {by} only names it, and the step's bytes lay in {place}, {now}. Mount its "
        'disk or put the folder back. copy=True, "tiermem": {"copies": true} and tiermem export '
        "--whole make checkpoints that hold all of their bytes",
        str(file),
    )


def newer_of(pointer: Pointer, file: Path) -> Manifest | None:
    """A manifest of the pointer's tag beside `file`, which it names: of a later commit or another
    run. None: there is none."""
    for commit, other in sorted(_commits(file.parent), reverse=True):
        with contextlib.suppress(ManifestError, OSError):
            manifest = parse_manifest(_read(other), str(other))
            if manifest.tag == pointer.tag and (
                manifest.run_id != pointer.run_id or commit > pointer.commit
            ):
                return manifest
    return None


def _check_place(found: Found, step: Pointer | Manifest, is_version_1: bool) -> None:
    """Raises ManifestError for a step of another tag than its folder (not in version 1), or of
    another time than `latest`."""
    folder = found.file.parent
    latest = found.latest
    if (
        found.tag is not None
        and not is_version_1
        and step.tag != found.tag
        and not is_named(real(folder), step.tag)
    ):
        raise ManifestError(
            f"{found.file}: is of {_name(step)}, in the folder of tag {found.tag!r}: give files "
            "and folders their own names again, or open the other tag"
        )
    if latest is None or not latest.series or _identity(step)[:2] == _identity(latest)[:2]:
        return
    if not (
        isinstance(step, Pointer) and step.series == latest.series and step.number > latest.number
    ):
        raise ManifestError(
            f"{found.file}: is of {_name(step)}; {LATEST_FILE} is of {_name(latest)}{_OLDER}"
        )


def _identity(step: Pointer | Manifest) -> tuple[object, ...]:
    return step.run_id, step.commit, step.step, step.tag


def _name(step: Pointer | Manifest) -> str:
    return f"step {step.step} (tag {step.tag!r}, run {step.run_id}, commit {step.commit})"


_OLDER = ": an older file was put in the place of a newer one. Open another tag"


@no_collection()
def read_parts(opened: Opened) -> list[tuple[Path, Part]]:
    """Every rank's part, with the folder of the part. Raises ManifestError, OSError."""
    found = []
    for each in opened.manifest.parts:
        folder = opened.file.parent / each.folder
        try:
            data = _read_whole(folder / each.file, each.num_bytes, each.crc32c, str(opened.file))
        except FileNotFoundError:
            raise _lost(folder / each.file, opened.file) from None
        found.append((folder, parse_part(data, str(folder / each.file))))
    return found


def tags_of(where: Path) -> list[str]:
    """The names of tags below a folder, newest first; of several parts, at most four, those whose
    pointer says so. Raises OSError.

    Times decide, but between tags of one series their numbers: a clock may have been set back.
    """
    folders = {each.name: each for each in where.iterdir() if _is_of_tag(each)}
    for folder in _folders_in(where, _MOST_PARTS):
        with contextlib.suppress(ManifestError, OSError):
            tag = str(folder.relative_to(where))
            if folder.parent != where and read_pointer(folder / POINTER_FILE)[0].tag == tag:
                folders[tag] = folder
    counted = []
    for tag, folder in folders.items():
        number, series = 0, ""
        with contextlib.suppress(ManifestError, OSError):
            pointer, _ = read_pointer(folder / POINTER_FILE)
            number, series = pointer.number, pointer.series
        counted.append((number, _age(folder), tag, series))
    newest = dict[str, int]()  # of each series, the age so far
    found = []
    for number, age, tag, series in sorted(counted):
        newest[series] = max(age, newest.get(series, 0))
        found.append((newest[series] if series else age, number, age, tag))
    return [tag for *_, tag in sorted(found, reverse=True)]


_MOST_PARTS = 4


def _folders_in(folder: Path, depth: int) -> Iterator[Path]:
    """A folder's folders and theirs, so deep: without links, hidden ones and those of runs."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for each in entries:
            if not each.name.startswith((".", "tiermem-")) and each.is_dir(follow_symlinks=False):
                yield Path(each.path)
                if depth > 1:
                    yield from _folders_in(Path(each.path), depth - 1)


def _is_of_tag(folder: Path) -> bool:
    with contextlib.suppress(PermissionError):  # lost+found, or another user's
        has_pointer = durable.exists(folder / POINTER_FILE)
        return has_pointer or (not folder.name.startswith("tiermem-") and bool(_commits(folder)))
    return False


def _age(folder: Path) -> int:
    """When a tag was written: the newest modification time of its pointer, else of its manifests,
    in ns."""
    return max((found.file.lstat().st_mtime_ns for found in _in_folder(folder)), default=0)


def _in_folder(folder: Path) -> list[Found]:
    """A folder's pointer, or its manifests, newest first."""
    if durable.exists(folder / POINTER_FILE):
        return [Found(folder / POINTER_FILE)]
    return [Found(file) for _, file in sorted(_commits(folder), reverse=True)]


def _commits(folder: Path) -> list[tuple[int, Path]]:
    files = list(folder.iterdir()) if folder.is_dir() else []
    return [
        (int(match[1]), file)
        for file in files
        if (match := _MANIFEST.fullmatch(file.name)) is not None
    ]


def _read_whole(file: Path, num_bytes: int, crc: int, source: str) -> bytes:
    """The bytes of a file whose size and checksum another file records. Raises ManifestError when
    they differ."""
    data = _read(file)
    if len(data) != num_bytes:
        raise ManifestError(
            f"{file}: has {len(data)} bytes; {source} says {num_bytes}: it was cut, or is another's"
        )
    if crc32c(data) != crc:
        raise ManifestError(
            f"{file}: its CRC-32C is not the one that {source} says: it is damaged, or another's"
        )
    return data


def _read(file: Path, most_bytes: int = MOST_BYTES) -> bytes:
    data = durable.read_file(file, most_bytes)
    if len(data) > most_bytes:
        raise ManifestError(f"{file}: has more than {most_bytes} bytes, which no such file has")
    return data
