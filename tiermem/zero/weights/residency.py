"""Residency: who comes, who stays and who has to leave, of the units that come and go.

`ensure` makes a unit present and starts what the order expects next, as far as buffers allow: with one shard reads into
place, with several the gathers of the next units and, behind them, reads of those after. A unit that is released stays until
somebody needs its buffer; then the one whose next use lies farthest ahead leaves (weights are clean in forward and backward,
so leaving writes nothing).

Gathers are collective. Which are started when, and who leaves for them, depends on the order of uses alone, never on time,
memory or what a disk does: a unit on NVMe is gathered ahead when it is the next one, whether its read has ended or not.
What reads ahead of that is this rank's own business.

The four limits of ZeRO-3 act here, in elements: prefetch_numel (ahead of use), max_live_numel (with a full layout),
max_reuse_numel (a released unit whose next use lies farther ahead leaves at once); small parameters that are never given up
are no units of this file.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

import torch

from tiermem.policy import OffloadPolicy
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.store import TensorStore
from tiermem.zero.order import Order
from tiermem.zero.plan import USUAL_ON_DEVICE
from tiermem.zero.weights.arrival import Arrival
from tiermem.zero.weights.live import LiveUnit, UnitState

__all__ = ["LiveUnit", "Residency", "UnitState"]

_MOST_AHEAD = 8  # units


class Residency:
    """Makes units present and decides who leaves.

    Args:
        units: all of them, by index.
        store: where shards on NVME are read from.
        order: looks ahead.
        pool: buffers of full layouts (CPU); None on an accelerator, where torch's allocator is asked.
        stages: buffers of shards on their way; None when shards are read straight into place.
    """

    def __init__(
        self,
        units: list[LiveUnit],
        store: TensorStore,
        order: Order,
        policy: OffloadPolicy,
        pool: Pool | None,
        stages: Pool | None,
        device: torch.device,
    ) -> None:
        self._units = units
        self.order = order
        self.recorder = store.recorder
        self._check_process = store.check_process
        self._arrival = Arrival(store, pool, stages, device)
        self._pool = pool
        self._stages = stages
        self._max_live = policy.max_live_numel or math.inf
        self._max_ahead = policy.prefetch_numel if policy.prefetch_numel is not None else math.inf
        if policy.gather_way == "single":
            self._max_ahead = 0  # nothing is live but what is used
        self._max_reuse = policy.max_reuse_numel
        self._most_full = pool.count if pool is not None else policy.unit_buffers or USUAL_ON_DEVICE
        self._full: dict[int, LiveUnit] = {}  # those that have a full layout, or a buffer for it
        self._full_numel = 0
        self._staged: dict[int, LiveUnit] = {}  # those whose shard has been fetched into a stage, and no more
        self._has_reads = any(live.entry is not None for live in units)

    def ensure(self, live: LiveUnit) -> None:
        """Makes a unit present and starts fetching what comes next. Blocks; raises OSError when a read failed."""
        if not live.unit.is_resident:
            self.order.use(live.unit.index)
            if live.state is not UnitState.PRESENT:
                self._bring(live)
        live.memory.use(live.filled)
        if not live.unit.is_resident:
            self._look_ahead(live)

    def release(self, live: LiveUnit) -> None:
        """Lets a unit leave when its buffer is needed; at once when it is not used again soon enough."""
        if live.unit.is_resident or live.num_users or live.state is not UnitState.PRESENT:
            return
        if self._max_reuse is not None and self._distance_numel(live) > self._max_reuse:
            self._evict(live)

    def empty(self) -> None:
        """Makes every streamed unit leave: before weights change, and at the end. Gathers under way are waited for."""
        for live in self._units:
            live.outdate()
        for live in [*self._full.values(), *self._staged.values()]:
            live.let_all_go()
            self._evict(live)

    def outdate(self, live: LiveUnit) -> None:
        """Makes a unit leave whose weights are about to change at home; nobody uses it."""
        live.outdate()
        if live.state is not UnitState.HOME and not live.unit.is_resident:
            self._evict(live)

    def expects_reads(self) -> bool:
        """Whether a unit that rests on NVME is expected in this pass and its read has not been started."""
        if not self._has_reads:
            return False
        upcoming = (self._units[index] for index in self.order.upcoming())
        return any(live.state is UnitState.HOME and live.reads for live in upcoming)

    def begin_pass(self, kind: Hashable, has_backward: bool) -> None:
        """A pass of a kind begins: starts fetching what it is expected to begin with, unless that is under way.

        Raises RuntimeError in a forked child.
        """
        self._check_process()
        self.order.begin(kind, has_backward)
        self._look_ahead(None)

    def end_pass(self) -> None:
        """A pass has ended whose next is expected to be of the same kind: starts fetching what that begins with.

        To be called when weights do not change before it: after a step, an evaluation, a micro-batch that ends no step.
        """
        self.order.rewind()
        self._look_ahead(None)

    # ---- coming and leaving ------------------------------------------------------------------------------------------

    def _bring(self, live: LiveUnit) -> None:
        """Makes a unit present now."""
        if live.move is not None:
            live.move.promote()
        if live.gather is not None:
            self._gather(live, is_urgent=True)
        elif live.state is UnitState.HOME:
            self._fetch(live, is_urgent=True)
        try:
            self._arrival.land(live)
        except BaseException:
            self._evict(live)
            raise

    def _gather(self, live: LiveUnit, is_urgent: bool) -> bool:
        """Starts the gather of a unit, if it is not under way; False when there is no room and it is not urgent."""
        if live.state not in (UnitState.HOME, UnitState.FETCHED):
            return True
        if not self._make_room(live, is_urgent):
            return False
        try:
            if live.state is UnitState.HOME and live.reads:
                self._fetch_into_stage(live, is_urgent=True)
            self._staged.pop(live.unit.index, None)
            self._arrival.gather(live)
        except BaseException:
            self._evict(live)
            raise
        return True

    def _fetch(self, live: LiveUnit, is_urgent: bool) -> bool:
        """Starts the way of a unit that is not gathered; False when there is no room and it is not urgent."""
        if live.state is not UnitState.HOME:
            return True
        if not self._make_room(live, is_urgent):
            return False
        if self._pool is None and live.entry is not None:
            live.stage = self._take_stage(live, is_urgent)
            if live.stage is None:
                self._evict(live)
                return False
        self._arrival.fetch(live, is_urgent)
        return True

    def _fetch_into_stage(self, live: LiveUnit, is_urgent: bool) -> bool:
        """Starts reading the shard of a unit that will be gathered; False when there is no buffer and it is not urgent."""
        live.stage = self._take_stage(live, is_urgent)
        if live.stage is None:
            return False
        self._staged[live.unit.index] = live
        self._arrival.fetch(live, is_urgent)
        return True

    def _evict(self, live: LiveUnit) -> None:
        self._staged.pop(live.unit.index, None)
        if self._full.pop(live.unit.index, None) is not None:
            self._full_numel -= live.unit.full_numel
        self._arrival.drop(live)

    # ---- ahead ---------------------------------------------------------------------------------------------------------

    def _look_ahead(self, current: LiveUnit | None) -> None:
        """Starts what comes next, nearest first, as far as limits and buffers allow."""
        may_wait = current is not None  # for one read: that of the next unit
        for live in self._ahead(current):
            if live.state is UnitState.PRESENT or (live.state is UnitState.GATHERED and not self._has_reads):
                continue
            is_read = live.gather is not None and live.reads
            bring = self._fetch if live.gather is None else self._gather
            if (is_read and not may_wait) or not bring(live, is_urgent=False):
                break
            may_wait = may_wait and not is_read
        if self._has_reads:
            self._read_ahead(current)

    def _read_ahead(self, current: LiveUnit | None) -> None:
        for live in self._ahead(current):
            is_home = live.state is UnitState.HOME and live.gather is not None
            if is_home and live.reads and not self._fetch_into_stage(live, is_urgent=False):
                return

    def _ahead(self, current: LiveUnit | None) -> Iterator[LiveUnit]:
        """The units expected next, each once, as many as may be fetched ahead."""
        ahead = 0
        seen = {current.unit.index} if current else set()
        for index in self.order.upcoming():
            if index not in seen:
                seen.add(index)
                live = self._units[index]
                ahead += live.unit.full_numel
                if ahead > self._max_ahead or len(seen) > _MOST_AHEAD:
                    return
                yield live

    # ---- who leaves ----------------------------------------------------------------------------------------------------

    def _make_room(self, live: LiveUnit, is_urgent: bool) -> bool:
        """Finds a unit the room for its full layout, if need be that of others whose next use lies farther ahead.

        Raises RuntimeError when it is urgent and all room is in use.
        """
        mine = -1.0 if is_urgent else self.order.distance(live.unit.index)
        while len(self._full) >= self._most_full or self._full_numel + live.unit.full_numel > self._max_live:
            farthest, distance = self._farthest(self._full)
            if farthest is None or distance <= mine:
                if not is_urgent:
                    return False
                if self._pool is None or len(self._full) < self._most_full:
                    break  # more than allowed, but all are in use
                self._refuse(live)
            else:
                self._evict(farthest)
        if self._pool is not None:
            live.slot = self._pool.take()
            assert live.slot is not None
        self._full[live.unit.index] = live
        self._full_numel += live.unit.full_numel
        return True

    def _take_stage(self, live: LiveUnit, is_urgent: bool) -> Slot | None:
        """A buffer for a shard on its way, if need be that of another whose use lies farther ahead."""
        assert self._stages is not None
        slot = self._stages.take()
        if slot is not None:
            return slot
        mine = -1.0 if is_urgent else self.order.distance(live.unit.index)
        among = self._staged | {i: u for i, u in self._full.items() if u.stage is not None and u.gather is None}
        farthest, distance = self._farthest(among)
        if farthest is not None and distance > mine:
            self._evict(farthest)
        return self._stages.take()

    def _farthest(self, among: dict[int, LiveUnit]) -> tuple[LiveUnit | None, float]:
        """Of those that nobody uses, the one whose next use lies farthest ahead, and how far."""
        found, farthest = None, -1.0
        for index, live in among.items():
            if not live.num_users and (distance := self.order.distance(index)) > farthest:
                found, farthest = live, distance
        return found, farthest

    def _refuse(self, live: LiveUnit) -> None:
        busy = ", ".join(other.unit.name for other in self._full.values() if other.num_users and other is not live)
        raise RuntimeError(
            f"unit {live.unit.name!r} finds all {self._most_full} buffers in use by {busy}: modules with parameters of their "
            f"own are nested deeper than that. Raise unit_buffers (buffer_count in a config) to {self._most_full + 1} or more"
        )

    def _distance_numel(self, live: LiveUnit) -> float:
        between = 0
        for index in self.order.upcoming():
            if index == live.unit.index:
                return between
            between += self._units[index].unit.full_numel
        return math.inf
