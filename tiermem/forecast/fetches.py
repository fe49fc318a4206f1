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
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Buffers:
    """What bounds how many units are present and fetched ahead; elements, and None for no bound."""

    num_slots: int
    max_ahead_numel: int | None = None
    max_live_numel: int | None = None
    max_reuse_numel: int | None = None


class Fetching:
    """Plays the coming and leaving of streamed units.

    Args:
        numels: elements of each streamed unit by index; others are passed over.
        buffers: how many can be present.
    """

    _MOST_AHEAD = 8  # units looked at (residency.py)

    def __init__(self, numels: dict[int, int], buffers: Buffers) -> None:
        self._numels = numels
        self._buffers = buffers
        self._present: set[int] = set()
        self._users: set[int] = set()
        self._sequence: list[int] = []
        self._place = 0

    def begin(self, uses: Iterable[Sequence[int]]) -> None:
        """Begins a pass whose uses need these units."""
        self._sequence = _without_repeats(unit for units in uses for unit in units if unit in self._numels)
        self._place = 0

    def use(self, units: Sequence[int]) -> tuple[list[int], list[int]]:
        """The next use; returns the units fetched because it needs them, and those fetched ahead, each in order.

        Raises ValueError when it needs more than there are buffers.
        """
        urgent, ahead = [], []
        self._users = set()
        for unit in units:
            if unit not in self._numels:
                continue
            self._users.add(unit)
            self._advance(unit)
            if unit not in self._present:
                if not self._take(unit, is_urgent=True):
                    raise ValueError(f"a module needs more than the {self._buffers.num_slots} units that have a buffer")
                urgent.append(unit)
            ahead += self._look_ahead(unit)
        users, self._users = self._users, set()
        for unit in users:
            if self._buffers.max_reuse_numel is not None and self._between(unit) > self._buffers.max_reuse_numel:
                self._present.discard(unit)
        return urgent, ahead

    def expects_fetches(self) -> bool:
        """Whether something is left to be fetched in this pass."""
        return any(unit not in self._present for unit in self._sequence[self._place :])

    def step(self) -> list[int]:
        """An optimizer step: all leave, and what the pass begins with is fetched; returns it."""
        self._present.clear()
        self._place = 0
        return self._look_ahead(None)

    def _advance(self, unit: int) -> None:
        if self._place and self._sequence[self._place - 1] == unit:
            return
        if unit in self._sequence[self._place :]:
            self._place = self._sequence.index(unit, self._place) + 1

    def _look_ahead(self, current: int | None) -> list[int]:
        begun: list[int] = []
        seen = set() if current is None else {current}
        ahead = 0
        for unit in self._sequence[self._place :]:
            if unit in seen:
                continue
            seen.add(unit)
            ahead += self._numels[unit]
            if ahead > (self._buffers.max_ahead_numel or math.inf) or len(seen) > self._MOST_AHEAD:
                break
            if unit not in self._present:
                if not self._take(unit, is_urgent=False):
                    break
                begun.append(unit)
        return begun

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
            self._present.discard(farthest)
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
