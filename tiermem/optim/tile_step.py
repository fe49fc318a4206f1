"""TileStep: what the pipeline does with a tile on its way through a buffer: read, compute, write (swap/pipeline.py).

The step is one pass of a native kernel per parameter in the tile; elements between parameters are never stepped. What
is read depends on what has been written and on what a step needs (optim/layout.py):

    states             from the tile's second step on
    fp32 initial       in its first, when zero.Init kept them for a master
    parameters         when they are the master, or its upper half; in the first step the master is made from them
    gradients          when they rest on NVME; they are final only at the end of backward

Stochastic rounding is told the parameter's name, its own count of steps and where in the whole parameter the tile's
elements lie: not where the tile was cut, nor on which of how many ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tiermem.optim.layout import FP32_BYTES, StateViews
from tiermem.optim.stepping import AnyStep, step_parts
from tiermem.optim.tile import Segment, Tile
from tiermem.policy import Tier
from tiermem.swap.arena import Slot
from tiermem.swap.move import Move
from tiermem.swap.native import BACKGROUND, narrow_part
from tiermem.swap.parts import Dither, StepParts
from tiermem.zero.shards import Shards, initial_master
from tiermem.zero.unit import Shard

RuleOf = Callable[[Shard], AnyStep | None]
"""The rule of a parameter's next step and its scalars, or None when it is not to be stepped."""
MomentsOf = Callable[[Shard], Sequence[str]]
"""The names of a parameter's moments, as torch names them, in the order of swap.parts.MOMENTS."""


class _Part(NamedTuple):
    """Bytes of an entry of the store and their place in a tile's buffer."""

    entry: str
    offset: int
    place: int
    num_bytes: int


class TileStep:
    """One step of a model's tiles.

    Args:
        shards: the model.
        rule_of, moments_of: how each parameter is stepped.
        grads: of the one unit that is stepped, flat in its shard layout, when none rest at home.
        starts_only: no gradients are looked at: states that have never been written are made, and nothing is stepped.
    """

    def __init__(
        self,
        shards: Shards,
        rule_of: RuleOf,
        moments_of: MomentsOf,
        grads: torch.Tensor | None = None,
        starts_only: bool = False,
    ) -> None:
        self._shards = shards
        self._store = shards.store
        self._rule_of = rule_of
        self._moments_of = moments_of
        self._grads = grads
        self._starts_only = starts_only

    def read(self, tile: Tile, slot: Slot) -> Move:
        parts = self._lasting_parts(tile) + self._gradient_parts(tile)
        return self._store.read(_into(slot, parts), f"tile {tile.entry}")

    def read_lasting(self, tile: Tile, slot: Slot) -> Move:
        """Starts reading what rests from step to step; whatever else waits for the disk goes first."""
        return self._store.read(_into(slot, self._lasting_parts(tile)), f"tile {tile.entry}", BACKGROUND)

    def read_rest(self, tile: Tile, slot: Slot) -> Move:
        return self._store.read(_into(slot, self._gradient_parts(tile)), f"gradients of tile {tile.entry}")

    def has_lasting(self, tile: Tile) -> bool:
        """Whether a tile has anything on NVMe that is read and rests from step to step."""
        return bool(self._lasting_parts(tile))

    def compute(self, tile: Tile, slot: Slot | None) -> None:
        start_ns = time.monotonic_ns()
        params = self._params(tile, slot)
        views = tile.layout.views(self._states(tile, slot), tile.numel)
        if not tile.is_started:
            self._start(tile, slot, views, params)
        for segment in tile.segments:
            rule = self._rule_of(segment.shard)
            if rule is not None:
                self._step(tile, segment, rule, views, params, self._gradients(tile, slot))
            elif not tile.layout.reads_weight and tile.live.shard is None:
                part = slice(segment.start, segment.start + segment.numel)
                params[part].copy_(_fp32(views)[part])  # it may not have been read, and the whole slice is written
        self._store.recorder.add("compute", f"tile {tile.entry}", start_ns, time.monotonic_ns(), tile.state_bytes)

    def write(self, tile: Tile, slot: Slot) -> Move:
        ranges = []
        if tile.home is Tier.NVME:
            ranges.append((tile.entry, 0, slot.tensor[: tile.state_bytes]))
        if tile.live.entry is not None:
            ranges.append((tile.live.entry, self._params_offset(tile), self._params_in(tile, slot)))
        return self._store.write(ranges, f"tile {tile.entry}")

    # ---- computing -------------------------------------------------------------------------------------------------------

    def _start(self, tile: Tile, slot: Slot | None, views: StateViews, params: torch.Tensor) -> None:
        """Makes a tile's first states: masters from initial values or from the weight, moments zero."""
        initial, states = self._initial_values(tile, slot), self._states(tile, slot)
        master = tile.layout.master
        if master is None:
            states.zero_()
            return
        if master.kind == "fp32":
            _fp32(views).copy_(params if initial is None else initial)
        else:
            assert views.master is not None
            views.master.zero_()  # bits that a bf16 number does not have
            for segment in tile.segments if initial is not None else ():
                assert initial is not None
                part = slice(segment.start, segment.start + segment.numel)
                narrow_part(self._shards.workers, initial[part], views.master[part], params[part])
        states[master.num_bytes(tile.numel) :].zero_()  # the initial values may have lain here

    def _step(
        self,
        tile: Tile,
        segment: Segment,
        rule: AnyStep,
        views: StateViews,
        params: torch.Tensor,
        grads: torch.Tensor,
    ) -> None:
        shard, part = segment.shard, slice(segment.start, segment.start + segment.numel)
        own, names = views.piece(segment.start, segment.numel), self._moments_of(shard)
        if len(names) > len(own.moments):
            raise ValueError(too_many_moments(names, tile.layout.num_moments))
        precision, dither = tile.layout.precision, None
        if precision.is_stochastic:
            first = tile.first_element(segment, self._shards.topology.shard_rank)
            dither = Dither(precision.key(shard.name), shard.num_steps, first)
        parts = StepParts(params[part], own.master, grads[part], own.moments[: len(names)])
        is_first = shard.num_steps == 1  # of this parameter; its tile may have been stepped before
        step_parts(self._shards.workers, rule, parts, dither, start_moments=is_first)

    # ---- where things are ------------------------------------------------------------------------------------------------

    def _lasting_parts(self, tile: Tile) -> list[_Part]:
        """States, fp32 initial values and parameters, as far as they are read from NVMe."""
        parts = []
        if tile.is_started and tile.home is Tier.NVME:
            parts.append(_Part(tile.entry, 0, 0, tile.state_bytes))
        initial = self._initial_of(tile)
        if initial is not None and self._store.home_of(initial) is Tier.NVME:
            place = tile.layout.initial_offset_bytes(tile.numel)
            parts.append(_Part(initial, tile.start * FP32_BYTES, place, tile.numel * FP32_BYTES))
        if tile.live.entry is not None and (tile.layout.reads_weight or not tile.is_started):
            parts.append(_Part(tile.live.entry, self._params_offset(tile), tile.room_bytes, tile.slice_bytes))
        return parts

    def _gradient_parts(self, tile: Tile) -> list[_Part]:
        """Gradients, when they rest on NVME."""
        if self._starts_only or self._grads is not None or self._shards.homes.home is not Tier.NVME:
            return []
        entry, offset = self._shards.homes.entry(tile.live.unit), tile.start * tile.grad_dtype.itemsize
        return [_Part(entry, offset, tile.room_bytes + tile.slice_bytes, tile.grad_bytes)]

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
            return self._store.view(tile.entry)
        assert slot is not None
        return slot.tensor[: tile.state_bytes]

    def _params(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        if tile.live.shard is not None:
            return tile.live.shard[tile.elements]
        assert slot is not None
        return self._params_in(tile, slot).view(tile.dtype)

    def _gradients(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        at_home = self._grads if self._grads is not None else self._shards.homes.flat(tile.live.unit)
        if at_home is not None:
            return at_home[tile.elements]
        assert slot is not None
        place = tile.room_bytes + tile.slice_bytes
        return slot.tensor[place : place + tile.grad_bytes].view(tile.grad_dtype)


def too_many_moments(names: Sequence[str], num_moments: int) -> str:
    """What is said when an optimizer keeps more than the plan has made room for."""
    return (
        f"this optimizer keeps {len(names)} moments of a parameter ({', '.join(names)}) and the plan made room for "
        f"num_moments={num_moments}: {len(names)} > {num_moments}. Shard the model with "
        f"OffloadPolicy(num_moments={len(names)})"
    )


def _fp32(views: StateViews) -> torch.Tensor:
    assert views.master is not None and views.master.dtype == torch.float32
    return views.master


def _into(slot: Slot, parts: Sequence[_Part]) -> list[tuple[str, int, torch.Tensor]]:
    """What the store is asked for: each part with its place in the buffer."""
    return [(part.entry, part.offset, slot.tensor[part.place : part.place + part.num_bytes]) for part in parts]
