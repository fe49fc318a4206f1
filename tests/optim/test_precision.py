"""Does a Precision refuse what does not exist, and say of every dtype how it is kept?"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tiermem import OffloadPolicy
from tiermem.precision import PRESETS, Precision

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"master": "fp64"},
            "precision: master is 'fp64'; allowed are 'fp32', 'split', 'bf16', 'fp16'",
        ),
        (
            {"moments": "split"},
            "precision: moments is 'split'; allowed are 'fp32', 'bf16', 'fp16', '8bit'",
        ),
        ({"grads": "8bit"}, "precision: grads is '8bit'; allowed are None, 'fp32', 'bf16', 'fp16'"),
        ({"rounding": "up"}, "precision: rounding is 'up'; allowed are 'stochastic', 'nearest'"),
        ({"rounding": None}, "precision: rounding is None; allowed are"),
        ({"seed": -1}, "precision: seed is -1; allowed are whole numbers from 0 to 2^64 - 1"),
        ({"seed": 1 << 64}, "precision: seed is 18446744073709551616; allowed"),
        ({"seed": 0.5}, "precision: seed is 0.5; allowed"),
        ({"seed": True}, "precision: seed is True; allowed"),
    ],
)
def test_what_does_not_exist_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Precision(**fields)


def test_presets_are_found_by_name() -> None:
    assert Precision.preset("exact") == Precision("fp32", "fp32") == Precision()
    assert Precision.preset("compact") == Precision("split", "bf16", None, "stochastic")
    assert Precision.preset("bf16") == Precision("bf16", "bf16", "bf16", "nearest")
    assert Precision.preset("tiny") == Precision("split", "8bit", None, "stochastic")
    with pytest.raises(
        ValueError, match="preset is 'small'; allowed are exact, compact, bf16, tiny"
    ):
        Precision.preset("small")


@pytest.mark.parametrize(
    ("master", "dtype", "kept"),
    [
        ("fp32", BF16, "fp32"),
        ("fp32", FP16, "fp32"),
        ("split", BF16, "split"),
        ("bf16", BF16, None),
        ("fp16", FP16, None),
        *((master, FP32, None) for master in ("fp32", "split", "bf16", "fp16")),
    ],
)
def test_the_master_that_is_kept_beside_a_parameter(
    master: Any, dtype: torch.dtype, kept: str | None
) -> None:
    precision = Precision(master)
    precision.check_dtype(dtype, "w")
    assert precision.master_of(dtype) == kept


@pytest.mark.parametrize(
    ("master", "dtype", "reason"),
    [
        (
            "split",
            FP16,
            (
                "which are a bf16 number, and fp16 has another exponent. Train in bfloat16, or set "
                "master='fp32'"
            ),
        ),
        ("bf16", FP16, "the weight itself is the master, so both are of one dtype"),
        ("fp16", BF16, "the weight itself is the master, so both are of one dtype"),
        (
            "fp32",
            torch.float64,
            "parameter 'w' is torch.float64; an optimizer steps torch.float32, torch.bfloat16",
        ),
        ("fp32", torch.int64, "parameter 'w' is torch.int64"),
    ],
)
def test_a_dtype_that_cannot_be_kept_so_is_refused(
    master: Any, dtype: torch.dtype, reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Precision(master).check_dtype(dtype, "w")


def test_gradients_rest_in_the_parameters_dtype_unless_asked_otherwise() -> None:
    assert [Precision().grad_dtype(dtype) for dtype in (FP32, BF16, FP16)] == [FP32, BF16, FP16]
    assert [Precision(grads="fp32").grad_dtype(dtype) for dtype in (FP32, BF16)] == [FP32, FP32]
    assert PRESETS["bf16"].grad_dtype(FP32) == BF16


def test_keys_are_the_same_in_every_process_and_differ_by_name_and_seed() -> None:
    assert Precision().key("layers.0.weight") == 1197929081065304505
    names = [f"layers.{i}.{part}" for i in range(500) for part in ("weight", "bias")]
    keys = {Precision(seed=seed).key(name) for name in names for seed in (0, 1, (1 << 64) - 1)}
    assert len(keys) == 3 * len(names)
    assert all(0 <= key < 1 << 64 for key in keys)
    assert Precision().key("\ud800") not in keys  # torch allows every string as a name


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"precision": "compact"},
            "precision is 'compact'; give a Precision, such as Precision.preset('compact')",
        ),
        ({"num_moments": -1}, "num_moments is -1; allowed are 0 to 3"),
        ({"num_moments": 4}, "num_moments is 4; allowed are 0 to 3"),
        ({"num_moments": 2.5}, "num_moments is 2.5; allowed are 0 to 3"),
    ],
)
def test_a_policy_refuses_what_is_no_precision_and_no_number_of_moments(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        OffloadPolicy(**fields)
