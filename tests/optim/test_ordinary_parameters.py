"""Does the optimizer step ordinary parameters as torch's does?"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn

import tiermem
from tiermem import Precision

RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    ("AdamW", {"amsgrad": True, "maximize": True, "weight_decay": 0.0}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("kind", "options"), RECIPES)
def test_fp32_parameters_follow_torch(kind: str, options: dict[str, Any]) -> None:
    losses, weights = [], []
    for module in (tiermem, torch.optim):
        model = seeded(models.ShortTower)
        losses.append(
            train_steps(
                model, getattr(module, kind)(model.parameters(), lr=1e-3, **options), range(10)
            )
        )
        weights.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=2e-6)


def test_lion_moves_along_the_sign_of_the_interpolated_momentum() -> None:
    param = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optim = tiermem.Lion([param], lr=0.1, weight_decay=0.5)
    for grads, wanted in (([1.0, -1.0, 0.0], [0.85, -1.8, 2.85]), ([-0.05, 0.0, 2.0], None)):
        param.grad = torch.tensor(grads)
        optim.step()
        if wanted is not None:
            torch.testing.assert_close(param.detach(), torch.tensor(wanted))
    # momentum 0.01 * 1 outweighs 0.1 * -0.05 in the first element: 0.9 * 0.01 - 0.005 > 0
    torch.testing.assert_close(param.detach()[0], torch.tensor(0.85 * 0.95 - 0.1))
    assert set(optim.state[param]) == {"step", "exp_avg"}


def test_states_lie_under_torchs_names_with_a_master_for_low_precision() -> None:
    low, full = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))
    optim = tiermem.AdamW([low, full])
    (low.float().sum() + full.sum()).backward()
    optim.step()
    assert set(optim.state[full]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optim.state[low]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert optim.state[low]["master"].dtype is torch.float32


def test_split_masters_are_the_fp32_ones() -> None:
    masters = []
    for precision in (Precision(), Precision(master="split")):
        numbers = torch.Generator().manual_seed(3)
        param = nn.Parameter(torch.randn(7, 501, generator=numbers).bfloat16())
        optim = tiermem.AdamW([param], lr=1e-2, precision=precision)
        for _ in range(50):
            param.grad = torch.randn(7, 501, generator=numbers).bfloat16()
            optim.step()
        masters.append(optim.state_dict()["state"][0]["master"])
    assert torch.equal(*masters)


@pytest.mark.parametrize(
    ("preset", "num_bytes"),
    [("exact", 12 * 64), ("compact", 6 * 64), ("bf16", 4 * 64), ("tiny", 4 * 64 + 2)],
)
def test_states_take_the_bytes_of_their_preset(preset: str, num_bytes: int) -> None:
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optim = tiermem.AdamW([param], precision=preset)
    param.sum().backward()
    optim.step()
    assert sum(t.nbytes for name, t in optim.state[param].items() if name != "step") == num_bytes


@pytest.mark.parametrize("preset", ["compact", "bf16", "tiny"])
def test_every_preset_trains(preset: str) -> None:
    losses = []
    for precision in ("exact", preset):
        model = seeded(models.ShortTower).bfloat16()
        optim = tiermem.AdamW(model.parameters(), lr=3e-3, precision=precision)
        for _ in range(12):
            optim.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            optim.step()
        losses.append(loss.item())
    assert losses[0] < 3.0  # from log(61) = 4.1
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_stochastic_rounding_depends_on_seed_and_name_alone() -> None:
    def weight(precision: Precision, name: str) -> torch.Tensor:
        param = nn.Parameter(torch.full((999,), 1.001, dtype=torch.bfloat16))
        optim = tiermem.SGD([(name, param)], lr=1e-4, precision=precision)
        param.grad = torch.ones_like(param)
        optim.step()
        return param.detach()

    own = Precision(master="bf16", moments="bf16")
    assert torch.equal(weight(own, "a"), weight(own, "a"))
    assert not torch.equal(weight(own, "a"), weight(own, "b"))
    assert not torch.equal(
        weight(own, "a"), weight(Precision(master="bf16", moments="bf16", seed=1), "a")
    )


def test_parameters_that_are_not_contiguous_follow_torch() -> None:
    ours, theirs = (
        nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).t())
        for _ in "12"
    )
    optims = tiermem.AdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    for param, optim in zip((ours, theirs), optims, strict=True):
        for _ in range(3):
            param.grad = None
            (param.square().sum() + param[0].sum()).backward()
            optim.step()
    assert not ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_empty_and_single_elements_are_stepped() -> None:
    empty, single = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.0))
    optim = tiermem.AdamW([empty, single], lr=0.1, precision="tiny")
    (single.square() + empty.sum()).backward()
    optim.step()
    assert single.item() < 2.0
    again = tiermem.AdamW([empty, single], precision="tiny")
    again.load_state_dict(optim.state_dict())


def test_a_gradient_norm_is_clipped_and_the_scale_taken_out() -> None:
    ours, theirs = (nn.ParameterList([torch.ones(70000), torch.ones(3, 5)]) for _ in "12")
    optim, twin = tiermem.SGD(ours, lr=1.0), torch.optim.SGD(theirs, lr=1.0)
    for params, scale in ((ours, 1024.0), (theirs, 1.0)):
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, scale * (i + 1))
    optim.step(scale=1024.0, max_norm=2.0)
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 2.0)
    twin.step()
    assert optim.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("preset", ["exact", "compact", "bf16", "tiny"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_overflow_leaves_every_state_untouched(preset: str, bad: float) -> None:
    model = seeded(models.ShortTower).bfloat16()
    optim = tiermem.AdamW(model.parameters(), lr=1e-2, precision=preset)
    train_steps(model, optim, range(2))
    before = copy.deepcopy((model.state_dict(), [dict(s) for s in optim.state.values()]))
    loss_of(model, 2).backward()
    model.head.weight.grad[3, 5] = bad
    optim.step(scale=8.0)
    assert optim.was_skipped
    assert_same_tensors(dict(before[0]), dict(model.state_dict()))
    for was, state in zip(before[1], optim.state.values(), strict=True):
        assert_same_tensors(was, dict(state))


def test_a_copied_or_unpickled_optimizer_goes_on() -> None:
    model = seeded(models.ShortTower).bfloat16()
    optim = tiermem.AdamW(model.parameters(), lr=1e-2, precision="compact")
    train_steps(model, optim, range(2))
    other, resumed = pickle.loads(pickle.dumps((model, optim)))
    assert train_steps(other, resumed, range(2, 4)) == train_steps(model, optim, range(2, 4))
    other, resumed = pickle.loads(pickle.dumps((model, optim)))
    kept = []
    for each, module in ((optim, model), (resumed, other)):
        each.state.clear()  # masters outlive it
        train_steps(module, each, [4])
        kept.append({str(i): entry["master"] for i, entry in each.state_dict()["state"].items()})
    assert_same_tensors(*kept)


def test_schedulers_and_groups_are_torchs() -> None:
    losses = []
    for module in (tiermem, torch.optim):
        model = seeded(models.ShortTower)
        weights, others = (
            [p for p in model.parameters() if (p.ndim > 1) == is_matrix]
            for is_matrix in (True, False)
        )
        optim = module.AdamW(
            [{"params": weights, "weight_decay": 0.3}, {"params": others[:2], "lr": 3e-3}], lr=1e-3
        )
        optim.add_param_group({"params": others[2:], "weight_decay": 0.0})
        schedule = torch.optim.lr_scheduler.OneCycleLR(optim, 1e-2, total_steps=8)
        losses.append([])
        for step in range(8):
            losses[-1] += train_steps(model, optim, [step])
            schedule.step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


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
