"""TiledLinear computes what a whole layer computes, in units as small as its tiles."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.zero import GatheredParameters, Init, TiledLinear, TiledLinearReturnBias


class Wide(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("in_splits", "out_splits"),
    [(1, 1), (7, 1), (1, 5), (7, 15), (70, 45), (3, 1), (1, 7), (11, 4)],
)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_whole_layer_and_its_gradients(
    in_splits: int, out_splits: int, bias: bool
) -> None:
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
    tiled = TiledLinear(
        6, 4, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False
    )
    outputs = tiled([torch.ones(3, 3), torch.ones(3, 3)])
    assert [tuple(y.shape) for y in outputs] == [(3, 2), (3, 2)]


@pytest.mark.parametrize("side", ["in", "out"])
@pytest.mark.parametrize("splits", [0, -1, 9])
def test_splits_that_cannot_be_are_errors(side: str, splits: int) -> None:
    with pytest.raises(
        RuntimeError, match=f"{side}_splits is {splits}; allowed are 1 to {side}_features=8"
    ):
        TiledLinear(8, 8, **{f"{side}_splits": splits})


def test_uneven_splits_and_names_are_the_references() -> None:
    tiled = TiledLinear(8, 5, in_splits=3, out_splits=2)
    assert {name: tuple(value.shape) for name, value in tiled.state_dict().items()} == {
        "linears.0.0.weight": (3, 3), "linears.0.1.weight": (3, 3), "linears.0.2.weight": (3, 2), "linears.0.2.bias": (3,),
        "linears.1.0.weight": (2, 3), "linears.1.1.weight": (2, 3), "linears.1.2.weight": (2, 2), "linears.1.2.bias": (2,),
    }  # fmt: skip


def test_inputs_that_do_not_fit_are_errors() -> None:
    tiled = TiledLinear(6, 4, in_splits=2, input_is_already_split=True)
    with pytest.raises(RuntimeError, match="3 pieces of input are given; in_splits is 2"):
        tiled([torch.ones(2)] * 3)
    with pytest.raises(RuntimeError, match="must be in_features=6"):
        TiledLinear(6, 4, in_splits=2)(torch.ones(3, 4))


class Scaled(nn.Linear):
    """A tile of another class, with an argument of its own."""

    def __init__(self, *args: int, scale: float, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_tiles_are_of_the_class_and_get_the_arguments_asked_for() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(6, 4)
    tiled = TiledLinear(6, 4, True, 2, 2, linear_cls=Scaled, init_linear=whole, scale=3.0)
    x = torch.randn(5, 6)
    assert all(type(tile) is Scaled for row in tiled.linears for tile in row)
    torch.testing.assert_close(tiled(x), whole(x) * 3.0)


class Megatrons(nn.Linear):
    """Leaves its bias to whoever called it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_return_bias_adds_outputs_and_hands_biases_on(bias: bool, combine: bool) -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(6, 4, bias=bias), torch.randn(5, 6)
    tiled = TiledLinearReturnBias(
        6, 4, bias, 3, 2, combine_out_splits=combine, linear_cls=Megatrons, init_linear=whole
    )
    y, found = tiled(x)
    torch.testing.assert_close(
        y if combine else torch.cat(y, -1), nn.functional.linear(x, whole.weight)
    )
    if bias:
        torch.testing.assert_close(found if combine else torch.cat(found), whole.bias)
    else:
        assert found is None


def test_return_bias_needs_tiles_that_do() -> None:
    with pytest.raises(
        RuntimeError, match=r"a tile returned Tensor; TiledLinearReturnBias needs \(output, bias\)"
    ):
        TiledLinearReturnBias(6, 4)(torch.ones(6))


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("when", ["inside Init", "after Init", "sharded", "gathered by the caller"])
def test_copying_reaches_partitioned_tiles(when: str, home: Tier, tmp_path: Path) -> None:
    policy = OffloadPolicy(params=home, paths=[tmp_path], persistence_numel=0)
    torch.manual_seed(0)
    whole, x = nn.Linear(6, 4), torch.randn(5, 6)
    with Init(policy=policy):
        model = Wide(TiledLinear(6, 4, in_splits=3, out_splits=2))
        if when == "inside Init":
            model.layer.copy_params_from(whole)
    if when == "after Init":
        model.layer.copy_params_from(whole)
    with tiermem.shard(model, policy, is_trained=False):
        if when == "sharded":
            model.layer.copy_params_from(whole)
        if when == "gathered by the caller":
            with GatheredParameters(model.layer.parameters(), modifier_rank=0):
                model.layer.copy_params_from(whole)
        torch.testing.assert_close(model(x), whole(x))


def test_parameters_at_work_fall_with_the_number_of_tiles(tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        paths=[tmp_path],
        persistence_numel=0,
        unit_buffers=1,
        max_reuse_numel=0,
    )
    most = []
    for tiles in (1, 2, 8):
        model = Wide(TiledLinear(512, 512, bias=False, out_splits=tiles))
        with tiermem.shard(model, policy) as shards:
            present: list[int] = []
            note = functools.partial(note_present, shards, present)
            for row in model.layer.linears:
                row[0].register_forward_pre_hook(note)
            model(torch.ones(2, 512, requires_grad=True)).sum().backward()
            most.append(max(present))
    assert most == [512 * 512 * 4 // tiles for tiles in (1, 2, 8)]  # one tile of fp32, nothing else


def note_present(shards: tiermem.Shards, present: list[int], *_: object) -> None:
    present.append(sum(live.unit.full_bytes for live in shards.units if live.is_present))


def test_a_layer_of_another_shape_is_not_copied() -> None:
    with pytest.raises(RuntimeError, match="the other layer is 8 -> 4"):
        TiledLinear(8, 8, out_splits=2).copy_params_from(nn.Linear(8, 4))


def test_unit_buffers_shrink_with_the_number_of_tiles(tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=600
    )
    sizes, losses = [], []
    for layer in (nn.Linear(512, 512), TiledLinear(512, 512, out_splits=8)):
        torch.manual_seed(0)
        model = Wide(layer)
        nn.init.constant_(next(model.parameters()), 0.01)
        with tiermem.shard(model, policy) as shards:
            sizes.append(shards.plan.units.slot_bytes)
            losses.append(model(torch.ones(2, 512)).shape)
    assert sizes[0] == 512 * 512 * 4
    assert sizes[1] == sizes[0] // 8
    assert losses[0] == losses[1]


def test_a_unit_that_is_too_large_is_refused_and_one_of_tiles_is_not(tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME, paths=[tmp_path], unit_numel=40_000, persistence_numel=0
    )
    with pytest.raises(ValueError, match=r"unit 'layer' holds 262656 elements.*TiledLinear"):
        tiermem.shard(Wide(nn.Linear(512, 512)), policy)
    tiermem.shard(Wide(TiledLinear(512, 512, out_splits=8)), policy).close()
    assert not list(tmp_path.iterdir())
