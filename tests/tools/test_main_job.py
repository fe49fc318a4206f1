"""The main job at its real size: hundreds of millions of parameters under caps that the kernel
enforces. Takes minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.soak]

BLOCK_INPUT_BYTES = 128 * 1024 * 2  # tokens x hidden, bf16


def train(folder: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tiermem.tools.cli", "train", "--json", "out.json", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return figures


def test_419m_under_1250_mib_equals_the_run_in_memory_to_the_bit(tmp_path: Path) -> None:
    capped = train(
        tmp_path, "--preset", "419m", "--offload", "nvme", "--memory", "1250MiB", "--steps", "10"
    )
    assert (
        capped["losses"]
        == train(tmp_path, "--preset", "419m", "--offload", "cpu", "--steps", "10")["losses"]
    )
    assert not list(tmp_path.glob("**/tiermem-*"))


def test_1_3b_trains_under_2500_mib(tmp_path: Path) -> None:
    figures = train(
        tmp_path, "--preset", "1.3b", "--offload", "nvme", "--memory", "2500MiB", "--steps", "3"
    )
    assert len(figures["losses"]) == 3
    assert figures["losses"][2] < figures["losses"][0]


def test_twice_the_layers_take_the_same_peak_with_activation_checkpointing(tmp_path: Path) -> None:
    options = (
        "--preset",
        "419m",
        "--offload",
        "nvme",
        "--memory",
        "1250MiB",
        "--resident",
        "0",
        "--checkpointing",
    )
    once = train(tmp_path, *options, "--layers", "24", "--steps", "2")["peak_rss_bytes"]
    twice = train(tmp_path, *options, "--layers", "48", "--steps", "2")["peak_rss_bytes"]
    assert twice - 24 * BLOCK_INPUT_BYTES <= 1.05 * once
