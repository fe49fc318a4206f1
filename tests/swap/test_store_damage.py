"""When somebody deletes or truncates a store's files under it, does it go on, or say clearly that
it cannot?"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiermem.swap.base.native import TransferError
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
NUM_BYTES = 3 * 65536 + 4096


# ---- deleted -------------------------------------------------------------------------------------


def test_folder_deleted_under_a_store_does_no_harm(
    make_store: MakeStore,
    engine: str,
    pattern: Pattern,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = make_store(engine=engine)
    store.put("old", pattern(NUM_BYTES), Tier.NVME).wait()
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    assert torch.equal(store.fetch("old").wait(), pattern(NUM_BYTES))
    store.release("old")
    store.put("new", pattern(NUM_BYTES, seed=1), Tier.NVME).wait()
    store.reserve_disk(100 << 20)  # the file grows although it has no name
    assert torch.equal(store.fetch("new").wait(), pattern(NUM_BYTES, seed=1))
    with caplog.at_level(logging.WARNING, "tiermem"):
        store.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder / name} had been removed while the run used it"
        for name in ("segment.bin", "lock")
    ]
    assert list(tmp_path.iterdir()) == []


def test_path_deleted_altogether_does_no_harm(
    make_store: MakeStore, pattern: Pattern, two_paths: list[NvmePath]
) -> None:
    store = make_store(paths=two_paths)
    for i in range(4):
        store.put(f"x{i}", pattern(NUM_BYTES, seed=i), Tier.NVME).wait()
    shutil.rmtree(two_paths[0].path)
    for i in range(4):
        assert torch.equal(store.fetch(f"x{i}").wait(), pattern(NUM_BYTES, seed=i))
        store.release(f"x{i}", dirty=True)
    store.close()
    assert list(two_paths[1].path.iterdir()) == []


def test_full_disk_is_told_also_when_the_folder_is_gone(mount: Callable[..., Path]) -> None:
    small = mount("ext4", 24 << 20)
    with TensorStore(small, 1 << 20) as store:
        shutil.rmtree(next(small.glob("tiermem-*")))
        with pytest.raises(OSError, match="are free: No space left on device") as refusal:
            store.reserve_disk(1 << 30)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(small))


def test_lock_removed_by_somebody_is_a_warning(
    store: TensorStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder,) = tmp_path.iterdir()
    (folder / "lock").unlink()
    with caplog.at_level(logging.WARNING, "tiermem"):
        store.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder / 'lock'} had been removed while the run used it"
    ]
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_removed_are_left_with_a_warning(
    store: TensorStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    (folder,) = tmp_path.iterdir()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tiermem"):
        patch.setattr(Path, "unlink", refuse)
        store.close()  # its descriptors are closed all the same: the check around every test looks
    told = [record.getMessage() for record in caplog.records]
    why = "Read-only file system (the file system has turned read-only: see the kernel log)"
    assert told[:2] == [f"{folder / name} is left: {why}" for name in ("segment.bin", "lock")]
    shutil.rmtree(folder)


# ---- truncated -----------------------------------------------------------------------------------


def truncate(store: TensorStore, num_bytes: int, index: int = 0) -> None:
    with store._files.segments[index].file.open("r+b") as file:
        file.truncate(num_bytes)


def test_reads_behind_the_end_say_that_something_truncated_it_and_the_rest_is_read(
    make_store: MakeStore, engine: str, pattern: Pattern
) -> None:
    store = make_store(engine=engine)
    for i in range(2):
        store.put(f"x{i}", pattern(NUM_BYTES, seed=i), Tier.NVME).wait()
    truncate(store, NUM_BYTES + 65536)
    for _ in range(2):
        with pytest.raises(TransferError, match="something truncated it") as failure:
            store.fetch("x1").wait()
        assert failure.value.errno == errno.ENODATA
        assert str(failure.value.filename).endswith("segment.bin")
        assert failure.value.offset >= NUM_BYTES
    assert torch.equal(store.fetch("x0").wait(), pattern(NUM_BYTES))


def test_write_to_a_truncated_file_is_refused_so_that_no_zeros_are_ever_read(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store()
    for i in range(3):
        store.put(f"x{i}", pattern(NUM_BYTES, seed=i), Tier.NVME).wait()
    size = store._files.segments[0].size_bytes
    store.fetch("x2").wait()
    truncate(store, 4096)
    message = rf"the file has 4096 of its {size} bytes: something truncated it, .* is lost"
    with pytest.raises(OSError, match=message) as refusal:
        store.release("x2", dirty=True)  # would make the file long again, with a hole where x1 was
    assert (refusal.value.errno, refusal.value.filename) == (
        errno.ENODATA,
        str(store._files.segments[0].file),
    )
    with pytest.raises(OSError, match=message):
        store.write([("x1", 0, store.arena.take(4096).tensor)], "range")
    with pytest.raises(OSError, match=message):
        store.put("x3", pattern(100), Tier.NVME)
    assert "x3" not in store
    assert store.is_present("x2")  # its new bytes are not lost
    assert torch.equal(store.fetch("x2").wait(), pattern(NUM_BYTES, seed=2))
    with pytest.raises(TransferError, match="something truncated it"):
        store.fetch("x1").wait()
    store.flush()
    store.close()


def test_truncated_path_leaves_the_others_usable(
    make_store: MakeStore, pattern: Pattern, two_paths: list[NvmePath]
) -> None:
    store = make_store(paths=two_paths)
    for i in range(4):
        store.put(f"x{i}", pattern(NUM_BYTES, seed=i), Tier.NVME).wait()
    truncate(store, 0, index=1)
    for i in (0, 2):
        store.fetch(f"x{i}").wait().fill_(i)
        store.release(f"x{i}", dirty=True)
        assert (store.fetch(f"x{i}").wait() == i).all()
    for i in (1, 3):
        with pytest.raises(TransferError, match="something truncated it"):
            store.fetch(f"x{i}").wait()
        store.drop(f"x{i}")
    store.put("host", pattern(100), Tier.HOST)
    assert torch.equal(store.view("host"), pattern(100))


def test_store_whose_files_were_truncated_closes(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store = make_store()
    store.put("x", pattern(NUM_BYTES), Tier.NVME).wait()
    truncate(store, 0)
    store.fetch("x")  # fails when it is looked at
    store.close()
    assert list(tmp_path.iterdir()) == []
