"""Does a checkpoint open on another number of ranks, to the bit, and do ranks fail together?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from programs.models import Tower
from programs.twins import assert_same_tensors, seeded
from resume_on_ranks import batch
from torch.nn import functional as F

import tiermem


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    nvme = tmp_path_factory.mktemp("nvme")
    return launch(
        Path(__file__).with_name("resume_on_ranks.py"),
        4,
        tmp_path_factory.mktemp("ranks"),
        str(nvme),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["fp32", "compact"])
def test_states_pass_from_rank_to_rank_to_the_bit(found: list[Any], way: str) -> None:
    stages = found[0][way]
    assert len(stages["opened"]) == len(stages["stepped"]) - 1
    for saved, opened in zip(stages["stepped"], stages["opened"], strict=False):
        assert_same_tensors(opened, saved)


def test_a_step_on_2_4_1_and_3_ranks_is_four_on_one(found: list[Any]) -> None:
    plain = seeded(Tower, 11)
    optim = tiermem.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        inputs, targets = batch(step, 0, 1)
        F.cross_entropy(plain(inputs).flatten(0, 1).float(), targets.flatten()).backward()
        optim.step()
        optim.zero_grad()
    last = found[0]["fp32"]["stepped"][3]
    for name, param in copy.deepcopy(plain).named_parameters():
        assert torch.allclose(last[f"{name}.weight"], param, rtol=1e-4, atol=2e-5), name
        for state in ("exp_avg", "exp_avg_sq"):
            due = optim.state[plain.get_parameter(name)][state]
            assert torch.allclose(last[f"{name}.{state}"], due, rtol=1e-3, atol=1e-6), (name, state)


def test_what_one_rank_cannot_read_no_rank_trains_on(found: list[Any]) -> None:
    first, second = found[0]["one fails"], found[1]["one fails"]
    assert second["load"].startswith("DamagedState")
    assert "exp_avg of head.weight" in second["load"]
    assert "open it with tag='old'" in second["load"]
    assert "rank 1: DamagedState" in first["load"] or first["load"].startswith("DamagedState")
    for rank in (first, second):
        assert "mixture of two steps" in rank["step"]
        assert rank["older"] == "old"
