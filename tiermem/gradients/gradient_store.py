"""GradientStore: keeps gradients on their tier until the step; and ShardedGrad, the value of
`p.grad` meanwhile."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from tiermem.gradients.gradient_link import GradientLink, GradientPart
from tiermem.policy import Tier
from tiermem.precision import Precision
from tiermem.swap.base.native import Workers, store_gradient
from tiermem.swap.base.side_threads import Task
from tiermem.swap.kernels.device_kernels import kernels_of
from tiermem.swap.memory.accelerator import current_stream, is_accelerator, new_stream, on, record
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore
from tiermem.units.gradient_state import Factor
from tiermem.units.unit import Shard, Unit, own_numel
from tiermem.weights.resting_tensor import RestingTensor, on_copies, resting_in

# ---- the value of p.grad -------------------------------------------------------------------------

T = TypeVar("T")


class Homes(Protocol):
    """Computes the norms of gradients that rest on a tier, reads and changes them. GradientHomes is
    one."""

    def norms(self, shards: Sequence[Shard], device: torch.device) -> torch.Tensor:
        """The 2-norm of each parameter's gradient, after the mean over ranks: fp32, on a device.
        Collective."""

    def factor(self, value: torch.Tensor | float) -> Factor:
        """A number that is to scale gradients, also one on an accelerator. Does not block."""

    @property
    def has_whole(self) -> bool:
        """Whether this rank holds whole gradients."""

    def check_kept(
        self, grad: ShardedGrad, is_zeroed: bool = False, is_recorded: bool = False
    ) -> None:
        """Raises RuntimeError for a gradient that was dropped, that step_in_backward has used, or
        whose graph is lost. is_zeroed: which the caller zeroes. is_recorded: in a graph."""

    def read(self, shard: Shard) -> torch.Tensor:
        """A copy of a whole gradient, where the maths runs. Blocks; raises OSError."""

    def replace(self, shard: Shard, value: torch.Tensor) -> None:
        """Replaces a whole gradient. Blocks; raises OSError."""

    def clamp(self, shard: Shard, low: float | None, high: float | None) -> None:
        """Bounds the elements of this rank's part of a gradient. Blocks; raises OSError."""

    def write_through(self, shard: Shard) -> None:
        """After a change of a gradient: makes it in the tensor that the user has set. Blocks; raises
        OSError."""


class ShardedGrad(RestingTensor):
    """The value of `p.grad` while the gradient rests on a tier. It has the right shape and dtype,
    but no values.

    any number of ranks    2-norms; scaling, zeroing and clamping in place: `torch.nn.utils.clip_grad_norm_`,
                           `clip_grad_value_`, `get_total_norm`, GradScaler's unscale. A factor is
                           remembered and applied in the step
    whole on each rank     every other call, on a copy of the values (resting_tensor.py)
    in parts on ranks      every other call raises RuntimeError. To read the values use `Shards.gradient(param)` on every rank
    used (step_in_backward)  every call raises RuntimeError, but zeroing after the step
    """

    @staticmethod
    def __new__(cls, shard: Shard, homes: Homes) -> ShardedGrad:
        param = shard.param
        grad: ShardedGrad = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=param.grad_dtype or param.dtype, device=param.device
        )
        return grad

    def __init__(self, shard: Shard, homes: Homes) -> None:
        # weak: `p.grad` belongs to the parameter, where the garbage collector does not look
        self._shard = weakref.ref(shard)
        self._homes = weakref.ref(homes)

    @property
    def shard(self) -> Shard:
        """The shard whose gradient this is. Raises RuntimeError when its sharded model is gone."""
        return _living(self._shard())

    @property
    def homes(self) -> Homes:
        """The object that has its values. Raises RuntimeError when its sharded model is gone."""
        return _living(self._homes())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.shard.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def what(self) -> str:
        """The gradient, in an error."""
        return "the gradient of a sharded parameter"

    def read(self) -> torch.Tensor:
        """A copy of the values. Blocks; raises OSError, and RuntimeError where ranks hold parts."""
        self.homes.check_kept(self)
        if not self.homes.has_whole:
            raise RuntimeError(
                f"the gradient of {self.shard.name} rests in parts on several ranks: norms, "
                "scaling, zeroing and clamping work in place; to read it call "
                "Shards.gradient(param) on every rank, between backward and step"
            )
        return self.homes.read(self.shard)

    def replace(self, value: torch.Tensor) -> None:
        """Replaces the values. Blocks; raises OSError."""
        self.homes.replace(self.shard, value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in ("aten::detach", "aten::alias"):
            return args[0]
        if isinstance(args[0], (list, tuple)) and 0 < len(resting_in(args[0])) < len(args[0]):
            return _one_by_one(func, args, kwargs or {})  # the user has set a `p.grad`
        is_recorded = torch.is_grad_enabled() and not func._schema.is_mutable
        for grad in resting_in(args):
            grad.homes.check_kept(grad, name in _ZEROING, is_recorded)
        if name == "aten::linalg_vector_norm" and _is_two_norm(args[1:], kwargs):
            return _norms(args[:1])[0]
        if name == "aten::_foreach_norm" and _is_two_norm(args[1:], kwargs):
            return _norms(args[0])
        is_by_one = name in ("aten::mul_", "aten::div_")
        if is_by_one and (not torch.is_tensor(args[1]) or args[1].numel() == 1):
            _scale([args[0]], args[1], name.startswith("aten::div"))
            return args[0]
        if name in ("aten::_foreach_mul_", "aten::_foreach_div_"):
            _scale(args[0], args[1], "div" in name)
            return None
        if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            grads, found_inf, inv_scale = args
            grads[0].homes.tell_nonfinite([grad.shard for grad in grads], found_inf)
            _scale(grads, inv_scale, False)
            return None
        if name in _ZEROING:
            for grad in args[0] if name == "aten::_foreach_zero_" else args:
                grad.shard.gradient.clear()
                grad.homes.write_through(grad.shard)
            return args[0] if name == "aten::zero_" else None
        if (bounds := _bounds(func, args, kwargs or {})) is not None:
            for grad in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                grad.homes.clamp(grad.shard, *bounds)
            return args[0] if isinstance(args[0], ShardedGrad) else None
        return on_copies(func, args, kwargs or {})


_ZEROING = ("aten::zero_", "aten::_foreach_zero_")


def _one_by_one(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Calls an operator of lists once for each tensor of its first list."""
    count = len(args[0])
    found = [
        func(
            *(
                each[i : i + 1] if isinstance(each, (list, tuple)) and len(each) == count else each
                for each in args
            ),
            **kwargs,
        )
        for i in range(count)
    ]
    return None if found[0] is None else [each for one in found for each in one]


def _bounds(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float | None, float | None] | None:
    """The numbers that a call bounds gradients by in place, None: no bound; None for any other
    call."""
    name = func._schema.name.removeprefix("aten::")
    given = {
        arg.name: value for arg, value in zip(func._schema.arguments, args, strict=False)
    } | dict(kwargs)
    low, high = {
        "clamp_": (given.get("min"), given.get("max")),
        "clamp_min_": (given.get("min"), None),
        "clamp_max_": (None, given.get("max")),
        "_foreach_clamp_min_": (given.get("scalar"), None),
        "_foreach_clamp_max_": (None, given.get("scalar")),
    }.get(name, (None, None))
    if low is high is None or any(
        isinstance(each, (torch.Tensor, list, tuple)) for each in (low, high)
    ):
        return None
    return low, high


def _living(found: T | None) -> T:
    if found is None:
        raise RuntimeError(
            "the sharded model that this gradient belongs to is gone: set p.grad to None"
        )
    return found


def _is_two_norm(args: Sequence[Any], kwargs: Any) -> bool:
    order = args[0] if args else (kwargs or {}).get("ord", 2)
    dims = args[1] if len(args) > 1 else None
    return float(order) == 2.0 and dims is None


def _norms(grads: Sequence[ShardedGrad]) -> list[torch.Tensor]:
    return list(grads[0].homes.norms([grad.shard for grad in grads], grads[0].device).unbind())


def _scale(grads: Sequence[ShardedGrad], factor: Any, is_division: bool) -> None:
    factors = factor if isinstance(factor, (list, tuple)) else [factor] * len(grads)
    made: dict[int, Factor] = {}  # one for all gradients that one tensor scales
    for grad, value in zip(grads, factors, strict=True):
        if id(value) not in made:
            scaling = grad.homes.factor(value)
            made[id(value)] = scaling.inverse() if is_division else scaling
        grad.shard.gradient.scale(made[id(value)])
        grad.homes.write_through(grad.shard)


# ---- the store of gradients ----------------------------------------------------------------------
#
#     add     copies or adds parts of a unit's gradients; computes a share's sums of squares when it is complete
#     end     sends the unit's gradients to their tier
#     join    waits for both
#
# Between `add` and `end` a unit's home is open: memory of its shard layout, which holds the stored
# gradient if more is to be added to it. Micro-batches that go through a block one after the other
# (layerwise.py) are all added to an open home. Gradients of an accelerator whose home is not DEVICE
# come through a link (gradient_link.py). Its helper thread does this work then, and `join` waits
# for it.
#
#     HOST, DEVICE    the memory is on the tier itself
#     NVME            the memory is a buffer: read first if need be, written in the background afterwards. A unit is read
#                     only after its write has ended. Until its buffer is wanted for another unit,
#                     steps copy the gradients from there (`cached`)
#     None            (step_in_backward) the memory is a buffer, and the unit is stepped from it at once
#
# The sums of squares are of fixed blocks of each parameter, in float64, in the order of elements.
# They do not depend on how a share was cut into parts.
#
# On DEVICE the work runs on a stream of its own, because hooks run on any stream that autograd
# uses. That stream waits for the stream that brings a gradient, and a reader waits for that stream
# (`join`). The next step's gradients depend on the weights that the last step wrote, so they come
# after that step has read the gradients before them.

Consume = Callable[[Unit, torch.Tensor], torch.Event | None]
"""Steps a unit with gradients that are not kept: flat, in the unit's shard layout. They stay valid
until the event that it returns, after which an accelerator has read them; None: during the call."""


class OpenHome(NamedTuple):
    """A unit's gradients while parts of them are stored."""

    unit: Unit
    flat: torch.Tensor
    slot: Slot | None  # the buffer that holds them; None: they are on their tier


class GradientStore:
    """Keeps the gradients of units on one tier until the step.

    Args:
        home: the tier; None: gradients are not kept, and each unit is stepped in backward.
        shard_rank: which share of every parameter is this rank's.
        pool: buffers, for NVME and None.
        links: buffers of the link from an accelerator; None: no gradient crosses it.
        precision: gives the dtype in which gradients accumulate and rest.
    """

    def __init__(
        self,
        home: Tier | None,
        store: TensorStore,
        shard_rank: int,
        workers: Workers,
        pool: Pool | None,
        links: Pool | None,
        precision: Precision,
    ) -> None:
        self._precision = precision
        self.recorder = store.recorder
        self._store = store
        self._shard_rank = shard_rank
        self._workers = workers
        self._stream: torch.Stream | None = None
        self._link: GradientLink | None = None
        self.use(home, pool, links)
        # of units between `add` and `end`; the link's thread has it
        self._open: dict[Unit, OpenHome] = {}
        self._leaving: list[tuple[Unit, Slot, Move]] = []  # buffers, also of writes that have ended
        # called with a unit's index before what `cached` has returned for the unit changes
        self.on_reuse: Callable[[int], None] = lambda unit: None
        self._arriving = collections.deque[tuple[Unit, Task[None] | None]]()
        self._ends: dict[Unit, torch.Event] = {}  # after which its gradients are on DEVICE
        # steps a unit at once when gradients are not kept; None: there is no optimizer
        self.consume: Consume | None = None
        # after which the steps of `consume` have read their buffers
        self._read: torch.Event | None = None

    def check_consumer(self) -> None:
        """Before a backward: raises RuntimeError when gradients are not kept and no optimizer steps
        units with them."""
        if self.home is None and self.consume is None:
            raise RuntimeError(
                "step_in_backward steps units while backward runs, and there is no optimizer yet: "
                "build it before backward"
            )

    def dtype(self, unit: Unit) -> torch.dtype:
        """The dtype in which a unit's gradients accumulate and rest."""
        return self._precision.grad_dtype(unit.dtype)

    @staticmethod
    def entry(unit: Unit) -> str:
        """The name of a unit's gradients in the store."""
        return f"grad/{unit.index}/{unit.name}"

    def announce(self, unit: Unit) -> None:
        """Before the first `reserve`: one slab holds the gradients of all units that are announced,
        if they are on DEVICE."""
        if self.home is Tier.DEVICE:
            num_bytes = unit.shard_numel * self.dtype(unit).itemsize
            self._store.on_device.reserve(self.entry(unit), num_bytes)

    def reserve(self, unit: Unit, crosses_link: bool) -> None:
        """Reserves room for a unit's gradients on their tier. crosses_link: whether steps on an
        accelerator read them."""
        if self.home is not None:
            self._store.reserve(
                self.entry(unit),
                (unit.shard_numel,),
                self.dtype(unit),
                self.home,
                is_durable=False,
                crosses_link=crosses_link,
            )

    def cross(self, unit: Unit, crosses_link: bool) -> None:
        """Says whether steps on an accelerator read a unit's gradients from now on."""
        if self.home is Tier.HOST:
            self._store.cross(self.entry(unit), crosses_link)

    def view(self, unit: Unit) -> torch.Tensor | None:
        """A unit's gradients in the shard layout; None when they do not rest in memory."""
        return self._store.view(self.entry(unit)) if self.home in (Tier.HOST, Tier.DEVICE) else None

    def add(self, unit: Unit, parts: Sequence[GradientPart], is_known: bool) -> None:
        """Adds parts of a unit's gradients at its home. The parts may be released on return. Blocks
        for buffers.

        is_known: whether some rank had these gradients; else `Gradient.confirm` tells later. Raises
            OSError, also of an earlier call.
        """
        if self._link is None:
            self._add(unit, parts, is_known)
        else:
            self._link.send(parts, lambda hosted: self._add(unit, hosted, is_known))

    def end_of_reads(self) -> torch.Event | None:
        """The event after which an accelerator has read all parts that were given to `add`; None:
        they have been read."""
        if self._link is not None:
            return self._link.end_of_reads()
        return None if self._stream is None else record(self._stream)

    def end(self, unit: Unit) -> None:
        """Sends the gradients that were added to a unit to their tier. Raises OSError, also of an
        earlier call.

        With step_in_backward it steps the unit, on this thread. It blocks until the gradients have
        come to host memory, because they may be refused before any state changes, but not until an
        accelerator has stepped the unit.
        """
        if self._link is not None and self.home is not None:
            self._arriving.append((unit, self._link.call(lambda: self._end(unit))))
        else:
            self._join_link()
            self._end(unit)
            self._arriving.append((unit, None))

    def arrived(self) -> Iterator[Unit]:
        """The units that were ended since the last `join` and whose gradients have come from an
        accelerator, each once."""
        while self._arriving and ((ended := self._arriving[0][1]) is None or ended.is_set):
            yield self._arriving.popleft()[0]

    def _add(self, unit: Unit, parts: Sequence[GradientPart], is_known: bool) -> None:
        if unit not in self._open:
            adds = any(shard.gradient.takes_more for shard in unit.shards)
            self._open[unit] = self.open(unit, adds)
        for part in parts:
            with self._at_home(part.data):
                self.put(self._open[unit], part)
            if is_known and part.start + part.data.numel() >= part.shard.shard_numel:
                part.shard.gradient.confirm()

    def _end(self, unit: Unit) -> None:
        if unit in self._open:
            self.close(self._open.pop(unit))
        if self._stream is not None:
            self._ends[unit] = record(self._stream)

    def await_end(self, unit: Unit) -> None:
        """Lets the current stream wait until the gradients of a unit's last `end` are on DEVICE.
        For any thread."""
        if unit in self._ends:
            current_stream(self._store.device).wait_event(self._ends[unit])

    def open(self, unit: Unit, adds: bool) -> OpenHome:
        """Memory for a unit's gradients; with `adds` it holds the stored gradient. Blocks for a
        buffer; raises OSError."""
        at_home = self.view(unit)
        if at_home is not None:
            return OpenHome(unit, at_home, None)
        slot = self._take()
        if self._read is not None:
            self._read.synchronize()
        dtype = self.dtype(unit)
        data = slot.tensor[: unit.shard_numel * dtype.itemsize]
        try:
            if adds:
                while any(each is unit for each, _, _ in self._leaving):
                    self._reap()  # a write under way ends before the entry is read
                self._store.read([(self.entry(unit), 0, data)], f"grad {unit.name}").wait()
        except BaseException:
            self._give_back(slot)
            raise
        return OpenHome(unit, data.view(dtype), slot)

    def put(self, opened: OpenHome, given: GradientPart) -> None:
        """Copies or adds a part of this rank's share. The last one computes sums of squares."""
        shard, start, part = given
        adds = shard.gradient.takes_more
        stop = start + part.numel()
        first = shard.shard_numel * self._shard_rank
        num_valid = own_numel(shard, self._shard_rank)
        share = opened.flat[shard.shard_offset : shard.shard_offset + num_valid]
        if start == 0 and adds and shard.gradient.factor != 1.0:
            # the user scaled the stored gradient, not the new part
            share.mul_(shard.gradient.factor)
        source = part if stop <= num_valid else part[: max(0, num_valid - start)]
        is_last = stop >= num_valid
        if start == 0 and is_last and not is_accelerator(share.device):
            shard.gradient.arrive(
                store_gradient(self._workers, share, source, first, accumulate=adds)
            )
            return
        if source.numel():
            target = share[start : start + source.numel()]
            target.add_(source) if adds else target.copy_(source)
        if is_last and (source.numel() or start == 0):
            shard.gradient.arrive(self._sums_of(share, first))

    def _sums_of(self, share: torch.Tensor, first: int) -> Sequence[float] | torch.Tensor:
        if is_accelerator(share.device):
            return kernels_of(share.device).block_sums(share, first)
        return store_gradient(self._workers, None, share, first)

    def clear(self, opened: OpenHome, shard: Shard) -> None:
        """Writes zeros in place of a parameter's gradient."""
        share = opened.flat[shard.shard_offset : shard.shard_offset + shard.shard_numel]
        with self._at_home(share):
            share.zero_()
        shard.gradient.arrive(())

    def visit(
        self,
        unit: Unit,
        shard: Shard,
        visitor: Callable[[torch.Tensor], object],
        changes: bool,
    ) -> None:
        """Shows a function this rank's share of a parameter's stored gradient: flat, without
        padding, with the user's factor.

        changes: whether the function changes it, which is then stored. Call it after `join`.
            Blocks; raises OSError.
        """
        opened = self.open(unit, adds=True)
        start = shard.shard_offset
        share = opened.flat[start : start + own_numel(shard, self._shard_rank)]
        try:
            if shard.gradient.is_zero:
                share = share.zero_() if changes else torch.zeros_like(share)
            elif shard.gradient.factor != 1.0:
                share = (
                    share.mul_(shard.gradient.factor) if changes else share * shard.gradient.factor
                )
            visitor(share)
        except BaseException:
            self._give_back(opened.slot)
            raise
        if not changes:
            self._give_back(opened.slot)
            return
        shard.gradient.arrive(self._sums_of(share, shard.shard_numel * self._shard_rank))
        self.close(opened)

    def close(self, opened: OpenHome) -> None:
        """Sends a unit's gradients to their tier; a write to NVME continues in the background.
        Raises OSError."""
        unit, flat, slot = opened
        if slot is None:
            return
        try:
            if self.home is None:
                assert self.consume is not None
                self._read = self.consume(unit, flat)
                self._give_back(slot)
                return
            data = slot.tensor[: flat.nbytes]
            move = self._store.write([(self.entry(unit), 0, data)], f"grad {unit.name}")
        except BaseException:
            self._give_back(slot)
            raise
        self._leaving.append((unit, slot, move))

    def is_home(self, unit: Unit) -> bool:
        """Whether a step can read a unit's gradients: no write is under way, or memory has them.
        Does not block."""
        done = all(each is not unit or move.is_done() for each, _, move in list(self._leaving))
        return done or self.cached(unit) is not None

    def cached(self, unit: Unit) -> torch.Tensor | None:
        """The bytes of a unit's gradients that rest on NVMe, if memory still has them; see
        `on_reuse`.

        None with an accelerator, where another thread takes the buffers.
        """
        found = (
            [slot for each, slot, _ in self._leaving if each is unit] if self._link is None else []
        )
        return found[-1].tensor if found else None

    def drop(self) -> None:
        """Discards the parts of the unit between `add` and `end`, and earlier errors. Blocks until
        the link is empty."""
        if self._link is not None:
            with suppress(Exception):
                self._link.join()
        self._drop_open()

    def reset(self) -> None:
        """`drop`, and takes every buffer back, also one that an interrupt has lost. May be
        repeated. Blocks."""
        self.drop()
        for unit, _, move in self._leaving:
            move.outcome()
            self.on_reuse(unit.index)
        self._leaving.clear()
        self._store.end_transfers()
        for each in (self._pool, self._link):
            if each is not None:
                each.reset()

    def _drop_open(self) -> None:
        while self._open:
            self._give_back(self._open.popitem()[1].slot)

    def flush(self) -> None:
        """Blocks until every gradient is on its tier, where it may be changed. Raises OSError."""
        self.join()
        while self._leaving:
            self._reap()

    def await_writes(self) -> None:
        """Blocks until every gradient is on its tier; what is `cached` stays. Raises OSError."""
        self.join()
        for each in list(self._leaving):
            if each[2].outcome() is not None:
                self._leaving.insert(0, self._leaving.pop(self._leaving.index(each)))
                self._reap()  # raises the error, once

    def stop(self) -> None:
        """Ends the link's thread and gives all buffers back, after `flush`. No backward may be
        under way."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def use(self, home: Tier | None, pool: Pool | None, links: Pool | None) -> None:
        """Goes on with other buffers, after `stop`. On another tier nothing may be stored."""
        self.home = home
        self._pool = pool
        self._link = GradientLink(self._store.device, links) if links is not None else None
        if home is not Tier.DEVICE or not is_accelerator(self._store.device):
            self._stream = None
        elif self._stream is None:
            self._stream = new_stream(self._store.device)

    def drop_room(self, unit: Unit) -> None:
        """Gives the room of a unit's gradients back."""
        if self.home is not None:
            self._store.drop(self.entry(unit))

    def join(self) -> None:
        """Blocks until the link is empty; lets the current stream wait for work on gradients that
        rest on DEVICE.

        Raises OSError.
        """
        self._join_link()
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)

    def _join_link(self) -> None:
        self._arriving.clear()
        if self._link is not None:
            try:
                self._link.join()
            except BaseException:
                self._drop_open()
                raise

    def _at_home(self, data: torch.Tensor) -> AbstractContextManager[object]:
        """Inside the block, accelerator work runs on the stream of DEVICE gradients, after the
        current stream's `data`."""
        if self._stream is not None:
            self._stream.wait_stream(current_stream(self._stream.device))
            data.record_stream(self._stream)
        return on(self._stream)

    def _take(self) -> Slot:
        assert self._pool is not None
        slot = self._pool.take()
        if slot is None:
            # open homes have all buffers: the oldest is read again when more is added to it
            if not self._leaving:
                self._end(next(iter(self._open)))
            self._reap()
            slot = self._pool.take()
        assert slot is not None
        return slot

    def _give_back(self, slot: Slot | None) -> None:
        if slot is not None:
            assert self._pool is not None
            self._pool.give_back(slot)

    def _reap(self) -> None:
        unit, slot, move = self._leaving.pop(0)
        try:
            move.wait()
        finally:
            self.on_reuse(unit.index)
            self._give_back(slot)
