"""Does what "auto" plans beside the activations of a batch train without running out of memory?"""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch
from programs.models import Tower
from programs.twins import seeded
from torch import nn

import tiermem
from tiermem.integrations.choice import compute_policy, find_room
from tiermem.plans.activations import activations_of

MIB = 1 << 20
SHAPES = {"deep": (128, 512, 12), "wide": (256, 1024, 4), "few": (320, 1280, 2)}
"""Width, inner width, blocks."""


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens.flatten())


@pytest.mark.parametrize(("capacity_mib", "num_tokens"), [(12, 512), (24, 4096), (64, 512)])
@pytest.mark.parametrize("checkpoint", [None, False], ids=["", "checkpointed"])
@pytest.mark.parametrize("shape", SHAPES)
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
        policy = compute_policy(model, 2, device, 1, tmp_path / "states", room)
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
