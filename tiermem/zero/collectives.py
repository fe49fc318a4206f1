"""Collectives: the few that partitioning needs, straight into and out of the layouts of a unit.

    gather   every rank's shard of a unit        -> the unit's full layout, parameter by parameter, no copy between
    reduce   every rank's gradient of a parameter -> the sum over ranks of this rank's part (the optimizer divides)
    total    float64 sums                        -> their sum over ranks
    share    rank 0's tensor                     -> the same on every rank
    exchange a small object of every rank        -> all of them, everywhere

torch.distributed does the work (NCCL on GPUs, gloo on CPUs). With one shard nothing is called. The sequence of calls is a
function of the program's sequence of units alone. A rank that dies, or is silent for longer than the policy's `timeout_s`,
makes the call fail on the others, with its name (rollcall.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tiermem.zero.topology import Topology
from tiermem.zero.unit import Shard, Unit


def gather_unit(topology: Topology, unit: Unit, shard: torch.Tensor, full: torch.Tensor) -> None:
    """Fills the full layout from every rank's flat shard layout. Blocks (in stream order on a GPU)."""
    for part in unit.shards:
        mine = shard[part.shard_offset : part.shard_offset + part.shard_numel]
        whole = full[part.full_offset : part.full_offset + part.shard_numel * topology.num_shards]
        if topology.num_shards == 1:
            whole.copy_(mine)
        elif part.numel:
            gather(topology, mine, whole, f"gathering {unit.name}")


def reduce_gradient(topology: Topology, part: Shard, grad: torch.Tensor, bucket_numel: int) -> torch.Tensor:
    """The sum over ranks of this rank's part of a gradient: flat, shard_numel elements, in the dtype that it is added up in.

    That is `part.reduce_dtype`, else the gradient's; in a world of one nothing is added and the dtype stays.
    """
    flat = grad.contiguous().view(-1)
    if topology.group is None:
        return flat
    flat = flat.to(part.reduce_dtype or flat.dtype)
    if topology.num_shards == 1:
        _call(topology, f"reducing {part.name}", dist.all_reduce, flat)
        return flat
    padded = part.shard_numel * topology.num_shards
    if padded != part.numel:
        flat = torch.nn.functional.pad(flat, (0, padded - part.numel))
    out = torch.empty(part.shard_numel, dtype=flat.dtype, device=flat.device)
    if padded <= bucket_numel:
        _call(topology, f"reducing {part.name}", dist.reduce_scatter_tensor, out, flat)
        return out
    rows, step = flat.view(topology.num_shards, part.shard_numel), max(1, bucket_numel // topology.num_shards)
    for start in range(0, part.shard_numel, step):
        piece = rows[:, start : start + step].contiguous().view(-1)
        _call(topology, f"reducing {part.name}", dist.reduce_scatter_tensor, out[start : start + step], piece)
    return out


def total(topology: Topology, sums: torch.Tensor) -> torch.Tensor:
    """Adds float64 sums over the ranks that hold different parts; in place. Blocks."""
    if topology.num_shards > 1:
        _call(topology, "adding up norms", dist.all_reduce, sums)
    return sums


def gather(topology: Topology, mine: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """Fills `whole` with every rank's part, in the order of ranks. Blocks."""
    _call(topology, what, dist.all_gather_into_tensor, whole, mine)


def share(topology: Topology, value: torch.Tensor, what: str) -> None:
    """Overwrites a tensor with rank 0's. Blocks; does nothing in a world of one."""
    if topology.group is not None:
        _call(topology, what, dist.broadcast, value, dist.get_global_rank(topology.group, 0))


def exchange(topology: Topology, value: str) -> list[str]:
    """Every rank's string, in the order of ranks. Blocks."""
    values: list[Any] = [None] * topology.world
    if topology.group is None:
        return [value]
    try:
        dist.all_gather_object(values, value, group=topology.group)
    except RuntimeError as error:
        raise _explained(topology, "comparing what ranks were given", error) from error
    return values


def _call(topology: Topology, what: str, collective: Callable[..., Any], *args: Any) -> None:
    """Runs a collective; a failure, or a wait longer than the topology's, names the rank that is gone."""
    try:
        work = collective(*args, group=topology.group, async_op=True)
        if args[0].device.type == "cpu":
            work.wait(timedelta(seconds=topology.timeout_s))
        else:
            work.wait()  # orders the stream; the backend's own watch keeps the time
    except RuntimeError as error:
        raise _explained(topology, what, error) from error


def _explained(topology: Topology, what: str, error: RuntimeError) -> RuntimeError:
    return error if topology.roll_call is None else topology.roll_call.explain(what, error)
