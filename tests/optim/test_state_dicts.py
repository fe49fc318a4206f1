"""Do optimizers' state dicts have torch's format both ways, and restore every state to the bit?"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.precision import PRESETS

RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {"maximize": True}),
    ("Adagrad", {"initial_accumulator_value": 0.3, "lr_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.2}),
    ("SGD", {}),
]
Entry = dict[str, torch.Tensor]


def flat(state_dict: dict[str, Any]) -> Entry:
    return {
        f"{number}.{name}": value
        for number, entry in state_dict["state"].items()
        for name, value in entry.items()
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "options"), RECIPES)
@pytest.mark.parametrize("is_ours_first", [True, False])
def test_torch_and_we_continue_each_others_runs(
    kind: str, options: dict[str, Any], is_ours_first: bool
) -> None:
    model = seeded(models.ShortTower)
    before, after = (tiermem, torch.optim) if is_ours_first else (torch.optim, tiermem)
    first = getattr(before, kind)(model.parameters(), lr=1e-3, **options)
    train_steps(model, first, range(3))
    other = copy.deepcopy(model)
    second = getattr(after, kind)(other.parameters(), lr=0.5)  # the groups of the dict are taken
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert train_steps(other, second, range(3, 8)) == pytest.approx(
        train_steps(model, first, range(3, 8)), rel=1e-5
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_resumed_run_is_the_run_to_the_bit(
    preset: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(models.ShortTower).to(dtype)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2, precision=preset)
    train_steps(model, optim, range(3))
    torch.save((model.state_dict(), optim.state_dict()), tmp_path / "saved")
    weights, states = torch.load(tmp_path / "saved", weights_only=True)
    assert all(value.dtype == torch.float32 for value in flat(states).values())
    other = seeded(models.ShortTower, 7).to(dtype)
    resumed = tiermem.AdamW(other.parameters(), precision=preset)
    resumed.load_state_dict(states)
    other.load_state_dict(weights)
    assert_same_tensors(flat(optim.state_dict()), flat(resumed.state_dict()))
    assert train_steps(model, optim, range(3, 6)) == train_steps(other, resumed, range(3, 6))
    assert_same_tensors(dict(model.state_dict()), dict(other.state_dict()))


def test_a_loaded_state_shares_no_memory_with_the_dict() -> None:
    model = seeded(models.ShortTower)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, optim, range(1))
    saved = optim.state_dict()
    other = copy.deepcopy(model)
    resumed = tiermem.AdamW(other.parameters(), lr=1e-2)
    resumed.load_state_dict(saved)
    kept = copy.deepcopy(flat(resumed.state_dict()))
    train_steps(model, optim, range(1, 2))
    assert_same_tensors(kept, flat(resumed.state_dict()))


def test_a_torch_dict_of_low_precision_parameters_starts_masters_from_them() -> None:
    model = seeded(models.ShortTower).bfloat16()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, theirs, range(2))
    for preset in ("exact", "compact"):
        ours = tiermem.AdamW(model.parameters(), precision=preset)
        ours.load_state_dict(theirs.state_dict())
        for number, param in enumerate(model.parameters()):
            assert torch.equal(ours.state_dict()["state"][number]["master"], param.detach().float())


def test_torchs_choice_of_implementation_is_not_taken_over() -> None:
    model = seeded(models.ShortTower)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train_steps(model, theirs, range(2))
    ours = tiermem.AdamW(model.parameters())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["fused"] is None
    train_steps(model, ours, range(2, 3))


def test_the_users_hooks_see_what_torchs_see() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optim = tiermem.AdamW([param], precision="tiny")
    param.grad = torch.ones_like(param)
    optim.step()
    seen: list[Any] = []
    optim.register_state_dict_post_hook(
        lambda _, found: seen.append(found["state"][0]["exp_avg"].dtype)
    )
    optim.register_load_state_dict_pre_hook(
        lambda _, given: seen.append(given["state"][0]["exp_avg"].dtype)
    )
    optim.register_load_state_dict_post_hook(
        lambda each: seen.append(each.state[param]["exp_avg"].dtype)
    )
    optim.load_state_dict(optim.state_dict())
    assert seen == [torch.float32, torch.float32, torch.uint8]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)},
            "no 'exp_avg_sq' for parameter '0', only 'step'",
        ),
        (
            {"step": 1, "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(3)},
            r"has shape \(2,\); the parameter has",
        ),
    ],
)
def test_a_dict_of_another_optimizer_is_refused(entry: dict[str, Any], message: str) -> None:
    optim = tiermem.AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match=message):
        optim.load_state_dict(
            {"state": {0: entry}, "param_groups": optim.state_dict()["param_groups"]}
        )


# ---- sharded -------------------------------------------------------------------------------------


def policy_of(home: Tier, preset: str, tmp_path: Path) -> OffloadPolicy:
    return OffloadPolicy(
        params=home,
        optim=home,
        paths=[tmp_path],
        persistence_numel=50,
        tile_numel=4096,
        precision=Precision.preset(preset),
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_sharded_models_states_are_those_of_the_ordinary_one(
    preset: str, home: Tier, tmp_path: Path
) -> None:
    """Equal keys and values, also where rounding is stochastic: the names are the same, so the
    random numbers are."""
    model = seeded(models.ShortTower).bfloat16()
    plain = copy.deepcopy(model)
    ordinary = tiermem.AdamW(plain.named_parameters(), lr=1e-2, precision=preset)
    train_steps(plain, ordinary, range(3))
    with tiermem.shard(model, policy_of(home, preset, tmp_path)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(3))
        assert_same_tensors(flat(ordinary.state_dict()), flat(optim.state_dict()))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_sharded_run_resumes_to_the_bit(preset: str, home: Tier, tmp_path: Path) -> None:
    policy, model = policy_of(home, preset, tmp_path), seeded(models.ShortTower).bfloat16()
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(3))
        weights, states = copy.deepcopy((model.state_dict(), optim.state_dict()))
        losses = train_steps(model, optim, range(3, 6))
        wanted = dict(model.state_dict())
    for has_begun in (False, True):
        other = seeded(models.ShortTower).bfloat16()
        other.load_state_dict(weights)
        with tiermem.shard(other, policy):
            resumed = tiermem.AdamW(other.parameters())
            if has_begun:
                # what it holds is replaced, what it has read ahead forgotten
                train_steps(other, resumed, range(9, 10))
                # there the weights are the model's own, which may not be replaced behind it
                if preset == "bf16":
                    continue
            resumed.load_state_dict(states)
            assert train_steps(other, resumed, range(3, 6)) == losses
            assert_same_tensors(wanted, dict(other.state_dict()))


@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_a_refused_dict_changes_nothing(home: Tier, is_sharded: bool, tmp_path: Path) -> None:
    """Its last entry cannot be restored."""
    policy, model = policy_of(home, "exact", tmp_path), seeded(models.ShortTower).bfloat16()
    with contextlib.ExitStack() as stack:
        if is_sharded:
            stack.enter_context(tiermem.shard(model, policy))
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        else:
            policy = OffloadPolicy(optim=home, paths=[tmp_path])
            optim = tiermem.AdamW(model.parameters(), lr=1e-2, policy=policy)
            stack.callback(optim.close)
        train_steps(model, optim, range(2))
        before = copy.deepcopy(optim.state_dict())
        wrong = copy.deepcopy(before)
        for entry in wrong["state"].values():
            entry["exp_avg"].zero_()
        last = wrong["state"][max(wrong["state"])]
        last["exp_avg_sq"] = torch.zeros(7)
        with pytest.raises(ValueError, match=r"has shape \(7,\); the parameter has"):
            optim.load_state_dict(wrong)
        assert_same_tensors(flat(before), flat(optim.state_dict()))
        train_steps(model, optim, range(2, 3))


def test_torchs_dict_goes_into_a_sharded_model(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_steps(model, theirs, range(3))
    states = copy.deepcopy(theirs.state_dict())
    other = copy.deepcopy(model)
    losses = train_steps(model, theirs, range(3, 6))
    with tiermem.shard(other, policy_of(Tier.NVME, "exact", tmp_path)):
        ours = tiermem.AdamW(other.parameters())
        ours.load_state_dict(states)
        assert train_steps(other, ours, range(3, 6)) == pytest.approx(losses, rel=1e-5)


def test_a_parameter_that_was_never_stepped_has_no_entry(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model, policy_of(Tier.NVME, "exact", tmp_path)):
        optim = tiermem.AdamW(model.layers[0].parameters())
        assert optim.state_dict()["state"] == {}
        train_steps(model, optim, range(1))
        assert len(optim.state_dict()["state"]) == len(list(model.layers[0].parameters()))


def test_an_optimizer_of_a_sharded_model_is_not_pickled() -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model), pytest.raises(RuntimeError, match=r"use state_dict\(\)"):
        copy.deepcopy(tiermem.AdamW(model.parameters()))
