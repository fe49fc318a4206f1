"""Do checkpoints that commit 47ff4ce wrote open to the bit, and go on to the bit, on as many ranks
as wrote them?

fixtures/checkpoints.tar.xz holds them, and what is to be found in them; saved_before.py is the run
that wrote it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from programs.twins import assert_same_tensors
from saved_before import CLIENT_STATE, PLACES, PRESETS, go_on

pytestmark = pytest.mark.filterwarnings("ignore:moments in bf16 are rounded to nearest")
ARCHIVE = Path(__file__).parent / "fixtures" / "checkpoints.tar.xz"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, unpacked."""
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def check(found: dict[str, Any], due: dict[str, Any]) -> None:
    assert found["client_state"] == CLIENT_STATE
    assert_same_tensors(found["saved"]["states"], due["saved"]["states"])
    assert found["saved"]["counters"] == due["saved"]["counters"]
    assert found["losses"] == due["losses"]
    assert found["end"] == due["end"]
    assert found["after"] == due["after"]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_that_one_rank_saved_opens_and_goes_on(
    saved: Path, tmp_path: Path, preset: str, place: str
) -> None:
    due = torch.load(saved / "1" / "0.pt", weights_only=False)[preset]
    check(go_on(saved / "1" / preset / place, preset, tmp_path / "nvme"), due)


@pytest.mark.slow
def test_steps_that_two_ranks_saved_open_and_go_on(saved: Path, tmp_path: Path) -> None:
    script, out = Path(__file__).with_name("saved_before.py"), tmp_path / "ranks"
    out.mkdir()
    for rank, found in enumerate(launch(script, 2, out, "open", str(saved))):
        due = torch.load(saved / "2" / f"{rank}.pt", weights_only=False)
        for preset in PRESETS:
            for place in PLACES:
                check(found[f"{preset} {place}"], due[preset])
