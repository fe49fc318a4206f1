"""Plan: the memory of a sharded model on every tier, as a sum of rows, for one choice of what a
budget leaves open."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from tiermem.policy import (
    USUAL_TILE_NUMELS,
    USUAL_UNITS_AHEAD,
    OffloadPolicy,
    Tier,
    usual_tile_buffers,
)
from tiermem.ranks.topology import Topology
from tiermem.swap.base.native import NORM_BLOCK
from tiermem.swap.base.ranges import round_up, within
from tiermem.swap.kernels.torch_step import step_scratch_bytes, sum_scratch_bytes
from tiermem.units.quantised import scratch_bytes
from tiermem.units.state_layout import (
    FP32_BYTES,
    brought_bytes,
    keeps_initial_master,
    state_sizes,
    tile_bytes,
)
from tiermem.units.unit import UNIT_ALIGN, Division, Unit
from tiermem.wires.gather import secondary_numel
from tiermem.wires.packed import gathers_packed, needs_wire, wire_bytes
from tiermem.wires.reduce import MOST_UNDER_WAY, largest_buffer, largest_column

# ---- the plan ------------------------------------------------------------------------------------

_USUAL_GRAD_BUFFERS = 2
_LINK_BUFFERS = 2
"""One is filled by the accelerator while the other one's gradients are stored."""
_STREAM_BUFFERS = 3
"""One tile arrives while another one is stepped and a third one leaves."""
_PAGE = 4096
BOUNCE_BYTES = 4 << 20
ACTIVATION_CHUNK_BYTES = 1 << 20
"""Activations move in pieces of this size."""
_ACTIVATION_BUFFERS = 8
"""Of one piece each, between activations and NVMe: enough to keep a disk busy."""

CONTEXT = "context"
PACKING = "packing"
_STATES = "optimizer states"
_ATTEMPTS = "slot of steps under backward"
_WEIGHT_COPIES = "second copies of weights, for steps under backward"
_STATE_COPIES = "second copies of states, for steps under backward"
_FACTORS = (8, 8)


class Row(NamedTuple):
    """One line of a plan: its name, the tier, its bytes, and the reason."""

    what: str
    tier: Tier
    num_bytes: int
    why: str


class PlanChoice(NamedTuple):
    """What a budget leaves open."""

    grads: Tier | None  # the tier of gradients; None: they are not kept
    unit_buffers: int
    tile_buffers: int
    tile_numel: int  # most elements of a tile
    # whether there is room for steps under backward, if the policy wants them
    attempts: bool = True


class Buffers(NamedTuple):
    """Buffers of one size for one purpose; (0, 0) when the plan has none."""

    slot_bytes: int
    num: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and numbers of everything that is allocated, in bytes of this rank.

    HOST memory is a sum of rows, each with its reason: storage (states that rest on HOST) and
    buffers (states that pass through). When the budget leaves a choice, the plan prefers, in this
    order: gradients on HOST; tiles and unit buffers of their usual size and number; then smaller
    tiles. The rest of the budget keeps a part of the optimizer states on HOST. When even the
    smallest plan does not fit, ValueError gives the arithmetic and the smallest budget that works.
    Bytes are per rank; the budget is per node.

    DEVICE memory is a sum of rows, too, without activations. With a budget for it (`device_bytes`),
    units stay there that would be streamed without it: those whose fetch costs most, as many as
    both budgets hold.
    """

    rows: list[Row]
    choice: PlanChoice
    host_bytes: int  # all HOST rows
    # those that are carved from the arena; the others are the driver's and torch's
    arena_bytes: int
    device_bytes: int  # all DEVICE rows, on an accelerator
    disk_bytes: int  # all NVME rows
    # the part for slots that durable steps hold; taken by the first write after a checkpoint
    durable_disk_bytes: int
    # the part for steps under backward, beside what they replace; 0: none is on disk
    attempt_disk_bytes: int
    # units in memory, by index, that have a second copy for steps under backward
    copied: tuple[int, ...]
    grads: Tier | None  # None: gradients are not kept
    states: Tier  # of the optimizer
    on_device: tuple[str, ...]  # names of the buffers below that lie on an accelerator
    link_bytes: int  # the part of host_bytes that crosses the link to an accelerator
    # as planned: more units may be resident
    division: Division = dataclasses.field(compare=False, repr=False)
    unit_homes: dict[int, Tier]  # the tiers of streamed units, by unit index
    # whether gradients, or weights, that rest on an accelerator come to tiles that the CPU steps
    brings_gradients: bool
    brings_weights: bool
    units: Buffers  # full layouts of streamed units, on HOST or, with an accelerator, on DEVICE
    staging: Buffers  # shards on their way to a gather or to the accelerator
    wires: Buffers  # blocks that packed gathers send and receive
    gradients: Buffers  # gradients of a unit on their way to their tier
    links: Buffers  # gradients on their way from an accelerator
    sums: Buffers  # buckets of gradients during reductions
    tiles: Buffers  # tiles of optimizer states
    streams: Buffers  # on an accelerator: tiles that rest elsewhere and are stepped there
    exchanges: Buffers  # on it: weights and gradients that its steps of other tiles need
    activations: Buffers  # pieces of activations on their way to NVMe and back
    tile_numel: int
    # most bytes of states that stay on the device although `states` is another tier
    kept_bytes: int
    steps_there: bool  # whether an accelerator steps states that rest there
    streamed_part: float  # of the tiles that rest elsewhere: those that an accelerator steps
    resident_bytes: int  # most bytes of states that are kept on HOST although they rest on NVMe
    # room for those that rest on HOST; 0: there are none, or the plan does not know how many
    activation_bytes: int
    lacks: str = dataclasses.field(default="", compare=False)
    """What steps under backward lack here, in words, where they are wanted and have no room."""

    def __str__(self) -> str:
        return "\n".join(
            f"{row.tier.name:<6} {format_mib(row.num_bytes):>12}  {row.what} ({row.why})"
            for row in self.rows
        )

    def listed(self, tier: Tier) -> str:
        """Its rows of a tier, in one line, for an error."""
        return "; ".join(
            f"{row.what} {format_mib(row.num_bytes)} ({row.why})"
            for row in self.rows
            if row.tier is tier
        )

    @property
    def steps_on_device(self) -> bool:
        """Whether an accelerator steps tiles, so that data of steps crosses the link."""
        return self.steps_there or self.streamed_part > 0

    @property
    def initial_masters(self) -> Tier:
        """Where fp32 values that masters begin with rest until the first step."""
        return Tier.NVME if self.states is Tier.NVME else Tier.HOST

    @property
    def may_attempt(self) -> bool:
        """Whether there is room for steps under backward."""
        return bool(self.attempt_disk_bytes or self.copied)

    def without_attempts(self, lacks: str) -> Plan:
        """The same plan of states on NVMe without room for steps under backward. lacks: what is
        missing, in words."""
        rows = [row for row in self.rows if row.what not in (_ATTEMPTS, _WEIGHT_COPIES)]
        on_host = sum(row.num_bytes for row in self.rows if row.what == _WEIGHT_COPIES)
        return dataclasses.replace(
            self,
            rows=rows,
            host_bytes=self.host_bytes - on_host,
            arena_bytes=self.arena_bytes - on_host,
            disk_bytes=self.disk_bytes - self.attempt_disk_bytes,
            attempt_disk_bytes=0,
            copied=(),
            lacks=lacks,
        )


def keeps_secondary(policy: OffloadPolicy, num_shards: int) -> bool:
    """Whether near ranks keep a secondary copy of gathered parameters: only if others are far."""
    return 1 < policy.secondary_group_size < num_shards


_Counted = tuple[Unit, int]
"""A unit, and how many units of its kind there are."""


class _Sheet:
    """The rows of a plan while it is being made."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.link_bytes = 0

    def add(
        self, what: str, tier: Tier, num_bytes: int, why: str, crosses_link: bool = False
    ) -> None:
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


def sizes_from(policy: OffloadPolicy, given: int | None, usual: Sequence[int]) -> list[int]:
    """The sizes that a plan tries, best first. given: by the user, which is the least where
    `sizes_are_least`."""
    if given is None:
        return list(usual)
    larger = [size for size in usual if policy.sizes_are_least and size > given]
    return [*larger, given]


class Planner:
    """Plans one choice; lists the choices, best first."""

    def __init__(
        self,
        division: Division,
        policy: OffloadPolicy,
        topology: Topology,
        is_gpu: bool,
        homes: dict[int, Tier],
        context_bytes: int,
        copies_weights: bool,
    ) -> None:
        self._policy = policy
        self._context_bytes = context_bytes
        self._division = division
        # a unit of each kind, and how many there are
        self._counted = division.counted(homes)
        self._is_gpu = is_gpu
        self._topology = topology
        self._num_shards = topology.num_shards
        self._world = topology.world
        self._trainable = [each for each in self._counted if each[0].is_trainable]
        self._trained = [unit for unit, _ in self._trainable]  # without numbers
        self._largest = max((unit.shard_numel for unit in self._trained), default=UNIT_ALIGN)
        self._homes = homes  # of streamed units, by index
        optim = policy.optim if policy.optim_ratio else Tier.DEVICE
        # without an accelerator DEVICE means host memory
        self._device = device = Tier.DEVICE if is_gpu else Tier.HOST
        self._states: Tier = device if optim is Tier.DEVICE else optim  # tier of optimizer states
        self._grad_homes: list[Tier | None] = (
            [Tier.HOST, Tier.NVME] if policy.paths else [Tier.HOST]
        )
        if policy.step_in_backward:
            self._grad_homes = [None]  # gradients are not kept
        elif policy.grads is not None or self._states is Tier.DEVICE:
            self._grad_homes = [policy.grads or Tier.DEVICE]
        in_use = {self._states, *self._grad_homes, *homes.values()}
        self._is_all_there = in_use <= {Tier.DEVICE, device}
        """Whether a step finds everything in the memory where it computes, so that a tile may be as
        large as a unit."""
        # of them, on the device
        self._kept_part = 0.0 if self._states is device else 1.0 - policy.optim_ratio
        self._steps_there = is_gpu and (self._states is device or self._kept_part > 0)
        self._streamed_part = (policy.streamed_ratio or 0.0) * (
            is_gpu and self._states is not device
        )
        self._steps_on_device = self._steps_there or self._streamed_part > 0
        self.wants_attempts = policy.wanted_overlap(self._states, is_gpu) == "backward"
        may_attempt = self.wants_attempts and not (is_gpu and self._steps_on_device)
        self._may_attempt = may_attempt and self._states is Tier.NVME
        may_copy = self._may_attempt if not is_gpu else may_attempt and self._states is Tier.HOST
        self.copied = [
            unit
            for unit in division.units
            if may_copy and unit.is_trainable and homes.get(unit.index) is Tier.HOST
        ]
        """Units in memory that such steps need second copies of."""
        copies_weights |= policy.overlap == "backward" or policy.host_bytes is not None
        # of their weights
        self._weights_copied = self.copied if copies_weights and not is_gpu else []
        # and, where there is room, of their states as well
        self._all_copied = self.copied if is_gpu else []
        rests_on_host = is_gpu and policy.activations is Tier.HOST
        # activations get what the budget leaves
        self.wants_rest = rests_on_host and policy.activation_bytes is None
        self._keeps_activations = rests_on_host or policy.activations is Tier.NVME

    def choices(self) -> list[PlanChoice]:
        """All choices, best first."""
        policy = self._policy
        # one more than a forward uses at once: a backward holds a unit while a checkpoint repeats others
        aheads = [1, 0] if policy.gather_way == "single" else [USUAL_UNITS_AHEAD, 1]
        at_once = max(1, self._division.most_at_once)
        counts = sizes_from(policy, policy.unit_buffers, [at_once + ahead for ahead in aheads])
        tiles = sizes_from(
            policy, policy.tile_numel, [self._largest] * self._is_all_there + USUAL_TILE_NUMELS
        )
        buffers = sizes_from(
            policy,
            policy.tile_buffers,
            usual_tile_buffers(policy.pipeline_read, policy.pipeline_write),
        )
        every = itertools.product(self._grad_homes, counts, buffers, tiles, [True, False])
        is_asked = policy.overlap == "backward"  # other things make room for it then
        return sorted(
            itertools.starmap(PlanChoice, every),
            key=lambda choice: is_asked and not choice.attempts,
        )

    def copied_within(self, num_bytes: int | None, tile_numel: int) -> tuple[int, ...]:
        """Units on HOST, by index, whose second copies take so many bytes at most; evenly spread.
        None: by the policy alone.

        Spreading them lets the next forward start on stepped units while the CPU steps the rest.
        """
        sizes = [sum(self.copy_bytes(unit, tile_numel)) for unit in self._all_copied]
        if num_bytes is None:  # nobody has said how much memory there is
            num_bytes = sum(sizes) if self._policy.overlap == "backward" else 0
        taken = within(sizes, min(num_bytes, sum(sizes)))
        left = num_bytes - sum(itertools.compress(sizes, taken))
        # what is left goes to units whose gradients come first
        for index in reversed(range(len(sizes))):
            if not taken[index] and sizes[index] <= left:
                taken[index], left = True, left - sizes[index]
        return tuple(unit.index for unit in itertools.compress(self._all_copied, taken))

    def copy_bytes(self, unit: Unit, tile_numel: int) -> tuple[int, int]:
        """Bytes of the second copies of a unit's weights and of its states."""
        return _page(unit.shard_bytes), _pages(state_sizes(unit, tile_numel, self._policy))

    def plan(
        self,
        choice: PlanChoice,
        room_bytes: int = 0,
        copied: Collection[int] = (),
        left_bytes: int = 0,
    ) -> Plan:
        """The plan of one choice, also when it exceeds the budget.

        room_bytes, left_bytes: HOST memory for activations, and for states that rest on NVMe, where
            the policy does not say how much. copied: see `copied_within`.
        """
        grads, num_units, num_tiles, tile_numel, attempts = choice
        policy = self._policy
        sheet = _Sheet()
        at_home = self._at_home
        for row, crosses_link in self._parameter_rows:
            sheet.add(*row, crosses_link)
        streamed = [each for each in self._counted if each[0].takes_buffer]
        num_units = min(num_units, sum(num for _, num in streamed))
        needs_staging = (
            self._num_shards > 1 or self._is_gpu or any(u.is_packed for u, _ in streamed)
        )
        sizes = (unit.full_bytes for unit, _ in streamed)
        units = sheet.buffers(
            "unit", num_units, sizes, "in use and fetched ahead", tier=self._device
        )
        shard_sizes = (unit.shard_bytes for unit, _ in at_home[Tier.NVME])
        # one more, which the accelerator still reads
        num_shards = (3 if self._is_gpu else 2) * needs_staging
        staging = sheet.buffers(
            "shard", num_shards, shard_sizes, "read ahead of a gather", crosses_link=self._is_gpu
        )
        wired = [
            u
            for u, _ in streamed
            if gathers_packed(u, policy, self._num_shards)
            and needs_wire(u, self._num_shards, self._is_gpu)
        ]
        wires = sheet.buffers(
            "wire",
            units.num,
            (wire_bytes(u, self._num_shards) for u in wired),
            "blocks on their way, packed or from other ranks",
            tier=self._device,
        )
        gradients = self._add_gradients(sheet, grads)
        most = policy.reduce_bucket_numel if self._world > 1 else sys.maxsize
        links = sheet.buffers(
            "link",
            _LINK_BUFFERS * (self._is_gpu and grads is not Tier.DEVICE),
            (largest_column(unit, self._num_shards, most) for unit in self._trained),
            "gradients on their way from the accelerator",
            True,
        )
        limit = policy.reduce_bucket_numel
        sums = sheet.buffers(
            "reduce",
            MOST_UNDER_WAY * (self._world > 1),
            (largest_buffer(u, self._topology, limit, self._is_gpu) for u in self._trained),
            "gradients on their way between ranks",
            tier=self._device,
        )
        self._add_packing(sheet, wired)
        activations, room_bytes = self._add_activations(sheet, room_bytes)
        kept_bytes, resident_bytes = self._add_states(sheet, left_bytes, tile_numel)
        durable, attempt = self._add_slots(sheet, at_home[Tier.NVME], attempts)
        second = [unit for unit in self._all_copied if unit.index in copied]
        copies = [self.copy_bytes(unit, tile_numel) for unit in second]
        why = (
            f"of {len(copies)} of {len(self._all_copied)} units, evenly spread: what the budget "
            "leaves room for"
        )
        sheet.add(
            _WEIGHT_COPIES, Tier.HOST, sum(weights for weights, _ in copies), why, crosses_link=True
        )
        sheet.add(_STATE_COPIES, Tier.HOST, sum(states for _, states in copies), why)
        if attempt:
            second += self._weights_copied
        has_whole = Tier.NVME in (self._states, grads, *self._homes.values())
        is_brought = self._is_gpu and self._states is not Tier.DEVICE
        brings_grads = is_brought and grads is Tier.DEVICE
        brings_weights = is_brought and bool(at_home[Tier.DEVICE])
        tile_numel = min(round_up(tile_numel, UNIT_ALIGN), self._largest)
        size_of = (
            tile_bytes
            if has_whole
            else functools.partial(brought_bytes, grads=brings_grads, weights=brings_weights)
        )
        tile_sizes = (size_of(u, tile_numel, policy) for u in self._trained)
        why = f"of {tile_numel} elements"
        crosses = self._steps_on_device or brings_grads or brings_weights
        tiles = sheet.buffers("tile", num_tiles, tile_sizes, why, crosses_link=crosses)
        streams, exchanges = self._add_steps_there(sheet, tile_numel, grads)
        sheet.add(
            "bounce buffer",
            Tier.HOST,
            BOUNCE_BYTES if policy.paths else 0,
            "for bytes of ordinary tensors",
        )
        outside_bytes = self._add_outside(sheet, grads)
        return Plan(
            rows=sheet.rows,
            choice=choice,
            host_bytes=sheet.total(Tier.HOST),
            arena_bytes=sheet.total(Tier.HOST) - outside_bytes,
            device_bytes=sheet.total(Tier.DEVICE),
            disk_bytes=sheet.total(Tier.NVME),
            durable_disk_bytes=durable,
            attempt_disk_bytes=attempt,
            copied=tuple(unit.index for unit in second),
            grads=grads,
            states=self._states,
            on_device=("units", "wires", "sums") if self._is_gpu else (),
            link_bytes=sheet.link_bytes,
            division=self._division,
            unit_homes=self._homes,
            brings_gradients=brings_grads,
            brings_weights=brings_weights,
            units=units,
            staging=staging,
            wires=wires,
            gradients=gradients,
            links=links,
            sums=sums,
            tiles=tiles,
            streams=streams,
            exchanges=exchanges,
            activations=activations,
            tile_numel=tile_numel,
            kept_bytes=kept_bytes,
            steps_there=self._steps_there,
            streamed_part=self._streamed_part,
            resident_bytes=resident_bytes,
            activation_bytes=room_bytes,
        )

    # What follows is of units alone, whatever is chosen.

    @functools.cached_property
    def _at_home(self) -> dict[Tier, list[_Counted]]:
        """The streamed units by tier."""
        found: dict[Tier, list[_Counted]] = {tier: [] for tier in Tier}
        for unit, num in self._counted:
            if (home := self._homes.get(unit.index)) is not None:
                found[home].append((unit, num))
        return found

    @functools.cached_property
    def _parameter_rows(self) -> list[tuple[Row, bool]]:
        """The rows of parameters, and whether each crosses the link."""
        is_gpu = self._is_gpu
        present = [each for each in self._counted if each[0].is_resident]
        full = _pages((unit.full_bytes, num) for unit, num in present)
        found = [(Row("resident parameters", self._device, full, "present all the time"), False)]
        if self._num_shards > 1 or (is_gpu and self._states is not Tier.DEVICE):
            home = Tier.DEVICE if self._states is Tier.DEVICE else Tier.HOST
            shards = _pages((unit.shard_bytes, num) for unit, num in present)
            found.append((Row("their shards", home, shards, "what a step writes"), is_gpu))
        form = self._policy.frozen_blocks
        blocks = f", frozen matrices in {form} blocks" if form else ""
        for tier in (Tier.HOST, Tier.DEVICE, Tier.NVME):
            home = tier if is_gpu or tier is Tier.NVME else Tier.HOST
            at_rest = _pages((unit.shard_bytes, num) for unit, num in self._at_home[tier])
            crosses_link = is_gpu and tier is not Tier.NVME
            row = Row("parameters", home, at_rest, f"rest on {home.name}{blocks}")
            found.append((row, crosses_link))
        if keeps_secondary(self._policy, self._num_shards):
            num_across = self._num_shards // self._policy.secondary_group_size
            second = _pages(
                (secondary_numel(unit, num_across) * unit.dtype.itemsize, num)
                for unit, num in self._counted
                if not unit.is_resident
            )
            why = "backward gathers from them (hpZ)"
            found.append((Row("secondary copies", self._device, second, why), False))
        return found

    def _add_gradients(self, sheet: _Sheet, home: Tier | None) -> Buffers:
        """Adds the rows of gradients; returns the buffers through which they pass."""
        dtype_of = self._policy.precision.grad_dtype
        sizes = [(u.shard_numel * dtype_of(u.dtype).itemsize, num) for u, num in self._trainable]
        if home is not None:
            why = f"rest on {home.name} until the step"
            sheet.add("gradients", home, _pages(sizes), why, crosses_link=self._steps_on_device)
        passes = home in (None, Tier.NVME)
        crosses = self._steps_on_device and home is None  # to the accelerator that steps them
        return sheet.buffers(
            "gradient",
            _USUAL_GRAD_BUFFERS * passes,
            (size for size, _ in sizes),
            "on their way home",
            crosses,
        )

    def _add_packing(self, sheet: _Sheet, wired: Sequence[Unit]) -> None:
        """Adds the row of an accelerator's memory for packing: the streams of gathers and of
        reductions each keep some."""
        reduced = self._trained if self._topology.packs_reductions else []
        sizes = (max((u.packed_numel for u in units), default=0) for units in (wired, reduced))
        scratch = sum(map(scratch_bytes, sizes)) * self._is_gpu
        sheet.add(
            PACKING,
            Tier.DEVICE,
            scratch,
            "fp32 copies of pieces of blocks that are sent and received",
        )

    def _add_steps_there(
        self, sheet: _Sheet, tile_numel: int, grads: Tier | None
    ) -> tuple[Buffers, Buffers]:
        """Adds the rows of an accelerator's memory for steps; returns the buffers of tiles that
        rest elsewhere, and those of what rests elsewhere of other tiles."""
        if self._steps_on_device and self._trainable:
            sheet.add("step", Tier.DEVICE, step_scratch_bytes(tile_numel), "fp32 values")
        elif grads is Tier.DEVICE and self._trainable:
            sheet.add(
                "step",
                Tier.DEVICE,
                sum_scratch_bytes(self._largest),
                "squares in fp64, for the norm",
            )
        policy = self._policy
        streams = sheet.buffers(
            "stream",
            _STREAM_BUFFERS * (self._streamed_part > 0),
            (tile_bytes(u, tile_numel, policy) for u in self._trained),
            f"streamed_ratio={policy.streamed_ratio}",
            tier=Tier.DEVICE,
        )
        weights_cross = {self._states, *self._homes.values()} != {Tier.DEVICE}
        grads_cross = grads is not Tier.DEVICE
        exchanges = sheet.buffers(
            "exchange",
            _STREAM_BUFFERS * self._steps_there,
            (
                brought_bytes(u, tile_numel, policy, grads_cross, weights_cross)
                for u in self._trained
            ),
            "weights and gradients of tiles that are stepped there",
            tier=Tier.DEVICE,
        )
        return streams, exchanges

    def _add_outside(self, sheet: _Sheet, grads: Tier | None) -> int:
        """Adds the rows of memory outside the arena: of a KV cache, and what an accelerator takes
        of HOST. Returns the bytes of HOST among them."""
        kv_bytes = self._policy.kv_bytes or 0
        sheet.add(
            "KV cache",
            self._device,
            kv_bytes,
            "left to a generation: kv_bytes",
        )
        if not self._is_gpu:
            return kv_bytes
        shards = [(shard, num) for unit, num in self._trainable for shard in unit.shards]
        # of norms, with factors from clipping and GradScaler: float64
        sizes = [8 * sum(num for _, num in shards), *_FACTORS]
        if grads is Tier.DEVICE:  # sums of squares, that norms are made from
            squares = ((shard.shard_numel // NORM_BLOCK + 2) * num for shard, num in shards)
            sizes.append(8 * sum(squares))
        small = sum(max(_PAGE, 1 << (size - 1).bit_length()) for size in sizes if size)
        sheet.add(
            CONTEXT,
            Tier.HOST,
            self._context_bytes,
            "of the accelerator's driver in this process, measured",
        )
        sheet.add(
            "small copies",
            Tier.HOST,
            small,
            "pinned by torch, which rounds them up to powers of two",
        )
        return self._context_bytes + small

    def _add_activations(self, sheet: _Sheet, room_bytes: int) -> tuple[Buffers, int]:
        """Adds the rows of activations; returns the buffers through which they pass, and their room
        on HOST."""
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
            "activation",
            count,
            [ACTIVATION_CHUNK_BYTES],
            "on their way to NVME and back",
            self._is_gpu,
        )
        return buffers, room_bytes * (home is Tier.HOST)

    def _add_states(self, sheet: _Sheet, left_bytes: int, tile_numel: int) -> tuple[int, int]:
        """Adds the rows of optimizer states.

        left_bytes: see `plan`.

        Returns the bytes of states that stay on an accelerator, and of those kept on HOST, although
        the others rest elsewhere.
        """
        tiles = [
            (size, num * count)
            for unit, num in self._trainable
            for size, count in state_sizes(unit, tile_numel, self._policy)
        ]
        states = _pages(tiles)
        home = self._states
        initial = (
            (unit.shard_numel * FP32_BYTES, num)
            for unit, num in self._trainable
            if keeps_initial_master(unit, self._policy)
        )
        sheet.add(
            "initial masters",
            Tier.NVME if home is Tier.NVME else Tier.HOST,
            _pages(initial),
            "until the first step",
        )
        kept = int(states * self._kept_part) // _PAGE * _PAGE
        asked = self._policy.resident_bytes
        most = left_bytes if asked is None else asked
        resident = min(most // _PAGE * _PAGE, states - kept) if home is Tier.NVME else 0
        # Tiles are not divided, so up to one tile less is kept, and one less resident.
        largest = max(tiles, default=(0, 0))[0]
        elsewhere = sum(
            part if part == states else max(0, part - largest) for part in (kept, resident)
        )
        is_streamed = self._streamed_part > 0
        sheet.add(
            _STATES, home, states - elsewhere, f"rest on {home.name}", crosses_link=is_streamed
        )
        why = f"states that stay: optim_ratio={self._policy.optim_ratio}"
        sheet.add("kept tiles", self._device, kept, why)
        sheet.add(
            "resident tiles", Tier.HOST, resident, "states kept on HOST", crosses_link=is_streamed
        )
        return kept, resident

    def _add_slots(self, sheet: _Sheet, resting: list[_Counted], attempts: bool) -> tuple[int, int]:
        """Adds room for slots that checkpoints hold while steps write to others, and for what steps
        under backward write.

        Returns the bytes of both on NVMe.

        resting: units on NVMe. Units that training never writes are stored once for all
            checkpoints; writing a checkpoint makes the files grow by them. attempts: whether steps
            under backward get room, if the policy wants them.
        """
        policy = self._policy
        written = _pages((unit.shard_bytes, num) for unit, num in resting if unit.is_trainable)
        written += sum(r.num_bytes for r in sheet.rows if r.tier is Tier.NVME and r.what == _STATES)
        durable = (policy.num_slots - 1) * written
        sheet.add(
            "frozen slots",
            Tier.NVME,
            durable,
            f"durability={policy.durability!r}, keep={policy.keep}",
        )
        has_weights = bool(resting or self._weights_copied)
        is_attempted = attempts and self._may_attempt and has_weights and written > 0
        attempt = written if is_attempted else 0
        why = f"overlap={policy.overlap!r}"
        later = "; taken before the first such step, of which a run that always clips has none"
        sheet.add(_ATTEMPTS, Tier.NVME, attempt, why + later)
        sheet.add(
            _WEIGHT_COPIES,
            Tier.HOST,
            _pages((u.shard_bytes, 1) for u in self._weights_copied) * is_attempted,
            why,
        )
        return durable, attempt


def _pages(sizes: Iterable[tuple[int, int]]) -> int:
    """Bytes of so many pieces of each size."""
    return sum(_page(size) * num for size, num in sizes)


def _page(num_bytes: int) -> int:
    return round_up(num_bytes, _PAGE)


def format_mib(num_bytes: int) -> str:
    """A size for an error."""
    return f"{num_bytes / (1 << 20):.1f} MiB"
