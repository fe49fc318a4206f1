"""Residency: which units are present, which are on their way, and who has to leave for them.

    HOME     in no buffer
    COMING   a buffer is being filled from NVME (or a copy to the GPU is under way)
    PRESENT  the parameters see their bytes

        HOME --prefetch--> COMING --ensure--> PRESENT --evict--> HOME
        HOME --ensure-------------------------> PRESENT

`ensure` makes a unit present and then fetches ahead what the order expects next, as far as buffers allow. A unit that is
released stays until somebody needs its buffer; then the one whose next use lies farthest ahead leaves (weights are clean in
forward and backward, so leaving writes nothing). Which unit leaves depends on the order of uses alone, never on time, so
that every rank gathers in the same sequence.
"""

from __future__ import annotations

import enum
import time

import torch

from tiermem.policy import OffloadPolicy
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move
from tiermem.swap.native import URGENT
from tiermem.swap.store import TensorStore
from tiermem.zero import resting
from tiermem.zero.attributes import ZeroParamStatus, mark
from tiermem.zero.gather import gather_unit
from tiermem.zero.memory import UnitMemory
from tiermem.zero.order import Order
from tiermem.zero.packed import PackedGather
from tiermem.zero.secondary import NearGather
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Unit


class UnitState(enum.Enum):
    """Where a unit's full layout occupies memory; see the diagram above."""

    HOME = enum.auto()
    COMING = enum.auto()
    PRESENT = enum.auto()


class LiveUnit:
    """One unit and what it occupies now."""

    def __init__(
        self,
        unit: Unit,
        memory: UnitMemory,
        entry: str | None,
        shard: torch.Tensor | None,
        gather: PackedGather | NearGather | None = None,
    ) -> None:
        self.unit = unit
        self.memory = memory
        self.entry = entry  # its shard's name in the store, when it rests on NVME
        self.shard = shard  # its shard, flat, when that rests in memory
        self.gather = gather  # None: it is gathered plainly (gather.py), or rests where it is present
        self.state = UnitState.PRESENT if unit.is_resident else UnitState.HOME
        self.num_users = 0  # modules in forward and passes of backward that need it now
        self.slot: Slot | None = None  # holds the full layout (CPU)
        self.stage: Slot | None = None  # holds the shard on its way to a gather or to the GPU
        self.move: Move | None = None  # the read under way
        self.copied: torch.cuda.Event | None = None  # the copy to the GPU under way
        self.reads_shard = entry is not None  # the way under way begins at NVMe
        self._streamed = [] if unit.is_resident else [shard.param for shard in unit.shards]

    def outdate(self) -> None:
        """The weights are about to change at home: what has been kept of them elsewhere is not gathered from again."""
        if self.gather is not None:
            self.gather.outdate()

    def hold(self) -> None:
        """Somebody needs the unit from now on: its parameters are ordinary ones until the last has let go."""
        if not self.num_users:
            resting.wake(self._streamed)
        self.num_users += 1

    def let_go(self) -> None:
        """The opposite of one `hold`."""
        self.num_users -= 1
        if self.num_users <= 0:
            self.let_all_go()

    def let_all_go(self) -> None:
        """Nobody needs the unit any more, whoever held it: its parameters rest (resting.py)."""
        self.num_users = 0
        resting.rest(self._streamed)

    def take_out(self, index: int, value: torch.Tensor) -> None:
        """One parameter holds a copy of its own, whatever becomes of the unit, until `put_back`."""
        param = self.unit.shards[index].param
        self._streamed = [each for each in self._streamed if each is not param]
        resting.wake([param])
        self.memory.take_out(index, value)

    def put_back(self, index: int) -> None:
        """Ends a `take_out`; does nothing for a parameter that was not taken out."""
        if not self.memory.is_out(index):
            return
        param = self.unit.shards[index].param
        self.memory.put_back(index)
        self._streamed.append(param)
        if not self.num_users:
            resting.rest([param])

    def part_with(self) -> None:
        """The unit's parameters are ordinary ones for good."""
        resting.wake(self._streamed)
        self._streamed = []


class Residency:
    """Makes units present and decides who leaves.

    Args:
        units: all of them, by index.
        store: where shards on NVME are read from.
        order: looks ahead.
        pool: buffers of full layouts (CPU); None on a GPU, where torch's allocator is asked.
        stages: buffers of shards on their way; None when shards are read straight into place.
    """

    def __init__(
        self,
        units: list[LiveUnit],
        store: TensorStore,
        order: Order,
        topology: Topology,
        policy: OffloadPolicy,
        pool: Pool | None,
        stages: Pool | None,
        device: torch.device,
    ) -> None:
        self._units = units
        self._store = store
        self.order = order
        self._topology = topology
        self._pool = pool
        self._stages = stages
        self._device = device
        self._max_live = policy.max_live_numel or float("inf")
        self._max_ahead = policy.prefetch_numel if policy.prefetch_numel is not None else float("inf")
        self._max_reuse = policy.max_reuse_numel
        self._num_on_gpu = policy.unit_buffers or 3
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ensure(self, live: LiveUnit) -> None:
        """Makes a unit present and starts fetching what comes next. Blocks; raises OSError when a read failed."""
        if not live.unit.is_resident:
            self.order.use(live.unit.index)
            if live.state is not UnitState.PRESENT:
                self._bring(live, urgent=True)
                self._land(live)
            self._look_ahead(live)

    def release(self, live: LiveUnit) -> None:
        """Lets a unit leave when its buffer is needed; at once when it is not used again soon enough."""
        if live.unit.is_resident or live.num_users or live.state is not UnitState.PRESENT:
            return
        if self._max_reuse is not None and self._distance_numel(live) > self._max_reuse:
            self._evict(live)

    def empty(self) -> None:
        """Makes every streamed unit leave that nobody uses: before weights change, and at the end."""
        for live in self._units:
            live.outdate()
            if live.state is not UnitState.HOME and not live.unit.is_resident:
                live.let_all_go()
                self._evict(live)

    def outdate(self, live: LiveUnit) -> None:
        """Makes a unit leave whose weights are about to change at home; nobody uses it."""
        live.outdate()
        if live.state is not UnitState.HOME and not live.unit.is_resident:
            self._evict(live)

    def expects_reads(self) -> bool:
        """Whether a unit that rests on NVME is expected in this pass and its read has not been started."""
        return any(
            live.state is UnitState.HOME and live.entry is not None
            for live in (self._units[index] for index in self.order.upcoming())
        )

    def prefetch_first(self) -> None:
        """Starts fetching what the next pass is expected to begin with."""
        self.order.rewind()
        self._look_ahead(None)

    # ---- coming and leaving ------------------------------------------------------------------------------------------

    def _bring(self, live: LiveUnit, urgent: bool) -> bool:
        """Starts the way of a unit; False when there is no buffer and it is not urgent."""
        if live.state is not UnitState.HOME:
            if urgent and live.move is not None:
                live.move.promote()
            return True
        live.reads_shard = live.entry is not None and (live.gather is None or live.gather.needs_shard)
        if self._is_direct(live) and self._pool is not None:
            live.slot = self._take(self._pool, live, urgent)
            if live.slot is None:
                return False
            assert live.entry is not None
            live.move = self._store.fetch(live.entry, into=live.slot, priority=URGENT if urgent else 1)
        elif live.reads_shard:
            assert self._stages is not None and live.entry is not None
            live.stage = self._take(self._stages, live, urgent)
            if live.stage is None:
                return False
            live.move = self._store.fetch(live.entry, into=live.stage, priority=URGENT if urgent else 1)
        elif self._copy_stream is not None and self._is_direct(live):
            if not urgent and self._num_present() >= self._num_on_gpu:
                return False
            self._copy_in(live, live.shard)
        live.state = UnitState.COMING
        mark((shard.param for shard in live.unit.shards), ZeroParamStatus.INFLIGHT)
        return True

    def _land(self, live: LiveUnit) -> None:
        """Ends the way of a unit: waits for its bytes, gathers, shows them to the parameters."""
        if live.move is not None:
            move, live.move = live.move, None
            try:
                move.wait()
            except OSError:
                self._drop(live)
                raise
        if self._is_direct(live) and self._pool is not None:
            assert live.slot is not None
            live.memory.put_under(live.slot)
        elif self._is_direct(live):
            if live.copied is None:
                self._copy_in(live, self._staged(live))
            assert live.copied is not None
            torch.cuda.current_stream(self._device).wait_event(live.copied)
            live.memory.show()
            self._drop_stage(live)
        else:
            self._gather(live)
        live.state = UnitState.PRESENT

    def _gather(self, live: LiveUnit) -> None:
        start_ns = time.monotonic_ns()
        if self._pool is not None:
            live.slot = self._take(self._pool, live, urgent=True)
            assert live.slot is not None
            live.memory.put_under(live.slot)
        else:
            live.memory.allocate()
            live.memory.show()
        shard = live.shard if live.shard is not None else self._staged(live) if live.reads_shard else None
        if shard is not None:
            shard = shard.to(self._device, non_blocking=True)
        if live.gather is not None:
            live.gather.put(shard)
            live.gather.start().wait()
        else:
            assert shard is not None
            gather_unit(self._topology, live.unit, shard, live.memory.full)
        self._drop_stage(live)
        num_bytes = live.unit.full_bytes
        self._store.recorder.add("gather", live.unit.name, start_ns, time.monotonic_ns(), num_bytes)

    def _copy_in(self, live: LiveUnit, shard: torch.Tensor | None) -> None:
        """Starts the copy of a whole unit to the GPU, behind what the current stream does with that memory."""
        assert self._copy_stream is not None and shard is not None
        live.memory.allocate()
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copy_stream):
            live.memory.full.copy_(shard, non_blocking=True)
            live.copied = torch.cuda.Event()
            live.copied.record(self._copy_stream)

    def _is_direct(self, live: LiveUnit) -> bool:
        """Whether a unit's bytes are present as they rest: there is one shard, and it is not packed."""
        return self._topology.num_shards == 1 and not live.unit.is_packed

    def _staged(self, live: LiveUnit) -> torch.Tensor:
        assert live.stage is not None
        return live.stage.tensor[: live.unit.shard_bytes].view(live.unit.rests_as)

    def _drop_stage(self, live: LiveUnit) -> None:
        if live.stage is not None:
            if live.copied is not None:
                live.copied.synchronize()  # the GPU still reads the buffer; an event of this copy alone
            assert self._stages is not None and live.entry is not None
            self._store.release(live.entry)
            self._stages.give_back(live.stage)
            live.stage = None
        live.copied = None

    def _evict(self, live: LiveUnit) -> None:
        if live.move is not None:
            move, live.move = live.move, None
            move.cancel()
        self._drop(live)

    def _drop(self, live: LiveUnit) -> None:
        if live.memory.is_present:
            live.memory.leave()
        elif live.copied is not None:
            live.copied.synchronize()
            live.memory.leave()
        if live.stage is not None:
            assert self._stages is not None
            self._release_entry(live)
            self._stages.give_back(live.stage)
            live.stage = None
        if live.slot is not None:
            assert self._pool is not None
            if self._is_direct(live):
                self._release_entry(live)
            self._pool.give_back(live.slot)
            live.slot = None
        live.copied = None
        live.state = UnitState.HOME

    def _release_entry(self, live: LiveUnit) -> None:
        if live.entry is not None and self._store.is_present(live.entry):
            self._store.release(live.entry)

    # ---- who comes, who leaves -----------------------------------------------------------------------------------------

    def _look_ahead(self, current: LiveUnit | None) -> None:
        ahead = 0
        live_numel = sum(u.unit.full_numel for u in self._units if u.state is not UnitState.HOME)
        seen = {current.unit.index} if current else set()
        for index in self.order.upcoming():
            if index in seen:
                continue
            seen.add(index)
            live = self._units[index]
            ahead += live.unit.full_numel
            if ahead > self._max_ahead:
                return
            if live.state is UnitState.HOME:
                live_numel += live.unit.full_numel
                if live_numel > self._max_live or not self._bring(live, urgent=False):
                    return
            if len(seen) > len(self._units) or len(seen) > 8:
                return

    def _take(self, pool: Pool, live: LiveUnit, urgent: bool) -> Slot | None:
        """A buffer for a unit, if need be somebody else's whose next use lies farther ahead."""
        slot = pool.take()
        if slot is not None:
            return slot
        mine = -1.0 if urgent else self.order.distance(live.unit.index)
        idle = [u for u in self._units if u.state is not UnitState.HOME and not u.num_users and u is not live]
        idle = [u for u in idle if not u.unit.is_resident and (u.slot if pool is self._pool else u.stage)]
        farthest = max(idle, key=lambda u: self.order.distance(u.unit.index), default=None)
        if farthest is not None and self.order.distance(farthest.unit.index) > mine:
            self._evict(farthest)
            return pool.take()
        if urgent:
            busy = ", ".join(
                u.unit.name for u in self._units if u.num_users and u is not live and not u.unit.is_resident
            )
            raise RuntimeError(
                f"unit {live.unit.name!r} finds all {pool.count} buffers in use by {busy}: modules with parameters of their "
                f"own are nested deeper than that. Raise unit_buffers (buffer_count in a config) to {pool.count + 1} or more"
            )
        return None

    def _distance_numel(self, live: LiveUnit) -> float:
        between = 0
        for index in self.order.upcoming():
            if index == live.unit.index:
                return between
            between += self._units[index].unit.full_numel
        return float("inf")

    def _num_present(self) -> int:
        return sum(1 for u in self._units if u.state is not UnitState.HOME and not u.unit.is_resident)
