"""Does what "auto" plans beside the activations of a batch train without running out of memory?"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import seeded
from torch import nn

import tiermem
from tiermem.engine.room import find_room
from tiermem.plans.activations import activations_of

MIB = 1 << 20
SHAPES = {"deep": (128, 512, 12), "wide": (256, 1024, 4), "few": (320, 1280, 2)}
"""Width, inner width, blocks."""


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens.flatten())


ROOMS = [(12, 512), (24, 512), (40, 1024), (64, 4096)]
"""MiB of the device, and tokens."""


def cases() -> Iterator[Any]:
    """All; of a shape and a room, one of both ways to keep activations is slow."""
    every = itertools.product(enumerate(SHAPES), (None, False), enumerate(ROOMS))
    for (i, shape), checkpoint, (j, (capacity_mib, num_tokens)) in every:
        marks = [pytest.mark.slow] if (i + j) % 2 != (checkpoint is None) else []
        name = f"{shape}-{'' if checkpoint is None else 'checkpointed'}-{capacity_mib}-{num_tokens}"
        yield pytest.param(shape, checkpoint, num_tokens, capacity_mib, marks=marks, id=name)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("shape", "checkpoint", "num_tokens", "capacity_mib"), cases())
def test_what_auto_plans_beside_activations_trains_without_running_out(
    shape: str,
    checkpoint: bool | None,
    num_tokens: int,
    capacity_mib: int,
    sim: ModuleType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    width, inner, num_blocks = SHAPES[shape]
    device = torch.device("sim")
    model = seeded(lambda: Tower(width, inner, num_blocks, checkpoint=checkpoint))
    tokens = torch.zeros(8, num_tokens // 8, dtype=torch.long)
    sim.set_capacity(capacity_mib * MIB)
    predicted = activations_of(model, loss_of, tokens, device)
    assert predicted is not None
    room = find_room(model, device, predicted)
    if room.device_bytes == 1:
        pytest.skip("the activations alone are more than the device holds")
    caplog.set_level(logging.INFO, "tiermem")
    try:
        policy = tiermem.choose_policy(
            model,
            tiermem.OffloadPolicy(paths=tmp_path / "states"),
            loss_of=loss_of,
            batch=tokens,
            device=device,
        )
    except ValueError:
        assert room.device_bytes < 6 * max(
            sum(param.nbytes for param in block.parameters()) for block in model.children()
        )
        return
    with tiermem.shard(model, policy, device=device) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            loss_of(model, tokens.to(device)).backward()
            optim.step()
            optim.zero_grad()
        peak = torch.accelerator.max_memory_allocated()
        planned = shards.plan.device_bytes + predicted.peak_bytes
        assert peak <= capacity_mib * MIB
        assert peak <= 1.1 * planned + MIB


# ---- callers that know no batch ------------------------------------------------------------------

DEVICE, HOST, NVME = tiermem.Tier.DEVICE, tiermem.Tier.HOST, tiermem.Tier.NVME


def tower() -> nn.Module:
    return seeded(lambda: Tower(256, 1024, 6, checkpoint=None))


def test_shard_without_a_policy_uses_the_card(sim: ModuleType) -> None:
    needed = 16 * sum(param.numel() for param in tower().parameters())
    homes = {}
    for part in (0.5, 4):
        sim.set_capacity(int(part * needed))
        model = tower()
        with tiermem.shard(model, device="sim") as shards:
            homes[part] = shards.policy.optim, shards.policy.optim_ratio
            states = tiermem.AdamW(model.parameters())
            on_device = [tile.state_home is DEVICE for tile in states.tiles_of(shards).tiles]
            tokens = torch.zeros(1, 8, dtype=torch.long, device="sim")
            loss_of(model, tokens).backward()
            states.step()
            assert all(on_device) == (part == 4)
    assert homes[4] == (DEVICE, 1.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parts", ["both", "params"])
def test_homes_of_a_config_that_are_auto_are_those_that_choose_policy_finds(
    parts: str, sim: ModuleType, tmp_path: Path
) -> None:
    model = tower()
    sim.set_capacity(8 * sum(param.numel() for param in model.parameters()))
    disk = {"nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "auto", **disk},
            "offload_optimizer": {"device": "auto" if parts == "both" else "nvme", **disk},
        },
        "tiermem": {"host_bytes": 24 << 20},  # too little for all of the states
    }
    read = tiermem.config.load_config(config)
    expected = tiermem.choose_policy(model, read.policy(), read.moved, device="sim")
    engine, *_ = tiermem.initialize(model=model, config=config, device="sim")
    with contextlib.ExitStack() as closing:
        closing.callback(engine.close)
        chosen = engine.shards.policy
        names = ("params", "optim", "optim_ratio", "grads", "streamed_ratio", "device_bytes")
        assert [getattr(chosen, each) for each in names] == [
            getattr(expected, each) for each in names
        ]
        assert chosen.params is not DEVICE or chosen.optim is NVME
        if parts == "params":
            assert chosen.optim is NVME
        engine.backward(loss_of(engine, torch.zeros(1, 8, dtype=torch.long, device="sim")))
        engine.step()


def test_what_is_no_tier_of_a_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="OffloadPolicy"):
        tiermem.shard(tower(), "fastest")  # type: ignore[arg-type]
