"""Do states that the user sets between steps lie where the next step reads them, on any tier?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.state_access import safe_get_full_fp32_param, safe_set_full_optimizer_state

WIDTH = 128


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def trained(folder: Path, tier: Tier, overlap: str, **fields: Any) -> list[torch.Tensor]:
    """The masters after steps between which moments are set."""
    folder.mkdir()
    torch.manual_seed(3)
    model = nn.Sequential(*[block() for _ in range(6)]).bfloat16()
    policy = OffloadPolicy(
        params=tier,
        grads=tier,
        optim=tier,
        paths=[folder],
        tile_numel=8192,
        overlap=overlap,  # type: ignore[arg-type]
        **fields,
    )
    data = torch.randn(5, WIDTH).bfloat16()
    with tiermem.shard(model, policy):
        optim = tiermem.AdamW(model.parameters(), lr=1e-3)
        for step in range(6):
            model(data).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
            for param in model.parameters() if step in (1, 3) else ():
                if param.ndim == 2:
                    value = torch.full((WIDTH, WIDTH), 1e-3)
                    safe_set_full_optimizer_state(param, value, "exp_avg")
        found = []
        for param in model.parameters():
            master = safe_get_full_fp32_param(param)
            assert master is not None
            found.append(master.clone())
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("durability", ["none", "step"])
def test_states_that_are_set_count_in_the_next_step(
    durability: str, overlap: str, tmp_path: Path
) -> None:
    """With durable steps a state that is set lies in two slots, in part in each."""
    expected = trained(tmp_path / "host", Tier.HOST, "none", durability="none")
    found = trained(tmp_path / "nvme", Tier.NVME, overlap, resident_bytes=0, durability=durability)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_moment_without_room_is_refused_also_after_a_reset(is_sharded: bool) -> None:
    """As OneCycleLR does to SGD: it gives groups a momentum."""
    model = block()
    policy = OffloadPolicy(optim=Tier.HOST, num_moments=0 if is_sharded else 2)
    if is_sharded:
        tiermem.shard(model, policy)
    optim = tiermem.SGD(model.parameters(), lr=0.1, policy=None if is_sharded else policy)
    for _ in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
        optim.step()
    optim.param_groups[0]["momentum"] = 0.9
    optim.state.clear()
    with pytest.raises(ValueError, match="room for 0 moments and now keeps momentum_buffer"):
        optim.step()
