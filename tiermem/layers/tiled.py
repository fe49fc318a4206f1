"""TiledLinear and TiledMLP: layers cut into tiles, so that not all of their weights or activations
are in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiermem.run.access import GatheredParameters
from tiermem.swap.base.grad_mode import without_grad
from tiermem.units import registry
from tiermem.units.leaf import UsedInPieces

# ---- TiledLinear ---------------------------------------------------------------------------------


class TiledLinear(UsedInPieces):
    """A replacement for `nn.Linear` whose tiles are fetched, used and released one after the other.

    It serves an operator larger than a unit's buffer. The weight is cut into out_splits x in_splits
    smaller layers. Each is a unit, so the memory of weights in use falls with their number:

        y[o] = sum over i of tile[o][i](x[i])        the last tile of each row has the bias

    Inputs, outputs and gradients of the whole layer are not cut; TiledMLP cuts activations, along
    the sequence.

    Args:
        in_features, out_features, bias: as in nn.Linear.
        in_splits, out_splits: number of pieces of the input and of the output. Where they do not
            divide it, the first pieces are one element larger, as in the reference.
        input_is_already_split: forward takes a sequence of in_splits tensors.
        combine_out_splits: forward returns one tensor; False: a list of out_splits tensors.
        linear_cls: the class of a tile; called with (in_features, out_features, bias=...,
            **kwargs).
        init_linear: a layer from which weight and bias are copied.

    The tiles are `linears[o][i]`. Raises RuntimeError when a number of splits is less than 1 or
    more than the features.
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
        _check_splits("in", in_splits, in_features)
        _check_splits("out", out_splits, out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.linears = nn.ModuleList()
        for num_out in _sizes(out_features, out_splits):
            row = nn.ModuleList()
            for i, num_in in enumerate(_sizes(in_features, in_splits)):
                row.append(linear_cls(num_in, num_out, bias=bias and i == in_splits - 1, **kwargs))
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: torch.Tensor | list[torch.Tensor]) -> Any:
        """y = x W^T + b over the last dimension of the input. Returns a tensor, or a list of
        out_splits tensors."""
        pieces = self._split(input_)
        return self._combine([self._row(_tiles_of(row), pieces) for row in self.linears])

    @without_grad
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies weight and bias of a whole layer into the tiles, one tile at a time.

        Both layers may be partitioned, in zero.Init or by `shard`. Then it is collective and
        blocks, memory holds the whole other layer and one tile, and every rank gets rank 0's
        values. Raises RuntimeError for another shape.
        """
        self._check_fits(other)
        with GatheredParameters(_free(other)):
            rows = torch.tensor_split(other.weight, self.out_splits, dim=0)
            biases = torch.tensor_split(other.bias, self.out_splits) if self.use_bias else ()
            for o, (row, weight) in enumerate(zip(self.linears, rows, strict=True)):
                pieces = torch.tensor_split(weight, self.in_splits, dim=1)
                for i, (tile, piece) in enumerate(zip(_tiles_of(row), pieces, strict=True)):
                    with GatheredParameters(_free(tile), modifier_rank=0):
                        tile.weight.copy_(piece)
                        if self.use_bias and i == self.in_splits - 1:
                            tile.bias.copy_(biases[o])

    def extra_repr(self) -> str:
        """The number of splits."""
        return f"in_splits={self.in_splits}, out_splits={self.out_splits}"

    def _split(self, input_: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
        if self.input_is_already_split:
            pieces = list(input_)
            if len(pieces) != self.in_splits:
                raise RuntimeError(
                    f"{len(pieces)} pieces of input are given; in_splits is {self.in_splits}"
                )
            return pieces
        if not isinstance(input_, torch.Tensor) or input_.shape[-1] != self.in_features:
            shape = (
                tuple(input_.shape) if isinstance(input_, torch.Tensor) else type(input_).__name__
            )
            raise RuntimeError(
                f"the input is {shape}; its last dimension must be in_features={self.in_features}"
            )
        return list(torch.tensor_split(input_, self.in_splits, dim=-1))

    def _row(self, tiles: list[Any], pieces: list[torch.Tensor]) -> Any:
        total: torch.Tensor | None = None
        for tile, piece in zip(tiles, pieces, strict=True):
            part = tile(piece)
            total = part if total is None else total + part
        return total

    def _combine(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _check_fits(self, other: nn.Linear) -> None:
        if (other.in_features, other.out_features) != (self.in_features, self.out_features):
            raise RuntimeError(
                f"the other layer is {other.in_features} -> {other.out_features}, this one "
                f"{self.in_features} -> {self.out_features}"
            )
        if (other.bias is not None) != self.use_bias:
            raise RuntimeError(
                f"the other layer has {'a' if other.bias is not None else 'no'} bias, this one has "
                "not the same"
            )


class TiledLinearReturnBias(TiledLinear):
    """A TiledLinear whose tiles return (output, bias), as Megatron-LM's do; forward returns
    (outputs, biases).

    Outputs of a row are added up. A row's bias is the last one that is not None. Biases are
    combined like outputs; None when no row has one.
    """

    def _row(self, tiles: list[Any], pieces: list[torch.Tensor]) -> Any:
        total: torch.Tensor | None = None
        bias: torch.Tensor | None = None
        for tile, piece in zip(tiles, pieces, strict=True):
            returned = tile(piece)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise RuntimeError(
                    f"a tile returned {type(returned).__name__}; TiledLinearReturnBias needs "
                    "(output, bias). Give a linear_cls that returns both, or use TiledLinear"
                )
            part, own = returned
            total = part if total is None else total + part
            bias = own if own is not None else bias
        return total, bias

    def _combine(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        combined = super()._combine([output for output, _ in outputs])
        return combined, super()._combine(biases) if biases else None


def _sizes(features: int, splits: int) -> list[int]:
    """The sizes of the pieces that torch.tensor_split makes."""
    return [features // splits + (number < features % splits) for number in range(splits)]


def _check_splits(name: str, splits: int, features: int) -> None:
    if not 1 <= splits <= features:
        raise RuntimeError(
            f"{name}_splits is {splits}; allowed are 1 to {name}_features={features}"
        )


def _tiles_of(row: nn.Module) -> list[Any]:
    assert isinstance(row, nn.ModuleList)
    return list(row)


def _free(module: nn.Module) -> list[nn.Parameter]:
    """A module's parameters that no context around the caller has gathered."""
    return [param for param in module.parameters() if not registry.is_gathered(param)]


# ---- TiledMLP ------------------------------------------------------------------------------------

AnyModule = TypeVar("AnyModule")


class TiledMLP:
    """A position-wise block computed over pieces of the sequence: only one piece's inner
    activations are in memory.

        x  [batch, sequence, hidden]  --cut along the sequence-->  pieces  --fn, one by one-->  outputs  --joined-->  y

    An MLP treats every position alike and widens it (hidden -> 4 x hidden and more), which fills
    memory at long sequences. Forward keeps only the pieces of x. Backward computes each piece
    again, last piece first, and drops it. Peak memory of inner activations falls with the number of
    pieces; the cost is a second forward.

    Call `TiledMLP.apply(fn, self, x, shards, compute_params)` in a module's forward, as with the
    reference.
    """

    @staticmethod
    def apply(
        fn: Callable[[AnyModule, torch.Tensor], torch.Tensor],
        module: AnyModule,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Computes `fn(module, x)` over `shards` pieces of the sequence, the last dimension but
        one.

        Pieces differ by at most one position. More shards than positions make one piece per
        position. On several ranks all use the same number when the module's layers are units of
        their own. `compute_params` is ignored: gradients are final when the last piece has been
        computed. Raises ValueError for less than 1 shard or an input of one dimension.
        """
        if shards < 1 or x.dim() < 2:
            raise ValueError(
                f"shards is {shards} and x has shape {tuple(x.shape)}; allowed are 1 shard or "
                "more, and at least the dimensions [sequence, hidden]"
            )
        pieces: Sequence[Any] = torch.tensor_split(x, max(1, min(shards, x.shape[-2])), dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([fn(module, piece) for piece in pieces], dim=-2)
        outputs = [checkpoint(fn, module, piece, use_reentrant=False) for piece in pieces]
        return torch.cat(outputs, dim=-2)
