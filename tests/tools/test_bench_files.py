"""Do a benchmark's files leave nothing behind, and is a lack of room refused with the
arithmetic?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("_tiermem_native")

from tiermem.tools.measure.files import BenchFiles, check_room

PIB = 1 << 50


def test_files_have_no_name_and_other_processes_can_write_them(tmp_path: Path) -> None:
    with BenchFiles([tmp_path], [1 << 16, 1 << 16, 1 << 17]) as files:
        assert list(tmp_path.iterdir()) == []
        name = files.name(0, 1)
        assert name != files.name(0)
        write = f"import os; fd = os.open({name!r}, os.O_RDWR); os.pwrite(fd, b'there', 100)"
        subprocess.run([sys.executable, "-c", write], check=True)
        with open(name, "rb") as file:
            assert file.read()[100:105] == b"there"
        assert os.stat(name).st_size == files.sizes[1] == 1 << 16
        assert os.stat(files.name(0, -1)).st_size == files.sizes[-1] == 1 << 17
        assert files.paths == (tmp_path,)
    assert not os.path.exists(name)


def test_a_file_that_does_not_fit_takes_the_others_with_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"a file of .* cannot be made"):
        BenchFiles([tmp_path], [1 << 16, PIB])
    assert len(os.listdir("/proc/self/fd")) == before


def test_room_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(
        OSError, match=r"are free: .* for 4 files \+ .* for stores\. Free space"
    ) as refused:
        check_room([tmp_path], [("4 files", PIB), ("stores", PIB), ("nothing", 0)])
    assert "nothing" not in str(refused.value)
    assert refused.value.filename == str(tmp_path)


def test_paths_on_one_file_system_share_what_is_free(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    most = stats.f_bavail * stats.f_frsize * 3 // 4
    (tmp_path / "other").mkdir()
    check_room([tmp_path], [("a file", most)])
    with pytest.raises(OSError, match="x 2 paths on this file system"):
        check_room([tmp_path, tmp_path / "other"], [("a file", most)])
