"""Pools: the arena's buffers for whatever moves, carved once and as the plan counted them."""

from __future__ import annotations

from typing import NamedTuple

from tiermem.swap.arena import Arena, Pool
from tiermem.zero.plan import Plan


class Pools(NamedTuple):
    """None: the plan has no use for such buffers."""

    units: Pool | None  # full layouts of units on a CPU
    shards: Pool | None  # on their way to a gather or to the accelerator
    gradients: Pool | None  # of a unit, until they are home
    sums: Pool | None  # what gradients are reduced in
    tiles: Pool | None  # of optimizer states
    wires: Pool | None  # what packed gathers send and receive
    updates: Pool | None  # broadcast weights on their way to their places


def carve(arena: Arena, plan: Plan) -> Pools:
    """Takes all buffers of a plan from the arena, which keeps them until it is closed."""
    return Pools(
        units=_carve(arena, plan.unit_slot_bytes, plan.num_unit_slots, "units"),
        shards=_carve(arena, plan.stage_slot_bytes, plan.num_stage_slots, "shards", crosses_link=True),
        gradients=_carve(arena, plan.grad_slot_bytes, plan.num_grad_slots, "gradients"),
        sums=_carve(arena, plan.reduce_slot_bytes, plan.num_reduce_slots, "sums"),
        tiles=_carve(arena, plan.tile_slot_bytes, plan.num_tile_slots, "tiles"),
        wires=_carve(arena, plan.wire_slot_bytes, plan.num_wire_slots, "wires"),
        updates=_carve(arena, plan.update_slot_bytes, plan.num_update_slots, "updates"),
    )


def _carve(arena: Arena, slot_bytes: int, num_slots: int, name: str, crosses_link: bool = False) -> Pool | None:
    return Pool(arena, slot_bytes, num_slots, name, crosses_link) if num_slots else None
