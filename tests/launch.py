"""Launch: one script in several processes that meet in torch.distributed, without an agent between.

    in the test      found = launch(HERE / "twin_on_ranks.py", 2, tmp_path, str(nvme))     what every rank wrote, by rank
    in the script    with as_rank() as (rank, out, words): torch.save({...}, out)

The first rank that fails ends the others, and its output is the error. Nothing outlives the call.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional

_WAIT_S = 60.0  # for other ranks, in collectives


def launch(script: Path, num_ranks: int, folder: Path, *words: str, timeout_s: float = 400.0) -> list[Any]:
    """Runs a script once per rank and returns what each wrote; `folder` must be empty. Blocks."""
    processes = []
    for rank in range(num_ranks):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        environment |= {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        with open(folder / f"{rank}.txt", "w") as said:
            command = [sys.executable, str(script), str(folder), *words]
            processes.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment))
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    wrong = [rank for rank, process in enumerate(processes) if process.returncode]
    said_by = {rank: (folder / f"{rank}.txt").read_text()[-4000:] for rank in wrong}
    assert not wrong, f"ranks {wrong} failed:\n" + "\n".join(
        f"---- rank {rank}\n{text}" for rank, text in said_by.items()
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@contextlib.contextmanager
def as_rank() -> Iterator[tuple[int, Path, list[str]]]:
    """In a launched script: meets the other ranks; gives this rank's number, the file to write and the script's words."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{folder.absolute()}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=_WAIT_S)
    )
    yield rank, folder / f"{rank}.pt", sys.argv[2:]
    dist.destroy_process_group()
