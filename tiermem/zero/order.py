"""Order: the sequence in which units are used, learnt while it happens and used to look ahead.

A *pass* begins when the model is called, or the one of its modules that began the last pass (hooks.py). The sequence of one
pass (forward, and backward when there was one) is the guess for the next pass of the same kind; before the first, the guess is
the order of definition and then the reverse of what backward needs of it. When the program does something else the guess is
taken up again at the next place where it fits: a wrong guess costs time, never correctness. The guess depends on the program's
sequence of uses alone, never on time or memory, so that every rank makes the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence

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
