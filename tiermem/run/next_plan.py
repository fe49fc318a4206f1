"""The next plan of a living model: parameters require gradients that were frozen when the model was
sharded, or weights, states or gradients are to rest elsewhere.

    p.requires_grad_(True)  ->  the next forward with gradients, step or load  ->  room for gradients and states  ->  trained
    Shards.rehome(policy)   ->  between two passes                             ->  weights and states on other tiers

A unit has room for gradients and states, or for neither, so a unit is unfrozen as a whole; its
parameters that still require no gradient get none and are not stepped. The plan is made again
before anything is changed (budget.py): within the same budgets, or those of the policy that is
given. Then the model goes over to it between two passes:

    refuse     blocks, sparse gradients and the like: RuntimeError or ValueError; no room: ValueError with the arithmetic
    reserve    space on disk: OSError. Where there is none for steps under backward alone, they run under the next forward
    make room  what the new plan has no place for on HOST leaves it; buffers of another size are given back
    carve      the arena goes on with the new budget; new buffers, gradients and states are carved from it

A parameter that is frozen again keeps its states and its room. With several ranks all must unfreeze
the same parameters, and give the same policy.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn

from tiermem.plans.agreement import agree, facts_of_policy
from tiermem.plans.budget import plan_after, take_disk
from tiermem.plans.plan import Plan, format_mib
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import Topology, ranks_per_node
from tiermem.run.move_to_home import check_model
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.swap.memory.device_memory import take_pieces
from tiermem.swap.store.store import TensorStore
from tiermem.units.unit import Shard
from tiermem.weights.unit_state import LiveUnit


class Frozen:
    """The parameters of a model that have required no gradient so far."""

    def __init__(self, parameters: Iterable[tuple[LiveUnit, Shard]]) -> None:
        self._parameters = list(parameters)
        self.forget()

    def unfrozen(self, also: Collection[nn.Parameter]) -> list[tuple[LiveUnit, Shard]]:
        """Those that require gradients now, and these."""
        chosen = {id(param) for param in also}
        # reading it of resting parameters takes less time so
        with torch._C.DisableTorchFunctionSubclass():
            return [
                e for e in self._parameters if e[1].param.requires_grad or id(e[1].param) in chosen
            ]

    def forget(self) -> None:
        """Drops those that require gradients now."""
        with torch._C.DisableTorchFunctionSubclass():
            self._parameters = [
                each for each in self._parameters if not each[1].param.requires_grad
            ]


def plan_of(
    found: Sequence[tuple[LiveUnit, Shard]],
    model: nn.Module,
    now: Plan,
    policy: OffloadPolicy,
    topology: Topology,
    device: torch.device,
    keeps_grads: bool,
) -> Plan:
    """The plan of a model with more trained units, those of these parameters; changes nothing.
    Collective; blocks.

    Raises RuntimeError for a unit in blocks; ValueError for a model that cannot be trained, where
    ranks differ, and with the arithmetic when there is no room.
    """
    names = ", ".join(shard.name for live, shard in found if not live.unit.is_trainable)
    units = list(dict.fromkeys(live.unit for live, _ in found if not live.unit.is_trainable))
    agree(topology, {"unfrozen parameters": names}, "a forward after parameters were unfrozen")
    for unit in units:
        if unit.blocks is not None:
            raise RuntimeError(
                f"{names} requires gradients and rests in {unit.blocks.name} blocks, which no step "
                "can write: set "
                "requires_grad before sharding, or shard without blocks (frozen_quant_type=None)"
            )
    check_model(model, is_trained=True)
    indices = [unit.index for unit in units]
    return _agreed(
        now,
        policy,
        topology,
        device,
        keeps_grads,
        f"no room to train {names}, frozen until now",
        indices,
    )


_OF_WEIGHTS = ("params", "host_param_numel")
_MAY_CHANGE = (
    *_OF_WEIGHTS,
    "grads",
    "optim",
    "optim_ratio",
    "streamed_ratio",
    "resident_bytes",
    "host_bytes",
    "device_bytes",
)
"""Fields of a policy that another policy may have, for a model that goes over to it."""
_PIECE_BYTES = 16 << 20
"""Of an accelerator's memory: smaller pieces are of no use to most tiles."""


def plan_elsewhere(
    policy: OffloadPolicy,
    before: OffloadPolicy,
    now: Plan,
    topology: Topology,
    device: torch.device,
    keeps_grads: bool,
    num_slots: int,
) -> Plan:
    """The plan of a model whose states go to where another policy has them; changes nothing.
    Collective; blocks.

    num_slots: of the store.

    Raises ValueError for fields that are settled when a model is sharded, where ranks differ, and
    with the arithmetic when there is no room.
    """
    agree(topology, facts_of_policy(policy), "Shards.rehome")
    settled = [
        name
        for name, value in vars(before).items()
        if name not in _MAY_CHANGE and getattr(policy, name) != value
    ]
    if settled:
        raise ValueError(
            f"rehome: {', '.join(settled)} is settled when a model is sharded; only "
            f"{', '.join(_MAY_CHANGE)} may change. Begin with shards.policy, and replace these"
        )
    moves_weights = any(getattr(policy, name) != getattr(before, name) for name in _OF_WEIGHTS)
    if moves_weights and not now.unit_homes:
        raise ValueError(
            "rehome: all weights are always present, and stay where they are: they rest where the "
            f"maths runs, or have at most persistence_numel={before.persistence_numel} elements. "
            "Shard with params on a tier that weights are fetched from (NVME or, beside an "
            "accelerator, HOST) and a smaller persistence_numel"
        )
    refusal = "weights and states cannot rest as this policy has them"
    plan = _agreed(now, policy, topology, device, keeps_grads, refusal, moves_weights=moves_weights)
    leaves = (plan.states is Tier.DEVICE) is not (now.states is Tier.DEVICE)
    if is_accelerator(device) and leaves and any(u.is_resident for u in now.division.units):
        raise ValueError(
            "rehome: units that are always present have a shard on HOST unless all states rest on "
            "DEVICE. Move all states but a part: give optim_ratio more than 0, and optim HOST or "
            "NVME; or shard with optim=DEVICE"
        )
    if plan.attempt_disk_bytes and num_slots <= policy.num_slots:
        plan = plan.without_attempts("a slot on disk, which the store was opened without")
    return plan


def _agreed(
    now: Plan,
    policy: OffloadPolicy,
    topology: Topology,
    device: torch.device,
    keeps_grads: bool,
    refusal: str,
    unfrozen: Sequence[int] = (),
    moves_weights: bool = False,
) -> Plan:
    """The plan that follows, where every rank has room for it; ValueError on every rank where one
    has none. Collective; blocks."""
    is_gpu = is_accelerator(device)
    try:
        ranks = ranks_per_node()
        plan = plan_after(
            now, policy, topology, is_gpu, ranks, keeps_grads, unfrozen, moves_weights
        )
        if is_gpu:
            _check_card(plan, now, device)
        error = ""
    except ValueError as refused:
        error = str(refused)
    said = next(filter(None, exchange(topology, error)), None)
    if said is not None:
        raise ValueError(f"{refusal}: {said}. The model is as it was")
    return plan


def reserve_more(
    plan: Plan, policy: OffloadPolicy, store: TensorStore, topology: Topology, is_slot_taken: bool
) -> Plan:
    """Preallocates the disk space that a plan needs beyond that of the plan now; returns the plan,
    as `take_disk` does.

    Collective; blocks. Raises OSError (ENOSPC) with the arithmetic; where only another rank has no
    space, with its error.
    """
    failed: OSError | None = None
    try:
        plan = take_disk(plan, policy, store, topology, is_slot_taken)
    except OSError as error:
        failed = error
    said = next(filter(None, exchange(topology, str(failed or ""))), None)
    if said is not None:
        raise failed or OSError(
            errno.ENOSPC, f"another rank has no space for the states of unfrozen parameters: {said}"
        )
    return plan


def _check_card(plan: Plan, now: Plan, device: torch.device) -> None:
    """Raises ValueError where an accelerator has no room for what a plan takes beyond the one now.
    Torch keeps what is taken here for the plan."""
    free_bytes, total_bytes = free_and_total(device)
    due_bytes = plan.device_bytes - now.device_bytes
    there = {row.what: row.num_bytes for row in now.rows if row.tier is Tier.DEVICE}
    rows = [row for row in plan.rows if row.tier is Tier.DEVICE]
    more = [max(0, row.num_bytes - there.get(row.what, 0)) for row in rows]
    why = ""
    if due_bytes > free_bytes:
        why = f"{free_bytes} of its {total_bytes} are free"
    else:
        try:
            taken = [take_pieces(size, min(size, _PIECE_BYTES), device) for size in more]
            del taken
        except torch.OutOfMemoryError as error:
            why = f"what is free is in smaller pieces ({error})"
    if why:
        raise ValueError(
            f"the plan needs {due_bytes} bytes more of the accelerator ({format_mib(due_bytes)}), "
            f"and {why}: {plan.listed(Tier.DEVICE)}"
        )
