"""Fetches: which units are read at which use, by the rules of `zero/weights/residency.py` played without memory.

A pass is a sequence of uses; at each, the units it needs come if they are not present, then those expected next, as far as
buffers allow. Who leaves is the idle unit whose next use lies farthest ahead. Since nothing depends on time, the fetches
of a whole step are known before it runs, and so are its bytes.

    use        0   1   2   3 | 3   2   1   0 | step
    fetched        3         |     0         | 0 1 2 for the next forward            4 units, 3 buffers
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class Buffers:
    """What bounds how many units are present and fetched ahead; elements, and None for no bound."""

    num_slots: int
    max_ahead_numel: int | None = None
    max_live_numel: int | None = None
    max_reuse_numel: int | None = None
    num_stages: int = 0
    """Shards on their way to a gather."""


class Start(NamedTuple):
    """A unit begins a part of its way: its shard's read into a stage, the gather, or, where nothing is gathered, all of it."""

    unit: int
    what: Literal["read", "gather", "fetch"]


class Fetching:
    """Plays the coming and leaving of streamed units.

    A unit that is read before it is gathered waits for its read when the gather begins: so of those only the next is gathered
    ahead, and the others are read ahead, into stages.

    Args:
        numels: elements of each streamed unit by index; others are passed over.
        buffers: how many can be present.
        reads: those whose way begins with a read.
        gathered: those that are gathered.
    """

    _MOST_AHEAD = 8  # units looked at (residency.py)

    def __init__(
        self,
        numels: dict[int, int],
        buffers: Buffers,
        reads: Collection[int] = (),
        gathered: Collection[int] = (),
    ) -> None:
        self._numels = numels
        self._buffers = buffers
        self._reads = set(reads)
        self._all_reads = frozenset(reads)
        self._gathered = frozenset(gathered)
        self._present: set[int] = set()  # has a buffer
        self._landed: set[int] = set()  # and has been used
        self._staged: set[int] = set()
        self._users: set[int] = set()
        self._sequence: list[int] = []
        self._place = 0
        self._starts: list[Start] = []

    def begin(self, uses: Iterable[Sequence[int]]) -> list[Start]:
        """Begins a pass whose uses need these units; returns what begins ahead of the first, unless a step has begun it."""
        self._sequence = _without_repeats(unit for units in uses for unit in units if unit in self._numels)
        self._place = 0
        self._look_ahead(None)
        return self._taken()

    def use(self, units: Sequence[int]) -> list[Start]:
        """The next use; returns what begins, because it needs it or ahead of those that will, in order.

        Raises ValueError when it needs more than there are buffers.
        """
        self._users = set()
        for unit in units:
            if unit not in self._numels:
                continue
            self._users.add(unit)
            self._advance(unit)
            if not self._bring(unit, is_urgent=True):
                raise ValueError(f"a module needs more than the {self._buffers.num_slots} units that have a buffer")
            self._landed.add(unit)
            self._look_ahead(unit)
        users, self._users = self._users, set()
        for unit in users:
            if self._buffers.max_reuse_numel is not None and self._between(unit) > self._buffers.max_reuse_numel:
                self.outdate(unit)
        return self._taken()

    def expects_reads(self) -> bool:
        """Whether something is left to be read in this pass."""
        return any(self._is_home(unit) and unit in self._reads for unit in self._sequence[self._place :])

    def outdate(self, unit: int) -> None:
        """A unit leaves, as when its weights change at home."""
        self._present.discard(unit)
        self._landed.discard(unit)
        self._staged.discard(unit)

    def kept_near(self, unit: int) -> None:
        """Until the step a unit is gathered without its shard, from a second copy."""
        self._reads.discard(unit)

    def step(self) -> list[Start]:
        """An optimizer step: all leave, and what the pass begins with is fetched; returns what begins."""
        for each in (self._present, self._landed, self._staged):
            each.clear()
        self._reads = set(self._all_reads)
        self._place = 0
        self._look_ahead(None)
        return self._taken()

    def _taken(self) -> list[Start]:
        starts, self._starts = self._starts, []
        return starts

    def _advance(self, unit: int) -> None:
        if self._place and self._sequence[self._place - 1] == unit:
            return
        if unit in self._sequence[self._place :]:
            self._place = self._sequence.index(unit, self._place) + 1

    def _look_ahead(self, current: int | None) -> None:
        may_wait = current is not None  # for one read: that of the next unit
        for unit in self._ahead(current):
            is_read = unit in self._gathered and unit in self._reads and unit not in self._landed
            if (is_read and not may_wait) or not self._bring(unit, is_urgent=False):
                break
            may_wait = may_wait and not is_read
        for unit in self._ahead(current):
            is_due = self._is_home(unit) and unit in self._gathered and unit in self._reads
            if is_due and not self._stage(unit, is_urgent=False):
                break

    def _ahead(self, current: int | None) -> Iterator[int]:
        seen = set() if current is None else {current}
        ahead, most = 0, self._buffers.max_ahead_numel
        for unit in self._sequence[self._place :]:
            if unit in seen:
                continue
            seen.add(unit)
            ahead += self._numels[unit]
            if (most is not None and ahead > most) or len(seen) > self._MOST_AHEAD:
                return
            yield unit

    def _bring(self, unit: int, is_urgent: bool) -> bool:
        """Begins the way of a unit that has no buffer; False when there is none and it is not urgent."""
        if unit in self._present:
            return True
        if not self._take(unit, is_urgent):
            return False
        if unit not in self._gathered:
            self._starts.append(Start(unit, "fetch"))
            return True
        if unit in self._reads and unit not in self._staged:
            self._stage(unit, is_urgent=True)
        self._staged.discard(unit)
        self._starts.append(Start(unit, "gather"))
        return True

    def _stage(self, unit: int, is_urgent: bool) -> bool:
        """Begins the read of a shard that will be gathered, if need be in place of one whose use lies farther ahead."""
        if len(self._staged) >= self._buffers.num_stages:
            mine = -1.0 if is_urgent else self._distance(unit)
            farthest = max(sorted(self._staged - self._users), key=self._distance, default=None)
            if farthest is None or self._distance(farthest) <= mine:
                return False
            self._staged.discard(farthest)
        self._staged.add(unit)
        self._starts.append(Start(unit, "read"))
        return True

    def _is_home(self, unit: int) -> bool:
        return unit not in self._present and unit not in self._staged

    def _take(self, unit: int, is_urgent: bool) -> bool:
        """Finds a unit room, if need be that of others whose next use lies farther ahead."""
        mine = -1.0 if is_urgent else self._distance(unit)
        while not self._has_room(unit):
            idle = sorted(self._present - self._users)
            farthest = max(idle, key=self._distance, default=None)
            if farthest is None or self._distance(farthest) <= mine:
                if is_urgent and len(self._present) < self._buffers.num_slots:
                    break  # more elements than allowed, but all are in use
                return False
            self.outdate(farthest)
        self._present.add(unit)
        return True

    def _has_room(self, unit: int) -> bool:
        live = sum(self._numels[each] for each in self._present) + self._numels[unit]
        return len(self._present) < self._buffers.num_slots and live <= (self._buffers.max_live_numel or math.inf)

    def _distance(self, unit: int) -> float:
        try:
            return self._sequence.index(unit, self._place) - self._place
        except ValueError:
            return math.inf

    def _between(self, unit: int) -> float:
        between = 0
        for each in self._sequence[self._place :]:
            if each == unit:
                return between
            between += self._numels[each]
        return math.inf


def _without_repeats(units: Iterable[int]) -> list[int]:
    found: list[int] = []
    for unit in units:
        if not found or found[-1] != unit:
            found.append(unit)
    return found
