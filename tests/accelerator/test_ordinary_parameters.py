"""Do parameters that their owner keeps on a device step as on the CPU, to the bit, with their
states on HOST or NVMe?"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import loss_of, seeded

import tiermem
from accelerator.test_parity import differences
from tiermem import OffloadPolicy, Precision, Tier

SCHEDULES = ("at_once", "late", "random:1", "random:2", "random:3")


def trained(
    device: str, policy: OffloadPolicy, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    model = seeded(Tower).to(device, dtype)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2, policy=policy)
    losses = []
    for step in range(4):
        loss = loss_of(model, step, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optim.step()
        optim.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.detach())
        if step == 2:
            optim.load_state_dict(optim.state_dict())
    states = optim.state_dict()["state"]
    found = {
        "losses": [loss.item() for loss in losses],
        "weights": {name: value.cpu() for name, value in model.state_dict().items()},
        "states": {
            f"{number}.{name}": value
            for number, entry in states.items()
            for name, value in entry.items()
        },
    }
    optim.close()
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("preset", ["exact", "compact"])
@pytest.mark.parametrize("home", ["host", "nvme", "both"])
def test_states_away_from_a_device_change_no_bit(
    home: str, preset: str, sim: ModuleType, tmp_path: Path
) -> None:
    """On both tiers, a tile whose states rest in memory has its weights where another tile's states
    are read to."""
    dtype, precision = (
        (torch.float32 if preset == "exact" else torch.bfloat16),
        Precision.preset(preset),
    )
    where: dict[str, Any] = {
        "optim": Tier.HOST if home == "host" else Tier.NVME,
        "paths": [tmp_path],
    }
    if home == "both":
        where |= {"host_bytes": 1 << 24, "resident_bytes": 99_000}
    policy = OffloadPolicy(**where, tile_numel=4096, tile_buffers=3, precision=precision)
    expected = trained("cpu", OffloadPolicy(optim=Tier.HOST, precision=precision), dtype)
    for schedule in SCHEDULES:
        sim.set_schedule(schedule)
        assert differences(trained("sim", policy, dtype), expected) == [], schedule
