"""Gradients: from where autograd leaves them to where they rest until the step.

When every use of a unit in a backward has been answered, its parameters' `p.grad` are reduced over ranks, copied (or added,
when micro-batches accumulate) into the unit's gradient home, and measured in the same read: the sum of squares of fixed
blocks, in float64, from which global norm and the check for NaN and infinity are made. Then autograd's tensors are let go.

    HOST   the home is memory; the copy into it is the last
    NVME   the copy goes into a buffer, which is written behind; adding reads the home back first
    none   (step_in_backward) the unit is stepped from the buffer at once

A home may be in another dtype than the parameters (`Precision.grads`): micro-batches of a bf16 model then add up in fp32.

In place of the gradient `p.grad` holds a ShardedGrad: it has the right shape, answers norms and scaling (so that
`clip_grad_norm_` and GradScaler work) and raises for everything else, never silently nothing.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move
from tiermem.swap.native import Workers, store_gradient
from tiermem.swap.store import TensorStore
from tiermem.zero.collectives import total
from tiermem.zero.reduce import reduce_gradient
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Shard, Unit

T = TypeVar("T")


class GradientHomes:
    """Receives gradients and knows their norms.

    Args:
        units: the trainable ones.
        home: HOST, NVME, or DEVICE for "none is held".
        pool: buffers for NVME and none; also of gradients on their way from a GPU.
        policy: says in what dtype gradients rest, and how many are handed to one reduction.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        home: Tier,
        store: TensorStore,
        topology: Topology,
        workers: Workers,
        pool: Pool | None,
        policy: OffloadPolicy,
    ) -> None:
        self.home = home
        self._units = units
        self._store = store
        self._topology = topology
        self._workers = workers
        self._pool = pool
        self._policy = policy
        self._leaving: list[tuple[Unit, Slot, Move]] = []
        self.consume: Callable[[Unit, torch.Tensor], None] | None = None  # takes them at once when none is held
        for unit in units:
            for shard in unit.shards:
                shard.reduce_dtype = DTYPES[policy.reduce_dtype] if policy.reduce_dtype is not None else None
            if home is not Tier.DEVICE:
                store.reserve(self.entry(unit), (unit.shard_numel,), self.dtype(unit), home)

    @staticmethod
    def entry(unit: Unit) -> str:
        """The name of a unit's gradients in the store."""
        return f"grad/{unit.index}/{unit.name}"

    def dtype(self, unit: Unit) -> torch.dtype:
        """In what a unit's gradients are added up and rest."""
        return self._policy.precision.grad_dtype(unit.dtype)

    def flat(self, unit: Unit) -> torch.Tensor | None:
        """A unit's gradients in the shard layout, when they rest on HOST."""
        return self._store.view(self.entry(unit)) if self.home is Tier.HOST else None

    def receive(self, unit: Unit) -> None:
        """Takes the gradients that autograd left on a unit's parameters. Collective; blocks for the arithmetic only."""
        fresh = [s for s in unit.shards if s.param.grad is not None and not isinstance(s.param.grad, ShardedGrad)]
        if not fresh:
            return
        start_ns = time.monotonic_ns()
        if self.home is Tier.HOST:
            self._merge(unit, fresh, self._store.view(self.entry(unit)))
        else:
            self._pass_on(unit, fresh)
        self._store.recorder.add("reduce", unit.name, start_ns, time.monotonic_ns(), unit.shard_bytes)
        for shard in fresh:
            shard.param.grad = None

    def show(self, unit: Unit) -> None:
        """Lets `p.grad` stand for the gradients that rest at home."""
        for shard in unit.shards:
            if shard.has_gradient and shard.param.grad is None:
                shard.param.grad = ShardedGrad(shard, self)

    def hide(self, unit: Unit) -> None:
        """Before autograd adds to `p.grad`: takes the stand-in away, or, if the user did, forgets the gradient."""
        for shard in unit.shards:
            if isinstance(shard.param.grad, ShardedGrad):
                shard.param.grad = None
            elif shard.has_gradient and shard.param.grad is None:
                forget(shard)

    def drop_what_was_zeroed(self, units: Sequence[Unit]) -> None:
        """Before a step: forgets gradients whose stand-in the user removed."""
        for unit in units:
            for shard in unit.shards:
                if shard.has_gradient and shard.param.grad is None:
                    forget(shard)

    def settle(self) -> None:
        """Waits until every gradient is at home. Raises OSError."""
        while self._leaving:
            self._reap()

    def sums_of_squares(self, shards: Sequence[Shard]) -> list[float]:
        """Per parameter, over all ranks, in float64, with what was multiplied since. Collective."""
        local = [math.fsum(s.block_sums) * s.grad_factor**2 if s.has_gradient else 0.0 for s in shards]
        sums = torch.tensor(local, dtype=torch.float64)
        if self._topology.group is not None and torch.distributed.get_backend(self._topology.group) == "nccl":
            sums = sums.cuda()
        values: list[float] = total(self._topology, sums).tolist()
        return values

    def norm(self) -> float:
        """The global 2-norm of what rests at home, mean over ranks included; NaN or infinity when anything is. Collective."""
        shards = sorted((s for u in self._units for s in u.shards), key=lambda s: s.index)
        return math.sqrt(math.fsum(self.sums_of_squares(shards))) / self._topology.world

    # ---- merging ---------------------------------------------------------------------------------------------------------

    def _merge(self, unit: Unit, fresh: Sequence[Shard], home: torch.Tensor) -> None:
        for shard in fresh:
            grad = shard.param.grad
            assert grad is not None
            part = reduce_gradient(self._topology, shard, grad, self._policy.reduce_bucket_numel)
            valid = min(shard.shard_numel, max(0, shard.numel - self._first_element(shard)))
            dst = home[shard.shard_offset : shard.shard_offset + valid]
            src = part[:valid] if part.device.type == "cpu" else part[:valid].cpu()
            first = self._first_element(shard)
            if shard.has_gradient and shard.grad_factor != 1.0:
                dst.mul_(shard.grad_factor)  # what the user scaled is what is at home, not what comes
            shard.block_sums = store_gradient(self._workers, dst, src, first, accumulate=shard.has_gradient)
            shard.has_gradient, shard.grad_factor = True, 1.0

    def _pass_on(self, unit: Unit, fresh: Sequence[Shard]) -> None:
        slot = self._take()
        dtype = self.dtype(unit)
        data = slot.tensor[: unit.shard_numel * dtype.itemsize]
        home = data.view(dtype)
        try:
            if any(s.has_gradient for s in unit.shards):
                while any(each is unit for each, _, _ in self._leaving):
                    self._reap()  # what is being written is not to be read before
                self._store.read([(self.entry(unit), 0, data)], f"grad {unit.name}").wait()
            self._merge(unit, fresh, home)
            if self.home is Tier.DEVICE:
                assert self.consume is not None and self._pool is not None
                self.consume(unit, home)
                self._pool.give_back(slot)
                return
            move = self._store.write([(self.entry(unit), 0, data)], f"grad {unit.name}")
        except BaseException:
            assert self._pool is not None
            self._pool.give_back(slot)
            raise
        self._leaving.append((unit, slot, move))

    def _first_element(self, shard: Shard) -> int:
        return shard.shard_numel * self._topology.shard_rank

    def _take(self) -> Slot:
        assert self._pool is not None
        slot = self._pool.take()
        if slot is None:
            self._reap()
            slot = self._pool.take()
        assert slot is not None
        return slot

    def _reap(self) -> None:
        _, slot, move = self._leaving.pop(0)
        try:
            move.wait()
        finally:
            assert self._pool is not None
            self._pool.give_back(slot)


def forget(shard: Shard) -> None:
    """Says that no gradient of a parameter rests at home."""
    shard.has_gradient, shard.grad_factor, shard.block_sums = False, 1.0, []


class ShardedGrad(torch.Tensor):
    """Stands for a gradient that rests elsewhere: shape, dtype, norms and scaling; everything else raises.

    `torch.nn.utils.clip_grad_norm_`, `get_total_norm` and GradScaler's unscale work on it: multiplying it is remembered
    and folded into the step. To see its values use `Shards.gradient(param)`.
    """

    _shard: weakref.ref[Shard]  # weakly: `p.grad` hangs on the parameter where the garbage collector does not look
    _homes: weakref.ref[GradientHomes]

    @staticmethod
    def __new__(cls, shard: Shard, homes: GradientHomes) -> ShardedGrad:
        param = shard.param
        grad: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=param.dtype, device=param.device
        )
        grad._shard, grad._homes = weakref.ref(shard), weakref.ref(homes)
        return grad

    def __init__(self, shard: Shard, homes: GradientHomes) -> None:
        super().__init__()

    @property
    def shard(self) -> Shard:
        """Whose gradient this is. Raises RuntimeError when its sharded model is gone."""
        return _living(self._shard())

    @property
    def homes(self) -> GradientHomes:
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
                forget(grad.shard)
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
    world = homes._topology.world
    return [
        torch.tensor(math.sqrt(s) / world, dtype=torch.float32, device=g.device)
        for s, g in zip(sums, grads, strict=True)
    ]


def _scale(grads: Sequence[ShardedGrad], factor: Any, is_division: bool) -> None:
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * len(grads)
    for grad, value in zip(grads, factors, strict=True):
        number = float(value)
        grad.shard.grad_factor *= 1.0 / number if is_division else number
