"""Do two stores on one folder, of one process or of two, leave each other's bytes alone?"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tiermem.swap.base.tier import Tier
from tiermem.swap.store.store import TensorStore

MakeStore = Callable[..., TensorStore]
Pattern = Callable[..., torch.Tensor]
NUM_BYTES = 300_000

_OTHER = """
import sys, torch
from tiermem.swap.store.store import TensorStore
from tiermem.swap.base.tier import Tier
with TensorStore(sys.argv[1], 8 << 20) as store:
    store.put("x", torch.full((300_000,), 9, dtype=torch.uint8), Tier.NVME).wait()
    print("put", flush=True)
    sys.stdin.readline()
    assert (store.fetch("x").wait() == 9).all()
"""


def test_stores_on_one_folder_hold_their_own_bytes_under_the_same_names(
    make_store: MakeStore, engine: str, pattern: Pattern, tmp_path: Path
) -> None:
    one, other = make_store(engine=engine), make_store(engine=engine)
    for i in range(8):  # both have transfers under way at once
        one.put(f"x{i}", pattern(NUM_BYTES, seed=i), Tier.NVME)
        other.put(f"x{i}", pattern(NUM_BYTES, seed=100 + i), Tier.NVME)
    for i in range(8):
        assert torch.equal(one.fetch(f"x{i}").wait(), pattern(NUM_BYTES, seed=i))
        assert torch.equal(other.fetch(f"x{i}").wait(), pattern(NUM_BYTES, seed=100 + i))
        other.release(f"x{i}", dirty=True)
    assert len(list(tmp_path.iterdir())) == 2
    one.close()
    assert len(list(tmp_path.iterdir())) == 1
    for i in range(8):
        assert torch.equal(other.fetch(f"x{i}").wait(), pattern(NUM_BYTES, seed=100 + i))


@pytest.mark.slow
def test_stores_of_two_processes_share_a_folder(
    make_store: MakeStore, pattern: Pattern, tmp_path: Path
) -> None:
    store = make_store()
    store.put("x", pattern(NUM_BYTES), Tier.NVME).wait()
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as other:
        assert other.stdout is not None and other.stderr is not None
        assert other.stdout.readline() == "put\n", other.stderr.read()
        assert len(list(tmp_path.iterdir())) == 2
        store.close()
        assert len(list(tmp_path.iterdir())) == 1
        _, errors = other.communicate("go on\n")
    assert (other.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_fork_while_transfers_are_under_way_ends_them_in_the_parent_alone(
    make_store: MakeStore, engine: str, pattern: Pattern, tmp_path: Path
) -> None:
    store = make_store(host_bytes=16 << 20, engine=engine)
    moves = [store.put(f"x{i}", pattern(1 << 20, seed=i), Tier.NVME) for i in range(6)]
    reading = [store.fetch(f"x{i}") for i in range(6)]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(RuntimeError, match="fork"):
                reading[5].wait()
            with pytest.raises(RuntimeError, match="forked child"):
                store.fetch("x0")
            store.close()
            with TensorStore(tmp_path, 8 << 20) as own:  # the child may have one of its own
                own.put("y", torch.ones(1000), Tier.NVME)
                assert own.fetch("y").wait().sum() == 1000
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for move in moves:
        move.wait()
    for i, move in enumerate(reading):
        assert torch.equal(move.wait(), pattern(1 << 20, seed=i))
    assert len(list(tmp_path.iterdir())) == 1
