"""Which optimizers the section knows, their settings, and how many moments the plan makes room
for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tiermem import OffloadPolicy, Tier
from tiermem.config import ConfigError, OptimizerConfig, load_config
from tiermem.engine.choice import KINDS
from tiermem.optimizers import PARAMS


def problems(section: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config({"optimizer": section})
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize("name", PARAMS)
def test_every_optimizer_is_known_in_any_case(name: str) -> None:
    for spelling in (name, name.lower(), name.upper()):
        assert OptimizerConfig.model_validate({"type": spelling}).type == name


@pytest.mark.parametrize(
    ("given", "near"),
    [("AdaGrd", "Adagrad"), ("adamm", "Adam"), ("Mounn", "Muon"), ("lyon", "Lion")],
)
def test_an_unknown_optimizer_names_the_nearest(given: str, near: str) -> None:
    said = problems({"type": given})["optimizer.type"]
    assert f"did you mean {near}?" in said
    assert all(f"'{name}'" in said for name in PARAMS)


@pytest.mark.parametrize("name", ["Lamb", "OneBitAdam", "RMSprop"])
def test_an_optimizer_that_does_not_exist_here_is_refused(name: str) -> None:
    said = problems({"type": name, "params": {"max_coeff": 1}})["optimizer.type"]
    assert f"allowed is '{next(iter(PARAMS))}', " in said


@pytest.mark.parametrize(
    ("section", "count"),
    [
        ({"type": "Adam"}, 2),
        ({"type": "AdamW", "params": {"amsgrad": True}}, 3),
        ({"type": "Adagrad"}, 1),
        ({"type": "Lion"}, 1),
        ({"type": "SGD"}, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 1),
        ({"type": "Muon"}, 2),
    ],
)
def test_the_plan_makes_room_for_the_moments(section: dict[str, Any], count: int) -> None:
    assert load_config({"optimizer": section}).policy().num_moments == count


def test_room_for_two_moments_when_no_optimizer_is_named() -> None:
    assert load_config({}).policy().num_moments == 2


@pytest.mark.parametrize(
    ("kind", "key", "near"),
    [
        ("SGD", "momentun", "optimizer.params.momentum"),
        ("Adam", "beta", "optimizer.params.betas"),
        ("Lion", "weight_dekay", "optimizer.params.weight_decay"),
        ("Adagrad", "lr_decai", "optimizer.params.lr_decay"),
    ],
)
def test_an_unknown_setting_names_the_nearest_of_this_optimizer(
    kind: str, key: str, near: str
) -> None:
    said = problems({"type": kind, "params": {key: 1}})[f"optimizer.params.{key}"]
    assert f"unknown key of {kind}; did you mean {near}?" in said


@pytest.mark.parametrize(
    ("kind", "key"), [("Adam", "momentum"), ("Lion", "eps"), ("SGD", "betas"), ("Muon", "maximize")]
)
def test_a_setting_of_another_optimizer_is_refused(kind: str, key: str) -> None:
    assert (
        f"unknown key of {kind}"
        in problems({"type": kind, "params": {key: 1}})[f"optimizer.params.{key}"]
    )


@pytest.mark.parametrize("kind", PARAMS)
def test_errors_of_settings_name_their_path(kind: str) -> None:
    assert (
        "greater than or equal to 0"
        in problems({"type": kind, "params": {"lr": -1}})["optimizer.params.lr"]
    )


def test_nesterov_needs_momentum() -> None:
    assert (
        "momentum above 0"
        in problems({"type": "SGD", "params": {"nesterov": True}})["optimizer.params.nesterov"]
    )


@pytest.mark.parametrize("key", ["amsgrad", "maximize"])
def test_what_changes_the_step_reaches_the_optimizer(key: str) -> None:
    section = OptimizerConfig.model_validate({"type": "Adam", "params": {key: True}})
    assert section.params.settings()[key] is True


@pytest.mark.parametrize(
    ("kind", "params", "meant"),
    [
        ("Lion", {}, {"lr": 1e-3, "betas": (0.9, 0.999)}),
        ("Muon", {}, {"lr": 0.02, "muon_lr": None, "adam_lr": 3e-4, "eps": 1e-10}),
        ("Muon", {"muon_lr": 0.1}, {"adam_lr": 3e-4}),
        ("Muon", {"lr": 0.1}, {"lr": 0.1, "adam_lr": None}),
        ("Muon", {"adam_lr": 0.1}, {"lr": 0.02, "adam_lr": 0.1}),
        ("AdamW", {"torch_adam": False}, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True}, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "weight_decay": "auto"}, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, {"weight_decay": 0.0}),
        ("AdamW", {"torch_adam": True, "weight_decay": 0}, {"weight_decay": 0.0}),
    ],
)
def test_what_is_not_set_is_deepspeeds_default(
    kind: str, params: dict[str, Any], meant: dict[str, Any]
) -> None:
    settings = OptimizerConfig.model_validate({"type": kind, "params": params}).params.settings()
    assert {key: settings[key] for key in meant} == meant


@pytest.mark.parametrize("name", sorted({*PARAMS} - {"Muon"}))  # the engine reads its rates
def test_every_setting_is_an_argument_of_the_optimizer(name: str) -> None:
    section = OptimizerConfig.model_validate({"type": name})
    assert set(section.params.settings()) <= set(
        inspect.signature(KINDS[section.name].__init__).parameters
    )


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), "half"])
def test_a_ratio_that_is_no_part_is_one_error_with_its_key(ratio: Any) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    with pytest.raises(ConfigError, match=r"zero_optimization\.offload_optimizer\.ratio") as error:
        load_config({"zero_optimization": zero})
    assert len(error.value.problems) == 1
    if not isinstance(ratio, str):
        with pytest.raises(
            ValueError,
            match=r"optim_ratio is .*; it is the offloaded part of the states, from 0 to 1",
        ):
            OffloadPolicy(optim=Tier.HOST, optim_ratio=ratio)
