"""Does every block of docs/huggingface.md run, in the order of the page?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState
from tiny_models import build, samples
from tqdm import tqdm

from tiermem.integrations.choice import owner_of

PAGE = Path(__file__).parent.parent.parent / "docs" / "huggingface.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"model": build("gpt2"), "data": samples("gpt2", 8)}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # the page's own code
    owner = owner_of(names["model"])
    assert owner is not None
    owner.close()
    assert len(blocks) == 5
    assert (tmp_path / "state" / "tiermem").is_dir()
    assert sorted(each.name for each in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-4"]
    AcceleratorState._reset_state(reset_partial_state=True)
