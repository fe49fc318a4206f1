"""Do frozen parameters that rest as 8-bit blocks take half the bytes, and compute with what the blocks hold, on every tier?"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import twins
import zoo
from torch import nn
from twins import seeded, train_steps

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.zero.quantised import pack, unpack

TIERS = [Tier.DEVICE, Tier.HOST, Tier.NVME]


def policy_of(tier: Tier, path: Path, **fields: object) -> OffloadPolicy:
    settings = {"params": tier, "optim": tier, "paths": [path], "persistence_numel": 50, "quantised_frozen": True}
    return OffloadPolicy(**(settings | fields))  # type: ignore[arg-type]


def rounded(model: nn.Module) -> nn.Module:
    """A copy whose large frozen parameters hold what their blocks do."""
    twin = copy.deepcopy(model)
    for param in twin.parameters():
        if not param.requires_grad and param.numel() > 50:
            flat = param.detach().reshape(-1)
            param.data = unpack(pack(flat), flat.numel(), torch.empty_like(flat)).view(param.shape)
    return twin


@pytest.mark.parametrize("tier", TIERS)
def test_training_is_that_of_a_model_with_rounded_frozen_weights(tier: Tier, tmp_path: Path) -> None:
    model = seeded(zoo.frozen_tower)
    twin = rounded(model)
    twin_optim = tiermem.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    with tiermem.shard(model, policy_of(tier, tmp_path)) as shards:
        assert any(live.unit.is_packed for live in shards.units)
        optim = tiermem.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(3):
            losses = [train_steps(each, by, [step]) for each, by in ((model, optim), (twin, twin_optim))]
            assert losses[0] == losses[1]
        weights = copy.deepcopy(model.state_dict())
    for name, value in twin.state_dict().items():
        assert torch.equal(weights[name], value), name


def test_frozen_parameters_at_rest_take_about_half_of_bf16(tmp_path: Path) -> None:
    sizes = {}
    for is_quantised in (False, True):
        model = seeded(lambda: twins.Tower(width=256, inner=512)).to(torch.bfloat16).requires_grad_(False)
        model.head.requires_grad_(True)
        with tiermem.shard(model, policy_of(Tier.NVME, tmp_path, quantised_frozen=is_quantised)) as shards:
            rows = [row.num_bytes for row in shards.plan.rows if (row.what, row.tier) == ("parameters", Tier.NVME)]
            trained = sum(live.unit.shard_bytes for live in shards.units if live.unit.is_trainable)
            sizes[is_quantised] = sum(rows) - trained
    assert 0.53 < sizes[True] / sizes[False] < 0.55  # 0.53125, and whole pages


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_values_that_are_put_come_back_from_their_blocks(tier: Tier, tmp_path: Path) -> None:
    model = seeded(zoo.frozen_tower)
    with tiermem.shard(model, policy_of(tier, tmp_path)) as shards:
        param = model.layers[2].up.weight
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(3))
        shards.replace(param, value)
        flat = value.reshape(-1)
        expected = unpack(pack(flat), flat.numel(), torch.empty_like(flat)).view(value.shape)
        assert torch.equal(shards.weight(param), expected)
