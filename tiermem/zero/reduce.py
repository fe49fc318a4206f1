"""Reduce: every rank's gradient of a parameter, added up, and of the sum this rank's part (the optimizer divides)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tiermem.zero.collectives import call
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Shard


def reduce_gradient(topology: Topology, part: Shard, grad: torch.Tensor, bucket_numel: int) -> torch.Tensor:
    """The sum over ranks of this rank's part of a gradient: flat, shard_numel elements, in the dtype that it is added up in.

    That is `part.reduce_dtype`, else the gradient's; in a world of one nothing is added and the dtype stays.
    """
    flat = grad.contiguous().view(-1)
    if topology.group is None:
        return flat
    flat = flat.to(part.reduce_dtype or flat.dtype)
    if topology.num_shards == 1:
        return _add_replicas(topology, part, flat)
    padded = part.shard_numel * topology.num_shards
    if padded != part.numel:
        flat = torch.nn.functional.pad(flat, (0, padded - part.numel))
    out = torch.empty(part.shard_numel, dtype=flat.dtype, device=flat.device)
    if padded <= bucket_numel:
        call(topology, f"reducing {part.name}", dist.reduce_scatter_tensor, out, flat, among="shard")
        return _add_replicas(topology, part, out)
    rows, step = flat.view(topology.num_shards, part.shard_numel), max(1, bucket_numel // topology.num_shards)
    for start in range(0, part.shard_numel, step):
        piece = rows[:, start : start + step].contiguous().view(-1)
        target = out[start : start + step]
        call(topology, f"reducing {part.name}", dist.reduce_scatter_tensor, target, piece, among="shard")
    return _add_replicas(topology, part, out)


def _add_replicas(topology: Topology, part: Shard, mine: torch.Tensor) -> torch.Tensor:
    """Adds up this rank's part of a gradient over the ranks that hold copies of it; in place."""
    if topology.num_replicas > 1:
        call(topology, f"reducing {part.name}", dist.all_reduce, mine, among="replica")
    return mine
