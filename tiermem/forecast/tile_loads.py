"""TileLoad: what a tile of optimizer states moves in a step, once its states have been written.

The tiles are those of `optim/tile.py`, the bytes those that `optim/tile_moves.py` reads and writes:

    read      states that rest on NVMe · its weights there, when a step needs them · its gradients there
    written   states that rest on NVMe · its weights there
    memory    what the kernel streams: states and weights both ways, gradients once
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from tiermem.optim.tile import rests_on_host, stepped_ranges
from tiermem.policy import OffloadPolicy, Tier
from tiermem.zero.plan import Plan, planned_layout
from tiermem.zero.unit import Unit

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
