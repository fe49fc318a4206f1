"""Does a sharded model compute what its plain twin computes?"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from programs.models import Tower
from programs.twins import MasterTwin, loss_of, seeded, train, train_steps

import tiermem
from tiermem import OffloadPolicy, Tier

HOMES = [Tier.DEVICE, Tier.HOST, Tier.NVME]
STEPS = 20


def policy_at(home: Tier, folder: Path) -> OffloadPolicy:
    return OffloadPolicy(
        params=home, optim=home, paths=[folder], persistence_numel=100, tile_numel=4096
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", HOMES)
def test_fp32_adamw_follows_torch_to_one_in_a_million(home: Tier, tmp_path: Path) -> None:
    model = seeded(Tower)
    plain = copy.deepcopy(model)
    expected = train_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(STEPS))
    result = train(model, policy_at(home, tmp_path), STEPS)
    assert result.losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", HOMES)
def test_fp32_adam_with_l2_follows_torch_to_one_in_a_million(home: Tier, tmp_path: Path) -> None:
    model = seeded(Tower)
    plain = copy.deepcopy(model)
    expected = train_steps(
        plain, torch.optim.Adam(plain.parameters(), lr=1e-3, weight_decay=0.1), range(STEPS)
    )
    result = train(
        model, policy_at(home, tmp_path), STEPS, optimizer=tiermem.Adam, lr=1e-3, weight_decay=0.1
    )
    assert result.losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("home", HOMES)
def test_low_precision_with_fp32_master_equals_a_handwritten_twin_to_the_bit(
    home: Tier, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(Tower).to(dtype)
    twin = MasterTwin(copy.deepcopy(model), lr=1e-2, decay=0.01, max_norm=0.5)
    expected = [stepped(twin, number) for number in range(STEPS)]
    result = train(model, policy_at(home, tmp_path), STEPS, max_norm=0.5)
    assert result.losses == expected
    for name, param in twin.model.named_parameters():
        assert torch.equal(result.weights[name], param), name
        assert torch.equal(result.states[f"{name}.master"], twin.masters[param].flatten()), name
        assert torch.equal(result.states[f"{name}.exp_avg_sq"], twin.second[param].flatten()), name


def stepped(twin: MasterTwin, number: int) -> float:
    loss = loss_of(twin.model, number)
    loss.backward()
    twin.step()
    return loss.item()
