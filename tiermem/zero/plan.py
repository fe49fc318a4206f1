"""Plan: computes the memory of a sharded model on every tier before anything is allocated."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.accelerator import free_and_total, is_accelerator
from tiermem.swap.ranges import round_up
from tiermem.zero.gather import secondary_numel
from tiermem.zero.packed import gathers_packed, wire_bytes
from tiermem.zero.reduce import MOST_UNDER_WAY, largest_buffer, largest_column
from tiermem.zero.state_layout import FP32_BYTES, StateLayout
from tiermem.zero.topology import Topology
from tiermem.zero.unit import UNIT_ALIGN, Division, Unit, reads_weights_again

# ---- the plan --------------------------------------------------------------------------------------------------------

USUAL_TILE_NUMEL = 1 << 20
USUAL_TILE_BUFFERS = (8, 4)  # two for reads and two for writes keep a disk busy; more bridge its pauses
_USUAL_UNITS_AHEAD = 2
_USUAL_GRAD_BUFFERS = 2
_LINK_BUFFERS = 2
"""One is filled by the accelerator while the other one's gradients are stored."""
_PAGE = 4096
BOUNCE_BYTES = 4 << 20
ACTIVATION_CHUNK_BYTES = 1 << 20
"""Activations move in pieces of this size."""
_ACTIVATION_BUFFERS = 8
"""Of one piece each, between activations and NVMe: enough to keep a disk busy."""

_STATES = "optimizer states"

T = TypeVar("T")


class Row(NamedTuple):
    """One line of a plan: its name, the tier, its bytes, and the reason."""

    what: str
    tier: Tier
    num_bytes: int
    why: str


class Buffers(NamedTuple):
    """Buffers of one size for one purpose; (0, 0) when the plan has none."""

    slot_bytes: int
    num: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and numbers of everything that is allocated, in bytes of this rank.

    HOST memory is a sum of rows, each with its reason: storage (states that rest on HOST) and buffers (states that pass
    through). When the budget leaves a choice, the plan prefers, in this order: gradients on HOST; tiles and unit buffers of
    their usual size and number; then smaller tiles. The rest of the budget keeps a part of the optimizer states on HOST. When
    even the smallest plan does not fit, ValueError gives the arithmetic and the smallest budget that works. Bytes are per rank;
    the budget is per node.

    DEVICE memory is a sum of rows, too, without activations. With a budget for it (`device_bytes`), units stay there that would
    be streamed without it: those whose fetch costs most, as many as both budgets hold.
    """

    rows: list[Row]
    host_bytes: int  # all HOST rows: the arena's size
    device_bytes: int  # all DEVICE rows, on an accelerator
    disk_bytes: int  # all NVME rows
    frozen_disk_bytes: int  # the part for checkpoints; taken when the first step after a checkpoint is written
    grads: Tier | None  # None: gradients are not kept
    states: Tier  # of the optimizer
    on_device: tuple[str, ...]  # names of the buffers below that lie on an accelerator
    link_bytes: int  # the part of host_bytes that crosses the link to an accelerator
    division: Division = dataclasses.field(compare=False, repr=False)  # as planned: more units may be resident
    unit_homes: dict[int, Tier]  # the tiers of streamed units, by unit index
    units: Buffers  # full layouts of streamed units, on HOST or, with an accelerator, on DEVICE
    shards: Buffers  # shards on their way to a gather or to the accelerator
    wires: Buffers  # blocks that packed gathers send and receive
    gradients: Buffers  # gradients of a unit on their way to their tier
    links: Buffers  # gradients on their way from an accelerator
    sums: Buffers  # buckets of gradients during reductions
    tiles: Buffers  # tiles of optimizer states
    activations: Buffers  # pieces of activations on their way to NVMe and back
    tile_numel: int
    resident_bytes: int  # most bytes of states that are kept on HOST although they rest on NVMe
    activation_bytes: (
        int  # room for activations that rest on HOST; 0: there are none, or the plan does not know how many
    )

    def why_disk(self, policy: OffloadPolicy) -> str:
        """The arithmetic behind disk_bytes, for the error of a full disk; empty without room for checkpoints."""
        if not self.frozen_disk_bytes:
            return ""
        less = self.disk_bytes - self.frozen_disk_bytes
        return (
            f"What steps write rests in {policy.num_slots} slots (durability={policy.durability!r}, keep={policy.keep}), one "
            f"to write and the rest for what is durable; with durability='none' {less} bytes are enough, and "
            "a checkpoint is a copy"
        )


def planned_layout(unit: Unit, policy: OffloadPolicy) -> StateLayout:
    """The state layout of a unit when the optimizer keeps as many moments as the policy plans for."""
    return StateLayout(unit.dtype, policy.precision, policy.num_moments)


def keeps_initial_master(unit: Unit, policy: OffloadPolicy) -> bool:
    """Whether a unit's fp32 initial values are kept until its first step, beside its low-precision parameters."""
    has_master = policy.precision.master_of(unit.dtype) is not None
    return policy.master_from == "init" and unit.is_trainable and has_master


def keeps_secondary(policy: OffloadPolicy, num_shards: int) -> bool:
    """Whether near ranks keep a second copy of gathered parameters: only if other ranks are far."""
    return 1 < policy.secondary_group_size < num_shards


def make_plan(division: Division, policy: OffloadPolicy, topology: Topology, is_gpu: bool, ranks_on_node: int) -> Plan:
    """Plans a division under a policy.

    With one shard, a unit that rests where the maths runs is used there: such units are resident in `Plan.division`. Raises
    ValueError when the budget cannot hold the smallest plan, or a parameter cannot be kept in the policy's precision.
    """
    if policy.grads is Tier.DEVICE and not is_gpu:
        raise ValueError(
            "grads=DEVICE without an accelerator: reduced gradients rest on HOST or NVME; leave it None for what fits the "
            "budget"
        )
    for unit in division.units:
        if unit.is_trainable:
            policy.precision.check_dtype(unit.dtype, unit.shards[0].name)
    homes = _unit_homes(division.units, policy, topology.num_shards)
    in_place = {Tier.DEVICE} if is_gpu else {Tier.DEVICE, Tier.HOST}
    if topology.num_shards == 1:
        as_is = [u for u in division.units if not (u.is_packed or u.is_widened)]
        stays = {u.index for u in as_is if homes.get(u.index) in in_place}
        homes = {index: home for index, home in homes.items() if index not in stays}
        division = division.with_residents(stays)
    maker = _Maker(division, policy, topology, is_gpu, homes, ranks_on_node)
    plan = maker.make(set())
    if plan is not None and is_gpu and policy.device_bytes is not None:
        plan = maker.make(_staying(maker, division, homes)) or plan
    if plan is None:
        raise ValueError(maker.refusal())
    return plan


def check_card(plan: Plan, policy: OffloadPolicy, device: torch.device) -> None:
    """Raises ValueError, with the arithmetic, when an accelerator has no room for a plan or for the budget."""
    if is_accelerator(device):
        check_room(plan, policy, *free_and_total(device))


def check_room(plan: Plan, policy: OffloadPolicy, free_bytes: int, total_bytes: int) -> None:
    """As `check_card`, for an accelerator of which this process may still take `free_bytes` of all bytes."""
    if policy.device_bytes is not None and policy.device_bytes > total_bytes:
        raise ValueError(
            f"device_bytes={policy.device_bytes}, and the accelerator has {total_bytes} ({_mib(total_bytes)}), of which "
            "activations need a part: give less, or leave it out"
        )
    if plan.device_bytes > free_bytes:
        raise ValueError(
            f"the plan needs {plan.device_bytes} bytes of the accelerator, and {free_bytes} of its {total_bytes} are free "
            f"(other processes may hold the rest): {_listed(plan, Tier.DEVICE)}. Send more to HOST or NVME, or set device_bytes"
        )


class _Maker:
    """Makes the best plan within the budgets, for any choice of units that stay on the accelerator."""

    def __init__(
        self,
        division: Division,
        policy: OffloadPolicy,
        topology: Topology,
        is_gpu: bool,
        homes: dict[int, Tier],
        ranks_on_node: int,
    ) -> None:
        self._division = division
        self._policy = policy
        self._topology = topology
        self._is_gpu = is_gpu
        self._homes = homes
        self._ranks_on_node = ranks_on_node
        self._budget = None if policy.host_bytes is None else policy.host_bytes // ranks_on_node

    def make(self, stays: Collection[int]) -> Plan | None:
        """The best plan with these units (by index) staying on the accelerator; None when none fits."""
        policy, budget, planner = self._policy, self._budget, self._planner(stays)
        for choice in planner.choices():
            plan = planner.plan(choice, resident_bytes=policy.resident_bytes or 0)
            if self._fits(plan):
                left = 0 if budget is None else budget - plan.host_bytes - _PAGE
                if left > 0 and planner.wants_rest:
                    return planner.plan(choice, policy.resident_bytes or 0, room_bytes=left)
                return planner.plan(choice, left) if left > 0 and policy.resident_bytes is None else plan
        return None

    def refusal(self) -> str:
        """Says which budget no plan fits, with the rows of the smallest plan."""
        policy, planner, count = self._policy, self._planner(()), self._ranks_on_node
        plans = [planner.plan(choice, policy.resident_bytes or 0) for choice in planner.choices()]
        smallest = min(plans, key=lambda plan: plan.device_bytes)
        if policy.device_bytes is not None and smallest.device_bytes > policy.device_bytes:
            return (
                f"device_bytes={policy.device_bytes}, and the smallest plan needs {smallest.device_bytes} of each rank's "
                f"accelerator: {_listed(smallest, Tier.DEVICE)}. Raise the budget, or send more to HOST or NVME"
            )
        smallest = min((plan for plan in plans if self._fits_device(plan)), key=lambda plan: plan.host_bytes)
        return (
            f"host_bytes={policy.host_bytes} per node is {self._budget} for each of {count} ranks, and the smallest plan "
            f"needs {smallest.host_bytes} per rank, {smallest.host_bytes * count} per node: {_listed(smallest, Tier.HOST)}. "
            "Raise the budget, or send more to NVME"
        )

    def _planner(self, stays: Collection[int]) -> _Planner:
        homes = {index: home for index, home in self._homes.items() if index not in stays}
        division = self._division.with_residents(stays) if stays else self._division
        return _Planner(division, self._policy, self._topology, self._is_gpu, homes)

    def _fits(self, plan: Plan) -> bool:
        return (self._budget is None or plan.host_bytes <= self._budget) and self._fits_device(plan)

    def _fits_device(self, plan: Plan) -> bool:
        budget = self._policy.device_bytes if self._is_gpu else None
        return budget is None or plan.device_bytes <= budget


def _staying(maker: _Maker, division: Division, homes: Mapping[int, Tier]) -> set[int]:
    """The streamed units, by index, that stay on the accelerator: the most bytes that both budgets hold.

    Fetches cost most from NVME, and twice a step where backward reads the weights again. Units that cost the same stay at even
    distances, so that fetches of others hide behind them. Large units enlarge every buffer, so that is also tried: these first.
    """
    again = {unit.index for unit in division.order(reads_weights_again)}
    units = [u for u in division.units if u.index in homes and not u.is_packed and u.full_dtype == u.dtype]
    sizes = sorted(unit.full_bytes for unit in units)
    usual = sizes[len(sizes) // 2] if sizes else 0

    def cost(unit: Unit) -> tuple[bool, bool]:
        return homes[unit.index] is Tier.NVME, unit.index in again

    def first(count: int, order: Callable[[Unit], Any]) -> set[int]:
        """The indices of `count` units, group by group, the highest first; of the last group at even distances."""
        found: set[int] = set()
        for _, alike in itertools.groupby(sorted(units, key=order, reverse=True), key=order):
            group = sorted(alike, key=lambda unit: unit.index)
            found.update(unit.index for unit in spread(group, min(1.0, (count - len(found)) / len(group))))
            if len(found) >= count:
                break
        return found

    best: set[int] = set()
    bytes_of = {unit.index: unit.full_bytes for unit in units}
    orders: list[Callable[[Unit], Any]] = [cost, lambda unit: (unit.full_bytes > usual, *cost(unit))]
    for order in orders:
        low, high = 0, len(units)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if maker.make(first(middle, order)) is not None else (low, middle - 1)
        found = first(low, order)
        if sum(bytes_of[index] for index in found) > sum(bytes_of[index] for index in best):
            best = found
    return best


class _Sheet:
    """The rows of a plan while it is being made."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.link_bytes = 0

    def add(self, what: str, tier: Tier, num_bytes: int, why: str, crosses_link: bool = False) -> None:
        if num_bytes:
            self.rows.append(Row(what, tier, num_bytes, why))
            self.link_bytes += num_bytes * (crosses_link and tier is Tier.HOST)

    def buffers(
        self,
        what: str,
        count: int,
        sizes: Iterable[int],
        why: str,
        crosses_link: bool = False,
        tier: Tier = Tier.HOST,
    ) -> Buffers:
        """Adds `count` buffers of the largest size."""
        size = max(sizes, default=0) if count else 0
        if not size:
            return Buffers(0, 0)
        self.add(f"{count} {what} buffers", tier, count * _page(size), why, crosses_link)
        return Buffers(size, count)

    def total(self, tier: Tier) -> int:
        return sum(row.num_bytes for row in self.rows if row.tier is tier)


class _Planner:
    """Plans one choice; lists the choices, best first."""

    def __init__(
        self, division: Division, policy: OffloadPolicy, topology: Topology, is_gpu: bool, homes: dict[int, Tier]
    ) -> None:
        self._policy = policy
        self._division = division
        self._units = division.units
        self._most_at_once = max(1, division.most_at_once)
        self._is_gpu = is_gpu
        self._num_shards = topology.num_shards
        self._world = topology.world
        self._trainable = [u for u in division.units if u.is_trainable]
        self._homes = homes  # of streamed units, by index
        on_host = Tier.HOST if policy.optim is Tier.DEVICE and not is_gpu else policy.optim
        self._states: Tier = on_host  # tier of optimizer states; without an accelerator DEVICE means host memory
        rests_on_host = is_gpu and policy.activations is Tier.HOST
        self.wants_rest = rests_on_host and policy.activation_bytes is None  # activations get what the budget leaves
        self._keeps_activations = rests_on_host or policy.activations is Tier.NVME

    def choices(self) -> list[tuple[Tier | None, int, int, int]]:
        """Tuples (tier of gradients, unit buffers, tile buffers, elements of a tile), best first."""
        policy = self._policy
        homes: list[Tier | None] = [Tier.HOST, Tier.NVME] if policy.paths else [Tier.HOST]
        if policy.step_in_backward:
            homes = [None]  # gradients are not kept
        elif policy.grads is not None or self._states is Tier.DEVICE:
            homes = [policy.grads or Tier.DEVICE]
        aheads = [0] if policy.gather_way == "single" else [_USUAL_UNITS_AHEAD, 1]
        counts = [policy.unit_buffers] if policy.unit_buffers else [self._most_at_once + ahead for ahead in aheads]
        tiles = [policy.tile_numel] if policy.tile_numel else [USUAL_TILE_NUMEL >> i for i in range(5)]
        num_off = int(not policy.pipeline_read) + int(not policy.pipeline_write)
        buffers = [policy.tile_buffers] if policy.tile_buffers else [n >> num_off for n in USUAL_TILE_BUFFERS]
        return list(itertools.product(homes, counts, buffers, tiles))

    def plan(self, choice: tuple[Tier | None, int, int, int], resident_bytes: int, room_bytes: int = 0) -> Plan:
        """The plan of one choice, also when it exceeds the budget.

        room_bytes: HOST memory for activations, where the policy does not say how much.
        """
        grads, num_units, num_tiles, tile_numel = choice
        policy, sheet = self._policy, _Sheet()
        at_home = self._add_parameters(sheet)
        streamed = [u for u in self._units if u.index in self._homes]
        num_units, place = min(num_units, len(streamed)), Tier.DEVICE if self._is_gpu else Tier.HOST
        needs_stage = self._num_shards > 1 or self._is_gpu or any(u.is_packed for u in streamed)
        full_sizes = (u.full_bytes for u in streamed)
        units = sheet.buffers("unit", num_units, full_sizes, "in use and fetched ahead", tier=place)
        shard_sizes = (u.shard_bytes for u in at_home[Tier.NVME])
        num_shards = (3 if self._is_gpu else 2) * needs_stage  # one more, which the accelerator still reads
        shards = sheet.buffers("shard", num_shards, shard_sizes, "read ahead of a gather", crosses_link=self._is_gpu)
        wire_sizes = (wire_bytes(u, self._num_shards) for u in streamed if gathers_packed(u, policy))
        wires = sheet.buffers("wire", units.num, wire_sizes, "8-bit blocks on their way between ranks", tier=place)
        gradients = self._add_gradients(sheet, grads)
        num_links = _LINK_BUFFERS * (self._is_gpu and grads is not Tier.DEVICE)
        limit = policy.reduce_bucket_numel if self._world > 1 else sys.maxsize
        link_sizes = (largest_column(u, self._num_shards, limit) for u in self._trainable)
        links = sheet.buffers("link", num_links, link_sizes, "gradients on their way from the accelerator", True)
        num_sums = MOST_UNDER_WAY * (self._world > 1)
        sum_sizes = (largest_buffer(u, self._num_shards, policy.reduce_bucket_numel) for u in self._trainable)
        sums = sheet.buffers("reduce", num_sums, sum_sizes, "gradients on their way between ranks", tier=place)
        activations, room_bytes = self._add_activations(sheet, room_bytes)
        resident_bytes = self._add_states(sheet, resident_bytes, tile_numel)
        frozen = self._add_frozen(sheet, at_home[Tier.NVME])
        streams = Tier.NVME in (policy.optim, grads, *self._homes.values())
        largest = max((u.shard_numel for u in self._trainable), default=UNIT_ALIGN)
        tile_numel = min(round_up(tile_numel, UNIT_ALIGN), largest)
        tile_sizes = (tile_bytes(u, tile_numel, policy) for u in self._trainable)
        tiles = sheet.buffers("tile", num_tiles * streams, tile_sizes, f"of {tile_numel} elements")
        sheet.add("bounce buffer", Tier.HOST, BOUNCE_BYTES if policy.paths else 0, "for bytes of ordinary tensors")
        return Plan(
            rows=sheet.rows,
            host_bytes=sheet.total(Tier.HOST),
            device_bytes=sheet.total(Tier.DEVICE),
            disk_bytes=sheet.total(Tier.NVME),
            frozen_disk_bytes=frozen,
            grads=grads,
            states=self._states,
            on_device=("units", "wires", "sums") if self._is_gpu else (),
            link_bytes=sheet.link_bytes,
            division=self._division,
            unit_homes=self._homes,
            units=units,
            shards=shards,
            wires=wires,
            gradients=gradients,
            links=links,
            sums=sums,
            tiles=tiles,
            activations=activations,
            tile_numel=tile_numel,
            resident_bytes=resident_bytes,
            activation_bytes=room_bytes,
        )

    def _add_parameters(self, sheet: _Sheet) -> dict[Tier, list[Unit]]:
        """Adds the rows of parameters; returns the streamed units by tier."""
        at_home = {tier: [u for u in self._units if self._homes.get(u.index) is tier] for tier in Tier}
        present = [u for u in self._units if u.is_resident]
        place = Tier.DEVICE if self._is_gpu else Tier.HOST
        sheet.add("resident parameters", place, _pages(u.full_bytes for u in present), "present all the time")
        if self._num_shards > 1 or (self._is_gpu and self._states is not Tier.DEVICE):
            home = Tier.DEVICE if self._states is Tier.DEVICE else Tier.HOST
            shards = _pages(u.shard_bytes for u in present)
            sheet.add("their shards", home, shards, "what a step writes", crosses_link=self._is_gpu)
        for tier in (Tier.HOST, Tier.DEVICE):
            home = tier if self._is_gpu else Tier.HOST
            at_rest = _pages(u.shard_bytes for u in at_home[tier])
            sheet.add("parameters", home, at_rest, f"rest on {home.name}", crosses_link=self._is_gpu)
        sheet.add("parameters", Tier.NVME, _pages(u.shard_bytes for u in at_home[Tier.NVME]), "rest on NVME")
        if keeps_secondary(self._policy, self._num_shards):
            num_across = self._num_shards // self._policy.secondary_group_size
            sizes = [secondary_numel(u, num_across) * u.dtype.itemsize for u in self._units if not u.is_resident]
            sheet.add("secondary copies", place, _pages(sizes), "backward gathers from them (hpZ)")
        return at_home

    def _add_gradients(self, sheet: _Sheet, home: Tier | None) -> Buffers:
        """Adds the rows of gradients; returns the buffers through which they pass."""
        sizes = [u.shard_numel * self._policy.precision.grad_dtype(u.dtype).itemsize for u in self._trainable]
        if home is not None:
            sheet.add("gradients", home, _pages(sizes), f"rest on {home.name} until the step")
        passes = home in (None, Tier.NVME)
        return sheet.buffers("gradient", _USUAL_GRAD_BUFFERS * passes, sizes, "on their way home")

    def _add_activations(self, sheet: _Sheet, room_bytes: int) -> tuple[Buffers, int]:
        """Adds the rows of activations; returns the buffers through which they pass, and their room on HOST."""
        if not self._keeps_activations:
            return Buffers(0, 0), 0
        room_bytes = round_up(self._policy.activation_bytes or 0, ACTIVATION_CHUNK_BYTES) or (
            room_bytes // ACTIVATION_CHUNK_BYTES * ACTIVATION_CHUNK_BYTES
        )
        home = self._policy.activations or Tier.HOST
        why = f"inputs of checkpointed blocks rest on {home.name}"
        sheet.add("activations", home, room_bytes, why, crosses_link=True)
        count = _ACTIVATION_BUFFERS * (home is Tier.NVME)
        buffers = sheet.buffers(
            "activation", count, [ACTIVATION_CHUNK_BYTES], "on their way to NVME and back", self._is_gpu
        )
        return buffers, room_bytes * (home is Tier.HOST)

    def _add_states(self, sheet: _Sheet, resident_bytes: int, tile_numel: int) -> int:
        """Adds the rows of optimizer states; returns the bytes of states kept on HOST although they rest on NVMe."""
        tiles = [alike for u in self._trainable for alike in _state_sizes(u, tile_numel, self._policy)]
        states = sum(_page(size) * count for size, count in tiles)
        home = self._states
        initial = [u.shard_numel * FP32_BYTES for u in self._trainable if keeps_initial_master(u, self._policy)]
        sheet.add(
            "initial masters", Tier.NVME if home is Tier.NVME else Tier.HOST, _pages(initial), "until the first step"
        )
        if home is not Tier.NVME:
            sheet.add(_STATES, home, states, f"rest on {home.name}")
            return 0
        resident = min(resident_bytes // _PAGE * _PAGE, states)
        # Tiles are not divided, so up to one tile less is resident.
        whole = resident if resident == states else max(0, resident - max(tiles, default=(0, 0))[0])
        sheet.add(_STATES, Tier.NVME, states - whole, "rest on NVME")
        sheet.add("resident tiles", Tier.HOST, resident, "states kept on HOST")
        return resident

    def _add_frozen(self, sheet: _Sheet, resting: list[Unit]) -> int:
        """Adds room for slots that checkpoints hold while steps write to others; returns its bytes.

        resting: units on NVMe. Units that training never writes are stored once for all checkpoints; writing a checkpoint
        makes the files grow by them.
        """
        policy = self._policy
        written = _pages(u.shard_bytes for u in resting if u.is_trainable)
        written += sum(r.num_bytes for r in sheet.rows if r.tier is Tier.NVME and r.what == _STATES)
        frozen = (policy.num_slots - 1) * written
        sheet.add("frozen slots", Tier.NVME, frozen, f"durability={policy.durability!r}, keep={policy.keep}")
        return frozen


def _unit_homes(units: list[Unit], policy: OffloadPolicy, num_shards: int) -> dict[int, Tier]:
    """Tiers of streamed units. Of units on NVMe, `host_param_numel` elements stay on HOST, spread evenly over the model."""
    streamed = [u for u in units if not u.is_resident]
    homes = {u.index: policy.params for u in streamed}
    if policy.params is Tier.NVME and policy.host_param_numel and streamed:
        share = policy.host_param_numel / num_shards / sum(u.shard_numel for u in streamed)
        for unit in spread(streamed, min(1.0, share)):
            homes[unit.index] = Tier.HOST
    return homes


def tile_bytes(unit: Unit, tile_numel: int, policy: OffloadPolicy) -> int:
    """Bytes of a tile's buffer: its states, and its slices of the parameters and of the gradients."""
    numel = min(tile_numel, unit.shard_numel)
    grad_bytes = policy.precision.grad_dtype(unit.dtype).itemsize
    states = planned_layout(unit, policy).buffer_bytes(numel, keeps_initial_master(unit, policy))
    return states + numel * (unit.dtype.itemsize + grad_bytes)


def _state_sizes(unit: Unit, tile_numel: int, policy: OffloadPolicy) -> list[tuple[int, int]]:
    """(bytes of one tile's states, number of such tiles) for the tiles of a unit."""
    layout, step = planned_layout(unit, policy), round_up(tile_numel, UNIT_ALIGN)
    whole, rest = divmod(unit.shard_numel, step)
    return [(layout.total_bytes(numel), count) for numel, count in ((step, whole), (rest, 1)) if numel * count]


def spread(items: Sequence[T], share: float) -> list[T]:
    """The given share (0 to 1) of a list, taken at even distances."""
    return [item for i, item in enumerate(items) if int((i + 1) * share) > int(i * share)]


def _pages(sizes: Iterable[int]) -> int:
    return sum(_page(size) for size in sizes)


def _page(num_bytes: int) -> int:
    return round_up(num_bytes, _PAGE)


def _listed(plan: Plan, tier: Tier) -> str:
    return "; ".join(f"{row.what} {_mib(row.num_bytes)} ({row.why})" for row in plan.rows if row.tier is tier)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
