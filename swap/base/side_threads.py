"""SideThreads: threads beside the caller's, with which an interrupt of the caller does no harm.

An interrupt is raised between two operations of Python code. The standard library's pools, futures,
events and conditions are Python code around locks: a caller that is interrupted there leaves their
lock held, and whoever needs it next waits for ever. Here threads meet through locks and queues of C
alone, inside which no interrupt is raised.

    Flag          is set once; threads wait for it
    Result        is set once, with a value or an error
    Task          a call that another thread makes, unless it is cancelled before that
    SideThreads   threads that make calls, in the order given
"""

from __future__ import annotations

import _thread
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

R = TypeVar("R")


class Flag:
    """Is set once, by any thread."""

    def __init__(self) -> None:
        self.is_set = False
        self._unset = threading.Lock()  # held until it is set
        self._unset.acquire()

    def set(self) -> None:
        """Sets it; twice does nothing. Does not block."""
        self.is_set = True
        with contextlib.suppress(RuntimeError):  # it was set before
            self._unset.release()

    def wait(self) -> None:
        """Blocks until it is set."""
        while not self.is_set:
            with self._unset:
                pass

    def wait_for(self, seconds: float) -> bool:
        """Blocks until it is set, or so long; returns whether it is set. For threads that no
        interrupt reaches."""
        if not self.is_set and self._unset.acquire(timeout=seconds):
            self.set()  # for those who wait as well
        return self.is_set


class Result(Flag, Generic[R]):
    """What becomes of a piece of work."""

    def __init__(self) -> None:
        super().__init__()
        self._value: R | None = None
        self.error: BaseException | None = None

    def end(self, value: R | None = None, error: BaseException | None = None) -> None:
        """Sets what has become of it. Does not block."""
        self._value = value
        self.error = error
        self.set()

    def result(self) -> R:
        """Blocks until the work has ended; returns its value. Raises its error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return cast(R, self._value)


class Task(Result[R]):
    """A call that another thread makes."""

    def __init__(self, act: Callable[[], R]) -> None:
        super().__init__()
        self._act: Callable[[], R] | None = act
        self._fate: dict[str, bool] = {}  # whether it is made: who sets it first decides

    def run(self) -> None:
        """Makes the call, unless it was cancelled. Raises nothing."""
        act = self._act
        self._act = None  # what it holds ends with the call
        if not self._fate.setdefault("is made", True):
            self.set()
            return
        assert act is not None
        try:
            self._value = act()
        except BaseException as error:
            self.error = error
        del act
        self.set()

    def cancel(self) -> bool:
        """Whether the call has not begun; then it never does, and `wait` returns. Does not
        block."""
        if self._fate.setdefault("is made", False):
            return False
        self.is_set = True
        return True


class SideThreads:
    """Threads that make calls, in the order given; one thread makes them one after the other. They
    end with this object.

    begins: called by each thread first.
    """

    def __init__(self, count: int, name: str, begins: Callable[[], object] = lambda: None) -> None:
        self._tasks = queue.SimpleQueue[Task[Any] | None]()
        weakref.finalize(self, _end, self._tasks, count)
        self._threads = [
            threading.Thread(target=_serve, args=(self._tasks, begins), name=name, daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            start_thread(thread)

    def submit(self, act: Callable[[], R]) -> Task[R]:
        """Gives the threads a call. Does not block."""
        return self.give(Task(act))

    def give(self, task: Task[R]) -> Task[R]:
        """Gives the threads a task that is made before, so that an interrupt cannot lose it."""
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """Ends the threads when all calls are made. Blocks; twice does nothing."""
        _end(self._tasks, len(self._threads))
        for thread in self._threads:
            thread.join()


def _serve(tasks: queue.SimpleQueue[Task[Any] | None], begins: Callable[[], object]) -> None:
    """What a thread does: it holds nothing of a task that has ended. Where `begins` fails, its
    error becomes that of every task."""
    first = Task(begins)
    first.run()
    while (task := tasks.get()) is not None:
        if first.error is None:
            task.run()
        else:
            task.end(error=first.error)
        del task


def _end(tasks: queue.SimpleQueue[Task[Any] | None], count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread: `Thread.start` waits for it in Python code, so another thread calls that.
    Blocks until it has started. Raises RuntimeError where none can be."""
    task = Task(thread.start)
    _thread.start_new_thread(task.run, ())
    try:
        task.result()
    finally:
        task.wait()  # also after an interrupt: an unstarted thread cannot be joined
