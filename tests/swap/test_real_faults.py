"""Is every fault, on every engine, the right OSError or healed, and what had arrived kept?

Every row is held on io_uring, Linux AIO and threads (the `engine` fixture; an engine that cannot
run is a listed skip). "Lying disk" is a FUSE file system that answers as it is told
(lying_disk.py): the engines get the kernel's own answer.

    fault                   by the fault engine            by real means
    short read              test_transfer_faults           here: lying disk; a file that ends within the block
    short write             test_transfer_faults           here: lying disk; a limit of the process (RLIMIT_FSIZE)
    EIO                     test_transfer_faults           here: lying disk
                                                           test_failing_disks: dm-error, a device
                                                               that lost a range, a thin
                                                           device that runs full, a device that goes
                                                           away
    ENOSPC mid-write        test_transfer_faults           here: lying disk; test_failing_disks: a full file system
    ENOSPC at reservation   -                              test_files, test_paths, test_store_damage
    EFBIG                   -                              here: RLIMIT_FSIZE (at reservation: test_files)
    EROFS                   -                              test_failing_disks: ext4 turns itself read-only
    EINTR                   test_transfer_faults           here: lying disk; test_signals: signals, stop and continue
    EAGAIN                  test_transfer_faults           here: lying disk
    submission refused      test_transfer_faults           - (a kernel short of memory)
    late, out of order      test_transfer_faults           every real disk
    truncated by another    -                              test_store_damage; here: while reads are under way
    path deleted            -                              test_store_damage
    no locked memory        -                              test_engine_refusals: RLIMIT_MEMLOCK
    io_uring refused        -                              test_engine_refusals: seccomp; here: files on FUSE
    Linux AIO exhausted     -                              test_engine_refusals: fs.aio-max-nr

io_uring is never used on FUSE files (engine_uring.cpp says why), but the lying disk is told to it
all the same, by a queue that was not told of its files; only short transfers are not, which there
it gets wrong.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lies import Lies

from tiermem.swap.base.native import READ, WRITE, IoSettings, Map, Op, Queue, TransferError
from tiermem.swap.base.ranges import FileRange
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.memory.arena import Arena
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import FileReader, ReadAhead

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
MIB = 1 << 20
BLOCK = 65536
NUM_BYTES = 8 * BLOCK + 4096  # nine blocks of the small stores
HEALED: list[dict[str, object]] = [
    {"code": errno.EINTR, "times": 4},
    {"code": errno.EAGAIN, "times": 4},
]
SHORT: list[dict[str, object]] = [
    {"keep": 4096, "times": 3},
    {"keep": 4097, "times": 3},
    {"keep": 1},
]
KINDS = ["read", "write"]


def _id(rule: object) -> str | None:
    if not isinstance(rule, dict):
        return None
    return errno.errorcode[rule["code"]] if "code" in rule else f"short {rule['keep']}"


# ---- a disk that lies ----------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Map]:
    """Twice the bytes of a transfer."""
    memory = Map(2 * NUM_BYTES)
    memory.commit(0, memory.num_bytes)
    yield memory
    memory.close()


@pytest.fixture
def file(lies: Lies) -> Iterator[int]:
    """A direct file on the lying disk."""
    fd = os.open(lies.point / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    yield fd
    with contextlib.suppress(OSError):  # the disk may be gone
        os.close(fd)


def transfer(
    queue: Queue, kind: int, fd: int, address: int, num_bytes: int = NUM_BYTES, offset: int = 0
) -> None:
    """Does one, and raises what became of it."""
    answer = queue.wait(queue.submit([Op(kind, fd, address, num_bytes, offset)]))
    assert answer is not None
    queue.raise_for(answer)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [*HEALED, *SHORT], ids=_id)
def test_what_the_kernel_could_not_do_at_once_is_done(
    lies: Lies,
    file: int,
    memory: Map,
    engine: str,
    pattern: Pattern,
    kind: str,
    rule: dict[str, object],
) -> None:
    if engine == "uring" and rule in SHORT:
        pytest.skip(
            "io_uring finishes short transfers of FUSE files at the wrong place: see "
            "engine_uring.cpp"
        )
    queue, tensor = Queue(IoSettings(engine, BLOCK)), memory.tensor()
    tensor[:NUM_BYTES] = pattern(NUM_BYTES)
    lies.tell({"kind": kind, "start": 3 * BLOCK, "stop": 4 * BLOCK, **rule})
    transfer(queue, WRITE, file, memory.address)
    transfer(queue, READ, file, memory.address + NUM_BYTES)
    assert torch.equal(tensor[:NUM_BYTES], tensor[NUM_BYTES:])
    queue.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_error_of_the_disk_names_the_block_and_spares_the_others(
    lies: Lies, file: int, memory: Map, engine: str, pattern: Pattern, kind: str, code: int
) -> None:
    queue, tensor = Queue(IoSettings(engine, BLOCK, 1)), memory.tensor()
    tensor[:NUM_BYTES] = pattern(NUM_BYTES)
    transfer(queue, WRITE, file, memory.address)
    lies.tell(
        {
            "kind": kind,
            "start": 3 * BLOCK + 4096,
            "stop": 3 * BLOCK + 4097,
            "code": code,
            "times": 2,
        }
    )
    for _ in range(2):
        with pytest.raises(TransferError) as failure:
            transfer(queue, READ if kind == "read" else WRITE, file, memory.address)
        assert (failure.value.errno, failure.value.offset, failure.value.length) == (
            code,
            3 * BLOCK,
            BLOCK,
        )
    transfer(queue, READ, file, memory.address + NUM_BYTES)
    assert torch.equal(pattern(NUM_BYTES), tensor[NUM_BYTES:])
    queue.close()


@pytest.mark.parametrize("engine", ["auto", "aio", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_store_on_a_lying_disk_heals_or_names_and_goes_on(
    lies: Lies, make_store: MakeStore, pattern: Pattern, engine: str, kind: str
) -> None:
    store = make_store(engine=engine, depth=1, paths=[NvmePath(lies.point)])
    everywhere: dict[str, object] = {"kind": kind, "start": 0, "stop": 1 << 40}
    for rule in [*HEALED, *SHORT]:
        lies.tell({**everywhere, **rule})
        store.put("x", pattern(NUM_BYTES), Tier.NVME).wait()
        assert torch.equal(store.fetch("x").wait(), pattern(NUM_BYTES))
        store.drop("x")
    store.put("kept", pattern(NUM_BYTES, seed=1), Tier.NVME).wait()
    for code in (errno.EIO, errno.ENOSPC):
        lies.tell({**everywhere, "code": code})
        moved: list[Callable[[], object]] = [store.put("y", pattern(NUM_BYTES), Tier.NVME).wait]
        if kind == "read":
            moved[0]()
            moved = [store.fetch("y").wait]
        with pytest.raises(TransferError, match=r"segment\.bin") as failure:
            moved[0]()
        assert (failure.value.errno, failure.value.length) == (code, BLOCK)
        store.drop("y")
    assert torch.equal(store.fetch("kept").wait(), pattern(NUM_BYTES, seed=1))
    if kind == "write":
        with pytest.raises(TransferError):
            store.flush()
    assert "uring" not in store.stats().engine
    assert (
        engine != "auto"
    ) or "short transfers of FUSE files at the wrong place" in store.stats().engine_why


def test_store_refuses_io_uring_on_a_disk_where_it_would_move_wrong_bytes(
    lies: Lies, make_store: MakeStore
) -> None:
    store = make_store(engine="uring", paths=[NvmePath(lies.point)])
    with pytest.raises(
        OSError, match="short transfers of FUSE files at the wrong place"
    ) as refusal:
        store.put("x", torch.ones(5), Tier.NVME)
    assert refusal.value.filename == str(store._files.segments[0].file)


def test_file_on_a_lying_disk_is_read_as_it_is(lies: Lies, pattern: Pattern) -> None:
    path = lies.point / "weights"
    path.write_bytes(pattern(NUM_BYTES + 77).numpy().tobytes())
    for rule in [*HEALED, *SHORT]:
        lies.tell({"kind": "read", "start": BLOCK, "stop": 2 * BLOCK, **rule})
        with FileReader(path) as reader:
            assert torch.equal(
                reader.read(3, NUM_BYTES), pattern(NUM_BYTES + 77)[3 : NUM_BYTES + 3]
            )


def test_file_on_a_lying_disk_is_read_ahead_as_it_is(lies: Lies, pattern: Pattern) -> None:
    path, arena = lies.point / "states", Arena(2 * NUM_BYTES)
    path.write_bytes(pattern(NUM_BYTES).numpy().tobytes())
    slot = arena.take(2 * NUM_BYTES)
    for rule in SHORT:
        lies.tell({"kind": "read", "start": BLOCK, "stop": 2 * BLOCK, **rule})
        ahead = ReadAhead([slot.tensor])
        reading = ahead.start([FileRange(path, 3, NUM_BYTES - 3)])
        assert reading is not None
        assert torch.equal(reading.wait()[0], pattern(NUM_BYTES)[3:])
        ahead.close()
    arena.close()


def test_disk_that_is_pulled_ends_every_transfer(
    lies: Lies, file: int, memory: Map, engine: str, pattern: Pattern
) -> None:
    queue = Queue(IoSettings(engine, BLOCK))
    transfer(queue, WRITE, file, memory.address)
    lies.process.kill()
    lies.process.wait()
    for kind in (READ, WRITE):
        with pytest.raises(TransferError) as failure:
            transfer(queue, kind, file, memory.address)
        assert failure.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    queue.close()


# ---- short by the kernel's own doing -------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process may be written beyond that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_cut_short_by_a_limit_is_named_where_its_block_begins_and_heals_without_it(
    make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    store = make_store(engine=engine, depth=1)
    # so that the limit spares all other files
    store.reserve("room", (32 * MIB,), torch.uint8, Tier.NVME)
    store.put("kept", pattern(NUM_BYTES, seed=1), Tier.NVME).wait()
    store.put("x", pattern(NUM_BYTES), Tier.NVME).wait()
    home = store._entries["x"].nvme
    assert home is not None
    extent = home.extents[0]
    assert extent is not None
    store.fetch("x").wait().fill_(7)
    with file_size_limit(
        extent.offset + 3 * BLOCK + 8192
    ):  # within the fourth block: 8192 bytes are written, then none
        move = store.release("x", dirty=True)
        assert move is not None
        with pytest.raises(TransferError, match=r"writing 65536 bytes .*see ulimit -f") as failure:
            move.wait()
    assert (failure.value.errno, failure.value.offset) == (errno.EFBIG, extent.offset + 3 * BLOCK)
    assert torch.equal(store.fetch("kept").wait(), pattern(NUM_BYTES, seed=1))
    # neither the old bytes nor half of the new ones
    with pytest.raises(TransferError, match="ulimit"):
        store.fetch("x").wait()
    with pytest.raises(TransferError):
        store.flush()
    store.drop("x")
    store.put("x", pattern(NUM_BYTES, seed=2), Tier.NVME).wait()
    assert torch.equal(store.fetch("x").wait(), pattern(NUM_BYTES, seed=2))


@pytest.mark.parametrize("end", [BLOCK - 4096, BLOCK + 4096, BLOCK + 5000, 3 * BLOCK])
def test_read_over_the_end_is_enodata_until_somebody_extends_the_file(
    tmp_path: Path, memory: Map, engine: str, pattern: Pattern, end: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern(NUM_BYTES).numpy().tobytes()[:end])
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    queue = Queue(IoSettings(engine, BLOCK, 1))
    with pytest.raises(TransferError, match="shorter than what was written") as failure:
        transfer(queue, READ, fd, memory.address)
    assert (failure.value.errno, failure.value.offset) == (errno.ENODATA, end // BLOCK * BLOCK)
    path.write_bytes(pattern(NUM_BYTES).numpy().tobytes())
    transfer(queue, READ, fd, memory.address)
    assert torch.equal(memory.tensor()[:NUM_BYTES], pattern(NUM_BYTES))
    queue.close()
    os.close(fd)


# ---- truncated under way -------------------------------------------------------------------------


def test_file_truncated_while_reads_are_under_way_gives_whole_tensors_or_enodata(
    make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    store = make_store(host_bytes=32 * MIB, engine=engine)
    names = [str(i) for i in range(24)]
    for i, name in enumerate(names):
        store.put(name, pattern(MIB, seed=i), Tier.NVME)
    store.flush()
    cut = 10 * MIB + 4096  # within the eleventh
    barrier = threading.Barrier(2)

    def truncate() -> None:
        barrier.wait()
        os.truncate(store._files.segments[0].file, cut)

    thread = threading.Thread(target=truncate)
    thread.start()
    moves = [store.fetch(name) for name in reversed(names)]
    barrier.wait()
    arrived = [_arrived(move.wait) for move in moves]
    thread.join()
    for i, name in enumerate(names):
        tensor = arrived[len(names) - 1 - i]
        assert tensor is None or torch.equal(tensor, pattern(MIB, seed=i)), name
        if tensor is not None:
            store.release(name)
    assert all(tensor is not None for tensor in arrived[-10:])
    for i, name in enumerate(names):  # and from now on
        assert (_arrived(store.fetch(name).wait) is not None) == (i < 10)


def _arrived(wait: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    try:
        return wait()
    except TransferError as error:
        if error.errno != errno.ENODATA:
            raise
        return None
