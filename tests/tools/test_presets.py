"""Do the presets have the sizes they are named for?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tiermem.tools.presets import PRESETS, ModelSizes, preset, read_shape, with_layers

transformers: Any = pytest.importorskip("transformers")


def on_meta(shape: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**shape)
        )
    return model


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("151m", 151_012_352),
        ("419m", 419_480_576),
        ("1.3b", 1_345_423_360),
        ("7b", 6_738_415_616),
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("14b", 14_769_689_600),
        ("32b", 32_763_417_600),
        ("70b", 70_553_706_496),
    ],
)
def test_parameter_counts(name: str, num_params: int) -> None:
    assert sum(p.numel() for p in on_meta(preset(name)).parameters()) == num_params


@pytest.mark.parametrize("name", PRESETS)
def test_units_of_the_budget_are_those_of_the_model(name: str) -> None:
    model: Any = on_meta(preset(name))
    sizes = ModelSizes.of(preset(name))
    assert sizes.block_numel == sum(p.numel() for p in model.model.layers[0].parameters())
    assert sizes.vocabulary * sizes.hidden == model.lm_head.weight.numel()


def test_a_preset_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"151m, 419m, 1\.3b, 7b, 1b, 3b, 8b, 14b, 32b, 70b"):
        preset("420m")


def test_another_number_of_layers_leaves_the_preset_alone() -> None:
    assert with_layers(preset("151m"), 3)["num_hidden_layers"] == 3
    assert preset("151m")["num_hidden_layers"] == 8


def test_a_config_file_is_read_without_its_cache(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "use_cache": True}))
    assert read_shape(file) == {"model_type": "llama", "use_cache": False}


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "is not JSON"), ("[]", "model_type"), ("{}", "model_type")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_shape(file)
