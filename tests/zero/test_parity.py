"""Does a sharded model compute what its plain twin computes?"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from twins import Tower, loss_of, seeded, train, train_plain

import tiermem
from tiermem import OffloadPolicy, Tier

HOMES = [Tier.DEVICE, Tier.HOST, Tier.NVME]
STEPS = 20


def policy_at(home: Tier, folder: Path) -> OffloadPolicy:
    return OffloadPolicy(params=home, optim=home, paths=[folder], persistence_numel=100, tile_numel=4096)


@pytest.mark.parametrize("home", HOMES)
def test_fp32_adamw_follows_torch_to_one_in_a_million(home: Tier, tmp_path: Path) -> None:
    model = seeded(Tower)
    plain = copy.deepcopy(model)
    expected = train_plain(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), STEPS)
    result = train(model, policy_at(home, tmp_path), STEPS)
    assert result.losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("home", HOMES)
def test_fp32_adam_with_l2_follows_torch_to_one_in_a_million(home: Tier, tmp_path: Path) -> None:
    model = seeded(Tower)
    plain = copy.deepcopy(model)
    expected = train_plain(plain, torch.optim.Adam(plain.parameters(), lr=1e-3, weight_decay=0.1), STEPS)
    result = train(model, policy_at(home, tmp_path), STEPS, optimizer=tiermem.Adam, lr=1e-3, weight_decay=0.1)
    assert result.losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("home", HOMES)
def test_low_precision_with_fp32_master_equals_a_handwritten_twin_to_the_bit(
    home: Tier, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(Tower).to(dtype)
    twin = MasterTwin(copy.deepcopy(model), lr=1e-2, decay=0.01, max_norm=0.5)
    expected = [twin.step(number) for number in range(STEPS)]
    result = train(model, policy_at(home, tmp_path), STEPS, max_norm=0.5)
    assert result.losses == expected
    for name, param in twin.model.named_parameters():
        assert torch.equal(result.weights[name], param), name
        assert torch.equal(result.states[f"{name}.master"], twin.masters[param].flatten()), name
        assert torch.equal(result.states[f"{name}.exp_avg_sq"], twin.second[param].flatten()), name


class MasterTwin:
    """AdamW on fp32 masters of a low-precision model, in plain tensor operations."""

    def __init__(self, model: nn.Module, lr: float, decay: float, max_norm: float) -> None:
        self.model, self.lr, self.decay, self.max_norm = model, lr, decay, max_norm
        self.masters = {p: p.detach().float() for p in model.parameters()}
        self.first = {p: torch.zeros_like(m) for p, m in self.masters.items()}
        self.second = {p: torch.zeros_like(m) for p, m in self.masters.items()}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, number: int, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> float:
        with torch.enable_grad():
            loss = loss_of(self.model, number)
            loss.backward()
        self.num_steps += 1
        squares = [p.grad.double().square().sum().item() for p in self.model.parameters()]
        clip = min(1.0, self.max_norm / (math.sqrt(math.fsum(squares)) + 1e-6))
        for p, master in self.masters.items():
            grad = p.grad.float() * clip
            first, second = self.first[p], self.second[p]
            master *= 1.0 - self.lr * self.decay
            first += (grad - first) * (1.0 - beta1)
            second.copy_(second * beta2 + grad * grad * (1.0 - beta2))
            root = second.double().sqrt().float()  # torch's own fp32 sqrt (MKL) is an ulp off in one of six
            denominator = root * (1.0 / math.sqrt(1.0 - beta2**self.num_steps)) + eps
            master -= (self.lr / (1.0 - beta1**self.num_steps)) * (first / denominator)
            p.copy_(master)
            p.grad = None
        return loss.item()
