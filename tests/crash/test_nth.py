"""Does a run whose nth system call or allocation fails go on or say so, and is its last durable
step whole?

The same of a disk that forgets, reorders and tears what it was not told to keep. And would it be
seen if it were not?
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from forks import forked
from harness import totals_of
from supervisor import Rule, Supervisor, hold, why_not

from tiermem.swap.base.native import WRITE, IoSettings, Op, Queue

_WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


def test_some_failing_calls_lose_nothing(tmp_path: Path) -> None:
    assert (
        totals_of("nth.py", tmp_path, "--scenes", "0", "--sample", "3", "--workers", "1")["cases"]
        == 3
    )


def test_some_power_failures_lose_nothing(tmp_path: Path) -> None:
    assert (
        totals_of("write_log.py", tmp_path, "--scenes", "2", "--sample", "3", "--workers", "1")[
            "cases"
        ]
        == 3
    )


def test_linux_aio_ends_every_transfer_when_the_kernel_takes_none_any_more(tmp_path: Path) -> None:
    try:
        Queue(IoSettings("aio", depth=1)).close()
    except OSError as error:
        pytest.skip(str(error))

    def write() -> int:
        hold(["io_submit"])
        buffer = torch.zeros(8 << 12, dtype=torch.uint8)
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        queue = Queue(IoSettings("aio", block_bytes=4096, depth=2), {fd: "file"})
        answer = queue.wait(queue.submit([Op(WRITE, fd, buffer.data_ptr(), buffer.numel(), 0)]))
        queue.close()
        return 0 if answer is None else answer.error

    pid = forked(write, tmp_path / "printed")
    ended = Supervisor(
        pid, ["io_submit"], [tmp_path], Rule("io_submit", 2, errno.EIO, is_for_good=True)
    ).watch(60.0)
    assert ended.status is not None and os.waitstatus_to_exitcode(ended.status) == errno.EIO


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "script", "words"),
    [
        ("failed_syncs_are_not_told", "nth.py", ("--scenes", "6", "--calls", "fsync", "fdatasync")),
        ("files_go_before_their_manifest", "nth.py", ("--scenes", "0", "--calls", "unlink")),
        ("manifest_comes_before_the_data", "write_log.py", ("--scenes", "0", "--sample", "100")),
        ("small_files_are_not_synced", "write_log.py", ("--scenes", "0", "--sample", "100")),
        ("renames_are_not_synced", "write_log.py", ("--scenes", "0", "--sample", "100")),
    ],
)
def test_what_is_broken_is_noticed(
    way: str, script: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="seed 1, case"):
        totals_of(script, tmp_path, *words, "--sabotage", way)
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.soak
def test_no_failing_call_loses_anything(tmp_path: Path) -> None:
    found = totals_of("nth.py", tmp_path)
    assert found["cases"] == found["of"] > 4000


@pytest.mark.soak
def test_no_power_failure_loses_anything(tmp_path: Path) -> None:
    found = totals_of("write_log.py", tmp_path)
    assert found["cases"] == found["of"] > 700
