"""Tile: a range of one unit's shard layout whose states are read, stepped and written as one.

A tile may cut a parameter; its ranges are the elements of each parameter inside it. The states of a
tile lie in one entry of the store (units/state_layout.py draws it). Native steps read and write it
in strips. A buffer holds:

    [ states | parameters | gradients ]    the last two only if they rest on NVMe, or come from an accelerator to be stepped by
                                           the CPU; each begins at a multiple of 4096 bytes
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from tiermem.plans.plan import Plan
from tiermem.policy import Tier
from tiermem.swap.base.parts import Q8_BLOCK, num_scales
from tiermem.swap.base.ranges import (
    ALIGNMENT,
    ByteRange,
    Column,
    first_within,
    round_up,
    within,
)
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.swap.memory.arena import Slot
from tiermem.swap.store.store import TensorStore
from tiermem.units.state_layout import (
    MASTER,
    SCALES,
    StateLayout,
    StatePart,
    StateRange,
    moved_at_once,
)
from tiermem.units.unit import UNIT_ALIGN, Shard, ShardRange, Unit, ranges_in
from tiermem.weights.unit_state import LiveUnit

PIECE_NUMEL = 1 << 20
"""Most elements of a state that are shown, read or written in fp32 at once: tiles may be larger. A
number of whole strips."""

MomentsOf = Callable[[Shard], Sequence[str]]
"""Returns the names of a parameter's moments, as in torch, in the order of swap.parts.MOMENTS."""


@dataclasses.dataclass(eq=False, kw_only=True)
class StateTile:
    """A range of one unit's shard layout, and the tier on which its states rest."""

    start: int  # in elements; start and numel are multiples of 4096
    numel: int
    layout: StateLayout
    entry: str
    state_home: Tier
    ranges: Sequence[ShardRange]  # without padding, in their order
    is_started: bool = False  # whether its states have been written

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its parameters."""
        return self.layout.dtype

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of its states where they rest."""
        return self.layout.total_bytes(self.numel)

    def states_in(self, store: TensorStore, slot: Slot | None) -> torch.Tensor:
        """The bytes of its states: where they rest in memory, or in its buffer."""
        if not self.state_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if self.state_home is not Tier.NVME:
            return store.view(self.entry)
        assert slot is not None
        return slot.tensor[: self.state_bytes]

    def slice_of(self, part: ShardRange) -> slice:
        """A part as a slice of the tile, counted from the tile's first element."""
        return slice(part.in_unit.start - self.start, part.in_unit.stop - self.start)

    def bytes_of(self, state: StatePart, part: ShardRange) -> list[ByteRange]:
        """The byte ranges of its states that hold one state of elements; 8-bit: codes and
        scales."""
        return self.layout.ranges(state, self.numel, self.slice_of(part).start, part.numel)


@dataclasses.dataclass(eq=False, kw_only=True)
class Tile(StateTile):
    """A tile of a sharded model, whose parameters and gradients may rest on NVMe as well."""

    live: LiveUnit
    room_bytes: int  # in a buffer, for its states and the values that they are made from
    engine: Tier = Tier.HOST  # what steps it: HOST, the CPU; or DEVICE, an accelerator

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of its gradients."""
        return self.layout.precision.grad_dtype(self.dtype)

    @property
    def slice_bytes(self) -> int:
        """Bytes of its slice of the parameters."""
        return self.numel * self.dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of its slice of the gradients."""
        return self.numel * self.grad_dtype.itemsize

    @property
    def weight_home(self) -> Tier:
        """Where the weights of its unit rest."""
        if self.live.shard is None:
            return Tier.NVME
        return Tier.DEVICE if is_accelerator(self.live.shard.device) else Tier.HOST

    @functools.cached_property
    def weight_offset(self) -> int:
        """Where its weights begin in its buffer, in bytes. The buffer has no states if these rest
        in memory and no weights are on NVMe."""
        return 0 if self._is_in_memory else self.room_bytes

    @functools.cached_property
    def grad_offset(self) -> int:
        """Where its gradients begin in its buffer, in bytes: behind the weights, if these pass
        through it."""
        return self.weight_offset + (
            0 if self._is_in_memory and self.weight_home is Tier.HOST else self.slice_bytes
        )

    @property
    def _is_in_memory(self) -> bool:
        return Tier.NVME not in (self.state_home, self.weight_home)

    def columns(self, reads_grads: bool) -> list[Column]:
        """What of its buffer passes from or to NVMe in a step. Empty: strips do not have whole
        pages of each."""
        found = list[Column]()
        strip = self.layout.strip_numel
        if self.state_home is Tier.NVME:
            found += self.layout.columns(self.numel)
        if self.weight_home is Tier.NVME:
            found.append(
                Column(ByteRange(self.weight_offset, self.slice_bytes), strip * self.dtype.itemsize)
            )
        if reads_grads:
            found.append(
                Column(
                    ByteRange(self.grad_offset, self.grad_bytes), strip * self.grad_dtype.itemsize
                )
            )
        found = moved_at_once(found)
        has_pages = all(
            size % ALIGNMENT == 0 for held, strip_bytes in found for size in (*held, strip_bytes)
        )
        return found if has_pages else []

    @property
    def elements(self) -> slice:
        """Its range of elements in the unit's shard layout."""
        return slice(self.start, self.start + self.numel)

    @property
    def own_weights(self) -> torch.Tensor:
        """Its weights where they rest; not for those on NVMe."""
        assert self.live.shard is not None
        return self.live.shard[self.elements]


def stepped_ranges(
    unit: Unit, step: int, shard_rank: int, whole: Sequence[Shard] = ()
) -> Iterator[tuple[int, int, list[ShardRange]]]:
    """(start, elements, ranges) of each tile of a unit. Tiles that hold only padding are left
    out."""
    for start, numel in _ranges(unit.shard_numel, step, whole):
        if ranges := ranges_in(unit, slice(start, start + numel), shard_rank):
            yield start, numel, ranges


class TileRoute(NamedTuple):
    """Where the states of a tile rest, and what steps it."""

    states: Tier
    engine: Tier  # HOST: the CPU; DEVICE: an accelerator, which has the states or is sent them


def routes_of_tiles(
    sizes: Sequence[int], numels: Sequence[int], plan: Plan, homes: Sequence[Tier] = ()
) -> list[TileRoute]:
    """The routes of tiles with states of these sizes.

    At most `plan.kept_bytes` of states stay on the accelerator (without one: on HOST), evenly
    spread over the tiles. If the others go to NVMe, at most `plan.resident_bytes` of them stay on
    HOST: the first, since backward brings their gradients last and the next forward needs their
    weights first. The accelerator steps the tiles that rest there, and the plan's part of the
    elements of all others, evenly spread too.

    numels: the elements of each; 0 for one that is never sent there, since no buffer holds it.
    homes: where the states rest now: those that may stay there do.
    """
    home_of_kept = Tier.DEVICE if plan.steps_there else Tier.HOST
    home_of_resident = Tier.HOST if plan.states is Tier.NVME else plan.states
    now = homes or [plan.states] * len(sizes)
    kept = _within(sizes, plan.kept_bytes, [home is home_of_kept for home in now], within)
    rest = [0 if stays else size for size, stays in zip(sizes, kept, strict=True)]
    stay = [home is home_of_resident for home in now]
    resident = _within(rest, plan.resident_bytes, stay, first_within)
    found = [
        home_of_kept if stays else home_of_resident if is_resident else plan.states
        for stays, is_resident in zip(kept, resident, strict=True)
    ]
    elsewhere = [
        0 if home is Tier.DEVICE else numel for numel, home in zip(numels, found, strict=True)
    ]
    sent = within(elsewhere, int(sum(elsewhere) * plan.streamed_part))
    return [
        TileRoute(home, Tier.DEVICE if home is Tier.DEVICE or (is_sent and numel) else Tier.HOST)
        for home, is_sent, numel in zip(found, sent, elsewhere, strict=True)
    ]


def _within(
    sizes: Sequence[int],
    num_bytes: int,
    is_there: Sequence[bool],
    choose: Callable[[Sequence[int], int], list[bool]],
) -> list[bool]:
    """As `choose`, but of things that are there first."""
    first = choose([size * there for size, there in zip(sizes, is_there, strict=True)], num_bytes)
    stays = [chosen and there for chosen, there in zip(first, is_there, strict=True)]
    left = num_bytes - sum(itertools.compress(sizes, stays))
    rest = [0 if stay else size for size, stay in zip(sizes, stays, strict=True)]
    more = choose(rest, left)
    return [stay or chosen for stay, chosen in zip(stays, more, strict=True)]


def _ranges(total: int, step: int, whole: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """(start, number) of ranges of at most `step` elements, cut at multiples of 4096 and never
    inside a whole parameter."""
    start = 0
    while start < total:
        end = min(start + step, total)
        while end > start and (inside := _cut_by(end, whole)) is not None:
            end = inside.shard_offset // UNIT_ALIGN * UNIT_ALIGN
        if end <= start:
            due = start + step
            while (inside := _cut_by(due, whole)) is not None:
                due = round_up(inside.shard_offset + inside.shard_numel, UNIT_ALIGN)
            held = [
                s for s in whole if s.shard_offset < due and s.shard_offset + s.shard_numel > start
            ]
            largest = max(held, key=lambda shard: shard.shard_numel)
            raise ValueError(
                f"{largest.name} has {largest.shard_numel} elements and is stepped as a whole "
                "matrix, which no tile may cut; "
                f"with what shares its pages that is {due - start} elements, and a tile's buffer "
                f"holds {step}. Shard with "
                f"OffloadPolicy(tile_numel={due - start}), or step this parameter elementwise "
                "(use_muon=False)"
            )
        yield start, end - start
        start = end


def _cut_by(end: int, whole: Sequence[Shard]) -> Shard | None:
    """The whole parameter that a tile ending at `end` would cut; None if there is none."""
    return next((s for s in whole if s.shard_offset < end < s.shard_offset + s.shard_numel), None)


# ---- checksums -----------------------------------------------------------------------------------


def tile_runs(tile: StateTile, shard_rank: int, moments_of: MomentsOf) -> Iterator[StateRange]:
    """The byte ranges of a tile's entry that get a checksum each, in the order of the entry.

        [ master: a, b, c | moment 0: a, b, c | moment 1 codes: a, b, c | its scales: a, b, c ]    of parameters a, b, c

    A moment that a parameter's rule does not keep has checksums too: its bytes are written and read
    with the others, and the rule may become known later.
    """
    columns = tile.layout.columns(tile.numel)
    for state in tile.layout.parts:
        bytes_of = [tile.bytes_of(state, part) for part in tile.ranges]
        number = state.number - (tile.layout.master is not None)
        # values or codes, then scales
        for kind, suffix in enumerate(("", SCALES) if state.kind == "8bit" else ("",)):
            column = next(columns)
            for part, of_part in zip(tile.ranges, bytes_of, strict=True):
                shard = part.shard
                own = of_part[kind]
                name = functools.partial(_state_name, moments_of, shard, number, suffix)
                if kind == 1:
                    first_byte = shard_rank * num_scales(shard.shard_numel) + num_scales(part.start)
                    grain = (1, Q8_BLOCK)
                else:
                    itemsize = 1 if state.kind == "8bit" else state.num_bytes(1)
                    first_byte = itemsize * part.first_element(shard_rank)
                    grain = (itemsize, 1)
                yield StateRange(shard, name, own.offset, first_byte, own.num_bytes, *grain, column)


def _state_name(moments_of: MomentsOf, shard: Shard, number: int, suffix: str) -> str | None:
    """The name of a part's state, as in torch. number: of a moment, or -1 for the master. None: no
    rule keeps it."""
    if number < 0:
        return MASTER
    names = moments_of(shard)
    return names[number] + suffix if number < len(names) else None
