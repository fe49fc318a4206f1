"""Does every block of docs/peft.md run, in the order of the page? Skipped where peft is not
installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PAGE = Path(__file__).parent.parent.parent / "docs" / "peft.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM(
        LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=61)
    ).save_pretrained("base")
    words = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"batches": [words] * 3}
    losses = []
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # the page's own code
        losses.append(names["loss"].item())
    assert len(blocks) == 4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "saved" / "latest").is_file()
    assert losses[0] != losses[1]  # of other base weights
    assert names["reference"].isfinite().all() and names["logits"].isfinite().all()
