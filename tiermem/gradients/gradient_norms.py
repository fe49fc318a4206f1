"""Sums of squares of gradients, block by block, and what scales them, on the accelerator that has
them or on the CPU.

Each block's sum is computed when a part of a gradient comes home (gradient_store.py). Added up on
an accelerator, no thread waits; the CPU gets all of them in one copy, for which it waits once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.nn.functional import pad

from tiermem.swap.memory.accelerator import ToHost
from tiermem.units.unit import Shard


class BlockSums:
    """The blocks' sums of squares that an accelerator has, and their copy to the CPU."""

    def __init__(self) -> None:
        # the sums that are being copied
        self._coming: tuple[list[torch.Tensor], ToHost] | None = None

    def bring(self, every: Collection[Shard]) -> None:
        """Keeps the sums of squares of an accelerator on the CPU. Blocks until they are there."""
        self._start(every)
        coming = self._coming
        self._coming = None
        away = [shard for shard in every if isinstance(shard.gradient.block_sums, torch.Tensor)]
        if coming is not None and away:
            whole = coming[1].wait().tolist()
            for shard, own in zip(away, coming[0], strict=True):
                shard.gradient.bring_sums(whole[: own.numel()])
                del whole[: own.numel()]

    def squares_there(
        self, shards: Sequence[Shard], every: Collection[Shard]
    ) -> torch.Tensor | None:
        """The sum of squares of each parameter's gradient, float64, on the accelerator; None where
        the sums are not there.

        Adds the blocks' sums up as a binary tree. Starts to copy those of `every` parameter to the
        CPU.
        """
        alike: dict[int, dict[int, torch.Tensor]] = {}  # sums, by their count and shard's number
        for number, shard in enumerate(shards):
            sums = shard.gradient.block_sums
            if not shard.gradient.is_there or not len(sums):
                continue
            if not isinstance(sums, torch.Tensor):
                return None
            alike.setdefault(len(sums), {})[number] = sums
            device = sums.device
        if not alike:
            return None
        self._start(every)
        found = [torch.zeros((), dtype=torch.float64, device=device)] * len(shards)
        for count, own in alike.items():
            rows = torch.stack(list(own.values()))
            tree = pad(rows, (0, (1 << (count - 1).bit_length()) - count))
            while tree.shape[1] > 1:
                lower, upper = tree.chunk(2, dim=1)
                tree = lower + upper
            for number, sum_of in zip(own, tree.view(-1).unbind(), strict=True):
                found[number] = sum_of
        return torch.stack(found)

    def _start(self, every: Collection[Shard]) -> None:
        """Starts to copy sums of squares from an accelerator to the CPU, all at once, unless they
        are being copied."""
        away = [
            s.gradient.block_sums for s in every if isinstance(s.gradient.block_sums, torch.Tensor)
        ]
        before = [] if self._coming is None else self._coming[0]
        if away and [id(sums) for sums in before] != [id(sums) for sums in away]:
            self._coming = away, ToHost(torch.cat(away))


def with_factors(found: torch.Tensor, shards: Sequence[Shard]) -> torch.Tensor:
    """Values of parameters multiplied by the sizes of their factors that an accelerator
    computes."""
    by_factors: dict[tuple[int, ...], list[int]] = {}
    for number, shard in enumerate(shards):
        by_factors.setdefault(tuple(map(id, shard.gradient.factors_there)), []).append(number)
    for numbers in by_factors.values():
        for factor in shards[numbers[0]].gradient.factors_there:
            found = _scaled(found, numbers, factor.abs())
    return found


def _scaled(norms: torch.Tensor, numbers: Sequence[int], factor: torch.Tensor) -> torch.Tensor:
    """Norms, of which those with these numbers are multiplied by a factor on their device."""
    if len(numbers) == norms.numel():
        return norms * factor
    parts = list(norms.unbind())
    for number in numbers:
        parts[number] = parts[number] * factor
    return torch.stack(parts)
