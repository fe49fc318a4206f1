"""Shards: a model whose parameters are partitioned and rest on a tier, and the objects that serve
it.

    with tiermem.shard(model, policy=OffloadPolicy(params=Tier.NVME, optim=Tier.NVME,
    paths=["/mnt/nvme0"])) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=3e-4)
        loss = model(x); loss.backward(); optim.step(); optim.zero_grad()

    divide   the model into units                 unit.py       fetch     units when their modules run   prefetcher.py
    plan     the memory of every tier             plan.py       hook      forward and backward           hooks.py
    move     every parameter's part to its tier   move_to_home  receive   gradients                      gradients.py
    values   where they rest, read and written    values.py     show      whole weights to torch         values.py

To read a weight or a gradient outside forward and backward, use `weight`, `gradient` or
`state_dict`. They gather it and are collective: every rank calls them. Nothing in torch is patched.
Closing the shards removes the hooks and leaves the module, with its weights if asked to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from tiermem.gradients.gradients import GradientHomes
from tiermem.plans.agreement import agree, facts_of, facts_of_plan
from tiermem.plans.budget import check_card, make_plan, take_disk
from tiermem.plans.plan import BOUNCE_BYTES, Plan
from tiermem.plans.pools import Pools, carve, keep_buffers, open_store
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.failures import RankLost
from tiermem.ranks.joining import join_ranks
from tiermem.ranks.topology import (
    Topology,
    arrange,
    find_topology,
    near_workers,
    ranks_of,
    ranks_per_node,
)
from tiermem.run.activations import make_activations
from tiermem.run.fill import Fill
from tiermem.run.hooks import Hooks
from tiermem.run.init_params import built_with
from tiermem.run.memory_errors import MemoryErrors
from tiermem.run.move_to_home import (
    WeightsMove,
    check_model,
    check_rescaling,
    move_buffers,
    move_to_home,
    release,
    show_parts,
)
from tiermem.run.next_plan import Frozen, plan_elsewhere, plan_of, reserve_more
from tiermem.swap.base.native import trim_heap
from tiermem.swap.base.tile_program import end_kernels
from tiermem.swap.disk.run_folder import call_in_child
from tiermem.swap.memory.accelerator import find_device, is_accelerator, open_context
from tiermem.swap.memory.free import free_host_bytes
from tiermem.swap.program.program import Program
from tiermem.swap.store.stream import Bounce
from tiermem.units import registry
from tiermem.units.compute import agree_on_compute, widen_inputs
from tiermem.units.experts import serve_experts
from tiermem.units.state_layout import MASTER
from tiermem.units.unit import Shard, Unit, divide, serve_islands
from tiermem.units.written import adopt
from tiermem.weights import absent
from tiermem.weights.backward_marks import check_thread, in_backward, made_by, tensors_in
from tiermem.weights.prefetcher import Prefetcher, first_order, limits_of
from tiermem.weights.step_run import StepRun, kept_overlap
from tiermem.weights.unit_state import LiveUnit
from tiermem.weights.values import StateDicts, Values, initial_master

logger = logging.getLogger("tiermem")

_Attached = TypeVar("_Attached", bound="Attached")


class Attached(Protocol):
    """An object that other packages attach to a sharded model; the model calls it. The saver of
    durable steps is one."""

    @property
    def keeps_files(self) -> bool:
        """Whether the files of the store must be kept when the model is closed."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of this optimizer, on every rank. May block."""

    def close(self) -> None:
        """Called when the model is being closed and its store is still open. Blocks; raises errors
        since the last call."""


class States(Protocol):
    """The optimizer's states of a sharded model, as far as the model uses them."""

    def make_room(self, plan: Plan) -> None:
        """Moves states to NVMe that another plan has no room for on HOST. Blocks; raises
        OSError."""

    def check_move(self, plan: Plan) -> None:
        """Raises ValueError where another plan has steps made that would have other bits."""

    def move_out(self, plan: Plan) -> None:
        """Moves states to DEVICE and NVMe, those that another plan has there. Blocks; raises
        OSError."""

    def move_in(self, plan: Plan) -> None:
        """Moves states to HOST, those that another plan has there. Blocks; raises OSError."""

    def allocate(self, units: Sequence[Unit]) -> None:
        """Takes room for the states of units that have become trainable. Raises OSError."""

    def is_started(self, shard: Shard) -> bool:
        """Whether a parameter has states."""

    def read(self, shard: Shard, name: str) -> torch.Tensor:
        """A copy of this rank's part of one state of a parameter: flat, fp32, without padding.
        Blocks."""

    def put(self, shard: Shard, name: str, values: torch.Tensor) -> None:
        """Stores this rank's part of one state of a parameter, given in fp32, and of a master the
        weight. Blocks."""


class Shards:
    """The result of `tiermem.shard` (see there for the arguments). Closing it, or leaving its
    `with` block, ends it."""

    def __init__(
        self,
        model: nn.Module,
        policy: OffloadPolicy,
        group: dist.ProcessGroup | DeviceMesh | None,
        device: torch.device | str | None,
        is_trained: bool = True,
    ) -> None:
        if owner_of(model) is not None:
            raise ValueError(
                "this model is sharded already: close its shards before sharding it again"
            )
        check_model(model, is_trained)
        self.model = model
        self.device = find_device(device)
        built = built_with(model)
        context = open_context(self.device)  # its bytes
        if group is None and built.group is None:
            join_ranks(policy.timeout_s, self.device, policy.join_timeout_s)
        ranks, policy = ranks_of(group if group is not None else built.group, built.over(policy))
        everyone = find_topology(policy.stage, ranks, policy.timeout_s, self.device)
        agree(everyone, facts_of(model, policy, self.device))
        self.compute, policy = agree_on_compute(model, policy, everyone, self.device)
        self.policy = policy
        self.states: States | None = None  # of the optimizer that steps this model
        self._attached: list[Attached] = []
        # weights may not change: all units are present (access.py), or show averages
        self.is_held = False
        self._residents: list[LiveUnit] = []  # units that are always present
        self.topology: Topology = arrange(
            everyone,
            policy,
            ranks_per_node(),
            self.device.type,
            built.parts if ranks is built.group else None,
        )
        self._is_closed = False
        self._is_trained = is_trained
        self._handles: list[RemovableHandle] = []
        division = divide(model, policy, self.topology.num_shards, is_trained)
        self.plan = make_plan(
            division,
            policy,
            self.topology,
            is_accelerator(self.device),
            ranks_per_node(),
            context,
            free_bytes=free_host_bytes(),
        )
        check_rescaling(model, self.plan)
        agree(self.topology, facts_of_plan(self.plan), "the plan of tiermem.shard")
        check_card(self.plan, policy, self.device)
        self.store = open_store(self.plan, policy, self.topology, self.device)
        self._end_watch: Callable[[], object] = lambda: None
        workers = None
        try:
            self.workers = workers = near_workers(self.device, self.store.arena)
            self.store.sums.use(workers, policy.verify)
            # for a model that is never closed
            weakref.finalize(self, end_kernels, self.store.programs, workers)
            if self.topology.group is not None and self.topology.watch is not None:
                self.topology.watch.start(self.topology.group, self.topology.groups)
                self._end_watch = weakref.finalize(self, self.topology.watch.close)
            self.plan = take_disk(self.plan, policy, self.store, self.topology)
            self._build()
            trim_heap()  # returns freed memory of the build
            self._log_start()
        except BaseException:
            self.store.close()
            if workers is not None:
                workers.close()
            self._end_watch()
            raise

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(
            *[] if kind is None else [RankLost]
        ):  # after Ctrl-C in one rank, that is the one to tell
            self.close()

    def switch_pipeline(self, read: bool, write: bool) -> None:
        """Switches `pipeline_read` and `pipeline_write` of the policy for the steps that follow, as
        a benchmark does."""
        self.policy = dataclasses.replace(self.policy, pipeline_read=read, pipeline_write=write)

    def keep_overlap(self, saved: str) -> None:
        """Goes on with the `overlap` of the run that saved a checkpoint, unless the policy names
        one."""
        self.policy = kept_overlap(self.policy, self.plan, is_accelerator(self.device), saved)

    # ---- reading values --------------------------------------------------------------------------

    def weight(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of a parameter's whole value, on the CPU, in its own dtype. Collective; blocks."""
        live, shard = self.find(param)
        if live.unit.is_resident:
            self.store.on_device.check_there("param/")
            return param.detach().to("cpu", live.unit.dtype, copy=True)
        if live.is_present and not live.is_streamed:
            return (
                live.memory.views[live.unit.shards.index(shard)]
                .detach()
                .to("cpu", live.unit.dtype, copy=True)
            )
        return self.values.assemble(shard, self.local_weight(param)).view(shard.shape)

    def _saved(self, param: nn.Parameter) -> torch.Tensor:
        """Its `weight`. Raises RuntimeError if the model is torn."""
        value = self.weight(param)
        self.steps.check_whole()
        self.steps.check_loaded()
        return value

    def local_weight(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of this rank's part of a parameter: flat, on the CPU, shard_numel elements.
        Blocks."""
        live, shard = self.find(param)
        self.take_writes(param)
        return self.values.elements(
            live, slice(shard.shard_offset, shard.shard_offset + shard.shard_numel)
        )

    def refresh(self, param: nn.Parameter) -> None:
        """Makes a parameter's unit show new values from where it rests, unless a module holds it;
        gathered parameters, too.

        Collective; blocks.
        """
        live, _ = self.find(param)
        live.note_change([shard.param for shard in live.unit.shards])
        self._refresh(live)
        for index in live.taken_out:
            live.take_out(index, self.weight(live.unit.shards[index].param).to(self.device))

    def _refresh(self, live: LiveUnit) -> None:
        if live.is_streamed:
            if not self.hooks.may_lend:
                live.let_all_go()  # users left by a forward without backward
            if not live.num_users:
                self.prefetcher.outdate(live)
        elif live.shard is not None and live.shard is not live.memory.full:
            self.values.regather(live.unit, live.shard, live.memory)

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of a parameter's reduced gradient (mean over ranks), or None. Call between
        backward and step. Collective.

        A `p.grad` that the user has set counts, on every rank. Blocks; raises OSError.
        """
        live, shard = self.find(param)
        self._receive_set(self.topology.world > 1)
        local = self.local_gradient(param)
        if local is None:
            return None
        return self.values.assemble(shard, local.to(self.homes.store.dtype(live.unit))).view(
            shard.shape
        )

    def local_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of a reduced gradient, without padding: flat, fp32, on the CPU; or None.
        Blocks.

        On several ranks also None for a `p.grad` that the user has set and no backward, step or
        `gradient` has reduced.
        """
        live, shard = self.find(param)
        self._receive_set(is_collective=False)
        if not shard.gradient.is_there or param.grad is None:
            return None
        if shard.gradient.is_zero:
            return torch.zeros(self.values.num_mine(shard))
        self.homes.store.flush()
        part = slice(shard.shard_offset, shard.shard_offset + self.values.num_mine(shard))
        local = self.values.read_part(
            self.homes.store.entry(live.unit), self.homes.store.dtype(live.unit), part
        )
        return local.float() * (shard.gradient.factor / self.homes.divisor)

    def _receive_set(self, is_collective: bool) -> None:
        """Outside backward: drops gradients that the user has replaced, and receives the new ones
        where ranks may. Blocks."""
        if in_backward() or self.hooks.has_left_gradients or self.homes.store.home is None:
            return
        self.steps.finish()
        self.homes.check_whole()
        with torch._C.DisableTorchFunctionSubclass():
            self.homes.forget_replaced()
            if is_collective or self.topology.world == 1:
                self.homes.receive_rest()
            self.homes.show_all()

    def find(self, param: nn.Parameter) -> tuple[LiveUnit, Shard]:
        """A parameter's unit and its shard. Raises ValueError for a parameter of another model,
        RuntimeError in a fork and after `close`."""
        self.store.check_usable()
        try:
            return self._by_param[id(param)]
        except KeyError:
            raise ValueError("this parameter is not one of the sharded model's") from None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or this is a forked child."""
        return self._is_closed

    @property
    def adds_at_home(self) -> bool:
        """Whether gradients of micro-batches accumulate on their tier: in stages 2 and 3, or in a
        dtype of their own."""
        kept = (
            self.homes.store.dtype(live.unit) == live.unit.dtype
            for live in self.units
            if live.unit.is_trainable
        )
        return self.policy.stage >= 2 or not all(kept)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backwards accumulate gradients without reducing them, where `p.grad` can
        hold them.

        This holds in stages 0 and 1; the next backward outside the block, or the step, reduces the
        sum. In stages 2 and 3 a rank has room for its part alone, so gradients are reduced as
        usual, with the same sum. Raises RuntimeError with step_in_backward.
        """
        if self.policy.step_in_backward:
            raise RuntimeError(
                "no_sync with step_in_backward: no gradient is held to add to. Set it to False"
            )
        before = self.hooks.receive_if(lambda: self.adds_at_home)
        try:
            yield
        finally:
            self.hooks.receive_if(before)

    def receive_gradients(
        self,
        meanwhile: Callable[[], object] | None = None,
        counts: Callable[[Shard], bool] | None = None,
    ) -> float | None:
        """Reduces the gradients that backwards have left in `p.grad`, and stores them. Collective;
        blocks; raises OSError.

        Call it after `Hooks.check_backward_ended`.

        meanwhile, counts: of `GradientHomes.norm`, whose norm is returned; without meanwhile no
            step follows, which needs it.
        """
        self.store.check_process()
        self.hooks.has_left_gradients = False
        # reading the `grad` of resting parameters takes less time so
        with torch._C.DisableTorchFunctionSubclass():
            self.homes.forget_replaced()
            norm = None if meanwhile is None else self.homes.norm(meanwhile, counts)
            if norm is None:
                self.homes.receive_rest()
            self.homes.show_all()
        return norm

    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Replaces a parameter's values; every rank gives the whole tensor. Collective; blocks;
        raises OSError.

        The master becomes exactly the new value if that has a wider dtype than the weight. Else
        elements that change become the new value, and all others keep their master. Moments stay as
        they are.
        """
        live, shard = self.find(param)
        self.check_may_change()
        self.steps.half_loaded.add(param)
        self.drop_head_start()
        self._take_over(
            live, shard, value.detach(), is_master=value.dtype.itemsize > live.unit.dtype.itemsize
        )
        live.note_change([param])
        self._refresh(live)
        index = live.unit.shards.index(shard)
        is_gathered = index in live.taken_out and value.data_ptr() != param.data_ptr()
        if is_gathered or (live.num_users and live.is_streamed):
            shown = (
                self.weight(param)
                if live.unit.is_packed
                else value.to(live.unit.dtype).view(shard.shape)
            )
            if is_gathered:
                live.take_out(index, shown.detach().to(self.device, copy=True))
            else:
                live.memory.views[index].copy_(shown)
        self.steps.half_loaded.discard(param)

    def _begin_load(self, params: Sequence[nn.Parameter]) -> None:
        """Marks what a `load_state_dict` is about to replace."""
        if not self.is_held:  # else `replace` refuses
            self.steps.half_loaded.update(each for each in params if id(each) in self._by_param)

    def take_writes(self, param: nn.Parameter | None = None) -> None:
        """Takes over what the user has written to weights that are always present. Does nothing
        where nothing was written.

        param: if it was not written, nothing is done. Each rank takes its own part of what its own
            parameters show. Not collective; blocks; raises OSError, and RuntimeError as
            `LiveUnit.written` and `check_may_change` do.
        """
        if param is not None:
            live, _ = self.find(param)
            if not (live.unit.is_resident and live.is_written(param)):
                return
        written = [live for live in self._residents if live.written()]
        memories = {live.memory.address for live in written}
        for live in written:
            live.part_from(memories)
        for live in written:
            self._take_writes_of(live)

    def note_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """Notes that the user has taken `data` of a parameter that is present, and may write it."""
        found = self._by_param.get(id(param))
        if found is not None:
            found[0].note_data(param, data)

    def _take_writes_of(self, live: LiveUnit) -> None:
        """Takes over what the user has written to a unit that is present, and drops reads ahead of
        the old values."""
        self._check_not_held()
        if self.topology.world == 1:
            self.steps.commit()
        self.steps.finish()
        self.program.drop()
        if live.is_streamed:
            live.part_from({live.memory.address})
        for index in live.written():
            live.check_alone(index)
            shard = live.unit.shards[index]
            with torch._C.DisableTorchFunctionSubclass():
                shown = shard.param.detach()
            self._take_over(live, shard, shown)
            live.show_again(index)
            if live.is_home(shown) and self._is_split(live):
                live.remember(index)  # this program writes weights
        live.renew()

    def _take_over(
        self, live: LiveUnit, shard: Shard, value: torch.Tensor, is_master: bool = False
    ) -> None:
        """Stores this rank's part of a whole weight where it rests. Elements that change become
        masters (written.py).

        A split master consists of the weight and its low half, so its elements are compared with
        the weight at rest, or with what `LiveUnit.remember` kept where the user writes that very
        memory. The first such write to a parameter, before which nothing was kept, leaves low
        halves as they are, but for those of zeros: up to half a unit of bf16's last place.

        is_master: every element becomes the master. Not collective; blocks; raises OSError.
        """
        unit = live.unit
        mine = self.values.mine(shard, value).cpu()
        part = slice(shard.shard_offset, shard.shard_offset + mine.numel())
        states = self.states
        if states is not None and not states.is_started(shard):
            states = None  # its master will be made from the weight
        is_there = live.is_home(value)
        initial = initial_master(unit)
        if states is None and initial not in self.store:
            if not is_there:
                self.values.put_elements(live, part.start, mine.to(unit.dtype))
            return
        master = (
            self.values.read_part(initial, torch.float32, part)
            if states is None
            else states.read(shard, MASTER)
        )
        before = live.before(unit.shards.index(shard))
        if before is not None:
            before = self.values.mine(shard, before).cpu()
        else:
            before = (
                self.values.elements(live, part) if self._is_split(live) else master.to(unit.dtype)
            )
        if is_master:
            master.copy_(mine)
        elif not adopt(mine, master, before.to(mine.dtype)):
            return
        if states is not None:
            states.put(shard, MASTER, master)
            return
        self.values.put_initial_master(unit, shard, master)
        self.values.put_elements(live, part.start, mine.to(unit.dtype))

    def _is_split(self, live: LiveUnit) -> bool:
        """Whether a unit's masters are the weights and what these lack."""
        return (
            live.unit.is_trainable and self.policy.precision.master_of(live.unit.dtype) == "split"
        )

    def replace_mine(self, live: LiveUnit, shard: Shard, mine: torch.Tensor) -> None:
        """Replaces this rank's part of a parameter that has no master yet; every rank gives its
        own. Collective; blocks."""
        self.drop_head_start()
        if initial_master(live.unit) in self.store:
            self.values.put_initial_master(live.unit, shard, mine)
        self.values.put_elements(live, shard.shard_offset, mine.to(live.unit.dtype))
        self.refresh(shard.param)

    def check_may_change(self, is_collective: bool = True, is_step: bool = False) -> None:
        """Raises RuntimeError while all units are held present (changes would not reach them), and
        for a torn model.

        Makes the last step durable before if that is due, unless this rank alone is about to change
        something. Blocks. is_step: a step follows. What an accelerator still copies to host memory
        for the last one is not waited for: a step on the CPU writes other elements, one on the
        accelerator comes after it.
        """
        self.store.check_process()
        if is_collective or self.topology.world == 1:
            self.steps.commit()
        self._check_untorn(is_step)
        self._check_not_held()

    def _check_not_held(self) -> None:
        if self.is_held:
            raise RuntimeError(
                "weights cannot change inside EMA.applied, nor inside unwrap_model_for_generation: "
                "leave its block first"
            )

    def check_whole(self) -> None:
        """Finishes the step under way, then raises RuntimeError when the model's states are of two
        different steps.

        Raises the error of that step, and RuntimeError after `close`, in a forked child and after
        half a `load_state_dict`. Blocks.
        """
        self._check_untorn(is_step=False)
        self.steps.check_loaded()

    def _check_untorn(self, is_step: bool) -> None:
        self.store.check_usable()
        self.steps.finish_tiles() if is_step else self.steps.finish()
        self.steps.check_whole()
        self.hooks.recover()
        self.take_writes()

    def is_of_leaf(self, param: nn.Parameter) -> bool:
        """Whether a parameter is fetched with its leaf module."""
        return self.find(param)[0].unit.is_leaf

    def take_out(self, param: nn.Parameter) -> None:
        """Gives a parameter its whole values until `put_back`. Collective; blocks. Takes memory for
        this parameter alone."""
        live, shard = self.find(param)
        index = live.unit.shards.index(shard)
        if live.unit.is_resident:
            if self._is_split(live):
                live.remember(index)
            return
        self.hooks.see_gradient_of(live, param)
        if self.hooks.may_lend:
            self.hooks.borrow(live)
        else:
            value = self.weight(param).to(self.device)
            self.prefetcher.is_changing = True
            live.take_out(index, value)
            self.prefetcher.is_changing = False

    def put_back(self, param: nn.Parameter) -> None:
        """Ends a `take_out`: the parameter shows its unit again. Changes are dropped, unless
        `replace` was called."""
        live, shard = self.find(param)
        was_changing = self.prefetcher.is_changing
        self.prefetcher.is_changing = True
        index = live.unit.shards.index(shard)
        live.forget(index)
        live.put_back(index)
        self.prefetcher.is_changing = was_changing

    def end_gathers(self, units: Sequence[LiveUnit]) -> None:
        """Ends each `take_out` before weights change, since its copy would be an old one.

        An interrupt at the end of a GatheredParameters block has left it, or the block still lasts.
        What was written to the copy is lost: the model is then torn.
        """
        for live, shard in self._gathered(units):
            self._mark_written(live, shard)
            self.put_back(shard.param)
            registry.set_gathered(shard.param, False)

    def check_gathers(self) -> None:
        """Raises RuntimeError where a copy that `take_out` gave was written: weights at rest lack
        it. Blocks; raises OSError."""
        for live, shard in self._gathered(self.units):
            self._mark_written(live, shard)
        self.steps.check_loaded()

    def _gathered(self, units: Sequence[LiveUnit]) -> Iterator[tuple[LiveUnit, Shard]]:
        for live in units if registry.has_gathered() else ():
            yield from (
                (live, each) for each in live.unit.shards if registry.is_gathered(each.param)
            )

    def _mark_written(self, live: LiveUnit, shard: Shard) -> None:
        """Marks a parameter as half loaded if its copy differs from where it rests."""
        if live.unit.shards.index(shard) not in live.taken_out:
            return
        with torch._C.DisableTorchFunctionSubclass():
            mine = self.values.mine(shard, shard.param.detach()).cpu()
        resting = self.local_weight(shard.param)[: mine.numel()]
        if not torch.equal(*(each.contiguous().view(torch.uint8) for each in (mine, resting))):
            self.steps.half_loaded.add(shard.param)

    def drop_head_start(self, is_collective: bool = True) -> None:
        """Drops states read ahead for the next step, because they are about to change. Blocks until
        reads have stopped."""
        self.check_may_change(is_collective)
        self.program.drop()

    def parameters(self) -> Iterator[tuple[LiveUnit, Shard]]:
        """Every partitioned parameter, unit by unit."""
        for live in self.units:
            for shard in live.unit.shards:
                yield live, shard

    # ---- attachments -----------------------------------------------------------------------------

    def attach(self, attached: Attached) -> None:
        """Attaches an object: the model calls it after each step and when it is closed."""
        self._attached.append(attached)

    def find_attached(self, kind: type[_Attached]) -> _Attached | None:
        """The attached object of this class, or None. Raises RuntimeError in a forked child, which
        has no thread of it."""
        self.store.check_process()
        return next((each for each in self._attached if isinstance(each, kind)), None)

    def attach_states(self, states: States, on_last_read: Callable[[], None]) -> None:
        """Registers the states of the optimizer that steps this model.

        on_last_read: called when a backward begins, whose reads go before those that it starts
            (hooks.py).
        """
        self.states = states
        self.hooks.on_backward = on_last_read

    def detach_states(self) -> None:
        """Undoes `attach_states`: the model has no optimizer, and no parameter has been stepped."""
        self.states = None
        self.hooks.on_backward = lambda: None
        self.homes.on_arrival = lambda unit: None
        self.homes.store.consume = None
        for _, shard in self.parameters():
            shard.set_steps(0, False, False)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Calls every attachment after a step of an optimizer. Collective if an attachment is."""
        for each in self._attached:
            each.after_step(optimizer)

    @contextlib.contextmanager
    def held_present(self) -> Iterator[None]:
        """A block in which the caller chooses all units' weights; stepping, replacing or loading
        them raises RuntimeError."""
        before = self.is_held
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = before

    # ---- the next plan ---------------------------------------------------------------------------

    def enable_training(self, params: Collection[nn.Parameter] = ()) -> None:
        """Takes room for parameters that were frozen when the model was sharded and require
        gradients now (next_plan.py).

        Args:
            params: frozen parameters that get room as well, because their states are about to be
                loaded.

        Called before a forward with gradients, a step and a load. Does nothing without such
        parameters; else collective, and blocks. Raises ValueError with the arithmetic when there is
        no room, RuntimeError for weights in blocks, OSError for a full disk: then the model is as
        it was.
        """
        found = [] if self.is_held or self._is_closed else self._frozen.unfrozen(params)
        lives = list(dict.fromkeys(live for live, _ in found if not live.unit.is_trainable))
        if lives:
            keeps_grads = self._pause()
            plan = plan_of(
                found, self.model, self.plan, self.policy, self.topology, self.device, keeps_grads
            )
            self._go_over(plan, lives)
        for live in dict.fromkeys(live for live, _ in found):
            self.hooks.watch_gradients(live)
        if found:
            self._frozen.forget()

    def rehome(self, policy: OffloadPolicy) -> None:
        """Moves weights, the optimizer's states, and the place of gradients, to where another
        policy has them. Every result stays the same, to the bit.

            shards.rehome(dataclasses.replace(shards.policy, optim=Tier.HOST, host_bytes=64 << 30))

        Args:
            policy: `policy` of these shards, but for params, host_param_numel, optim, optim_ratio,
                streamed_ratio, grads, resident_bytes, host_bytes and device_bytes. Weights that are
                always present stay so.

        Call it between steps, also between two micro-batches, where gradients stay; not inside a
        forward or backward. Collective; blocks until the states have moved: their bytes are read
        and written once. Checkpoints of before and after can be opened under either policy.

        Raises ValueError for other fields that differ, with the arithmetic when there is no room,
        and for whole matrices (Muon) that another engine would step; OSError for a full disk: then
        the model is as it was. After an OSError of a move, or an interrupt amid it, the model says
        that it is torn: close it, and open a checkpoint in a new one.
        """
        if self.hooks.may_lend:
            raise RuntimeError("rehome inside a forward or backward: call it between steps")
        self.hooks.check_backward_ended()
        self.check_may_change()
        keeps_grads = self._pause()
        plan = plan_elsewhere(
            policy,
            self.policy,
            self.plan,
            self.topology,
            self.device,
            keeps_grads,
            self.store.num_slots,
        )
        if self.states is not None:
            self.states.check_move(plan)
        self._go_over(plan, policy=policy)

    def _pause(self) -> bool:
        """Ends the step under way, before the plan is made again. Returns whether gradients have
        to stay where they are. Collective; blocks."""
        self.store.on_device.check_all_there()
        self.steps.commit()
        self.steps.finish()
        self.homes.forget_replaced()
        return not self.homes.is_empty

    def _go_over(
        self, plan: Plan, lives: Sequence[LiveUnit] = (), policy: OffloadPolicy | None = None
    ) -> None:
        """Goes over to another plan, with which these units are trainable, or whose policy has
        states elsewhere. Collective; blocks."""
        given = policy or self.policy
        plan = reserve_more(plan, given, self.store, self.topology, self.steps.has_slot)
        self.steps.is_between_plans = True
        with self.steps.changing_all():
            self.program.drop()
            self.prefetcher.empty()
            self.homes.make_room(plan)
            if self.states is not None and policy is None:
                self.states.make_room(plan)
            elif self.states is not None:
                self.states.move_out(plan)
            self._move_initial_masters(plan, Tier.NVME)
            weights = WeightsMove(self.units, plan, given, self.values)
            weights.move_out()
            self._passage.end_use(self.plan.units, plan.units)
            keep_buffers(self.store, self._pools, self.plan, plan)
            link_bytes = plan.link_bytes if given.pin_memory else 0
            self.store.renew_host(plan.arena_bytes, link_bytes)
            self._use(plan, carve(self.store, plan, self._pools))
            self.policy = given
            self.program.use(self.tile_pool)
            pools = self._pools
            self._passage.use(pools.units, pools.staging, pools.wires, plan.units)
            weights.move_in(pools, self._passage)
            self.prefetcher.use(limits_of(plan, given))
            if (fill := self.find_attached(Fill)) is not None:
                fill.use(plan)
            for live in lives:
                live.unit.unfreeze()
                live.enable_training()
            self.homes.allocate(
                [live.unit for live in self.units if live.unit.is_trainable], plan, self._pools
            )
            self._move_initial_masters(plan, Tier.HOST)
            if self.states is not None:
                if policy is not None:
                    self.states.move_in(plan)
                self.states.allocate([live.unit for live in lives])
            self.store.flush()
        self.steps.is_between_plans = False

    def _move_initial_masters(self, plan: Plan, home: Tier) -> None:
        """Moves what masters begin with to a tier, if another plan has it there. Blocks; raises
        OSError."""
        if plan.initial_masters is home:
            for live in self.units:
                self.values.move_initial_master(live.unit, home)

    def _use(self, plan: Plan, pools: Pools) -> None:
        """Sets the plan and its buffers."""
        self.plan = plan
        self._pools = pools
        self.tile_pool = pools.tiles

    # ---- parameters of other modules -------------------------------------------------------------

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is under way. Raises RuntimeError in a forked child."""
        self.store.check_process()
        return self.hooks.may_lend

    def lend(self, params: list[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function with resting parameters gathered (access.py); outside a forward with
        copies of them. Blocks.

        Collective in a forward or backward. Outside, raises RuntimeError on several ranks; in
        another thread always.
        """
        check_thread(self.hooks.thread)
        if self.may_lend:
            return self.hooks.lend(params, func, args, kwargs)
        needed = [self.find(param)[0] for param in params]
        if self.topology.world > 1 and any(live.is_streamed for live in needed):
            absent.refuse_read(params[0], self.topology.world)

        make = functools.partial(func, *args, **kwargs)
        with absent.copies(self, params):
            copied = {param.untyped_storage()._cdata: param for param in params}
            frame = self.hooks.enter(list(dict.fromkeys(needed)), (), {}, reads_again=False)
            output = None
            try:
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t: _kept(self, t, copied), lambda read: read()
                ):
                    output = make()
            finally:
                self.hooks.leave(frame, made_by(tensors_in(output)))
            return absent.without_loans(output, params, make)

    def with_experts(
        self, param: nn.Parameter, chosen: torch.Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which the rows of a module's fused experts that tokens have chosen are there.
        Blocks; raises OSError.

        param: one of the module's. chosen: numbers of experts, (tokens, choices of each).
        """
        return self.hooks.with_experts(self.find(param)[0], chosen)

    def add_need(self, module: nn.Module, param: nn.Parameter) -> None:
        """Registers that a module needs a parameter of another module whenever it runs. No effect
        for a resident parameter."""
        live, _ = self._by_param.get(id(param), (None, None))
        if live is not None and live.is_streamed and self.hooks.add_need(module, live):
            self._added.append((module, live))

    def drop_need(self, module: nn.Module, param: nn.Parameter) -> None:
        """Removes an `add_need`, unless the module needs another external parameter of the same
        unit."""
        live, _ = self.find(param)
        still = {id(each) for each in registry.externals_of(module)}
        if (module, live) in self._added and not any(
            id(shard.param) in still for shard in live.unit.shards
        ):
            self._added.remove((module, live))
            self.hooks.drop_need(module, live)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, materialize: bool = False) -> None:
        """Removes the hooks and closes the store; files on paths are deleted, unless they hold a
        checkpoint.

        With materialize the parameters become ordinary tensors with their weights, and with the
        gradients that no step has used (collective; takes the whole model's memory). Without it,
        parameters that are not resident show NaN. Blocks. Raises the first error of a write-back,
        and torch's OutOfMemoryError where an accelerator cannot hold the model, whose weights are
        then in host memory. Does nothing in a forked child, where parameters show NaN. Before
        `reload_states` raises RuntimeError with materialize, and closes nothing.

        With durability="step" the last step is made durable (collective), but not on several ranks
        while an exception is being handled, because the other ranks may be elsewhere.
        """
        if self._is_closed:
            return
        for kind in ("param/", "grad/") if materialize else ():
            self.store.on_device.check_there(kind)
        self._is_closed = True
        try:
            with contextlib.ExitStack() as ending:  # also where a commit fails
                ending.callback(self.program.drop)
                ending.callback(self.steps.finish)
                for each in self._attached:
                    each.close()
            self.hooks.recover()
            self.prefetcher.empty()
            kept = list(self.parameters()) if materialize else []
            values = [
                (
                    shard.param,
                    live.unit.dtype,
                    None if live.unit.is_resident else self.weight(shard.param),
                    self.gradient(shard.param),
                )
                for live, shard in kept
            ]
            self.homes.store.flush()
        finally:
            self.hooks.remove()
            for handle in self._handles:
                handle.remove()
            self._end_experts()
            self._end_watch()
            release(self.units, self._passage)
            self.homes.store.stop()
            self.program.close()
            self.workers.close()
            self.store.close(keep=any(each.keeps_files for each in self._attached))
        try:
            _set_all(values, self.device)
        except torch.OutOfMemoryError as error:
            _set_all(values, torch.device("cpu"))
            raise torch.OutOfMemoryError(
                f"{error} The weights and gradients of this closed model are in host memory"
            ) from error

    def _leave_to_parent(self) -> None:
        """In a forked child, which has no arena: parameters show NaN, calls on them are refused,
        and `close` does nothing."""
        self._is_closed = True
        for live in self.units:
            live.leave_to_parent()
        if self.policy.stage == 3:
            show_parts(self.units)

    # ---- building --------------------------------------------------------------------------------

    def _build(self) -> None:
        division = self.plan.division
        units = division.units
        order = first_order(division)
        policy = self.policy
        bounce = Bounce(self.store, BOUNCE_BYTES // 4) if policy.paths else None
        self._use(self.plan, pools := carve(self.store, self.plan))
        workers = self.workers
        self.program: Program[Any] = Program(self.store, pools.tiles, workers)
        self.steps = StepRun(self.program)
        self.values = Values(
            self.store,
            self.steps,
            self.topology,
            self.device,
            bounce,
            policy.allgather_bucket_numel,
            workers,
        )
        self.units, self._passage = move_to_home(units, self.plan, policy, self.values, pools)
        move_buffers(self.model, self.device)
        self.prefetcher = Prefetcher(self.units, order, limits_of(self.plan, policy))
        trainable = [u for u in units if u.is_trainable]
        self.homes = GradientHomes(
            trainable, self.plan, self.store, self.topology, workers, pools, policy, self.steps
        )
        self.store.flush()
        live = {
            module: [self.units[index] for index in needed]
            for module, needed in division.triggers.items()
        }
        self.triggers = list(live)  # modules that make units present
        activations = make_activations(
            self.model, self.units, self.plan, policy, self.store, pools.activations
        )
        errors = MemoryErrors(self.model, self.device, lambda: (self.policy, self.plan))
        self.hooks = Hooks(
            self.model,
            live,
            self.units,
            self.prefetcher,
            self.homes,
            self.steps,
            self.store,
            activations,
            errors,
        )
        lowered = [s.param for u in units if u.full_dtype != u.dtype for s in u.shards]
        self._handles += serve_islands(self.model, lowered, policy, self.device, self.weight)
        self._handles += widen_inputs(self.model, {u.dtype for u in units if u.is_widened})
        self._handles += StateDicts(
            self._saved, self.replace, self._begin_load, self.steps.half_loaded.difference_update
        ).watch(self.model)
        self._end_experts = serve_experts(self.model)
        self._take_charge()

    def _take_charge(self) -> None:
        """Registers the parameters as partitioned ones; afterwards no module holds a unit."""
        self._by_param = {id(s.param): (u, s) for u, s in self.parameters()}
        call_in_child(self, Shards._leave_to_parent)
        for _, part in self.parameters():
            registry.register(part.param, self)
        if self.policy.stage == 3:
            show_parts(self.units)
        # registered needs of other modules' parameters
        self._added: list[tuple[nn.Module, LiveUnit]] = []
        for module in self.model.modules():
            for param in registry.externals_of(module):
                self.add_need(module, param)
        for each in self.units:
            each.let_all_go()
            each.take_writes = self._take_writes_of
        self._residents = [each for each in self.units if each.unit.is_resident]
        self._frozen = Frozen(self.parameters() if self._is_trained else ())
        self.hooks.on_training = self.enable_training
        comes_and_goes = "units" in self.plan.on_device and self.plan.units.num > 0
        if self.policy.fills_device and comes_and_goes and self.topology.num_shards == 1:
            self.attach(Fill(self.model, self.plan, self.prefetcher, self.device))

    def _log_start(self) -> None:
        stats = self.store.stats()
        engine = f"; {stats.engine_why}" if self.policy.paths and stats.engine != "none yet" else ""
        logger.info(
            "%d units, %.1f MiB on HOST, %.1f MiB on NVME per rank%s",
            len(self.units),
            self.plan.host_bytes / 2**20,
            self.plan.disk_bytes / 2**20,
            engine,
        )


def owner_of(model: nn.Module) -> Shards | None:
    """The Shards of a sharded model, else None."""
    owners = (registry.owner_of(param) for param in model.parameters())
    return next((owner for owner in owners if isinstance(owner, Shards)), None)


@contextlib.contextmanager
def loading(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """A block that replaces the values of parameters, one after the other. If it fails, or an
    interrupt ends it, their sharded models are torn until all are replaced.

    Raises RuntimeError before the block where weights may not change.
    """
    owned: dict[Shards, list[nn.Parameter]] = {}
    for param in params:
        if isinstance(owner := registry.owner_of(param), Shards):
            owned.setdefault(owner, []).append(param)
    with contextlib.ExitStack() as marks:
        for owner, own in owned.items():
            owner.check_may_change()
            marks.enter_context(owner.steps.loading(own))
        yield


def _kept(
    shards: Shards, saved: torch.Tensor, copied: Mapping[int, nn.Parameter]
) -> Callable[[], torch.Tensor]:
    """What a graph keeps of a tensor: a function that gives it; of a parameter's copy one that
    reads the weight again.

    copied: the parameter of each copy, by the copy's storage. The function raises RuntimeError
        after a step or another write of the parameter.
    """
    param = copied.get(saved.untyped_storage()._cdata) if saved.layout is torch.strided else None
    if param is None or saved.is_conj() or saved.is_neg():
        # not `saved`: an operation that saves its output would never be freed
        held = saved.detach()
        return lambda: held
    shape = (saved.shape, saved.stride(), saved.storage_offset())
    dtype = saved.dtype
    version = param._version

    def read() -> torch.Tensor:
        if param._version != version:
            raise RuntimeError(
                f"a graph that reads a parameter of shape {tuple(param.shape)} was made before the "
                "parameter was stepped or written: run backward before that"
            )
        return shards.weight(param).to(shards.device).flatten().view(dtype).as_strided(*shape)

    return read


def _set_all(
    values: Iterable[tuple[nn.Parameter, torch.dtype, torch.Tensor | None, torch.Tensor | None]],
    device: torch.device,
) -> None:
    """Makes parameters ordinary ones on a device, of these dtypes, with these values, or their own,
    and gradients."""
    for param, dtype, value, gradient in values:
        param.grad = None
        absent.become(param, (param.detach() if value is None else value).to(device, dtype))
        if gradient is not None:
            param.grad = gradient.to(device, dtype)
