"""Run by test_group.py on each rank: collectives of device tensors beside the same ones of CPU
tensors, by gloo."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from programs.models import VOCAB
from programs.unsharded import transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from accelerator import device
from accelerator.device import SCHEDULES

sim = device.load()
# imports what Meta kernels in Python need, once before the ranks are forked
torch.ones(1, device="meta").add(1)

Collective = Callable[[torch.Tensor, int, int], torch.Tensor]
"""(this rank's tensor of 12 elements, rank, number of ranks) -> what the collective leaves"""


def all_reduce(op: dist.ReduceOp.RedOpType) -> Collective:
    def act(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        dist.all_reduce(x, op)
        return x

    return act


def broadcast(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    dist.broadcast(x, size - 1)
    return x


def reduce(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    dist.reduce(x, 1)
    return x if rank == 1 else x.new_zeros(1)  # elsewhere it is left undefined


def all_gather(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    outputs = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(outputs, x)
    return torch.cat(outputs)


def all_gather_into_tensor(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    output = x.new_empty(size * x.numel())
    dist.all_gather_into_tensor(output, x)
    return output


def reduce_scatter_tensor(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    output = x.new_empty(x.numel() // size)
    dist.reduce_scatter_tensor(output, x)
    return output


def all_to_all_single(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    sent = [rank + to + 1 for to in range(size)]  # uneven
    received = [start + rank + 1 for start in range(size)]
    output = x.new_empty(sum(received))
    dist.all_to_all_single(output, x.repeat(2)[: sum(sent)].contiguous(), received, sent)
    return output


def gather_and_scatter(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, parts, 0)
    output = torch.empty_like(x)
    dist.scatter(output, None if parts is None else [part + 1 for part in parts], 0)
    return output


def ring(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    output = torch.empty_like(x)
    there, back = (rank + 1) % size, (rank - 1) % size
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, there), dist.P2POp(dist.irecv, output, back)]
    ):
        work.wait()
    return output


def send_and_receive(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)
    return x


def functionals(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    summed = functional.reduce_scatter_tensor(gathered * 2, "sum", 0, dist.group.WORLD)
    return functional.all_reduce(summed, "max", dist.group.WORLD) + 0


def in_a_half(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    dist.all_reduce(x, group=HALVES[rank * 2 // size])
    return x


COLLECTIVES: dict[str, Collective] = {
    "sum": all_reduce(dist.ReduceOp.SUM),
    "avg": all_reduce(dist.ReduceOp.AVG),
    "max": all_reduce(dist.ReduceOp.MAX),
    "min": all_reduce(dist.ReduceOp.MIN),
    "broadcast": broadcast,
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all_single": all_to_all_single,
    "gather_and_scatter": gather_and_scatter,
    "ring": ring,
    "send_and_receive": send_and_receive,
    "functionals": functionals,
    "in_a_half": in_a_half,
}
HALVES: list[dist.ProcessGroup] = []  # of the ranks, once they have met


def equal_gloos(rank: int, size: int) -> None:
    for name, act in COLLECTIVES.items():
        for dtype in (torch.float32, torch.bfloat16):
            start = torch.randn(12, generator=torch.Generator().manual_seed(rank)).to(dtype)
            expected = act(start.clone(), rank, size)
            found = act(start.to(HERE) * 1, rank, size)
            assert found.device == HERE and torch.equal(found.cpu(), expected), (
                f"{name}: {found.cpu()}, not {expected}"
            )


def move_8_bit_floats(rank: int, size: int) -> None:
    start = torch.full((4,), 1.5 * (rank + 1), device=HERE).to(torch.float8_e4m3fn)
    output = torch.empty(4 * size, dtype=torch.float8_e4m3fn, device=HERE)
    dist.all_gather_into_tensor(output, start)
    assert output.float().tolist() == [1.5 * (each + 1) for each in range(size) for _ in range(4)]


def train_as_on_cpus(rank: int, size: int) -> None:
    def train(where: torch.device) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(where)
        optim = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(
                where
            )
            model(x).square().mean().backward()
            works = [
                dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True)
                for p in model.parameters()
            ]
            for work in works:
                work.wait()
            optim.step()
            optim.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    for found, expected in zip(train(HERE), train(torch.device("cpu")), strict=True):
        assert torch.equal(found, expected)


def shard_by_fsdp(rank: int, size: int) -> None:
    """FSDP2, whose streams and events are known to be right, computes what it computes on CPUs."""

    def train(where: torch.device) -> list[float]:
        torch.manual_seed(0)
        model = transformer().to(where).eval()
        mesh = init_device_mesh(where.type, (size,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optim = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
        losses = []
        for step in range(3):
            tokens = torch.randint(
                0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(10 * step + rank)
            ).to(where)
            losses.append(
                F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            )
            losses[-1].backward()
            optim.step()
            optim.zero_grad()
        return [loss.item() for loss in losses]

    expected = train(torch.device("cpu"))
    sim.set_strict_frees(False)
    for schedule in SCHEDULES[1:4]:
        sim.set_schedule(schedule)
        assert train(HERE) == expected
    sim.set_strict_frees(True)


def wait_on_the_stream_alone(rank: int, size: int) -> None:
    """A collective and its wait cost the host nothing."""
    x = torch.full((5,), rank + 1.0, device=HERE)
    sim.reset_counts()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    doubled = x * 2
    assert not any(sim.host_waits().values())
    assert doubled.tolist() == [size * (size + 1.0)] * 5


def show_a_missing_wait(rank: int, size: int) -> None:
    sim.set_schedule("late")
    x = torch.full((5,), rank + 1.0, device=HERE)
    work = dist.all_reduce(x, async_op=True)
    assert x.sum().item() == 5 * (rank + 1)  # too early
    dist.barrier(cpus)  # until every rank has looked
    work.wait()
    assert x.sum().item() == 5 * size * (size + 1) / 2


def help_ranks_that_wait(rank: int, size: int) -> None:
    """Rank 0 waits for a collective; the others' hosts go elsewhere and never wait for theirs."""
    sim.set_schedule("late")
    x = torch.full((5,), rank + 1.0, device=HERE)
    dist.all_reduce(x)
    if rank == 0:
        assert x.sum().item() == 5 * size * (size + 1) / 2
    dist.barrier(cpus)


def poll(rank: int, size: int) -> None:
    sim.set_schedule("late")
    x = torch.full((5,), rank + 1.0, device=HERE)
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    dist.barrier(cpus)  # until every rank has looked
    while not work.is_completed():
        pass
    work.wait()
    assert x.sum().item() == 5 * size * (size + 1) / 2


def coalesce(rank: int, size: int) -> None:
    many = [torch.full((n,), float(rank + n), device=HERE) for n in (1, 2, 3)]
    with dist._coalescing_manager(device=HERE, async_ops=True) as manager:
        for x in many:
            dist.all_reduce(x)
    manager.wait()
    assert [x[0].item() for x in many] == [sum(r + n for r in range(size)) for n in (1, 2, 3)]


def launch_a_group_of_calls_at_its_end(rank: int, size: int) -> None:
    """`startCoalescing`: the calls start together, after all that was queued before the end on the
    group's stream."""
    x = torch.full((3,), rank + 1.0, device=HERE)
    sims._start_coalescing(HERE)
    sims.allreduce([x])
    assert x.tolist() == [rank + 1.0] * 3
    sims._end_coalescing(HERE).wait()
    assert x.tolist() == [size * (size + 1) / 2] * 3
    sims._start_coalescing(HERE)
    assert sims._end_coalescing(HERE) is None


def copy_a_list_out_before_its_group_is_launched(rank: int, size: int) -> None:
    """`allgather`: its copies from the flat buffer are queued by the call. Memory that is new here
    is NaN."""
    for is_grouped in (False, True):
        x, outputs = (
            torch.full((3,), rank + 1.0, device=HERE),
            [torch.zeros(3, device=HERE) for _ in range(size)],
        )
        grouped = (
            dist._coalescing_manager(sims, HERE, async_ops=True)
            if is_grouped
            else contextlib.nullcontext()
        )
        with grouped as works:
            work = dist.all_gather(outputs, x, group=sims, async_op=True)
        (works or work).wait()
        found = torch.stack(outputs).cpu()
        assert (
            bool(found.isnan().all())
            if is_grouped
            else found[:, 0].tolist() == [1.0 + each for each in range(size)]
        )


def run_a_synchronous_call_on_the_callers_stream(rank: int, size: int) -> None:
    """`collective`: with asyncOp false the current stream runs it, so nothing is to be waited for
    and no Work comes."""
    x, side, options = (
        torch.full((3,), rank + 1.0, device=HERE),
        torch.Stream(HERE),
        dist.AllreduceOptions(),
    )
    options.asyncOp = False
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        assert sims.allreduce([x], options) is None
        come = x.to("cpu", non_blocking=True)
    side.synchronize()
    assert come.tolist() == [size * (size + 1) / 2] * 3


def keep_tensors_until_the_wait(rank: int, size: int) -> None:
    """`stashed_for_allocator_safety_`: an asynchronous call's tensors live until its Work is waited
    for."""
    before = sim.memory_allocated()
    work = dist.all_reduce(torch.ones(1000, device=HERE), async_op=True)
    assert sim.memory_allocated() >= before + 4000
    work.wait()
    assert sim.memory_allocated() == before


def block_the_host_in_a_wait_with_a_time_out(rank: int, size: int) -> None:
    x = torch.full((3,), rank + 1.0, device=HERE)
    sim.reset_counts()
    work = dist.all_reduce(x, async_op=True)
    work.wait(timedelta(seconds=60))
    assert sim.host_waits()["main"] == 1 and work.is_success()


def make_a_communicator_at_first_use(rank: int, size: int) -> None:
    """`initNCCLComm`: the first call blocks the host of each rank until all have made it."""
    fresh, x = dist.new_group(backend="simccl"), torch.ones(3, device=HERE)
    caller = threading.Thread(target=lambda: dist.all_reduce(x, group=fresh, async_op=True).wait())
    if rank:
        caller.start()
        caller.join(0.2)
        assert caller.is_alive()
    dist.barrier(cpus)
    if not rank:
        caller.start()
    caller.join()
    assert x.tolist() == [float(size)] * 3


def refuse_what_nccl_refuses(rank: int, size: int) -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(4), group=sims)
    with pytest.raises((RuntimeError, ValueError), match="must be contiguous"):
        dist.all_reduce(torch.ones(4, 4, device=HERE).t(), group=sims)
    with pytest.raises(RuntimeError, match="must be on a sim device, but found one on cpu"):
        sims._get_backend(HERE).allreduce([torch.ones(4)], dist.AllreduceOptions())


def use_a_mesh(rank: int, size: int) -> None:
    mesh = init_device_mesh("sim", (size // 2, 2), mesh_dim_names=("outer", "inner"))
    x = torch.full((3,), float(rank), device=HERE)
    dist.all_reduce(x, group=mesh.get_group("inner"))
    assert x[0].item() == 2 * (rank - rank % 2) + 1


def block_the_host_in_a_barrier(rank: int, size: int) -> None:
    sim.set_schedule("late")
    torch.ones(3, device=HERE)
    sim.reset_counts()
    dist.barrier(sims, device_ids=[HERE.index])
    assert sim.host_waits()["main"] == 1


if __name__ == "__main__":
    meeting, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "cpu:gloo,sim:simccl", init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    assert not sim.was_touched()
    HERE = torch.device("sim", rank % sim.device_count())
    sim.set_device(HERE)
    torch.set_num_threads(1)
    cpus, sims = dist.new_group(backend="gloo"), dist.new_group(backend="simccl")
    HALVES += [dist.new_group(range(half * size // 2, (half + 1) * size // 2)) for half in (0, 1)]
    for schedule in SCHEDULES[:6] if size == 2 else SCHEDULES[:3]:
        for act in (equal_gloos, train_as_on_cpus, wait_on_the_stream_alone, coalesce):
            sim.set_schedule(schedule)
            act(rank, size)
    for act in (
        show_a_missing_wait,
        help_ranks_that_wait,
        poll,
        move_8_bit_floats,
        refuse_what_nccl_refuses,
    ):
        act(rank, size)
    for act in (
        launch_a_group_of_calls_at_its_end,
        copy_a_list_out_before_its_group_is_launched,
        run_a_synchronous_call_on_the_callers_stream,
        keep_tensors_until_the_wait,
        block_the_host_in_a_wait_with_a_time_out,
    ):
        for schedule in ("at_once", "late", "random:0"):
            sim.set_schedule(schedule)
            act(rank, size)
    for act in (
        make_a_communicator_at_first_use,
        use_a_mesh,
        block_the_host_in_a_barrier,
        shard_by_fsdp,
    ):
        act(rank, size)
    dist.destroy_process_group()
