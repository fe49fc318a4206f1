"""Does the optimizer step ordinary parameters as torch's does?"""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from torch import nn
from twins import assert_same_tensors, seeded

import tiermem


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ordinary_fp32_parameters_follow_torch(kind: str, decay: float) -> None:
    losses = []
    for module in (tiermem, torch.optim):
        model = seeded(zoo.Tower)
        optim = getattr(module, kind)(model.parameters(), lr=1e-3, weight_decay=decay, betas=(0.8, 0.95), eps=1e-6)
        for step in range(10):
            loss = zoo.loss_of(model, step)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
    assert losses[:10] == pytest.approx(losses[10:], rel=1e-6)


def test_states_lie_under_torchs_names_with_a_master_for_low_precision() -> None:
    low, full = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))
    optim = tiermem.AdamW([low, full])
    (low.float().sum() + full.sum()).backward()
    optim.step()
    assert set(optim.state[full]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optim.state[low]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert optim.state[low]["master"].dtype is torch.float32


def test_state_dict_goes_into_another_optimizer() -> None:
    model = seeded(zoo.Tower)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    zoo.loss_of(model, 0).backward()
    optim.step()
    other = copy.deepcopy(model)
    resumed = tiermem.AdamW(other.parameters(), lr=1e-2)
    resumed.load_state_dict(copy.deepcopy(optim.state_dict()))  # torch shares the tensors otherwise
    for each, stepped in ((model, optim), (other, resumed)):
        stepped.zero_grad()
        zoo.loss_of(each, 1).backward()
        stepped.step()
    assert_same_tensors(dict(model.state_dict()), dict(other.state_dict()))


def test_what_cannot_be_stepped_is_refused() -> None:
    param = nn.Parameter(torch.ones(4, 4).t()[:, :2])
    optim = tiermem.AdamW([param])
    param.sum().backward()
    with pytest.raises(ValueError, match="contiguous"):
        optim.step()


def test_a_closure_computes_the_loss() -> None:
    param = nn.Parameter(torch.ones(2))
    optim = tiermem.AdamW([param], lr=0.1)

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optim.step(closure).item() == 2.0
    assert (param < 1).all()
