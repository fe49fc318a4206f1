"""Pools: the store of a plan, and its buffers, which are carved from the store's memory before a
run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import Topology, paths_of_rank
from tiermem.swap.disk.run_folder import RunName
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.swap.memory.arena import Pool
from tiermem.swap.memory.device_memory import DevicePool
from tiermem.swap.store.store import TensorStore


def open_store(
    plan: Plan, policy: OffloadPolicy, topology: Topology, device: torch.device
) -> TensorStore:
    """Opens the store of a plan. Rank 0 chooses the run's id; folder names of several ranks contain
    the rank. Collective.

    Where steps under backward are wanted it has one more slot, which is used while the plan has
    room: perhaps a later plan.
    """
    [run_id, *_] = exchange(topology, RunName.new().run_id)
    return TensorStore(
        paths_of_rank(policy.paths),
        max(plan.arena_bytes, 1),
        policy.io,
        policy.disk_bytes,
        device,
        plan.link_bytes if policy.pin_memory else 0,
        num_slots=policy.num_slots
        + (policy.wanted_overlap(plan.states, is_accelerator(device)) == "backward"),
        run=RunName(run_id, None if topology.world == 1 else topology.rank),
    )


class Pools(NamedTuple):
    """The buffers of `Plan`, under the same names; None: the plan has no such buffers."""

    units: Pool | None
    staging: Pool | None
    gradients: Pool | None
    links: Pool | None
    sums: Pool | None
    tiles: Pool | None
    wires: Pool | None
    activations: Pool | None


def keep_buffers(store: TensorStore, pools: Pools, now: Plan, plan: Plan) -> None:
    """Before the store goes over to another plan: gives the buffers back that have another size or
    number there. All of them must be free."""
    crossing = _crossing(plan)
    for name, pool in pools._asdict().items():
        if pool is None or not pool.count:
            continue
        if getattr(now, name) != getattr(plan, name):
            pool.close()
        elif name not in plan.on_device:
            pool.cross(store.arena, name in crossing)


def _crossing(plan: Plan) -> list[str]:
    """The names of the buffers that are copied to an accelerator and back."""
    holds_brought = plan.steps_on_device or plan.brings_gradients or plan.brings_weights
    crossing = ["staging", "links", "activations"] + ["tiles"] * holds_brought
    if plan.grads is None and plan.steps_on_device:
        crossing.append("gradients")
    return crossing


def carve(store: TensorStore, plan: Plan, kept: Pools | None = None) -> Pools:
    """Takes all buffers of a plan from the store, which owns them until it is closed. Raises
    torch's OutOfMemoryError.

    Those on an accelerator have a slab for each purpose; full layouts have slots there instead
    (unit_memory.py).

    kept: buffers of another plan; those that `keep_buffers` has left are kept.
    """
    crossing = _crossing(plan)

    def pool(name: str) -> Pool | None:
        size, count = getattr(plan, name)
        own: Pool | None = getattr(kept, name, None)
        if own is not None and own.count:
            return own
        if not count or (name == "units" and name in plan.on_device):
            return None
        if name in plan.on_device:
            return DevicePool(store.on_device, size, count, name)
        return Pool(store.arena, size, count, name, crosses_link=name in crossing)

    return Pools(*map(pool, Pools._fields))
