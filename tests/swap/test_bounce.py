"""Do bytes at odd offsets and lengths pass through aligned buffers, and are their neighbours
kept?"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.base.native import Fault, IoSettings, TransferError
from tiermem.swap.base.tier import Tier
from tiermem.swap.store.checksum import Pieces, crc32c
from tiermem.swap.store.move import Move
from tiermem.swap.store.resources import UnderWay
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import Bounce

NUM_BYTES = 70_000
EDGES = st.sampled_from(
    [0, 1, 4095, 4096, 4097, 8191, 8192, 12288, 40_000, NUM_BYTES - 1, NUM_BYTES]
)
POINTS = st.one_of(EDGES, st.integers(0, NUM_BYTES))
Pattern = Callable[..., torch.Tensor]
MakeStore = Callable[..., TensorStore]


@settings(max_examples=drawn(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(st.tuples(st.booleans(), POINTS, POINTS), max_size=12),
    num_pages=st.integers(1, 3),
    count=st.integers(1, 4),
)
def test_any_range_is_read_and_written_as_in_memory(
    tmp_path: Path,
    pattern: Pattern,
    ranges: list[tuple[bool, int, int]],
    num_pages: int,
    count: int,
) -> None:
    with TensorStore([tmp_path], 1 << 20, IoSettings(block_bytes=4096)) as store:
        model = pattern(NUM_BYTES)
        store.put("x", model, Tier.NVME).wait()
        bounce = Bounce(store, num_pages * 4096, count)
        for seed, (is_write, one, other) in enumerate(ranges):
            start, stop = min(one, other), max(one, other)
            if is_write:
                model[start:stop] = pattern(stop - start, seed=seed)
                bounce.write("x", start, model[start:stop])
            else:
                into = torch.empty(stop - start, dtype=torch.uint8)
                bounce.read("x", start, stop, into)
                assert torch.equal(into, model[start:stop])
        assert torch.equal(store.fetch("x").wait(), model)


@pytest.fixture
def make_bounce(
    make_store: MakeStore, pattern: Pattern
) -> Callable[..., tuple[TensorStore, Bounce]]:
    """A store with an entry "x" of 64 KiB, blocks of 4096 one at a time, and a bounce of two
    buffers of 8192."""

    def make(*faults: Fault) -> tuple[TensorStore, Bounce]:
        store = make_store(block_bytes=65536, depth=1, faults=faults)
        store.put("x", pattern(65536), Tier.NVME).wait()  # block 0
        return store, Bounce(store, 8192, 2)

    return make


def test_empty_range_moves_nothing(make_bounce: Callable[..., tuple[TensorStore, Bounce]]) -> None:
    store, bounce = make_bounce()
    before = store.stats().nvme_read_bytes, store.stats().nvme_written_bytes
    bounce.read("x", 5, 5, torch.empty(0, dtype=torch.uint8))
    bounce.write("x", 5, torch.empty(0, dtype=torch.uint8))
    assert (store.stats().nvme_read_bytes, store.stats().nvme_written_bytes) == before


def test_aligned_write_reads_nothing(
    make_bounce: Callable[..., tuple[TensorStore, Bounce]], pattern: Pattern
) -> None:
    store, bounce = make_bounce()
    bounce.write("x", 4096, pattern(40960, seed=1))
    assert store.stats().nvme_read_bytes == 0


def test_a_piece_that_is_written_part_after_part_has_a_checksum(
    make_bounce: Callable[..., tuple[TensorStore, Bounce]], pattern: Pattern
) -> None:
    store, bounce = make_bounce()
    data = pattern(65536, seed=1)

    def write(*ends: int) -> None:
        for start, stop in itertools.pairwise(ends):
            bounce.write("x", start, data[start:stop])

    store.sums.protect("x", Pieces(np.array([5, 30_000]), np.array([30_000, 65_536])))
    table = store.sums.of("x")
    assert table is not None
    write(0, 9_000, 20_000)
    write(30_000, 40_000)
    write(20_000, 29_000)
    assert not table.is_known.any()
    write(29_000, 30_000)
    write(40_000, 65_536)
    assert table.is_known.all()
    assert table.crcs.tolist() == crc32c([data[5:30_000], data[30_000:]])
    write(5, 9_000)
    write(8_000, 8_100)
    write(9_000, 30_000)
    assert table.is_known.tolist() == [False, True]


@pytest.mark.parametrize(
    ("start", "stop", "buffer"),
    [
        (0, 5, torch.empty(4, dtype=torch.uint8)),
        (0, 4, torch.empty(4)),
        (-1, 3, torch.empty(4, dtype=torch.uint8)),
    ],
)
def test_tensor_that_does_not_match_the_range_is_refused(
    make_bounce: Callable[..., tuple[TensorStore, Bounce]],
    start: int,
    stop: int,
    buffer: torch.Tensor,
) -> None:
    _, bounce = make_bounce()
    with pytest.raises(ValueError, match=f"bytes {start} to {stop} pass through a uint8 tensor"):
        bounce.read("x", start, stop, buffer)


@pytest.mark.parametrize(("piece_bytes", "count"), [(0, 1), (4095, 1), (4096, 0)])
def test_buffers_that_cannot_work_are_refused(
    store: TensorStore, piece_bytes: int, count: int
) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        Bounce(store, piece_bytes, count)


def test_range_beyond_the_entry_is_refused(
    make_bounce: Callable[..., tuple[TensorStore, Bounce]],
) -> None:
    _, bounce = make_bounce()
    with pytest.raises(ValueError, match="lie outside 'x'"):
        bounce.read("x", 60_000, 70_000, torch.empty(10_000, dtype=torch.uint8))


@pytest.mark.parametrize("serial", [1, 2, 4])
def test_failed_piece_is_named_and_no_other_is_under_way_in_the_buffers(
    make_bounce: Callable[..., tuple[TensorStore, Bounce]], pattern: Pattern, serial: int
) -> None:
    store, bounce = make_bounce(Fault(serial, "error", errno.EIO))
    moves: list[Move] = []
    read = store.read

    def watch(ranges: list[tuple[str, int, torch.Tensor]], name: str, is_checked: bool) -> Move:
        moves.append(read(ranges, name, is_checked=is_checked))
        return moves[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "read", watch)
        with pytest.raises(TransferError, match="reading 8192 bytes"):
            bounce.read("x", 0, 65536, torch.empty(65536, dtype=torch.uint8))
    assert [move._is_done for move in moves] == [True] * len(moves)
    into = torch.empty(65536, dtype=torch.uint8)
    bounce.read("x", 0, 65536, into)
    assert torch.equal(into, pattern(65536))


def test_failed_write_is_raised_and_again_when_the_store_settles(
    make_bounce: Callable[..., tuple[TensorStore, Bounce]], pattern: Pattern
) -> None:
    store, bounce = make_bounce(Fault(3, "error", errno.ENOSPC))
    with pytest.raises(TransferError, match="writing 8192 bytes at offset 16384"):
        bounce.write("x", 0, pattern(65536, seed=1))
    with pytest.raises(TransferError, match="writing 8192 bytes at offset 16384"):
        store.flush()
    bounce.write("x", 0, pattern(65536, seed=2))
    assert torch.equal(store.fetch("x").wait(), pattern(65536, seed=2))


def test_a_read_that_an_interrupt_has_left_ends_before_its_buffer_is_used_again(
    tmp_path: Path, pattern: Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with TensorStore([tmp_path], 1 << 20) as store:
        model, into, ended = (
            pattern(NUM_BYTES),
            torch.empty(NUM_BYTES, dtype=torch.uint8),
            list[str](),
        )
        store.put("x", model, Tier.NVME).wait()
        bounce = Bounce(store, 4096, 2)
        with monkeypatch.context() as patch:
            patch.setattr(UnderWay, "add", stop)
            with pytest.raises(KeyboardInterrupt):
                bounce.read("x", 0, NUM_BYTES, into)
        end = store.end_transfers
        monkeypatch.setattr(store, "end_transfers", lambda: (ended.append("all"), end()))
        bounce.read("x", 0, NUM_BYTES, into)
        assert ended and torch.equal(into, model)
