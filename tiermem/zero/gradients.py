"""Gradients: from where autograd leaves them to where they rest until the step.

When every use of a unit in a backward has been answered, its parameters' `p.grad` are packed and let go, added up over ranks
while backward goes on (reduce.py), copied (or added, when micro-batches accumulate) into the unit's gradient home
and measured in the same pass (gradient_store.py): global norm and the check for NaN and infinity are made of that.

A home may be in another dtype than the parameters (`Precision.grads`): micro-batches of a bf16 model then add up in fp32.

Ranks may differ in which parameters get a gradient: a rank without one gives zeros. For that, ranks must reduce the same units
in the same sequence:

    stage 3        units that are gathered are reduced as they are answered, which is as they were gathered
    stages 0 to 2  nothing is gathered in backward, so units are reduced in the reverse order of definition, each as soon as it
                   and all before it are there; what never came is reduced at the end of backward
    the end        one exchange says which parameters any rank had a gradient of (the others have none and are not stepped),
                   and for which units any rank still has gradients, which came late; those are reduced once more

In place of the gradient `p.grad` holds a ShardedGrad (gradient_store.py). A backward that ends in an exception takes the
gradients of its step with it (`abandon`): what of them was reduced cannot be told from what was not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES
from tiermem.swap.arena import Pool
from tiermem.swap.native import Workers
from tiermem.swap.store import TensorStore
from tiermem.zero.collectives import start, total
from tiermem.zero.gradient_store import Consume, GradientStore, OpenHome, ShardedGrad
from tiermem.zero.reduce import Bucket, Reducer, cut, predivided
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Shard, Unit

logger = logging.getLogger("tiermem")


class GradientHomes:
    """Receives gradients and knows their norms.

    Args:
        units: the trainable ones.
        home: None: none is held.
        pool: buffers for NVME and none; also of gradients on their way from a GPU.
        buckets: buffers of reductions between CPUs; None: torch's own memory.
        policy: says in what dtype gradients rest, and how they are reduced.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        home: Tier | None,
        store: TensorStore,
        topology: Topology,
        workers: Workers,
        pool: Pool | None,
        buckets: Pool | None,
        policy: OffloadPolicy,
    ) -> None:
        self.home = home
        self._units = units
        self._topology = topology
        self._policy = policy
        self._homes = GradientStore(home, store, topology.shard_rank, workers, pool)
        self._reducer = Reducer(topology, policy, buckets) if topology.group is not None else None
        self._cut: dict[int, list[Bucket]] = {}  # each unit's buckets
        self._shards = [shard for unit in units for shard in unit.shards]
        self._stand_ins: dict[Shard, ShardedGrad] = {}  # what `p.grad` is between backward and step
        self._shown: set[Shard] = set()  # whose `p.grad` was left to be that
        self._open: OpenHome | None = None  # what some buckets of a unit have reached
        self._waiting: dict[Unit, bool] = {}  # what this backward has not begun to reduce, and whether it is answered
        self.num_micro_batches = 1  # a step's gradient is the mean of so many; 1: their losses were divided already
        self._given: set[Shard] = set()  # what this rank had a gradient of in this backward
        self._stepped: dict[Unit, list[Shard]] = {}  # in backward, since the last step; with what had a gradient
        for unit in units:
            for shard in unit.shards:
                shard.reduce_dtype = DTYPES[policy.reduce_dtype] if policy.reduce_dtype is not None else None
            self._homes.reserve(unit, self.dtype(unit))

    @staticmethod
    def entry(unit: Unit) -> str:
        """The name of a unit's gradients in the store."""
        return GradientStore.entry(unit)

    def dtype(self, unit: Unit) -> torch.dtype:
        """In what a unit's gradients are added up and rest."""
        return self._policy.precision.grad_dtype(unit.dtype)

    def flat(self, unit: Unit) -> torch.Tensor | None:
        """A unit's gradients in the shard layout, when they rest in memory."""
        return self._homes.view(unit)

    def step_with(self, consume: Consume) -> None:
        """Says who steps units in backward, when no gradients are held."""
        self._homes.step_with(consume)

    @property
    def divisor(self) -> float:
        """What is at home, and its norms, are divided by: the ranks, for a mean, and the micro-batches; less what was divided
        before the sum."""
        world = self._topology.world
        ranks = (world if self._policy.reduce_op == "mean" else 1) / predivided(world, self._policy)
        return ranks * self.num_micro_batches

    # ---- in backward -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A backward begins: clears the way for autograd's gradients."""
        self._waiting = dict.fromkeys(self._units if self._policy.stage == 3 else reversed(self._units), False)
        self._given.clear()
        self.forget_replaced()
        for shard in self._shown:
            shard.param.grad = None
        self._shown.clear()

    def receive(self, unit: Unit) -> None:
        """Takes what autograd has left on a unit's parameters, and begins to reduce it. Collective; raises OSError, RankLost.

        Blocks for the copy, for the oldest reduction when two are under way, and without overlap for its own.
        """
        if self._reducer is None:
            self._take(unit)
        elif unit in self._waiting and self._policy.stage == 3:
            self._reduce(unit)
        elif unit in self._waiting:
            self._waiting[unit] = True
            while self._waiting and self._waiting[first := next(iter(self._waiting))]:
                self._reduce(first)

    def finish(self) -> None:
        """The end of a backward, or the way of what is left to a step: every gradient is at home after it. Collective; blocks.

        Raises RuntimeError on every rank when a unit that has been stepped in backward gets more.
        """
        if self._reducer is None:
            for unit in self._units:
                self._take(unit)
            return
        for unit in list(self._waiting):
            if unit.is_resident or self._policy.stage != 3:
                self._reduce(unit)
        self.receive_rest()

    def receive_rest(self) -> None:
        """Receives every `p.grad` that any rank still has, as before a step. Collective; blocks."""
        if self._reducer is None:
            self.finish()
            return
        for unit in self._units:
            self._note_given(unit)
        flags = [any(_fresh(shard) for shard in unit.shards) for unit in self._units]
        flags = self._on_any_rank(flags + [shard in self._given for shard in self._shards])
        for unit in (unit for unit, is_left in zip(self._units, flags, strict=False) if is_left):
            self._reduce(unit)
        self._drain()
        for shard, is_given in zip(self._shards, flags[len(self._units) :], strict=True):
            if self.home is not None and is_given:
                shard.gradient.confirm()
            elif not shard.gradient.is_there:
                shard.gradient.forget()
        self._given.clear()

    def abandon(self) -> None:
        """Forgets every gradient, after a backward that ended in an exception. Waits for what is under way."""
        logger.warning("a backward ended in an exception: the gradients of its step are forgotten")
        while self._reducer is not None and not self._reducer.is_idle:
            self._reducer.release(self._reducer.finish()[0])
        if self._open is not None:
            self._homes.drop(self._open)
            self._open = None
        self.begin()
        self.begin_step()
        for shard in self._shards:
            shard.param.grad = None
            shard.gradient.forget()
        self._shown.clear()

    # ---- between backward and step -------------------------------------------------------------------------------------------

    def show(self, unit: Unit) -> None:
        """Lets `p.grad` stand for the gradients that rest at home."""
        for shard in unit.shards:
            if shard.gradient.is_there and shard.param.grad is None:
                if shard not in self._stand_ins:
                    self._stand_ins[shard] = ShardedGrad(shard, self)
                shard.param.grad = self._stand_ins[shard]
                self._shown.add(shard)

    def forget_replaced(self) -> None:
        """Outside backward: forgets the gradients in whose place the user has put None, or values of another kind."""
        for shard in self._shards:
            if not shard.gradient.is_there or isinstance(shard.param.grad, ShardedGrad):
                continue
            if shard.param.grad is None or shard in self._shown:
                shard.gradient.forget()
                self._shown.discard(shard)

    def write_zeros(self) -> None:
        """Before a step: makes the gradients that the user has zeroed zero at home. Blocks; raises OSError."""
        for unit in self._units:
            zeroed = [shard for shard in unit.shards if shard.gradient.is_zero]
            if zeroed:
                opened = self._homes.open(unit, self.dtype(unit), adds=len(zeroed) < len(unit.shards))
                for shard in zeroed:
                    self._homes.clear(opened, shard)
                self._homes.close(opened)

    def check_all_used(self) -> None:
        """Before a step, where the policy asks for it: raises RuntimeError on every rank, naming what has no gradient."""
        if self._policy.ignore_unused:
            return
        in_order = sorted(self._shards, key=lambda s: s.index)
        stepped = {shard for shards in self._stepped.values() for shard in shards}
        unused = [s.name for s in in_order if not s.gradient.is_there and s not in stepped]
        if unused:
            raise RuntimeError(
                f"{len(unused)} of {len(self._shards)} parameters took no part in the loss on any rank since the last step: "
                f"{', '.join(unused[:20])}{', ...' if len(unused) > 20 else ''}. Use them, freeze them before sharding, or "
                "let training go on without them: ignore_unused=True (in a config: ignore_unused_parameters)"
            )

    def begin_step(self) -> None:
        """With step_in_backward: what was stepped in the last backward may be stepped in the next."""
        self._stepped.clear()

    def settle(self) -> None:
        """Waits until every gradient is at home. Raises OSError."""
        self._homes.settle()

    def sums_of_squares(self, shards: Sequence[Shard]) -> list[float]:
        """Per parameter, over all ranks, in float64, with what was multiplied since. Collective."""
        self._homes.join()
        sums = block_sums_of(shards)
        local = [math.fsum(sums[s]) * s.gradient.factor**2 if s.gradient.is_there else 0.0 for s in shards]
        values: list[float] = total(self._topology, self._on_wire(local, torch.float64)).tolist()
        return values

    def norm(self) -> float:
        """The global 2-norm of what rests at home, mean over ranks included; NaN or infinity when anything is. Collective."""
        shards = sorted(self._shards, key=lambda s: s.index)
        return math.sqrt(math.fsum(self.sums_of_squares(shards))) / self.divisor

    # ---- between ranks -------------------------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        """Hands a unit's gradients to reductions, bucket by bucket."""
        assert self._reducer is not None
        if unit in self._stepped:
            raise _stepped_already(unit)
        self._waiting.pop(unit, None)
        self._note_given(unit)
        buckets = self._cut.get(unit.index)
        if buckets is None:
            policy, num_shards = self._policy, self._topology.num_shards
            buckets = self._cut[unit.index] = cut(
                unit, num_shards, policy.reduce_bucket_numel, policy.contiguous_gradients
            )
        for number, bucket in enumerate(buckets):
            while self._reducer.is_full:
                self._arrive()
            name = unit.name if len(buckets) == 1 else f"{unit.name} {number + 1}/{len(buckets)}"
            grads = [piece.shard.param.grad if _fresh(piece.shard) else None for piece in bucket.pieces]
            self._reducer.start(name, bucket, grads, unit.shards[0].param.device)
            del grads
            for piece in bucket.pieces:
                if piece.is_last:
                    piece.shard.param.grad = None
            if not self._policy.overlap_reduce:
                self._arrive()
        for shard in unit.shards:
            shard.param.grad = None

    def _arrive(self) -> None:
        """Waits for the oldest reduction and stores what came of it; with the last of a unit, its home is closed."""
        assert self._reducer is not None
        done, column = self._reducer.finish()
        unit = done.bucket.unit
        try:
            if self._open is None:
                self._open = self._open_home(unit)
            for piece in done.bucket.pieces:
                part = column[piece.place : piece.place + piece.stop - piece.start]
                self._homes.put(self._open, piece.shard, part, piece.start)
        finally:
            self._reducer.release(done)
        self._homes.recorder.add("reduce", done.what, done.start_ns, time.monotonic_ns(), done.bucket.num_bytes)
        if done.bucket is self._cut[unit.index][-1]:
            opened, self._open = self._open, None
            if self.home is None:
                self._tell_given(unit)
            self._close_home(opened)

    def _drain(self) -> None:
        while self._reducer is not None and not self._reducer.is_idle:
            self._arrive()

    def _note_given(self, unit: Unit) -> None:
        self._given.update(shard for shard in unit.shards if _fresh(shard))

    def _tell_given(self, unit: Unit) -> None:
        """Before a unit is stepped in backward: its parameters that no rank had a gradient of have none."""
        flags = self._on_any_rank([shard in self._given for shard in unit.shards])
        for shard, is_given in zip(unit.shards, flags, strict=True):
            if is_given:
                shard.gradient.confirm()

    def _on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Each flag: whether it is true on any rank. What is under way arrives meanwhile. Collective; blocks."""
        found = self._on_wire(flags, torch.uint8)
        pending = start(
            self._topology, "comparing which gradients there are", dist.all_reduce, found, dist.ReduceOp.MAX
        )
        if self.home is not None:
            self._drain()
        pending.wait()
        return [bool(flag) for flag in found.tolist()]

    def _on_wire(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._topology.control_device)

    # ---- home ----------------------------------------------------------------------------------------------------------------

    def _take(self, unit: Unit) -> None:
        """In a world of one: stores what autograd left."""
        fresh = [shard for shard in unit.shards if _fresh(shard)]
        if not fresh:
            return
        if unit in self._stepped:
            raise _stepped_already(unit)
        start_ns = time.monotonic_ns()
        opened = self._open_home(unit)
        try:
            for shard in fresh:
                assert shard.param.grad is not None
                self._homes.put(opened, shard, shard.param.grad.reshape(-1), 0)
                shard.gradient.confirm()
        except BaseException:
            self._homes.drop(opened)
            raise
        self._close_home(opened)
        self._homes.recorder.add("reduce", unit.name, start_ns, time.monotonic_ns(), unit.shard_bytes)
        for shard in fresh:
            shard.param.grad = None

    def _open_home(self, unit: Unit) -> OpenHome:
        return self._homes.open(unit, self.dtype(unit), any(shard.gradient.takes_more for shard in unit.shards))

    def _close_home(self, opened: OpenHome) -> None:
        if self.home is None:
            self._stepped[opened.unit] = [shard for shard in opened.unit.shards if shard.gradient.is_there]
        self._homes.close(opened)


def block_sums_of(shards: Sequence[Shard]) -> dict[Shard, Sequence[float]]:
    """The sums of squares of each gradient's blocks, on the CPU: those of an accelerator come in one copy. Blocks for it."""
    sums: dict[Shard, Sequence[float]] = {}
    away = {s: s.gradient.block_sums for s in shards if isinstance(s.gradient.block_sums, torch.Tensor)}
    if away:
        whole = torch.cat(list(away.values())).tolist()
        for shard, own in away.items():
            sums[shard], whole = whole[: own.numel()], whole[own.numel() :]
    return sums | {s: s.gradient.block_sums for s in shards if not isinstance(s.gradient.block_sums, torch.Tensor)}


def _fresh(shard: Shard) -> bool:
    """Whether autograd, or the user, has left a gradient on a parameter."""
    return shard.param.grad is not None and not isinstance(shard.param.grad, ShardedGrad)


def _stepped_already(unit: Unit) -> RuntimeError:
    return RuntimeError(
        f"unit {unit.name!r} gets gradients after it was stepped in this backward: with step_in_backward every parameter "
        "takes part in one backward per step, and in one part of it. Set step_in_backward=False to add gradients up"
    )
