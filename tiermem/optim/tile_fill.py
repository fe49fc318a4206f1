"""TileFill: puts states from elsewhere where a model's tiles rest, each tile once.

    fill a buffer with the next tile | write the previous one

Whoever fills gets, for each parameter in a tile, the places of the elements that the tile holds of it, in the formats that
they are kept in (optim/layout.py), all zero: what it leaves alone is the state before the first step. With `keeps` the tile
is read first, and what it leaves alone stays as it was.

Nothing is read back and nothing is gathered here: who shows the parameters is told afterwards (`Shards.refresh`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tiermem.optim.layout import StateViews
from tiermem.optim.tile import Segment, Tile
from tiermem.optim.tile_moves import MomentsOf, Part, TileMoves
from tiermem.swap.arena import Slot
from tiermem.swap.parts import Moment
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard


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
