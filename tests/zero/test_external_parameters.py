"""Does a parameter that is used outside its own module's forward have its values, in forward and in
backward?"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import externals
import pytest
import torch
from programs.homes import all_on_nvme
from programs.models import VOCAB
from programs.twins import assert_same, batch, is_absent, loss_of, seeded, train, train_steps
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy, Shards
from tiermem.weights.absent import RestingParameter
from tiermem.zero import register_external_parameter, unregister_external_parameter

ROOMS = {
    "as planned": {},
    "few": {"unit_buffers": 4},
    "leaves at once": {"max_reuse_numel": 0, "unit_buffers": 4},
}


@pytest.fixture
def model() -> externals.LanguageModel:
    return seeded(externals.LanguageModel)


@pytest.fixture
def shards(model: nn.Module, tmp_path: Path) -> Iterator[Shards]:
    with tiermem.shard(model, all_on_nvme(tmp_path, max_reuse_numel=0)) as shards:
        yield shards


@pytest.mark.sampled(16)
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("kind", externals.MODELS)
def test_training_is_that_of_a_model_in_memory(kind: str, room: str, tmp_path: Path) -> None:
    model = seeded(externals.MODELS[kind])
    in_memory = OffloadPolicy(persistence_numel=0)
    assert_same(train(model, all_on_nvme(tmp_path, **ROOMS[room])), train(model, in_memory))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("kind", externals.MODELS)
def test_losses_are_those_of_plain_torch(kind: str, tmp_path: Path) -> None:
    model = seeded(externals.MODELS[kind])
    plain = copy.deepcopy(model)
    losses = train(model, all_on_nvme(tmp_path, max_reuse_numel=0), optimizer=tiermem.Adam).losses
    optim = torch.optim.Adam(plain.parameters(), lr=1e-2)
    assert losses == pytest.approx(train_steps(plain, optim, range(4)), rel=1e-6)


def test_evaluation_uses_foreign_weights(model: nn.Module, tmp_path: Path) -> None:
    expected = copy.deepcopy(model)(batch(0)[0])
    with (
        tiermem.shard(model, all_on_nvme(tmp_path, max_reuse_numel=0), is_trained=False),
        torch.no_grad(),
    ):
        assert torch.equal(model(batch(0)[0]), expected)
        assert torch.equal(model.eval()(batch(0)[0]), expected)


def test_a_parameter_that_the_root_returns_lives_until_backward_has_ended(tmp_path: Path) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.custom = externals.CustomLinear(31, 31)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.custom(x)

    model, x = seeded(Root), torch.ones(2, 31)
    plain = copy.deepcopy(model)
    y, bias = plain(x)
    (y * bias).sum().backward()
    with tiermem.shard(model, all_on_nvme(tmp_path, max_reuse_numel=0)) as shards:
        y, bias = model(x)
        assert bias is model.custom.bias
        assert torch.equal(bias, plain.custom.bias)
        (y * bias).sum().backward()
        assert torch.equal(shards.gradient(bias), plain.custom.bias.grad)
        assert torch.equal(shards.gradient(model.custom.weight), plain.custom.weight.grad)
        assert type(bias) is not nn.Parameter  # nobody holds it any more
        assert all(live.num_users == 0 for live in shards.units)


def test_the_next_pass_fetches_a_foreign_weight_ahead(model: nn.Module, shards: Shards) -> None:
    sequence = []
    for step in range(2):
        loss_of(model, step).backward()
        sequence.append([shards.units[i].unit.name for i in shards.prefetcher.order._seen])
    forward = ["embeddings", "layers.0", "layers.1", "layers.2", "embeddings"]
    assert sequence[0][:5] == forward
    assert sequence[0] == sequence[1]
    # nothing is left to come
    assert shards.prefetcher.order.distance(shards.units[0].unit.index) == float("inf")


def test_a_use_holds_its_unit_no_longer_than_the_call(model: nn.Module, shards: Shards) -> None:
    model(batch(0)[0])
    assert all(live.num_users == 0 for live in shards.units)
    assert type(model.embeddings.weight) is not nn.Parameter
    assert isinstance(model.embeddings.weight, nn.Parameter)


def test_a_view_is_held_until_its_module_ends(tmp_path: Path) -> None:
    model = seeded(externals.ByView)
    with tiermem.shard(model, all_on_nvme(tmp_path, max_reuse_numel=0)) as shards:
        held = []
        model.layers[2].register_forward_hook(lambda *_: held.append(shards.units[0].num_users))
        loss_of(model, 0).backward()
        assert held == [0, 1]
        assert all(live.num_users == 0 for live in shards.units)


def test_an_exception_inside_a_foreign_use_lets_go(model: nn.Module, shards: Shards) -> None:
    def broken(tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.ones(3, 5), model.embeddings.weight)

    expected = loss_of(model, 0).item()
    forward, model.forward = model.forward, broken
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(batch(0)[0])
    model.forward = forward
    assert all(live.num_users == 0 for live in shards.units)
    assert is_absent(model.embeddings.weight)
    assert loss_of(model, 0).item() == expected


def test_outside_forward_a_parameter_is_lent_for_the_call_alone(
    model: nn.Module, shards: Shards
) -> None:
    expected = shards.weight(model.embeddings.weight).sum(1)
    assert torch.equal(model.embeddings.weight.sum(1), expected)
    assert is_absent(model.embeddings.weight)
    assert not any(live.is_present for live in shards.units if live.is_streamed)


# ---- registered ones -----------------------------------------------------------------------------


def test_a_registered_parameter_is_there_whenever_the_module_runs(
    model: nn.Module, shards: Shards
) -> None:
    seen = []
    model.layers[1].register_forward_pre_hook(
        lambda *_: seen.append(type(model.embeddings.weight) is not RestingParameter)
    )
    model(batch(0)[0])
    register_external_parameter(model.layers[1], model.embeddings.weight)
    model(batch(0)[0])
    unregister_external_parameter(model.layers[1], model.embeddings.weight)
    model(batch(0)[0])
    assert seen == [False, True, False]


def test_registering_with_the_root_after_sharding(model: nn.Module, shards: Shards) -> None:
    expected = loss_of(model, 0).item()
    register_external_parameter(model, model.embeddings.weight)
    seen = []
    model.layers[1].register_forward_pre_hook(
        lambda *_: seen.append(type(model.embeddings.weight) is not RestingParameter)
    )
    loss = loss_of(model, 0)
    assert (seen, loss.item()) == ([True], expected)
    loss.backward()
    assert all(live.num_users == 0 for live in shards.units)


def test_a_registration_is_copied_with_the_module() -> None:
    model = copy.deepcopy(seeded(externals.ModuleZ3))
    assert [p is model.embeddings.weight for p in model._external_params] == [True]


def test_registering_twice_is_registering_once(model: nn.Module) -> None:
    for _ in range(2):
        register_external_parameter(model, model.embeddings.weight)
    unregister_external_parameter(model, model.embeddings.weight)
    with pytest.raises(RuntimeError, match="not registered"):
        unregister_external_parameter(model, model.embeddings.weight)


@pytest.mark.parametrize("what", [torch.zeros(3), "weight", None])
def test_what_is_no_parameter_is_refused(what: object) -> None:
    with pytest.raises(RuntimeError, match=r"give the torch\.nn\.Parameter itself"):
        register_external_parameter(nn.Linear(2, 2), what)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"give a torch\.nn\.Module"):
        register_external_parameter("layer", nn.Parameter(torch.zeros(VOCAB)))
