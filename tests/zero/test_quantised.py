"""Do values come back from blocks of 8-bit or 4-bit codes as closely as promised, whatever their
sizes and dtypes?"""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.units.quantised import (
    BLOCK,
    INT8,
    LEVELS,
    NF4,
    PIECE,
    BlockFormat,
    byte_ranges,
    pack,
    pack_into,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 31 * 97, PIECE, PIECE + 1, 2 * PIECE + 65]


FORMS = [INT8, NF4]
of_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def there_and_back(values: torch.Tensor, form: BlockFormat = INT8) -> torch.Tensor:
    return unpack(pack(values, form), values.numel(), torch.empty_like(values), form=form)


def room_of(values: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The most by which each element may differ: half the largest distance of two values in its
    block."""
    filled = torch.nn.functional.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = filled.abs().amax(1, keepdim=True).expand_as(filled).reshape(-1)[: values.numel()]
    return largest * (0.5001 / 127 if form == INT8 else 0.152)


@of_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_values_come_back_within_half_a_step_of_their_block(
    numel: int, dtype: torch.dtype, form: BlockFormat
) -> None:
    values = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 0.02).to(dtype)
    error = (there_and_back(values, form).float() - values.float()).abs()
    rounding = values.float().abs() * torch.finfo(dtype).eps
    assert (error <= room_of(values, form) + rounding).all()


@of_form
@settings(max_examples=drawn(60))
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-100),
        min_size=1,
        max_size=200,
    )
)
def test_the_bound_holds_for_any_values(form: BlockFormat, numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    error = (there_and_back(values, form) - values).abs()
    assert (error <= room_of(values, form)).all()


@of_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_code_has_the_bits_of_torch(form: BlockFormat, dtype: torch.dtype) -> None:
    """float64 is packed and unpacked by torch calls."""
    numel = PIECE + 3 * BLOCK + 5
    values = (torch.randn(numel, generator=torch.Generator().manual_seed(9)) ** 3).to(dtype)
    values[:BLOCK], values[2 * BLOCK] = 0, -0.0
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(LEVELS)]).to(dtype)
    values[3 * BLOCK : 4 * BLOCK] = torch.nn.functional.pad(
        middles, (0, BLOCK - len(middles)), value=1.0
    )
    packed, by_torch = pack(values, form), pack(values.double(), form)
    assert torch.equal(packed, by_torch)
    wide = unpack(by_torch, numel, torch.empty(numel, dtype=torch.float64), form=form)
    assert torch.equal(
        unpack(packed, numel, torch.empty_like(values), form=form), wide.float().to(dtype)
    )


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """As QLoRA's appendix E defines them: 8 positive, 7 negative and zero, with equal areas
    between, scaled to 1."""
    quantile = statistics.NormalDist().inv_cdf
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    upper = [quantile(outermost + (0.5 - outermost) * i / 8) for i in range(8)]
    lower = [-quantile(outermost + (0.5 - outermost) * i / 7) for i in range(7)]
    expected = sorted([*upper, *lower, 0.0])
    assert list(LEVELS) == pytest.approx([each / upper[0] for each in expected], abs=2e-7)


def test_bytes_are_one_or_a_half_per_element_and_four_per_block() -> None:
    assert INT8.packed_bytes(BLOCK) == BLOCK + 4
    assert NF4.packed_bytes(BLOCK) == BLOCK / 2 + 4 == 4.5 * BLOCK / 8
    assert INT8.packed_bytes(BLOCK + 1) == 2 * (BLOCK + 4)
    for form in FORMS:
        assert form.packed_bytes(0) == 0
        assert (
            pack(torch.ones(1000), form).numel()
            == form.packed_bytes(1000)
            == 16 * form.packed_bytes(BLOCK)
        )


@of_form
def test_zeros_come_back_as_zeros_beside_blocks_that_hold_something(form: BlockFormat) -> None:
    values = torch.zeros(3 * BLOCK)
    values[BLOCK] = 5.0
    assert torch.equal(there_and_back(values, form), values)


@of_form
def test_blocks_do_not_disturb_each_other(form: BlockFormat) -> None:
    values = torch.cat([torch.full((BLOCK,), 1e-3), torch.full((BLOCK,), 1e3)])
    torch.testing.assert_close(there_and_back(values, form), values, rtol=1e-6, atol=0.0)


@of_form
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_is_not_hidden(
    bad: float, form: BlockFormat, dtype: torch.dtype
) -> None:
    values = torch.ones(3 * BLOCK, dtype=dtype)
    values[BLOCK + 3] = bad
    back = there_and_back(values, form)
    assert back[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(back[:BLOCK], values[:BLOCK])
    assert torch.equal(back[2 * BLOCK :], values[2 * BLOCK :])


@of_form
def test_packing_what_came_back_gives_the_same_values(form: BlockFormat) -> None:
    values = torch.randn(5 * BLOCK + 7, generator=torch.Generator().manual_seed(1))
    once = there_and_back(values, form)
    torch.testing.assert_close(there_and_back(once, form), once, rtol=1e-6, atol=1e-7)


@of_form
@pytest.mark.parametrize(
    ("start", "numel"), [(0, 1), (BLOCK, 2 * BLOCK), (3 * BLOCK, 100), (2 * BLOCK, PIECE + 3)]
)
def test_a_part_comes_back_as_it_does_in_the_whole(
    start: int, numel: int, form: BlockFormat
) -> None:
    values = torch.randn(PIECE + 10 * BLOCK, generator=torch.Generator().manual_seed(2))
    part = unpack(pack(values, form), values.numel(), torch.empty(numel), start, form=form)
    assert torch.equal(part, there_and_back(values, form)[start : start + numel])


@of_form
def test_adding_sums_what_came_back(form: BlockFormat) -> None:
    a, b = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    out = torch.zeros(300)
    for each in (a, b):
        unpack(pack(each, form), 300, out, add=True, form=form)
    assert torch.equal(out, there_and_back(a, form) + there_and_back(b, form))


@of_form
def test_values_are_left_as_they_are(form: BlockFormat) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(4))
    before = values.clone()
    pack(values, form)
    assert torch.equal(values, before)


@of_form
@pytest.mark.parametrize(("start", "numel"), [(0, 1), (BLOCK, 100), (3 * BLOCK, 4 * BLOCK)])
def test_a_part_is_packed_in_its_place_and_leaves_the_others(
    start: int, numel: int, form: BlockFormat
) -> None:
    values = torch.randn(10 * BLOCK, generator=torch.Generator().manual_seed(5))
    fresh = torch.randn(numel, generator=torch.Generator().manual_seed(6))
    packed = pack(values, form)
    pack_into(packed, values.numel(), fresh, start, form)
    filled = -(-numel // BLOCK) * BLOCK
    expected = there_and_back(values, form)
    expected[start : start + filled] = 0
    expected[start : start + numel] = there_and_back(fresh, form)
    assert torch.equal(
        unpack(packed, values.numel(), torch.empty_like(values), form=form), expected
    )


@of_form
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (BLOCK, 3 * BLOCK), (2 * BLOCK, 9 * BLOCK + 5), (0, 10 * BLOCK)]
)
def test_byte_ranges_are_a_part_packed_by_itself(start: int, stop: int, form: BlockFormat) -> None:
    values = torch.randn(10 * BLOCK, generator=torch.Generator().manual_seed(7))
    packed = pack(values, form)
    found = torch.cat([packed[each] for each in byte_ranges(values.numel(), start, stop, form)])
    filled = min(values.numel(), -(-stop // BLOCK) * BLOCK)
    assert torch.equal(found, pack(values[start:filled], form))
