"""What is a sharded model's weight outside forward and backward?"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, is_absent, loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.zero import GatheredParameters


@pytest.fixture
def model() -> nn.Module:
    return seeded(models.tied_tower)


@pytest.fixture
def plain(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


@pytest.fixture(params=[Tier.HOST, Tier.NVME])
def shards(
    request: pytest.FixtureRequest, model: nn.Module, plain: nn.Module, tmp_path: Path
) -> Iterator[Shards]:
    with tiermem.shard(
        model, OffloadPolicy(params=request.param, paths=[tmp_path], persistence_numel=50)
    ) as shards:
        yield shards


@pytest.fixture
def released(model: nn.Module, plain: nn.Module, tmp_path: Path) -> Iterator[nn.Parameter]:
    with tiermem.shard(
        model, OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=50)
    ):
        yield model.layers[0].up.weight


def test_released_parameter_keeps_its_shape_and_takes_no_memory(released: nn.Parameter) -> None:
    assert released.shape == (97, 31)
    assert released.numel() == 97 * 31
    assert is_absent(released)
    with torch._C.DisableTorchFunctionSubclass():
        assert released.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, pickle.dumps, lambda p: torch.save(p, io.BytesIO())]
)
def test_released_parameter_is_not_copied_or_pickled_but_says_how(
    way: Callable[[nn.Parameter], object], released: nn.Parameter
) -> None:
    with pytest.raises(
        RuntimeError, match=r"of shape \(97, 31\) whose values rest elsewhere cannot be copied"
    ):
        way(released)


def test_module_of_a_unit_is_copied_while_its_parameters_are_gathered(
    model: nn.Module, plain: nn.Module, released: nn.Parameter
) -> None:
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(model.layers[0].up)
    with GatheredParameters(model.layers[0].up.parameters()):
        copied = copy.deepcopy(model.layers[0].up)
    assert type(copied.weight) is nn.Parameter
    assert_same_tensors(copied.state_dict(), plain.layers[0].up.state_dict())


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda p: p.add_(torch.ones(97, 31)),
    "copy_": lambda p: p.copy_(torch.ones(97, 31)),
    "+=": lambda p: p.__iadd__(1.0),
    "item": lambda p: p.__setitem__(3, 1.0),
    "out": lambda p: torch.add(torch.ones(97, 31), 1.0, out=p),
    "fill_": lambda p: p.fill_(1.0),
    "init": nn.init.zeros_,
    "init by keyword": lambda p: nn.init.normal_(tensor=p),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_a_released_parameter_raises(released: nn.Parameter, write: str) -> None:
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"of shape \(97, 31\) whose values rest elsewhere"),
    ):
        WRITES[write](released)


def test_filling_past_the_parameter_raises(model: nn.Module, released: nn.Parameter) -> None:
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunctionSubclass(),
        pytest.raises(RuntimeError, match="data pointer"),
    ):
        released.zero_()
    assert is_absent(released)
    assert loss_of(model, 0).isfinite()


def test_parameters_keep_their_identity(model: nn.Module, tmp_path: Path) -> None:
    before = list(model.parameters())
    with tiermem.shard(model, OffloadPolicy(params=Tier.NVME, paths=[tmp_path])):
        loss_of(model, 0).backward()
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert model.head.weight is model.embed.weight


def test_state_dict_gathers(shards: Shards, plain: nn.Module) -> None:
    assert_same_tensors(dict(shards.model.state_dict()), dict(plain.state_dict()))


def test_state_dict_of_a_part_gathers(shards: Shards, plain: nn.Module) -> None:
    assert_same_tensors(
        dict(shards.model.layers[0].state_dict()), dict(plain.layers[0].state_dict())
    )
    part = shards.model.layers[0].up
    assert_same_tensors(
        dict(part.state_dict(prefix="x.")), dict(plain.layers[0].up.state_dict(prefix="x."))
    )


def test_state_dict_keeps_tied_weights_tied(shards: Shards) -> None:
    state = shards.model.state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


def test_saved_state_dict_loads_into_a_plain_model(shards: Shards, plain: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(shards.model.state_dict(), file)
    file.seek(0)
    fresh = seeded(models.tied_tower, seed=9)
    fresh.load_state_dict(torch.load(file))
    assert_same_tensors(dict(fresh.state_dict()), dict(plain.state_dict()))


def test_load_state_dict_puts_weights_where_they_rest(shards: Shards) -> None:
    other = seeded(models.tied_tower, seed=9)
    shards.model.load_state_dict(other.state_dict())
    assert_same_tensors(dict(shards.model.state_dict()), dict(other.state_dict()))
    assert loss_of(shards.model, 0).item() == loss_of(other, 0).item()


def test_load_state_dict_names_what_does_not_fit(shards: Shards, plain: nn.Module) -> None:
    state = plain.state_dict()
    state["layers.0.up.weight"] = torch.zeros(3, 3)
    del state["layers.0.up.bias"]
    with pytest.raises(
        RuntimeError, match=r"(?s)layers\.0\.up\.bias.*size mismatch for layers\.0\.up\.weight"
    ):
        shards.model.load_state_dict(state)


def test_load_state_dict_after_a_step_is_followed_by_masters(
    shards: Shards, plain: nn.Module
) -> None:
    optim = tiermem.AdamW(shards.model.parameters())
    loss_of(shards.model, 0).backward()
    optim.step()
    shards.model.load_state_dict(plain.state_dict())
    assert_same_tensors(dict(shards.model.state_dict()), dict(plain.state_dict()))
    for _, shard in shards.parameters():
        assert torch.equal(
            optim.tiles_of(shards).state(shard, "master"), shards.weight(shard.param).flatten()
        )


def test_copying_raises_and_says_how(shards: Shards) -> None:
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        copy.deepcopy(shards.model)


def test_pickling_raises_and_says_how(shards: Shards) -> None:
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        pickle.dumps(shards.model)


def test_sharding_twice_is_refused(shards: Shards) -> None:
    with pytest.raises(ValueError, match="sharded already"):
        tiermem.shard(shards.model)


def test_materialized_model_is_an_ordinary_one(shards: Shards, plain: nn.Module) -> None:
    model = shards.model
    shards.close(materialize=True)
    assert_same_tensors(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert model.head.weight is model.embed.weight
    assert loss_of(model, 0).item() == loss_of(plain, 0).item()
    copy.deepcopy(model)
    loss_of(model, 0).backward()
    assert model.head.weight.grad.isfinite().all()


def test_closed_model_can_be_sharded_again(shards: Shards, plain: nn.Module) -> None:
    model = shards.model
    shards.close(materialize=True)
    with tiermem.shard(model):
        assert loss_of(model, 0).item() == loss_of(plain, 0).item()


def test_model_closed_without_materializing_reads_nan_or_its_weights(
    model: nn.Module, tmp_path: Path
) -> None:
    tiermem.shard(
        model, OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=50)
    ).close()
    assert model.layers[0].up.weight.isnan().all()
    assert model.layers[0].up.weight.shape == (97, 31)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_graph_that_outlives_the_shards_raises(
    home: Tier, model: nn.Module, tmp_path: Path
) -> None:
    shards = tiermem.shard(
        model, OffloadPolicy(params=home, paths=[tmp_path], persistence_numel=50)
    )
    loss = loss_of(model, 0)
    shards.close()
    with pytest.raises(RuntimeError, match="closed"):
        loss.backward()


@pytest.mark.parametrize("compute_dtype", ["storage", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_views_that_a_hook_has_kept_read_nan_after_their_unit(
    home: Tier, dtype: torch.dtype, compute_dtype: Literal["storage", "fp32"], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(*(nn.Linear(65, 65) for _ in range(5))).to(dtype),
        torch.ones(3, 65, dtype=dtype),
    )
    with torch.no_grad():
        due = model(x)
    kept: list[torch.Tensor] = []
    policy = OffloadPolicy(
        params=home,
        paths=[tmp_path],
        persistence_numel=0,
        compute_dtype=compute_dtype,
        unit_buffers=2,
    )
    with torch.no_grad(), tiermem.shard(model, policy) as shards:
        for module in model:
            module.register_forward_pre_hook(
                lambda module, _: kept.append(module.weight.view(-1)[1:])
            )
        first = model(x)
        assert torch.equal(first, due) or compute_dtype == "fp32"
        shards.prefetcher.empty()
        is_streamed = shards.find(model[0].weight)[0].is_streamed
        assert all(bool(view.isnan().all()) == is_streamed for view in kept)
        for view in kept if is_streamed else ():
            view.zero_()  # in nobody's memory
        assert torch.equal(model(x), first)
        shards.prefetcher.empty()
        with GatheredParameters(list(model.parameters())):
            assert not any(param.isnan().any() for param in model.parameters())
    assert [view.numel() for view in kept] == [65 * 65 - 1] * 10
    assert all(view.isnan().all() or not view.any() for view in kept if is_streamed)


def test_a_model_that_is_closed_keeps_the_gradients_that_no_step_has_used(tmp_path: Path) -> None:
    found = []
    for is_sharded in (False, True):
        model = seeded(models.Tower)
        policy = OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, grads=Tier.NVME, paths=[tmp_path])
        shards = tiermem.shard(model, policy, device="cpu") if is_sharded else None
        for step in range(3):
            if step == 2 and shards is not None:
                shards.close(materialize=True)
            loss_of(model, step).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found.append(dict(model.state_dict()))
    assert_same_tensors(found[1], found[0])
