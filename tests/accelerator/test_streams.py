"""Do streams run as late as they may, in order, and is each missing wait seen?"""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch

from accelerator.device import SCHEDULES

LATE_ONES = [schedule for schedule in SCHEDULES if schedule != "at_once"]


def test_operations_wait_until_a_value_is_needed(sim: ModuleType) -> None:
    sim.set_schedule("late")
    x = torch.arange(6.0, device="sim").view(2, 3)
    y = x @ x.t() + 1
    assert sim.pending() >= 3
    assert y.tolist() == [[6, 15], [15, 51]]
    assert sim.pending() == 0 and sim.host_waits() == {"main": 1, "autograd": 0, "other": 0}


def test_at_once_leaves_nothing_pending(sim: ModuleType) -> None:
    torch.arange(6.0, device="sim").add_(1)
    assert sim.pending() == 0


def test_backward_is_deferred_too(sim: ModuleType) -> None:
    sim.set_schedule("late")
    x = torch.ones(3, 3, device="sim", requires_grad=True)
    (x @ x).sum().backward()
    assert sim.pending() >= 4 and sim.host_waits() == {"main": 0, "autograd": 0, "other": 0}
    assert x.grad.tolist() == [[6.0] * 3] * 3


def doubled_on_a_side_stream(sim: ModuleType, is_waited_for: bool) -> float:
    source = torch.full((100,), 3.0, device="sim")
    side = torch.Stream("sim")
    side.wait_stream(sim.current_stream())
    with side:
        doubled = source * 2
        event = side.record_event()
    if is_waited_for:
        sim.current_stream().wait_event(event)
    total = doubled.sum().item()
    sim.synchronize()  # the memory of both stays in use until here
    return total


def test_a_missing_wait_is_seen(sim: ModuleType) -> None:
    seen = []
    for schedule in LATE_ONES:
        sim.set_schedule(schedule)
        assert doubled_on_a_side_stream(sim, is_waited_for=True) == 600
        seen.append(doubled_on_a_side_stream(sim, is_waited_for=False) != 600)
    assert seen[0] and sum(seen[1:]) >= 5  # late: always; random: by several of 20 seeds
    sim.set_schedule("at_once")
    # which is why at once proves nothing
    assert doubled_on_a_side_stream(sim, is_waited_for=False) == 600


def test_events_are_done_when_their_stream_gets_there(sim: ModuleType) -> None:
    sim.set_schedule("late")
    side, event = torch.Stream("sim"), torch.Event("sim")
    assert event.query()  # never recorded
    with side:
        x = torch.ones(10, device="sim")
        event.record(side)
        y = x + 1
    assert not event.query() and not side.query()
    event.synchronize()
    assert event.query() and not side.query() and sim.pending() == 1
    side.synchronize()
    assert side.query() and y.sum().item() == 20


def test_polling_an_event_ends(sim: ModuleType) -> None:
    sim.set_schedule("late")
    torch.ones(10, device="sim")
    event = sim.current_stream().record_event()
    num_polls = 0
    while not event.query():
        num_polls += 1
    assert num_polls > 1


def test_an_event_waits_for_the_version_that_was_recorded(sim: ModuleType) -> None:
    sim.set_schedule("late")
    side, event = torch.Stream("sim"), torch.Event("sim")
    with side:
        x = torch.ones(10, device="sim")
        event.record(side)
    sim.current_stream().wait_event(event)
    with side:
        x.add_(1)
        event.record(side)
    assert x.sum().item() == 10  # the second version is not waited for
    event.synchronize()
    assert x.sum().item() == 20


def test_with_stream_and_set_stream_are_of_the_thread(sim: ModuleType) -> None:
    main, side = sim.current_stream(), torch.Stream("sim")
    seen = []
    with side:
        assert torch.accelerator.current_stream() == side
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
    assert torch.accelerator.current_stream() == main and seen == [main]
    torch.accelerator.set_stream(side)
    assert sim.current_stream() == side
    torch.accelerator.set_stream(main)


def test_a_program_gets_the_same_32_streams_in_turn(sim: ModuleType) -> None:
    streams = [torch.Stream("sim") for _ in range(33)]
    assert len(set(streams)) == 32 and streams[0] == streams[32]


def test_events_measure_time_if_asked(sim: ModuleType) -> None:
    first, last = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    first.record()
    torch.ones(100, device="sim")
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 0


def test_host_waits_are_counted_by_thread(sim: ModuleType) -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            torch.accelerator.current_stream().synchronize()
            return grad

    sim.set_schedule("late")
    x = torch.ones(3, device="sim", requires_grad=True)
    Waits.apply(x).sum().backward()
    thread = threading.Thread(target=lambda: x.grad.sum().item())
    thread.start()
    thread.join()
    torch.accelerator.synchronize()
    assert sim.host_waits() == {"main": 1, "autograd": 1, "other": 1}


def test_values_that_decide_shapes_wait_for_the_stream(sim: ModuleType) -> None:
    sim.set_schedule("late")
    x = torch.tensor([1.0, 0.0, 2.0], device="sim")
    sim.reset_counts()
    assert x.nonzero().shape == (2, 1) and sim.host_waits()["main"] == 1
    assert x[x > 0].shape == (2,) and sim.host_waits()["main"] == 2
    assert torch.equal(x, x) and sim.host_waits()["main"] == 3
    assert sim.undeferred() == {}


def test_an_error_of_a_kernel_is_raised_by_the_next_wait(sim: ModuleType) -> None:
    sim.set_schedule("late")
    table, outside = torch.ones(3, 2, device="sim"), torch.tensor([5], device="sim")
    torch.nn.functional.embedding(outside, table)
    with pytest.raises(IndexError, match="out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()


def test_threads_share_the_devices(sim: ModuleType) -> None:
    sim.set_schedule("random:7")
    totals = [0.0] * 4

    def work(index: int) -> None:
        with torch.Stream("sim"):
            x = torch.full((64, 64), float(index), device="sim")
            for _ in range(20):
                x = (x + 1).clone()
            totals[index] = x.mean().item()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [20, 21, 22, 23]
