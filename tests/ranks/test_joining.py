"""Do ranks that were started with different numbers say so, instead of waiting for those that will never come?"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from forks import free_port

SCRIPT = """
import torch.distributed as dist
from tiermem.engine.joining import join_ranks
try:
    join_ranks({timeout_s})
except ValueError as error:
    print(error)
else:
    dist.barrier()
    print("joined", dist.get_rank(), "of", dist.get_world_size())
"""


def said_by(*ranks: tuple[int, int], timeout_s: float = 60.0) -> list[str]:
    """What processes that were told (RANK, WORLD_SIZE) say."""
    port = str(free_port())
    processes = []
    for rank, world in ranks:
        told = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", SCRIPT.format(timeout_s=timeout_s)]
        processes.append(subprocess.Popen(command, env=os.environ | told, stdout=subprocess.PIPE, text=True))
    try:
        return [process.communicate(timeout=90)[0].strip().splitlines()[-1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_ranks_with_one_world_size_join() -> None:
    assert said_by((0, 2), (1, 2)) == ["joined 0 of 2", "joined 1 of 2"]


@pytest.mark.parametrize("sizes", [(3, 2), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_another_world_size_is_named_on_both_ranks(sizes: tuple[int, int]) -> None:
    for said in said_by((0, sizes[0]), (1, sizes[1])):
        assert said.startswith(f"ranks disagree: WORLD_SIZE is {sizes[0]} on rank 0 and {sizes[1]} on rank 1. ")


@pytest.mark.slow
def test_two_processes_with_one_number_are_told() -> None:
    first, *twins = said_by((0, 3), (1, 3), (1, 3))
    for said in (first, *twins):
        assert said.startswith("two processes say that they are rank 1 of 3")


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named() -> None:
    for said in said_by((0, 3), (2, 3), timeout_s=5.0):
        assert said.startswith("WORLD_SIZE is 3, and after 5 s ranks [1] have not come")
