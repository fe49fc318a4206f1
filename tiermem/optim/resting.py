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

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.optim.local import as_placed, first_element, local_of
from tiermem.optim.ordinary import STEP, State, check_gradient, num_steps_of, value_of
from tiermem.optim.rules import AnyStep, Rule, step_parts
from tiermem.optim.tile import StateTile, stepped_ranges, tile_runs
from tiermem.plans.plan import sizes_from
from tiermem.policy import USUAL_TILE_NUMELS, OffloadPolicy, Tier, usual_tile_buffers
from tiermem.ranks.topology import paths_of_rank, ranks_per_node
from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.swap.base.native import Workers, narrow_part, widen_part
from tiermem.swap.base.parts import Dither, StepParts
from tiermem.swap.base.ranges import round_up, within
from tiermem.swap.base.tier import ALIGNMENT
from tiermem.swap.memory.accelerator import activate, current_stream, is_accelerator, on, record
from tiermem.swap.memory.arena import BudgetError, Pool, Slot
from tiermem.swap.program.program import Program
from tiermem.swap.program.table import TileWork
from tiermem.swap.store.checksum import Range
from tiermem.swap.store.store import TensorStore
from tiermem.units.state_layout import (
    MASTER,
    StateLayout,
    StatePieces,
    StateViews,
    is_positive,
    keeps_sums,
)
from tiermem.units.unit import ALIGN, UNIT_ALIGN, Shard, ShardRange, Unit
from tiermem.units.written import Mark, adopt, mark_of

Ruled = Mapping[nn.Parameter, tuple[str, Rule]]
"""The name and the rule of each parameter, in the order of the optimizer."""

_APPLIED = {
    *("stage", "optim", "precision", "num_moments", "pin_memory", "verify", "io", "timeout_s"),
    *("paths", "host_bytes", "disk_bytes", "resident_bytes"),
    *("tile_numel", "tile_buffers", "pipeline_read", "pipeline_write"),
}
"""The fields of a policy that ordinary parameters follow, and those that change nothing for
them."""


def check_policy(policy: OffloadPolicy) -> None:
    """Raises ValueError for a policy with fields that only a sharded model can follow."""
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


class _Held(NamedTuple):
    """Elements of one parameter while their tile is worked on."""

    shard: Shard
    elements: slice  # of this rank's part, flat
    views: StateViews
    weight: torch.Tensor
    grad: torch.Tensor | None  # None except in a step


_Act = Callable[[_Held], None]


class RestingStates:
    """The states of some ordinary parameters, on HOST or NVMe. Owns their store, which `close` or
    the end of its life frees.

    Args:
        policy: tier, precision, paths and budgets. `host_bytes` is a budget per node, divided by
            the ranks on it.
        params: the parameters, each with its name and rule.
        workers: threads of the kernels; the caller closes them.
        taken_bytes: what other states of the same policy take of this rank's part of `host_bytes`.

    Raises BudgetError when `host_bytes` does not suffice, OSError (ENOSPC). All room
    is taken here.
    """

    def __init__(
        self, policy: OffloadPolicy, params: Ruled, workers: Workers, taken_bytes: int = 0
    ) -> None:
        self._policy = policy
        self._workers = workers
        self._rules = {param: rule for param, (_, rule) in params.items()}
        units = _lay_out(params)
        self.shards = {shard.param: shard for unit in units for shard in unit.shards}
        self._is_torn = False
        # of weights when a step or an adoption made their masters
        self._marks: dict[Shard, Mark] = {}
        devices = list(dict.fromkeys(local_of(param).device for param in params))
        devices = [device for device in devices if is_accelerator(device)]
        plan = _Planner(policy, units, self._rules, bool(devices)).plan(taken_bytes)
        self.host_bytes = plan.host_bytes
        """Bytes of HOST memory that the states and the buffers take."""
        self._tiles = plan.tiles
        self._room = {
            part.shard: tile.layout.num_moments for tile in plan.tiles for part in tile.ranges
        }
        link_bytes = plan.num_buffers * plan.buffer_bytes if devices and policy.pin_memory else 0
        self._store = TensorStore(
            paths_of_rank(policy.paths),
            max(plan.host_bytes, 1),
            policy.io,
            policy.disk_bytes,
            devices[0] if devices else None,
            link_bytes,
        )
        try:
            self._program = Program[StateTile](self._store, self._take_room(plan), workers)
        except BaseException:
            self._store.close()
            raise

    def step(self, steps: Mapping[nn.Parameter, AnyStep]) -> None:
        """Steps parameters that have a gradient, with their next scalars. Blocks, also until an
        accelerator has new weights.

        Raises OSError when a transfer fails, ValueError for a rule with more moments than the
        states have; after an OSError the states refuse to continue until a state dict is loaded.
        """
        self._check_whole()
        due = {self.shards[param]: step for param, step in steps.items()}
        for shard in due:
            self._check(shard)
        self._is_torn = True
        for shard in due:
            shard.count_step()
        precision = self._policy.precision

        def act(held: _Held) -> None:
            assert held.grad is not None
            shard = held.shard
            is_first = shard.num_steps == 1 and not shard.has_moments
            dither = None
            if precision.is_stochastic:
                first = first_element(shard.param) + held.elements.start
                dither = Dither(precision.key(shard.name), shard.num_steps, first)
            moments = held.views.moments[: len(self._names(shard))]
            parts = StepParts(held.weight, held.views.master, held.grad, moments)
            step_parts(self._workers, due[shard], parts, dither, start_moments=is_first)

        self._run(due, act, is_step=True)
        self._marks.update((shard, mark_of(local_of(shard.param))) for shard in due)
        self._is_torn = False

    def export(self) -> dict[nn.Parameter, State]:
        """The states of every parameter that has been stepped, in the format of state dicts: fp32,
        placed as the parameter.

        All of them are in memory at once. Blocks. Raises OSError.
        """
        self._check_whole()
        stepped = [shard for shard in self.shards.values() if shard.num_steps]
        found: dict[Shard, State] = {
            shard: {STEP: torch.tensor(float(shard.num_steps))} for shard in stepped
        }
        for shard, state in found.items():
            master = self._policy.precision.master_of(shard.param.dtype)
            names = [*self._names(shard), *([] if master is None else [MASTER])]
            state.update((name, torch.empty(shard.numel)) for name in names)

        def act(held: _Held) -> None:
            state = found[held.shard]
            master = held.views.master
            for name, moment in zip(self._names(held.shard), held.views.moments, strict=False):
                state[name][held.elements] = widen_part(
                    self._workers, moment, is_positive=is_positive(name)
                )
            if master is not None:
                weight = held.weight if master.dtype == torch.int16 else None
                state[MASTER][held.elements] = widen_part(self._workers, master, weight)

        self._run(found, act, changes=False)
        for shard, state in found.items():
            for name in state.keys() - {STEP}:
                state[name] = as_placed(state[name].view(shard.shape), shard.param)
        return {shard.param: state for shard, state in found.items()}

    def restore(self, entries: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Restores states from entries of a state dict; an empty entry means no steps. Blocks.
        Raises ValueError, OSError.

        Without `master` in an entry, the master is made from the parameter. Restoring a split
        master also sets its parameter.
        """
        stays_torn = self._is_torn and len(entries) < len(self.shards)
        given: dict[Shard, dict[str, torch.Tensor]] = {}
        counts: dict[Shard, int] = {}
        for param, entry in entries.items():
            shard = self.shards[param]
            rule = self._rules[param]
            counts[shard] = num_steps_of(entry, rule)
            if counts[shard]:
                has_master = (
                    self._policy.precision.master_of(param.dtype) is not None and MASTER in entry
                )
                names = [*rule.moments, *([MASTER] if has_master else [])]
                given[shard] = {
                    name: value_of(entry, name, param, shard.name).reshape(-1) for name in names
                }
        self._is_torn = True
        for shard, num_steps in counts.items():
            shard.set_steps(num_steps, False, False)
            self._marks.pop(shard, None)

        def act(held: _Held) -> None:
            values = given[held.shard]
            master = held.views.master
            for name, moment in zip(self._names(held.shard), held.views.moments, strict=False):
                narrow_part(
                    self._workers,
                    values[name][held.elements],
                    moment,
                    is_positive=is_positive(name),
                )
            if master is not None:
                new = values[MASTER][held.elements] if MASTER in values else held.weight.float()
                narrow_part(
                    self._workers, new, master, held.weight if master.dtype == torch.int16 else None
                )

        self._run(given, act, overwrites=True)
        self._is_torn = stays_torn

    def read_state(self, shard: Shard, name: str) -> torch.Tensor:
        """A copy of a moment, fp32. Blocks; raises OSError."""
        self._check_whole()
        found = torch.empty(shard.numel)
        number = self._names(shard).index(name)

        def act(held: _Held) -> None:
            found[held.elements] = widen_part(
                self._workers, held.views.moments[number], is_positive=is_positive(name)
            )

        self._run({shard: None}, act, changes=False)
        return found.view(shard.shape)

    def write_state(self, shard: Shard, name: str, value: torch.Tensor | None) -> None:
        """Replaces a moment; None: by zeros. Blocks; raises OSError."""
        self._check_whole()
        values = torch.zeros(shard.numel) if value is None else value.reshape(-1)
        number = self._names(shard).index(name)

        def act(held: _Held) -> None:
            moment = held.views.moments[number]
            narrow_part(self._workers, values[held.elements], moment, is_positive=is_positive(name))

        self._run({shard: None}, act)
        shard.note_loaded(moments=True)

    def use_rules(self, rules: Mapping[nn.Parameter, Rule]) -> None:
        """Sets the rules of parameters anew, whose groups may have changed."""
        self._rules.update(rules)

    def close(self) -> None:
        """Frees the memory and the files. Blocks. Raises the first error of a write that no step
        has raised."""
        self._store.close()

    # ---- one pass --------------------------------------------------------------------------------

    def _run(
        self,
        chosen: Mapping[Shard, object],
        act: _Act,
        *,
        is_step: bool = False,
        changes: bool = True,
        overwrites: bool = False,
    ) -> None:
        """Calls `act` for the chosen parameters in every tile; the other arguments are those of
        _Pass."""
        tiles = [tile for tile in self._tiles if any(part.shard in chosen for part in tile.ranges)]
        marks = {} if overwrites else {shard: mark_of(local_of(shard.param)) for shard in chosen}
        written = {shard for shard, mark in marks.items() if self._marks.get(shard) != mark}
        work = _Pass(self._store, chosen, act, is_step, changes, overwrites, written)
        was_torn = self._is_torn
        self._is_torn = was_torn or changes
        self._program.run(tiles, work, self._policy.pipeline_read, self._policy.pipeline_write)
        work.end()
        for tile in tiles if changes else ():
            tile.mark_started()
        self._is_torn = was_torn

    def _check_whole(self) -> None:
        self._store.check_process()
        if self._is_torn:
            raise RuntimeError(
                "a step, or loading a state dict, failed half-way, so that these states are a "
                "mixture of two steps: load "
                "the weights and the optimizer's state dict again"
            )

    # ---- building --------------------------------------------------------------------------------

    def _names(self, shard: Shard) -> tuple[str, ...]:
        return self._rules[shard.param].moments

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
        names = self._names(shard)
        most = self._room.get(shard, 3)
        if len(names) > most:
            raise ValueError(
                f"the parameter {shard.name!r} has room for {most} moments and now keeps "
                f"{', '.join(names)}: build the "
                "optimizer with the options that its groups have now"
            )

    def _take_room(self, plan: _Plan) -> Pool | None:
        """Takes memory and disk for every tile and buffer of the plan."""
        store = self._store
        policy = self._policy
        store.sums.use(self._workers, policy.verify)
        on_disk = [tile for tile in plan.tiles if tile.home is Tier.NVME]
        if on_disk:
            store.reserve_disk(sum(tile.state_bytes for tile in on_disk), plan.why)
        for tile in plan.tiles:
            if tile.state_bytes:
                store.reserve(tile.entry, (tile.state_bytes,), torch.uint8, tile.home)
        for tile in on_disk if keeps_sums(policy) else ():
            if tile.state_bytes:
                store.sums.protect(tile.entry, StatePieces(tile_runs(tile, 0, self._names)).pieces)
        if not plan.num_buffers:
            return None
        pool = Pool(
            store.arena, plan.buffer_bytes, plan.num_buffers, "tiles of states", crosses_link=True
        )
        store.flush()
        return pool


# ---- the plan ------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What the states of ordinary parameters take."""

    tiles: list[StateTile]
    num_buffers: int
    buffer_bytes: int
    host_bytes: int  # of states and buffers
    why: str  # the arithmetic, in words


@dataclasses.dataclass(frozen=True)
class _Planner:
    policy: OffloadPolicy
    units: Sequence[Unit]
    rules: Mapping[nn.Parameter, Rule]
    is_moved: bool  # whether parameters are on an accelerator

    def plan(self, taken_bytes: int) -> _Plan:
        """The most buffers and the largest tiles that fit. Raises BudgetError with the arithmetic
        of the smallest."""
        policy = self.policy
        budget = None
        if policy.host_bytes is not None:
            budget = policy.host_bytes // ranks_per_node() - taken_bytes
        has_buffers = policy.optim is Tier.NVME or self.is_moved
        whole = [max((unit.shard_numel for unit in self.units), default=UNIT_ALIGN)]
        usual = USUAL_TILE_NUMELS if has_buffers else whole
        numels = [
            round_up(numel, UNIT_ALIGN) for numel in sizes_from(policy, policy.tile_numel, usual)
        ]
        usual = usual_tile_buffers(policy.pipeline_read, policy.pipeline_write)
        counts = sizes_from(policy, policy.tile_buffers, usual) if has_buffers else [0]
        for count, numel in itertools.product(counts, numels):
            plan = self._try(numel, count, budget)
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

    def _try(self, tile_numel: int, count: int, budget: int | None) -> _Plan:
        tiles = [tile for unit in self.units for tile in self._cut(unit, tile_numel)]
        is_on_disk = self.policy.optim is Tier.NVME
        state_bytes = max((tile.state_bytes for tile in tiles), default=0) if is_on_disk else 0
        link_bytes = max((link_bytes_of(tile) for tile in tiles), default=0) if self.is_moved else 0
        buffer_bytes = round_up(state_bytes + link_bytes, ALIGNMENT)
        buffers = count * buffer_bytes
        total = sum(tile.state_bytes for tile in tiles)
        if is_on_disk:
            left = 0 if budget is None else max(0, budget - buffers)
            resident = (
                left
                if self.policy.resident_bytes is None
                else min(left, self.policy.resident_bytes)
            )
            stays = within([tile.state_bytes for tile in tiles], min(resident, total))
            tiles = [
                dataclasses.replace(tile, home=Tier.HOST) if is_resident else tile
                for tile, is_resident in zip(tiles, stays, strict=True)
            ]
        on_host = sum(tile.state_bytes for tile in tiles if tile.home is Tier.HOST)
        numel = sum(shard.numel for unit in self.units for shard in unit.shards)
        why = (
            f"The states of {numel} elements of ordinary parameters take {total} bytes, {on_host} "
            "of them on HOST, beside "
            f"{count} buffers of {buffer_bytes} = {buffers} bytes for tiles of {tile_numel} "
            "elements."
        )
        return _Plan(tiles, count if buffer_bytes else 0, buffer_bytes, on_host + buffers, why)

    def _cut(self, unit: Unit, tile_numel: int) -> Iterator[StateTile]:
        rules = {shard: self.rules[shard.param] for shard in unit.shards}
        num_moments = max(len(rule.moments) for rule in rules.values())
        layout = StateLayout(unit.dtype, self.policy.precision, num_moments)
        whole = [shard for shard, rule in rules.items() if rule.is_matrix]
        for start, numel, ranges in stepped_ranges(unit, tile_numel, 0, whole):
            entry = f"state/{unit.index}/{start}"
            yield StateTile(
                start=start,
                numel=numel,
                layout=layout,
                entry=entry,
                home=self.policy.optim,
                ranges=ranges,
            )


def link_bytes_of(tile: StateTile) -> int:
    """Bytes of a tile's weights and gradients in a buffer; gradients may be fp32."""
    return tile.numel * (tile.dtype.itemsize + torch.float32.itemsize)


def _lay_out(params: Ruled) -> list[Unit]:
    """The parameters' local parts one behind the other, those of one dtype and device in one
    unit."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Shard]] = {}
    for index, (param, (name, _)) in enumerate(params.items()):
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


class _Pass(TileWork[StateTile]):
    """One pass over tiles, which swap/program/program.py runs. A buffer holds [ states, if they rest on NVMe | weights |
    gradients ], the last two of parameters on an accelerator.

    Args:
        store: has the states.
        chosen: the parameters that `act` is called for.
        act: works on a parameter's elements in a tile, in place.
        is_step: whether it needs gradients.
        changes: whether states and weights are written back.
        overwrites: whether it writes every state of these parameters, so that a tile of them alone
            is not read.
        written: parameters whose weights the user has written; their masters become those of the
            weights before `act`.
    """

    def __init__(
        self,
        store: TensorStore,
        chosen: Mapping[Shard, object],
        act: _Act,
        is_step: bool,
        changes: bool,
        overwrites: bool,
        written: Collection[Shard],
    ) -> None:
        self._store = store
        self._written = written
        self._chosen = chosen
        self._act = act
        self._is_step = is_step
        self._changes = changes
        self._overwrites = overwrites
        # flat weight and gradient
        self._straight: dict[Shard, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def name(self, tile: StateTile) -> str:
        """The entry of its states."""
        return tile.entry

    def early_reads(self, tile: StateTile, slot: Slot | None) -> list[Range]:
        """Its states on NVMe, if they are needed."""
        return [] if self._is_blank(tile) else self._at_rest(tile, slot)

    def writes(self, tile: StateTile, slot: Slot | None) -> list[Range]:
        """Its states on NVMe, if they change."""
        return self._at_rest(tile, slot) if self._changes else []

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
            if self._changes and not local.is_contiguous():
                local.copy_(weight.view(local.shape))

    def _work_on(self, tile: StateTile, slot: Slot | None) -> None:
        """Calls `act` for each parameter in a tile; new weights start back to an accelerator."""
        at_rest = self._states(tile, slot)
        if self._is_blank(tile):
            at_rest.zero_()
        views = tile.layout.views(at_rest, tile.numel)
        is_brought = self.is_brought(tile)
        for part in self._parts(tile):
            weight, grad = self._flat(part.shard)
            place = tile.place_of(part)
            elements = slice(part.start, part.stop)
            own = weight[elements]
            near = None if grad is None else grad[elements]
            if is_brought:
                own, near = self._in_buffer(tile, slot, place, grad)
            states = views.piece(place.start, part.numel)
            if part.shard in self._written and states.master is not None:
                adopt(own, states.master)
            self._act(_Held(part.shard, elements, states, own, near))
            if is_brought and self._changes:
                weight[elements].copy_(own, non_blocking=True)

    def _bring(self, tile: StateTile, slot: Slot | None) -> None:
        """Starts the copies from an accelerator into a tile's buffer."""
        for part in self._parts(tile):
            weight, grad = self._flat(part.shard)
            near_weight, near_grad = self._in_buffer(tile, slot, tile.place_of(part), grad)
            if not self._is_step or tile.layout.reads_weight or part.shard in self._written:
                near_weight.copy_(weight[part.start : part.stop], non_blocking=True)
            if grad is not None and near_grad is not None:
                near_grad.copy_(grad[part.start : part.stop], non_blocking=True)

    def _in_buffer(
        self, tile: StateTile, slot: Slot | None, place: slice, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The places of a parameter's weights and gradients in a tile's buffer."""
        assert slot is not None
        start = tile.state_bytes if tile.home is Tier.NVME else 0
        weights = slot.tensor[start:].view(tile.dtype)
        size = tile.numel * tile.dtype.itemsize
        near = None
        if grad is not None:
            near = slot.tensor[start + size : start + size + tile.numel * grad.itemsize].view(
                grad.dtype
            )[place]
        return weights[place], near

    def _is_blank(self, tile: StateTile) -> bool:
        """Whether nothing of a tile's states is needed."""
        return not tile.is_started or (
            self._overwrites and all(part.shard in self._chosen for part in tile.ranges)
        )

    def _parts(self, tile: StateTile) -> Iterator[ShardRange]:
        return (part for part in tile.ranges if part.shard in self._chosen)

    def _flat(self, shard: Shard) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A parameter's local weight and, in a step, gradient: flat, copies where they are not
        contiguous."""
        if shard not in self._straight:
            grad = check_gradient(shard.param, shard.name, is_moved=True) if self._is_step else None
            flat_grad = None if grad is None else grad.contiguous().view(-1)
            self._straight[shard] = local_of(shard.param).contiguous().view(-1), flat_grad
        return self._straight[shard]

    def _at_rest(self, tile: StateTile, slot: Slot | None) -> list[Range]:
        is_there = tile.home is Tier.NVME and tile.state_bytes
        return [(tile.entry, 0, self._states(tile, slot))] if is_there else []

    def _states(self, tile: StateTile, slot: Slot | None) -> torch.Tensor:
        if not tile.state_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if tile.home is not Tier.NVME:
            return self._store.view(tile.entry)
        assert slot is not None
        return slot.tensor[: tile.state_bytes]


def _device_of(tile: StateTile) -> torch.device:
    """The device of a tile's parameters."""
    return local_of(tile.ranges[0].shard.param).device
