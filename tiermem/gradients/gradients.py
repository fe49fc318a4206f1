"""Gradients: from autograd's `p.grad` to the tier where they rest until the step (their home).

When backward has answered every use of a unit (its gradients are final), the unit's `p.grad` are
packed into buckets and released. Buckets are added up over ranks while backward continues
(reduce.py). The sums are copied to the unit's gradient home, or added to it when micro-batches
accumulate. The same pass computes sums of squares (gradient_store.py); the global norm and the
check for NaN and infinity use these sums.

A home may have another dtype than the parameters (`Precision.grads`): micro-batches of a bf16 model
then accumulate in fp32.

Ranks may differ in which parameters get a gradient; a rank without one contributes zeros. Ranks
must reduce the same units in the same sequence:

    stage 3        a unit is reduced when it is answered; ranks answer units in the order in which they gathered them
    stages 0 to 2  nothing is gathered in backward, so units are reduced in the reverse order of definition, each as soon as it
                   and all units before it are answered; at the end of backward the remaining units
                   are reduced
    the end        one exchange finds which parameters have a gradient on any rank (the others have none and are not stepped),
                   and which units have late gradients on any rank; those units are reduced once
                   more

    added          at the end as well: ordinary parameters that were added to the model after it was sharded, such as adapters.
                   Their gradients stay in `p.grad`, whole, as the mean over the ranks, as under
                   DistributedDataParallel

Afterwards `p.grad` holds a ShardedGrad (gradient_store.py). When a backward ends in an exception,
all gradients of its step are dropped (`abandon`): it is not known which of them were already
reduced. Each change of gradients is marked while it lasts (`is_changing`). A mark that is left tells of
an interrupt: then they are dropped before the next forward, backward, look or step.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from tiermem.gradients.gradient_link import GradientPart
from tiermem.gradients.gradient_norms import BlockSums, with_factors
from tiermem.gradients.gradient_store import GradientStore, ShardedGrad
from tiermem.plans.agreement import agree
from tiermem.plans.plan import Plan
from tiermem.plans.pools import Pools
from tiermem.policy import OffloadPolicy
from tiermem.ranks.collectives import RowSums, call, exchange, share, total
from tiermem.ranks.failures import RanksDiffer
from tiermem.ranks.topology import Topology
from tiermem.swap.base.native import Workers
from tiermem.swap.memory.accelerator import ToHost, is_accelerator, to_device
from tiermem.swap.store.store import TensorStore
from tiermem.units import registry
from tiermem.units.gradient_state import Factor
from tiermem.units.unit import Shard, Unit
from tiermem.weights.backward_marks import WeakCall
from tiermem.weights.step_run import StepRun
from tiermem.wires.reduce import Bucket, Reducer, cut, predivided

logger = logging.getLogger("tiermem")


class GradientHomes:
    """Receives gradients from autograd, sends them to their home and computes their norms.

    Args:
        units: the trainable units.
        plan: its `grads` is the tier where gradients rest; None: they are not kept, and units are
            stepped in backward.
        pools: its `gradients` are buffers for NVME and None, its `links` those of the link from an
            accelerator, its `sums` those of reductions.
        policy: in which dtype gradients rest, and how they are reduced.
        steps: the step that may be under way; it is finished before a gradient at home is read or
            changed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        plan: Plan,
        store: TensorStore,
        topology: Topology,
        workers: Workers,
        pools: Pools,
        policy: OffloadPolicy,
        steps: StepRun,
    ) -> None:
        self._units = units
        self._topology = topology
        self._policy = policy
        self._steps = steps
        self.store = GradientStore(
            plan.grads,
            store,
            topology.shard_rank,
            workers,
            pools.gradients,
            pools.links,
            policy.precision,
        )
        self._reducer = (
            Reducer(topology, policy, pools.sums, store.device)
            if topology.group is not None
            else None
        )
        # ranks fetch units together, and reduce each one's gradients once they are final
        self.reduces_when_final = topology.num_shards > 1 and policy.stage == 3
        self._cut: dict[int, list[Bucket]] = {}  # each unit's buckets
        self._of_shard = {shard: unit for unit in units for shard in unit.shards}
        # the values of `p.grad` between backward and step
        self._stand_ins: dict[Shard, ShardedGrad] = {}
        self._shown: set[Shard] = set()  # shards whose `p.grad` was set to its stand-in
        self._graphs: set[Shard] = set()  # of which this backward has made a graph
        # tensors that the user has set as `p.grad`, or that his hooks have seen there
        self._set_grads: dict[Shard, _SetGrad] = {}
        # units that this backward has not begun to reduce; True: answered
        self._waiting: dict[Unit, bool] = {}
        # a step's gradient is the mean of this many; 1: their losses were divided already
        self.num_micro_batches = 1
        # the last one of `factor`: its value and version
        self._factor: tuple[torch.Tensor, int, Factor] | None = None
        self._sums = BlockSums()
        self._rows = RowSums(topology)  # of `_left`, and of squares or zeros: all of one length
        # of buckets being reduced: whether its unit's home closes
        self._ends = collections.deque[bool]()
        self._given: set[Shard] = set()  # shards of which this rank had a gradient in this backward
        # units stepped in backward; their shards with a gradient
        self._stepped: dict[Unit, list[Shard]] = {}
        # ordinary parameters that were added to the model, in order, with the `p.grad` of each that
        # is a sum over ranks
        self._added: dict[nn.Parameter, torch.Tensor | None] = {}
        # the modules and parameters that each module of the model holds, all of these, and the
        # parameters among them that no unit holds
        self._modules: list[nn.Module] = []
        self._held: list[object] = []
        self._ordinary: list[nn.Parameter] = []
        # called when a unit's gradients of a backward are on their tier, or on their way to NVMe
        self.on_arrival: Callable[[Unit], None] = lambda unit: None
        # outside a change: an interrupt has ended one half-way
        self.is_changing = False
        self._reserve(units, plan)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is stored."""
        return not any(shard.gradient.is_there for shard in self._of_shard)

    def make_room(self, plan: Plan) -> None:
        """Before another plan is carved: ends transfers and gives up what it has no room for.
        Blocks; raises OSError."""
        self.store.flush()
        self.store.stop()
        for unit in self._units:
            if plan.grads is not self.store.home:
                self.store.drop_room(unit)
            else:
                self.store.cross(unit, plan.steps_on_device)

    def allocate(self, units: Sequence[Unit], plan: Plan, pools: Pools) -> None:
        """After `make_room`: goes on with another plan and its buffers, and with these units, the
        trainable ones."""
        due = set(units) - (set(self._units) if plan.grads is self.store.home else set())
        self._units = units
        self._of_shard = {shard: unit for unit in units for shard in unit.shards}
        self.store.use(plan.grads, pools.gradients, pools.links)
        if self._reducer is not None:
            self._reducer.use(pools.sums)
        self._reserve([unit for unit in units if unit in due], plan)

    def _reserve(self, units: Sequence[Unit], plan: Plan) -> None:
        """Takes room for the gradients of units at their home; on DEVICE all in one slab."""
        for unit in units:
            self.store.announce(unit)
        for unit in units:
            self.store.reserve(unit, plan.steps_on_device)

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Whether each of these flags is set on any rank. Collective; blocks. Raises RankLost, and
        RanksDiffer where ranks have other flags."""
        rows = exchange(self._topology, flags)
        counts = {len(row) for row in rows}
        if len(counts) > 1:
            raise RanksDiffer(
                f"ranks have made other numbers of forwards since the last backward: {counts}. "
                "Every rank has to use the same modules in the same order"
            )
        return [any(each) for each in zip(*rows, strict=True)]

    @property
    def divisor(self) -> float:
        """The number by which stored gradients and their norms are divided.

        It is the number of ranks (for a mean) times the micro-batches, divided by the factor that
        was applied before the sum.
        """
        world = self._topology.world
        ranks = (world if self._policy.reduce_op == "mean" else 1) / predivided(world, self._policy)
        return ranks * self.num_micro_batches

    def adopt(self, model: nn.Module) -> None:
        """Before a forward, on several ranks: finds trained parameters that were added to the model
        after it was sharded.

        New ones get rank 0's values. Collective if there are any; blocks. Raises ValueError where
        ranks differ in them.
        """
        if self._reducer is None:
            return
        found = {
            param: summed if param.grad is (summed := self._added.get(param)) else None
            for param in self._ordinary_of(model)
            if param.requires_grad
        }
        fresh = [param for param in found if param not in self._added]
        self._added = found
        if fresh:
            shapes = {
                f"added parameter {i}": f"{tuple(p.shape)} {p.dtype}" for i, p in enumerate(fresh)
            }
            agree(
                self._topology, shapes, "a forward with parameters that were added after sharding"
            )
        for param in fresh:
            share(self._topology, param.detach(), "sharing added parameters")

    def _ordinary_of(self, model: nn.Module) -> list[nn.Parameter]:
        """A model's parameters that no unit holds. The model is only searched where a module holds
        another parameter or module than before."""
        held = _held_by(self._modules)
        if not held or [*map(id, held)] != [*map(id, self._held)]:
            self._modules = [*model.modules()]
            self._held = _held_by(self._modules)
            self._ordinary = [p for p in model.parameters() if registry.owner_of(p) is None]
        return self._ordinary

    def changing(self) -> _Change:
        """A block that changes gradients, or uses them with other ranks. If an interrupt ends it,
        the mark stays."""
        return _Change(self)

    def check_alone(self) -> None:
        """After an interrupt: `Topology.check_alone`."""
        self._topology.check_alone()

    def check_whole(self) -> None:
        """Drops every gradient and raises RuntimeError, if an interrupt has ended a change of
        gradients."""
        if self.is_changing:
            self.abandon()
            raise lost_gradients("a change of gradients")

    # ---- in backward -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a backward: clears `p.grad` for autograd's gradients.

        On one rank, a parameter with a user's hook on its `p.grad` gets there what earlier
        micro-batches gave, since torch shows the sum to the hook. So does one whose `p.grad` was a
        tensor that the user holds: autograd adds to it.
        """
        self._factor = None
        self._waiting = dict.fromkeys(
            self._units if self.reduces_when_final else reversed(self._units), False
        )
        self._given.clear()
        self._graphs.clear()
        self.forget_replaced()
        for shard in self._shown:
            shard.param.grad = None
            if self._reducer is not None or not shard.gradient.is_there:
                continue
            grad = self._set_grads[shard].tensor() if shard in self._set_grads else None
            if grad is None and _is_hooked(shard.param):
                grad = self._copy_of(shard, torch.clone)  # as autograd has left it
            if grad is not None:
                shard.gradient.forget()
                shard.param.grad = grad
        self._shown.clear()
        for param, summed in self._added.items():
            if summed is not None and param.grad is summed:
                summed.div_(self._topology.world)  # added up once more with what comes now
            self._added[param] = None

    def receive(self, unit: Unit) -> None:
        """Takes the gradients that autograd left on a unit's parameters, and starts to reduce them.

        Collective. Raises OSError, RankLost. Blocks for the copy, and for the oldest reduction when
        two are under way.
        """
        with self.changing():
            if self._reducer is None:
                self._take(unit)
            elif self.reduces_when_final:
                # a rank may use what is always present without the others
                if unit in self._waiting and not unit.is_resident:
                    self._reduce(unit)
            elif unit in self._waiting:
                self._waiting[unit] = True
                while self._waiting and self._waiting[first := next(iter(self._waiting))]:
                    self._reduce(first)

    def add(self, unit: Unit, is_last: bool) -> None:
        """Takes the gradients of one of several micro-batches, whose sum goes home with the last
        one. Collective.

        Blocks and raises as `receive`. A unit without gradients takes part, too.
        """
        with self.changing():
            if self._reducer is None:
                self._take(unit, ends=False)
                if is_last:
                    self._end(unit)
            else:
                self._reduce(unit, is_last)

    def finish(self) -> None:
        """Ends a backward, or prepares a step: afterwards every gradient is at home. Collective;
        blocks.

        Raises RuntimeError on every rank when a unit that was stepped in backward gets another
        gradient.
        """
        with self.changing():
            for unit in list(self._waiting) if self._reducer is not None else ():
                if unit.is_resident or not self.reduces_when_final:
                    self._reduce(unit)
            self.receive_rest()
            self._reduce_added()
        self._steps.is_partial = False

    def receive_rest(self) -> None:
        """Receives every `p.grad` that any rank still has, for example before a step. Collective;
        blocks."""
        with self.changing():
            if self._reducer is None:
                for unit in self._units:
                    self._take(unit)
                self.store.join()
                return
            self._drain()  # what this rank can do before the others have come
            left = self._left()
            sums = self._add_up(
                "comparing which gradients there are", [*left, *[0.0] * len(self._of_shard)]
            )
            self._receive([number > 0 for number in sums[: len(left)]])

    def _left(self) -> list[bool]:
        """Of each unit, whether this rank has a `p.grad` left; of each parameter, whether it had
        one in this backward."""
        fresh = [[shard for shard in unit.shards if _fresh(shard)] for unit in self._units]
        self._given.update(*fresh)
        return [bool(each) for each in fresh] + [shard in self._given for shard in self._of_shard]

    def _receive(self, flags: Sequence[bool]) -> None:
        """Receives what any rank has left, by `_left` of all ranks."""
        for unit in (unit for unit, is_left in zip(self._units, flags, strict=False) if is_left):
            self._reduce(unit)
        self._drain()
        for shard, is_given in zip(self._of_shard, flags[len(self._units) :], strict=True):
            if self.store.home is not None and is_given:
                shard.gradient.confirm()
            elif not shard.gradient.is_there:
                shard.gradient.forget()
        self._given.clear()

    def abandon(self) -> None:
        """Drops every gradient, after a backward that ended in an exception. Blocks until
        reductions under way have ended.

        A second call completes the first.
        """
        logger.warning("a backward ended in an exception: the gradients of its step are forgotten")
        if self.is_changing:
            self.check_alone()
        self.is_changing = True
        self._steps.is_torn |= self._steps.is_partial
        if self._reducer is not None:
            self._reducer.reset()
        self._ends.clear()
        self.store.reset()
        for shard in self._of_shard:
            shard.param.grad = None
            shard.gradient.forget()
        self.begin()
        self.begin_step()
        self._stand_ins.clear()
        self._set_grads.clear()
        for param in self._added:
            param.grad = None
        self.is_changing = False

    # ---- between backward and step ---------------------------------------------------------------

    def show(self, unit: Unit) -> None:
        """Sets `p.grad` to a ShardedGrad for gradients that are at home, or that step_in_backward
        has used."""
        used = self._stepped.get(unit, ())
        for shard in unit.shards:
            if (shard.gradient.is_there or shard in used) and shard.param.grad is None:
                if shard not in self._stand_ins:
                    self._stand_ins[shard] = ShardedGrad(shard, self)
                shard.param.grad = self._stand_ins[shard]
                self._shown.add(shard)
                if shard in self._set_grads:
                    self._set_grads[shard].note()

    def show_all(self) -> None:
        """`show` of every trainable unit."""
        for unit in self._units:
            self.show(unit)

    def forget_replaced(self) -> None:
        """Outside backward: drops the stored gradients whose `p.grad` the user has set to None or
        to another tensor, and takes over what he has written to a tensor that he has set before.
        The gradient of another parameter is copied. Blocks; raises OSError, and RuntimeError for a
        gradient that was dropped before, and as `_follow` does."""
        for shard in self._of_shard:
            grad = shard.param.grad
            if not isinstance(grad, ShardedGrad):
                self._set_grads.pop(shard, None)
                if grad is not None:
                    self._set_grads[shard] = _SetGrad(grad)
            elif grad is not self._stand_ins.get(shard):
                shard.param.grad = grad.clone()
            elif shard in self._set_grads:
                self._follow(shard)
        for shard in self._of_shard:
            if not shard.gradient.is_there or isinstance(shard.param.grad, ShardedGrad):
                continue
            if shard.param.grad is None or shard in self._shown:
                shard.gradient.forget()
                self._shown.discard(shard)
                self._stand_ins.pop(shard, None)

    def _follow(self, shard: Shard) -> None:
        """Takes over what the user has written to the tensor that was `p.grad` until its values
        went home, and that the user holds. Blocks; raises OSError, and RuntimeError on several
        ranks, whose sum is at home."""
        written = self._set_grads[shard].written()
        if written is None:
            return
        if self._reducer is not None:
            raise RuntimeError(
                f"the tensor that was the `p.grad` of {shard.name} was written after a backward "
                "or a step had added it up over the ranks: set `p.grad` to it again, or write "
                "`p.grad` itself"
            )
        if self.store.home is None:
            raise _used(shard, "cannot be written any more")
        flat = written.reshape(-1)
        self._visit(shard, lambda share: share.copy_(flat), changes=True)
        self._set_grads[shard].note()

    def write_through(self, shard: Shard) -> None:
        """After a change of `p.grad`: makes it in the tensor that was `p.grad`, if the user holds
        that on one rank. Blocks; raises OSError."""
        if self._reducer is not None or shard not in self._set_grads:
            return
        held = self._set_grads[shard].tensor()
        if held is not None:
            with torch.no_grad():
                held.copy_(self._copy_of(shard, torch.clone))
            self._set_grads[shard].note()

    def write_zeros(self) -> None:
        """Before a step: writes zeros at home for gradients that the user has zeroed. Blocks;
        raises OSError."""
        for unit in self._units:
            zeroed = [shard for shard in unit.shards if shard.gradient.is_zero]
            if zeroed:
                self._steps.finish()
                opened = self.store.open(unit, adds=len(zeroed) < len(unit.shards))
                for shard in zeroed:
                    self.store.clear(opened, shard)
                self.store.close(opened)

    def check_all_used(self) -> None:
        """Before a step: raises RuntimeError on every rank, with the names of parameters without a
        gradient.

        Does nothing when the policy sets `ignore_unused`.
        """
        if self._policy.ignore_unused:
            return
        in_order = sorted(self._of_shard, key=lambda s: s.index)
        stepped = {shard for shards in self._stepped.values() for shard in shards}
        trained = [s for s in in_order if s.param.requires_grad]
        unused = [s.name for s in trained if not s.gradient.is_there and s not in stepped]
        if unused:
            raise RuntimeError(
                f"{len(unused)} of {len(trained)} parameters took no part in the loss on any rank "
                "since the last step: "
                f"{', '.join(unused[:20])}{', ...' if len(unused) > 20 else ''}. Use them, freeze "
                "them, or let training go on without them: ignore_unused=True (in a config: "
                "ignore_unused_parameters)"
            )

    def check_kept(
        self, grad: ShardedGrad, is_zeroed: bool = False, is_recorded: bool = False
    ) -> None:
        """Raises RuntimeError for a gradient that was dropped, for one that step_in_backward has
        used, which after the step may be zeroed. In a graph that is recorded, also for one whose own
        graph is lost."""
        shard = grad.shard
        if self._stand_ins.get(shard) is not grad:
            raise RuntimeError(
                f"this is a gradient of {shard.name} that is gone: `p.grad` was set to None or to "
                "another tensor, and a backward or a step has come since. Keep a copy: p.grad.clone()"
            )
        if self.store.home is None and (self._of_shard[shard] in self._stepped or not is_zeroed):
            raise _used(shard, "cannot be read, scaled or zeroed any more")
        if is_recorded and shard in self._graphs:
            raise RuntimeError(
                f"the gradient of {shard.name} rests on a tier, without the graph of "
                "backward(create_graph=True): to go back through it take "
                "torch.autograd.grad(loss, params, create_graph=True), else use it under "
                "torch.no_grad()"
            )
        if shard in self._set_grads:
            self._follow(shard)

    def check_used_once(self) -> None:
        """With step_in_backward, before a step: raises RuntimeError if the user has dropped
        gradients that were used, and for a second step with the same gradients."""
        for shard in self._shown:
            is_seen = isinstance(shard.param.grad, ShardedGrad)
            is_stepped = self._of_shard[shard] in self._stepped
            if is_stepped and not is_seen:
                raise _used(shard, "cannot be dropped any more")
            if is_seen and not is_stepped:
                raise _used(shard, "cannot be stepped with again")

    def begin_step(self) -> None:
        """With step_in_backward: allows units that were stepped in the last backward to be stepped
        again.

        Blocks until an accelerator has stepped the last of them; `GradientStore.open` has waited
        for the others.
        """
        self._steps.finish()
        self._stepped.clear()

    def sums_of_squares(self, shards: Sequence[Shard]) -> list[float]:
        """The sum of squares of each parameter's gradient over all ranks, in float64, with the
        user's scaling. Collective."""
        return self._total(self._squares(shards))

    def _total(self, sums: Sequence[float]) -> list[float]:
        """The sums of all ranks that hold parts. Collective."""
        values: list[float] = total(self._topology, self._on_wire(sums, torch.float64)).tolist()
        return values

    def _squares(self, shards: Sequence[Shard]) -> list[float]:
        """The sum of squares of this rank's part of each parameter's gradient, in float64, with the
        user's scaling."""
        self.store.join()
        # computed after the sums: one wait for both
        factors = [shard.gradient.factor for shard in shards]
        return [own * by**2 for own, by in zip(self._unscaled(shards), factors, strict=True)]

    def _unscaled(self, shards: Sequence[Shard]) -> list[float]:
        """`_squares` without the user's scaling, which is 1 where there is no gradient."""
        self._sums.bring(self._of_shard)
        return [
            math.fsum(cast(Sequence[float], s.gradient.block_sums)) if s.gradient.is_there else 0.0
            for s in shards
        ]

    def _squares_there(self, shards: Sequence[Shard]) -> torch.Tensor | None:
        """`_unscaled` on the accelerator where the sums rest; None: they rest elsewhere."""
        self.store.join()
        return self._sums.squares_there(shards, self._of_shard) if self.has_whole else None

    def norms(self, shards: Sequence[Shard], device: torch.device) -> torch.Tensor:
        """The 2-norm of each parameter's gradient, after the mean over ranks, fp32, on a device.
        Collective.

        Scale factors and sums of squares on an accelerator stay there, so no thread waits for them.
        """
        squares = self._squares_there(shards)
        known = [abs(s.gradient.known_factor) for s in shards]
        if squares is not None:
            found = (
                squares.sqrt()
                * to_device(torch.tensor(known, dtype=torch.float64), device)
                / self.divisor
            )
        else:
            sums = self._total(self._unscaled(shards))
            norms = [math.sqrt(of) * by / self.divisor for of, by in zip(sums, known, strict=True)]
            found = to_device(torch.tensor(norms, dtype=torch.float64), device)
        return with_factors(found, shards).float()

    def tell_nonfinite(self, shards: Sequence[Shard], found_inf: torch.Tensor) -> None:
        """Sets a tensor of one element to 1 where an element of these gradients is not finite.
        Collective.

        Blocks, but not for sums of squares that rest on an accelerator, where this is found out.
        """
        squares = self._squares_there(shards)
        if squares is not None:
            found_inf.masked_fill_(~with_factors(squares, shards).isfinite().all(), 1.0)
        elif not all(map(math.isfinite, self.sums_of_squares(shards))):
            found_inf.fill_(1.0)

    def factor(self, value: torch.Tensor | float) -> Factor:
        """A number that is to scale gradients, also one on an accelerator. Does not block.

        Clipping scales every gradient by one tensor, which is copied once.
        """
        if not isinstance(value, torch.Tensor) or not is_accelerator(value.device):
            return Factor(functools.partial(float, float(value)), None)
        version = value._version
        if self._factor is None or self._factor[0] is not value or self._factor[1] != version:
            there = value.detach().to(torch.float64, copy=True)
            self._factor = value, version, Factor(ToHost(there).number, there)
        return self._factor[2]

    @property
    def has_whole(self) -> bool:
        """Whether this rank holds whole gradients."""
        return self._topology.num_shards == 1

    def read(self, shard: Shard) -> torch.Tensor:
        """A copy of a whole gradient, on the device of its parameter. Blocks; raises OSError."""
        return self._copy_of(shard, lambda share: share.float() / self.divisor)

    def _copy_of(
        self, shard: Shard, copied: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What `copied` makes of a whole gradient, as its parameter has gradients."""
        found: list[torch.Tensor] = []
        self._visit(shard, lambda share: found.append(copied(share)), changes=False)
        param = shard.param
        return found[0].to(param.device, param.grad_dtype or param.dtype).view(shard.shape)

    def replace(self, shard: Shard, value: torch.Tensor) -> None:
        """Replaces a whole gradient. Blocks; raises OSError."""
        flat = value.reshape(-1)
        self._visit(shard, lambda share: share.copy_(flat.float() * self.divisor), changes=True)
        self.write_through(shard)

    def clamp(self, shard: Shard, low: float | None, high: float | None) -> None:
        """Bounds the elements of this rank's part of a gradient. Blocks; raises OSError."""
        bounds = [None if bound is None else bound * self.divisor for bound in (low, high)]
        self._visit(shard, lambda share: share.clamp_(*bounds), changes=True)
        self.write_through(shard)

    def _visit(
        self, shard: Shard, visitor: Callable[[torch.Tensor], object], changes: bool
    ) -> None:
        self._steps.finish()
        self.check_whole()
        unit = self._of_shard[shard]
        with self.changing():
            self.store.visit(unit, shard, visitor, changes)

    def norm(
        self, meanwhile: Callable[[], object], counts: Callable[[Shard], bool] | None
    ) -> float:
        """Before a step: receives every `p.grad` that any rank still has, and returns the global
        2-norm of the gradients of those parameters that count (None: of all).

        The norm is that after the mean over ranks; NaN or infinity if such a gradient is. Afterwards
        every gradient is on its tier, and those that the user has zeroed are zero there.
        Collective: one exchange where no rank has a `p.grad` left. Blocks; raises OSError.

        meanwhile: called while ranks exchange; what it has found of gradients is old if it is
            called again.
        """
        shards = sorted(self._of_shard, key=lambda s: s.index)
        if self._reducer is None:
            self.receive_rest()
        squares: Sequence[float] | None = None
        with self.changing():
            while squares is None:
                self._drain()
                self.write_zeros()
                self.store.await_writes()
                squares = (
                    self._squares(shards)
                    if self._reducer is None
                    else self._squares_or_more(shards, meanwhile)
                )
        pairs = zip(shards, squares, strict=True)
        counted = (of for shard, of in pairs if counts is None or counts(shard))
        return math.sqrt(math.fsum(counted)) / self.divisor

    def _squares_or_more(
        self, shards: Sequence[Shard], meanwhile: Callable[[], object]
    ) -> list[float] | None:
        """`sums_of_squares`; None: a rank had gradients left, which are received now. Ranks add in
        their order. Collective."""
        left = self._left()
        own = self._squares(shards) if self._topology.replica == 0 else [0.0] * len(shards)
        sums = self._add_up("adding up norms", [*left, *own], meanwhile)
        if any(sums[: len(left)]):
            self._receive([number > 0 for number in sums[: len(left)]])
            return None
        return sums[len(left) :]

    # ---- between ranks ---------------------------------------------------------------------------

    def _add_up(
        self, what: str, row: list[float], meanwhile: Callable[[], object] = lambda: None
    ) -> list[float]:
        """The sums of a row over ranks. Raises RankLost where ranks have made other calls, which
        may have been mixed up."""
        digest = self._topology.traffic.digest()
        *sums, digests = self._rows.add_up(what, [*row, digest], meanwhile)
        if digests != digest * self._topology.world:
            self.check_alone()
        return sums

    def _reduce(self, unit: Unit, ends: bool = True) -> None:
        """Starts the reductions of a unit's gradients, bucket by bucket. ends: its home closes
        after them. Collective."""
        assert self._reducer is not None
        if unit in self._stepped:
            raise _stepped_already(unit)
        self._waiting.pop(unit, None)
        fresh = {shard for shard in unit.shards if _fresh(shard)}
        self._given |= fresh
        self._note_used(fresh)
        buckets = self._cut.get(unit.index)
        if buckets is None:
            buckets = cut(unit, self._topology.num_shards, self._policy.reduce_bucket_numel)
            self._cut[unit.index] = buckets
        for number, bucket in enumerate(buckets):
            while self._reducer.is_full:
                self._arrive()
            name = unit.name if len(buckets) == 1 else f"{unit.name} {number + 1}/{len(buckets)}"
            grads = [
                part.shard.param.grad if part.shard in fresh else None for part in bucket.ranges
            ]
            self._ends.append(ends and bucket is buckets[-1])
            self._reducer.start(name, bucket, grads)
            del grads
            if self._reducer.is_eager:
                self._arrive()
            for part in bucket.ranges:
                if part.is_last:
                    part.shard.param.grad = None
        for shard in unit.shards:
            shard.param.grad = None

    def _arrive(self) -> None:
        """Waits for the oldest reduction and stores its result; after the last one of a unit,
        closes the unit's home."""
        assert self._reducer is not None
        done, column = self._reducer.finish()
        unit = done.bucket.unit
        try:
            columns = zip(done.bucket.ranges, done.bucket.split(column), strict=True)
            parts = [GradientPart(part.shard, part.start, sums) for part, sums in columns]
            with self._reducer.aside():
                self.store.add(unit, parts, is_known=False)
        finally:
            self._reducer.release(done, self.store.end_of_reads())
        self.store.recorder.add(
            "reduce", done.what, done.start_ns, time.monotonic_ns(), done.bucket.num_bytes
        )
        if self._ends.popleft():
            self._end(unit)

    def _drain(self) -> None:
        while self._reducer is not None and not self._reducer.is_idle:
            self._arrive()
        self.store.join()

    def _reduce_added(self) -> None:
        """Makes `p.grad` of added parameters the mean (or sum) over the ranks; a rank without one
        adds zeros. Collective."""
        added = list(self._added)
        given = self._on_any_rank([param.grad is not None for param in added]) if added else []
        for param in itertools.compress(added, given):
            grad = param.new_zeros(param.shape) if param.grad is None else param.grad.contiguous()
            call(self._topology, "adding up gradients of added parameters", dist.all_reduce, grad)
            if self._policy.reduce_op == "mean":
                grad.div_(self._topology.world)
            else:
                self._added[param] = grad
            param.grad = grad

    def _tell_given(self, unit: Unit) -> None:
        """Before a unit is stepped in backward: confirms the gradients of parameters that any rank
        had a gradient of."""
        flags = self._on_any_rank([shard in self._given for shard in unit.shards])
        for shard, is_given in zip(unit.shards, flags, strict=True):
            if is_given:
                shard.gradient.confirm()

    def _on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is True on any rank. Collective; blocks."""
        found = self._on_wire(flags, torch.uint8)
        call(
            self._topology,
            "comparing which gradients there are",
            dist.all_reduce,
            found,
            dist.ReduceOp.MAX,
        )
        return [bool(flag) for flag in found.tolist()]

    def _on_wire(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self._topology.control_device)

    # ---- home ------------------------------------------------------------------------------------

    def _take(self, unit: Unit, ends: bool = True) -> None:
        """With one rank: stores the gradients that autograd left. ends: the unit's home closes."""
        fresh = [shard for shard in unit.shards if _fresh(shard)]
        if not fresh:
            return
        if unit in self._stepped:
            raise _stepped_already(unit)
        start_ns = time.monotonic_ns()
        parts = [
            GradientPart(s, 0, s.param.grad.reshape(-1)) for s in fresh if s.param.grad is not None
        ]
        try:
            self.store.add(unit, parts, is_known=True)
        except BaseException:
            self.store.drop()
            raise
        if ends:
            self._end(unit)
        self.store.recorder.add(
            "reduce", unit.name, start_ns, time.monotonic_ns(), unit.shard_bytes
        )
        self._note_used(fresh)
        for shard in fresh:
            shard.param.grad = None

    def _note_used(self, fresh: Iterable[Shard]) -> None:
        """Notes the gradients that the user's hooks may have kept, and those that
        backward(create_graph=True) has left, whose graph ends here."""
        for shard in fresh:
            grad = shard.param.grad
            if grad is not None and _is_hooked(shard.param):
                self._set_grads[shard] = _SetGrad(grad)
            if grad is not None and grad.requires_grad:
                self._graphs.add(shard)

    def _end(self, unit: Unit) -> None:
        """Sends a unit's gradients to their tier; with step_in_backward steps it."""
        if self.store.home is None:
            self.store.join()  # the gradients' states are known afterwards
            if self._reducer is not None:
                self._tell_given(unit)
            self._stepped[unit] = [shard for shard in unit.shards if shard.gradient.is_there]
        self.store.end(unit)
        for arrived in self.store.arrived():
            self.on_arrival(arrived)


class _SetGrad:
    """A tensor that the user has set as `p.grad`, or that a hook of his has seen there. It may be a
    view of a buffer of all gradients. Its values go home; the user may hold it, read it and write
    it."""

    def __init__(self, grad: torch.Tensor) -> None:
        is_view = grad._base is not None and grad._base.dtype is grad.dtype
        whole = grad._base if is_view and grad._base is not None else grad
        self._whole = weakref.ref(whole)
        self._view = (grad.shape, grad.stride(), grad.storage_offset()) if is_view else None
        self._version = -1

    def tensor(self) -> torch.Tensor | None:
        """The tensor, if it is held."""
        whole = self._whole()
        if whole is None or self._view is None:
            return whole
        return whole.as_strided(*self._view)

    def note(self) -> None:
        """Notes that its values are at home."""
        whole = self._whole()
        # torch counts no writes of the others
        self._version = -1 if whole is None or whole.is_inference() else whole._version

    def written(self) -> torch.Tensor | None:
        """The tensor, if it is held and was written since `note`."""
        whole = self._whole()
        if whole is None or self._version in (-1, whole._version):
            return None
        return self.tensor()


class _Change:
    """The block of `GradientHomes.changing`."""

    def __init__(self, homes: GradientHomes) -> None:
        self._homes = homes

    def __enter__(self) -> None:
        self._was_changing = self._homes.is_changing
        self._homes.is_changing = True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._homes.is_changing = self._was_changing
        elif isinstance(error, Exception):
            self._homes.is_changing = self._was_changing or isinstance(error, MemoryError)


def lost_gradients(where: str) -> RuntimeError:
    """The error of a step that an exception has deprived of its gradients. where: what it has
    ended."""
    return RuntimeError(
        f"{where} ended in an exception, so the gradients are those of a part of the model. They "
        "are forgotten: run forward and backward again before the step"
    )


def _held_by(modules: Sequence[nn.Module]) -> list[object]:
    """The modules and parameters that modules hold."""
    return [
        child
        for module in modules
        for child in (*module._modules.values(), *module._parameters.values())
    ]


def _fresh(shard: Shard) -> bool:
    """Whether autograd or the user has left a gradient on a parameter."""
    grad = shard.param.grad
    return grad is not None and not isinstance(grad, ShardedGrad)


def _is_hooked(param: nn.Parameter) -> bool:
    """Whether the user has a hook on the gradient that is accumulated."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return any(not isinstance(each, WeakCall) for each in hooks.values())


def _used(shard: Shard, what: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {shard.name} was used while backward ran, by step_in_backward: it "
        f"{what}. Set step_in_backward=False to clip or change gradients between backward and step"
    )


def _stepped_already(unit: Unit) -> RuntimeError:
    return RuntimeError(
        f"unit {unit.name!r} gets gradients after it was stepped in this backward: with "
        "step_in_backward every parameter takes part in one backward per step, and in one part of "
        "it. Set step_in_backward=False to add gradients up. If an interrupt came between backward "
        "and step, the step was made: go on with the next one"
    )
