"""Mesh: the process groups inside the data-parallel ranks, for sharding within a part of them (MiCS) and near them (hpZ).

Ranks are counted through three dimensions, the last one fastest, and make a DeviceMesh of them:

    replica   ranks that hold the same part              world / num_shards of them
    across    nodes that a shard group spreads over      num_shards / num_within
    within    ranks of a shard group on one node         num_within

        rank = (replica x num_across + across) x num_within + within       shard_rank = across x num_within + within

    8 ranks, 4 to a node, shards in fours      replica 2, across 1, within 4     {0 1 2 3} {4 5 6 7}
    8 ranks, 2 to a node, shards in fours      replica 2, across 2, within 2     {0 1|2 3} {4 5|6 7}
    8 ranks, 4 to a node, one shard group      replica 1, across 2, within 4     {0 1 2 3|4 5 6 7}

Ranks are near when they share a node (LOCAL_WORLD_SIZE) or, with hpZ, when they keep a secondary copy together. A shard group
that nothing gathers or reduces in two stages is one row: across 1. Dimensions of one rank are left out of the mesh. Sizes
that do not divide are refused with the arithmetic before any group is made.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tiermem.policy import OffloadPolicy
from tiermem.zero.ranks.topology import Peers, Topology, bound_waits

# Parts of a group by their ranks. torch finds the members of a group by a name made of their ranks, under which the keys of a
# destroyed one are still in the store: a group is made once for every list of ranks, whoever asks.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
_ASIDE: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Layout(NamedTuple):
    """Sizes of the three dimensions."""

    num_replicas: int
    num_across: int
    num_within: int

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the states."""
        return self.num_across * self.num_within

    def place(self, rank: int) -> tuple[int, int, int]:
        """A rank's place in each dimension."""
        outer, within = divmod(rank, self.num_within)
        return outer // self.num_across, outer % self.num_across, within

    def peers(self, rank: int, dimension: str) -> list[int]:
        """The ranks that differ from this one in a dimension alone ("shard": in across and within), in order."""
        replica, across, within = self.place(rank)
        replicas = range(self.num_replicas) if dimension == "replica" else (replica,)
        nodes = range(self.num_across) if dimension in ("across", "shard") else (across,)
        locals_ = range(self.num_within) if dimension in ("within", "shard") else (within,)
        return [(r * self.num_across + a) * self.num_within + w for r in replicas for a in nodes for w in locals_]


def plan_layout(world: int, policy: OffloadPolicy, ranks_on_node: int) -> Layout:
    """The layout of `world` data-parallel ranks under a policy. Raises ValueError when sizes do not divide."""
    if policy.stage == 0:
        return Layout(world, 1, 1)
    num_shards = policy.shard_group_size or world
    if world % num_shards:
        raise ValueError(
            f"shard_group_size={num_shards} (mics_shard_size in a config) does not divide the {world} data-parallel ranks: "
            f"{world} = {world // num_shards} x {num_shards} + {world % num_shards}. Allowed are {_divisors(world)}"
        )
    num_within = _num_within(num_shards, policy, ranks_on_node)
    if num_shards % num_within:
        raise ValueError(
            f"secondary_group_size={num_within} (zero_hpz_partition_size in a config) does not divide the {num_shards} ranks "
            f"that share the parameters: {num_shards} = {num_shards // num_within} x {num_within} + {num_shards % num_within}. "
            f"Allowed are {_divisors(num_shards)}"
        )
    return Layout(world // num_shards, num_shards // num_within, num_within)


def plan_topology(world: int, policy: OffloadPolicy, ranks_on_node: int) -> Topology:
    """Rank 0's place among ranks that are not there: sizes without groups, for plans. Raises ValueError as `plan_layout`."""
    layout = plan_layout(world, policy, ranks_on_node)
    has_stages = layout.num_across > 1 and layout.num_within > 1
    return Topology(
        None,
        0,
        world,
        layout.num_shards,
        0,
        across=Peers(None, 0, layout.num_across) if has_stages else None,
        within=Peers(None, 0, layout.num_within) if has_stages else None,
        gathers_in_stages=has_stages and policy.two_stage_gather,
        packs_reductions=policy.quantised_reduction and layout.num_shards > 1,
    )


def numbered(topology: Topology, parts: Sequence[int]) -> Topology:
    """All ranks of a topology share parameters, each keeping the part that is said: `parts`, in the order of ranks.

    Collective over the topology's ranks; blocks. Raises ValueError where torch cannot make a group in such an order.
    """
    ranks = _in_order_of_parts(topology, parts)
    return dataclasses.replace(
        topology, shard_rank=parts[topology.rank], shard_group=_group_of(topology, ranks, "shard")
    )


def arrange(
    topology: Topology,
    policy: OffloadPolicy,
    ranks_on_node: int,
    device_type: str = "cpu",
    parts: Sequence[int] | None = None,
) -> Topology:
    """This rank's place and groups under a policy; `topology` as it is when that needs no groups of its own.

    parts: the place that each rank takes in the three dimensions, in the order of ranks; default: that of its number.

    Collective over the topology's ranks, which must have agreed on the policy before; blocks. Groups are made once and live as
    long as the topology's own. Raises ValueError when sizes do not divide.
    """
    layout = plan_layout(topology.world, policy, ranks_on_node)
    if topology.group is None:
        return topology
    own = range(topology.world) if parts is None else parts
    everyone, place = _in_order_of_parts(topology, own), own[topology.rank]
    has_stages = layout.num_across > 1 and layout.num_within > 1
    groups: dict[str, dist.ProcessGroup] = {}
    for dimension in ("replica", "shard", *(("across", "within") if has_stages else ())):
        ranks = [everyone[r] for r in layout.peers(place, dimension)]
        if ranks == dist.get_process_group_ranks(topology.group):
            groups[dimension] = topology.group
        elif len(ranks) > 1:
            groups[dimension] = _group_of(topology, ranks, dimension)
    has_parts = any(group is not topology.group for group in groups.values())
    replica, across, within = layout.place(place)
    return dataclasses.replace(
        topology,
        num_shards=layout.num_shards,
        shard_rank=across * layout.num_within + within,
        shard_group=groups.get("shard"),
        replica_group=groups.get("replica"),
        across=Peers(groups["across"], across, layout.num_across) if has_stages else None,
        within=Peers(groups["within"], within, layout.num_within) if has_stages else None,
        gathers_in_stages=has_stages and policy.two_stage_gather,
        packs_reductions=policy.quantised_reduction and layout.num_shards > 1,
        replica=replica,
        mesh=_mesh(layout, everyone, groups, device_type) if has_parts else None,
    )


def ranks_of(
    given: dist.ProcessGroup | DeviceMesh | None, policy: OffloadPolicy
) -> tuple[dist.ProcessGroup | None, OffloadPolicy]:
    """The data-parallel ranks that a user names by a group or a mesh, and the policy with what the mesh says.

    A mesh of one dimension is its group. One of two is (replicas, shards), as torch's `fully_shard` takes it, and holds all
    ranks: its second size is the policy's `shard_group_size`. Raises ValueError for other meshes.
    """
    if not isinstance(given, DeviceMesh):
        return given, policy
    if given.ndim == 1:
        return given.get_group(), policy
    sizes, ranks = tuple(given.mesh.shape), given.mesh.flatten().tolist()
    if given.ndim != 2 or ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"a mesh of sizes {sizes} over ranks {ranks} given; allowed are one dimension, or (replicas, shards) "
            f"that hold all {dist.get_world_size()} ranks in their order"
        )
    if policy.shard_group_size not in (None, sizes[1]):
        raise ValueError(
            f"shard_group_size={policy.shard_group_size} with a mesh that shards over {sizes[1]} ranks: leave one of them out"
        )
    return dist.group.WORLD, dataclasses.replace(policy, shard_group_size=sizes[1])


def _num_within(num_shards: int, policy: OffloadPolicy, ranks_on_node: int) -> int:
    """Ranks of a shard group that are near each other; all of it where nothing happens in two stages."""
    if policy.secondary_group_size > 1:
        return policy.secondary_group_size
    has_two_stages = policy.two_stage_gather or policy.quantised_reduction
    return ranks_on_node if has_two_stages and num_shards % ranks_on_node == 0 else num_shards


def _in_order_of_parts(topology: Topology, parts: Sequence[int]) -> list[int]:
    """The topology's ranks by what they keep."""
    assert topology.group is not None
    ranks = dist.get_process_group_ranks(topology.group)
    return [ranks[index] for index in sorted(range(len(ranks)), key=lambda index: parts[index])]


def _group_of(topology: Topology, ranks: list[int], dimension: str) -> dist.ProcessGroup:
    """The process group of some of the topology's ranks; only they call this, in the same order as their other groups."""
    assert topology.group is not None
    made = _GROUPS.setdefault(topology.group, {})
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"ranks were given parts in the order {ranks} (get_partition_rank of a zero.Init), but torch {torch.__version__} "
            "makes groups in the order of ranks alone: take a newer one, or leave the parts in that order"
        )
    if tuple(ranks) not in made:
        made[tuple(ranks)] = dist.new_group(
            ranks,
            timeout=timedelta(seconds=topology.timeout_s),
            backend=dist.get_backend_config(topology.group),
            use_local_synchronization=True,
            group_desc=f"tiermem {dimension}",
            **order,
        )
    bound_waits(made[tuple(ranks)], topology.timeout_s)
    return made[tuple(ranks)]


def group_aside(topology: Topology) -> dist.ProcessGroup:
    """All ranks of a topology once more, for what a thread calls while others train: over gloo, on any device.

    Collective the first time; made once.
    """
    assert topology.group is not None
    if topology.group not in _ASIDE:
        _ASIDE[topology.group] = dist.new_group(
            dist.get_process_group_ranks(topology.group),
            timeout=timedelta(seconds=topology.timeout_s),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="tiermem aside",
        )
    return _ASIDE[topology.group]


def _mesh(layout: Layout, everyone: list[int], groups: dict[str, dist.ProcessGroup], device_type: str) -> DeviceMesh:
    """The dimensions of several ranks as a DeviceMesh; `shard` stands for `across` and `within` where these are one row."""
    sizes = {"replica": layout.num_replicas}
    if "within" in groups:
        sizes |= {"across": layout.num_across, "within": layout.num_within}
    else:
        sizes["shard"] = layout.num_shards
    sizes = {name: size for name, size in sizes.items() if size > 1}
    ranks = torch.tensor(everyone).view(*sizes.values())
    return DeviceMesh.from_group([groups[n] for n in sizes], device_type, ranks, mesh_dim_names=tuple(sizes))


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
