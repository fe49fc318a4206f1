"""StateTiles: the optimizer states of a sharded model, cut into tiles that are read, stepped and
written as one.

Before its first step a tile has no states on disk. Its masters are then made from the parameters,
or from the fp32 values that zero.Init kept; its moments are zero.

The first tiles are read while backward runs (run/hooks.py says when). States and parameters do not
change between steps, so these reads stay valid while micro-batches accumulate, after a failed
backward and after a skipped step. Code that writes states in between drops these reads
(`Shards.drop_head_start`).

Single states are read and written as in at_rest.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from tiermem.optim.at_rest import FindRule, RestingTiles
from tiermem.optim.tile import Tile, TileRoute, routes_of_tiles, stepped_ranges
from tiermem.optim.tile_step import SecondCopy, TilePass, Way
from tiermem.optim.tile_stream import TileStream
from tiermem.optim.tile_work import Act, LastSteps, RuleOf, Stepping, Visitor, visiting
from tiermem.plans.plan import Plan
from tiermem.policy import Tier
from tiermem.ranks.collectives import total
from tiermem.run.shards import Shards
from tiermem.swap.memory.accelerator import current_stream, is_accelerator, new_stream
from tiermem.units.state_layout import (
    MASTER,
    StateLayout,
    StatePieces,
    keeps_initial_master,
    keeps_sums,
    weight_runs,
)
from tiermem.units.unit import Shard, ShardRange, Unit
from tiermem.weights.step_run import overlap_of
from tiermem.weights.unit_memory import apart
from tiermem.weights.unit_state import LiveUnit
from tiermem.weights.values import initial_master, name_elsewhere


class StateTiles(RestingTiles[Tile]):
    """The tiles of a sharded model. Reserves room for its states and steps them.

    Args:
        shards: the model; its plan gives the size of tiles and the number of buffers.
        find_rule: the group and the rule of each parameter. No tile may cut a parameter that is
            stepped as a whole matrix.

    Raises ValueError when the model already has an optimizer.
    """

    def __init__(self, shards: Shards, find_rule: FindRule) -> None:
        if shards.states is not None:
            raise ValueError(
                "this model has an optimizer already: call its close() first, which gives up its "
                "states, or make one optimizer "
                "with several parameter groups"
            )
        super().__init__(
            shards.store,
            shards.values,
            shards.workers,
            shards.policy,
            shards.topology.shard_rank,
            find_rule,
            shards.steps.half_loaded,
        )
        self._shards = shards
        # for what tiles that the CPU steps lack
        self._link: torch.Stream | None = None
        # for what an accelerator lacks of tiles
        self._streams: dict[Way, TileStream] = {}
        self._num_moments = 0  # of a tile
        self._of_unit: dict[LiveUnit, list[Tile]] = {}
        self._seconds: dict[LiveUnit, SecondCopy] = {}  # of units in memory; `attempt` changes them
        self._last = LastSteps({}, {})
        # called before states are shown to a caller
        self.on_look: Callable[[], None] = lambda: None
        self.allocate([live.unit for live in shards.units if live.unit.is_trainable])

    def allocate(self, units: Sequence[Unit]) -> None:
        """Takes room for the states of units that have become trainable, by the model's plan.
        Raises OSError, ValueError."""
        lives = [self._shards.units[unit.index] for unit in units]
        held = (len(self.names(shard)) for unit in units for shard in unit.shards)
        self._num_moments = max([self._num_moments, *held])
        plan = self._shards.plan
        tiles = [tile for live in lives for tile in self._cut(live)]
        tiles = [
            dataclasses.replace(tile, state_home=route.states, engine=route.engine)
            for tile, route in zip(tiles, self._routes(tiles, plan), strict=True)
        ]
        self._announce(tiles)
        self._reserve(tiles, plan.streamed_part > 0)
        self._close_streams()
        if self._link is None and (plan.brings_gradients or plan.brings_weights):
            self._link = new_stream(self._shards.device)
        for way, buffers in ((Way.DEVICE_STREAMS, plan.streams), (Way.DEVICE, plan.exchanges)):
            if buffers.num:
                memory = self._store.on_device
                self._streams[way] = TileStream(memory, self._shards.device, buffers)
                self._store.flush()  # pins the states
        self._set([*self.tiles, *tiles])
        self._protect(tiles)
        copied = [
            live
            for live in self._of_unit
            if live.unit.index in plan.copied and live.may_exchange and live not in self._seconds
        ]
        self._seconds.update((live, self._second_of(live)) for live in copied)
        if copied:
            self._store.flush()

    def make_room(self, plan: Plan) -> None:
        """Moves states from HOST to NVME, as many as another plan has no room for on HOST, and
        gives up second copies.

        The states are written before their memory is given up. Blocks; raises OSError.
        """
        self._give_up_seconds_without(plan)
        if plan.states is not Tier.NVME:
            return
        excess = (
            self._bytes_on(Tier.HOST)
            - plan.resident_bytes
            - (0 if plan.steps_there else plan.kept_bytes)
        )
        moved: dict[Tile, Tile] = {}
        for tile in reversed(self.tiles):
            if excess > 0 and tile.state_home is Tier.HOST and tile.state_bytes:
                moved[tile] = self._moved(tile, TileRoute(Tier.NVME, tile.engine))
                excess -= tile.state_bytes
        self._set([moved.get(tile, tile) for tile in self.tiles])

    def check_move(self, plan: Plan) -> None:
        """Raises ValueError where another engine would step whole matrices, whose bits would
        differ."""
        for tile, route in zip(self.tiles, self._routes(self.tiles, plan), strict=True):
            found = [self._find_rule(part.shard.param) for part in tile.ranges]
            if route.engine is not tile.engine and any(
                each and each[1].is_matrix for each in found
            ):
                raise ValueError(
                    f"{tile.ranges[0].shard.name} is stepped as a whole matrix, whose bits depend "
                    'on what steps it: shard with the policy that it is to have, where "auto" chooses '
                    "with tiermem.choose_policy(model, rehomes=False)"
                )

    def move_out(self, plan: Plan) -> None:
        """Moves states to DEVICE and NVMe, those that another plan has there, and gives up second
        copies that it has no room for. Blocks; raises OSError."""
        self._give_up_seconds_without(plan)
        for tile in self.tiles:
            if tile.state_home is Tier.HOST and tile.state_bytes:
                self._store.cross(tile.entry, plan.streamed_part > 0)
        self._move(plan, (Tier.DEVICE, Tier.NVME))

    def move_in(self, plan: Plan) -> None:
        """Moves states to HOST, which the arena has room for now; weights have moved. Blocks;
        raises OSError."""
        # without what a tile has kept of where its weights rested
        self._set([dataclasses.replace(tile) for tile in self.tiles])
        self._move(plan, (Tier.HOST,))
        self._protect(self.tiles)

    def _move(self, plan: Plan, homes: Collection[Tier]) -> None:
        routes = dict(zip(self.tiles, self._routes(self.tiles, plan), strict=True))
        due = {tile: route for tile, route in routes.items() if route.states in homes}
        changed = [tile for tile, route in due.items() if route.states is not tile.state_home]
        self._give_up_seconds({tile.live for tile in changed} & self._seconds.keys())
        self._announce([self._elsewhere(tile, due[tile]) for tile in changed])
        crosses = plan.streamed_part > 0
        self._set(
            [self._moved(tile, due[tile], crosses) if tile in due else tile for tile in self.tiles]
        )

    def close(self) -> None:
        """Gives up the states, so that another optimizer has their room. Call it after
        `Shards.drop_head_start`."""
        self._give_up_seconds(list(self._seconds))
        self._shards.program.use(self._shards.tile_pool)
        for tile in self.tiles:
            if tile.state_bytes:
                self._store.drop(tile.entry)
        self._set([])
        self._close_streams()

    def _close_streams(self) -> None:
        while self._streams:
            self._streams.popitem()[1].close()

    def _give_up_seconds_without(self, plan: Plan) -> None:
        self._give_up_seconds(
            [each for each in self._seconds if each.unit.index not in plan.copied]
        )

    def _give_up_seconds(self, lives: Collection[LiveUnit]) -> None:
        for live in lives:
            for slot in self._seconds.pop(live).slots.values():
                self._store.arena.give_back(slot)

    def begin(self) -> None:
        """Starts reading the first tiles of the next step, at low priority. Does nothing if they
        are already being read.

        Tiles in memory are left out, because they need no buffer.
        """
        if self._shards.tile_pool is None or not self._shards.policy.pipeline_read:
            return
        work = TilePass(self._shards, self.names)
        self._shards.program.begin(filter(work.lasting_parts, self._in_order()), work)

    def attempt(self, live: LiveUnit, rule_of: RuleOf) -> bool:
        """Steps tiles of a unit beside what they replace, for a `step` that commits them. Does not
        block for transfers.

        Weights and states that rest in memory are stepped into a second copy; tiles without room
        for one are left out. Parameters have not counted the step. Returns and raises as
        `Program.attempt`.
        """
        # the user may write weights that are always present until the step
        if not live.is_streamed:
            return True
        second = self._seconds.get(live)
        act = Stepping(self._shards.workers, rule_of, is_counted=False, last=self._last)
        has_room = {Tier.NVME: second is not None or live.entry is not None}
        tiles = self._of_unit.get(live, [])
        due = [
            t
            for t in tiles
            if has_room.get(t.state_home, second is not None and t.entry in second.slots)
        ]
        if not due:
            return True
        work = TilePass(self._shards, self.names, act, is_step=True, second=second, link=self._link)
        for tile in set(tiles) - set(due):
            work.copy_unstepped(tile)
        return self._shards.program.attempt(due, work, len(self.tiles), "compute")

    def step(
        self,
        rule_of: RuleOf,
        live: LiveUnit | None = None,
        grads: torch.Tensor | None = None,
        commits: bool = False,
    ) -> None:
        """Steps every tile once, or the tiles of one unit with the given gradients: flat, in its
        shard layout.

        commits: whether `attempt` has stepped its tiles as this step would, to the bit; they are
            then not stepped again.

        The caller calls it inside `StepRun.changing_all`, with all else that a step changes.

        Blocks, or with overlap "forward" until all units that are not streamed are stepped
        (weights/step_run.py); a tile's first step always blocks. Raises OSError when a transfer
        fails; tiles then hold old and new states.
        """
        shards = self._shards
        act = Stepping(self._shards.workers, rule_of, last=self._last)
        tiles = self._in_order() if live is None else self._of_unit.get(live, ())
        if self._link is not None:
            self._link.wait_stream(current_stream(shards.device))
        work = TilePass(
            shards,
            self.names,
            act,
            is_step=True,
            grads=grads,
            link=self._link,
            streams=self._streams,
        )
        overlap = overlap_of(shards.policy, shards.plan, is_accelerator(shards.device))
        if overlap != "none" and live is None and all(tile.is_started for tile in tiles):
            at_once = [each.unit.index for each in self._of_unit if not each.is_streamed]
            try:
                shards.steps.start(
                    tiles, work, at_once, "compute", self._accept if commits else None
                )
            finally:
                work.finish()
        else:
            self._run(tiles, work)

    def load(self, shard: Shard, name: str, values: torch.Tensor) -> None:
        """Restores a state from fp32 values of the form that `state` returns, exactly. Blocks.

        MASTER also sets the parameter, as a step does. After loading moments the caller sets the
        number of steps that they have seen (`Shard.set_steps`). With several ranks, MASTER is
        collective; moments become part of the last step if that is still to be made durable. Raises
        ValueError for another number of values, OSError when a transfer fails.
        """
        self._shards.drop_head_start(is_collective=name == MASTER)
        self.put(shard, name, values)
        if name == MASTER:
            self._shards.refresh(shard.param)

    def visit(self, chosen: Collection[Shard], visitor: Visitor) -> None:
        """Calls a function that changes the states of chosen parameters in place, for each tile
        that holds any of them.

        Every rank calls it for the same parameters; collective. Blocks. Raises OSError when a
        transfer fails, and the visitor's error; then the states that the visitor has seen may be
        written or not.
        """
        self._shards.drop_head_start()
        due = [tile for tile in self.tiles if any(part.shard in chosen for part in tile.ranges)]
        visit = visiting(self._shards.workers, chosen, visitor)
        self._run(due, TilePass(self._shards, self.names, visit, reads_weights=True))
        order = sorted(chosen, key=lambda shard: shard.index)
        topology = self._shards.topology
        for live in dict.fromkeys(self._shards.find(shard.param)[0] for shard in order):
            self._shards.refresh(live.unit.shards[0].param)
        has_moments = torch.tensor([float(s.has_moments) for s in order], dtype=torch.float64)
        # a rank may hold zeros, or nothing
        has_moments = total(topology, has_moments.to(topology.control_device))
        for shard, num_ranks in zip(order, has_moments.tolist(), strict=True):
            shard.note_loaded(num_ranks > 0, self.keeps_master(shard))

    def fill(self, filler: Act, keeps: bool = False) -> None:
        """Calls a function that writes states and weights in their stored formats, once for each
        parameter in each tile.

        keeps: whether states and weights that the function does not write keep their values; else
            they become zero. Not collective. Afterwards every rank calls `Shards.refresh` for every
            unit, and `Shard.set_steps` of every parameter. Blocks. Raises OSError, and the filler's
            error; then tiles hold old and new values.
        """
        self._shards.drop_head_start()
        work = TilePass(self._shards, self.names, filler, reads_weights=True, is_blank=not keeps)
        self._run(self.tiles, work)

    # ---- passes and tiles ------------------------------------------------------------------------

    def _in_order(self) -> list[Tile]:
        """The tiles in the order of a step: of units that are not streamed, then in the order of
        the next forward."""
        expected = {
            unit: number for number, unit in enumerate(self._shards.prefetcher.order.first_uses())
        }

        def first_use(live: LiveUnit) -> float:
            return expected.get(live.unit.index, math.inf) if live.is_streamed else -1

        return [
            tile for live in sorted(self._of_unit, key=first_use) for tile in self._of_unit[live]
        ]

    def _accept(self) -> None:
        """Makes the second copies that `attempt` steps the memory where their units rest. They may
        still be under way."""
        for live in {tile.live for tile in self._shards.program.attempted} & self._seconds.keys():
            second = self._seconds[live]
            live.exchange(second.weights)
            before = {
                entry: self._store.exchange(entry, slot) for entry, slot in second.slots.items()
            }
            self._seconds[live] = second._replace(slots=before)

    def _second_of(self, live: LiveUnit) -> SecondCopy:
        """Room for a unit's weights, and for its states if they rest in memory, with what no step
        writes: zeros."""
        arena = self._store.arena
        what = f"a second copy of {live.unit.name!r}"
        slot = arena.take(
            live.unit.shard_bytes, what, crosses_link=is_accelerator(self._shards.device)
        )
        slots = {live.name: slot}
        for tile in self._of_unit[live] if self._shards.plan.states is Tier.HOST else ():
            if tile.state_bytes:
                slots[tile.entry] = arena.take(tile.state_bytes, what)
        for each in (slot, *slots.values()):
            each.tensor.zero_()
        return SecondCopy(apart(slot.tensor).view(live.unit.dtype), slots)

    def _run(self, tiles: Sequence[Tile], work: TilePass) -> None:
        policy = self._shards.policy
        lane = "compute" if work.is_step else ""
        try:
            self._shards.program.run(tiles, work, policy.pipeline_read, policy.pipeline_write, lane)
        finally:
            work.finish()
        for tile in tiles:
            tile.is_started = True
        for live in {tile.live for tile in tiles}:
            initial = initial_master(live.unit)
            if initial in self._store and all(tile.is_started for tile in self._of_unit[live]):
                self._store.drop(initial)

    def _cut(self, live: LiveUnit) -> Iterator[Tile]:
        """The tiles of a unit. Raises ValueError for a whole matrix that does not fit into one
        tile."""
        policy = self._shards.policy
        plan = self._shards.plan
        unit = live.unit
        layout = StateLayout(unit.dtype, policy.precision, self._num_moments)
        rules = ((shard, self._find_rule(shard.param)) for shard in unit.shards)
        whole = [shard for shard, found in rules if found is not None and found[1].is_matrix]
        step = plan.tile_numel
        if not plan.tiles.num and whole:
            step = unit.shard_numel  # stepped where it rests, without a buffer that limits the size
        for start, numel, ranges in stepped_ranges(
            unit, step, self._shards.topology.shard_rank, whole
        ):
            in_buffer = layout.buffer_bytes(numel, keeps_initial_master(unit, policy))
            entry = f"state/{unit.index}/{unit.name}/{start}"
            yield Tile(
                start=start, numel=numel, layout=layout, entry=entry, state_home=plan.states, ranges=ranges, live=live,
                room_bytes=in_buffer,
            )  # fmt: skip

    def _routes(self, tiles: Sequence[Tile], plan: Plan) -> list[TileRoute]:
        """The routes of tiles by a plan, with what other tiles leave of its memory."""
        chosen = set(tiles)
        others = [tile for tile in self.tiles if tile not in chosen]
        on_host = self._bytes_on(Tier.HOST, others)
        on_device = self._bytes_on(Tier.DEVICE, others)
        kept = on_device if plan.steps_there else min(plan.kept_bytes, on_host)
        resident = on_host if plan.steps_there else on_host - kept
        left = dataclasses.replace(
            plan,
            kept_bytes=max(0, plan.kept_bytes - kept),
            resident_bytes=max(0, plan.resident_bytes - resident),
        )
        numels = [
            tile.numel
            if tile.state_bytes + tile.slice_bytes + tile.grad_bytes <= plan.streams.slot_bytes
            else 0
            for tile in tiles
        ]
        sizes = [tile.state_bytes for tile in tiles]
        return routes_of_tiles(sizes, numels, left, [tile.state_home for tile in tiles])

    def _announce(self, tiles: Sequence[Tile]) -> None:
        """Lets the states of tiles on DEVICE share a slab."""
        for tile in tiles:
            if tile.state_home is Tier.DEVICE and tile.state_bytes:
                self._store.on_device.reserve(tile.entry, tile.state_bytes)

    def _bytes_on(self, home: Tier, tiles: Sequence[Tile] | None = None) -> int:
        """The bytes of states on a tier: of these tiles; default: of all."""
        found = self.tiles if tiles is None else tiles
        return sum(tile.state_bytes for tile in found if tile.state_home is home)

    def _set(self, tiles: Sequence[Tile]) -> None:
        """Makes these the tiles, in the order of units and elements."""
        super()._set(sorted(tiles, key=lambda tile: (tile.live.unit.index, tile.start)))
        self._of_unit.clear()
        for tile in self.tiles:
            self._of_unit.setdefault(tile.live, []).append(tile)

    def _moved(self, tile: Tile, route: TileRoute, crosses_link: bool = False) -> Tile:
        """A tile on another route, whose states have moved if they rest elsewhere there. Blocks;
        raises OSError."""
        if route.states is tile.state_home:
            return (
                tile
                if route.engine is tile.engine
                else dataclasses.replace(tile, engine=route.engine)
            )
        there = self._elsewhere(tile, route)
        self._reserve([there], crosses_link)
        self._protect([there])
        if tile.state_bytes:
            if tile.is_started:
                self._shards.values.copy(tile.entry, there.entry)
            self._store.drop(tile.entry)
        return there

    def _elsewhere(self, tile: Tile, route: TileRoute) -> Tile:
        """A tile on a route whose states rest elsewhere, under another name in the store."""
        entry = name_elsewhere(tile.entry)
        return dataclasses.replace(tile, state_home=route.states, engine=route.engine, entry=entry)

    def _protect(self, tiles: Sequence[Tile]) -> None:
        """Sets up checksums for bytes on NVMe: for states, and anew for weights, because tiles
        write parts of them."""
        super()._protect(tiles)
        for live in dict.fromkeys(tile.live for tile in tiles if keeps_sums(self._policy)):
            if live.entry is not None:
                starts = [tile.start for tile in self._of_unit[live]]
                strip = self._of_unit[live][0].layout.strip_numel
                runs = weight_runs(live.unit, self._shard_rank, strip, starts)
                self._store.sums.protect(live.entry, StatePieces(runs).pieces)

    # ---- weights ---------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """As `Shards.check_whole`; raises RuntimeError also after a `close`."""
        self._store.check_process()
        if self._shards.is_closed or self._shards.states is not self:
            raise RuntimeError(
                "these states were freed when their optimizer, or the sharded model, was closed: "
                "build another optimizer, which begins anew"
            )
        self._shards.check_whole()

    def take_writes(self, shard: Shard) -> None:
        """As `Shards.take_writes`."""
        self._shards.take_writes(shard.param)

    def whole(self, shard: Shard, mine: torch.Tensor) -> torch.Tensor:
        """A state of every rank's parts, on the CPU. Collective; blocks."""
        return self._shards.values.assemble(shard, mine).view(shard.shape)

    def mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole state, flat and without padding."""
        return self._shards.values.mine(shard, whole)

    def read_state(self, shard: Shard, name: str) -> torch.Tensor:
        """A copy of a moment, fp32. Blocks; raises OSError, and RuntimeError where ranks hold
        parts."""
        if self._shards.topology.num_shards > 1:
            raise RuntimeError(
                f"{name} of {shard.name} rests in parts on several ranks: zero it, or assign it in "
                "`optimizer.state`, on every "
                "rank; to read it call tiermem.utils.safe_get_full_optimizer_state on every rank"
            )
        return super().read_state(shard, name)

    def _start(self, tiles: Sequence[Tile]) -> None:
        self._run(tiles, TilePass(self._shards, self.names))

    def _weight_in(self, tile: Tile, elements: ShardRange) -> torch.Tensor:
        return self._shards.values.elements(tile.live, elements.in_unit)

    def _put_weight(self, tile: Tile, elements: ShardRange, weight: torch.Tensor) -> None:
        self._shards.values.put_elements(tile.live, elements.in_unit.start, weight)

    def _first_master(self, tile: Tile, elements: ShardRange) -> torch.Tensor:
        initial = initial_master(tile.live.unit)
        if initial not in self._store:
            return super()._first_master(tile, elements)
        return self._shards.values.read_part(initial, torch.float32, elements.in_unit)


def tiles_of(shards: Shards) -> StateTiles | None:
    """The states of a sharded model's optimizer, or None before there is one."""
    assert shards.states is None or isinstance(shards.states, StateTiles)
    return shards.states
