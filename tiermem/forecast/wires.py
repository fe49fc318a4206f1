"""Wires: what a rank hands to collectives for a unit, to the byte, and what of that crosses to or from it.

    gathers     a unit's parameters, in the dtype that the maths sees; as 8-bit blocks (qwZ); across nodes and then within
                them (two stages); within a node alone, once a second copy is there (hpZ)
    updates     new weights of a unit that stays present, span by span
    reductions  a unit's gradients, bucket by bucket: to their owners, then among copies of a part (MiCS); as 8-bit blocks
                within a node and then across (qgZ); or an all-reduce

The payload of a call is what `zero/ranks/traffic.py` counts: the larger side, what an all-gather fills, what a reduction
takes. Of it crosses all but a rank's own part; in an all-reduce twice that, there and back. Padding between parameters is
not sent. The few bytes by which ranks compare flags and add up norms are left out.
"""

from __future__ import annotations

from typing import NamedTuple

from tiermem.policy import OffloadPolicy
from tiermem.precision import DTYPES
from tiermem.zero.gradients.buckets import Bucket, cut
from tiermem.zero.gradients.reduce import scatters
from tiermem.zero.plan import keeps_secondary
from tiermem.zero.ranks.quantised import packed_bytes
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.unit import Unit
from tiermem.zero.weights.gather import cut_span, spans_of


class Send(NamedTuple):
    """One call of a collective."""

    among: str
    """Which ranks: "world", "shard", "replica", "across" or "within" (zero/ranks/mesh.py)."""
    payload_bytes: int
    crossing_bytes: int
    """Of the payload, what this rank receives, and as much that it sends."""


def gathers(unit: Unit, policy: OffloadPolicy, topology: Topology, is_second: bool = False) -> list[Send]:
    """The calls of one gather; `is_second`: from the second copy that hpZ keeps."""
    num_shards = topology.num_shards
    if num_shards == 1:
        return []
    numel = sum(shard.shard_numel for shard in unit.shards)
    whole_bytes = numel * num_shards * unit.full_dtype.itemsize
    if is_second and topology.within is not None:
        return [_to_all("within", whole_bytes, topology)]
    if unit.is_packed or (policy.quantised_gather and unit.dtype.is_floating_point):
        return [_to_all("shard", packed_bytes(unit.packed_numel) * num_shards, topology)]
    if policy.gather_way == "all_reduce":
        return [_added_up("shard", unit.full_bytes, topology)]
    return _plain(whole_bytes, topology)


def updates(unit: Unit, policy: OffloadPolicy, topology: Topology) -> list[Send]:
    """The calls by which new weights of a unit that stays present reach every rank."""
    num_shards = topology.num_shards
    if num_shards == 1:
        return []
    sends: list[Send] = []
    for span in spans_of(unit, num_shards, policy.allgather_bucket_numel):
        if policy.allgather_partitions:
            numel = sum(part.numel for part in cut_span(unit, span))
            sends += _plain(numel * num_shards * unit.full_dtype.itemsize, topology)
        else:
            span_bytes = (span.stop - span.start) * unit.dtype.itemsize
            sends.append(_to_all("shard", span_bytes * num_shards, topology))
    return sends


def buckets_of(unit: Unit, policy: OffloadPolicy, topology: Topology) -> list[Bucket]:
    """The buckets that a unit's gradients are reduced in."""
    return cut(unit, topology.num_shards, policy.reduce_bucket_numel, policy.contiguous_gradients)


def reductions(bucket: Bucket, policy: OffloadPolicy, topology: Topology) -> list[Send]:
    """The calls that reduce one bucket."""
    if topology.world == 1:
        return []
    itemsize = bucket.dtype.itemsize if policy.reduce_dtype is None else DTYPES[policy.reduce_dtype].itemsize
    column_bytes = bucket.column_numel * itemsize
    if not scatters(topology.num_shards, policy):
        return [_added_up("world", column_bytes * bucket.num_columns, topology)]
    if topology.packs_reductions:
        sends = _packed(bucket, topology)
    else:
        sends = [_to_all("shard", column_bytes * bucket.num_columns, topology)]
    if topology.num_replicas > 1:
        sends.append(_added_up("replica", column_bytes, topology))
    return sends


def keeps_second(policy: OffloadPolicy, topology: Topology) -> bool:
    """Whether gathers but the first after a step come from a second copy near by (hpZ)."""
    return keeps_secondary(policy, topology.num_shards) and topology.within is not None


def _plain(whole_bytes: int, topology: Topology) -> list[Send]:
    """Every rank's part of something to all; where that is done in two stages, across nodes first."""
    if topology.gathers_in_stages and topology.across is not None:
        from_nodes = whole_bytes // topology.num_shards * topology.across.size
        return [_to_all("across", from_nodes, topology), _to_all("within", whole_bytes, topology)]
    return [_to_all("shard", whole_bytes, topology)]


def _packed(bucket: Bucket, topology: Topology) -> list[Send]:
    """Blocks for every rank; over several nodes for the near ones first, and of their sums one for each node."""
    if topology.across is None or topology.within is None:
        return [_to_all("shard", topology.num_shards * packed_bytes(bucket.column_numel), topology)]
    num_across, num_within = topology.across.size, topology.within.size
    return [
        _to_all("within", num_within * packed_bytes(num_across * bucket.column_numel), topology),
        _to_all("across", num_across * packed_bytes(bucket.column_numel), topology),
    ]


def _to_all(among: str, payload_bytes: int, topology: Topology) -> Send:
    """Every rank's part goes to every other."""
    num_ranks = _size(among, topology)
    return Send(among, payload_bytes, payload_bytes * (num_ranks - 1) // num_ranks)


def _added_up(among: str, payload_bytes: int, topology: Topology) -> Send:
    num_ranks = _size(among, topology)
    return Send(among, payload_bytes, 2 * payload_bytes * (num_ranks - 1) // num_ranks)


def _size(among: str, topology: Topology) -> int:
    peers = {"across": topology.across, "within": topology.within}.get(among)
    sizes = {"world": topology.world, "shard": topology.num_shards, "replica": topology.num_replicas}
    return peers.size if peers is not None else sizes[among]
