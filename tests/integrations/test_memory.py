"""Does the Trainer keep to a memory cap with a model that is larger: opened, trained, saved and
resumed?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from launch import launch as launch_ranks
from random_llama import write_llama
from safetensors import safe_open
from transformers import LlamaConfig

from tiermem.tools.job.launcher import Observer, launch
from tiermem.tools.memory_limit import open_limit

HERE = Path(__file__).parent
CAP = 3 << 30
WIDTHS = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
}


class Output(Observer):
    """The lines that a child printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_output(self, line: str) -> None:
        self.lines.append(line)


def run_capped(
    word: str, folder: Path, script: str = "capped_llama.py", cap: int = CAP
) -> dict[str, Any]:
    """Runs a script under a cap, which the kernel enforces, and returns what it wrote."""
    output = Output()
    command = [sys.executable, str(HERE / script), word, str(folder)]
    with open_limit(cap) as limit:
        if limit.kind == "watch":
            pytest.skip(f"the kernel enforces no cap here: {limit.why}")
        paths = {"PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent)))}
        outcome = launch(command, limit, [output], environment=paths)
    assert outcome.exit_code == 0, "\n".join([outcome.describe(), *output.lines[-40:]])
    found: dict[str, Any] = json.loads((folder / f"{word}.json").read_text("utf-8"))
    print(word, found, outcome.anonymous_peak_bytes)
    return found


@pytest.mark.soak
def test_a_llama_of_1_3_billion_trains_saves_and_resumes_under_3_gib(tmp_path: Path) -> None:
    made, whole, again = (run_capped(word, tmp_path) for word in ("make", "train", "resume"))
    assert whole["peaks"]["from_pretrained"] - whole["peaks"]["imports"] < made["bytes"] // 5
    assert len(whole["losses"]) == 3 and whole["losses"][2] < whole["losses"][0]
    assert again["losses"][-1] == whole["losses"][-1]
    assert not list((tmp_path / "out").rglob("optimizer.pt"))
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert sum(a * (b[0] if b else 1) for a, *b in shapes.values()) == 1_345_423_360


@pytest.mark.soak
def test_lora_on_a_base_of_7_billion_in_nf4_trains_under_4_gib(tmp_path: Path) -> None:
    """A step reads each of the base's weights at most twice, in 4.5 bits; the kernel counts what
    the forecast says."""
    found = run_capped("lora", tmp_path, "capped_lora.py", 4 << 30)
    assert found["numel"] > 6.7e9
    assert found["at rest"] == pytest.approx(found["numel"] * 4.5 / 8, rel=0.001)
    # embedding and layer 0, for the next forward
    ahead = (32000 * 4096 + 4 * 4096**2 + 3 * 4096 * 11008) * 9 // 16
    assert found["read"] == [found["planned"] + ahead, found["planned"], found["planned"]]
    assert found["losses"][2] < found["losses"][1] < found["losses"][0]


@pytest.mark.slow
def test_no_rank_of_two_ever_holds_the_whole_model(tmp_path: Path) -> None:
    for name, num_layers in (("small", 2), ("large", 32)):
        config = LlamaConfig(num_hidden_layers=num_layers, **WIDTHS)
        num_bytes = write_llama(tmp_path / name / "made", config, torch.float32)
        (tmp_path / name / "nvme").mkdir()
    (tmp_path / "out").mkdir()
    for found in launch_ranks(HERE / "llama_on_ranks.py", 2, tmp_path / "out", str(tmp_path)):
        assert {phase: peak for phase, peak in found.items() if peak > num_bytes * 2 // 3} == {}, (
            num_bytes
        )
