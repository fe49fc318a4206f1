"""Do the transforms of torch.func around a streamed model give what they give around a plain
one?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs.models import Layers
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def blocks() -> nn.Module:
    """More of them than there are buffers."""
    torch.manual_seed(0)
    return Layers(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(6)))


CALLS: dict[str, Call] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones_like(x))[0],
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jacrev": lambda model, x: torch.func.jacrev(lambda x: model(x).sum(0))(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(lambda x: model(x).sum(0))(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).square().sum())(x[0]),
    "grads of samples": lambda model, x: torch.func.vmap(
        torch.func.grad(lambda row: model(row).sum())
    )(x),
}


def data(seed: int) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(seed))


def policy(home: Tier, folder: Path, overlap: str = "none") -> OffloadPolicy:
    sizes = {"persistence_numel": 0, "unit_buffers": 2, "tile_numel": 4096}
    return OffloadPolicy(params=home, optim=home, paths=[folder], overlap=overlap, **sizes)  # type: ignore[arg-type]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("name", CALLS)
def test_a_transform_gives_what_it_gives_around_a_plain_model(
    name: str, home: Tier, tmp_path: Path
) -> None:
    model, twin = blocks(), blocks()
    with tiermem.shard(model, policy(home, tmp_path)):
        torch.testing.assert_close(CALLS[name](model, data(0)), CALLS[name](twin, data(0)))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("name", CALLS)
def test_training_goes_on_between_transforms(name: str, overlap: str, tmp_path: Path) -> None:
    model, twin = blocks(), blocks()
    with tiermem.shard(model, policy(Tier.NVME, tmp_path, overlap)):
        optims = (
            tiermem.AdamW(model.parameters(), lr=1e-3),
            torch.optim.AdamW(twin.parameters(), lr=1e-3),
        )
        for number in range(4):
            found = []
            for each, optim in zip((model, twin), optims, strict=True):
                optim.zero_grad()
                found.append(CALLS[name](each, data(number)).detach())
                each(data(number)).square().mean().backward()
                optim.step()
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-6
        )
