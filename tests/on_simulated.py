"""OnSimulated: the environment of a process that finds the simulated accelerator of
tests/accelerator, as users find a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SITE = Path(__file__).parent / "accelerator" / "site"


def environment(**settings: str) -> dict[str, str]:
    """For subprocess.run. Skips the test where there is no simulated device, or no compiler to
    build it with."""
    if not _SITE.is_dir():
        pytest.skip("tests/accelerator, the simulated device, is not there")
    missing = importlib.import_module("accelerator.build").missing_for_build()
    if missing:
        pytest.skip(missing)
    return {**os.environ, "PYTHONPATH": str(_SITE), "OMP_NUM_THREADS": "1", **settings}


def python(*words: str, **settings: str) -> str:
    """Starts Python there with these words and returns what it prints. Blocks. Raises
    AssertionError when it fails."""
    command = [sys.executable, *words]
    done = subprocess.run(
        command, env=environment(**settings), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
