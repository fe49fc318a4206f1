"""Putting a gradient: other values in place of a reduced gradient that rests at home, between backward and step.

The values are the gradient itself, the mean over ranks; at home lie sums. So the values rest as they are, and the factor
that every gradient carries to the step (`Shard.grad_factor`) says that they have been divided. The norm of the step is made of
them: their sums of squares take the place of those that were measured when the gradient came.
"""

from __future__ import annotations

import torch

from tiermem.policy import Tier
from tiermem.swap.native import store_gradient
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard
from tiermem.zero.weights.residency import LiveUnit


def put_gradient(shards: Shards, live: LiveUnit, shard: Shard, mine: torch.Tensor) -> None:
    """Puts this rank's part of a gradient, flat and without padding, where it rests. Blocks; raises OSError.

    It is rounded to what gradients rest in (`Precision.grads`). A parameter that had no gradient has one then, on this rank.
    """
    homes, workers = shards.homes, shards.workers
    homes.settle()
    values = mine.detach().to("cpu", homes.dtype(live.unit)).contiguous()
    flat, first = homes.flat(live.unit), shard.shard_numel * shards.topology.shard_rank
    if homes.home is Tier.DEVICE:
        assert flat is not None
        flat[shard.shard_offset : shard.shard_offset + values.numel()].copy_(values)
        sums = store_gradient(workers, None, values, first)
    elif flat is not None:
        home = flat[shard.shard_offset : shard.shard_offset + values.numel()]
        sums = store_gradient(workers, home, values, first)
    else:
        sums = store_gradient(workers, None, values, first)
        offset = shard.shard_offset * values.element_size()
        shards.values.write_part(homes.entry(live.unit), offset, values.view(torch.uint8))
    shard.block_sums, shard.grad_factor = sums, homes.divisor
    shard.has_gradient, shard.is_zeroed = True, False
    homes.show(live.unit)
