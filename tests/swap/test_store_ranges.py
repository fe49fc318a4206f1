"""Do byte ranges reach exactly the bytes they name, and is what no disk accepts refused before it
is asked for?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tiermem.swap.base.tier import Tier
from tiermem.swap.store.store import TensorStore

Pattern = Callable[..., torch.Tensor]


def test_one_move_reads_and_writes_ranges_of_several_entries(
    store: TensorStore, pattern: Pattern
) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        store.put(name, pattern(16384, seed=seed), Tier.NVME).wait()
    slot = store.arena.take(8192).tensor
    store.write(
        [
            ("a", 4096, slot[:4096].copy_(pattern(4096, 3))),
            ("b", 0, slot[4096:].copy_(pattern(4096, 4))),
        ],
        "w",
    ).wait()
    into = store.arena.take(12288).tensor
    first, second = store.read([("b", 0, into[:8192]), ("a", 4096, into[8192:])], "r").wait()
    assert torch.equal(first, torch.cat([pattern(4096, 4), pattern(16384, 2)[4096:8192]]))
    assert torch.equal(second, pattern(4096, 3))
    assert torch.equal(store.fetch("a").wait()[:4096], pattern(16384, 1)[:4096])


def test_move_of_no_range_has_ended_and_opens_no_queue(store: TensorStore) -> None:
    assert store.read([], "nothing").is_done()
    assert store.write([], "nothing").wait() == []
    assert store.stats().engine == "none yet"


@pytest.mark.parametrize(
    ("offset", "first", "last", "message"),
    [
        (-4096, 0, 4096, "bytes -4096 to 0 lie outside 'a' .8192 bytes."),
        (4096, 0, 8192, "bytes 4096 to 12288 lie outside 'a'"),
        (1, 0, 4096, "offset 1, length 4096"),
        (0, 0, 4095, "length 4095"),
        (0, 1, 4097, "must be multiples of 4096; odd ranges pass through a Bounce"),
    ],
)
def test_range_that_the_disk_does_not_accept_is_refused(
    store: TensorStore, offset: int, first: int, last: int, message: str
) -> None:
    store.reserve("a", (8192,), torch.uint8, Tier.NVME)
    buffer = store.arena.take(16384).tensor[first:last]
    for ask in (store.read, store.write):
        with pytest.raises(ValueError, match=message):
            ask([("a", offset, buffer)], "range")


def test_buffer_that_is_not_bytes_is_refused(store: TensorStore) -> None:
    store.reserve("a", (8192,), torch.uint8, Tier.NVME)
    slot = store.arena.take(16384).tensor
    for buffer in (slot[:8192].view(torch.float32), slot[::2][:4096]):
        with pytest.raises(ValueError, match="contiguous uint8"):
            store.read([("a", 0, buffer)], "range")


def test_entry_on_host_has_no_ranges(store: TensorStore) -> None:
    store.put("a", torch.ones(4), Tier.HOST)
    with pytest.raises(RuntimeError, match="'a' rests on HOST: there is no file"):
        store.read([("a", 0, store.arena.take(4096).tensor)], "range")


def test_buffer_of_a_move_that_nobody_kept_lives_until_it_ends(
    store: TensorStore, pattern: Pattern
) -> None:
    store.put("a", pattern(1 << 20), Tier.NVME).wait()
    for _ in range(20):
        spare = torch.empty((1 << 20) + 4096, dtype=torch.uint8)
        start = -spare.data_ptr() % 4096
        store.read([("a", 0, spare[start : start + (1 << 20)])], "range")
        del spare
    store.close()
