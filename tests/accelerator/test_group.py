"""Do collectives of device tensors leave what gloo leaves, in stream order, whichever rank
waits?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import launch_ranks

from accelerator.fixture import WHY_SKIPPED

_TIMEOUT_S = 2.0
_LONELY = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from accelerator import device
sim = device.load()
rank, meeting, is_aborted = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "aborted"
longest = timedelta(seconds=TIMEOUT_S)
dist.init_process_group("cpu:gloo,sim:simccl", init_method=meeting, rank=rank, world_size=2, timeout=longest)
x = torch.ones(3, device="sim")
dist.all_reduce(x)
x.cpu()
if rank == 1:
    dist.distributed_c10d._get_default_store().wait(["gone"], timedelta(seconds=60))
    dist.distributed_c10d.os._exit(0)
dist.distributed_c10d._get_default_store().set("gone", "1")
time.sleep(0.5)
since = time.monotonic()
dist.all_reduce(x)
print("ordered", time.monotonic() - since < 1.0, flush=True)
if is_aborted:
    dist.group.WORLD._get_backend(x.device).abort()
x.cpu()
try:
    dist.all_reduce(x)
except RuntimeError as error:
    print(error, flush=True)
dist.distributed_c10d.os._exit(0)
""".replace("TIMEOUT_S", str(_TIMEOUT_S))


def _left_alone(folder: Path, word: str) -> tuple[int, str, float]:
    """How rank 0 ends, what it says, and after how many seconds, when rank 1 is gone before their
    second collective."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _LONELY]
    words = [f"file://{folder}/meeting", word]
    other = subprocess.Popen([*command, "1", *words], env=environment)
    since = time.monotonic()
    done = subprocess.run(
        [*command, "0", *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert other.wait() == 0
    return done.returncode, done.stdout + done.stderr, time.monotonic() - since


@pytest.mark.slow
@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
def test_a_peer_that_is_gone_is_silence_until_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    code, said, took_s = _left_alone(tmp_path, "left")
    assert code == -signal.SIGABRT and took_s > _TIMEOUT_S
    assert "ordered True" in said and "watchdog: all_reduce on rank 0 timed out" in said


@pytest.mark.slow
@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
def test_aborting_a_communicator_ends_what_is_pending_and_refuses_what_follows(
    tmp_path: Path,
) -> None:
    code, said, _ = _left_alone(tmp_path, "aborted")
    assert code == 0 and "the communicator was aborted" in said and "watchdog" not in said


@pytest.mark.sampled(2)
@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_collectives_on_ranks(num_ranks: int, tmp_path: Path) -> None:
    launch_ranks(
        Path(__file__).parent / "group_on_ranks.py",
        num_ranks,
        str(tmp_path / "meeting"),
        timeout_s=120,
    )
