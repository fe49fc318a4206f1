"""Move: transfers in flight, as a value.

A Move owns the buffers of its bytes until they have arrived. `wait()` returns when they have, and
raises the error if they have not. A Move may follow another one (`Later`): a fetch of bytes that
are still being written starts when that write has ended, in the first thread that calls one of its
methods. If the write failed, the fetch fails with the write's error.

A DeviceCopy is the Move of a fetch to an accelerator: its `wait` returns a copy there, until
`release` ends it.

    later --(the other move has ended)--> moving --(a thread asks the queue)--> arrived | failed | cancelled
"""

from __future__ import annotations

import contextlib
import copy
import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tiermem.swap.base.native import URGENT, Answer, error_of
from tiermem.swap.disk.queue import Queues, Transfers
from tiermem.swap.memory.accelerator import current_stream, is_accelerator, record

_GLANCE_S = 1e-3  # seconds to wait for one move before looking at the others


def wait_for_any(moves: Sequence[Move]) -> None:
    """Blocks until one of the moves has ended, with or without error.

    The first one's transfers become urgent, as in `wait`. The others are checked every millisecond,
    because one call cannot wait for several queues. Errors are raised by each move's own `wait`,
    not here.
    """
    start_ns = 0
    while True:
        for move in moves:
            if move.is_done():
                if start_ns:
                    move._queue.recorder.add(
                        "wait", move.name, start_ns, max(start_ns, move._answered_ns)
                    )
                return
        start_ns = start_ns or time.monotonic_ns()
        moves[0]._glance(_GLANCE_S if len(moves) > 1 else None)


class Later(NamedTuple):
    """Transfers that are submitted when another move has ended."""

    after: Move
    ops: Transfers
    priority: int


class Move:
    """One or several transfers that end together. Thread-safe.

    Args:
        queue: the queues that have the transfers; must outlive the move. Their recorder receives
            the times of transfers and waits.
        transfers: their tag in the queues, or those to submit later; their memory is inside `owns`.
            None: there are none, and the move is done at once.
        owns: objects that must stay alive until the end (slots, tensors); `wait` returns it.
        name: the name in events and errors.
        is_write: whether the transfers are writes.
        on_end: called with whether the bytes have arrived, before any `wait` returns: once, and
            again after an interrupt.
        check: called once before on_end, if the bytes have arrived and the move is not cancelled.
            If it returns an error, the move fails with that error.
    """

    def __init__(
        self,
        queue: Queues,
        transfers: int | Later | None,
        owns: Any,
        name: str,
        is_write: bool = False,
        on_end: Callable[[bool], None] | None = None,
        check: Callable[[], OSError | None] | None = None,
    ) -> None:
        self.name = name
        self.is_write = is_write
        self._queue = queue
        self._tag = transfers if isinstance(transfers, int) else None
        # None once they are submitted
        self._later = transfers if isinstance(transfers, Later) else None
        self._on_end = on_end
        self._check = check
        self._is_done = False
        # time of the queue's answer; a check after it does not count as waiting
        self._answered_ns = 0
        # `wait` raises a copy, because a raised exception keeps its frames alive
        self._failure: OSError | None = None
        self._result = owns
        # Held by the thread that asks the queue; taken before the store's lock. An interrupt may
        # leave it to this thread.
        self._lock = threading.RLock()
        if transfers is None:
            self._end()

    def wait(self) -> Any:
        """Blocks until the bytes have arrived and returns what the move owns. Raises OSError; safe
        to call again."""
        if not self._is_done:
            with self._lock:
                self._wait()
        if self._failure is not None:
            raise copy.copy(self._failure)
        return self._result

    def outcome(self) -> OSError | None:
        """Blocks as `wait` and returns its error instead of raising it; None also when the move was
        cancelled."""
        try:
            self.wait()
        except OSError as error:
            return None if self.was_cancelled else error
        return None

    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once; False while another thread waits. Does not
        wait for the disk.

        It submits the transfers if the preceding move has ended, and runs `check` if the bytes have
        arrived.
        """
        self._glance(0.0)
        return self._is_done

    @property
    def has_failed(self) -> bool:
        """Whether the move has failed; `wait` raises the error."""
        return self._failure is not None

    @property
    def was_cancelled(self) -> bool:
        """Whether the move has failed because of `cancel`."""
        return self._failure is not None and self._failure.errno == errno.ECANCELED

    def promote(self) -> None:
        """Makes these transfers urgent: before prefetches and write-backs. Does not block."""
        if self._is_done or not self._lock.acquire(blocking=False):
            return  # another thread waits for it, so it is urgent already
        try:
            if self._later is not None:
                self._later = self._later._replace(priority=URGENT)
                self._later.after.promote()
            elif self._tag is not None and not self._is_done:
                self._queue.promote(self._tag)
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """Drops transfers that have not started and waits for the others. Never raises OSError.

        Afterwards `wait` raises ECANCELED, unless the bytes had arrived and need no check. The
        preceding move continues.
        """
        if self._is_done:
            return
        self._drop()  # also when another thread holds the lock, waiting
        with self._lock:
            if self._is_done:
                return
            # skip the check, and fail, so that no caller uses unverified bytes
            if self._check is not None:
                self._check = lambda: OSError(
                    errno.ECANCELED, f"{self.name!r} was cancelled before it was verified"
                )
            if self._tag is None:
                self._end(
                    OSError(errno.ECANCELED, f"{self.name!r} was cancelled before it started")
                )
                return
            self._drop()
            self._ask(timeout_s=None)

    def _wait(self) -> None:
        if self._later is not None:
            with contextlib.suppress(OSError):  # its failure becomes this move's in _start
                self._later.after.wait()
        if self._is_done or not self._start():
            return
        self._ask(timeout_s=0.0)
        if not self._is_done:
            start_ns = time.monotonic_ns()
            self._ask(timeout_s=None)
            self._queue.recorder.add("wait", self.name, start_ns, self._answered_ns)

    def _glance(self, timeout_s: float | None) -> None:
        """Waits for at most timeout_s seconds (None: to the end) and records no event."""
        if self._is_done or not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return
        try:
            if self._later is not None:
                self._later.after._glance(timeout_s)
            if not self._is_done and self._start():
                self._ask(timeout_s)
        finally:
            self._lock.release()

    def _start(self) -> bool:
        """Whether the transfers are submitted. Submits them if the preceding move succeeded; fails
        with its error if not."""
        if self._later is None:
            return True
        after, ops, priority = self._later
        if not after.is_done():
            return False
        if after.has_failed:
            self._end(after._failure)
            return False
        try:
            self._tag = self._queue.submit(ops, priority)
            self._later = None
        except OSError as error:
            self._end(
                OSError(
                    error.errno or errno.EIO,
                    f"{self.name!r} could not be started: {error.strerror}",
                )
            )
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
            self._end(
                OSError(error.errno or errno.EIO, f"{self.name!r} was under way: {error.strerror}")
            )
            return
        if answer is not None:
            self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        self._answered_ns = time.monotonic_ns()
        if answer.started_ns:
            self._queue.recorder.add(
                "write" if self.is_write else "read",
                self.name,
                answer.started_ns,
                answer.finished_ns,
                answer.num_bytes,
            )
        failure: OSError | None = error_of(answer, self._queue.files)
        if failure is None and self._check is not None:
            try:
                failure = self._check()
            except OSError as error:  # no memory to sum in: told to whoever waits
                failure = error
        self._end(failure)

    def _end(self, failure: OSError | None = None) -> None:
        """Ends the move. After an interrupt the queue is asked again, and this is done again."""
        self._failure = failure
        self._answered_ns = self._answered_ns or time.monotonic_ns()
        if self._on_end is not None:
            self._on_end(failure is None)
        self._on_end = None
        self._is_done = True
        self._later = self._check = None
        if self._tag is not None:
            self._queue.end(self._tag)


class DeviceCopy(Move):
    """A tensor on its way from its home, through HOST memory, to the device.

    The copy has memory of torch's allocator, or is HOST memory itself where the device is the CPU.

    Args:
        move: the fetch into HOST memory.
        device: the device of the copy.
    """

    def __init__(self, move: Move, device: torch.device) -> None:
        super().__init__(move._queue, None, None, move.name)
        self._move = move
        self._device = device
        self._host: torch.Tensor | None = None  # the tensor in HOST memory
        self._copy: torch.Tensor | None = None
        self._copied: torch.Event | None = None

    def wait(self) -> torch.Tensor:
        """Blocks until the bytes are in HOST memory; returns the copy, which the current stream
        fills. Raises OSError."""
        if self._copy is None:
            self._host = self._copy = self._move.wait()
            if is_accelerator(self._device):
                self._copy = torch.empty_like(self._host, device=self._device)
                self._copy.copy_(self._host, non_blocking=True)
                self._copied = record(current_stream(self._device))
        return self._copy

    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._move.is_done()

    @property
    def has_failed(self) -> bool:
        """Whether the fetch has failed; `wait` raises the error."""
        return self._move.has_failed

    @property
    def was_cancelled(self) -> bool:
        """Whether the fetch has failed because of `cancel`."""
        return self._move.was_cancelled

    def promote(self) -> None:
        """Makes the fetch urgent. Does not block."""
        self._move.promote()

    def cancel(self) -> None:
        """Cancels the fetch. Never raises OSError."""
        self._move.cancel()

    def end(self, is_dirty: bool) -> None:
        """Ends the copy: HOST memory may be given away afterwards. With `is_dirty` it has the
        copy's bytes. Blocks."""
        if self._copied is None:
            return
        assert self._host is not None and self._copy is not None
        if is_dirty:
            self._host.copy_(self._copy)
        elif not self._copied.query():
            self._copied.synchronize()
        self._copy = self._copied = None
