"""Do values come back from blocks of 8-bit integers as closely as promised, whatever their sizes and dtypes?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.zero.quantised import BLOCK, PIECE, byte_ranges, pack, pack_into, packed_bytes, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, BLOCK - 1, BLOCK, BLOCK + 1, 31 * 97, PIECE, PIECE + 1, 2 * PIECE + 65]


def there_and_back(values: torch.Tensor) -> torch.Tensor:
    return unpack(pack(values), values.numel(), torch.empty_like(values))


def scales_of(values: torch.Tensor) -> torch.Tensor:
    """The step of each element's block."""
    filled = torch.nn.functional.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    return (filled.abs().amax(1, keepdim=True) / 127).expand_as(filled).reshape(-1)[: values.numel()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_values_come_back_within_half_a_step_of_their_block(numel: int, dtype: torch.dtype) -> None:
    values = (torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 0.02).to(dtype)
    error = (there_and_back(values).float() - values.float()).abs()
    rounding = values.float().abs() * torch.finfo(dtype).eps
    assert (error <= scales_of(values) * 0.5001 + rounding).all()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-100),
        min_size=1,
        max_size=200,
    )
)
def test_the_bound_holds_for_any_values(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    error = (there_and_back(values) - values).abs()
    assert (error <= scales_of(values) * 0.5001).all()


def test_bytes_are_one_per_element_and_four_per_block() -> None:
    assert packed_bytes(BLOCK) == BLOCK + 4
    assert packed_bytes(BLOCK + 1) == 2 * (BLOCK + 4)
    assert packed_bytes(0) == 0
    assert pack(torch.ones(1000)).numel() == packed_bytes(1000) == 16 * 68


def test_zeros_come_back_as_zeros_beside_blocks_that_hold_something() -> None:
    values = torch.zeros(3 * BLOCK)
    values[BLOCK] = 5.0
    assert torch.equal(there_and_back(values), values)


def test_blocks_do_not_disturb_each_other() -> None:
    values = torch.cat([torch.full((BLOCK,), 1e-3), torch.full((BLOCK,), 1e3)])
    torch.testing.assert_close(there_and_back(values), values, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 3] = bad
    back = there_and_back(values)
    assert back[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(back[:BLOCK], values[:BLOCK])
    assert torch.equal(back[2 * BLOCK :], values[2 * BLOCK :])


def test_packing_what_came_back_gives_the_same_values() -> None:
    values = torch.randn(5 * BLOCK + 7, generator=torch.Generator().manual_seed(1))
    once = there_and_back(values)
    torch.testing.assert_close(there_and_back(once), once, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("start", "numel"), [(0, 1), (BLOCK, 2 * BLOCK), (3 * BLOCK, 100), (2 * BLOCK, PIECE + 3)])
def test_a_part_comes_back_as_it_does_in_the_whole(start: int, numel: int) -> None:
    values = torch.randn(PIECE + 10 * BLOCK, generator=torch.Generator().manual_seed(2))
    packed = pack(values)
    part = unpack(packed, values.numel(), torch.empty(numel), start)
    assert torch.equal(part, there_and_back(values)[start : start + numel])


def test_adding_sums_what_came_back() -> None:
    a, b = torch.randn(2, 300, generator=torch.Generator().manual_seed(3))
    out = torch.zeros(300)
    for each in (a, b):
        unpack(pack(each), 300, out, add=True)
    assert torch.equal(out, there_and_back(a) + there_and_back(b))


def test_values_are_left_as_they_are() -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(4))
    before = values.clone()
    pack(values)
    assert torch.equal(values, before)


@pytest.mark.parametrize(("start", "numel"), [(0, 1), (BLOCK, 100), (3 * BLOCK, 4 * BLOCK)])
def test_a_part_is_packed_in_its_place_and_leaves_the_others(start: int, numel: int) -> None:
    values = torch.randn(10 * BLOCK, generator=torch.Generator().manual_seed(5))
    fresh = torch.randn(numel, generator=torch.Generator().manual_seed(6))
    packed = pack(values)
    pack_into(packed, values.numel(), fresh, start)
    filled = -(-numel // BLOCK) * BLOCK
    expected = there_and_back(values)
    expected[start : start + filled] = 0
    expected[start : start + numel] = there_and_back(fresh)
    assert torch.equal(unpack(packed, values.numel(), torch.empty_like(values)), expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (BLOCK, 3 * BLOCK), (2 * BLOCK, 9 * BLOCK + 5), (0, 10 * BLOCK)])
def test_byte_ranges_are_a_part_packed_by_itself(start: int, stop: int) -> None:
    values = torch.randn(10 * BLOCK, generator=torch.Generator().manual_seed(7))
    packed = pack(values)
    found = torch.cat([packed[each] for each in byte_ranges(values.numel(), start, stop)])
    filled = min(values.numel(), -(-stop // BLOCK) * BLOCK)
    assert torch.equal(found, pack(values[start:filled]))
