"""Is O_DIRECT used exactly where the kernel allows it at the alignment that transfers have, and is
the rest said once?"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiermem.swap.base import native
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk import direct
from tiermem.swap.disk.direct import open_direct, open_unnamed, preallocate, probe_path
from tiermem.swap.disk.durable import Owned
from tiermem.swap.disk.files import Files
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import FileReader

Pattern = Callable[..., torch.Tensor]
REFUSED = [
    ((0, 0), "its files take no direct I/O, says the kernel (STATX_DIOALIGN)"),
    (
        (512, 8192),
        "O_DIRECT asks for memory at multiples of 512 and offsets of 8192 bytes, more than 4096",
    ),
    (
        (16384, 4096),
        "O_DIRECT asks for memory at multiples of 16384 and offsets of 4096 bytes, more than 4096",
    ),
]
TAKEN = [None, (4, 512), (512, 512), (4096, 4096)]


def answer(monkeypatch: pytest.MonkeyPatch, alignment: tuple[int, int] | None) -> None:
    monkeypatch.setattr(native, "file_alignment", lambda fd: alignment)


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("alignment", TAKEN)
def test_alignment_that_transfers_have_is_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alignment: tuple[int, int] | None
) -> None:
    answer(monkeypatch, alignment)
    assert probe_path(tmp_path)[3:5] == (True, "")
    files = Files(tmp_path)
    assert is_direct(files.segments[0].fd)
    files.close(keep=False)


@pytest.mark.parametrize(("alignment", "why"), REFUSED)
def test_alignment_that_transfers_lack_is_buffered_and_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    alignment: tuple[int, int],
    why: str,
) -> None:
    answer(monkeypatch, alignment)
    files = Files(tmp_path)
    assert not is_direct(files.segments[0].fd)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path} ({files.segments[0].facts.file_system}) is used buffered: {why}"
    ]
    files.close(keep=False)


def test_two_paths_of_one_file_system_are_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mount: Callable[..., Path],
) -> None:
    answer(monkeypatch, (0, 0))
    paths = [tmp_path / "a", tmp_path / "b", mount("tmpfs")]
    for path in paths[:2]:
        path.mkdir()
    with caplog.at_level(logging.WARNING, "tiermem"):
        files = Files(paths)
    told = [
        record.getMessage().split(" ")[0]
        for record in caplog.records
        if "is used buffered" in record.getMessage()
    ]
    assert sorted(told) == sorted([str(paths[0]), str(paths[2]).split(" ")[0]])
    files.close(keep=False)


def test_what_is_buffered_keeps_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: Pattern
) -> None:
    answer(monkeypatch, (0, 0))
    with TensorStore(tmp_path, 4 << 20) as store:
        store.put("x", pattern(1_000_001), Tier.NVME).wait()
        assert torch.equal(store.fetch("x").wait(), pattern(1_000_001))


@pytest.mark.parametrize(
    ("alignment", "expected"), [((0, 0), False), ((8192, 8192), False), ((512, 512), True)]
)
def test_reader_and_unnamed_files_follow_the_same_rule(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pattern: Pattern,
    alignment: tuple[int, int],
    expected: bool,
) -> None:
    answer(monkeypatch, alignment)
    path = tmp_path / "model"
    path.write_bytes(bytes(pattern(10_001).numpy()))
    with FileReader(path) as reader:
        assert is_direct(reader._file.fd) is expected
        assert torch.equal(reader.read(5, 9_990), pattern(10_001)[5:9_995])
    own, why = open_unnamed(tmp_path)
    assert (not why) is is_direct(own[0]) is expected
    own.close()
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_file_that_refuses_o_direct_says_so(mount: Callable[..., Path]) -> None:
    folder = mount("ramfs")
    (folder / "file").touch()
    own, why = open_direct(folder / "file", os.O_RDWR)
    assert (is_direct(own[0]), why) == (False, "it takes no O_DIRECT")
    own.close()
    assert open_unnamed(folder)[1]
    assert [file.name for file in folder.iterdir()] == ["file"]


def test_file_that_is_not_there_is_an_error_not_a_buffered_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_direct(tmp_path / "missing", os.O_RDONLY)


def test_probing_a_folder_makes_no_name_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []

    def look(file: Path, flags: int) -> tuple[Owned, str]:
        names.extend(os.listdir(tmp_path))  # what a process would leave that is killed here
        return open_direct(file, flags)

    monkeypatch.setattr(direct, "open_direct", look)
    assert probe_path(tmp_path).why_buffered == open_unnamed(tmp_path)[1]
    assert not names


def test_room_is_taken_where_there_is_no_fallocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(fd: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "posix_fallocate", lacking)
    file = tmp_path / "segment"
    file.write_bytes(b"kept" * 1000)
    with open_direct(file, os.O_RDWR)[0] as fd:
        preallocate(fd, 0, 3 << 20)
    assert file.read_bytes() == b"kept" * 1000 + bytes((3 << 20) - 4000)
    assert file.stat().st_blocks * 512 >= 3 << 20
