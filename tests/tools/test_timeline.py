"""Are events put into lanes, rows and a trace that a viewer can show?"""

from __future__ import annotations

import json
from pathlib import Path

from tiermem.tools.record.run_record import Span, lanes_of, read_spans, rows_of, within, write_trace

READ_A = Span("read", "a", 0, 100, 4096)
READ_B = Span("read", "b", 50, 150, 4096)
READ_C = Span("read", "c", 100, 200, 4096)
STEP = Span("step", "step", 10, 400, 0)


def test_transfers_under_way_together_lie_in_rows_of_their_own() -> None:
    assert rows_of([READ_A, READ_B, READ_C]) == [[READ_A, READ_C], [READ_B]]


def test_lanes_come_in_one_order_and_unknown_ones_last() -> None:
    other = Span("other", "x", 0, 1, 0)
    assert list(lanes_of([other, READ_A, STEP])) == ["step", "read", "other"]


def test_a_stretch_cuts_what_reaches_beyond_it() -> None:
    assert within([READ_A, READ_C], 60, 100) == [READ_A._replace(start_ns=60)]


def test_events_are_read_back_in_order_of_start(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(list(span)) + "\n" for span in (READ_C, READ_A)))
    assert read_spans(file) == [READ_A, READ_C]
    assert read_spans(tmp_path / "none.jsonl") == []


def test_a_trace_has_one_thread_per_row_and_microseconds(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [READ_A, READ_B, READ_C, STEP])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = {e["name"]: e for e in events if e["ph"] == "X"}
    assert names == {1: "step", 2: "read", 3: "read 2"}
    assert {name: (e["tid"], e["ts"], e["dur"]) for name, e in complete.items()} == {
        "step": (1, 0.01, 0.39),
        "a": (2, 0.0, 0.1),
        "c": (2, 0.1, 0.1),
        "b": (3, 0.05, 0.1),
    }
    assert complete["a"]["args"] == {"bytes": 4096, "GB/s": 40.96}
