"""When the disk itself fails, fills up or goes away, is each transfer named or healed, and what had
arrived kept?

Every test has a file system of its own, on a loop device; the faults are the kernel's. Which fault
is held where stands in test_real_faults.py.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mounts import SECTOR, device_of, fill, place_on_device, run_or_skip

from tiermem.swap.base.native import TransferError
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
Mount = Callable[..., Path]
MIB = 1 << 20
BLOCK = 65536
NUM_BYTES = 8 * BLOCK + 4096  # nine blocks of the small stores
_SHUT_DOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125  # EXT4_IOC_SHUTDOWN


def put_all(store: TensorStore, pattern: Pattern, *names: str) -> None:
    """Puts tensors, each with bytes of its own, and waits for them."""
    for name in names:
        store.put(name, pattern(NUM_BYTES, seed=ord(name[0])), Tier.NVME).wait()


def check_all(store: TensorStore, pattern: Pattern, *names: str) -> None:
    """Their bytes are those that were put."""
    for name in names:
        assert torch.equal(store.fetch(name).wait(), pattern(NUM_BYTES, seed=ord(name[0])))
        store.release(name)


def place_of(store: TensorStore, name: str, offset: int) -> tuple[int, int]:
    """Where a byte of a tensor lies in the segment, and on the device."""
    home = store._entries[name].nvme
    assert home is not None
    extent = home.extents[0]
    assert extent is not None
    place = extent.offset + offset
    return place, place_on_device(store._files.segments[0].fd, place)


def forget_failures(store: TensorStore, *codes: int) -> None:
    """Settles: the writes that failed are raised once, as one of these, and then no more."""
    with pytest.raises(OSError, match=r"\w") as failure:
        store.flush()
    assert failure.value.errno in codes
    store.flush()


# ---- EIO -----------------------------------------------------------------------------------------


def test_range_that_the_device_lost_is_named_and_the_rest_is_read(
    mount: Mount, make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    point = mount("ext4", 96 * MIB)
    # one in flight: blocks in order
    store = make_store(engine=engine, depth=1, paths=[NvmePath(point)])
    put_all(store, pattern, "kept", "lost")
    offset, place = place_of(store, "lost", 4 * BLOCK)
    assert place_of(store, "kept", 8 * BLOCK)[1] < place
    os.truncate(f"{point}.image", place)  # the loop device goes on, but for what lay here
    for _ in range(2):
        with pytest.raises(
            TransferError, match=r"reading 65536 bytes .*see the kernel log"
        ) as failure:
            store.fetch("lost").wait()
        error = failure.value
        assert (error.errno, error.offset, error.length) == (errno.EIO, offset, BLOCK)
        assert error.filename == str(store._files.segments[0].file)
    check_all(store, pattern, "kept")
    put_all(store, pattern, "new")  # makes the device longer again
    check_all(store, pattern, "new")


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A device of 96 MiB that device-mapper maps, whole but for a bad range: mapped(start, bytes)
    changes it."""
    name = f"tiermem-test-{os.getpid()}"
    image, num_sectors = tmp_path / "mapped.image", 96 * MIB // SECTOR
    run_or_skip("dmsetup", "version")
    image.touch()
    os.truncate(image, 96 * MIB)
    loop = run_or_skip("losetup", "--find", "--show", str(image))

    def table(start: int, num_bytes: int) -> str:
        bad = start // SECTOR, num_bytes // SECTOR
        behind = sum(bad)
        parts = [
            (0, bad[0], f"linear {loop} 0"),
            (*bad, "error"),
            (behind, num_sectors - behind, f"linear {loop} {behind}"),
        ]
        return "\n".join(f"{first} {length} {target}" for first, length, target in parts if length)

    def change(start: int = 0, num_bytes: int = 0) -> str:
        run_or_skip("dmsetup", "suspend", name)
        run_or_skip("dmsetup", "load", name, stdin=table(start, num_bytes))
        run_or_skip("dmsetup", "resume", name)
        return f"/dev/mapper/{name}"

    try:
        run_or_skip("dmsetup", "create", name, stdin=table(0, 0))
        yield change
        subprocess.run(["dmsetup", "remove", "--retry", name], check=True)
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)


@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_bad_range_of_a_device_is_named_and_heals_with_it(
    mapped: Callable[..., str],
    mount: Mount,
    make_store: MakeStore,
    engine: str,
    pattern: Pattern,
    kind: str,
) -> None:
    point = mount("ext4", device=mapped())
    store = make_store(engine=engine, depth=1, paths=[NvmePath(point)])
    put_all(store, pattern, "kept", "bad")
    offset, place = place_of(store, "bad", 4 * BLOCK)
    if kind == "writing":
        store.fetch("bad").wait()
    mapped(place, 4096)
    with pytest.raises(TransferError, match=f"{kind} 65536 bytes .*see the kernel log") as failure:
        (store.fetch("bad") if kind == "reading" else store.release("bad", dirty=True)).wait()  # type: ignore[union-attr]
    assert (failure.value.errno, failure.value.offset, failure.value.length) == (
        errno.EIO,
        offset,
        BLOCK,
    )
    check_all(store, pattern, "kept")
    mapped()
    if kind == "writing":
        forget_failures(store, errno.EIO)
        with pytest.raises(TransferError, match="writing"):  # never what lies there from before
            store.fetch("bad").wait()
        store.drop("bad")
        put_all(store, pattern, "bad")
    check_all(store, pattern, "kept", "bad")


def test_thin_device_that_runs_full_under_a_write_is_an_error_and_heals_with_room(
    mount: Mount, make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    thin = mount("tmpfs", options="size=6m")
    point = mount("ext4", 96 * MIB, folder=thin)
    store = make_store(host_bytes=32 * MIB, engine=engine, paths=[NvmePath(point)])
    put_all(store, pattern, "kept")
    big = pattern(12 * MIB)
    with pytest.raises(TransferError, match="writing 65536 bytes at offset") as failure:
        store.put("big", big, Tier.NVME).wait()  # the file has its room: the device has none
    assert failure.value.errno in (errno.EIO, errno.ENOSPC)
    assert failure.value.filename == str(store._files.segments[0].file)
    with pytest.raises(TransferError, match="writing"):
        store.fetch("big").wait()
    forget_failures(store, errno.EIO, errno.ENOSPC)
    check_all(store, pattern, "kept")
    run_or_skip("mount", "-o", "remount,size=64m", str(thin))
    store.drop("big")
    store.put("big", big, Tier.NVME).wait()
    assert torch.equal(store.fetch("big").wait(), big)
    check_all(store, pattern, "kept")


def test_device_that_goes_away_fails_everything_on_it_and_nothing_else(
    mount: Mount,
    make_store: MakeStore,
    engine: str,
    pattern: Pattern,
    caplog: pytest.LogCaptureFixture,
) -> None:
    point = mount("ext4", 96 * MIB)
    store = make_store(engine=engine, paths=[NvmePath(point)])
    put_all(store, pattern, "gone")
    store.put("host", pattern(1000), Tier.HOST)
    folder = os.open(point, os.O_RDONLY)
    fcntl.ioctl(folder, _SHUT_DOWN, struct.pack("I", 2))
    os.close(folder)
    with pytest.raises(TransferError, match="reading") as failure:
        store.fetch("gone").wait()
    assert failure.value.errno == errno.EIO
    with pytest.raises(TransferError, match="writing") as failure:
        store.put("new", pattern(NUM_BYTES), Tier.NVME).wait()
    assert failure.value.errno == errno.EIO
    with pytest.raises(OSError, match=r"are needed beyond .*Input/output error") as refusal:
        store.reserve_disk(80 * MIB)
    assert (refusal.value.errno, refusal.value.filename) == (errno.EIO, str(point))
    assert torch.equal(store.view("host"), pattern(1000))
    forget_failures(store, errno.EIO)
    with caplog.at_level(logging.WARNING, "tiermem"):
        store.close()
    assert any("segment.bin is left" in record.getMessage() for record in caplog.records)


# ---- EROFS ---------------------------------------------------------------------------------------


def test_file_system_that_turns_read_only_is_read_and_refuses_writes(
    mount: Mount, make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    point = mount("ext4", 96 * MIB, options="errors=remount-ro")
    trigger = Path("/sys/fs/ext4", Path(device_of(point)).name, "trigger_fs_error")
    if not trigger.exists():
        pytest.skip(f"no {trigger}")
    store = make_store(engine=engine, paths=[NvmePath(point)])
    put_all(store, pattern, "kept")
    trigger.write_text("1")  # what ext4 does when it finds itself damaged
    with pytest.raises(
        TransferError, match=r"writing .*Read-only file system .*turned read-only"
    ) as failure:
        store.put("new", pattern(NUM_BYTES), Tier.NVME).wait()
    assert failure.value.errno == errno.EROFS
    with pytest.raises(OSError, match=r"are needed beyond .*Read-only") as refusal:
        store.reserve_disk(80 * MIB)
    assert (refusal.value.errno, refusal.value.filename) == (errno.EROFS, str(point))
    forget_failures(store, errno.EROFS)
    check_all(store, pattern, "kept")
    store.close()


# ---- ENOSPC --------------------------------------------------------------------------------------


def test_full_file_system_in_the_middle_of_a_write_is_named_and_heals_with_room(
    mount: Mount, make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    point = mount("ext4", 24 * MIB)
    store = make_store(engine=engine, depth=1, paths=[NvmePath(point)])
    put_all(store, pattern, "kept", "x")
    segment = store._files.segments[0].file
    offset, _ = place_of(store, "x", 4 * BLOCK)
    store.fetch("x").wait()
    run_or_skip(
        "fallocate",
        "--punch-hole",
        "--offset",
        str(offset),
        "--length",
        str(2 * BLOCK),
        str(segment),
    )
    filler = fill(point)
    move = store.release("x", dirty=True)
    assert move is not None
    with pytest.raises(
        TransferError, match=r"writing 65536 bytes .*free some space or add a path"
    ) as failure:
        move.wait()
    error = failure.value
    assert (error.errno, error.offset, error.length, error.filename) == (
        errno.ENOSPC,
        offset,
        BLOCK,
        str(segment),
    )
    with pytest.raises(OSError, match="are free: No space left on device") as refusal:
        store.put("more", pattern(NUM_BYTES), Tier.NVME)
    assert (refusal.value.errno, "more" in store) == (errno.ENOSPC, False)
    check_all(store, pattern, "kept")
    forget_failures(store, errno.ENOSPC)
    filler.unlink()
    store.drop("x")
    put_all(store, pattern, "x", "more")
    check_all(store, pattern, "kept", "x", "more")


@pytest.mark.parametrize("kind", ["ext2", "ext4"])
def test_file_system_is_used_whether_it_can_preallocate_or_not(
    mount: Mount, make_store: MakeStore, pattern: Pattern, kind: str
) -> None:
    point = mount(kind, 32 * MIB)
    store = make_store(host_bytes=16 * MIB, paths=[NvmePath(point)])
    put_all(store, pattern, "a", "b")
    segment = store._files.segments[0]
    assert os.stat(segment.file).st_blocks * SECTOR >= segment.size_bytes
    before = os.stat(segment.file)
    with pytest.raises(OSError, match="are free: No space left on device") as refusal:
        store.reserve_disk(40 * MIB)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(point))
    after = os.stat(segment.file)
    assert after.st_size == before.st_size == segment.size_bytes
    # nothing of it stays taken; a list of blocks may
    assert (after.st_blocks - before.st_blocks) * SECTOR < BLOCK
    check_all(store, pattern, "a", "b")
