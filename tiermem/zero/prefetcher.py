"""Prefetcher: the learnt order of uses, what backward still has to answer, and which units come, stay and leave."""

from __future__ import annotations

import math
import time
import weakref
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import nn

from tiermem.policy import OffloadPolicy
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.store import TensorStore
from tiermem.zero.plan import USUAL_ON_DEVICE
from tiermem.zero.unit import Division
from tiermem.zero.unit_state import Arrival, LiveUnit, UnitState

# ---- Order: the sequence in which units are used, learnt while it happens and used to look ahead ---------------------
#
# A *pass* begins when the model is called, or the one of its modules that began the last pass (hooks.py). The sequence
# of one pass (forward, and backward when there was one) is the guess for the next pass of the same kind; before the
# first, the guess is the order of definition and then the reverse of what backward needs of it. When the program does
# something else the guess is taken up again at the next place where it fits: a wrong guess costs time, never
# correctness. The guess depends on the program's sequence of uses alone, never on time or memory, so that every rank
# makes the same one.

_LOOK_BEHIND = 4
_LONGEST = 64  # uses of each unit


class Order:
    """The learnt sequence of unit indices, with a place in it.

    Args:
        forward: units in the order of definition.
        backward: those that backward needs, in its order; default: all.
    """

    def __init__(self, forward: Sequence[int], backward: Sequence[int] | None = None) -> None:
        self._forward = list(forward)
        self._backward = self._forward[::-1] if backward is None else list(backward)
        self._learnt: dict[Hashable, list[int]] = {}
        self._kind: Hashable = None
        self._seen: list[int] = []  # of this pass
        self._guess: list[int] = []
        self._places: dict[int, list[int]] = {}  # of each unit in the guess, for distances
        self._place = 0  # in the guess: what comes next

    def begin(self, kind: Hashable, has_backward: bool) -> None:
        """Begins a pass; what the last one did becomes the guess for its kind."""
        if self._seen:
            self._learnt[self._kind] = self._seen
        self._kind, self._seen, self._place = kind, [], 0
        first_guess = self._forward + (self._backward if has_backward else [])
        self._expect(self._learnt.get(kind) or first_guess)

    def rewind(self) -> None:
        """Ends a pass whose next is expected to be of the same kind: what it begins with is upcoming."""
        if self._seen:
            self._learnt[self._kind] = self._seen
            self._expect(self._seen)
        self._seen, self._place = [], 0

    @property
    def is_long(self) -> bool:
        """Whether a pass has used every unit many times over: nothing that repeats has been found in it."""
        return len(self._seen) > _LONGEST * (len(self._forward) + 1)

    def use(self, unit: int) -> None:
        """Notes a use and finds the place in the guess that fits it."""
        if self._seen and self._seen[-1] == unit:
            return
        self._seen.append(unit)
        nearest = self._place - _LOOK_BEHIND
        if self._place < len(self._guess) and self._guess[self._place] == unit:
            self._place += 1
        elif unit in self._guess[self._place :]:
            self._place = self._guess.index(unit, self._place) + 1
        elif unit in self._guess[max(nearest, 0) : self._place]:
            self._place = self._guess.index(unit, max(nearest, 0)) + 1

    def upcoming(self) -> Iterator[int]:
        """The units expected next, nearest first; ends where the pass is expected to end."""
        return map(self._guess.__getitem__, range(self._place, len(self._guess)))

    def distance(self, unit: int) -> float:
        """How many uses lie before the unit's next; infinity when none is expected in this pass."""
        places = self._places.get(unit, ())
        nearest = bisect_left(places, self._place)
        return places[nearest] - self._place if nearest < len(places) else float("inf")

    def _expect(self, guess: list[int]) -> None:
        self._guess, self._places = guess, {}
        for place, unit in enumerate(guess):
            self._places.setdefault(unit, []).append(place)


# ---- Uses: what forward has made of every unit, and backward has not answered yet ------------------------------------
#
# Each forward with gradients makes a *use*, held by the autograd graph alone: a graph that is thrown away (an
# exception, an evaluation without backward) takes its uses with it. Reentrant checkpointing runs forward without
# gradients first; that is a *promise* of a use, made when backward computes forward again. When no use of a unit is
# left unanswered, and none promised, its gradients are final.
#
# Backward reads the weights of a use again, except those of an Embedding: where its gradient goes is said by the
# indices alone. So the unit of an embedding table, often the largest of all, is brought once in a step and not twice.

_HOOKS_OF_A_MODULE = 1  # that hooks.py puts before its forward, and behind it


class Use:
    """One forward of a module with gradients: which units took part, and whether backward has asked for them.

    Args:
        units: whose parameters get gradients through it.
        reads_again: whether its backward reads their weights.
    """

    def __init__(self, units: Sequence[LiveUnit], reads_again: bool = True) -> None:
        self.units = list(units)
        self.reads_again = reads_again
        self.is_held = False
        self.answered_in = 0  # the number of a backward
        self.entered = 0  # by the clock of forwards that begin and end
        self.left = 0
        self.start_ns = time.monotonic_ns()  # of the forward, then of the backward

    @property
    def needed_again(self) -> Sequence[LiveUnit]:
        """The units that are to be present in its backward."""
        return self.units if self.reads_again else ()


class Uses:
    """The uses that are left unanswered, unit by unit."""

    def __init__(self, units: Sequence[LiveUnit]) -> None:
        self._open: dict[int, weakref.WeakSet[Use]] = {live.unit.index: weakref.WeakSet() for live in units}
        self._promised: dict[int, int] = dict.fromkeys(self._open, 0)

    def add(self, use: Use) -> None:
        """A use is to be answered, perhaps once more."""
        for live in use.units:
            self._open[live.unit.index].add(use)

    def extend(self, use: Use, live: LiveUnit) -> None:
        """A use turns out to need one more unit, by a function whose backward may read it."""
        if live not in use.units:
            use.units.append(live)
            use.reads_again = True
            self._open[live.unit.index].add(use)

    def answer(self, use: Use) -> None:
        """Backward is through with a use."""
        for live in use.units:
            self._open[live.unit.index].discard(use)

    def promise(self, needed: Sequence[LiveUnit], change: int) -> None:
        """A use of each of these units will be made (1), or has been (-1)."""
        for live in needed:
            self._promised[live.unit.index] = max(0, self._promised[live.unit.index] + change)

    def forget_promises(self) -> None:
        """Backward has ended: what was promised and not made never will be."""
        self._promised = dict.fromkeys(self._promised, 0)

    def is_final(self, live: LiveUnit) -> bool:
        """Whether a unit's gradients are all there."""
        index = live.unit.index
        return not self._open[index] and not self._promised[index]


def first_order(division: Division) -> Order:
    """What a model's first pass is expected to need, by definition: forward, and then what backward reads again."""
    forward, backward = division.order(), division.order(reads_weights_again)
    return Order([unit.index for unit in forward], [unit.index for unit in reversed(backward)])


def reads_weights_again(module: nn.Module) -> bool:
    """Whether a module's backward may read its weights: always, but for a plain Embedding without hooks of the user's.

    A hook may use the weights in any way.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return type(module) is not nn.Embedding or any(len(each) > _HOOKS_OF_A_MODULE for each in hooks)


# ---- Residency: who comes, who stays and who has to leave, of the units that come and go -----------------------------
#
# `ensure` makes a unit present and starts what the order expects next, as far as buffers allow: with one shard reads
# into place, with several the gathers of the next units and, behind them, reads of those after. A unit that is released
# stays until somebody needs its buffer; then the one whose next use lies farthest ahead leaves (weights are clean in
# forward and backward, so leaving writes nothing).
#
# Gathers are collective. Which are started when, and who leaves for them, depends on the order of uses alone, never on
# time, memory or what a disk does: a unit on NVMe is gathered ahead when it is the next one, whether its read has ended
# or not. What reads ahead of that is this rank's own business.
#
# The four limits of ZeRO-3 act here, in elements: prefetch_numel (ahead of use), max_live_numel (with a full layout),
# max_reuse_numel (a released unit whose next use lies farther ahead leaves at once); small parameters that are never
# given up are no units of this file.

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
