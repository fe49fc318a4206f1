"""What is done to a tile while its states are in a buffer: a step, first states, a visit, states from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tiermem.optim.rules import AnyStep, step_parts
from tiermem.optim.tile import MomentsOf, Part, Segment, Tile, TileMoves, fp32_master
from tiermem.policy import Tier
from tiermem.swap.arena import Slot
from tiermem.swap.native import narrow_part, widen_part
from tiermem.swap.parts import Dither, Moment, StepParts
from tiermem.zero.shards import Shards
from tiermem.zero.state_layout import StateViews, is_positive
from tiermem.zero.unit import Shard

# ---- TileStep: one optimizer step of a tile, and TileStart: its first states without a step --------------------------
#
# The step is one pass of a native kernel per parameter in the tile; elements between parameters are never stepped. How
# a tile comes and goes: tile.py.
#
# Stochastic rounding is told the parameter's name, its own count of steps and where in the whole parameter the tile's
# elements lie: not where the tile was cut, nor on which of how many ranks.

RuleOf = Callable[[Shard], AnyStep | None]
"""The rule of a parameter's next step and its scalars, or None when it is not to be stepped."""


class TileStep(TileMoves):
    """One step of a model's tiles.

    Args:
        shards: the model.
        rule_of, moments_of: how each parameter is stepped.
        grads: of the one unit that is stepped, flat in its shard layout, when none rest at home.
    """

    def __init__(
        self, shards: Shards, rule_of: RuleOf, moments_of: MomentsOf, grads: torch.Tensor | None = None
    ) -> None:
        super().__init__(shards, moments_of, reads_gradients=grads is None)
        self._rule_of = rule_of
        self._grads = grads

    def _device(self, tile: Tile) -> torch.device:
        return self._store.device if tile.home is Tier.DEVICE else super()._device(tile)

    def _compute(self, tile: Tile, slot: Slot | None) -> None:
        """Steps a tile."""
        start_ns = time.monotonic_ns()
        views, params = self.open(tile, slot)
        grads = self._gradients(tile, slot)
        for segment in tile.segments:
            rule = self._rule_of(segment.shard)
            if rule is not None:
                self._step(tile, segment, rule, views, params, grads)
            elif not tile.layout.reads_weight and tile.live.shard is None:
                part = slice(segment.start, segment.start + segment.numel)
                params[part].copy_(
                    fp32_master(views)[part]
                )  # it may not have been read, and the whole slice is written
        self._store.recorder.add("compute", f"tile {tile.entry}", start_ns, time.monotonic_ns(), tile.state_bytes)

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
        starts = shard.num_steps == 1 and not shard.has_moments  # this parameter; its tile may have been stepped before
        step_parts(self._shards.workers, rule, parts, dither, start_moments=starts)

    def _gradients(self, tile: Tile, slot: Slot | None) -> torch.Tensor:
        at_home = self._grads if self._grads is not None else self._shards.homes.flat(tile.live.unit)
        if at_home is not None:
            return at_home[tile.elements].to(self._device(tile))
        assert slot is not None
        place = tile.room_bytes + tile.slice_bytes
        return slot.tensor[place : place + tile.grad_bytes].view(tile.grad_dtype).to(self._device(tile))


class TileStart(TileMoves):
    """Makes states that have never been written, and steps nothing."""

    def _compute(self, tile: Tile, slot: Slot | None) -> None:
        """Makes a tile's first states."""
        self.open(tile, slot)


def too_many_moments(names: Sequence[str], num_moments: int) -> str:
    """What is said when an optimizer keeps more than the plan has made room for."""
    return (
        f"this optimizer keeps {len(names)} moments of a parameter ({', '.join(names)}) and the plan made room for "
        f"num_moments={num_moments}: {len(names)} > {num_moments}. Shard the model with "
        f"OffloadPolicy(num_moments={len(names)})"
    )


# ---- TileVisit: lets a function change states of chosen parameters while their tiles pass through the buffers --------
# once
#
#     read the next tile | widen -> the function -> round back | write the previous tile
#
# The function sees, for each chosen parameter in a tile, the elements that the tile holds of it, in fp32:
#
#     {"fp32_param": ..., "exp_avg": ..., "exp_avg_sq": ...}      flat tensors, to be changed in place
#
# Values that it leaves alone come back to the bit in every precision. The parameter follows its master.

FP32_PARAM = "fp32_param"

Visitor = Callable[[dict[str, torch.Tensor], Shard, slice], None]
"""Changes states in place: by name, of which parameter, and which of its elements, counted from its first."""


class TileVisit(TileMoves):
    """One visit to a model's tiles.

    Args:
        shards: the model.
        moments_of: what is kept of each parameter.
        chosen: the parameters whose states are shown.
        visitor: what is called with them.
    """

    def __init__(self, shards: Shards, moments_of: MomentsOf, chosen: Collection[Shard], visitor: Visitor) -> None:
        super().__init__(shards, moments_of, reads_weights=True)
        self._chosen = chosen
        self._visitor = visitor

    def _compute(self, tile: Tile, slot: Slot | None) -> None:
        """Shows a tile's chosen parameters to the visitor and keeps what it leaves."""
        views, params = self.open(tile, slot)
        for segment in tile.segments:
            if segment.shard in self._chosen:
                self._visit(tile, segment, views, params[segment.start : segment.start + segment.numel])

    def _visit(self, tile: Tile, segment: Segment, views: StateViews, weight: torch.Tensor) -> None:
        own, shard, workers = views.piece(segment.start, segment.numel), segment.shard, self._shards.workers
        names = list(self._moments_of(shard))
        is_split = own.master is not None and own.master.dtype == torch.int16
        master = widen_part(workers, weight if own.master is None else own.master, weight if is_split else None)
        values = {FP32_PARAM: master}
        for name, moment in zip(names, own.moments, strict=False):  # a tile may have room for more
            values[name] = widen_part(workers, moment, is_positive=is_positive(name))
        first = tile.first_element(segment, self._shards.topology.shard_rank)
        self._visitor(values, shard, slice(first, first + segment.numel))
        for name, moment in zip(names, own.moments, strict=False):
            narrow_part(workers, values[name], moment, is_positive=is_positive(name))
            shard.has_moments |= shard.num_steps == 0 and bool(values[name].any())
        if is_split:
            assert own.master is not None
            narrow_part(workers, values[FP32_PARAM], own.master, weight)
            return
        weight.copy_(values[FP32_PARAM])
        if own.master is not None:
            own.master.copy_(values[FP32_PARAM])


# ---- TileFill: puts states from elsewhere where a model's tiles rest, each tile once ---------------------------------
#
#     fill a buffer with the next tile | write the previous one
#
# Whoever fills gets, for each parameter in a tile, the places of the elements that the tile holds of it, in the formats
# that they are kept in (zero/state_layout.py), all zero: what it leaves alone is the state before the first step. With
# `keeps` the tile is read first, and what it leaves alone stays as it was.
#
# Nothing is read back and nothing is gathered here: who shows the parameters is told afterwards (`Shards.refresh`).


class Places(NamedTuple):
    """Where elements of one parameter and its states lie, to be filled."""

    shard: Shard
    first: int  # element of the whole parameter that these begin with
    weight: torch.Tensor
    views: StateViews
    names: Sequence[str]  # of the moments, as torch names them

    @property
    def numel(self) -> int:
        """Elements."""
        return self.weight.numel()

    @property
    def master(self) -> torch.Tensor | None:
        """fp32; int16: the low bits of a split one; None: the weight is the master."""
        return self.views.master

    @property
    def moments(self) -> Mapping[str, Moment]:
        """By name; a tile may have room for more."""
        return dict(zip(self.names, self.views.moments, strict=False))

    def cut(self, most_numel: int) -> Iterator[Places]:
        """The same in pieces of at most so many elements, a multiple of 64."""
        for start in range(0, self.numel, most_numel):
            weight = self.weight[start : start + most_numel]
            views = self.views.piece(start, weight.numel())
            yield Places(self.shard, self.first + start, weight, views, self.names)


Filler = Callable[[Places], None]


class TileFill(TileMoves):
    """One filling of a model's tiles.

    Args:
        shards: the model.
        moments_of: what is kept of each parameter.
        filler: is called with the places of each parameter in each tile, in the order of the tiles.
        keeps: whether what the filler leaves alone stays as it was.
    """

    def __init__(self, shards: Shards, moments_of: MomentsOf, filler: Filler, keeps: bool) -> None:
        super().__init__(shards, moments_of, reads_weights=True)
        self._filler = filler
        self._keeps = keeps

    def _compute(self, tile: Tile, slot: Slot | None) -> None:
        """Lets a tile be filled."""
        views, params = self.open(tile, slot) if self._keeps else self._open_empty(tile, slot)
        for segment in tile.segments:
            self._filler(self._places(tile, segment, views, params))

    def _open_empty(self, tile: Tile, slot: Slot | None) -> tuple[StateViews, torch.Tensor]:
        states, params = self._states(tile, slot), self._params(tile, slot)
        states.zero_()
        params.zero_()
        return tile.layout.views(states, tile.numel), params

    def _places(self, tile: Tile, segment: Segment, views: StateViews, params: torch.Tensor) -> Places:
        own, start, numel = views.piece(segment.start, segment.numel), segment.start, segment.numel
        names = self._moments_of(segment.shard)
        first = tile.first_element(segment, self._shards.topology.shard_rank)
        return Places(segment.shard, first, params[start : start + numel], own, names)

    def _lasting_parts(self, tile: Tile) -> list[Part]:
        return super()._lasting_parts(tile) if self._keeps else []
