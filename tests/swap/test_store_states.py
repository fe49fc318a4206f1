"""Does an entry go only where its diagram says, and does every arrow do what it says to memory and
disk?"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermem.swap.base.native import Fault
from tiermem.swap.base.tier import Tier
from tiermem.swap.memory.arena import BudgetError
from tiermem.swap.store.entry import Entry
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
LATE = Fault(0, "late", 1000, repeat=1 << 30)  # completions come when nothing else can come


def written_by_process() -> int:
    """Bytes this process caused to be sent to the storage layer."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


# ---- put, fetch, release -------------------------------------------------------------------------


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (1023,), (1024,), (1025,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_was_put_is_fetched(
    store: TensorStore, home: Tier, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape).mul(3).to(dtype)
    store.put("x", tensor, home).wait()
    fetched = store.fetch("x").wait()
    assert (fetched.dtype, fetched.shape) == (dtype, torch.Size(shape))
    assert torch.equal(fetched, tensor)
    assert store.home_of("x") is home


def test_put_takes_a_tensor_that_is_not_contiguous(store: TensorStore) -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    store.put("x", tensor, Tier.NVME)
    tensor.fill_(-1)  # the copy was done on return
    assert torch.equal(store.fetch("x").wait(), torch.arange(12.0).view(3, 4).t())


def test_states_follow_the_diagram(make_store: MakeStore) -> None:
    store = make_store(faults=(LATE,))
    entry_of = store._entries.__getitem__
    store.put("x", torch.ones(5), Tier.NVME)
    assert entry_of("x").state.name == "LEAVING"
    coming = store.fetch("x")
    assert entry_of("x").state.name == "COMING"
    coming.wait()
    assert entry_of("x").state.name == "PRESENT"
    assert store.is_present("x")
    assert store.release("x") is None
    assert entry_of("x").state.name == "HOME"


def test_tensor_that_rests_on_host_is_its_own_home(store: TensorStore) -> None:
    store.put("x", torch.zeros(4), Tier.HOST)
    store.view("x").fill_(2)
    assert store.fetch("x").wait().data_ptr() == store.view("x").data_ptr()
    assert store.release("x") is None
    assert store.release("x", dirty=True) is not None
    assert torch.equal(store.fetch("x").wait(), torch.full((4,), 2.0))
    assert store.stats().nvme_read_bytes == store.stats().nvme_written_bytes == 0


def test_release_of_clean_tensor_writes_nothing(store: TensorStore) -> None:
    store.put("x", torch.ones(100_000), Tier.NVME).wait()
    written, by_process = store.stats().nvme_written_bytes, written_by_process()
    for _ in range(3):
        store.fetch("x").wait()
        store.release("x")
    store.flush()
    assert store.stats().nvme_written_bytes == written
    assert written_by_process() == by_process


def test_release_of_dirty_tensor_writes_exactly_its_padded_bytes(store: TensorStore) -> None:
    store.put("x", torch.ones(100_001), Tier.NVME).wait()
    store.fetch("x").wait().fill_(3)
    written, by_process = store.stats().nvme_written_bytes, written_by_process()
    move = store.release("x", dirty=True)
    assert move is not None
    move.wait()
    padded = -(-4 * 100_001 // 4096) * 4096
    assert store.stats().nvme_written_bytes - written == padded
    assert written_by_process() - by_process == padded  # O_DIRECT: no more, no less
    assert torch.equal(store.fetch("x").wait(), torch.full((100_001,), 3.0))


def test_fetch_reads_exactly_the_padded_bytes_once(store: TensorStore) -> None:
    store.put("x", torch.ones(100_001), Tier.NVME).wait()
    for _ in range(2):  # the second finds it present
        store.fetch("x").wait()
    assert store.stats().nvme_read_bytes == -(-4 * 100_001 // 4096) * 4096


def test_fetch_of_what_is_coming_returns_the_same_move(make_store: MakeStore) -> None:
    store = make_store(faults=(LATE,))
    store.put("x", torch.ones(5), Tier.NVME).wait()
    move = store.fetch("x")
    assert store.fetch("x") is move
    assert torch.equal(move.wait(), torch.ones(5))


def test_fetch_while_leaving_sees_the_new_bytes(make_store: MakeStore, pattern: Pattern) -> None:
    store = make_store(host_bytes=16 << 20, faults=(LATE,))
    store.put("x", pattern(1 << 20, seed=1), Tier.NVME).wait()
    for seed in range(2, 8):
        store.fetch("x").wait().copy_(pattern(1 << 20, seed=seed))
        store.release("x", dirty=True)
        assert torch.equal(store.fetch("x").wait(), pattern(1 << 20, seed=seed))
        store.release("x")


def test_cancelled_fetch_of_what_is_leaving_does_not_forget_the_write(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(host_bytes=16 << 20, faults=(LATE,))
    store.put("x", pattern(1 << 20), Tier.NVME)
    store.fetch("x").cancel()
    assert store._entries["x"].state.name == "LEAVING"
    assert torch.equal(store.fetch("x").wait(), pattern(1 << 20))
    store.release("x")
    assert store.arena.carved_bytes == 0


def test_slot_lent_by_the_caller_is_filled_and_never_given_away(store: TensorStore) -> None:
    store.put("x", torch.arange(5), Tier.NVME).wait()
    slot = store.arena.take(4096)
    carved = store.arena.carved_bytes
    tensor = store.fetch("x", into=slot).wait()
    assert tensor.data_ptr() == slot.tensor.data_ptr()
    tensor.add_(1)
    move = store.release("x", dirty=True)
    assert move is not None
    move.wait()
    assert store.arena.carved_bytes == carved
    assert torch.equal(store.fetch("x").wait(), torch.arange(1, 6))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("come_to", "message"),
    [
        ("HOME", "'x' is HOME; only what is PRESENT"),
        ("COMING", "is COMING; only"),
        ("LEAVING", "is LEAVING; only"),
    ],
)
@pytest.mark.parametrize("dirty", [False, True])
def test_release_of_what_is_not_present_names_both_states(
    make_store: MakeStore, come_to: str, message: str, dirty: bool
) -> None:
    store = make_store(faults=(LATE,))
    move = store.put("x", torch.ones(5), Tier.NVME)
    if come_to != "LEAVING":
        move.wait()
    if come_to == "COMING":
        store.fetch("x")
    with pytest.raises(RuntimeError, match=message):
        store.release("x", dirty)
    assert torch.equal(store.fetch("x").wait(), torch.ones(5))  # nothing was disturbed


def test_slot_that_is_too_small_is_refused_and_changes_nothing(store: TensorStore) -> None:
    store.put("x", torch.ones(1025), Tier.NVME).wait()
    slot = store.arena.take(4100)
    with pytest.raises(ValueError, match="'x' needs a slot of 8192 bytes; it has 4100"):
        store.fetch("x", into=slot)
    assert torch.equal(store.fetch("x").wait(), torch.ones(1025))


def test_names_are_unique_and_known(store: TensorStore) -> None:
    store.put("x", torch.ones(1), Tier.HOST)
    with pytest.raises(ValueError, match="'x' is in the store already"):
        store.put("x", torch.ones(1), Tier.HOST)
    assert "x" in store
    for ask in (
        store.fetch,
        store.release,
        store.view,
        store.drop,
        store.home_of,
        store.is_present,
    ):
        with pytest.raises(KeyError):
            ask("y")


def test_what_rests_on_the_device_is_looked_at_in_place(store: TensorStore) -> None:
    store.put("x", torch.arange(5.0), Tier.DEVICE).wait()
    store.view("x").mul_(2.0)
    assert store.fetch("x").wait().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert store.stats().host_bytes == 0
    store.release("x")
    store.drop("x")
    assert "x" not in store


def test_views_of_nvme_are_refused(store: TensorStore) -> None:
    store.reserve("y", (1,), torch.float32, Tier.NVME)
    with pytest.raises(RuntimeError, match="rests on NVME"):
        store.view("y")


# ---- the budget ----------------------------------------------------------------------------------


def test_budget_is_kept_by_waiting_for_write_backs(make_store: MakeStore, pattern: Pattern) -> None:
    store = make_store(host_bytes=2 << 20)
    for i in range(16):
        store.put(f"x{i}", pattern(1 << 20, seed=i), Tier.NVME)  # the budget holds two
    for i in range(16):
        assert torch.equal(store.fetch(f"x{i}").wait(), pattern(1 << 20, seed=i))
        store.release(f"x{i}", dirty=True)
    assert store.stats().host_peak_bytes <= 2 << 20


def test_what_cannot_fit_is_refused_and_leaves_nothing(make_store: MakeStore) -> None:
    store = make_store(host_bytes=1 << 20)
    store.put("big", torch.ones(200_000), Tier.HOST)
    for home, purpose in ((Tier.NVME, "on its way to NVME"), (Tier.HOST, "resting on HOST")):
        with pytest.raises(BudgetError, match=f"'x', {purpose}, needs 401408 bytes"):
            store.put("x", torch.ones(100_000), home)
        assert "x" not in store
    assert store.stats().nvme_bytes == 0
    store.drop("big")
    store.put("x", torch.ones(100_000), Tier.NVME)


def test_fetch_that_cannot_fit_is_refused_and_can_be_asked_again(make_store: MakeStore) -> None:
    store = make_store(host_bytes=1 << 20)
    store.put("x", torch.ones(200_000), Tier.NVME).wait()
    slot = store.arena.take(1 << 19)
    with pytest.raises(BudgetError, match="'x', being fetched, needs 802816 bytes"):
        store.fetch("x")
    store.arena.give_back(slot)
    assert torch.equal(store.fetch("x").wait(), torch.ones(200_000))


# ---- dropping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["HOME", "COMING", "PRESENT", "LEAVING", "COMING after LEAVING"])
def test_drop_frees_memory_and_home_whatever_the_state(
    make_store: MakeStore, state: str, pattern: Pattern
) -> None:
    store = make_store(host_bytes=8 << 20, faults=(LATE,))
    move = store.put("x", pattern(1 << 20), Tier.NVME)
    if "LEAVING" not in state:
        move.wait()
    if state in ("COMING", "PRESENT", "COMING after LEAVING"):
        coming = store.fetch("x")
        if state == "PRESENT":
            coming.wait()
    assert store._entries["x"].state.name == state.split()[0]
    store.drop("x")
    assert store.arena.carved_bytes == store.stats().nvme_bytes == 0
    assert "x" not in store
    # Whatever gets the extent next is not written over by what was under way.
    store.put("y", pattern(1 << 20, seed=1), Tier.NVME).wait()
    assert torch.equal(store.fetch("y").wait(), pattern(1 << 20, seed=1))
    store.close()  # a cancelled write is no error


def test_drop_waits_for_ranges_under_way(make_store: MakeStore, pattern: Pattern) -> None:
    store = make_store(faults=(LATE,))
    store.reserve("x", (1 << 20,), torch.uint8, Tier.NVME)
    buffer = store.arena.take(1 << 20).tensor
    move = store.write([("x", 0, buffer)], "x")
    store.drop("x")
    assert move.is_done()
    assert not move.has_failed


# ---- a write-back that failed --------------------------------------------------------------------


@pytest.mark.parametrize("is_waited_for", [False, True])
@pytest.mark.parametrize("is_lent", [False, True])
def test_fetch_after_a_failed_write_raises_its_error_never_old_bytes(
    make_store: MakeStore, is_waited_for: bool, is_lent: bool
) -> None:
    # The first write (block 0) and read (block 1) pass, the second write (block 2) fails.
    store = make_store(faults=(Fault(2, "error", errno.EIO),))
    store.put("x", torch.ones(5), Tier.NVME).wait()
    store.fetch("x").wait().fill_(2)
    write = store.release("x", dirty=True)
    assert write is not None
    if is_waited_for:
        with pytest.raises(OSError, match="writing 4096 bytes"):
            write.wait()
    slot = store.arena.take(4096) if is_lent else None
    for _ in range(3):
        move = store.fetch("x", into=slot)
        for _ in range(2):
            with pytest.raises(OSError, match="writing 4096 bytes at offset 0 failed") as failure:
                move.wait()
        assert failure.value.errno == errno.EIO
        assert store._entries["x"].state.name == "LOST"
    with pytest.raises(RuntimeError, match="'x' is LOST"):
        store.release("x")
    assert store.arena.carved_bytes == (4096 if is_lent else 0)
    store.drop("x")
    store.put("x", torch.full((5,), 3.0), Tier.NVME).wait()  # the store goes on
    assert torch.equal(store.fetch("x").wait(), torch.full((5,), 3.0))
    with pytest.raises(OSError, match="writing 4096 bytes at offset 0 failed"):
        store.close()


def test_failed_read_leaves_the_tensor_at_home(make_store: MakeStore) -> None:
    store = make_store(faults=(Fault(1, "error", errno.EIO),))
    store.put("x", torch.ones(5), Tier.NVME).wait()
    with pytest.raises(OSError, match="reading 4096 bytes at offset 0 failed"):
        store.fetch("x").wait()
    assert store.arena.carved_bytes == 0
    assert torch.equal(store.fetch("x").wait(), torch.ones(5))


def test_settle_raises_the_first_error_once_and_waits_for_all(make_store: MakeStore) -> None:
    store = make_store(faults=(Fault(0, "error", errno.EIO), Fault(1, "error", errno.ENOSPC)))
    moves = [store.put(f"x{i}", torch.ones(5), Tier.NVME) for i in range(4)]
    with pytest.raises(OSError, match="Input/output error"):
        store.flush()
    assert all(move.is_done() for move in moves)
    store.flush()


@pytest.mark.parametrize("owner", ["arrive", "give_back"], ids=["read", "write"])
def test_an_interrupt_at_the_end_of_a_move_is_completed_by_the_next_wait(
    make_store: MakeStore, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    store.put("a", torch.arange(4096.0), Tier.NVME)
    store.flush()
    carved = store.arena.carved_bytes
    move = store.fetch("a")
    if owner == "give_back":
        move.wait()
        leaving = store.release("a", dirty=True)
        assert leaving is not None
        move = leaving
    at: Any = store._entries["a"] if owner == "arrive" else store.arena
    act = getattr(at, owner)

    def act_and_interrupt(*given: Any) -> None:
        act(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(at, owner, act_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            move.wait()
    move.wait()
    assert torch.equal(store.fetch("a").wait(), torch.arange(4096.0))
    store.release("a")
    store.flush()
    assert store.arena.carved_bytes == carved


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_tensor_whose_release_was_interrupted_keeps_its_memory(
    make_store: MakeStore, has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    store = make_store()
    store.put("a", torch.arange(4096.0), Tier.NVME)
    store.flush()
    carved = store.arena.carved_bytes
    shown = store.fetch("a").wait()
    with monkeypatch.context() as patched:
        patched.setattr(Entry, "leave", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.release("a", dirty=True)
    if has_ended:
        store.flush()
    other = store.arena.take(4096 * 4, "another")
    assert store.is_present("a") and other.tensor.data_ptr() != shown.data_ptr()
    store.arena.give_back(other)
    store.release("a", dirty=True)
    store.flush()
    assert store.arena.carved_bytes == carved
