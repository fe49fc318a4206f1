"""Does the wheel install and train in an empty environment on a machine without a compiler, as a user would find it?"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("_tiermem_native")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
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
CPU_SECONDS = "import time; before = time.process_time(); import tiermem; print(time.process_time() - before)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as pip builds it from the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=900)
    (made,) = folder.glob("tiermem-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what the wheel needs is this environment's, seen through a path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    command = [str(found), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, timeout=300)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def run(python: Path, folder: Path, *arguments: str) -> str:
    """What a program says on a machine without a compiler: PATH holds the environment's programs alone."""
    environment = {"PATH": str(python.parent), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    assert not any(
        shutil.which(name, path=environment["PATH"]) for name in ("cc", "c++", "gcc", "g++", "clang", "cmake")
    )
    done = subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_types_and_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    assert {"tiermem/py.typed", "tiermem/swap/native.py", "tiermem/tools/cli.py", "_tiermem_native.abi3.so"} <= set(
        names
    )
    assert {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")} >= {"plots", "hjson", "hf"}
    assert "cp310-abi3" in wheel.name


def test_installed_wheel_trains_without_a_compiler(python: Path, tmp_path: Path) -> None:
    file, falls = run(python, tmp_path, "-c", TRAIN).splitlines()[-2:]
    assert Path(file).is_relative_to(python.parent.parent)  # not the sources
    assert falls == "True"


def test_installed_command_plans(python: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 1, "zero_optimization": {"stage": 3}}))
    said = run(python, tmp_path, str(python.parent / "tiermem"), "check", "--config", "ds.json")
    assert "stage" in said or "train_batch_size" in said


def test_import_costs_less_than_half_a_second_beyond_torch(python: Path, tmp_path: Path) -> None:
    seconds = [float(run(python, tmp_path, "-c", "import torch; " + CPU_SECONDS)) for _ in range(3)]
    assert statistics.median(seconds) < 0.5, os.uname().machine
