"""TiledLinear: a linear layer cut into tiles that are fetched, used and released one after the other.

For an operator larger than a unit's buffer. The weight becomes out_splits x in_splits smaller layers; each is a unit of its
own, so that the memory at work falls with their number:

    y[o] = sum over i of tile[o][i](x[i])        the bias sits on the last tile of each row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class TiledLinear(nn.Module):
    """A drop-in for `nn.Linear`, tile by tile.

    Args:
        in_features, out_features, bias: as of nn.Linear.
        in_splits, out_splits: pieces of the input and of the output; features that do not divide evenly make pieces that
            differ by one.
        input_is_already_split: forward takes a sequence of in_splits tensors.
        combine_out_splits: forward returns one tensor; False: a list of out_splits tensors.
        linear_cls: what a tile is; called with (in_features, out_features, bias=..., **kwargs).
        init_linear: a layer whose weight and bias are copied.

    Raises RuntimeError when a number of splits is less than 1 or more than the features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}_splits is {splits}; allowed are 1 to {name}_features={features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes, self.out_sizes = _pieces(in_features, in_splits), _pieces(out_features, out_splits)
        self.tiles = nn.ModuleList()
        for out_size in self.out_sizes:
            row = nn.ModuleList()
            for i, in_size in enumerate(self.in_sizes):
                row.append(linear_cls(in_size, out_size, bias=bias and i == in_splits - 1, **kwargs))
            self.tiles.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """y = x W^T + b, over the last dimension of the input."""
        if self.input_is_already_split:
            pieces = list(input_)
        else:
            assert isinstance(input_, torch.Tensor)
            pieces = list(torch.split(input_, self.in_sizes, dim=-1))
        if len(pieces) != len(self.in_sizes):
            raise RuntimeError(f"{len(pieces)} pieces of input are given; in_splits is {len(self.in_sizes)}")
        outputs = [self._row(row, pieces) for row in self.tiles]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies weight and bias of a whole layer into the tiles; before the model is sharded."""
        if (other.in_features, other.out_features) != (self.in_features, self.out_features):
            raise RuntimeError(
                f"the other layer is {other.in_features} -> {other.out_features}, this one {self.in_features} -> "
                f"{self.out_features}"
            )
        if (other.bias is not None) != self.use_bias:
            raise RuntimeError(
                f"the other layer has {'a' if other.bias is not None else 'no'} bias, this one has not the same"
            )
        rows = torch.split(other.weight, self.out_sizes, dim=0)
        biases = torch.split(other.bias, self.out_sizes) if other.bias is not None else None
        for o, (row, weight) in enumerate(zip(self.tiles, rows, strict=True)):
            for tile, piece in zip(_tiles_of(row), torch.split(weight, self.in_sizes, dim=1), strict=True):
                tile.weight.copy_(piece)
            if biases is not None:
                _tiles_of(row)[-1].bias.copy_(biases[o])

    def extra_repr(self) -> str:
        """The splits."""
        return f"in_splits={len(self.in_sizes)}, out_splits={len(self.out_sizes)}"

    @staticmethod
    def _row(row: nn.Module, pieces: list[torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for tile, piece in zip(_tiles_of(row), pieces, strict=True):
            part = tile(piece)
            total = part if total is None else total + part
        assert total is not None
        return total


def _tiles_of(row: nn.Module) -> list[Any]:
    assert isinstance(row, nn.ModuleList)
    return list(row)


def _pieces(features: int, splits: int) -> list[int]:
    return [features // splits + int(i < features % splits) for i in range(splits)]
