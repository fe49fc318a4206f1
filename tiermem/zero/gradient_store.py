"""GradientStore: where gradients rest until the step, and what `p.grad` shows of them."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tiermem.policy import Tier
from tiermem.swap.accelerator import current_stream, is_accelerator, new_stream, on
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move
from tiermem.swap.native import Workers, store_gradient
from tiermem.swap.store import TensorStore
from tiermem.swap.torch_step import block_sums_in_torch
from tiermem.zero.state_layout import own_numel
from tiermem.zero.unit import Shard, Unit

# ---- ShardedGrad: what `p.grad` holds while the gradient itself rests at home ----------------------------------------
#
# It has the right shape and dtype, answers norms and scaling, so that `clip_grad_norm_` and GradScaler work, and raises
# for everything else, never silently nothing.

T = TypeVar("T")


class Norms(Protocol):
    """Who knows the norms of gradients at home."""

    @property
    def divisor(self) -> float:
        """What sums over ranks are divided by."""

    def sums_of_squares(self, shards: Sequence[Shard]) -> list[float]:
        """Per parameter, over all ranks, of the sums over ranks. Collective."""


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
                grad.shard.gradient.clear()
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
        grad.shard.gradient.scale(1.0 / number if is_division else number)


# ---- GradientStore: where gradients rest until the step, unit by unit ------------------------------------------------
#
#     open    memory of a unit's shard layout, with what rests there if there is to be added to it
#     put     a part of a parameter's share is copied or added, and measured when the share is all there
#     close   the unit's gradients go where they rest
#
#     HOST, DEVICE    the memory is their home
#     NVME            it is a buffer, read from home if need be and written behind; a unit is read only once it is written
#     None            (step_in_backward) it is a buffer, handed to the step of the unit
#
# Measured are sums of squares of fixed blocks of each parameter, in float64, in the order of elements: they do not
# depend on how a share was cut into parts.
#
# On a DEVICE all of this happens there, on a stream of its own, because hooks run on whichever stream autograd is on:
# it waits for the stream that brings a gradient, and a reader waits for it (`join`). A gradient depends on the weights
# of the last step, so that it comes when that has read the one before.

Consume = Callable[[Unit, torch.Tensor], None]
"""Steps a unit with gradients that are not kept: flat, in its shard layout, valid during the call."""


class OpenHome(NamedTuple):
    """A unit's gradients while parts of them are put."""

    unit: Unit
    flat: torch.Tensor
    slot: Slot | None  # the buffer they are in, unless that is their home


class GradientStore:
    """See the module.

    Args:
        home: None: none is held.
        shard_rank: which share of every parameter is this rank's.
        pool: buffers, for NVME and None.
    """

    def __init__(
        self, home: Tier | None, store: TensorStore, shard_rank: int, workers: Workers, pool: Pool | None
    ) -> None:
        self.home = home
        self.recorder = store.recorder
        self._store = store
        self._shard_rank = shard_rank
        self._workers = workers
        self._pool = pool
        self._stream = new_stream(store.device) if home is Tier.DEVICE and is_accelerator(store.device) else None
        self._leaving: list[tuple[Unit, Slot, Move]] = []
        self._consume: Consume | None = None  # takes them at once when none is held

    def step_with(self, consume: Consume) -> None:
        """Says who steps units in backward, when no gradients are held."""
        self._consume = consume

    @staticmethod
    def entry(unit: Unit) -> str:
        """The name of a unit's gradients in the store."""
        return f"grad/{unit.index}/{unit.name}"

    def reserve(self, unit: Unit, dtype: torch.dtype) -> None:
        """Makes room for a unit's gradients where they rest."""
        if self.home is not None:
            self._store.reserve(self.entry(unit), (unit.shard_numel,), dtype, self.home, is_durable=False)

    def view(self, unit: Unit) -> torch.Tensor | None:
        """A unit's gradients in the shard layout, when they rest in memory."""
        return self._store.view(self.entry(unit)) if self.home in (Tier.HOST, Tier.DEVICE) else None

    def open(self, unit: Unit, dtype: torch.dtype, adds: bool) -> OpenHome:
        """Memory for a unit's gradients; with `adds`, what rests at home is in it. Blocks for a buffer; raises OSError."""
        at_home = self.view(unit)
        if at_home is not None:
            return OpenHome(unit, at_home, None)
        slot = self._take()
        data = slot.tensor[: unit.shard_numel * dtype.itemsize]
        try:
            if adds:
                while any(each is unit for each, _, _ in self._leaving):
                    self._reap()  # what is being written is not to be read before
                self._store.read([(self.entry(unit), 0, data)], f"grad {unit.name}").wait()
        except BaseException:
            self._give_back(slot)
            raise
        return OpenHome(unit, data.view(dtype), slot)

    def put(self, opened: OpenHome, shard: Shard, part: torch.Tensor, start: int) -> None:
        """Copies or adds a part of this rank's share, flat, which begins at element `start` of it; the last one measures."""
        with self._at_home(part):
            self._put(opened, shard, part, start)

    def _put(self, opened: OpenHome, shard: Shard, part: torch.Tensor, start: int) -> None:
        adds, stop = shard.gradient.takes_more, start + part.numel()
        first = shard.shard_numel * self._shard_rank
        num_valid = own_numel(shard, self._shard_rank)
        share = opened.flat[shard.shard_offset : shard.shard_offset + num_valid]
        if start == 0 and adds and shard.gradient.factor != 1.0:
            share.mul_(shard.gradient.factor)  # what the user scaled is what is at home, not what comes
        source = part[: max(0, num_valid - start)]
        is_last = stop >= num_valid
        if is_accelerator(share.device):
            target = share[start : start + source.numel()]
            target.add_(source) if adds else target.copy_(source)
            if is_last:
                shard.gradient.arrive(block_sums_in_torch(share, first))
            return
        source = source.cpu()
        if start == 0 and is_last:
            shard.gradient.arrive(store_gradient(self._workers, share, source, first, accumulate=adds))
        elif source.numel():
            target = share[start : start + source.numel()]
            target.add_(source) if adds else target.copy_(source)
            if is_last:
                shard.gradient.arrive(store_gradient(self._workers, None, share, first))

    def clear(self, opened: OpenHome, shard: Shard) -> None:
        """Writes zeros in place of a parameter's gradient."""
        share = opened.flat[shard.shard_offset : shard.shard_offset + shard.shard_numel]
        with self._at_home(share):
            share.zero_()
        shard.gradient.arrive(())

    def close(self, opened: OpenHome) -> None:
        """Sends a unit's gradients where they rest; a write to NVME goes on behind. Raises OSError."""
        unit, flat, slot = opened
        if slot is None:
            return
        try:
            if self.home is None:
                assert self._consume is not None
                self._consume(unit, flat)
                self._give_back(slot)
                return
            data = slot.tensor[: flat.nbytes]
            move = self._store.write([(self.entry(unit), 0, data)], f"grad {unit.name}")
        except BaseException:
            self._give_back(slot)
            raise
        self._leaving.append((unit, slot, move))

    def drop(self, opened: OpenHome) -> None:
        """Forgets what was put; its buffer is free again."""
        self._give_back(opened.slot)

    def settle(self) -> None:
        """Waits until every gradient is at home. Raises OSError."""
        self.join()
        while self._leaving:
            self._reap()

    def join(self) -> None:
        """The current stream waits for what is done to gradients on a DEVICE."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def _at_home(self, data: torch.Tensor) -> Iterator[None]:
        """Inside, work on an accelerator is done where gradients rest on a DEVICE, with data of the current stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(current_stream(self._stream.device))
        data.record_stream(self._stream)
        with on(self._stream):
            yield

    def _take(self) -> Slot:
        assert self._pool is not None
        slot = self._pool.take()
        if slot is None:
            self._reap()
            slot = self._pool.take()
        assert slot is not None
        return slot

    def _give_back(self, slot: Slot | None) -> None:
        if slot is not None:
            assert self._pool is not None
            self._pool.give_back(slot)

    def _reap(self) -> None:
        _, slot, move = self._leaving.pop(0)
        try:
            move.wait()
        finally:
            self._give_back(slot)
