"""Topology: which ranks share the parts of a tensor, which ranks hold copies of a part, and their
process groups."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tiermem.policy import OffloadPolicy
from tiermem.ranks.failures import Traffic, Watch
from tiermem.swap.base.native import Workers
from tiermem.swap.disk.paths import AnyPath, NvmePath, as_paths
from tiermem.swap.memory.accelerator import backends_of, control_device, pci_addresses
from tiermem.swap.memory.arena import Arena
from tiermem.swap.memory.nodes import SYSFS, deal_cores, node_of_cores, node_of_pci, read_nodes

logger = logging.getLogger("tiermem")

# ---- a rank's place ------------------------------------------------------------------------------
#
#     stage 0        every rank holds everything (shards = 1), gradients are averaged over all ranks (replicas = world)
#     stage 1 to 3   every rank holds one part (shards = world), no rank holds a copy (replicas = 1)
#     MiCS           groups of ranks share the parts (shards = the group's size); each group holds a copy (replicas = groups)
#
# Gradients are added up first among the ranks that share the parts, each rank getting its own part,
# and then among the ranks that hold copies of that part. A process without a process group is a
# world of one rank; no group is made for it.


class Peers(NamedTuple):
    """Ranks that call a collective together, and this rank's place among them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class _RankShare:
    """How parameters are divided, and the share that this rank holds."""

    group: dist.ProcessGroup | None  # all data-parallel ranks
    rank: int
    world: int
    num_shards: int
    shard_rank: int


@dataclasses.dataclass(frozen=True, eq=False)
class Topology(_RankShare):
    """This rank's place. `group` is None in a world of one. Topologies are equal when they divide
    parameters alike."""

    timeout_s: float = 1800.0  # longest wait for the other ranks
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    watch: Watch | None = None  # watches waits; None in a world of one
    shard_group: dist.ProcessGroup | None = None  # None: one shard
    replica_group: dist.ProcessGroup | None = None  # None: no copies
    across: Peers | None = None  # ranks at this place on each node
    within: Peers | None = None  # the shard group's ranks on this node
    gathers_in_stages: bool = False  # gathers across nodes first, then within
    packs_reductions: bool = False  # gradients cross ranks as 8-bit blocks
    replica: int = 0  # which copy of its part this rank holds
    mesh: DeviceMesh | None = None  # None: no dimension has its own group
    # The device on which the group takes small tensors, and values of CPU tensors.
    control_device: torch.device = dataclasses.field(default=torch.device("cpu"))

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Every group in which this rank calls collectives, each once."""
        near = [peers.group for peers in (self.across, self.within) if peers is not None]
        every = [self.group, self.shard_group, self.replica_group, *near]
        return list(dict.fromkeys(group for group in every if group is not None))

    @property
    def num_replicas(self) -> int:
        """Ranks that hold a copy of this rank's part, this rank included."""
        return self.world // self.num_shards

    def check_alone(self) -> None:
        """After an interrupt amid what ranks do together: raises RankLost from now on, unless this
        rank is alone."""
        if self.watch is not None:
            self.watch.is_torn = True
            self.watch.check_whole()

    def group_of(self, among: str) -> dist.ProcessGroup:
        """The process group of a dimension: "world" (all), "shard", "replica", "across" or
        "within"."""
        peers = self.across if among == "across" else self.within
        near = peers.group if peers is not None else None
        groups = {"world": self.group, "shard": self.shard_group, "replica": self.replica_group}
        group = groups.get(among, near)
        assert group is not None, f"no ranks are {among!r}"  # torch would use the world instead
        return group


def find_topology(
    stage: int,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 1800.0,
    device: torch.device | None = None,
) -> Topology:
    """The topology of a ZeRO stage over a process group (default: the world, if torch.distributed
    is initialised).

    Does not wait for other ranks; the first agreement (agreement.py) does. Raises ValueError for a
    group that takes no tensors of the device.
    """
    alone = Topology(None, 0, 1, 1, 0)
    if not dist.is_initialized():
        return alone
    group = group or dist.group.WORLD
    assert group is not None
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    if world == 1:
        return alone
    bound_waits(group, timeout_s)
    control = control_device(group, device or torch.device("cpu"))
    ranks = dist.get_process_group_ranks(group)
    traffic = Traffic()
    found = Topology(
        group,
        rank,
        world,
        1,
        0,
        timeout_s,
        traffic,
        Watch(ranks, traffic, timeout_s),
        replica_group=group,
        control_device=control,
    )
    if stage == 0:
        return found
    return dataclasses.replace(
        found, num_shards=world, shard_rank=rank, replica_group=None, shard_group=group
    )


def bound_waits(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Sets gloo's own time-out as well; else its threads, and so the process's exit, wait for the
    group's original time-out."""
    # private; without it exits take longer
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is not None and "cpu:gloo" in dist.get_backend_config(group):
        set_timeout(timedelta(seconds=timeout_s), group)


def ranks_per_node() -> int:
    """Ranks that share this node's memory and cores: LOCAL_WORLD_SIZE, which torchrun sets; else
    all ranks."""
    if not dist.is_initialized():
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def paths_of_rank(paths: AnyPath | Sequence[AnyPath]) -> tuple[NvmePath, ...]:
    """The paths with this rank's share of their caps. The caps are bytes per node."""
    ranks = ranks_per_node()
    return tuple(
        path
        if path.max_bytes is None
        else dataclasses.replace(path, max_bytes=max(1, path.max_bytes // ranks))
        for path in as_paths(paths)
    )


def fair_cores(device: torch.device | None = None, sysfs: Path = SYSFS) -> tuple[int, ...]:
    """The cores of this rank's share, near its accelerator. Ranks share no core; empty with fewer
    cores than ranks."""
    ranks = ranks_per_node()
    local_rank = 0 if ranks == 1 else int(os.environ.get("LOCAL_RANK", dist.get_rank() % ranks))
    addresses = pci_addresses(device or torch.device("cpu"), ranks)
    wanted = [node_of_pci(address, sysfs) for address in addresses]
    return deal_cores(os.sched_getaffinity(0), read_nodes(sysfs), wanted, local_rank)


def fair_threads(device: torch.device | None = None) -> int:
    """The number of cores in this rank's share, at least one."""
    return max(1, len(fair_cores(device)))


def give_fair_threads(device: torch.device) -> int:
    """Sets torch's threads to the fair share (torchrun sets OMP_NUM_THREADS=1) and returns the
    share."""
    threads = fair_threads(device)
    if torch.get_num_threads() != threads and ranks_per_node() > 1:
        torch.set_num_threads(threads)
    return threads


def near_workers(device: torch.device, arena: Arena, sysfs: Path = SYSFS) -> Workers:
    """Kernel threads on the fair share of cores. The arena's memory prefers the node that holds all
    of them.

    Nothing is preferred on a machine of one node. A kernel may refuse it, as in some containers:
    then memory lies where the kernel puts it. The caller closes the workers.
    """
    cores = fair_cores(device, sysfs)
    node = node_of_cores(cores, read_nodes(sysfs))
    try:
        if node is not None:
            arena.bind(node)
    except OSError as error:
        logger.info("memory is not near the cores of node %d: %s", node, error)
    return Workers(give_fair_threads(device), cores)


# ---- process groups for MiCS and hpZ -------------------------------------------------------------
#
# Ranks are counted through three dimensions, the last one fastest. A DeviceMesh holds them:
#
#     replica   ranks that hold the same part              world / num_shards of them
#     across    nodes that a shard group spreads over      num_shards / num_within
#     within    ranks of a shard group on one node         num_within
#
#         rank = (replica x num_across + across) x num_within + within       shard_rank = across x num_within + within
#
#     8 ranks, 4 to a node, shards in fours      replica 2, across 1, within 4     {0 1 2 3} {4 5 6 7}
#     8 ranks, 2 to a node, shards in fours      replica 2, across 2, within 2     {0 1|2 3} {4 5|6 7}
#     8 ranks, 4 to a node, one shard group      replica 1, across 2, within 4     {0 1 2 3|4 5 6 7}
#
# Ranks are near when they share a node (LOCAL_WORLD_SIZE) or, with hpZ, when they keep a second
# copy together. A shard group without two-stage gathers or reductions has across 1. Dimensions of
# one rank are left out of the mesh. Sizes that do not divide raise ValueError before any group is
# made.

# The groups made inside a group, by their backends and ranks. torch names a group by its ranks, and
# the store keeps the keys of a destroyed group under that name. So a group is made once for every
# list of ranks.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Any, ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)


class Layout(NamedTuple):
    """The sizes of the three dimensions."""

    num_replicas: int
    num_across: int
    num_within: int

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the states."""
        return self.num_across * self.num_within

    @property
    def has_stages(self) -> bool:
        """Whether a shard group spreads over several nodes, with several ranks on each."""
        return self.num_across > 1 and self.num_within > 1

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """The coordinates of a rank: its number in each dimension."""
        outer, within = divmod(rank, self.num_within)
        return outer // self.num_across, outer % self.num_across, within

    def peers(self, rank: int, dimension: str) -> list[int]:
        """The ranks that differ from `rank` only in one dimension ("shard": in across and within),
        in order."""
        replica, across, within = self.coordinates(rank)
        replicas = range(self.num_replicas) if dimension == "replica" else (replica,)
        nodes = range(self.num_across) if dimension in ("across", "shard") else (across,)
        locals_ = range(self.num_within) if dimension in ("within", "shard") else (within,)
        return [
            (r * self.num_across + a) * self.num_within + w
            for r in replicas
            for a in nodes
            for w in locals_
        ]


def plan_layout(world: int, policy: OffloadPolicy, ranks_on_node: int) -> Layout:
    """The layout of `world` data-parallel ranks under a policy. Raises ValueError when sizes do not
    divide."""
    if policy.stage == 0:
        return Layout(world, 1, 1)
    num_shards = policy.shard_group_size or world
    if world % num_shards:
        raise ValueError(
            f"shard_group_size={num_shards} (mics_shard_size in a config) does not divide the "
            f"{world} data-parallel ranks: {world} = {world // num_shards} x {num_shards} + "
            f"{world % num_shards}. Allowed are {_divisors(world)}"
        )
    num_within = _num_within(num_shards, policy, ranks_on_node)
    if num_shards % num_within:
        raise ValueError(
            f"secondary_group_size={num_within} (zero_hpz_partition_size in a config) does not "
            f"divide the {num_shards} ranks that share the parameters: {num_shards} = "
            f"{num_shards // num_within} x {num_within} + {num_shards % num_within}. Allowed are "
            f"{_divisors(num_shards)}"
        )
    return Layout(world // num_shards, num_shards // num_within, num_within)


def plan_topology(world: int, policy: OffloadPolicy, ranks_on_node: int) -> Topology:
    """Rank 0's topology for `world` imagined ranks: sizes without groups, for plans. Raises
    ValueError as `plan_layout`."""
    return _placed(
        Topology(None, 0, world, 1, 0), plan_layout(world, policy, ranks_on_node), 0, policy, {}
    )


def numbered(topology: Topology, parts: Sequence[int]) -> Topology:
    """A topology in which all ranks share parameters and rank r keeps part `parts[r]`.

    Collective over the topology's ranks; blocks. Raises ValueError when torch cannot make a group
    in such an order.
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
    """This rank's place and groups under a policy.

    parts: the part that each rank holds, in the order of ranks; default: the rank's number.

    Collective over the topology's ranks, which must have agreed on the policy before; blocks.
    Groups are made once and live as long as the topology's own. Returns `topology` itself in a
    world of one. Raises ValueError when sizes do not divide.
    """
    layout = plan_layout(topology.world, policy, ranks_on_node)
    if topology.group is None:
        return topology
    own = range(topology.world) if parts is None else parts
    everyone = _in_order_of_parts(topology, own)
    own_part = own[topology.rank]
    groups: dict[str, dist.ProcessGroup] = {}
    for dimension in ("replica", "shard", *(("across", "within") if layout.has_stages else ())):
        ranks = [everyone[r] for r in layout.peers(own_part, dimension)]
        if ranks == dist.get_process_group_ranks(topology.group):
            groups[dimension] = topology.group
        elif len(ranks) > 1:
            groups[dimension] = _group_of(topology, ranks, dimension)
    has_parts = any(group is not topology.group for group in groups.values())
    mesh = _mesh(layout, everyone, groups, device_type) if has_parts else None
    return dataclasses.replace(_placed(topology, layout, own_part, policy, groups), mesh=mesh)


def _placed(
    topology: Topology,
    layout: Layout,
    own_part: int,
    policy: OffloadPolicy,
    groups: Mapping[str, dist.ProcessGroup],
) -> Topology:
    """The topology of the rank that holds a part of a layout."""
    replica, across, within = layout.coordinates(own_part)
    return dataclasses.replace(
        topology,
        num_shards=layout.num_shards,
        shard_rank=across * layout.num_within + within,
        shard_group=groups.get("shard"),
        replica_group=groups.get("replica"),
        across=Peers(groups.get("across"), across, layout.num_across)
        if layout.has_stages
        else None,
        within=Peers(groups.get("within"), within, layout.num_within)
        if layout.has_stages
        else None,
        gathers_in_stages=layout.has_stages and policy.two_stage_gather,
        packs_reductions=policy.quantised_reduction and layout.num_shards > 1,
        replica=replica,
    )


def ranks_of(
    given: dist.ProcessGroup | DeviceMesh | None, policy: OffloadPolicy
) -> tuple[dist.ProcessGroup | None, OffloadPolicy]:
    """The data-parallel ranks of a user's group or mesh, and the policy with the mesh's size of
    shard groups.

    A mesh of one dimension stands for its group. A mesh of two is (replicas, shards), as torch's
    `fully_shard` takes it, and holds all ranks; its second size becomes the policy's
    `shard_group_size`. Raises ValueError for other meshes.
    """
    if not isinstance(given, DeviceMesh):
        return given, policy
    if given.ndim == 1:
        return given.get_group(), policy
    sizes = tuple(given.mesh.shape)
    ranks = given.mesh.flatten().tolist()
    if given.ndim != 2 or ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"a mesh of sizes {sizes} over ranks {ranks} given; allowed are one dimension, or "
            f"(replicas, shards) that hold all {dist.get_world_size()} ranks in their order"
        )
    if policy.shard_group_size not in (None, sizes[1]):
        raise ValueError(
            f"shard_group_size={policy.shard_group_size} with a mesh that shards over {sizes[1]} "
            "ranks: leave one of them out"
        )
    return dist.group.WORLD, dataclasses.replace(policy, shard_group_size=sizes[1])


def _num_within(num_shards: int, policy: OffloadPolicy, ranks_on_node: int) -> int:
    """Ranks of a shard group that are near each other; the whole group when nothing runs in two
    stages."""
    if policy.secondary_group_size > 1:
        return policy.secondary_group_size
    has_two_stages = policy.two_stage_gather or policy.quantised_reduction
    return ranks_on_node if has_two_stages and num_shards % ranks_on_node == 0 else num_shards


def _in_order_of_parts(topology: Topology, parts: Sequence[int]) -> list[int]:
    """The topology's ranks, sorted by the parts that they keep."""
    assert topology.group is not None
    ranks = dist.get_process_group_ranks(topology.group)
    return [rank for _, rank in sorted(zip(parts, ranks, strict=True))]


def _group_of(
    topology: Topology, ranks: list[int], purpose: str, backend: str = ""
) -> dist.ProcessGroup:
    """The process group of some of the topology's ranks. Collective over these ranks; all make
    groups in the same order.

    Where the world's group has a device (`device_id`), torch splits the new group from it, for
    which NCCL needs all ranks: each rank of the topology makes a group at that time, and the
    topology holds all ranks. Raises ValueError where it does not.

    backend: default: the topology's.
    """
    assert topology.group is not None
    if _bound_device() is not None and topology.world != dist.get_world_size():
        raise ValueError(
            "the process group was made with a device_id, so groups of its ranks are split from it "
            f"by all {dist.get_world_size()}, and the model is shared among {topology.world}: make "
            "it without device_id"
        )
    made = _GROUPS.setdefault(topology.group, {})
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise ValueError(
            f"ranks were given parts in the order {ranks} (get_partition_rank of a zero.Init), but "
            f"torch {torch.__version__} makes groups in the order of ranks alone: take a newer "
            "one, or leave the parts in that order"
        )
    key = (backend, *ranks)
    if key not in made:
        made[key] = dist.new_group(
            ranks,
            timeout=timedelta(seconds=topology.timeout_s),
            backend=backend or dist.get_backend_config(topology.group),
            use_local_synchronization=True,
            group_desc=f"tiermem {purpose}",
            **order,
        )
    bound_waits(made[key], topology.timeout_s)
    return made[key]


def _bound_device() -> torch.device | None:
    """The device of the world's group, if torch splits new groups from that."""
    world = dist.group.WORLD
    device = None if world is None else world.bound_device_id
    if world is None or device is None or not world._get_backend(device).supports_splitting:
        return None
    return device


def group_aside(topology: Topology) -> dist.ProcessGroup:
    """A second gloo group of all ranks of a topology, for a thread's collectives while the main
    group is in use.

    Works on any device. Collective the first time; made once.
    """
    assert topology.group is not None
    # torch makes no group beside one with a device that does not take its tensors
    device = _bound_device()
    backend = "gloo" if device is None else backends_of(device)
    return _group_of(
        topology, sorted(dist.get_process_group_ranks(topology.group)), "aside", backend
    )


def _mesh(
    layout: Layout, everyone: list[int], groups: dict[str, dist.ProcessGroup], device_type: str
) -> DeviceMesh:
    """The dimensions of more than one rank as a DeviceMesh; `shard` replaces `across` and `within`
    without two stages."""
    sizes = {"replica": layout.num_replicas}
    if "within" in groups:
        sizes |= {"across": layout.num_across, "within": layout.num_within}
    else:
        sizes["shard"] = layout.num_shards
    sizes = {name: size for name, size in sizes.items() if size > 1}
    ranks = torch.tensor(everyone).view(*sizes.values())
    return DeviceMesh.from_group(
        [groups[n] for n in sizes], device_type, ranks, mesh_dim_names=tuple(sizes)
    )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
