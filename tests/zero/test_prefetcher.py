"""Which transitions does the prefetcher make, in which order, for units that only write them
down?"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tiermem.weights.prefetcher import Limits, Order, Prefetcher
from tiermem.weights.unit_state import UnitState


class PlayedUnit:
    """A unit on NVMe that is gathered from several ranks, which gives its staging buffer back when
    the gather has begun."""

    is_streamed = is_gathered = reads = is_staged = True

    def __init__(self, index: int, log: list[str]) -> None:
        self.unit = cast(Any, SimpleNamespace(index=index, full_numel=1, takes_buffer=True))
        self.state = UnitState.HOME
        self.num_users = 0
        self.holds_staging = False
        self._log = log

    def _become(self, state: UnitState, holds_staging: bool, what: str) -> None:
        self.state, self.holds_staging = state, holds_staging
        self._log.append(f"{what} {self.unit.index}")

    def read(self, is_urgent: bool) -> None:
        self._become(UnitState.READING, True, "read")

    def gather(self) -> None:
        assert self.holds_staging, "a gather needs the shard in a staging buffer"
        self._become(UnitState.GATHERING, False, "gather")

    def land(self) -> None:
        self._become(UnitState.PRESENT, False, "land")

    def drop(self) -> None:
        self._become(UnitState.HOME, False, "drop")

    def copy(self) -> None:
        raise AssertionError("its parts come from several ranks")

    def hold(self) -> None:
        self.num_users += 1

    def let_go(self) -> None:
        self.num_users -= 1

    def use(self) -> None:
        """Nothing to wait for."""

    promote = outdate = let_all_go = use


def play(num_units: int, num_full: int, num_staging: int, uses: list[int]) -> list[str]:
    log: list[str] = []
    units = [PlayedUnit(index, log) for index in range(num_units)]
    limits = Limits(num_full, False, num_staging, math.inf, math.inf, math.inf)
    prefetcher = Prefetcher(units, Order(range(num_units), range(num_units)[::-1]), limits)
    prefetcher.order.begin("training", has_backward=False)
    prefetcher.acquire()
    for index in uses:
        prefetcher.acquire(units[index])
        prefetcher.release(units[index])
    return log


def test_units_that_are_used_where_they_rest_need_no_room() -> None:
    units = [PlayedUnit(index, []) for index in range(3)]
    prefetcher = Prefetcher(
        units, Order(range(3), [2, 1, 0]), Limits(2, True, 2, math.inf, math.inf, math.inf)
    )
    assert prefetcher.has_room_for(units[:2]) and not prefetcher.has_room_for(units)
    units[0].unit.takes_buffer = False
    assert prefetcher.has_room_for(units)


def test_units_are_read_and_gathered_ahead_in_the_expected_order() -> None:
    assert play(3, num_full=3, num_staging=2, uses=[0, 1, 2])[:8] == [
        *("read 0", "read 1"),  # the pass begins: no gather waits for a read yet
        *("gather 0", "land 0", "gather 1"),
        *("read 2", "land 1", "gather 2"),
    ]


@pytest.mark.parametrize("is_late", [False, True])
def test_an_accelerator_keeps_the_unit_whose_maths_may_still_run(is_late: bool) -> None:
    """Unit 0 is used again before unit 1. Its buffer is free at once, that of unit 1 when its maths
    has ended."""
    log = list[str]()
    units = [PlayedUnit(index, log) for index in range(3)]
    prefetcher = Prefetcher(
        units, Order(range(3), [2, 1, 0]), Limits(2, True, 3, 0.0, math.inf, math.inf, is_late)
    )
    prefetcher.order.begin("training", has_backward=False)
    for index in (0, 1, 2, 0, 1):
        prefetcher.acquire(units[index])
        prefetcher.release(units[index])
    prefetcher.end_pass()
    log.clear()
    prefetcher.order.begin("training", has_backward=False)
    for index in (0, 1, 2):
        prefetcher.acquire(units[index])
        prefetcher.release(units[index])
    assert [each for each in log if "drop" in each][-1] == ("drop 0" if is_late else "drop 1")


def test_a_unit_that_is_needed_at_once_gets_the_stage_of_a_read_that_can_wait() -> None:
    """The order changes: unit 2 is read ahead and holds the only staging buffer when unit 3 is
    needed instead."""
    assert play(4, num_full=4, num_staging=1, uses=[0, 3])[:9] == [
        *("read 0", "gather 0", "land 0"),
        *("read 1", "gather 1", "read 2"),
        *("drop 2", "read 3", "gather 3"),
    ]
