"""TileVisit: lets a function change states of chosen parameters while their tiles pass through the buffers once.

    read the next tile | widen -> the function -> round back | write the previous tile

The function sees, for each chosen parameter in a tile, the elements that the tile holds of it, in fp32:

    {"fp32_param": ..., "exp_avg": ..., "exp_avg_sq": ...}      flat tensors, to be changed in place

Values that it leaves alone come back to the bit in every precision. The parameter follows its master.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from tiermem.optim.layout import StateViews, is_positive
from tiermem.optim.tile import Segment, Tile
from tiermem.optim.tile_moves import MomentsOf, TileMoves
from tiermem.swap.arena import Slot
from tiermem.swap.native import narrow_part, widen_part
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard

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
