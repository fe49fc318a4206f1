"""Manifest: the files that describe a durable step. This docstring specifies the format, version 1.

    <dir>/latest                       text: the newest tag
    <dir>/<tag>/tiermem.json           pointer: the folder and the file of the tag's manifest
    <folder>/manifest-<commit>.json    what all ranks saved: parameters, scalars, checksums, the list of parts
    <folder>/part-<commit>-<rank>.json what one rank saved: pieces of states, and their file and byte ranges
    <folder>/segment.bin               the store's own file: states that rest on NVMe are not copied
    <folder>/data-<commit>.bin         states that rest in host memory, written when the step is saved
    <dir>/<tag>/data-<run id>-<commit>-<rank>.bin    a complete copy: all states of a rank; its part and manifest lie beside
                                       it under similar names, so a tag that is saved again changes only with its pointer

<folder> is a run folder, `<path>/tiermem-<run id>[.<rank>]`: rank 0's for the manifest, each rank's own for the rest. A path in
a file is absolute, or relative to the folder of the file that names it. Commit numbers of a run increase. Every file is
written under a temporary name, synced and renamed. The order is parts, manifest, pointer: a file that exists is whole.

Each file is one JSON object (UTF-8, no NaN, no key twice) on one line. Its last field, "crc32c", is the CRC-32C of all bytes
before `,"crc32c"`, in 8 hexadecimal digits. Sizes and offsets are in bytes; starts and numels are in elements.

pointer   format "tiermem" · version 1 · run_id · commit · folder · file · bytes and crc32c_of (of the manifest file)
manifest  format, version, run_id, commit · tag (null: a durable step without a tag) · step (number of optimizer steps) ·
          world (ranks) · num_shards (ranks that share one copy of a parameter) · parts [{rank, folder, file, bytes, crc32c}],
          one per rank, in order · optimizer, scheduler, loss_scaler, engine, client_state, config (values, see fields.py) ·
          parameters [{name, aliases, role, shape, dtype, trainable, num_steps, group}] · excluded (frozen parameters that
          the caller left out) · checksums {parameter: {state: [CRC-32C of each MiB]}}
part      format, version, run_id, commit · rank · rng, data (values) · files [path] ·
          states [{param, state, kind, pieces [[start, numel, file, offset]]}], each (param, state) once

role      "parameter": of the sharded model; "buffer": of the model; "ordinary": stepped by the optimizer, not sharded
group     index of the optimizer's parameter group; null: in no group. num_steps: optimizer steps that the states have seen
state     "weight" (also of a buffer) · "master": the fp32 value, if it is kept beside the weight · moments under torch's
          names ("exp_avg", ...) · "<state>.scales" for a quantised state · "<state>.rank<r>" for a buffer or an ordinary
          parameter whose value on rank r differs from rank 0's
kind      how a piece's elements are stored, see kinds.py; all pieces of a (parameter, state) have one kind
piece     elements [start, start + numel) of the whole parameter, row-major, from byte `offset` of a file; `file` is an index
          into the part's files, from 0. The pieces of a (parameter, state), over all parts, cover it exactly once. Pieces of
          one file do not overlap. Pieces may have any size. A state without pieces has its value from before the first step:
          a moment is zero, and a master equals the weight
checksums of each 1 MiB of a state's bytes, in the order of its elements as if they lay in one piece. They do not depend on
          tiles, ranks or files. The last checksum covers the remaining bytes. Codes and scales have separate checksums

This module and finding.py validate all files before any byte of a state is read. An error is a ManifestError that names the
file and the field. Nothing in a file is executed, and memory use is bounded by the file's size. `dump` reads back what it
has written with the same functions: a checkpoint that opening would refuse is not saved.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import (
    DIGEST,
    FLAG,
    LARGEST,
    NAMES,
    PLAIN,
    Fields,
    Json,
    ManifestError,
    Rule,
    are_whole,
    one_of,
    read,
    records,
    rule,
    seal,
    string,
    text,
    unseal,
    whole,
    wholes,
    write,
)

FORMAT, VERSION = "tiermem", 1
CHECKSUM_BYTES = 1 << 20
POINTER_FILE, LATEST_FILE = "tiermem.json", "latest"
WEIGHT, MASTER = "weight", "master"
_MOST_DIMENSIONS = 64
_MOST_RANKS = 1 << 24
_MOST_CRC = (1 << 32) - 1


# ---- rules of fields -------------------------------------------------------------------------------------------------


def _read_shape(fields: Fields, name: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = wholes().read(fields, name)
    if len(shape) > _MOST_DIMENSIONS or math.prod(max(n, 1) for n in shape) > LARGEST:
        fields.refuse(name, list(shape), f"at most {_MOST_DIMENSIONS} dimensions and {LARGEST} elements")
    return shape


def _read_pieces(fields: Fields, name: str) -> list[Sequence[int]]:
    found: list[Sequence[int]] = []
    for where, value in fields.items(name):
        if not are_whole(value) or len(value) != 4:
            raise ManifestError(f"{where}: four whole numbers of 0 to {LARGEST} are due: start, numel, file, offset")
        found.append(tuple(value))
    return found


def _read_checksums(fields: Fields, name: str) -> dict[str, dict[str, tuple[int, ...]]]:
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    params = Fields(fields.any(name), f"{fields.where}: {name}")
    for param in params.names():
        states = Fields(params.any(param), f"{params.where} of {param[:80]!r}")
        found[param] = {state: wholes(_MOST_CRC).read(states, state) for state in states.names()}
    return found


_RUN_ID = string(64)
_TAG = rule(
    lambda tag: tag is None or (isinstance(tag, str) and 0 < len(tag) <= 255),
    "a string of 1 to 255 characters, or null",
)
_GROUP = rule(
    lambda group: group is None or (type(group) is int and 0 <= group <= LARGEST),
    "the number of a parameter group, or null",
)
_CHECKSUMS = Rule(_read_checksums, lambda found: {name: dict(states) for name, states in found.items()})


# ---- records ---------------------------------------------------------------------------------------------------------
#
# Each attribute is annotated with its rule, and with its name in the file where that differs.


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
    """The pieces of one state of one parameter in a part. A piece is (start, numel, file, offset), as in Piece."""

    param: Annotated[str, string()]
    state: Annotated[str, string(255)]
    kind: Annotated[str, one_of(kinds.KINDS)]
    pieces: Annotated[list[Sequence[int]], Rule(_read_pieces)]


@dataclasses.dataclass(frozen=True)
class Part:
    """One rank's part of a durable step: the pieces of states in its files, and its generators and loader state."""

    run_id: Annotated[str, _RUN_ID]
    commit: Annotated[int, whole()]
    rank: Annotated[int, whole(_MOST_RANKS)]
    rng: Annotated[Json, PLAIN]
    data: Annotated[Json, PLAIN]
    files: Annotated[tuple[str, ...], NAMES]
    states: Annotated[tuple[PartState, ...], records(PartState)]

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
        return _sealed(self, parse_part, f"the part of rank {self.rank}")


@dataclasses.dataclass(frozen=True)
class PartFile:
    """The file of a rank's part: its folder, name, size and CRC-32C."""

    rank: Annotated[int, whole(_MOST_RANKS)]
    folder: Annotated[str, string()]
    file: Annotated[str, string(255)]
    num_bytes: Annotated[int, whole(), "bytes"]
    crc32c: Annotated[int, DIGEST]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One tensor of the model or the optimizer, whole."""

    name: Annotated[str, string()]
    aliases: Annotated[tuple[str, ...], NAMES]
    role: Annotated[str, one_of(("parameter", "buffer", "ordinary"))]
    shape: Annotated[tuple[int, ...], Rule(_read_shape)]
    dtype: Annotated[str, one_of(kinds.DTYPES)]
    is_trainable: Annotated[bool, FLAG, "trainable"]
    num_steps: Annotated[int, whole()]
    group: Annotated[int | None, _GROUP]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A durable step of all ranks. The fields are described in the module's docstring."""

    run_id: Annotated[str, _RUN_ID]
    commit: Annotated[int, whole()]
    tag: Annotated[str | None, _TAG]
    step: Annotated[int, whole()]
    world: Annotated[int, whole(_MOST_RANKS, 1)]
    num_shards: Annotated[int, whole(_MOST_RANKS, 1)]
    parts: Annotated[tuple[PartFile, ...], records(PartFile)]
    optimizer: Annotated[Json, PLAIN]
    scheduler: Annotated[Json, PLAIN]
    loss_scaler: Annotated[Json, PLAIN]
    engine: Annotated[Json, PLAIN]
    client_state: Annotated[Json, PLAIN]
    config: Annotated[Json, PLAIN]
    parameters: Annotated[tuple[Parameter, ...], records(Parameter)]
    excluded: Annotated[tuple[str, ...], NAMES]
    checksums: Annotated[Mapping[str, Mapping[str, tuple[int, ...]]], _CHECKSUMS]

    def dump(self) -> bytes:
        """The file's bytes. Raises ManifestError for what `parse_manifest` refuses."""
        return _sealed(self, parse_manifest, "the manifest")


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The manifest file of a tag: its folder, name, size and CRC-32C, its run and commit."""

    run_id: Annotated[str, _RUN_ID]
    commit: Annotated[int, whole()]
    folder: Annotated[str, string()]
    file: Annotated[str, string(255)]
    num_bytes: Annotated[int, whole(), "bytes"]
    crc32c: Annotated[int, DIGEST, "crc32c_of"]

    def dump(self) -> bytes:
        """The file's bytes. Raises ManifestError for what `parse_pointer` refuses."""
        return _sealed(self, parse_pointer, "the pointer")


def manifest_name(commit: int) -> str:
    """The file name of a commit's manifest."""
    return f"manifest-{commit}.json"


def part_name(commit: int, rank: int) -> str:
    """The file name of a rank's part of a commit."""
    return f"part-{commit}-{rank}.json"


def data_name(commit: int) -> str:
    """The file name of the states that rest in a rank's host memory at a commit."""
    return f"data-{commit}.bin"


# ---- reading files ---------------------------------------------------------------------------------------------------


def parse_pointer(data: bytes, source: str) -> Pointer:
    """A pointer from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    return _opened(Pointer, data, source)


def parse_part(data: bytes, source: str) -> Part:
    """A part from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    part = _opened(Part, data, source)
    seen: set[tuple[str, str]] = set()
    for number, each in enumerate(part.states):
        if (each.param, each.state) in seen:
            raise ManifestError(f"{source}: states: {each.state} of {each.param[:80]!r} is listed twice")
        seen.add((each.param, each.state))
        for place, piece in enumerate(each.pieces):
            if (wrong := _wrong_with(piece, each.kind, len(part.files))) is not None:
                raise ManifestError(f"{source}: states[{number}]: pieces[{place}]: {wrong}")
    return part


def parse_manifest(data: bytes, source: str) -> Manifest:
    """A manifest from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    found = _opened(Manifest, data, source)
    if found.world % found.num_shards:
        raise ManifestError(f"{source}: num_shards is {found.num_shards}; a divisor of world={found.world} is due")
    if [part.rank for part in found.parts] != list(range(found.world)):
        raise ManifestError(
            f"{source}: parts: {len(found.parts)} are listed; one for each of world={found.world} ranks is due, in order"
        )
    if len({(part.folder, part.file) for part in found.parts}) != len(found.parts):
        raise ManifestError(f"{source}: parts: a path is listed twice")
    names = _check_names(found.parameters, found.excluded, source)
    for name in found.checksums:
        if name not in names:
            raise ManifestError(f"{source}: checksums: {name[:80]!r} is none of the parameters")
    return found


def check_parameters(parameters: Iterable[Parameter], excluded: Sequence[str]) -> None:
    """Raises ManifestError for parameters that `parse_manifest` would refuse. Call it before anything is written."""
    content = {"parameters": [write(each) for each in parameters], "excluded": excluded}
    fields = Fields(text(json.dumps(content).encode(), _NOT_SAVED), _NOT_SAVED)
    _check_names(records(Parameter).read(fields, "parameters"), fields.texts("excluded"), _NOT_SAVED)


_NOT_SAVED = "this cannot be saved, because it would not open again"
_Record = TypeVar("_Record", Pointer, Part, Manifest)


def _sealed(record: _Record, parse: Callable[[bytes, str], _Record], what: str) -> bytes:
    """The bytes of a file, checked by its own parser. Raises ManifestError."""
    data = seal({"format": FORMAT, "version": VERSION, **write(record)})
    parse(data, f"{_NOT_SAVED}: {what}")
    return data


def _opened(kind: type[_Record], data: bytes, source: str) -> _Record:
    fields = Fields(unseal(data, source), source)
    if (found := fields.any("format")) != FORMAT:
        fields.refuse("format", found, f'"{FORMAT}"')
    version = whole(least=1).read(fields, "version")
    if version > VERSION:
        raise ManifestError(
            f"{source}: is of version {version} of the format; this tiermem reads version {VERSION}: open it with a newer one"
        )
    return read(kind, fields)


def _check_names(parameters: Iterable[Parameter], excluded: Sequence[str], source: str) -> set[str]:
    """The names of the parameters. Raises ManifestError for a name that occurs twice."""
    names, seen = set[str](), set[str]()
    for each in parameters:
        names.add(each.name)
        for name in (each.name, *each.aliases):
            if name in seen:
                raise ManifestError(f"{source}: parameters: {name!r} is listed twice")
            seen.add(name)
    both = sorted(seen.intersection(excluded))
    if both:
        raise ManifestError(f"{source}: excluded: {both[0]!r} is among the parameters as well")
    return names


def _wrong_with(piece: Sequence[int], kind: str, num_files: int) -> str | None:
    start, numel, file, offset = piece
    if not numel:
        return "holds no element"
    if file >= num_files:
        return f"file is {file}; the number of one of {num_files} files is due"
    if start + numel > LARGEST or offset + kinds.bytes_of(kind, numel) > LARGEST:
        return f"ends beyond {LARGEST}"
    return None
