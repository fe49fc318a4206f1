"""Capture: the elements of states that this rank saves, and their places now.

    weights    this rank's shard of every parameter, where its unit rests       only ranks of replica 0
    states     master and moments, tile by tile                                 only ranks of replica 0
    own        buffers, and ordinary parameters with their states               rank 0; other ranks if their values differ

Without an optimizer only weights and buffers are saved: a master begins anew as the weight.
Ordinary parameters are those that the optimizer steps beside the sharded model. A master is saved
if it is kept beside the weight. Before the first step it is saved only if it was made from the fp32
values that zero.Init saw. A parameter that was neither stepped nor loaded has no states; the reader
takes them as zeros. Gradients are not saved.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.fields import Json, encode
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT, Parameter
from tiermem.checkpoint.saving.pieces import CHUNK_BYTES, Resting, Stretch, in_memory
from tiermem.optim import ordinary
from tiermem.optim.tile import Tile
from tiermem.optim.tiles import StateTiles, tiles_of
from tiermem.policy import Tier
from tiermem.run.shards import Shards
from tiermem.units import registry
from tiermem.units.unit import Shard, ShardRange
from tiermem.weights.unit_state import LiveUnit
from tiermem.weights.values import initial_master
from tiermem.weights_io import names_of, saved_buffers

if TYPE_CHECKING:
    from tiermem.optim.base import NativeOptimizer


logger = logging.getLogger("tiermem")


def parameters(
    shards: Shards, optimizer: NativeOptimizer | None, exclude_frozen: bool
) -> tuple[list[Parameter], list[str]]:
    """Every tensor that is saved, in the order of the model, and the names of frozen parameters
    that are left out."""
    groups = {
        id(p): i
        for i, g in enumerate(optimizer.param_groups if optimizer else ())
        for p in g["params"]
    }
    aliases = names_of(shards.model)
    found = []
    excluded = []
    for live, shard in sorted(shards.parameters(), key=lambda each: each[1].index):
        if exclude_frozen and not shard.param.requires_grad:
            excluded.append(shard.name)
            continue
        names = tuple(name for name in aliases[id(shard.param)] if name != shard.name)
        form = live.unit.blocks
        found.append(
            Parameter(
                shard.name,
                names,
                "parameter",
                tuple(shard.shape),
                kinds.name_of(live.unit.dtype),
                shard.param.requires_grad,
                shard.num_steps if optimizer else 0,
                groups.get(id(shard.param)),
                None if form is None else form.name,
            )
        )
    for (name, *others), buffer in buffers(shards.model):
        dtype = kinds.name_of(buffer.dtype)
        found.append(
            Parameter(name, tuple(others), "buffer", tuple(buffer.shape), dtype, False, 0, None)
        )
    if optimizer is None:
        return found, excluded
    for name, param in optimizer.named():
        owner = registry.owner_of(param)
        if isinstance(owner, Shards) and owner is not shards:
            raise ValueError(
                f"parameter {name!r} is of another sharded model: save each with an optimizer of "
                "its own"
            )
    for name, param in ordinary_of(optimizer).items():
        steps = int(optimizer.state.get(param, {}).get(ordinary.STEP, 0))
        found.append(
            Parameter(
                name,
                (),
                "ordinary",
                tuple(param.shape),
                kinds.name_of(param.dtype),
                param.requires_grad,
                steps,
                groups[id(param)],
            )
        )
    return found, excluded


def buffers(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Persistent buffers, each with all its names, in the order of the model."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, buffer in saved_buffers(model):
        found.setdefault(id(buffer), ([], buffer))[0].append(name)
    return list(found.values())


_told = weakref.WeakSet[nn.Module]()
"""Modules whose extra state a warning has named."""


def extra_states(model: nn.Module) -> dict[str, Json]:
    """The extra state of every module that has one, by its name in a state dict.

    A warning, one for a module, names one that a part cannot hold; the save lacks it.
    """
    found = {}
    for name, module in modules_with_extra(model).items():
        state = module.get_extra_state()
        try:
            found[name] = encode(state, name)
        except TypeError as error:
            if module not in _told:
                logger.warning("%s. The save lacks it", error)
            _told.add(module)
    return found


def modules_with_extra(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have an extra state, by its name in a state dict."""
    return {
        f"{name}._extra_state".removeprefix("."): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


class Captures:
    """Finds the weights and states that this rank saves. The stretches on NVMe are put into arrays
    once, and again after a state has moved between tiers, after a tile's first step, or for other
    names."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._seen: tuple[object, ...] = ()
        self._resting = Resting([])

    def take(self, names: Sequence[str], has_states: bool) -> tuple[Resting, list[Stretch]]:
        """The stretches of the named parameters on NVMe, and those in memory. Reads no bytes; does
        not block."""
        seen = has_states, *_what_decides(self._shards, names)
        on_nvme, in_memory = (
            stretches(self._shards, frozenset(names), each, has_states) for each in (True, False)
        )
        if seen != self._seen:
            self._resting = Resting(on_nvme)
            self._seen = seen
        return self._resting, list(in_memory)


def own(shards: Shards, optimizer: NativeOptimizer | None) -> Iterator[Stretch]:
    """The states that every rank holds whole: ordinary parameters and their states, and copies of
    buffers.

    A forward may change a buffer before it is written.
    """
    held = {names[0]: buffer.clone() for names, buffer in buffers(shards.model)}
    if optimizer is not None:
        held |= ordinary_of(optimizer)
    for name, tensor in held.items():
        if not tensor.numel():
            continue
        yield Stretch(
            name, WEIGHT, kinds.name_of(tensor.dtype), 0, tensor.numel(), 0, (in_memory(tensor), 0)
        )
        states = optimizer.whole_state(tensor) if optimizer is not None else {}
        for key, value in states.items():
            if key != ordinary.STEP:
                state, kind = _ordinary_kind(key, value, states)
                yield Stretch(name, state, kind, 0, tensor.numel(), 0, (in_memory(value), 0))


# ---- sharded states ------------------------------------------------------------------------------


def _what_decides(shards: Shards, names: Sequence[str]) -> tuple[object, ...]:
    """A value that changes when the stretches on NVMe change."""
    units = tuple(
        (live.entry, live.unit.is_packed, live.unit.is_trainable) for live in shards.units
    )
    tiles = tiles_of(shards)
    if tiles is None:
        return tuple(names), units
    moments = tuple(
        tiles.names(shard) for live, shard in shards.parameters() if live.unit.is_trainable
    )
    on_nvme = tuple(
        (tile.entry, tile.is_started) for tile in tiles.tiles if tile.state_home is Tier.NVME
    )
    return tuple(names), units, tiles, on_nvme, moments


def stretches(
    shards: Shards, names: frozenset[str], is_on_nvme: bool, has_states: bool = True
) -> Iterator[Stretch]:
    """The stretches of the named parameters on NVMe, or those in memory. Reads no bytes; does not
    block.

    has_states: masters and moments too.
    """
    if shards.topology.replica:  # a rank of replica 0 saves the same elements
        return
    states_of = functools.cache(functools.partial(_states_of, shards))
    weights_of = functools.cache(_weights_of)
    for live, shard in shards.parameters():
        if shard.name in names and (numel := shards.values.num_mine(shard)):
            if (live.entry is not None) == is_on_nvme:
                whole = ShardRange(shard, 0, numel)
                yield from _cut(shards, whole, weights_of(live), shard.shard_offset)
            if has_states and shards.states is not None and live.unit.is_trainable:
                yield from _states(shards, live, shard, states_of, is_on_nvme)


class _StatePlace(NamedTuple):
    """A state of a unit's shard or of a tile, and where its first byte lies."""

    state: str
    kind: str
    holder: str | torch.Tensor
    offset: int


def _weights_of(live: LiveUnit) -> Sequence[_StatePlace]:
    """The weights of a unit's shard; of one that rests in blocks the codes, then the scales."""
    unit = live.unit
    holder: str | torch.Tensor = live.entry or ""
    if live.entry is None and live.shard is not None:
        holder = in_memory(live.shard)
    if unit.blocks is None:
        return [_StatePlace(WEIGHT, kinds.name_of(unit.dtype), holder, 0)]
    scales = unit.blocks.code_bytes(unit.packed_numel)
    return [
        _StatePlace(WEIGHT, kinds.AT_REST[unit.blocks.name], holder, 0),
        _StatePlace(WEIGHT + kinds.SCALES, kinds.PACKED_SCALES, holder, scales),
    ]


def _states_of(shards: Shards, tile: Tile, names: tuple[str, ...]) -> Sequence[_StatePlace]:
    """Every state of a tile; of an 8-bit state its codes, then its scales. Plain SGD of fp32
    parameters has none."""
    if not tile.state_bytes:
        return []
    layout = tile.layout
    found = list[_StatePlace]()
    holder = (
        tile.entry if tile.state_home is Tier.NVME else in_memory(shards.store.view(tile.entry))
    )
    master = [] if layout.master is None else [(layout.master, MASTER)]
    for part, state in [
        *master,
        *((layout.moment(number), name) for number, name in enumerate(names)),
    ]:
        codes, *scales = layout.ranges(part, tile.numel, 0, tile.numel)
        found.append(_StatePlace(state, part.kind, holder, codes.offset))
        found += [
            _StatePlace(state + kinds.SCALES, kinds.CODE_SCALES, holder, each.offset)
            for each in scales
        ]
    return found


def _cut(
    shards: Shards, elements: ShardRange, places: Sequence[_StatePlace], in_place: int
) -> Iterator[Stretch]:
    """Elements of this rank's share in every state of these places, from element `in_place` of
    each."""
    shard = elements.shard
    rank = shards.topology.shard_rank
    first = elements.first_element(rank)
    for state, kind, holder, offset in places:
        before = kinds.bytes_of(kind, first)
        if kind in kinds.OF_SCALES:  # their blocks of 64 start anew on each rank
            before = rank * kinds.bytes_of(kind, shard.shard_numel)
            before += kinds.bytes_of(kind, elements.start)
        place = holder, offset + kinds.bytes_of(kind, in_place)
        yield Stretch(shard.name, state, kind, first, elements.numel, before, place)


def _states(
    shards: Shards, live: LiveUnit, shard: Shard, states_of: Any, is_on_nvme: bool
) -> Iterator[Stretch]:
    tiles = tiles_of(shards)
    assert tiles is not None
    pieces = tiles.pieces(shard)
    if not all(tile.is_started for tile, _ in pieces):
        if (
            not is_on_nvme
            and initial_master(live.unit) in shards.store
            and pieces[0][0].layout.master is not None
        ):
            for tile, elements in pieces:
                yield _initial(tiles, tile, elements, shards.topology.shard_rank)
        return
    names = tiles.names(shard)
    for tile, elements in pieces:
        if (tile.state_home is Tier.NVME) == is_on_nvme:
            in_tile = tile.slice_of(elements).start
            yield from _cut(shards, elements, states_of(tile, names), in_tile)


def _initial(tiles: StateTiles, tile: Tile, elements: ShardRange, rank: int) -> Stretch:
    """A master that does not exist yet, as the first step would make it: in fp32."""
    first = elements.first_element(rank)

    def chunks() -> Iterator[torch.Tensor]:
        for chunk in elements.cut(CHUNK_BYTES // 4):
            yield tiles.piece(tile, chunk, MASTER).view(torch.uint8)

    return Stretch(elements.shard.name, MASTER, "fp32", first, elements.numel, first * 4, chunks)


# ---- states that every rank holds whole ----------------------------------------------------------


def ordinary_of(optimizer: NativeOptimizer) -> dict[str, nn.Parameter]:
    """The ordinary parameters by their names in a manifest: `optimizer.<name or number>`."""
    return {f"optimizer.{name}": param for name, param in optimizer.named_ordinary()}


def _ordinary_kind(
    key: str, value: torch.Tensor, state: Sequence[str] | dict[str, torch.Tensor]
) -> tuple[str, str]:
    """(state, kind) of a tensor that an ordinary parameter has under a key of the optimizer's
    state."""
    if key.endswith("_scales"):
        return key.removesuffix("_scales") + kinds.SCALES, kinds.CODE_SCALES
    if f"{key}_scales" in state:
        return key, kinds.CODES
    return key, kinds.SPLIT if value.dtype == torch.int16 else kinds.name_of(value.dtype)
