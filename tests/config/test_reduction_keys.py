"""Do the keys about gradients between ranks become the policy's fields, and contradict each other
where they do?

What each field does is seen on ranks: tests/ranks/test_grads_on_ranks.py,
tests/engine/test_accumulation.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.config import ConfigError, load_config


@pytest.mark.parametrize(
    ("zero", "field", "value"),
    [
        ({"allgather_bucket_size": 77}, "allgather_bucket_numel", 77),
        ({"reduce_bucket_size": 77}, "reduce_bucket_numel", 77),
        ({"ignore_unused_parameters": False}, "ignore_unused", False),
    ],
)
def test_section_zero_optimization(zero: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(load_config({"zero_optimization": zero}).policy(), field) == value


@pytest.mark.parametrize(
    ("top", "field", "value"),
    [
        ({}, "reduce_op", "mean"),
        ({"gradient_allreduce_op": "sum"}, "reduce_op", "sum"),
        ({}, "predivide_factor", 1.0),
        ({"gradient_predivide_factor": 4}, "predivide_factor", 4.0),
        ({"prescale_gradients": True}, "predivide_factor", "ranks"),
        ({"fp32_allreduce": True}, "reduce_dtype", "fp32"),
        ({"fp32_allreduce": True, "communication_data_type": "fp32"}, "reduce_dtype", "fp32"),
        ({"fp32_allreduce": False, "communication_data_type": "bf16"}, "reduce_dtype", "bf16"),
        ({"fp32_allreduce": False}, "reduce_dtype", None),
    ],
)
def test_top_of_the_config(top: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(load_config(top).policy(), field) == value


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"fp32_allreduce": True, "communication_data_type": "bf16"}, "remove fp32_allreduce"),
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
            "which divides by the ranks; remove one",
        ),
        ({"gradient_predivide_factor": 0}, "greater than 0"),
        ({"gradient_allreduce_op": "max"}, "mean"),
    ],
)
def test_contradictions_and_values_out_of_range(top: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(top)
