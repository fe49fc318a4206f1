"""Fetches: the units that the real prefetcher fetches in each pass of a step, by its own rules.

    uses of a forward, limits of buffers  ->  weights/prefetcher.py  ->  per pass: what is read, gathered, copied, and when

A step's first, second and last micro-batch are played, after a whole step before them, since
nothing is fetched ahead of the first one. All micro-batches between them are like the second one.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from tiermem.units.unit import Unit
from tiermem.weights.prefetcher import Limits, Order, Prefetcher
from tiermem.weights.unit_state import UnitState

MOST_PASSES = 3


class Fetch(NamedTuple):
    """One transition of a unit on its way to where the maths runs."""

    kind: str
    """ "read" (from NVMe), "gather" (from ranks) or "copy" (from HOST)."""
    unit: int
    is_awaited: bool
    """Whether the maths waits for all of it: the unit was not fetched ahead."""
    is_second: bool
    """Of a gather: from the secondary copy in the node (hpZ)."""


class StepFetches(NamedTuple):
    """The fetches of a step: of the forward and of the backward of each pass, and after the
    step."""

    forward: list[list[Fetch]]
    backward: list[list[Fetch]]
    after: list[Fetch]


@dataclasses.dataclass(frozen=True)
class FetchedUnit:
    """What the prefetcher's rules need to know of a unit."""

    index: int
    is_streamed: bool
    is_on_nvme: bool
    is_gathered: bool
    num_reductions: int
    """Calls that reduce its gradients over ranks, one after the other; 0: it has none."""
    takes_buffer: bool
    full_numel: int


class PlayedUse(NamedTuple):
    """A module in a pass: the units that it needs, and whether its backward needs them again."""

    units: tuple[int, ...]
    reads_again: bool


class Played(NamedTuple):
    """All that the fetches of a step follow from."""

    uses: tuple[PlayedUse, ...]
    units: tuple[FetchedUnit, ...]
    limits: Limits
    num_passes: int
    """Forwards, and backwards, of a step."""
    is_gpu: bool
    is_by_layer: bool
    steps_in_backward: bool
    most_under_way: int
    """Reductions at the same time, of several ranks."""
    keeps_second: bool


@functools.lru_cache(maxsize=512)
def fetches_of(played: Played) -> StepFetches:
    """Plays a step after another one. Raises ValueError when a module needs more units at once than
    there are buffers for."""
    play = _Play(played)
    play.step()
    return play.step()


class _Play:
    """Two steps of a prefetcher."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self.fetches: list[Fetch] = []
        self.first = 0  # of those that the use under way has begun
        self._units = [_PlayedUnit(unit, self, played) for unit in played.units]
        again = [use for use in reversed(played.uses) if use.reads_again]
        order = Order(self._streamed(played.uses), self._streamed(again))
        self._prefetcher = Prefetcher(self._units, order, played.limits)

    def step(self) -> StepFetches:
        forwards = []
        backwards = []
        for _ in range(min(self._played.num_passes, MOST_PASSES)):
            self._forward()
            forwards.append(self._taken())
            self._backward()
            backwards.append(self._taken())
        if not self._played.steps_in_backward:
            self._prefetcher.empty()
            self._prefetcher.end_pass(may_gather=self._played.is_gpu)
        return StepFetches(forwards, backwards, self._taken())

    def _taken(self) -> list[Fetch]:
        found = self.fetches
        self.fetches = []
        self.first = 0
        return found

    def _forward(self) -> None:
        self._prefetcher.order.begin("training", has_backward=True)
        self._prefetcher.acquire()
        *uses, last = self._played.uses
        for use in uses:
            self._use(use.units)
        for use in uses if self._played.is_by_layer else ():
            if not use.reads_again:  # the tail's forward begins with the head's
                self._use(use.units)
        self._use(last.units)

    def _backward(self) -> None:
        left = collections.Counter(index for use in self._played.uses for index in use.units)
        under_way: list[int] = []  # units whose gradients are being reduced, for each call
        for use in reversed(self._played.uses):
            self._use(use.units if use.reads_again else ())
            left.subtract(use.units)
            final = (index for index in use.units if not left[index])
            for index in final if self._played.steps_in_backward else ():
                for _ in range(self._played.units[index].num_reductions):
                    under_way.append(index)
                    if len(under_way) > self._played.most_under_way:
                        self._step_oldest(under_way)
        while under_way:
            self._step_oldest(under_way)

    def _step_oldest(self, under_way: list[int]) -> None:
        """Steps a unit after the last of its reductions."""
        index = under_way.pop(0)
        if index not in under_way:
            self._prefetcher.outdate(self._units[index])

    def _use(self, units: Sequence[int]) -> None:
        needed = [self._units[index] for index in units]
        try:
            for each in needed:
                self.first = len(self.fetches)
                self._prefetcher.acquire(each)
        except RuntimeError as error:  # too few buffers
            raise ValueError(str(error)) from error
        for each in needed:
            self._prefetcher.release(each)

    def _streamed(self, uses: Sequence[PlayedUse]) -> list[int]:
        return [index for use in uses for index in use.units if self._units[index].is_streamed]


class _PlayedUnit:
    """A unit for the real prefetcher, whose transitions are counted."""

    def __init__(self, facts: FetchedUnit, play: _Play, played: Played) -> None:
        self.unit: Unit = facts  # type: ignore[assignment]
        self.state = UnitState.HOME if facts.is_streamed else UnitState.PRESENT
        self.num_users = 0
        self.is_streamed = facts.is_streamed
        self.is_gathered = facts.is_gathered
        self.is_staged = facts.is_gathered or played.is_gpu
        self.is_stepped = True  # the seconds of its step are counted apart
        self._play = play
        self._is_on_nvme = facts.is_on_nvme
        self._keeps_second = played.keeps_second
        self._has_second = False  # whether there is a secondary copy in the node (hpZ)
        self._is_reading = False

    @property
    def reads(self) -> bool:
        """Whether fetching the unit begins with a read."""
        return self._is_on_nvme and not self._has_second

    @property
    def holds_staging(self) -> bool:
        """Whether it occupies a shard buffer."""
        return self._is_reading and self.is_staged

    def read(self, is_urgent: bool) -> None:
        """HOME -> READING; for a unit that is not gathered, the copy follows."""
        self._add("read")
        if not self.is_gathered:
            self._add("copy")
        self.state = UnitState.READING
        self._is_reading = True

    def gather(self) -> None:
        """HOME or READING -> GATHERING."""
        self._add("gather")
        self._add("copy")
        self.state = UnitState.GATHERING
        self._is_reading = False
        self._has_second = self._keeps_second

    def copy(self) -> None:
        """HOME -> COPYING."""
        self._add("copy")
        self.state = UnitState.COPYING

    def land(self) -> None:
        """-> PRESENT. What this use has begun of it was not fetched ahead."""
        fetches = self._play.fetches
        for index in range(self._play.first, len(fetches)):
            if fetches[index].unit == self.unit.index:
                fetches[index] = fetches[index]._replace(is_awaited=True)
        self.state = UnitState.PRESENT
        self._is_reading = False

    def drop(self) -> None:
        """-> HOME."""
        self.state = UnitState.HOME
        self._is_reading = False

    def outdate(self) -> None:
        """Drops the secondary copy: the weights are about to change."""
        self._has_second = False

    def promote(self) -> None:
        """Does nothing: seconds are counted apart."""

    use = promote  # the maths is counted apart
    let_all_go = promote  # between uses a unit has no users

    def hold(self) -> None:
        """Adds a user."""
        self.num_users += 1

    def let_go(self) -> None:
        """Removes a user."""
        self.num_users -= 1

    def _add(self, kind: str) -> None:
        self._play.fetches.append(Fetch(kind, self.unit.index, False, self._has_second))
