"""TiledMLP: a position-wise block computed over pieces of the sequence, so that its inner activations are those of one piece.

    x  [batch, sequence, hidden]  --cut along the sequence-->  pieces  --fn, one by one-->  outputs  --joined-->  y

An MLP treats every position alike, and widens it (hidden -> 4 x hidden and more): at long sequences that is what fills memory.
Forward keeps the pieces of x alone; backward computes each piece again, last first, and drops it. Peak memory of inner
activations falls with the number of pieces; the price is a second forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

AnyModule = TypeVar("AnyModule")


class TiledMLP:
    """Called as the reference's: `TiledMLP.apply(fn, self, x, shards, compute_params)` in a module's forward."""

    @staticmethod
    def apply(
        fn: Callable[[AnyModule, torch.Tensor], torch.Tensor],
        module: AnyModule,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Computes `fn(module, x)` over `shards` pieces of the sequence, the last dimension but one.

        Pieces differ by at most one position; more shards than positions make a piece per position. On several ranks all use
        the same number when the module's layers are units of their own. `compute_params` is not needed: gradients count as
        final when the last piece has been computed. Raises ValueError for less than 1 shard or an input of one dimension.
        """
        if shards < 1 or x.dim() < 2:
            raise ValueError(
                f"shards is {shards} and x has shape {tuple(x.shape)}; allowed are 1 shard or more, and at least "
                "the dimensions [sequence, hidden]"
            )
        pieces: Sequence[Any] = torch.tensor_split(x, max(1, min(shards, x.shape[-2])), dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([fn(module, piece) for piece in pieces], dim=-2)
        outputs = [checkpoint(fn, module, piece, use_reentrant=False) for piece in pieces]
        return torch.cat(outputs, dim=-2)
