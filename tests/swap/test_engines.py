"""Do all engines move the same bytes? What one writes the others and plain file calls read, at
every edge of alignment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tiermem.swap.base.engines import ENGINES
from tiermem.swap.base.native import READ, SYNC, WRITE, IoSettings, Op, Queue
from tiermem.swap.base.tier import Tier
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.store import TensorStore

SIZES = (0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1)
Pattern = Callable[..., torch.Tensor]


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Memory for both sides of a transfer."""
    arena = Arena(16 << 20)
    yield arena
    arena.close()


@pytest.fixture
def queue(engine: str, arena: Arena) -> Iterator[Queue]:
    """Blocks of 64 KiB, few in flight, so that a transfer is many; half of the arena registered."""
    arena.give_back(arena.take(8 << 20))
    queue = Queue(IoSettings(engine, 65536, 4), regions=arena.regions)
    assert queue.engine == engine
    yield queue
    queue.close()


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, Path]]:
    """An open file; O_DIRECT unless the test asks otherwise."""
    path = tmp_path / "data"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(request, "param", os.O_DIRECT))
    yield fd, path
    os.close(fd)


def move(queue: Queue, *ops: Op) -> None:
    answer = queue.wait(queue.submit(ops))
    assert answer is not None
    queue.raise_for(answer)
    assert answer.num_bytes == sum(op.length for op in ops)
    assert answer.submitted_ns <= answer.started_ns <= answer.finished_ns


@pytest.mark.sampled(16)
@pytest.mark.parametrize("file", [0], indirect=True)  # buffered: any length and offset is allowed
@pytest.mark.parametrize("num_bytes", SIZES[1:])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_bytes_of_any_length_are_identical(
    queue: Queue,
    arena: Arena,
    file: tuple[int, Path],
    pattern: Pattern,
    num_bytes: int,
    offset: int,
) -> None:
    fd, path = file
    out, back = arena.take(num_bytes).tensor, arena.take(num_bytes).tensor
    out.copy_(pattern(num_bytes))
    move(queue, Op(WRITE, fd, out.data_ptr(), num_bytes, offset))
    assert path.read_bytes() == bytes(offset) + bytes(out.numpy())
    move(queue, Op(READ, fd, back.data_ptr(), num_bytes, offset))
    assert torch.equal(back, out)


@pytest.mark.parametrize(
    "num_bytes", [4096, 8192, 65536 - 4096, 65536, 65536 + 4096, 1 << 20, (1 << 20) + 4096]
)
def test_bytes_past_the_page_cache_are_identical(
    queue: Queue, arena: Arena, file: tuple[int, Path], pattern: Pattern, num_bytes: int
) -> None:
    fd, path = file
    out, back = arena.take(num_bytes).tensor, arena.take(num_bytes).tensor
    out.copy_(pattern(num_bytes))
    move(queue, Op(WRITE, fd, out.data_ptr(), num_bytes, 4096))
    assert path.read_bytes()[4096:] == bytes(out.numpy())
    path.write_bytes(bytes(4096) + bytes(pattern(num_bytes, seed=1).numpy()))
    move(queue, Op(READ, fd, back.data_ptr(), num_bytes, 4096))
    assert torch.equal(back, pattern(num_bytes, seed=1))


def test_operations_of_one_tag_end_together(
    queue: Queue, arena: Arena, file: tuple[int, Path], pattern: Pattern
) -> None:
    fd, path = file
    buffer = arena.take(1 << 20).tensor.copy_(pattern(1 << 20))
    pieces = [
        Op(WRITE, fd, buffer.data_ptr() + i * 4096, 4096, (255 - i) * 4096) for i in range(256)
    ]
    move(queue, *pieces)
    expected = pattern(1 << 20).view(256, 4096).flip(0).reshape(-1)
    assert path.read_bytes() == bytes(expected.numpy())


def test_counters_count_the_bytes_that_moved(
    queue: Queue, arena: Arena, file: tuple[int, Path], pattern: Pattern
) -> None:
    fd, _ = file
    buffer = arena.take(1 << 20).tensor
    for kind, length in ((WRITE, 1 << 20), (READ, 131072)):
        move(queue, Op(kind, fd, buffer.data_ptr(), length, 0))
    counters = queue.counters()
    assert (counters.read_bytes, counters.written_bytes, counters.blocks) == (131072, 1 << 20, 18)


def test_sync_is_answered(queue: Queue, file: tuple[int, Path]) -> None:
    answer = queue.wait(queue.submit([Op(SYNC, file[0], 0, 0, 0)]))
    assert answer is not None
    queue.raise_for(answer)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_one_engine_put_every_engine_fetches(
    make_store: Callable[..., TensorStore], engine: str, pattern: Pattern, num_bytes: int
) -> None:
    store = make_store(engine=engine)
    store.put("x", pattern(num_bytes), Tier.NVME).wait()
    home = store._entries["x"].nvme
    assert home is not None
    extent = home.extents[0]
    assert extent is not None
    on_disk = store._files.segments[0].file.read_bytes()[extent.offset : extent.offset + num_bytes]
    assert on_disk == bytes(pattern(num_bytes).numpy())
    assert torch.equal(store.fetch("x").wait(), pattern(num_bytes))


def test_named_engine_is_used_and_an_unknown_one_refused() -> None:
    with pytest.raises(ValueError, match=f"engine is 'spdk'; allowed are {', '.join(ENGINES)}"):
        Queue(IoSettings("spdk"))
    queue = Queue(IoSettings("auto"))
    assert queue.engine in ENGINES[1:]
    assert queue.why
    queue.close()
    assert queue.close() == 0
    with pytest.raises(OSError, match="this I/O queue is closed"):
        queue.counters()
