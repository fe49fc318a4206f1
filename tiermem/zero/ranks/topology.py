"""Topology: which ranks share the parts of a tensor, and which hold copies of the same part.

    stage 0        every rank holds everything (shards = 1), gradients are averaged over all ranks (replicas = world)
    stage 1 to 3   every rank holds one part (shards = world), nobody holds a copy (replicas = 1)
    MiCS           ranks share the parts in groups (shards = the group's size), replicas across the groups (mesh.py)

Gradients are added up among those that share the parts, each getting its own, and then among those that hold copies of that
one. One process without a process group is a world of one rank; no group is made for it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tiermem.swap.accelerator import control_device
from tiermem.swap.paths import AnyPath, NvmePath, as_paths
from tiermem.zero.ranks.rollcall import RollCall
from tiermem.zero.ranks.traffic import Traffic
from tiermem.zero.ranks.watch import Watch


class Peers(NamedTuple):
    """Ranks that call a collective together, and this rank's place among them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Topology:
    """This rank's place. `group` is None in a world of one. Topologies are equal when they cut parameters alike."""

    group: dist.ProcessGroup | None  # all data-parallel ranks
    rank: int
    world: int
    num_shards: int
    shard_rank: int
    roll_call: RollCall | None = dataclasses.field(default=None, compare=False)
    timeout_s: float = dataclasses.field(default=1800.0, compare=False)  # longest wait for the other ranks
    traffic: Traffic = dataclasses.field(default_factory=Traffic, compare=False)
    watch: Watch | None = dataclasses.field(default=None, compare=False)  # of waits for others; None in a world of one
    shard_group: dist.ProcessGroup | None = dataclasses.field(default=None, compare=False)  # None: one shard
    replica_group: dist.ProcessGroup | None = dataclasses.field(default=None, compare=False)  # None: no copies
    across: Peers | None = dataclasses.field(default=None, compare=False)  # this place on every node of the shard group
    within: Peers | None = dataclasses.field(default=None, compare=False)  # the shard group's ranks on this node
    gathers_in_stages: bool = dataclasses.field(default=False, compare=False)  # across nodes first, then within
    packs_reductions: bool = dataclasses.field(default=False, compare=False)  # gradients cross as 8-bit blocks
    replica: int = dataclasses.field(default=0, compare=False)  # which copy of its part this rank holds
    mesh: DeviceMesh | None = dataclasses.field(
        default=None, compare=False
    )  # of those, where there are parts (mesh.py)
    control_device: torch.device = dataclasses.field(
        default=torch.device("cpu"), compare=False
    )  # where the group takes small tensors, and values of the CPU

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every group that this rank calls collectives in, each once."""
        near = [peers.group for peers in (self.across, self.within) if peers is not None]
        every = [self.group, self.shard_group, self.replica_group, *near]
        return list(dict.fromkeys(group for group in every if group is not None))

    @property
    def num_replicas(self) -> int:
        """Ranks that hold a copy of this rank's part."""
        return self.world // self.num_shards

    def group_of(self, among: str) -> dist.ProcessGroup:
        """The ranks of a dimension: "world" (all), "shard", "replica", "across" or "within"."""
        peers = self.across if among == "across" else self.within
        near = peers.group if peers is not None else None
        groups = {"world": self.group, "shard": self.shard_group, "replica": self.replica_group}
        group = groups.get(among, near)
        assert group is not None, f"nobody to call {among!r}"  # torch would take the world for it
        return group


def find_topology(
    stage: int,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
    device: torch.device | None = None,
) -> Topology:
    """The topology of a ZeRO stage over a process group (default: the world, if torch.distributed is initialised).

    Does not wait for the other ranks: the first agreement (agreement.py) does. Raises ValueError for a group that takes no
    tensors of the device.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Topology(None, 0, 1, 1, 0)
    group = group or dist.group.WORLD
    assert group is not None
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:
        return Topology(None, 0, 1, 1, 0)
    bound_waits(group, timeout_s)
    control = control_device(group, device or torch.device("cpu"))
    ranks, traffic = dist.get_process_group_ranks(group), Traffic()
    roll_call, watch = RollCall(ranks), Watch(ranks, traffic)
    found = Topology(
        group, rank, world, 1, 0, roll_call, timeout_s, traffic, watch, replica_group=group, control_device=control
    )
    if stage == 0:
        return found
    return dataclasses.replace(found, num_shards=world, shard_rank=rank, replica_group=None, shard_group=group)


def bound_waits(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Gives gloo our time-out as well: its threads would wait for as long as the group was made to, and the exit for them."""
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # private: without it only the exit is slower
    if set_timeout is not None and "cpu:gloo" in dist.get_backend_config(group):
        set_timeout(timedelta(seconds=timeout_s), group)


def ranks_per_node() -> int:
    """Ranks that share this node's memory and cores: torchrun says so in LOCAL_WORLD_SIZE; else all of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def paths_of_rank(paths: AnyPath | Sequence[AnyPath]) -> tuple[NvmePath, ...]:
    """The paths with this rank's share of their caps, which are per node."""
    ranks = ranks_per_node()
    return tuple(
        path if path.max_bytes is None else dataclasses.replace(path, max_bytes=max(1, path.max_bytes // ranks))
        for path in as_paths(paths)
    )


def fair_threads() -> int:
    """This rank's share of the cores it may run on, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ranks_per_node())


def fair_cores() -> tuple[int, ...]:
    """The cores of that share: no two ranks of a node have one in common, where there is one for each."""
    cores, share, ranks = sorted(os.sched_getaffinity(0)), fair_threads(), ranks_per_node()
    if share * ranks > len(cores):
        return ()
    local_rank = 0 if ranks == 1 else int(os.environ.get("LOCAL_RANK", dist.get_rank() % ranks))
    return tuple(cores[local_rank * share : (local_rank + 1) * share])


def give_fair_threads() -> int:
    """Sets torch's threads to the fair share (torchrun sets OMP_NUM_THREADS=1) and returns it."""
    threads = fair_threads()
    if torch.get_num_threads() != threads and ranks_per_node() > 1:
        torch.set_num_threads(threads)
    return threads
