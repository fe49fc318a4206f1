"""In simulated time: a whole iteration of a model of 8B on a card of 24 GB, whose step goes on under the next forward.

The graph is what the library asked of the device, and which thread waited for which tile's step. Bytes and arithmetic are those
of the full size. The machine has one DRAM for the CPU's kernels and for both directions of the link.
"""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiermem
from accelerator import clock
from tiermem import OffloadPolicy, Tier
from tiermem.optim.tile_step import TilePass
from tiermem.precision import PRESETS
from tiermem.swap.program import Program
from tiermem.zero.step_run import StepRun

WIDTH, LAYERS, VOCABULARY, ROWS = 256, 32, 617, 256
"""A layer has 16 tiles of 4096 elements, as one of 218 M elements has of 16 M; the vocabulary is as large beside it."""
SCALE = 218e6 / WIDTH**2
NUMEL = LAYERS * 218e6 + 2 * VOCABULARY * WIDTH * SCALE


class Model(nn.Module):
    """A chain of checkpointed blocks between an embedding and a head: forward twice, as in training of such a size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).float().square().mean()


class Marks:
    """Adds to a recording: the steps of tiles on the lane "cpu", and which thread waits for them."""

    def __init__(self, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sim = sim
        self.starts: list[int] = []  # of steps
        self._by_unit: dict[int, list[int]] = defaultdict(list)
        self._by_buffer: dict[int, int] = {}
        start, finish, await_unit, bring = Program.start, Program.finish, StepRun.await_unit, TilePass.bring

        def started(program: Program[Any], *args: Any, **kwargs: Any) -> None:
            self.starts.append(sim.mark("start a step"))
            self._by_unit.clear()
            start(program, *args, **kwargs)

        def finished(program: Program[Any]) -> None:
            finish(program)
            self._await([step for steps in self._by_unit.values() for step in steps])

        def awaited(run: StepRun, unit: int) -> None:
            await_unit(run, unit)
            self._await(self._by_unit[unit])

        def brought(work: TilePass, tile: Any, slot: Any) -> None:
            self._await([self.starts[-1], self._by_buffer.get(slot.offset, -1)])
            bring(work, tile, slot)
            states = sum(part.num_bytes(tile.numel) for part in tile.layout.parts)  # without a small tile's rounding
            num_bytes = 2 * states + 2 * tile.slice_bytes + tile.grad_bytes  # read and written; read
            step = sim.mark(f"step {tile.entry}", "cpu", num_bytes)
            self._by_unit[tile.live.unit.index].append(step)
            self._by_buffer[slot.offset] = step

        monkeypatch.setattr(Program, "start", started)
        monkeypatch.setattr(Program, "finish", finished)
        monkeypatch.setattr(StepRun, "await_unit", awaited)
        monkeypatch.setattr(TilePass, "bring", brought)

    def _await(self, needs: list[int]) -> None:
        self._sim.mark("await a step", needs=needs, blocks=True)


def record(sim: ModuleType, marks: Marks, overlap: str) -> list[Any]:
    """Three iterations, each of which clips; the order of units is known and every tile has its states."""
    policy = OffloadPolicy(
        params=Tier.HOST, optim=Tier.HOST, grads=Tier.DEVICE, precision=PRESETS["tiny"], overlap=overlap,  # type: ignore[arg-type]
        persistence_numel=0, unit_buffers=4, tile_numel=4096, tile_buffers=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model().bfloat16()
    tokens = torch.arange(ROWS, device="sim") % VOCABULARY
    sim.set_schedule("late")
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-3)
        for number in range(6):
            if number == 3:
                shards.check_whole()  # no step is under way
                sim.synchronize()
                marks.starts.clear()
                sim.record(True)
            model(tokens).backward()
            optim.step(max_norm=1e-3)
            optim.zero_grad()
        sim.record(False)
        return list(sim.recording())


def with_dram(entries: list[Any]) -> list[Any]:
    """Each copy over the link also takes the DRAM, as work that nothing waits for."""
    copies = [(number, entry) for number, entry in enumerate(entries) if entry.get("lane") in ("to device", "to host")]
    return entries + [
        entry | {"kind": "host_work", "lane": "cpu", "needs": [number], "blocks": False, "thread": ("link", -1)}
        for number, entry in copies
    ]


def seconds(entries: list[Any], starts: list[int], tokens: int) -> float:
    """Of one iteration, from a step's start to the next."""

    products = sum(entry["flops"] for entry in entries if entry.get("lane") == "compute") / len(starts)

    def size_of(entry: Any) -> tuple[float, float]:
        if (
            entry["lane"] == "compute"
        ):  # 8 a parameter and token in all, the embedding's and the attention's share included
            return 0.0, entry["flops"] * 8 * NUMEL * tokens / products
        return entry["bytes"] * SCALE, 0.0

    replay = clock.replay(entries, clock.CARD_24GB, size_of=size_of)
    times = [replay.spans[number][1] for number in starts]
    return times[-1] - times[-2]


LEAST = {8192: 1650, 16384: 2100}
"""Tokens a second with clipping at every step; the products alone allow 2335."""


def test_8b_that_clips_every_step_hides_it_under_the_next_forward(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all tokens in one micro-batch: 150 TFLOPS, a link of 22 GB/s each way, DRAM of 65 GB/s."""
    marks = Marks(sim, monkeypatch)
    found = {}
    for overlap in ("none", "forward"):
        entries = with_dram(record(sim, marks, overlap))
        found[overlap] = {tokens: tokens / seconds(entries, marks.starts, tokens) for tokens in LEAST}
    for tokens, least in LEAST.items():
        assert found["forward"][tokens] >= least, found
        assert found["forward"][tokens] > 1.1 * found["none"][tokens], found
