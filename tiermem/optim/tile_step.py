"""TileStep: one optimizer step of a tile, and TileStart: its first states without a step.

The step is one pass of a native kernel per parameter in the tile; elements between parameters are never stepped. How a
tile comes and goes: tile_moves.py.

Stochastic rounding is told the parameter's name, its own count of steps and where in the whole parameter the tile's
elements lie: not where the tile was cut, nor on which of how many ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from tiermem.optim.layout import StateViews
from tiermem.optim.stepping import AnyStep, step_parts
from tiermem.optim.tile import Segment, Tile
from tiermem.optim.tile_moves import MomentsOf, TileMoves, fp32_master
from tiermem.policy import Tier
from tiermem.swap.arena import Slot
from tiermem.swap.parts import Dither, StepParts
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard

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
