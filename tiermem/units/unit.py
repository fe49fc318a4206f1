"""Unit: parameters that are fetched, gathered and released together, and their places in memory."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.policy import OffloadPolicy, Tier
from tiermem.precision import DTYPES
from tiermem.swap.base.ranges import round_up
from tiermem.units.compute import widened_dtype
from tiermem.units.experts import Fused, fused_experts
from tiermem.units.gradient_state import Gradient
from tiermem.units.leaf import UsedInPieces, apply_rules, has_forward, is_routed, z3_leaf_module
from tiermem.units.quantised import BLOCK, FORMATS, INT8, BlockFormat

# ---- lowered weights -----------------------------------------------------------------------------
#
# Under torch.autocast a Linear's fp32 weight is cast to bf16 in every forward, and autograd keeps
# the copy until backward. When the policy names the dtype (`gather_dtype`), each rank casts its
# fp32 part before the gather instead. Half the bytes cross ranks, the unit's buffer is half as
# large, and autograd keeps a view of that buffer, no copy. The values have the same bits. At rest
# the parameter is fp32 (as are masters, gradients and state dicts). While its unit is present, its
# dtype is the lower one.
#
# A parameter is lowered when it has a wider dtype and belongs only to modules of the classes that
# the policy names. A weight tied to an Embedding, which autocast does not lower, is not lowered.
# With one shard no weight is lowered: nothing is gathered, and weights are read straight into
# place.
#
# An *island* is such a module that runs outside that autocast after all. It computes with its
# parameters as they rest. They are gathered for that call, beside the unit, and autograd keeps the
# copy until backward.

logger = logging.getLogger("tiermem")


def lowered_parameters(
    model: nn.Module, policy: OffloadPolicy, num_shards: int
) -> dict[nn.Parameter, torch.dtype]:
    """The parameters that are gathered in a lower dtype than they rest in, each with that dtype."""
    if policy.gather_dtype is None or policy.stage != 3 or num_shards == 1:
        return {}
    if policy.quantised_gather or policy.frozen_blocks:
        return {}  # blocks cross ranks
    dtype = DTYPES[policy.gather_dtype]
    lowered = {
        p: dtype for m in _lowered_modules(model, policy) for p in m.parameters(recurse=False)
    }
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if type(module) not in policy.lowered_modules or param.dtype.itemsize <= dtype.itemsize:
                lowered.pop(param, None)
    return {p: dtype for p in lowered if p.dtype.is_floating_point}


def serve_islands(
    model: nn.Module,
    lowered: Iterable[nn.Parameter],
    policy: OffloadPolicy,
    device: torch.device,
    whole: Callable[[nn.Parameter], torch.Tensor],
) -> Iterator[RemovableHandle]:
    """Installs hooks on every module with lowered parameters; they serve its forward outside
    autocast. Yields their handles.

    whole: gathers a parameter's values as they rest. Collective; held weakly.
    """
    found = set(lowered)
    if not found or policy.gather_dtype is None:
        return
    islands = _Islands(found, device, DTYPES[policy.gather_dtype], whole)
    for module in _lowered_modules(model, policy):
        if not found.isdisjoint(module.parameters(recurse=False)):
            yield module.register_forward_pre_hook(islands.enter)
            yield module.register_forward_hook(islands.leave, always_call=True)


class _Islands:
    """Replaces lowered parameters during forwards outside the autocast for which they are
    lowered."""

    def __init__(
        self,
        lowered: set[nn.Parameter],
        device: torch.device,
        dtype: torch.dtype,
        whole: Callable[[nn.Parameter], torch.Tensor],
    ) -> None:
        self._lowered = lowered
        self._device = device
        self._dtype = dtype
        self._whole = weakref.WeakMethod(whole)
        self._replaced: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._has_warned = False

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before forward: outside autocast, replaces the module's parameters by their values as
        they rest."""
        kind = self._device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self._dtype:
            return
        whole = self._whole()
        if whole is None or module in self._replaced:
            return
        self._warn(module)
        own = {name: p for name, p in module.named_parameters(recurse=False) if p in self._lowered}
        self._replaced[module] = own
        for name, param in own.items():
            module._parameters[name] = cast(Any, InPlaceOf).apply(
                param, whole(param).to(self._device)
            )

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After forward, also one that raised: restores the parameters."""
        module._parameters.update(self._replaced.pop(module, {}))

    def _warn(self, module: nn.Module) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a %s runs outside torch.autocast(%r, %s), for which weights are gathered in that "
                "dtype: those of such modules "
                "are gathered a second time in every forward, as they rest, and kept until "
                "backward. In a config, "
                "lower_precision_safe_modules says which modules are gathered so",
                type(module).__name__,
                self._device.type,
                self._dtype,
            )


class InPlaceOf(torch.autograd.Function):
    """Gives a value in place of a tensor, and passes the value's gradient to the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _lowered_modules(model: nn.Module, policy: OffloadPolicy) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module) in policy.lowered_modules)


# ---- units ---------------------------------------------------------------------------------------
#
# A unit is a child of the outermost ModuleList. A child that is larger than its buffer is split at
# its inner modules, down to leaf modules (leaf.py) and tiles (tiled.py). Outside every ModuleList
# each module that owns parameters is a unit. Small parameters (and, below stage 3, all of them)
# form *resident* units, which stay present. Parameters of one unit share a dtype (and a lowered
# dtype), and are all trainable or all frozen when the model is sharded; all or none of the frozen
# ones rest in blocks. A unit becomes trainable as a whole when one of its parameters is unfrozen
# (run/next_plan.py). A parameter owned by two modules (tied weights) belongs to the first module's
# unit, and both modules then trigger that unit.
#
# There are two layouts, in elements. Every parameter begins at a multiple of ALIGN (64 bytes or
# more in every dtype):
#
#     full    as the maths sees it:   parameter i holds shards x ceil(numel / shards) elements, its own numel first
#     shard   this rank's part:       parameter i holds ceil(numel / shards) elements, flat row-major, zero-padded tail
#
# In units that rest in blocks, shards hold whole blocks: ceil(numel / shards) is rounded up to
# BLOCK elements. With one shard the two are the same, so a unit is read from disk straight into
# place. Both are padded to a multiple of UNIT_ALIGN elements, so a tile cut at such a multiple
# begins at a multiple of 4096 bytes in every dtype. A shard is one contiguous extent: one read.

ALIGN = 64  # elements
UNIT_ALIGN = 4096  # elements
_PAGE = 4096  # bytes


@dataclasses.dataclass(eq=False)
class Shard:
    """This rank's part of one parameter, and its place in its unit's two layouts (elements)."""

    name: str  # full name in the root module
    index: int  # position in named_parameters(): the order of reductions
    param: nn.Parameter
    shape: torch.Size
    numel: int
    shard_numel: int  # ceil(numel / shards)
    full_offset: int
    shard_offset: int
    # of its gradient's reduction; may be set before the first backward
    reduce_dtype: torch.dtype
    num_rows: int = 0  # fused experts that it holds, which may be fetched singly
    gradient: Gradient = dataclasses.field(default_factory=Gradient)
    num_steps: int = 0  # optimizer steps taken
    has_moments: bool = False  # moments were loaded before the first step, which then reads them
    has_master: bool = False  # a master was loaded before the first step

    def count_step(self) -> None:
        """Counts one more optimizer step."""
        self.num_steps += 1

    def set_steps(self, num_steps: int, has_moments: bool, has_master: bool) -> None:
        """Sets the number of steps that its restored states have seen.

        has_moments, has_master: whether moments and a master were restored; they matter before the
            first step.
        """
        self.num_steps = num_steps
        self.has_moments = has_moments and not num_steps
        self.has_master = has_master and not num_steps

    def note_loaded(self, moments: bool, master: bool = False) -> None:
        """Notes that moments or a master were set; this matters before the first step."""
        self.set_steps(self.num_steps, self.has_moments or moments, self.has_master or master)


def own_numel(shard: Shard, shard_rank: int) -> int:
    """Elements of a rank's share of a parameter, without its padding."""
    return min(shard.shard_numel, max(0, shard.numel - shard.shard_numel * shard_rank))


class ShardRange(NamedTuple):
    """Elements [start, stop) of a rank's share of a parameter, or of every rank's share."""

    shard: Shard
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of one rank."""
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        """Whether the share ends with it."""
        return self.stop == self.shard.shard_numel

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole share, so that the ranges of all ranks are contiguous in the full
        layout."""
        return self.numel == self.shard.shard_numel

    @property
    def in_unit(self) -> slice:
        """Its place in the unit's shard layout."""
        return slice(self.shard.shard_offset + self.start, self.shard.shard_offset + self.stop)

    def in_full(self, rank: int) -> slice:
        """The place of a rank's elements in the unit's full layout."""
        first = self.shard.full_offset + rank * self.shard.shard_numel
        return slice(first + self.start, first + self.stop)

    def first_element(self, rank: int) -> int:
        """The index in the whole parameter of a rank's first element."""
        return self.shard.shard_numel * rank + self.start

    def cut(self, most_numel: int, num_before: int = 0) -> Iterator[ShardRange]:
        """The same elements in ranges of at most `most_numel`, cut at its multiples, where
        `num_before` elements lie before the first one."""
        for start in range(self.start - num_before % most_numel, self.stop, most_numel):
            yield self._replace(
                start=max(start, self.start), stop=min(start + most_numel, self.stop)
            )


@dataclasses.dataclass(eq=False)
class Unit:
    """Parameters that are fetched, gathered and released together. Its layout is fixed. It can
    become trainable."""

    name: str
    index: int
    shards: list[Shard]
    dtype: torch.dtype
    is_trainable: bool  # has room for gradients and optimizer states
    is_resident: bool  # always present: its full layout is never released
    full_numel: int
    shard_numel: int
    # of the full layout; another than dtype when parts are cast before the gather, or widened
    full_dtype: torch.dtype
    is_leaf: bool = False  # the unit of a leaf module
    # its shard rests in such blocks (quantised.py), and is sent as such
    blocks: BlockFormat | None = None
    was_unfrozen: bool = False  # became trainable after the model was sharded
    # used where it rests, and absent between uses, so that a step can go on meanwhile
    is_in_place: bool = False

    def unfreeze(self) -> None:
        """Makes it trainable; it has room for gradients and states now."""
        self.is_trainable = self.was_unfrozen = True

    def use_in_place(self, is_in_place: bool) -> None:
        """Sets whether it is used where it rests."""
        self.is_in_place = is_in_place
        vars(self).pop("takes_buffer", None)

    @functools.cached_property
    def takes_buffer(self) -> bool:
        """Whether a fetch fills a buffer with it. Not if it is always present, or used where it
        rests."""
        return not (self.is_resident or self.is_in_place)

    @property
    def full_bytes(self) -> int:
        """Bytes of the full layout."""
        return self.full_numel * self.full_dtype.itemsize

    @functools.cached_property
    def is_widened(self) -> bool:
        """Whether the maths sees a wider dtype than rests and travels (compute.py)."""
        return self.full_dtype.itemsize > self.dtype.itemsize

    @property
    def travels_as(self) -> torch.dtype:
        """The dtype in which its parts cross ranks."""
        return self.dtype if self.is_widened else self.full_dtype

    @property
    def is_packed(self) -> bool:
        """Whether its shard rests in blocks."""
        return self.blocks is not None

    @property
    def packed_numel(self) -> int:
        """Elements of the shard layout up to the end of the last parameter's blocks: the elements
        that are packed."""
        last = self.shards[-1]
        return last.shard_offset + round_up(last.shard_numel, ALIGN)

    @property
    def packed_bytes(self) -> int:
        """Bytes of a rank's blocks: of those in which it rests, or of the 8-bit ones in which it
        may cross ranks."""
        return (self.blocks or INT8).packed_bytes(self.packed_numel)

    @property
    def rests_as(self) -> torch.dtype:
        """The dtype of this rank's part at rest."""
        return torch.uint8 if self.is_packed else self.dtype

    @property
    def entry(self) -> str:
        """The name of its shard in the store, if the shard is there."""
        return f"param/{self.index}/{self.name}"

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's part at rest."""
        if self.is_packed:
            return round_up(self.packed_bytes, _PAGE)
        return self.shard_numel * self.dtype.itemsize


def ranges_in(unit: Unit, span: slice | None, shard_rank: int | None = None) -> list[ShardRange]:
    """The elements of a unit's parameters that a span of its shard layout holds, in its order;
    None: the whole layout.

    shard_rank: the rank whose elements are meant, without padding; None: every rank's share, with
        padding.
    """
    start, stop = (span.start, span.stop) if span is not None else (0, unit.shard_numel)
    found: list[ShardRange] = []
    for shard in unit.shards:
        numel = shard.shard_numel if shard_rank is None else own_numel(shard, shard_rank)
        first = max(0, start - shard.shard_offset)
        last = min(numel, stop - shard.shard_offset)
        if first < last:
            found.append(ShardRange(shard, first, last))
    return found


@dataclasses.dataclass(frozen=True)
class Division:
    """A model divided into units."""

    units: list[Unit]
    # modules whose forward needs units, in the order of the model, with the units' indices
    triggers: dict[nn.Module, list[int]]
    # most streamed units that a module needs, together with the modules around it
    most_at_once: int
    layouts: Sequence[int]  # of each unit the number of its layout: equal ones have equal sizes

    def counted(self, homes: Mapping[int, Tier]) -> list[tuple[Unit, int]]:
        """A unit of each kind, and how many units are of that kind: of one layout and home, and
        equally trained and kept. Sizes of all units are sums over these."""
        found = defaultdict[Hashable, list[Unit]](list)
        for unit, layout in zip(self.units, self.layouts, strict=True):
            kept = unit.is_resident, unit.is_in_place, homes.get(unit.index)
            kind = layout, unit.is_trainable, unit.was_unfrozen, *kept
            found[kind].append(unit)
        return [(alike[0], len(alike)) for alike in found.values()]

    def with_changed(self, indices: Collection[int], **fields: Any) -> Division:
        """The same division, with these fields of some units changed."""
        return self.with_units(
            {index: dataclasses.replace(self.units[index], **fields) for index in indices}
        )

    def with_units(self, changed: Mapping[int, Unit]) -> Division:
        """The same division, with other units at these indices."""
        units = [changed.get(unit.index, unit) for unit in self.units]
        return dataclasses.replace(self, units=units)

    def order(self, counts: Callable[[nn.Module], bool] = lambda module: True) -> list[Unit]:
        """The streamed units in the order of definition of their modules; `counts` selects
        modules."""
        seen: dict[int, None] = {}
        for module, needed in self.triggers.items():
            if counts(module):
                seen.update(dict.fromkeys(needed))
        return [self.units[index] for index in seen if not self.units[index].is_resident]


_HOOKS_OF_A_MODULE = 1  # the number that hooks.py installs before a forward, and after it


def reads_weights_again(module: nn.Module) -> bool:
    """Whether a module's backward may read its weights: True, except for a plain Embedding without
    the user's hooks.

    A user's hook may use the weights in any way.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return type(module) is not nn.Embedding or any(len(each) > _HOOKS_OF_A_MODULE for each in hooks)


def divide(
    model: nn.Module, policy: OffloadPolicy, num_shards: int, is_trained: bool = True
) -> Division:
    """Divides a model's parameters into units.

    Raises ValueError when a module with parameters of its own is larger than `policy.unit_numel`,
    naming it, and for a model that is marked as a leaf and has no forward.
    """
    apply_rules(model, policy.leaves)
    if z3_leaf_module(model) and not has_forward(model):
        raise ValueError(
            f"the model is a leaf, but a {type(model).__name__} has no forward that would fetch "
            "it: mark the modules in it"
        )
    names = {param: (i, name) for i, (name, param) in enumerate(model.named_parameters())}
    persistent = _persistent(model, policy)
    form = FORMATS.get(policy.frozen_blocks or "")
    seen_as = lowered_parameters(model, policy, num_shards) or _widened_parameters(model, policy)
    # other ranks' tokens choose other rows, and a fetch is collective
    fused = fused_experts(model) if num_shards == 1 else {}
    units: list[Unit] = []
    triggers: dict[nn.Module, list[int]] = {}
    owners: dict[nn.Parameter, int] = {}
    small: dict[nn.Parameter, None] = {}  # a set that keeps its order
    limit = 0 if policy.gather_way == "single" else policy.unit_numel
    for name, module, params, is_leaf in _groups(model, limit, persistent, num_shards):
        needed = dict.fromkeys(owners[p] for p in params if p in owners)
        fresh = [p for p in params if p not in owners and p not in persistent]
        for kind, alike in _by_kind(fresh, is_trained, seen_as, form).items():
            unit = _lay_out(
                name, len(units), alike, names, kind, policy, num_shards, is_leaf, fused
            )
            _check_size(unit, policy)
            units.append(unit)
            owners.update(dict.fromkeys(alike, unit.index))
            needed[unit.index] = None
        small.update(dict.fromkeys(p for p in params if p in persistent))
        if needed:
            triggers.setdefault(module, []).extend(needed)
    for kind, alike in _by_kind(list(small), is_trained, {}, None).items():
        unit = _lay_out("persistent", len(units), alike, names, kind, policy, num_shards)
        units.append(dataclasses.replace(unit, is_resident=True))
    numbers: dict[Hashable, int] = {}
    layouts = [numbers.setdefault(_layout_of(unit), len(numbers)) for unit in units]
    return Division(units, triggers, _most_at_once(model, triggers, units), layouts)


def _layout_of(unit: Unit) -> Hashable:
    """All that a unit's sizes follow from, but for what may change."""
    shards = [(s.numel, s.shard_numel, s.shard_offset, s.reduce_dtype) for s in unit.shards]
    formats = unit.dtype, unit.full_dtype, unit.blocks
    return unit.full_numel, unit.shard_numel, *formats, *shards


def _most_at_once(
    model: nn.Module, triggers: Mapping[nn.Module, list[int]], units: Sequence[Unit]
) -> int:
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, held: frozenset[int]) -> int:
        if module in seen:
            return 0
        seen.add(module)
        held |= {index for index in triggers.get(module, []) if not units[index].is_resident}
        return max([len(held), *(visit(child, held) for child in module.children())])

    return visit(model, frozenset())


class _Group(NamedTuple):
    """Parameters that are fetched together, in one or more units."""

    name: str
    module: nn.Module  # its forward needs them
    params: list[nn.Parameter]
    is_leaf: bool


def _groups(
    model: nn.Module, limit: int | None, persistent: set[nn.Parameter], num_shards: int
) -> Iterator[_Group]:
    """Every group: whole subtrees where they fit, elsewhere a module's own parameters.

    The group's module has a forward. Parameters in a bare container (ModuleList, ParameterList)
    belong to the module around it.
    """
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module, runs: nn.Module, is_listed: bool) -> Iterator[_Group]:
        if module in seen:
            return
        seen.add(module)
        params = list(module.parameters())
        fits = limit is None or sum(p.numel() for p in params if p not in persistent) <= limit
        holds_list = any(isinstance(m, nn.ModuleList) and len(m) > 0 for m in module.modules())
        is_block = is_listed and not is_stage(module)
        is_whole = fits and not _must_split(module, num_shards) and (is_block or not holds_list)
        # One unit of any size: marked as a leaf, or several ranks could run different children.
        is_leaf = z3_leaf_module(module) or (num_shards > 1 and is_routed(module))
        runs = module if has_forward(module) else runs
        if is_leaf or (module is not model and is_whole and runs is module):
            yield _Group(name or "root", runs, params, is_leaf)
            return
        own = list(module.parameters(recurse=False))
        if own:
            yield _Group(name or "root", runs, own, False)
        is_listed = is_listed or isinstance(module, nn.ModuleList)
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child, runs, is_listed)

    yield from visit("", model, model, False)


def is_stage(module: nn.Module) -> bool:
    """Whether a module of a list is itself a row of blocks, such as a UNet's: several modules in
    lists of its own have nearly all of its parameters, and none most of them."""
    lists = (child for child in module.children() if isinstance(child, nn.ModuleList))
    sizes = [sum(p.numel() for p in block.parameters()) for each in lists for block in each]
    whole = sum(p.numel() for p in module.parameters())
    return len(sizes) > 3 and sum(sizes) > 0.8 * whole and max(sizes) < 0.5 * whole


def _must_split(module: nn.Module, num_shards: int) -> bool:
    """Whether a module holds modules whose children are units: tiles, and on one rank the experts
    behind a router."""
    return any(
        isinstance(m, UsedInPieces) or (num_shards == 1 and is_routed(m) and not z3_leaf_module(m))
        for m in module.modules()
    )


def _widened_parameters(model: nn.Module, policy: OffloadPolicy) -> dict[nn.Parameter, torch.dtype]:
    """The parameters that the maths sees in a wider dtype than they rest in, each with that
    dtype."""
    dtypes = {param: widened_dtype(param, policy) for param in model.parameters()}
    return {param: dtype for param, dtype in dtypes.items() if dtype is not param.dtype}


def _persistent(model: nn.Module, policy: OffloadPolicy) -> set[nn.Parameter]:
    """Parameters small enough to stay gathered, smallest first, within the bound for the whole
    model.

    A parameter that is widened for the maths is not among them: at rest it is seen as it rests.
    """
    if policy.stage != 3:
        return set()
    params = [param for param in model.parameters() if widened_dtype(param, policy) is param.dtype]
    small = sorted(
        (p for p in params if p.numel() <= policy.persistence_numel), key=lambda p: p.numel()
    )
    room = math.inf if policy.model_persistence_numel is None else policy.model_persistence_numel
    chosen: set[nn.Parameter] = set()
    for param in small:
        room -= param.numel()
        if room < 0:
            break
        chosen.add(param)
    return chosen


class _Kind(NamedTuple):
    """The properties that all parameters of a unit share."""

    dtype: torch.dtype
    is_trainable: bool
    full_dtype: torch.dtype
    blocks: BlockFormat | None


def _by_kind(
    params: list[nn.Parameter],
    is_trained: bool,
    seen_as: Mapping[nn.Parameter, torch.dtype],
    form: BlockFormat | None,
) -> dict[_Kind, list[nn.Parameter]]:
    kinds = defaultdict[_Kind, list[nn.Parameter]](list)
    for param in dict.fromkeys(params):
        is_trainable = param.requires_grad and is_trained
        has_blocks = not is_trainable and param.dim() > 1 and param.dtype.is_floating_point
        kind = _Kind(
            param.dtype, is_trainable, seen_as.get(param, param.dtype), form if has_blocks else None
        )
        kinds[kind].append(param)
    return kinds


def _lay_out(
    name: str,
    index: int,
    params: list[nn.Parameter],
    names: dict[nn.Parameter, tuple[int, str]],
    kind: _Kind,
    policy: OffloadPolicy,
    num_shards: int,
    is_leaf: bool = False,
    fused: Mapping[nn.Parameter, Fused] | None = None,
) -> Unit:
    dtype, is_trainable, full_dtype, blocks = kind
    reduce_dtype = DTYPES[policy.reduce_dtype] if policy.reduce_dtype is not None else dtype
    shards: list[Shard] = []
    rows = {p: fused[p] for p in params if fused and p in fused and blocks is None}
    if len({each.module for each in rows.values()}) > 1:
        rows = {}  # a row's number says too little
    full = part = 0
    for param in params:
        position, full_name = names[param]
        # so ranks cut no block
        share = round_up(-(-param.numel() // num_shards), BLOCK if blocks else 1)
        align = UNIT_ALIGN if param in rows else ALIGN  # rows begin with a page, if they are pages
        full = round_up(full, align)
        part = round_up(part, align)
        shards.append(
            Shard(
                full_name,
                position,
                param,
                param.shape,
                param.numel(),
                share,
                full,
                part,
                reduce_dtype,
                rows[param].num_rows if param in rows else 0,
            )
        )
        full += round_up(share * num_shards, align)
        part += round_up(share, align)
    full = round_up(max(full, 1), UNIT_ALIGN)
    part = round_up(max(part, 1), UNIT_ALIGN)
    is_resident = policy.stage != 3
    return Unit(
        name,
        index,
        shards,
        dtype,
        is_trainable,
        is_resident,
        full,
        part,
        full_dtype,
        is_leaf,
        blocks,
    )


def _check_size(unit: Unit, policy: OffloadPolicy) -> None:
    numel = sum(shard.numel for shard in unit.shards)
    if policy.unit_numel is None or numel <= policy.unit_numel or policy.stage != 3:
        return
    why = "has no inner module to split it at"
    instead = ", or replace its Linear by tiermem.zero.TiledLinear"
    if unit.is_leaf:
        why = (
            "is a leaf module, fetched as one because which of its children run may differ "
            "between ranks"
        )
        instead = ""
    raise ValueError(
        f"unit {unit.name!r} holds {numel} elements, more than the {policy.unit_numel} of one "
        "parameter buffer "
        f"(unit_numel; buffer_size in a config), and {why}. Raise the buffer's size{instead}"
    )
