"""In simulated time: what of a training step hides behind what, and does the clock tell what a CPU run takes?

The graph is what the library has asked of the device; its disk reads are added where it started and awaited them.
"""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from accelerator import clock
from accelerator.clock import Rate
from tiermem import OffloadPolicy, Tier
from tiermem.swap.move import Move
from tiermem.swap.store import TensorStore

WIDTH, DEPTH = 64, 8


class Blocks(nn.Module):
    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def reads(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Reads of NVMe are host work on the lane "disk read": begun where they are started, and awaited where they are.

    By the Move, the number of those in the recording; one that was begun before it is taken for done.
    """
    numbers: dict[int, int] = {}
    read, wait = TensorStore.read, Move.wait

    def started(store: TensorStore, ranges: Any, name: str, *args: Any, **kwargs: Any) -> Move:
        move = read(store, ranges, name, *args, **kwargs)
        numbers[id(move)] = sim.mark(f"read {name}", "disk read", store._entries[name].num_bytes)
        return move

    def awaited(move: Move, *args: Any, **kwargs: Any) -> Any:
        if id(move) in numbers:
            sim.mark("await a read", needs=[numbers.pop(id(move))], blocks=True)
        return wait(move, *args, **kwargs)

    monkeypatch.setattr(TensorStore, "read", started)
    monkeypatch.setattr(Move, "wait", awaited)
    return numbers


def record(
    sim: ModuleType, tier: Tier, folder: Path, is_trained: bool, reads: dict[int, int] | None = None
) -> list[Any]:
    """What one pass asks of the device, the order of units being known: forward alone, or with backward."""
    model = Blocks()
    policy = OffloadPolicy(params=tier, optim=Tier.HOST, paths=[folder], persistence_numel=0, unit_buffers=4)
    sim.set_schedule("late")
    with tiermem.shard(model, policy, is_trained=is_trained):
        x = torch.ones(4 * WIDTH, WIDTH, device="sim")
        for _ in range(2):
            sim.synchronize()
            (reads or {}).clear()
            sim.record(True)
            if is_trained:
                model(x).sum().backward()
            else:
                with torch.no_grad():
                    model(x)
            sim.record(False)
            entries = sim.recording()
    return list(entries)


def rates(compute_per_copy: float, **lanes: Rate) -> dict[str, Rate]:
    """A block's product takes `compute_per_copy` times as long as the copy of its weights, which takes a second."""
    copied, flops = 4 * (WIDTH * WIDTH + WIDTH), 2 * 4 * WIDTH**3
    found = {"compute": Rate(flops_per_s=flops / compute_per_copy), "to device": Rate(bytes_per_s=copied)}
    return found | {"to host": Rate(bytes_per_s=copied)} | lanes


def test_copies_of_weights_on_host_hide_behind_forward(sim: ModuleType, tmp_path: Path) -> None:
    """The first units are there from the pass before, and what is copied last is for the next one."""
    entries = record(sim, Tier.HOST, tmp_path, is_trained=False)
    replay = clock.replay(entries, rates(2.5))
    assert replay.busy_spans("compute")[-1][1] == pytest.approx(replay.busy_s["compute"])  # it never waits
    bound = clock.replay(entries, rates(0.5))
    copies = bound.busy_spans("to device")
    assert copies[-1][1] == pytest.approx(bound.busy_s["to device"], rel=0.1)  # the link never waits


def test_reads_of_weights_hide_behind_forward(sim: ModuleType, reads: dict[int, int], tmp_path: Path) -> None:
    """Reads are ahead of their use; the copies to the device are not yet."""
    disk = Rate(bytes_per_s=4 * WIDTH * WIDTH)
    entries = record(sim, Tier.NVME, tmp_path, False, reads)
    assert sum(entry["lane"] == "disk read" for entry in entries if entry["kind"] == "host_work") >= DEPTH - 4
    replay = clock.replay(entries, rates(3.0, **{"disk read": disk}))
    assert replay.hidden_share("disk read") > 0.6
    assert replay.makespan_s < 0.8 * sum(replay.busy_s.values())


@pytest.mark.slow
def test_the_clock_tells_what_a_run_on_a_cpu_takes(sim: ModuleType, tmp_path: Path) -> None:
    """The CPU's rate is measured on one model; a deeper one is predicted from its recording to 10 %."""
    torch.set_num_threads(1)
    flops, models = {}, {"calibrated": Blocks(512, 4), "predicted": Blocks(512, 10)}
    x = torch.ones(512, 512)
    for name, model in models.items():
        on_device = copy.deepcopy(model).to("sim")
        sim.record(True)
        on_device(x.to("sim")).sum().backward()
        sim.record(False)
        operations = (entry for entry in sim.recording() if entry["kind"] == "operation")
        flops[name] = [entry for entry in operations if entry["lane"] == "compute"]
    seconds = dict.fromkeys(models, math.inf)
    for _ in range(15):  # in turns: a rate changes with what else the machine does
        for name, model in models.items():
            start = time.perf_counter()
            model(x).sum().backward()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    total = sum(entry["flops"] for entry in flops["calibrated"])
    cpu = {"compute": Rate(flops_per_s=total / seconds["calibrated"])}
    assert clock.replay(flops["predicted"], cpu).makespan_s == pytest.approx(seconds["predicted"], rel=0.10)
