"""Tiles that rest on HOST or NVMe and are stepped on an accelerator: how many, which bytes cross
the link, do copies hide?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import loss_of, seeded
from sent_bytes import sent_bytes

import tiermem
from accelerator import clock
from accelerator.clock import Rate
from accelerator.test_device_step import HOMES, OPTIMIZERS, build, muon, policy_of, train
from accelerator.test_parity import differences
from tiermem import OffloadPolicy, Tier
from tiermem.forecast import Rates, choose
from tiermem.forecast.rates import Compute
from tiermem.optim.tile import Tile
from tiermem.optim.tile_step import Way
from tiermem.optim.tile_stream import TileStream
from tiermem.optim.tiles import StateTiles
from tiermem.plans.plan import Buffers
from tiermem.swap.memory.arena import Arena
from tiermem.swap.memory.device_memory import DeviceMemory


def is_sent(tile: Tile) -> bool:
    """Whether an accelerator steps a tile that rests elsewhere."""
    return tile.engine is Tier.DEVICE and tile.state_home is not Tier.DEVICE


def tiles_of(optim: Any, shards: tiermem.Shards) -> list[Tile]:
    found: list[Tile] = optim.tiles_of(shards).tiles
    return found


@pytest.mark.parametrize("home", HOMES)
def test_the_ratio_is_the_part_of_the_elements_that_is_sent(
    home: str, sim: ModuleType, tmp_path: Path
) -> None:
    for ratio in (None, 0.0, 0.25, 0.5, 1.0):
        policy = policy_of("exact", tmp_path, **HOMES[home] | {"streamed_ratio": ratio})
        model = build("exact")
        with tiermem.shard(model, policy, device="sim") as shards:
            tiles = tiles_of(tiermem.AdamW(model.parameters()), shards)
            total, sent = (
                sum(tile.numel for tile in tiles),
                sum(tile.numel for tile in tiles if is_sent(tile)),
            )
            due, largest = (ratio or 0.0) * total, max(tile.numel for tile in tiles)
            assert due - largest < sent <= due
            assert Tier.DEVICE not in {tile.state_home for tile in tiles}


def test_a_tile_comes_after_the_last_use_of_what_its_buffer_was_before(sim: ModuleType) -> None:
    sim.set_schedule("side_first")
    numel, where = 1 << 14, torch.device("sim")
    memory, arena = DeviceMemory(where), Arena(1 << 20, 1 << 20)
    states = (
        arena.take(4 * numel, "states", crosses_link=True).tensor.view(torch.float32).fill_(3.0)
    )
    arena.pin(where)
    earlier = torch.empty(numel, device=where)
    address, total = earlier.data_ptr(), earlier.fill_(7.0).sum()
    del earlier
    stream = TileStream(memory, where, Buffers(4 * numel, 1))
    stream.begin()
    place = stream.bring(states)
    stream.arrive()
    assert place.data_ptr() == address
    assert (place.sum().item(), total.item()) == (3.0 * numel, 7.0 * numel)
    stream.close()
    memory.close()
    arena.close()


def test_what_stays_on_the_device_is_not_sent(sim: ModuleType, tmp_path: Path) -> None:
    policy = policy_of(
        "exact", tmp_path, params=Tier.HOST, optim=Tier.HOST, optim_ratio=0.5, streamed_ratio=1.0
    )
    model = build("exact")
    with tiermem.shard(model, policy, device="sim") as shards:
        tiles = tiles_of(tiermem.AdamW(model.parameters()), shards)
        assert {(tile.state_home, is_sent(tile)) for tile in tiles} == {
            (Tier.DEVICE, False),
            (Tier.HOST, True),
        }


def test_a_part_that_the_forecast_chooses_trains_to_the_same_bits(
    sim: ModuleType, tmp_path: Path
) -> None:
    policy = policy_of("compact", tmp_path, params=Tier.HOST, optim=Tier.HOST, host_bytes=1 << 28)
    fast_link = Rates(1e9, 1e9, link_bytes_s=50e9, kernel_bytes_s=1e9, tile_s=0)
    choice = choose(build("compact"), policy, fast_link, Compute(1e-12, 2e-12), is_gpu=True)
    assert choice.policy.streamed_ratio
    kept = dataclasses.replace(policy, streamed_ratio=0.0)
    sent, stepped = (
        train(OPTIMIZERS["AdamW"], "compact", "sim", each) for each in (choice.policy, kept)
    )
    assert differences(sent, stepped) == []


def test_without_an_accelerator_none_is_sent(tmp_path: Path) -> None:
    model = build("exact")
    policy = policy_of("exact", tmp_path, params=Tier.HOST, optim=Tier.HOST, streamed_ratio=1.0)
    with tiermem.shard(model, policy, device="cpu") as shards:
        assert not any(
            is_sent(tile) for tile in tiles_of(tiermem.AdamW(model.parameters()), shards)
        )
        assert shards.plan.streams.num == 0


def test_a_whole_matrix_that_is_larger_than_a_buffer_is_stepped_on_the_cpu(
    sim: ModuleType, tmp_path: Path
) -> None:
    model = build("exact")
    policy = policy_of("exact", tmp_path, params=Tier.HOST, optim=Tier.HOST, streamed_ratio=1.0)
    with tiermem.shard(model, policy, device="sim") as shards:
        tiles = tiles_of(muon(model), shards)
        assert {tile.numel <= 4096 for tile in tiles if is_sent(tile)} == {True}
        assert {is_sent(tile) for tile in tiles} == {True, False}


def recorded(
    sim: ModuleType, policy: OffloadPolicy, precision: str
) -> tuple[tiermem.Shards, StateTiles]:
    """A model and its states; what their second step asked of the device is recorded."""
    model = seeded(lambda: Tower(num_blocks=6)).bfloat16()
    shards = tiermem.shard(model, policy, device="sim")
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        loss_of(model, 0, "sim").backward()
        shards.homes.store.flush()
        sim.synchronize()
        sim.record(True)
        optim.step()
        sim.record(False)
        optim.zero_grad()
    return shards, optim.tiles_of(shards)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("precision", ["exact", "compact", "tiny"])
@pytest.mark.parametrize("home", HOMES)
def test_the_bytes_that_cross_the_link_are_those_that_are_said(
    home: str, precision: str, sim: ModuleType, tmp_path: Path
) -> None:
    fields = {"num_moments": 2, "streamed_ratio": 0.5, **HOMES[home]}
    policy = policy_of(precision, tmp_path, **fields)
    shards, states = recorded(sim, policy, precision)
    with shards:
        sent = [
            sent_bytes(tile.live.unit, tile.numel, shards.plan, policy)
            for tile in states.tiles
            if is_sent(tile)
        ]
        buffers = states._streams[Way.DEVICE_STREAMS]
        for stream, due in (
            (buffers._down, sum(each.down for each in sent)),
            (buffers._up, sum(each.up for each in sent)),
        ):
            copies = (
                e
                for e in sim.recording()
                if e["kind"] == "operation" and e["place"][1] == stream.stream_id
            )
            assert sum(entry["bytes"] for entry in copies) == due > 0


@pytest.mark.parametrize(
    "homes",
    [
        {"params": Tier.HOST, "optim": Tier.HOST, "streamed_ratio": 1.0},
        {"params": Tier.NVME, "optim": Tier.NVME, "streamed_ratio": 1.0},
        {"params": Tier.HOST, "optim": Tier.DEVICE, "grads": Tier.HOST},
        {"params": Tier.HOST, "optim": Tier.DEVICE, "grads": Tier.DEVICE},
    ],
    ids=["sent from host", "sent from nvme", "weights and gradients", "weights"],
)
def test_copies_of_tiles_hide_behind_each_other_and_behind_the_step(
    homes: dict[str, Any], sim: ModuleType, tmp_path: Path
) -> None:
    """In simulated time, where each lane takes a second for all tiles: a step takes little more
    than that. Also where only weights, or weights and gradients, are not where the states are: three
    seconds, when copies and steps took turns."""
    policy = policy_of("exact", tmp_path, persistence_numel=0, **homes)
    sim.set_schedule("late")
    shards, states = recorded(sim, policy, "exact")
    shards.close()
    lanes, num = ("to device", "to host", "compute"), len(states.tiles)
    busy = clock.replay(list(sim.recording()), dict.fromkeys(lanes, Rate(1.0))).busy_s
    replay = clock.replay(list(sim.recording()), {lane: Rate(busy[lane]) for lane in lanes})
    most_s = 1.5 if homes["optim"] is Tier.DEVICE else 1 + 4 / num
    assert replay.makespan_s <= most_s, (replay.makespan_s, num)


def test_weights_go_to_the_device_when_the_last_step_has_brought_them(
    sim: ModuleType, tmp_path: Path
) -> None:
    """In simulated time, with a slow way back: the next forward's copies begin when the step's have
    ended, though nothing else orders the two streams."""
    policy = policy_of(
        "exact", tmp_path, params=Tier.HOST, optim=Tier.DEVICE, persistence_numel=0, unit_buffers=2
    )
    model = seeded(lambda: Tower(num_blocks=6)).bfloat16()
    sim.set_schedule("late")
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            loss_of(model, 0, "sim").backward()
            sim.synchronize()
            sim.record(True)
            optim.step()
            optim.zero_grad()
            loss_of(model, 1, "sim")
            sim.record(False)
        up = optim.tiles_of(shards)._streams[Way.DEVICE]._up
        copies = shards._passage.copies
        assert copies is not None
    entries = list(sim.recording())
    rates = {"compute": Rate(), "to device": Rate(), "to host": Rate(1.0)}
    spans = clock.replay(entries, rates).spans
    places = [entry["place"][1] if entry["kind"] == "operation" else None for entry in entries]
    came = [span for span, place in zip(spans, places, strict=True) if place == up.stream_id]
    went = [span for span, place in zip(spans, places, strict=True) if place == copies.stream_id]
    assert len(came) > 6 and len(went) > 6
    assert min(start for start, _ in went) >= max(end for _, end in came) > 0
