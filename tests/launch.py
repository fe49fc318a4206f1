"""Launch: one script in several processes that meet in torch.distributed, without an agent between.

    in the test      found = launch(HERE / "twin_on_ranks.py", 2, tmp_path, str(nvme))     what every rank wrote, by rank
    in the script    with as_rank() as (rank, out, words): torch.save({...}, out)

The processes are forks of one that has imported what the script imports, and has computed nothing
(fork_server.py). The first rank that fails ends the others, and its output is the error. Nothing
outlives the call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
import torch.distributed as dist

# Before there is a group, which it would hold: ranks/joining.py.
import torch.distributed.nn.functional
from forks import forked, free_port
from strips import cut_small_tiles

_WAIT_S = 60.0  # for other ranks, in collectives


def launch(
    script: Path, num_ranks: int, folder: Path, *words: str, timeout_s: float = 400.0
) -> list[Any]:
    """Runs a script once per rank and returns what each wrote; `folder` must be empty. Blocks."""
    launch_ranks(script, num_ranks, str(folder), *words, timeout_s=timeout_s)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def launch_ranks(script: Path, num_ranks: int, *words: str, timeout_s: float = 400.0) -> None:
    """Runs a script once per rank, with these words and the variables that torchrun sets.
    Blocks."""
    done = fork_server.run(
        [__file__, str(num_ranks), str(script), *words], timeout_s, OMP_NUM_THREADS="1"
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{script.name} failed on {num_ranks} ranks:\n{output[-8000:]}"


def asked(request: pytest.FixtureRequest, *parameters: str) -> list[Any]:
    """What the tests of this module that run, and no others, say for some of their parameters: the
    cases that the module's launch computes. Each once, in the order of the tests."""
    found = {}
    for item in request.session.items:
        given = getattr(item, "callspec", None)
        if item.path == request.path and given is not None and {*parameters} <= {*given.params}:
            values = tuple(given.params[name] for name in parameters)
            found[values if len(values) > 1 else values[0]] = None
    return list(found)


@contextlib.contextmanager
def as_rank(backend: str = "gloo") -> Iterator[tuple[int, Path, list[str]]]:
    """In a launched script: meets the other ranks; gives this rank's number, the file to write and
    the script's words."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{folder.absolute()}/meeting"
    dist.init_process_group(
        backend,
        init_method=meeting,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_WAIT_S),
    )
    cut_small_tiles()
    yield rank, folder / f"{rank}.pt", sys.argv[2:]
    dist.destroy_process_group()


# ---- the process that forks ----------------------------------------------------------------------


def _fork_ranks(num_ranks: int, script: str) -> int:
    """Forks the ranks and waits for them; the exit status."""
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="imported")
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = {forked(functools.partial(_be_a_rank, rank, script)) for rank in range(num_ranks)}
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            for each in running:
                os.kill(each, signal.SIGKILL)
            return 1
    return 0


def _be_a_rank(rank: int, script: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    num_ranks, sys.argv = int(sys.argv[1]), sys.argv[2:]
    sys.exit(_fork_ranks(num_ranks, sys.argv[0]))
