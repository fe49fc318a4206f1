"""Manifest: the files that say what a durable step consists of. This page is the format's specification, version 1.

    <dir>/latest                       text: the newest tag
    <dir>/<tag>/tiermem.json           pointer: the folder and the file of the tag's manifest
    <folder>/manifest-<commit>.json    what all ranks together saved: parameters, scalars, checksums, the parts
    <folder>/part-<commit>-<rank>.json what one rank saved: pieces of states, and in which bytes of which file they lie
    <folder>/segment.bin               states that rest on NVMe lie where they rest; the store's own file is the checkpoint
    <folder>/data-<commit>.bin         states that rest in memory, written when they were saved
    <dir>/<tag>/data-<run id>-<commit>-<rank>.bin    a complete copy: all states of a rank; its parts and manifest lie beside
                                       it, with such names, so that a tag that is saved again is replaced by its pointer

<folder> is rank 0's (manifest) or each rank's own run folder, `<path>/tiermem-<run id>[.<rank>]`. A path in a file is
absolute, or relative to the folder of the file that names it. Commits of a run are numbered upwards. A file is written to a
temporary name, synced and renamed, the parts before the manifest and the manifest before the pointer: what is there is whole.

Each file is one JSON object (UTF-8, no NaN, no key twice) on one line; its last field, "crc32c", is the CRC-32C of all bytes
before `,"crc32c"`, in 8 hexadecimal digits. Sizes are bytes, offsets are bytes, starts and numels are elements.

pointer   format "tiermem" · version 1 · run_id · commit · folder · file · bytes and crc32c_of (those of the manifest)
manifest  format, version, run_id, commit · tag (null: a step that was made durable without one) · step (optimizer steps) ·
          world, num_shards (ranks; ranks that share one copy of a parameter) · parts [{rank, folder, file, bytes, crc32c}],
          one per rank, in order · optimizer, scheduler, loss_scaler, engine, client_state, config (values, see fields.py) ·
          parameters [{name, aliases, role, shape, dtype, trainable, num_steps, group}] · excluded (frozen parameters left
          out when asked to) · checksums {parameter: {state: [CRC-32C of each MiB]}}
part      format, version, run_id, commit · rank · rng, data (values) · files [path] ·
          states [{param, state, kind, pieces [[start, numel, file, offset]]}], each (param, state) once

role      "parameter": of the sharded model; "buffer": of the model; "ordinary": stepped by the optimizer, not sharded
group     which of the optimizer's parameter groups; null: of none. num_steps: optimizer steps that its states have seen
state     "weight" (a buffer's too) · "master": the fp32 value, where the weight is not it · moments under torch's names
          ("exp_avg", ...) · "<state>.scales" beside states in 8 bits · "<state>.rank<r>": of a buffer or an ordinary
          parameter that is not the same on rank r as on rank 0
kind      how a piece's elements are stored, see fields.py; one kind for all pieces of a (parameter, state)
piece     elements start to start + numel of the whole parameter, row-major, from byte `offset` on in one of the files, which
          are counted from 0. The pieces of a (parameter, state), over all parts, cover it exactly once, if there are any;
          those of one file do not overlap. Pieces may have any size, and a state without pieces is the one before the first
          step: zero, and a master is the weight
checksums of each 1 MiB of a state's bytes, put in the order of its elements as if it lay in one piece: they do not depend
          on tiles, ranks or files. The last one is of what is left. With 8-bit states codes and scales have their own

What is opened is validated as a whole, here and in finding.py, before a byte of a state is read: an error is a ManifestError
that names the file and the field. Nothing in a file is executed, and no more memory is taken than its size asks for. What is
written is read by the same functions before it is published (`dump`): what opening refuses is not saved.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import LARGEST, Fields, Json, ManifestError, check, seal, text, unseal

__all__ = [
    "CHECKSUM_BYTES",
    "POINTER_FILE",
    "Manifest",
    "ManifestError",
    "Parameter",
    "Part",
    "PartFile",
    "PartState",
    "Piece",
    "Pointer",
    "parse_manifest",
    "parse_part",
    "parse_pointer",
    "states_of",
]

FORMAT, VERSION = "tiermem", 1
CHECKSUM_BYTES = 1 << 20
POINTER_FILE, LATEST_FILE = "tiermem.json", "latest"
WEIGHT, MASTER = "weight", "master"
_ROLES = frozenset({"parameter", "buffer", "ordinary"})
_MOST_DIMENSIONS = 64
_MOST_RANKS = 1 << 24
_MOST_CRC = (1 << 32) - 1


class Piece(NamedTuple):
    """Elements of one state of one parameter, in one range of a file. `kind` is one of kinds.KINDS."""

    param: str
    state: str
    kind: str
    start: int
    numel: int
    file: int  # index in the part's files
    offset: int
    num_bytes: int


class PartState(NamedTuple):
    """What a part has of one state of one parameter; a piece is (start, numel, file, offset), as in Piece."""

    param: str
    state: str
    kind: str
    pieces: list[Sequence[int]]


def states_of(pieces: Iterable[Piece]) -> tuple[PartState, ...]:
    """Pieces as a part has them. Raises ValueError for two kinds of one state, which no part holds."""
    found: dict[tuple[str, str], PartState] = {}
    for each in pieces:
        state = found.setdefault((each.param, each.state), PartState(each.param, each.state, each.kind, []))
        if state.kind != each.kind:
            raise ValueError(f"{each.state} of {each.param} is {state.kind} and {each.kind}")
        state.pieces.append((each.start, each.numel, each.file, each.offset))
    return tuple(found.values())


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank saved."""

    run_id: str
    commit: int
    rank: int
    rng: Json
    data: Json
    files: tuple[str, ...]
    states: tuple[PartState, ...]

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, one by one."""
        return tuple(
            Piece(param, state, kind, start, numel, file, offset, kinds.bytes_of(kind, numel))
            for param, state, kind, pieces in self.states
            for start, numel, file, offset in pieces
        )

    def dump(self) -> bytes:
        """The file's bytes. Raises ManifestError for what `parse_part` refuses."""
        return _readable(
            {
                **_head(self.run_id, self.commit),
                "rank": self.rank,
                "rng": self.rng,
                "data": self.data,
                "files": self.files,
                "states": [each._asdict() for each in self.states],
            },
            parse_part,
            f"the part of rank {self.rank}",
        )


@dataclasses.dataclass(frozen=True)
class PartFile:
    """Where the part of a rank is, and what it must be."""

    rank: int
    folder: str
    file: str
    num_bytes: int
    crc32c: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One tensor of the model or the optimizer, whole."""

    name: str
    aliases: tuple[str, ...]
    role: str
    shape: tuple[int, ...]
    dtype: str  # one of kinds.DTYPES
    is_trainable: bool
    num_steps: int
    group: int | None

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What all ranks together saved."""

    run_id: str
    commit: int
    tag: str | None
    step: int
    world: int
    num_shards: int
    parts: tuple[PartFile, ...]
    optimizer: Json
    scheduler: Json
    loss_scaler: Json
    engine: Json
    client_state: Json
    config: Json
    parameters: tuple[Parameter, ...]
    excluded: tuple[str, ...]
    checksums: Mapping[str, Mapping[str, tuple[int, ...]]]

    def dump(self) -> bytes:
        """The file's bytes. Raises ManifestError for what `parse_manifest` refuses."""
        shown = {name: getattr(self, name) for name in ("tag", "step", "world", "num_shards")}
        parts = [
            {"rank": p.rank, "folder": p.folder, "file": p.file, "bytes": p.num_bytes, "crc32c": f"{p.crc32c:08x}"}
            for p in self.parts
        ]
        return _readable(
            {
                **_head(self.run_id, self.commit),
                **shown,
                "parts": parts,
                **{name: getattr(self, name) for name in _VALUES},
                "parameters": [_written(each) for each in self.parameters],
                "excluded": self.excluded,
                "checksums": {name: dict(states) for name, states in self.checksums.items()},
            },
            parse_manifest,
            "the manifest",
        )


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Where the manifest of a tag is."""

    run_id: str
    commit: int
    folder: str
    file: str
    num_bytes: int
    crc32c: int

    def dump(self) -> bytes:
        """The file's bytes. Raises ManifestError for what `parse_pointer` refuses."""
        place = {"folder": self.folder, "file": self.file, "bytes": self.num_bytes, "crc32c_of": f"{self.crc32c:08x}"}
        return _readable({**_head(self.run_id, self.commit), **place}, parse_pointer, "the pointer")


def manifest_name(commit: int) -> str:
    """The file name of a commit's manifest."""
    return f"manifest-{commit}.json"


def part_name(commit: int, rank: int) -> str:
    """The file name of a rank's part of a commit."""
    return f"part-{commit}-{rank}.json"


def data_name(commit: int) -> str:
    """The file name of what rested in a rank's memory at a commit."""
    return f"data-{commit}.bin"


def parse_pointer(data: bytes, source: str) -> Pointer:
    """A pointer from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    fields = _opened(data, source)
    run_id, commit = fields.text("run_id", 64), fields.integer("commit")
    found = Pointer(
        run_id, commit, fields.text("folder"), fields.text("file", 255), *_size_and_crc(fields, "crc32c_of")
    )
    fields.done()
    return found


def parse_part(data: bytes, source: str) -> Part:
    """A part from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    fields = _opened(data, source)
    run_id, commit = fields.text("run_id", 64), fields.integer("commit")
    rank, files = fields.integer("rank", _MOST_RANKS), fields.texts("files")
    values = {name: check(fields.any(name), f"{source}: {name}") for name in ("rng", "data")}
    states = tuple(_part_state(value, where, len(files)) for where, value in fields.items("states"))
    fields.done()
    seen: set[tuple[str, str]] = set()
    for each in states:
        if (each.param, each.state) in seen:
            raise ManifestError(f"{source}: states: {each.state} of {each.param[:80]!r} is listed twice")
        seen.add((each.param, each.state))
    return Part(run_id, commit, rank, values["rng"], values["data"], files, states)


def parse_manifest(data: bytes, source: str) -> Manifest:
    """A manifest from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    fields = _opened(data, source)
    run_id, commit = fields.text("run_id", 64), fields.integer("commit")
    tag = fields.any("tag")
    if tag is not None and not (isinstance(tag, str) and 0 < len(tag) <= 255):
        fields.refuse("tag", tag, "a string of 1 to 255 characters, or null")
    step, world = fields.integer("step"), fields.integer("world", _MOST_RANKS, 1)
    num_shards = fields.integer("num_shards", world, 1)
    if world % num_shards:
        fields.refuse("num_shards", num_shards, f"a divisor of world={world}")
    parts = _part_files(fields, source, world)
    values = {name: check(fields.any(name), f"{source}: {name}") for name in _VALUES}
    parameters, excluded = _parameters(fields, source)
    checksums = _checksums(fields.any("checksums"), {p.name for p in parameters}, source)
    fields.done()
    return Manifest(
        run_id=run_id,
        commit=commit,
        tag=tag,
        step=step,
        world=world,
        num_shards=num_shards,
        parts=parts,
        parameters=parameters,
        excluded=excluded,
        checksums=checksums,
        **values,
    )


def check_parameters(parameters: Iterable[Parameter], excluded: Sequence[str]) -> None:
    """Raises ManifestError for parameters that `parse_manifest` refuses: before anything is written."""
    content = {"parameters": [_written(each) for each in parameters], "excluded": excluded}
    _parameters(Fields(text(json.dumps(content).encode(), _NOT_SAVED), _NOT_SAVED), _NOT_SAVED)


_NOT_SAVED = "this cannot be saved, because it would not open again"
_VALUES = ("optimizer", "scheduler", "loss_scaler", "engine", "client_state", "config")


def _head(run_id: str, commit: int) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "run_id": run_id, "commit": commit}


def _written(parameter: Parameter) -> dict[str, Any]:
    shown = dict(vars(parameter))
    shown["trainable"] = shown.pop("is_trainable")
    return shown


def _readable(content: Mapping[str, Any], parse: Callable[[bytes, str], object], what: str) -> bytes:
    """A sealed file that its reader takes."""
    data = seal(content)
    parse(data, f"{_NOT_SAVED}: {what}")
    return data


def _opened(data: bytes, source: str) -> Fields:
    """The fields behind `format` and `version`."""
    fields = Fields(unseal(data, source), source)
    if (found := fields.any("format")) != FORMAT:
        fields.refuse("format", found, f'"{FORMAT}"')
    version = fields.integer("version", least=1)
    if version > VERSION:
        raise ManifestError(
            f"{source}: is of version {version} of the format; this tiermem reads version {VERSION}: open it with a newer one"
        )
    return fields


def _size_and_crc(fields: Fields, name: str) -> tuple[int, int]:
    return fields.integer("bytes"), fields.digest(name)


def _part_files(fields: Fields, source: str, world: int) -> tuple[PartFile, ...]:
    found: list[PartFile] = []
    for where, value in fields.items("parts"):
        each = Fields(value, where)
        rank = each.integer("rank", _MOST_RANKS)
        found.append(PartFile(rank, each.text("folder"), each.text("file", 255), *_size_and_crc(each, "crc32c")))
        each.done()
    if len(found) != world or any(part.rank != rank for rank, part in enumerate(found)):
        raise ManifestError(
            f"{source}: parts: {len(found)} are listed; one for each of world={world} ranks is due, in order"
        )
    places = {(part.folder, part.file) for part in found}
    if len(places) != len(found):
        raise ManifestError(f"{source}: parts: a path is listed twice")
    return tuple(found)


def _parameters(fields: Fields, source: str) -> tuple[tuple[Parameter, ...], tuple[str, ...]]:
    """What is saved, and what was left out; no name twice."""
    parameters = tuple(_parameter(value, where) for where, value in fields.items("parameters"))
    excluded = fields.texts("excluded")
    seen: set[str] = set()
    for name in (name for p in parameters for name in (p.name, *p.aliases)):
        if name in seen:
            raise ManifestError(f"{source}: parameters: {name!r} is listed twice")
        seen.add(name)
    both = sorted(seen.intersection(excluded))
    if both:
        raise ManifestError(f"{source}: excluded: {both[0]!r} is among the parameters as well")
    return parameters, excluded


def _parameter(value: Any, where: str) -> Parameter:
    fields = Fields(value, where)
    shape, group = fields.integers("shape"), fields.any("group")
    if len(shape) > _MOST_DIMENSIONS or math.prod(max(n, 1) for n in shape) > LARGEST:
        fields.refuse("shape", list(shape), f"at most {_MOST_DIMENSIONS} dimensions and {LARGEST} elements")
    if group is not None and not (type(group) is int and 0 <= group <= LARGEST):
        fields.refuse("group", group, "the number of a parameter group, or null")
    found = Parameter(
        fields.text("name", least=1),
        fields.texts("aliases"),
        fields.text("role", allowed=_ROLES),
        shape,
        fields.text("dtype", allowed=kinds.DTYPES),
        fields.flag("trainable"),
        fields.integer("num_steps"),
        group,
    )
    fields.done()
    return found


def _checksums(value: Any, names: set[str], source: str) -> dict[str, dict[str, tuple[int, ...]]]:
    fields = Fields(value, f"{source}: checksums")
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in fields.names():
        if name not in names:
            raise ManifestError(f"{source}: checksums: {name[:80]!r} is none of the parameters")
        states = Fields(fields.any(name), f"{source}: checksums of {name[:80]!r}")
        found[name] = {state: states.integers(state, _MOST_CRC) for state in states.names()}
    return found


def _part_state(value: Any, where: str, num_files: int) -> PartState:
    fields = Fields(value, where)
    param, state = fields.text("param"), fields.text("state", 255)
    kind = fields.text("kind", allowed=kinds.KINDS)
    pieces: list[Sequence[int]] = [_piece(value, place, kind, num_files) for place, value in fields.items("pieces")]
    fields.done()
    return PartState(param, state, kind, pieces)


def _piece(value: Any, where: str, kind: str, num_files: int) -> tuple[int, int, int, int]:
    if not (isinstance(value, list) and len(value) == 4 and all(type(n) is int and 0 <= n <= LARGEST for n in value)):
        raise ManifestError(f"{where}: four whole numbers of 0 to {LARGEST} are due: start, numel, file, offset")
    start, numel, file, offset = value
    if not numel:
        raise ManifestError(f"{where}: holds no element")
    if file >= num_files:
        raise ManifestError(f"{where}: file is {file}; the number of one of {num_files} files is due")
    if start + numel > LARGEST or offset + kinds.bytes_of(kind, numel) > LARGEST:
        raise ManifestError(f"{where}: ends beyond {LARGEST}")
    return start, numel, file, offset
