"""When something goes wrong on one rank, do the others stop soon and say which rank and what?"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "lose_a_rank.py"


@pytest.mark.parametrize(("num_ranks", "who"), [(2, 0), (2, 1), (3, 1)])
def test_survivors_of_a_dead_rank_name_it(num_ranks: int, who: int, tmp_path: Path) -> None:
    ended = launch("dies", who, num_ranks, tmp_path)
    for rank, (code, error) in ended.items():
        if rank != who:
            assert code != 0
            assert f"rank {who}" in last_line(error)
            assert "is gone" in last_line(error)
    remove_what_the_dead_left(tmp_path)


def test_survivors_of_a_rank_that_raises_name_it(tmp_path: Path) -> None:
    ended = launch("raises", 1, 2, tmp_path)
    assert "this rank's own trouble" in ended[1][1]
    assert "rank 1" in last_line(ended[0][1])
    assert not list(tmp_path.glob("tiermem-*"))


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_policy_says(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = launch("hangs", 1, 2, tmp_path, wait_for=[0])
    assert ended[0][0] != 0
    assert "one was slower than timeout_s" in last_line(ended[0][1])
    assert time.monotonic() - start < 24.0  # 4 s of waiting, 10 s of asking around, and starting up
    remove_what_the_dead_left(tmp_path)


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("policy", "policy.persistence_numel is 50 on rank 0 and 51 on rank 1"),
        ("model", "parameter embed.weight is (61, 31) torch.float32 on rank 0 and not there on rank 1"),
        ("config", "gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_ranks_that_disagree_all_stop_and_name_the_difference(what: str, difference: str, tmp_path: Path) -> None:
    for code, error in launch(what, 1, 2, tmp_path).values():
        assert code != 0
        assert f"ValueError: ranks disagree: {difference}" in error
    assert not list(tmp_path.iterdir())


def remove_what_the_dead_left(nvme: Path) -> None:
    """Survivors clean up after themselves; the folder of a process that was killed stays for `tiermem fsck`."""
    left = list(nvme.glob("tiermem-*"))
    assert len(left) <= 1
    for folder in left:
        shutil.rmtree(folder)


def launch(
    what: str, who: int, num_ranks: int, nvme: Path, wait_for: list[int] | None = None
) -> dict[int, tuple[int, str]]:
    """Starts the ranks without an agent that would end the survivors; {rank: (exit code, stderr)}."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    ranks = {
        rank: subprocess.Popen(
            [sys.executable, str(SCRIPT), what, str(who), str(nvme)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    }
    try:
        return {rank: ended(ranks[rank]) for rank in wait_for or ranks}
    finally:
        for process in ranks.values():
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    error = process.communicate(timeout=60)[1]
    return process.returncode, error


def last_line(error: str) -> str:
    return next(line for line in reversed(error.splitlines()) if "RankLost" in line)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
