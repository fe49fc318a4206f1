"""Does a model built under zero.Init hold the weights of a plain build, and does nothing else stay
behind?"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import models
from programs.homes import all_at
from programs.twins import assert_same_tensors, batch, is_absent, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.units import registry
from tiermem.weights.absent import RestingParameter
from tiermem.zero import GatheredParameters, Init, ZeroParamStatus

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": models.llama,
    "llama, tied": functools.partial(models.llama, tied=True),
    "nanogpt": models.NanoGPT,
    "tied": models.tied_tower,
    "frozen": models.frozen_tower,
}
HOMES = [Tier.DEVICE, Tier.HOST, Tier.NVME]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_equal_a_plain_builds_seed_for_seed(
    kind: str, home: Tier, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    plain = seeded(MODELS[kind])
    plain = plain.to(dtype) if dtype else plain
    policy = all_at(home, tmp_path)
    torch.manual_seed(0)
    with Init(policy=policy, dtype=dtype):
        model = MODELS[kind]()
    assert torch.rand(1).item() == after_plain_build(kind)  # the generator has gone as far
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
        assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
            n for n, p in plain.named_parameters() if not p.requires_grad
        }


@functools.cache
def after_plain_build(kind: str) -> float:
    seeded(MODELS[kind])
    return torch.rand(1).item()


def test_losses_equal_a_plain_builds(tmp_path: Path) -> None:
    policy, losses = all_at(Tier.NVME, tmp_path), []
    for builder in (Init(policy=policy, enabled=False), Init(policy=policy)):
        torch.manual_seed(0)
        with builder:
            model = models.llama()
        with tiermem.shard(model, policy):
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses += train_steps(model, optim, range(3))
    assert losses[:3] == losses[3:]


def test_parameters_show_nan_the_true_shape_and_the_coming_dtype(tmp_path: Path) -> None:
    with Init(policy=all_at(Tier.NVME, tmp_path), dtype=torch.bfloat16):
        model = models.NanoGPT()
    assert model.lm_head.weight.shape == (61, 32)
    assert is_absent(model.lm_head.weight)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    tiermem.shard(model, all_at(Tier.NVME, tmp_path)).close()


def test_copies_before_sharding_have_the_values_and_pickling_raises(tmp_path: Path) -> None:
    policy = all_at(Tier.NVME, tmp_path)
    with Init(policy=policy):
        model = models.ShortTower()
        inside = copy.deepcopy(model.layers[0])  # as torch.nn.TransformerEncoder does it
    with pytest.raises(
        RuntimeError,
        match=r"of shape \(\d+,( \d+)?\) whose values rest elsewhere.*GatheredParameters",
    ):
        pickle.dumps(model.layers[0])
    copied = copy.deepcopy(model.layers[0])
    with GatheredParameters(list(model.layers[0].parameters())):
        gathered = copy.deepcopy(model.layers[0])
    with tiermem.shard(model, policy), GatheredParameters(list(model.layers[0].parameters())):
        assert not any(type(p) is RestingParameter for p in model.layers[0].parameters())
        values = {name: value.clone() for name, value in model.layers[0].state_dict().items()}
    assert_same_tensors(dict(gathered.state_dict()), values)
    assert_same_tensors(dict(copied.state_dict()), values)
    with GatheredParameters(list(inside.parameters())):
        assert_same_tensors(dict(inside.state_dict()), values)


def test_what_code_does_to_a_parameter_inside_is_kept(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = models.ShortTower()
        up = model.layers[0].up
        with torch.no_grad():
            up.weight.mul_(2.0)
            up.weight[3] = 7.0
            up.weight.data[4].fill_(5.0)
            torch.add(up.weight, 1.0, out=up.weight)
            torch.nn.init.constant_(tensor=model.head.weight, val=0.25)
            model.layers[1].load_state_dict(model.layers[0].state_dict())
            model.layers[2].up.weight.copy_(input_of(up))
        return model

    def input_of(up: nn.Linear) -> torch.Tensor:
        return up.weight.abs() + up.weight.norm()

    policy = all_at(Tier.NVME, tmp_path)
    plain = seeded(build)
    torch.manual_seed(0)
    with Init(policy=policy):
        model = build()
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_data_that_parameters_exchange_inside_is_kept(tmp_path: Path) -> None:
    policy = all_at(Tier.HOST, tmp_path, persistence_numel=0)
    with Init(policy=policy):
        model = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(2)])
        for value, linear in enumerate(model):
            nn.init.constant_(linear.weight, value)
        first = model[0].weight.data
        model[0].weight.data = model[1].weight.data
        model[1].weight.data = first
    with tiermem.shard(model, policy):
        state = model.state_dict()
        assert [state[f"{number}.weight"].unique().tolist() for number in range(2)] == [
            [1.0],
            [0.0],
        ]


def test_a_weight_that_was_tied_over_frees_its_place(tmp_path: Path) -> None:
    policy = all_at(Tier.NVME, tmp_path)
    with Init(policy=policy) as init:
        model = models.NanoGPT()
        gc.collect()
        assert init._built is not None
        assert len(init._built._kept) == sum(1 for _ in model.parameters())
    tiermem.shard(model, policy).close()


def test_a_finished_module_is_converted(tmp_path: Path) -> None:
    model, plain = seeded(models.ShortTower), seeded(models.ShortTower)
    policy = all_at(Tier.NVME, tmp_path)
    Init(module=model, policy=policy)
    assert is_absent(model.head.weight)
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_parameter_without_dimensions_is_kept(tmp_path: Path) -> None:
    with Init(policy=all_at(Tier.NVME, tmp_path)):
        model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.5))})
        assert model["scale"].item() == 2.5
    assert model["scale"].shape == () and is_absent(model["scale"])
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path)):
        assert model.state_dict()["scale"] == 2.5


def test_disabled_context_does_nothing(tmp_path: Path) -> None:
    for builder in (
        Init(policy=all_at(Tier.NVME, tmp_path), enabled=False),
        Init(policy=OffloadPolicy(stage=2)),
    ):
        torch.manual_seed(0)
        with builder:
            model = models.ShortTower()
        assert_same_tensors(dict(model.state_dict()), dict(seeded(models.ShortTower).state_dict()))


def test_nothing_is_left_when_the_body_raises(tmp_path: Path) -> None:
    def build() -> None:
        with Init(policy=all_at(Tier.NVME, tmp_path)):
            models.ShortTower()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build()
    assert not list(tmp_path.iterdir())
    plain = models.ShortTower()  # hooks and mode are gone
    assert all(p.isfinite().all() for p in plain.parameters())


def test_nothing_is_left_of_a_model_that_is_never_sharded(tmp_path: Path) -> None:
    with Init(policy=all_at(Tier.NVME, tmp_path)):
        model = models.ShortTower()
    assert list(tmp_path.iterdir())
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_another_policy_may_shard_than_built(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with Init(policy=all_at(Tier.NVME, tmp_path)):
        model = models.ShortTower()
    with tiermem.shard(model, OffloadPolicy(stage=1)):
        assert_same_tensors(dict(model.state_dict()), dict(seeded(models.ShortTower).state_dict()))


def test_a_meta_model_without_weights_is_refused(tmp_path: Path) -> None:
    policy = all_at(Tier.NVME, tmp_path)
    with Init(policy=policy), torch.device("meta"):
        model = models.ShortTower()
    with pytest.raises(RuntimeError, match="never given values: load a checkpoint"):
        tiermem.shard(model, policy)
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_every_parameter_shows_what_it_is_from_init_on(tmp_path: Path) -> None:
    shapes = {name: p.shape for name, p in models.ShortTower().named_parameters()}
    with Init(policy=all_at(Tier.NVME, tmp_path)):
        model = models.ShortTower()
    for name, param in model.named_parameters():
        assert (param.ds_shape, param.ds_numel) == (shapes[name], shapes[name].numel())
        assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
        assert param.ds_tensor.shape == (param.ds_numel,)
    assert len({param.ds_id for param in model.parameters()}) == len(shapes)
    tiermem.shard(model, all_at(Tier.NVME, tmp_path)).close()


class OnDevice(nn.Module):
    """Linear layers and a parameter of its own, at some depth, on a device that is given."""

    def __init__(self, depth: int, device: str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(31, 97, device=device)
        self.own = nn.Parameter(torch.zeros(7, device=device))
        self.inner = (
            nn.utils.skip_init(OnDevice, depth - 1, device=device or "cpu") if depth else None
        )  # type: ignore[attr-defined]


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("is_root", [False, True], ids=["nested", "root"])
def test_skip_init_and_to_empty_make_room_for_values(
    is_root: bool, home: Tier, tmp_path: Path
) -> None:
    policy = all_at(home, tmp_path)
    with Init(policy=policy):
        model = nn.utils.skip_init(OnDevice, 2) if is_root else OnDevice(2)  # type: ignore[attr-defined]
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(number)
    assert all(registry.owner_of(param) is not None for param in model.parameters())
    with tiermem.shard(model, policy):
        for number, value in enumerate(model.state_dict().values()):
            assert (value == number).all()


def test_adapters_that_are_added_afterwards_are_partitioned_when_asked(tmp_path: Path) -> None:
    policy = all_at(Tier.NVME, tmp_path)
    with Init(policy=policy, dtype=torch.bfloat16):
        model = models.ShortTower()
    model.adapter = nn.Linear(31, 97)
    values = {name: value.clone() for name, value in model.adapter.state_dict().items()}
    model.embed.weight.convert_to_zero_parameters(list(model.parameters()))
    assert is_absent(model.adapter.weight)
    assert (model.adapter.weight.ds_shape, model.adapter.weight.dtype) == ((97, 31), torch.float32)
    with tiermem.shard(model, policy):
        found = {
            name.partition(".")[2]: v
            for name, v in model.state_dict().items()
            if name.startswith("adapter")
        }
        assert_same_tensors(found, values)
        with pytest.raises(RuntimeError, match="add modules before"):
            model.embed.weight.convert_to_zero_parameters([nn.Parameter(torch.zeros(3))])


def test_integer_parameters_are_kept(tmp_path: Path) -> None:
    policy = all_at(Tier.HOST, tmp_path)
    with Init(policy=policy):
        model = models.ShortTower()
        model.codes = nn.Parameter(torch.arange(99, dtype=torch.int8), requires_grad=False)
    with tiermem.shard(model, policy):
        assert torch.equal(model.state_dict()["codes"], torch.arange(99, dtype=torch.int8))


def test_config_and_policy_together_are_refused() -> None:
    with pytest.raises(ValueError, match="config or a policy, not both"):
        Init(config_dict_or_path={"train_batch_size": 1}, policy=OffloadPolicy())
    with pytest.raises(ValueError, match="config is an older name of config_dict_or_path"):
        Init(config={}, config_dict_or_path={})


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match="nowhere"),
        Init(policy=all_at(Tier.NVME, tmp_path / "nowhere")),
    ):
        pass


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("persistence_numel", [0, 50, 1 << 20])
def test_masters_start_from_the_fp32_initial_values_when_asked(
    home: Tier, persistence_numel: int, tmp_path: Path
) -> None:
    initial = {name: p.detach() for name, p in seeded(models.ShortTower).named_parameters()}
    policy = all_at(
        home, tmp_path, master_from="init", persistence_numel=persistence_numel, tile_numel=4096
    )
    torch.manual_seed(0)
    with Init(policy=policy, dtype=torch.bfloat16):
        model = models.ShortTower()
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        tiles = optim.tiles_of(shards)
        for _, shard in shards.parameters():
            assert torch.equal(tiles.state(shard, "master"), initial[shard.name].flatten()), (
                shard.name
            )
        # zero gradients: the step leaves masters as they are
        model(batch(0)[0]).sum().mul(0.0).backward()
        optim.step()
        for _, shard in shards.parameters():
            assert torch.equal(tiles.state(shard, "master"), initial[shard.name].flatten()), (
                shard.name
            )
            assert torch.equal(shards.weight(shard.param), initial[shard.name].bfloat16())
        assert not any(name.startswith("initial/") for name in shards.store._entries)


def test_masters_from_initial_values_are_in_the_plan(tmp_path: Path) -> None:
    model = seeded(models.ShortTower).bfloat16()
    with tiermem.shard(model, all_at(Tier.NVME, tmp_path, master_from="init")) as shards:
        row = next(row for row in shards.plan.rows if row.what == "initial masters")
        assert row.num_bytes == sum(live.unit.shard_numel * 4 for live in shards.units)
        assert shards.store.stats().nvme_bytes <= shards.plan.disk_bytes


# ---- load_state_dict before sharding -------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_state_dict_is_loaded_before_sharding(kind: str, home: Tier, tmp_path: Path) -> None:
    plain, policy = seeded(MODELS[kind], 5), all_at(home, tmp_path)
    with Init(policy=policy):
        model = MODELS[kind]()
    model.load_state_dict(plain.state_dict())
    assert all(is_absent(param) for param in model.parameters() if param.numel())
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
        model.load_state_dict(seeded(MODELS[kind], 6).state_dict())
        assert_same_tensors(dict(model.state_dict()), dict(seeded(MODELS[kind], 6).state_dict()))


def test_a_loaded_state_dict_fills_what_meta_left_empty(tmp_path: Path) -> None:
    plain, policy = seeded(models.NanoGPT), all_at(Tier.NVME, tmp_path)
    with torch.device("meta"), Init(policy=policy):
        model = models.NanoGPT()
    model.load_state_dict(plain.state_dict())
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_a_state_dict_loaded_before_sharding_keeps_fp32_for_masters() -> None:
    plain, policy = (
        seeded(models.ShortTower),
        OffloadPolicy(persistence_numel=50, master_from="init"),
    )
    with Init(policy=policy, dtype=torch.bfloat16):
        model = models.ShortTower()
    model.load_state_dict(plain.state_dict())
    with tiermem.shard(model, policy):
        tiermem.AdamW(model.parameters())
        for name, param in model.named_parameters():
            due = plain.get_parameter(name).detach()
            assert torch.equal(tiermem.utils.safe_get_full_fp32_param(param), due)
            assert param.dtype is torch.bfloat16


def test_a_state_dict_loaded_in_a_gather_is_what_the_gather_writes() -> None:
    plain, policy = seeded(models.ShortTower), OffloadPolicy(persistence_numel=50)
    with Init(policy=policy):
        model = models.ShortTower()
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.load_state_dict(plain.state_dict())
    with (
        pytest.raises(RuntimeError, match="gathered parameters were written"),
        GatheredParameters(list(model.parameters())),
    ):
        model.load_state_dict(seeded(models.ShortTower, 3).state_dict())
    with tiermem.shard(model, policy):
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_state_dict_of_another_shape_is_torchs_error() -> None:
    with Init(policy=OffloadPolicy(persistence_numel=50)):
        model = nn.Linear(8, 8)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.load_state_dict(nn.Linear(9, 8).state_dict())
