"""Do the ranks that a launcher has started train together, and say so when they were told different
numbers?"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fork_server import Started, start
from forks import free_port
from programs.models import Tower
from programs.twins import loss_of, seeded

import tiermem
from tiermem.ranks.joining import JOIN_TIMEOUT_S

SCRIPT = """
import torch
import torch.distributed as dist
from tiermem.ranks.joining import join_ranks
try:
    join_ranks(1800.0, torch.device("cpu"), {join_timeout_s})
except ValueError as error:
    print(error)
else:
    dist.barrier()
    print("joined", dist.get_rank(), "of", dist.get_world_size())
"""


SHARDS = """
import torch.distributed as dist
from programs.models import Tower
from programs.twins import seeded, train_steps
import tiermem
policy = tiermem.OffloadPolicy(persistence_numel=50)
if {with_init}:
    with tiermem.zero.Init(policy=policy):
        model = seeded(Tower)
    held = sum(p.ds_tensor.numel() for p in model.parameters() if hasattr(p, "ds_tensor"))
    assert dist.get_world_size() == 2 and held < 0.6 * sum(p.ds_numel for p in model.parameters() if hasattr(p, "ds_numel"))
else:
    model = seeded(Tower)
with tiermem.shard(model, policy):
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    print(train_steps(model, optim, [10 * step + dist.get_rank() for step in range(3)]))
dist.destroy_process_group()
"""

ALONE = """
import torch.distributed as dist
import tiermem
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
try:
    tiermem.shard(__import__("torch").nn.Linear(2, 2))
except ValueError as error:
    print(error)
"""


TWICE = """
import time
import torch
import torch.distributed as dist
import tiermem
for times in (1, 2):
    tiermem.init_distributed()
    found = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(found)
    if dist.get_rank() == 0:
        time.sleep(0.3)  # rank 1 finds the store of the first group
    dist.destroy_process_group()
print(found.item())
"""

PASSIVE = """
import torch
import tiermem
policy = tiermem.OffloadPolicy(join_timeout_s={join_timeout_s})
try:
    {what}
except ValueError as error:
    print(error)
"""
DIES = """
import os
import torch
import torch.distributed as dist
import tiermem
from tiermem.ranks import joining
joining._GRACE_S = joining._LEAST_S = 2.0
if os.environ["RANK"] == "{who}":
    dist.init_process_group = lambda *args, **words: os.kill(os.getpid(), 9)
try:
    tiermem.shard(torch.nn.Linear(2, 2), tiermem.OffloadPolicy(join_timeout_s=3.0))
except ValueError as error:
    print(error)
"""
MADE_BY = {
    "shard": "tiermem.shard(torch.nn.Linear(2, 2), policy)",
    "Init": "tiermem.zero.Init(policy=policy).__enter__()",
    "initialize": "tiermem.initialize(model=torch.nn.Linear(2, 2), config={'train_batch_size': 3, "
    "'tiermem': {'join_timeout_s': 3}})",
    "init_distributed": "tiermem.init_distributed(timeout=__import__('datetime').timedelta(seconds=3))",
}


def started(
    *ranks: tuple[int, int],
    script: str = "",
    join_timeout_s: float = 60.0,
    agents_port: int | None = None,
    starts: int = 0,
) -> list[Started]:
    """Processes that are told (RANK, WORLD_SIZE); default: they join.

    agents_port: where an agent, such as torchrun's, keeps the store; starts: how often it has
        started the ranks before.
    """
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents_port or free_port())}
    if agents_port:
        told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(starts)}
    words = ["-c", script or SCRIPT.format(join_timeout_s=join_timeout_s)]
    return [start(words, RANK=str(rank), WORLD_SIZE=str(world), **told) for rank, world in ranks]


def last_lines(processes: list[Started]) -> list[str]:
    """The last line that each process prints. Blocks."""
    for process in processes:
        process.wait(90)
        assert process.stdout().strip(), process.stderr()
    return [process.stdout().strip().splitlines()[-1] for process in processes]


def said_by(*ranks: tuple[int, int], **settings: Any) -> list[str]:
    """Starts processes (see `started`) and returns their last lines."""
    with contextlib.ExitStack() as stack:
        return last_lines([stack.enter_context(process) for process in started(*ranks, **settings)])


def test_ranks_with_one_world_size_join() -> None:
    assert said_by((0, 2), (1, 2)) == ["joined 0 of 2", "joined 1 of 2"]


ONE_RANK = """
import torch
import torch.distributed as dist
import tiermem
policy = tiermem.OffloadPolicy()
for what in {ways}:
    assert not dist.is_initialized()
    exec(what)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1), what
    found = torch.ones(1)
    dist.all_reduce(found)
    dist.destroy_process_group()
print("a group each time")
"""


def test_one_rank_of_a_launcher_has_a_group_whichever_call_comes_first() -> None:
    ways = [*(MADE_BY | {"Init": "with tiermem.zero.Init(policy=policy): pass"}).values()]
    script = ONE_RANK.format(
        ways=[each.replace("'train_batch_size': 3", "'train_batch_size': 1") for each in ways]
    )
    assert said_by((0, 1), script=script) == ["a group each time"]


@pytest.mark.parametrize("with_init", [False, True])
def test_sharding_joins_the_ranks_and_trains_as_ddp_does(with_init: bool) -> None:
    said = said_by((0, 2), (1, 2), script=SHARDS.format(with_init=with_init))
    twin = seeded(Tower)
    optim = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    expected: list[list[float]] = [[], []]
    for step in range(3):
        losses = [loss_of(twin, 10 * step + rank) for rank in range(2)]
        (sum(losses) / 2).backward()
        optim.step()
        optim.zero_grad()
        for mine, loss in zip(expected, losses, strict=True):
            mine.append(loss.item())
    for mine, theirs in zip(said, expected, strict=True):
        assert json.loads(mine) == pytest.approx(theirs, rel=1e-5)


def test_a_group_of_one_rank_of_several_is_refused() -> None:
    [said] = said_by((0, 2), script=ALONE.format(port=free_port()))
    assert said.startswith("WORLD_SIZE is 2 and the process group holds this rank alone")


@pytest.mark.parametrize("sizes", [(3, 2), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_another_world_size_is_named_on_both_ranks(sizes: tuple[int, int]) -> None:
    for said in said_by((0, sizes[0]), (1, sizes[1])):
        assert said.startswith(
            f"ranks disagree: WORLD_SIZE is {sizes[0]} on rank 0 and {sizes[1]} on rank 1. "
        )


@pytest.mark.slow
def test_two_processes_with_one_number_are_told() -> None:
    first, *twins = said_by((0, 3), (1, 3), (1, 3))
    for said in (first, *twins):
        assert said.startswith("two processes say that they are rank 1 of 3")


AGENT = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", {port}, is_master=True, wait_for_workers=False)
print("listening", flush=True)
while True:
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[int]:
    """The port of a store that no rank keeps."""
    port = free_port()
    with start(["-c", AGENT.format(port=port)]) as process:
        while "listening" not in process.stdout():
            time.sleep(0.01)
        yield port


def test_ranks_join_again_at_the_store_of_an_agent(agent: int) -> None:
    assert said_by((0, 2), (1, 2), script=TWICE, agents_port=agent) == ["3.0", "3.0"]
    assert said_by((0, 2), (1, 2), script=TWICE) == ["3.0", "3.0"]


@pytest.fixture(scope="module")
def waiting(agent: int) -> Iterator[dict[str, list[Started]]]:
    """Worlds in which a rank never comes; all wait at the same time."""
    worlds = {
        "rank 0's store": started((0, 3), (2, 3), join_timeout_s=3.0),
        "an agent's store": started(
            (0, 3), (2, 3), join_timeout_s=3.0, agents_port=agent, starts=1
        ),
        "no store": started((1, 3), (2, 3), join_timeout_s=3.0),
        "an agent's store without rank 0": started(
            (1, 3), (2, 3), join_timeout_s=3.0, agents_port=agent, starts=2
        ),
        "1 dies": started((0, 3), (1, 3), (2, 3), script=DIES.format(who=1)),
        "0 dies": started((0, 3), (1, 3), (2, 3), script=DIES.format(who=0)),
    } | {
        who: started((0, 3), script=PASSIVE.format(join_timeout_s=3.0, what=what))
        for who, what in MADE_BY.items()
    }
    with contextlib.ExitStack() as stack:
        for process in itertools.chain(*worlds.values()):
            stack.enter_context(process)
        yield worlds


@pytest.mark.sampled(2)
@pytest.mark.parametrize("store", ["rank 0's store", "an agent's store"])
def test_a_rank_that_never_comes_is_named_by_all(
    store: str, waiting: dict[str, list[Started]]
) -> None:
    for said in last_lines(waiting[store]):
        assert said.startswith("WORLD_SIZE is 3, and after 3 s ranks [1] have not come")


@pytest.mark.slow
def test_rank_0_that_never_comes_is_named_by_all(waiting: dict[str, list[Started]]) -> None:
    for said in last_lines(waiting["no store"]):
        assert said.startswith(
            "WORLD_SIZE is 3, and in 3 s nothing answered at MASTER_ADDR:MASTER_PORT 127.0.0.1:"
        )
        assert "rank 0 has not come" in said
    for said in last_lines(waiting["an agent's store without rank 0"]):
        assert said.startswith("WORLD_SIZE is 3, and after 3 s ranks [0] have not come")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_before_the_group_is_made_is_named(
    who: int, waiting: dict[str, list[Started]]
) -> None:
    processes = waiting[f"{who} dies"]
    for said in last_lines([process for rank, process in enumerate(processes) if rank != who]):
        assert said.startswith("all ranks had come, and some were gone before the group was made")
        assert (
            "rank 0, which keeps the store," if who == 0 else "after 2 s ranks [1] have not come"
        ) in said


@pytest.mark.parametrize("who", MADE_BY)
def test_everything_that_joins_waits_no_longer_than_asked(
    who: str, waiting: dict[str, list[Started]]
) -> None:
    [said] = last_lines(waiting[who])
    assert said.startswith("WORLD_SIZE is 3, and after 3 s ranks [1, 2] have not come")


def test_by_default_ranks_wait_a_minute_for_each_other() -> None:
    assert JOIN_TIMEOUT_S == tiermem.OffloadPolicy().join_timeout_s == 60.0
