"""When the disk lies or fails, are transfers finished or named, and does the store go on?"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch

from tiermem.swap.base.native import Fault, TransferError
from tiermem.swap.base.tier import Tier
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
NUM_BYTES = 8 * 65536 + 4096  # nine blocks of the small stores


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0, "short", 4096),
        Fault(3, "short", 4097, repeat=5),
        Fault(2, "short", 1),
        Fault(8, "short", 0),
        Fault(1, "error", errno.EINTR, repeat=4),
        Fault(1, "error", errno.EAGAIN, repeat=4),
        Fault(0, "late", 7, repeat=3),
        Fault(0, "refused", 0, repeat=50),
    ],
    ids=lambda fault: f"{fault.kind} {fault.value} at {fault.serial}",
)
def test_what_can_be_finished_is_finished(
    make_store: MakeStore, engine: str, pattern: Pattern, fault: Fault
) -> None:
    store = make_store(engine=engine, faults=(fault,))
    store.put("x", pattern(NUM_BYTES), Tier.NVME).wait()
    assert torch.equal(store.fetch("x").wait(), pattern(NUM_BYTES))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(9, "short", 4096, repeat=3),
        Fault(12, "error", errno.EINTR, repeat=2),
        Fault(9, "late", 5, repeat=2),
    ],
    ids=lambda fault: fault.kind,
)
def test_reads_are_finished_as_writes_are(
    make_store: MakeStore, engine: str, pattern: Pattern, fault: Fault
) -> None:
    store = make_store(engine=engine, faults=(fault,))
    store.put("x", pattern(NUM_BYTES), Tier.NVME).wait()  # blocks 0 to 8
    assert torch.equal(store.fetch("x").wait(), pattern(NUM_BYTES))


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EIO, "kernel log"),
        (errno.ENOSPC, "free some space or add a path"),
        (errno.EDQUOT, "the quota is used up"),
        (errno.EINVAL, "alignment or O_DIRECT"),
    ],
)
@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_what_cannot_be_finished_is_named_and_the_store_goes_on(
    make_store: MakeStore, engine: str, pattern: Pattern, code: int, advice: str, kind: str
) -> None:
    serial = 4 if kind == "writing" else 13
    # one in flight: blocks in order
    store = make_store(engine=engine, depth=1, faults=(Fault(serial, "error", code),))
    move = store.put("x", pattern(NUM_BYTES), Tier.NVME)
    if kind == "reading":
        move.wait()
        move = store.fetch("x")
    with pytest.raises(
        TransferError, match=rf"{kind} 65536 bytes at offset 262144 failed: .*{advice}"
    ) as failure:
        move.wait()
    error = failure.value
    assert (error.errno, error.offset, error.length) == (code, 4 * 65536, 65536)
    assert str(error.filename).endswith("segment.bin")
    assert store.arena.carved_bytes == 0
    store.put("y", pattern(NUM_BYTES, seed=1), Tier.NVME).wait()
    assert torch.equal(store.fetch("y").wait(), pattern(NUM_BYTES, seed=1))
    if kind == "writing":
        with pytest.raises(TransferError):
            store.flush()
    store.flush()


def test_errors_that_never_end_end_in_that_error(
    make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    store = make_store(engine=engine, faults=(Fault(0, "error", errno.EINTR, repeat=1 << 20),))
    with pytest.raises(TransferError) as failure:
        store.put("x", pattern(4096), Tier.NVME).wait()
    assert failure.value.errno == errno.EINTR
    with pytest.raises(TransferError):
        store.close()


def test_truncated_segment_is_told_from_a_failing_disk(
    make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    store = make_store(engine=engine)
    store.put("x", pattern(NUM_BYTES), Tier.NVME).wait()
    with store._files.segments[0].file.open("r+b") as file:
        file.truncate(65536)
    with pytest.raises(TransferError, match="something truncated it") as failure:
        store.fetch("x").wait()
    assert failure.value.errno == errno.ENODATA


def test_failure_of_one_tensor_spares_the_others(
    make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    store = make_store(engine=engine, depth=1, faults=(Fault(1, "error", errno.EIO),))
    moves = [store.put(f"x{i}", pattern(4096, seed=i), Tier.NVME) for i in range(4)]
    failed = [move.name for move in moves if not _arrives(move.wait)]
    assert failed == ["x1"]
    for i in (0, 2, 3):
        assert torch.equal(store.fetch(f"x{i}").wait(), pattern(4096, seed=i))
    with pytest.raises(TransferError):
        store.flush()


def _arrives(wait: Callable[[], object]) -> bool:
    try:
        wait()
    except OSError:
        return False
    return True
