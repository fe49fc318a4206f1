"""Do the keys of MiCS, hpZ and quantised communication reach the policy, and are combinations that
cannot be refused?"""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.config import ConfigError, load_config


def config_of(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **zero}}


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("mics_shard_size", 8, "shard_group_size", 8),
        ("mics_shard_size", -1, "shard_group_size", None),
        ("zero_hpz_partition_size", 4, "secondary_group_size", 4),
        ("zero_hpz_partition_size", 0, "secondary_group_size", 1),
        ("zero_quantized_weights", True, "quantised_gather", True),
        ("zero_quantized_gradients", True, "quantised_reduction", True),
        ("zero_quantized_nontrainable_weights", True, "quantised_frozen", True),
    ],
)
def test_key_reaches_its_field(key: str, value: Any, field: str, expected: Any) -> None:
    assert getattr(load_config(config_of(**{key: value})).policy(), field) == expected


def test_the_documents_mics_example_is_taken_as_it_stands() -> None:
    policy = load_config(
        config_of(mics_shard_size=8, mics_hierarchical_params_gather=False)
    ).policy()
    assert (policy.shard_group_size, policy.two_stage_gather) == (8, False)
    assert (
        load_config(config_of(mics_shard_size=8, mics_hierarchical_params_gather=True))
        .policy()
        .two_stage_gather
    )


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        (
            config_of(stage=2, mics_shard_size=2),
            "zero_optimization.mics_shard_size",
            "it acts in stage 3 alone",
        ),
        (
            config_of(stage=1, zero_hpz_partition_size=2),
            "zero_optimization.zero_hpz_partition_size",
            "stage 3 alone",
        ),
        (
            config_of(mics_shard_size=0),
            "zero_optimization.mics_shard_size",
            "allowed are 1 or more ranks, or -1",
        ),
        (
            config_of(mics_hierarchical_params_gather=True),
            "zero_optimization.mics_hierarchical_params_gather",
            "without",
        ),
        (
            config_of(stage=1, zero_quantized_gradients=True),
            "zero_optimization.zero_quantized_gradients",
            "in stages 2 and 3",
        ),
        (
            config_of(zero_quantized_weights=True)
            | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "zero_optimization.zero_quantized_weights",
            "true with torch_autocast",
        ),
    ],
)
def test_combination_that_cannot_be_is_refused(
    config: dict[str, Any], path: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert said in problem.message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [0, 1])
def test_no_secondary_copy_is_asked_for_in_any_stage(stage: int, size: int) -> None:
    policy = load_config(config_of(stage=stage, zero_hpz_partition_size=size)).policy()
    assert policy == load_config(config_of(stage=stage)).policy()


def test_what_needs_another_stage_is_told_beside_what_else_is_wrong() -> None:
    zero = {"stage": 1, "zero_quantized_weights": True, "offload_param": {"device": "nvme"}}
    with pytest.raises(ConfigError) as caught:
        load_config(
            {
                "zero_optimization": zero,
                "tiermem": {"durability": "step"},
                "prescale_gradients": True,
            }
        )
    assert {problem.path for problem in caught.value.problems} == {
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
    }
