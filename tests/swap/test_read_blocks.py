"""Do batches of small blocks bring the bytes they name, by one call to the queue, and is what no
disk accepts refused?"""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tiermem.swap.base.native import Blocks, Fault, Queue, TransferError
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]


def rows(*numbers: int, block_bytes: int = 4096) -> np.ndarray:
    return np.array(numbers, np.int64) * block_bytes


def expected(whole: torch.Tensor, offsets: np.ndarray, block_bytes: int) -> torch.Tensor:
    return torch.cat([whole[offset : offset + block_bytes] for offset in offsets.tolist()])


# the small stores' own blocks are of 65536
@pytest.mark.parametrize("block_bytes", [4096, 12_288, 131_072])
def test_blocks_come_in_the_order_asked_for(
    make_store: MakeStore, engine: str, pattern: Pattern, block_bytes: int
) -> None:
    store = make_store(engine=engine)
    # the entry does not start where its file does
    store.put("first", pattern(4096), Tier.NVME).wait()
    store.put("x", pattern(1 << 20), Tier.NVME).wait()
    last = (1 << 20) - block_bytes
    offsets = np.random.default_rng(1).integers(0, last // 4096 + 1, 37) * 4096
    offsets[:4] = [last, 0, 4096, 0]  # out of order, twice, and overlapping
    into = store.arena.take(37 * block_bytes).tensor
    move = store.read_blocks("x", offsets, block_bytes, into)
    assert move.wait() is into
    assert torch.equal(into, expected(pattern(1 << 20), offsets, block_bytes))


def test_thousands_of_blocks_are_one_call(
    make_store: MakeStore, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(host_bytes=16 << 20, depth=64)
    store.put("x", pattern(1 << 20), Tier.NVME).wait()
    offsets = np.random.default_rng(2).integers(0, 256, 2000) * 4096
    calls: list[int] = []
    submit_blocks = Queue.submit_blocks

    def watch(self: Queue, blocks: Blocks, priority: int, *rest: int) -> int:
        calls.append(len(blocks.addresses))
        return submit_blocks(self, blocks, priority, *rest)

    def refuse(self: Queue, *rest: object) -> int:
        raise AssertionError("block by block")

    into = store.arena.take(2000 * 4096).tensor
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "submit_blocks", watch)
        patch.setattr(Queue, "submit", refuse)
        store.read_blocks("x", offsets, 4096, into).wait()
    assert calls == [2000]
    assert torch.equal(into, expected(pattern(1 << 20), offsets, 4096))
    assert store.stats().nvme_read_bytes == 2000 * 4096


def test_move_is_named_recorded_and_cancelled_like_any_other(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(faults=(Fault(0, "late", 1000, repeat=1 << 30),))
    store.put("x", pattern(65536), Tier.NVME).wait()
    into = store.arena.take(8192).tensor
    store.read_blocks("x", rows(3, 1), 4096, into, title="two rows").wait()
    event = next(
        event
        for event in store.recorder.events
        if event.name == "two rows" and event.lane == "read"
    )
    assert event.num_bytes == 8192
    store.read_blocks("x", rows(0, 1), 4096, into).cancel()
    store.drop("x")


def test_no_blocks_are_no_transfer(store: TensorStore) -> None:
    store.reserve("x", (4096,), torch.uint8, Tier.NVME)
    nothing = torch.empty(0, dtype=torch.uint8)
    assert store.read_blocks("x", rows(), 4096, nothing).is_done()
    assert store.stats().engine == "none yet"


def test_block_that_fails_is_named_and_the_store_goes_on(
    make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    store = make_store(engine=engine, depth=1, faults=(Fault(3, "error", errno.EIO),))
    store.put("x", pattern(65536), Tier.NVME).wait()  # block 0
    into = store.arena.take(5 * 4096).tensor
    with pytest.raises(TransferError, match="reading 4096 bytes at offset 28672 failed") as failure:
        store.read_blocks("x", rows(9, 8, 7, 6, 5), 4096, into).wait()
    assert str(failure.value.filename).endswith("segment.bin")
    store.read_blocks("x", rows(9, 8, 7, 6, 5), 4096, into).wait()
    assert torch.equal(into, expected(pattern(65536), rows(9, 8, 7, 6, 5), 4096))
    store.flush()  # a read's failure is its own


def test_blocks_of_an_entry_on_any_path(
    make_store: MakeStore, pattern: Pattern, two_paths: list[NvmePath]
) -> None:
    store = make_store(paths=two_paths)
    into = store.arena.take(3 * 4096).tensor
    for i in range(4):
        store.put(f"x{i}", pattern(65536, seed=i), Tier.NVME).wait()
        store.read_blocks(f"x{i}", rows(15, 0, 7), 4096, into).wait()
        assert torch.equal(into, expected(pattern(65536, seed=i), rows(15, 0, 7), 4096))
    assert [path.read_bytes for path in store.stats().paths] == [2 * 3 * 4096] * 2


@pytest.mark.parametrize(
    ("offsets", "block_bytes", "num_bytes", "message"),
    [
        (np.array([0, 4096], np.int32), 4096, 8192, "flat int64 array, not 1-d int32"),
        (np.zeros((2, 2), np.int64), 4096, 16384, "flat int64 array, not 2-d int64"),
        (rows(0, 1), 4095, 8190, "blocks of 4095 bytes"),
        (rows(0, 1), 0, 0, "blocks of 0 bytes"),
        (np.array([4096, 8193], np.int64), 4096, 8192, "offset 8193 is no multiple of 4096"),
        (
            np.array([-4096, 0], np.int64),
            4096,
            8192,
            "blocks at -4096 to 4096 lie outside 'x' .16384 bytes.",
        ),
        (rows(0, 4), 4096, 8192, "blocks at 0 to 20480 lie outside 'x'"),
        (rows(3, 2), 8192, 16384, "blocks at 8192 to 20480 lie outside 'x'"),
        (rows(0, 1), 4096, 4096, "2 blocks of 4096 bytes need a buffer of 8192, not 4096"),
    ],
)
def test_blocks_that_no_disk_accepts_are_refused(
    store: TensorStore, offsets: np.ndarray, block_bytes: int, num_bytes: int, message: str
) -> None:
    store.reserve("x", (16384,), torch.uint8, Tier.NVME)
    into = store.arena.take(1 << 20).tensor[:num_bytes]
    with pytest.raises(ValueError, match=message):
        store.read_blocks("x", offsets, block_bytes, into)


def test_buffer_that_is_odd_or_not_bytes_is_refused(store: TensorStore) -> None:
    store.reserve("x", (16384,), torch.uint8, Tier.NVME)
    slot = store.arena.take(32768).tensor
    with pytest.raises(ValueError, match="must be multiples of 4096"):
        store.read_blocks("x", rows(0), 4096, slot[1:4097])
    for buffer in (slot[:16384].view(torch.float32), slot[::2][:4096]):
        with pytest.raises(ValueError, match="contiguous uint8"):
            store.read_blocks("x", rows(0), 4096, buffer)


def test_entry_on_host_has_no_blocks(store: TensorStore) -> None:
    store.put("x", torch.ones(4), Tier.HOST)
    with pytest.raises(RuntimeError, match="'x' rests on HOST"):
        store.read_blocks("x", rows(0), 4096, store.arena.take(4096).tensor)
    with pytest.raises(KeyError):
        store.read_blocks("y", rows(0), 4096, store.arena.take(4096).tensor)
