"""Are several paths weighed by what they take all at once, and does a path that cannot be measured
stop nobody?"""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from tiermem.swap.base.native import IoSettings
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk import passes
from tiermem.swap.disk.passes import weigh
from tiermem.swap.disk.paths import NvmePath
from tiermem.swap.store.store import TensorStore

MIB = 1 << 20


@pytest.fixture
def folders(tmp_path: Path) -> list[NvmePath]:
    """Three folders without weights."""
    paths = [NvmePath(tmp_path / name) for name in ("a", "b", "c")]
    for each in paths:
        each.path.mkdir()
    return paths


def rates_of(rates: dict[str, float | OSError]):  # type: ignore[no-untyped-def]
    """A measurement that answers by the folder's name."""

    def measure(fd: int, file_bytes: int, io: IoSettings, seconds: float) -> float:
        rate = rates[Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name]
        if isinstance(rate, OSError):
            raise rate
        return rate

    return measure


def test_slowest_path_weighs_one_and_the_others_as_much_as_they_are_faster(
    folders: list[NvmePath], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(passes, "mixed_rate", rates_of({"a": 3e9, "b": 1e9, "c": 2.5e9}))
    with caplog.at_level(logging.INFO, "tiermem"):
        assert weigh(folders, IoSettings()) == [3.0, 1.0, 2.5]
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"{folders[0].path} 3.00 GB/s (weight 3)" in line
    assert f"{folders[2].path} 2.50 GB/s (weight 2.5)" in line


def test_all_paths_are_measured_at_once(
    folders: list[NvmePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(3, timeout=60)

    def measure(fd: int, file_bytes: int, io: IoSettings, seconds: float) -> float:
        together.wait()  # broken, and raises, unless all three come
        return 1e9

    monkeypatch.setattr(passes, "mixed_rate", measure)
    assert weigh(folders, IoSettings()) == [1.0, 1.0, 1.0]


def test_measuring_bounds_its_memory_and_keeps_the_engine(
    folders: list[NvmePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def measure(fd: int, file_bytes: int, io: IoSettings, seconds: float) -> float:
        seen.append((io.engine, io.block_bytes, io.depth, os.fstat(fd).st_size == file_bytes))
        return 1e9

    monkeypatch.setattr(passes, "mixed_rate", measure)
    weigh(folders, IoSettings("threads", 8 * MIB, 512))
    weigh(folders, IoSettings("aio", 65536, 4))
    assert set(seen) == {("threads", MIB, 16, True), ("aio", 65536, 4, True)}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_path_that_cannot_be_measured_weighs_one_with_a_warning(
    folders: list[NvmePath],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    failing = OSError(code, "cannot")
    monkeypatch.setattr(passes, "mixed_rate", rates_of({"a": 4e9, "b": failing, "c": 2e9}))
    with caplog.at_level(logging.WARNING, "tiermem"):
        assert weigh(folders, IoSettings()) == [2.0, 1.0, 1.0]
    assert [record.getMessage() for record in caplog.records] == [
        f"{folders[1].path} could not be measured and weighs 1: cannot"
    ]


def test_full_disk_is_no_error_while_weighing(
    folders: list[NvmePath], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert weigh(folders, IoSettings()) == [1.0, 1.0, 1.0]
    assert caplog.text.count("No space left on device") == 3


def test_cap_bounds_the_file_that_measures(
    folders: list[NvmePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def measure(fd: int, file_bytes: int, io: IoSettings, seconds: float) -> float:
        sizes.append(file_bytes)
        return 1e9

    monkeypatch.setattr(passes, "mixed_rate", measure)
    capped = [NvmePath(folders[0].path, 5 * MIB + 1), NvmePath(folders[1].path, MIB), folders[2]]
    assert weigh(capped, IoSettings()) == [1.0, 1.0, 1.0]
    assert sorted(sizes) == [5 * MIB, 32 * MIB]  # the second has no room for two blocks


def test_one_path_and_given_weights_are_not_measured(
    folders: list[NvmePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "mixed_rate", rates_of({}))  # would raise KeyError
    assert weigh(folders[:1], IoSettings()) == [1.0]
    assert weigh([], IoSettings()) == []
    given = [
        NvmePath(each.path, weight=weight)
        for each, weight in zip(folders, (0.5, 2, 3), strict=True)
    ]
    assert weigh(given, IoSettings()) == [0.5, 2, 3]


def test_some_weights_given_and_others_not_are_refused_and_leave_nothing(
    folders: list[NvmePath],
) -> None:
    some = [NvmePath(folders[0].path, weight=2.0), *folders[1:]]
    with pytest.raises(
        ValueError, match=f"not for {folders[1].path}, {folders[2].path}: give all of them, or none"
    ):
        TensorStore(some, 1 << 20)
    assert all(list(each.path.iterdir()) == [] for each in folders)


def test_measuring_for_real_leaves_nothing_and_gives_every_path_a_weight(
    folders: list[NvmePath],
) -> None:
    found = weigh(folders, IoSettings())
    assert min(found) == 1.0
    assert all(list(each.path.iterdir()) == [] for each in folders)


def test_store_deals_by_what_was_measured(
    folders: list[NvmePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(passes, "mixed_rate", rates_of({"a": 1e9, "b": 2e9, "c": 3e9}))
    with TensorStore([each.path for each in folders], 1 << 20) as store:
        for i in range(24):
            store.reserve(str(i), (MIB,), torch.uint8, Tier.NVME)
        paths = store.stats().paths
    assert [(path.path, path.weight, path.used_bytes // MIB) for path in paths] == [
        (folders[0].path, 1.0, 4),
        (folders[1].path, 2.0, 8),
        (folders[2].path, 3.0, 12),
    ]
