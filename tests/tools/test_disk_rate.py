"""Is a disk measured through the queue, with nothing left on it?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("_tiermem_native")

from tiermem.swap.base.engines import ENGINES
from tiermem.swap.disk.direct import open_unnamed
from tiermem.tools.check import direct_alignment
from tiermem.tools.measure import sustained
from tiermem.tools.measure.files import DiskRate, measure_disk
from tiermem.tools.measure.sustained import measure_disks


def test_rates_are_positive_and_nothing_is_left(tmp_path: Path) -> None:
    rate = measure_disk(tmp_path, 0.05, file_bytes=(32 << 20) + (1 << 20))
    assert rate.read_bytes_s > 0
    assert rate.write_bytes_s > 0
    assert rate.engine in ENGINES[1:]
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_no_name(tmp_path: Path) -> None:
    import os

    with open_unnamed(tmp_path)[0] as fd:
        assert list(tmp_path.iterdir()) == []
        os.write(fd, bytes(0))


def test_alignment_is_one_of_those_tried(tmp_path: Path) -> None:
    assert direct_alignment(tmp_path) in (0, 512, 1024, 2048, 4096)


def test_folders_of_one_file_system_are_one_disk_and_several_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {
        "a": DiskRate(3.0, 5.0, "uring", "works", True),
        "b": DiskRate(30.0, 50.0, "aio", "works", False),
    }
    seen, devices = [], {"a": 1, "again": 1, "b": 2}
    folders = [tmp_path / name for name in devices]

    def measured(folder: Path, seconds: float) -> DiskRate:
        seen.append(folder.name)
        return rates[folder.name]

    monkeypatch.setattr(sustained, "measure_disk", measured)
    monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_dev=devices[self.name]))
    assert measure_disks(folders, None) == DiskRate(33.0, 55.0, "uring", "works", False)
    assert seen == ["a", "b"]
    assert measure_disks(folders[:2], None) == rates["a"]
    with pytest.raises(ValueError, match="no folder to measure"):
        measure_disks([], None)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        measure_disk(tmp_path / "nowhere", 0.1)
