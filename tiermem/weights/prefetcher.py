"""Prefetcher: learns the order in which units are used, knows the forwards whose backward has not
run yet, and decides which units to fetch, to keep and to evict."""

from __future__ import annotations

import itertools
import math
import time
import weakref
from bisect import bisect_left
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy
from tiermem.units.unit import Division, Unit, reads_weights_again
from tiermem.weights.backward_marks import outside_transforms
from tiermem.weights.unit_state import LiveUnit, UnitState

# ---- the order of uses ---------------------------------------------------------------------------

_LOOK_BEHIND = 4  # uses
_LONGEST = 64  # uses of each unit in one pass


class Order:
    """The learnt sequence of unit indices, with the current position in it.

    A *pass* begins when the model is called, or the module that began the last pass (hooks.py). The
    sequence of one pass (forward, and backward if there is one) is the guess for the next pass of
    the same kind. The first guess is the order of definition, then the reverse order of the units
    that backward needs. When the program uses another unit than guessed, the position moves to the
    next one where the guess fits. A wrong guess costs time, never correctness. The guess depends
    only on the program's sequence of uses, not on time or memory, so every rank makes the same
    guess.

    Args:
        forward: unit indices in the order of definition.
        backward: the units that backward needs, in order of definition reversed.
    """

    def __init__(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        self._forward = list(forward)
        self._backward = list(backward)
        self._learnt: dict[Hashable, list[int]] = {}
        self._kind: Hashable = None
        self._seen: list[int] = []  # the uses of this pass
        self._guess: list[int] = []
        self._positions: dict[int, list[int]] = {}  # of each unit in the guess, for distances
        self._position = 0  # in the guess: the next expected use

    def begin(self, kind: Hashable, has_backward: bool) -> None:
        """Begins a pass. The uses of the last pass become the guess for its kind."""
        if self._seen:
            self._learnt[self._kind] = self._seen
        self._kind = kind
        self._seen = []
        self._position = 0
        first_guess = self._forward + (self._backward if has_backward else [])
        self._expect(self._learnt.get(kind) or first_guess)

    def first_uses(self) -> list[int]:
        """The units in the order in which the next pass of this kind is expected to use them."""
        return list(dict.fromkeys(self._seen or self._guess))

    def rewind(self) -> None:
        """Ends a pass and expects the next one to be of the same kind: its first units become
        upcoming."""
        if self._seen:
            self._learnt[self._kind] = self._seen
            self._expect(self._seen)
        self._seen = []
        self._position = 0

    @property
    def is_long(self) -> bool:
        """Whether a pass has used every unit more than 64 times on average: no repetition was found
        in it."""
        return len(self._seen) > _LONGEST * (len(self._forward) + 1)

    def use(self, unit: int) -> None:
        """Records a use and moves the position in the guess to fit it."""
        if self._seen and self._seen[-1] == unit:
            return
        self._seen.append(unit)
        nearest = self._position - _LOOK_BEHIND
        if self._position < len(self._guess) and self._guess[self._position] == unit:
            self._position += 1
        elif unit in self._guess[self._position :]:
            self._position = self._guess.index(unit, self._position) + 1
        elif unit in self._guess[max(nearest, 0) : self._position]:
            self._position = self._guess.index(unit, max(nearest, 0)) + 1

    def upcoming(self) -> Iterator[int]:
        """The units expected next, nearest first, until the expected end of the pass."""
        return map(self._guess.__getitem__, range(self._position, len(self._guess)))

    def distance(self, unit: int) -> float:
        """The number of uses before the unit's next use; infinity when none is expected in this
        pass."""
        positions = self._positions.get(unit, ())
        nearest = bisect_left(positions, self._position)
        return positions[nearest] - self._position if nearest < len(positions) else float("inf")

    def _expect(self, guess: list[int]) -> None:
        self._guess = guess
        self._positions = {}
        for position, unit in enumerate(guess):
            self._positions.setdefault(unit, []).append(position)


# ---- unanswered uses -----------------------------------------------------------------------------

_MOST_RUNS = 64  # of a unit's forwards, before those whose graphs are gone are forgotten


class UnitUse:
    """One forward of a module with gradients: its units, and whether backward has asked for them.

    Backward reads the weights of a use again, except those of an Embedding, whose gradient depends
    on the indices alone. So the unit of an embedding table, often the largest, is fetched once per
    step instead of twice.

    Args:
        units: units whose parameters get gradients through it.
        reads_again: whether its backward reads their weights.
    """

    def __init__(self, units: Sequence[LiveUnit], reads_again: bool = True) -> None:
        self.units = list(units)
        self.reads_again = reads_again
        self.answered_in = 0  # number of the backward that answered it last
        self.is_counted = False  # see `Uses.count`
        self.runs: dict[int, int] = {}  # by unit, the number of the run that it belongs to
        self.entered = 0  # tick of the forward's begin
        self.left = 0  # tick of its end
        self.changes: dict[LiveUnit, int] = {}  # of its units: `num_changes` at its end
        self.start_ns = time.monotonic_ns()  # of the forward, later of the backward
        # the rows of experts that it uses, of units that may come without; others come whole
        self.rows: dict[LiveUnit, set[int]] = {}

    def by_rows(self) -> None:
        """Notes that it uses no row of experts until more is said."""
        for live in self.units:
            if live.pages is not None:
                self.rows[live] = set()

    def note_rows(self, live: LiveUnit, rows: Collection[int] | None) -> None:
        """Notes that it uses rows of a unit's experts; None: perhaps all."""
        if rows is None:
            self.rows.pop(live, None)
        elif live in self.rows:
            self.rows[live].update(rows)

    def keep_whole(self) -> None:
        """At the end of a forward: what is there as a whole may have been used as a whole."""
        if self.rows:
            self.rows = {live: rows for live, rows in self.rows.items() if live.is_partial}

    @property
    def needed_again(self) -> Sequence[LiveUnit]:
        """The units that must be present in its backward."""
        return self.units if self.reads_again else ()


class Frame:
    """A forward under way: its use, and units of other modules' parameters that it holds until it
    ends."""

    def __init__(self, needed: Sequence[LiveUnit]) -> None:
        self.needed = needed
        self.use: UnitUse | None = None  # None: the forward runs without gradients
        self.borrowed: list[LiveUnit] = []


class Uses:
    """The unanswered uses of every unit.

    Only the autograd graph holds a use. A graph that is thrown away (after an exception, or an
    evaluation without backward) takes its uses with it. Reentrant checkpointing first runs forward
    without gradients: this *promises* a use, which is made when backward computes forward again. A
    unit's gradients are final when it has no unanswered and no promised use.

    Ranks that reduce final gradients together have to call the same units final, although one rank
    may keep a graph that another one has thrown away. Each rank notes the forwards that no backward
    has answered. Forwards of one unit, one after the other, are one *run*: they need no fetch, so
    that ranks may differ in how many they are. A call of a model whose units its modules need
    begins runs anew. Where a unit has more runs than one, the ranks ask one another before a
    backward whose graphs are left (`settle`).

    Args:
        any_of: flags of this rank -> whether any rank's is set, in order; collective. None: no
            other rank takes part.
    """

    def __init__(
        self, units: Sequence[LiveUnit], any_of: Callable[[list[bool]], list[bool]] | None
    ) -> None:
        self._open = {live.unit.index: weakref.WeakSet[UnitUse]() for live in units}
        self._promised = dict.fromkeys(self._open, 0)
        self._any_of = any_of
        self._most_runs = _MOST_RUNS
        # of units that ranks reduce: runs that no backward has answered, by their numbers
        self._runs: dict[int, dict[int, list[weakref.ref[UnitUse]]]] = {
            index: {} for index in self._open
        }
        self._numbers = itertools.count()
        self._last = -1  # the unit that was counted last

    def add(self, use: UnitUse) -> None:
        """Registers a use that backward has to answer; may be repeated for the same use."""
        for live in use.units:
            self._open[live.unit.index].add(use)

    def count(self, use: UnitUse) -> None:
        """Counts a forward, unless backward computes it again, which answers it as well. Collective
        now and then, where many are counted."""
        use.is_counted = self._any_of is not None
        for live in use.units if use.is_counted else ():
            self._count(use, live)

    def _count(self, use: UnitUse, live: LiveUnit) -> None:
        if not live.is_streamed:
            return
        index = live.unit.index
        is_next = index == self._last
        self._last = index
        if not live.unit.is_trainable:
            return
        runs = self._runs[index]
        if not (is_next and runs):
            runs[next(self._numbers)] = []
        use.runs[index] = number = next(reversed(runs))
        runs[number].append(weakref.ref(use))
        if len(runs) > self._most_runs:
            self.settle()
            self._most_runs = max(_MOST_RUNS, 2 * len(runs))

    def end_run(self) -> None:
        """The next forward begins a run."""
        self._last = -1

    def settle(self) -> None:
        """Before a backward: forgets the forwards whose graphs no rank has kept. Collective, where
        a unit has more than one run of them."""
        if self._any_of is None or max(map(len, self._runs.values()), default=0) < 2:
            return
        pairs = [(runs, number) for runs in self._runs.values() for number in runs]
        are_kept = self._any_of(
            [any(use() is not None for use in runs[number]) for runs, number in pairs]
        )
        for (runs, number), is_kept in zip(pairs, are_kept, strict=True):
            if not is_kept:
                del runs[number]

    def extend(self, use: UnitUse, live: LiveUnit) -> None:
        """Adds a unit to a use, for a function whose backward may read the unit."""
        if live not in use.units:
            use.units.append(live)
            use.reads_again = True
            self._open[live.unit.index].add(use)
            if use.is_counted:
                self._count(use, live)
        use.note_rows(live, None)

    def answer(self, use: UnitUse) -> None:
        """Notes that backward has answered a use."""
        for live in use.units:
            self._open[live.unit.index].discard(use)
            self._runs[live.unit.index].pop(use.runs.pop(live.unit.index, -1), None)
        self.end_run()

    def promise(self, needed: Sequence[LiveUnit], change: int) -> None:
        """Notes that a use of each of these units will be made (change 1), or has been made (change
        -1)."""
        for live in needed:
            self._promised[live.unit.index] = max(0, self._promised[live.unit.index] + change)

    def forget_promises(self) -> None:
        """Drops all promises at the end of backward: those left will not be kept."""
        self._promised = dict.fromkeys(self._promised, 0)

    def is_final(self, live: LiveUnit) -> bool:
        """Whether a unit's gradients are complete."""
        index = live.unit.index
        is_answered = not self._open[index] and not self._runs[index]
        return is_answered and not self._promised[index]


def first_order(division: Division) -> Order:
    """The expected order of a model's first pass: forward in order of definition, then the units
    that backward reads again."""
    forward = division.order()
    backward = division.order(reads_weights_again)
    return Order([unit.index for unit in forward], [unit.index for unit in reversed(backward)])


# ---- the prefetcher ------------------------------------------------------------------------------

_MOST_AHEAD = 8  # units


class Streamed(Protocol):
    """A unit as the prefetcher uses it: a LiveUnit, or a simulated one in a forecast."""

    unit: Unit
    state: UnitState
    num_users: int

    @property
    def is_streamed(self) -> bool:
        """Whether it is fetched and evicted."""

    @property
    def is_gathered(self) -> bool:
        """Whether it is gathered: from the shards of all ranks, or from blocks."""

    @property
    def reads(self) -> bool:
        """Whether fetching it begins with a read from NVMe."""

    @property
    def is_stepped(self) -> bool:
        """Whether its weights at rest are those of the last step, so that a copy of them need not
        wait."""

    @property
    def is_staged(self) -> bool:
        """Whether its read goes into a staging buffer, which one shard fits."""

    @property
    def holds_staging(self) -> bool:
        """Whether it occupies a staging buffer now."""

    def read(self, is_urgent: bool) -> None:
        """HOME -> READING."""

    def promote(self) -> None:
        """Raises the priority of the read under way, which is needed at once."""

    def gather(self) -> None:
        """HOME or READING -> GATHERING. Collective."""

    def copy(self) -> None:
        """HOME -> COPYING."""

    def land(self) -> None:
        """READING, GATHERING or COPYING -> PRESENT. Blocks."""

    def use(self) -> None:
        """PRESENT: the current stream uses the unit from now on."""

    def drop(self) -> None:
        """Any state -> HOME."""

    def outdate(self) -> None:
        """Notes that its weights are about to change where they rest."""

    def hold(self) -> None:
        """Adds a user."""

    def let_go(self) -> None:
        """Removes a user."""

    def let_all_go(self) -> None:
        """Removes all users."""


class Limits(NamedTuple):
    """Bounds on the units in memory, in elements unless said otherwise; infinity: no bound."""

    num_full: int
    """Units that may have a full layout at once."""
    is_fixed: bool
    """Whether these are a fixed number of buffers (CPU) rather than memory of torch's allocator."""
    num_staging: int
    """Staging buffers: those for shards on their way."""
    ahead_numel: float
    """Fetched ahead of use: prefetch_numel."""
    live_numel: float
    """In full layouts at once: max_live_numel."""
    reuse_numel: float
    """A released unit whose next use is farther ahead is evicted at once: max_reuse_numel."""
    is_late: bool = False
    """Whether the maths of a released unit may still run: an accelerator does what it was given
    when it comes to it."""


def limits_of(plan: Plan, policy: OffloadPolicy) -> Limits:
    """Limits of a plan's buffers and of the policy's prefetch_numel, max_live_numel and
    max_reuse_numel. Resident units and those in place do not count."""
    ahead = math.inf if policy.prefetch_numel is None else policy.prefetch_numel
    return Limits(
        num_full=plan.units.num,
        is_fixed=plan.units.num > 0,
        num_staging=plan.staging.num,
        # single: only units in use are in memory
        ahead_numel=0 if policy.gather_way == "single" else ahead,
        live_numel=policy.max_live_numel or math.inf,
        reuse_numel=math.inf if policy.max_reuse_numel is None else policy.max_reuse_numel,
        is_late="units" in plan.on_device,
    )


T = TypeVar("T", bound=Streamed)
_Step = tuple[T, Callable[[], None]]  # a unit, and its next transition


class Prefetcher(Generic[T]):
    """Decides which units to fetch, to keep and to evict, and calls their transitions. Has no
    access to their memory.

    `acquire` makes a unit present and starts to fetch the units that the order expects next, as far
    as buffers allow. A pass begins with `order.begin` and `acquire()`. On one rank `acquire`
    starts reads into the units' buffers. On several ranks it starts the gathers of the next units,
    and the reads of the shards of the units after those. A released unit stays until its buffer is
    needed. Then the unit whose next use is farthest ahead is evicted. Weights do not change in
    forward and backward, so an eviction writes nothing.

    Gathers are collective. Their sequence, and the evictions for them, depend only on the order of
    uses, never on time, memory or the disk. A unit on NVMe is gathered ahead when it is the next
    one, whether its read has ended or not. Reads further ahead may differ between ranks.

    Each change is marked while it lasts (`is_changing`). A mark that is left tells of an interrupt:
    then nothing is fetched or released until `recover`, which the next pass, step or close calls.

    Args:
        units: all units, by index.
        order: the expected order of uses.
    """

    def __init__(self, units: Sequence[T], order: Order, limits: Limits) -> None:
        # outside a change: an interrupt has ended one half-way
        self.is_changing = False
        self._units = units
        self.order = order
        self._full: dict[int, T] = {}  # units that have a full layout, or a buffer for it
        self._staged: dict[int, T] = {}  # units in READING whose gather has not begun
        self._last: T | None = None  # the unit that was used last
        self.use(limits)

    def use(self, limits: Limits) -> None:
        """Goes on with other limits, and with units that rest elsewhere. All units are at HOME."""
        self._limits = limits
        self._has_reads = any(live.reads for live in self._units)

    @outside_transforms
    def acquire(self, live: T | None = None, may_gather: bool = True) -> None:
        """Makes a unit present for one more user, and starts to fetch the units that are expected
        next. None: only the latter.

        may_gather: whether gathers of units that are expected next may begin. Blocks; raises
            OSError when a read failed. With None it never does: the forward that needs the unit
            reads it again.
        """
        self._begin()
        if live is not None:
            live.hold()
            if not live.is_streamed:
                live.use()
                self.is_changing = False
                return
            self.order.use(live.unit.index)
        for each, transition in self._due(live, may_gather):
            try:
                transition()
            except (OSError, RuntimeError) as error:
                self._evict(each)
                self.is_changing = False
                if live is None and isinstance(error, OSError):
                    return  # whoever needs the unit fetches it again
                raise
        self._last = live or self._last
        self.is_changing = False

    @outside_transforms
    def fetch_more(self, live: T, fetch: Callable[[], None]) -> None:
        """Calls a function that fetches more of a unit that is present, through a staging buffer
        where its reads need one. Blocks; raises OSError, and then the unit stays as it is."""
        self._begin()
        try:
            if live.reads and live.is_staged:
                self._free_staging(live, is_urgent=True)
            fetch()
        except (OSError, RuntimeError):
            self.is_changing = False
            raise
        self.is_changing = False

    def _begin(self) -> None:
        """Marks a change. Raises RuntimeError where an interrupt has left the mark of another
        one."""
        if self.is_changing:
            raise RuntimeError(
                "an exception has ended this forward or backward in the midst of a fetch, so that "
                "it cannot go on: call the "
                "model again"
            )
        self.is_changing = True

    @outside_transforms
    def release(self, live: T, may_evict: bool = True) -> None:
        """Removes a user of a unit. Without users it may be evicted: now if its next use is beyond
        reuse_numel."""
        if self.is_changing:
            return
        self.is_changing = True
        live.let_go()
        is_idle = (
            may_evict
            and live.is_streamed
            and not live.num_users
            and live.state is UnitState.PRESENT
        )
        is_bounded = self._limits.reuse_numel < math.inf and live.unit.takes_buffer
        if is_idle and is_bounded and self._distance_numel(live) > self._limits.reuse_numel:
            self._evict(live)
        self.is_changing = False

    def recover(self, reset: Callable[[], None]) -> None:
        """After an interrupt that has left the mark. reset: makes every unit absent and all buffers
        free. Blocks."""
        reset()
        self._staged.clear()
        self._full.clear()
        self.is_changing = False

    def empty(self) -> None:
        """Evicts every streamed unit: before weights change, and at the end. Blocks for gathers
        under way."""
        self.is_changing = True
        for live in self._units:
            if live.is_streamed and live.state is not UnitState.HOME:
                live.let_all_go()
                self._evict(live)
            live.outdate()  # not before a gather under way has ended, which gives a second copy
        self.is_changing = False

    def outdate(self, live: T) -> None:
        """Evicts a unit without users whose weights are about to change where they rest."""
        if self.is_changing:
            return
        self.is_changing = True
        if live.state is not UnitState.HOME and live.is_streamed:
            self._evict(live)
        live.outdate()
        self.is_changing = False

    def has_room_for(self, units: Iterable[T]) -> bool:
        """Whether these units can be in use at once."""
        return (
            not self._limits.is_fixed
            or sum(live.unit.takes_buffer for live in units) <= self._limits.num_full
        )

    def allow(self, num_full: int) -> None:
        """Sets how many units may have a full layout at once. Of more, those without users are
        evicted whose next use is farthest ahead."""
        if self.is_changing:
            return
        self.is_changing = True
        self._limits = self._limits._replace(num_full=num_full)
        while len(self._full) > num_full and (farthest := self._farthest(self._full)[0]):
            self._evict(farthest)
        self.is_changing = False

    def end_pass(self, may_gather: bool = True) -> None:
        """Ends a pass and starts to fetch the first units of the next pass, which is expected to be
        of the same kind.

        Call it when weights do not change before the next pass: after a step, an evaluation, or a
        micro-batch without a step.

        may_gather: whether gathers may begin. After a step on CPUs they begin with the next pass:
            they take the time of the thread that begins them.
        """
        self.order.rewind()
        self.acquire(may_gather=may_gather)

    # ---- fetching --------------------------------------------------------------------------------

    def _due(self, current: T | None, may_gather: bool) -> Iterator[_Step[T]]:
        """Yields the transitions that `acquire` makes, in order. The caller makes each one before
        it asks for the next."""
        if current is not None:
            if current.state is not UnitState.PRESENT:
                current.promote()
                yield from self._start(current, is_urgent=True)
                yield current, current.land
            current.use()
        may_wait = current is not None  # a gather may wait for one read: that of the next unit
        for live in self._ahead(current):  # nearest first, as far as limits and buffers allow
            if live.state is UnitState.PRESENT or (
                live.state is UnitState.GATHERING and not self._has_reads
            ):
                continue
            is_read = live.is_gathered and live.reads
            if live.is_gathered and not may_gather:
                break
            if (is_read and not may_wait) or not (yield from self._start(live, is_urgent=False)):
                break
            may_wait = may_wait and not is_read
        # shards that will be gathered later
        for live in self._ahead(current) if self._has_reads else ():
            if live.state is UnitState.HOME and live.is_gathered and live.reads:
                if not self._free_staging(live, is_urgent=False):
                    break
                yield live, partial(live.read, False)
                self._staged[live.unit.index] = live

    def _start(self, live: T, is_urgent: bool) -> Generator[_Step[T], None, bool]:
        """Starts to bring a unit into its full layout, unless that is under way. False: it is not
        urgent, and has no room.

        A unit that is copied from memory where it is being stepped has to be urgent, too. A gather
        waits for the step: which gathers begin must not depend on time.
        """
        begins = live.state is UnitState.HOME or (
            live.state is UnitState.READING and live.is_gathered
        )
        if not begins:
            return True
        if not (is_urgent or live.reads or live.is_gathered or live.is_stepped):
            return False
        if not self._make_room(live, is_urgent):
            return False
        if live.is_gathered:
            if (
                live.state is UnitState.HOME
                and live.reads
                and self._free_staging(live, is_urgent=True)
            ):
                yield live, partial(live.read, True)
            self._staged.pop(live.unit.index, None)
            yield live, live.gather
        elif not live.reads:
            yield live, live.copy
        elif not live.is_staged or self._free_staging(live, is_urgent):
            yield live, partial(live.read, is_urgent)
        else:
            self._evict(live)
            return False
        return True

    def _ahead(self, current: T | None) -> Iterator[T]:
        """The units expected next, each once, up to the limits for prefetches."""
        ahead = 0
        seen = {current.unit.index} if current else set()
        for index in self.order.upcoming():
            live = self._units[index]
            if index not in seen and live.unit.takes_buffer:
                seen.add(index)
                ahead += live.unit.full_numel
                if ahead > self._limits.ahead_numel or len(seen) > _MOST_AHEAD:
                    return
                yield live

    # ---- making room -----------------------------------------------------------------------------

    def _evict(self, live: T) -> None:
        self._staged.pop(live.unit.index, None)
        self._full.pop(live.unit.index, None)
        live.drop()

    def _make_room(self, live: T, is_urgent: bool) -> bool:
        """Takes room for a unit's full layout, if need be from units whose next use is farther
        ahead.

        Returns False when there is no such room. Raises RuntimeError when the unit is urgent and
        all buffers are in use.
        """
        if not live.unit.takes_buffer:
            return True
        limits = self._limits
        mine = -1.0 if is_urgent else self.order.distance(live.unit.index)
        is_bounded = limits.live_numel < math.inf
        while len(self._full) >= limits.num_full or (
            is_bounded
            and sum(each.unit.full_numel for each in (live, *self._full.values()))
            > limits.live_numel
        ):
            farthest, distance = self._farthest(self._full)
            if farthest is None or distance <= mine:
                if not is_urgent:
                    return False
                if not limits.is_fixed or len(self._full) < limits.num_full:
                    break  # exceeds the limit, since all units are in use
                self._refuse(live)
            else:
                self._evict(farthest)
        self._full[live.unit.index] = live
        return True

    def _free_staging(self, live: T, is_urgent: bool) -> bool:
        """Whether a staging buffer is free for a unit's shard.

        If need be, evicts a unit that is being read and whose next use is farther ahead.
        """
        holders = {i: u for i, u in (self._staged | self._full).items() if u.holds_staging}
        if len(holders) < self._limits.num_staging:
            return True
        mine = -1.0 if is_urgent else self.order.distance(live.unit.index)
        farthest, distance = self._farthest(
            {i: u for i, u in holders.items() if u.state is UnitState.READING}
        )
        if farthest is None or distance <= mine:
            return False
        self._evict(farthest)
        return True

    def _farthest(self, among: dict[int, T]) -> tuple[T | None, float]:
        """The unit without users whose next use is farthest ahead, and the number of uses before
        it.

        Who follows a unit in its buffer waits for its maths. So the unit that was used last goes
        only if it is the only one.
        """
        idle = [
            (self.order.distance(index), live)
            for index, live in among.items()
            if not live.num_users
        ]
        if self._limits.is_late and len(idle) > 1:
            idle = [each for each in idle if each[1] is not self._last]
        distance, found = max(idle, key=lambda each: each[0], default=(-1.0, None))
        return found, distance

    def _refuse(self, live: T) -> None:
        busy = ", ".join(
            other.unit.name
            for other in self._full.values()
            if other.num_users and other is not live
        )
        raise RuntimeError(
            f"unit {live.unit.name!r} finds all {self._limits.num_full} buffers in use by {busy}: "
            "modules with parameters of "
            "their own are nested deeper than that, or a checkpoint repeats them in backward. Raise "
            "unit_buffers (buffer_count in a config) to "
            f"{self._limits.num_full + 1} or more"
        )

    def _distance_numel(self, live: T) -> float:
        between = 0
        for index in self.order.upcoming():
            if index == live.unit.index:
                return between
            between += self._units[index].unit.full_numel
        return math.inf
