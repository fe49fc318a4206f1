"""Parameters under zero.Init: keeps the parameters of a model while it is built, until `shard`
takes them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import mmap
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from tiermem.plans.agreement import agree
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.collectives import exchange, sendable, share_parts
from tiermem.ranks.topology import Topology, paths_of_rank
from tiermem.swap.base.grad_mode import call_with_grad
from tiermem.swap.base.native import trim_heap
from tiermem.swap.store.store import TensorStore
from tiermem.swap.store.stream import Bounce
from tiermem.units import registry
from tiermem.weights import absent
from tiermem.weights.absent import ZeroParamStatus, absent_part, become, describe, mark
from tiermem.weights.values import StateDicts
from tiermem.wires.gather import assemble

# ---- arguments of zero.Init that `shard` and `initialize` use as well ----------------------------


@dataclasses.dataclass(frozen=True)
class AsBuilt:
    """Settings given to zero.Init that no config contains. ParametersInInit keeps them; empty by
    default.

    group     get_dp_process_group()   the ranks that share the model, unless shard is given a group
    parts     get_partition_rank()     the part that each rank keeps, for as long as the model is sharded
    fields    the quantised arguments and zero_param_parallel_group, as fields of the policy
    """

    group: dist.ProcessGroup | None = None
    """The ranks that share the model; None: the world."""
    parts: tuple[int, ...] | None = None
    """The part that each rank of the group keeps, in the order of ranks; None: rank r keeps part
    r."""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the policy."""

    def over(self, policy: OffloadPolicy) -> OffloadPolicy:
        """A policy with these fields. Raises ValueError when the policy sets one of them to another
        value."""
        defaults = {field.name: field.default for field in dataclasses.fields(policy)}
        for name, value in self.fields.items():
            if getattr(policy, name) not in (value, defaults[name]):
                raise ValueError(
                    f"{name}={getattr(policy, name)!r} in the policy, but the model was built "
                    "under a zero.Init whose "
                    f"arguments say {value!r}: say it in one place, or the same in both"
                )
        return dataclasses.replace(policy, **self.fields)


def built_with(model: nn.Module) -> AsBuilt:
    """The settings of the zero.Init under which a model was built; empty for a plain model."""
    for param in model.parameters():
        found = getattr(registry.owner_of(param), "as_built", None)
        if isinstance(found, AsBuilt):
            return found
    return AsBuilt()


def size_of_near(group: dist.ProcessGroup, near: dist.ProcessGroup) -> int:
    """The number of ranks of `near`, which keep a secondary copy of gathered parameters (hpZ), among
    the ranks of `group`.

    Raises ValueError unless `near` holds neighbouring ranks, this one among them, and its size
    divides the group into blocks.
    """
    ranks = dist.get_process_group_ranks(group)
    inside = dist.get_process_group_ranks(near)
    size = len(inside)
    blocks = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    if len(ranks) % size or sorted(inside) not in blocks or dist.get_rank() not in inside:
        raise ValueError(
            f"zero_param_parallel_group holds ranks {inside} of {ranks}, and a second copy is kept "
            "among neighbours: allowed "
            f"are {_allowed(ranks)}, and every rank gives the one that it is in"
        )
    return size


def _allowed(ranks: Sequence[int]) -> str:
    sizes = [size for size in range(1, len(ranks) + 1) if len(ranks) % size == 0]
    return "; ".join(
        ", ".join(str(ranks[start : start + size]) for start in range(0, len(ranks), size))
        for size in sizes
    )


# ---- ParametersInInit ----------------------------------------------------------------------------

_CACHE_BYTES = 16 << 20
_FREED_BYTES = 4 << 20
_PIECE_NUMEL = 1 << 20
_MAPPED_BYTES = 128 << 10


Put = Callable[[int, torch.Tensor], object]
"""Takes flat values of this rank's part of a parameter, from an element of the part on. They are
valid during the call."""


def into(out: torch.Tensor) -> Put:
    """Puts values into a flat tensor, cast to its dtype."""
    return lambda start, values: out[start : start + values.numel()].copy_(values)


class ParametersInInit:
    """Keeps the parameters of a model that is being built, until `shard` takes them.

    Each rank keeps its part of every parameter, in ordinary memory or on NVMe. The parameter itself
    sleeps: it shows NaN and takes no memory. Code that uses it wakes it (init.py sees the use).
    Before the awake parameters take more than 16 MiB, the oldest go back to sleep. Then, and when a
    parameter is admitted, rank 0's values are kept on every rank; other ranks' writes are dropped.
    This holds for parameters of every size.

    Peak memory: the parts, and the larger of 16 MiB and the parameters that one call of torch uses.

        admit --> asleep --wake--> awake --trim--> asleep          take_out, put_back: a GatheredParameters context holds it
        finish: building has ended, parameters rest (absent.py)    move_part: the model is sharded; the part is dropped here

    Args:
        policy: parts rest on NVMe if the policy's parameters do, else in ordinary memory.
            Parameters of at most `persistence_numel` elements always rest in memory.
        topology: which rank keeps which part.
        as_built: the settings of the context, for `shard`.
        pin_memory: parts that rest in memory are page-locked, where there is a GPU.
    """

    may_lend = False  # no forward of the model runs yet

    def __init__(
        self,
        policy: OffloadPolicy,
        topology: Topology,
        as_built: AsBuilt,
        pin_memory: bool,
    ) -> None:
        self.topology = topology
        self.as_built = as_built
        self._pins = pin_memory and torch.accelerator.is_available()
        self._small_numel = policy.persistence_numel
        self._store: TensorStore | None = None
        self._bounce: Bounce | None = None
        # receives pieces read on the way to a parameter's place
        self._piece: torch.Tensor | None = None
        if policy.params is Tier.NVME:
            self._store = TensorStore(
                paths_of_rank(policy.paths), 8 << 20, policy.io, policy.disk_bytes
            )
            self._bounce = Bounce(self._store)
            self._piece = torch.empty(
                _PIECE_NUMEL * 8, dtype=torch.uint8, device="cpu"
            )  # kept: new blocks fragment the heap
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # Parameter -> _Kept
        self._awake: collections.OrderedDict[int, nn.Parameter] = collections.OrderedDict()
        self._awake_bytes = 0
        self._freed_bytes = 0  # since the heap was last trimmed
        self._num_admitted = 0
        self._is_building = True
        # of `load_state_dict`, until the model is sharded
        self._handles: list[RemovableHandle] = []

    def admit(self, param: nn.Parameter) -> None:
        """Takes a parameter's values (rank 0's) and leaves NaN. Collective when there are several
        ranks; blocks."""
        value = param.detach()
        if self.topology.group is not None and not value.is_meta:
            number = f"parameter number {self._num_admitted}"
            agree(
                self.topology,
                {number: f"{tuple(value.shape)} {value.dtype}"},
                f"{number} under zero.Init",
            )
            value = self._of_rank_0(value)
        self._num_admitted += 1
        kept = _Kept(f"init/{self._num_admitted}")
        self._kept[param] = kept
        self._put(kept, value)
        registry.register(param, self)
        part_numel = self.share_of(value.numel())
        part = absent_part((part_numel,), value.dtype)
        describe(param, self._num_admitted, value.shape, part, ZeroParamStatus.NOT_AVAILABLE)
        weakref.finalize(param, self._forget, kept)
        # the last name of the values but the parameter: `_sleep` frees them, then trims the heap
        del value
        self._sleep(param)

    def admit_new(self, params: Iterable[nn.Parameter]) -> None:
        """Admits parameters of any module that have no owner, also after building. Collective;
        blocks."""
        fresh = [param for param in params if registry.owner_of(param) is None]
        for param in fresh:
            self.admit(param)
        if not self._is_building:
            absent.rest(fresh)

    def wake(self, param: nn.Parameter, is_overwritten: bool = False) -> None:
        """Brings a parameter's values back for code that uses it, until `trim` puts it to sleep.
        Collective; blocks.

        is_overwritten: the code sets `data` to another tensor, so the values are not brought back.
        """
        kept = self._kept.get(param)
        if kept is None or registry.is_gathered(param):
            return
        if id(param) in self._awake:
            self._awake.move_to_end(id(param))
            return
        if not is_overwritten:
            param.data = self._get(kept).to(param.device, kept.dtype).view(kept.shape)
        self._awake[id(param)] = param
        mark((param,), ZeroParamStatus.AVAILABLE)
        self._awake_bytes += kept.whole_bytes

    def is_asleep(self, param: nn.Parameter) -> bool:
        """Whether a parameter is kept here and shows NaN."""
        return (
            param in self._kept and not registry.is_gathered(param) and id(param) not in self._awake
        )

    def make_room(self, params: Iterable[torch.Tensor]) -> None:
        """Before parameters are woken together: puts the oldest awake ones to sleep, until all take
        16 MiB at most."""
        asleep = [
            self._kept[param]
            for param in params
            if param in self._kept and id(param) not in self._awake
        ]
        self.trim(_CACHE_BYTES - sum(kept.whole_bytes for kept in asleep))

    def trim(self, keep_bytes: int) -> None:
        """Puts the oldest awake parameters to sleep, with their values written back, until the
        others take <= keep_bytes."""
        while self._awake and self._awake_bytes > keep_bytes:
            param = next(iter(self._awake.values()))
            self._write_back(param)
            self._sleep(param)

    def _write_back(self, param: nn.Parameter) -> None:
        """Keeps rank 0's values of an awake parameter, which then counts as asleep."""
        if self._awake.pop(id(param), None) is not None:
            self._awake_bytes -= self._kept[param].whole_bytes
            self.write(param, param.detach())

    def write(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Replaces a parameter's values by those that rank 0 gives. Collective when there are
        several ranks; blocks."""
        self._put(self._kept[param], self._of_rank_0(value))

    def _of_rank_0(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor whose part that this rank keeps has rank 0's values. Collective when there are
        several ranks; blocks."""
        if self.topology.group is None or value.is_meta or value.numel() == 0:
            return value
        value = value.contiguous()
        value = sendable(self.topology, value)
        share_parts(self.topology, value, self._parts, "sharing initial values")
        return value

    @functools.cached_property
    def _parts(self) -> list[int]:
        """The part that each rank keeps, in the order of ranks. Collective the first time;
        blocks."""
        return exchange(self.topology, self.topology.shard_rank)

    def finish(self, dtype: torch.dtype | None, modules: Iterable[nn.Module]) -> None:
        """Ends building: all parameters sleep and show the dtype that they will have.

        modules: whose `load_state_dict` fills parameters until the model is sharded; every rank
            gives all values.
        """
        loads = StateDicts(self.whole, self._load)
        self._handles = [loads.watch_loads(module) for module in modules]
        self.trim(keep_bytes=-1)
        for param in list(self._kept.keys()):
            if dtype is not None and param.dtype.is_floating_point:
                param.data = absent_part(param.shape, dtype, param.device)
        self._is_building = False
        absent.rest(self._kept.keys())
        trim_heap()

    def discard(self) -> None:
        """Ends building after an error: closes the store on NVMe."""
        if self._store is not None:
            self._store.close()

    def share_of(self, numel: int) -> int:
        """Elements of each rank's part of a parameter of `numel` elements, with its padding."""
        return -(-numel // self.topology.num_shards)

    def move_part(self, param: nn.Parameter, put: Put | None) -> None:
        """Hands this rank's part of a parameter (flat, without padding) to `put`, and forgets it.

        put: called with pieces, in order, so no copy of the whole part is made; None: nothing is
            handed over. Blocks; raises
        OSError.
        """
        kept = self._kept.pop(param)
        absent.part_with([param])
        if put is not None and kept.part is not None:
            put(0, kept.part)
        elif put is not None:
            self._read_pieces(kept, put)
        self._forget(kept)
        registry.unregister(param)
        if self._kept:
            return
        while self._handles:
            self._handles.pop().remove()
        if self._store is not None:
            self._store.close()

    def lend(self, params: list[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function while parameters hold copies of their values. Blocks.

        Raises RuntimeError on several ranks, unless a zero.Init is open, in which every rank makes
        the same calls.
        """
        if self.topology.world > 1 and not registry.is_building():
            absent.refuse_read(params[0], self.topology.world)
        make = functools.partial(func, *args, **kwargs)
        with absent.copies(self, params):
            return absent.without_loans(make(), params, make)

    def replace(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Replaces a parameter's values; every rank gives the whole tensor. Blocks."""
        self._put(self._kept[param], value)

    def _load(self, param: nn.Parameter, value: torch.Tensor) -> None:
        if registry.is_gathered(param):  # its context decides which rank's values are kept
            call_with_grad(False, param.copy_, value)
        else:
            self.replace(param, value.to(self._kept[param].dtype))

    def take_out(self, param: nn.Parameter) -> None:
        """Gives a parameter its whole values until `put_back`. Collective when there are several
        ranks; blocks."""
        kept = self._kept[param]
        shown = param.dtype
        self._write_back(param)  # keeps changes made while it was awake
        absent.part_with([param])
        # its changes may be dropped
        param.data = self._get(kept).to(param.device, shown, copy=True).view(kept.shape)
        mark((param,), ZeroParamStatus.AVAILABLE)

    def put_back(self, param: nn.Parameter) -> None:
        """Ends a `take_out`: the parameter sleeps. Changes are dropped, unless `replace` was
        called."""
        self._sleep(param)
        if not self._is_building:
            absent.rest([param])

    def whole(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of a parameter's values as built. Collective when there are several ranks;
        blocks."""
        kept = self._kept[param]
        return self._get(kept).view(kept.shape)

    def _sleep(self, param: nn.Parameter) -> None:
        """Sets a parameter's data to NaN. The C library keeps freed blocks, so the heap is trimmed
        every 4 MiB."""
        self._freed_bytes += param.nbytes
        with torch._C.DisableTorchFunction():
            device = "cpu" if param.is_meta else param.device
            become(param, absent_part(param.shape, param.dtype, device))
        mark((param,), ZeroParamStatus.NOT_AVAILABLE)
        if self._freed_bytes >= _FREED_BYTES:
            self._freed_bytes = 0
            trim_heap()

    # ---- one parameter ---------------------------------------------------------------------------

    def _put(self, kept: _Kept, value: torch.Tensor) -> None:
        part_numel = self.share_of(value.numel())
        first = part_numel * self.topology.shard_rank
        if value.dtype != kept.dtype or value.shape != kept.shape:
            self._forget(kept)
        kept.dtype = value.dtype
        kept.shape = value.shape
        kept.num_values = max(0, min(part_numel, value.numel() - first))
        if value.is_meta:
            return
        mine = value.detach().reshape(-1)[first : first + kept.num_values].cpu()
        if self._store is None or value.numel() <= self._small_numel:
            self._keep_in_memory(kept, mine)
            return
        assert self._bounce is not None
        if kept.name not in self._store:
            self._store.reserve(kept.name, (kept.num_values,), kept.dtype, Tier.NVME)
        self._bounce.write(kept.name, 0, mine.contiguous().view(torch.uint8))
        kept.is_filled = True

    def _keep_in_memory(self, kept: _Kept, mine: torch.Tensor) -> None:
        """Copies a part into its place. On one rank a parameter that is awake shows the part
        itself; then nothing is copied."""
        if kept.part is not None and self.topology.num_shards > 1:
            kept.part.copy_(mine)
        elif kept.part is None or kept.part.data_ptr() != mine.data_ptr():
            kept.part = mine.clone().pin_memory() if self._pins else _mapped(mine)

    def _read_pieces(self, kept: _Kept, put: Put) -> None:
        if not kept.is_filled:
            raise RuntimeError(
                f"a parameter of shape {tuple(kept.shape)} was built on the meta device and never "
                "given values: load a checkpoint (tiermem.load_safetensors) before sharding"
            )
        assert self._bounce is not None and self._piece is not None and kept.dtype is not None
        size = kept.dtype.itemsize
        piece = self._piece[: _PIECE_NUMEL * size].view(kept.dtype)
        for start in range(0, kept.num_values, _PIECE_NUMEL):
            stop = min(start + _PIECE_NUMEL, kept.num_values)
            values = piece[: stop - start]
            self._bounce.read(kept.name, start * size, stop * size, values.view(torch.uint8))
            put(start, values)

    def _get(self, kept: _Kept) -> torch.Tensor:
        part = kept.part
        if part is None:
            part = torch.empty(kept.num_values, dtype=kept.dtype)
            self._read_pieces(kept, into(part))
        numel = kept.shape.numel()
        device = self.topology.control_device
        return assemble(
            self.topology, part, self.share_of(numel), device, "gathering initial values"
        )[:numel]

    def _forget(self, kept: _Kept) -> None:
        kept.part = None
        if self._store is not None and kept.name in self._store:
            self._store.drop(kept.name)
        kept.is_filled = False


def _mapped(values: torch.Tensor) -> torch.Tensor:
    """A copy of flat values on the CPU; if it is large, in a mapping of its own.

    Parts stay while whole parameters come and go. Among them in the C library's heap, parts would
    leave holes that only shorter blocks fit into.
    """
    if values.nbytes < _MAPPED_BYTES:
        return values.clone()
    held = mmap.mmap(-1, values.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(held, dtype=values.dtype).copy_(values)  # keeps the mapping


@dataclasses.dataclass(eq=False)
class _Kept:
    """One parameter: its dtype and shape as built, and this rank's part (in memory, or in the
    store)."""

    name: str
    dtype: torch.dtype | None = None
    shape: torch.Size = dataclasses.field(default_factory=torch.Size)
    num_values: int = 0
    part: torch.Tensor | None = None
    is_filled: bool = False

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.shape.numel() * (self.dtype.itemsize if self.dtype is not None else 0)
