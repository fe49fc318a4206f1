"""Move: bytes on their way from slot to slot, as a value.

A Move owns the buffer of its bytes until they have arrived; `wait()` is the only way to learn that they have, and raises the
error if they have not. It may follow another move (`after`): a fetch of bytes that are still being written starts when the
write has ended, in the first thread that looks at it, and fails with the write's error.

    asked --(after has ended)--> moving --(looked at)--> arrived | failed | cancelled
"""

from __future__ import annotations

import contextlib
import copy
import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tiermem.swap.native import NORMAL, READ, URGENT, Answer
from tiermem.swap.queue import Queues, Transfers

_GLANCE_S = 1e-3  # for which one move is waited for while others may end


def wait_for_any(groups: Sequence[Sequence[Move]]) -> int:
    """Blocks until every move of a group has ended, well or not, and returns its index: of several the first.

    The first group's bytes are asked for urgently, as `wait` does. The others are looked at every millisecond: moves of
    several queues cannot be waited for together. What has failed raises in its own `wait`, not here.
    """
    start_ns = 0
    while True:
        for index, group in enumerate(groups):
            if all(move.is_done() for move in group):
                if start_ns:
                    end_ns = max(start_ns, *(move._answered_ns for move in group))
                    group[-1]._queue.recorder.add("wait", group[-1].name, start_ns, end_ns)
                return index
        start_ns = start_ns or time.monotonic_ns()
        for move in groups[0]:
            move._glance(_GLANCE_S if len(groups) > 1 else None)


class Move:
    """Transfers that end together. Safe to look at and to wait for from several threads.

    Args:
        queue: where they are submitted; must outlive the move. Its recorder receives the transfer's times and the time spent
            waiting.
        ops: the transfers, on one path or several; their memory is inside `owns`. None: nothing has to move.
        owns: what must stay alive until the end (slots, tensors).
        name: for events and errors.
        priority: urgent, normal or background.
        after: a move that must end first.
        on_end: called once, when the bytes have arrived or not (True: arrived), before any `wait` returns.
        check: called once, before that, when the bytes have arrived and the move is not cancelled; an error that it returns
            makes them as good as not arrived.
    """

    def __init__(
        self,
        queue: Queues,
        ops: Transfers,
        owns: Any,
        name: str,
        priority: int = NORMAL,
        after: Move | None = None,
        on_end: Callable[[bool], None] | None = None,
        check: Callable[[], OSError | None] | None = None,
    ) -> None:
        self.name = name
        self._queue = queue
        self._ops: Transfers = ops
        self._lane = "read" if not ops or ops[0].kind == READ else "write"
        self._owns = owns
        self._priority = priority
        self._after = after  # until this is submitted
        self._on_end = on_end
        self._check = check
        self._tag: int | None = None
        self._is_done = False
        self._answered_ns = 0  # when its end was looked at: what is done with the bytes then is not waiting
        self._failure: OSError | None = None  # `wait` raises a copy: one that was raised would keep its frames
        self._result: Any = owns
        self._lock = threading.Lock()  # held by the one thread that asks the queue; taken before a store's lock
        if not ops:
            self._end()
        elif after is None or (after.is_done() and not after.has_failed):
            self._tag, self._after = queue.submit(ops, priority), None

    def wait(self) -> Any:
        """Blocks until the bytes have arrived and returns what the move owns. Raises OSError; safe to call again."""
        if not self._is_done:
            with self._lock:
                self._wait()
        if self._failure is not None:
            raise copy.copy(self._failure)
        return self._result

    def outcome(self) -> OSError | None:
        """Blocks as `wait` and returns its error instead of raising it; None also when the move was cancelled."""
        try:
            self.wait()
        except OSError as error:
            return None if self.was_cancelled else error
        return None

    def is_done(self) -> bool:
        """Whether `wait` would return (or raise) at once; False while another thread waits. Never blocks for the disk.

        Starts a move whose predecessor has ended, and checks bytes that have come.
        """
        if self._is_done:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._is_done and self._start():
                self._ask(timeout_s=0.0)
            return self._is_done
        finally:
            self._lock.release()

    @property
    def has_failed(self) -> bool:
        """Whether the bytes are known not to have arrived; `wait` raises why."""
        return self._failure is not None

    @property
    def was_cancelled(self) -> bool:
        """Whether they have not arrived because of `cancel`."""
        return self._failure is not None and self._failure.errno == errno.ECANCELED

    @property
    def is_write(self) -> bool:
        """Whether the bytes go to the files."""
        return self._lane == "write"

    def promote(self) -> None:
        """Asks for these bytes before prefetches and write-backs."""
        if self._is_done or not self._lock.acquire(blocking=False):
            return  # another thread waits for it: it is urgent already
        try:
            self._priority = URGENT
            if self._after is not None:
                self._after.promote()
            elif self._tag is not None and not self._is_done:
                self._queue.promote(self._tag)
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """Drops what has not started and waits for the rest. Never raises OSError.

        `wait` raises ECANCELED afterwards, unless the bytes had arrived and need no check. What it follows is left alone.
        """
        if self._is_done:
            return
        self._drop()  # also when another thread holds the lock, waiting
        with self._lock:
            if self._is_done:
                return
            if self._check is not None:  # not worth the time now, and nobody may take the bytes for verified ones
                self._check = lambda: OSError(errno.ECANCELED, f"{self.name!r} was cancelled before it was verified")
            if self._tag is None:
                self._end(OSError(errno.ECANCELED, f"{self.name!r} was cancelled before it started"))
                return
            self._drop()
            self._ask(timeout_s=None)

    def _wait(self) -> None:
        if self._after is not None:
            with contextlib.suppress(OSError):  # its failure becomes this move's in _start
                self._after.wait()
        if self._is_done or not self._start():
            return
        self._ask(timeout_s=0.0)
        if not self._is_done:
            start_ns = time.monotonic_ns()
            self._ask(timeout_s=None)
            self._queue.recorder.add("wait", self.name, start_ns, self._answered_ns)

    def _glance(self, timeout_s: float | None) -> None:
        """Waits for at most that long (None: to the end) and records nothing."""
        if self._is_done or not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return
        try:
            if self._after is not None:
                self._after._glance(timeout_s)
            if not self._is_done and self._start():
                self._ask(timeout_s)
        finally:
            self._lock.release()

    def _start(self) -> bool:
        """Whether the transfers are with the queue. Submits them when the predecessor has ended well, ends if not."""
        after = self._after
        if after is None:
            return True
        if not after.is_done():
            return False
        if after.has_failed:
            self._end(after._failure)
            return False
        try:
            self._tag, self._after = self._queue.submit(self._ops, self._priority), None
        except OSError as error:
            self._end(OSError(error.errno or errno.EIO, f"{self.name!r} could not be started: {error.strerror}"))
            return False
        return True

    def _drop(self) -> None:
        if self._tag is not None:
            with contextlib.suppress(OSError):  # ENOENT: it has just been answered
                self._queue.cancel(self._tag)

    def _ask(self, timeout_s: float | None) -> None:
        assert self._tag is not None
        try:
            answer = self._queue.wait(self._tag, timeout_s)
        except OSError as error:
            self._end(OSError(error.errno or errno.EIO, f"{self.name!r} was under way: {error.strerror}"))
            return
        if answer is not None:
            self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        self._answered_ns = time.monotonic_ns()
        if answer.started_ns:
            self._queue.recorder.add(self._lane, self.name, answer.started_ns, answer.finished_ns, answer.num_bytes)
        self._end(self._queue.error_of(answer) or (self._check() if self._check is not None else None))

    def _end(self, failure: OSError | None = None) -> None:
        self._failure = failure
        self._answered_ns = self._answered_ns or time.monotonic_ns()
        self._ops, self._owns, self._after, self._check = (), None, None, None
        on_end, self._on_end = self._on_end, None
        if on_end:
            on_end(failure is None)
        self._is_done = True
