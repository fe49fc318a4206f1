"""Manifest: the files that describe a durable step. This docstring specifies the format, version 2.

    <dir>/latest                       a pointer: as a rule a copy of the newest tag's
    <dir>/<tag>/tiermem.json           pointer: the folder and the file of the tag's manifest
    <folder>/manifest-<commit>.json    what all ranks saved: parameters, scalars, checksums, the list of parts
    <folder>/part-<commit>-<rank>.json what one rank saved: pieces of states, and their file and
    byte ranges
    <folder>/segment.bin               the store's own file: states that rest on NVMe are not copied
    <folder>/data-<commit>.bin         states that rest in host memory, written when the step is saved
    <dir>/<tag>/data-<run id>-<commit>-<rank>.bin    a complete copy: all states of a rank; its part and manifest lie beside
                                       it under similar names, so a tag that is saved again changes
                                       only with its pointer

<folder> is a run folder, `<path>/tiermem-<run id>[.<rank>]`: rank 0's for the manifest, each rank's
own for the rest. A path in a file is absolute, or relative to the folder of the file that names it
(in `latest`: to the tag's folder). Commit numbers of a run increase. Every file is written under a
temporary name, synced and renamed. The order is parts, manifest, pointer, `latest`: a file that
exists is whole.

Each file is one JSON object (UTF-8, no NaN, no key twice) on one line. Its last field, "crc32c", is
the CRC-32C of all bytes before `,"crc32c"`, in 8 hexadecimal digits. Sizes and offsets are in
bytes; starts and numels are in elements.

pointer   format "tiermem" · version 2 · tag, run_id, commit and step, as the manifest has them · series, number (below) ·
          folder · file · bytes and crc32c_of (of the manifest file) · witness (number of the README.txt
          beside it in its file system, and when that file changed; left out of a complete copy's
          pointer). A folder that is moved keeps both; a copy of it has others
manifest  format, version, run_id, commit · tag (null: a durable step without a tag) · step (number of optimizer steps) ·
          world (ranks) · num_shards (ranks that share one copy of a parameter) · parts [{rank,
          folder, file, bytes, crc32c}], one per rank, in order · optimizer, scheduler, loss_scaler,
          engine, client_state, config (values, see fields.py) · parameters [{name, aliases, role,
          shape, dtype, trainable, num_steps, group, at_rest}] · excluded (frozen parameters that
          the caller left out) · checksums {parameter: {state: [CRC-32C of each MiB]}} · choices
part      format, version, run_id, commit · rank · rng, data (values) · files [path] ·
          states [{param, state, kind, pieces [[start, numel, file, offset]]}], each (param, state)
          once · extra_state {name in a state dict: value of a module's get_extra_state}, left out if
          no module has one

role      "parameter": of the sharded model; "buffer": of the model; "ordinary": stepped by the optimizer, not sharded
group     index of the optimizer's parameter group; null: in no group. num_steps: optimizer steps that the states have seen
state     "weight" (also of a buffer) · "master": the fp32 value, if it is kept beside the weight · moments under torch's
          names ("exp_avg", ...) · "<state>.scales" for a quantised state · "<state>.rank<r>" for a
          buffer or an ordinary parameter whose value on rank r differs from rank 0's
kind      how a piece's elements are stored, see kinds.py; all pieces of a (parameter, state) have one kind
piece     elements [start, start + numel) of the whole parameter, row-major, from byte `offset` of a file; `file` is an index
          into the part's files, from 0. The pieces of a (parameter, state), over all parts, cover
          it exactly once. Pieces of one file do not overlap. Pieces may have any size. A state
          without pieces has its value from before the first step: a moment is zero, and a master
          equals the weight
checksums of each 1 MiB of a state's bytes, in the order of its elements as if they lay in one
          piece. They do not depend on tiles, ranks or files. The last checksum covers the remaining
          bytes. Codes and scales have separate checksums. The manifest holds them, not the blocks: a block that was written
          elsewhere, or not at all, differs from its checksum
choices   {name: value}, strings: choices that can affect bits, that all ranks share, and that are not as by default.
          "compute_dtype" "fp32": weights of 16 bits are multiplied in fp32. "overlap" "none",
          "forward", "backward": what runs beside steps, if the policy said it. "streamed_ratio"
          "0.5": the part of the tiles that an accelerator steps and that rest on HOST or NVMe. A
          reader refuses what it does not know
at_rest   the form of a frozen parameter that rests in blocks: "int8" or "nf4"; its weight has the kind "packed" or "nf4", and
          its dtype is that of the values which the blocks stand for. null: it rests in its dtype;
          before forms were named, also "int8". A reader refuses a form that it does not know
number    a pointer's number is that of `latest` when it was written, plus 1. Numbers belong to a series: a new series begins
          where no `latest` can be trusted. finding.py says which states a crash leaves, and which
          only a change from outside

Version 1 had no tag, step, series and number in a pointer, and no choices and at_rest; `latest` was
the name of the tag as plain text. It opens as before, without the comparisons of these fields.

This module and finding.py validate all files before any byte of a state is read. An error is a
ManifestError that names the file and the field. Nothing in a file is executed, and memory use is
bounded by the file's size. `dump` reads back what it has written with the same functions: a
checkpoint that opening would refuse is not saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
from pydantic import AfterValidator, FailFast, Field

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import (
    LARGEST,
    Digest,
    ManifestError,
    Name,
    Names,
    Plain,
    Records,
    Whole,
    one_of,
    read,
    record,
    seal,
    string,
    unseal,
    whole,
    write,
)

FORMAT = "tiermem"
VERSION = 2
CHECKSUM_BYTES = 1 << 20
POINTER_FILE = "tiermem.json"
LATEST_FILE = "latest"
WEIGHT = "weight"
MASTER = "master"
_MOST_DIMENSIONS = 64
_MOST_RANKS = 1 << 24
_MOST_CRC = (1 << 32) - 1

flat = itertools.chain.from_iterable


# ---- records -------------------------------------------------------------------------------------
#
# Each attribute has the type of its field (fields.py), and the field's name as alias where that
# differs.


def _check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > _MOST_DIMENSIONS or math.prod(max(n, 1) for n in shape) > LARGEST:
        raise ValueError(
            f"at most {_MOST_DIMENSIONS} dimensions and {LARGEST} elements are allowed"
        )
    return shape


_COMPUTE = "compute_dtype"
_OVERLAP = "overlap"
_STREAMED = "streamed_ratio"
_CHOICES = {_COMPUTE: ("fp32",), _OVERLAP: ("none", "forward", "backward")}


def choices_of(compute_dtype: str, overlap: str, streamed_part: float) -> dict[str, str]:
    """The `choices` of a manifest."""
    given = {_COMPUTE: compute_dtype, _OVERLAP: overlap}
    streamed = {_STREAMED: repr(streamed_part)} if streamed_part else {}
    return {name: value for name, value in given.items() if value in _CHOICES[name]} | streamed


def _known_form(found: str) -> str:
    """Refuses a form at rest that this version does not know."""
    return found if found in kinds.AT_REST else _unknown(found)


def _unknown(found: str) -> NoReturn:
    raise ValueError(
        f"{found!r:.80} is unknown: it was written by a newer tiermem, open it with that"
    )


def _known_choices(found: Mapping[str, str]) -> Mapping[str, str]:
    """Refuses choices that this version does not know."""
    for name, value in found.items():
        if name == _STREAMED:
            _ratio(value)
        elif value not in _CHOICES.get(name, ()):
            _unknown(value if name in _CHOICES else name)
    return found


def _ratio(found: str) -> float:
    """A number from 0 to 1. Raises ValueError."""
    value = float(found)
    return value if 0.0 <= value <= 1.0 else _unknown(found)


_RunId = Annotated[str, string(64)]
_File = Annotated[str, string(255)]
_Rank = Annotated[int, whole(_MOST_RANKS)]
_Ranks = Annotated[int, whole(_MOST_RANKS, 1)]
_Sums = Annotated[tuple[Annotated[int, whole(_MOST_CRC)], ...], FailFast()]
_Shape = Annotated[tuple[Whole, ...], FailFast(), AfterValidator(_check_shape)]


class Piece(NamedTuple):
    """Elements of one state of one parameter, in one range of a file. `kind` is one of
    kinds.KINDS."""

    param: str
    state: str
    kind: str
    start: int
    numel: int
    file: int  # index in the part's files
    offset: int
    num_bytes: int


@record
class PartState:
    """The pieces of one state of one parameter in a part. A piece is (start, numel, file, offset),
    as in Piece."""

    param: Name
    state: _File
    kind: Annotated[str, one_of(kinds.KINDS)]
    pieces: Annotated[list[tuple[Whole, Whole, Whole, Whole]], FailFast()]


@record
class Part:
    """One rank's part of a durable step: the pieces of states in its files, and its generators and
    loader state."""

    run_id: _RunId
    commit: Whole
    rank: _Rank
    rng: Plain
    data: Plain
    files: Names
    states: Records[PartState]
    extra_state: Annotated[Mapping[str, Plain], FailFast(), Field(exclude=True)] = (
        dataclasses.field(default_factory=dict)
    )

    def dump(self) -> bytes:
        """The file's bytes. Raises ManifestError for what `parse_part` refuses."""
        return _sealed(self, parse_part, f"the part of rank {self.rank}")


@record
class PartFile:
    """The file of a rank's part: its folder, name, size and CRC-32C."""

    rank: _Rank
    folder: Name
    file: _File
    num_bytes: Annotated[Whole, Field(alias="bytes")]
    crc32c: Digest


@record
class Parameter:
    """One tensor of the model or the optimizer, whole."""

    name: Name
    aliases: Names
    role: Literal["parameter", "buffer", "ordinary"]
    shape: _Shape
    dtype: Annotated[str, one_of(kinds.DTYPES)]
    is_trainable: Annotated[bool, Field(strict=True, alias="trainable")]
    num_steps: Whole
    group: Whole | None
    at_rest: Annotated[str, AfterValidator(_known_form)] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@record
class Manifest:
    """A durable step of all ranks. The fields are described in the module's docstring."""

    run_id: _RunId
    commit: Whole
    tag: _File | None
    step: Whole
    world: _Ranks
    num_shards: _Ranks
    parts: Records[PartFile]
    optimizer: Plain
    scheduler: Plain
    loss_scaler: Plain
    engine: Plain
    client_state: Plain
    config: Plain
    parameters: Records[Parameter]
    excluded: Names
    checksums: Annotated[dict[str, Annotated[dict[str, _Sums], FailFast()]], FailFast()]
    choices: Annotated[Mapping[str, str], AfterValidator(_known_choices)] | None = None
    """None: a manifest of version 1."""

    @property
    def compute_dtype(self) -> str:
        """What weights were multiplied in: "fp32", or "storage", the dtype in which they rest."""
        return (self.choices or {}).get(_COMPUTE, "storage")

    @property
    def overlap(self) -> str:
        """What the policy said that runs beside steps; "auto": nothing."""
        return (self.choices or {}).get(_OVERLAP, "auto")

    @property
    def streamed_part(self) -> float:
        """The part of the tiles at rest on HOST or NVMe that an accelerator has stepped."""
        return _ratio((self.choices or {}).get(_STREAMED, "0.0"))

    def dump(self) -> bytes:
        """The file's bytes. Raises ManifestError for what `parse_manifest` refuses."""
        return _sealed(self, parse_manifest, "the manifest")


@record
class Pointer:
    """The manifest file of a tag: its folder, name, size and CRC-32C, its run and commit.

    In version 2 also its tag and step, and the series and number of the pointer. An empty tag: a
    pointer of version 1. witness: tells the folder from copies of it; empty for a complete copy.
    """

    run_id: _RunId
    commit: Whole
    folder: Name
    file: _File
    num_bytes: Annotated[Whole, Field(alias="bytes")]
    crc32c: Annotated[Digest, Field(alias="crc32c_of")]
    tag: _File = ""
    step: Whole = 0
    series: _RunId = ""
    number: Whole = 0
    witness: Annotated[_File, Field(exclude=True)] = ""

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


# ---- reading files -------------------------------------------------------------------------------


def parse_pointer(data: bytes, source: str) -> Pointer:
    """A pointer from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    return _opened(Pointer, data, source)


def parse_part(data: bytes, source: str) -> Part:
    """A part from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    part = _opened(Part, data, source)
    names = [(each.param, each.state) for each in part.states]
    if len({*names}) < len(names):
        param, state = Counter(names).most_common(1)[0][0]
        raise ManifestError(f"{source}: states: {state} of {param[:80]!r} is listed twice")
    for number, each in enumerate(part.states if _may_be_wrong(part) else ()):
        for index, piece in enumerate(each.pieces):
            if (wrong := _wrong_with(piece, each.kind, len(part.files))) is not None:
                raise ManifestError(f"{source}: states[{number}]: pieces[{index}]: {wrong}")
    return part


def parse_manifest(data: bytes, source: str) -> Manifest:
    """A manifest from its file's bytes. `source` names the file in errors. Raises ManifestError."""
    found = _opened(Manifest, data, source)
    if found.world % found.num_shards:
        raise ManifestError(
            f"{source}: num_shards is {found.num_shards}; a divisor of world={found.world} is due"
        )
    if [part.rank for part in found.parts] != list(range(found.world)):
        raise ManifestError(
            f"{source}: parts: {len(found.parts)} are listed; one for each of world={found.world} "
            "ranks is due, in order"
        )
    if len({(part.folder, part.file) for part in found.parts}) != len(found.parts):
        raise ManifestError(f"{source}: parts: a path is listed twice")
    names = _check_names(found.parameters, found.excluded, source)
    for name in found.checksums:
        if name not in names:
            raise ManifestError(f"{source}: checksums: {name[:80]!r} is none of the parameters")
    return found


def check_parameters(parameters: Sequence[Parameter], excluded: Sequence[str]) -> None:
    """Raises ManifestError for parameters that `parse_manifest` would refuse. Call it before
    anything is written."""
    listed = read(_Listed, write(_Listed(tuple(parameters), tuple(excluded))), _NOT_SAVED)
    _check_names(listed.parameters, listed.excluded, _NOT_SAVED)


_NOT_SAVED = "this cannot be saved, because it would not open again"
_Record = TypeVar("_Record", Pointer, Part, Manifest)


_SINCE_2: Mapping[type, Sequence[str]] = {
    Pointer: ("tag", "step", "series", "number"),
    Manifest: ("choices",),
}


@record
class _Listed:
    """The fields of a manifest that list tensors."""

    parameters: Records[Parameter]
    excluded: Names


@record
class _Head:
    """The first fields of every file."""

    format: Literal["tiermem"]
    version: Annotated[int, whole(least=1)]


def _sealed(value: _Record, parse: Callable[[bytes, str], _Record], what: str) -> bytes:
    """The bytes of a file, checked by its own parser. Raises ManifestError."""
    head: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    for name in ("extra_state", "witness"):
        if added := getattr(value, name, None):  # else readers before the field open the file
            head[name] = added
    data = seal(head, value)
    parse(data, f"{_NOT_SAVED}: {what}")
    return data


def _opened(kind: type[_Record], data: bytes, source: str) -> _Record:
    content = unseal(data, source)
    head = read(
        _Head,
        {name: content.pop(name) for name in ("format", "version") if name in content},
        source,
    )
    if head.version > VERSION:
        raise ManifestError(
            f"{source}: is of version {head.version} of the format; this tiermem reads version "
            f"{VERSION}: open it with a newer one"
        )
    for name in _SINCE_2.get(kind, ()):
        if (content.get(name) is None) != (head.version == 1):
            raise ManifestError(
                f"{source}: {name} is due since version 2 of the format, and not in version 1"
            )
    return read(kind, content, source)


def _check_names(parameters: Iterable[Parameter], excluded: Sequence[str], source: str) -> set[str]:
    """The names of the parameters. Raises ManifestError for a name that occurs twice."""
    names = set[str]()
    seen = set[str]()
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


def _may_be_wrong(part: Part) -> bool:
    """Whether `_wrong_with` may name a fault of a piece. It runs no Python code per piece."""
    numbers = np.fromiter(flat(flat([each.pieces for each in part.states])), np.int64)
    start, numel, file, offset = numbers.reshape(-1, 4).T
    most = np.maximum(start, offset) + numel.astype(float) * _MOST_ELEMENT_BYTES
    return bool(
        numel.min(initial=1) < 1
        or file.max(initial=-1) >= len(part.files)
        or most.max(initial=0) > LARGEST / 2
    )


_MOST_ELEMENT_BYTES = max(kinds.bytes_of(kind, 1) for kind in kinds.KINDS)


def _wrong_with(piece: Sequence[int], kind: str, num_files: int) -> str | None:
    start, numel, file, offset = piece
    if not numel:
        return "holds no element"
    if file >= num_files:
        return f"file is {file}; the number of one of {num_files} files is due"
    if start + numel > LARGEST or offset + kinds.bytes_of(kind, numel) > LARGEST:
        return f"ends beyond {LARGEST}"
    return None
