"""Gather: every rank's part of something, brought together on all of them, straight into its final place.

gather_unit   every rank's shard of a unit     -> the unit's full layout, parameter by parameter, no copy between
gather        every rank's part of one tensor  -> the whole, in the order of ranks
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tiermem.zero.collectives import call
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


def gather(topology: Topology, mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """Fills `whole` with every rank's part, in the order of ranks. Blocks."""
    call(topology, what, dist.all_gather_into_tensor, whole, mine)
