"""Are extents preallocated, aligned and apart, are paths judged before a run, and does a run leave
nothing behind?"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import fork_server
import pytest
from drawn import drawn
from forks import forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermem.swap.base.native import IoSettings
from tiermem.swap.base.ranges import ALIGNMENT
from tiermem.swap.disk import run_folder
from tiermem.swap.disk.direct import file_system_of, probe_path
from tiermem.swap.disk.files import Extent, Files
from tiermem.swap.disk.run_folder import remove_dead_runs

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """One path; tests close it."""
    return Files([tmp_path])


# ---- extents -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (MIB + 1, MIB + 4096)]
)
def test_extent_is_aligned_and_covers_what_was_asked(files: Files, asked: int, given: int) -> None:
    extents = [files.allocate(asked) for _ in range(3)]
    assert [extent.num_bytes for extent in extents] == [given] * 3
    assert all(extent.offset % ALIGNMENT == 0 for extent in extents)
    assert files.used_bytes == 3 * given
    files.close(keep=False)


def test_file_has_blocks_for_every_extent_before_anything_is_written(files: Files) -> None:
    extent = files.allocate(100 * MIB)
    stat = os.fstat(files.segment_of(extent).fd)
    assert stat.st_size >= extent.offset + extent.num_bytes
    assert stat.st_blocks * 512 >= stat.st_size
    files.close(keep=False)


def test_reserved_bytes_are_allocated_without_growth_in_one_piece(files: Files) -> None:
    files.reserve(10 * MIB + 1)
    assert files.segments[0].size_bytes == 10 * MIB + ALIGNMENT
    files.reserve(10 * MIB)
    assert files.allocate(10 * MIB + 1) == Extent(0, 0, 10 * MIB + ALIGNMENT)
    assert files.segments[0].size_bytes == 10 * MIB + ALIGNMENT
    files.close(keep=False)


def test_reserve_does_not_count_holes(files: Files) -> None:
    files.reserve(4 * MIB)
    extents = [files.allocate(MIB) for _ in range(4)]
    files.free(extents[0])
    files.free(extents[2])
    files.reserve(2 * MIB)
    size = files.segments[0].size_bytes
    assert files.allocate(2 * MIB).offset == 4 * MIB
    assert files.segments[0].size_bytes == size
    files.close(keep=False)


def test_growth_uses_what_is_free_at_the_end(files: Files) -> None:
    files.reserve(MIB)
    assert files.allocate(64 * MIB).offset == 0
    assert files.segments[0].size_bytes == 65 * MIB  # 63 MiB were missing: one step of 64
    files.close(keep=False)


def test_extent_freed_is_allocated_again_and_only_once(files: Files) -> None:
    extent = files.allocate(MIB)
    files.free(extent)
    assert files.allocate(MIB) == extent
    files.free(extent)
    with pytest.raises(RuntimeError, match="given back twice"):
        files.free(extent)
    files.close(keep=False)


@settings(max_examples=drawn(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 300_000)), max_size=40),
    num_paths=st.integers(1, 3),
)
def test_extents_never_overlap(
    tmp_path: Path, steps: list[tuple[bool, int]], num_paths: int
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        paths = [Path(folder) / str(i) for i in range(num_paths)]
        for path in paths:
            path.mkdir()
        files = Files(paths)
        held: list[Extent] = []
        for is_allocation, number in steps:
            if is_allocation or not held:
                held.append(files.allocate(number))
            else:
                files.free(held.pop(number % len(held)))
            held.sort()
            for one, two in itertools.pairwise(held):
                assert one.path_index != two.path_index or one.offset + one.num_bytes <= two.offset
            assert files.used_bytes == sum(extent.num_bytes for extent in held)
            ends = [(e.path_index, e.offset + e.num_bytes) for e in held]
            assert all(end <= files.segments[index].size_bytes for index, end in ends)
        files.close(keep=False)


def test_extents_are_dealt_by_weight(tmp_path: Path) -> None:
    paths = [tmp_path / "slow", tmp_path / "fast"]
    for path in paths:
        path.mkdir()
    files = Files(paths)
    files.weights = [1.0, 3.0]
    for _ in range(40):
        files.allocate(MIB)
    assert [segment.used_bytes for segment in files.segments] == [10 * MIB, 30 * MIB]
    files.close(keep=False)


# ---- no room -------------------------------------------------------------------------------------


def test_disk_bytes_bounds_extents_and_the_file(tmp_path: Path) -> None:
    files = Files([tmp_path], limit_bytes=3 * MIB)
    extent = files.allocate(MIB)
    assert files.segments[0].size_bytes <= 3 * MIB
    for ask in (files.allocate, files.reserve):
        with pytest.raises(OSError, match="exceed disk_bytes=3145728") as refusal:
            ask(2 * MIB + 1)
        assert refusal.value.errno == errno.ENOSPC
        assert refusal.value.filename == str(tmp_path)
    files.free(extent)
    files.allocate(3 * MIB)
    assert files.segments[0].size_bytes == 3 * MIB
    files.close(keep=False)


def test_full_disk_is_refused_at_reservation_with_needed_and_free(
    mount: Callable[..., Path],
) -> None:
    path = mount("ext4", 24 * MIB)
    files = Files([path])
    free = probe_path(path).free_bytes
    with pytest.raises(
        OSError, match=rf"{64 * MIB} bytes are needed.* are free: No space left"
    ) as refusal:
        files.reserve(64 * MIB)
    assert (refusal.value.errno, refusal.value.filename) == (errno.ENOSPC, str(path))
    # what the refused request had taken is given back
    assert abs(probe_path(path).free_bytes - free) < MIB
    files.allocate(4 * MIB)  # less than one step of growth: exactly what is needed
    files.close(keep=False)


def test_full_path_sends_extents_to_the_other_and_both_full_names_both(
    tmp_path: Path, mount: Callable[..., Path]
) -> None:
    small, other = mount("ext4", 24 * MIB), tmp_path / "other"
    other.mkdir()
    files = Files([small, other])
    assert [files.allocate(100 * MIB).path_index for _ in range(3)] == [1, 1, 1]
    files.segments.append(files.segments.pop(0))
    with pytest.raises(OSError, match="bytes are needed") as refusal:
        files.allocate(1 << 50)
    assert str(small) in str(refusal.value)
    assert str(other) in str(refusal.value)
    files.close(keep=False)


def test_used_up_quota_sends_extents_to_the_other_path_and_is_named_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = os.posix_fallocate

    def take_below_mine(fd: int, offset: int, length: int) -> None:
        if "/mine/" in os.readlink(f"/proc/self/fd/{fd}") and offset + length > 8 * MIB:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        take(fd, offset, length)

    paths = [tmp_path / "mine", tmp_path / "other"]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(os, "posix_fallocate", take_below_mine)
    files = Files(paths)
    assert [files.allocate(6 * MIB).path_index for _ in range(3)] == [0, 1, 1]
    files.close(keep=False)
    alone = Files(paths[:1])
    alone.allocate(6 * MIB)
    with pytest.raises(
        OSError, match=r"bytes are needed.*the quota is used up: free some space, ask for more"
    ) as refusal:
        alone.allocate(6 * MIB)
    assert refusal.value.errno == errno.EDQUOT
    alone.allocate(2 * MIB)
    alone.close(keep=False)


def test_file_size_limit_of_the_process_is_an_error_not_a_signal(tmp_path: Path) -> None:
    script = (
        "import resource, sys, pathlib; from tiermem.swap.disk.files import Files\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * MIB}, {2 * MIB}))\n"
        f"files = Files([pathlib.Path({str(tmp_path)!r})])\n"
        "try: files.allocate(8 << 20)\n"
        "except OSError as error: print(error.errno)\n"
        "files.allocate(1 << 20); files.close(keep=False)"
    )
    done = fork_server.run(["-c", script], 60)
    assert (done.stdout, done.stderr) == (f"{errno.EFBIG}\n", "")
    assert list(tmp_path.iterdir()) == []


def test_error_other_than_a_full_disk_is_not_hidden_by_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "broken")

    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    files = Files(paths)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OSError, match="Input/output") as raised:
            files.allocate(1)
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(paths[0]))
    files.close(keep=False)


def test_without_a_path_nothing_rests_on_nvme() -> None:
    files = Files([])
    files.reserve(0)
    for ask in (files.allocate, files.reserve):
        with pytest.raises(ValueError, match="no path was given"):
            ask(1)
    files.close(keep=False)


# ---- paths ---------------------------------------------------------------------------------------


def test_missing_path_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make it first") as refusal:
        Files([tmp_path, tmp_path / "missing"])
    assert refusal.value.filename == str(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []  # what the first path had got is gone


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"is a file .* where a folder is due"):
        Files([tmp_path / "file"])


def test_path_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(OSError, match="cannot write here") as refusal:
        Files([Path("/proc")])
    assert refusal.value.filename == "/proc"


def test_path_listed_twice_is_refused_also_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="listed twice"):
        Files([tmp_path, tmp_path / "link"])


def test_file_system_is_told_from_the_longest_mount_point(
    tmp_path: Path, mount: Callable[..., Path]
) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    point = mount("tmpfs")  # its name holds a space, which /proc/self/mounts escapes
    assert file_system_of(point / "below") == "tmpfs"
    assert file_system_of(tmp_path) != "tmpfs"


def test_probe_leaves_nothing(tmp_path: Path) -> None:
    facts = probe_path(tmp_path)
    assert facts.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_refused_o_direct_falls_back_to_buffered_with_one_warning(
    mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = mount("ramfs")
    with caplog.at_level(logging.WARNING, "tiermem"):
        files = Files([path])
    files.allocate(MIB)
    refusals = [r.getMessage() for r in caplog.records if "O_DIRECT" in r.getMessage()]
    assert refusals == [f"{path} (ramfs) is used buffered: it takes no O_DIRECT"]
    assert any("is memory, not disk" in r.getMessage() for r in caplog.records)
    files.close(keep=False)


# ---- locks and what is left ----------------------------------------------------------------------


def test_folder_holds_lock_and_segment_while_the_run_lives(files: Files, tmp_path: Path) -> None:
    folder = tmp_path / files.run.folder_name
    assert sorted(file.name for file in folder.iterdir()) == ["lock", "segment.bin"]
    assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()
    files.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_live_runs_are_not_reported_dead(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = (
        "import sys; from pathlib import Path; from tiermem.swap.disk.files import Files; "
        "Files([Path(sys.argv[1])])"
    )
    with caplog.at_level(logging.WARNING, "tiermem"):
        second = Files([tmp_path])
        other = fork_server.run(["-c", script, str(tmp_path)])
    assert (caplog.text, other.stderr) == ("", "")
    for mine in (files, second):
        mine.close(keep=False)
    for left in tmp_path.iterdir():  # the other process ended without closing
        for file in left.iterdir():
            file.unlink()
        left.rmdir()


def killed_with(folder: Path, num_bytes: int) -> int:
    """The id of a process that was killed when it had reserved so many bytes of a folder."""

    def reserve_and_die() -> None:
        Files([folder]).reserve(num_bytes)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = forked(reserve_and_die)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return pid


def test_run_that_was_killed_is_reported_with_its_bytes_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed_with(tmp_path, 12288)
    (dead,) = tmp_path.iterdir()
    with caplog.at_level(logging.WARNING, "tiermem"):
        files = Files([tmp_path])
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path} holds 12288 bytes of runs that ended without closing: {dead.name}"
    ]
    files.close(keep=False)
    assert sorted(file.name for file in dead.iterdir()) == ["lock", "segment.bin"]
    for file in dead.iterdir():
        file.unlink()
    dead.rmdir()


def test_kept_run_leaves_its_segment_and_is_not_reported_dead(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.allocate(1)
    files.close(keep=True)
    (kept,) = tmp_path.iterdir()
    assert [file.name for file in kept.iterdir()] == ["segment.bin"]
    with caplog.at_level(logging.WARNING, "tiermem"):
        Files([tmp_path]).close(keep=False)
    assert caplog.text == ""
    (kept / "segment.bin").unlink()
    kept.rmdir()


def test_lock_appears_already_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    rename = Path.rename

    def watch(self: Path, target: Path) -> Path:
        seen.append((run_folder.is_dead(self.parent), (self.parent / "lock").exists()))
        renamed = rename(self, target)
        seen.append((run_folder.is_dead(self.parent), (self.parent / "lock").exists()))
        return renamed

    monkeypatch.setattr(Path, "rename", watch)
    Files([tmp_path]).close(keep=False)
    assert seen == [(False, False), (False, True)]


def test_segment_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, first: str) -> int:
        raise OSError(errno.ENOLCK, "no locks here")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_lock", fail)
        with pytest.raises(OSError, match="no locks here"):
            Files([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_somebody_elses_file_in_the_folder_survives_with_a_warning(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / files.run.folder_name
    (folder / "notes.txt").touch()
    with caplog.at_level(logging.WARNING, "tiermem"):
        files.close(keep=False)
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]
    assert "is left" in caplog.text
    (folder / "notes.txt").unlink()
    folder.rmdir()


def test_folder_removed_under_a_run_does_not_stop_the_closing(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    files = Files(paths)
    for file in files.segments[1].folder.iterdir():
        file.unlink()
    files.segments[1].folder.rmdir()
    files.close(keep=False)
    assert [list(path.iterdir()) for path in paths] == [[], []]


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ({"engine": "spdk"}, "allowed are auto, uring"),
        ({"block_bytes": 0}, "multiples of 4096"),
        ({"block_bytes": 4097}, "multiples of 4096"),
        ({"block_bytes": 2 << 30}, "up to 1073741824"),
        ({"depth": 0}, "1 to 4096"),
        ({"depth": 4097}, "1 to 4096"),
        ({"threads": -1}, "to 1024"),
    ],
)
def test_setting_out_of_range_is_refused_with_what_is_allowed(
    setting: dict[str, object], allowed: str
) -> None:
    with pytest.raises(ValueError, match=allowed):
        IoSettings(**setting)  # type: ignore[arg-type]


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    pid = killed_with(tmp_path, 4096)
    (tmp_path / "tiermem-notes").mkdir()
    live = Files([tmp_path])
    left = {folder.name for folder in tmp_path.glob("tiermem-*")} - {
        "tiermem-notes",
        live.run.folder_name,
    }
    assert len(left) == 1
    assert remove_dead_runs([tmp_path], pid + 1) == []
    assert {folder.name for folder in remove_dead_runs([tmp_path], pid)} == left
    assert remove_dead_runs([tmp_path], os.getpid()) == []  # it lives
    live.close(keep=False)
    assert [folder.name for folder in tmp_path.iterdir()] == ["tiermem-notes"]
    (tmp_path / "tiermem-notes").rmdir()
