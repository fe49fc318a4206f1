"""Does the step in torch operations give the native kernel's bits, for every rule, format and
rounding, without waiting?

Both are run on CPU tensors. Bits are compared, apart from those of a NaN: which one it is, is not
promised.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiermem.optim.rules import step_parts
from tiermem.optimizers.base import MatrixStep
from tiermem.swap.base.native import (
    NORM_BLOCK,
    Workers,
    narrow_part,
    optimizer_step,
    store_gradient,
    widen_part,
)
from tiermem.swap.base.parts import (
    MOMENTS,
    Dither,
    Moment,
    Quantised,
    StepParts,
    StepRule,
    num_scales,
)
from tiermem.swap.kernels import device_kernels, torch_step
from tiermem.swap.kernels.torch_step import (
    SCRATCH_BYTES,
    block_sums_in_torch,
    narrow_in_torch,
    step_in_torch,
    sum_scratch_bytes,
    widen_in_torch,
)

F32, BF16, F16, Q8, SPLIT = torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int16

_ADAM = StepRule(
    "adamw", 0.03, 0.9997, 0.37, beta1=0.9, beta2=0.95, eps=1e-8, inv_sqrt_bias2=(1 - 0.95) ** -0.5
)
_SGD = StepRule("sgd", 3e-3, 0.1, 0.37, momentum=0.8, dampening=0.3)
RULES: dict[str, tuple[StepRule, int]] = {  # and the number of moments
    "adamw": (_ADAM, 2),
    "adam": (_ADAM._replace(name="adam", decay=0.1), 2),
    "adamw amsgrad": (_ADAM._replace(maximize=True), 3),
    "adam amsgrad": (_ADAM._replace(name="adam", decay=0.0), 3),
    "adagrad": (StepRule("adagrad", 0.01, 0.1, 0.37, eps=1e-10, initial=0.1), 1),
    "lion": (StepRule("lion", 1e-3, 0.9997, 0.37, beta1=0.9, beta2=0.99, maximize=True), 1),
    "sgd": (_SGD._replace(maximize=True), 0),
    "sgd momentum": (_SGD, 1),
    "sgd nesterov": (_SGD._replace(nesterov=True), 1),
    "matrix momentum": (StepRule("sgd", 0.0, 0.0, 0.37, momentum=0.95, dampening=0.95), 1),
    "matrix update": (StepRule("sgd", 0.02, 0.1), 0),
}
MASTERS = [
    (None, F32),
    (F32, F32),
    (BF16, F32),
    (F16, F32),
    (BF16, SPLIT),
    (BF16, None),
    (F16, None),
    (F32, None),
]
MOMENT_DTYPES = [
    (F32, F32, F32),
    (BF16, BF16, BF16),
    (F16, F16, F16),
    (Q8, Q8, Q8),
    (BF16, Q8, F32),
]
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    -1e-40,
    1.17549e-38,
    math.inf,
    -math.inf,
    math.nan,
    3.4028e38,
    -3.3962e38,
    65519.0,
]
SPECIAL += [65520.0, 6e-8, -2.98e-8, 1.0, -1.0, 1.00390625, 1.01171875]
NANS = [0x7FFFFFFF, -1, 0x7FFF8000]  # patterns that a split master's weight would not show
EDGES = [
    0x7F7E,
    0x7F7F,
    0x7F80,
    0x7FFF,
    0x477F,
    0x4780,
    0x387F,
    0x3880,
    0x3300,
    0x32FF,
    0,
]  # upper halves next to limits


# ---- numbers, and the parts made of them ---------------------------------------------------------


def numbers(numel: int, seed: int, spread: int = 12) -> torch.Tensor:
    """Of many sizes, special ones first, then a block of zeros, and one of subnormals, as far as
    there is room."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= torch.exp2(torch.randint(-spread, spread // 2, (numel,), generator=generator).float())
    special = torch.cat([torch.tensor(SPECIAL), torch.tensor(NANS, dtype=torch.int32).view(F32)])
    special = special[torch.randperm(len(special), generator=generator)][:numel]
    values[: len(special)] = special
    values[128:192] = 0
    values[270:272] = -0.0
    values[192:256] *= 1e-38
    return values


def patterns(numel: int) -> torch.Tensor:
    """fp32 numbers of random bits, ties and what lies next to them among them."""
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(9)).to(
        torch.int32
    )
    low = torch.tensor(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000], dtype=torch.int32
    )
    bits[: numel // 2] = (bits[: numel // 2] & -65536) | low.repeat(numel)[: numel // 2]
    edges = torch.tensor(EDGES, dtype=torch.int32).repeat(numel)[: numel // 4] << 16
    bits[-len(edges) :] = edges | (bits[-len(edges) :] & -0x7FFF0001)
    return bits.view(F32)


def moment_of(
    values: torch.Tensor, dtype: torch.dtype, workers: Workers, is_positive: bool
) -> Moment:
    values = values.abs() if is_positive else values
    if dtype is not Q8:
        return values.to(dtype, copy=True)
    moment = Quantised(
        torch.empty(len(values), dtype=Q8), torch.empty(num_scales(len(values)), dtype=Q8)
    )
    narrow_part(workers, values, moment, is_positive=is_positive)
    return moment


def parts_of(
    rule: StepRule,
    workers: Workers,
    numel: int,
    weight: torch.dtype | None,
    master: torch.dtype | None,
    moments: Sequence[torch.dtype],
    grad: torch.dtype = F32,
) -> StepParts:
    p, kinds = numbers(numel, 1), MOMENTS[rule.name]
    held = [
        moment_of(numbers(numel, 2 + k, 20) * 0.01, dtype, workers, kind.is_positive)
        for k, (kind, dtype) in enumerate(zip(kinds, moments, strict=False))
    ]
    low = None if master is None else torch.empty(numel, dtype=master)
    shown = None if weight is None else p.to(weight, copy=True)
    if low is not None:
        narrow_part(workers, p, low, shown if master is SPLIT else None)
    return StepParts(shown, low, numbers(numel, 7).to(grad), held)


def tensors_of(parts: StepParts) -> list[torch.Tensor]:
    tensors = [part for part in (parts.weight, parts.master, parts.grad) if part is not None]
    for moment in parts.moments:
        tensors += moment if isinstance(moment, Quantised) else [moment]
    return tensors


def copy_of(parts: StepParts, device: str = "cpu") -> StepParts:
    def copied(part: Any) -> Any:
        if isinstance(part, Quantised):
            return Quantised(*(copied(each) for each in part))
        return None if part is None else part.to(device, copy=True)

    return StepParts(
        *(copied(part) for part in parts[:3]), [copied(moment) for moment in parts.moments]
    )


def is_same(seen: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the bits are, or both are NaN."""
    if seen.shape != wanted.shape or seen.dtype is not wanted.dtype:
        return False
    if not seen.dtype.is_floating_point:
        return torch.equal(seen, wanted)
    whole = torch.int32 if seen.dtype is F32 else torch.int16
    return bool(((seen.view(whole) == wanted.view(whole)) | (seen.isnan() & wanted.isnan())).all())


def assert_same_steps(
    rule: StepRule,
    parts: StepParts,
    workers: Workers,
    dither: Dither | None,
    note: str = "",
    num_steps: int = 3,
    step_ours: Callable[..., None] = step_in_torch,
) -> None:
    """Steps by both from the same parts; the second starts the moments."""
    native, ours = copy_of(parts), copy_of(parts)
    for step in range(num_steps):
        own = None if dither is None else dither._replace(step=dither.step + step)
        optimizer_step(workers, rule, native, own, start_moments=step == 1)
        step_ours(rule, ours, own, start_moments=step == 1)
        for k, (seen, wanted) in enumerate(zip(tensors_of(ours), tensors_of(native), strict=True)):
            assert is_same(seen, wanted), (
                f"step {step}, tensor {k} {note}: {seen[seen != wanted]}, {wanted[seen != wanted]}"
            )


# ---- the step ------------------------------------------------------------------------------------


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("grad", [F32, BF16, F16])
def test_every_combination_has_the_kernels_bits(
    name: str, grad: torch.dtype, workers: Workers
) -> None:
    rule, num_moments = RULES[name]
    kinds = MOMENT_DTYPES if num_moments else MOMENT_DTYPES[:1]
    for (weight, master), moments, is_stochastic in itertools.product(
        MASTERS, kinds, (False, True)
    ):
        parts = parts_of(rule, workers, 451, weight, master, moments[:num_moments], grad)
        dither = Dither(0xFEDCBA9876543210, 1234567, 3 * 65536 + 11) if is_stochastic else None
        assert_same_steps(
            rule, parts, workers, dither, f"{weight} {master} {moments} {is_stochastic}"
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("numel", [0, 1, 7, 63, 64, 65, 127, 128, 1000, 4099])
@pytest.mark.parametrize("name", ["adamw", "adam amsgrad", "sgd nesterov"])
def test_every_length_has_the_kernels_bits(name: str, numel: int, workers: Workers) -> None:
    rule, num_moments = RULES[name]
    for (weight, master), dtype in itertools.product([(BF16, SPLIT), (F16, None)], (BF16, Q8)):
        parts = parts_of(rule, workers, numel, weight, master, [dtype] * num_moments, BF16)
        assert_same_steps(rule, parts, workers, Dither(5, 6, 7))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "first", [0, 1, 2**31 - 100, 2**32 - 1003, 2**32 - 64, 2**32, 9 * 2**32 - 1, 2**40 + 77]
)
@pytest.mark.parametrize("step", [0, 1, 2**31, 2**32 + 5, 2**63])
def test_random_words_are_the_kernels_wherever_the_elements_lie(
    first: int, step: int, workers: Workers
) -> None:
    rule, _ = RULES["adamw amsgrad"]
    parts = parts_of(rule, workers, 1100, BF16, None, [BF16, Q8, F16])
    for key in (0, 2**64 - 1, 0x123456789ABCDEF0):
        assert_same_steps(rule, parts, workers, Dither(key, step, first), num_steps=1)


def test_chunks_leave_no_seam(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_step, "CHUNK", 192)
    for name, (rule, num_moments) in RULES.items():
        for numel in (191, 192, 193, 1003):
            parts = parts_of(rule, workers, numel, BF16, SPLIT, [Q8] * num_moments)
            assert_same_steps(rule, parts, workers, Dither(1, 2, 2**32 - 300), name, num_steps=1)


def test_many_elements_have_the_kernels_bits(workers: Workers) -> None:
    """Where torch shares an operation among threads."""
    parts = parts_of(_ADAM, workers, 300_007, BF16, None, [BF16, Q8], BF16)
    assert_same_steps(_ADAM, parts, workers, Dither(1, 2, 3))


@pytest.mark.parametrize("dtype", [BF16, F16, Q8])
def test_every_pattern_is_rounded_stochastically_as_by_the_kernel(
    dtype: torch.dtype, workers: Workers
) -> None:
    g = patterns(200_000)
    m = moment_of(torch.zeros_like(g), dtype, workers, False)
    rule = StepRule("sgd", 0.0, 0.0, momentum=0.0)  # the moment becomes the gradient
    if dtype is Q8:
        g = torch.where(g.abs() < 1e38, g, 0)  # sound blocks
        g = g.view(-1, 64).sort(dim=1)[0].sort(dim=0)[0].view(-1)  # of like sizes
    assert_same_steps(
        rule, StepParts(None, torch.zeros_like(g), g, (m,)), workers, Dither(1, 2, 3), num_steps=1
    )


def test_scalars_of_all_sizes_are_rounded_as_by_the_kernel(workers: Workers) -> None:
    for value in (0.0, 1e-310, 1e-42, 1e-3, 3.0, 1e38, 1e300, -0.5, math.inf, math.nan):
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


# ---- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16, SPLIT, torch.uint16])
def test_every_pattern_is_widened_and_narrowed_as_by_the_kernel(
    dtype: torch.dtype, workers: Workers
) -> None:
    values = patterns(200_000)
    native, ours = torch.empty(200_000, dtype=dtype), torch.empty(200_000, dtype=dtype)
    has_weight = dtype in (SPLIT, torch.uint16)
    weights = [torch.empty(200_000, dtype=BF16) if has_weight else None for _ in "12"]
    narrow_part(workers, values, native, weights[0])
    narrow_in_torch(values, ours, weights[1])
    assert is_same(ours, native)
    if weights[0] is not None and weights[1] is not None:
        assert torch.equal(weights[0].view(torch.int16), weights[1].view(torch.int16))
        given = values.view(torch.int32)
        # NaNs that round to zero
        kept = torch.where((given & 0x7FFFFFFF) >= 0x7FFF8000, given & ~0x8000, given)
        assert torch.equal(widen_in_torch(ours, weights[1]).view(torch.int32), kept)
        weights[0].view(torch.int16)[::2] &= -0x8000  # the user writes zeros
        assert is_same(widen_in_torch(native, weights[0]), widen_part(workers, native, weights[0]))
        assert widen_in_torch(native, weights[0])[::2].abs().max() < 1e-40
        return
    if dtype in (BF16, F16):
        native = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert is_same(widen_in_torch(native, weights[0]), widen_part(workers, native, weights[0]))


@pytest.mark.parametrize("is_positive", [False, True])
def test_every_code_and_scale_is_widened_as_by_the_kernel(
    is_positive: bool, workers: Workers
) -> None:
    codes = torch.arange(256).to(Q8).repeat(256)
    scales = torch.arange(256).repeat_interleave(4).to(Q8)
    scales[(scales > 0) & (scales < 48)] = 48  # none is ever written
    stored = Quantised(codes[:-5].clone(), scales)
    assert is_same(
        widen_in_torch(stored, None, is_positive), widen_part(workers, stored, None, is_positive)
    )


@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 200_001])
def test_blocks_of_codes_are_narrowed_as_by_the_kernel(
    is_positive: bool, numel: int, workers: Workers
) -> None:
    for spread, values in (
        (8, numbers(numel, 3)),
        (40, numbers(numel, 4, 40)),
        (0, patterns(max(numel, 10))[:numel]),
    ):
        if is_positive and spread:
            values = torch.where(values == 0, values, values.abs())  # -0 stays
        stored = [
            Quantised(torch.empty(numel, dtype=Q8), torch.empty(num_scales(numel), dtype=Q8))
            for _ in "12"
        ]
        narrow_part(workers, values, stored[0], None, is_positive)
        narrow_in_torch(values, stored[1], None, is_positive)
        assert torch.equal(stored[1].codes, stored[0].codes) and torch.equal(
            stored[1].scales, stored[0].scales
        )


def test_widening_gives_memory_of_its_own() -> None:
    stored = torch.zeros(5)
    widen_in_torch(stored).add_(1)
    assert torch.equal(stored, torch.zeros(5))


# ---- sums of squares -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, NORM_BLOCK - 1, NORM_BLOCK, 5 * NORM_BLOCK + 17])
@pytest.mark.parametrize("numel", [0, 1, 65, NORM_BLOCK, 2 * NORM_BLOCK + 3])
def test_block_sums_are_the_kernels_to_a_few_units(
    first: int, numel: int, workers: Workers
) -> None:
    for dtype in (F32, BF16, F16):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        wanted = torch.tensor(store_gradient(workers, None, grad, first), dtype=torch.float64)
        seen = block_sums_in_torch(grad, first)
        assert seen.shape == wanted.shape and ((seen - wanted).abs() <= 1e-14 * wanted).all()


def test_block_sums_do_not_depend_on_cuts_nor_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.randn(5 * NORM_BLOCK)
    wanted = block_sums_in_torch(grad, 0)
    cut = 2 * NORM_BLOCK
    assert torch.equal(
        torch.cat([block_sums_in_torch(grad[:cut], 0), block_sums_in_torch(grad[cut:], cut)]),
        wanted,
    )
    monkeypatch.setattr(torch_step, "CHUNK", NORM_BLOCK)
    assert torch.equal(block_sums_in_torch(grad, 0), wanted)
    assert torch.equal(block_sums_in_torch(grad[100:], 100)[1:], wanted[1:])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4e38])
def test_a_block_sum_is_finite_where_every_element_is(value: float) -> None:
    grad = torch.full((2 * NORM_BLOCK,), 3.4e38)
    grad[NORM_BLOCK + 5] = value
    assert block_sums_in_torch(grad, 0).isfinite().tolist() == [True, math.isfinite(value)]


# ---- memory --------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """Counts the bytes of storages that operations make, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._sizes = 0, {}  # type: int, dict[int, int]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in self._storages(made):
            if storage._cdata not in self._sizes and storage._cdata not in {
                s._cdata for s in self._storages(args)
            }:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made

    def _storages(self, tree: Any) -> list[Any]:
        return [
            leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)
        ]


@pytest.mark.parametrize("name", ["adamw amsgrad", "sgd nesterov", "matrix update"])
def test_a_step_takes_no_more_memory_than_it_says(
    name: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_step, "CHUNK", NORM_BLOCK)
    rule, num_moments = RULES[name]
    for (weight, master), moments in zip(MASTERS, itertools.cycle(MOMENT_DTYPES[2:]), strict=False):
        parts = parts_of(
            rule, workers, NORM_BLOCK + 100, weight, master, moments[:num_moments], BF16
        )
        with Held() as held:
            step_in_torch(rule, parts, Dither(1, 2, 3))
            block_sums_in_torch(parts.grad, 0)
        assert NORM_BLOCK * 16 < held.peak <= NORM_BLOCK * SCRATCH_BYTES, (weight, master, moments)
        with Held() as held:
            sums = block_sums_in_torch(parts.grad, 0)
        assert NORM_BLOCK * 12 < held.peak - 2 * sums.nbytes <= sum_scratch_bytes(NORM_BLOCK + 100)


# ---- without waiting, and where the parts lie ----------------------------------------------------


class NoCopyToDevice(TorchDispatchMode):
    """Fails where an operation takes a tensor of the host: the meta device, which knows no values,
    is the other one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]
        assert all(tensor.device.type == "meta" for tensor in given), func
        # a number where torch.where takes a tensor is copied to the device, and the host waits
        assert "where" not in func.name() or len(given) == 3, func
        return func(*args, **(kwargs or {}))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", RULES)
def test_nothing_waits_for_the_device(name: str, workers: Workers) -> None:
    """On the meta device there are no values to wait for: reading one raises."""
    rule, num_moments = RULES[name]
    for (weight, master), moments in zip(MASTERS, itertools.cycle(MOMENT_DTYPES), strict=False):
        parts = copy_of(parts_of(rule, workers, 200, weight, master, moments[:num_moments]), "meta")
        with NoCopyToDevice():
            step_parts(workers, rule, parts, Dither(1, 2, 2**32 - 100))
            step_parts(workers, rule, parts, None, start_moments=True)
            block_sums_in_torch(parts.grad, NORM_BLOCK - 5)
            for moment in parts.moments:
                narrow_in_torch(widen_in_torch(moment), moment)


def test_a_matrix_is_stepped_where_it_lies(workers: Workers) -> None:
    rules = [RULES[name][0] for name in ("matrix momentum", "matrix update")]
    step = MatrixStep(rules[0], rules[1], (10, 20), True, (3.4, -4.7, 2.0), 5, 1e-7, BF16)
    parts = copy_of(parts_of(rules[0], workers, 200, BF16, SPLIT, [Q8]), "meta")
    with NoCopyToDevice():
        step_parts(workers, step, parts, Dither(1, 2, 3), start_moments=True)


def test_parts_of_two_devices_are_refused(workers: Workers) -> None:
    parts = copy_of(parts_of(_ADAM, workers, 100, None, F32, (F32, F32)), "meta")
    with pytest.raises(ValueError, match="contiguous tensors on meta"):
        step_in_torch(_ADAM, parts._replace(master=torch.zeros(100)))
    with pytest.raises(ValueError, match="contiguous tensors on cpu"):
        optimizer_step(workers, _ADAM, parts._replace(grad=torch.zeros(100)))


def test_torch_operations_step_where_triton_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "tiermem.swap.kernels.triton_step", raising=False)
    device_kernels._in_triton.cache_clear()
    assert device_kernels.kernels_of(torch.device("cuda", 0)) == (
        step_in_torch,
        block_sums_in_torch,
    )
    device_kernels._in_triton.cache_clear()
