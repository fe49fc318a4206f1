"""StateLayout: where the parts of a tile's states lie in its bytes.

    a tile of n elements    [ master | moment 0 | moment 1 | ... ]    n multiples of 4096, so every part begins on 64 bytes

    part       fp32  4n        split  2n: the bits that the bf16 weight lacks
               bf16  2n        8bit   n codes, then n / 64 scale bytes
               fp16  2n        (none: the weight is the master, and lies elsewhere)

A tile is one range of the disk, so its bytes are rounded up to what the disk takes; zeros are the state before the first
step in every format. Moments have a place here and a name where a rule is known: two parameters of a tile may be stepped
by two rules. 8-bit blocks of 64 elements are counted from the start of this rank's part of a parameter, which tiles never
cut. They are not counted from the start of the whole parameter: where shards do not begin at multiples of 64 elements
another number of ranks makes other blocks, and so other bits, as good ones.

With `master_from="init"` a split master is made from fp32 values in the first step. Those pass through the tile's buffer
behind the master, where the moments, still zero, have not been put yet:

    [ low bits | fp32 values ... ]    of which fp32 masters need no more than their own place
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import torch

from tiermem.precision import DTYPES, Precision
from tiermem.swap.direct import ALIGNMENT
from tiermem.swap.extents import round_up
from tiermem.swap.parts import Moment, Quantised, num_scales

MASTER = "master"
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
FP32_BYTES = 4

Kind = Literal["fp32", "bf16", "fp16", "split", "8bit"]

_NEVER_NEGATIVE = frozenset({EXP_AVG_SQ, "max_exp_avg_sq", "sum"})


def is_positive(name: str) -> bool:
    """Whether a moment, named as torch names it, is never negative: its 8-bit codes have no sign."""
    return name in _NEVER_NEGATIVE


class StatePart(NamedTuple):
    """One part of the states; `place` counts from the first."""

    place: int
    kind: Kind

    def num_bytes(self, numel: int) -> int:
        """Bytes of so many elements."""
        if self.kind == "8bit":
            return numel + num_scales(numel)
        return numel * (torch.int16 if self.kind == "split" else DTYPES[self.kind]).itemsize

    def view(self, data: torch.Tensor, numel: int) -> Moment:
        """These elements, looked at in the bytes that hold them and nothing else."""
        if self.kind == "8bit":
            return Quantised(data[:numel], data[numel : numel + num_scales(numel)])
        return data[: self.num_bytes(numel)].view(torch.int16 if self.kind == "split" else DTYPES[self.kind])


class StateViews(NamedTuple):
    """The parts of a tile's states, or of a piece of them, as tensors."""

    master: torch.Tensor | None
    moments: tuple[Moment, ...]

    def piece(self, start: int, numel: int) -> StateViews:
        """Elements [start, start + numel) of every part; where moments are in 8 bits, `start` is a multiple of 64."""
        master = None if self.master is None else self.master[start : start + numel]
        return StateViews(master, tuple(_piece(moment, start, numel) for moment in self.moments))


class ByteRange(NamedTuple):
    """Bytes of a tile's states."""

    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The states of elements of one dtype, kept in a precision, with room for so many moments."""

    dtype: torch.dtype
    precision: Precision
    num_moments: int

    @functools.cached_property
    def master(self) -> StatePart | None:
        """The master kept beside the parameter; None: the parameter is its own."""
        kind = self.precision.master_of(self.dtype)
        return None if kind is None else StatePart(0, kind)

    @functools.cached_property
    def parts(self) -> tuple[StatePart, ...]:
        """Every part, in the order in which they lie."""
        master = self.master
        first = () if master is None else (master,)
        kind = self.precision.moments
        return first + tuple(StatePart(len(first) + i, kind) for i in range(self.num_moments))

    def moment(self, number: int) -> StatePart:
        """The part of a moment, counted from 0."""
        return self.parts[number + (self.master is not None)]

    @property
    def reads_weight(self) -> bool:
        """Whether a step needs the weight as it was: it is the master, or its upper half."""
        return self.master is None or self.master.kind == "split"

    def offset_bytes(self, part: StatePart, numel: int) -> int:
        """Where a part begins in the states of so many elements."""
        return sum(other.num_bytes(numel) for other in self.parts[: part.place])

    def total_bytes(self, numel: int) -> int:
        """Bytes of a tile's states, at home and on their way."""
        return round_up(sum(part.num_bytes(numel) for part in self.parts), ALIGNMENT)

    def initial_offset_bytes(self, numel: int) -> int:
        """Where fp32 values for the first master lie in a tile's buffer."""
        return 0 if self.master is None or self.master.kind == "fp32" else self.master.num_bytes(numel)

    def buffer_bytes(self, numel: int, keeps_initial: bool) -> int:
        """Bytes of a tile's buffer that its states take, and in the first step what its master is made from."""
        initial = self.initial_offset_bytes(numel) + FP32_BYTES * numel if keeps_initial else 0
        return max(self.total_bytes(numel), round_up(initial, ALIGNMENT))

    def views(self, states: torch.Tensor, numel: int) -> StateViews:
        """The parts of a tile's states: a uint8 tensor of total_bytes(numel)."""
        found = [part.view(states[self.offset_bytes(part, numel) :], numel) for part in self.parts]
        master = found.pop(0) if self.master is not None else None
        assert not isinstance(master, Quantised)
        return StateViews(master, tuple(found))

    def ranges(self, part: StatePart, tile_numel: int, start: int, numel: int) -> list[ByteRange]:
        """Which bytes of a tile's states hold elements [start, start + numel) of a part; in 8 bits, codes and scales.

        Put one behind the other they are what `StatePart.view` looks at.
        """
        offset = self.offset_bytes(part, tile_numel)
        if part.kind != "8bit":
            return [ByteRange(offset + part.num_bytes(start), part.num_bytes(numel))]
        scales = offset + tile_numel + num_scales(start)
        return [ByteRange(offset + start, numel), ByteRange(scales, num_scales(numel))]


def _piece(moment: Moment, start: int, numel: int) -> Moment:
    if isinstance(moment, Quantised):
        scales = moment.scales[num_scales(start) : num_scales(start + numel)]
        return Quantised(moment.codes[start : start + numel], scales)
    return moment[start : start + numel]
