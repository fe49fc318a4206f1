"""Gather: every rank's part of something, brought together on all of them, straight into its final place.

gather_unit   every rank's shard of a unit     -> the unit's full layout, parameter by parameter, no copy between
gather        every rank's part of one tensor  -> the whole, in the order of ranks
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tiermem.zero.collectives import Pending, call
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Unit


def gather_unit(topology: Topology, unit: Unit, shard: torch.Tensor, full: torch.Tensor) -> None:
    """Fills the full layout from every rank's flat shard layout. Blocks (in stream order on a GPU)."""
    for part in unit.shards:
        mine = shard[part.shard_offset : part.shard_offset + part.shard_numel]
        whole = full[part.full_offset : part.full_offset + part.shard_numel * topology.num_shards]
        if topology.num_shards == 1:
            whole.copy_(mine)
        elif part.numel:
            gather(topology, mine, whole, f"gathering {unit.name}")


class PlainGather:
    """The gather of one unit from every rank's shard, in two steps: `put` the shard, `start` the exchange."""

    def __init__(self, topology: Topology, unit: Unit, full: torch.Tensor) -> None:
        self._topology = topology
        self._unit = unit
        self._full = full
        self._shard: torch.Tensor | None = None

    def put(self, shard: torch.Tensor | None) -> None:
        """Takes this rank's flat shard layout, until the exchange has ended."""
        self._shard = shard

    def start(self) -> Pending:
        """Fills the full layout. Collective; blocks (in stream order on a GPU). Raises RankLost."""
        assert self._shard is not None
        gather_unit(self._topology, self._unit, self._shard, self._full)
        self._shard = None
        return Pending(self._topology, f"gathering {self._unit.name}", [], [self._full])


def gather(topology: Topology, mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """Fills `whole` with the parts of the ranks that share it, in their order. Blocks."""
    if topology.gathers_in_stages:
        _gather_in_stages(topology, mine, whole, what)
    else:
        call(topology, what, dist.all_gather_into_tensor, whole, mine, among="shard")


def _gather_in_stages(topology: Topology, mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """Gathers from this rank's place on every node, then one node's parts after the other within this node.

    A byte crosses to this node once for all its ranks. The first stage takes a buffer of num_across parts.
    """
    assert topology.across is not None
    num_nodes = topology.across.size
    from_nodes = mine.new_empty(num_nodes, mine.numel())
    call(topology, what, dist.all_gather_into_tensor, from_nodes.view(-1), mine, among="across")
    for node, of_node in zip(from_nodes, whole.view(num_nodes, -1), strict=True):
        call(topology, what, dist.all_gather_into_tensor, of_node, node, among="within")
