"""Does a run that is killed at any moment, or whose disk loses what was not synced, go on from its
last durable state?

And would it be seen if it did not: each way of sabotage.py breaks something that keeps states
whole, or leaves something.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sabotage
from harness import totals_of


def test_some_deaths_lose_nothing(tmp_path: Path) -> None:
    words = (
        "--plans",
        "5",
        "--ranks",
        "1",
        "--share",
        "0.01",
        "--count",
        "4",
        "--workers",
        "1",
    )
    assert sum(totals_of("deaths.py", tmp_path, *words)["cases"].values()) >= 6


def test_some_operations_leave_nothing(tmp_path: Path) -> None:
    assert sum(totals_of("operations.py", tmp_path, "--count", "6")["totals"].values()) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted(sabotage.DEATHS))
def test_death_is_noticed(way: str, tmp_path: Path) -> None:
    plan = "3" if way.startswith("copies") else "1" if way.startswith("commits") else "0"
    words = (
        "--plans",
        plan,
        "--ranks",
        "1",
        "--share",
        "0.3",
        "--count",
        "6",
        "--workers",
        "1",
        "--seed",
        "4",
    )
    with pytest.raises(AssertionError, match="AssertionError"):
        totals_of("deaths.py", tmp_path, *words, "--sabotage", way)
    shutil.rmtree(tmp_path / "runs")  # what is left of the case that failed


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted(sabotage.LEAKS))
def test_leak_is_noticed(way: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="AssertionError: seed 4, operation"):
        totals_of("operations.py", tmp_path, "--count", "40", "--seed", "4", "--sabotage", way)
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.soak
def test_no_death_loses_anything(tmp_path: Path) -> None:
    found = totals_of("deaths.py", tmp_path, "--seed", "2")
    assert sum(found["cases"].values()) > 3000
    for ranks in ("1 rank", "2 ranks"):
        for phase in ("opening", "training", "saving", "window"):
            assert found["moments"][f"{ranks}, {phase}"] > 100  # of random ones
        for phase in ("speculation", "undo"):  # of the two plans that step under backward
            assert found["moments"][f"{ranks}, {phase}"] > 10


@pytest.mark.soak
def test_no_operation_leaves_anything(tmp_path: Path) -> None:
    # and the last tidying
    assert sum(totals_of("operations.py", tmp_path, "--seed", "3")["totals"].values()) > 2000
