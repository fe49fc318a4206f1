"""A whole iteration on the simulated device, to be replayed: a model in blocks, whose steps the CPU
does tile by tile.

The recording has what the library asked of the device, and which thread waited for which tile's
step. test_iteration_time.py replays it with the sizes and rates of 8B on a card;
test_measured_time.py with rates of this CPU, beside a run of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.engine.sharding import shard_for_passes
from tiermem.optim.tile_step import TilePass
from tiermem.precision import PRESETS
from tiermem.run.layerwise import LayerwisePasses
from tiermem.swap.program.program import Program
from tiermem.weights.step_run import StepRun

NUM_BEFORE, NUM_RECORDED = 2, 2
"""Iterations: those that learn the order of units, and those of a recording. Time is counted from
the start of the last step but one to that of the last."""


class Sizes(NamedTuple):
    """Of a model, its tiles and its batch."""

    width: int
    layers: int
    vocabulary: int
    rows: int  # of the activations
    tile_numel: int


def call(act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a forward under nothing else."""
    return act(*args, **kwargs)


class Model(nn.Module):
    """A chain of checkpointed blocks between an embedding and a head: forward twice, as in training
    of such a size."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.embed = nn.Embedding(sizes.vocabulary, width)
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh())
                for _ in range(sizes.layers)
            ]
        )
        self.head = nn.Linear(width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).float().square().mean()


def policy_of(
    overlap: str, tile_numel: int, by_layer: bool = False, **fields: Any
) -> OffloadPolicy:
    """by_layer: the micro-batches of a step go through the model block by block."""
    if by_layer:
        fields |= {"accumulation": "layers"}
    return OffloadPolicy(
        params=Tier.HOST, optim=Tier.HOST, grads=Tier.DEVICE, precision=PRESETS["tiny"], overlap=overlap,  # type: ignore[arg-type]
        persistence_numel=0, tile_numel=tile_numel, tile_buffers=4, **{"unit_buffers": 4} | fields,
    )  # fmt: skip


class Marks:
    """Adds to a recording: the steps of tiles on the lane "cpu", and which thread waits for
    them."""

    def __init__(self, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sim = sim
        self.starts: list[int] = []  # of steps
        self.num_attempted = 0  # tiles
        self._by_unit: dict[int, list[int]] = defaultdict(list)
        self._by_range: dict[tuple[int, int], int] = {}  # by unit and first element
        self._by_buffer: dict[int, int] = {}
        # tiles that are stepped beside what they replace, since when
        self._attempted: dict[Any, int] = {}
        # units that the main thread knows to be stepped, in virtual time
        self._stepped: set[int] = set()
        start, finish, attempt, commit, compute_here = (
            Program.start,
            Program.finish,
            Program.attempt,
            Program.commit,
            Program._compute_here,
        )
        await_unit, stepped, bring = StepRun.await_unit, StepRun.stepped, TilePass.bring

        def started(program: Program[Any], *args: Any, **kwargs: Any) -> None:
            self.starts.append(sim.mark("start a step"))
            self._by_unit.clear()
            self._attempted.clear()
            self._stepped.clear()
            start(program, *args, **kwargs)
            assert program._running is not None
            for row in program._running.planned:
                if row.is_native and not row.is_brought:
                    step = self._step(row.tile, self.starts[-1], 2)
                    self._by_unit[row.tile.live.unit.index].append(step)
                    self._by_range[row.tile.live.unit.index, row.tile.start] = step

        def computed_here(program: Program[Any], rows: Any, *args: Any) -> None:
            compute_here(program, rows, *args)
            for row in rows:
                if row.is_native:
                    self._await([self._step(row.tile, -1, 2)])

        def attempted(program: Program[Any], tiles: Any, *args: Any) -> bool:
            if not program.attempted:
                self._by_unit.clear()
            self._attempted |= dict.fromkeys(tiles, sim.mark("attempt"))
            self.num_attempted += len(tiles)
            return attempt(program, tiles, *args)

        def committed(program: Program[Any], *args: Any) -> None:
            self.starts.append(sim.mark("start a step"))
            self._stepped = {tile.live.unit.index for tile in program.attempted}
            commit(program, *args)

        def finished(program: Program[Any]) -> None:
            finish(program)
            self._await([step for steps in self._by_unit.values() for step in steps])

        def awaited(run: StepRun, unit: int) -> None:
            await_unit(run, unit)
            if run.is_under_way:
                self._await(self._by_unit[unit])
                self._stepped.add(unit)

        def stepped_in_turn(run: StepRun, unit: int) -> Iterator[slice]:
            for part in stepped(run, unit):
                self._await([self._by_range.get((unit, part.start), -1)])
                yield part
            self._stepped.add(unit)

        def is_stepped(run: StepRun, unit: int) -> bool:
            """In virtual time this thread waits for each unit in turn, and no later one is stepped
            by then."""
            return not run.is_under_way or unit in self._stepped

        def brought(work: TilePass, tile: Any, slot: Any) -> None:
            since = self._attempted.pop(tile, -1)
            self._await(
                [self.starts[-1] if since < 0 else since, self._by_buffer.get(slot.offset, -1)]
            )
            bring(work, tile, slot)
            # read and written; a second copy is also fetched to be written
            step = self._step(tile, -1, 2 if since < 0 else 3)
            self._by_unit[tile.live.unit.index].append(step)
            self._by_range[tile.live.unit.index, tile.start] = step
            self._by_buffer[slot.offset] = step

        monkeypatch.setattr(Program, "_compute_here", computed_here)
        monkeypatch.setattr(Program, "start", started)
        monkeypatch.setattr(Program, "attempt", attempted)
        monkeypatch.setattr(Program, "commit", committed)
        monkeypatch.setattr(Program, "finish", finished)
        monkeypatch.setattr(StepRun, "await_unit", awaited)
        monkeypatch.setattr(StepRun, "stepped", stepped_in_turn)
        monkeypatch.setattr(StepRun, "is_stepped", is_stepped)
        monkeypatch.setattr(TilePass, "bring", brought)

    def _step(self, tile: Any, need: int, ways: int) -> int:
        """The step of a tile, which moves its states and weights so many times."""
        # without a small tile's rounding
        states = sum(part.num_bytes(tile.numel) for part in tile.layout.parts)
        num_bytes = ways * (states + tile.slice_bytes) + tile.grad_bytes
        number: int = self._sim.mark(
            f"step {tile.entry}", "cpu", num_bytes, flops=tile.numel, needs=[need]
        )
        return number

    def _await(self, needs: list[int]) -> None:
        self._sim.mark("await a step", needs=needs, blocks=True)


class Training:
    """A sharded model on the simulated device, and its iterations."""

    def __init__(
        self, sizes: Sizes, overlap: str, max_norm: float, by_layer: bool = False, **fields: Any
    ) -> None:
        torch.manual_seed(0)
        self._model, self._max_norm = Model(sizes).bfloat16(), max_norm
        self._tokens = torch.arange(sizes.rows, device="sim") % sizes.vocabulary
        policy = policy_of(overlap, sizes.tile_numel, by_layer, **fields)
        self.shards = shard_for_passes(self._model, policy, None, "sim", True)
        self._passes = LayerwisePasses(self.shards, call) if by_layer else None
        self._optim = tiermem.AdamW(self._model.parameters(), lr=1e-3)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.shards.close()

    def iterate(self, num_micros: int = 1, is_late: bool = False, is_apart: bool = False) -> None:
        """Forwards, backwards, a step. is_late: backward is long, as in virtual time: what it has
        attempted is done.

        is_apart: the step begins when the device has no maths left.
        """
        losses = [lambda: self._model(self._tokens)] * num_micros
        if self._passes is not None:
            with self._passes.step(losses):
                self._passes.forward()
                self._passes.backward(torch.Tensor.backward)
        for loss in losses if self._passes is None else ():
            loss().backward()
        if is_late and self.shards.program.attempted:
            self.shards.program._program().quiet()
        if is_apart:
            torch.accelerator.synchronize("sim")
        self._optim.step(max_norm=self._max_norm)
        self._optim.zero_grad()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """On the CPU, by name."""
        return {name: value.cpu() for name, value in self._model.state_dict().items()}

    @property
    def numel(self) -> int:
        """The elements that a step changes."""
        return sum(unit.shard_numel for unit in self.shards.plan.division.units)

    @property
    def num_tiles(self) -> int:
        """Those that native kernels have stepped so far."""
        return self.shards.program.num_native

    @property
    def kernels(self) -> list[Any]:
        """The events of their kernels."""
        return [event for event in self.shards.store.recorder.events if event.lane == "compute"]

    def quiet(self) -> None:
        """Blocks until nothing is under way."""
        self.shards.check_whole()
        torch.accelerator.synchronize("sim")


def record(
    sim: ModuleType,
    marks: Marks,
    sizes: Sizes,
    overlap: str,
    max_norm: float = 1e-3,
    num_micros: int = 1,
    by_layer: bool = False,
    **fields: Any,
) -> list[Any]:
    """NUM_RECORDED iterations; the order of units is known and every tile has its states."""
    sim.set_schedule("late")
    with Training(sizes, overlap, max_norm, by_layer, **fields) as training:
        for number in range(NUM_BEFORE + NUM_RECORDED):
            if number == NUM_BEFORE:
                training.quiet()
                marks.starts.clear()
                marks.num_attempted = 0
                sim.record(True)
            training.iterate(num_micros, is_late=True)
        training.quiet()  # the last step, too
        sim.record(False)
        assert training.shards.steps.num_redone == 0
        return list(sim.recording())
