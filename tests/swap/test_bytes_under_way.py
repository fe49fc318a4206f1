"""How much of a step is under way at first?"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("_tiermem_native")

from tiermem.swap.base.tile_program import cache_bytes, first_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "cache", "under_way"),
    [
        ([], 0, 16 * MIB),
        (["48K", "1024K", "32768K"], 32 * MIB, 8 * MIB),
        (["48K", "2048K", "307200K", ""], 300 * MIB, 16 * MIB),
        (["32K", "512K"], MIB // 2, 6 * MIB),
    ],
)
def test_a_quarter_of_the_last_cache_is_under_way_at_first(
    sizes: list[str], cache: int, under_way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermem.swap.base.tile_program._CACHES", tmp_path)
    for index, size in enumerate(sizes):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert (cache_bytes(), first_bytes.__wrapped__()) == (cache, under_way)
