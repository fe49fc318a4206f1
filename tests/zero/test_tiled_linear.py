"""TiledLinear computes what a whole layer computes, in units as small as its tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.zero import TiledLinear


class Wide(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (3, 1), (1, 4), (3, 4), (70, 45)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_whole_layer_and_its_gradients(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(70, 45, bias=bias).double()
    tiled = TiledLinear(70, 45, bias, in_splits, out_splits, init_linear=whole, dtype=torch.float64)
    x = torch.randn(5, 70, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    torch.testing.assert_close(tiled(x), whole(twin))
    tiled(x).square().sum().backward()
    whole(twin).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)


def test_split_input_and_split_output_are_lists() -> None:
    tiled = TiledLinear(6, 4, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    outputs = tiled([torch.ones(3, 3), torch.ones(3, 3)])
    assert [tuple(y.shape) for y in outputs] == [(3, 2), (3, 2)]


@pytest.mark.parametrize("splits", [0, -1, 9])
def test_splits_that_cannot_be_are_errors(splits: int) -> None:
    with pytest.raises(RuntimeError, match="allowed are 1 to"):
        TiledLinear(8, 8, in_splits=splits)


def test_a_layer_of_another_shape_is_not_copied() -> None:
    with pytest.raises(RuntimeError, match="the other layer is 8 -> 4"):
        TiledLinear(8, 8, out_splits=2).copy_params_from(nn.Linear(8, 4))


def test_unit_buffers_shrink_with_the_number_of_tiles(tmp_path: Path) -> None:
    policy = OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=600)
    sizes, losses = [], []
    for layer in (nn.Linear(512, 512), TiledLinear(512, 512, out_splits=8)):
        torch.manual_seed(0)
        model = Wide(layer)
        nn.init.constant_(next(model.parameters()), 0.01)
        with tiermem.shard(model, policy) as shards:
            sizes.append(shards.plan.unit_slot_bytes)
            losses.append(model(torch.ones(2, 512)).shape)
    assert sizes[0] == 512 * 512 * 4
    assert sizes[1] == sizes[0] // 8
    assert losses[0] == losses[1]


def test_a_unit_that_is_too_large_is_refused_and_one_of_tiles_is_not(tmp_path: Path) -> None:
    policy = OffloadPolicy(params=Tier.NVME, paths=[tmp_path], unit_numel=40_000, persistence_numel=0)
    with pytest.raises(ValueError, match=r"unit 'layer' holds 262656 elements.*TiledLinear"):
        tiermem.shard(Wide(nn.Linear(512, 512)), policy)
    tiermem.shard(Wide(TiledLinear(512, 512, out_splits=8)), policy).close()
    assert not list(tmp_path.iterdir())
