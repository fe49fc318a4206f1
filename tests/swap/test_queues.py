"""Is each path served by a queue of its own, and does a tag that lies on several paths still have
one end?"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiermem.swap.base.native import (
    READ,
    WRITE,
    Answer,
    Blocks,
    Fault,
    IoSettings,
    Op,
    TransferError,
    error_of,
)
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk import queue as queues_module
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.disk.queue import InFlight, Queues, Recorder, add_counters
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore

A, B = 30, 40  # descriptors; no file is touched


class FakeQueue:
    """Answers when the test says so, and writes down what was asked of it."""

    opened: dict[int, FakeQueue]
    refuses: dict[int, int]  # descriptor: errno of its submissions
    fails_to_open: int

    def __init__(self, *settings: object, files: dict[int, str], **options: object) -> None:
        (self.fd,) = files
        if self.fd == self.fails_to_open:
            raise OSError(errno.ENOMEM, "no ring")
        self.answers: dict[int, Answer] = {}
        self.opened[self.fd] = self
        self.log: list[tuple[Any, ...]] = []

    def new_tag(self) -> int:
        return 100 + len([what for what, *_ in self.log if what in ("submit", "blocks")])

    def new_answer(self) -> None:
        return None

    def submit(self, ops: list[Op], priority: int, tag: int) -> int:
        if self.fd in self.refuses:
            raise OSError(self.refuses[self.fd], "refused")
        self.log.append(("submit", [op.offset for op in ops], priority))
        return tag

    def submit_blocks(self, blocks: Blocks, priority: int, tag: int) -> int:
        self.log.append(("blocks", blocks.offsets.tolist(), blocks.length, priority))
        return tag

    def end(self, tag: int = 100, error: int = 0, times: tuple[int, int, int] = (1, 2, 3)) -> None:
        self.answers[tag] = Answer(error, self.fd, READ, 4096 * self.fd, 512, 4096, *times)

    def wait(self, tag: int, timeout_s: float | None, into: None) -> Answer | None:
        self.log.append(("wait", tag, timeout_s))
        assert timeout_s is not None or tag in self.answers  # else the test would hang
        return self.answers.pop(tag, None)

    def promote(self, tag: int, priority: int) -> None:
        self.log.append(("promote", tag))

    def cancel(self, tag: int) -> None:
        self.log.append(("cancel", tag))
        self.end(tag, errno.ECANCELED)

    def close(self) -> int:
        self.log.append(("close",))
        return 0


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeQueue]:
    """The queues that are opened, by descriptor."""
    opened: dict[int, FakeQueue] = {}
    monkeypatch.setattr(FakeQueue, "opened", opened, raising=False)
    monkeypatch.setattr(FakeQueue, "refuses", {}, raising=False)
    monkeypatch.setattr(FakeQueue, "fails_to_open", -1, raising=False)
    monkeypatch.setattr(queues_module, "Queue", FakeQueue)
    return opened


def ops_on(*places: tuple[int, int]) -> list[Op]:
    return [Op(READ, fd, 0, 4096, offset) for fd, offset in places]


# ---- routing -------------------------------------------------------------------------------------


def test_transfers_go_to_the_queue_of_their_file_in_order(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    queues.submit(ops_on((B, 1), (A, 2), (B, 3)), 2)
    assert fakes[A].log == [("submit", [2], 2)]
    assert fakes[B].log == [("submit", [1, 3], 2)]


def test_blocks_go_to_the_queue_of_their_file_at_once(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    offsets = np.array([8192, 0], np.int64)
    queues.submit([Blocks(READ, B, offsets, offsets, 4096)], 0)
    assert (fakes[A].log, fakes[B].log) == ([], [("blocks", [8192, 0], 4096, 0)])


def test_waiting_for_one_path_asks_nothing_of_the_other(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    stuck, ready = queues.submit(ops_on((A, 1))), queues.submit(ops_on((B, 2)))
    fakes[B].end()
    assert queues.wait(ready) is not None
    assert fakes[A].log == [("submit", [1], 1)]
    assert queues.wait(stuck, 0.0) is None


def test_file_without_a_queue_is_refused(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a"}, IoSettings())
    with pytest.raises(OSError, match="no queue was opened for this file") as refusal:
        queues.submit(ops_on((B, 1)))
    assert refusal.value.errno == errno.EBADF
    queues.close()
    with pytest.raises(OSError, match="this I/O queue is closed"):
        queues.submit(ops_on((A, 1)))


# ---- one end -------------------------------------------------------------------------------------


def test_tag_on_two_paths_is_answered_when_both_have_ended(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    tag = queues.submit(ops_on((A, 1), (B, 2)))
    assert queues.wait(tag, 0.0) is None
    fakes[B].end(times=(4, 5, 9))
    assert queues.wait(tag, 0.0) is None
    fakes[A].end(times=(3, 6, 8))
    answer = queues.wait(tag, 0.0)
    assert answer is not None
    assert (answer.error, answer.num_bytes) == (0, 8192)
    assert (answer.submitted_ns, answer.started_ns, answer.finished_ns) == (3, 5, 9)
    assert queues.wait(tag) == answer  # it may be asked again until `end`
    queues.end(tag)
    with pytest.raises(OSError, match="was answered already") as refusal:
        queues.wait(tag)
    assert refusal.value.errno == errno.ENOENT


def test_start_of_a_part_that_never_started_does_not_count(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    tag = queues.submit(ops_on((A, 1), (B, 2)))
    fakes[A].end(error=errno.ECANCELED, times=(1, 0, 2))
    fakes[B].end(times=(1, 7, 9))
    answer = queues.wait(tag)
    assert answer is not None
    assert (answer.started_ns, answer.error) == (7, errno.ECANCELED)


def test_whoever_waits_raises_every_part(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    tag = queues.submit(ops_on((A, 1), (B, 2)))
    queues.wait(tag, 0.0)
    assert ("promote", 100) not in fakes[B].log
    fakes[A].end()
    fakes[B].end()
    queues.wait(tag)
    assert fakes[B].log.index(("promote", 100)) < fakes[B].log.index(("wait", 100, None))


def test_promoting_reaches_every_part_that_goes_on(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    tag = queues.submit(ops_on((A, 1), (B, 2)))
    fakes[A].end()
    assert queues.wait(tag, 0.0) is None
    queues.promote(tag)
    assert ("promote", 100) not in fakes[A].log
    assert ("promote", 100) in fakes[B].log


@pytest.mark.parametrize(
    ("errors", "kept"),
    [((errno.EIO, 0), A), ((0, errno.EIO), B), ((errno.ECANCELED, errno.EIO), B)],
)
def test_error_of_the_disk_is_kept_and_names_its_file(
    fakes: dict[int, FakeQueue], errors: tuple[int, int], kept: int
) -> None:
    queues = Queues({A: "file a", B: "file b"}, IoSettings())
    tag = queues.submit(ops_on((A, 1), (B, 2)))
    for fd, error in zip((A, B), errors, strict=True):
        fakes[fd].end(error=error)
    answer = queues.wait(tag)
    assert answer is not None
    error = error_of(answer, queues.files)
    assert isinstance(error, TransferError)
    assert (error.errno, error.offset) == (errno.EIO, 4096 * kept)
    assert error.filename == {A: "file a", B: "file b"}[kept]


def test_cancelling_drops_every_part_that_goes_on(fakes: dict[int, FakeQueue]) -> None:
    queues = Queues({A: "a", B: "b"}, IoSettings())
    tag = queues.submit(ops_on((A, 1), (B, 2)))
    fakes[A].end()
    queues.wait(tag, 0.0)
    queues.cancel(tag)
    answer = queues.wait(tag)
    assert answer is not None
    assert answer.error == errno.ECANCELED
    assert ("cancel", 100) not in fakes[A].log


def test_refusal_of_one_path_ends_what_another_has_got(
    fakes: dict[int, FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeQueue, "refuses", {B: errno.ENOMEM})
    queues = Queues({A: "a", B: "b"}, IoSettings())
    with pytest.raises(OSError, match="refused"):
        queues.submit(ops_on((A, 1), (B, 2)))
    assert fakes[A].log == [("submit", [1], 1), ("cancel", 100), ("wait", 100, None)]


def test_queue_that_cannot_be_opened_names_its_path_and_leaves_none(
    fakes: dict[int, FakeQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeQueue, "fails_to_open", B)
    with pytest.raises(OSError, match="no ring") as refusal:
        Queues({A: "/mnt/a", B: "/mnt/b"}, IoSettings())
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOMEM, "/mnt/b")
    assert fakes[A].log == [("close",)]


# ---- pieces of a stream --------------------------------------------------------------------------


def test_the_oldest_piece_ends_before_one_too_many_is_started_and_all_end_in_order() -> None:
    ended: list[int] = []
    with InFlight(3) as in_flight:
        for piece in range(5):
            assert len(ended) == max(0, piece - 2)
            in_flight.add(lambda piece=piece: ended.append(piece))
    assert ended == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fails", [{0}, {2, 3}, {4}])
def test_every_piece_ends_also_after_an_error_and_the_first_error_is_raised(
    fails: set[int],
) -> None:
    ended: list[int] = []
    started: list[int] = []

    def end(piece: int) -> None:
        ended.append(piece)
        if piece in fails:
            raise OSError(errno.EIO, f"piece {piece}")

    def stream() -> None:
        with InFlight(2) as in_flight:
            for piece in range(5):
                started.append(piece)
                in_flight.add(lambda piece=piece: end(piece))

    with pytest.raises(OSError, match=f"piece {min(fails)}"):
        stream()
    assert sorted(set(ended)) == started


def test_an_error_of_the_caller_is_not_replaced_by_that_of_a_piece() -> None:
    ended: list[int] = []

    def end() -> None:
        ended.append(1)
        raise OSError(errno.EIO, "piece")

    def stream() -> None:
        with InFlight(2) as in_flight:
            in_flight.add(end)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream()
    assert ended == [1]


# ---- real queues ---------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[int, str]]:
    """Two files of 256 KiB, all bytes of the first 1, of the second 2."""
    opened = {}
    for value in (1, 2):
        path = tmp_path / f"file {value}"
        path.write_bytes(bytes([value]) * 262144)
        opened[os.open(path, os.O_RDWR | os.O_DIRECT)] = str(path)
    yield opened
    for fd in opened:
        os.close(fd)


def test_move_over_two_paths_brings_the_bytes_of_both(files: dict[int, str], engine: str) -> None:
    arena, recorder = Arena(1 << 20), Recorder()
    queues = Queues(
        files,
        IoSettings(engine, block_bytes=4096, depth=4),
        arena.regions,
        recorder=recorder,
    )
    buffer = arena.take(524288).tensor
    first, second = files
    half = buffer.data_ptr() + 262144
    ops = [Op(READ, second, half, 262144, 0), Op(READ, first, half - 262144, 262144, 0)]
    move = Move(queues, queues.submit(ops), buffer, "x")
    assert torch.equal(move.wait()[:262144], torch.ones(262144, dtype=torch.uint8))
    assert torch.equal(buffer[262144:], torch.full((262144,), 2, dtype=torch.uint8))
    (event,) = (event for event in recorder.events if event.lane == "read")
    assert event.num_bytes == 524288
    assert [counters.read_bytes for counters in queues.counters_by_path()] == [262144, 262144]
    assert add_counters(queues.counters_by_path()).blocks == 128
    assert queues.latencies(READ).sum() == 128
    assert queues.latencies(WRITE).sum() == 0
    assert queues.engine == engine
    queues.close()
    arena.close()


def test_settings_reach_every_queue(files: dict[int, str]) -> None:
    queues = Queues(
        files, IoSettings(block_bytes=4096, depth=64, single_submit=True, overlap_events=False)
    )
    arena = Arena(1 << 20)
    buffer = arena.take(262144).tensor
    for fd in files:
        Move(
            queues, queues.submit([Op(READ, fd, buffer.data_ptr(), 262144, 0)]), buffer, "x"
        ).wait()
    assert all(
        counters.kernel_entries >= counters.blocks == 64 for counters in queues.counters_by_path()
    )
    queues.close()
    arena.close()


@pytest.mark.parametrize("kind", ["fetch", "read"])
def test_failing_path_leaves_the_others_alone(
    make_store: Callable[..., TensorStore],
    two_paths: list[NvmePath],
    pattern: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    opened: list[object] = []

    def open_one(*settings: Any, **options: Any) -> object:
        options["faults"] = [Fault(0, "error", errno.EIO, repeat=1 << 20)] * (len(opened) == 1)
        opened.append(_REAL(*settings, **options))
        return opened[-1]

    monkeypatch.setattr(queues_module, "Queue", open_one)
    store = make_store(paths=two_paths)
    moves = [store.put(f"x{i}", pattern(100_000, seed=i), Tier.NVME) for i in range(6)]
    failed = [move.name for move in moves if isinstance(_error(move), TransferError)]
    assert failed == ["x1", "x3", "x5"]  # dealt in turns
    for i in (0, 2, 4):
        assert torch.equal(store.fetch(f"x{i}").wait(), pattern(100_000, seed=i))
        store.release(f"x{i}")
    if kind == "read":  # one move that touches both fails, and names the one that did
        buffer = store.arena.take(8192).tensor
        with pytest.raises(TransferError) as failure:
            store.read([("x0", 0, buffer[:4096]), ("x1", 0, buffer[4096:])], "both").wait()
        assert str(failure.value.filename).startswith(str(two_paths[1].path))
    with pytest.raises(TransferError):
        store.flush()
    assert torch.equal(store.fetch("x2").wait(), pattern(100_000, seed=2))


_REAL = queues_module.Queue


def _error(move: Move) -> OSError | None:
    try:
        move.wait()
    except OSError as error:
        return error
    return None
