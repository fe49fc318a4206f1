"""Do calls of side threads end, whatever an interrupt of their caller cuts off?"""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from tiermem.swap.base import side_threads
from tiermem.swap.base.side_threads import Flag, SideThreads, Task


def test_calls_are_made_in_order_and_answer() -> None:
    threads = SideThreads(1, "test")
    made: list[int] = []
    tasks = [
        threads.submit(lambda number=number: made.append(number) or number) for number in range(100)
    ]  # type: ignore[misc]
    assert [task.result() for task in tasks] == made == list(range(100))
    failing = threads.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    threads.close()
    threads.close()
    assert not any(thread.name == "test" for thread in threading.enumerate())


def test_a_cancelled_call_is_never_made_and_one_that_has_begun_cannot_be_cancelled() -> None:
    threads = SideThreads(1, "test")
    may_end, has_begun = Flag(), Flag()
    made: list[str] = []

    def act() -> None:
        has_begun.set()
        may_end.wait()
        made.append("first")

    first, second = threads.submit(act), threads.submit(lambda: made.append("second"))
    has_begun.wait()
    assert second.cancel() and second.cancel() and not first.cancel()
    second.wait()
    may_end.set()
    threads.close()
    assert made == ["first"]
    never_given = Task(lambda: made.append("never"))
    assert never_given.cancel()
    never_given.wait()


def test_a_thread_that_cannot_begin_gives_its_error_to_every_call() -> None:
    threads = SideThreads(1, "test", lambda: 1 // 0)
    for task in [threads.submit(lambda: 7) for _ in range(2)]:
        with pytest.raises(ZeroDivisionError):
            task.result()
    threads.close()


def test_threads_end_with_their_owner_and_hold_no_finished_call() -> None:
    class Held:
        pass

    threads = SideThreads(2, "test-owner")
    held = Held()
    threads.submit(lambda held=held: None).result()  # type: ignore[misc]
    deadline = time.monotonic() + 10
    while sys.getrefcount(held) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sys.getrefcount(held) == 2
    del threads
    gc.collect()
    while any(thread.name == "test-owner" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Interrupt(BaseException):
    """Raised at an operation of Python code, as Ctrl-C is."""


def interrupted_at(number: int, act: Any) -> bool:
    """Calls a function, and raises Interrupt before the operation of this number in it and what it
    calls; returns whether it came so far."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == number:
                sys.settrace(None)
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        act()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


class Caller:
    """One thread beside this one, and a way to use it."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.threads = SideThreads(1, "test")
        self.flag = Flag()
        self.num_made = 0
        self.task = Task(self.make)
        if way == "result":
            self.threads.give(self.task)

    def make(self) -> None:
        self.num_made += 1

    def act(self) -> None:
        if self.way == "submit":
            self.threads.submit(self.make).result()
        elif self.way == "give":
            self.threads.give(self.task).wait()
        elif self.way == "result":
            self.task.result()
        elif self.way == "cancel":
            self.task.cancel()
        elif self.way == "flag":
            self.flag.set()
            self.flag.wait()
        else:
            self.threads.close()

    def go_on(self) -> None:
        """As a program does after the interrupt."""
        if self.way in ("give", "cancel") and not self.task.cancel():
            self.task.wait()
        if self.way == "flag":
            self.flag.set()
            self.flag.wait()
        if self.way != "close":
            assert self.threads.submit(lambda: 7).result() == 7
        self.threads.close()
        assert self.num_made <= 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["submit", "give", "result", "cancel", "flag", "close"])
def test_an_interrupt_at_any_operation_leaves_threads_that_go_on(way: str) -> None:
    for number in range(1, 400):
        caller = Caller(way)
        was_reached = interrupted_at(number, caller.act)
        caller.go_on()
        if not was_reached:
            assert number > 3
            return
    pytest.fail("no call came to its end")


def test_a_thread_that_cannot_start_is_told() -> None:
    thread = threading.Thread(target=lambda: None)
    side_threads.start_thread(thread)
    thread.join()
    with pytest.raises(RuntimeError, match="once"):
        side_threads.start_thread(thread)
