"""Joining: the ranks that a launcher has started create the process group, or the error names the
missing ranks.

    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT    ->  a store  ->  every rank posts its WORLD_SIZE  ->  the group

torch alone would wait for missing ranks until its time-out, and not name them. Here rank 0 reads
each rank's post before the group is created, and posts one answer for all. A rank that gets no
answer names rank 0 if rank 0 has not come.

The store belongs to rank 0 or to torchrun's agent. The agent's store outlives ranks and their
restarts, so each round of `world` arrivals has its own keys.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tiermem.swap.memory.accelerator import activate, backends_of, find_device, is_accelerator

JOIN_TIMEOUT_S = 60.0
"""How long ranks wait for each other to start by default, in seconds."""

_KEY = "tiermem/joining"
_LOOK_S = 0.02
_GRACE_S = 5.0
_LEAST_S = 10.0  # for making the group
_AGREED = "agreed"


def join_ranks(timeout_s: float, device: torch.device, join_timeout_s: float) -> None:
    """Creates the process group of the launcher's ranks, also of one, unless a group exists.
    Collective; blocks.

    The group takes CPU tensors and tensors of `device`'s kind. A process that no launcher has
    started trains without a group.

    Args:
        timeout_s: longest wait in a collective of the group.
        join_timeout_s: longest wait for all ranks to start; no more than timeout_s.

    Raises ValueError on the ranks that came when ranks are missing (it names them), when ranks have
    different WORLD_SIZEs, or when two have the same RANK. Also raises it when the existing process
    group holds this rank alone although a launcher has started several: each rank would train by
    itself.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 and not _says_where():
        return
    if dist.is_initialized():
        if dist.get_world_size() == 1 < world:
            raise ValueError(
                f"WORLD_SIZE is {world} and the process group holds this rank alone, so that every "
                "rank would train by itself: "
                "make the group of all ranks, leave it to tiermem, or unset WORLD_SIZE"
            )
        return
    _join(world, backends_of(device), device, timeout_s, join_timeout_s)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Creates the process group of the launcher's ranks, unless one exists, like the reference's
    function of this name.

    `initialize`, `shard` and `zero.Init` do this themselves, also for one rank. Without a launcher
    (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) and without init_method no group is created: one
    process trains without a group.

    Args:
        dist_backend: default: gloo for the CPU, and the accelerator's own backend.
        timeout: longest wait in a collective, and for ranks to start; default: 1800 s, and 60 s.
        init_method, rank, world_size: passed to torch.distributed.init_process_group.
        dist_init_required: False: a group has to exist already.
        auto_mpi_discovery, distributed_port, verbose, config: ignored; the port is MASTER_PORT.

    Collective; blocks. Raises RuntimeError when a group has to exist and does not, ValueError like
    `join_ranks`.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required is False and there is no process group: make one, or leave it out"
        )
    device = find_device()
    activate(device)
    backend = dist_backend or backends_of(device)
    timeout_s = 1800.0 if timeout is None else timeout.total_seconds()
    if init_method is not None:
        hold_no_group()
        dist.init_process_group(
            backend, init_method, timedelta(seconds=timeout_s), world_size, rank
        )
    elif _says_where():
        world = int(os.environ.get("WORLD_SIZE", "1"))
        _join(world, backend, device, timeout_s, JOIN_TIMEOUT_S if timeout is None else timeout_s)


def hold_no_group() -> None:
    """Call it before a process group is created; else torch keeps a reference, and the group is not
    destroyed.

    torch.distributed.nn.functional, which torch's optimizers import, uses the world's group at
    import as a default argument. gloo's threads would live on with the group, and sometimes abort
    an interpreter that exits (pytorch/pytorch#179291).
    """
    import torch.distributed.nn.functional  # noqa: F401


def _join(
    world: int, backend: str, device: torch.device, timeout_s: float, join_timeout_s: float
) -> None:
    hold_no_group()
    timeout = timedelta(seconds=timeout_s)
    # With its device a backend connects at once, and a barrier need not guess the device.
    bound = (
        device
        if is_accelerator(device) and device.index is not None and backend != "gloo"
        else None
    )
    if not _says_where():
        dist.init_process_group(backend, timeout=timeout, device_id=bound)
        return
    rank = int(os.environ["RANK"])
    join_timeout_s = min(join_timeout_s, timeout_s)
    store = _meet(rank, world, join_timeout_s)
    kinds = {each.rpartition(":")[2] for each in backend.split(",")}
    # Private to torch, and only for these backends.
    set_timeout = (
        getattr(dist.distributed_c10d, "_set_pg_timeout", None)
        if kinds <= {"gloo", "nccl"}
        else None
    )
    # The same on every rank, so that all find out together: a rank that dies now is not waited for
    # as in a collective.
    joining = timedelta(seconds=max(join_timeout_s / 2, _LEAST_S)) if set_timeout else timeout
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=joining,
            device_id=bound,
        )
    except RuntimeError as error:
        _tell_gone(store, rank, world, error)
        raise
    store.set_timeout(timeout)
    if set_timeout is not None:
        set_timeout(timeout, dist.group.WORLD)


def _tell_gone(store: Store, rank: int, world: int, error: RuntimeError) -> None:
    """Raises ValueError that names the ranks that are gone when the group cannot be made; all
    others call it. Blocks."""
    try:
        _agree(PrefixStore("again", store), rank, world, _GRACE_S, time.monotonic() + _GRACE_S)
    except (ValueError, dist.DistError) as said:
        asked = (
            said
            if isinstance(said, ValueError)
            else "rank 0, which keeps the store, does not answer"
        )
        raise ValueError(
            "all ranks had come, and some were gone before the group was made: see their logs. "
            f"Asked again, {asked}"
        ) from error


def _says_where() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _meet(rank: int, world: int, timeout_s: float) -> Store:
    """The store to which all ranks have come. Raises ValueError when ranks are missing or their
    numbers differ. Blocks."""
    deadline = time.monotonic() + timeout_s
    while True:
        store = _open_store(rank, world, deadline, timeout_s)
        try:
            attempt = (store.add(f"{_KEY}/arrived", 1) - 1) // world
            _agree(PrefixStore(f"{_KEY}/{attempt}", store), rank, world, timeout_s, deadline)
        except dist.DistNetworkError as error:
            # It was that of a group before, which rank 0 had not ended yet: rank 0 opens another.
            if rank == 0 or _is_agents() or time.monotonic() > deadline:
                raise ValueError(
                    f"WORLD_SIZE is {world}, and what keeps the store of the ranks has ended while "
                    f"they met: see the log of rank 0, or of the launcher ({error})"
                ) from error
        else:
            return PrefixStore(f"group/{attempt}", store)


def _is_agents() -> bool:
    """Whether torchrun's agent keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agree(attempt: Store, rank: int, world: int, timeout_s: float, deadline: float) -> None:
    """Returns when all ranks have come. Raises ValueError as `_meet`, DistError when the store has
    gone. Blocks."""
    # counts arrivals, not ranks: two processes may have the same RANK
    ticket = attempt.add("arrived", 1)
    attempt.set(f"said/{ticket}", f"{rank} {world}")
    if rank == 0:
        attempt.set("answer", _read_all(attempt, world, deadline, timeout_s))
    answer = _answer(attempt, world, deadline, timeout_s)
    if rank == 0:
        _wait_until_read(attempt)
    with contextlib.suppress(dist.DistError):  # rank 0 may have gone with the store
        attempt.add("read", 1)
    if answer != _AGREED:
        raise ValueError(answer)


def _open_store(rank: int, world: int, deadline: float, timeout_s: float) -> Store:
    """The store of rank 0 or of torchrun's agent, with its own prefix for every restart of the
    ranks."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    is_agents = _is_agents()
    is_mine = rank == 0 and not is_agents
    store = None
    while store is None:
        # torch tries twice, each time so long
        half = timedelta(seconds=max((deadline - time.monotonic()) / 2, 1.0))
        try:
            store = TCPStore(
                address,
                port,
                is_master=is_mine,
                timeout=half,
                wait_for_workers=False,
                multi_tenant=not is_agents,
            )
        except dist.DistNetworkError as error:
            if is_mine:
                raise
            if time.monotonic() > deadline - 1.0:
                raise ValueError(
                    f"WORLD_SIZE is {world}, and in {timeout_s:g} s nothing answered at "
                    "MASTER_ADDR:MASTER_PORT "
                    f"{address}:{port}: rank 0 has not come, or not there ({error})"
                ) from None
    store.set_timeout(timedelta(seconds=timeout_s))
    if not is_agents:
        return store
    return PrefixStore(
        f"tiermem/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    )


def _answer(attempt: Store, world: int, deadline: float, timeout_s: float) -> str:
    """Rank 0's answer; without one, a message that names the missing ranks."""
    # rank 0 may have started after this one
    left_s = max(deadline - time.monotonic(), 0.0) + _GRACE_S
    try:
        attempt.wait(["answer"], timedelta(seconds=left_s))
        return attempt.get("answer").decode()
    except dist.DistStoreError:
        return _missing(world, _arrived(attempt), timeout_s)


def _arrived(attempt: Store) -> set[int]:
    """The ranks that have posted."""
    found = set[int]()
    with contextlib.suppress(dist.DistError):  # the store may have ended with rank 0
        for ticket in range(1, attempt.add("arrived", 0) + 1):
            found.add(int(attempt.get(f"said/{ticket}").decode().split()[0]))
    return found


def _missing(world: int, found: set[int], timeout_s: float) -> str:
    missing = sorted(set(range(world)) - found)
    return (
        f"WORLD_SIZE is {world}, and after {timeout_s:g} s ranks {missing} have not come: start "
        "them, or set WORLD_SIZE"
    )


def _read_all(attempt: Store, world: int, deadline: float, timeout_s: float) -> str:
    """Reads each rank's post until all have come or one differs. Returns the answer for all
    ranks."""
    found: dict[int, int] = {}
    while len(found) < world and time.monotonic() < deadline:
        if not attempt.check([f"said/{len(found) + 1}"]):
            time.sleep(_LOOK_S)
            continue
        rank, theirs = map(int, attempt.get(f"said/{len(found) + 1}").decode().split())
        if theirs != world:
            return (
                f"ranks disagree: WORLD_SIZE is {world} on rank 0 and {theirs} on rank {rank}. "
                "Start every rank with the number of all ranks"
            )
        if rank in found:
            return (
                f"two processes say that they are rank {rank} of {world}: start every rank with "
                "a RANK of its own"
            )
        found[rank] = theirs
    return _AGREED if len(found) == world else _missing(world, set(found), timeout_s)


def _wait_until_read(attempt: Store) -> None:
    """Rank 0 may keep the store: it waits until the ranks that have come have read the answer, at
    most `_GRACE_S`."""
    deadline = time.monotonic() + _GRACE_S
    while attempt.add("read", 0) < attempt.add("arrived", 0) - 1 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
