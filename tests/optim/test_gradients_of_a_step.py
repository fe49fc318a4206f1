"""Which gradients does a step take: none of a broken backward, none twice, and what of parameters
without any?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

HOMES = {
    "memory": {},
    "cpu": {"params": Tier.HOST},
    "nvme": {"params": Tier.NVME, "grads": Tier.NVME},
}


@pytest.fixture(params=HOMES)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> OffloadPolicy:
    return OffloadPolicy(paths=[tmp_path], persistence_numel=50, **HOMES[request.param])


def broken(model: nn.Module, number: int, module: nn.Module) -> None:
    """A backward that ends in an exception when it comes to `module`."""
    handle = module.register_full_backward_hook(lambda *_: 1 / 0)
    loss = loss_of(model, number)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()


def assert_trained_as(plain: nn.Module, model: nn.Module, num_steps: int) -> None:
    """The model's weights equal those of its plain twin after so many steps, to the bit."""
    train_steps(plain, tiermem.AdamW(plain.parameters(), lr=1e-2), range(num_steps))
    assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("is_zeroed", [False, True])
@pytest.mark.parametrize("broken_at", [0, 2])
def test_a_broken_backward_leaves_nothing_to_the_next(
    stage: int, is_zeroed: bool, broken_at: int, tmp_path: Path
) -> None:
    model = seeded(models.ShortTower)
    plain = copy.deepcopy(model)
    policy = OffloadPolicy(stage=stage, grads=Tier.NVME, paths=[tmp_path], persistence_numel=50)
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(2))
        broken(model, 7, model.layers[broken_at].up)
        if is_zeroed:
            optim.zero_grad()
        train_steps(model, optim, range(2, 4))
        assert_trained_as(plain, model, num_steps=4)
        del optim


def test_micro_batches_before_a_broken_one_are_forgotten_with_it(policy: OffloadPolicy) -> None:
    model = seeded(models.ShortTower)
    plain = copy.deepcopy(model)
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 5).backward()
        broken(model, 7, model.layers[1].up)
        train_steps(model, optim, range(1))
        assert_trained_as(plain, model, num_steps=1)
        del optim


def test_a_step_right_after_a_broken_backward_raises_and_changes_nothing(
    policy: OffloadPolicy,
) -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(1))
        before = dict(model.state_dict())
        broken(model, 7, model.layers[1].up)
        with pytest.raises(RuntimeError, match="last backward ended in an exception"):
            optim.step()
        assert_same_tensors(before, dict(model.state_dict()))
        train_steps(model, optim, range(1, 2))
        assert optim.grad_norm > 0


# ---- step in backward ----------------------------------------------------------------------------


def test_a_unit_that_was_stepped_in_backward_takes_no_more_gradients(policy: OffloadPolicy) -> None:
    model = seeded(models.ShortTower)
    fields: dict[str, Any] = vars(policy) | {"step_in_backward": True, "grads": None}
    with tiermem.shard(model, OffloadPolicy(**fields)) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(1))
        loss_of(model, 1).backward()
        with pytest.raises(
            RuntimeError, match=r"unit 'head' gets gradients after it was stepped in this backward"
        ):
            loss_of(model, 2).backward()
        assert all(shard.num_steps <= 2 for _, shard in shards.parameters())


def test_a_unit_whose_input_is_a_leaf_is_stepped_with_all_its_gradients() -> None:
    def train(model: nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        model(x).square().mean().backward()
        optim.step()
        return [param.detach().clone() for param in model.parameters()]

    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))

    plain = build()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model = build()
    policy = OffloadPolicy(persistence_numel=0, step_in_backward=True)
    with tiermem.shard(model, policy):
        train(model, tiermem.SGD(model.parameters(), lr=0.1))
        found = list(model.state_dict().values())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# ---- without gradients ---------------------------------------------------------------------------


def test_unused_parameters_are_not_stepped(policy: OffloadPolicy) -> None:
    model = seeded(lambda: models.ShortTower(skips=True))
    with tiermem.shard(model, policy) as shards:
        train_steps(model, tiermem.AdamW(model.parameters(), lr=1e-2), range(2))
        steps = {shard.name: shard.num_steps for _, shard in shards.parameters()}
    assert {name: number for name, number in steps.items() if "layers" in name} == {
        name: 1 if name.startswith("layers.0") else 0 if name.startswith("layers.2") else 2
        for name in steps
        if "layers" in name
    }


@pytest.mark.parametrize("step_in_backward", [False, True])
def test_unused_parameters_are_an_error_that_names_them_when_asked(step_in_backward: bool) -> None:
    model = seeded(lambda: models.ShortTower(skips=True))
    policy = OffloadPolicy(
        ignore_unused=False, persistence_numel=50, step_in_backward=step_in_backward
    )
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        with pytest.raises(
            RuntimeError, match=r"took no part in the loss.*layers\.2\.norm\.weight.*ignore_unused"
        ) as e:
            optim.step()
        assert "layers.1" not in str(e.value)


def test_used_parameters_are_no_error_when_asked(policy: OffloadPolicy) -> None:
    model = seeded(models.ShortTower)
    fields: dict[str, Any] = vars(policy) | {"ignore_unused": False}
    with tiermem.shard(model, OffloadPolicy(**fields)):
        train_steps(model, tiermem.AdamW(model.parameters(), lr=1e-2), range(3))


def test_frozen_parameters_are_not_missed() -> None:
    model = seeded(models.frozen_tower)
    with tiermem.shard(model, OffloadPolicy(ignore_unused=False, persistence_numel=50)):
        train_steps(model, tiermem.AdamW(model.parameters(), lr=1e-2), range(2))
