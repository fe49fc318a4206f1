"""When a write or a sync fails: does a freeze say so, freeze nothing, and leave the last frozen
state as it was?"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from frozen_bytes import content, on_disk, write
from lies import Lies

from tiermem.swap.base.native import Fault
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk import durable
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
PAGE = 4096


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_freeze_raises_what_a_write_under_way_failed_with_until_it_is_made_good(
    make_store: MakeStore, pattern: Pattern, code: int
) -> None:
    store = make_store(num_slots=2, faults=(Fault(2, "error", code),))
    store.put("x", pattern(2 * PAGE), Tier.NVME).wait()  # block 0
    first = store.freeze()
    slot = store.arena.take(PAGE)
    store.write([("x", 0, slot.tensor.copy_(pattern(PAGE, seed=1)))], "good").wait()  # block 1
    store.write([("x", PAGE, slot.tensor)], "bad")  # block 2, and nobody waits for it
    with pytest.raises(OSError, match=r"segment\.bin") as failure:
        store.freeze()
    assert failure.value.errno == code
    with pytest.raises(
        OSError, match=f"bytes {PAGE} to {2 * PAGE} of 'x' are lost: .* Write them again"
    ) as again:
        store.freeze()  # told already, and still not made good
    assert again.value.errno == errno.EIO
    assert on_disk(first, "x", 2 * PAGE) == pattern(2 * PAGE).numpy().tobytes()
    write(store, "x", PAGE, pattern(PAGE, seed=2))
    second = store.freeze()
    assert (
        on_disk(second, "x", 2 * PAGE)
        == torch.cat([pattern(PAGE, 1), pattern(PAGE, 2)]).numpy().tobytes()
    )
    store.thaw(first)
    # refused, if a freeze that failed had kept its slot
    write(store, "x", 0, pattern(2 * PAGE, seed=3))


def test_lost_entry_keeps_a_store_from_being_frozen_until_it_is_dropped(
    make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=2, faults=(Fault(1, "error", errno.EIO),))
    store.put("x", pattern(PAGE), Tier.NVME).wait()
    store.put("y", pattern(PAGE), Tier.NVME)
    with pytest.raises(OSError, match="Input/output error"):
        store.flush()
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error") as failure:
            store.freeze()
        assert failure.value.errno == errno.EIO
    store.drop("y")
    assert list(store.freeze().parts) == ["x"]


def failing_sync(only_first: bool = True) -> contextlib.AbstractContextManager[None]:
    """Syncs of segments fail as they do when the disk does."""
    told: list[durable.Step] = []

    def fail(step: durable.Step) -> None:
        if step.kind == "sync" and step.when == "before" and step.name.endswith("segment.bin"):
            told.append(step)
            if len(told) == 1 or not only_first:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    return durable.watch(fail)


def test_sync_that_fails_freezes_nothing_names_the_file_and_may_be_tried_again(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store = make_store(num_slots=2)
    store.put("x", pattern(2 * PAGE), Tier.NVME).wait()
    first = store.freeze()
    write(store, "x", 0, pattern(2 * PAGE, seed=1))
    (file,) = tmp_path.glob("tiermem-*/segment.bin")
    with failing_sync():
        with pytest.raises(OSError, match="Input/output error") as failure:
            store.freeze()
        assert (failure.value.errno, failure.value.filename) == (errno.EIO, str(file))
        write(store, "x", 0, pattern(PAGE, seed=2))  # in place: nothing holds that slot
        second = store.freeze()
    assert on_disk(first, "x", 2 * PAGE) == pattern(2 * PAGE).numpy().tobytes()
    expected = torch.cat([pattern(PAGE, 2), pattern(2 * PAGE, seed=1)[PAGE:]])
    assert on_disk(second, "x", 2 * PAGE) == expected.numpy().tobytes()


def test_sync_that_the_disk_fails_is_told_as_it_was(
    lies: Lies, make_store: MakeStore, pattern: Pattern
) -> None:
    store = make_store(num_slots=2, paths=[NvmePath(lies.point)])
    store.put("x", pattern(2 * PAGE), Tier.NVME).wait()
    first = store.freeze()
    write(store, "x", 0, pattern(PAGE, seed=1))
    lies.tell({"kind": "sync", "start": 0, "stop": 1, "code": errno.EIO})
    with pytest.raises(OSError, match="Input/output error") as failure:
        store.freeze()
    assert (failure.value.errno, failure.value.filename) == (errno.EIO, str(first.files[0]))
    second = store.freeze()
    assert on_disk(first, "x", 2 * PAGE) == pattern(2 * PAGE).numpy().tobytes()
    assert on_disk(second, "x", PAGE) == pattern(PAGE, seed=1).numpy().tobytes()


def test_after_a_failed_sync_a_buffered_path_is_not_believed_any_more(
    mount: Callable[..., Path], pattern: Pattern
) -> None:
    with TensorStore(mount("ramfs"), 1 << 20, num_slots=2) as store:
        store.put("x", pattern(PAGE), Tier.NVME).wait()
        with failing_sync(), pytest.raises(OSError, match="Input/output error"):
            store.freeze()
        with pytest.raises(
            OSError, match=r"the kernel may have dropped what was written.*Save a copy elsewhere"
        ):
            store.freeze()


@pytest.mark.parametrize("how", ["removed", "replaced", "truncated"])
def test_file_that_nobody_would_find_whole_is_not_frozen(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path, how: str
) -> None:
    store = make_store(num_slots=2)
    store.put("x", pattern(2 * PAGE), Tier.NVME).wait()
    store.thaw(store.freeze())  # its name has been synced, once
    (file,) = tmp_path.glob("tiermem-*/segment.bin")
    if how == "truncated":
        os.truncate(file, PAGE)
    else:
        file.unlink()
    if how == "replaced":
        file.write_bytes(bytes(2 * PAGE))
    code, words = (
        (errno.ENODATA, "truncated")
        if how == "truncated"
        else (errno.ENOENT, "removed or replaced")
    )
    with pytest.raises(OSError, match=words) as failure:
        store.freeze()
    assert (failure.value.errno, failure.value.filename) == (code, str(file))
    if how != "truncated":
        assert content(store, "x") == pattern(2 * PAGE).numpy().tobytes()  # the run goes on


def test_freeze_tells_its_steps(make_store: MakeStore, pattern: Pattern) -> None:
    store = make_store(num_slots=2)
    store.put("x", pattern(2 * PAGE), Tier.NVME).wait()
    steps: list[tuple[str, str, str]] = []
    with durable.watch(lambda step: steps.append((step.when, step.kind, Path(step.name).name))):
        freeze = store.freeze()
        write(store, "x", 0, pattern(2 * PAGE, seed=1))
        write(store, "x", 0, pattern(2 * PAGE, seed=2))  # no slot changes
        store.thaw(freeze)
    (folder,) = store.folders()
    syncs = ["segment.bin", folder.name, folder.parent.name]
    expected = [("before", "freeze", folder.name)]
    expected += [(when, "sync", name) for name in syncs for when in ("before", "after")]
    expected += [("after", "freeze", folder.name), ("before", "slot", "x"), ("after", "slot", "x")]
    assert steps == [*expected, ("before", "thaw", folder.name), ("after", "thaw", folder.name)]
