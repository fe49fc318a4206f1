"""Halving: the best of many candidates in a given time. All are tried a little, the worse half goes, the rest is tried more.

    round 1    64 candidates, a turn each      -> 32 stay
    round 2    32 candidates, some turns each  -> 16 stay
    ...                                           1

The time is divided over the rounds up front. Turns of one round are interleaved, each sweep over the candidates in an order
of its own, so that what drifts while they run is shared by all. A candidate's cost is the median of its turns, in all rounds:
one bad turn does not end it. Knows nothing of what a candidate is.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

LEAST_TURN_S, MOST_TURN_S = 0.04, 0.25
_TURNS_OF_ROUND = 3  # aimed at: a turn is a third of what a round leaves to a candidate


@dataclasses.dataclass
class Standing(Generic[T]):
    """A candidate and what its turns cost; infinite for one that cannot run."""

    candidate: T
    costs: list[float]
    num_rounds: int = 0

    @property
    def cost(self) -> float:
        """The median; infinite before the first turn."""
        return statistics.median(self.costs) if self.costs else math.inf


def halve(
    candidates: Sequence[T],
    measure: Callable[[T, float], float],
    seconds: float,
    on_round: Callable[[int, int, int], None] = lambda number, num_rounds, num_left: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Standing[T]]:
    """Ranks the candidates, the winner first, then those that stayed longest.

    Every candidate has at least one turn; after that the time is kept to, but for the turn under way when it ends.

    Args:
        measure: gives a candidate a turn of about so many seconds and returns its cost, less is better.
        seconds: for all of it.
        on_round: told the round, their number and the candidates left, before each begins.
        clock: seconds; a test brings its own.
    """
    if not candidates:
        raise ValueError("no candidates")
    shuffler = random.Random(0)
    standings = [Standing(each, []) for each in candidates]
    left = list(standings)
    deadline = clock() + seconds
    num_rounds = math.ceil(math.log2(len(candidates)))
    for number in range(num_rounds):
        on_round(number + 1, num_rounds, len(left))
        round_s = (deadline - clock()) / (num_rounds - number)
        _play(left, measure, round_s, deadline, shuffler, clock)
        left = sorted(left, key=lambda standing: standing.cost)[: -(-len(left) // 2)]
    return sorted(standings, key=lambda standing: (standing is not left[0], -standing.num_rounds, standing.cost))


def thin(candidates: Sequence[T], turn_s: Callable[[T], float], seconds: float) -> list[T]:
    """Every second candidate, as often as needed until a turn for each fits; at least two, in their order."""
    kept = list(candidates)
    while len(kept) > 3 and sum(map(turn_s, kept)) > seconds:
        kept = kept[::2]
    return kept


def _play(
    left: Sequence[Standing[T]],
    measure: Callable[[T, float], float],
    round_s: float,
    deadline: float,
    shuffler: random.Random,
    clock: Callable[[], float],
) -> None:
    """One round: sweeps over the candidates until its time is over, so that all have the same number of turns."""
    turn_s = min(MOST_TURN_S, max(LEAST_TURN_S, round_s / (_TURNS_OF_ROUND * len(left))))
    start, sweep_s = clock(), 0.0
    for standing in left:
        standing.num_rounds += 1
    while not all(standing.costs for standing in left) or clock() - start + sweep_s <= round_s:
        began = clock()
        for standing in shuffler.sample(left, len(left)):
            if standing.costs and clock() >= deadline:
                return
            standing.costs.append(measure(standing.candidate, turn_s))
        sweep_s = clock() - began
