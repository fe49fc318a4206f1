"""Does `torchrun ... tiermem train` train once: other batches on each rank, one folder, one JSON,
one budget?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import launch
import pytest

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

from tiermem.tools.presets import preset

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 4, "vocab_size": 300}
TRAIN = [
    "train",
    "--model",
    "tiny.json",
    "--data",
    "text.txt",
    "--seq",
    "32",
]
TRAIN += ["--precision", "fp32", "--memory", "1GiB"]


def train_by_torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command on two ranks that torchrun starts."""
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    return subprocess.run(
        [sys.executable, "-m", *launch, "-m", "tiermem.tools.cli", *TRAIN, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def train(folder: Path, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The command on ranks that have the variables which torchrun sets, and are forks."""
    script = str(Path(__file__).with_name("command_on_ranks.py"))
    launched = [launch.__file__, str(ranks), script] if ranks > 1 else [script]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return fork_server.run([*launched, *TRAIN, *words], 200, OMP_NUM_THREADS="1")


def figures(folder: Path, ranks: int, *words: str) -> dict[str, Any]:
    done = train(folder, ranks, "--json", f"{ranks}.json", "--runs", f"runs{ranks}", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / f"{ranks}.json").read_text())
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(json.dumps(preset("151m") | TINY))
    (tmp_path / "text.txt").write_bytes(bytes((i * i * 7919 + i) % 251 for i in range(20_000)))
    return tmp_path


@pytest.mark.usefixtures("forked_python")
def test_two_ranks_train_as_one_with_the_whole_batch_and_leave_one_run(folder: Path) -> None:
    words = ("--steps", "3", "--offload", "nvme")
    two = figures(folder, 2, "--batch", "2", *words)
    one = figures(folder, 1, "--batch", "4", *words)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-6)
    assert len(set(one["losses"])) == 3
    (run,) = (folder / "runs2").iterdir()
    assert json.loads((run / "run.json").read_text())["losses"] == two["losses"]
    assert not list(run.glob("rank*"))


@pytest.mark.slow
def test_ranks_go_on_from_what_they_saved(folder: Path) -> None:
    """Those that torchrun starts."""
    done = train_by_torchrun(folder, "--steps", "2", "--offload", "nvme", "--save", "ck")
    assert done.returncode == 0, done.stdout + done.stderr
    done = train_by_torchrun(folder, "--resume", "ck", "--steps", "3", "--json", "on.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from step 2 of ck" in " ".join(done.stdout.split())
    assert len(json.loads((folder / "on.json").read_text())["losses"]) == 1


@pytest.mark.slow
def test_a_cap_that_is_too_small_is_refused_in_one_line_of_a_rank(folder: Path) -> None:
    """Of rank 0, or of rank 1 with its name where that one is first and the launcher ends both."""
    done = train(folder, 2, "--steps", "1", "--offload", "none", "--memory", "300MiB")
    assert done.returncode != 0
    said = done.stderr.splitlines()
    assert {line.partition("--memory")[0] for line in said} <= {
        "tiermem train: ",
        "tiermem train: rank 1: ",
    }
    assert said and all("is the smallest that works" in line for line in said)
    assert not (folder / "runs").exists()
