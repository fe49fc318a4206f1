"""Is a file that is filled past the page cache what was put, and is one that fails not there?"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tiermem.swap.store.stream import FileWriter


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, (1 << 20) + 1, (5 << 20) + 123])
def test_a_file_holds_what_was_put_at_any_length(tmp_path: Path, num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    with FileWriter(tmp_path / "data", num_bytes) as file:
        for start in range(0, num_bytes, 700_001):
            file.put(data[start : start + 700_001])
        assert file.position == num_bytes
    assert (tmp_path / "data").read_bytes() == data.numpy().tobytes()


def test_what_is_skipped_is_zero(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "data", 100) as file:
        file.put(torch.ones(3, dtype=torch.uint8))
        file.skip_to(64)
        file.put(torch.ones(36, dtype=torch.uint8))
    assert (tmp_path / "data").read_bytes() == b"\1" * 3 + b"\0" * 61 + b"\1" * 36


def test_an_error_leaves_no_file_and_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ZeroDivisionError), FileWriter(tmp_path / "data", 1 << 21) as file:
        file.put(torch.ones((1 << 20) + 1 // 0, dtype=torch.uint8))
    with pytest.raises(ValueError, match="1 of 2 bytes"), FileWriter(tmp_path / "data", 2) as file:
        file.put(torch.ones(1, dtype=torch.uint8))
    with (
        pytest.raises(ValueError, match="byte 3 of a file of 2"),
        FileWriter(tmp_path / "data", 2) as file,
    ):
        file.put(torch.ones(3, dtype=torch.uint8))
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"bytes are needed, [0-9]+ are free") as caught:
        FileWriter(tmp_path / "data", 1 << 60)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG) and caught.value.filename == str(
        tmp_path / "data"
    )
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        FileWriter(tmp_path / "data", 4)
    assert (tmp_path / "data").read_bytes() == b"mine"
