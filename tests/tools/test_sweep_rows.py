"""Are the figures of a row the arithmetic they claim to be, and is what a reader must know said?"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sweep_values import MIB, outcome, setting

from tiermem.tools.bench.io_ranks import RankOutcome
from tiermem.tools.bench.io_report import (
    CSV_COLUMNS,
    MeasuredRow,
    add_witness,
    best_of,
    byte_counts,
    latency_quantiles,
    notes_of,
    print_rows,
    row_of,
    save_csv,
)
from tiermem.tools.record.run_record import IoCounts
from tiermem.tools.words import check_outputs, save_json

GB = 10**9


def row(mode: str = "read", *loops: list[RankOutcome], **changed: Any) -> dict[str, Any]:
    return row_of(MeasuredRow(setting(mode, **changed), True, list(loops)))


def test_a_rate_is_the_median_of_its_loops() -> None:
    found = row("read", *([outcome(1.0, read=size * GB)] for size in (3, 1, 2, 5)))
    assert (found["gbps_median"], found["gbps_min"], found["gbps_max"]) == (2.5, 1.0, 5.0)
    assert found["first_gbps"] == 3.0
    assert found["loops_gbps"] == [3.0, 1.0, 2.0, 5.0]


def test_both_directions_count() -> None:
    assert row("mixed", [outcome(2.0, read=GB, written=3 * GB)])["gbps_median"] == 2.0


def test_ranks_together_count_from_the_first_start_to_the_last_end() -> None:
    late = outcome(1.0, read=GB)._replace(start_s=101.0, end_s=102.0)
    found = row("read", [outcome(1.0, read=GB), late], ranks=2)
    assert found["gbps_median"] == 1.0
    assert found["ranks"] == 2


def test_latencies_are_those_of_all_loops_and_ranks_together() -> None:
    found = row("read", [outcome(read=GB), outcome(read=GB)], [outcome(read=GB), outcome(read=GB)])
    assert [found["p50_us"], found["p99_us"]] == latency_quantiles(
        np.array([4, 8, 12], dtype=np.uint64), (0.5, 0.99)
    )


def test_cpu_time_is_per_gigabyte_and_per_block() -> None:
    found = row("random", [outcome(1.0, read=GB // 2)], [outcome(1.0, read=GB // 2)])
    assert found["cpu_s_per_gb"] == pytest.approx(0.2)
    assert found["user_us_per_block"] == pytest.approx(0.2 / 3 / 100 * 1e6)
    assert found["idle_fraction"] == 0.25


def test_a_row_without_figures_keeps_its_keys_and_its_reason() -> None:
    refused = MeasuredRow(setting(), True, error="no ring here")
    found = row_of(refused)
    assert found["gbps_median"] is None
    assert found["error"] == "no ring here"
    assert set(CSV_COLUMNS) <= set(found)
    add_witness(found, [1.0], [2.0], [], None)
    assert (found["fio_gbps"], found["yardstick_gbps"], found["fraction"]) == (1.0, 2.0, None)


def test_a_witness_gives_the_fraction_and_what_a_block_costs_beyond_it() -> None:
    found = row("random", [outcome(1.0, read=GB)])
    add_witness(found, [1.5], [2.0], [0.5], 100.0)
    assert (found["fio_gbps"], found["yardstick_gbps"], found["peer_gbps"]) == (1.5, 2.0, 0.5)
    assert (found["fraction"], found["peer_fraction"]) == (0.5, 2.0)
    assert found["user_us_beyond_bare"] == pytest.approx(found["user_us_per_block"] - 100)


def test_a_fraction_is_the_median_of_what_each_loop_gave() -> None:
    found = row("read", *([outcome(read=size * GB)] for size in (2, 1, 4)))
    add_witness(found, [], [2.0, 2.0, 5.0], [1.0, 4.0], None)
    assert found["fraction"] == 0.8  # of 1, 1/2 and 4/5; the medians' own ratio is 1
    assert found["peer_fraction"] == (2.0 + 0.25) / 2


def test_tensors_are_set_beside_the_sequential_passes() -> None:
    shares = [(("put", 1.0, 4.0), ("fetch", 3.0, 4.0)), (("put", 2.0, 4.0), ("fetch", 3.0, 2.0))]
    found = row("tensors", *([outcome(read=GB, shares=each)] for each in shares))
    assert (found["put_gbps"], found["put_share"]) == (1.5, 0.375)
    assert (found["fetch_gbps"], found["fetch_share"]) == (3.0, 1.0)


def test_a_sustained_write_is_a_series_with_its_knee() -> None:
    points = ((GB, 1.0), (2 * GB, 1.5), (3 * GB, 2.0), (4 * GB, 4.0), (5 * GB, 6.0))
    found = row("sustained", [outcome(6.0, written=6 * GB, series=points)])
    assert [point["gbps"] for point in found["series"]] == [2.0, 2.0, 0.5, 0.5]
    assert found["knee_bytes"] == 3 * GB
    assert (found["gbps_before_knee"], found["gbps_after_knee"]) == (2.0, 0.5)
    assert (found["gbps_min"], found["gbps_max"], found["gbps_overall"]) == (0.5, 2.0, 1.0)
    assert any(
        "2.00 GB/s up to 3.0 GB, then 0.50" in note
        for note in notes_of([found], *[IoCounts(0, 0)] * 2)
    )


def test_the_best_of_a_mode_is_its_highest_median() -> None:
    rows = [
        row(mode, [outcome(read=size * GB)])
        for mode, size in (("read", 1), ("read", 3), ("read", 2), ("write", 1))
    ]
    rows.append(row_of(MeasuredRow(setting("mixed"), True, error="no")))
    assert best_of(rows) == {"read": rows[1], "write": rows[3]}


def test_bytes_past_the_page_cache_are_counted_and_others_not() -> None:
    direct = MeasuredRow(setting(), True, [[outcome(read=GB, written=5, kernel=IoCounts(7, 5))]])
    buffered = MeasuredRow(setting(), False, [[outcome(read=GB)]])
    assert byte_counts([direct, buffered]) == (IoCounts(GB, 5), IoCounts(7, 5))


def notes(*rows: dict[str, Any], ours: int = 0, kernel: int = 0) -> list[str]:
    return notes_of(list(rows), IoCounts(ours, 0), IoCounts(kernel, 0))


def test_passes_of_the_best_row_that_differ_much_are_told() -> None:
    uneven = row("read", *([outcome(seconds, read=GB)] for seconds in (0.5, 0.5, 1.0)))
    even = row("write", *([outcome(seconds, written=GB)] for seconds in (0.5, 0.5, 0.6)))
    said = [note for note in notes(uneven, even, ours=0) if "passes reached" in note]
    assert len(said) == 1 and "1.00 to 2.00 GB/s" in said[0]


def test_a_slow_first_pass_is_told() -> None:
    cold = row("read", *([outcome(read=int(size * GB))] for size in (1.5, 2, 2)))
    warm = row("read", *([outcome(read=int(size * GB))] for size in (1.7, 2, 2)))
    assert any("the first pass reached 1.50 GB/s, later ones 2.00" in note for note in notes(cold))
    assert notes(warm) == []


def test_a_fraction_beyond_the_possible_is_the_yardsticks_error() -> None:
    found = row("read", [outcome(read=GB)])
    add_witness(found, [], [1 / 1.03], [], None)
    assert any("error of the yardstick" in note and "1.030" in note for note in notes(found))
    add_witness(found, [], [1 / 1.01], [], None)
    assert notes(found) == []


def test_bytes_that_the_kernel_counts_otherwise_are_told() -> None:
    assert notes(ours=GB, kernel=GB + 5_000_000) == []
    assert any(
        "1000000000" in note and "1020000000" in note
        for note in notes(ours=GB, kernel=1_020_000_000)
    )


def test_buffered_files_and_engines_that_cannot_run_are_told() -> None:
    buffered = row_of(MeasuredRow(setting(), False, [[outcome(read=GB)]]))
    refused = row_of(MeasuredRow(setting(engine="aio"), True, error="aio-max-nr"))
    said = notes(buffered, refused, refused)
    assert sum("aio cannot run here: aio-max-nr" in note for note in said) == 1
    assert any("/a: buffered" in note for note in said)


def test_the_table_shows_a_column_only_where_something_stands_in_it() -> None:
    text = io.StringIO()
    plain, judged = row("read", [outcome(read=GB)]), row("write", [outcome(written=2 * GB)])
    print_rows(
        [plain, judged],
        {"read": plain},
        ["mind [this]"],
        "a machine",
        Console(file=text, width=200, markup=False),
    )
    said = text.getvalue()
    assert "fio" not in said
    assert "mind [this]" in said
    assert "a machine" in said
    add_witness(judged, [1.25], [], [], None)
    print_rows([plain, judged], {}, [], "", Console(file=text, width=200, markup=False))
    assert "fio" in text.getvalue()
    assert "1.25" in text.getvalue()


def test_files_carry_our_mark_and_the_rows(tmp_path: Path) -> None:
    rows = [row("read", [outcome(read=GB)], path="a,b"), row("write", [outcome(written=GB)])]
    save_json(tmp_path / "x.json", {"made_by": "tiermem bench io", "rows": rows})
    save_csv(tmp_path / "x.csv", "tiermem bench io", rows)
    check_outputs([tmp_path / "x.json", tmp_path / "x.csv"], "tiermem bench io")
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == rows
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[0].startswith("#")
    found = list(csv.DictReader(lines[1:]))
    assert [(each["mode"], each["path"], float(each["gbps_median"])) for each in found] == [
        ("read", "a,b", 1.0),
        ("write", "/a", 1.0),
    ]


def test_a_figure_that_is_no_number_cannot_reach_the_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_json(tmp_path / "x.json", {"rows": [{"p50_us": float("nan")}]}, allows_nan=False)


def test_blocks_of_a_mebibyte_are_said_so() -> None:
    assert setting().block_bytes == MIB
    assert "1024 KiB x 8, 1 rank" in setting().describe()
