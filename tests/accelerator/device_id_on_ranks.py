"""Run by test_device_id.py on each of four ranks: MiCS and a copy in the background in a world
whose group has its device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tiermem
from accelerator import device
from tiermem import OffloadPolicy, Tier
from tiermem.ranks.topology import find_topology, group_aside

sim = device.load()


def weights_after_training(policy: OffloadPolicy, where: torch.device) -> torch.Tensor:
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, 0.5)
    with tiermem.shard(model, policy, device=where):
        optim = tiermem.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 64, device=where)).sum().backward()
        optim.step()
        return model.state_dict()["weight"].cpu().clone()


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    own = torch.device("sim", rank % 2)
    sim.set_device(own)
    policy = OffloadPolicy(
        params=Tier.HOST, optim=Tier.HOST, shard_group_size=2, timeout_s=20, persistence_numel=0
    )
    found = weights_after_training(policy, own)
    world = dist.group.WORLD
    assert world is not None and world.bound_device_id == own
    aside = group_aside(find_topology(3, timeout_s=20, device=own))
    half = dist.new_group([0, 1])
    dist.new_group([2, 3])
    if rank < 2:
        with pytest.raises(ValueError, match="make it without device_id"):
            group_aside(find_topology(3, half, 20, own))
    torch.save(found, folder / f"{rank}.pt")
    # the first rank's process has the store through which the others make their groups
    dist.barrier(aside)
    dist.destroy_process_group()
