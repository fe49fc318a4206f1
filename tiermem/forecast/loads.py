"""Loads: what a step reads, writes and sends: units fetched, tiles of states, payloads of collectives."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import nn

from tiermem.forecast.rates import Compute
from tiermem.optim.tile import rests_on_host, stepped_ranges
from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES
from tiermem.zero.gather import cut_span, spans_of
from tiermem.zero.packed import gathers_packed
from tiermem.zero.plan import Plan, keeps_secondary, planned_layout
from tiermem.zero.prefetcher import reads_weights_again
from tiermem.zero.quantised import packed_bytes
from tiermem.zero.reduce import Bucket, cut, scatters
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Division, Unit

# ---- Uses: the modules that a forward runs one after another, with the units each needs and how long its maths -------
# takes
#
# Taken from a division (zero/unit.py), in the order in which modules are defined: the first guess that `zero/prefetcher.py`
# makes too. A module's maths is counted by its parameters that multiply: those of two dimensions or more, outside
# embeddings, which only look up. A mixture of experts counts every expert, so its time is an upper bound.


class Use(NamedTuple):
    """One module's part in a forward and a backward."""

    name: str
    units: tuple[int, ...]  # indices of the units it needs, streamed or not
    forward_s: float
    backward_s: float
    reads_again: bool = True  # whether its backward needs the units as well


def uses_of(model: nn.Module, division: Division, compute: Compute) -> list[Use]:
    """The uses of one forward. The model may be on the meta device."""
    names = {module: name for name, module in model.named_modules()}
    in_list = {
        m for each in model.modules() if isinstance(each, nn.ModuleList) for m in each.modules() if m is not each
    }
    has_rest = compute.rest_forward_s is not None
    uses: list[Use] = []
    counted: set[nn.Parameter] = set()
    for module, units in division.triggers.items():
        matrices = _matrices(module) & {shard.param for unit in units for shard in unit.shards}
        counted |= matrices
        numel = 0 if has_rest and module not in in_list else sum(param.numel() for param in matrices)
        forward_s, backward_s = numel * compute.forward_s, numel * compute.backward_s
        indices = tuple(unit.index for unit in units)
        uses.append(Use(names[module], indices, forward_s, backward_s, reads_weights_again(module)))
    left = sum(param.numel() for param in _left(in_list if has_rest else set(model.modules())) - counted)
    if left or not uses:
        uses.append(Use("what is always present", (), left * compute.forward_s, left * compute.backward_s))
    last, rest = uses[-1], (compute.rest_forward_s or 0.0, compute.rest_backward_s or 0.0)
    uses[-1] = last._replace(forward_s=last.forward_s + rest[0], backward_s=last.backward_s + rest[1])
    return uses


def _matrices(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that a module and those below it multiply by: of two dimensions, not those of its embeddings."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    looked_up = {param for each in embeddings for param in each.parameters(recurse=False)}
    return {param for param in module.parameters() if param.dim() > 1} - looked_up


def _left(modules: set[nn.Module]) -> set[nn.Parameter]:
    """Matrices that these modules own themselves."""
    owned = (module.parameters(recurse=False) for module in modules if not isinstance(module, nn.Embedding))
    return {param for params in owned for param in params if param.dim() > 1}


# ---- TileLoad: what a tile of optimizer states moves in a step, once its states have been written --------------------
#
# The tiles are those of `optim/tile.py`, the bytes those that `optim/tile.py` reads and writes:
#
#     read      states that rest on NVMe · its weights there, when a step needs them · its gradients there
#     written   states that rest on NVMe · its weights there
#     memory    what the kernel streams: states and weights both ways, gradients once

MOST_TILES = 20_000  # played one by one; of more, neighbours are taken together


class TileLoad(NamedTuple):
    """Bytes of one tile, or of neighbours taken together."""

    unit: int
    read_bytes: int
    lasting_bytes: int  # of those read, what rests from step to step: a head start may read it
    written_bytes: int
    memory_bytes: int
    num_tiles: int = 1


def tile_loads(
    units: Sequence[Unit], plan: Plan, policy: OffloadPolicy, shard_rank: int, most_tiles: int = MOST_TILES
) -> list[TileLoad]:
    """The loads of a step in the order in which tiles are stepped; of more than `most_tiles`, neighbours of a unit together."""
    cut: dict[Hashable, list[tuple[int, int]]] = {}  # of units that lie alike: a Transformer's blocks are cut once
    pieces: list[tuple[Unit, int, int]] = []
    for unit in units:
        if unit.is_trainable:
            alike = (unit.dtype, unit.shard_numel, *((s.numel, s.shard_numel, s.shard_offset) for s in unit.shards))
            if alike not in cut:
                cut[alike] = _cut(unit, plan.tile_numel, policy, shard_rank)
            pieces += [(unit, numel, size) for numel, size in cut[alike]]
    sizes = [size for _, _, size in pieces]
    stays = rests_on_host(sizes, plan.resident_bytes) if policy.optim is Tier.NVME else [True] * len(sizes)
    made: dict[tuple[int, int, bool], TileLoad] = {}
    loads = []
    for (unit, numel, size), at_home in zip(pieces, stays, strict=True):
        key = (unit.index, numel, at_home)
        if key not in made:
            made[key] = _load(unit, numel, 0 if at_home else size, size, plan, policy)
        loads.append(made[key])
    return _together(loads, -(-len(loads) // most_tiles))


def _cut(unit: Unit, tile_numel: int, policy: OffloadPolicy, shard_rank: int) -> list[tuple[int, int]]:
    """(elements, bytes of states) of a unit's tiles."""
    layout = planned_layout(unit, policy)
    numels = [numel for _, numel, _ in stepped_ranges(unit, tile_numel, shard_rank)]
    bytes_of = {numel: layout.total_bytes(numel) for numel in set(numels)}
    return [(numel, bytes_of[numel]) for numel in numels]


def _load(unit: Unit, numel: int, moved: int, size: int, plan: Plan, policy: OffloadPolicy) -> TileLoad:
    weights, grads = numel * unit.dtype.itemsize, numel * policy.precision.grad_dtype(unit.dtype).itemsize
    is_on_nvme = plan.unit_homes.get(unit.index) is Tier.NVME and not unit.is_resident
    reads_weight = is_on_nvme and planned_layout(unit, policy).reads_weight
    lasting = moved + (weights if reads_weight else 0)
    return TileLoad(
        unit.index,
        lasting + (grads if plan.grads is Tier.NVME else 0),
        lasting,
        moved + (weights if is_on_nvme else 0),
        2 * size + weights + (weights if planned_layout(unit, policy).reads_weight else 0) + grads,
    )


def _together(loads: list[TileLoad], num: int) -> list[TileLoad]:
    if num <= 1:
        return loads
    found: list[TileLoad] = []
    for _, of_unit in itertools.groupby(loads, key=lambda load: load.unit):
        alike = list(of_unit)
        groups = (alike[i : i + num] for i in range(0, len(alike), num))
        found += [TileLoad(*(group[0].unit, *map(sum, list(zip(*group, strict=True))[1:]))) for group in groups]
    return found


# ---- Wires: what a rank hands to collectives for a unit, to the byte, and what of that crosses to or from it ---------
#
#     gathers     a unit's parameters, in the dtype that the maths sees; as 8-bit blocks (qwZ); across nodes and then within
#                 them (two stages); within a node alone, once a second copy is there (hpZ)
#     updates     new weights of a unit that stays present, span by span
#     reductions  a unit's gradients, bucket by bucket: to their owners, then among copies of a part (MiCS); as 8-bit blocks
#                 within a node and then across (qgZ); or an all-reduce
#
# The payload of a call is what `zero/failures.py` counts: the larger side, what an all-gather fills, what a
# reduction takes. Of it crosses all but a rank's own part; in an all-reduce twice that, there and back. Padding between
# parameters is not sent. The few bytes by which ranks compare flags and add up norms are left out.


class Send(NamedTuple):
    """One call of a collective."""

    among: str
    """Which ranks: "world", "shard", "replica", "across" or "within" (zero/topology.py)."""
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
    if gathers_packed(unit, policy):
        return [_to_all("shard", packed_bytes(unit.packed_numel) * num_shards, topology)]
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
