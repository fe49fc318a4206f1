"""Are virtual times those that arithmetic by hand gives?"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from accelerator import clock
from accelerator.clock import Rate, Work


def spans(*works: Work, **shared: str) -> list[tuple[float, float]]:
    return list(clock.run(works, shared).spans)


# ---- works ---------------------------------------------------------------------------------------


def test_lanes_run_side_by_side_and_each_in_turn() -> None:
    assert spans(Work("a", "compute", 3), Work("b", "copy", 2), Work("c", "copy", 2)) == [
        (0, 3),
        (0, 2),
        (2, 4),
    ]


def test_work_starts_when_all_that_it_needs_has_ended() -> None:
    works = Work("copy", "copy", 2), Work("other", "compute", 1), Work("use", "compute", 3, (0, 1))
    assert spans(*works) == [(0, 2), (0, 1), (2, 5)]


def test_a_lane_serves_first_what_is_ready_first() -> None:
    works = Work("slow", "disk", 5), Work("late", "compute", 1, (0,)), Work("early", "compute", 7)
    assert spans(*works) == [(0, 5), (7, 8), (0, 7)]


def test_lanes_that_share_a_resource_take_turns() -> None:
    works = Work("read", "read", 2), Work("write", "write", 3), Work("read", "read", 1)
    assert spans(*works, read="disk", write="disk") == [(0, 2), (2, 5), (5, 6)]


def test_work_without_a_lane_takes_no_turn() -> None:
    assert spans(Work("a", "x", 2), Work("wait", "", 0, (0,)), Work("b", "x", 1, (1,))) == [
        (0, 2),
        (2, 2),
        (2, 3),
    ]


def test_a_circle_is_an_error() -> None:
    with pytest.raises(ValueError, match="waits for itself"):
        spans(Work("a", "x", 1, (1,)), Work("b", "x", 1, (0,)))


def test_hidden_share_is_the_part_of_copies_under_compute() -> None:
    replay = clock.run(
        [Work("copy", "copy", 4), Work("compute", "compute", 3), Work("copy", "copy", 2, (0,))]
    )
    assert replay.makespan_s == 6 and replay.busy_s == {"copy": 6, "compute": 3}
    assert replay.hidden_share("copy") == 3 / 6
    assert replay.hidden_share("compute", behind="copy") == 1.0
    assert replay.hidden_share("disk") == 1.0


def test_an_operation_costs_the_longer_of_bytes_and_arithmetic() -> None:
    rate = Rate(bytes_per_s=100, flops_per_s=10, latency_s=0.5)
    assert rate.seconds(200, 10) == 2.5 and rate.seconds(100, 40) == 4.5


# ---- recordings ----------------------------------------------------------------------------------

RATES = {
    "compute": Rate(flops_per_s=1),
    "to device": Rate(bytes_per_s=1),
    "disk read": Rate(bytes_per_s=1),
    "cpu": Rate(1),
}


def operation(
    lane: str, stream: int, index: int, seconds: float, thread: str = "main"
) -> dict[str, object]:
    place = (0, stream, index)
    return {
        "kind": "operation",
        "name": lane,
        "lane": lane,
        "place": place,
        "bytes": seconds,
        "flops": seconds,
        "thread": (thread, 1),
    }


def stream_wait(stream: int, index: int, after: tuple[int, int, int]) -> dict[str, object]:
    return {
        "kind": "stream_wait",
        "name": "wait",
        "place": (0, stream, index),
        "after": after,
        "thread": ("main", 1),
    }


def host_wait(after: tuple[int, int, int], thread: str = "main") -> dict[str, object]:
    return {"kind": "host_wait", "name": "synchronize", "after": after, "thread": (thread, 1)}


def host_work(
    lane: str, seconds: float, needs: tuple[int, ...] = (), blocks: bool = False
) -> dict[str, object]:
    found = {
        "kind": "host_work",
        "name": lane,
        "lane": lane,
        "bytes": seconds,
        "flops": 0,
        "needs": needs,
    }
    return found | {"blocks": blocks, "thread": ("main", 1)}


def test_a_stream_runs_in_order_and_waits_for_marks() -> None:
    recording = [
        operation("to device", 1, 1, 4),
        operation("compute", 0, 1, 1),
        stream_wait(0, 2, (0, 1, 1)),
        operation("compute", 0, 3, 2),
    ]
    replay = clock.replay(recording, RATES)
    assert replay.spans == [(0, 4), (0, 1), (4, 4), (4, 6)]
    assert replay.hidden_share("to device") == 1 / 4


def test_a_mark_includes_what_stood_in_the_stream_then() -> None:
    recording = [
        operation("to device", 1, 1, 4),
        operation("to device", 1, 3, 9),  # what is not recorded had index 2
        stream_wait(0, 1, (0, 1, 2)),
        operation("compute", 0, 2, 2),
    ]
    assert clock.replay(recording, RATES).spans[3] == (4, 6)


def test_a_host_wait_holds_up_what_its_thread_issues_next() -> None:
    recording = [
        operation("compute", 0, 1, 3),
        host_wait((0, 0, 1)),
        operation("to device", 1, 1, 2),
    ]
    assert clock.replay(recording, RATES).spans[2] == (3, 5)
    recording[1] = host_wait((0, 0, 1), thread="other")
    assert clock.replay(recording, RATES).spans[2] == (0, 2)
    recording[1] = host_wait((0, 0, 1), thread="autograd")  # which main waits for
    assert clock.replay(recording, RATES).spans[2] == (3, 5)


def test_host_work_runs_beside_its_thread_unless_it_blocks() -> None:
    recording = [
        host_work("disk read", 5),
        operation("compute", 0, 1, 1),
        host_work("", 0, (0,), blocks=True),
    ]
    recording += [operation("to device", 1, 1, 2)]
    assert clock.replay(recording, RATES).spans == [(0, 5), (0, 1), (5, 5), (5, 7)]
    recording[0] = host_work("cpu", 5, blocks=True)
    assert clock.replay(recording, RATES).spans == [(0, 5), (5, 6), (5, 5), (5, 7)]


def test_issuing_costs_the_thread_time() -> None:
    recording = [
        operation("compute", 0, 1, 1),
        operation("compute", 0, 2, 1),
        operation("to device", 1, 1, 1),
    ]
    assert clock.replay(recording, RATES, issue_s=2).spans[:3] == [(2, 3), (4, 5), (6, 7)]


def test_sizes_can_be_those_of_the_full_model() -> None:
    recording = [operation("compute", 0, 1, 1), operation("to device", 1, 1, 1)]
    replay = clock.replay(
        recording, RATES, size_of=lambda entry: (10 * entry["bytes"], 100 * entry["flops"])
    )
    assert replay.busy_s == {"compute": 100, "to device": 10}


def test_a_lane_without_a_rate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rate for lane 'tape'"):
        clock.replay([host_work("tape", 1)], RATES)


# ---- what the device recorded --------------------------------------------------------------------


def test_recording_names_operations_lanes_bytes_and_flops(sim: ModuleType) -> None:
    sim.set_schedule("late")
    host = torch.ones(6, 4).pin_memory()
    b = torch.ones(4, 8, device="sim")
    sim.record(True)
    a = host.to("sim", non_blocking=True)
    side = torch.Stream("sim")
    side.wait_stream(sim.current_stream())
    with side:
        c = a @ b
    number = sim.mark("read", "disk read", 100)
    sim.mark("wait for it", needs=[number], blocks=True)
    side.synchronize()
    sim.record(False)
    c.add_(1)
    copy, wait, product, read, waited, synchronized = sim.recording()
    assert (copy["kind"], copy["lane"], copy["bytes"]) == ("operation", "to device", 96)
    assert (wait["kind"], wait["after"]) == ("stream_wait", copy["place"])
    assert (product["name"], product["lane"], product["flops"]) == (
        "aten::mm",
        "compute",
        2 * 6 * 4 * 8,
    )
    assert product["bytes"] == 4 * (6 * 4 + 4 * 8 + 6 * 8) and product["place"][:2] == (
        0,
        side.stream_id,
    )
    assert (read["kind"], read["lane"], read["id"]) == ("host_work", "disk read", number)
    assert (waited["needs"], waited["blocks"]) == ([number], True)
    assert (synchronized["kind"], synchronized["after"]) == ("host_wait", product["place"])
    assert copy["thread"][0] == "main"


def test_flops_of_attention_and_convolution(sim: ModuleType) -> None:
    q = torch.ones(2, 3, 5, 7, device="sim", requires_grad=True)
    image, weight = (
        torch.ones(2, 3, 8, 8, device="sim"),
        torch.ones(4, 3, 3, 3, device="sim", requires_grad=True),
    )
    sim.record(True)
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    torch.nn.functional.conv2d(image, weight).sum().backward()
    torch.addmm(
        torch.ones(6, device="sim"), torch.ones(2, 3, device="sim"), torch.ones(3, 6, device="sim")
    )
    torch.bmm(torch.ones(2, 3, 4, device="sim"), torch.ones(2, 4, 5, device="sim"))
    sim.record(False)
    flops = [entry["flops"] for entry in sim.recording() if entry.get("flops")]
    attention, convolution = 4 * 2 * 3 * 5 * 5 * 7, 2 * (2 * 4 * 6 * 6) * 27
    assert flops == [
        attention,
        2.5 * attention,
        convolution,
        2 * convolution,
        2 * 2 * 3 * 6,
        2 * 2 * 3 * 4 * 5,
    ]


@pytest.mark.parametrize(("is_ahead", "expected_s"), [(False, 4 * (2 + 3)), (True, 2 + 4 * 3)])
def test_copies_one_layer_ahead_hide_behind_compute(
    sim: ModuleType, is_ahead: bool, expected_s: float
) -> None:
    """Four layers, each copied in 2 s and multiplied in 3 s: one after the other, or all but the
    first copy hidden."""
    size = 16
    layers = [torch.full((size, size), 0.1).pin_memory() for _ in range(4)]
    slots = [torch.empty(size, size, device="sim") for _ in range(2)]
    copying, computing = torch.Stream("sim"), sim.current_stream()
    copied, used = [torch.Event("sim") for _ in layers], [torch.Event("sim") for _ in layers]

    def copy(layer: int) -> None:
        if layer >= 2:
            copying.wait_event(used[layer - 2])
        with copying:
            slots[layer % 2].copy_(layers[layer], non_blocking=True)
            copied[layer].record(copying)

    x = torch.ones(size, size, device="sim")
    expected = x.cpu()
    for layer in layers:
        expected = expected @ layer
    sim.synchronize()
    for schedule in ("late", "random:1", "random:2"):
        sim.set_schedule(schedule)
        sim.record(True)
        if is_ahead:
            copy(0)
        y = x
        for layer in range(4):
            if not is_ahead:
                copying.wait_stream(computing)
                copy(layer)
            elif layer + 1 < 4:
                copy(layer + 1)
            computing.wait_event(copied[layer])
            y = y @ slots[layer % 2]
            used[layer].record(computing)
        sim.record(False)
        rates = {
            "compute": Rate(flops_per_s=2 * size**3 / 3),
            "to device": Rate(bytes_per_s=size * size * 4 / 2),
        }
        replay = clock.replay(sim.recording(), rates)
        assert replay.makespan_s == pytest.approx(expected_s)
        assert replay.busy_s == pytest.approx({"compute": 12, "to device": 8})
        assert replay.hidden_share("to device") == pytest.approx(6 / 8 if is_ahead else 0)
        assert torch.equal(y.cpu(), expected)
