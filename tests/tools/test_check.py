"""Does `tiermem check` name everything it promises?"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("_tiermem_native")

from tiermem.swap.base.engines import ENGINES
from tiermem.tools.check import check_machine
from tiermem.tools.options import CheckOptions


def test_every_finding_is_there(tmp_path: Path) -> None:
    text = io.StringIO()
    assert (
        check_machine(CheckOptions([tmp_path, tmp_path.parent], 0.1), Console(file=text, width=200))
        == 0
    )
    for what in (
        "path",
        "direct I/O",
        "memory limit",
        "memlock",
        "aio-max-nr",
        "transparent_hugepage",
        *(f"engine {name}" for name in ENGINES),
        "kernels",
        "GPU",
        "GB/s",
        " free",
    ):
        assert what in text.getvalue()
    assert text.getvalue().count("GB/s") == 4  # both ways, of both folders
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="--seconds"):
        CheckOptions(seconds=0)
