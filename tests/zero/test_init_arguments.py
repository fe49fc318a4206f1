"""Does every documented argument of zero.Init act, or say why it does not?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, is_absent, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.run.init_params import AsBuilt
from tiermem.zero import DeepSpeedTensorOverride, GatheredParameters, Init, ZeroParamStatus
from tiermem.zero.partition_parameters import restore_init_context, shutdown_init_context

POLICY = OffloadPolicy(params=Tier.HOST, persistence_numel=50)


def config_of(folder: Path, **zero: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(folder)}
    section = {
        "stage": 3,
        "offload_param": offload,
        "stage3_param_persistence_threshold": 50,
    } | zero
    return {"train_batch_size": 1, "zero_optimization": section}


def test_arguments_are_in_the_documented_order(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    Init(model, None, True, "cpu", False, config_of(tmp_path), None, True, torch.bfloat16)
    assert is_absent(model.head.weight)
    assert model.head.weight.dtype is torch.bfloat16
    assert not list(tmp_path.iterdir())  # it rests in memory, whatever the config says


@pytest.mark.parametrize(
    ("remote", "is_on_disk"), [(None, True), ("nvme", True), ("cpu", False), ("none", False)]
)
def test_remote_device_says_where_parameters_rest(
    remote: str | None, is_on_disk: bool, tmp_path: Path
) -> None:
    plain = seeded(models.ShortTower)
    torch.manual_seed(0)
    with Init(remote_device=remote, config_dict_or_path=config_of(tmp_path), pin_memory=True):
        model = models.ShortTower()
    assert bool(list(tmp_path.iterdir())) == is_on_disk
    with GatheredParameters(model.parameters()):
        assert_same_tensors(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_remote_devices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed are none, cpu, nvme"):
        Init(remote_device="gpu")
    with pytest.raises(ValueError, match=r"no path is given: set offload_param\.nvme_path"):
        Init(remote_device="nvme")


def test_a_swapper_of_the_reference_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"zero\.Init was given param_swapper=.*tiers move parameters here"
    ):
        Init(param_swapper=object())


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("zero_quantized_weights", "quantised_gather"),
        ("zero_quantized_nontrainable_weights", "quantised_frozen"),
    ],
)
def test_quantised_arguments_hold_for_shard_and_initialize(
    name: str, field: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        with Init(config_dict_or_path=config_of(tmp_path), **{name: True}):
            return models.ShortTower()

    with tiermem.shard(build(), POLICY) as shards:
        assert getattr(shards.policy, field)
    engine, _, _, _ = tiermem.initialize(model=build(), config=config_of(tmp_path))
    assert getattr(engine.shards.policy, field)
    engine.destroy()


def test_arguments_that_a_policy_contradicts_are_refused() -> None:
    with Init(policy=POLICY, zero_quantized_nontrainable_weights=True) as init:
        model = models.ShortTower()
    assert init._built is not None
    built = AsBuilt(fields={"secondary_group_size": 2})
    assert built.over(POLICY).secondary_group_size == 2
    with pytest.raises(ValueError, match=r"secondary_group_size=4 in the policy.*arguments say 2"):
        built.over(dataclasses.replace(POLICY, secondary_group_size=4))
    with pytest.raises(ValueError, match=r"quantised_frozen=True with stage 2"):
        tiermem.shard(model, OffloadPolicy(stage=2))


def test_the_deprecated_name_of_the_config_warns(tmp_path: Path) -> None:
    with (
        pytest.warns(DeprecationWarning, match="use config_dict_or_path"),
        Init(config=config_of(tmp_path)),
    ):
        model = models.ShortTower()
    assert is_absent(model.head.weight)


def test_without_ranks_there_is_one_part() -> None:
    init = Init()
    assert (init.get_partition_rank(), init.get_dp_process_group()) == (0, None)


def test_tensors_inside_are_as_ever_unless_asked() -> None:
    with Init(policy=POLICY, dtype=torch.bfloat16):
        assert torch.zeros(3).dtype is torch.float32


def test_tensors_inside_get_the_dtype_when_asked() -> None:
    both = [DeepSpeedTensorOverride.dtype, DeepSpeedTensorOverride.device]
    with Init(policy=POLICY, dtype=torch.bfloat16, tensor_overrides=both):
        made = [
            torch.tensor(1.5),
            torch.empty(2),
            torch.zeros(2),
            torch.ones(2),
            torch.full((2,), 1.5),
            torch.eye(2),
        ]
        made += [torch.randn(2), torch.arange(0.0, 1.0, 0.5)]
        assert {each.dtype for each in made} == {torch.bfloat16}
        assert torch.zeros(2, dtype=torch.float64).dtype is torch.float64
        assert torch.arange(3).dtype is torch.int64
    assert torch.zeros(2).dtype is torch.float32


def test_the_innermost_context_takes_what_is_built_in_it(tmp_path: Path) -> None:
    nvme = OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=50)
    plain = seeded(lambda: nn.ModuleList([models.ShortTower(), models.ShortTower()]))
    torch.manual_seed(0)
    with Init(policy=POLICY):
        outer = models.ShortTower()
        assert not list(tmp_path.iterdir())
        with Init(policy=nvme):
            inner = models.ShortTower()
            assert list(tmp_path.iterdir())
        assert is_absent(inner.head.weight)
    for model, twin in zip((outer, inner), plain, strict=True):
        with GatheredParameters(model.parameters()):
            assert_same_tensors(dict(model.named_parameters()), dict(twin.named_parameters()))


def test_a_context_can_be_suspended() -> None:
    with Init(policy=POLICY):
        shutdown_init_context()
        ordinary = models.ShortTower()
        restore_init_context()
        model = models.ShortTower()
    assert not any(p.isnan().any() for p in ordinary.parameters())
    assert is_absent(model.head.weight)
    shutdown_init_context()  # outside of every context: nothing happens


def test_parameters_are_described_while_building() -> None:
    with Init(policy=POLICY):
        model = models.ShortTower()
        weight = model.layers[0].up.weight
        assert (weight.ds_shape, weight.ds_numel, weight.ds_tensor.shape) == (
            (97, 31),
            97 * 31,
            (97 * 31,),
        )
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with tiermem.shard(model, POLICY):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE  # one rank: it rests where it is used
        assert weight.ds_tensor.data_ptr() == weight.data_ptr()
    assert not hasattr(weight, "ds_id")


def fill_linears(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.25)


def test_apply_inside_finds_values_or_refuses(tmp_path: Path) -> None:
    with Init(config_dict_or_path=config_of(tmp_path)):
        model = models.ShortTower()
        model.apply(fill_linears)
    with GatheredParameters(model.head.weight):
        assert (model.head.weight == 0.25).all()

    with Init(config_dict_or_path=config_of(tmp_path, override_module_apply=False)):
        model = models.ShortTower()
        with pytest.raises(RuntimeError, match="override_module_apply is false: gather it"):
            model.apply(fill_linears)
        with GatheredParameters(model.head.weight, modifier_rank=0):
            model.head.apply(fill_linears)
        nn.init.constant_(model.layers[0].up.weight, 0.5)  # outside of apply
    with GatheredParameters(model.parameters()):
        assert (model.head.weight == 0.25).all()
        assert (model.layers[0].up.weight == 0.5).all()


@pytest.mark.parametrize("is_overridden", [True, False])
def test_apply_of_an_engine_gathers_unless_told_not_to(is_overridden: bool, tmp_path: Path) -> None:
    config = config_of(tmp_path, override_module_apply=is_overridden)
    engine, _, _, _ = tiermem.initialize(model=seeded(models.ShortTower), config=config)
    if is_overridden:
        assert engine.apply(fill_linears) is engine
        assert (engine.shards.weight(engine.module.head.weight) == 0.25).all()
    else:
        with pytest.raises(RuntimeError, match="values rest elsewhere"):
            engine.apply(fill_linears)
    engine.destroy()
