"""Does a run that was stopped, or killed, go on with the losses of one that was not?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("_tiermem_native")
pytest.importorskip("transformers")

from test_train import TINY, command

from tiermem.tools.presets import preset

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.json").write_text(
        json.dumps(preset("151m") | TINY | {"num_key_value_heads": 4})
    )
    return tmp_path


def tiermem_train(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [*command()[:4], *arguments, "--json", "out.json"], cwd=folder, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def begin(folder: Path, *arguments: str) -> dict[str, Any]:
    return tiermem_train(folder, "--model", "tiny.json", "--seq", "32", *arguments)


@pytest.mark.parametrize("states", ["exact", "tiny"])
def test_losses_go_on_from_a_checkpoint_on_other_tiers(folder: Path, states: str) -> None:
    whole = begin(folder, "--steps", "5", "--states", states)["losses"]
    first = begin(folder, "--steps", "3", "--states", states, "--save-every", "2", "--save", "ck")
    assert first["disagreements"] == []
    assert first["losses"] == whole[:3]
    on_nvme = tiermem_train(folder, "--resume", "ck", "--steps", "5")
    assert on_nvme["losses"] == whole[3:]
    assert on_nvme["disagreements"] == []
    assert (
        tiermem_train(folder, "--resume", "ck", "--steps", "5", "--offload", "cpu")["losses"]
        == whole[3:]
    )


def test_a_killed_run_goes_on_from_its_last_step(folder: Path) -> None:
    whole = begin(folder, "--steps", "8")["losses"]
    before = set((folder / "runs").iterdir())
    arguments = command("--steps", "8", "--durability", "step", "--verbose")
    with subprocess.Popen(
        arguments, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if ": step 4/" in line:
                break
        os.killpg(run.pid, signal.SIGKILL)
    (killed,) = set((folder / "runs").iterdir()) - before
    gone_on = tiermem_train(folder, "--resume", str(killed), "--steps", "8")["losses"]
    assert 0 < len(gone_on) <= 4
    assert gone_on == whole[-len(gone_on) :]
    again = (
        tiermem_train(folder, "--resume", str(killed), "--steps", "8")
        if any(killed.glob("tiermem-*"))
        else None
    )
    assert again is None or again["losses"] == gone_on
