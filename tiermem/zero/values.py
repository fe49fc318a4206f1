"""Values: a unit's weights where they rest, read and written by element, and as the model's state dict."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.policy import Tier
from tiermem.swap.store import TensorStore
from tiermem.swap.stream import Bounce
from tiermem.zero import registry
from tiermem.zero.gather import Updating, gather, gather_unit
from tiermem.zero.quantised import byte_ranges, pack, pack_into, unpack
from tiermem.zero.state_layout import own_numel
from tiermem.zero.topology import Topology
from tiermem.zero.unit import Shard, Unit
from tiermem.zero.unit_state import LiveUnit, UnitMemory

# ---- Values: a unit's weights where they rest, read and written by element; and parameters made whole out of ---------
# every rank's part
#
#     memory   the shard itself                      NVMe   through a small bounce buffer, a piece at a time
#     packed   int8 codes and their scales (Packed)  initial master   fp32 values kept until the first step
#
# A unit rests in its shard layout (unit.py): every parameter's part of this rank, padding included. A full layout that is
# present does not follow what is written here: `Shards.refresh` makes it show the change.


def initial_master(unit: Unit) -> str:
    """The name in the store of a unit's fp32 values before its first step, kept for `master_from="init"`."""
    return f"initial/{unit.index}/{unit.name}"


class Values:
    """Units' values in a store. Lives as long as the store does.

    bounce: moves pieces of what rests on NVMe; None: nothing does.
    updating: how units that stay present come together.
    """

    def __init__(
        self,
        store: TensorStore,
        topology: Topology,
        device: torch.device,
        bounce: Bounce | None,
        updating: Updating,
    ) -> None:
        self.store = store
        self.topology = topology
        self.device = device
        self._bounce = bounce
        self._updating = updating

    # ---- by element -----------------------------------------------------------------------------------------------------

    def elements(self, live: LiveUnit, part: slice) -> torch.Tensor:
        """A copy of elements of a unit's shard layout, this rank's parameters. Blocks; raises OSError.

        Of a unit that rests packed the first element is a multiple of BLOCK, as every parameter's is.
        """
        if live.unit.is_packed:
            return self._unpacked_elements(live, part)
        if live.shard is not None:
            return live.shard[part].to("cpu", copy=True)
        assert live.entry is not None
        return self.read_part(live.entry, live.unit.dtype, part)

    def put_elements(self, live: LiveUnit, start: int, values: torch.Tensor) -> None:
        """Overwrites elements of a unit's shard layout from `start` on, in its dtype. Blocks; raises OSError.

        Nothing that shows the parameters follows yet: `drop_head_start` before, and `refresh` once all are there.
        """
        live.await_home()
        if live.unit.is_packed:
            self._pack_elements(live, start, values)
        elif live.shard is not None:
            live.shard[start : start + values.numel()].copy_(values)
        else:
            assert live.entry is not None
            self.write_part(live.entry, start * live.unit.dtype.itemsize, values.contiguous().view(torch.uint8))

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

    def put_initial_master(self, unit: Unit, part: Shard, values: torch.Tensor) -> None:
        """Keeps a parameter's values in fp32 until its first step."""
        entry = initial_master(unit)
        if self.store.home_of(entry) is Tier.HOST:
            self.store.view(entry)[part.shard_offset : part.shard_offset + values.numel()].copy_(values)
        else:
            self.write_part(entry, part.shard_offset * 4, values.float().contiguous().view(torch.uint8))

    # ---- by parameter, over ranks ---------------------------------------------------------------------------------------

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
        return own_numel(shard, self.topology.shard_rank)

    def regather(self, unit: Unit, shard: torch.Tensor, memory: UnitMemory) -> None:
        """Refreshes a present unit's full layout from every rank's shard. Collective."""
        if unit.is_resident:
            self._updating.spread(unit, shard, memory.full)
        else:
            gather_unit(self.topology, unit, shard.to(self.device), memory.full)

    def keep_present(self, live: LiveUnit) -> None:
        """Brings a unit that is at HOME, in memory beside the arena, until `end_keeping`. Collective; blocks."""
        shard = live.shard if live.shard is not None else self.elements(live, slice(0, live.unit.shard_numel))
        live.keep(lambda memory: self.regather(live.unit, shard, memory))

    # ---- packed ---------------------------------------------------------------------------------------------------------

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


# ---- State dicts: `model.state_dict()` shows whole weights, and `load_state_dict` puts them where the parameters -----
# rest
#
#     state_dict        each module's own parameters become gathered copies     (torch's post-hook)
#     load_state_dict   values go home first; torch then copies nothing         (torch's pre-hook)
#
# Both are collective, as gathering is. Every module has hooks of its own, so that a state dict of a part of the model
# works. What is no partitioned parameter (buffers, extra state, the weights of a module that was copied) is left to
# torch.


class StateDicts:
    """Looks after the state dicts of one sharded model.

    weight: makes a copy of a parameter's whole value. replace: puts a whole value in a parameter's place.
    """

    def __init__(
        self,
        weight: Callable[[nn.Parameter], torch.Tensor],
        replace: Callable[[nn.Parameter, torch.Tensor], None],
    ) -> None:
        self._weight = weight
        self._replace = replace
        self._gathered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._gathered_by: Callable[[], object] = lambda: None  # the state_dict under way, held weakly

    def watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Hooks every module that has parameters; the caller takes the hooks off."""
        handles: list[RemovableHandle] = []
        for module in model.modules():
            if module._parameters:
                # torch marks the functions it is given, so each module gets one of its own
                fill, put = self._fill, self._take
                handles.append(module.register_state_dict_post_hook(lambda *args, fill=fill: fill(*args)))
                handles.append(module.register_load_state_dict_pre_hook(lambda *args, put=put: put(*args)))
        return handles

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replaces a module's own parameters in a state dict by gathered copies, in ordinary memory; tied ones by one."""
        if self._gathered_by() is not state:
            self._gathered_by = weakref.ref(state)
            self._gathered.clear()
        for name, param in module._parameters.items():
            if param is not None and prefix + name in state and registry.keeper_of(param) is not None:
                copy = self._gathered.get(id(param))
                if copy is None:
                    copy = self._gathered[id(param)] = self._weight(param)
                state[prefix + name] = copy

    def _take(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before torch loads a module's own parameters: puts the values where the parameters rest."""
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if param is None or registry.keeper_of(param) is None:
                continue
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                self._replace(param, value)
                state[prefix + name] = param  # torch copies it to itself, which does nothing
