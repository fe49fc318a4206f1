"""Values: reads and writes a unit's weights where they rest, by element, by parameter, and as the
model's state dict."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.ranks.topology import Topology
from tiermem.swap.base.native import Workers
from tiermem.swap.base.tier import Tier
from tiermem.swap.memory.accelerator import current_stream, record
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import Bounce, Parts
from tiermem.units import registry
from tiermem.units.quantised import byte_ranges, pack, unpack
from tiermem.units.unit import Shard, Unit, own_numel
from tiermem.weights.step_run import StepRun
from tiermem.weights.unit_memory import UnitMemory
from tiermem.weights.unit_state import LiveUnit
from tiermem.wires.gather import assemble, gather_unit, spread

# ---- values at rest ------------------------------------------------------------------------------

_MOVED = "/moved"


def initial_master(unit: Unit) -> str:
    """The name in the store of a unit's fp32 values before its first step, kept for
    `master_from="init"`."""
    return f"initial/{unit.index}/{unit.name}"


def name_elsewhere(name: str) -> str:
    """The name that an entry of the store gets when it moves to another tier: two names, in
    turns."""
    own = name.removesuffix(_MOVED)
    return own if own != name else own + _MOVED


class Values:
    """Reads and writes units' weights in a store. Lives as long as the store does.

        memory   the shard itself                      NVMe             through a small bounce buffer, a piece at a time
        packed   codes and their scales                initial master   fp32 values kept until the first step

    A unit rests in its shard layout (unit.py): this rank's part of every parameter, with padding. A
    full layout that is present does not follow writes made here; `Shards.refresh` makes it show
    them. A step under way is finished before anything is read or written; its errors are raised
    here.

    steps: the step that may be under way.
    bounce: moves pieces of entries on NVMe; None: no entry is on NVMe.
    spread_numel: most elements of resident units' new weights that one call brings to all ranks.
    workers: threads that pack and unpack blocks on a CPU; None: the caller alone.
    """

    def __init__(
        self,
        store: TensorStore,
        steps: StepRun,
        topology: Topology,
        device: torch.device,
        bounce: Bounce | None,
        spread_numel: int,
        workers: Workers | None,
    ) -> None:
        self.store = store
        self.steps = steps
        self.topology = topology
        self.device = device
        self._parts = Parts(store, bounce)
        self._spread_numel = spread_numel
        self.workers = workers

    # ---- by element ------------------------------------------------------------------------------

    def elements(self, live: LiveUnit, part: slice) -> torch.Tensor:
        """A copy of elements of a unit's shard layout on this rank, on the CPU. Blocks; raises
        OSError.

        When the unit rests packed, the first element must be a multiple of BLOCK; every parameter
        begins at one.
        """
        self.steps.finish()
        form = live.unit.blocks
        if form is None:
            return self._read(live, live.unit.dtype, part)
        out = torch.empty(part.stop - part.start, dtype=live.unit.dtype)
        return unpack(self.blocks(live, part), out.numel(), out, 0, False, form, self.workers)

    def put_elements(self, live: LiveUnit, start: int, values: torch.Tensor) -> None:
        """Overwrites elements of a unit's shard layout from `start` on, in the unit's dtype.
        Blocks; raises OSError.

        Call `drop_head_start` before, and `refresh` after the last write: present parameters do not
        follow by themselves.
        """
        self.steps.finish()
        form = live.unit.blocks
        if form is not None:
            self.put_blocks(
                live, slice(start, start + values.numel()), pack(values, form, self.workers)
            )
            return
        live.await_home()
        self._write(live, start, values)

    def blocks(self, live: LiveUnit, part: slice) -> torch.Tensor:
        """A copy of the blocks of elements of a unit that rests packed: uint8, codes, then scales.
        Blocks; raises OSError."""
        return torch.cat(
            [self._read(live, torch.uint8, each) for each in self._block_bytes(live, part)]
        )

    def put_blocks(self, live: LiveUnit, part: slice, packed: torch.Tensor) -> None:
        """Overwrites blocks of a unit that rests packed, as `blocks` gives them. Blocks; raises
        OSError."""
        live.await_home()
        codes, scales = self._block_bytes(live, part)
        self._write(live, codes.start, packed[: codes.stop - codes.start])
        self._write(live, scales.start, packed[codes.stop - codes.start :])

    def _block_bytes(self, live: LiveUnit, part: slice) -> tuple[slice, slice]:
        """The bytes of the codes and of the scales of elements."""
        assert live.unit.blocks is not None
        return byte_ranges(live.unit.packed_numel, part.start, part.stop, live.unit.blocks)

    def read_part(self, entry: str, dtype: torch.dtype, part: slice) -> torch.Tensor:
        """A copy of elements of an entry, on the CPU; from NVME through a small bounce buffer.
        Blocks; raises OSError."""
        self.steps.finish()
        return self._parts.read_part(entry, dtype, part)

    def write_part(self, entry: str, start: int, values: torch.Tensor) -> None:
        """Writes elements of an entry from element `start` on, in its dtype; to NVME through the
        bounce buffer.

        Blocks; raises OSError.
        """
        self.steps.finish()
        self._parts.write_part(entry, start, values)

    def copy(self, entry: str, to: str) -> None:
        """Copies an entry to another one of that size, on any tiers. Blocks; raises OSError."""
        self.steps.finish()
        self._parts.copy(entry, to)

    def put_initial_master(
        self, unit: Unit, part: Shard, values: torch.Tensor, start: int = 0
    ) -> None:
        """Stores fp32 values until a parameter's first step, from element `start` of this rank's
        part on. Blocks.

        Raises OSError.
        """
        self.write_part(initial_master(unit), part.shard_offset + start, values.float())

    def move_initial_master(self, unit: Unit, home: Tier) -> None:
        """Moves the values that `put_initial_master` has stored, if there are any, through memory
        beside the plan's. Blocks; raises OSError."""
        name = initial_master(unit)
        if name not in self.store or self.store.home_of(name) is home:
            return
        values = self.read_part(name, torch.float32, slice(0, unit.shard_numel))
        self.store.drop(name)
        self.store.reserve(name, values.shape, values.dtype, home, is_durable=False)
        self.write_part(name, 0, values)

    def _read(self, live: LiveUnit, dtype: torch.dtype, part: slice) -> torch.Tensor:
        self.store.on_device.check_there("param/")
        if live.shard is not None:
            return live.shard[part].to("cpu", copy=True)
        assert live.entry is not None
        return self.read_part(live.entry, dtype, part)

    def _write(self, live: LiveUnit, start: int, values: torch.Tensor) -> None:
        self.store.on_device.check_there("param/")
        if live.shard is not None:
            live.shard[start : start + values.numel()].copy_(values)
        else:
            assert live.entry is not None
            self.write_part(live.entry, start, values)

    # ---- by parameter, over ranks ----------------------------------------------------------------

    def assemble(self, shard: Shard, local: torch.Tensor) -> torch.Tensor:
        """A parameter's whole elements from every rank's part: flat, on the CPU. Collective;
        blocks.

        local: this rank's part, flat, with or without its padding.
        """
        share = shard.shard_numel
        what = f"gathering {shard.name}"
        return assemble(self.topology, local, share, self.device, what)[: shard.numel]

    def mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter's elements, flat and without padding: a view where
        possible."""
        first = shard.shard_numel * self.topology.shard_rank
        return whole.reshape(-1)[first : first + shard.shard_numel]

    def num_mine(self, shard: Shard) -> int:
        """Elements of this rank's part of a parameter, without its padding."""
        return own_numel(shard, self.topology.shard_rank)

    def regather(self, unit: Unit, shard: torch.Tensor, memory: UnitMemory) -> None:
        """Fills a present unit's full layout from every rank's shard. Collective; blocks (on a GPU
        in stream order)."""
        if unit.is_resident:
            spread(self.topology, unit, shard, memory.full, self._spread_numel)
            if memory.has_streams:
                memory.note_home_read(record(current_stream(self.device)))
        else:
            gather_unit(self.topology, unit, shard.to(self.device), memory.full)

    def keep_present(self, live: LiveUnit) -> None:
        """Makes a unit at HOME present in torch's own memory until `end_keeping`. Collective;
        blocks."""
        self.steps.finish()
        shard = live.shard
        unit = live.unit
        if shard is None or unit.is_packed:
            shard = self.elements(
                live, slice(0, unit.packed_numel if unit.is_packed else unit.shard_numel)
            )
        live.keep(lambda memory: self.regather(unit, shard, memory))


# ---- state dicts ---------------------------------------------------------------------------------


class StateDicts:
    """Makes `model.state_dict()` return whole weights, and `load_state_dict` store them where the
    parameters rest.

        state_dict        each module's own parameters are replaced by gathered copies     (torch's post-hook)
        load_state_dict   values are stored first; torch then copies nothing               (torch's pre-hook)

    Both are collective. Every module has its own hooks, so the state dict of a submodule works.
    Buffers, extra state and the parameters of copied modules are left to torch.

    weight: returns a copy of a parameter's whole value. replace: stores a parameter's whole value.
    begin, end: called with the parameters of a module before it is loaded, and when it is.
    """

    def __init__(
        self,
        weight: Callable[[nn.Parameter], torch.Tensor],
        replace: Callable[[nn.Parameter, torch.Tensor], None],
        begin: Callable[[list[nn.Parameter]], None] = lambda _: None,
        end: Callable[[list[nn.Parameter]], None] = lambda _: None,
    ) -> None:
        self._weight = weight
        self._replace = replace
        self._begin = begin
        self._end = end
        self._gathered = weakref.WeakValueDictionary[int, torch.Tensor]()
        # a weak reference to the state dict under way
        self._gathered_by: Callable[[], object] = lambda: None

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Installs hooks on every module. Returns their handles; the caller removes
        them."""
        handles: list[RemovableHandle] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which has no such hooks
                handles += [
                    module.register_load_state_dict_pre_hook(
                        lambda module, *_: self._begin([*module.parameters()])
                    ),
                    module.register_load_state_dict_post_hook(
                        lambda module, _: self._end([*module.parameters()])
                    ),
                ]
            if module._parameters:
                # torch sets attributes on the function, so each module gets its own
                fill = self._fill
                handles.append(
                    module.register_state_dict_post_hook(lambda *args, fill=fill: fill(*args))
                )
                handles.append(self.watch_loads(module))
        return handles

    def watch_loads(self, module: nn.Module) -> RemovableHandle:
        """Installs the hook of `load_state_dict` on one module."""
        handle: RemovableHandle = module.register_load_state_dict_pre_hook(
            lambda *args: self._take(*args)
        )
        return handle

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replaces a module's own parameters in a state dict by gathered copies in ordinary memory;
        tied ones share one."""
        if self._gathered_by() is not state:
            self._gathered_by = weakref.ref(state)
            self._gathered.clear()
        for name, param in module._parameters.items():
            if (
                param is not None
                and prefix + name in state
                and registry.owner_of(param) is not None
            ):
                copy = self._gathered.get(id(param))
                if copy is None:
                    copy = self._gathered[id(param)] = self._weight(param)
                state[prefix + name] = copy

    def _take(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before torch loads a module's own parameters: stores their values where the parameters
        rest."""
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if param is None or registry.owner_of(param) is None:
                continue
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                self._replace(param, value)
                state[prefix + name] = param  # torch copies it to itself, which does nothing
