"""When a rank is killed, stopped or exits, do the others name it within 1.5 times the time-out, on
any backend?

Rank 0 keeps the store; when it is stopped, the store does not answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import hosts
import pytest
from accelerator.fixture import WHY_SKIPPED

SCRIPT = Path(__file__).parent / "silent_ranks.py"
TIMEOUT_S = 6.0
FEW = [
    "gloo, 0 of 2 stopped in forward",
    "simccl, 0 of 2 stopped in backward",
    "simccl, 1 of 2 killed in save",
]
MANY = [
    f"{backend}, {who} of {world} {how} in {phase}"
    for backend in ("gloo", "simccl")
    for who, world in ((1, 2), (2, 4), (0, 4))
    for how in ("killed", "stopped", "exits")
    for phase in ("forward", "backward", "step", "save")
]


def found_in(names: list[str], out: Path) -> dict[str, dict[str, tuple[str, float, str]]]:
    """By world and rank: the class, seconds and words of what a rank raised."""
    if WHY_SKIPPED is not None:
        names = [name for name in names if name.startswith("gloo")]
    done = fork_server.run([str(SCRIPT), str(out), *names], 120, OMP_NUM_THREADS="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads((out / "found.json").read_text())


def assert_survivors_name(names: list[str], out: Path) -> None:
    for name, said in found_in(names, out).items():
        assert len(said) == int(name.split()[3]) - 1
        for kind, took_s, words in said.values():
            assert kind == "RankLost", f"{name}: {kind} {words}"
            assert f"rank {name.split()[1]} (process " in words and "is gone" in words, (
                f"{name}: {words}"
            )
            assert "its last call was" in words, f"{name}: {words}"
            assert took_s < 1.5 * TIMEOUT_S, f"{name}: {took_s} s"


def test_survivors_name_a_rank_that_is_gone(tmp_path: Path) -> None:
    assert_survivors_name(FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
def test_ranks_on_devices_whose_collectives_differ_in_order_are_told_where(tmp_path: Path) -> None:
    (said,) = found_in(["simccl, 1 of 2 turns in batch"], tmp_path).values()
    for kind, took_s, words in said.values():
        assert kind == "RanksDiffer" and "ranks have gone different ways: number" in words
        assert took_s < 1.5 * TIMEOUT_S


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(MANY), 3))
def test_survivors_name_a_rank_that_is_gone_in_any_phase(first: int, tmp_path: Path) -> None:
    assert_survivors_name(MANY[first : first + 3], tmp_path)


@pytest.mark.slow
def test_hosts_whose_cable_is_cut_name_each_other(tmp_path: Path) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "12007",
        "GLOO_SOCKET_IFNAME": "cable",
    }
    environment |= {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), str(SCRIPT.parent)])}
    with hosts.two_hosts() as enter, contextlib.ExitStack() as stack:
        for rank, command in enumerate(enter):
            words = [*command, sys.executable, str(SCRIPT), str(tmp_path)]
            stack.callback(subprocess.Popen(words, env={**environment, "RANK": str(rank)}).kill)
        _await([tmp_path / f"at-{rank}" for rank in (0, 1)], 90.0)
        since = time.time()
        subprocess.run([*enter[1], "ip", "link", "set", "cable", "down"], check=True)
        _await([tmp_path / f"{rank}.json" for rank in (0, 1)], 30.0)
    for rank in (0, 1):
        kind, at, words = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kind == "RankLost" and f"rank {1 - rank} (process " in words and "is gone" in words
        assert at - since < 1.5 * TIMEOUT_S


def _await(paths: list[Path], most_s: float) -> None:
    deadline = time.monotonic() + most_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.02)
