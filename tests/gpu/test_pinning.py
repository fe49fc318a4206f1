"""Is host memory registered with the GPU's driver: all that crosses the link, nothing else, and
only when that is asked for?"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

import pytest
import torch
from programs import models
from programs.twins import seeded

import tiermem
from tiermem import OffloadPolicy, Tier

pytestmark = pytest.mark.gpu


def is_pinned(address: int) -> bool:
    """Asked of a storage that begins there: torch looks at where a storage begins, and an arena is
    one storage."""
    page = (ctypes.c_char * 64).from_address(address)
    return torch.frombuffer(page, dtype=torch.uint8).is_pinned()


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("params", [Tier.HOST, Tier.NVME])
def test_what_crosses_the_link_is_pinned_and_nothing_else(
    params: Tier,
    pin_memory: bool,
    accelerator: torch.device,
    device_module: ModuleType,
    tmp_path: Path,
) -> None:
    if not any(hasattr(device_module, name) for name in ("cudart", "host_register")):
        pytest.skip(f"{accelerator.type} registers no host memory")
    policy = OffloadPolicy(
        params=params,
        optim=Tier.HOST,
        persistence_numel=50,
        pin_memory=pin_memory,
        paths=[tmp_path],
    )
    with tiermem.shard(seeded(models.ShortTower), policy) as shards:
        tiermem.AdamW(shards.model.parameters())
        [(start, num_bytes)] = shards.store.arena.regions
        link_bytes = shards.plan.link_bytes
        assert 0 < link_bytes < num_bytes
        crossing = range(start, start + link_bytes, 4096)
        assert {is_pinned(address) for address in crossing} == {pin_memory}
        assert not any(
            is_pinned(address) for address in range(start + link_bytes, start + num_bytes, 4096)
        )
        homes = [live.shard for live in shards.units if live.shard is not None]
        assert {is_pinned(home.data_ptr()) for home in homes} == {pin_memory}
    assert not is_pinned(torch.empty(64, dtype=torch.uint8).data_ptr())
