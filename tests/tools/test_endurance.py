"""Is what was written said, and what it means for a drive, by arithmetic?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tiermem.tools.measure.machine import WrittenOnPath, endurance_lines, lines_of_run, parse_tbw

GB, TB = 10**9, 10**12
A, B = Path("/a"), Path("/b")


def test_a_drive_s_life_is_counted_in_runs_steps_and_days() -> None:
    (line,) = endurance_lines(
        [WrittenOnPath(A, 12 * GB)], num_steps=10, seconds=864.0, tbw_bytes=600 * TB
    )
    assert line == (
        "written to /a: 12.0 GB in this run, 1.20 GB per step; a drive of 600 TBW lasts 50,000 "
        "such runs, 500,000 steps, "
        "500 days at this rate"
    )


def test_without_a_drive_a_hundred_terabytes_are_spoken_of() -> None:
    (line,) = endurance_lines([WrittenOnPath(A, 2 * GB)], num_steps=4, seconds=1.0)
    assert line == (
        "written to /a: 2.00 GB in this run, 500 MB per step; every 100 TB of a drive's TBW are "
        "200,000 such steps"
    )


def test_a_run_without_steps_and_seconds_counts_runs_alone() -> None:
    (line,) = endurance_lines([WrittenOnPath(A, 3 * GB)], 0, 0.0, 6 * TB)
    assert line == "written to /a: 3.00 GB in this run; a drive of 6 TBW lasts 2,000 such runs"


def test_several_paths_have_a_line_each_and_a_sum() -> None:
    lines = endurance_lines([WrittenOnPath(A, GB), WrittenOnPath(B, 3 * GB)], 2, 1.0, 600 * TB)
    assert [line.partition(":")[0] for line in lines] == [
        "written to /a",
        "written to /b",
        "all of it, if the paths share one drive",
    ]
    assert (
        "4.00 GB in this run, 2.00 GB per step; a drive of 600 TBW lasts 150,000 such runs"
        in lines[2]
    )


def test_a_path_that_was_not_written_has_no_wear() -> None:
    lines = endurance_lines([WrittenOnPath(A, 0), WrittenOnPath(B, GB)], 2, 1.0, TB)
    assert lines[0] == "written to /a: 0 B in this run: no wear"
    assert len(lines) == 2


def test_an_older_store_says_what_it_was_written_in_all() -> None:
    (line,) = endurance_lines([WrittenOnPath(A, GB, 5 * TB)], 1, 1.0)
    assert "1.00 GB in this run, 1.00 GB per step (5.00 TB since the store was made);" in line


def test_a_long_life_is_counted_in_years() -> None:
    (line,) = endurance_lines([WrittenOnPath(A, GB)], 1, 86_400.0, 3652.5 * GB)  # type: ignore[arg-type]
    assert line.endswith("10.0 years at this rate")


def test_a_life_shorter_than_a_day_is_not_rounded_away() -> None:
    (line,) = endurance_lines([WrittenOnPath(A, 2 * TB)], 4, 43_200.0, TB)
    assert line.endswith("a drive of 1 TBW lasts 0.5 such runs, 2 steps, 0.25 days at this rate")


def test_nothing_on_nvme_says_nothing() -> None:
    assert endurance_lines([], 3, 1.0, TB) == []


def test_a_saved_run_tells_its_training_and_its_building() -> None:
    run = {
        "losses": [1.0, 2.0],
        "training_s": 10.0,
        "paths": [{"path": "/a", "written_bytes": 2 * GB, "since_made_bytes": 3 * GB}],
    }
    (line,) = lines_of_run(run, 100 * TB)
    assert line.startswith(
        "written to /a: 2.00 GB in this run, 1.00 GB per step (3.00 GB since the store was made); "
    )
    assert lines_of_run({"losses": []}) == []


def test_what_steps_that_were_made_again_wrote_is_said_apart() -> None:
    run = {
        "losses": [1.0, 2.0, 3.0],
        "paths": [{"path": "/a", "written_bytes": 4 * GB, "since_made_bytes": None}],
        "steps_redone": 1,
        "redone_bytes": GB,
        "copied_bytes": 2 * GB,
    }
    written, copied, again = lines_of_run(run, 100 * TB)
    assert copied == "of this 2.00 GB are copies that saves made"
    assert written.startswith("written to /a: 4.00 GB in this run")
    assert (
        again == "of this 1.00 GB were written under backward and dropped: 1 of 3 steps made again"
    )


def test_a_store_as_old_as_the_run_says_it_once() -> None:
    (line,) = endurance_lines([WrittenOnPath(A, GB, GB)], 1, 1.0)
    assert "since the store was made" not in line


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("600TB", 600 * TB), ("600 TBW", 600 * TB), ("1200", 1200 * TB), ("1.5TiB", 3 << 39)],
)
def test_endurance_is_written_as_data_sheets_do(text: str, num_bytes: int) -> None:
    assert parse_tbw(text) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "600kB", "-1"])
def test_what_is_no_endurance_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no drive's endurance; write its TBW"):
        parse_tbw(text)
