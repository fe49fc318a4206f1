"""A `tiermem` command in the test's own process, without the seconds that a process of its own
takes."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path

import pytest

from tiermem.tools.cli import main


def call(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """What the command says and returns, in this folder. What it starts are processes."""
    given = [str(word) for word in words]
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        pytest.raises(SystemExit) as ended,
    ):
        main(given)
    status = int(ended.value.code or 0)
    return subprocess.CompletedProcess(given, status, said.getvalue(), errors.getvalue())
