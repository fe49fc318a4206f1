"""Joining: the ranks that a launcher has started make the process group, or say that they were told different numbers.

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT    ->  a store  ->  every rank says its WORLD_SIZE  ->  the group

torch would wait for the missing ranks until its time-out. Here rank 0 reads what each says before the group is made, and
answers them all. torchrun's agent tells every rank the same number and keeps the store, so there nothing is asked.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tiermem.swap.accelerator import activate, backends_of

_KEY = "tiermem/joining"
_LOOK_S = 0.02
_AGREED = "agreed"


def join_ranks(timeout_s: float, device: torch.device) -> None:
    """Makes the process group of the ranks around this one, unless there is one or this rank is alone. Collective; blocks.

    It takes tensors of the CPU and of the device that this rank computes on.

    Raises ValueError on the ranks that came when they were told different numbers of ranks, or one number twice; and when the
    process group that is there holds this rank alone, though a launcher has started several: each would train by itself.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or not dist.is_available():
        return
    if dist.is_initialized():
        if dist.get_world_size() == 1:
            raise ValueError(
                f"WORLD_SIZE is {world} and the process group holds this rank alone, so that every rank would train by itself: "
                "make the group of all ranks, leave it to tiermem, or unset WORLD_SIZE"
            )
        return
    hold_no_group()
    backend, timeout = backends_of(device), timedelta(seconds=timeout_s)
    activate(device)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not _says_where():
        dist.init_process_group(backend, timeout=timeout)
        return
    rank = int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    _compare_numbers(store, rank, world, timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def hold_no_group() -> None:
    """To be called before a process group is made, or torch holds it for ever and it does not end when it is destroyed.

    torch.distributed.nn.functional, which torch's optimizers import, has what is the world then for its default arguments.
    gloo's threads live on with the group, and now and then abort an interpreter that ends (pytorch/pytorch#179291).
    """
    import torch.distributed.nn.functional  # noqa: F401


def _says_where() -> bool:
    return all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))


def _compare_numbers(store: TCPStore, rank: int, world: int, timeout_s: float) -> None:
    """Every rank says what it was told, and rank 0 what it makes of it."""
    place = store.add(f"{_KEY}/arrived", 1)  # of those that have come: two may call themselves the same rank
    store.set(f"{_KEY}/said/{place}", f"{rank} {world}")
    if rank == 0:
        store.set(f"{_KEY}/answer", _read_all(store, world, timeout_s))
    answer = store.get(f"{_KEY}/answer").decode()  # waits for it
    if rank == 0:
        _wait_until_read(store)
    store.add(f"{_KEY}/read", 1)
    if answer != _AGREED:
        raise ValueError(answer)


def _read_all(store: TCPStore, world: int, timeout_s: float) -> str:
    """Reads what each rank says as it comes, until all have come or one says something else; the answer to all."""
    found: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < world and time.monotonic() < deadline:
        if not store.check([f"{_KEY}/said/{len(found) + 1}"]):
            time.sleep(_LOOK_S)
            continue
        rank, theirs = map(int, store.get(f"{_KEY}/said/{len(found) + 1}").decode().split())
        if theirs != world:
            return (
                f"ranks disagree: WORLD_SIZE is {world} on rank 0 and {theirs} on rank {rank}. Start every rank with the "
                "number of all ranks"
            )
        if rank in found:
            return f"two processes say that they are rank {rank} of {world}: start every rank with a RANK of its own"
        found[rank] = theirs
    if len(found) == world:
        return _AGREED
    missing = sorted(set(range(world)) - set(found))
    return (
        f"WORLD_SIZE is {world}, and after {timeout_s:g} s ranks {missing} have not come: start them, or set WORLD_SIZE"
    )


def _wait_until_read(store: TCPStore, most_s: float = 5.0) -> None:
    """Rank 0 keeps the store: it stays until those that have come have read the answer."""
    deadline = time.monotonic() + most_s
    while store.add(f"{_KEY}/read", 0) < store.add(f"{_KEY}/arrived", 0) - 1 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
