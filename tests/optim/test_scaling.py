"""Does the loss scale move as the documented fp16 keys say?"""

from __future__ import annotations

import pytest

from tiermem.config.precision import Fp16Config
from tiermem.optim.rules import LossScaler


def scales(overflows: str, **keys: object) -> list[float]:
    """The scale before each step; `x` in `overflows` is a step that overflowed, `.` one that did
    not."""
    config = Fp16Config.model_validate({"enabled": True} | keys)
    scaler, found = LossScaler(config, config.enabled), []
    for step in overflows:
        found.append(scaler.scale)
        scaler.update(step == "x")
    return [*found, scaler.scale]


def test_disabled_is_one_for_ever() -> None:
    assert scales("..x.", enabled=False) == [1.0] * 5


def test_static_scale_stays() -> None:
    assert scales("..x.", loss_scale=128) == [128.0] * 5


def test_dynamic_scale_halves_at_once_without_hysteresis() -> None:
    assert scales("xx..", initial_scale_power=4, hysteresis=1) == [16, 8, 4, 4, 4]


def test_hysteresis_forgives_the_first_overflows() -> None:
    assert scales("xxx", initial_scale_power=4, hysteresis=3) == [16, 16, 16, 8]


@pytest.mark.parametrize(("is_on", "last"), [(True, 16), (False, 4)])
def test_consecutive_hysteresis_forgives_again_after_a_good_step(is_on: bool, last: int) -> None:
    assert (
        scales("x.x.x.", initial_scale_power=4, hysteresis=2, consecutive_hysteresis=is_on)[-1]
        == last
    )


def test_scale_doubles_after_a_window_without_overflow() -> None:
    assert scales("..x....", initial_scale_power=4, loss_scale_window=3, hysteresis=1) == [
        16,
        16,
        16,
        8,
        8,
        8,
        16,
        16,
    ]


def test_scale_never_falls_below_its_minimum() -> None:
    assert scales("x.x", initial_scale_power=2, hysteresis=2, min_loss_scale=2) == [4, 4, 4, 2]


def test_an_overflow_at_the_least_scale_is_an_error_and_changes_nothing() -> None:
    scaler = LossScaler(
        Fp16Config.model_validate({"enabled": True, "initial_scale_power": 1, "hysteresis": 2}),
        True,
    )
    for _ in range(2):
        scaler.update(True)
    before = scaler.state_dict()
    for _ in range(2):
        with pytest.raises(
            FloatingPointError, match=r"least loss scale, 1 \(fp16.min_loss_scale\)"
        ):
            scaler.update(True)
    assert scaler.state_dict() == before
    scaler.update(False)  # a step that does not overflow goes on


def test_the_first_overflows_at_the_least_scale_are_forgiven_by_the_hysteresis() -> None:
    assert scales("x.", initial_scale_power=0, hysteresis=2) == [1, 1, 1]


@pytest.mark.parametrize("power", [0, 16, 24])
def test_scale_starts_at_the_power_given(power: int) -> None:
    assert scales("", initial_scale_power=power) == [2.0**power]


def test_a_loss_scale_goes_on_from_its_state() -> None:
    overflows = [bool(step % 7 == 3 or step % 11 == 5) for step in range(60)]
    config = Fp16Config.model_validate({"enabled": True, "loss_scale_window": 4, "hysteresis": 3})
    whole, first, second = (LossScaler(config, True) for _ in range(3))
    scales = []
    for has_overflowed in overflows:
        whole.update(has_overflowed)
        scales.append(whole.scale)
    for has_overflowed in overflows[:29]:
        first.update(has_overflowed)
    second.load_state_dict(first.state_dict())
    for step in range(29, 60):
        second.update(overflows[step])
        assert second.scale == scales[step]
    with pytest.raises(ValueError, match="scale, hysteresis_left and num_good"):
        second.load_state_dict({"scale": 0.0})


def test_a_static_scale_stays_what_the_config_says() -> None:
    saved = LossScaler(Fp16Config.model_validate({"enabled": True}), True).state_dict()
    scaler = LossScaler(Fp16Config.model_validate({"enabled": True, "loss_scale": 128}), True)
    scaler.load_state_dict(saved)
    assert scaler.scale == 128.0
