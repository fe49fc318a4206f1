"""Does every block of docs/drop_in.md run, in the order of the page?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import loss_of, seeded

PAGE = Path(__file__).parent.parent.parent / "docs" / "drop_in.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {
        "model": seeded(Tower),
        "loss_of": loss_of,
        "batches": range(3),
        "torch": torch,
    }
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # the page's own code
    assert len(blocks) == 4
    assert list((tmp_path / "saved").glob("*.distcp"))
    assert names["saved"]["num_updates"] == 3
