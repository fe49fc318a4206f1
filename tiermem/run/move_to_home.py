"""Settle: checks a model, then moves its parameters' values to where their units rest, one
parameter at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tiermem.plans.plan import Plan, keeps_secondary
from tiermem.plans.pools import Pools
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.collectives import sendable, share
from tiermem.ranks.topology import Topology
from tiermem.run.init_params import ParametersInInit, Put, into
from tiermem.swap.base.ranges import round_up
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.swap.memory.arena import Pool
from tiermem.units import registry
from tiermem.units.quantised import BlockFormat, pack_into
from tiermem.units.state_layout import (
    StatePieces,
    keeps_initial_master,
    keeps_sums,
    planned_layout,
    weight_runs,
)
from tiermem.units.unit import UNIT_ALIGN, Shard, Unit
from tiermem.weights.absent import (
    RestingParameter,
    ZeroParamStatus,
    absent_part,
    become,
    describe,
    undescribe,
)
from tiermem.weights.unit_memory import LAYOUTS, Passage, UnitMemory, apart
from tiermem.weights.unit_state import LiveUnit, UnitAtRest
from tiermem.weights.values import Values, initial_master, name_elsewhere
from tiermem.wires.gather import Gather, NearGather, UnitGather, secondary_numel
from tiermem.wires.packed import PackedGather, gathers_packed

# ---- models that are refused ---------------------------------------------------------------------
#
#     lazy parameters      have no shape yet, so nothing can be planned
#     meta parameters      have no values
#     sparse embeddings    have gradients that are lists of rows, which cannot be reduced or stepped here (frozen: allowed)
#     max_norm embeddings  write weights in forward, where these may be a copy; the master is not written (frozen: allowed)
#     RWKV's rescaling     writes weights when train() or eval() has changed (weights that are always present: allowed)
#     shared memory        two parameters over the same memory, or a buffer over a parameter's. Torch steps such memory once for
#                          each parameter. Frozen ones that are equal in place, shape and strides
#                          become one parameter
#     complex parameters   no optimizer here steps them (frozen: allowed)
#
# Checks that depend on the policy (dtypes of masters, sizes of buffers) are made during planning
# (plan.py, unit.py).


def check_model(model: nn.Module, is_trained: bool) -> None:
    """Raises ValueError for a model that cannot be partitioned; names the parameter or module and
    the change to make."""
    check_values(model)
    tie_shared(model)
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"parameter {name!r} has no shape yet (a lazy module): call the model once before "
                "it is sharded"
            )
        if param.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device and has no values: give it values before "
                "the model is sharded (load_state_dict(..., assign=True)), also on ranks that take "
                "rank 0's, or build the model under tiermem.zero.Init"
            )
        if is_trained and param.requires_grad and param.is_complex():
            raise ValueError(
                f"parameter {name!r} is {param.dtype}, which no optimizer here steps: keep "
                "torch.view_as_real of it as the "
                "parameter and torch.view_as_complex that in forward, or freeze it"
            )
    empty = empty_buffers(model)
    if empty:
        raise ValueError(
            f"{', '.join(empty)}: buffers on the meta device, which no file fills "
            "(persistent=False). Give them values before the model is sharded, or build it without "
            "torch.device('meta'), under tiermem.zero.Init"
        )
    for name, module in model.named_modules():
        is_scripted = isinstance(module, torch.jit.RecursiveScriptModule)  # type: ignore[attr-defined]  # torch documents it
        if is_scripted and next(module.parameters(), None) is not None:
            raise ValueError(
                f"module {name or 'model'!r} was made by torch.jit.script, which takes no hooks "
                "that fetch its weights: keep the module itself and compile it by engine.compile() "
                "or torch.compile, or trace it (torch.jit.trace)"
            )
        if (
            is_trained
            and isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.weight.requires_grad
        ):
            _check_embedding(name, module)


def check_rescaling(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError for transformers' RWKV that rescales its weights, where any are absent."""
    comes_and_goes = any(unit.takes_buffer for unit in plan.division.units)
    for name, module in model.named_modules() if comes_and_goes else ():
        if hasattr(module, "_rescale_layers") and module.config.rescale_every:
            raise ValueError(
                f"module {name or 'model'!r} writes its weights when train() or eval() has changed "
                "(transformers' RWKV), where they may rest elsewhere: set config.rescale_every = 0 "
                "once it is built or loaded. Outputs differ by its norms' eps; fp16 may overflow"
            )


def check_values(model: nn.Module) -> None:
    """Raises ValueError for a model that was closed without its weights, which show NaN."""
    for name, param in model.named_parameters():
        if is_lazy(param) or param.is_meta:
            continue
        is_placeholder = param.numel() > 1 and not any(param.stride())
        if is_placeholder and registry.owner_of(param) is None and param[(0,) * param.ndim].isnan():
            raise ValueError(
                f"the values of parameter {name!r} are gone: it was sharded, and closed without "
                "materialize=True. Train, evaluate and save before close(), or give it "
                "materialize=True; else build or load the model again"
            )


def tie_shared(model: nn.Module) -> None:
    """Makes frozen parameters over the same elements one parameter. Raises ValueError for other
    overlaps, with both names."""
    seen: dict[int, list[tuple[int, int, str, torch.Tensor]]] = {}
    for prefix, module in model.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                memory = None if tensor is None else _memory_of(tensor)
                if tensor is None or memory is None:
                    continue
                storage, start, stop = memory
                whole_name = f"{kind} {f'{prefix}.{name}' if prefix else name!r}"
                others = seen.setdefault(storage, [])
                over = [
                    each
                    for each in others
                    if each[0] < stop and start < each[1] and each[3] is not tensor
                ]
                twin = next((each for each in over if _is_twin(each[3], tensor)), None)
                if twin is not None and len(over) == 1:
                    module._parameters[name] = cast(nn.Parameter, twin[3])
                    continue
                parameters = [each for each in over if isinstance(each[3], nn.Parameter)]
                if parameters or (over and kind == "parameter"):
                    raise ValueError(
                        f"{whole_name} and {over[0][2]} share memory, and each weight has a place "
                        "of its own here. Use one parameter for both (head.weight = embed.weight, "
                        "without .data), or give one of them a clone"
                    )
                others.append((start, stop, whole_name, tensor))


def _memory_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """A tensor's storage, and the bytes of it from the first to the last element; None for one
    without memory of its own."""
    if (
        is_lazy(tensor)
        or isinstance(tensor, RestingParameter)
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        return None
    if not tensor.numel() or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return None
    start = int(tensor.storage_offset()) * tensor.itemsize
    reach = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        + 1
    )
    return int(tensor.untyped_storage()._cdata), start, start + int(reach) * tensor.itemsize


def _is_twin(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two frozen parameters are the same elements in the same shape."""
    both = first, second
    if not all(isinstance(each, nn.Parameter) and not each.requires_grad for each in both):
        return False
    one, other = ((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in both)
    return one == other


def empty_buffers(model: nn.Module) -> list[str]:
    """The names of the buffers on the meta device that a state dict does not have."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and name in module._non_persistent_buffers_set
    ]


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.sparse:
        raise ValueError(
            f"module {name!r} makes sparse gradients, which are neither reduced nor stepped here: "
            "build it with sparse=False, or freeze it"
        )
    if module.max_norm is not None:
        raise ValueError(
            f"module {name!r} has max_norm={module.max_norm}: it writes its weights in forward, "
            "where they are a copy of what is stepped, so that would be lost. Build it with "
            "max_norm=None and divide the rows that it looks up by their norms, or freeze it"
        )


# ---- moving weights ------------------------------------------------------------------------------
#
#     a parameter's whole value                    this rank's part, in the unit's shard layout
#       rank 0's, shared with all     ----------->   resident   the unit's storage for life (and, for a gather, its shard)
#       ParametersInInit's (zero.Init)               in place   the same, seen while it is in use
#                                                    HOST       an entry of the store
#                                                    NVME       through a buffer, then an entry of the store
#                                                    packed     codes and scales, on HOST or NVME
#
# The fp32 values for the first step (`master_from="init"`) are stored as well. A parameter releases
# its old memory as soon as its part is stored, so the model needs memory once.


def move_to_home(
    units: Iterable[Unit], plan: Plan, policy: OffloadPolicy, values: Values, pools: Pools
) -> tuple[list[LiveUnit], Passage]:
    """Moves every unit's weights to where they rest; the store owns the memory. Collective; blocks;
    raises OSError.

    `TensorStore.flush` registers the memory taken here. Returns the units and what they share,
    which `release` ends.
    """
    units = list(units)
    if is_accelerator(values.device):
        _announce(units, plan, policy, values)
    nan_bytes = max((unit.full_bytes for unit in units if not unit.is_resident), default=0)
    buffers = pools.units, pools.staging, pools.wires, plan.units
    passage = Passage(values.store, values.steps, values.device, *buffers, nan_bytes)
    settler = _Settler(plan, policy, values, pools, passage)
    return [settler.send_home(unit) for unit in units], passage


class WeightsMove:
    """Moves weights that rest elsewhere in another plan. No unit is present meanwhile.

    move_out    to DEVICE and NVMe: their memory on HOST is free for the new plan
    move_in     to HOST, with the buffers of the new plan; then the units use what has moved
    """

    def __init__(
        self, units: Iterable[LiveUnit], plan: Plan, policy: OffloadPolicy, values: Values
    ) -> None:
        self._plan = plan
        self._policy = policy
        self._values = values
        self._units = [live for live in units if live.is_streamed]
        homes = {live: _home_of(live.unit, plan, values.device) for live in self._units}
        # of those that move
        self._homes = {
            live: home
            for live, home in homes.items()
            if home is not values.store.home_of(live.name)
        }
        self._names = {live: name_elsewhere(live.name) for live in self._homes}

    def move_out(self) -> None:
        """Blocks; raises OSError and torch's OutOfMemoryError."""
        for live, home in self._homes.items():
            if home is Tier.DEVICE:  # all of them share a slab
                self._values.store.on_device.reserve(self._names[live], live.unit.shard_bytes)
        self._move(Tier.DEVICE, Tier.NVME)

    def move_in(self, pools: Pools, passage: Passage) -> None:
        """Blocks; raises OSError."""
        self._move(Tier.HOST)
        settler = _Settler(self._plan, self._policy, self._values, pools, passage)
        for live in self._units:
            settler.settle(live, self._names.get(live, live.name))
        show_parts(self._names)

    def _move(self, *homes: Tier) -> None:
        for live, name in self._names.items():
            if self._homes[live] in homes:
                live.await_home()
                _reserve(live.unit, name, self._plan, self._policy, self._values)
                self._values.copy(live.name, name)
                self._values.store.drop(live.name)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Moves a model's buffers to a device; buffers that share a tensor still share it
    afterwards."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


def show_parts(units: Iterable[LiveUnit]) -> None:
    """Sets the documented attributes on the parameters of units (absent.py)."""
    for live in units:
        for shard in live.unit.shards:
            part = absent_part((shard.shard_numel,), live.unit.dtype)
            if live.shard is not None and not live.unit.is_packed:
                part = live.shard[shard.shard_offset : shard.shard_offset + shard.shard_numel]
            status = ZeroParamStatus.AVAILABLE if live.is_present else ZeroParamStatus.NOT_AVAILABLE
            describe(shard.param, shard.index, shard.shape, part, status)


def release(units: Iterable[LiveUnit], passage: Passage) -> None:
    """The opposite of `move_to_home`: parameters become ordinary ones without gradients, and leave the
    registry.

    Those of resident units keep their values: on an accelerator in the memory where they are, which
    may have no room for another; elsewhere as copies, since the store's memory ends.
    """
    units = list(units)
    for live in units:
        live.await_home()  # the memory ends with the store
        live.part_with()
    for live in units:
        for shard in live.unit.shards:
            shard.param.grad = None
            if live.unit.is_resident and is_accelerator(shard.param.device):
                passage.store.on_device.leave_to(shard.param)
            elif live.unit.is_resident:
                shard.param.data = shard.param.data.clone()
            registry.unregister(shard.param)
            undescribe(shard.param)
    passage.close()


class _Settler:
    """Moves units; used during `move_to_home` only."""

    def __init__(
        self, plan: Plan, policy: OffloadPolicy, values: Values, pools: Pools, passage: Passage
    ) -> None:
        self._plan = plan
        self._policy = policy
        self._values = values
        self._store = values.store
        self._topology = values.topology
        self._device = values.device
        # buffers in which a unit for NVMe is filled
        self._pool: Pool | None = pools.units or pools.staging
        self._wires = pools.wires
        self._is_accelerated = is_accelerator(self._device)
        self._passage = passage

    def send_home(self, unit: Unit) -> LiveUnit:
        """Moves a unit's weights to where they rest, one parameter at a time. Collective;
        blocks."""
        if unit.is_resident:
            return self._make_resident(unit)
        entry = unit.entry
        _reserve(unit, entry, self._plan, self._policy, self._values)
        at_rest = self._at_rest(unit, entry)
        if at_rest.shard is None:
            assert self._pool is not None
            slot = self._pool.take()
            assert slot is not None
            data = slot.tensor[: unit.shard_bytes]
            self._fill(unit, data.view(unit.rests_as))
            self._store.write([(entry, 0, data)], entry).wait()
            self._pool.give_back(slot)
        else:
            self._fill(unit, at_rest.shard)
        return LiveUnit(unit, self._passage, at_rest)

    def settle(self, live: LiveUnit, name: str) -> None:
        """Makes a unit rest under another name in the store, where its bytes are, or take part in
        another plan where it is."""
        unit = live.unit
        is_in_place = self._plan.division.units[unit.index].is_in_place
        if name == live.name and is_in_place == unit.is_in_place and not unit.is_packed:
            return
        unit.use_in_place(is_in_place)
        live.move_to(self._at_rest(unit, name))

    def _at_rest(self, unit: Unit, name: str) -> UnitAtRest:
        """Where a streamed unit rests: its bytes are in the store under this name."""
        shard = None
        if self._store.home_of(name) is not Tier.NVME:
            shard = self._store.view(name)
            shard = shard if is_accelerator(shard.device) else apart(shard)
        memory = UnitMemory(unit, self._passage, shard if unit.is_in_place else None)
        if unit.is_in_place:
            return UnitAtRest(name, memory, memory.full, None)
        gather = self._gather_of(unit, memory, self._store.home_of(name))
        return UnitAtRest(name, memory, shard, gather)

    def _gather_of(self, unit: Unit, memory: UnitMemory, home: Tier) -> Gather | None:
        """The gather of a unit; None when it is present in the form in which it rests, or is copied
        or widened alone.

        On one rank a unit that is widened on the device where it rests is gathered: on the stream
        whose work writes it there.
        """
        policy = self._policy
        topology = self._topology
        if gathers_packed(unit, policy, topology.num_shards):
            plain: Gather = PackedGather(
                topology, unit, memory.travels, self._wires, self._values.workers
            )
        elif topology.num_shards > 1 or (home is Tier.DEVICE and unit.is_widened):
            plain = UnitGather(topology, unit, memory.travels, policy.gather_way == "single")
        else:
            return None
        if not keeps_secondary(policy, topology.num_shards):
            return plain
        assert topology.across is not None
        name = f"secondary/{unit.index}/{unit.name}"
        numel = secondary_numel(unit, topology.across.size)
        home = Tier.DEVICE if self._is_accelerated else Tier.HOST
        if name not in self._store:
            self._store.reserve(name, (numel,), unit.travels_as, home)
        return NearGather(topology, unit, plain, memory.travels, self._store.view(name))

    def _make_resident(self, unit: Unit) -> LiveUnit:
        entry = unit.entry
        home = _home_of_resident(self._plan, self._topology, self._is_accelerated)
        if self._is_accelerated:
            slot = self._store.on_device.take(entry if home is None else LAYOUTS, unit.full_bytes)
            memory = UnitMemory(unit, self._passage, slot.tensor)
        else:
            slot = self._store.arena.take(unit.full_bytes, f"resident unit {unit.name!r}")
            memory = UnitMemory(unit, self._passage, apart(slot.tensor[: unit.full_bytes]))
        shard = memory.full
        if home is not None:
            self._store.reserve(
                entry, (unit.shard_numel,), unit.dtype, home, crosses_link=self._is_accelerated
            )
            shard = self._store.view(entry)
        self._fill(unit, shard)
        if shard is not memory.full:
            self._values.regather(unit, shard, memory)
        return LiveUnit(unit, self._passage, UnitAtRest(entry, memory, shard, None))

    def _fill(self, unit: Unit, shard: torch.Tensor) -> None:
        """Writes this rank's part of every parameter of a unit, of rank 0's values, into the unit's
        shard layout."""
        shard.zero_()
        if keeps_initial_master(unit, self._policy):
            self._store.reserve(
                initial_master(unit),
                (unit.shard_numel,),
                torch.float32,
                self._plan.initial_masters,
                is_durable=False,
            )
        for part in unit.shards:
            piece = shard[part.shard_offset : part.shard_offset + part.shard_numel]
            if unit.blocks is not None:
                self._fill_part(part, self._packing(unit, unit.blocks, part, shard))
            elif initial_master(unit) in self._store:
                values = torch.zeros(part.shard_numel)
                self._fill_part(part, into(values))
                self._values.put_initial_master(unit, part, values)
                piece.copy_(values)
            else:
                self._fill_part(part, into(piece))
            # releases the old memory: from now on the parameter is on the device, without elements
            part.param.grad = None
            become(part.param, torch.empty(0, dtype=part.param.dtype, device=self._device))

    def _packing(self, unit: Unit, form: BlockFormat, part: Shard, shard: torch.Tensor) -> Put:
        """Packs values into the blocks of a unit. Each call begins at a whole block."""

        def put(start: int, values: torch.Tensor) -> None:
            values = values.to(shard.device, unit.dtype)
            pack_into(
                shard,
                unit.packed_numel,
                values,
                part.shard_offset + start,
                form,
                self._values.workers,
            )

        return put

    def _fill_part(self, part: Shard, put: Put) -> None:
        """Hands this rank's part of a parameter that is not sharded yet to `put`, without
        padding."""
        owner = registry.owner_of(part.param)
        if isinstance(owner, ParametersInInit):
            if owner.topology == self._topology and owner.share_of(part.numel) == part.shard_numel:
                owner.move_part(part.param, put)
                return
            value = owner.whole(part.param)
            owner.move_part(part.param, None)
        else:
            value = part.param.detach().contiguous()
            if self._topology.group is not None and part.numel:
                value = sendable(self._topology, value)
                share(self._topology, value, f"sharing {part.name}")
        mine = self._values.mine(part, value)
        if mine.numel():
            put(0, mine)


def _home_of(unit: Unit, plan: Plan, device: torch.device) -> Tier:
    """The tier in the store where a streamed unit rests: without an accelerator DEVICE is HOST."""
    home = plan.unit_homes[unit.index]
    return Tier.HOST if home is Tier.DEVICE and not is_accelerator(device) else home


def _reserve(unit: Unit, name: str, plan: Plan, policy: OffloadPolicy, values: Values) -> None:
    """Takes room for a streamed unit's shard where a plan has it. On NVMe it has checksums, cut at
    the usual tile boundaries."""
    home = _home_of(unit, plan, values.device)
    numel = unit.shard_bytes // unit.rests_as.itemsize
    crosses = is_accelerator(values.device)
    values.store.reserve(name, (numel,), unit.rests_as, home, crosses_link=crosses)
    if home is Tier.NVME and keeps_sums(policy):
        # of frozen units too, which may be unfrozen
        step = round_up(plan.choice.tile_numel, UNIT_ALIGN)
        cuts = range(step, unit.shard_numel, step)
        strip = planned_layout(unit, policy).strip_numel
        runs = weight_runs(unit, values.topology.shard_rank, strip, cuts)
        values.store.sums.protect(name, StatePieces(runs).pieces)


def _home_of_resident(plan: Plan, topology: Topology, is_gpu: bool) -> Tier | None:
    """Where the shards of resident units rest, which steps write; None: steps write the full
    layouts."""
    steps_there = is_gpu and plan.states is Tier.DEVICE
    if topology.num_shards > 1 or (is_gpu and not steps_there):
        return Tier.DEVICE if steps_there else Tier.HOST
    return None


def _announce(units: Sequence[Unit], plan: Plan, policy: OffloadPolicy, values: Values) -> None:
    """Announces what units take of an accelerator for life, so that all of one kind lies in one
    slab."""
    memory = values.store.on_device
    home = _home_of_resident(plan, values.topology, is_gpu=True)
    for unit in units:
        if unit.is_resident:
            memory.reserve(unit.entry if home is None else LAYOUTS, unit.full_bytes)
        elif (
            keeps_secondary(policy, values.topology.num_shards)
            and values.topology.across is not None
        ):
            numel = secondary_numel(unit, values.topology.across.size)
            memory.reserve("secondary/", numel * unit.travels_as.itemsize)
        if (home if unit.is_resident else plan.unit_homes[unit.index]) is Tier.DEVICE:
            memory.reserve(unit.entry, unit.shard_bytes)
