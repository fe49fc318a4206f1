"""Does a program step every tile once, without Python between its read and its write; and where is
all when something fails?"""

from __future__ import annotations

import errno
import functools
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tiermem.swap.base.errors import DamagedEntry
from tiermem.swap.base.native import (
    Fault,
    IoSettings,
    StepNumbers,
    TransferError,
    Workers,
    optimizer_step,
    step_struct,
)
from tiermem.swap.base.parts import StepParts, StepRule
from tiermem.swap.base.tier import Tier
from tiermem.swap.base.tile_program import TileProgram
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.swap.program.program import Program
from tiermem.swap.program.table import NativeStep, StepTable, TileRow, TileWork
from tiermem.swap.store.checksum import Pieces, Range, Verify
from tiermem.swap.store.entry import Freeze, NoSlotError
from tiermem.swap.store.store import TensorStore

NUMEL = 8192
TILE_BYTES = 8 * NUMEL  # a weight and a momentum in fp32
GRAD = torch.linspace(-1, 1, NUMEL)
RULE = StepRule("sgd", 0.5, 0.0, momentum=0.5)


class Momentum(TileWork[str]):
    """A tile is an entry: an fp32 weight and its momentum. `called`: the tiles whose work is not
    native.

    brought: the tiles whose gradients are brought to their buffers, behind what rests on disk.
    bases: of the rows of tiles, which serve until they are cleared.
    """

    def __init__(
        self,
        store: TensorStore,
        workers: Workers,
        called: Sequence[str] = (),
        fails_at: str = "",
        brought: Sequence[str] = (),
        error: type[BaseException] = KeyboardInterrupt,
        bases: dict[str, object] | None = None,
    ) -> None:
        self._store = store
        self._bases = bases
        self._workers = workers
        self._called = called
        self._fails_at = fails_at
        self._brought = brought
        self._error = error
        self.computed: list[str] = []
        self.threads: set[int] = set()  # that brought gradients

    def name(self, tile: str) -> str:
        return tile

    def unit(self, tile: str) -> int:
        return int(tile.split()[1]) // 2

    def early_reads(self, tile: str, slot: Slot | None) -> list[Range]:
        return self._ranges(tile, slot)

    def writes(self, tile: str, slot: Slot | None) -> list[Range]:
        return self._ranges(tile, slot)

    def basis(self, tile: str) -> object:
        return None if self._bases is None else self._bases.setdefault(tile, object())

    def is_shown(self, tile: str) -> bool:
        return self._store.home_of(tile) is not Tier.HOST

    def steps(self, tile: str, slot: Slot | None) -> list[NativeStep] | None:
        parts, numbers = self._parts(tile, slot), StepNumbers(RULE, 0)
        steps = [NativeStep(step_struct(RULE, parts, numbers, None, False), numbers, parts)]
        return None if tile in self._called else steps

    def is_brought(self, tile: str) -> bool:
        return tile in self._brought

    def bring(self, tile: str, slot: Slot) -> None:
        self.threads.add(threading.get_ident())
        if tile == self._fails_at:
            raise ValueError(f"no gradient of {tile}")
        self._grad(slot).copy_(GRAD)

    def compute(self, tile: str, slot: Slot | None) -> None:
        self.computed.append(tile)
        if tile == self._fails_at:
            raise self._error(tile)
        optimizer_step(self._workers, RULE, self._parts(tile, slot))

    def _ranges(self, tile: str, slot: Slot | None) -> list[Range]:
        if self._store.home_of(tile) is Tier.HOST:
            return []
        assert slot is not None
        return [(tile, 0, slot.tensor[:TILE_BYTES])]

    def _parts(self, tile: str, slot: Slot | None) -> StepParts:
        data = (
            self._store.view(tile)
            if slot is None or self._store.home_of(tile) is Tier.HOST
            else slot.tensor
        )
        values = data[:TILE_BYTES].view(torch.float32)
        grad = GRAD if slot is None or tile not in self._brought else self._grad(slot)
        return StepParts(values[:NUMEL], None, grad, [values[NUMEL:]])

    def _grad(self, slot: Slot) -> torch.Tensor:
        return slot.tensor[TILE_BYTES:].view(torch.float32)[: GRAD.numel()]


@pytest.fixture
def workers() -> Iterator[Workers]:
    found = Workers(2)
    yield found
    found.close()


def first_of(number: int) -> torch.Tensor:
    return torch.randn(2 * NUMEL, generator=torch.Generator().manual_seed(number)).view(torch.uint8)


def stepped(number: int, num_steps: int, workers: Workers) -> torch.Tensor:
    data = first_of(number)
    values = data.view(torch.float32)
    for _ in range(num_steps):
        optimizer_step(workers, RULE, StepParts(values[:NUMEL], None, GRAD, [values[NUMEL:]]))
    return data


def put(store: TensorStore, num_tiles: int, home: Tier = Tier.NVME) -> list[str]:
    names = [f"tile {number}" for number in range(num_tiles)]
    for number, name in enumerate(names):
        store.put(name, first_of(number), home).wait()
        if home is Tier.NVME:
            starts = np.arange(0, TILE_BYTES, 16384)
            store.sums.protect(name, Pieces(starts, starts + 16384))
    return names


def value(store: TensorStore, name: str) -> torch.Tensor:
    if store.home_of(name) is Tier.HOST:
        return store.view(name)
    data: torch.Tensor = store.fetch(name).wait().clone()
    store.release(name)
    return data


def num_free(pool: Pool) -> int:
    slots = []
    while (slot := pool.take()) is not None:
        slots.append(slot)
    for slot in slots:
        pool.give_back(slot)
    return len({slot.offset for slot in slots})


def check(
    store: TensorStore,
    names: Sequence[str],
    num_steps: Sequence[int],
    workers: Workers,
    first: int = 0,
) -> None:
    for number, (name, steps) in enumerate(zip(names, num_steps, strict=True), first):
        assert torch.equal(value(store, name), stepped(number, steps, workers)), name


# ---- what is brought -----------------------------------------------------------------------------


@pytest.mark.parametrize("home", [Tier.NVME, Tier.HOST])
@pytest.mark.parametrize("which", [range(6), (1, 4)])
def test_what_tiles_need_is_brought_by_a_thread(
    store: TensorStore, workers: Workers, home: Tier, which: Sequence[int]
) -> None:
    names = put(store, 6, home)
    pool = Pool(store.arena, 2 * TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    work = Momentum(store, workers, brought=[names[number] for number in which])
    for _ in range(2):
        program.start(names, work)
        assert program.is_native
        program.wait(2)
        program.finish()
        assert num_free(pool) == 2
    check(store, names, [2] * 6, workers)
    assert work.threads and threading.get_ident() not in work.threads
    program.close()


def test_what_is_not_brought_fails_its_fetch_and_says_why(
    store: TensorStore, workers: Workers
) -> None:
    names = put(store, 6)
    program: Program[str] = Program(store, Pool(store.arena, 2 * TILE_BYTES, 2, "tiles"), workers)
    work = Momentum(store, workers, brought=names, fails_at=names[3])
    program.start(names, work)
    with pytest.raises(OSError, match="stepping 'tile 3'") as caught:
        program.wait(1)
    assert str(caught.value.__cause__) == "no gradient of tile 3"
    program.finish()
    assert torch.equal(value(store, names[3]), stepped(3, 0, workers))
    program.start(names, Momentum(store, workers, brought=names))
    program.drop()  # amid the run
    program.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_thread_that_serves_an_attempt_counts_the_tiles_that_are_called(
    make_store: Callable[..., TensorStore], workers: Workers, leaves: bool
) -> None:
    store = make_store(num_slots=2)
    names = put(store, 6)
    program: Program[str] = Program(store, Pool(store.arena, 2 * TILE_BYTES, 2, "tiles"), workers)
    kind = LeavingMomentum if leaves else Momentum
    work = kind(store, workers, called=names[4:], brought=names[:4])
    assert program.attempt(names, work, 6)
    program.commit(names, work)
    program.finish()
    assert (program.num_native, program.num_called) == (4, 2)
    check(store, names, [1] * 6, workers)
    program.close()


class LeavingMomentum(Momentum):
    """Leaves the work of called tiles to who waits for it."""

    def compute(self, tile: str, slot: Slot | None) -> Any:
        def rest() -> None:
            # which notes the thread, and may fail
            self.bring(tile, slot) if slot is not None else None
            optimizer_step(self._workers, RULE, self._parts(tile, slot))

        self.computed.append(tile)
        return rest


def test_work_that_is_left_to_an_accelerator_is_awaited_by_threads(
    store: TensorStore, workers: Workers
) -> None:
    """Beside tiles whose gradients are brought; what fails says why, and is not written."""
    names = put(store, 6)
    pool = Pool(store.arena, 2 * TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    left, brought = names[::2], names[1::2]
    work = LeavingMomentum(store, workers, called=left, brought=brought)
    program.run(names, work)
    check(store, names, [1] * 6, workers)
    assert sorted(work.computed) == left and num_free(pool) == 2
    assert work.threads and threading.get_ident() not in work.threads
    with pytest.raises(OSError, match="stepping 'tile 2'") as caught:
        program.run(names, LeavingMomentum(store, workers, left, names[2], brought))
    assert str(caught.value.__cause__) == "no gradient of tile 2"
    assert num_free(pool) == 2
    assert torch.equal(value(store, names[2]), stepped(2, 1, workers))
    program.close()


def test_a_tile_that_is_slow_holds_its_own_buffer_only(
    store: TensorStore, workers: Workers
) -> None:
    names, have_passed = put(store, 7), threading.Event()

    class Slow(Momentum):
        """The work on tile 0 ends when the tile before the last is computed."""

        def compute(self, tile: str, slot: Slot | None) -> Any:
            if tile == names[-2]:
                have_passed.set()
            rest = functools.partial(super().compute, tile, slot)
            return (
                rest() if tile != names[0] else lambda: rest() if have_passed.wait(30.0) else None
            )

    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    work = Slow(store, workers, names)
    program.run(names, work)
    assert work.computed[:4] == names[1:5] and work.computed.index(names[0]) >= 4
    check(store, names, [1] * 7, workers)
    program.close()


# ---- every tile once -----------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_buffers", [1, 2, 5])
@pytest.mark.parametrize("called", [(), ("tile 1", "tile 6")], ids=["native", "mixed"])
def test_tiles_on_disk_are_stepped_in_place(
    make_store: Callable[..., TensorStore],
    engine: str,
    workers: Workers,
    num_buffers: int,
    called: tuple[str, ...],
) -> None:
    store = make_store(engine=engine)
    names = put(store, 7)
    pool = Pool(store.arena, TILE_BYTES, num_buffers, "tiles")
    program: Program[str] = Program(store, pool, workers)
    for number, (read_ahead, write_behind) in enumerate(
        [(True, True), (False, True), (True, False)]
    ):
        work = Momentum(store, workers, called)
        if number:
            program.begin(names, work)
            assert program.begun == names[:num_buffers]
        program.run(names, work, read_ahead, write_behind)
        assert (program.begun, num_free(pool), sorted(work.computed)) == (
            [],
            num_buffers,
            sorted(called),
        )
    check(store, names, [3] * 7, workers)
    for name in names:  # the checksums are those of what was written
        table = store.sums.of(name)
        assert table is not None and table.is_known.all()
    program.close()


def test_tiles_on_two_paths_are_stepped_in_place(tmp_path: Path, workers: Workers) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with TensorStore(paths, 8 << 20, IoSettings(block_bytes=16384, depth=4)) as store:
        names = put(store, 12)
        program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 3, "tiles"), workers)
        for _ in range(3):
            program.run(names, Momentum(store, workers))
        assert all(path.read_bytes > 0 for path in store.stats().paths)
        check(store, names, [3] * 12, workers)
        program.close()


@pytest.mark.parametrize(
    "called", [(), ("tile 0", "tile 1", "tile 2", "tile 3")], ids=["native", "called"]
)
def test_tiles_in_memory_need_no_buffer(
    store: TensorStore, workers: Workers, called: tuple[str, ...]
) -> None:
    names = put(store, 4, Tier.HOST)
    program: Program[str] = Program(store, None, workers)
    program.run(names, Momentum(store, workers, called))
    program.run([], Momentum(store, workers))
    check(store, names, [1] * 4, workers)
    assert (program.num_native, program.num_called) == (4 - len(called), len(called))
    assert not store.programs  # nor a thread
    program.close()


class Watching(Momentum):
    """What is called first ends when the tiles `awaited` have been stepped."""

    awaited: Sequence[str] = ()

    def compute(self, tile: str, slot: Slot | None) -> None:
        end = time.monotonic() + 60
        before = [first_of(int(each.split()[1])) for each in self.awaited]
        while any(
            torch.equal(self._store.view(each), old)
            for each, old in zip(self.awaited, before, strict=True)
        ):
            assert time.monotonic() < end, "nothing is stepped beside what the caller does"
            time.sleep(0.001)
        super().compute(tile, slot)


def test_tiles_in_memory_are_stepped_beside_what_the_caller_does(
    store: TensorStore, workers: Workers
) -> None:
    names = put(store, 9, Tier.HOST)
    program: Program[str] = Program(store, None, workers)
    work = Watching(store, workers, called=names[::3])
    work.awaited = [name for name in names if name not in names[::3]]
    program.run(names, work, lane="compute")
    check(store, names, [1] * 9, workers)
    assert (program.num_native, program.num_called) == (6, 3) and work.computed == names[::3]
    assert sorted(e.name for e in store.recorder.events if e.lane == "compute") == work.awaited
    with pytest.raises(ValueError, match="tile 3"):
        program.run(
            names, Momentum(store, workers, called=names[::3], fails_at=names[3], error=ValueError)
        )
    assert not program.is_running
    check(store, names[3:4], [1], workers, first=3)
    program.close()


def test_no_python_runs_between_the_read_and_the_write_of_a_native_tile(
    store: TensorStore, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = put(store, 20)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    program.run(names, Momentum(store, workers))
    seen: list[str] = []
    stop = TileProgram.stop

    def ended(self: TileProgram) -> None:
        sys.setprofile(None)
        stop(self)

    monkeypatch.setattr(TileProgram, "stop", ended)
    program.start(names, Momentum(store, workers))
    sys.setprofile(
        lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None
    )
    program.finish()
    waits = {
        "finish",
        "_program",
        "_call_next",
        "__init__",
        "next",
        "handle",
        "check_process",
        "check",
    }
    ends = {"has_failed", "failure", "_report", "end", "drop", "_drop", "is_mine", "ended", "add"}
    ends |= {"<lambda>", "__enter__", "__exit__"}
    ends |= {"_end_attempt", "cancel"}  # of the last attempt's future
    assert set(seen) <= waits | ends, seen
    assert len(seen) < 100  # calls that wait for the end, of a tenth of a second each
    check(store, names, [2] * 20, workers)
    program.close()


def test_the_recorder_sees_every_transfer_and_step(store: TensorStore, workers: Workers) -> None:
    names = put(store, 5)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    store.recorder.forget()
    program.run(names, Momentum(store, workers), lane="compute")
    for lane in ("read", "write"):
        assert (
            sum(event.num_bytes for event in store.recorder.events if event.lane == lane)
            == 5 * TILE_BYTES
        )
    for lane in ("read", "compute", "write"):
        assert sorted(e.name for e in store.recorder.events if e.lane == lane) == names
    assert all(event.start_ns <= event.end_ns for event in store.recorder.events)
    program.close()


# ---- reads before the run ------------------------------------------------------------------------


def test_begun_tiles_are_read_once_or_dropped(store: TensorStore, workers: Workers) -> None:
    names = put(store, 6)
    pool = Pool(store.arena, TILE_BYTES, 3, "tiles")
    program: Program[str] = Program(store, pool, workers)
    work = Momentum(store, workers)
    before = store.stats().nvme_read_bytes
    program.begin(names, work)
    program.begin(names[3:], work)  # has begun
    program.run(names, work)
    assert store.stats().nvme_read_bytes - before == 6 * TILE_BYTES
    program.begin(names, work)
    program.drop()
    assert (program.begun, num_free(pool)) == ([], 3)
    program.begin(names[:2], work)
    program.run(names[1:], work)  # without one that was begun
    check(store, names, [1, 2, 2, 2, 2, 2], workers)
    program.close()


def test_queues_that_are_opened_anew_do_not_lose_what_was_begun(
    store: TensorStore, workers: Workers
) -> None:
    names = put(store, 4)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    program.begin(names, Momentum(store, workers))
    store.reserve("more", (1 << 21,), torch.uint8, Tier.HOST)
    store.flush()
    program.run(names, Momentum(store, workers))
    check(store, names, [1] * 4, workers)
    program.close()


def test_a_store_that_is_dropped_ends_what_was_begun(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, 8 << 20)
    workers = Workers(1)
    names = put(store, 3)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    program.begin(names, Momentum(store, workers))
    del store, program
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    workers.close()


# ---- runs that a caller does not wait for at once ------------------------------------------------


@pytest.mark.parametrize("called", [(), ("tile 1", "tile 14")], ids=["native", "mixed"])
@pytest.mark.parametrize("num_buffers", [1, 3])
def test_a_unit_can_be_awaited_while_others_are_stepped(
    store: TensorStore, workers: Workers, called: tuple[str, ...], num_buffers: int
) -> None:
    names = put(store, 40)
    pool = Pool(store.arena, TILE_BYTES, num_buffers, "tiles")
    program: Program[str] = Program(store, pool, workers)
    program.wait(3)  # no run is under way
    assert program.is_stepped(3)
    for steps in (1, 2):
        work = Momentum(store, workers, called)
        program.start(names, work)
        for unit in (7, 0, 19):
            program.wait(unit)
            assert program.is_stepped(unit)
        assert (program.is_running, program.is_native) == (True, not called)
        program.finish()
        program.finish()  # there is none
        assert not program.is_running
        assert (sorted(work.computed), num_free(pool)) == (sorted(called), num_buffers)
        check(store, names, [steps] * 40, workers)
    program.close()


class HeldBack(Momentum):
    """One tile's gradients are brought when `held` is set."""

    held_tile = "tile 3"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = threading.Event()

    def unit(self, tile: str) -> int:
        return int(tile.split()[1]) // 5

    def bring(self, tile: str, slot: Slot) -> None:
        if tile == self.held_tile:
            assert self.held.wait(60)
        super().bring(tile, slot)


@pytest.mark.parametrize("home", [Tier.NVME, Tier.HOST])
def test_tiles_of_a_unit_are_given_when_each_is_computed(
    store: TensorStore, workers: Workers, home: Tier
) -> None:
    names = put(store, 10, home)
    program: Program[str] = Program(store, Pool(store.arena, 2 * TILE_BYTES, 2, "tiles"), workers)
    assert list(program.computed(0)) == []  # no run is under way
    work = HeldBack(store, workers, brought=names)
    program.start(names, work)
    given = program.computed(0)
    assert [next(given) for _ in range(3)] == names[:3]
    assert not program.is_stepped(0)
    work.held.set()
    assert list(given) == names[3:5] and program.is_stepped(0)
    assert list(program.computed(1)) == names[5:]
    program.finish()
    check(store, names, [1] * 10, workers)
    work = HeldBack(store, workers, brought=names, fails_at=names[3])
    work.held.set()
    program.start(names, work)
    given = program.computed(0)
    assert next(given) == names[0]
    with pytest.raises(OSError, match="stepping 'tile 3'"):
        list(given)
    program.drop()
    program.close()


def ranges_of(
    names: Sequence[str], numbers: Sequence[int], buffers: Sequence[torch.Tensor]
) -> list[Range]:
    return [(names[number], 0, buffer) for number, buffer in zip(numbers, buffers, strict=False)]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("num_frozen", [0, 1])
@pytest.mark.parametrize("num_buffers", [1, 3])
def test_a_read_sees_what_the_run_writes_wherever_it_is(
    make_store: Callable[..., TensorStore],
    engine: str,
    workers: Workers,
    num_buffers: int,
    num_frozen: int,
) -> None:
    store = make_store(engine=engine, num_slots=1 + num_frozen, host_bytes=64 << 20)
    names, other = put(store, 40), first_of(99)
    store.put("other", other, Tier.NVME).wait()
    program: Program[str] = Program(
        store, Pool(store.arena, TILE_BYTES, num_buffers, "tiles"), workers
    )
    buffers = [store.arena.take(TILE_BYTES, "a test").tensor for _ in range(4)]
    for steps in (1, 2):
        freezes = [store.freeze() for _ in range(num_frozen)]
        program.start(names, Momentum(store, workers))
        for unit in (7, 0, 7, 19, 0, 12):  # some again, when they are written
            numbers = [2 * unit, 2 * unit + 1]
            read = program.read(
                [*ranges_of(names, numbers, buffers[:2]), ("other", 0, buffers[2])], "a unit", unit
            )
            read.promote()
            read.wait()
            for number, buffer in zip(numbers, buffers, strict=False):
                assert torch.equal(buffer, stepped(number, steps, workers))
            assert torch.equal(buffers[2], other)
        program.finish()
        read = program.read(ranges_of(names, [3], buffers[:1]), "a tile", 1)
        read.wait()
        assert torch.equal(buffers[0], stepped(3, steps, workers))
        check(store, names, [steps] * 40, workers)
        for freeze in freezes:
            for number, name in enumerate(names):  # what was frozen is the step before
                [extent] = freeze.ranges(name, 0, TILE_BYTES)
                with freeze.files[extent.path_index].open("rb") as file:
                    file.seek(extent.offset)
                    frozen = torch.frombuffer(bytearray(file.read(TILE_BYTES)), dtype=torch.uint8)
                assert torch.equal(frozen, stepped(number, steps - 1, workers))
            store.thaw(freeze)
    program.close()


def test_a_read_of_tiles_that_are_not_written_reads_no_disk(
    store: TensorStore, workers: Workers
) -> None:
    names = put(store, 40)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 1, "tiles"), workers)
    buffers = [store.arena.take(TILE_BYTES, "a test").tensor for _ in range(2)]
    before = store.stats().nvme_read_bytes
    # it goes no further than its caller does
    program.start(names, Momentum(store, workers, ["tile 0"]))
    read = program.read(ranges_of(names, [38, 39], buffers), "a unit", 19)
    program.finish()
    read.wait()
    assert store.stats().nvme_read_bytes - before == 40 * TILE_BYTES
    assert all(
        torch.equal(buffer, stepped(number, 1, workers))
        for buffer, number in zip(buffers, (38, 39), strict=True)
    )
    program.close()


def test_a_freeze_that_ends_under_a_run_changes_no_byte(
    make_store: Callable[..., TensorStore], workers: Workers
) -> None:
    store = make_store(num_slots=2, host_bytes=64 << 20)
    names = put(store, 20)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    for steps in (1, 2, 3):
        freeze = store.freeze()
        program.start(names, Momentum(store, workers))
        store.thaw(freeze)  # as the thread of a copy does
        program.finish()
        check(store, names, [steps] * 20, workers)
    program.close()


def test_a_read_that_is_cancelled_writes_nothing_afterwards(
    store: TensorStore, workers: Workers
) -> None:
    names = put(store, 40)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    buffers = [store.arena.take(TILE_BYTES, "a test").tensor.fill_(7) for _ in range(2)]
    program.start(names, Momentum(store, workers))
    read = program.read(ranges_of(names, [38, 39], buffers), "a unit", 19)
    read.cancel()
    before = [buffer.clone() for buffer in buffers]
    program.finish()
    assert (read.was_cancelled, read.outcome()) == (True, None)
    assert all(map(torch.equal, buffers, before))
    with pytest.raises(OSError, match="cancelled"):
        read.wait()
    program.close()


def test_a_read_may_be_waited_for_when_other_tiles_are_read(
    store: TensorStore, workers: Workers
) -> None:
    names = put(store, 40)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    buffers = [store.arena.take(TILE_BYTES, "a test").tensor for _ in range(6)]
    work = Momentum(store, workers)
    program.start(names, work)
    reads = [
        program.read(ranges_of(names, [2 * u, 2 * u + 1], buffers[2 * i :]), "", u)
        for i, u in enumerate((19, 3))
    ]
    other = program.read(ranges_of(names, [10, 11], buffers[4:]), "", 5)
    program.finish()
    program.begin(names[10:], work)
    for read in reads:
        read.promote()
        read.wait()
    other.cancel()
    for buffer, number in zip(buffers, (38, 39, 6, 7), strict=False):
        assert torch.equal(buffer, stepped(number, 1, workers))
    program.run(names, work)
    check(store, names, [2] * 40, workers)
    program.close()


@pytest.mark.parametrize("is_read", [False, True])
def test_a_failure_is_raised_once_by_a_read_or_by_the_end(
    store: TensorStore, workers: Workers, is_read: bool
) -> None:
    names = put(store, 40)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    program.run(names, Momentum(store, workers))  # from now on checksums are known
    table = store.sums.of("tile 1")
    assert table is not None
    table.crcs[0] ^= 1
    program.start(names, Momentum(store, workers))
    buffer = store.arena.take(TILE_BYTES, "a test").tensor
    if is_read:
        with pytest.raises(DamagedEntry, match="'tile 1'"):
            program.read(ranges_of(names, [39], [buffer]), "a unit", 19).wait()
        assert program.is_running
        program.finish()
    else:
        read = program.read(ranges_of(names, [39], [buffer]), "a unit", 19)
        assert isinstance(read.outcome(), DamagedEntry)  # as a prefetch that nobody waits for
        with pytest.raises(DamagedEntry, match="'tile 1'"):
            program.finish()
    assert (program.is_running, program.has_failed) == (False, True)
    program.finish()
    table.crcs[0] ^= 1
    program.run(names[2:], Momentum(store, workers))
    assert not program.has_failed
    program.close()


def test_a_run_that_fails_raises_at_the_unit_and_steps_no_other(
    store: TensorStore, workers: Workers
) -> None:
    names = put(store, 40)
    pool = Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    program.run(names, Momentum(store, workers))  # from now on checksums are known
    table = store.sums.of("tile 1")
    assert table is not None
    table.crcs[0] ^= 1
    program.start(names, Momentum(store, workers))
    with pytest.raises(DamagedEntry, match="'tile 1'"):
        program.wait(0)
    table.crcs[0] ^= 1
    program.finish()  # its error has been raised
    assert num_free(pool) == 2
    check(store, names[1:2], [1], workers, 1)
    program.close()


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_begun", [False, True])
# four blocks are read and four are written of a tile
@pytest.mark.parametrize(("block", "tile"), [(1, 0), (9, 1)])
def test_a_transfer_that_fails_is_raised_with_its_place(
    make_store: Callable[..., TensorStore], workers: Workers, block: int, tile: int, is_begun: bool
) -> None:
    store = make_store(block_bytes=16384, depth=1, faults=(Fault(16 + block, "error", errno.EIO),))
    names = put(store, 4)  # 16 blocks
    pool = Pool(store.arena, TILE_BYTES, 1, "tiles")
    program: Program[str] = Program(store, pool, workers)
    if is_begun:
        program.begin(names, Momentum(store, workers))
    with pytest.raises(TransferError) as caught:
        program.run(names, Momentum(store, workers))
    assert (caught.value.errno, caught.value.length, num_free(pool)) == (errno.EIO, 16384, 1)
    check(store, names, [int(number < tile) for number in range(4)], workers)
    program.run(names, Momentum(store, workers))  # it remains usable
    check(store, names, [1 + int(number < tile) for number in range(4)], workers)
    program.close()


def test_a_write_that_fails_is_lost_until_it_is_repeated(
    make_store: Callable[..., TensorStore], workers: Workers
) -> None:
    store = make_store(block_bytes=16384, depth=1, faults=(Fault(16 + 13, "error", errno.ENOSPC),))
    names = put(store, 4)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 1, "tiles"), workers)
    with pytest.raises(TransferError, match="full") as caught:
        program.run(names, Momentum(store, workers))
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="tile 1"):
        store.freeze()
    with pytest.raises(DamagedEntry):
        program.run(names, Momentum(store, workers))
    program.close()


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_damaged_bytes_are_named_and_never_stepped(
    store: TensorStore, workers: Workers, num_buffers: int
) -> None:
    names = put(store, 4)
    program: Program[str] = Program(
        store, Pool(store.arena, TILE_BYTES, num_buffers, "tiles"), workers
    )
    program.run(names, Momentum(store, workers))
    table = store.sums.of("tile 2")
    assert table is not None
    table.crcs[1] ^= 1
    with pytest.raises(DamagedEntry, match="bytes 16384 to 32768 of 'tile 2'") as caught:
        program.run(names, Momentum(store, workers))
    assert (caught.value.piece, caught.value.written) == ("piece 1", table.crcs[1])
    table.crcs[1] ^= 1
    assert torch.equal(value(store, "tile 2"), stepped(2, 1, workers))
    program.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("num_buffers", [1, 3])
def test_an_error_of_python_work_ends_the_run_and_loses_no_buffer(
    store: TensorStore, workers: Workers, num_buffers: int, error: type[BaseException]
) -> None:
    names = put(store, 5)
    pool = Pool(store.arena, TILE_BYTES, num_buffers, "tiles")
    program: Program[str] = Program(store, pool, workers)
    with pytest.raises(error, match="tile 2"):
        program.run(names, Momentum(store, workers, ["tile 2"], fails_at="tile 2", error=error))
    assert num_free(pool) == num_buffers
    assert torch.equal(value(store, "tile 2"), first_of(2))
    store.flush()  # nothing is in flight
    program.close()


def test_a_tile_that_cannot_be_planned_ends_the_run(
    store: TensorStore, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = put(store, 9)
    pool = Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    monkeypatch.setattr(
        Momentum, "is_brought", lambda _, tile: ["tile 7"].index(tile) if tile > "tile 6" else False
    )
    with pytest.raises(ValueError, match="'tile 8' is not in list"):
        program.run(names, Momentum(store, workers))
    assert (program.is_running, num_free(pool)) == (False, 2)
    assert torch.equal(value(store, "tile 8"), first_of(8))
    program.close()


def test_an_interrupt_at_the_end_of_a_run_loses_no_write(
    make_store: Callable[..., TensorStore], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes have gone to other slots, because a freeze holds the old bytes: the store must
    learn of each."""
    store = make_store(num_slots=2)
    names, pool = put(store, 5), Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    freeze, note, noted = store.freeze(), StepTable.note, []

    def interrupted(*args: Any) -> None:
        noted.append(args)
        if len(noted) == 3:
            raise KeyboardInterrupt
        note(*args)

    monkeypatch.setattr(StepTable, "note", interrupted)
    program.start(names, Momentum(store, workers))
    with pytest.raises(KeyboardInterrupt):
        program.finish()
    assert program.is_running
    program.finish()
    assert (program.is_running, program.has_failed, num_free(pool)) == (False, False, 2)
    check(store, names, [1] * 5, workers)
    store.thaw(freeze)
    program.close()


def test_a_pool_without_a_free_buffer_is_an_error(store: TensorStore, workers: Workers) -> None:
    names = put(store, 2)
    pool = Pool(store.arena, TILE_BYTES, 1, "tiles")
    slot = pool.take()
    assert slot is not None
    program: Program[str] = Program(store, pool, workers)
    program.begin(names, Momentum(store, workers))
    assert program.begun == []
    with pytest.raises(RuntimeError, match=f"none of the 1 buffers of {TILE_BYTES} bytes is free"):
        program.run(names, Momentum(store, workers))
    pool.give_back(slot)
    program.run(names, Momentum(store, workers))
    program.close()


# ---- ranges that are planned once ----------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_of_tiles_follows_every_change(
    make_store: Callable[..., TensorStore],
    workers: Workers,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between runs of one program slots are held, entries made anew, pieces cut or unknown, and
    queues opened anew."""
    store, chosen = make_store(num_slots=3, host_bytes=64 << 20), random.Random(seed)
    names, steps = put(store, 5), [0] * 5
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    freezes, bases = list[Freeze](), dict[str, object]()
    seen, rows = list[TileRow[str]](), StepTable.rows

    def noted(*args: Any, **options: Any) -> Iterator[TileRow[str]]:
        for row in rows(*args, **options):
            seen.append(row)
            yield row

    monkeypatch.setattr(StepTable, "rows", noted)

    def run(some: Sequence[int]) -> None:
        program.run([names[number] for number in some], Momentum(store, workers, bases=bases))
        for number in some:
            steps[number] += 1

    def attempt(is_committed: bool) -> None:
        assert program.attempt(names[2:], Momentum(store, workers, bases=bases), 5)
        if is_committed:
            program.commit(names, Momentum(store, workers, bases=bases))
            program.finish()
            steps[:] = [each + 1 for each in steps]
        else:
            program.drop()

    def freeze() -> None:
        if freezes:
            store.thaw(freezes.pop())
        else:
            freezes.append(store.freeze())

    def make_anew(number: int) -> None:
        data = value(store, names[number])
        store.drop(names[number])
        store.put(names[number], data, Tier.NVME).wait()

    def protect(number: int, piece_bytes: int) -> None:
        starts = np.arange(0, TILE_BYTES, piece_bytes)
        store.sums.protect(names[number], Pieces(starts, starts + piece_bytes))

    def write_part(number: int) -> None:
        page = store.arena.take(4096, "a test")
        page.tensor.copy_(value(store, names[number])[8192:12288])
        store.write([(names[number], 8192, page.tensor)], "a page").wait()
        store.arena.give_back(page)
        if (table := store.sums.of(names[number])) is not None:
            table.crcs[~table.is_known] ^= 1  # they say nothing

    def open_queues() -> None:
        store.arena.take(1 << 20, "memory that the queues do not know")
        store.flush()

    for _ in range(60):
        number = chosen.randrange(5)
        chosen.choice(
            [
                lambda: run(range(5)),
                lambda: [run(range(5)) for _ in range(3)],
                lambda number=number: run(sorted({0, number})),
                lambda: attempt(True),
                lambda: attempt(True),
                lambda: attempt(False),
                freeze,
                bases.clear,
                lambda number=number: make_anew(number),
                lambda number=number: protect(number, 16384 if number % 2 else 8192),
                lambda number=number: write_part(number),
                lambda: store.sums.use(workers, chosen.choice(get_args(Verify))),
                open_queues,
            ]
        )()
        check(store, names, steps, workers)
    assert len(seen) - len({id(each) for each in seen}) >= 20  # were kept
    while freezes:
        freeze()
    store.sums.use(workers, "always")
    for number in range(5):
        protect(number, 16384)
    for _ in range(2):  # the first run makes the checksums known
        run(range(5))
    table = store.sums.of(names[3])
    assert table is not None and table.is_known.all()
    table.crcs[1] ^= 1
    with pytest.raises(DamagedEntry, match="'tile 3'"):
        run(range(5))
    program.close()


# ---- tentative runs ------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("num_frozen", [0, 1])
@pytest.mark.parametrize("num_buffers", [1, 3])
def test_a_tentative_run_is_seen_when_it_is_committed(
    make_store: Callable[..., TensorStore],
    engine: str,
    workers: Workers,
    num_buffers: int,
    num_frozen: int,
) -> None:
    """In any step some tiles are attempted and others are not; in every third the results are
    dropped."""
    store = make_store(engine=engine, num_slots=2 + num_frozen, host_bytes=64 << 20)
    names = put(store, 12)
    pool = Pool(store.arena, TILE_BYTES, num_buffers, "tiles")
    program: Program[str] = Program(store, pool, workers)
    called, buffer, steps = ["tile 3"], store.arena.take(TILE_BYTES, "a test").tensor, 0
    for number in range(6):
        freezes = [store.freeze() for _ in range(num_frozen)]
        assert program.attempt(names[8:], Momentum(store, workers, called), 12)
        assert program.attempt(names[:5], Momentum(store, workers, called), 12)
        assert set(program.attempted) == {*names[8:], *names[:5]} - {"tile 3"}
        assert (program.is_running, program.is_stepped(5)) == (False, True)
        if number % 2:
            store.put("more", first_of(99), Tier.NVME).wait()
            store.arena.take(1 << 20, "memory that the queues do not know")
            store.flush()  # new queues
            store.drop("more")
        read = program.read([(names[9], 0, buffer)], "a tile", 4)
        read.wait()
        assert torch.equal(buffer, stepped(9, steps, workers))
        check(store, names, [steps] * 12, workers)
        if number % 3 == 2:
            program.drop()
            assert (program.attempted, num_free(pool)) == ([], num_buffers)
        else:
            program.commit(names, Momentum(store, workers, called))
            assert program.is_running
            read = program.read([(names[9], 0, buffer)], "a tile", 4)
            program.finish()
            read.wait()
            steps += 1
            assert torch.equal(buffer, stepped(9, steps, workers))
        check(store, names, [steps] * 12, workers)
        for freeze in freezes:
            store.thaw(freeze)
    tables = [store.sums.of(name) for name in names]
    assert all(table is not None and table.is_known.all() for table in tables)
    program.close()


def test_what_a_commit_adds_runs_behind_the_units_before_it(
    make_store: Callable[..., TensorStore], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiles are a unit; of units 1 and 2 one tile each was attempted, of unit 3 both."""
    turns: list[Sequence[int]] = []
    add = TileProgram.add

    def noting(self: TileProgram, tiles: Sequence[Any], own: Sequence[int] = ()) -> bool:
        turns.append(own)
        return add(self, tiles, own)

    monkeypatch.setattr(TileProgram, "add", noting)
    store = make_store(num_slots=2)
    names = put(store, 9)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 1, "tiles"), workers)
    for unit in (names[6:8], names[5:6], names[2:3]):
        assert program.attempt(unit, Momentum(store, workers), 9)
    program.commit(names, Momentum(store, workers))
    program.finish()
    unit_3, unit_2, unit_1, added = turns
    assert [*unit_3, *unit_2, *unit_1] == [9, 9, 7, 6]
    assert list(added) == [5, 5, 6, 7, 9]  # of tiles 0, 1, 3, 4 and 8
    check(store, names, [1] * 9, workers)
    program.close()


def test_a_tentative_run_that_is_not_committed_leaves_no_trace(
    make_store: Callable[..., TensorStore], workers: Workers
) -> None:
    store = make_store(num_slots=2, host_bytes=64 << 20)
    names = put(store, 8)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    before, work = store.stats().nvme_read_bytes, Momentum(store, workers)
    program.begin(names, work)
    assert program.attempt(names[4:], work, 8)  # what has begun is dropped
    program.begin(names, work)
    assert program.begun == []
    program.run(names, work)
    check(store, names, [1] * 8, workers)
    assert program.attempt(names, work, 8)
    program.close()
    assert store.stats().nvme_read_bytes - before <= (2 + 4 + 8 + 8 + 8) * TILE_BYTES
    check(store, names, [1] * 8, workers)


@pytest.mark.parametrize("is_given", [False, True])
def test_an_interrupt_amid_an_attempt_leaves_a_run_of_the_tiles_that_were_given(
    make_store: Callable[..., TensorStore],
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    is_given: bool,
) -> None:
    """Python notes tiles before native code is given them, and learns after it that it was."""
    store = make_store(num_slots=2)
    names, work, add = put(store, 6), Momentum(store, workers), TileProgram.add
    pool = Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    assert program.attempt(names[4:], work, 6)

    def interrupted(*given: Any) -> bool:
        assert not is_given or add(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TileProgram, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.attempt(names[2:4], work, 6)
    assert program.attempted == [*names[4:], *names[2 : 4 if is_given else 2]]
    program.commit(names, work)
    program.finish()
    check(store, names, [1] * 6, workers)
    assert program.attempt(names, work, 6)
    program.drop()
    assert num_free(pool) == 2
    program.close()


def test_what_follows_an_attempt_that_its_caller_left_waits_for_it(
    make_store: Callable[..., TensorStore], workers: Workers
) -> None:
    """As after an interrupt on the last line of `attempt`: the thread of the program still plans
    tiles."""
    store = make_store(num_slots=2)
    names, work = put(store, 4), Momentum(store, workers)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 2, "tiles"), workers)
    goes_on = threading.Event()

    def slow() -> Iterator[str]:
        goes_on.wait()
        yield from names

    found: list[bool] = []
    caller = threading.Thread(target=lambda: found.append(program.attempt(slow(), work, 4)))
    caller.start()
    threading.Timer(0.1, goes_on.set).start()
    while not program._attempting._fate:
        time.sleep(0.001)
    program.run(names, work)
    caller.join()
    assert found == [True]
    check(store, names, [1] * 4, workers)
    program.close()


def test_a_tentative_run_without_a_free_slot_or_native_work_begins_nothing(
    make_store: Callable[..., TensorStore], workers: Workers
) -> None:
    store = make_store(num_slots=2)
    names, pool = put(store, 3), Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    assert program.attempt(names, Momentum(store, workers, names), 3)  # none of them is native
    assert (program.attempted, num_free(pool)) == ([], 2)
    freeze = store.freeze()
    program.run(names, Momentum(store, workers))
    with pytest.raises(NoSlotError):
        program.attempt(names, Momentum(store, workers), 3)
    store.thaw(freeze)
    assert (program.attempted, num_free(pool)) == ([], 2)
    program.close()


def test_a_program_that_is_forgotten_amid_a_tentative_run_ends_its_thread(
    tmp_path: Path, workers: Workers
) -> None:
    """Its tiles are brought by a thread, which must not keep the model and the process alive."""
    store = TensorStore([tmp_path], 1 << 20, num_slots=2)
    names = put(store, 4)
    program: Program[str] = Program(store, Pool(store.arena, 2 * TILE_BYTES, 2, "tiles"), workers)
    assert program.attempt(names[:2], Momentum(store, workers, brought=names), len(names))
    serving, gone = program._brought, weakref.ref(program)
    assert serving is not None and program._helper is not None
    threads = program._helper._threads
    del program
    assert serving.wait_for(10.0)
    for thread in threads:
        thread.join(10.0)
    assert gone() is None
    assert not any(thread.is_alive() for thread in threads)
    store.close()


def test_an_interrupt_while_tiles_are_given_leaves_no_buffer_behind(
    make_store: Callable[..., TensorStore], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(num_slots=2)
    names, pool = put(store, 4), Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for owner, verb in (Momentum, "steps"), (TileProgram, "run"):
        with monkeypatch.context() as patched:
            patched.setattr(owner, verb, interrupt)
            with pytest.raises(KeyboardInterrupt):
                program.attempt(names, Momentum(store, workers), 4)
        assert (program.attempted, num_free(pool)) == ([], 2)
    with monkeypatch.context() as patched:
        steps, ended = Momentum.steps, list[bool]()

        def interrupt_the_caller(*given: Any) -> list[NativeStep] | None:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            time.sleep(0.05)  # the caller has been interrupted
            ended.append(True)
            return steps(*given)

        patched.setattr(Momentum, "steps", interrupt_the_caller)
        with pytest.raises(KeyboardInterrupt):
            program.attempt(names[:1], Momentum(store, workers), 4)
        assert ended == [True]  # the thread is done with the program
    program.drop()
    assert program.attempt(names[:2], Momentum(store, workers), 4)
    program.commit(names, Momentum(store, workers))
    program.finish()
    check(store, names, [1] * 4, workers)
    program.close()


@pytest.mark.parametrize("name", ["next", "done"])
def test_a_called_tile_that_an_interrupt_has_left_is_ended(
    store: TensorStore, workers: Workers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else the end of the run waited for it for ever: after `next` nobody knew its number."""
    names, pool = put(store, 4), Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    real = getattr(TileProgram, name)

    def interrupted(*given: Any) -> object:
        if name == "next" and isinstance(real(*given), bool):
            return False
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TileProgram, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            program.run(names, Momentum(store, workers, called=names))
    assert num_free(pool) == 2
    program.run(names, Momentum(store, workers, called=names))
    program.close()


@pytest.mark.parametrize("call", [3, 12], ids=["read", "write"])
def test_a_tentative_run_that_fails_says_so_and_changes_nothing(
    make_store: Callable[..., TensorStore], workers: Workers, call: int
) -> None:
    store = make_store(
        num_slots=2, faults=(Fault(8 + call, "error", errno.EIO),), block_bytes=TILE_BYTES
    )
    names = put(store, 8)
    program: Program[str] = Program(store, Pool(store.arena, TILE_BYTES, 8, "tiles"), workers)
    program.attempt(names, Momentum(store, workers), 8)  # false if it has failed by now
    while not program.has_failed:
        assert program.attempted
    assert not program.attempt([], Momentum(store, workers), 8)
    program.run(names, Momentum(store, workers))
    check(store, names, [1] * 8, workers)
    program.close()


def test_an_interrupt_when_reads_have_begun_ends_them(
    make_store: Callable[..., TensorStore], workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    names, pool = put(store, 4), Pool(store.arena, TILE_BYTES, 2, "tiles")
    program: Program[str] = Program(store, pool, workers)
    begin = TileProgram.begin

    def begin_and_interrupt(*given: Any) -> None:
        begin(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TileProgram, "begin", begin_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            program.begin(names, Momentum(store, workers))
    assert num_free(pool) == 2
    program.begin(names, Momentum(store, workers))
    program.run(names, Momentum(store, workers))
    check(store, names, [1] * 4, workers)
    program.close()
