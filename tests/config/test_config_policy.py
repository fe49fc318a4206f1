"""From keys to the policy: what is set goes through, what is not is planned, what contradicts is
refused."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.config import ConfigError, OwnConfig, load_config
from tiermem.policy import IoSettings, OffloadPolicy, Tier


def policy_of(zero: dict[str, Any], **top: Any) -> OffloadPolicy:
    return load_config({"zero_optimization": zero, **top}).policy()


def nvme(**keys: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": "/a", **keys}


def test_empty_config_is_the_default_policy_of_stage_zero() -> None:
    assert load_config({}).policy() == OffloadPolicy(
        stage=0, early_steps=True, sizes_are_least=True
    )


def test_offload_without_counts_leaves_every_size_to_the_plan() -> None:
    policy = policy_of({"stage": 3, "offload_param": nvme(), "offload_optimizer": nvme()})
    expected = OffloadPolicy(stage=3, params=Tier.NVME, optim=Tier.NVME, paths=["/a"])
    assert policy == dataclasses.replace(expected, early_steps=True, sizes_are_least=True)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("sub_group_size", "tile_numel"),
        ("stage3_prefetch_bucket_size", "prefetch_numel"),
        ("stage3_max_live_parameters", "max_live_numel"),
        ("stage3_max_reuse_distance", "max_reuse_numel"),
        ("stage3_param_persistence_threshold", "persistence_numel"),
        ("stage3_model_persistence_threshold", "model_persistence_numel"),
        ("reduce_bucket_size", "reduce_bucket_numel"),
    ],
)
def test_size_that_is_set_goes_through(key: str, field: str) -> None:
    assert getattr(policy_of({"stage": 3, key: 12345}), field) == 12345


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("buffer_count", "unit_buffers"),
        ("buffer_size", "unit_numel"),
        ("max_in_cpu", "host_param_numel"),
    ],
)
def test_parameter_buffers_matter_on_nvme_alone(key: str, field: str) -> None:
    config = {
        "zero_optimization": {"stage": 3, "offload_param": nvme(**{key: 7})},
        "tiermem": {"strict": True},
    }
    assert getattr(load_config(config).policy(), field) == 7
    assert (
        getattr(policy_of({"stage": 3, "offload_param": {"device": "cpu", key: 7}}), field) is None
    )


@pytest.mark.parametrize(("count", "tiles"), [(4, 1), (5, 1), (8, 2), (12, 3)])
def test_four_optimizer_buffers_are_one_tile(count: int, tiles: int) -> None:
    assert (
        policy_of({"stage": 2, "offload_optimizer": nvme(buffer_count=count)}).tile_buffers == tiles
    )


def test_fewer_buffers_than_one_tile_takes_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"3 // 4 = 0 tiles"):
        policy_of({"stage": 2, "offload_optimizer": nvme(buffer_count=3)})


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3, "offload_param": nvme(buffer_count=0)},
        {"stage": 3, "offload_param": nvme(buffer_size=0)},
        {"stage": 3, "offload_optimizer": nvme(buffer_count=0)},
        {"stage": 3, "sub_group_size": 0},
    ],
)
def test_a_size_of_zero_is_planned(zero: dict[str, Any]) -> None:
    kept = {
        key: {k: v for k, v in value.items() if v != 0} if isinstance(value, dict) else value
        for key, value in zero.items()
    }
    kept.pop("sub_group_size", None)
    assert policy_of(zero) == policy_of(kept)


SMALL = {
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 4096,
        "offload_param": nvme(buffer_count=2, buffer_size=7),
        "offload_optimizer": nvme(buffer_count=4),
    },
    "aio": {"block_size": 4096, "queue_depth": 4, "thread_count": 2},
}


def test_small_numbers_are_least_and_that_is_told_in_one_line() -> None:
    keys = (
        "offload_param.buffer_count, .*offload_optimizer.buffer_count, .*sub_group_size, "
        "aio.block_size, aio.queue_depth"
    )
    with pytest.warns(
        UserWarning, match=f"more than these .* where memory allows: .*{keys}; "
    ) as told:
        policy = load_config(SMALL).policy()
    assert len(told) == 1
    assert policy.sizes_are_least and policy.unit_numel is None
    assert (policy.io.block_bytes, policy.io.depth) == (IoSettings.block_bytes, IoSettings.depth)


def test_numbers_that_are_usual_are_no_news() -> None:
    """Five units are more than a plan takes by itself; without pipelines four tiles are all that it
    takes."""
    optim = nvme(buffer_count=16, pipeline_read=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy_of(
            {
                "stage": 3,
                "offload_param": nvme(buffer_count=5),
                "offload_optimizer": optim,
                "sub_group_size": 1 << 20,
            }
        )


@pytest.mark.parametrize("own", [{"strict": True}, {"sizes_are_least": False}])
def test_small_numbers_stay_where_the_config_says_so(own: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = load_config({**SMALL, "tiermem": own}).policy()
    assert not policy.sizes_are_least and policy.unit_numel == 7
    assert (policy.io.block_bytes, policy.io.depth) == (4096, 8)


def test_what_tune_has_measured_is_no_small_number() -> None:
    aio = {"block_size": 1 << 19, "queue_depth": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = load_config({"aio": aio, "tiermem": {"measured": {"date": "today"}}}).policy()
    assert (policy.io.block_bytes, policy.io.depth) == (1 << 19, 8)


@pytest.mark.parametrize("key", ["pipeline_read", "pipeline_write"])
def test_pipelines_are_on_unless_switched_off(key: str) -> None:
    assert getattr(policy_of({"stage": 2, "offload_optimizer": nvme()}), key) is True
    assert getattr(policy_of({"stage": 2, "offload_optimizer": nvme(**{key: False})}), key) is False


@pytest.mark.parametrize(
    ("param", "optim", "pinned"), [(None, None, True), (False, None, False), (False, True, True)]
)
def test_arena_is_pinned_unless_every_section_says_no(
    param: bool | None, optim: bool | None, pinned: bool
) -> None:
    sections = {
        name: {"device": "cpu"} | ({} if pin is None else {"pin_memory": pin})
        for name, pin in (("offload_param", param), ("offload_optimizer", optim))
    }
    assert policy_of({"stage": 3, **sections}).pin_memory is pinned


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_parameters_are_offloaded_in_stage_three_only(stage: int, device: str) -> None:
    with pytest.raises(ConfigError, match="set stage to 3"):
        policy_of({"stage": stage, "offload_param": nvme(device=device)})


def test_optimizer_is_not_offloaded_in_stage_zero() -> None:
    with pytest.raises(ConfigError, match=r"offload_optimizer\.device: cpu with stage 0"):
        policy_of({"offload_optimizer": {"device": "cpu"}})


def test_own_section_maps_to_fields_of_the_same_name() -> None:
    own = {
        "host_bytes": "2GiB",
        "disk_bytes": "1 TB",
        "resident_bytes": "512MiB",
        "grads": "cpu",
        "on_nonfinite": "raise",
        "master_from": "init",
        "timeout_s": 5,
    }
    policy = policy_of({"stage": 3}, tiermem=own)
    assert (policy.host_bytes, policy.disk_bytes, policy.resident_bytes) == (
        2 << 30,
        10**12,
        512 << 20,
    )
    assert (policy.grads, policy.on_nonfinite, policy.master_from, policy.timeout_s) == (
        Tier.HOST,
        "raise",
        "init",
        5.0,
    )


@pytest.mark.parametrize(
    ("text", "size"), [(1, 1), ("7", 7), ("1.5KiB", 1536), ("2gb", 2 * 10**9), ("3M", 3 * 10**6)]
)
def test_sizes_are_bytes_or_have_a_unit(text: Any, size: int) -> None:
    assert load_config({"tiermem": {"host_bytes": text}}).tiermem.host_bytes == size


@pytest.mark.parametrize("text", ["2 Gigs", "-1GiB", "1.0001KiB", True, 0, ""])
def test_sizes_that_mean_nothing_are_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"tiermem\.host_bytes"):
        load_config({"tiermem": {"host_bytes": text}})


def test_gradients_on_nvme_need_a_path() -> None:
    with pytest.raises(ConfigError, match=r"tiermem\.grads: nvme given without a path"):
        policy_of({"stage": 2, "offload_optimizer": {"device": "cpu"}}, tiermem={"grads": "nvme"})


def test_gradients_rest_elsewhere_from_stage_one_on() -> None:
    with pytest.raises(ConfigError, match=r"tiermem\.grads: set with stage 0"):
        policy_of({"stage": 0}, tiermem={"grads": "cpu"})
    assert policy_of({"stage": 1}, tiermem={"grads": "cpu"}).grads is Tier.HOST
    assert policy_of({"stage": 3}, tiermem={"grads": "device"}).grads is Tier.DEVICE


@pytest.mark.parametrize(
    ("top", "what"),
    [
        ({}, "gradient_clipping 1.0 \\(the default\\)"),
        ({"gradient_clipping": 2}, "gradient_clipping 2.0,"),
        (
            {"gradient_clipping": 0, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps 2",
        ),
        ({"gradient_clipping": 0, "fp16": {"enabled": True}}, "dynamic loss scale"),
        (
            {"gradient_clipping": 0, "torch_autocast": {"enabled": True, "dtype": "fp16"}},
            "dynamic loss scale",
        ),
    ],
)
def test_step_in_backward_excludes_what_needs_all_gradients(top: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        load_config({"tiermem": {"step_in_backward": True}, **top})


def test_step_in_backward_excludes_skipping() -> None:
    with pytest.raises(ConfigError, match="on_nonfinite"):
        load_config(
            {"gradient_clipping": 0, "tiermem": {"step_in_backward": True, "on_nonfinite": "skip"}}
        )


def test_overrides_win_over_keys() -> None:
    config = load_config({"zero_optimization": {"stage": 3, "sub_group_size": 5}})
    found = config.policy(tile_numel=9, host_bytes=100, early_steps=False, sizes_are_least=False)
    assert found == OffloadPolicy(stage=3, tile_numel=9, host_bytes=100)


DEVICES = st.sampled_from(["none", "cpu", "nvme"])
COUNTS = st.integers(0, 20)


@given(
    stage=st.integers(0, 3),
    param=st.fixed_dictionaries(
        {"device": DEVICES}, optional={"buffer_count": COUNTS, "nvme_path": st.just("/a")}
    ),
    optim=st.fixed_dictionaries(
        {"device": DEVICES}, optional={"buffer_count": COUNTS, "nvme_path": st.just("/b")}
    ),
    own=st.fixed_dictionaries(
        {}, optional={"grads": DEVICES, "resident_bytes": COUNTS, "step_in_backward": st.booleans()}
    ),
    clipping=st.sampled_from([0, 1]),
)
def test_config_that_is_accepted_always_gives_a_policy(
    stage: int, param: dict[str, Any], optim: dict[str, Any], own: dict[str, Any], clipping: int
) -> None:
    zero = {"stage": stage, "offload_param": param, "offload_optimizer": optim}
    try:
        config = load_config(
            {"zero_optimization": zero, "tiermem": own, "gradient_clipping": clipping}
        )
    except ConfigError:
        return
    policy = config.policy()
    assert policy.stage == stage
    assert policy.params is Tier(param["device"])
    assert policy.optim is Tier(optim["device"])


# ---- one definition ------------------------------------------------------------------------------


def test_a_policy_is_replaced_pickled_and_compared_by_its_flat_fields() -> None:
    policy = OffloadPolicy(stage=3, optim=Tier.NVME, paths=["/a"], host_bytes=1 << 30)
    other = dataclasses.replace(policy, host_bytes=1 << 20)
    assert (other.host_bytes, other.optim, other.paths) == (1 << 20, Tier.NVME, policy.paths)
    assert pickle.loads(pickle.dumps(policy)) == policy != other
    with pytest.raises(ValueError, match="host_bytes is 0"):
        dataclasses.replace(policy, host_bytes=0)


def test_all_contradictions_of_a_policy_are_told_at_once_and_a_config_names_its_keys() -> None:
    with pytest.raises(
        ValueError,
        match=r"quantised_gather=True with stage 2, .*; two_stage_gather=True without shard_",
    ):
        OffloadPolicy(stage=2, quantised_gather=True, two_stage_gather=True)
    zero = {"stage": 3, "mics_hierarchical_params_gather": True}
    with pytest.raises(
        ConfigError, match=r"params_gather: True without zero_optimization\.mics_shard_size"
    ):
        policy_of(zero)
    with pytest.raises(
        ConfigError,
        match=r'tiermem\.durability: "step" makes durable what rests on NVME, and nothing',
    ):
        load_config({"tiermem": {"durability": "step"}})


def test_activations_have_one_home_from_either_key() -> None:
    nvme = {"activations": "nvme", "paths": "/a"}
    assert load_config({"tiermem": nvme}).policy().activations is Tier.NVME
    assert load_config({"tiermem": nvme}).policy().paths
    assert load_config({"activation_checkpointing": None}) == load_config({})
    with pytest.raises(
        ConfigError,
        match=r"tiermem\.activations: nvme given, but activation_checkpointing\.cpu_check",
    ):
        load_config({"tiermem": nvme, "activation_checkpointing": {"cpu_checkpointing": True}})
    with pytest.raises(ConfigError, match=r"tiermem\.activations: nvme given without a path"):
        load_config({"tiermem": {"activations": "nvme"}})
    with pytest.raises(ConfigError, match=r"tiermem\.activation_bytes: 4096 without activations"):
        load_config({"tiermem": {"activation_bytes": 4096}})


SHARED = [
    field.name
    for field in dataclasses.fields(OffloadPolicy)
    if field.name in OwnConfig.model_fields
]
WORDS = [
    "skip",
    "raise",
    "apply",
    "param",
    "init",
    "checkpoint",
    "step",
    "none",
    "always",
    "sample",
    "resume",
    "x",
]


@pytest.mark.parametrize(
    "name", [name for name in SHARED if name not in ("paths", "precision", "grads", "activations")]
)
def test_a_key_of_our_own_has_the_default_and_the_range_of_its_field(name: str) -> None:
    default = OwnConfig.model_fields[name].default
    assert default == getattr(OffloadPolicy(), name)
    for value in (
        WORDS if isinstance(default, str) else (0, 1) if isinstance(default, bool) else (-1, 0, 1)
    ):
        needed = {
            "durability": {"optim": Tier.NVME, "paths": "/a"},
            "activation_bytes": {"activations": Tier.HOST},
        }
        beside = needed.get(name, {})
        assert is_allowed(OwnConfig, {name: value}) == is_allowed(
            OffloadPolicy, {name: value, **beside}
        ), value


def is_allowed(made: Any, fields: dict[str, Any]) -> bool:
    try:
        made(**fields)
    except ValueError:
        return False
    return True
