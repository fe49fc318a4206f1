"""Does a Move end once, in order, for everybody who waits, and say what went wrong?"""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiermem.swap.base.native import (
    BACKGROUND,
    READ,
    URGENT,
    WRITE,
    Answer,
    Fault,
    IoSettings,
    Op,
    TransferError,
)
from tiermem.swap.disk.queue import Queues, Recorder
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.move import Later, Move


class FakeQueue:
    """Answers a tag when the test says so, and writes down what was asked of it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.answers: dict[int, int] = {}  # tag: error
        self.answered = threading.Condition()
        self.recorder = Recorder()
        self.files = {3: "file"}

    def submit(self, ops: list[Op], priority: int) -> int:
        tag = ops[0].offset  # tests name a transfer by its offset
        self.log.append(("submit", tag))
        return tag

    def end(self, tag: int, error: int = 0) -> None:
        with self.answered:
            self.answers[tag] = error
            self.answered.notify_all()

    def wait(self, tag: int, timeout_s: float | None = None) -> Answer | None:
        with self.answered:
            if timeout_s is None:
                self.log.append(("wait", tag))
                self.answered.wait_for(lambda: tag in self.answers)
            if tag not in self.answers:
                return None
            return Answer(self.answers.pop(tag), 3, READ, tag, 4096, 4096, 1, 2, 3)

    def cancel(self, tag: int) -> None:
        self.log.append(("cancel", tag))
        self.end(tag, errno.ECANCELED)

    def promote(self, tag: int) -> None:
        self.log.append(("promote", tag))


@pytest.fixture
def queue() -> FakeQueue:
    """No I/O: the test decides what ends and when."""
    return FakeQueue()


def move_of(
    queue: FakeQueue, tag: int, after: Move | None = None, ended: list[object] | None = None
) -> Move:
    def on_end(arrived: bool) -> None:
        if ended is not None:
            ended.append((tag, arrived))

    ops = [Op(READ, 3, 0, 4096, tag)]
    transfers = queue.submit(ops, 1) if after is None else Later(after, ops, 1)
    return Move(queue, transfers, f"bytes {tag}", f"move {tag}", on_end=on_end)  # type: ignore[arg-type]


# ---- the end -------------------------------------------------------------------------------------


def test_move_of_nothing_has_ended(queue: FakeQueue) -> None:
    ended: list[bool] = []
    move = Move(queue, None, "result", "nothing", on_end=ended.append)  # type: ignore[arg-type]
    assert move.is_done()
    assert move.wait() == "result"
    assert (ended, queue.log) == ([True], [])


def test_wait_returns_what_the_move_owns_again_and_again_and_ends_once(queue: FakeQueue) -> None:
    ended: list[object] = []
    move = move_of(queue, 1, ended=ended)
    assert not move.is_done()
    queue.end(1)
    assert [move.wait(), move.wait()] == ["bytes 1", "bytes 1"]
    assert ended == [(1, True)]
    assert queue.log == [("submit", 1)]


def test_error_is_raised_by_every_wait_as_a_new_exception(queue: FakeQueue) -> None:
    ended: list[object] = []
    move = move_of(queue, 1, ended=ended)
    queue.end(1, errno.EIO)
    raised = []
    for _ in range(2):
        with pytest.raises(
            TransferError, match="reading 4096 bytes at offset 1 failed: Input/output error"
        ) as failure:
            move.wait()
        raised.append(failure.value)
    assert (raised[0].errno, raised[0].filename, raised[0].offset, raised[0].length) == (
        errno.EIO,
        "file",
        1,
        4096,
    )
    assert raised[0] is not raised[1]
    assert move.is_done()
    assert move.has_failed
    assert not move.was_cancelled
    assert ended == [(1, False)]


def test_buffer_lives_as_long_as_the_move_is_under_way(queue: FakeQueue) -> None:
    class Buffer:
        pass

    buffer = Buffer()
    seen = weakref.ref(buffer)
    move = Move(queue, 1, buffer, "move")  # type: ignore[arg-type]
    del buffer
    gc.collect()
    assert seen() is not None
    queue.end(1)
    assert move.wait() is seen()


# ---- one after the other -------------------------------------------------------------------------


def test_follower_starts_when_its_predecessor_has_ended(queue: FakeQueue) -> None:
    ended: list[object] = []
    first = move_of(queue, 1, ended=ended)
    second = move_of(queue, 2, after=first, ended=ended)
    assert not second.is_done()
    assert queue.log == [("submit", 1)]
    queue.end(1)
    queue.end(2)
    assert second.wait() == "bytes 2"
    assert queue.log == [("submit", 1), ("submit", 2)]
    assert ended == [(1, True), (2, True)]


def test_waiting_for_a_chain_waits_in_order(queue: FakeQueue) -> None:
    first = move_of(queue, 1)
    third = move_of(queue, 3, after=move_of(queue, 2, after=first))
    waiting = threading.Thread(target=third.wait)
    waiting.start()
    for tag in (1, 2, 3):
        queue.end(tag)
    waiting.join()
    assert [tag for what, tag in queue.log if what == "submit"] == [1, 2, 3]
    assert third.is_done()


def test_look_at_a_follower_starts_it(queue: FakeQueue) -> None:
    first = move_of(queue, 1)
    second = move_of(queue, 2, after=first)
    queue.end(1)
    assert not second.is_done()
    assert queue.log == [("submit", 1), ("submit", 2)]
    second.cancel()


@pytest.mark.parametrize("is_known", [True, False])
def test_follower_of_a_failure_fails_with_it_and_moves_nothing(
    queue: FakeQueue, is_known: bool
) -> None:
    ended: list[object] = []
    first = move_of(queue, 1, ended=ended)
    queue.end(1, errno.ENOSPC)
    if is_known:
        assert first.is_done()
    second = move_of(queue, 2, after=first, ended=ended)
    for _ in range(2):
        with pytest.raises(TransferError) as failure:
            second.wait()
        assert (failure.value.errno, failure.value.offset) == (errno.ENOSPC, 1)
    assert ended == [(1, False), (2, False)]
    assert queue.log == [("submit", 1)]


def test_follower_that_cannot_be_submitted_fails(queue: FakeQueue) -> None:
    def refuse(ops: list[Op], priority: int) -> int:
        raise OSError(errno.ESHUTDOWN, "closing")

    ended: list[object] = []
    first = move_of(queue, 1)
    second = move_of(queue, 2, after=first, ended=ended)
    queue.end(1)
    queue.submit = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="'move 2' could not be started: closing"):
        second.wait()
    assert ended == [(2, False)]


# ---- cancelling and promoting --------------------------------------------------------------------


def test_cancelled_move_raises_and_ends_once(queue: FakeQueue) -> None:
    ended: list[object] = []
    move = move_of(queue, 1, ended=ended)
    move.cancel()
    move.cancel()
    with pytest.raises(OSError, match="at offset 1 failed: Operation canceled"):
        move.wait()
    assert move.was_cancelled
    assert ended == [(1, False)]


def test_cancelled_follower_leaves_its_predecessor_alone(queue: FakeQueue) -> None:
    first = move_of(queue, 1)
    second = move_of(queue, 2, after=first)
    second.cancel()
    with pytest.raises(OSError, match="cancelled before it started"):
        second.wait()
    assert not first.is_done()
    queue.end(1)
    assert first.wait() == "bytes 1"
    assert queue.log == [("submit", 1)]


def test_cancel_after_the_bytes_arrived_changes_nothing(queue: FakeQueue) -> None:
    move = move_of(queue, 1)
    queue.end(1)
    move.wait()
    move.cancel()
    assert move.wait() == "bytes 1"
    assert not move.was_cancelled


def test_cancel_ends_the_wait_of_another_thread(queue: FakeQueue) -> None:
    move = move_of(queue, 1)
    errors: list[int | None] = []

    def wait() -> None:
        try:
            move.wait()
        except OSError as error:
            errors.append(error.errno)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while ("wait", 1) not in queue.log:
        pass
    move.cancel()
    waiting.join()
    assert errors == [errno.ECANCELED]


def test_promoting_a_follower_promotes_what_it_waits_for(queue: FakeQueue) -> None:
    first = move_of(queue, 1)
    second = move_of(queue, 2, after=first)
    second.promote()
    assert queue.log == [("submit", 1), ("promote", 1)]
    queue.end(1)
    first.wait()
    first.promote()
    assert queue.log == [("submit", 1), ("promote", 1)]
    second.cancel()


# ---- through a real queue ------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A descriptor of 1 MiB, the bytes of block i all i."""
    path = tmp_path / "data"
    path.write_bytes(b"".join(bytes([i]) * 4096 for i in range(256)))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    yield fd
    os.close(fd)


def test_threads_that_wait_for_one_move_at_once_all_get_it(file: int) -> None:
    arena, queue = Arena(1 << 20), Queues({file: "data"}, IoSettings())
    buffer = arena.take(1 << 20).tensor
    results: list[object] = []
    for _ in range(50):
        ops = [Op(READ, file, buffer.data_ptr(), 1 << 20, 0)]
        move = Move(queue, queue.submit(ops), buffer, "all")
        threads = [
            threading.Thread(target=lambda move=move: results.append(move.wait())) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 200
    assert all(result is buffer for result in results)
    assert torch.equal(buffer[::4096], torch.arange(256, dtype=torch.uint8))
    queue.close()
    arena.close()


def test_events_tell_reads_from_writes_with_bytes_and_times(file: int) -> None:
    arena, queue = Arena(1 << 20), Queues({file: "data"}, IoSettings())
    buffer = arena.take(8192).tensor
    for kind in (WRITE, READ):
        tag = queue.submit([Op(kind, file, buffer.data_ptr(), 8192, 0)], BACKGROUND)
        Move(queue, tag, buffer, f"kind {kind}", is_write=kind == WRITE).wait()
    moved = [event for event in queue.recorder.events if event.lane != "wait"]
    assert [(e.lane, e.name, e.num_bytes) for e in moved] == [
        ("write", "kind 1", 8192),
        ("read", "kind 0", 8192),
    ]
    assert all(0 < e.start_ns <= e.end_ns for e in moved)
    queue.close()
    arena.close()


def test_error_of_a_transfer_names_path_offset_and_length(file: int, tmp_path: Path) -> None:
    arena = Arena(1 << 20)
    io = IoSettings(block_bytes=4096)
    queue = Queues({file: str(tmp_path / "data")}, io, faults=[Fault(2, "error", errno.EIO)])
    buffer = arena.take(16384).tensor
    move = Move(
        queue,
        queue.submit([Op(READ, file, buffer.data_ptr(), 16384, 8192)], URGENT),
        buffer,
        "move",
    )
    with pytest.raises(TransferError, match="see the kernel log") as failure:
        move.wait()
    error = failure.value
    assert (error.errno, error.filename, error.length) == (errno.EIO, str(tmp_path / "data"), 4096)
    assert error.offset in range(8192, 8192 + 16384, 4096)
    queue.close()
    arena.close()


def test_move_whose_queue_was_closed_says_so(file: int) -> None:
    arena, queue = Arena(1 << 20), Queues({file: "data"}, IoSettings())
    buffer = arena.take(4096).tensor
    move = Move(
        queue, queue.submit([Op(READ, file, buffer.data_ptr(), 4096, 0)]), buffer, "'layers.3'"
    )
    queue.close()
    with pytest.raises(OSError, match="this I/O queue is closed"):
        move.wait()
    arena.close()
