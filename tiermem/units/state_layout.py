"""StateLayout: the byte ranges of optimizer states in a tile's bytes, and the pieces that have a
checksum each."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from tiermem.optimizers import NEVER_NEGATIVE
from tiermem.policy import OffloadPolicy
from tiermem.precision import DTYPES, Precision
from tiermem.swap.base.parts import Q8_BLOCK, Moment, Quantised, moment_between, num_scales
from tiermem.swap.base.ranges import ALIGNMENT, ByteRange, Column, Numbers, round_up
from tiermem.swap.store.checksum import Pieces
from tiermem.units.quantised import BLOCK, BlockFormat, byte_ranges
from tiermem.units.unit import UNIT_ALIGN, Shard, Unit, own_numel, ranges_in

# ---- the layout of a tile ------------------------------------------------------------------------

MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
FP32_BYTES = 4
STRIP_NUMEL = 1 << 17
"""Elements of a strip of a tile, with checksums of its own: two megabytes of an exact step, one of
a compact one."""
AT_ONCE_BYTES = 2 << 20
"""About what is read, stepped and written at once: with fewer bytes threads wake each other as long
as they work."""

Kind = Literal["fp32", "bf16", "fp16", "split", "8bit"]


def moved_at_once(columns: Sequence[Column]) -> list[Column]:
    """The columns of a tile in strips of about AT_ONCE_BYTES through all of them: one of
    STRIP_NUMEL elements, or several."""
    strip_bytes = sum(column.strip_bytes for column in columns)
    num = max(1, round(AT_ONCE_BYTES / max(1, strip_bytes)))
    return [Column(column.bytes, column.strip_bytes * num) for column in columns]


def is_positive(name: str) -> bool:
    """Whether a moment, named as in torch, is never negative: its 8-bit codes then have no sign."""
    return name in NEVER_NEGATIVE


class StatePart(NamedTuple):
    """One part of the states: the master or a moment; `number` counts from 0."""

    number: int
    kind: Kind

    def num_bytes(self, numel: int) -> int:
        """Bytes of `numel` elements of the part."""
        if self.kind == "8bit":
            return numel + num_scales(numel)
        return numel * (torch.int16 if self.kind == "split" else DTYPES[self.kind]).itemsize

    def view(self, data: torch.Tensor, numel: int) -> Moment:
        """A view of the part's elements in bytes that hold this part alone."""
        if self.kind == "8bit":
            return Quantised(data[:numel], data[numel : numel + num_scales(numel)])
        return data[: self.num_bytes(numel)].view(
            torch.int16 if self.kind == "split" else DTYPES[self.kind]
        )


class StateViews(NamedTuple):
    """The parts of a tile's states, or of a piece of the tile, as tensors."""

    master: torch.Tensor | None
    moments: tuple[Moment, ...]

    def piece(self, start: int, numel: int) -> StateViews:
        """Elements [start, start + numel) of every part, as views; with 8-bit moments `start` is a
        multiple of 64."""
        master = None if self.master is None else self.master[start : start + numel]
        stop = start + numel
        return StateViews(master, tuple(moment_between(each, start, stop) for each in self.moments))


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The layout of the states of elements of one dtype, in one precision, with a number of
    moments.

        a tile of n elements    [ master | moment 0 | moment 1 | ... ]    n multiples of 4096, so parts begin at 64 bytes

        part       fp32  4n        split  2n: the bits that the bf16 weight lacks
                   bf16  2n        8bit   n codes, then n / 64 scale bytes
                   fp16  2n        (none: the weight is the master, and rests elsewhere)

    A tile is one range of the disk, so its bytes are rounded up to the disk's alignment. Zeros are
    the state before the first step in every format. Moments have room here; the optimizer's rule
    names them, and two parameters of a tile may have different rules. 8-bit blocks of 64 elements
    are counted from the start of this rank's part of a parameter, and tiles never cut a block. If
    shards do not begin at multiples of 64 elements of the whole parameter, another number of ranks
    makes other blocks and other bits, of the same precision.

    With `master_from="init"` the first step makes a split master from fp32 values. These pass
    through the tile's buffer behind the master, in the room of the moments, which are still zero:

        [ low bits | fp32 values ... ]    fp32 masters need only their own room
    """

    dtype: torch.dtype
    precision: Precision
    num_moments: int

    @functools.cached_property
    def master(self) -> StatePart | None:
        """The master kept beside the parameter; None: the parameter is its own master."""
        kind = self.precision.master_of(self.dtype)
        return None if kind is None else StatePart(0, kind)

    @functools.cached_property
    def parts(self) -> tuple[StatePart, ...]:
        """Every part, in order of `number`."""
        master = self.master
        first = () if master is None else (master,)
        kind = self.precision.moments
        return first + tuple(StatePart(len(first) + i, kind) for i in range(self.num_moments))

    def moment(self, number: int) -> StatePart:
        """The part of a moment; moments count from 0."""
        return self.parts[number + (self.master is not None)]

    @property
    def reads_weight(self) -> bool:
        """Whether a step reads the old weight: it is the master, or the upper half of the
        master."""
        return self.master is None or self.master.kind == "split"

    def total_bytes(self, numel: int) -> int:
        """Bytes of a tile's states, with padding."""
        return round_up(sum(part.num_bytes(numel) for part in self.parts), ALIGNMENT)

    def initial_offset_bytes(self, numel: int) -> int:
        """The byte at which fp32 values for the first master begin in a tile's buffer."""
        return (
            0 if self.master is None or self.master.kind == "fp32" else self.master.num_bytes(numel)
        )

    def buffer_bytes(self, numel: int, keeps_initial: bool) -> int:
        """Bytes that a tile's states take in its buffer; with `keeps_initial` also the fp32 values
        of the first step."""
        initial = self.initial_offset_bytes(numel) + FP32_BYTES * numel if keeps_initial else 0
        return max(self.total_bytes(numel), round_up(initial, ALIGNMENT))

    @property
    def strip_numel(self) -> int:
        """Elements of a strip of a tile; of 8-bit moments as many as fill a page with scales."""
        return (
            max(STRIP_NUMEL, Q8_BLOCK * ALIGNMENT)
            if self.precision.moments == "8bit"
            else STRIP_NUMEL
        )

    def columns(self, numel: int) -> Iterator[Column]:
        """Each part in a tile's states; 8-bit: its codes, then its scales."""
        strip = self.strip_numel
        for part in self.parts:
            of_tile = self.ranges(part, numel, 0, numel)
            of_strip = self.ranges(part, strip, 0, strip)
            for own, of_each in zip(of_tile, of_strip, strict=True):
                yield Column(own, of_each.num_bytes)

    def views(self, states: torch.Tensor, numel: int) -> StateViews:
        """The parts of a tile's states as views of `states`: a uint8 tensor of
        total_bytes(numel)."""
        found = []
        offset = 0
        for part in self.parts:
            found.append(part.view(states[offset:], numel))
            offset += part.num_bytes(numel)
        master = found.pop(0) if self.master is not None else None
        assert not isinstance(master, Quantised)
        return StateViews(master, tuple(found))

    def ranges(self, part: StatePart, tile_numel: int, start: int, numel: int) -> list[ByteRange]:
        """The byte ranges of a tile's states that hold elements [start, start + numel) of a part;
        8-bit: codes and scales.

        The ranges one after the other are the bytes that `StatePart.view` takes.
        """
        offset = sum(before.num_bytes(tile_numel) for before in self.parts[: part.number])
        if part.kind != "8bit":
            return [ByteRange(offset + part.num_bytes(start), part.num_bytes(numel))]
        scales = offset + tile_numel + num_scales(start)
        return [ByteRange(offset + start, numel), ByteRange(scales, num_scales(numel))]


# ---- the tiles of a unit, as a plan counts them --------------------------------------------------


def planned_layout(unit: Unit, policy: OffloadPolicy) -> StateLayout:
    """The state layout of a unit when the optimizer keeps as many moments as the policy plans
    for."""
    return _layout(unit.dtype, policy.precision, policy.num_moments)


_layout = functools.cache(StateLayout)


def keeps_initial_master(unit: Unit, policy: OffloadPolicy) -> bool:
    """Whether a unit's fp32 initial values are kept until its first step, beside its low-precision
    parameters."""
    return (
        policy.master_from == "init"
        and unit.is_trainable
        and not unit.was_unfrozen
        and policy.precision.master_of(unit.dtype) is not None
    )


def tile_bytes(unit: Unit, tile_numel: int, policy: OffloadPolicy) -> int:
    """Bytes of a tile's buffer: its states, and its slices of the parameters and of the
    gradients."""
    numel = min(tile_numel, unit.shard_numel)
    states = planned_layout(unit, policy).buffer_bytes(numel, keeps_initial_master(unit, policy))
    return states + numel * unit.dtype.itemsize + grad_bytes(unit, tile_numel, policy)


def grad_bytes(unit: Unit, tile_numel: int, policy: OffloadPolicy) -> int:
    """Bytes of a tile's gradients."""
    return min(tile_numel, unit.shard_numel) * policy.precision.grad_dtype(unit.dtype).itemsize


def brought_bytes(
    unit: Unit, tile_numel: int, policy: OffloadPolicy, grads: bool, weights: bool
) -> int:
    """Bytes of what comes from an accelerator to the buffer of a tile in memory."""
    weight_bytes = min(tile_numel, unit.shard_numel) * unit.dtype.itemsize
    return weight_bytes * weights + grad_bytes(unit, tile_numel, policy) * grads


def state_sizes(unit: Unit, tile_numel: int, policy: OffloadPolicy) -> list[tuple[int, int]]:
    """(bytes of one tile's states, number of such tiles) for the tiles of a unit."""
    layout = planned_layout(unit, policy)
    step = round_up(tile_numel, UNIT_ALIGN)
    whole, rest = divmod(unit.shard_numel, step)
    return [
        (layout.total_bytes(numel), count)
        for numel, count in ((step, whole), (rest, 1))
        if numel * count
    ]


# ---- pieces with checksums -----------------------------------------------------------------------

BLOCK_BYTES = 1 << 20
WEIGHT = "weight"
SCALES = ".scales"


class StateRange(NamedTuple):
    """Bytes of an entry that are contiguous in one state of one parameter as well."""

    shard: Shard
    # called when needed: the rule may be set later; None: the rule has no such state
    state: Callable[[], str | None]
    offset: int  # first byte in the entry
    first_byte: int  # in the state of the whole parameter
    num_bytes: int
    grain_bytes: int  # bytes of one grain ...
    grain_numel: int = 1  # ... and its elements
    column: Column | None = None  # of the entry, whose strips no piece crosses
    # of rows that may be read singly: no piece crosses their ends, nor those of the pages around them
    row_bytes: int = 0  # 0: none


class StatePiece(NamedTuple):
    """Elements of one state of one parameter; str() describes them for errors."""

    param: str
    state: str
    start: int
    stop: int
    num_steps: int  # optimizer steps of the parameter, with the one under way

    def __str__(self) -> str:
        return (
            f"{self.state} of {self.param}, elements {self.start} to {self.stop}, at step "
            f"{self.num_steps}"
        )


def keeps_sums(policy: OffloadPolicy) -> bool:
    """Whether states on NVMe have checksums: the policy verifies reads or makes steps durable."""
    return policy.verify != "resume" or policy.durability != "none"


class StatePieces:
    """The pieces of one entry on NVMe, each with a checksum.

    An entry holds parts of several parameters and states. Each part is cut at every MiB of its
    state's bytes, counted from the first element of the WHOLE parameter:

        exp_avg of a parameter     |   1 MiB   |   1 MiB   |   1 MiB   | rest |       blocks: a manifest's checksums
        ranks                      [       rank 0       |       rank 1        ]
        tiles                      [ tile | tile | tile ][ tile | tile | tile ]
        pieces                     [  |   |    |  |     ][   |  |    | |      ]

    Tiles are cut in strips, which are read and written one by one. A piece lies in one block, one
    strip and one rank, so it is written and read whole. Checksums (CRC-32C) of consecutive pieces
    combine to the checksum of their block, whatever the tiles and ranks. Padding between
    parameters, states in memory and gradients have no checksum.

    runs: in the order of their bytes in the entry.
    """

    def __init__(self, runs: Iterable[StateRange]) -> None:
        self.runs = [run for run in runs if run.num_bytes]
        cut = [_cut(run) for run in self.runs]
        self._first_piece = np.cumsum([0, *map(len, cut)]).tolist()
        self.first_bytes: Numbers = np.concatenate([*cut, np.zeros(0, np.int64)])
        ends = [
            np.append(each[1:], run.first_byte + run.num_bytes)
            for each, run in zip(cut, self.runs, strict=True)
        ]
        self.num_bytes: Numbers = np.concatenate([*ends, np.zeros(0, np.int64)]) - self.first_bytes
        shifts = np.array([run.offset - run.first_byte for run in self.runs], np.int64)
        starts = self.first_bytes + np.repeat(shifts, list(map(len, cut)))
        self.pieces = Pieces(starts, starts + self.num_bytes, self.name)

    def name(self, number: int) -> StatePiece:
        """The elements of a piece."""
        run = self.runs[bisect.bisect_right(self._first_piece, number) - 1]
        first = int(self.first_bytes[number])
        start = _element(run, first)
        stop = _element(run, first + int(self.num_bytes[number]))
        return StatePiece(
            run.shard.name, run.state() or "an unused state", start, stop, run.shard.num_steps
        )


def weight_runs(
    unit: Unit, shard_rank: int, strip: int, cuts: Sequence[int]
) -> Iterator[StateRange]:
    """The runs of a unit's entry on NVMe that hold this rank's weights.

    strip: elements of a strip; cuts: elements of its shard layout, ascending, at which tiles divide
        it.
    """
    if unit.blocks is not None:
        yield from _packed_runs(unit, unit.blocks, shard_rank)
        return
    size = unit.dtype.itemsize
    for span in itertools.starmap(slice, itertools.pairwise([0, *cuts, unit.shard_numel])):
        for part in ranges_in(unit, span, shard_rank):
            first = part.first_element(shard_rank)
            column = Column(
                ByteRange(span.start * size, (span.stop - span.start) * size), strip * size
            )
            row = part.shard.numel // part.shard.num_rows * size if part.shard.num_rows else 0
            yield StateRange(
                part.shard,
                lambda: WEIGHT,
                part.in_unit.start * size,
                first * size,
                part.numel * size,
                size,
                column=column,
                row_bytes=row,
            )


def _packed_runs(unit: Unit, form: BlockFormat, shard_rank: int) -> Iterator[StateRange]:
    """Codes of all parameters, then their scales; a scale of 4 bytes for each block of a rank's
    part."""
    grain = 8 // form.code_bits  # elements of a byte
    ranges = [
        byte_ranges(unit.packed_numel, s.shard_offset, s.shard_offset + s.shard_numel, form)
        for s in unit.shards
    ]
    kinds = ((lambda: WEIGHT, 1, grain), (lambda: WEIGHT + SCALES, 4, BLOCK))
    for kind, (name, size, numel) in enumerate(kinds):
        for shard, of_shard in zip(unit.shards, ranges, strict=True):
            first = shard_rank * -(-shard.shard_numel // numel)
            own = -(-own_numel(shard, shard_rank) // numel)
            yield StateRange(
                shard, name, of_shard[kind].start, first * size, own * size, size, numel
            )


def _cut(run: StateRange) -> Numbers:
    """The first bytes of a run's pieces, in the state of the whole parameter."""
    end = run.first_byte + run.num_bytes
    cuts: list[Numbers] = [
        np.array([run.first_byte]),
        np.arange(round_up(run.first_byte + 1, BLOCK_BYTES), end, BLOCK_BYTES),
    ]
    if run.column is not None:
        first = run.column.bytes.offset + run.first_byte - run.offset
        step = run.column.strip_bytes
        cuts.append(np.arange(first + round_up(run.first_byte + 1 - first, step), end, step))
    if run.row_bytes:
        ends = np.arange(run.first_byte // run.row_bytes, end // run.row_bytes + 1) * run.row_bytes
        # Rows are read in pages, of which the first or the last may be there already.
        shift = run.offset - run.first_byte
        before, after = ((ends + shift + more) // ALIGNMENT for more in (0, ALIGNMENT - 1))
        cuts += [ends, before * ALIGNMENT - shift, after * ALIGNMENT - shift]
    found = np.unique(np.concatenate(cuts)).astype(np.int64)
    return found[(found >= run.first_byte) & (found < end)]


def _element(run: StateRange, byte: int) -> int:
    """The element at a byte of a state. Blocks of elements with one scale are counted on each rank
    from its first element."""
    return min(byte // run.grain_bytes * run.grain_numel, run.shard.numel)
