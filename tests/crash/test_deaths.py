"""Does a run that is killed at any moment, or whose disk loses what was not synced, go on from its last durable state?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def _totals(script: str, folder: Path, *words: str) -> dict[str, Any]:
    """What a script counted; TIERMEM_SOAK_TOTALS names a folder that keeps it."""
    keep = os.environ.get("TIERMEM_SOAK_TOTALS")
    totals = (Path(keep) if keep else folder) / f"{Path(script).stem}.json"
    command = [sys.executable, str(HERE / script), str(folder / "runs"), "--totals", str(totals), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(totals.read_text())
    return found


def test_some_deaths_lose_nothing(tmp_path: Path) -> None:
    assert (
        _totals("deaths.py", tmp_path, "--plans", "2", "--ranks", "1", "--share", "0.02", "--count", "2")["cases"] >= 8
    )


def test_some_operations_leave_nothing(tmp_path: Path) -> None:
    assert sum(_totals("operations.py", tmp_path, "--count", "12")["totals"].values()) == 12


@pytest.mark.soak
def test_no_death_loses_anything(tmp_path: Path) -> None:
    assert _totals("deaths.py", tmp_path, "--seed", "2")["cases"] > 1000


@pytest.mark.soak
def test_no_operation_leaves_anything(tmp_path: Path) -> None:
    assert sum(_totals("operations.py", tmp_path, "--seed", "3")["totals"].values()) == 2000
