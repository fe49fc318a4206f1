"""Tiles: the optimizer states of a sharded model, cut into pieces that are read, stepped and written as one.

A tile is a range of one unit's shard layout; it may cut through a parameter. Its states lie side by side in one entry of the
store, so that a tile is one read and one write:

    parameter in bf16 or fp16    [ master | exp_avg | exp_avg_sq ]     fp32 each
    parameter in fp32            [ exp_avg | exp_avg_sq ]              the parameter is the master

In a buffer the tile's slice of the parameters and of the gradients follow, when those rest on NVMe. The step is one pass of a
native kernel per parameter in the tile; elements between parameters are never stepped. Before its first step a tile has no
states on disk: the master is made from the parameter (or read from the fp32 values that zero.Init saw, when those were
kept), the moments are zero.

The first tiles are read before backward has ended (zero/hooks.py says when). States and parameters rest from one step to
the next, so what has come stays right while micro-batches accumulate, a backward fails or a step is skipped; whoever
writes them in between drops it (`Shards.drop_head_start`). Gradients are not final before the end of backward: their slices
are read when the step begins.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tiermem.policy import Tier
from tiermem.swap.arena import Slot
from tiermem.swap.move import Move
from tiermem.swap.native import BACKGROUND, optimizer_step
from tiermem.swap.parts import StepParts, StepRule
from tiermem.swap.pipeline import run_pipeline
from tiermem.zero.plan import STATE_BYTES, state_element_bytes
from tiermem.zero.residency import LiveUnit
from tiermem.zero.shards import Shards, initial_master
from tiermem.zero.unit import Shard

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"


class Segment(NamedTuple):
    """The elements of one parameter inside a tile; `start` counts from the tile's first element."""

    shard: Shard
    start: int
    numel: int


@dataclasses.dataclass(eq=False)
class Tile:
    """A range of one unit's shard layout and the home of its states."""

    live: LiveUnit
    start: int  # elements
    numel: int
    entry: str
    home: Tier
    segments: list[Segment]
    is_started: bool = False  # its states have been written once

    @property
    def state_names(self) -> tuple[str, ...]:
        """The states in the order in which they lie."""
        return (MASTER, EXP_AVG, EXP_AVG_SQ) if self.live.unit.dtype.itemsize < STATE_BYTES else (EXP_AVG, EXP_AVG_SQ)

    @property
    def state_bytes(self) -> int:
        """Bytes of its states."""
        return self.numel * state_element_bytes(self.live.unit)

    @property
    def slice_bytes(self) -> int:
        """Bytes of its slice of the parameters, and of the gradients."""
        return self.numel * self.live.unit.dtype.itemsize

    @property
    def slice_offset(self) -> int:
        """Where that slice begins in the unit's parameters, and in its gradients."""
        return self.start * self.live.unit.dtype.itemsize


class _Part(NamedTuple):
    """Bytes of an entry of the store and their place in a tile's buffer."""

    entry: str
    offset: int
    place: int
    num_bytes: int


RuleOf = Callable[[Shard], StepRule | None]
"""The rule of a parameter's next step and its scalars, or None when it is not to be stepped."""


class StateTiles:
    """The tiles of a sharded model: makes room for its states and steps them.

    Args:
        shards: the model; its plan says how large tiles are and how many buffers they pass through.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._store = shards.store
        self.tiles = [tile for live in shards.units if live.unit.is_trainable for tile in self._cut(live)]
        self._choose_homes()
        if any(tile.entry in self._store for tile in self.tiles):
            raise ValueError("this model has an optimizer already: make one optimizer with several parameter groups")
        for tile in self.tiles:
            self._store.reserve(tile.entry, (tile.state_bytes,), torch.uint8, tile.home)

    def begin(self) -> None:
        """Starts reading the first tiles of the next step, behind everything else; does nothing once they are on their way.

        Tiles that lie in memory are left out: they would hold a buffer for nothing.
        """
        start = self._shards.head_start
        if start is None or not self._shards.policy.pipeline_read:
            return
        work = _TileStep(self._shards, lambda shard: None, None)  # which only reads
        start.begin((tile for tile in self.tiles if work.has_lasting(tile)), work.read_lasting)

    def step(self, rule_of: RuleOf) -> None:
        """Steps every tile once. Blocks; raises OSError when a transfer failed."""
        self._run(self.tiles, _TileStep(self._shards, rule_of, None))

    def step_unit(self, live: LiveUnit, grads: torch.Tensor, rule_of: RuleOf) -> None:
        """Steps one unit's tiles with gradients that rest nowhere: flat, in its shard layout. Blocks."""
        self._run([t for t in self.tiles if t.live is live], _TileStep(self._shards, rule_of, grads))

    def state(self, shard: Shard, name: str) -> torch.Tensor:
        """A copy of this rank's part of one fp32 state of a parameter, flat. Blocks; raises OSError."""
        pieces = []
        for tile in self.tiles:
            for segment in tile.segments:
                if segment.shard is shard:
                    pieces.append(self._state_piece(tile, segment, name))
        return torch.cat(pieces) if pieces else torch.empty(0)

    def _run(self, tiles: Sequence[Tile], work: _TileStep) -> None:
        policy, pool = self._shards.policy, self._shards.tile_pool
        if pool is not None:
            start = self._shards.head_start
            run_pipeline(tiles, work, pool, policy.pipeline_read, policy.pipeline_write, start)
        else:
            for tile in tiles:
                work.compute(tile, None)
        for tile in tiles:
            tile.is_started = True
            if initial_master(tile.live.unit) in self._store and all(
                t.is_started for t in self.tiles if t.live is tile.live
            ):
                self._store.drop(initial_master(tile.live.unit))

    def _state_piece(self, tile: Tile, segment: Segment, name: str) -> torch.Tensor:
        offset = tile.start + segment.start - segment.shard.shard_offset
        if name == MASTER and not tile.is_started and initial_master(tile.live.unit) in self._store:
            return self._initial_piece(initial_master(tile.live.unit), tile.start + segment.start, segment.numel)
        if name == MASTER and (not tile.is_started or MASTER not in tile.state_names):
            return self._shards.local_weight(segment.shard.param)[offset : offset + segment.numel].float()
        if not tile.is_started:
            return torch.zeros(segment.numel)
        first = tile.state_names.index(name) * tile.numel + segment.start
        part = slice(first, first + segment.numel)
        if tile.home is Tier.NVME:
            return self._shards.read_part(tile.entry, torch.float32, part)
        return self._store.view(tile.entry).view(torch.float32)[part].clone()

    def _initial_piece(self, entry: str, start: int, numel: int) -> torch.Tensor:
        if self._store.home_of(entry) is Tier.NVME:
            return self._shards.read_part(entry, torch.float32, slice(start, start + numel))
        return self._store.view(entry)[start : start + numel].clone()

    def _cut(self, live: LiveUnit) -> list[Tile]:
        tiles, unit, step = [], live.unit, self._shards.plan.tile_numel
        for start in range(0, unit.shard_numel, step):
            numel = min(step, unit.shard_numel - start)
            segments = [s for s in (_overlap(self._shards, part, start, numel) for part in unit.shards) if s.numel > 0]
            if segments:
                entry = f"state/{unit.index}/{unit.name}/{start}"
                tiles.append(Tile(live, start, numel, entry, self._shards.policy.optim, segments))
        return tiles

    def _choose_homes(self) -> None:
        """States that rest in memory rest on HOST; of those on NVME a share stays there, spread evenly."""
        if self._shards.policy.optim is not Tier.NVME:
            for tile in self.tiles:
                tile.home = Tier.HOST
            return
        due, states = 0, sum(tile.state_bytes for tile in self.tiles)
        for tile in self.tiles:
            due += tile.state_bytes * self._shards.plan.resident_bytes
            if due >= tile.state_bytes * states:
                due -= tile.state_bytes * states
                tile.home = Tier.HOST


class _TileStep:
    """What the pipeline does with a tile: see `TileWork` in swap/pipeline.py."""

    def __init__(self, shards: Shards, rule_of: RuleOf, grads: torch.Tensor | None) -> None:
        self._shards = shards
        self._store = shards.store
        self._rule_of = rule_of
        self._grads = grads  # of the one unit being stepped, when none rest at home

    def read(self, tile: Tile, slot: Slot) -> Move:
        parts = self._lasting_parts(tile) + self._gradient_parts(tile)
        return self._store.read(_into(slot, parts), f"tile {tile.entry}")

    def read_lasting(self, tile: Tile, slot: Slot) -> Move:
        """Starts reading what rests from step to step; whatever else waits for the disk goes first."""
        return self._store.read(_into(slot, self._lasting_parts(tile)), f"tile {tile.entry}", BACKGROUND)

    def read_rest(self, tile: Tile, slot: Slot) -> Move:
        return self._store.read(_into(slot, self._gradient_parts(tile)), f"gradients of tile {tile.entry}")

    def has_lasting(self, tile: Tile) -> bool:
        """Whether a tile has anything on NVMe that is read and rests from step to step."""
        return bool(self._lasting_parts(tile))

    def compute(self, tile: Tile, slot: Slot | None) -> None:
        start_ns = time.monotonic_ns()
        states, params, grads = self._views(tile, slot)
        initial = self._initial_values(tile, slot)
        if not tile.is_started:
            states.zero_() if initial is None else states[tile.numel :].zero_()
        if initial is not None:
            states[: tile.numel].copy_(initial)
        by_name = dict(zip(tile.state_names, states.view(len(tile.state_names), tile.numel), strict=True))
        master = by_name.get(MASTER)
        is_from_weight = master is not None and not tile.is_started and initial is None
        for segment in tile.segments:
            part = slice(segment.start, segment.start + segment.numel)
            rule = self._rule_of(segment.shard)
            if rule is None:
                if is_from_weight and master is not None:
                    master[part].copy_(params[part])
                elif master is not None and tile.is_started and tile.live.shard is None:
                    params[part].copy_(master[part])  # it was not read, and the whole slice is written
                continue
            moments = (by_name[EXP_AVG][part], by_name[EXP_AVG_SQ][part])
            parts = StepParts(params[part], None if master is None else master[part], grads[part], moments)
            optimizer_step(self._shards.workers, rule, parts, start_moments=is_from_weight, start_master=is_from_weight)
        self._store.recorder.add("compute", f"tile {tile.entry}", start_ns, time.monotonic_ns(), tile.state_bytes)

    def write(self, tile: Tile, slot: Slot) -> Move:
        states, params, _ = self._buffers(tile, slot)
        ranges = []
        if tile.home is Tier.NVME:
            ranges.append((tile.entry, 0, states))
        if tile.live.entry is not None:
            ranges.append((tile.live.entry, tile.slice_offset, params))
        return self._store.write(ranges, f"tile {tile.entry}")

    def _lasting_parts(self, tile: Tile) -> list[_Part]:
        """States, fp32 initial values and parameters, as far as they are read from NVMe."""
        parts = []
        if tile.is_started and tile.home is Tier.NVME:
            parts.append(_Part(tile.entry, 0, 0, tile.state_bytes))
        initial = self._initial_of(tile)
        if initial is not None and self._store.home_of(initial) is Tier.NVME:
            parts.append(_Part(initial, tile.start * STATE_BYTES, 0, tile.numel * STATE_BYTES))
        if tile.live.entry is not None and (MASTER not in tile.state_names or not tile.is_started):
            parts.append(_Part(tile.live.entry, tile.slice_offset, tile.state_bytes, tile.slice_bytes))
        return parts

    def _gradient_parts(self, tile: Tile) -> list[_Part]:
        """Gradients, when they rest on NVME."""
        if self._grads is not None or self._shards.homes.home is not Tier.NVME:
            return []
        entry = self._shards.homes.entry(tile.live.unit)
        return [_Part(entry, tile.slice_offset, tile.state_bytes + tile.slice_bytes, tile.slice_bytes)]

    def _initial_of(self, tile: Tile) -> str | None:
        """The entry of fp32 initial values that a tile's master starts from, when they were kept."""
        name = initial_master(tile.live.unit)
        return name if not tile.is_started and name in self._store else None

    def _initial_values(self, tile: Tile, slot: Slot | None) -> torch.Tensor | None:
        initial = self._initial_of(tile)
        if initial is None:
            return None
        if self._store.home_of(initial) is Tier.HOST:
            return self._store.view(initial)[tile.start : tile.start + tile.numel]
        assert slot is not None
        return self._buffers(tile, slot)[0].view(torch.float32)[: tile.numel]

    def _buffers(self, tile: Tile, slot: Slot) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three byte ranges of a tile's buffer: states, parameters, gradients."""
        states, each = tile.state_bytes, tile.slice_bytes
        buffer = slot.tensor
        return buffer[:states], buffer[states : states + each], buffer[states + each : states + 2 * each]

    def _views(self, tile: Tile, slot: Slot | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States (fp32, flat), parameters and gradients of a tile, wherever they are: in its buffer or at home."""
        unit, part = tile.live.unit, slice(tile.start, tile.start + tile.numel)
        in_buffer = self._buffers(tile, slot) if slot is not None else None
        if tile.home is Tier.NVME:
            assert in_buffer is not None
            states = in_buffer[0]
        else:
            states = self._store.view(tile.entry)
        if tile.live.shard is not None:
            params = tile.live.shard[part]
        else:
            assert in_buffer is not None
            params = in_buffer[1].view(unit.dtype)
        at_home = self._grads if self._grads is not None else self._shards.homes.flat(unit)
        if at_home is not None:
            grads = at_home[part]
        else:
            assert in_buffer is not None
            grads = in_buffer[2].view(unit.dtype)
        return states.view(torch.float32), params, grads


def _into(slot: Slot, parts: Sequence[_Part]) -> list[tuple[str, int, torch.Tensor]]:
    """What the store is asked for: each part with its place in the buffer."""
    return [(part.entry, part.offset, slot.tensor[part.place : part.place + part.num_bytes]) for part in parts]


def _overlap(shards: Shards, part: Shard, start: int, numel: int) -> Segment:
    """The elements of a parameter inside [start, start + numel) of its unit's shard layout; none of its padding."""
    before = part.shard_numel * shards.topology.shard_rank
    valid = min(part.shard_numel, max(0, part.numel - before))
    first, last = max(start, part.shard_offset), min(start + numel, part.shard_offset + valid)
    return Segment(part, first - start, last - first)
