"""TileLoad: what a tile of optimizer states moves in a step, once its states have been written.

The tiles are those of `optim/tile.py`, the bytes those that `optim/tile_moves.py` reads and writes:

    read      states that rest on NVMe · its weights there, when a step needs them · its gradients there
    written   states that rest on NVMe · its weights there
    memory    what the kernel streams: states and weights both ways, gradients once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiermem.optim.tile import rests_on_host, stepped_ranges
from tiermem.policy import OffloadPolicy, Tier
from tiermem.zero.plan import Plan, planned_layout
from tiermem.zero.unit import Unit

_MOST_TILES = 20_000  # played one by one; of more, neighbours are taken together


class TileLoad(NamedTuple):
    """Bytes of one tile, or of neighbours taken together."""

    unit: int
    read_bytes: int
    lasting_bytes: int  # of those read, what rests from step to step: a head start may read it
    written_bytes: int
    memory_bytes: int


def tile_loads(units: Sequence[Unit], plan: Plan, policy: OffloadPolicy, shard_rank: int) -> list[TileLoad]:
    """The loads of a step in the order in which tiles are stepped."""
    pieces = [
        (unit, numel)
        for unit in units
        if unit.is_trainable
        for _, numel, _ in stepped_ranges(unit, plan.tile_numel, shard_rank)
    ]
    sizes = [planned_layout(unit, policy).total_bytes(numel) for unit, numel in pieces]
    stays = rests_on_host(sizes, plan.resident_bytes) if policy.optim is Tier.NVME else [True] * len(sizes)
    loads = [
        _load(unit, numel, 0 if at_home else size, size, plan, policy)
        for (unit, numel), size, at_home in zip(pieces, sizes, stays, strict=True)
    ]
    return _together(loads, -(-len(loads) // _MOST_TILES))


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
    groups = [loads[i : i + num] for i in range(0, len(loads), num)]
    return [TileLoad(group[0].unit, *(sum(each[i] for each in group) for i in range(1, 5))) for group in groups]
