"""Does the Triton kernel give the native kernel's bits? Run by test_triton_step.py in a process of
its own.

Triton's interpreter runs kernels with numpy on CPU tensors. TRITON_INTERPRET=1 chooses it, for the
whole process, when triton is imported. A program of the kernel takes it some hundredths of a
second.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import test_torch_step as torch_tests
import torch
from test_torch_step import (
    _ADAM,
    BF16,
    F16,
    F32,
    MASTERS,
    MOMENT_DTYPES,
    Q8,
    RULES,
    SPLIT,
    copy_of,
    is_same,
    moment_of,
    parts_of,
    patterns,
    tensors_of,
)

from tiermem.swap.base.native import NORM_BLOCK, Workers
from tiermem.swap.base.parts import Dither, Quantised, StepParts, StepRule
from tiermem.swap.kernels import triton_step, triton_sums
from tiermem.swap.kernels.torch_step import block_sums_in_torch, step_in_torch
from tiermem.swap.kernels.triton_step import launch, step_in_triton

assert_same_steps = functools.partial(torch_tests.assert_same_steps, step_ours=launch)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities


@pytest.mark.parametrize("name", RULES)
def test_every_rule_and_format_has_the_native_bits(name: str, workers: Workers) -> None:
    rule, num_moments = RULES[name]
    grads = itertools.cycle([F32, BF16, F16])
    for k, (weight, master) in enumerate(MASTERS):
        kinds = MOMENT_DTYPES[k % 2 :: 2] if num_moments else MOMENT_DTYPES[:1]
        for moments, is_stochastic in itertools.product(kinds, (False, True)):
            parts = parts_of(rule, workers, 451, weight, master, moments[:num_moments], next(grads))
            dither = Dither(0xFEDCBA9876543210, 1234567, 3 * 65536 + 11) if is_stochastic else None
            assert_same_steps(
                rule, parts, workers, dither, f"{weight} {master} {moments} {is_stochastic}", 2
            )


@pytest.mark.parametrize("numel", [0, 1, 7, 63, 64, 65, 1023, 1024, 1025, 4099])
def test_every_length_has_the_native_bits(numel: int, workers: Workers) -> None:
    for name, (weight, master) in (
        ("adamw", (BF16, SPLIT)),
        ("adagrad", (F16, None)),
        ("sgd nesterov", (BF16, F32)),
    ):
        rule, num_moments = RULES[name]
        parts = parts_of(rule, workers, numel, weight, master, [Q8, F16][:num_moments], BF16)
        assert_same_steps(rule, parts, workers, Dither(5, 6, 7), num_steps=2)


@pytest.mark.parametrize(
    "first", [0, 1, 2**31 - 100, 2**32 - 1003, 2**32 - 64, 2**32, 9 * 2**32 - 1, 2**40 + 77]
)
@pytest.mark.parametrize("step", [0, 1, 2**31, 2**32 + 5, 2**63])
def test_random_words_are_the_native_ones_wherever_the_elements_lie(
    first: int, step: int, workers: Workers
) -> None:
    rule, _ = RULES["adamw amsgrad"]
    # blocks of codes are not cut at multiples of 2^32
    for moments in ([BF16, Q8, F16], [F16, BF16, BF16]):
        parts = parts_of(rule, workers, 1100, BF16, None, moments)
        assert_same_steps(
            rule, parts, workers, Dither(2**64 - 1 - step % 7, step, first), num_steps=1
        )


@pytest.mark.parametrize("dtype", [BF16, F16, Q8])
@pytest.mark.parametrize("is_stochastic", [False, True])
def test_every_pattern_is_narrowed_as_natively(
    dtype: torch.dtype, is_stochastic: bool, workers: Workers
) -> None:
    g = patterns(64 * 320)
    m = moment_of(torch.zeros_like(g), dtype, workers, False)
    rule = StepRule("sgd", 0.0, 0.0, momentum=0.0)  # the moment becomes the gradient
    if dtype is Q8:
        g = torch.where(g.abs() < 1e38, g, 0)  # sound blocks
        g = g.view(-1, 64).sort(dim=1)[0].sort(dim=0)[0].view(-1)  # of like sizes
    dither = Dither(1, 2, 3) if is_stochastic else None
    assert_same_steps(
        rule, StepParts(None, torch.zeros_like(g), g, (m,)), workers, dither, num_steps=1
    )


@pytest.mark.parametrize(
    "rule", [StepRule("sgd", 1.0, 0.0, momentum=1.0), StepRule("adagrad", 1.0, 0.0)]
)
def test_every_code_and_scale_is_widened_as_natively(rule: StepRule, workers: Workers) -> None:
    """SGD moves p by what it read; adagrad's sum is positive."""
    codes = torch.arange(256).to(Q8).repeat(256)
    scales = torch.arange(256).repeat_interleave(4).to(Q8)
    scales[(scales > 0) & (scales < 48)] = 48  # none is ever written
    grad = torch.zeros(len(codes)) if rule.name == "sgd" else torch.full((len(codes),), 1e-3)
    parts = StepParts(None, torch.zeros(len(codes)), grad, (Quantised(codes, scales),))
    assert_same_steps(rule, parts, workers, None, num_steps=1)


@pytest.mark.parametrize("moment", [F32, BF16, F16])
def test_every_pattern_is_widened_as_natively(moment: torch.dtype, workers: Workers) -> None:
    """SGD with a momentum of 1 and no gradient moves p by its moment."""
    values = (
        patterns(2**16)
        if moment is F32
        else torch.arange(-(2**15), 2**15, dtype=torch.int16).view(moment)
    )
    rule = StepRule("sgd", 1.0, 0.0, momentum=1.0)
    parts = StepParts(None, torch.zeros(2**16), torch.zeros(2**16), (values,))
    assert_same_steps(rule, parts, workers, None, num_steps=1)


def test_every_pattern_of_a_split_master_is_kept(workers: Workers) -> None:
    bits = patterns(2**15).view(torch.int32)
    weight, low = ((bits + 0x8000) >> 16).to(torch.int16).view(BF16), bits.to(torch.int16)
    for master in (low, low.view(torch.uint16)):
        parts = StepParts(weight, master, torch.zeros(2**15))
        assert_same_steps(StepRule("sgd", 0.0, 0.0), parts, workers, None, num_steps=1)


def test_scalars_of_all_sizes_are_rounded_as_natively(workers: Workers) -> None:
    for value in (0.0, 1e-310, 1e-42, 3.0, 1e300, -0.5, math.inf, math.nan):
        for field in ("step_size", "decay", "grad_scale", "eps", "inv_sqrt_bias2"):
            parts = parts_of(_ADAM, workers, 200, BF16, SPLIT, (F32, F32))
            assert_same_steps(
                _ADAM._replace(**{field: value}),
                parts,
                workers,
                None,
                f"{field} {value}",
                num_steps=1,
            )


def test_a_variant_that_gives_the_bits_of_torch_operations_is_used(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def counted(*args: object, **flags: object) -> None:
        launched.append(args)
        launch(*args, **flags)

    monkeypatch.setattr(triton_step, "launch", counted)
    rule, num_moments = RULES["adam amsgrad"]
    parts = parts_of(rule, workers, 500, BF16, SPLIT, MOMENT_DTYPES[4][:num_moments], BF16)
    for _ in range(2):
        launched.clear()
        ours = copy_of(parts)
        step_in_triton(rule, ours, Dither(1, 2, 3), start_moments=True)
        step_in_torch(rule, parts, Dither(1, 2, 3), start_moments=True)
        assert all(
            is_same(seen, wanted)
            for seen, wanted in zip(tensors_of(ours), tensors_of(parts), strict=True)
        )
    assert len(launched) == 1  # it was tried before the first step alone


def test_a_variant_whose_bits_differ_is_not_used(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(rule: StepRule, *args: object, **flags: object) -> None:
        launch(rule._replace(eps=rule.eps * 1.001), *args, **flags)

    monkeypatch.setattr(triton_step, "launch", wrong)
    parts = parts_of(_ADAM, workers, 500, None, F32, (F32, F32))
    ours = copy_of(parts)
    step_in_triton(_ADAM, ours)
    step_in_torch(_ADAM, parts)
    assert all(
        is_same(seen, wanted)
        for seen, wanted in zip(tensors_of(ours), tensors_of(parts), strict=True)
    )
    assert "its bits differ" in caplog.text


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_sums_of_squares_have_the_bits_of_torch_operations(dtype: torch.dtype) -> None:
    places = itertools.product(
        (0, 5, NORM_BLOCK - 1, 3 * NORM_BLOCK), (1, 5003, NORM_BLOCK, 2 * NORM_BLOCK + 77)
    )
    for first, numel in places:
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        for broken in (None, numel // 2):
            if broken is not None:
                grad[broken] = math.nan
            wanted = block_sums_in_torch(grad, first)
            for sums in (
                triton_sums.launch(grad, first),
                triton_sums.block_sums_in_triton(grad, first),
            ):
                torch.testing.assert_close(sums, wanted, rtol=0, atol=0, equal_nan=True)
    assert triton_sums._is_exact(grad.device, dtype)


def test_sums_whose_bits_differ_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        triton_sums,
        "launch",
        lambda grad, first: block_sums_in_torch(grad, first).nextafter(torch.tensor(0.0).double()),
    )
    triton_sums._is_exact.cache_clear()
    grad = torch.randn(NORM_BLOCK + 1)
    assert torch.equal(triton_sums.block_sums_in_triton(grad, 1), block_sums_in_torch(grad, 1))
    assert "its bits differ" in caplog.text
