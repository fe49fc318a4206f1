"""In simulated time: what of a training step hides behind what?

The graph is what the library has asked of the device; its disk reads are added where it started and
awaited them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Layers
from torch import nn

import tiermem
from accelerator import clock
from accelerator.clock import Rate
from tiermem import OffloadPolicy, Tier
from tiermem.gradients.gradient_link import GradientLink
from tiermem.swap.memory.arena import Slot
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore
from tiermem.weights.unit_memory import StagedRead

WIDTH, DEPTH = 64, 8


class Ring:
    """The free buffers of a link. Who takes one awaits the addition of what was in it."""

    def __init__(self, sim: ModuleType, free: Any, adds: dict[int, int]) -> None:
        self.sim, self.free, self.adds, self.put, self.empty = sim, free, adds, free.put, free.empty

    def get(self) -> Slot:
        slot: Slot = self.free.get()
        self.sim.mark("await a buffer", needs=[self.adds.get(slot.offset, -1)], blocks=True)
        return slot


@pytest.fixture
def waits(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """Adds to the recording: disk reads, additions to gradients at home on the lane "cpu", and
    which thread waits for them.

    A read or an addition that was begun before the recording is taken for done: `record` forgets
    it.
    """
    read, wait, staged_wait = TensorStore.read, Move.wait, StagedRead.wait
    send, take, join = GradientLink.send, GradientLink._take, GradientLink.join
    reads: dict[int, int] = {}  # by the Move
    adds: dict[int, int] = {}  # by the buffer's offset

    def started(store: TensorStore, ranges: Any, name: str, *args: Any, **kwargs: Any) -> Move:
        move = read(store, ranges, name, *args, **kwargs)
        reads[id(move)] = sim.mark(f"read {name}", "disk read", store._entries[name].num_bytes)
        return move

    def awaited(move: Move) -> Any:
        sim.mark("await a read", needs=[reads.get(id(move), -1)], blocks=True)
        return wait(move)

    def awaited_copy(reading: StagedRead) -> None:
        staged_wait(reading)
        sim.mark("await the start of a copy", needs=[reads.get(id(reading._move), -1)], blocks=True)

    def sent(link: GradientLink, parts: Any, store: Any) -> None:
        if not isinstance(link._free, Ring):
            link._free = Ring(sim, link._free, adds)
        send(link, parts, store)

    def taken(link: GradientLink, slot: Slot, copied: Any, hosted: Any, store: Any) -> None:
        def noted(parts: Any) -> None:
            store(parts)
            num_bytes = 3 * sum(part.data.nbytes for part in parts)  # read twice, written once
            adds[slot.offset] = sim.mark("add gradients", "cpu", num_bytes, blocks=True)

        take(link, slot, copied, hosted, noted)

    def joined(link: GradientLink) -> None:
        join(link)
        sim.mark("await gradients", needs=list(adds.values()), blocks=True)

    monkeypatch.setattr(TensorStore, "read", started)
    monkeypatch.setattr(Move, "wait", awaited)
    monkeypatch.setattr(StagedRead, "wait", awaited_copy)
    monkeypatch.setattr(GradientLink, "send", sent)
    monkeypatch.setattr(GradientLink, "_take", taken)
    monkeypatch.setattr(GradientLink, "join", joined)
    return [reads, adds]


def record(
    sim: ModuleType,
    tier: Tier,
    folder: Path,
    is_trained: bool,
    waits: Sequence[dict[int, int]] = (),
    depth: int = DEPTH,
) -> tuple[list[Any], list[Any]]:
    """What the forward and the backward of one pass ask of the device, the order of units being
    known."""
    # without, a layer's bytes are those of its one weight
    linears = [nn.Linear(WIDTH, WIDTH, bias=depth == DEPTH) for _ in range(depth)]
    model = Layers(*(nn.Sequential(linear, nn.Tanh()) for linear in linears))
    policy = OffloadPolicy(
        params=tier, optim=Tier.HOST, paths=[folder], persistence_numel=0, unit_buffers=4
    )
    sim.set_schedule("late")
    with tiermem.shard(model, policy, is_trained=is_trained) as shards:
        x, found = torch.ones(4 * WIDTH, WIDTH, device="sim"), []
        for _ in range(2):
            sim.synchronize()
            found = []
            with torch.set_grad_enabled(is_trained):
                _begin(sim, shards, waits)
                loss = model(x).sum()
                found.append(_recorded(sim))
            sim.synchronize()
            if is_trained:
                _begin(sim, shards, waits)
                loss.backward()
                found.append(_recorded(sim))
                for param in model.parameters():
                    param.grad = None
                shards.prefetcher.end_pass()
    return found[0], found[-1]


def _begin(sim: ModuleType, shards: tiermem.Shards, waits: Sequence[dict[int, int]]) -> None:
    """Starts to record when no helper thread has work, so that what was begun before is not in the
    recording."""
    for thread in (shards._passage.starter, shards._passage.reader):
        if thread is not None:
            thread.submit(int).result()
    sim.synchronize()
    for numbers in waits:
        numbers.clear()
    sim.record(True)


def _recorded(sim: ModuleType) -> list[Any]:
    sim.record(False)
    return list(sim.recording())


def rates(compute_per_copy: float, **lanes: Rate) -> dict[str, Rate]:
    """A block's product takes `compute_per_copy` times as long as the copy of its weights, which
    takes a second."""
    copied, flops = 4 * (WIDTH * WIDTH + WIDTH), 2 * 4 * WIDTH**3
    found = {
        "compute": Rate(flops_per_s=flops / compute_per_copy),
        "to device": Rate(bytes_per_s=copied),
    }
    return found | {"to host": Rate(bytes_per_s=copied)} | lanes


def test_copies_of_weights_on_host_hide_behind_forward(sim: ModuleType, tmp_path: Path) -> None:
    """The first units are there from the pass before, and what is copied last is for the next
    one."""
    entries, _ = record(sim, Tier.HOST, tmp_path, is_trained=False)
    replay = clock.replay(entries, rates(2.5))
    # it never waits
    assert replay.busy_spans("compute")[-1][1] == pytest.approx(replay.busy_s["compute"])
    bound = clock.replay(entries, rates(0.5))
    copies = bound.busy_spans("to device")
    # the link never waits
    assert copies[-1][1] == pytest.approx(bound.busy_s["to device"], rel=0.1)


# ---- the rates of an 8B model on a card of 24 GB -------------------------------------------------

LAYERS, LAYER_NUMEL = 32, 218e6
"""Of a Llama of 8B."""


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.NVME])
def test_forward_and_backward_of_8b_take_the_longest_of_compute_link_and_disk(
    tier: Tier, sim: ModuleType, waits: list[dict[int, int]], tmp_path: Path
) -> None:
    """Each at most 1.05 of its own longest lane, at 8k and at 16k tokens: 150 TFLOPS, 22 GB/s each
    way, NVMe of 7 GB/s.

    Where the disk bounds it, backward ends with one unit's copy, maths, way home and addition after
    the last read.
    """
    phases = dict(
        zip(("forward", "backward"), record(sim, tier, tmp_path, True, waits, LAYERS), strict=True)
    )
    numel = WIDTH * WIDTH
    for tokens in (8192, 16384):

        def size_of(entry: Any, tokens: int = tokens) -> tuple[float, float]:
            # the products; what is small in a layer of 4096 is not counted
            if entry["lane"] == "compute":
                return 0.0, entry["flops"] * (LAYER_NUMEL / numel) * (tokens / (4 * WIDTH))
            return entry["bytes"] * (2 * LAYER_NUMEL) / (4 * numel), 0.0

        for phase, entries in phases.items():
            replay = clock.replay(entries, clock.CARD_24GB, size_of=size_of)
            longest = max(replay.busy_s.values())
            assert replay.makespan_s <= 1.05 * longest, (
                phase,
                tokens,
                replay.busy_s,
                replay.makespan_s,
            )
