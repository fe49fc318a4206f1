"""Does the recorder keep the newest events, and the seconds waited even of those it forgot?"""

from __future__ import annotations

import pytest

from tiermem.swap.queue import Event, Recorder


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
