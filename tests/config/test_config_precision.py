"""bf16, fp16 and its loss scale, the optimizer section."""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.config import ConfigError, OptimizerConfig, load_config


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "true"}}, "bf16"),
    ],
)
def test_precision_follows_the_section_that_is_on(config: dict[str, Any], precision: str) -> None:
    assert load_config(config).precision == precision


def test_both_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bf16\.enabled and fp16\.enabled are both true"):
        load_config({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


@pytest.mark.parametrize("value", [True, "high", float("inf"), float("nan"), -1])
def test_loss_scale_is_a_finite_number_not_below_zero(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale"):
        load_config({"fp16": {"loss_scale": value}})


@pytest.mark.parametrize("key", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [True, 1.5, float("inf")])
def test_window_and_least_scale_are_whole_numbers(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config({"fp16": {key: value}})


@pytest.mark.parametrize("key", ["loss_scale_window", "min_loss_scale"])
def test_window_and_least_scale_must_be_positive_when_the_scale_is_dynamic(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config({"fp16": {"enabled": True, key: 0}})
    assert (
        load_config({"fp16": {"enabled": True, "loss_scale": 128, key: 0}}).fp16.loss_scale == 128
    )
    assert load_config({"fp16": {"enabled": False, key: 0}}).precision == "fp32"


@pytest.mark.parametrize(("scale", "dynamic"), [(0, True), (1024.0, False)])
def test_loss_scale_zero_is_dynamic(scale: float, dynamic: bool) -> None:
    assert load_config({"fp16": {"enabled": True, "loss_scale": scale}}).fp16.is_dynamic is dynamic


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"type": "Adam"}, "AdamW"),
        ({"type": "adamw"}, "AdamW"),
        ({"type": "ADAM", "params": {"adam_w_mode": False}}, "Adam"),
    ],
)
def test_adam_means_adamw_unless_adam_w_mode_is_false(section: dict[str, Any], name: str) -> None:
    assert OptimizerConfig.model_validate(section).name == name


def test_adamw_without_adam_w_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.adam_w_mode"):
        load_config({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}})


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], [0.9, -0.1], 0.9])
def test_betas_are_two_rates_below_one(betas: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.betas"):
        load_config({"optimizer": {"type": "Adam", "params": {"betas": betas}}})


def test_optimizer_without_a_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.type: is missing"):
        load_config({"optimizer": {"params": {"lr": 1}}})


def test_a_first_scale_that_no_float_holds_is_refused() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 1024}
    with pytest.raises(ConfigError, match=r"initial_scale_power: 1024 given; .* equal to 1023"):
        load_config({"train_batch_size": 1, "fp16": fp16})
