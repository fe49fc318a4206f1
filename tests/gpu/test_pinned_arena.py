"""Is host memory registered with the GPU's driver exactly when the policy asks for it?"""

from __future__ import annotations

import pytest
import torch
import zoo
from twins import seeded

import tiermem
from tiermem import OffloadPolicy, Tier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("pin_memory", [True, False])
def test_pin_memory_registers_the_arena_with_the_driver(pin_memory: bool) -> None:
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, persistence_numel=50, pin_memory=pin_memory)
    with tiermem.shard(seeded(zoo.Tower).cuda(), policy) as shards:
        homes = [live.shard for live in shards.units if live.shard is not None]
        assert homes
        assert {home.is_pinned() for home in homes} == {pin_memory}
