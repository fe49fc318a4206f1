"""Do modules of torch.jit train as their plain twins, or are they refused with the reason?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs.twins import assert_same_tensors
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier


class Holder(nn.Module):
    """A model with a block in its middle that torch.jit may have made."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        made = {"plain": lambda: block, "traced": lambda: torch.jit.trace(block, torch.ones(1, 8))}
        self.first = nn.Linear(8, 8)
        self.block = made[kind]()
        self.activation = nn.Tanh() if kind == "plain" else torch.jit.script(nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.block(self.first(x))).square().mean()


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.HOST, Tier.NVME])
def test_a_traced_module_trains_as_the_plain_one(home: Tier, tmp_path: Path) -> None:
    policy = OffloadPolicy(params=home, optim=home, paths=[tmp_path] if home is Tier.NVME else ())
    found = []
    for kind in ("plain", "traced"):
        model = Holder(kind)
        with tiermem.shard(model, policy):
            optim = tiermem.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(2, 8)).backward()
                optim.step()
                optim.zero_grad()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_tensors(found[1], found[0])


def test_a_scripted_module_with_weights_is_refused_with_the_reason() -> None:
    inside = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    for model, name in ((inside, "1"), (torch.jit.script(nn.Linear(4, 4)), "model")):
        with pytest.raises(
            ValueError,
            match=f"module '{name}' was made by torch.jit.script.*compile it by engine.compile",
        ):
            tiermem.shard(model)
    with pytest.raises(ValueError, match=r"module '1' was made by torch.jit.script"):
        tiermem.initialize(
            model=inside, config={"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
        )
