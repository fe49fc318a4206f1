"""Do Python values come back from JSON as they went in, and is what has no place there refused by
name?"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from tiermem.checkpoint.format.fields import ManifestError, decode, encode


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "v"), allow_nan=False)), "v")


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(1 << 100), 0.1, float("inf"), -0.0, "é\ud800", [1, [2.5]], (1, (2,)), {"a": {1: (2,)}}, {"$": "x"},
        {(1, 2): {3}}, frozenset([1]), b"\0\xff", 1 + 2j, torch.Size([2, 0]), torch.bfloat16, OrderedDict(a=1, b=[None]),
        random.Random(3).getstate(), Counter([4, 2, 4]),
    ],
)  # fmt: skip
def test_values_come_back_equal(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    if not isinstance(value, OrderedDict):
        assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape).mul(100).to(dtype)
    found = there_and_back({"deep": [value]})["deep"][0]
    assert found.dtype == dtype and found.shape == shape and torch.equal(found, value)
    assert torch.equal(
        there_and_back(torch.arange(12).view(3, 4).t()), torch.arange(12).view(3, 4).t()
    )


def test_arrays_and_generators_come_back() -> None:
    state = np.random.RandomState(7).get_state(legacy=False)
    found = there_and_back(state)
    assert (
        np.array_equal(found["state"]["key"], state["state"]["key"])
        and found["state"]["pos"] == state["state"]["pos"]
    )
    scalar = there_and_back(np.float32(1.5))
    assert scalar == np.float32(1.5) and type(scalar) is np.float32
    assert np.isnan(there_and_back(float("nan")))
    big = np.arange(6, dtype=">i4").reshape(2, 3)
    assert np.array_equal(there_and_back(big), big)
    assert (
        there_and_back(np.random.default_rng(1).bit_generator.state)
        == np.random.default_rng(1).bit_generator.state
    )


@pytest.mark.parametrize(
    "value",
    [
        object(),
        argparse.Namespace(a=1),
        lambda: 0,
        np.array([object()]),
        torch.empty(2, device="meta"),
        Exception,
    ],
)
def test_what_has_no_place_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"client_state\['args'\]\[1\]"):
        encode({"args": [0, value]}, "client_state")


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested deeper"):
        encode(value, "client_state")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "pickle", "value": ""},
        {"$": ["tensor"]},
        {"$": "tensor", "dtype": "fp32", "shape": [2], "value": "AAAA"},
        {"$": "tensor", "dtype": "fp32", "shape": [1 << 62, 1 << 62], "value": ""},
        {"$": "tensor", "dtype": "fp32", "shape": [0] * 70, "value": ""},
        {"$": "ndarray", "dtype": "O", "shape": [1], "value": "AAAA"},
        {"$": "ndarray", "dtype": "f4", "shape": [0, 1 << 60], "value": ""},
        {"$": "dict", "value": [[[1], 2]]},
        {"$": "set", "value": [{}]},
        {"$": "float", "value": "1"},
        {"$": "complex", "value": [1, 2, 3]},
        {"$": "bytes", "value": "é"},
        {"$": "tuple", "value": 3},
        {"$": "size", "value": [-1]},
    ],
)
def test_json_that_is_never_written_is_refused(value: Any) -> None:
    with pytest.raises(ManifestError):
        decode(value, "v")
