"""Does FreeRanges hand out every byte once, and does it forget none?"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.swap.base.ranges import FreeRanges


def test_lowest_range_that_is_long_enough_is_cut() -> None:
    free = FreeRanges()
    for start, num_bytes in ((0, 10), (20, 30), (60, 30)):
        free.add(start, num_bytes)
    assert free.take(15) == 20
    assert free.ranges() == [(0, 10), (35, 50), (60, 90)]


def test_ranges_that_touch_are_one() -> None:
    free = FreeRanges()
    for start in (0, 20, 10):
        free.add(start, 10)
    assert free.ranges() == [(0, 30)]
    assert (free.longest, free.tail(30), free.tail(40)) == (30, 30, 0)


@pytest.mark.parametrize(
    ("start", "num_bytes"), [(0, 10), (5, 2), (9, 5), (15, 6), (0, 40), (20, 1), (29, 5)]
)
def test_giving_back_twice_is_refused_and_changes_nothing(start: int, num_bytes: int) -> None:
    free = FreeRanges()
    free.add(0, 10)
    free.add(20, 10)
    with pytest.raises(RuntimeError, match="given back twice"):
        free.add(start, num_bytes)
    assert free.ranges() == [(0, 10), (20, 30)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_held_and_free_bytes_cover_the_line_once(steps: list[tuple[bool, int]]) -> None:
    free, held = FreeRanges(), []
    free.add(0, 200)
    for is_take, number in steps:
        if is_take:
            start = free.take(number)
            if start is None:
                assert free.longest < number
            else:
                held.append((start, start + number))
        elif held:
            start, stop = held.pop(number % len(held))
            free.add(start, stop - start)
        ranges = free.ranges()
        pieces = sorted(ranges + held)
        assert [stop for _, stop in pieces] == [start for start, _ in pieces[1:]] + [200]
        assert pieces[0][0] == 0
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges))
