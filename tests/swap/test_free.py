"""Is the memory that counts as free that of the machine and of every cgroup around a process?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tiermem.swap.base.proc import bytes_in, read_table
from tiermem.swap.memory import free


def group(folder: Path, limit: str, used: int, unused_files: int) -> Path:
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {unused_files}\n")
    return folder


def test_a_cgroup_further_out_limits_and_its_unused_files_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = group(tmp_path / "outer", str(9 << 20), 7 << 20, 1 << 20)
    inner = group(outer / "inner", "max", 6 << 20, 0)
    monkeypatch.setattr(free, "own_cgroup", {"": inner, "memory": None}.get)
    assert free.free_host_bytes() == 3 << 20
    (outer / "memory.current").write_text(str(99 << 20))
    assert free.free_host_bytes() == 0


def test_without_cgroups_it_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free, "own_cgroup", lambda controller: None)
    table = read_table("/proc/meminfo")
    assert 0 < free.free_host_bytes() <= bytes_in(table, "MemTotal")
