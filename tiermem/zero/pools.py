"""Pools: the buffers of a plan that lie on HOST, carved from the arena before a run."""

from __future__ import annotations

from typing import NamedTuple

from tiermem.swap.arena import Arena, Pool
from tiermem.zero.plan import Plan


class Pools(NamedTuple):
    """The buffers of `Plan`, under the same names; None: the plan has no such buffers."""

    units: Pool | None
    shards: Pool | None
    gradients: Pool | None
    links: Pool | None
    sums: Pool | None
    tiles: Pool | None
    wires: Pool | None
    activations: Pool | None


def carve(arena: Arena, plan: Plan) -> Pools:
    """Takes all buffers of a plan that lie on HOST from the arena, which owns them until it is closed."""

    crossing = ("shards", "links", "activations", *(["tiles"] if plan.steps_there else []))

    def pool(name: str) -> Pool | None:
        size, count = getattr(plan, name)
        if not count or name in plan.on_device:
            return None
        return Pool(arena, size, count, name, crosses_link=name in crossing)

    return Pools(*map(pool, Pools._fields))
