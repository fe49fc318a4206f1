"""Do the parts of a tile's states lie one behind the other, whole and in pieces, in the bytes that
arithmetic says?"""

from __future__ import annotations

import itertools

import pytest
import torch

from tiermem.precision import PRESETS, Precision
from tiermem.swap.base.parts import Quantised
from tiermem.units.state_layout import StateLayout, StateViews, is_positive

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
NUMEL = 3 * 4096
PER_ELEMENT = {"exact": 12, "compact": 6, "bf16": 4, "tiny": 4 + 2 / 64}
LAYOUTS = [
    StateLayout(dtype, Precision(master, moments), num_moments)
    for (dtype, master), moments, num_moments in itertools.product(
        [(BF16, "fp32"), (BF16, "split"), (BF16, "bf16"), (FP16, "fp16"), (FP32, "split")],
        ["fp32", "bf16", "fp16", "8bit"],
        [0, 1, 3],
    )
]


def parts_of(views: StateViews) -> list[torch.Tensor]:
    """Every tensor of the views, 8-bit moments as codes and scales."""
    found = [] if views.master is None else [views.master]
    for moment in views.moments:
        found += [*moment] if isinstance(moment, Quantised) else [moment]
    return found


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_bytes_per_element(name: str) -> None:
    layout = StateLayout(BF16, PRESETS[name], 2)
    assert layout.total_bytes(1 << 20) == PER_ELEMENT[name] * (1 << 20)
    fp32 = {"exact": 8, "compact": 4, "bf16": 4, "tiny": 2 + 2 / 64}
    assert StateLayout(FP32, PRESETS[name], 2).total_bytes(1 << 20) == fp32[name] * (1 << 20)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_tile_is_a_range_that_the_disk_takes_and_no_longer(layout: StateLayout) -> None:
    needed = sum(part.num_bytes(NUMEL) for part in layout.parts)
    total = layout.total_bytes(NUMEL)
    assert total % 4096 == 0
    assert needed <= total < needed + 4096


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_views_cover_the_bytes_once_in_order(layout: StateLayout) -> None:
    states = torch.zeros(layout.total_bytes(NUMEL), dtype=torch.uint8)
    end = states.data_ptr()
    for tensor in parts_of(layout.views(states, NUMEL)):
        assert tensor.data_ptr() == end
        assert tensor.data_ptr() % 64 == 0
        end += tensor.nbytes
    assert end - states.data_ptr() == sum(part.num_bytes(NUMEL) for part in layout.parts)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("start", "numel"), [(0, NUMEL), (64, 1), (128, 4095), (4096, 4159), (NUMEL - 64, 64)]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_piece_read_by_ranges_is_the_piece_of_the_views(
    layout: StateLayout, start: int, numel: int
) -> None:
    states = torch.randint(0, 256, (layout.total_bytes(NUMEL),), dtype=torch.uint8)
    piece = layout.views(states, NUMEL).piece(start, numel)
    read = []
    for part in layout.parts:
        ranges = layout.ranges(part, NUMEL, start, numel)
        data = torch.cat([states[each.offset : each.offset + each.num_bytes] for each in ranges])
        view = part.view(data, numel)
        read += [*view] if isinstance(view, Quantised) else [view]
    assert len(read) == len(parts_of(piece))
    for theirs, ours in zip(read, parts_of(piece), strict=True):
        assert theirs.dtype == ours.dtype
        assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))


def test_initial_values_lie_behind_a_split_master_and_in_the_place_of_an_fp32_one() -> None:
    exact, tiny = StateLayout(BF16, PRESETS["exact"], 2), StateLayout(BF16, PRESETS["tiny"], 2)
    assert exact.initial_offset_bytes(NUMEL) == 0
    assert exact.buffer_bytes(NUMEL, keeps_initial=True) == exact.total_bytes(NUMEL)
    assert tiny.initial_offset_bytes(NUMEL) == 2 * NUMEL
    assert tiny.buffer_bytes(NUMEL, keeps_initial=True) == 6 * NUMEL
    assert tiny.buffer_bytes(NUMEL, keeps_initial=False) == tiny.total_bytes(NUMEL) < 6 * NUMEL


def test_a_step_reads_the_weight_where_it_is_the_master_or_half_of_it() -> None:
    assert [name for name in PRESETS if StateLayout(BF16, PRESETS[name], 2).reads_weight] == [
        "compact",
        "bf16",
        "tiny",
    ]
    assert all(StateLayout(FP32, precision, 2).reads_weight for precision in PRESETS.values())


def test_moments_that_are_never_negative() -> None:
    names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "sum", "momentum_buffer"]
    assert [name for name in names if is_positive(name)] == ["exp_avg_sq", "max_exp_avg_sq", "sum"]
