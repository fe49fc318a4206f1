"""Does what is pending between ranks keep its memory until nobody touches it any more, also when
something fails?"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch

from tiermem.ranks.collectives import Pending, Then
from tiermem.ranks.topology import Topology

ALONE = Topology(None, 0, 1, 1, 0)


class Work:
    """A handle as torch.distributed gives them, which fails with a word or ends."""

    def __init__(self, fails_with: str = "", looks: Callable[[], None] = lambda: None) -> None:
        self.is_over = False
        self._fails_with = fails_with
        self._looks = looks

    def wait(self, timeout: timedelta) -> None:
        self._looks()
        self.is_over = True
        if self._fails_with:
            raise RuntimeError(self._fails_with)


def test_a_failure_is_raised_after_the_others_have_ended_with_the_memory_still_there() -> None:
    memory = torch.zeros(3)
    seen = weakref.ref(memory)

    def memory_is_there() -> None:
        assert seen() is not None

    works = [
        Work(looks=memory_is_there),
        Work("first", memory_is_there),
        Work("second", memory_is_there),
    ]
    works.append(Work(looks=memory_is_there))
    pending = Pending(ALONE, "gathering a", [works], [memory])
    del memory
    with pytest.raises(RuntimeError, match="first"):
        pending.wait()
    assert all(work.is_over for work in works)
    assert seen() is None


def test_the_end_after_an_interrupt_waits_again() -> None:
    def interrupted() -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 1:
            raise KeyboardInterrupt

    num_waits, unpacked = 0, list[str]()
    pending = Then(
        [Pending(ALONE, "gathering a", [[Work(looks=interrupted)]], [])],
        lambda: unpacked.append("a"),
    )
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.end()
    assert num_waits == 2 and not unpacked


def test_a_round_is_not_started_after_one_that_failed() -> None:
    def rounds() -> Iterator[list[Work]]:
        yield [Work("lost")]
        raise AssertionError("started")

    pending = Pending(ALONE, "gathering a", rounds(), [])
    with pytest.raises(RuntimeError, match="lost"):
        pending.wait()
    pending.wait()  # nothing is left


def test_the_end_after_another_failure_waits_and_says_nothing() -> None:
    works = [Work("lost"), Work()]
    memory = torch.zeros(3)
    seen = weakref.ref(memory)
    pending = Pending(ALONE, "reducing a", [works], [memory])
    del memory
    pending.end()
    assert all(work.is_over for work in works)
    assert seen() is None
