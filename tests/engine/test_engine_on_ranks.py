"""Are an engine's whole weights whole on two ranks, written once, and does a rank that stays away
get named?"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from launch import launch
from programs.twins import assert_same_tensors

SCRIPT = Path(__file__).parent / "engine_on_ranks.py"

stages = pytest.mark.parametrize("stage", [1, 3])


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder that was written to, and what either rank found."""
    out, nvme = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("nvme")
    found = launch(SCRIPT, 2, out, str(nvme))
    return out, found


@pytest.mark.sampled(2)
@stages
def test_rank_0_has_the_consolidated_weights_and_writes_them(
    stage: int, launched: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, found = launched[0] / f"stage {stage}", [rank[f"stage {stage}"] for rank in launched[1]]
    assert_same_tensors(found[0]["whole"], found[1]["whole"])
    assert_same_tensors(found[0]["consolidated"], found[0]["whole"])
    assert found[1]["consolidated"] is None
    assert sorted(os.listdir(folder)) == ["model.safetensors", "pytorch_model.bin"]
    assert_same_tensors(
        torch.load(folder / "pytorch_model.bin", weights_only=True), found[0]["whole"]
    )
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    assert_same_tensors(saved, {name: found[0]["whole"][name] for name in saved})


@stages
def test_while_all_units_are_present_nothing_is_gathered(
    stage: int, launched: tuple[Path, list[dict[str, Any]]]
) -> None:
    for rank in launched[1]:
        found = rank[f"stage {stage}"]
        assert found["calls while present"] == 0
        for logits in found["present"]:
            assert torch.equal(logits, found["streamed"])


@stages
def test_what_rank_0_cannot_write_is_an_error_on_both(
    stage: int, launched: tuple[Path, list[dict[str, Any]]]
) -> None:
    errors = [rank[f"stage {stage}"]["error"] for rank in launched[1]]
    assert "Not a directory" in errors[0]
    assert errors[1].startswith("rank 0 could not write")
    assert "Not a directory" in errors[1]
    assert_same_tensors(
        launched[1][0][f"stage {stage}"]["after"], launched[1][1][f"stage {stage}"]["after"]
    )


@pytest.mark.slow
def test_a_rank_that_stays_away_from_a_full_state_is_named(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(2):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(tmp_path), str(tmp_path), "away"],
                env=os.environ
                | place
                | {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "PYTHONPATH": str(SCRIPT.parents[1]),
                },
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = ranks[0].communicate(timeout=120)[1].strip().splitlines()[-1]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode != 0
    assert "gathering embed.weight failed on rank 0" in said
    assert f"Rank 1 (process {ranks[1].pid} on " in said
    assert "did not come to it" in said
    for folder in tmp_path.glob("tiermem-*"):
        shutil.rmtree(folder)
