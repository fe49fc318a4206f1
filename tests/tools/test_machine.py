"""Are the facts of a machine and of its paths found, and said?"""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tiermem.tools.measure import machine
from tiermem.tools.measure.machine import machine_facts, memory_bytes, place_of

MOUNTS = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 21 259:1 / {folder}/my\\040disk rw,noatime - xfs /dev/nvme0n1p1 rw,attr2
31 21 0:40 / {folder}/net rw - nfs4 server:/export rw,vers=4.2
32 30 259:2 / {folder}/my\\040disk rw,noatime,nodev - btrfs /dev/nvme1n1 rw,noatime,ssd
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS.format(folder=tmp_path))
    monkeypatch.setattr(machine, "_MOUNTS", table)
    return tmp_path


def test_a_path_lies_on_the_nearest_mount_the_later_of_two(mounts: Path) -> None:
    place = place_of(mounts / "my disk" / "folder")
    assert place.mount_point == str(mounts / "my disk")
    assert (place.file_system, place.device) == ("btrfs", "/dev/nvme1n1")
    assert place.mount_options == "rw,noatime,nodev,ssd"


def test_a_path_of_no_other_mount_lies_on_the_root(mounts: Path) -> None:
    assert place_of(mounts).device == "/dev/vda"


def test_a_networked_path_has_no_model(mounts: Path) -> None:
    place = place_of(mounts / "net")
    assert (place.file_system, place.device, place.device_model) == (
        "nfs4",
        "server:/export",
        "unknown",
    )


def test_without_a_table_of_mounts_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_MOUNTS", tmp_path / "nowhere")
    assert place_of(tmp_path).file_system == "unknown"


def test_the_facts_name_what_a_figure_needs(tmp_path: Path) -> None:
    facts = machine_facts([tmp_path])
    assert facts["kernel"].startswith("Linux ")
    assert facts["cpu"]
    assert facts["num_cores"] >= 1
    assert facts["memory_bytes"] == memory_bytes() > 1 << 28
    assert datetime.datetime.fromisoformat(facts["date"]).tzinfo is not None
    assert facts["paths"][0]["path"] == str(tmp_path)
    assert facts["paths"][0]["file_system"] != "unknown"
