"""Does a queue keep its promises from Python: many blocks by one call, its options, work that goes
on without the GIL?"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tiermem.swap.base.native import (
    READ,
    SYNC,
    WRITE,
    Blocks,
    IoSettings,
    Map,
    Op,
    Queue,
    TransferError,
)

BLOCK = 4096
NUM_BLOCKS = 400
_PATIENCE_S = 20.0
Memory = tuple[Map, torch.Tensor]


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Memory for NUM_BLOCKS blocks, and its bytes."""
    memory = Map(NUM_BLOCKS * BLOCK)
    memory.commit(0, NUM_BLOCKS * BLOCK)
    yield memory, memory.tensor()
    memory.close()


@pytest.fixture
def file(
    tmp_path: Path, pattern: Callable[..., torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """A file of NUM_BLOCKS blocks open with O_DIRECT, and what it holds."""
    held = pattern(NUM_BLOCKS * BLOCK)
    (tmp_path / "data").write_bytes(bytes(held.numpy()))
    fd = os.open(tmp_path / "data", os.O_RDWR | os.O_DIRECT)
    yield fd, held
    os.close(fd)


def offsets_of(num_blocks: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The blocks of the file in a random order."""
    return np.random.default_rng(seed).permutation(NUM_BLOCKS)[:num_blocks].astype(np.int64) * BLOCK


@pytest.mark.parametrize("num_blocks", [0, 1, 3, 64, NUM_BLOCKS])
def test_blocks_by_one_call_arrive_where_they_belong(
    engine: str, memory: Memory, file: tuple[int, torch.Tensor], num_blocks: int
) -> None:
    fd, held = file
    queue = Queue(IoSettings(engine, BLOCK, 64), files={fd: "data"})
    offsets, target = offsets_of(num_blocks), memory[1]
    addresses = memory[0].address + np.arange(num_blocks, dtype=np.int64) * BLOCK
    if num_blocks:
        answer = queue.wait(queue.submit_blocks(Blocks(READ, fd, addresses, offsets, BLOCK)))
        assert answer is not None
        assert (answer.error, answer.num_bytes) == (0, num_blocks * BLOCK)
    wanted = [held[o : o + BLOCK] for o in offsets.tolist()]
    assert torch.equal(target[: num_blocks * BLOCK], torch.cat([*wanted, held[:0]]))
    assert queue.counters().read_bytes == num_blocks * BLOCK
    queue.close()


def test_blocks_by_one_call_are_written_like_single_ones(
    engine: str,
    memory: Memory,
    file: tuple[int, torch.Tensor],
    pattern: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    fd, _ = file
    memory[1].copy_(pattern(NUM_BLOCKS * BLOCK, seed=1))
    queue = Queue(IoSettings(engine, BLOCK, 8))
    offsets = np.sort(offsets_of(NUM_BLOCKS))[::2]  # of two blocks each, cut by the queue
    addresses = memory[0].address + offsets[::-1].copy()
    answer = queue.wait(queue.submit_blocks(Blocks(WRITE, fd, addresses, offsets, 2 * BLOCK)))
    assert answer is not None
    queue.raise_for(answer)
    pairs = memory[1].view(-1, 2 * BLOCK).flip(0)
    assert (tmp_path / "data").read_bytes() == bytes(pairs.reshape(-1).numpy())
    queue.close()


def test_a_block_among_many_that_fails_is_named(
    memory: Memory, file: tuple[int, torch.Tensor]
) -> None:
    fd, _ = file
    queue = Queue(IoSettings(block_bytes=BLOCK, depth=4), files={fd: "the file"})
    offsets = np.array([0, NUM_BLOCKS * BLOCK, BLOCK], dtype=np.int64)
    addresses = memory[0].address + np.arange(3, dtype=np.int64) * BLOCK
    answer = queue.wait(queue.submit_blocks(Blocks(READ, fd, addresses, offsets, BLOCK)))
    assert answer is not None
    with pytest.raises(TransferError) as raised:
        queue.raise_for(answer)
    assert (raised.value.errno, raised.value.offset, raised.value.length) == (
        errno.ENODATA,
        NUM_BLOCKS * BLOCK,
        BLOCK,
    )
    assert raised.value.filename == "the file"
    queue.close()


def test_malformed_blocks_are_refused_before_anything_moves(
    memory: Memory, file: tuple[int, torch.Tensor]
) -> None:
    fd, _ = file
    queue = Queue(IoSettings(block_bytes=BLOCK, depth=4))
    row = np.zeros(3, dtype=np.int64)
    with pytest.raises(ValueError, match=r"two rows of one length; given \(3,\), \(2,\)"):
        queue.submit_blocks(Blocks(READ, fd, row, row[:2], BLOCK))
    with pytest.raises(ValueError, match="two rows of one length"):
        queue.submit_blocks(Blocks(READ, fd, row.reshape(1, 3), row.reshape(1, 3), BLOCK))
    with pytest.raises(OSError, match="submitting 3 transfers: Invalid argument"):
        queue.submit_blocks(Blocks(READ, fd, row, row, BLOCK))  # address 0
    with pytest.raises(OSError, match="Invalid argument"):
        queue.submit_blocks(Blocks(READ, fd, row + memory[0].address, row, 0))
    with pytest.raises(OSError, match="Invalid argument"):
        queue.submit_blocks(Blocks(READ, fd, row + memory[0].address, row - 1, BLOCK))
    assert queue.counters().blocks == 0
    queue.close()


def test_blocks_beyond_the_depth_go_on_while_python_holds_the_gil(
    engine: str, memory: Memory, file: tuple[int, torch.Tensor]
) -> None:
    fd, held = file
    queue = Queue(IoSettings(engine, BLOCK, 4))
    offsets = offsets_of(NUM_BLOCKS)
    tag = queue.submit_blocks(Blocks(READ, fd, memory[0].address + offsets, offsets, BLOCK))
    # PyDLL, other than CDLL, keeps the GIL, and so does the loop: no Python thread runs meanwhile
    libc = ctypes.PyDLL(None)
    places = ctypes.c_void_p(memory[0].address), ctypes.c_void_p(held.data_ptr())
    before = sys.getswitchinterval()
    sys.setswitchinterval(_PATIENCE_S)
    for _ in range(int(_PATIENCE_S / 0.01)):
        if has_arrived := libc.memcmp(*places, ctypes.c_size_t(held.nbytes)) == 0:
            break
        libc.usleep(10_000)
    sys.setswitchinterval(before)
    assert has_arrived, f"only {queue.counters().blocks} of {NUM_BLOCKS} blocks ended"
    assert queue.wait(tag) is not None
    queue.close()


@pytest.mark.parametrize("overlap_events", [True, False])
@pytest.mark.parametrize("single_submit", [True, False])
def test_options_change_no_byte(
    engine: str,
    memory: Memory,
    file: tuple[int, torch.Tensor],
    single_submit: bool,
    overlap_events: bool,
) -> None:
    fd, held = file
    region = (memory[0].address, memory[0].num_bytes)
    queue = Queue(
        IoSettings(engine, BLOCK, 16, single_submit=single_submit, overlap_events=overlap_events),
        files={fd: "data"},
        regions=[region],
    )
    answer = queue.wait(queue.submit([Op(READ, fd, memory[0].address, NUM_BLOCKS * BLOCK, 0)]))
    assert answer is not None
    queue.raise_for(answer)
    assert torch.equal(memory[1], held)
    counters = queue.counters()
    assert counters.blocks == NUM_BLOCKS
    if single_submit:
        assert counters.kernel_entries >= NUM_BLOCKS
    queue.close()


def test_clocks_cover_what_was_wanted(
    engine: str, memory: Memory, file: tuple[int, torch.Tensor]
) -> None:
    fd, _ = file
    queue = Queue(IoSettings(engine, BLOCK, 4))
    answer = queue.wait(queue.submit([Op(READ, fd, memory[0].address, NUM_BLOCKS * BLOCK, 0)]))
    assert answer is not None
    counters = queue.counters()
    assert counters.wanted_ns == answer.finished_ns - answer.submitted_ns
    assert 0 < counters.busy_ns <= answer.finished_ns - answer.started_ns
    assert counters.cpu_ns > 0
    queue.wait(queue.submit([Op(SYNC, fd, 0, 0, 0)]))
    queue.close()
