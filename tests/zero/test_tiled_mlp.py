"""What does tiling along the sequence save, and does a linear layer keep a copy of its weight for
backward?"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.zero import TiledMLP


class Mlp(nn.Module):
    def __init__(self, shards: int = 0) -> None:
        super().__init__()
        self.shards = shards
        self.up, self.down = nn.Linear(6, 48), nn.Linear(48, 6)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.shards:
            return self.inner(x)
        return TiledMLP.apply(Mlp.inner, self, x, self.shards, [self.up.weight, self.down.weight])


class Around(nn.Module):
    def __init__(self, shards: int) -> None:
        super().__init__()
        self.mlp = Mlp(shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


@pytest.mark.parametrize("shape", [(2, 11, 6), (11, 6)], ids=str)
@pytest.mark.parametrize("shards", [1, 3, 11, 40])
def test_computes_what_the_whole_block_computes(shards: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole = Mlp().double()
    tiled = copy.deepcopy(whole)
    tiled.shards = shards
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    torch.testing.assert_close(tiled(x), whole(twin))
    tiled(x).square().sum().backward()
    whole(twin).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    for param, other in zip(tiled.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad)


def test_forward_keeps_the_input_alone() -> None:
    kept = {}
    for shards in (0, 4):
        model, x = Mlp(shards), torch.randn(2, 12, 6, requires_grad=True)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def note(
            t: torch.Tensor, sizes: dict[int, int] = sizes, weights: set[int] = weights
        ) -> torch.Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = model(x)
        y.sum().backward()
        kept[shards] = sum(sizes.values())
    rows = 2 * 12
    assert kept[0] == rows * (6 + 48 + 48) * 4  # x, and the wide activations before and after gelu
    assert kept[4] <= rows * 6 * 4


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_trains_on_every_tier(home: Tier, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Around(3)
    plain, x = copy.deepcopy(model), torch.randn(2, 11, 6)
    plain(x).square().sum().backward()
    policy = OffloadPolicy(
        params=home, optim=home, paths=[tmp_path], persistence_numel=0, max_reuse_numel=0
    )
    with tiermem.shard(model, policy) as shards:
        model(x).square().sum().backward()
        for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(shards.gradient(param), twin.grad)


@pytest.mark.parametrize(("shards", "shape"), [(0, (2, 3, 6)), (2, (6,))])
def test_what_cannot_be_cut_is_refused(shards: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="1 shard or more"):
        TiledMLP.apply(Mlp.inner, Mlp(), torch.ones(shape), shards)


def test_backward_keeps_no_bytes_of_a_released_weight(tmp_path: Path) -> None:
    """What memory_efficient_linear is for: autograd keeps views, and they hold NaN while the unit
    is away."""
    policy = OffloadPolicy(
        params=Tier.NVME, paths=[tmp_path], persistence_numel=0, unit_buffers=1, max_reuse_numel=0
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(3, 64, requires_grad=True)
    with tiermem.shard(model, policy, is_trained=False) as shards:
        saved: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = model(x)
        views = [t for t in saved if any(live.memory.sees(t) for live in shards.units)]
        assert len(views) >= 2
        away = [
            t
            for t in views
            if not any(live.memory.sees(t) and live.is_present for live in shards.units)
        ]
        assert away
        assert all(t.isnan().all() for t in away)
        y.sum().backward()
        assert x.grad.isfinite().all()
