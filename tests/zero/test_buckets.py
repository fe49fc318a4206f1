"""Are gradients packed so that every rank's column holds its part of every parameter, once, within
the limit?"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tiermem import OffloadPolicy
from tiermem.ranks.topology import Topology
from tiermem.swap.base.ranges import round_up
from tiermem.units.unit import Unit, divide
from tiermem.wires.reduce import Bucket, cut, largest_buffer, put_in

SIZES = st.lists(st.integers(0, 23), min_size=1, max_size=6)


class Parameters(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self) -> None: ...


def unit_of(sizes: list[int], num_shards: int) -> Unit:
    (unit,) = divide(Parameters(sizes), OffloadPolicy(stage=2), num_shards).units
    return unit


def summed_columns(
    unit: Unit, buckets: list[Bucket], num_shards: int, grads: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Every parameter, put together again from what each rank's columns hold of it."""
    wholes = [torch.full((s.shard_numel * num_shards,), torch.nan) for s in unit.shards]
    for bucket in buckets:
        flat = torch.full((bucket.column_numel * num_shards,), torch.nan, dtype=bucket.dtype)
        columns = flat.view(num_shards, bucket.column_numel)
        for part, place in zip(bucket.ranges, bucket.split(columns), strict=True):
            put_in(part, grads[part.shard.index], place)
        assert not flat.isnan().any()
        for rank, column in enumerate(columns):
            for part, values in zip(bucket.ranges, bucket.split(column), strict=True):
                begin = part.shard.shard_numel * rank + part.start
                place = wholes[part.shard.index][begin : begin + values.numel()]
                assert place.isnan().all()
                place.copy_(values)
    return wholes


@given(SIZES, st.integers(1, 5), st.integers(0, 70))
def test_columns_hold_every_element_once_and_zeros_behind(
    sizes: list[int], num_shards: int, limit: int
) -> None:
    unit = unit_of(sizes, num_shards)
    grads = [torch.randn(size) for size in sizes]
    buckets = cut(unit, num_shards, limit)
    for whole, grad in zip(summed_columns(unit, buckets, num_shards, grads), grads, strict=True):
        assert torch.equal(whole[: grad.numel()], grad)
        assert not whole[grad.numel() :].any()


@given(SIZES, st.integers(1, 5), st.integers(0, 70))
def test_no_bucket_is_larger_than_the_limit_and_only_the_last_is_smaller(
    sizes: list[int], num_shards: int, limit: int
) -> None:
    unit = unit_of(sizes, num_shards)
    room = max(1, limit // num_shards)
    buckets = cut(unit, num_shards, limit)
    assert all(bucket.column_numel <= room for bucket in buckets)
    assert sum(bucket.column_numel for bucket in buckets) == sum(
        -(-size // num_shards) for size in sizes
    )
    assert all(bucket.column_numel == room for bucket in buckets[:-1])
    largest = max((bucket.num_bytes for bucket in buckets), default=0)
    sent, topology = round_up(largest, 64), Topology(None, 0, num_shards, num_shards, 0)
    # an accelerator's sum; the columns of all ranks on a CPU
    received = largest // num_shards, largest
    for is_gpu, beside in zip((True, False), received, strict=True):
        needed = largest_buffer(unit, topology, limit, is_gpu)
        assert needed == (sent + beside if num_shards > 1 else largest)


def test_a_missing_gradient_is_zeros() -> None:
    unit = unit_of([5, 3], 2)
    (bucket,) = cut(unit, 2, 100)
    flat = torch.full((bucket.column_numel * 2,), torch.nan)
    first, second = bucket.split(flat.view(2, -1))
    put_in(bucket.ranges[0], None, first)
    put_in(bucket.ranges[1], torch.tensor([1.0, 2.0, 3.0]), second)
    assert flat.tolist() == [0, 0, 0, 1, 2, 0, 0, 0, 3, 0]


def test_a_gradient_is_packed_in_the_dtype_it_is_added_up_in() -> None:
    unit = unit_of([5, 3, 4], 2)
    unit.shards[1].reduce_dtype = torch.bfloat16
    buckets = cut(unit, 2, 100)
    assert [(b.dtype, [p.shard.index for p in b.ranges]) for b in buckets] == [
        (torch.float32, [0, 2]),
        (torch.bfloat16, [1]),
    ]
    assert [bucket.num_bytes for bucket in buckets] == [(3 + 2) * 2 * 4, 2 * 2 * 2]
