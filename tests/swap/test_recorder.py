"""Does the recorder keep the newest events, and the seconds waited even of those it forgot? Is a meter told what limits?"""

from __future__ import annotations

import pytest

from tiermem.swap import queue
from tiermem.swap.queue import Event, Meter, Recorder, StoreStats


def test_newest_events_are_kept_and_waiting_is_summed_over_all() -> None:
    recorder = Recorder(max_events=2)
    for start in range(4):
        recorder.add("wait", f"move {start}", start * 10, start * 10 + 5)
    assert list(recorder.events) == [Event("wait", "move 2", 20, 25, 0), Event("wait", "move 3", 30, 35, 0)]
    assert recorder.wait_s == pytest.approx(4 * 5e-9)


def test_only_the_wait_lane_counts_as_waiting() -> None:
    recorder = Recorder()
    recorder.add("read", "layers.3", 0, 10**9, 4096)
    assert recorder.wait_s == 0.0


def test_span_is_recorded_also_when_its_body_raises() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), recorder.span("compute", "tile 0", 7):
        _ = 1 / 0
    (event,) = recorder.events
    assert (event.lane, event.name, event.num_bytes) == ("compute", "tile 0", 7)
    assert 0 < event.start_ns <= event.end_ns


def totals(read: int, written: int) -> StoreStats:
    return StoreStats(read, written, 0, 0, 0, 0.0, "uring", "")


def test_a_meter_divides_the_time_and_names_the_largest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([totals(10, 20), totals(3_000_000_010, 1_000_000_020), totals(3_000_000_010, 1_000_000_020)])
    clock = iter([0, 2_000_000_000, 3_000_000_000])
    monkeypatch.setattr(queue.time, "monotonic_ns", lambda: next(clock))
    recorder = Recorder()
    meter = Meter(recorder, lambda: next(seen))
    recorder.add("wait", "tile states/0", 100_000_000, 1_300_000_000)
    recorder.add("read", "tile states/0", 0, 1_300_000_000, 7)
    recorder.add("compute", "tile states/0", 1_300_000_000, 1_500_000_000)
    recorder.add("wait", "gather layers.0", 1_500_000_000, 1_600_000_000)
    found = meter.look()
    shares = {"disk": 0.6, "CPU kernels": 0.1, "other ranks": 0.05, "computing": 0.25}
    assert found.shares == pytest.approx(shares)
    assert found.waits_s == pytest.approx({"tile states": 1.2, "gather layers.0": 0.1})
    assert list(found.waits_s) == ["tile states", "gather layers.0"]
    assert found.as_logged() == {"read_gb_s": 1.5, "written_gb_s": 0.5, "waited_s": 1.3, "limited_by": "disk"}
    assert meter.look().shares == pytest.approx({"disk": 0, "CPU kernels": 0, "other ranks": 0, "computing": 1})


def test_a_meter_measures_what_the_recorder_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 100])
    monkeypatch.setattr(queue.time, "monotonic_ns", lambda: next(clock))
    recorder = Recorder(max_events=2)
    meter = Meter(recorder, lambda: totals(0, 0))
    for start in (0, 60, 80):
        recorder.add("wait", "tile 0", start, start + 20)
    assert meter.look().shares["disk"] == 1.0
