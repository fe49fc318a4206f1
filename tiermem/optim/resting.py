"""Resting: states of ordinary parameters that rest on HOST or NVMe, in a store of their own.

    parameters of one dtype and device    [ p0 | p1 |       p2        | p3 | ... ]    a unit, as in units/unit.py
    their states, in tiles                [    tile    |    tile    |   tile   ]    stepped one after the other

    on HOST     the states are stepped where they rest
    on NVMe     through a few buffers: the next tile is read and the previous one written while one is stepped

The parameters and their gradients stay where their owner keeps them; of a DTensor that is its local
shard (local.py). From an accelerator a tile's gradients are copied into a pinned buffer, and its
new weights back, on the accelerator's current stream. The states are stepped by the kernels, and in
the formats, of every other tier, so a tier changes no bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from tiermem.optim.at_rest import FindRule, RestingTiles
from tiermem.optim.local import as_placed, first_element, local_of
from tiermem.optim.ordinary import check_gradient
from tiermem.optim.tile import MomentsOf, StateTile, stepped_ranges
from tiermem.optim.tile_work import ParamViews, Stepping
from tiermem.optimizers.base import AnyStep, Group, Rule
from tiermem.plans.plan import sizes_from
from tiermem.policy import (
    USUAL_TILE_NUMELS,
    OffloadPolicy,
    Tier,
    check_kind,
    usual_tile_buffers,
)
from tiermem.ranks.topology import paths_of_rank, ranks_per_node
from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.swap.base.native import Workers
from tiermem.swap.base.ranges import ALIGNMENT, round_up, within
from tiermem.swap.memory.accelerator import activate, current_stream, is_accelerator, on, record
from tiermem.swap.memory.arena import BudgetError, Pool, Slot
from tiermem.swap.program.program import Program
from tiermem.swap.program.table import TileWork
from tiermem.swap.store.checksum import Range
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import Bounce, Parts
from tiermem.units.state_layout import StateLayout
from tiermem.units.unit import ALIGN, UNIT_ALIGN, Shard, ShardRange, Unit
from tiermem.units.written import Mark, adopt, mark_of

_APPLIED = {
    *("stage", "optim", "precision", "num_moments", "pin_memory", "verify", "io", "timeout_s"),
    *("paths", "host_bytes", "disk_bytes", "resident_bytes"),
    *("tile_numel", "tile_buffers", "pipeline_read", "pipeline_write"),
}
"""The fields of a policy that ordinary parameters follow, and those that change nothing for
them."""


def check_policy(policy: OffloadPolicy) -> None:
    """Raises ValueError for a policy with fields that only a sharded model can follow."""
    check_kind(policy)
    usual = OffloadPolicy()
    others = [
        field.name
        for field in dataclasses.fields(policy)
        if field.name not in _APPLIED and getattr(policy, field.name) != getattr(usual, field.name)
    ]
    if others:
        raise ValueError(
            f"the policy sets {', '.join(others)}, which only a sharded model follows; the states "
            "of ordinary parameters "
            "follow optim, precision, paths, host_bytes and the like. Leave the others out, or "
            "call "
            "tiermem.shard(model, policy) and build the optimizer without a policy"
        )


class RestingStates(RestingTiles[StateTile]):
    """The states of some ordinary parameters, on HOST or NVMe. Owns their store, which `close` or
    the end of its life frees.

    Args:
        policy: tier, precision, paths and budgets. `host_bytes` is a budget per node, divided by
            the ranks on it.
        names: the name of each parameter, in the order of the optimizer.
        find_rule: the group and the rule of each; a method of the optimizer, which is held weakly.
        workers: threads of the kernels; the caller closes them.
        taken_bytes: what other states of the same policy take of this rank's part of `host_bytes`.

    Raises BudgetError when `host_bytes` does not suffice, OSError (ENOSPC). All room is
    taken here.
    """

    def __init__(
        self,
        policy: OffloadPolicy,
        names: Mapping[nn.Parameter, str],
        find_rule: FindRule,
        workers: Workers,
        taken_bytes: int,
    ) -> None:
        units = _lay_out(names)
        self.shards = {shard.param: shard for unit in units for shard in unit.shards}
        # of weights when a step or an adoption made their masters
        self._marks: dict[Shard, Mark] = {}
        devices = list(dict.fromkeys(local_of(param).device for param in names))
        devices = [device for device in devices if is_accelerator(device)]
        rules = {param: found[1] for param in names if (found := find_rule(param)) is not None}
        plan = plan_states(policy, units, rules, bool(devices), taken_bytes)
        self.host_bytes = plan.host_bytes
        """Bytes of HOST memory that the states and the buffers take."""
        store = TensorStore(
            paths_of_rank(policy.paths),
            max(plan.host_bytes, 1),
            policy.io,
            policy.disk_bytes,
            devices[0] if devices else None,
            plan.num_buffers * plan.buffer_bytes if devices and policy.pin_memory else 0,
        )
        try:
            bounce = Bounce(store, plan.piece_bytes, _NUM_PIECES) if plan.piece_bytes else None
            parts = Parts(store, bounce)
            super().__init__(store, parts, workers, policy, 0, _weakly(find_rule), set())
            self._set(plan.tiles)
            self._program = Program[StateTile](store, self._take_room(plan), workers)
        except BaseException:
            store.close()
            raise

    def step(self, steps: Mapping[nn.Parameter, AnyStep]) -> None:
        """Steps parameters that have a gradient, with their next scalars. Blocks, also until an
        accelerator has new weights.

        Raises OSError when a transfer fails, ValueError for a rule with more moments than the
        states have; after an OSError the states refuse to continue until a state dict is loaded.
        """
        self.check_whole()
        due = {self.shards[param]: step for param, step in steps.items()}
        for shard in due:
            self._check(shard)
        self._run(due)

    def close(self) -> None:
        """Frees the memory and the files. Blocks. Raises the first error of a write that no step
        has raised."""
        self._store.close()

    # ---- weights ---------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """Raises RuntimeError when the states are a mixture of two steps."""
        self._store.check_process()
        if self.half_loaded:
            raise RuntimeError(
                "a step, or loading a state dict, failed half-way, so that these states are a "
                "mixture of two steps: load "
                "the weights and the optimizer's state dict again"
            )

    def load(self, shard: Shard, name: str, values: torch.Tensor) -> None:
        """Restores a state from fp32 values. Blocks. After an OSError the states refuse to
        continue."""
        with self._changing([shard]):
            self.put(shard, name, values)
            self._marks.pop(shard, None)

    def take_writes(self, shard: Shard) -> None:
        """Makes the master that of a weight which the user has written. Blocks; raises OSError."""
        if self.keeps_master(shard) and self._is_written(shard):
            self._run({shard: None})

    def whole(self, shard: Shard, mine: torch.Tensor) -> torch.Tensor:
        """A state, placed as its parameter."""
        return as_placed(mine.view(shard.shape), shard.param)

    def mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a state, flat."""
        return whole.reshape(-1)

    def _start(self, tiles: Sequence[StateTile]) -> None:
        self._run(dict.fromkeys(part.shard for tile in tiles for part in tile.ranges))

    def _weight_in(self, tile: StateTile, elements: ShardRange) -> torch.Tensor:
        return local_of(elements.shard.param).reshape(-1)[elements.start : elements.stop].cpu()

    def _put_weight(self, tile: StateTile, elements: ShardRange, weight: torch.Tensor) -> None:
        """Only a split master sets its weight: it says what the weight's low bits are."""
        master = tile.layout.master
        if master is None or master.kind != "split":
            return
        local = local_of(elements.shard.param)
        flat = local.contiguous().view(-1)
        flat[elements.start : elements.stop].copy_(weight)
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))

    # ---- one pass --------------------------------------------------------------------------------

    def _run(self, steps: Mapping[Shard, AnyStep | None]) -> None:
        """Makes first states, and the masters of weights that the user has written, of these
        parameters; then steps those that have a step."""
        tiles = [tile for tile in self.tiles if any(part.shard in steps for part in tile.ranges)]
        written = {shard for shard in steps if self._is_written(shard)}
        act = Stepping(self._workers, steps.get)
        work = _Pass(self._store, steps, act, self.names, written)
        with self._changing(self.shards.values()):
            for shard, step in steps.items():
                if step is not None:
                    shard.count_step()
            self._program.run(tiles, work, self._policy.pipeline_read, self._policy.pipeline_write)
            work.end()
            for tile in tiles:
                tile.is_started = True
            self._marks.update((shard, mark_of(local_of(shard.param))) for shard in steps)

    @contextlib.contextmanager
    def _changing(self, shards: Iterable[Shard]) -> Iterator[None]:
        """A block that replaces states of these parameters; one that raises leaves them half
        loaded."""
        new = set(shards) - self.half_loaded
        self.half_loaded |= new
        yield
        self.half_loaded -= new

    def _is_written(self, shard: Shard) -> bool:
        """Whether its weight was written since its master was last made that of the weight."""
        return self._marks.get(shard) != mark_of(local_of(shard.param))

    def _check(self, shard: Shard) -> None:
        """Raises ValueError for a parameter of another dtype or shape, or with more moments, than
        when the plan was made."""
        local = local_of(shard.param)
        if local.dtype is not shard.reduce_dtype or local.shape != shard.shape:
            raise ValueError(
                f"the parameter {shard.name!r} is {local.dtype} of shape {tuple(local.shape)} now, "
                "and its states are of "
                f"{shard.reduce_dtype} of shape {tuple(shard.shape)}: build the optimizer after "
                "the model has its dtype"
            )
        names = self.names(shard)
        room = [tile.layout.num_moments for tile, _ in self.pieces(shard)]
        if room and len(names) > room[0]:
            raise ValueError(
                f"the parameter {shard.name!r} has room for {room[0]} moments and now keeps "
                f"{', '.join(names)}: build the "
                "optimizer with the options that its groups have now"
            )

    def _take_room(self, plan: StatesPlan) -> Pool | None:
        """Takes memory and disk for every tile and buffer of the plan."""
        store = self._store
        store.sums.use(self._workers, self._policy.verify)
        on_disk = [tile for tile in plan.tiles if tile.state_home is Tier.NVME]
        if on_disk:
            store.reserve_disk(sum(tile.state_bytes for tile in on_disk), plan.why)
        self._reserve(plan.tiles)
        self._protect(plan.tiles)
        if not plan.num_buffers:
            return None
        pool = Pool(
            store.arena, plan.buffer_bytes, plan.num_buffers, "tiles of states", crosses_link=True
        )
        store.flush()
        return pool


def _weakly(find_rule: FindRule) -> FindRule:
    """A method of an optimizer that does not keep the optimizer alive, which owns the caller."""
    held = weakref.WeakMethod(find_rule)

    def find(param: nn.Parameter) -> tuple[Group, Rule] | None:
        alive = held()
        return None if alive is None else alive(param)

    return find


# ---- the plan ------------------------------------------------------------------------------------


_PIECE_BYTES = 1 << 20
_NUM_PIECES = 2
"""Buffers for single states on NVMe: one is copied while the other one is read or written."""


class StatesPlan(NamedTuple):
    """What the states of ordinary parameters take."""

    tiles: list[StateTile]
    num_buffers: int
    buffer_bytes: int
    piece_bytes: int  # of each buffer for single states
    host_bytes: int  # of states and buffers
    why: str  # the arithmetic, in words


def plan_states(
    policy: OffloadPolicy,
    units: Sequence[Unit],
    rules: Mapping[nn.Parameter, Rule],
    is_moved: bool,
    taken_bytes: int,
) -> StatesPlan:
    """The plan with the most buffers and the largest tiles that fit. Raises BudgetError with the
    arithmetic of the smallest.

    is_moved: whether parameters are on an accelerator. taken_bytes: what other states take.
    """
    budget = None
    if policy.host_bytes is not None:
        budget = policy.host_bytes // ranks_per_node() - taken_bytes
    has_buffers = policy.optim is Tier.NVME or is_moved
    whole = [max((unit.shard_numel for unit in units), default=UNIT_ALIGN)]
    usual = USUAL_TILE_NUMELS if has_buffers else whole
    numels = [round_up(numel, UNIT_ALIGN) for numel in sizes_from(policy, policy.tile_numel, usual)]
    usual = usual_tile_buffers(policy.pipeline_read, policy.pipeline_write)
    counts = sizes_from(policy, policy.tile_buffers, usual) if has_buffers else [0]
    for count, numel in itertools.product(counts, numels):
        tiles = [tile for unit in units for tile in _cut(policy, unit, rules, numel)]
        plan = _plan_of(policy, tiles, count, is_moved, budget)
        if budget is None or plan.host_bytes <= budget:
            return plan
    assert budget is not None
    raise BudgetError(
        f"{plan.why} {plan.host_bytes} bytes of HOST memory are needed, and host_bytes leaves "
        f"this rank {budget} "
        f"({policy.host_bytes} // {ranks_per_node()} ranks - {taken_bytes} of other states). "
        "Raise host_bytes, "
        + ("choose smaller tiles (tile_numel), " if has_buffers else "set optim=Tier.NVME, ")
        + "or a smaller precision"
    )


def _plan_of(
    policy: OffloadPolicy, tiles: list[StateTile], count: int, is_moved: bool, budget: int | None
) -> StatesPlan:
    """The plan of these tiles and so many buffers."""
    is_on_disk = policy.optim is Tier.NVME
    sizes = [tile.state_bytes for tile in tiles]
    state_bytes = max(sizes, default=0) if is_on_disk else 0
    # weights and gradients in a buffer; gradients may be fp32
    sent = (tile.numel * (tile.dtype.itemsize + torch.float32.itemsize) for tile in tiles)
    link_bytes = max(sent, default=0) if is_moved else 0
    buffer_bytes = round_up(state_bytes + link_bytes, ALIGNMENT)
    piece_bytes = min(_PIECE_BYTES, state_bytes)
    buffers = count * buffer_bytes + _NUM_PIECES * piece_bytes
    if is_on_disk:
        left = sum(sizes) if policy.resident_bytes is None else policy.resident_bytes
        resident = min(left, 0 if budget is None else max(0, budget - buffers))
        tiles = [
            dataclasses.replace(tile, state_home=Tier.HOST) if is_resident else tile
            for tile, is_resident in zip(tiles, within(sizes, resident), strict=True)
        ]
    on_host = sum(tile.state_bytes for tile in tiles if tile.state_home is Tier.HOST)
    shards = {part.shard for tile in tiles for part in tile.ranges}
    why = (
        f"The states of {sum(shard.numel for shard in shards)} elements of ordinary parameters "
        f"take {sum(sizes)} bytes, {on_host} of them on HOST, beside {count} buffers of "
        f"{buffer_bytes} bytes for tiles of {max((tile.numel for tile in tiles), default=0)} "
        f"elements and {_NUM_PIECES} of {piece_bytes} for single states = {buffers} bytes."
    )
    num_buffers = count if buffer_bytes else 0
    return StatesPlan(tiles, num_buffers, buffer_bytes, piece_bytes, on_host + buffers, why)


def _cut(
    policy: OffloadPolicy, unit: Unit, rules: Mapping[nn.Parameter, Rule], tile_numel: int
) -> Iterator[StateTile]:
    """The tiles of a unit. Raises ValueError for a whole matrix that does not fit into one tile."""
    of_shards = {shard: rules[shard.param] for shard in unit.shards}
    num_moments = max(len(rule.moments) for rule in of_shards.values())
    layout = StateLayout(unit.dtype, policy.precision, num_moments)
    whole = [shard for shard, rule in of_shards.items() if rule.is_matrix]
    for start, numel, ranges in stepped_ranges(unit, tile_numel, 0, whole):
        yield StateTile(
            start=start,
            numel=numel,
            layout=layout,
            entry=f"state/{unit.index}/{start}",
            state_home=policy.optim,
            ranges=ranges,
        )


def _lay_out(names: Mapping[nn.Parameter, str]) -> list[Unit]:
    """The parameters' local parts one behind the other, those of one dtype and device in one
    unit."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Shard]] = {}
    for index, (param, name) in enumerate(names.items()):
        local = local_of(param)
        of_kind = kinds.setdefault((param.dtype, local.device), [])
        offset = of_kind[-1].shard_offset + round_up(of_kind[-1].numel, ALIGN) if of_kind else 0
        numel = local.numel()
        of_kind.append(
            Shard(name, index, param, local.shape, numel, numel, offset, offset, param.dtype)
        )
    units: list[Unit] = []
    for (dtype, _), shards in kinds.items():
        numel = round_up(max(1, shards[-1].shard_offset + shards[-1].numel), UNIT_ALIGN)
        units.append(Unit("ordinary", len(units), shards, dtype, True, True, numel, numel, dtype))
    return units


# ---- the work on a tile --------------------------------------------------------------------------


class _Values(NamedTuple):
    """Elements of a parameter."""

    weight: torch.Tensor
    grad: torch.Tensor | None  # None: they are not stepped


@dataclasses.dataclass(eq=False)
class _Pass(TileWork[StateTile]):
    """One pass over tiles, which swap/program/program.py runs. A buffer holds [ states, if they rest on NVMe | weights |
    gradients ], the last two of parameters on an accelerator.

    Args:
        store: has the states.
        steps: the step of each parameter that is worked on; None: its states are only made those of
            its weight.
        act: makes the steps.
        names: the moments of a parameter.
        written: parameters whose weights the user has written; their masters become those of the
            weights before the step.
    """

    _store: TensorStore
    _steps: Mapping[Shard, AnyStep | None]
    _act: Stepping
    _names: MomentsOf
    _written: Collection[Shard]
    _straight: dict[Shard, _Values] = dataclasses.field(default_factory=dict, init=False)
    """The flat weight and gradient of each."""

    def name(self, tile: StateTile) -> str:
        """The entry of its states."""
        return tile.entry

    def early_reads(self, tile: StateTile, slot: Slot | None) -> list[Range]:
        """Its states on NVMe, once they have been written."""
        return self.writes(tile, slot) if tile.is_started else []

    def writes(self, tile: StateTile, slot: Slot | None) -> list[Range]:
        """Its states on NVMe."""
        is_there = tile.state_home is Tier.NVME and tile.state_bytes
        return [(tile.entry, 0, tile.states_in(self._store, slot))] if is_there else []

    def is_brought(self, tile: StateTile) -> bool:
        """Whether `compute` copies weights and gradients from an accelerator to its buffer."""
        return is_accelerator(_device_of(tile))

    def compute(self, tile: StateTile, slot: Slot | None) -> Callable[[], None] | None:
        """Does the work on a tile, in its buffer or where it rests; blocks. Parameters on an
        accelerator come to the buffer on the current stream; the rest, which is returned, does the
        work when they have come, and waits until they are back."""
        if not self.is_brought(tile):
            self._work_on(tile, slot)
            return None
        stream = current_stream(_device_of(tile))
        self._bring(tile, slot)
        copied = record(stream)

        def rest() -> None:
            copied.synchronize()
            activate(stream.device)
            with on(stream):
                call_with_grad(False, self._work_on, tile, slot)
                record(stream).synchronize()

        return rest

    def end(self) -> None:
        """Copies parameters back that are not contiguous."""
        for shard, (weight, _) in self._straight.items():
            local = local_of(shard.param)
            if self._steps[shard] is not None and not local.is_contiguous():
                local.copy_(weight.view(local.shape))

    def _work_on(self, tile: StateTile, slot: Slot | None) -> None:
        """Steps each parameter in a tile; new weights start back to an accelerator."""
        at_rest = tile.states_in(self._store, slot)
        if not tile.is_started:
            at_rest.zero_()
        views = tile.layout.views(at_rest, tile.numel)
        for part, at_owner, near in self._held(tile, slot):
            shard = part.shard
            states = views.piece(tile.slice_of(part).start, part.numel)
            if shard in self._written and states.master is not None:
                adopt(near.weight, states.master)
            if self._steps[shard] is None:
                continue
            first = first_element(shard.param) + part.start
            names = self._names(shard)
            self._act(ParamViews(tile, shard, first, near.weight, near.grad, states, names))
            if near is not at_owner:
                at_owner.weight.copy_(near.weight, non_blocking=True)

    def _bring(self, tile: StateTile, slot: Slot | None) -> None:
        """Starts the copies from an accelerator into a tile's buffer."""
        for part, at_owner, near in self._held(tile, slot):
            if tile.layout.reads_weight or part.shard in self._written:
                near.weight.copy_(at_owner.weight, non_blocking=True)
            if near.grad is not None and at_owner.grad is not None:
                near.grad.copy_(at_owner.grad, non_blocking=True)

    def _held(
        self, tile: StateTile, slot: Slot | None
    ) -> Iterator[tuple[ShardRange, _Values, _Values]]:
        """The elements of each parameter in a tile that is worked on, and their values where their
        owner keeps them and where the work finds them."""
        for part in tile.ranges:
            if part.shard not in self._steps:
                continue
            weight, grad = self._flat(part.shard)
            elements = slice(part.start, part.stop)
            at_owner = _Values(weight[elements], None if grad is None else grad[elements])
            near = at_owner
            if self.is_brought(tile):
                near = self._in_buffer(tile, slot, tile.slice_of(part), grad)
            yield part, at_owner, near

    def _in_buffer(
        self, tile: StateTile, slot: Slot | None, in_tile: slice, grad: torch.Tensor | None
    ) -> _Values:
        """A parameter's weights and gradients in a tile's buffer."""
        assert slot is not None
        start = tile.state_bytes if tile.state_home is Tier.NVME else 0
        weights = slot.tensor[start:].view(tile.dtype)
        near = None
        if grad is not None:
            start += tile.numel * tile.dtype.itemsize
            near = slot.tensor[start : start + tile.numel * grad.itemsize].view(grad.dtype)[in_tile]
        return _Values(weights[in_tile], near)

    def _flat(self, shard: Shard) -> _Values:
        """A parameter's local weight and, in a step, gradient: flat, copies where they are not
        contiguous."""
        if shard not in self._straight:
            weight = local_of(shard.param).contiguous().view(-1)
            grad = None
            if self._steps[shard] is not None:
                grad = check_gradient(shard.param, shard.name, is_moved=True).contiguous().view(-1)
            self._straight[shard] = _Values(weight, grad)
        return self._straight[shard]


def _device_of(tile: StateTile) -> torch.device:
    """The device of a tile's parameters."""
    return local_of(tile.ranges[0].shard.param).device
