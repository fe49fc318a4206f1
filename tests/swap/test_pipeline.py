"""In which order does the pipeline read, compute and write, and where is every buffer when something fails?"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tiermem.swap.arena import Arena, Pool, Slot
from tiermem.swap.move import Move
from tiermem.swap.native import READ, Answer, IoSettings, TransferError
from tiermem.swap.pipeline import run_pipeline
from tiermem.swap.queue import Queues, Recorder
from tiermem.swap.store import TensorStore
from tiermem.swap.tier import Tier


class FakeQueue(Queues):
    """One per transfer, which writes down its end.

    That is when somebody waits for it, or has looked at it often; or, fast, at once; or, slow, when it is told to.
    """

    def __init__(self, log: list[str], name: str, is_fast: bool, is_slow: bool, fails: bool) -> None:
        self.recorder = Recorder()
        self._log = log
        self.name = name
        self._is_fast = is_fast
        self.is_slow = is_slow
        self._error = errno.EIO if fails else 0
        self._num_looks = 0

    def submit(self, ops: object, priority: int = 0) -> int:
        return 1

    def wait(self, tag: int, timeout_s: float | None = None) -> Answer | None:
        self._num_looks += 1
        if self._error != errno.ECANCELED:
            if self.is_slow:
                assert timeout_s is not None and self._num_looks < 500, f"{self.name} is waited for and never ends"
                return None
            if timeout_s == 0.0 and not self._is_fast and self._num_looks < 10:
                return None
            self._log.append(f"{self.name} ended")
        return Answer(self._error, 0, READ, 0, 4096, 4096, 1, 1, 2)

    def error_of(self, answer: Answer) -> TransferError | None:
        return TransferError(answer.error, READ, self.name, 0, 4096) if answer.error else None

    def promote(self, tag: int, priority: int = 0) -> None:
        pass

    def cancel(self, tag: int) -> None:
        if self._error != errno.ECANCELED:
            self._log.append(f"{self.name} cancelled")
        self._error = errno.ECANCELED


class Work:
    """Writes down what is asked.

    `fail_at` names the one step that fails, "" none; what is in `slow` ends when the tile it names has been computed.
    """

    def __init__(
        self,
        fail_at: str = "",
        writes_are_fast: bool = False,
        reads_are_fast: bool = False,
        slow: dict[str, int] | None = None,
    ) -> None:
        self.log: list[str] = []
        self.slot_of: dict[int, Slot] = {}
        self._fail_at = fail_at
        self._is_fast = {"read": reads_are_fast, "write": writes_are_fast}
        self._slow = slow or {}
        self._queues: list[FakeQueue] = []

    def read(self, tile: int, slot: Slot) -> Move:
        assert slot not in self.slot_of.values()
        self.slot_of[tile] = slot
        return self._start(f"read {tile}")

    def compute(self, tile: int, slot: Slot) -> None:
        assert self.slot_of[tile] is slot
        self.log.append(f"compute {tile}")
        if self._fail_at == f"compute {tile}":
            raise ValueError(self._fail_at)
        for queue in self._queues:
            if self._slow.get(queue.name) == tile:
                queue.is_slow = False

    def write(self, tile: int, slot: Slot) -> Move:
        del self.slot_of[tile]  # from here on only the pipeline looks after it
        return self._start(f"write {tile}")

    def computed(self) -> list[int]:
        return [int(step.split()[1]) for step in self.log if step.startswith("compute")]

    def _start(self, name: str) -> Move:
        self.log.append(name)
        if self._fail_at == f"{name} starts":
            raise ValueError(self._fail_at)
        kind = name.split()[0]
        self._queues.append(
            FakeQueue(self.log, name, self._is_fast[kind], name in self._slow, fails=self._fail_at == name)
        )
        return Move(self._queues[-1], self._queues[-1].submit([], 1), None, name, is_write=kind == "write")


@pytest.fixture
def make_pool() -> Iterator[Callable[[int], Pool]]:
    """make_pool(count): buffers of one page."""
    arena = Arena(64 * 4096)
    yield lambda count: Pool(arena, 4096, count, "tiles")
    arena.close()


def num_free(pool: Pool) -> int:
    slots = []
    while (slot := pool.take()) is not None:
        slots.append(slot)
    for slot in slots:
        pool.give_back(slot)
    return len({slot.offset for slot in slots})


# ---- the order -----------------------------------------------------------------------------------------------------------


def test_two_buffers_read_ahead_and_write_behind(make_pool: Callable[[int], Pool]) -> None:
    work, pool = Work(), make_pool(2)
    run_pipeline(range(3), work, pool)
    assert work.log == [
        "read 0",
        "read 1",
        "read 0 ended",
        "compute 0",
        "write 0",
        "read 1 ended",  # no buffer is free, but one is coming
        "compute 1",
        "write 1",
        "write 0 ended",  # nothing is coming: the oldest write must end
        "read 2",
        "read 2 ended",
        "compute 2",
        "write 2",
        "write 1 ended",
        "write 2 ended",
    ]
    assert num_free(pool) == 2


def test_write_that_has_ended_by_itself_frees_its_buffer_for_the_next_read(make_pool: Callable[[int], Pool]) -> None:
    work = Work(writes_are_fast=True)
    run_pipeline(range(3), work, make_pool(2))
    assert [step for step in work.log if "ended" not in step] == [
        "read 0",
        "read 1",
        "compute 0",
        "write 0",
        "read 2",
        "compute 1",
        "write 1",
        "compute 2",
        "write 2",
    ]


def test_without_read_ahead_the_next_read_starts_behind_the_computation(make_pool: Callable[[int], Pool]) -> None:
    work = Work()
    run_pipeline(range(2), work, make_pool(3), read_ahead=False)
    assert work.log == [
        "read 0",
        "read 0 ended",
        "compute 0",
        "write 0",
        "read 1",
        "read 1 ended",
        "compute 1",
        "write 1",
        "write 0 ended",
        "write 1 ended",
    ]


def test_without_write_behind_each_write_ends_before_the_next_tile(make_pool: Callable[[int], Pool]) -> None:
    work = Work()
    run_pipeline(range(2), work, make_pool(3), write_behind=False)
    assert work.log == [
        "read 0",
        "read 1",
        "read 0 ended",
        "compute 0",
        "write 0",
        "write 0 ended",
        "read 1 ended",
        "compute 1",
        "write 1",
        "write 1 ended",
    ]


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_tiles", [0, 1, 2, 7])
@pytest.mark.parametrize("read_ahead", [False, True])
@pytest.mark.parametrize("write_behind", [False, True])
def test_every_tile_goes_through_once_in_order(
    make_pool: Callable[[int], Pool], num_buffers: int, num_tiles: int, read_ahead: bool, write_behind: bool
) -> None:
    work, pool = Work(), make_pool(num_buffers)
    run_pipeline(range(num_tiles), work, pool, read_ahead, write_behind)
    for what in ("read", "compute", "write"):
        done = [step for step in work.log if step.startswith(what) and not step.endswith("ended")]
        assert done == [f"{what} {tile}" for tile in range(num_tiles)]
    assert num_free(pool) == num_buffers


# ---- who is slow does not stop the others ----------------------------------------------------------------------------------


def test_the_first_tile_that_has_come_is_computed_first(make_pool: Callable[[int], Pool]) -> None:
    work = Work(reads_are_fast=True, writes_are_fast=True, slow={"read 1": 5, "read 3": 4})
    run_pipeline(range(8), work, make_pool(4))
    assert work.computed() == [0, 2, 4, 3, 5, 1, 6, 7]


def test_a_read_that_is_slow_holds_its_own_buffer_only(make_pool: Callable[[int], Pool]) -> None:
    work = Work(slow={"read 0": 6})
    pool = make_pool(2)
    run_pipeline(range(7), work, pool)
    assert work.computed() == [1, 2, 3, 4, 5, 6, 0]
    assert num_free(pool) == 2


def test_a_write_that_is_slow_holds_its_own_buffer_only(make_pool: Callable[[int], Pool]) -> None:
    work = Work(slow={"write 0": 6})
    pool = make_pool(2)
    run_pipeline(range(7), work, pool)
    assert work.computed() == [0, 1, 2, 3, 4, 5, 6]
    assert work.log.index("write 5 ended") < work.log.index("write 0 ended")
    assert num_free(pool) == 2


def test_with_two_buffers_behind_slow_writes_the_first_that_ends_is_used(make_pool: Callable[[int], Pool]) -> None:
    work = Work(slow={"write 0": 3})
    run_pipeline(range(4), work, make_pool(2))
    assert [step for step in work.log if step.startswith("write")] == [
        "write 0",
        "write 1",
        "write 1 ended",  # both buffers are leaving; the older one does not end
        "write 2",
        "write 2 ended",
        "write 3",
        "write 0 ended",
        "write 3 ended",
    ]


def test_without_read_ahead_a_slow_tile_is_not_passed(make_pool: Callable[[int], Pool]) -> None:
    work = Work(reads_are_fast=True, slow={"read 1": 2})
    with pytest.raises(AssertionError, match="read 1 is waited for and never ends"):
        run_pipeline(range(3), work, make_pool(3), read_ahead=False)
    assert work.computed() == [0]


# ---- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tile", [0, 2, 4])
@pytest.mark.parametrize("step", ["read {}", "compute {}", "write {}", "read {} starts", "write {} starts"])
@pytest.mark.parametrize("write_behind", [False, True])
def test_failure_gives_every_buffer_back_and_leaves_nothing_in_flight(
    make_pool: Callable[[int], Pool], num_buffers: int, tile: int, step: str, write_behind: bool
) -> None:
    fail_at = step.format(tile)
    work, pool = Work(fail_at), make_pool(num_buffers)
    with pytest.raises((OSError, ValueError), match=fail_at):
        run_pipeline(range(5), work, pool, write_behind=write_behind)
    assert num_free(pool) == num_buffers
    started = {entry for entry in work.log if entry.split()[0] in ("read", "write") and len(entry.split()) == 2}
    ended = {" ".join(entry.split()[:2]) for entry in work.log if entry.endswith(("ended", "cancelled"))}
    assert started - ended <= {fail_at.removesuffix(" starts")}
    assert not any(entry.startswith("write") and entry.endswith("cancelled") for entry in work.log)


def test_tiles_that_cannot_be_listed_give_the_buffer_back(make_pool: Callable[[int], Pool]) -> None:
    def tiles() -> Iterator[int]:
        yield 0
        raise KeyError("no such tile")

    work, pool = Work(), make_pool(2)
    with pytest.raises(KeyError):
        run_pipeline(tiles(), work, pool)
    assert num_free(pool) == 2


def test_pool_without_a_free_buffer_is_an_error_not_a_silent_end(make_pool: Callable[[int], Pool]) -> None:
    pool = make_pool(1)
    slot = pool.take()
    assert slot is not None
    with pytest.raises(RuntimeError, match="none of the 1 buffers of 4096 bytes is free"):
        run_pipeline(range(2), Work(), pool)
    pool.give_back(slot)


# ---- on a store ------------------------------------------------------------------------------------------------------------


class AddOne:
    """A tile is an entry; its bytes grow by one."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def read(self, tile: str, slot: Slot) -> Move:
        return self._store.read([(tile, 0, slot.tensor)], tile)

    def compute(self, tile: str, slot: Slot) -> None:
        slot.tensor.add_(1)

    def write(self, tile: str, slot: Slot) -> Move:
        return self._store.write([(tile, 0, slot.tensor)], tile)


@pytest.mark.parametrize("num_buffers", [1, 2, 5])
def test_tiles_on_disk_are_stepped_in_place(
    make_store: Callable[..., TensorStore], engine: str, pattern: Callable[..., torch.Tensor], num_buffers: int
) -> None:
    store = make_store(engine=engine)
    names = [f"tile {i}" for i in range(7)]
    for i, name in enumerate(names):
        store.put(name, pattern(131072, seed=i), Tier.NVME).wait()
    pool = Pool(store.arena, 131072, num_buffers, "tiles")
    for _ in range(3):
        run_pipeline(names, AddOne(store), pool)
    for i, name in enumerate(names):
        assert torch.equal(store.fetch(name).wait(), pattern(131072, seed=i) + 3)
        store.release(name)


def test_tiles_on_two_paths_are_stepped_in_place(tmp_path: Path, pattern: Callable[..., torch.Tensor]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with TensorStore(paths, 8 << 20, IoSettings(block_bytes=65536, depth=4)) as store:
        names = [f"tile {i}" for i in range(12)]
        for i, name in enumerate(names):
            store.put(name, pattern(131072 - 4096 * (i % 3), seed=i), Tier.NVME).wait()
        assert all(any(path.rglob("segment.bin")) for path in paths)
        pool = Pool(store.arena, 131072 - 2 * 4096, 3, "tiles")
        for _ in range(3):
            run_pipeline(names, AddOne(store), pool)
        for i, name in enumerate(names):
            expected = pattern(131072 - 4096 * (i % 3), seed=i)
            expected[: pool.slot_bytes] += 3
            assert torch.equal(store.fetch(name).wait(), expected)
            store.release(name)
