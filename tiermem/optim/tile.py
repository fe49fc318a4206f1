"""Tile: a range of one unit's shard layout whose states are read, stepped and written as one, and how it moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from tiermem.policy import Tier
from tiermem.swap.arena import Slot
from tiermem.swap.move import Move
from tiermem.swap.native import BACKGROUND, narrow_part
from tiermem.swap.parts import Q8_BLOCK, num_scales
from tiermem.swap.ranges import round_up
from tiermem.zero.shards import Shards
from tiermem.zero.state_layout import FP32_BYTES, MASTER, SCALES, Run, StateLayout, StatePart, StateViews
from tiermem.zero.unit import UNIT_ALIGN, Shard, Unit
from tiermem.zero.unit_state import LiveUnit
from tiermem.zero.values import initial_master

# ---- Tile: a range of one unit's shard layout whose states are read, stepped and written as one ----------------------
#
# A tile may cut through a parameter; a Segment is what it holds of one. Its states lie side by side in one entry of the
# store, so that a tile is one read and one write (state_layout.py draws it). While it passes through a buffer:
#
#     [ states | parameters | gradients ]    the last two where they rest on NVME; each begins at what the disk takes


class Segment(NamedTuple):
    """The elements of one parameter inside a tile; `start` counts from the tile's first element."""

    shard: Shard
    start: int
    numel: int


@dataclasses.dataclass(eq=False)
class Tile:
    """A range of one unit's shard layout and the home of its states."""

    live: LiveUnit
    start: int  # elements, a multiple of 4096, as numel is
    numel: int
    layout: StateLayout
    room_bytes: int  # of a buffer, for its states and what they are made from
    entry: str
    home: Tier
    segments: Sequence[Segment]
    is_started: bool = False  # its states have been written once

    @property
    def dtype(self) -> torch.dtype:
        """Of its parameters."""
        return self.live.unit.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of its gradients."""
        return self.layout.precision.grad_dtype(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of its states at home."""
        return self.layout.total_bytes(self.numel)

    @property
    def slice_bytes(self) -> int:
        """Bytes of its slice of the parameters."""
        return self.numel * self.dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of its slice of the gradients."""
        return self.numel * self.grad_dtype.itemsize

    @property
    def elements(self) -> slice:
        """Its place in the unit's shard layout."""
        return slice(self.start, self.start + self.numel)

    def first_element(self, segment: Segment, shard_rank: int) -> int:
        """Where a segment begins in its whole parameter."""
        shard = segment.shard
        return shard.shard_numel * shard_rank + self.start + segment.start - shard.shard_offset


def cut(
    live: LiveUnit,
    step: int,
    layout: StateLayout,
    keeps_initial: bool,
    home: Tier,
    shard_rank: int,
    is_whole: Callable[[Shard], bool] = lambda _: False,
) -> list[Tile]:
    """The tiles of a unit, of at most `step` elements; none for what holds nothing but padding.

    is_whole: of parameters that no tile may cut. Raises ValueError for one that does not fit.
    """
    tiles, unit = [], live.unit
    whole = [shard for shard in unit.shards if is_whole(shard)]
    for start, numel, segments in stepped_ranges(unit, step, shard_rank, whole):
        entry, in_buffer = f"state/{unit.index}/{unit.name}/{start}", layout.buffer_bytes(numel, keeps_initial)
        tiles.append(Tile(live, start, numel, layout, in_buffer, entry, home, segments))
    return tiles


def stepped_ranges(
    unit: Unit, step: int, shard_rank: int, whole: Sequence[Shard] = ()
) -> Iterator[tuple[int, int, list[Segment]]]:
    """(start, elements, what of which parameter) of a unit's tiles: those that hold more than padding."""
    for start, numel in _ranges(unit.shard_numel, step, whole):
        segments = [s for s in (_overlap(part, start, numel, shard_rank) for part in unit.shards) if s.numel > 0]
        if segments:
            yield start, numel, segments


def rests_on_host(sizes: Sequence[int], resident_bytes: int) -> list[bool]:
    """Of tiles of these bytes, which stay on HOST: so many bytes of them at most, spread evenly."""
    due, total, stays = 0, sum(sizes), []
    for size in sizes:
        due += size * resident_bytes
        stays.append(due >= size * total)
        due -= size * total * stays[-1]
    return stays


def _ranges(total: int, step: int, whole: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """(start, number) of at most `step` elements, cut at multiples of 4096 and through none of the whole parameters."""
    start = 0
    while start < total:
        end = min(start + step, total)
        while end > start and (inside := _cut_by(end, whole)) is not None:
            end = inside.shard_offset // UNIT_ALIGN * UNIT_ALIGN
        if end <= start:
            due = start + step
            while (inside := _cut_by(due, whole)) is not None:
                due = round_up(inside.shard_offset + inside.shard_numel, UNIT_ALIGN)
            held = [s for s in whole if s.shard_offset < due and s.shard_offset + s.shard_numel > start]
            largest = max(held, key=lambda shard: shard.shard_numel)
            raise ValueError(
                f"{largest.name} has {largest.shard_numel} elements and is stepped as a whole matrix, which no tile may cut; "
                f"with what shares its pages that is {due - start} elements, and a tile's buffer holds {step}. Shard with "
                f"OffloadPolicy(tile_numel={due - start}), or step this parameter elementwise (use_muon=False)"
            )
        yield start, end - start
        start = end


def _cut_by(end: int, whole: Sequence[Shard]) -> Shard | None:
    """The whole parameter that a tile's end would cut."""
    return next((s for s in whole if s.shard_offset < end < s.shard_offset + s.shard_numel), None)


def _overlap(part: Shard, start: int, numel: int, shard_rank: int) -> Segment:
    """The elements of a parameter inside [start, start + numel) of its unit's shard layout; none of its padding."""
    before = part.shard_numel * shard_rank
    valid = min(part.shard_numel, max(0, part.numel - before))
    first, last = max(start, part.shard_offset), min(start + numel, part.shard_offset + valid)
    return Segment(part, first - start, last - first)


# ---- TileMoves: what of a tile is read and written, and where it lies while it passes through a buffer ---------------
# (swap/pipeline.py)
#
# What is read depends on what has been written and on what the work needs (zero/state_layout.py):
#
#     states             once they have been made
#     fp32 initial       before that, when zero.Init kept them for a master
#     parameters         when they are the master, or its upper half; and when the master is made from them
#     gradients          when they rest on NVME; they are final only at the end of backward
#
# States and the slice of the parameters are written back. What is computed in between: tile_step.py, tile_step.py. It
# is computed on the CPU, but for steps of states that rest on an accelerator: what lies elsewhere is copied there and
# back.

MomentsOf = Callable[[Shard], Sequence[str]]
"""The names of a parameter's moments, as torch names them, in the order of swap.parts.MOMENTS."""


class Part(NamedTuple):
    """Bytes of an entry of the store and their place in a tile's buffer."""

    entry: str
    offset: int
    place: int
    num_bytes: int


class TileMoves:
    """The transfers of a model's tiles.

    Args:
        shards: the model.
        moments_of: what is kept of each parameter.
        reads_gradients: whether the work looks at gradients that rest at home.
        reads_weights: whether it always looks at the parameters, not only where states are made of them.
    """

    def __init__(
        self, shards: Shards, moments_of: MomentsOf, reads_gradients: bool = False, reads_weights: bool = False
    ) -> None:
        self._shards = shards
        self._store = shards.store
        self._moments_of = moments_of
        self._reads_gradients = reads_gradients and shards.homes.home is Tier.NVME
        self._reads_weights = reads_weights
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of what lies elsewhere, by its address

    def compute(self, tile: Tile, slot: Slot | None) -> None:
        """Does the work with a tile, in its buffer or where it rests. Blocks."""
        try:
            self._compute(tile, slot)
            for original, copy in self._copies.values():
                original.copy_(copy)
        finally:
            self._copies.clear()

    def _compute(self, tile: Tile, slot: Slot | None) -> None:
        raise NotImplementedError

    def _device(self, tile: Tile) -> torch.device:
        """Where the work with a tile is computed."""
        return torch.device("cpu")

    def _near(self, tile: Tile, data: torch.Tensor) -> torch.Tensor:
        """A tile's data where its work is computed: themselves, or a copy that is copied back in the end."""
        if data.device == self._device(tile) or not data.numel():
            return data
        if data.data_ptr() not in self._copies:
            self._copies[data.data_ptr()] = data, data.to(self._device(tile))
        return self._copies[data.data_ptr()][1]

    def read(self, tile: Tile, slot: Slot) -> Move:
        """Starts filling a buffer with all that the work needs."""
        parts = self._lasting_parts(tile) + self._gradient_parts(tile)
        return self._store.read(_into(slot, parts), f"tile {tile.entry}")

    def read_lasting(self, tile: Tile, slot: Slot) -> Move:
        """Starts reading what rests from step to step; whatever else waits for the disk goes first."""
        return self._store.read(_into(slot, self._lasting_parts(tile)), f"tile {tile.entry}", BACKGROUND)

    def read_rest(self, tile: Tile, slot: Slot) -> Move:
        """Starts reading what `read_lasting` leaves out."""
        return self._store.read(_into(slot, self._gradient_parts(tile)), f"gradients of tile {tile.entry}")

    def has_lasting(self, tile: Tile) -> bool:
        """Whether a tile has anything on NVMe that is read and rests from step to step."""
        return bool(self._lasting_parts(tile))

    def write(self, tile: Tile, slot: Slot) -> Move:
        """Starts writing states and parameters back."""
        ranges = []
        if tile.home is Tier.NVME:
            ranges.append((tile.entry, 0, slot.tensor[: tile.state_bytes]))
        if tile.live.entry is not None:
            ranges.append((tile.live.entry, self._params_offset(tile), self._params_in(tile, slot)))
        return self._store.write(ranges, f"tile {tile.entry}")

    def open(self, tile: Tile, slot: Slot | None) -> tuple[StateViews, torch.Tensor]:
        """A tile's states, made if they never were, and its slice of the parameters, where they lie now."""
        params = self._params(tile, slot)
        views = tile.layout.views(self._states(tile, slot), tile.numel)
        if not tile.is_started:
            self._start(tile, slot, views, params)
        return views, params

    # ---- making states ---------------------------------------------------------------------------------------------------

    def _start(self, tile: Tile, slot: Slot | None, views: StateViews, params: torch.Tensor) -> None:
        """Makes a tile's first states: masters from initial values or from the weight, moments zero."""
        initial, states = self._initial_values(tile, slot), self._states(tile, slot)
        master = tile.layout.master
        if master is None:
            states.zero_()
            return
        if master.kind == "fp32":
            fp32_master(views).copy_(params if initial is None else initial)
        else:
            assert views.master is not None
            views.master.zero_()  # bits that a bf16 number does not have
            for segment in tile.segments if initial is not None else ():
                assert initial is not None
                part = slice(segment.start, segment.start + segment.numel)
                narrow_part(self._shards.workers, initial[part], views.master[part], params[part])
        states[master.num_bytes(tile.numel) :].zero_()  # the initial values may have lain here

    def _initial_of(self, tile: Tile) -> str | None:
        """The entry of fp32 initial values that a tile's master starts from, when they were kept."""
        name = initial_master(tile.live.unit)
        return name if not tile.is_started and name in self._store else None

    def _initial_values(self, tile: Tile, slot: Slot | None) -> torch.Tensor | None:
        initial = self._initial_of(tile)
        if initial is None:
            return None
        if self._store.home_of(initial) is Tier.HOST:
            return self._store.view(initial)[tile.elements]
        assert slot is not None
        place = tile.layout.initial_offset_bytes(tile.numel)
        return slot.tensor[place : place + tile.numel * FP32_BYTES].view(torch.float32)

    # ---- where things are ------------------------------------------------------------------------------------------------

    def _lasting_parts(self, tile: Tile) -> list[Part]:
        """States, fp32 initial values and parameters, as far as they are read from NVMe."""
        parts = []
        if tile.is_started and tile.home is Tier.NVME:
            parts.append(Part(tile.entry, 0, 0, tile.state_bytes))
        initial = self._initial_of(tile)
        if initial is not None and self._store.home_of(initial) is Tier.NVME:
            place = tile.layout.initial_offset_bytes(tile.numel)
            parts.append(Part(initial, tile.start * FP32_BYTES, place, tile.numel * FP32_BYTES))
        is_weight_read = self._reads_weights or tile.layout.reads_weight or not tile.is_started
        if tile.live.entry is not None and is_weight_read:
            parts.append(Part(tile.live.entry, self._params_offset(tile), tile.room_bytes, tile.slice_bytes))
        return parts

    def _gradient_parts(self, tile: Tile) -> list[Part]:
        """Gradients, when they rest on NVME."""
        if not self._reads_gradients:
            return []
        entry, offset = self._shards.homes.entry(tile.live.unit), tile.start * tile.grad_dtype.itemsize
        return [Part(entry, offset, tile.room_bytes + tile.slice_bytes, tile.grad_bytes)]

    def _params_offset(self, tile: Tile) -> int:
        return tile.start * tile.dtype.itemsize

    def _params_in(self, tile: Tile, slot: Slot) -> torch.Tensor:
        """The bytes of a tile's buffer that hold its slice of the parameters."""
        return slot.tensor[tile.room_bytes : tile.room_bytes + tile.slice_bytes]

    def _states(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        """The bytes of a tile's states, at home or in its buffer."""
        if not tile.state_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if tile.home is not Tier.NVME:
            return self._near(tile, self._store.view(tile.entry))
        assert slot is not None
        return slot.tensor[: tile.state_bytes]

    def _params(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        if tile.live.shard is not None:
            tile.live.await_home()
            return self._near(tile, tile.live.shard[tile.elements])
        assert slot is not None
        return self._near(tile, self._params_in(tile, slot).view(tile.dtype))


def fp32_master(views: StateViews) -> torch.Tensor:
    """The master of a tile that keeps one in fp32."""
    assert views.master is not None and views.master.dtype == torch.float32
    return views.master


def _into(slot: Slot, parts: Sequence[Part]) -> list[tuple[str, int, torch.Tensor]]:
    """What the store is asked for: each part with its place in the buffer."""
    return [(part.entry, part.offset, slot.tensor[part.place : part.place + part.num_bytes]) for part in parts]


# ---- What of a tile's states has a checksum: every part of every parameter in it (zero/state_layout.py), codes -------
# and scales apart
#
#     [ master: a, b, c | moment 0: a, b, c | moment 1 codes: a, b, c | its scales: a, b, c ]
#
# Every part that has a place has checksums, whether the rule of its parameter keeps that moment or not: it is written
# and read with the rest, and a rule may be known later.


def tile_runs(tile: Tile, shard_rank: int, moments_of: MomentsOf) -> Iterator[Run]:
    """What a tile's entry holds, in the order in which it lies there."""
    for part in tile.layout.parts:
        ranges = [tile.layout.ranges(part, tile.numel, segment.start, segment.numel) for segment in tile.segments]
        for kind in range(2 if part.kind == "8bit" else 1):  # numbers or codes, then scales
            for segment, places in zip(tile.segments, ranges, strict=True):
                state = _StateName(tile, part, segment, moments_of, is_scales=kind == 1)
                first = tile.first_element(segment, shard_rank)
                if kind == 1:
                    per_rank = num_scales(segment.shard.shard_numel)
                    inside = num_scales(first - segment.shard.shard_numel * shard_rank)
                    first_byte, grain = shard_rank * per_rank + inside, (1, Q8_BLOCK)
                else:
                    itemsize = 1 if part.kind == "8bit" else part.num_bytes(1)
                    first_byte, grain = itemsize * first, (itemsize, 1)
                yield Run(segment.shard, state, places[kind].offset, first_byte, places[kind].num_bytes, *grain)


class _StateName:
    """The name of a part's state, as torch names it: asked for when it is needed."""

    def __init__(self, tile: Tile, part: StatePart, segment: Segment, moments_of: MomentsOf, is_scales: bool) -> None:
        self._number = part.place - (tile.layout.master is not None)
        self._shard = segment.shard
        self._moments_of = moments_of
        self._suffix = SCALES if is_scales else ""

    def __call__(self) -> str | None:
        if self._number < 0:
            return MASTER
        names = self._moments_of(self._shard)
        return names[self._number] + self._suffix if self._number < len(names) else None
