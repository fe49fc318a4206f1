"""ShardedGrad: what `p.grad` holds while the gradient itself rests at home.

It has the right shape and dtype, answers norms and scaling, so that `clip_grad_norm_` and GradScaler work, and raises for
everything else, never silently nothing.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from tiermem.zero.unit import Shard

T = TypeVar("T")


class Norms(Protocol):
    """Who knows the norms of gradients at home."""

    @property
    def divisor(self) -> float:
        """What sums over ranks are divided by."""

    def sums_of_squares(self, shards: Sequence[Shard]) -> list[float]:
        """Per parameter, over all ranks, of the sums over ranks. Collective."""


def forget(shard: Shard) -> None:
    """Says that no gradient of a parameter rests at home."""
    shard.has_gradient, shard.is_zeroed, shard.grad_factor, shard.block_sums = False, False, 1.0, []


def _zero(shard: Shard) -> None:
    """Makes a gradient that rests at home zero; what lies there is overwritten by the next one, or before the step."""
    shard.is_zeroed, shard.grad_factor, shard.block_sums = True, 1.0, []


class ShardedGrad(torch.Tensor):
    """Stands for a gradient that rests elsewhere: shape, dtype, norms and scaling; everything else raises.

    `torch.nn.utils.clip_grad_norm_`, `get_total_norm` and GradScaler's unscale work on it: multiplying it is remembered
    and folded into the step. To see its values use `Shards.gradient(param)`.
    """

    _shard: weakref.ref[Shard]  # weakly: `p.grad` hangs on the parameter where the garbage collector does not look
    _homes: weakref.ref[Norms]

    @staticmethod
    def __new__(cls, shard: Shard, homes: Norms) -> ShardedGrad:
        param = shard.param
        grad: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=param.grad_dtype or param.dtype, device=param.device
        )
        grad._shard, grad._homes = weakref.ref(shard), weakref.ref(homes)
        return grad

    def __init__(self, shard: Shard, homes: Norms) -> None:
        super().__init__()

    @property
    def shard(self) -> Shard:
        """Whose gradient this is. Raises RuntimeError when its sharded model is gone."""
        return _living(self._shard())

    @property
    def homes(self) -> Norms:
        """Where it rests. Raises RuntimeError when its sharded model is gone."""
        return _living(self._homes())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.shard.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in ("aten::detach", "aten::alias"):
            return args[0]
        if name == "aten::linalg_vector_norm" and _is_two_norm(args[1:], kwargs):
            return _norms([args[0]])[0]
        if name == "aten::_foreach_norm" and _is_two_norm(args[1:], kwargs):
            return _norms(args[0])
        if name in ("aten::mul_", "aten::div_"):
            _scale([args[0]], args[1], name.startswith("aten::div"))
            return args[0]
        if name in ("aten::_foreach_mul_", "aten::_foreach_div_"):
            _scale(args[0], args[1], "div" in name)
            return None
        if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            grads, found_inf, inv_scale = args
            if not all(math.isfinite(float(n)) for n in _norms(grads)):
                found_inf.fill_(1.0)
            _scale(grads, inv_scale, False)
            return None
        if name in ("aten::zero_", "aten::_foreach_zero_"):
            for grad in args[0] if name == "aten::_foreach_zero_" else args:
                _zero(grad.shard)
            return args[0] if name == "aten::zero_" else None
        raise RuntimeError(
            f"{name} on the gradient of a sharded parameter: its values rest elsewhere. Norms and scaling work in place; "
            "to read it use Shards.gradient(param) between backward and step"
        )


def _living(found: T | None) -> T:
    if found is None:
        raise RuntimeError("the sharded model that this gradient belongs to is gone: set p.grad to None")
    return found


def _is_two_norm(args: Sequence[Any], kwargs: Any) -> bool:
    order = args[0] if args else (kwargs or {}).get("ord", 2)
    dims = args[1] if len(args) > 1 else None
    return float(order) == 2.0 and dims is None


def _norms(grads: Sequence[ShardedGrad]) -> list[torch.Tensor]:
    homes = grads[0].homes
    sums = homes.sums_of_squares([g.shard for g in grads])
    return [
        torch.tensor(math.sqrt(s) / homes.divisor, dtype=torch.float32, device=g.device)
        for s, g in zip(sums, grads, strict=True)
    ]


def _scale(grads: Sequence[ShardedGrad], factor: Any, is_division: bool) -> None:
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * len(grads)
    for grad, value in zip(grads, factors, strict=True):
        number = float(value)
        grad.shard.grad_factor *= 1.0 / number if is_division else number
