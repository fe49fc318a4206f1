"""torch_autocast: alone and together with bf16 and fp16; the names of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tiermem.config import ConfigError, load_config


def problems(raw: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize("sections", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}])
@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "bf16"), ("torch.float16", "fp16"), (None, None)]
)
def test_autocast_goes_with_every_precision(
    sections: dict[str, Any], dtype: str | None, name: str | None
) -> None:
    config = load_config({**sections, "torch_autocast": {"enabled": True, "dtype": dtype}})
    assert (config.torch_autocast.enabled, config.torch_autocast.dtype) == (True, name)


def test_autocast_to_fp32_is_refused() -> None:
    said = problems({"torch_autocast": {"enabled": True, "dtype": "fp32"}})["torch_autocast.dtype"]
    assert "allowed are bf16 and fp16" in said


def test_safe_modules_are_linear_and_convolutions_by_default() -> None:
    classes = load_config({"torch_autocast": {"enabled": True}}).torch_autocast.safe_classes
    assert classes == (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def test_safe_modules_by_name() -> None:
    names = ["torch.nn.Linear", "torch.nn.modules.sparse.Embedding"]
    config = load_config(
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": names}}
    )
    assert config.torch_autocast.safe_classes == (nn.Linear, nn.Embedding)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch.nn.Liner", "did you mean torch.nn.Linear?"),
        ("torch.mm.Linear", "torch.mm cannot be imported"),
        ("Linear", "the full path of a class, such as 'torch.nn.Linear'"),
        ("torch.nn.functional", "no class of modules"),
        ("torch.nn.Parameter", "no class of modules"),
    ],
)
def test_a_name_of_no_module_class_is_refused(name: str, said: str) -> None:
    raw = {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": [name]}}
    found = problems(raw)["torch_autocast.lower_precision_safe_modules"]
    assert repr(name) in found
    assert said in found
    assert not load_config(
        {"torch_autocast": {"lower_precision_safe_modules": [name]}}
    ).torch_autocast.enabled


def test_names_are_strings() -> None:
    raw = {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": [torch.nn.Linear]}}
    assert any(
        path.startswith("torch_autocast.lower_precision_safe_modules") for path in problems(raw)
    )


def test_two_dtypes_for_one_reduction_are_refused() -> None:
    autocast = {
        "enabled": True,
        "dtype": "bf16",
        "lower_precision_safe_modules": ["torch.nn.Linear"],
    }
    said = problems({"torch_autocast": autocast, "communication_data_type": "fp32"})
    assert "communication_data_type is fp32" in said["torch_autocast.lower_precision_safe_modules"]
    assert load_config({"torch_autocast": autocast, "communication_data_type": "bf16"})


def test_fp16_autocast_scales_the_loss_by_the_keys_of_fp16() -> None:
    autocast = {"enabled": True, "dtype": "fp16"}
    assert load_config({"torch_autocast": autocast}).scales_loss
    assert not load_config({"torch_autocast": autocast | {"dtype": "bf16"}}).scales_loss
    assert "fp16.min_loss_scale" in problems(
        {"torch_autocast": autocast, "fp16": {"min_loss_scale": 0}}
    )
