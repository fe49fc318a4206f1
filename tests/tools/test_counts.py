"""Are our counts held to the kernel's?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tiermem.tools.record.run_record import IoCounts, disagreements, kernel_counts

GB = 10**9


@pytest.mark.parametrize("read", [10 * GB, int(10.19 * GB)])
@pytest.mark.parametrize("written", [5 * GB, int(4.95 * GB)])
def test_counts_within_two_percent_agree(read: int, written: int) -> None:
    assert disagreements(IoCounts(10 * GB, 5 * GB), IoCounts(read, written)) == []


def test_a_difference_names_both_numbers() -> None:
    (sentence,) = disagreements(IoCounts(10 * GB, 5 * GB), IoCounts(10 * GB, 6 * GB))
    assert "bytes written" in sentence
    assert str(5 * GB) in sentence
    assert str(6 * GB) in sentence


def test_bytes_that_the_kernel_did_not_see_are_a_difference() -> None:
    assert len(disagreements(IoCounts(GB, GB), IoCounts(0, 0))) == 2


def test_pages_of_program_code_are_no_difference() -> None:
    assert disagreements(IoCounts(0, 0), IoCounts(20 << 20, 0)) == []


def test_the_kernel_counts_what_goes_to_disk(tmp_path: Path) -> None:
    before = kernel_counts()
    with open(tmp_path / "file", "wb") as file:
        file.write(os.urandom(8 << 20))
        os.fsync(file.fileno())
    written = kernel_counts().since(before).written_bytes
    if written == 0:
        pytest.skip("this file system is not on a disk")
    assert 8 << 20 <= written < 12 << 20
