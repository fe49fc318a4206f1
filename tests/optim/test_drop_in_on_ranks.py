"""Is tiermem.AdamW a drop-in for torch's under DDP and FSDP2, wherever its states rest, and does
DCP save and open them?

One launch on two ranks trains and saves every case (drop_in_on_ranks.py), one on a single rank
opens what was saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in_on_ranks import CASES, HOMES, KINDS
from launch import asked, launch
from programs.twins import assert_same_tensors

HERE = Path(__file__).parent

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Found, Found]:
    """What two ranks trained, and what one opened."""
    nvme, saved = tmp_path_factory.mktemp("nvme"), tmp_path_factory.mktemp("saved")
    script, words = HERE / "drop_in_on_ranks.py", (str(nvme), str(saved))
    compared = [f"{kind}, {home}" for kind in asked(request, "kind") for home in HOMES]
    cases = sorted({*compared, *asked(request, "case")})
    trained = launch(script, 2, tmp_path_factory.mktemp("trained"), *words, "train", *cases)
    return trained, launch(script, 1, tmp_path_factory.mktemp("opened"), *words, "open", *cases)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_torchs(case: str, launched: tuple[Found, Found]) -> None:
    kind = case.split(", ")[0]
    for rank in launched[0]:
        mine, theirs = rank[case], rank[f"{kind}, torch"]
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-6)
        # 4 ulp of the weight, or 2 ulp of 1.0 for weights near zero
        torch.testing.assert_close(mine["weights"], theirs["weights"], rtol=2**-21, atol=2**-22)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_changes_no_bit(kind: str, launched: tuple[Found, Found]) -> None:
    for rank in launched[0]:
        expected = rank[f"{kind}, beside"]
        for home in ("host", "nvme"):
            assert rank[f"{kind}, {home}"]["losses"] == expected["losses"]
            assert torch.equal(rank[f"{kind}, {home}"]["went_on"], expected["went_on"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_one_rank_opens_what_two_saved(case: str, launched: tuple[Found, Found]) -> None:
    [alone] = launched[1]
    assert torch.equal(alone[case]["weights"], launched[0][0][case]["weights"])
    assert_same_tensors(alone[case]["states"], launched[0][0][case]["states"])
    assert int(alone[case]["states"]["0.step"]) == 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_clips_sees_the_norm_of_all_ranks(
    kind: str, launched: tuple[Found, Found]
) -> None:
    for rank in launched[0]:
        assert rank[f"{kind}, norm"] == pytest.approx(1.0, rel=1e-6)


def test_states_that_were_gathered_whole_come_back(launched: tuple[Found, Found]) -> None:
    for rank in launched[0]:
        assert all(rank[word] for word in ("ddp, whole", "fsdp2, whole", "fsdp2, beside, whole"))


def test_stochastic_rounding_depends_on_the_place_in_the_whole_parameter(
    launched: tuple[Found, Found],
) -> None:
    """Equal gradients give equal bits on any number of ranks."""
    on_two, [alone] = launched
    for kind in KINDS:
        assert torch.equal(on_two[0][f"{kind}, dithered"], alone["ddp, dithered"])
        assert torch.equal(alone[f"{kind}, dithered"], alone["ddp, dithered"])


def test_matrices_that_are_cut_over_ranks_are_refused(launched: tuple[Found, Found]) -> None:
    for rank in launched[0]:
        assert "Muon steps whole matrices: put it in a group with use_muon=False" in rank["muon"]
