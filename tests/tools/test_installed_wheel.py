"""Does the wheel install and train in an empty environment on a machine without a compiler, as a
user would find it?"""

from __future__ import annotations

import json
import os
import statistics
import zipfile
from pathlib import Path

import pytest
from installed import python, run, wheel

pytest.importorskip("_tiermem_native")

pytestmark = pytest.mark.slow

__all__ = ["python", "wheel"]

TRAIN = """
import torch, tiermem
torch.manual_seed(1)
policy = tiermem.OffloadPolicy(params=tiermem.Tier.NVME, optim=tiermem.Tier.NVME, paths=["."], host_bytes=64 << 20)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
x = torch.randn(32, 64)
losses = []
with tiermem.shard(model, policy, device="cpu"):
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
print(tiermem.__file__)
print(losses[-1] < losses[0])
"""
CPU_SECONDS = (
    "import time; before = time.process_time(); import tiermem; print(time.process_time() - before)"
)


def test_wheel_holds_types_and_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    assert {
        "tiermem/py.typed",
        "tiermem/swap/base/native.py",
        "tiermem/tools/cli.py",
        "_tiermem_native.abi3.so",
    } <= set(names)
    assert {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")} >= {
        "plots",
        "hjson",
        "hf",
    }
    assert "cp310-abi3" in wheel.name


def test_installed_wheel_trains_without_a_compiler(python: Path, tmp_path: Path) -> None:
    file, falls = run(python, tmp_path, "-c", TRAIN).splitlines()[-2:]
    assert Path(file).is_relative_to(python.parent.parent)  # not the sources
    assert falls == "True"


def test_installed_command_plans(python: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_batch_size": 1, "zero_optimization": {"stage": 3}})
    )
    said = run(python, tmp_path, str(python.parent / "tiermem"), "check", "--config", "ds.json")
    assert "stage" in said or "train_batch_size" in said


def test_import_costs_less_than_half_a_second_beyond_torch(python: Path, tmp_path: Path) -> None:
    seconds = [float(run(python, tmp_path, "-c", "import torch; " + CPU_SECONDS)) for _ in range(3)]
    assert statistics.median(seconds) < 0.5, os.uname().machine
