"""Does `tiermem train` run on the GPU by itself, go on from what it saved, and tell what it took
there?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import on_simulated
import pytest
import torch

pytestmark = pytest.mark.gpu

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.slow
def test_training_on_nvme_runs_on_the_device_and_tells_its_memory(
    accelerator: torch.device, tmp_path: Path
) -> None:
    for package in ("transformers", "rich", "typer"):
        pytest.importorskip(package)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    words = [
        "train",
        "--model",
        "config.json",
        "--offload",
        "nvme",
        "--seq",
        "32",
        "--steps",
        "3",
        "--runs",
        "runs",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tiermem.tools.cli", *words, "--nvme", ".", "--json", "run.json"],
        cwd=tmp_path,
        env=on_simulated.environment() if accelerator.type == "sim" else dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["device"] == str(accelerator) and len(run["losses"]) == 3
    card = run["device_memory"]
    assert (
        0
        < card["plan_bytes"]
        <= card["peak_allocated_bytes"]
        <= card["peak_reserved_bytes"]
        <= card["total_bytes"]
    )
    assert f"{accelerator} peak" in done.stdout
