"""Do the results of training stay the same, to the bit, when states or weights move between the tiers of a
machine with an accelerator amid it?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.precision import Precision

HOST = Tier.HOST
NVME = Tier.NVME

MOVES: list[dict[str, Any]] = [
    {"optim_ratio": 0.5},
    {"optim": NVME, "optim_ratio": 0.25},
    {"optim_ratio": 1.0, "streamed_ratio": 0.5},
    {"optim": HOST, "optim_ratio": 0.125, "streamed_ratio": None},
    {"optim_ratio": 0.75, "streamed_ratio": 1.0},
    {"optim": NVME, "optim_ratio": 1.0, "streamed_ratio": None},
]


def backward(model: nn.Module, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 7, (2, 5), generator=generator).to("sim")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return float(loss.detach())


def train(
    nvme: Path, fields: dict[str, Any], moves: list[dict[str, Any]]
) -> tuple[list[float], dict[str, torch.Tensor], list[set[Tier]]]:
    """Losses, weights, and the tiers of states after each move."""
    model = seeded(Tower).bfloat16()
    given = {"persistence_numel": 50, "tile_numel": 4096, **fields}
    policy = OffloadPolicy(paths=[nvme], **given)
    losses: list[float] = []
    tiers = []
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for number, move in enumerate(moves):
            if number % 2:  # between two micro-batches
                losses.append(backward(model, 3 * number))
            shards.rehome(dataclasses.replace(shards.policy, **move))
            tiers.append({tile.state_home for tile in optim.tiles_of(shards).tiles})
            for place in (1, 2):
                losses.append(backward(model, 3 * number + place))
                optim.step()
                optim.zero_grad()
        return losses, dict(model.state_dict()), tiers


@pytest.mark.parametrize("precision", ["exact", "compact"])
@pytest.mark.parametrize(("params", "grads"), [(HOST, HOST), (NVME, NVME), (Tier.DEVICE, None)])
def test_states_move_between_all_tiers(
    precision: str, params: Tier, grads: Tier | None, sim: ModuleType, tmp_path: Path
) -> None:
    fields = {
        "params": params,
        "grads": grads,
        "optim": HOST,
        "precision": Precision.preset(precision),
    }
    stays = train(tmp_path, fields, [{}] * len(MOVES))
    moves = train(tmp_path, fields, MOVES)
    assert moves[0] == stays[0]
    assert_same_tensors(moves[1], stays[1])
    assert moves[2][0] == {HOST, Tier.DEVICE}
    assert NVME in moves[2][1] and Tier.DEVICE in moves[2][1]
    assert Tier.DEVICE not in moves[2][-1]
    assert NVME in moves[2][-1]


@pytest.mark.parametrize("schedule", ["late", "side_first"])
def test_gradients_move_between_all_tiers(schedule: str, sim: ModuleType, tmp_path: Path) -> None:
    sim.set_schedule(schedule)
    fields = {"params": HOST, "optim": HOST, "grads": Tier.DEVICE}
    moves: list[dict[str, Any]] = []
    for tier in (HOST, Tier.DEVICE, NVME, Tier.DEVICE):
        moves += [{"grads": tier}, {}]
    stays = train(tmp_path, fields, [{}] * len(moves))
    moved = train(tmp_path, fields, moves)
    assert moved[0] == stays[0]
    assert_same_tensors(moved[1], stays[1])


@pytest.mark.parametrize("schedule", ["late", "side_first"])
@pytest.mark.parametrize("params", [HOST, NVME])
def test_weights_move_between_all_tiers(
    schedule: str, params: Tier, sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_schedule(schedule)
    fields = {
        "params": params,
        "grads": HOST,
        "optim": HOST,
        "persistence_numel": 0,
        "precision": Precision.preset("compact"),
    }
    moves: list[dict[str, Any]] = [
        {"params": Tier.DEVICE},
        {"optim_ratio": 0.5},
        {"params": NVME, "host_param_numel": 9000, "optim": NVME},
        {"params": HOST, "optim_ratio": 1.0, "streamed_ratio": 0.5},
        {"params": Tier.DEVICE, "optim": Tier.DEVICE, "optim_ratio": 0.5},
        {"params": NVME, "host_param_numel": 0, "optim_ratio": 1.0, "streamed_ratio": None},
        {"params": HOST},
    ]
    stays = train(tmp_path, fields, [{}] * len(moves))
    moved = train(tmp_path, fields, moves)
    assert moved[0] == stays[0]
    assert_same_tensors(moved[1], stays[1])


def test_states_that_have_left_the_device_do_not_move(sim: ModuleType, tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    policy = OffloadPolicy(params=HOST, optim=NVME, paths=[tmp_path])
    with tiermem.shard(model, policy, device="sim") as shards:
        shards.store.on_device.leave({"grad", "state"})
        with pytest.raises(RuntimeError, match="call reload_states first"):
            shards.rehome(dataclasses.replace(policy, optim=HOST))
        shards.store.on_device.come_back()
        shards.rehome(dataclasses.replace(policy, optim=HOST))
