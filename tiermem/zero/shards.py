"""Shards: a model whose parameters are partitioned and rest on a tier, and everything that looks after them.

    with tiermem.shard(model, policy=OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=["/mnt/nvme0"])) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=3e-4)
        loss = model(x); loss.backward(); optim.step(); optim.zero_grad()

    divide     the model into units                 unit.py        present    units when their modules run   residency.py
    plan       the memory of every tier             plan.py        watch      forward and backward           hooks.py
    move       every parameter's part to its home   here           receive    gradients                      grads.py

Reading a weight or a gradient from outside forward and backward gathers it: `weight`, `gradient`, and `state_dict`, which are
collective (every rank calls them). Nothing is patched: closing the shards takes the hooks off and leaves the module behind,
with its weights when asked to.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from tiermem.optim.layout import MASTER
from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.arena import Pool
from tiermem.swap.bounce import Bounce
from tiermem.swap.native import Workers, trim_heap
from tiermem.swap.pipeline import HeadStart
from tiermem.swap.store import TensorStore
from tiermem.zero import registry
from tiermem.zero.building.admission import check_model
from tiermem.zero.building.nursery import Nursery
from tiermem.zero.gradients.grads import GradientHomes
from tiermem.zero.hooks import Hooks
from tiermem.zero.order import Order
from tiermem.zero.plan import BOUNCE_BYTES, keeps_initial_master, keeps_secondary, make_plan
from tiermem.zero.ranks.agreement import agree, facts_of, facts_of_plan
from tiermem.zero.ranks.collectives import share
from tiermem.zero.ranks.mesh import arrange, ranks_of
from tiermem.zero.ranks.packed import PackedGather
from tiermem.zero.ranks.quantised import byte_ranges, pack, pack_into, unpack
from tiermem.zero.ranks.topology import (
    Topology,
    fair_cores,
    find_topology,
    give_fair_threads,
    paths_of_rank,
    ranks_per_node,
)
from tiermem.zero.unit import Shard, Unit, divide
from tiermem.zero.weights.attributes import ZeroParamStatus, absent_part, describe, undescribe
from tiermem.zero.weights.gather import Gather, UnitGather, gather, gather_unit
from tiermem.zero.weights.lowering import watch_autocast
from tiermem.zero.weights.memory import UnitMemory, can_swap_pointers
from tiermem.zero.weights.residency import LiveUnit, Residency
from tiermem.zero.weights.secondary import NearGather, Secondary, secondary_numel

if TYPE_CHECKING:
    from tiermem.optim.tiles import StateTiles

logger = logging.getLogger("tiermem")


def shard(
    model: nn.Module,
    policy: OffloadPolicy | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    is_trained: bool = True,
) -> Shards:
    """Partitions a model's parameters over the ranks of a group and sends each part to its home.

    Args:
        model: any module, built plainly or under `tiermem.zero.Init`; its parameters keep their identity.
        policy: where things rest; the default keeps everything in memory.
        group: data-parallel ranks, or a mesh of them (one dimension, or replicas and shards: MiCS); default: the world, if
            torch.distributed is initialised. Rank 0's weights win.
        device: where the maths runs; default: where the parameters are.
        is_trained: False for inference: no room is made for gradients and optimizer states.

    Collective and blocking. Raises ValueError when the policy cannot be met (with the arithmetic) and OSError when a path is
    missing, not writable or too full, both before any weight has been moved.
    """
    return Shards(model, policy or OffloadPolicy(), group, device, is_trained)


class Shards:
    """See `shard`. A context manager: closing ends it."""

    def __init__(
        self,
        model: nn.Module,
        policy: OffloadPolicy,
        group: dist.ProcessGroup | DeviceMesh | None,
        device: torch.device | str | None,
        is_trained: bool = True,
    ) -> None:
        if any(isinstance(registry.keeper_of(p), Shards) for p in model.parameters()):
            raise ValueError("this model is sharded already: close its shards before sharding it again")
        check_model(model, is_trained)
        self.model = model
        ranks, policy = ranks_of(group, policy)
        self.policy = policy
        everyone = find_topology(policy.stage, ranks, policy.timeout_s)
        self.device = torch.device(device) if device is not None else device_of(model)
        agree(everyone, facts_of(model, policy, self.device))
        self.states: StateTiles | None = None  # of the optimizer that steps this model
        self.is_held = False  # all units are kept present (present.py)
        self.topology: Topology = arrange(everyone, policy, ranks_per_node(), self.device.type)
        self._is_closed = False
        self._handles: list[RemovableHandle] = []
        _check_device(policy, self.device, is_trained)
        division = divide(model, policy, self.topology.num_shards, is_trained)
        is_gpu = self.device.type == "cuda"
        self.plan = make_plan(division, policy, self.topology, is_gpu, ranks_per_node())
        agree(self.topology, facts_of_plan(self.plan, division.units), "the plan of tiermem.shard")
        arena_bytes = max(self.plan.host_bytes, 1)
        paths = paths_of_rank(policy.paths)
        self.store = TensorStore(paths, arena_bytes, policy.io, policy.disk_bytes, policy.pin_memory)
        self.workers = Workers(give_fair_threads(), fair_cores())
        weakref.finalize(self, self.workers.close)  # when nobody closes; closing twice does nothing
        try:
            if self.plan.disk_bytes:
                self.store.reserve_disk(self.plan.disk_bytes)
            self._build(division.triggers, division.units, Order([u.index for u in division.order()]))
        except BaseException:
            self.store.close()
            self.workers.close()
            raise
        trim_heap()  # what building left behind is not needed again
        self._log_start()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- looking at values ---------------------------------------------------------------------------------------------

    def weight(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of a parameter's whole value, on the CPU, in its own dtype. Collective; blocks."""
        live, shard = self.find(param)
        if live.unit.is_resident:
            index = live.unit.shards.index(shard)
            return live.memory.views[index].detach().to("cpu", copy=True)
        return self.assemble(shard, self.local_weight(param)).view(shard.shape)

    def local_weight(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of this rank's part of a parameter: flat, on the CPU, shard_numel elements. Blocks."""
        live, shard = self.find(param)
        return self.local_elements(live, slice(shard.shard_offset, shard.shard_offset + shard.shard_numel))

    def local_elements(self, live: LiveUnit, part: slice) -> torch.Tensor:
        """A copy of elements of a unit's shard layout, this rank's parameters. Blocks; raises OSError.

        Of a unit that rests packed the first element is a multiple of BLOCK, as every parameter's is.
        """
        if live.unit.is_packed:
            return self._unpacked_elements(live, part)
        if live.shard is not None:
            return live.shard[part].clone()
        assert live.entry is not None
        return self.read_part(live.entry, live.unit.dtype, part)

    def put_elements(self, live: LiveUnit, start: int, values: torch.Tensor) -> None:
        """Overwrites elements of a unit's shard layout from `start` on, in its dtype. Blocks; raises OSError.

        Nothing that shows the parameters follows yet: `drop_head_start` before, and `refresh` once all are there.
        """
        if live.unit.is_packed:
            self._pack_elements(live, start, values)
        elif live.shard is not None:
            live.shard[start : start + values.numel()].copy_(values)
        else:
            assert live.entry is not None
            self.write_part(live.entry, start * live.unit.dtype.itemsize, values.contiguous().view(torch.uint8))

    def refresh(self, param: nn.Parameter) -> None:
        """Lets a parameter's unit show what was put where it rests, unless a module holds it. Collective; blocks."""
        live, _ = self.find(param)
        if not live.unit.is_resident:
            if not self.hooks.may_lend:
                live.let_all_go()  # what a forward without backward has left
            if not live.num_users:
                self.residency.outdate(live)
        elif live.shard is not None and live.shard is not live.memory.full:
            self.regather(live.unit, live.shard, live.memory)

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of a parameter's reduced gradient (the mean over ranks), or None. Between backward and step. Collective."""
        live, shard = self.find(param)
        local = self.local_gradient(param)
        return None if local is None else self.assemble(shard, local.to(self.homes.dtype(live.unit))).view(shard.shape)

    def local_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """This rank's part of a reduced gradient, without padding, in fp32: flat, on the CPU; or None. Blocks."""
        live, shard = self.find(param)
        if not shard.has_gradient or param.grad is None:
            return None
        self.homes.settle()
        part = slice(shard.shard_offset, shard.shard_offset + self.num_mine(shard))
        flat, dtype = self.homes.flat(live.unit), self.homes.dtype(live.unit)
        local = self.read_part(self.homes.entry(live.unit), dtype, part) if flat is None else flat[part]
        return local.float() * (shard.grad_factor / self.homes.divisor)

    def assemble(self, shard: Shard, local: torch.Tensor) -> torch.Tensor:
        """A parameter's elements out of every rank's part of them: flat, on the CPU. Collective; blocks.

        local: this rank's part, flat, with or without its padding.
        """
        if self.topology.num_shards == 1 or not shard.numel:
            return local[: shard.numel]
        mine = torch.zeros(shard.shard_numel, dtype=local.dtype, device=self.device)
        mine[: local.numel()].copy_(local)
        whole = torch.empty(shard.shard_numel * self.topology.num_shards, dtype=local.dtype, device=self.device)
        gather(self.topology, mine, whole, f"gathering {shard.name}")
        return whole[: shard.numel].cpu()

    def mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter's elements, flat and without padding: a view where that is possible."""
        first = shard.shard_numel * self.topology.shard_rank
        return whole.reshape(-1)[first : first + shard.shard_numel]

    def num_mine(self, shard: Shard) -> int:
        """Elements of this rank's part of a parameter, without its padding."""
        return min(shard.shard_numel, max(0, shard.numel - shard.shard_numel * self.topology.shard_rank))

    def find(self, param: nn.Parameter) -> tuple[LiveUnit, Shard]:
        """A parameter's unit and its part there. Raises ValueError for one of another model."""
        return self._find(param)

    @property
    def adds_at_home(self) -> bool:
        """Whether gradients of micro-batches add up where they rest: in stages 2 and 3, and in a dtype of their own."""
        kept = (self.homes.dtype(live.unit) == live.unit.dtype for live in self.units if live.unit.is_trainable)
        return self.policy.stage >= 2 or not all(kept)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in the block add their gradients up without reducing them, where `p.grad` has a place for them.

        That is in stages 0 and 1; the next backward outside, or the step, reduces all. In stages 2 and 3 a rank has a place
        for its part alone, so that gradients are reduced as ever, and add up to the same. Not for step_in_backward.
        """
        if self.policy.step_in_backward:
            raise RuntimeError("no_sync with step_in_backward: no gradient is held to add to. Set it to False")
        before = self.hooks.may_receive
        self.hooks.may_receive = lambda: self.adds_at_home
        try:
            yield
        finally:
            self.hooks.may_receive = before

    def receive_gradients(self) -> None:
        """Adds up over ranks what backwards have left in `p.grad`, and sends it home. Collective; blocks."""
        self.hooks.check_backward_ended()
        self.homes.drop_what_was_zeroed()
        self.homes.receive_rest()
        for live in self.units:
            if live.unit.is_trainable:
                self.homes.show(live.unit)

    def read_part(self, entry: str, dtype: torch.dtype, part: slice) -> torch.Tensor:
        """A copy of elements of an entry that rests on NVME, through a small bounce buffer. Blocks; raises OSError."""
        out = torch.empty(part.stop - part.start, dtype=dtype)
        assert self._bounce is not None
        self._bounce.read(entry, part.start * dtype.itemsize, part.stop * dtype.itemsize, out.view(torch.uint8))
        return out

    def write_part(self, entry: str, offset: int, data: torch.Tensor) -> None:
        """Writes bytes of an entry that rests on NVME, from byte `offset` on; as `read_part`. Blocks; raises OSError."""
        assert self._bounce is not None
        self._bounce.write(entry, offset, data)

    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Puts other values in a parameter's place; every rank gives the whole. Collective; blocks; raises OSError.

        A master becomes exactly the new value; moments stay as they are.
        """
        live, shard = self.find(param)
        stepped = any(other.num_steps for _, other in self.parameters())  # which has made the masters
        if live.unit.is_trainable and self.states is not None and stepped:
            self.states.load(shard, MASTER, self.mine(shard, value.detach()).cpu().float())
        else:
            self.replace_mine(live, shard, self.mine(shard, value.detach()).cpu())
        if live.num_users and not live.unit.is_resident:
            live.memory.views[live.unit.shards.index(shard)].copy_(value.view(shard.shape))

    def replace_mine(self, live: LiveUnit, shard: Shard, mine: torch.Tensor) -> None:
        """Puts other values in place of this rank's part of a parameter that has no master yet; every rank its own. Blocks."""
        self.drop_head_start()
        if initial_master(live.unit) in self.store:
            self._write_initial_master(live.unit, shard, mine)
        self.put_elements(live, shard.shard_offset, mine.to(live.unit.dtype))
        self.refresh(shard.param)

    def check_may_change(self) -> None:
        """Raises RuntimeError while units are held present that changes at home would not reach."""
        if self.is_held:
            raise RuntimeError(
                "weights cannot be stepped, replaced or set inside unwrap_model_for_generation: leave its block first"
            )

    def is_of_leaf(self, param: nn.Parameter) -> bool:
        """Whether a parameter is fetched with a leaf module."""
        return self.find(param)[0].unit.is_leaf

    def take_out(self, param: nn.Parameter) -> None:
        """Gives a parameter its whole values until `put_back`. Collective; blocks; takes memory for this parameter alone."""
        live, shard = self.find(param)
        if live.unit.is_resident:
            return
        if self.hooks.may_lend:
            self.hooks.borrow(live)
        else:
            live.take_out(live.unit.shards.index(shard), self.weight(param).to(self.device))

    def put_back(self, param: nn.Parameter) -> None:
        """Ends a `take_out`: the parameter is what its unit is. What was written in the copy is gone, unless `replace`d."""
        live, shard = self.find(param)
        live.put_back(live.unit.shards.index(shard))

    def _unpacked_elements(self, live: LiveUnit, part: slice) -> torch.Tensor:
        numel, out = live.unit.packed_numel, torch.empty(part.stop - part.start, dtype=live.unit.dtype)
        if live.shard is not None:
            return unpack(live.shard, numel, out, part.start)
        assert live.entry is not None
        codes, scales = byte_ranges(numel, part.start, part.stop)
        packed = [self.read_part(live.entry, torch.uint8, each) for each in (codes, scales)]
        return unpack(torch.cat(packed), out.numel(), out)

    def _pack_elements(self, live: LiveUnit, start: int, values: torch.Tensor) -> None:
        if live.shard is not None:
            pack_into(live.shard, live.unit.packed_numel, values, start)
            return
        assert live.entry is not None
        packed = pack(values)
        codes, scales = byte_ranges(live.unit.packed_numel, start, start + values.numel())
        num_codes = codes.stop - codes.start
        self.write_part(live.entry, codes.start, packed[:num_codes])
        self.write_part(live.entry, scales.start, packed[num_codes:])

    def drop_head_start(self) -> None:
        """Forgets what has been read ahead for the next step, because it is about to change at home. Blocks shortly."""
        self.check_may_change()
        if self.head_start is not None:
            self.head_start.drop()

    def parameters(self) -> Iterator[tuple[LiveUnit, Shard]]:
        """Every partitioned parameter, unit by unit."""
        for live in self.units:
            for shard in live.unit.shards:
                yield live, shard

    # ---- parameters of other modules -----------------------------------------------------------------------------------

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is at work."""
        return self.hooks.may_lend

    def lend(self, params: list[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function with resting parameters brought back (external.py). Collective."""
        return self.hooks.lend(params, func, args, kwargs)

    def add_need(self, module: nn.Module, param: nn.Parameter) -> None:
        """A module needs a parameter that is not its own whenever it runs; nothing to do for one that is always present."""
        live, _ = self._by_param.get(id(param), (None, None))
        if live is not None and not live.unit.is_resident and self.hooks.add_need(module, live):
            self._added.append((module, live))

    def drop_need(self, module: nn.Module, param: nn.Parameter) -> None:
        """The opposite of `add_need`; what else the module needs of the parameter's unit keeps it."""
        live, _ = self.find(param)
        still = {id(each) for each in registry.externals_of(module)}
        if (module, live) in self._added and not any(id(shard.param) in still for shard in live.unit.shards):
            self._added.remove((module, live))
            self.hooks.drop_need(module, live)

    # ---- the end -------------------------------------------------------------------------------------------------------

    def close(self, materialize: bool = False) -> None:
        """Takes the hooks off and ends the store; what it kept on paths is removed.

        With materialize the parameters become ordinary tensors with their weights (collective; takes the whole model's
        memory); without, parameters that are not resident are left as NaN. Raises the first error of a write-back.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.drop_head_start()
            self.residency.empty()
            weights = [(s.param, self.weight(s.param)) for _, s in self.parameters()] if materialize else []
            self.homes.settle()
        finally:
            self.hooks.remove()
            for handle in self._handles:
                handle.remove()
            for each in self.units:
                each.part_with()
            for live, shard in self.parameters():
                shard.param.grad = None
                if not materialize and live.unit.is_resident:
                    shard.param.data = shard.param.data.clone()
                registry.dismiss(shard.param)
                undescribe(shard.param)
            self.workers.close()
            self.store.close()
        for param, value in weights:
            param.data = value.to(self.device)

    # ---- building ------------------------------------------------------------------------------------------------------

    def _build(self, triggers: dict[nn.Module, list[Unit]], units: list[Unit], order: Order) -> None:
        plan, arena = self.plan, self.store.arena
        may_swap = can_swap_pointers()
        self._bounce = Bounce(self.store, BOUNCE_BYTES // 4) if self.policy.paths else None
        pool = Pool(arena, plan.unit_slot_bytes, plan.num_unit_slots, "units") if plan.num_unit_slots else None
        stages = Pool(arena, plan.stage_slot_bytes, plan.num_stage_slots, "shards") if plan.num_stage_slots else None
        grads = Pool(arena, plan.grad_slot_bytes, plan.num_grad_slots, "gradients") if plan.num_grad_slots else None
        buckets = Pool(arena, plan.reduce_slot_bytes, plan.num_reduce_slots, "sums") if plan.num_reduce_slots else None
        tiles = Pool(arena, plan.tile_slot_bytes, plan.num_tile_slots, "tiles") if plan.num_tile_slots else None
        self.tile_pool = tiles
        self.head_start: HeadStart[Any] | None = HeadStart(tiles) if tiles is not None else None  # of the next step
        self._wires = Pool(arena, plan.wire_slot_bytes, plan.num_wire_slots, "wires") if plan.num_wire_slots else None
        self.units = [self._send_home(unit, may_swap, pool or stages) for unit in units]
        self.store.settle()
        self.residency = Residency(self.units, self.store, order, self.policy, pool, stages, self.device)
        trainable = [u for u in units if u.is_trainable]
        self.homes = GradientHomes(
            trainable, plan.grads, self.store, self.topology, self.workers, grads, buckets, self.policy
        )
        live = {module: [self.units[u.index] for u in needed] for module, needed in triggers.items()}
        self.triggers = list(live)  # modules that make units present
        self.hooks = Hooks(self.model, live, self.units, self.residency, self.homes)
        lowered = [s.param for u in units if u.full_dtype != u.dtype for s in u.shards]
        self._handles += watch_autocast(self.model, lowered, self.policy, self.device)
        self._gathered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._gathered_by: Callable[[], object] = lambda: None  # the state_dict under way, held weakly
        for module in self.model.modules():
            if module._parameters:
                # torch marks the functions it is given, so each module gets one of its own
                fill, put = self._fill_state_dict, self._take_state_dict
                self._handles.append(module.register_state_dict_post_hook(lambda *args, fill=fill: fill(*args)))
                self._handles.append(module.register_load_state_dict_pre_hook(lambda *args, put=put: put(*args)))
        self._by_param = {id(s.param): (u, s) for u, s in self.parameters()}
        for _, part in self.parameters():
            registry.enrol(part.param, self)
        self._describe()
        self._added: list[tuple[nn.Module, LiveUnit]] = []  # needs of parameters of other modules, as registered
        for module in self.model.modules():
            for param in registry.externals_of(module):
                self.add_need(module, param)
        for each in self.units:
            each.let_all_go()

    def _describe(self) -> None:
        """Gives the parameters the documented attributes, where they are partitioned."""
        if self.policy.stage != 3:
            return
        for live, shard in self.parameters():
            part = absent_part(shard.shard_numel, live.unit.dtype)
            if live.shard is not None:
                part = live.shard[shard.shard_offset : shard.shard_offset + shard.shard_numel]
            is_there = live.unit.is_resident
            status = ZeroParamStatus.AVAILABLE if is_there else ZeroParamStatus.NOT_AVAILABLE
            describe(shard.param, shard.index, shard.shape, part, status)

    def _send_home(self, unit: Unit, may_swap: bool, pool: Pool | None) -> LiveUnit:
        """Moves a unit's weights to where they rest, one parameter at a time."""
        if unit.is_resident:
            return self._make_resident(unit, may_swap)
        home, entry = self.plan.unit_homes[unit.index], f"param/{unit.index}/{unit.name}"
        if home is not Tier.NVME and self.topology.num_shards == 1 and self.device.type == "cpu" and not unit.is_packed:
            unit.is_resident = True  # one of `host_param_numel`: it is present where it rests
            return self._make_resident(unit, may_swap)
        numel = unit.shard_bytes // unit.rests_as.itemsize
        self.store.reserve(entry, (numel,), unit.rests_as, Tier.NVME if home is Tier.NVME else Tier.HOST)
        memory = UnitMemory(unit, self.device, may_swap)
        if home is not Tier.NVME:
            shard = self.store.view(entry)
            self._fill(unit, shard)
            memory.hide()
            return LiveUnit(unit, memory, None, shard, self._gather_of(unit, memory))
        assert pool is not None
        slot = pool.take()
        assert slot is not None
        self._fill(unit, slot.tensor[: unit.shard_bytes].view(unit.rests_as))
        self.store.write([(entry, 0, slot.tensor[: unit.shard_bytes])], entry).wait()
        pool.give_back(slot)
        memory.hide()
        return LiveUnit(unit, memory, entry, None, self._gather_of(unit, memory))

    def _gather_of(self, unit: Unit, memory: UnitMemory) -> Gather | None:
        """How a unit is gathered; None: it is not, since it rests as it is present."""
        policy, topology = self.policy, self.topology
        if unit.is_packed or (policy.quantised_gather and unit.dtype.is_floating_point):
            plain: Gather = PackedGather(topology, unit, memory.full, self._wires)
        elif topology.num_shards > 1:
            plain = UnitGather(topology, unit, memory.full, policy.gather_way)
        else:
            return None
        if not keeps_secondary(policy, topology.num_shards):
            return plain
        assert topology.across is not None
        name, numel = f"secondary/{unit.index}/{unit.name}", secondary_numel(unit, topology.across.size)
        self.store.reserve(name, (numel,), memory.full.dtype, Tier.HOST)
        return NearGather(Secondary(topology, unit, self.store.view(name)), plain, memory.full)

    def _make_resident(self, unit: Unit, may_swap: bool) -> LiveUnit:
        memory = UnitMemory(unit, self.device, may_swap)
        if self.device.type == "cpu":
            memory.hold(self.store.arena.take(unit.full_bytes, f"resident unit {unit.name!r}"))
        else:
            memory.allocate()
        shard = memory.full
        if self.topology.num_shards > 1 or self.device.type == "cuda":
            self.store.reserve(f"param/{unit.index}/{unit.name}", (unit.shard_numel,), unit.dtype, Tier.HOST)
            shard = self.store.view(f"param/{unit.index}/{unit.name}")
        self._fill(unit, shard)
        if shard is not memory.full:
            self.regather(unit, shard, memory)
        memory.show()
        return LiveUnit(unit, memory, None, shard)

    def regather(self, unit: Unit, shard: torch.Tensor, memory: UnitMemory) -> None:
        """Refreshes a resident unit's full layout from every rank's shard. Collective."""
        gather_unit(self.topology, unit, shard.to(self.device), memory.full)

    def _fill(self, unit: Unit, shard: torch.Tensor) -> None:
        """Writes this rank's part of every parameter of a unit into its shard layout; rank 0's values win."""
        shard.zero_()
        if keeps_initial_master(unit, self.policy):
            home = Tier.NVME if self.policy.optim is Tier.NVME else Tier.HOST
            self.store.reserve(initial_master(unit), (unit.shard_numel,), torch.float32, home)
        for part in unit.shards:
            if unit.is_packed:
                plain = torch.zeros(part.shard_numel, dtype=unit.dtype)
                self._fill_part(part, plain)
                pack_into(shard, unit.packed_numel, plain, part.shard_offset)
                _forget_values(part, self.device)
                continue
            piece = shard[part.shard_offset : part.shard_offset + part.shard_numel]
            if initial_master(unit) in self.store:
                values = torch.zeros(part.shard_numel)
                self._fill_part(part, values)
                self._write_initial_master(unit, part, values)
                piece.copy_(values)
            else:
                self._fill_part(part, piece)
            _forget_values(part, self.device)

    def _write_initial_master(self, unit: Unit, part: Shard, values: torch.Tensor) -> None:
        """Keeps a parameter's values in fp32 until its first step."""
        entry = initial_master(unit)
        if self.store.home_of(entry) is Tier.HOST:
            self.store.view(entry)[part.shard_offset : part.shard_offset + values.numel()].copy_(values)
        else:
            self.write_part(entry, part.shard_offset * 4, values.float().contiguous().view(torch.uint8))

    def _fill_part(self, part: Shard, out: torch.Tensor) -> None:
        """Writes this rank's part of a parameter that has not been sharded yet; the padding is left."""
        keeper = registry.keeper_of(part.param)
        if isinstance(keeper, Nursery) and keeper.topology == self.topology:
            keeper.move_part(part.param, out)
            return
        if isinstance(keeper, Nursery):
            value = keeper.whole(part.param)
            keeper.move_part(part.param, None)
        else:
            value = part.param.detach().contiguous()
            if self.topology.group is not None and part.numel:
                share(self.topology, value, f"sharing {part.name}")
        first = part.shard_numel * self.topology.shard_rank
        mine = value.view(-1)[first : first + part.shard_numel]
        out[: mine.numel()].copy_(mine)

    def _find(self, param: nn.Parameter) -> tuple[LiveUnit, Shard]:
        try:
            return self._by_param[id(param)]
        except KeyError:
            raise ValueError("this parameter is not one of the sharded model's") from None

    def _fill_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replaces a module's own parameters in a state dict by gathered copies, in ordinary memory; tied ones by one."""
        if self._gathered_by() is not state:
            self._gathered_by = weakref.ref(state)
            self._gathered.clear()
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state:
                copy = self._gathered.get(id(param))
                if copy is None:
                    copy = self._gathered[id(param)] = self.weight(param)
                state[prefix + name] = copy

    def _take_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before torch loads a module's own parameters: puts the values where the parameters rest."""
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if param is not None and isinstance(value, torch.Tensor) and value.shape == param.shape:
                self.replace(param, value)
                state[prefix + name] = param  # torch copies it to itself, which does nothing

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


def _forget_values(part: Shard, device: torch.device) -> None:
    """Lets go of what a parameter held before it was sharded."""
    part.param.grad = None
    part.param.data = torch.empty(0, dtype=part.param.dtype, device=device)


def initial_master(unit: Unit) -> str:
    """The name in the store of a unit's fp32 values before its first step, kept for `master_from="init"`."""
    return f"initial/{unit.index}/{unit.name}"


def device_of(model: nn.Module) -> torch.device:
    """Where the maths of a model runs unless it is told otherwise: where its parameters are, or the GPU for those on meta."""
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device.type == "meta" and torch.cuda.is_available()
        else device
    )


def _check_device(policy: OffloadPolicy, device: torch.device, is_trained: bool) -> None:
    if device.type == "cuda" and policy.optim is Tier.DEVICE and is_trained:
        raise ValueError(
            "optim=DEVICE on a GPU: optimizer states step on the CPU here. Set optim=Tier.HOST or Tier.NVME (in a config: "
            'offload_optimizer: {"device": "cpu"})'
        )
