"""Capture: which elements of which states this rank saves, and where they lie at this moment.

    weights    this rank's part of every parameter, where its unit rests        parameters of replica 0 alone
    states     master and moments, tile by tile                                 the same
    own        buffers, and what the optimizer steps beside the sharded model   rank 0's; another rank's where they differ

A master is saved where there is one beside the weight; before the first step only if it was made from the fp32 values that
zero.Init saw. What has never been stepped nor put has no states, which says the same as zeros. Gradients are not saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from tiermem.checkpoint.format import kinds
from tiermem.checkpoint.format.manifest import MASTER, WEIGHT, Parameter
from tiermem.checkpoint.saving.stretch import Read, Stretch, in_memory
from tiermem.optim import ordinary
from tiermem.optim.layout import StatePart
from tiermem.optim.tile import Segment, Tile
from tiermem.policy import Tier
from tiermem.zero import registry
from tiermem.zero.ranks.quantised import byte_ranges
from tiermem.zero.shards import Shards
from tiermem.zero.unit import Shard
from tiermem.zero.weights.live import LiveUnit
from tiermem.zero.weights.values import initial_master

if TYPE_CHECKING:
    from tiermem.optim.base import NativeOptimizer


class OwnTensor(NamedTuple):
    """A tensor that every rank has for itself: a buffer, or what the optimizer keeps of an ordinary parameter."""

    param: str
    state: str
    kind: str
    numel: int
    data: torch.Tensor

    def stretch(self, rank: int) -> Stretch:
        """To be saved as rank 0's, or as one that differs from it."""
        variant = f".rank{rank}" if rank else ""
        return Stretch(self.param, self.state + variant, self.kind, 0, self.numel, 0, in_memory(self.data))


def parameters(
    shards: Shards, optimizer: NativeOptimizer | None, exclude_frozen: bool
) -> tuple[list[Parameter], list[str]]:
    """Every tensor that is saved, in the order of the model, and the names of frozen ones that are not."""
    groups = {id(p): i for i, g in enumerate(optimizer.param_groups if optimizer else ()) for p in g["params"]}
    aliases = _aliases(shards.model)
    found, excluded = [], []
    for _, shard in sorted(shards.parameters(), key=lambda each: each[1].index):
        if exclude_frozen and not shard.param.requires_grad:
            excluded.append(shard.name)
            continue
        names = tuple(name for name in aliases[id(shard.param)] if name != shard.name)
        dtype, group = kinds.name_of(shards.find(shard.param)[0].unit.dtype), groups.get(id(shard.param))
        is_trainable = shard.param.requires_grad
        found.append(
            Parameter(shard.name, names, "parameter", tuple(shard.shape), dtype, is_trainable, shard.num_steps, group)
        )
    for (name, *others), buffer in buffers(shards.model):
        dtype = kinds.name_of(buffer.dtype)
        found.append(Parameter(name, tuple(others), "buffer", tuple(buffer.shape), dtype, False, 0, None))
    for name, param in _ordinary(shards, optimizer):
        assert optimizer is not None
        steps = int(optimizer.state.get(param, {}).get(ordinary.STEP, 0))
        dtype, group = kinds.name_of(param.dtype), groups[id(param)]
        found.append(Parameter(name, (), "ordinary", tuple(param.shape), dtype, param.requires_grad, steps, group))
    return found, excluded


def buffers(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Persistent buffers with all their names, in the order of the model."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                full = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(buffer), ([], buffer))[0].append(full)
    return list(found.values())


def sharded(shards: Shards, names: set[str]) -> Iterator[Stretch]:
    """The weights and states of chosen parameters that this rank saves. Blocks on nothing; the bytes are read later."""
    if shards.topology.replica:  # another rank saves the same
        return
    for live, shard in shards.parameters():
        if shard.name in names and shards.values.num_mine(shard):
            yield from _weight(shards, live, shard)
            if shards.states is not None and live.unit.is_trainable:
                yield from _states(shards, live, shard)


def own(shards: Shards, optimizer: NativeOptimizer | None) -> list[OwnTensor]:
    """What every rank has for itself: buffers, ordinary parameters and their states."""
    found = [OwnTensor(n[0], WEIGHT, kinds.name_of(b.dtype), b.numel(), b) for n, b in buffers(shards.model)]
    for name, param in _ordinary(shards, optimizer):
        assert optimizer is not None
        found.append(OwnTensor(name, WEIGHT, kinds.name_of(param.dtype), param.numel(), param))
        for key, value in optimizer.state.get(param, {}).items():
            if key != ordinary.STEP:
                found.append(OwnTensor(name, *_ordinary_kind(key, value, optimizer.state[param]), param.numel(), value))
    return [each for each in found if each.numel]


# ---- sharded -------------------------------------------------------------------------------------------------------------


def _weight(shards: Shards, live: LiveUnit, shard: Shard) -> Iterator[Stretch]:
    unit, numel = live.unit, shards.values.num_mine(shard)
    first, offset = shard.shard_numel * shards.topology.shard_rank, shard.shard_offset
    if not unit.is_packed:
        size = unit.dtype.itemsize
        place = _Place(shards, live.entry, live.shard, offset * size)
        yield place.stretch(shard, WEIGHT, kinds.name_of(unit.dtype), first, numel, first * size)
        return
    codes, scales = byte_ranges(unit.packed_numel, offset, offset + numel)
    yield _Place(shards, live.entry, live.shard, codes.start).stretch(shard, WEIGHT, kinds.PACKED, first, numel, first)
    place, before = (
        _Place(shards, live.entry, live.shard, scales.start),
        _scales_before(shards, shard, kinds.PACKED_SCALES),
    )
    yield place.stretch(shard, WEIGHT + kinds.SCALES, kinds.PACKED_SCALES, first, numel, before)


def _states(shards: Shards, live: LiveUnit, shard: Shard) -> Iterator[Stretch]:
    tiles = shards.states
    assert tiles is not None
    pieces = tiles.pieces(shard)
    if not all(tile.is_started for tile, _ in pieces):
        if initial_master(live.unit) in shards.store and pieces[0][0].layout.master is not None:
            for tile, segment in pieces:
                yield _initial(shards, tile, segment)
        return
    for tile, segment in pieces:
        if tile.layout.master is not None:
            yield from _part(shards, tile, segment, tile.layout.master, MASTER)
        for number, name in enumerate(tiles.names(shard)):
            yield from _part(shards, tile, segment, tile.layout.moment(number), name)


def _part(shards: Shards, tile: Tile, segment: Segment, part: StatePart, state: str) -> Iterator[Stretch]:
    """A segment of one state of a tile; in 8 bits codes and scales."""
    shard, first = segment.shard, tile.first_element(segment, shards.topology.shard_rank)
    memory = None if tile.home is Tier.NVME else shards.store.view(tile.entry)
    entry = tile.entry if memory is None else None
    ranges = tile.layout.ranges(part, tile.numel, segment.start, segment.numel)
    place = _Place(shards, entry, memory, ranges[0].offset)
    yield place.stretch(shard, state, part.kind, first, segment.numel, kinds.bytes_of(part.kind, first))
    if part.kind == kinds.CODES:
        before = _scales_before(shards, shard, kinds.CODE_SCALES)
        before += (first - shard.shard_numel * shards.topology.shard_rank) // kinds.BLOCK
        place = _Place(shards, entry, memory, ranges[1].offset)
        yield place.stretch(shard, state + kinds.SCALES, kinds.CODE_SCALES, first, segment.numel, before)


def _initial(shards: Shards, tile: Tile, segment: Segment) -> Stretch:
    """A master that has not been made yet, as it will be: in fp32."""
    tiles = shards.states
    assert tiles is not None
    first = tile.first_element(segment, shards.topology.shard_rank)

    def read(offset: int, num_bytes: int) -> torch.Tensor:
        part = Segment(segment.shard, segment.start + offset // 4, num_bytes // 4)
        return tiles.piece(tile, part, MASTER).view(torch.uint8)

    return Stretch(segment.shard.name, MASTER, "fp32", first, segment.numel, first * 4, read)


def _scales_before(shards: Shards, shard: Shard, kind: str) -> int:
    """Bytes of scales that the ranks before this one hold of a parameter: each counts its own blocks."""
    return shards.topology.shard_rank * kinds.bytes_of(kind, shard.shard_numel)


class _Place(NamedTuple):
    """Where bytes lie: behind an offset of an entry on NVMe, or of memory."""

    shards: Shards
    entry: str | None
    memory: torch.Tensor | None
    offset: int

    def stretch(self, shard: Shard, state: str, kind: str, first: int, numel: int, first_byte: int) -> Stretch:
        """Elements of a state that lie there."""
        return Stretch(shard.name, state, kind, first, numel, first_byte, self._read, self.entry, self.offset)

    def _read(self, offset: int, num_bytes: int) -> torch.Tensor:
        start = self.offset + offset
        if self.entry is not None:
            return self.shards.values.read_part(self.entry, torch.uint8, slice(start, start + num_bytes))
        assert self.memory is not None
        return in_memory(self.memory)(start, num_bytes)


# ---- what every rank has for itself ------------------------------------------------------------------------------------------


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return found


def _ordinary(shards: Shards, optimizer: NativeOptimizer | None) -> list[tuple[str, nn.Parameter]]:
    """What the optimizer steps beside the sharded model: (`optimizer.<name or number>`, parameter).

    Raises ValueError when it steps another sharded model as well.
    """
    found = []
    for name, param in optimizer.named() if optimizer is not None else ():
        keeper = registry.keeper_of(param)
        if keeper is not shards and isinstance(keeper, Shards):
            raise ValueError(f"parameter {name!r} is of another sharded model: save each with an optimizer of its own")
        if keeper is not shards:
            found.append((f"optimizer.{name}", param))
    return found


def _ordinary_kind(key: str, value: torch.Tensor, state: Sequence[str] | dict[str, torch.Tensor]) -> tuple[str, str]:
    """(state, kind) of what an ordinary parameter keeps under a key."""
    if key.endswith("_scales"):
        return key.removesuffix("_scales") + kinds.SCALES, kinds.CODE_SCALES
    if f"{key}_scales" in state:
        return key, kinds.CODES
    return key, kinds.SPLIT if value.dtype == torch.int16 else kinds.name_of(value.dtype)


__all__ = ["OwnTensor", "Read", "buffers", "own", "parameters", "sharded"]
