"""Do frozen bytes stay as they are on the disk while the store goes on, whatever is written, and do
live ones come back?"""

from __future__ import annotations

import contextlib
import errno
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import drawn
from frozen_bytes import content, on_disk, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.base.native import Blocks, Fault, IoSettings, Queue
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.entry import Freeze, NoSlotError
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
PAGE = 4096
LATE = (Fault(0, "late", 20, repeat=1 << 30),)  # every block ends later


# ---- the bytes -----------------------------------------------------------------------------------

NAMES, MOST_PAGES = "abc", 5
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["write", "write", "write", "change", "freeze", "thaw", "drop", "put", "look"]
        ),
        st.sampled_from(NAMES),
        st.integers(0, MOST_PAGES - 1),
        st.integers(1, MOST_PAGES),
    ),
    max_size=40,
)


class Twin:
    """A store, what it must hold, and what its freezes must."""

    def __init__(self, store: TensorStore, pattern: Pattern) -> None:
        self.store = store
        self.live: dict[str, torch.Tensor] = {}
        self.frozen: list[tuple[Freeze, dict[str, bytes]]] = []
        self._pattern = pattern
        self._seed = 0

    def step(self, what: str, name: str, page: int, num_pages: int) -> None:
        self._seed += 1
        if what == "freeze":
            if len(self.frozen) + 1 < self.store.num_slots:
                self.frozen.append(
                    (
                        self.store.freeze(),
                        {n: bytes(t.numpy().tobytes()) for n, t in self.live.items()},
                    )
                )
        elif what == "thaw":
            if self.frozen:
                self.store.thaw(self.frozen.pop(page % len(self.frozen))[0])
        elif name not in self.live:
            self.live[name] = self._pattern(num_pages * PAGE, seed=self._seed)
            self.store.put(name, self.live[name], Tier.NVME)
        elif what == "drop":
            self.store.drop(name)
            del self.live[name]
        elif what == "change":
            self.live[name] = self._pattern(len(self.live[name]), seed=self._seed)
            self.store.fetch(name).wait().copy_(self.live[name])
            self.store.release(name, dirty=True)
        elif what == "write":
            self._write(name, page, num_pages)
        else:
            assert content(self.store, name) == self.live[name].numpy().tobytes()

    def _write(self, name: str, page: int, num_pages: int) -> None:
        """A range, after what is under way there: the order of ranges is their caller's."""
        self.store.flush()
        start = page * PAGE % len(self.live[name])
        stop = min(start + num_pages * PAGE, len(self.live[name]))
        self.live[name][start:stop] = self._pattern(stop - start, seed=self._seed)
        write(self.store, name, start, self.live[name][start:stop])

    def check(self) -> None:
        for freeze, held in self.frozen:
            assert {name: on_disk(freeze, name, len(data)) for name, data in held.items()} == held


@settings(max_examples=drawn(60), suppress_health_check=list(HealthCheck))
@given(steps=STEPS, num_slots=st.integers(2, 4), num_paths=st.integers(1, 2))
def test_live_bytes_and_every_frozen_state_are_what_they_should_be(
    tmp_path: Path,
    pattern: Pattern,
    steps: list[tuple[str, str, int, int]],
    num_slots: int,
    num_paths: int,
) -> None:
    with contextlib.ExitStack() as folders:
        made = [
            Path(folders.enter_context(tempfile.TemporaryDirectory(dir=tmp_path)))
            for _ in range(num_paths)
        ]
        paths = [NvmePath(folder, weight=1.0) for folder in made]
        with TensorStore(
            paths, 1 << 20, IoSettings(block_bytes=8192, depth=4), num_slots=num_slots
        ) as store:
            twin = Twin(store, pattern)
            for step in steps:
                twin.step(*step)
                twin.check()
            for name, data in twin.live.items():
                assert content(store, name) == data.numpy().tobytes()
            for freeze, _ in twin.frozen:
                store.thaw(freeze)
                store.thaw(freeze)  # twice does nothing
            for name in list(twin.live):
                store.drop(name)
            assert store.stats().nvme_bytes == 0
        assert all(list(folder.iterdir()) == [] for folder in made)


def test_ranges_of_a_freeze_are_any_bytes_and_cross_slots(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=2)
    data = pattern(5 * PAGE + 77)
    store.put("x", data, Tier.NVME).wait()
    first = store.freeze()
    data[PAGE : 2 * PAGE] = 7
    write(store, "x", PAGE, data[PAGE : 2 * PAGE])
    store.thaw(first)
    freeze = store.freeze()
    assert list(freeze.parts) == ["x"]
    for start, num_bytes in [
        (0, len(data)),
        (PAGE - 1, 3),
        (PAGE - 5, PAGE + 10),
        (len(data) - 1, 1),
        (9, 0),
    ]:
        assert (
            on_disk(freeze, "x", num_bytes, start)
            == data[start : start + num_bytes].numpy().tobytes()
        )
    assert len(freeze.ranges("x", 0, len(data))) == 3
    with pytest.raises(ValueError, match=r"bytes 0 to 24577 lie outside 'x' .24576 bytes."):
        freeze.ranges("x", 0, 6 * PAGE + 1)
    with pytest.raises(KeyError):
        freeze.ranges("y", 0, 1)


def test_write_under_way_is_ended_by_the_freeze(make_store: MakeStore, pattern: Pattern) -> None:
    store = make_store(num_slots=2, faults=LATE)
    moves = [store.put(f"x{i}", pattern(300_000, seed=i), Tier.NVME) for i in range(3)]
    freeze = store.freeze()
    assert all(move.is_done() for move in moves)
    for i in range(3):
        assert on_disk(freeze, f"x{i}", 300_000) == pattern(300_000, seed=i).numpy().tobytes()


def test_fetch_sees_what_was_written_behind_a_freeze(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=2, faults=LATE)
    store.put("x", pattern(300_000), Tier.NVME)
    freeze = store.freeze()
    store.fetch("x").wait().copy_(pattern(300_000, seed=1))
    store.release("x", dirty=True)
    # while it is still being written
    assert torch.equal(store.fetch("x").wait(), pattern(300_000, seed=1))
    assert on_disk(freeze, "x", 300_000) == pattern(300_000).numpy().tobytes()


def test_writes_of_other_threads_are_in_a_freeze_whole_or_not_at_all(make_store: MakeStore) -> None:
    store = make_store(num_slots=2, block_bytes=PAGE)
    num_bytes, is_over = 16 * PAGE, threading.Event()
    for name in NAMES:
        store.put(name, torch.zeros(num_bytes, dtype=torch.uint8), Tier.NVME).wait()

    def go_on(name: str) -> None:
        slot = store.arena.take(num_bytes)
        number = 0
        while not is_over.is_set():
            number = number % 250 + 1
            store.write([(name, 0, slot.tensor.fill_(number))], name).wait()

    threads = [threading.Thread(target=go_on, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            freeze = store.freeze()
            found = {name: on_disk(freeze, name, num_bytes) for name in NAMES}
            assert all(len(set(data)) == 1 for data in found.values())
            assert {name: on_disk(freeze, name, num_bytes) for name in NAMES} == found
            store.thaw(freeze)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("num_paths", [1, 2])
def test_blocks_of_an_entry_that_lies_in_several_slots_come_as_they_were_written(
    make_store: MakeStore, pattern: Pattern, two_paths: list[NvmePath], num_paths: int
) -> None:
    # the other slot is elsewhere
    paths = [NvmePath(two_paths[0].path, max_bytes=80 * PAGE, weight=1.0), two_paths[1]]
    store = make_store(num_slots=2, paths=paths[-num_paths:])
    data = pattern(64 * PAGE)
    store.put("x", data, Tier.NVME).wait()
    store.freeze()
    for start, stop in [(3, 4), (9, 21), (40, 64)]:
        data[start * PAGE : stop * PAGE] = pattern((stop - start) * PAGE, seed=stop)
        write(store, "x", start * PAGE, data[start * PAGE : stop * PAGE])
    home = store._entries["x"].nvme
    assert home is not None
    assert len({extent.path_index for extent in home.extents if extent is not None}) == num_paths
    for block_pages in (1, 2, 6):
        offsets = np.random.default_rng(block_pages).integers(0, 65 - block_pages, 50) * PAGE
        into = store.arena.take(50 * block_pages * PAGE).tensor
        store.read_blocks("x", offsets, block_pages * PAGE, into).wait()
        assert torch.equal(
            into, torch.cat([data[o : o + block_pages * PAGE] for o in offsets.tolist()])
        )


def test_blocks_are_one_call_also_where_slots_meet(
    make_store: MakeStore, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(num_slots=2)
    store.put("x", pattern(64 * PAGE), Tier.NVME).wait()
    store.freeze()
    write(store, "x", 5 * PAGE, pattern(PAGE, seed=1))
    calls: list[tuple[int, int]] = []
    submit_blocks = Queue.submit_blocks

    def watch(self: Queue, blocks: Blocks, priority: int, *rest: int) -> int:
        calls.append((len(blocks.addresses), blocks.length))
        return submit_blocks(self, blocks, priority, *rest)

    monkeypatch.setattr(Queue, "submit_blocks", watch)
    into = store.arena.take(8 * PAGE).tensor
    store.read_blocks("x", np.array([0, 8], np.int64) * PAGE, 4 * PAGE, into).wait()  # none crosses
    store.read_blocks("x", np.array([2, 8], np.int64) * PAGE, 4 * PAGE, into).wait()  # 2 to 6 does
    assert calls == [(2, 4 * PAGE), (8, PAGE)]


# ---- room ----------------------------------------------------------------------------------------


def test_second_slot_takes_room_when_it_is_written_and_a_dropped_one_when_it_is_thawed(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=3)
    sizes = []
    store.put("x", pattern(3 * PAGE), Tier.NVME).wait()
    freeze = store.freeze()
    sizes.append(store.stats().nvme_bytes)
    write(store, "x", 0, pattern(PAGE, seed=1))
    sizes.append(store.stats().nvme_bytes)
    store.drop("x")  # the freeze needs its first slot, nobody the second
    sizes.append(store.stats().nvme_bytes)
    store.put("x", pattern(2 * PAGE, seed=2), Tier.NVME).wait()  # another of that name
    assert on_disk(freeze, "x", 3 * PAGE) == pattern(3 * PAGE).numpy().tobytes()
    store.thaw(freeze)
    sizes.append(store.stats().nvme_bytes)
    assert sizes == [3 * PAGE, 6 * PAGE, 3 * PAGE, 2 * PAGE]


def test_what_is_temporary_is_not_frozen_and_has_one_slot(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=2)
    store.reserve("grad", (2 * PAGE,), torch.uint8, Tier.NVME, is_durable=False)
    store.put("host", torch.ones(5), Tier.HOST)
    assert not store.freeze().parts
    write(store, "grad", 0, pattern(2 * PAGE))
    assert store.stats().nvme_bytes == 2 * PAGE


def test_write_that_finds_no_slot_is_refused_and_changes_nothing(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=1)
    store.put("x", pattern(2 * PAGE), Tier.NVME).wait()
    freeze = store.freeze()
    with pytest.raises(NoSlotError, match=r"freezes hold all 1 slots of them. Thaw one first"):
        write(store, "x", PAGE, pattern(PAGE, seed=1))
    assert content(store, "x") == pattern(2 * PAGE).numpy().tobytes()
    store.thaw(freeze)
    write(store, "x", PAGE, pattern(PAGE, seed=1))
    with pytest.raises(ValueError, match="num_slots is 0"):
        make_store(num_slots=0)


def test_full_disk_refuses_the_second_slot_and_keeps_both_states(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=2, disk_bytes=3 * PAGE)
    store.put("x", pattern(2 * PAGE), Tier.NVME).wait()
    freeze = store.freeze()
    with pytest.raises(OSError, match="exceed disk_bytes") as refusal:
        write(store, "x", 0, pattern(PAGE, seed=1))
    assert refusal.value.errno == errno.ENOSPC
    assert (
        content(store, "x") == on_disk(freeze, "x", 2 * PAGE) == pattern(2 * PAGE).numpy().tobytes()
    )
    store.freeze()  # nothing is lost
