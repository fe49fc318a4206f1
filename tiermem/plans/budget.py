"""Budget: chooses the plan of a sharded model, the best one that the budgets of HOST and DEVICE
hold."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from tiermem.plans.plan import CONTEXT, Plan, PlanChoice, Planner, format_mib
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import Topology
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.swap.memory.arena import PAGE_BYTES
from tiermem.swap.store.store import TensorStore
from tiermem.units.unit import Division, Unit, reads_weights_again

logger = logging.getLogger("tiermem")


class _Refusal:
    """Words of an error that are computed when they are read: a search drops most unread."""

    def __init__(self, words: Callable[[], str]) -> None:
        self._words = words

    def __str__(self) -> str:
        return self._words()

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def make_plan(
    division: Division,
    policy: OffloadPolicy,
    topology: Topology,
    is_gpu: bool,
    ranks_on_node: int,
    context_bytes: int = 0,
    keeps_units: bool = True,
    free_bytes: int | None = None,
) -> Plan:
    """Plans a division under a policy.

    keeps_units: whether streamed units stay on the accelerator where its budget has room.
    free_bytes: HOST memory of this node that is free; None: unknown. Without host_bytes, weights
        that rest in memory have second copies where every node's plan takes at most half of it.
    context_bytes: HOST memory that this process has taken for the accelerator's context; part of
        the budget. Ranks plan for the rank that took most, so the call is collective.

    With one shard, a unit that rests where the maths runs is used there. In `Plan.division` such
    units are resident; or, where a step of states on NVMe can go on under the next forward, in
    place. Raises ValueError when the budget cannot hold the smallest plan, or a parameter cannot be
    kept in the policy's precision.
    """
    if policy.grads is Tier.DEVICE and not is_gpu:
        raise ValueError(
            "grads=DEVICE without an accelerator: reduced gradients rest on HOST or NVME; leave it "
            "None for what fits the "
            "budget"
        )
    for unit in division.units:
        if unit.is_trainable:
            policy.precision.check_dtype(unit.dtype, unit.shards[0].name)
    homes = _unit_homes(division.units, policy, topology.num_shards)
    if as_is := _used_at_home(division.units, homes, topology, is_gpu):
        steps_go_on = (
            not is_gpu
            and policy.optim is Tier.NVME
            and policy.wanted_overlap(policy.optim, is_gpu) != "none"
        )
        absent = {
            u.index for u in as_is if steps_go_on and u.is_trainable and homes[u.index] is Tier.HOST
        }
        stays = {u.index for u in as_is} - absent
        homes = {index: home for index, home in homes.items() if index not in stays}
        division = division.with_changed(stays, is_resident=True).with_changed(
            absent, is_in_place=True
        )
    if is_gpu:
        context_bytes = max(exchange(topology, context_bytes))
    maker = _Maker(division, policy, topology, is_gpu, homes, ranks_on_node, context_bytes)
    plan = maker.make(set())
    if policy.early_steps and policy.host_bytes is None and free_bytes is not None:
        more = dataclasses.replace(maker, copies_weights=True).make(set())
        if more is not None and more.copied:
            is_small = 2 * more.host_bytes * ranks_on_node <= free_bytes
            plan = more if all(exchange(topology, is_small)) else plan
    if keeps_units and plan is not None and is_gpu and policy.device_bytes is not None:
        stays = _staying(maker, division, homes, policy.device_bytes - plan.device_bytes)
        plan = maker.make(stays) or plan
    if plan is None:
        raise ValueError(_Refusal(maker.refusal))
    return plan


def plan_after(
    now: Plan,
    policy: OffloadPolicy,
    topology: Topology,
    is_gpu: bool,
    ranks_on_node: int,
    keeps_grads: bool,
    unfrozen: Collection[int] = (),
    moves_weights: bool = False,
) -> Plan:
    """The plan of the same units with more of them trained (by index), or with states or weights
    elsewhere.

    Existing units and tiles keep their sizes. When the budget is short, gradients go to NVME, then
    there are fewer tile buffers, and states that the first plan kept on HOST beyond their tier rest
    on NVME.

    policy: of the plan now, but for budgets and for where states rest and are stepped.
    keeps_grads: gradients stay on their tier.

    Raises ValueError with the arithmetic, and for a dtype without a master.
    """
    division = now.division
    if unfrozen:
        division = division.with_changed(unfrozen, is_trainable=True, was_unfrozen=True)
    for index in unfrozen:
        unit = division.units[index]
        policy.precision.check_dtype(unit.dtype, unit.shards[0].name)
    homes = now.unit_homes
    if moves_weights:
        homes = _unit_homes(division.units, policy, topology.num_shards)
        near = {u.index for u in _used_at_home(division.units, homes, topology, is_gpu)}
        division = division.with_changed(homes.keys() - near, is_in_place=False)
        division = division.with_changed(near, is_in_place=True)
    context = sum(row.num_bytes for row in now.rows if row.what == CONTEXT)
    maker = _Maker(
        division,
        policy,
        topology,
        is_gpu,
        homes,
        ranks_on_node,
        context,
        now,
        keeps_grads,
        bool(now.copied),
    )
    plan = maker.make(())
    if plan is None:
        raise ValueError(_Refusal(maker.refusal))
    return plan


def take_disk(
    plan: Plan,
    policy: OffloadPolicy,
    store: TensorStore,
    topology: Topology,
    is_slot_taken: bool = False,
) -> Plan:
    """Preallocates the disk space of a plan beyond what is in use; returns the plan for which every
    rank has room.

    Space for steps under backward is only checked here, after every rank has reserved the rest;
    `take_slot` reserves it before the first such step. If one rank lacks the space, no rank makes
    such steps.

    is_slot_taken: this rank has taken the slot. Leaving it out would give no space back, so the
        whole plan is taken.

    Collective; blocks. Logs what such steps lack where they are left out: as a warning if the
    policy names them. Raises OSError when the plan finds no space.
    """
    failed: OSError | None = None
    try:
        if plan.disk_bytes:
            least = plan.disk_bytes - (0 if is_slot_taken else plan.attempt_disk_bytes)
            store.reserve_disk(_due(store, least), why_disk(plan, policy))
    except OSError as error:  # of this rank, perhaps alone
        failed = error
    may_look = plan.attempt_disk_bytes and not any(
        exchange(topology, "no" if failed or is_slot_taken else "")
    )
    missing = _missing(plan, store, topology) if may_look else ""
    if failed is not None:
        raise failed
    if missing:
        size = f"{plan.attempt_disk_bytes} bytes ({format_mib(plan.attempt_disk_bytes)})"
        plan = plan.without_attempts(
            f"{size} more on disk, for which not every rank has room: {missing}"
        )
    if plan.lacks:
        level = logging.WARNING if policy.overlap == "backward" else logging.INFO
        logger.log(
            level, 'overlap "backward" needs %s. Steps run under the next forward', plan.lacks
        )
    return plan


def take_slot(plan: Plan, store: TensorStore) -> bool:
    """Preallocates the disk space of steps under backward, before the first one; whether it is
    there. Blocks."""
    try:
        if plan.attempt_disk_bytes:
            store.reserve_disk(_due(store, plan.disk_bytes))
    except OSError as error:
        logger.warning(
            "steps do not begin under backward, as the disk has filled up since the start: %s",
            error,
        )
        return False
    return True


def why_disk(plan: Plan, policy: OffloadPolicy) -> str:
    """The arithmetic behind disk_bytes, for the error of a full disk; empty without room for
    checkpoints."""
    if not plan.durable_disk_bytes:
        return ""
    less = plan.disk_bytes - plan.durable_disk_bytes
    return (
        f"What steps write rests in {policy.num_slots} slots (durability={policy.durability!r}, "
        f"keep={policy.keep}), one "
        f"to write and the rest for what is durable; with durability='none' {less} bytes are "
        "enough, and "
        "a checkpoint is a copy"
    )


def _due(store: TensorStore, disk_bytes: int) -> int:
    """Those of a plan's bytes that are not in use yet."""
    return max(0, disk_bytes - store.stats().nvme_bytes)


def _missing(plan: Plan, store: TensorStore, topology: Topology) -> str:
    """Why a rank has no disk space for a whole plan; empty where all have it. Takes nothing.
    Collective."""
    error = ""
    with contextlib.ExitStack() as taken:  # until all ranks have tried, as they may share a disk
        try:
            taken.enter_context(store.reserve_disk(_due(store, plan.disk_bytes)))
        except OSError as found:
            error = str(found)
        return next(filter(None, exchange(topology, error)), "")


def check_card(plan: Plan, policy: OffloadPolicy, device: torch.device) -> None:
    """Raises ValueError, with the arithmetic, when an accelerator has no room for a plan or for the
    budget."""
    if is_accelerator(device):
        check_room(plan, policy, *free_and_total(device))


def check_room(plan: Plan, policy: OffloadPolicy, free_bytes: int, total_bytes: int) -> None:
    """As `check_card`, for an accelerator of which this process may still take `free_bytes` of all
    bytes."""
    if policy.device_bytes is not None and policy.device_bytes > total_bytes:
        raise ValueError(
            f"device_bytes={policy.device_bytes}, and the accelerator has {total_bytes} "
            f"({format_mib(total_bytes)}), of which "
            "activations need a part: give less, or leave it out"
        )
    if plan.device_bytes > free_bytes:
        raise ValueError(
            f"the plan needs {plan.device_bytes} bytes of the accelerator, and {free_bytes} of its "
            f"{total_bytes} are free "
            f"(other processes may hold the rest): {plan.listed(Tier.DEVICE)}. Send more to HOST "
            "or NVME, or set device_bytes"
        )


@dataclasses.dataclass
class _Maker:
    """Makes the best plan within the budgets, for any choice of units that stay on the
    accelerator."""

    division: Division
    policy: OffloadPolicy
    topology: Topology
    is_gpu: bool
    homes: dict[int, Tier]
    ranks_on_node: int
    context_bytes: int
    now: Plan | None = None  # the plan that the new one follows
    keeps_grads: bool = False
    """Gradients stay on their tier where a plan follows another one."""
    copies_weights: bool = False
    """Weights in memory may have second copies without a budget."""

    @property
    def budget(self) -> int | None:
        """Of HOST memory for a rank."""
        host_bytes = self.policy.host_bytes
        return None if host_bytes is None else host_bytes // self.ranks_on_node

    @functools.cached_property
    def _resident(self) -> list[Unit]:
        """Units as they are if they stay."""
        every = range(len(self.division.units))
        return self.division.with_changed(every, is_resident=True).units

    def make(self, stays: Collection[int]) -> Plan | None:
        """The best plan with these units (by index) staying on the accelerator; None when none
        fits."""
        budget = self.budget
        planner = self._planner(stays)
        now = self.now
        room, kept = (0, ()) if now is None else (now.activation_bytes, now.copied)
        choices = self._choices(planner)
        fitting: set[Tier | None] | None = None
        for choice, copied in itertools.product(choices, (kept, ()) if kept else ((),)):
            if fitting is not None and choice.grads not in fitting:
                continue
            plan = planner.plan(choice, room, copied)
            if self._fits(plan):
                left = 0 if budget is None else max(0, budget - plan.host_bytes - PAGE_BYTES)
                if left > 0 and planner.wants_rest and now is None:
                    plan = planner.plan(choice, room_bytes=left)
                else:
                    if now is None:
                        copied = planner.copied_within(
                            None if budget is None else left, choice.tile_numel
                        )
                    plan = planner.plan(choice, room, copied, left)
                return dataclasses.replace(
                    plan, lacks="" if plan.may_attempt else self._lacks(planner, choice)
                )
            if fitting is None:
                fitting = set(self._fitting(planner, choices))
        return None

    def fits(self, stays: Collection[int]) -> bool:
        """Whether a plan fits with these units (by index) staying on the accelerator."""
        planner = self._planner(stays)
        return any(True for _ in self._fitting(planner, self._choices(planner)))

    def _fitting(self, planner: Planner, choices: Sequence[PlanChoice]) -> Iterator[Tier | None]:
        """The homes of gradients with which some choice fits: the one that takes least does."""
        least = {choice.grads: choice for choice in sorted(choices, key=_size, reverse=True)}
        room_bytes = 0 if self.now is None else self.now.activation_bytes
        for grads, choice in least.items():
            if self._fits(planner.plan(choice, room_bytes)):
                yield grads

    def _lacks(self, planner: Planner, choice: PlanChoice) -> str:
        """What steps under backward lack, in words, where they are wanted and the plan of a choice
        has no room for them."""
        policy = self.policy
        if not planner.wants_attempts:
            return (
                "pipeline_read and pipeline_write, one of which is off"
                if policy.overlap == "backward"
                else ""
            )
        if not planner.copied:
            return (
                "states that are stepped on the CPU: on NVMe, with weights on NVMe or in memory "
                "that the budget has room for "
                "twice, or, beside an accelerator, in memory that it has room for twice: there are "
                "none"
            )
        if planner.wants_rest:
            return (
                "activation_bytes: without it inputs of checkpointed blocks take what "
                "host_bytes leaves"
            )
        plan = planner.plan(choice._replace(attempts=False))
        copies = [planner.copy_bytes(unit, choice.tile_numel) for unit in planner.copied]
        copies_bytes = sum(weights + states * self.is_gpu for weights, states in copies)
        enough = (plan.host_bytes + copies_bytes) * self.ranks_on_node
        if policy.host_bytes is not None and enough <= policy.host_bytes:
            return "states on NVMe: the budget keeps all of them in memory"
        given = "is not set" if policy.host_bytes is None else f"is {policy.host_bytes}"
        size = f"{enough} ({format_mib(enough)} a node)"
        said = f"host_bytes, which {given}, and {size} has room for twice what rests in memory"
        if policy.host_bytes is None:
            said += "; without it, twice as much has to be free"
        return said

    def _choices(self, planner: Planner) -> list[PlanChoice]:
        """The choices, best first."""
        if (now := self.now) is None:
            return planner.choices()
        grads, units, tiles, numel, _ = now.choice
        every = dict.fromkeys(each._replace(tile_numel=numel) for each in planner.choices())
        elsewhere = (Tier.NVME, self.policy.grads)
        return [
            each
            for each in every
            if each.unit_buffers == units
            and now.may_attempt <= each.attempts <= now.choice.attempts  # what no step uses may go
            and (each.grads is grads or (each.grads in elsewhere and not self.keeps_grads))
            and each.tile_buffers <= tiles
        ]

    def refusal(self) -> str:
        """Says which budget no plan fits, with the rows of the smallest plan."""
        policy = self.policy
        planner = self._planner(())
        count = self.ranks_on_node
        plans = [planner.plan(choice) for choice in self._choices(planner)]
        if not plans:
            return "gradients that are there stay where they rest: step, or drop them, before"
        smallest = min(plans, key=lambda plan: plan.device_bytes)
        if policy.device_bytes is not None and smallest.device_bytes > policy.device_bytes:
            return (
                f"device_bytes={policy.device_bytes}, and the smallest plan needs "
                f"{smallest.device_bytes} of each rank's "
                f"accelerator: {smallest.listed(Tier.DEVICE)}. Raise the budget, or send more to "
                "HOST or NVME"
            )
        smallest = min(
            (plan for plan in plans if self._fits_device(plan)), key=lambda plan: plan.host_bytes
        )
        return (
            f"host_bytes={policy.host_bytes} per node is {self.budget} for each of {count} ranks, "
            "and the smallest plan "
            f"needs {smallest.host_bytes} per rank, {smallest.host_bytes * count} per node: "
            f"{smallest.listed(Tier.HOST)}. "
            "Raise the budget, or send more to NVME"
        )

    def _planner(self, stays: Collection[int]) -> Planner:
        homes = {index: home for index, home in self.homes.items() if index not in stays}
        division = self.division.with_units({index: self._resident[index] for index in stays})
        return Planner(
            division,
            self.policy,
            self.topology,
            self.is_gpu,
            homes,
            self.context_bytes,
            self.copies_weights,
        )

    def _fits(self, plan: Plan) -> bool:
        return (self.budget is None or plan.host_bytes <= self.budget) and self._fits_device(plan)

    def _fits_device(self, plan: Plan) -> bool:
        budget = self.policy.device_bytes if self.is_gpu else None
        return budget is None or plan.device_bytes <= budget


def _size(choice: PlanChoice) -> tuple[int, int, int, bool]:
    """What a plan grows with, for one home of gradients: each by itself."""
    return choice.unit_buffers, choice.tile_buffers, choice.tile_numel, choice.attempts


def _staying(
    maker: _Maker, division: Division, homes: Mapping[int, Tier], room_bytes: int
) -> set[int]:
    """The streamed units, by index, that stay on the accelerator: the most bytes that both budgets
    hold.

    Fetches cost most from NVME, and twice a step where backward reads the weights again. Units that
    cost the same stay at even distances, so that fetches of others hide behind them. Large units
    enlarge every buffer, so that is also tried: these first.

    room_bytes: of the accelerator, which the plan leaves with no more units there.
    """
    again = {unit.index for unit in division.order(reads_weights_again)}
    units = [
        u
        for u in division.units
        if u.index in homes and not u.is_packed and u.full_dtype == u.dtype
    ]
    by_size = sorted(unit.full_bytes for unit in units)
    usual = by_size[len(by_size) // 2] if by_size else 0

    def cost(unit: Unit) -> tuple[bool, bool]:
        return homes[unit.index] is Tier.NVME, unit.index in again

    def first(count: int, groups: Sequence[Sequence[Unit]]) -> set[int]:
        """The indices of `count` units, group by group; of the last group at even distances."""
        found: set[int] = set()
        for group in groups:
            found.update(
                unit.index for unit in _spread(group, min(1.0, (count - len(found)) / len(group)))
            )
        return found

    orders: list[Callable[[Unit], Any]] = [
        cost,
        lambda unit: (unit.full_bytes > usual, *cost(unit)),
    ]
    found = []
    for order in orders:
        ordered = sorted(units, key=order, reverse=True)  # equal ones as the model has them
        groups = [list(alike) for _, alike in itertools.groupby(ordered, key=order)]
        sums = itertools.accumulate(unit.full_bytes for unit in ordered)
        low = 0
        high = len(units)
        probe = bisect.bisect(list(sums), room_bytes)  # rarely off by many
        step = 1
        while low < high:
            probe = min(max(probe, low + 1), high)
            if maker.fits(first(probe, groups)):
                low = probe
                probe += step
                step *= 2
            else:
                high = probe - 1
                probe = (low + high + 1) // 2 if low else high
                step = 1
        found.append(first(low, groups))
    return max(found, key=lambda stays: sum(division.units[each].full_bytes for each in stays))


def _unit_homes(units: list[Unit], policy: OffloadPolicy, num_shards: int) -> dict[int, Tier]:
    """Tiers of streamed units. Of units on NVMe, `host_param_numel` elements stay on HOST, spread
    evenly over the model."""
    streamed = [u for u in units if not u.is_resident]
    homes = {u.index: policy.params for u in streamed}
    if policy.params is Tier.NVME and policy.host_param_numel and streamed:
        share = policy.host_param_numel / num_shards / sum(u.shard_numel for u in streamed)
        for unit in _spread(streamed, min(1.0, share)):
            homes[unit.index] = Tier.HOST
    return homes


def _used_at_home(
    units: Sequence[Unit], homes: Mapping[int, Tier], topology: Topology, is_gpu: bool
) -> list[Unit]:
    """The streamed units that can be used where they rest: on one shard, where the maths runs."""
    if topology.num_shards > 1:
        return []
    near = {Tier.DEVICE} if is_gpu else {Tier.DEVICE, Tier.HOST}
    return [
        unit
        for unit in units
        if homes.get(unit.index) in near and not (unit.is_packed or unit.is_widened)
    ]


def _spread(units: Sequence[Unit], share: float) -> list[Unit]:
    """The given share (0 to 1) of units, taken at even distances."""
    return [unit for i, unit in enumerate(units) if int((i + 1) * share) > int(i * share)]
