"""Does the recorder keep the newest events, and the seconds waited even of those it forgot? Is a
meter told what limits?"""

from __future__ import annotations

import pytest

from tiermem.swap.disk import queue
from tiermem.swap.disk.queue import Event, Meter, Recorder, StoreStats


def test_newest_events_are_kept_and_waiting_is_summed_over_all() -> None:
    recorder = Recorder(max_events=2)
    for start in range(4):
        recorder.add("wait", f"move {start}", start * 10, start * 10 + 5)
    assert list(recorder.events) == [
        Event("wait", "move 2", 20, 25, 0),
        Event("wait", "move 3", 30, 35, 0),
    ]
    assert recorder.wait_s == pytest.approx(4 * 5e-9)


def test_only_the_wait_lane_counts_as_waiting() -> None:
    recorder = Recorder()
    recorder.add("read", "layers.3", 0, 10**9, 4096)
    assert recorder.wait_s == 0.0


def test_span_is_recorded_also_when_its_body_raises() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), recorder.span("compute", "tile 0"):
        _ = 1 / 0
    (event,) = recorder.events
    assert (event.lane, event.name, event.num_bytes) == ("compute", "tile 0", 0)
    assert 0 < event.start_ns <= event.end_ns


def totals(read: int, written: int) -> StoreStats:
    return StoreStats(read, written, 0, 0, 0, 0.0, "uring", "")


def metered(
    monkeypatch: pytest.MonkeyPatch, *clock_s: float, max_events: int = 100
) -> tuple[Recorder, Meter]:
    """A recorder and its meter, which looks at the clock once when it is made and once in each
    look."""
    clock = iter([int(each * 1e9) for each in clock_s])
    seen = iter([totals(10, 20), *[totals(3_000_000_010, 1_000_000_020)] * 2])
    monkeypatch.setattr(queue.time, "monotonic_ns", lambda: next(clock))
    recorder = Recorder(max_events)
    return recorder, Meter(recorder, lambda: next(seen))


def add(recorder: Recorder, lane: str, name: str, start_s: float, end_s: float) -> None:
    recorder.add(lane, name, int(start_s * 1e9), int(end_s * 1e9))


def test_a_meter_says_how_long_each_resource_was_busy_and_names_the_busiest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, meter = metered(monkeypatch, 0, 2, 3)
    add(recorder, "wait", "tile states/0", 0.1, 1.3)
    add(recorder, "read", "tile states/0", 0, 1.3)
    add(recorder, "write", "tile states/1", 1.2, 1.4)
    add(recorder, "compute", "tile states/0", 1.3, 1.5)
    add(recorder, "step", "step", 1.2, 1.5)
    add(recorder, "wait", "gather layers.0", 1.5, 1.6)
    add(recorder, "gather", "gather layers.0", 1.4, 1.6)
    found = meter.look()
    assert found.limits_s == pytest.approx(
        {"compute": 0.5, "disk": 1.4, "link": 0.2, "kernels": 0.2}
    )
    assert found.waits_s == pytest.approx({"tile states": 1.2, "gather layers.0": 0.1})
    assert list(found.waits_s) == ["tile states", "gather layers.0"]
    assert found.as_logged() == {
        "read_gb_s": 1.5,
        "written_gb_s": 0.5,
        "waited_s": 1.3,
        "limited_by": "disk",
    }
    assert meter.look().limits_s == pytest.approx(
        {"compute": 1.0, "disk": 0, "link": 0, "kernels": 0}
    )


def test_a_step_under_the_forward_counts_once_when_its_events_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are told in the second look, at the end of the run, and began before the first."""
    recorder, meter = metered(monkeypatch, 0, 1, 2)
    add(recorder, "step", "step", 0.5, 1)
    first = meter.look()
    add(recorder, "read", "tile 0", 0.5, 1.5)
    add(recorder, "compute", "tile 0", 1.4, 1.6)
    add(recorder, "write", "tile 0", 1.6, 1.75)
    second = meter.look()
    assert first.limits_s == pytest.approx({"compute": 0.5, "disk": 0, "link": 0, "kernels": 0})
    assert second.limits_s == pytest.approx(
        {"compute": 1.0, "disk": 1.15, "link": 0, "kernels": 0.2}
    )


def test_a_meter_measures_what_the_recorder_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, meter = metered(monkeypatch, 0, 100, max_events=2)
    for start in (0, 60, 80):
        add(recorder, "wait", "tile 0", start, start + 20)
    found = meter.look()
    assert (found.waited_s, found.limits_s["compute"]) == (40.0, 0.0)
