"""Is the picture drawn for every mode and engine, with our mark in it?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from tiermem.tools.bench.io_report import block_label, draw_heatmap, panels_of
from tiermem.tools.words import check_outputs

pytestmark = pytest.mark.usefixtures("opened_fonts")


def row(
    mode: str, engine: str, block: int, depth: int, rate: float | None, **more: Any
) -> dict[str, Any]:
    named = {
        "mode": mode,
        "engine": engine,
        "block_bytes": block,
        "depth": depth,
        "gbps_median": rate,
    }
    return {**named, "ranks": 1, "path": "/a", **more}


ROWS = [
    row(mode, engine, block, depth, block * depth / 1e7)
    for mode in ("read", "write")
    for engine in ("auto", "aio")
    for block in (1 << 18, 1 << 20)
    for depth in (1, 8)
]


def test_there_is_a_panel_for_each_mode_and_engine() -> None:
    assert list(panels_of(ROWS)) == ["read, auto", "read, aio", "write, auto", "write, aio"]
    assert all(len(rows) == 4 for rows in panels_of(ROWS).values())


def test_titles_name_what_differs() -> None:
    rows = [row("read", "auto", 1, 1, 1.0, ranks=n, path=p) for n in (1, 4) for p in ("/a", "all")]
    titles = list(panels_of(rows))
    assert titles == [
        "read, auto, 1 rank, /a",
        "read, auto, 1 rank, all",
        "read, auto, 4 ranks, /a",
        "read, auto, 4 ranks, all",
    ]


def test_the_picture_is_a_png_that_we_know_again(tmp_path: Path) -> None:
    series = [{"written_bytes": n * 10**9, "gbps": 2.0 / n} for n in (1, 2, 3, 4)]
    rows = [
        *ROWS,
        row("mixed", "uring", 1 << 20, 1, None),  # cannot run
        row("sustained", "auto", 1 << 20, 8, 1.0, series=series, knee_bytes=2 * 10**9),
    ]
    file = tmp_path / "map.png"
    draw_heatmap(rows, "a machine with a long name " * 20 + "\na path", file, "tiermem bench io")
    draw_heatmap(rows[:1], "a machine", file, "tiermem bench io")
    check_outputs([file], "tiermem bench io")
    with pytest.raises(FileExistsError):
        check_outputs([file], "tiermem bench step")


@pytest.mark.parametrize(
    ("size", "label"), [(4096, "4 KiB"), (1 << 18, "256 KiB"), (4 << 20, "4 MiB"), (6144, "6 KiB")]
)
def test_a_block_is_named_as_it_was_given(size: int, label: str) -> None:
    assert block_label(size) == label
