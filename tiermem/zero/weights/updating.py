"""Updating: the weights of units that stay present, brought from the ranks that have stepped them to all the others.

    a span of every rank's shard layout, at most `allgather_bucket_numel` elements of all ranks together, then the next

    all-gather (allgather_partitions)    every rank's span in one call, straight into the full layout
    broadcasts                           one rank's span after the other: its owner sends it as it rests, the others receive
                                         it in a buffer of one span and copy each parameter's part to its place

Both leave the same bits. A span ends where its room does, in the middle of a parameter or of several. What it bounds is what a
call carries, and with it the memory that is needed beside weights and shards: the buffer of broadcasts, what a backend
collects in, and on a GPU the span on its way there. Units that come and go are gathered whole (gather.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tiermem.policy import OffloadPolicy
from tiermem.swap.arena import Pool
from tiermem.zero.ranks.collectives import call
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.unit import Unit
from tiermem.zero.weights.gather import cut_span, gather_unit, spans_of


class Updating:
    """Brings new weights to all ranks. Collective: every rank calls it for the same units in the same order.

    Args:
        pool: a buffer of `span_bytes` of the largest unit, for broadcasts between CPUs; None: torch's own memory.
    """

    def __init__(self, topology: Topology, policy: OffloadPolicy, pool: Pool | None) -> None:
        self._topology = topology
        self._is_gathered = policy.allgather_partitions
        self._limit_numel = policy.allgather_bucket_numel
        self._pool = pool

    def spread(self, unit: Unit, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Fills a unit's full layout from every rank's flat shard layout. Raises RankLost.

        Blocks, on a GPU in stream order.
        """
        num_shards = self._topology.num_shards
        if num_shards == 1:
            gather_unit(self._topology, unit, shard.to(full.device), full)
            return
        for span in spans_of(unit, num_shards, self._limit_numel):
            mine = shard[span].to(full.device)
            if self._is_gathered:
                gather_unit(self._topology, unit, mine, full, span)
            else:
                self._broadcast(unit, mine, full, span)

    def _broadcast(self, unit: Unit, mine: torch.Tensor, full: torch.Tensor, span: slice) -> None:
        slot = self._pool.take() if self._pool is not None else None
        try:
            buffer = torch.empty_like(mine) if slot is None else slot.tensor[: mine.nbytes].view(mine.dtype)
            for owner in range(self._topology.num_shards):
                sent = mine if owner == self._topology.shard_rank else buffer
                source = dist.get_global_rank(self._topology.group_of("shard"), owner)
                call(self._topology, f"gathering {unit.name}", dist.broadcast, sent, source, among="shard")
                for part in cut_span(unit, span):
                    place = part.shard_offset - span.start
                    full[part.place_of(owner)].copy_(sent[place : place + part.numel])
        finally:
            if self._pool is not None and slot is not None:
                self._pool.give_back(slot)


def span_bytes(unit: Unit, num_shards: int, policy: OffloadPolicy) -> int:
    """Bytes of the buffer that a unit's broadcasts are received in; 0 when there are none."""
    if policy.allgather_partitions or num_shards == 1:
        return 0
    longest = max((s.stop - s.start for s in spans_of(unit, num_shards, policy.allgather_bucket_numel)), default=0)
    return longest * unit.dtype.itemsize
