"""Source: an opened durable step. It reads and verifies elements of states, in any file.

    Source.open(DIR, tag)  ->  manifest, parts, cover: all valid, every file exists and is long enough
    read, fp32             ->  elements of one state, by index in the whole parameter

A read takes whole blocks of 1 MiB and compares the CRC-32C of each block with the manifest. It
returns no unverified byte. The range may have any size, so tiles and ranks may differ from those
that saved. `follow` announces reads, which are then prefetched. Memory use: see verified.py.

A store that another live process uses is not read, because its slots change. A store that is read
is locked as shared: no process can take it over or remove it. A Source writes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import ManifestError, decode, no_collection
from tiermem.checkpoint.format.finding import Found, Opened, cover, find, read_manifest, read_parts
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT, Manifest, Parameter, Part
from tiermem.checkpoint.opening.verified import (
    LEAST_AREA_BYTES,
    Verified,
    VerifiedSpan,
    VerifiedStream,
)
from tiermem.ranks.topology import Topology, fair_cores, fair_threads
from tiermem.swap.base.native import Workers, widen_part
from tiermem.swap.base.parts import Quantised
from tiermem.swap.disk import durable
from tiermem.swap.disk.run_folder import RunName, RunOwner, owner_of, share, this_process
from tiermem.units.quantised import BLOCK, FORMATS, BlockFormat, unpack
from tiermem.units.state_layout import is_positive

if TYPE_CHECKING:
    from typing_extensions import Self

_FORMS = {kind: FORMATS[name] for name, kind in kinds.AT_REST.items()}
CHUNK_NUMEL = 4 << 20
"""Elements of a large state that a caller should read at a time: 16 MiB in fp32."""


Progress = Callable[[int], None]
"""Called with the number of bytes just read, verified or written."""


class Elements(NamedTuple):
    """Elements [start, start + numel) of a state, by index in the whole parameter."""

    param: str
    state: str
    start: int
    numel: int


class Source:
    """An opened durable step, for one thread at a time. Use it in a `with` block.

    Args:
        opened: its manifest.
        others: further durable steps of the same place, for the advice in errors.
        own: processes whose live stores may be read: this process and the other ranks.

    Raises ManifestError when manifest and parts do not describe a whole step; OSError when a file
    is missing; EBUSY when another process uses the store.
    """

    @no_collection()
    def __init__(
        self, opened: Opened, others: Sequence[Found] = (), own: frozenset[RunOwner] = frozenset()
    ) -> None:
        self.file = opened.file
        self.place = opened.place
        self.manifest: Manifest = opened.manifest
        self._verified = Verified(self.manifest, self._threads, lambda: advice(others))
        self._workers: Workers | None = None
        self._own = own | {this_process()}
        with contextlib.ExitStack() as shared:
            self._shared: set[Path] = set()
            self._share(self.file.parent, shared)
            parts = opened.parts or read_parts(opened)
            for folder in dict.fromkeys(folder for folder, _ in parts):
                self._share(folder, shared)
            self.parts: tuple[Part, ...] = tuple(part for _, part in parts)
            self._saved = cover(self.manifest, self.parts, str(self.file))
            self.parameters: Mapping[str, Parameter] = {
                each.name: each for each in self.manifest.parameters
            }
            self._aliases = {
                alias: each.name for each in self.manifest.parameters for alias in each.aliases
            }
            self._states: dict[str, list[str]] = {name: [] for name in self.parameters}
            for param, state in self._saved.numbers:
                self._states[param].append(state)
            self._streams: dict[tuple[str, str], VerifiedStream] = {}  # those that were asked for
            self._paths = [folder / file for folder, part in parts for file in part.files]
            used = set(self._saved.rows.file.tolist())
            for folder in sorted({self._paths[number].parent for number in used}):
                self._share(folder, shared)
            self._check_files(used)
            self._shares = shared.pop_all()

    @classmethod
    def open(cls, where: Path | str, tag: str | None = None, allow_older: bool = False) -> Self:
        """Opens a durable step: the given tag, else the newest step; see `finding.find`. Blocks.

        allow_older: opens the next older step when the newest is not whole. Otherwise the error
            names an older whole step.
        Raises NothingSaved (a FileNotFoundError), ManifestError, OSError.
        """
        found = find(Path(where), tag)
        for number, each in enumerate(found):
            try:
                return cls.of(each, found[number + 1 :])
            except (ManifestError, OSError):
                if not allow_older or number == len(found) - 1:
                    raise
        raise AssertionError("find returns something, or raises")

    @classmethod
    def of(
        cls, found: Found, others: Sequence[Found] = (), own: frozenset[RunOwner] = frozenset()
    ) -> Self:
        """Opens one durable step. An error names the first of `others` that is whole. Raises
        ManifestError, OSError."""
        try:
            return cls(read_manifest(found), others, own)
        except (ManifestError, OSError) as error:
            raise _with_advice(error, others) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except BaseException:
            self.close()  # after an interrupt
            raise

    def close(self) -> None:
        """Closes the files; a second call completes the first."""
        self._verified.close()
        self._shares.close()
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    # ---- contents --------------------------------------------------------------------------------

    def find(self, name: str) -> Parameter | None:
        """A parameter by its name or an alias; None if it was not saved."""
        return self.parameters.get(self._aliases.get(name, name))

    def states(self, param: str) -> tuple[str, ...]:
        """The saved states of a parameter. A missing state has its value from before the first
        step."""
        return tuple(self._states[param])

    def moments(self, param: str) -> list[str]:
        """The names of a parameter's saved moments, without scales and variants of ranks."""
        return [
            each for each in self._states[param] if each not in (WEIGHT, MASTER) and "." not in each
        ]

    def kind(self, param: str, state: str) -> str | None:
        """How a state's elements are stored (kinds.py); None if the state was not saved."""
        number = self._saved.numbers.get((param, state))
        return None if number is None else self._saved.kinds[number]

    def part_of(self, topology: Topology) -> Part | None:
        """The part that this rank saved; None if another number of ranks saved the step."""
        return self.parts[topology.rank] if self.manifest.world == topology.world else None

    def extra_states(self, part: Part | None = None) -> dict[str, Any]:
        """What `get_extra_state` of modules gave, by the name in a state dict: on the rank of a
        part, or on rank 0."""
        saved = (part or self.parts[0]).extra_state
        return {name: decode(value, f"{self.file}: {name}") for name, value in saved.items()}

    def files(self, param: str, state: str) -> tuple[Path, ...]:
        """The files that hold a state, in the order of its elements."""
        found = self._saved.pieces(param, state)
        return tuple(dict.fromkeys(self._paths[piece.file] for piece in found))

    def bytes_of(self, param: str, state: str) -> int:
        """Bytes of a state in its stored form."""
        return self._saved.num_bytes[self._saved.numbers[param, state]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return sum(self._saved.num_bytes)

    # ---- reading ---------------------------------------------------------------------------------

    def follow(self, told: Iterable[Elements]) -> None:
        """Announces the next reads by `read`, `read_into` or `fp32`, in order; they are prefetched.
        A hint. Raises OSError.

        For a state that was not saved, the state that `fp32` computes it from is prefetched.
        """
        self._verified.follow(each for elements in told for each in self._bytes_of(elements))

    def lent(self, areas: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """Within the block, prefetches into the caller's memory areas that are large enough: see
        verified.py."""
        return self._verified.lent([area for area in areas if area.numel() >= LEAST_AREA_BYTES])

    def read(self, param: str, state: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) as stored: flat, of the kind's dtype (int16 for a split
        master).

        Blocks. Raises DamagedState, OSError; KeyError for a state that was not saved; ValueError
        for a quantised state, whose codes need their scales: use `fp32`.
        """
        out = torch.empty(numel, dtype=self._dtype(self._stream(param, state)))
        self.read_into(param, state, start, out)
        return out

    def read_into(self, param: str, state: str, start: int, out: torch.Tensor) -> None:
        """`read` into a flat contiguous CPU tensor of the kind's dtype; takes no memory for the
        whole range. Blocks."""
        stream = self._stream(param, state)
        dtype = self._dtype(stream)
        if out.dtype != dtype:
            raise ValueError(
                f"{state} of {param} is stored as {dtype}; it cannot be read into {out.dtype}"
            )
        first = start * dtype.itemsize
        self._verified.copy(stream, first, out.contiguous().view(torch.uint8))

    def fp32(self, param: str, state: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) in fp32: a new flat tensor. Blocks; raises as `read`.

        A master that was not saved equals the weight; a moment that was not saved is zero.
        """
        base, _, rank = state.partition(kinds.OF_RANK)
        if base == MASTER and (param, state) not in self._saved.numbers:
            state = self._weight_beside(param, rank)
        if (param, state) not in self._saved.numbers:
            return torch.zeros(numel)
        stream = self._stream(param, state)
        if stream.kind in kinds.SCALED:
            return self._scaled(stream, start, numel)
        values = self.read(param, state, start, numel)
        if stream.kind == kinds.SPLIT:
            return widen_part(
                self._threads(),
                values,
                self.read(param, self._weight_beside(param, rank), start, numel),
            )
        return values.float()

    def weight(self, param: str, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements [start, start + numel) of a weight: as stored, if it was stored in this dtype,
        else from the master.

        The master is rounded to nearest. Blocks; raises as `read`.
        """
        out = torch.empty(numel, dtype=dtype)
        self.weight_into(param, start, out)
        return out

    def weight_into(self, param: str, start: int, out: torch.Tensor) -> None:
        """`weight` into a flat contiguous CPU tensor, in its dtype. Blocks; raises as `read`."""
        stored = self.kind(param, WEIGHT)
        if stored == kinds.name_of(out.dtype):
            self.read_into(param, WEIGHT, start, out)
        elif stored == "float64":  # fp32 would lose bits of it
            out.copy_(self.read(param, WEIGHT, start, out.numel()))
        else:
            out.copy_(self.fp32(param, MASTER, start, out.numel()))

    def blocks(self, param: str, start: int, numel: int, form: BlockFormat) -> torch.Tensor | None:
        """The blocks of elements [start, start + numel) of a frozen weight as saved: uint8, codes,
        then scales.

        None: it was saved in another form, or its blocks do not begin at multiples of BLOCK. start:
            such a multiple. Blocks;
        raises as `read`.
        """
        if _FORMS.get(self.kind(param, WEIGHT) or "") != form:
            return None
        found = self._with_scales(self._stream(param, WEIGHT), start, numel)
        if any(each.start % BLOCK for span, own in found for each in (span, *own)):
            return None
        of_blocks = list[torch.Tensor]()
        codes = list[torch.Tensor]()
        for span, own in found:
            of_blocks += map(self._bytes, own)
            codes.append(self._bytes(span))
        padding = torch.zeros(
            form.code_bytes(numel) - sum(each.numel() for each in codes), dtype=torch.uint8
        )
        return torch.cat([*codes, padding, *of_blocks])

    def verify(self, param: str, state: str) -> Iterator[int]:
        """Compares every block of a state with its checksum; yields the bytes of each chunk. Raises
        DamagedState, OSError."""
        return self._verified.verify(self._stream(param, state))

    # ---- helpers ---------------------------------------------------------------------------------

    def _share(self, folder: Path, shared: contextlib.ExitStack) -> None:
        """Locks a run's folder as shared, until this closes. Raises OSError (EBUSY) when another
        process uses it."""
        place = Path(os.path.normpath(folder))
        name = RunName.of(place)
        if name is not None and place not in self._shared:
            shared.enter_context(
                share(place, name.run_id if owner_of(place) in self._own else None)
            )
            self._shared.add(place)

    def _check_files(self, used: set[int]) -> None:
        """Raises OSError or ManifestError unless every file exists and is as long as its pieces
        require."""
        rows = self._saved.rows
        sizes = np.array(
            [_size_of(path) if n in used else 0 for n, path in enumerate(self._paths)], np.int64
        )
        for row in np.flatnonzero(rows.offset + rows.num_bytes > sizes[rows.file]).tolist():
            piece = self._saved.piece(row)
            raise ManifestError(
                f"{self._paths[piece.file]}: has {sizes[piece.file]} bytes and {piece.state} of "
                f"{piece.param} ends at byte "
                f"{piece.offset + piece.num_bytes}: it was cut, or is another's"
            )

    def _stream(self, param: str, state: str) -> VerifiedStream:
        """The bytes of a state. Raises KeyError for a state that was not saved."""
        found = self._streams.get((param, state))
        if found is None:
            pieces = [
                (self._paths[piece.file], piece) for piece in self._saved.pieces(param, state)
            ]
            found = self._streams[param, state] = VerifiedStream(param, state, pieces)
        return found

    def _bytes_of(self, told: Elements) -> Iterator[VerifiedSpan]:
        """The spans of elements of a state, with the spans of its scales and of the weight beside a
        split master."""
        base, _, rank = told.state.partition(kinds.OF_RANK)
        states = [told.state]
        if base == MASTER and self.kind(told.param, told.state) in (None, kinds.SPLIT):
            states.append(self._weight_beside(told.param, rank))
        for state in states:
            if (told.param, state) not in self._saved.numbers:
                continue
            stream = self._stream(told.param, state)
            if stream.kind not in kinds.SCALED:
                yield from stream.spans(told.start, told.numel)
                continue
            for span, scales in self._with_scales(stream, told.start, told.numel):
                yield from (*scales, span)

    def _with_scales(
        self, stream: VerifiedStream, start: int, numel: int
    ) -> list[tuple[VerifiedSpan, list[VerifiedSpan]]]:
        """The spans of elements of a quantised state, each with the spans of its scales."""
        scales = self._stream(stream.param, kinds.scales_of(stream.state))
        spans = stream.spans(start, numel)
        return [(span, list(scales.spans(span.start, span.numel))) for span in spans]

    def _dtype(self, stream: VerifiedStream) -> torch.dtype:
        if stream.kind == kinds.SPLIT:
            return torch.int16
        if stream.kind not in kinds.DTYPES:
            raise ValueError(
                f"{stream.state} of {stream.param} is stored in codes ({stream.kind}): ask for it "
                "in fp32"
            )
        return kinds.dtype_of(stream.kind)

    def _weight_beside(self, param: str, rank: str) -> str:
        """The weight beside a master: that rank's own weight, if it was saved, else rank 0's."""
        own = f"{WEIGHT}{kinds.OF_RANK}{rank}"
        return own if rank and (param, own) in self._saved.numbers else WEIGHT

    def _scaled(self, stream: VerifiedStream, start: int, numel: int) -> torch.Tensor:
        parts = []
        for span, own in self._with_scales(stream, start, numel):
            if any((each.start - span.start) % BLOCK for each in own):
                raise ManifestError(
                    f"{self.file}: {stream.state} of {stream.param}: its scales are of other blocks"
                )
            of_span = torch.cat([self._bytes(each) for each in own])
            values = self._unscaled(stream, span.numel, self._bytes(span), of_span)
            parts.append(values[max(0, start - span.start) :])
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def _unscaled(
        self, stream: VerifiedStream, numel: int, codes: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        if stream.kind == kinds.CODES:
            positive = is_positive(stream.state.partition(".")[0])
            return widen_part(self._threads(), Quantised(codes, scales), is_positive=positive)
        form = _FORMS[stream.kind]
        filled = torch.nn.functional.pad(codes, (0, form.code_bytes(numel) - codes.numel()))
        return unpack(
            torch.cat([filled, scales]), numel, torch.empty(numel), 0, False, form, self._threads()
        )

    def _bytes(self, span: VerifiedSpan) -> torch.Tensor:
        out = torch.empty(span.num_bytes, dtype=torch.uint8)
        self._verified.copy(span.stream, span.first_byte, out)
        return out

    def _threads(self) -> Workers:
        if self._workers is None:
            self._workers = Workers(fair_threads(), fair_cores())
        return self._workers


def state_of_rank(source: Source, param: str, state: str, topology: Topology) -> str:
    """The state as this rank saved it, if as many ranks open it as saved it and the rank's values
    differed; else that of rank 0."""
    own = f"{state}{kinds.OF_RANK}{topology.rank}"
    is_own = source.part_of(topology) is not None and source.kind(param, own) is not None
    return own if is_own else state


def verify_all(source: Source, progress: Progress) -> None:
    """Compares every checksum of a step. progress: called with the bytes just verified. Blocks;
    raises DamagedState, OSError."""
    for param in source.parameters:
        for state in source.states(param):
            for num_bytes in source.verify(param, state):
                progress(num_bytes)


def _size_of(file: Path) -> int:
    """The size of a regular file in bytes. Raises OSError that names the file."""
    with open(durable.open_regular(file), "rb") as opened:
        return os.fstat(opened.fileno()).st_size


def advice(others: Sequence[Found]) -> str:
    """The last sentence of an error: the first of the other steps that is whole, and how to open
    it."""
    for each in others:
        try:
            with Source(read_manifest(each)) as source:
                step = source.manifest.step
        except (ManifestError, OSError):
            continue
        what = f"tag={each.tag!r}" if each.tag is not None else f"{each.file}"
        return (
            f"The durable step that is whole before it is step {step}: open it with {what} or "
            "allow_older=True"
        )
    return "There is no other durable step that is whole here"


def _with_advice(error: ManifestError | OSError, others: Sequence[Found]) -> Exception:
    if isinstance(error, ManifestError):
        return ManifestError(f"{error}. {advice(others)}")
    return OSError(error.errno, f"{error.strerror or error}. {advice(others)}", error.filename)


# ---- the weights of an opened step ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight or buffer of an opened step. The source must stay open while values are read.

    parameter: its record in the step. dtype: of the values that `pieces`, `read` and `whole`
        return.
    """

    source: Source
    parameter: Parameter
    dtype: torch.dtype

    @property
    def names(self) -> tuple[str, ...]:
        """All names; the parameter's own name is first."""
        return (self.parameter.name, *self.parameter.aliases)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, flat values), in order. Values are valid until the next. Blocks; raises
        DamagedState, OSError."""
        # One buffer: a new tensor for each piece leaves holes in malloc's heap, into which the next
        # one does not fit.
        numel = self.parameter.numel
        values = torch.empty(min(CHUNK_NUMEL, numel), dtype=self.dtype)
        for start in range(0, numel, CHUNK_NUMEL):
            self.source.weight_into(self.parameter.name, start, values[: numel - start])
            yield start, values[: numel - start]

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel), flat. Blocks; raises DamagedState, OSError."""
        return self.source.weight(self.parameter.name, start, numel, self.dtype)

    def whole(self) -> torch.Tensor:
        """The whole tensor. Blocks; raises DamagedState, OSError."""
        return filled(self.parameter, self.dtype, self.read)


def weights_of(
    source: Source, dtype: torch.dtype | None = None, exclude_frozen: bool = False
) -> list[Weight]:
    """The weights and buffers, in the order of the model. Ordinary parameters are no weights of the
    model.

    dtype: of floating-point values. None: as stored, bit by bit; a weight in blocks has the dtype
        of its parameter. fp32: the master where it was saved beside the weight, else the weight.
        Another dtype: the weight if it is stored in this dtype, else the master, rounded to
        nearest. Other values keep their dtype.

    Raises ValueError for a dtype that is not floating-point.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"weights cannot be exported as {dtype}; floating-point dtypes are allowed"
        )
    found = []
    for each in source.manifest.parameters:
        if each.role == "ordinary" or (
            exclude_frozen and each.role == "parameter" and not each.is_trainable
        ):
            continue
        stored = kinds.dtype_of(each.dtype)
        found.append(
            Weight(
                source, each, dtype if dtype is not None and stored.is_floating_point else stored
            )
        )
    return found


def filled(
    parameter: Parameter, dtype: torch.dtype, part: Callable[[int, int], torch.Tensor]
) -> torch.Tensor:
    """A whole tensor, read in pieces of 16 MiB (fp32)."""
    value = torch.empty(parameter.shape, dtype=dtype)
    flat = value.view(-1)
    for start in range(0, parameter.numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, parameter.numel)
        flat[start:stop] = part(start, stop - start)
    return value
