"""Are the documented classes, keys, defaults and bounds those of the documentation?"""

from __future__ import annotations

import sys
from typing import Any

import pydantic
import pytest
from config_keys import text_of

from tiermem import config as tc
from tiermem.config import ConfigError, load_config
from tiermem.section import ConfigModel

ZERO_DEFAULTS: dict[str, Any] = {
    "stage": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": True,  # documented as null, which is read as it acts
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "offload_param": None,
    "offload_optimizer": None,
    "sub_group_size": 1_000_000_000,
    "cpu_offload_param": None,
    "cpu_offload_use_pin_memory": None,
    "cpu_offload": None,
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": sys.maxsize,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "gather_16bit_weights_on_model_save": False,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "round_robin_gradients": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "memory_efficient_linear": True,
    "pipeline_loading_checkpoint": False,
    "override_module_apply": True,
}
PARAM_DEFAULTS: dict[str, Any] = {
    "device": "none",
    "nvme_path": None,
    "buffer_count": 5,
    "buffer_size": 100_000_000,
    "max_in_cpu": 1_000_000_000,
    "pin_memory": False,
}
OPTIMIZER_DEFAULTS: dict[str, Any] = {
    "device": "none",
    "nvme_path": None,
    "buffer_count": 4,
    "pin_memory": False,
    "pipeline_read": False,
    "pipeline_write": False,
    "fast_init": False,
    "ratio": 1.0,
}
ALIASES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
CLASSES: list[tuple[type[pydantic.BaseModel], dict[str, Any]]] = [
    (tc.DeepSpeedZeroConfig, ZERO_DEFAULTS),
    (tc.DeepSpeedZeroOffloadParamConfig, PARAM_DEFAULTS),
    (tc.DeepSpeedZeroOffloadOptimizerConfig, OPTIMIZER_DEFAULTS),
]
FIELDS = [(cls, name, value) for cls, defaults in CLASSES for name, value in defaults.items()]


@pytest.mark.parametrize(("cls", "name", "value"), FIELDS)
def test_documented_key_has_its_documented_default(
    cls: type[pydantic.BaseModel], name: str, value: Any
) -> None:
    assert getattr(cls(), name) == value


@pytest.mark.parametrize(("cls", "name", "value"), [f for f in FIELDS if f[2] is not None])
def test_documented_default_can_be_written_out(
    cls: type[pydantic.BaseModel], name: str, value: Any
) -> None:
    assert getattr(cls(**{ALIASES.get(name, name): value}), name) == value


@pytest.mark.parametrize(("name", "alias"), ALIASES.items())
def test_alias_and_name_set_the_same_field(name: str, alias: str) -> None:
    value = True if name.startswith("gather") else 7
    assert tc.ZeroConfig.model_validate({alias: value}) == tc.ZeroConfig.model_validate(
        {name: value}
    )


@pytest.mark.parametrize(
    "key", ["stage3_allgather_sequential", "stage3_allgather_single_param", "allgather_sequential"]
)
def test_single_parameter_gather_is_known_under_its_three_names(key: str) -> None:
    assert tc.ZeroConfig.model_validate({key: True}).allgather_sequential is True


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (c, n)
        for c, n, v in FIELDS
        if isinstance(v, int) and not isinstance(v, bool) and n not in ("stage", "mics_shard_size")
    ],
)
def test_counts_have_a_minimum_of_zero(cls: type[pydantic.BaseModel], name: str) -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        cls(**{ALIASES.get(name, name): -1})


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_ratio_is_between_zero_and_one(ratio: float) -> None:
    with pytest.raises(ValueError, match="than or equal to"):
        tc.OffloadOptimizerConfig(ratio=ratio)


def test_stage_enum_has_the_documented_values() -> None:
    members = {m.name: int(m) for m in tc.ZeroStageEnum}
    assert members == {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


def test_device_enum_has_the_documented_values() -> None:
    assert [m.value for m in tc.OffloadDeviceEnum] == ["none", "cpu", "nvme"]


@pytest.mark.parametrize("stage", [-1, 4, "three"])
def test_stage_outside_0_to_3_is_refused(stage: Any) -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage.*0, 1, 2 or 3"):
        load_config({"zero_optimization": {"stage": stage}})


def test_precision_sections_have_their_defaults() -> None:
    fp16, bf16 = tc.Fp16Config(), tc.Bf16Config()
    assert (fp16.enabled, fp16.loss_scale, fp16.initial_scale_power, fp16.loss_scale_window) == (
        False,
        0,
        16,
        1000,
    )
    assert (fp16.hysteresis, fp16.consecutive_hysteresis, fp16.min_loss_scale) == (2, False, 1)
    assert (bf16.enabled, bf16.check_grad_overflow, bf16.immediate_grad_update) == (
        False,
        True,
        False,
    )


def test_aio_section_has_its_defaults() -> None:
    aio = tc.AioConfig()
    assert (aio.block_size, aio.queue_depth, aio.intra_op_parallelism) == (1048576, 8, 1)
    assert (aio.single_submit, aio.overlap_events, aio.use_gds) == (False, True, False)


def test_gradients_are_clipped_to_norm_one_by_default() -> None:
    assert load_config({}).gradient_clipping == 1.0


@pytest.mark.parametrize(
    ("offload", "tiers"),
    [
        ({}, ("DEVICE", "DEVICE")),
        ({"offload_optimizer": {"device": "cpu"}}, ("DEVICE", "HOST")),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            ("HOST", "HOST"),
        ),
        (
            {
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme_data"},
                "offload_param": {"device": "nvme", "nvme_path": "/nvme_data"},
            },
            ("NVME", "NVME"),
        ),
    ],
)
def test_documented_examples_rest_where_they_say(
    offload: dict[str, Any], tiers: tuple[str, str]
) -> None:
    params = {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
    config = load_config(
        {
            "zero_optimization": {"stage": 3, **offload},
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": params},
        }
    )
    policy = config.policy()
    assert (policy.stage, policy.params.name, policy.optim.name) == (3, *tiers)


OTHER_SECTIONS = (
    tc.TiermemConfig,
    tc.Fp16Config,
    tc.Bf16Config,
    tc.AioConfig,
    tc.OwnConfig,
    tc.AdamParams,
)


@pytest.mark.parametrize("model", [*(cls for cls, _ in CLASSES), *OTHER_SECTIONS])
def test_every_field_has_a_docstring(model: type[ConfigModel]) -> None:
    fields = model.model_fields.items()
    assert [name for name, field in fields if not text_of(model.path_of(name), field)] == []
