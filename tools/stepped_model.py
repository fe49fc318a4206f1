"""SteppedModel: parameters, gradients and optimizer states on NVMe and nothing else, stepped again and again.

The model is blocks of parameters without a forward. Gradients are given once and stay: every step reads, computes and
writes the same bytes, which `expected` says by arithmetic, per element of a tile:

    parameters in       fp32                    bf16
    preset              exact   compact  tiny   exact   compact  bf16   tiny
    states              8       4        2.03   12      6        4      4.03   read and written, unless the tile is resident
    parameters          4       4        4      0       2        2      2      read, unless only states rest on NVMe
                        4       4        4      2       2        2      2      written, the same
    gradients           4       4        4      2       2        2      2      read, the same
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tiermem.optim.adam import AdamW
from tiermem.optim.layout import StateLayout
from tiermem.optim.tile import Tile
from tiermem.policy import IoSettings, OffloadPolicy, Tier
from tiermem.precision import Precision
from tiermem.swap.sums import Verify
from tiermem.tools.counts import IoCounts, kernel_counts
from tiermem.tools.timeline import Span
from tiermem.zero.shards import shard

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LEAST_PARAMS = 4096
_MOST_BLOCK_NUMEL = 1 << 24
_BLOCK_PARAMS = 4  # tensors in a block
_NUM_MOMENTS = 2  # AdamW's


class Pipelining(NamedTuple):
    """Which half of the pipeline is on."""

    reads_ahead: bool = True
    writes_behind: bool = True

    @property
    def name(self) -> str:
        """As a table says it."""
        if self.reads_ahead:
            return "both on" if self.writes_behind else "only reads ahead"
        return "only writes behind" if self.writes_behind else "both off"


@dataclasses.dataclass(frozen=True)
class StepRun:
    """What one step took and moved."""

    start_ns: int
    end_ns: int
    moved: tuple[IoCounts, ...]  # on each path, by the queues' completions
    kernel: IoCounts  # of the whole process, as the kernel counts
    spans: list[Span]

    @property
    def seconds(self) -> float:
        """Wall clock."""
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def total(self) -> IoCounts:
        """Bytes on all paths."""
        return IoCounts(sum(m.read_bytes for m in self.moved), sum(m.written_bytes for m in self.moved))

    def lane_s(self, lane: str) -> float:
        """Seconds that events of a lane took together."""
        return sum(span.end_ns - span.start_ns for span in self.spans if span.lane == lane) * 1e-9

    def idle_fraction(self) -> float:
        """The part of the step in which no tile was on its way, in or out."""
        last, busy = self.start_ns, 0
        for span in sorted((s for s in self.spans if s.lane in ("read", "write")), key=lambda s: s.start_ns):
            busy += max(0, min(span.end_ns, self.end_ns) - max(span.start_ns, last))
            last = max(last, span.end_ns)
        return 1.0 - busy / max(1, self.end_ns - self.start_ns)


class SteppedModel:
    """A sharded model with its optimizer and gradients; its first step has been made. A context manager.

    Args:
        paths: folders on NVMe.
        num_params: about so many; `num_params` of the object says how many.
        precision: of parameters and gradients, "fp32" or "bf16".
        preset: of the states, as in `tiermem.precision.PRESETS`.
        resident_bytes: of the states, kept in memory.
        only_states: parameters and gradients rest in memory.
        io: of the queues.
        verify: which reads are compared with the checksums of what was written; "resume": none, and no sums are taken.

    Raises OSError when a path has too little room or fails. Leaves nothing on the paths when it is closed.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        num_params: int,
        precision: str,
        preset: str,
        resident_bytes: int,
        only_states: bool,
        io: IoSettings,
        pipelining: Pipelining,
        verify: Verify = "always",
    ) -> None:
        others = Tier.HOST if only_states else Tier.NVME
        policy = OffloadPolicy(
            params=others,
            optim=Tier.NVME,
            grads=others,
            precision=Precision.preset(preset),
            num_moments=_NUM_MOMENTS,
            paths=tuple(paths),
            resident_bytes=resident_bytes,
            pipeline_read=pipelining.reads_ahead,
            pipeline_write=pipelining.writes_behind,
            persistence_numel=0,
            prefetch_numel=0,  # no forward comes: what is read for it would be counted
            io=io,
            durability="none",  # nothing is saved
            verify=verify,
        )
        model = _Blocks(num_params, DTYPES[precision])
        self.num_params = sum(p.numel() for p in model.parameters())
        self.preset = preset
        self.verify = verify
        self.pipelining = pipelining
        self._shards = shard(model, policy)
        try:
            self._optimizer = AdamW(model.parameters(), lr=1e-4)
            self._give_gradients()
            self._optimizer.step()  # writes states that were never read: not what is measured
            tiles = self._optimizer.tiles_of(self._shards).tiles
        except BaseException:
            self._shards.close()
            raise
        self.tile_names = [f"tile {tile.entry}" for tile in tiles]
        self.state_bytes = sum(tile.state_bytes for tile in tiles)
        self.resident_bytes = sum(tile.state_bytes for tile in tiles if tile.home is Tier.HOST)
        self.memory_bytes = sum(_memory_bytes(tile) for tile in tiles)
        streamed = self.state_bytes - self.resident_bytes
        self.expected = IoCounts(streamed, streamed)
        if not only_states:
            params, grads = sum(tile.slice_bytes for tile in tiles), sum(tile.grad_bytes for tile in tiles)
            reads_params = any(tile.layout.reads_weight for tile in tiles)
            self.expected = IoCounts(streamed + params * reads_params + grads, streamed + params)

    def __enter__(self) -> SteppedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> str:
        """What the queues run on."""
        return self._shards.store.stats().engine

    def step(self, pipelining: Pipelining) -> StepRun:
        """Makes one step with the pipeline switched so. Blocks; raises OSError."""
        recorder = self._shards.store.recorder
        self._shards.policy = dataclasses.replace(
            self._shards.policy, pipeline_read=pipelining.reads_ahead, pipeline_write=pipelining.writes_behind
        )
        recorder.events.clear()
        before, kernel_before = self._counts(), kernel_counts()
        start_ns = time.monotonic_ns()
        self._optimizer.step()
        end_ns = time.monotonic_ns()
        kernel = kernel_counts().since(kernel_before)
        moved = tuple(now.since(then) for now, then in zip(self._counts(), before, strict=True))
        return StepRun(start_ns, end_ns, moved, kernel, [Span(*event) for event in recorder.events])

    def close(self) -> None:
        """Removes it from the paths and from memory."""
        self._shards.close()

    def _give_gradients(self) -> None:
        for live in self._shards.units:
            for part in live.unit.shards:
                part.param.grad = torch.full(part.shape, 1e-3, dtype=live.unit.dtype)
            self._shards.homes.receive(live.unit)
            self._shards.homes.show(live.unit)
        self._shards.homes.settle()

    def _counts(self) -> list[IoCounts]:
        return [IoCounts(p.read_bytes, p.written_bytes) for p in self._shards.store.stats().paths]


def state_bytes_of(num_params: int, precision: str, preset: str) -> int:
    """Bytes of optimizer states, about, before there is a model."""
    layout = StateLayout(DTYPES[precision], Precision.preset(preset), _NUM_MOMENTS)
    return sum(part.num_bytes(num_params) for part in layout.parts)


def _memory_bytes(tile: Tile) -> int:
    """What a step of a tile reads and writes in memory, in one pass."""
    return 2 * tile.state_bytes + tile.slice_bytes * (1 + tile.layout.reads_weight) + tile.grad_bytes


class _Blocks(nn.Module):
    """Nothing but parameters, in units of at most 16 M elements."""

    def __init__(self, num_params: int, dtype: torch.dtype) -> None:
        super().__init__()
        count = math.ceil(num_params / _MOST_BLOCK_NUMEL)
        self.layers = nn.ModuleList(_Block(num_params // count // _BLOCK_PARAMS, dtype) for _ in range(count))


class _Block(nn.Module):
    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((numel,), 0.01, dtype=dtype)) for _ in range(_BLOCK_PARAMS)
        )
