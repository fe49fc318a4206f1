"""Prefetcher: the learnt order of uses, what backward still has to answer, and which units come, stay and leave."""

from __future__ import annotations

import math
import time
import weakref
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import nn

from tiermem.policy import OffloadPolicy
from tiermem.zero.plan import USUAL_ON_DEVICE, Plan
from tiermem.zero.unit import Division, Unit
from tiermem.zero.unit_state import LiveUnit, UnitState

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


# ---- Prefetcher: which of the streamed units come, stay and leave ---------------------------------------------------

_MOST_AHEAD = 8  # units


class Streamed(Protocol):
    """A unit as the prefetcher sees it: a LiveUnit, or one that a forecast plays."""

    unit: Unit
    state: UnitState
    num_users: int

    @property
    def is_streamed(self) -> bool:
        """Whether it comes and goes."""

    @property
    def is_gathered(self) -> bool:
        """Whether it comes from the parts of all ranks, or from 8-bit blocks."""

    @property
    def reads(self) -> bool:
        """Whether bringing it begins with a read."""

    @property
    def is_staged(self) -> bool:
        """Whether its read goes into a stage."""

    @property
    def holds_stage(self) -> bool:
        """Whether it occupies a stage."""

    def read(self, is_urgent: bool) -> None:
        """HOME -> READING."""

    def promote(self) -> None:
        """The read under way is needed at once."""

    def gather(self) -> None:
        """HOME or READING -> GATHERING. Collective."""

    def copy(self) -> None:
        """HOME or READING -> COPYING."""

    def land(self) -> None:
        """READING, GATHERING or COPYING -> PRESENT. Blocks."""

    def use(self) -> None:
        """PRESENT: the unit is used from now on."""

    def drop(self) -> None:
        """Any state -> HOME."""

    def outdate(self) -> None:
        """Its weights are about to change at home."""

    def let_all_go(self) -> None:
        """Its modules need it no more."""


class Limits(NamedTuple):
    """What bounds the units in memory, in elements where not said otherwise; infinity for no bound."""

    num_full: int
    """Units with room for a full layout."""
    is_fixed: bool
    """Whether that room is so many buffers (CPU), rather than memory that torch's allocator gives."""
    num_stages: int
    """Buffers of shards on their way."""
    ahead_numel: float
    """Ahead of use: prefetch_numel."""
    live_numel: float
    """With a full layout: max_live_numel."""
    reuse_numel: float
    """A unit whose next use lies farther ahead leaves at once: max_reuse_numel."""


def limits_of(plan: Plan, policy: OffloadPolicy) -> Limits:
    """The limits of a plan's buffers and of ZeRO-3's four sizes (small parameters that stay present are no streamed units)."""
    ahead = math.inf if policy.prefetch_numel is None else policy.prefetch_numel
    return Limits(
        num_full=plan.units.num or policy.unit_buffers or USUAL_ON_DEVICE,
        is_fixed=plan.units.num > 0,
        num_stages=plan.shards.num,
        ahead_numel=0 if policy.gather_way == "single" else ahead,  # single: nothing is live but what is used
        live_numel=policy.max_live_numel or math.inf,
        reuse_numel=math.inf if policy.max_reuse_numel is None else policy.max_reuse_numel,
    )


T = TypeVar("T", bound=Streamed)


class Prefetcher(Generic[T]):
    """Decides which units come, stay and leave, and calls their transitions. Touches no memory itself.

    `ensure` makes a unit present and starts what the order expects next, as far as buffers allow: with one shard reads into
    place, with several the gathers of the next units and, behind them, reads of those after. A released unit stays until its
    buffer is needed; then the unit whose next use lies farthest ahead leaves (weights are clean in forward and backward, so
    leaving writes nothing).

    Gathers are collective. Which are started when, and which unit leaves for them, depends on the order of uses alone, never
    on time, memory or the disk: a unit on NVMe is gathered ahead when it is the next one, whether its read has ended or not.
    Reads ahead of that are this rank's own business.

    Args:
        units: all of them, by index.
        order: looks ahead.
    """

    def __init__(self, units: Sequence[T], order: Order, limits: Limits) -> None:
        self._units = units
        self.order = order
        self._limits = limits
        self._full: dict[int, T] = {}  # those that have a full layout, or a buffer for it
        self._full_numel = 0
        self._staged: dict[int, T] = {}  # those in READING whose gather has not begun
        self._has_reads = any(live.reads for live in units)

    def ensure(self, live: T) -> None:
        """Makes a unit present and starts fetching what comes next. Blocks; raises OSError when a read failed."""
        if not live.is_streamed:
            live.use()
            return
        self.order.use(live.unit.index)
        if live.state is not UnitState.PRESENT:
            self._bring(live)
        live.use()
        self._look_ahead(live)

    def release(self, live: T) -> None:
        """Lets a unit leave when its buffer is needed; at once when it is not used again soon enough."""
        if not live.is_streamed or live.num_users or live.state is not UnitState.PRESENT:
            return
        if self._limits.reuse_numel < math.inf and self._distance_numel(live) > self._limits.reuse_numel:
            self._evict(live)

    def empty(self) -> None:
        """Makes every streamed unit leave: before weights change, and at the end. Gathers under way are waited for."""
        for live in self._units:
            live.outdate()
        for live in [*self._full.values(), *self._staged.values()]:
            live.let_all_go()
            self._evict(live)

    def outdate(self, live: T) -> None:
        """Makes a unit leave whose weights are about to change at home; it has no users."""
        live.outdate()
        if live.state is not UnitState.HOME and live.is_streamed:
            self._evict(live)

    def expects_reads(self) -> bool:
        """Whether a unit that rests on NVME is expected in this pass and its read has not been started."""
        if not self._has_reads:
            return False
        upcoming = (self._units[index] for index in self.order.upcoming())
        return any(live.state is UnitState.HOME and live.reads for live in upcoming)

    def begin_pass(self, kind: Hashable, has_backward: bool) -> None:
        """A pass of a kind begins: starts fetching what it is expected to begin with, unless that is under way."""
        self.order.begin(kind, has_backward)
        self._look_ahead(None)

    def end_pass(self) -> None:
        """A pass has ended whose next is expected to be of the same kind: starts fetching what that begins with.

        To be called when weights do not change before it: after a step, an evaluation, a micro-batch that ends no step.
        """
        self.order.rewind()
        self._look_ahead(None)

    # ---- coming and leaving ------------------------------------------------------------------------------------------

    def _bring(self, live: T) -> None:
        """Makes a unit present now."""
        live.promote()
        self._start(live, is_urgent=True)
        try:
            live.land()
        except BaseException:
            self._evict(live)
            raise

    def _start(self, live: T, is_urgent: bool) -> bool:
        """Starts a unit's way into its full layout, if that is not under way; False: there is no room, and it is not urgent."""
        begins = live.state is UnitState.HOME or (live.state is UnitState.READING and live.is_gathered)
        if not begins:
            return True
        if not self._make_room(live, is_urgent):
            return False
        try:
            if live.is_gathered:
                if live.state is UnitState.HOME and live.reads and self._make_stage(live, is_urgent=True):
                    live.read(is_urgent=True)
                self._staged.pop(live.unit.index, None)
                live.gather()
            elif not live.reads:
                live.copy()
            elif not live.is_staged or self._make_stage(live, is_urgent):
                live.read(is_urgent)
            else:
                self._evict(live)
                return False
        except BaseException:
            self._evict(live)
            raise
        return True

    def _evict(self, live: T) -> None:
        self._staged.pop(live.unit.index, None)
        if self._full.pop(live.unit.index, None) is not None:
            self._full_numel -= live.unit.full_numel
        live.drop()

    # ---- ahead -------------------------------------------------------------------------------------------------------

    def _look_ahead(self, current: T | None) -> None:
        """Starts what comes next, nearest first, as far as limits and buffers allow."""
        may_wait = current is not None  # for one read: that of the next unit
        for live in self._ahead(current):
            if live.state is UnitState.PRESENT or (live.state is UnitState.GATHERING and not self._has_reads):
                continue
            is_read = live.is_gathered and live.reads
            if (is_read and not may_wait) or not self._start(live, is_urgent=False):
                break
            may_wait = may_wait and not is_read
        if self._has_reads:
            self._read_ahead(current)

    def _read_ahead(self, current: T | None) -> None:
        """Starts reads of shards that will be gathered."""
        for live in self._ahead(current):
            if live.state is UnitState.HOME and live.is_gathered and live.reads:
                if not self._make_stage(live, is_urgent=False):
                    return
                live.read(is_urgent=False)
                self._staged[live.unit.index] = live

    def _ahead(self, current: T | None) -> Iterator[T]:
        """The units expected next, each once, as many as may be fetched ahead."""
        ahead = 0
        seen = {current.unit.index} if current else set()
        for index in self.order.upcoming():
            if index not in seen:
                seen.add(index)
                live = self._units[index]
                ahead += live.unit.full_numel
                if ahead > self._limits.ahead_numel or len(seen) > _MOST_AHEAD:
                    return
                yield live

    # ---- which leaves ------------------------------------------------------------------------------------------------

    def _make_room(self, live: T, is_urgent: bool) -> bool:
        """Finds a unit the room for its full layout, if need be that of others whose next use lies farther ahead.

        Raises RuntimeError when it is urgent and all room is in use.
        """
        limits, mine = self._limits, -1.0 if is_urgent else self.order.distance(live.unit.index)
        while len(self._full) >= limits.num_full or self._full_numel + live.unit.full_numel > limits.live_numel:
            farthest, distance = self._farthest(self._full)
            if farthest is None or distance <= mine:
                if not is_urgent:
                    return False
                if not limits.is_fixed or len(self._full) < limits.num_full:
                    break  # more than allowed, but all are in use
                self._refuse(live)
            else:
                self._evict(farthest)
        self._full[live.unit.index] = live
        self._full_numel += live.unit.full_numel
        return True

    def _make_stage(self, live: T, is_urgent: bool) -> bool:
        """Whether a stage is free for a unit's shard, if need be that of another whose use lies farther ahead."""
        holders = {i: u for i, u in (self._staged | self._full).items() if u.holds_stage}
        if len(holders) < self._limits.num_stages:
            return True
        mine = -1.0 if is_urgent else self.order.distance(live.unit.index)
        farthest, distance = self._farthest({i: u for i, u in holders.items() if u.state is UnitState.READING})
        if farthest is None or distance <= mine:
            return False
        self._evict(farthest)
        return True

    def _farthest(self, among: dict[int, T]) -> tuple[T | None, float]:
        """Of those without users, the one whose next use lies farthest ahead, and how far."""
        found, farthest = None, -1.0
        for index, live in among.items():
            if not live.num_users and (distance := self.order.distance(index)) > farthest:
                found, farthest = live, distance
        return found, farthest

    def _refuse(self, live: T) -> None:
        busy = ", ".join(other.unit.name for other in self._full.values() if other.num_users and other is not live)
        raise RuntimeError(
            f"unit {live.unit.name!r} finds all {self._limits.num_full} buffers in use by {busy}: modules with parameters of "
            "their own are nested deeper than that. Raise unit_buffers (buffer_count in a config) to "
            f"{self._limits.num_full + 1} or more"
        )

    def _distance_numel(self, live: T) -> float:
        between = 0
        for index in self.order.upcoming():
            if index == live.unit.index:
                return between
            between += self._units[index].unit.full_numel
        return math.inf
