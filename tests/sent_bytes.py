"""The bytes of a sent tile that cross the link, by the rule: the forecast and the device are held
to it."""

from __future__ import annotations

from typing import NamedTuple

from tiermem import OffloadPolicy, Tier
from tiermem.plans.plan import Plan
from tiermem.units.state_layout import planned_layout
from tiermem.units.unit import Unit


class LinkBytes(NamedTuple):
    """Bytes of one tile that cross the link to an accelerator, each way."""

    down: int
    up: int


def sent_bytes(unit: Unit, numel: int, plan: Plan, policy: OffloadPolicy) -> LinkBytes:
    """What a tile of so many elements moves over the link in a step, after its first, if it is
    stepped where it does not rest.

    States go both ways; weights too, unless they rest there, and down only if the step reads them
    or they rest in memory; gradients go down, unless they rest there.
    """
    layout = planned_layout(unit, policy)
    home = plan.unit_homes.get(unit.index)
    states = layout.total_bytes(numel)
    weights = numel * unit.dtype.itemsize
    rests_there = home is Tier.DEVICE and not unit.is_resident
    is_read = layout.reads_weight or home is not Tier.NVME or unit.is_resident
    grads = (
        0 if plan.grads is Tier.DEVICE else numel * policy.precision.grad_dtype(unit.dtype).itemsize
    )
    up = states + (0 if rests_there else weights)
    return LinkBytes(up - (0 if is_read or rests_there else weights) + grads, up)
