"""Does halving find the best, keep to its time and treat all alike? On a clock of its own."""

from __future__ import annotations

import math
import random

import pytest

from tiermem.tools.tune import LEAST_TURN_S, halve, thin


class Disk:
    """Costs with noise and drift; a turn takes the time it is given."""

    def __init__(self, costs: dict[str, float], noise: float = 0.0, drift: float = 0.0) -> None:
        self.costs = costs
        self.now_s = 0.0
        self.turns: list[str] = []
        self._noise = noise
        self._drift = drift
        self._random = random.Random(1)

    def measure(self, candidate: str, turn_s: float) -> float:
        self.now_s += turn_s
        self.turns.append(candidate)
        return (
            self.costs[candidate]
            * (1 + self._drift * self.now_s)
            * self._random.uniform(1, 1 + self._noise)
        )

    def clock(self) -> float:
        return self.now_s


def disk_of(num: int, **kwargs: float) -> Disk:
    return Disk({f"c{i}": 10.0 + (i * 7) % num for i in range(num)}, **kwargs)


@pytest.mark.parametrize("num", [2, 3, 7, 64, 65])
@pytest.mark.parametrize("kwargs", [{}, {"noise": 0.1}, {"drift": 0.05}])
def test_the_cheapest_wins(num: int, kwargs: dict[str, float]) -> None:
    disk = disk_of(num, **kwargs)
    standings = halve(list(disk.costs), disk.measure, 30.0, clock=disk.clock)
    best = min(disk.costs.values())
    assert disk.costs[standings[0].candidate] <= best * (1.1 if kwargs else 1.0)
    assert sorted(standing.candidate for standing in standings) == sorted(disk.costs)


def test_time_is_kept_to() -> None:
    disk = disk_of(64)
    halve(list(disk.costs), disk.measure, 30.0, clock=disk.clock)
    assert 20.0 < disk.now_s < 30.5


def test_half_goes_in_every_round_and_the_rest_has_more_turns() -> None:
    disk = disk_of(20)
    rounds: list[str] = []
    standings = halve(list(disk.costs), disk.measure, 20.0, rounds.append, disk.clock)
    assert rounds == [
        f"round {number} of 5: {num_left} settings left"
        for number, num_left in enumerate((20, 10, 5, 3, 2), start=1)
    ]
    turns = [len(standing.costs) for standing in standings]
    assert turns == sorted(turns, reverse=True)
    assert turns[0] > 5 * turns[-1] >= 5


def test_every_candidate_has_a_turn_when_there_is_no_time() -> None:
    disk = disk_of(9)
    halve(list(disk.costs), disk.measure, 0.0, clock=disk.clock)
    assert set(disk.turns) == set(disk.costs)
    assert len(disk.turns) == 9
    assert disk.now_s == pytest.approx(9 * LEAST_TURN_S)


def test_turns_of_a_round_are_interleaved() -> None:
    disk = disk_of(4)
    halve(list(disk.costs), disk.measure, 8.0, clock=disk.clock)
    first = disk.turns[: len(disk.turns) // 4 * 4]
    for sweep in range(3):
        assert set(first[4 * sweep : 4 * sweep + 4]) == set(disk.costs)


def test_one_bad_turn_ends_nobody() -> None:
    disk = disk_of(2)
    best = min(disk.costs, key=lambda each: disk.costs[each])

    def measure(candidate: str, turn_s: float) -> float:
        is_bad = candidate == best and disk.turns.count(best) == 2
        return disk.measure(candidate, turn_s) * (1000 if is_bad else 1)

    assert halve(list(disk.costs), measure, 5.0, clock=disk.clock)[0].candidate == best


def test_what_cannot_run_is_last() -> None:
    disk = disk_of(5)
    disk.costs["c3"] = math.inf
    assert halve(list(disk.costs), disk.measure, 5.0, clock=disk.clock)[-1].candidate == "c3"


def test_a_single_candidate_wins_untried() -> None:
    disk = disk_of(1)
    (standing,) = halve(["c0"], disk.measure, 5.0, clock=disk.clock)
    assert (standing.candidate, standing.cost, disk.turns) == ("c0", math.inf, [])


def test_no_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        halve([], lambda candidate, turn_s: 0.0, 1.0)


def test_candidates_are_thinned_until_a_turn_each_fits() -> None:
    assert thin(range(64), lambda each: 0.1, 6.5) == list(range(64))
    assert thin(range(64), lambda each: 0.1, 2.0) == list(range(0, 64, 4))
    assert thin(range(64), lambda each: 100.0, 1.0) == [0, 32]
