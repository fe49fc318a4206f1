"""Do tasks run when their lane is free and what they wait for has ended, in the stated order?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.forecast.rates import Task, play


def test_reading_hides_behind_computing_but_for_the_first_and_the_last() -> None:
    tasks = []
    for i in range(3):
        tasks.append(Task(f"read {i}", "disk", 2.0, (2 * i - 2,) if i else ()))
        tasks.append(Task(f"compute {i}", "cpu", 3.0, (2 * i, 2 * i - 1) if i else (0,)))
    played = play(tasks)
    assert list(zip([task.name for task in tasks], played.begin_s, played.end_s, strict=True)) == [
        ("read 0", 0.0, 2.0),
        ("compute 0", 2.0, 5.0),
        ("read 1", 2.0, 4.0),
        ("compute 1", 5.0, 8.0),
        ("read 2", 4.0, 6.0),
        ("compute 2", 8.0, 11.0),
    ]


def test_a_free_lane_takes_the_lowest_priority_number_then_who_waited_longest() -> None:
    tasks = [
        Task("first", "disk", 1.0),
        Task("behind", "disk", 1.0, priority=1),
        Task("late", "disk", 1.0, (0,)),
        Task("early", "disk", 1.0),
    ]
    played = play(tasks)
    order = sorted(range(4), key=lambda number: played.begin_s[number])
    assert [tasks[number].name for number in order] == ["first", "early", "late", "behind"]


def test_a_task_without_seconds_passes_through_a_lane() -> None:
    played = play(
        [
            Task("a", "x", 0.0),
            Task("b", "x", 0.0, (0,)),
            Task("c", "y", 1.0, (1,)),
            Task("d", "x", 2.0),
        ]
    )
    assert played.end_s == [0.0, 0.0, 1.0, 2.0]  # equally long ready: b has the lower number


def test_figures_of_a_phase() -> None:
    tasks = [
        Task("a", "x", 1.0, phase="p"),
        Task("b", "x", 2.0, phase="q"),
        Task("c", "y", 4.0, phase="p"),
    ]
    played = play(tasks)
    assert (played.phase_end_s("p"), played.phase_end_s("none"), played.busy_s("x", "p")) == (
        4.0,
        0.0,
        1.0,
    )


@pytest.mark.parametrize("after", [(0,), (1,), (-1,)])
def test_a_task_comes_after_earlier_ones_only(after: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"task 0 \(a\) comes after .*; allowed are earlier tasks"):
        play([Task("a", "x", 1.0, after), Task("b", "x", 1.0)])


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    tasks = []
    for number in range(draw(st.integers(1, 25))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        seconds = float(draw(st.integers(0, 5)))
        tasks.append(
            Task(
                str(number),
                draw(st.sampled_from("abc")),
                seconds,
                tuple(after),
                priority=draw(st.integers(0, 1)),
            )
        )
    return tasks


@settings(max_examples=60, deadline=None)
@given(tasks=programs())
def test_no_lane_does_two_things_and_nobody_idles_without_a_reason(tasks: list[Task]) -> None:
    played = play(tasks)
    for number, task in enumerate(tasks):
        assert played.end_s[number] == played.begin_s[number] + task.seconds
        assert all(played.end_s[each] <= played.begin_s[number] for each in task.after)
        ready = max((played.end_s[each] for each in task.after), default=0.0)
        busy = sum(
            min(played.end_s[i], played.begin_s[number]) - max(played.begin_s[i], ready)
            for i, other in enumerate(tasks)
            if other.lane == task.lane and i != number
            if played.end_s[i] > ready and played.begin_s[i] < played.begin_s[number]
        )
        # somebody else had the lane all the time it waited
        assert busy == played.begin_s[number] - ready
