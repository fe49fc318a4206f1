"""Init: building a model that is larger than memory.

    with tiermem.zero.Init(config_dict_or_path=cfg):
        model = MyLargeModel()

A module *stands* when it is assigned to its parent; its parameters then go to their home (each rank keeps its part) and leave
NaN behind. The root stands when Init exits. Code that touches a parameter afterwards (weight initialisation by a library, tied
weights, `Module.apply`) finds its values: inside Init a TorchFunctionMode sees torch's calls on parameters, brings a parameter
back before the call and sends it home again from a bounded cache, oldest first. Values are those of a plain build, seed for
seed: they are kept in the dtype they were built in, and are cast when the model is sharded.

Peak memory while building is one unit (plus the cache): whatever a module holds that nobody has assigned yet. A bare list of
leaf modules (`nn.ModuleList([nn.Linear(...) for ...])`) stands all at once and may exceed it. Parameters of at most
`persistence_numel` elements stay where they are.

No torch name is patched: module registration hooks and the mode are torch's own, and are gone when Init exits. Only `shard` or
`initialize` make the model usable: they take the parameters over.
"""

from __future__ import annotations

import collections
import os
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.bounce import Bounce
from tiermem.swap.native import trim_heap
from tiermem.swap.store import TensorStore
from tiermem.zero import registry
from tiermem.zero.collectives import share
from tiermem.zero.gather import gather
from tiermem.zero.topology import Topology, find_topology, paths_of_rank

_CACHE_BYTES = 64 << 20
_PIECE_NUMEL = 1 << 20
_METADATA = {
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "layout", "is_meta", "ndim", "names",
    "is_cuda", "is_sparse", "is_quantized", "is_cpu", "itemsize", "nbytes", "size", "dim", "numel", "nelement",
    "ndimension", "stride", "is_floating_point", "is_complex", "requires_grad_", "element_size", "__hash__", "__len__",
    "is_contiguous", "retains_grad", "_backward_hooks", "_version", "output_nr", "get_device", "is_inference",
    "type", "is_signed", "__torch_function__", "is_mps", "is_xpu", "is_nested", "is_mkldnn", "is_vulkan", "is_ipu",
}  # fmt: skip


class Init:
    """Partitions parameters while a model is being built; see the module's docstring.

    Args:
        module: convert a finished module instead of building one inside the context.
        data_parallel_group: ranks that share the parameters; default: the world.
        config_dict_or_path: a DeepSpeed-style config, dict or JSON file.
        config: the older name of config_dict_or_path.
        enabled: False makes the context do nothing.
        dtype: of the parameters once sharded; default: what the config's precision says, else as built.
        policy: an OffloadPolicy instead of a config.

    Raises ValueError for a config that is wrong, OSError when a path is missing or full.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        *,
        policy: OffloadPolicy | None = None,
    ) -> None:
        if config is not None and config_dict_or_path is not None:
            raise ValueError("config and config_dict_or_path are the same thing: give one of them")
        given = config if config is not None else config_dict_or_path
        if given is not None and policy is not None:
            raise ValueError("give a config or a policy, not both")
        self._dtype = dtype
        if given is not None:
            from tiermem.config import load_config  # the config floor is needed only by those who come with a config

            loaded = load_config(given)
            policy = loaded.policy()
            self._dtype = dtype or {"bf16": torch.bfloat16, "fp16": torch.float16}.get(loaded.precision)
        self._policy = policy or OffloadPolicy()
        self._enabled = enabled and self._policy.stage == 3
        self._group = data_parallel_group
        self._handles: list[RemovableHandle] = []
        self._mode: _Touch | None = None
        self._nursery: Nursery | None = None
        self._seen: list[weakref.ref[nn.Parameter]] = []  # registered while building, in order
        if module is not None and self._enabled:
            with self:
                self._seen = [weakref.ref(p) for p in module.parameters()]

    def __enter__(self) -> Init:
        if self._enabled:
            self._nursery = Nursery(self._policy, find_topology(3, self._group, self._policy.timeout_s))
            self._handles = [
                register_module_module_registration_hook(self._stands),
                register_module_parameter_registration_hook(self._appears),
            ]
            self._mode = _Touch(self._nursery)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is None or self._nursery is None:
            return
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        while self._handles:
            self._handles.pop().remove()
        if error is None:
            for reference in self._seen:
                param = reference()
                if param is not None:
                    self._admit(param)
            self._nursery.graduate(self._dtype)
        else:
            self._nursery.abandon()
        self._seen.clear()
        self._mode = None

    def _appears(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            self._seen.append(weakref.ref(param))

    def _stands(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None:
            for param in module.parameters():
                self._admit(param)

    def _admit(self, param: nn.Parameter) -> None:
        assert self._nursery is not None
        # their fp32 values are asked for: even small ones are kept as built
        is_small = (
            param.numel() <= self._policy.persistence_numel and self._policy.master_from != "init" and not param.is_meta
        )
        if not is_small and registry.keeper_of(param) is None:
            self._nursery.admit(param)
        elif is_small and self._dtype is not None:
            self._nursery.remember_small(param)


class Nursery:
    """Keeps the parameters of a model that is being built, until `shard` takes them.

    Args:
        policy: parameters rest on NVMe if theirs do, else in ordinary memory, each rank its part.
        topology: who keeps which part.
    """

    def __init__(self, policy: OffloadPolicy, topology: Topology) -> None:
        self.topology = topology
        self._on_nvme = policy.params is Tier.NVME
        self._store: TensorStore | None = None
        self._bounce: Bounce | None = None
        self._piece: torch.Tensor | None = None  # what is read on the way to a parameter's place
        if self._on_nvme:
            self._store = TensorStore(paths_of_rank(policy.paths), 8 << 20, policy.io, policy.disk_bytes, pin=False)
            self._bounce = Bounce(self._store)
            self._piece = torch.empty(_PIECE_NUMEL * 8, dtype=torch.uint8)  # kept: blocks that come and go leave holes
        self._children: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Parameter -> _Child
        self._small: list[weakref.ref[nn.Parameter]] = []  # left where they are; cast in the end
        self._awake: collections.OrderedDict[int, weakref.ref[nn.Parameter]] = collections.OrderedDict()
        self._awake_bytes = 0
        self._freed_bytes = 0  # since the heap was last trimmed
        self._num_admitted = 0

    def admit(self, param: nn.Parameter) -> None:
        """Takes a parameter's values (rank 0's win) and leaves NaN. Collective when there are several ranks; blocks."""
        value = param.detach()
        if self.topology.group is not None and not value.is_meta:
            value = value.contiguous()
            share(self.topology, value, "sharing initial values")
        self._num_admitted += 1
        child = _Child(f"init/{self._num_admitted}")
        self._children[param] = child
        self._put(param, child, value)
        registry.enrol(param, self)
        weakref.finalize(param, self._forget, child)
        self._sleep(param)

    def remember_small(self, param: nn.Parameter) -> None:
        """Notes a parameter that stays where it is, to be cast with the others."""
        self._small.append(weakref.ref(param))

    def wake(self, param: nn.Parameter) -> None:
        """Brings a parameter's values back for code that touches it; the oldest awake go to sleep when there are many."""
        child = self._children.get(param)
        if child is None:
            return
        if id(param) in self._awake:
            self._awake.move_to_end(id(param))
            return
        param.data = self._get(param, child).to(child.dtype).view(child.shape)
        self._awake[id(param)] = weakref.ref(param)
        self._awake_bytes += param.nbytes

    def trim(self, keep_bytes: int = _CACHE_BYTES) -> None:
        """Puts the oldest awake parameters to sleep, what is in them written back, until the rest takes keep_bytes."""
        while self._awake and self._awake_bytes > keep_bytes:
            _, reference = self._awake.popitem(last=False)
            param = reference()
            if param is not None:
                self._awake_bytes -= param.nbytes
                self._put(param, self._children[param], param.detach())
                self._sleep(param)
        if not self._awake:
            self._awake_bytes = 0

    def graduate(self, dtype: torch.dtype | None) -> None:
        """Building has ended: all parameters sleep, and show the dtype they will have."""
        self.trim(keep_bytes=0)
        for param in list(self._children.keys()):
            if dtype is not None and param.dtype.is_floating_point:
                param.data = torch.empty((), dtype=dtype).fill_(float("nan")).expand(param.shape)
        for reference in self._small:
            small = reference()
            if small is not None and dtype is not None and small.dtype.is_floating_point:
                small.data = small.data.to(dtype)
        self._small.clear()
        trim_heap()

    def abandon(self) -> None:
        """Building has failed: nothing is kept."""
        if self._store is not None:
            self._store.close()

    def move_part(self, param: nn.Parameter, into: torch.Tensor | None) -> None:
        """Writes this rank's part of a parameter (flat, without padding) into a tensor, cast to its dtype, and forgets it.

        Goes piece by piece: no copy of the whole part is made on the way. Blocks; raises OSError.
        """
        child = self._children.pop(param)
        if into is not None and child.part is not None:
            into[: child.num_values].copy_(child.part)
        elif into is not None:
            self._read_pieces(child, into)
        self._forget(child)
        registry.dismiss(param)
        if not self._children and self._store is not None:
            self._store.close()

    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Puts other values in a parameter's place; every rank gives the whole. Blocks."""
        self._put(param, self._children[param], value)

    def whole(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of a parameter's values as built. Collective when there are several ranks; blocks."""
        child = self._children[param]
        return self._get(param, child).view(child.shape)

    def _sleep(self, param: nn.Parameter) -> None:
        """Leaves NaN in a parameter's place. The C library keeps freed blocks; every so often they are given back."""
        self._freed_bytes += param.nbytes
        _put_to_sleep(param)
        if self._freed_bytes > _CACHE_BYTES:
            self._freed_bytes = 0
            trim_heap()

    # ---- one child ---------------------------------------------------------------------------------------------------------

    def _put(self, param: nn.Parameter, child: _Child, value: torch.Tensor) -> None:
        part_numel = -(-value.numel() // self.topology.num_shards)
        first = part_numel * self.topology.shard_rank
        if value.dtype != child.dtype or value.shape != child.shape:
            self._forget(child)
        child.dtype, child.shape, child.is_gone = value.dtype, value.shape, False
        child.num_values = max(0, min(part_numel, value.numel() - first))
        if value.is_meta:
            return
        mine = value.detach().reshape(-1)[first : first + child.num_values].cpu()
        if self._store is None:
            child.part = mine.clone()
            return
        assert self._bounce is not None
        if child.name not in self._store:
            self._store.reserve(child.name, (child.num_values,), child.dtype, Tier.NVME)
        self._bounce.write(child.name, 0, mine.contiguous().view(torch.uint8))
        child.is_filled = True

    def _part(self, child: _Child) -> torch.Tensor:
        if child.part is not None:
            return child.part
        part = torch.empty(child.num_values, dtype=child.dtype)
        self._read_pieces(child, part)
        return part

    def _read_pieces(self, child: _Child, into: torch.Tensor) -> None:
        if not child.is_filled:
            raise RuntimeError(
                f"a parameter of shape {tuple(child.shape)} was built on the meta device and never given values: "
                "load a checkpoint (tiermem.load_safetensors) before sharding"
            )
        assert self._bounce is not None and self._piece is not None and child.dtype is not None
        size = child.dtype.itemsize
        piece = self._piece[: _PIECE_NUMEL * size].view(child.dtype)
        for start in range(0, child.num_values, _PIECE_NUMEL):
            stop = min(start + _PIECE_NUMEL, child.num_values)
            values = piece[: stop - start]
            self._bounce.read(child.name, start * size, stop * size, values.view(torch.uint8))
            into[start:stop].copy_(values)

    def _get(self, param: nn.Parameter, child: _Child) -> torch.Tensor:
        part = self._part(child)
        if self.topology.num_shards == 1:
            return part
        numel = child.shape.numel()
        part_numel = -(-numel // self.topology.num_shards)
        padded = torch.nn.functional.pad(part, (0, part_numel - part.numel()))
        whole = torch.empty(part_numel * self.topology.num_shards, dtype=child.dtype)
        gather(self.topology, padded, whole, "gathering initial values")
        return whole[:numel]

    def _forget(self, child: _Child) -> None:
        child.part = None
        if self._store is not None and not child.is_gone and child.name in self._store:
            self._store.drop(child.name)
        child.is_gone, child.is_filled = True, False


class _Child:
    """One parameter in the nursery: what it was built as, and this rank's part of it (in memory, or the store's entry)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype: torch.dtype | None = None
        self.shape = torch.Size()
        self.num_values = 0
        self.part: torch.Tensor | None = None
        self.is_filled = False
        self.is_gone = False


class _Touch(TorchFunctionMode):
    """Sees torch's calls on parameters inside Init, and wakes those that sleep before the call."""

    def __init__(self, nursery: Nursery) -> None:
        super().__init__()
        self._nursery = nursery

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _name_of(func) not in _METADATA:
            given = [*args, *kwargs.values()]
            given += [each for a in given if isinstance(a, (list, tuple)) for each in a]
            touched = [a for a in given if isinstance(a, nn.Parameter)]
            if touched:
                with torch._C.DisableTorchFunction():
                    self._nursery.trim()
                    for param in touched:
                        self._nursery.wake(param)
        return func(*args, **kwargs)


def _name_of(func: Any) -> str:
    """The attribute behind a property's getter, or the function's own name; setters count as touching."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)
    return name


def _put_to_sleep(param: nn.Parameter) -> None:
    with torch._C.DisableTorchFunction():
        device = "cpu" if param.is_meta else param.device
        nothing = torch.full((), float("nan"), dtype=param.dtype, device=device).expand(param.shape)
        if not param.is_meta:
            param.data = nothing
            return
        # A parameter leaves the meta device with its identity: what torch.utils.swap_tensors does once it has made sure
        # that nobody holds weak references (ours stay right: the Python object is the same).
        torch._C._swap_tensor_impl(param, nn.Parameter(nothing, param.requires_grad))
