"""Is a key whose effect does not exist refused with its reason, and accepted where it asks for
nothing?"""

from __future__ import annotations

from typing import Any

import pytest

from tiermem.config import ConfigError, TiermemConfig, load_config
from tiermem.keys import COMPUTED, INERT, PLANNED, RECOGNISED, REFUSED
from tiermem.section import known_paths

NOT_DEFAULT: dict[str, Any] = {
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": 0.5,
    "optimizer.params.bias_correction": False,
    "seq_parallel_communication_data_type": "bf16",
    "sequence_parallel_size": 2,
    "vocabulary_size": 50257,
}


def config_with(path: str, value: Any) -> dict[str, Any]:
    """A config that holds one key, and the type that an optimizer section needs."""
    *sections, key = path.split(".")
    config: dict[str, Any] = {}
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {"type": "Adam"} if section == "optimizer" else {})
    inner[key] = value
    return config


@pytest.mark.parametrize("path", REFUSED)
def test_refused_key_says_its_reason(path: str) -> None:
    strict = {"tiermem": {"strict": True}} if path in INERT else {}
    with pytest.raises(ConfigError) as caught:
        load_config(config_with(path, NOT_DEFAULT.get(path, True)) | strict)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert REFUSED[path] in problem.message


def test_what_does_nothing_is_dropped_with_one_warning_unless_strict() -> None:
    asked = {path: NOT_DEFAULT.get(path, {"enabled": True}) for path in INERT}
    with pytest.warns(UserWarning, match="does nothing here") as caught:
        config = load_config(asked)
    assert config.model_dump() == load_config({}).model_dump()
    inert = {row.key: row.note for row in config.report() if row.how == "inert"}
    assert inert == INERT
    assert len(caught) == 1
    assert all(f"{path} ({INERT[path]})" in str(caught[0].message) for path in INERT)
    with pytest.raises(ConfigError) as refused:
        load_config(asked | {"tiermem": {"strict": True}})
    assert {problem.path for problem in refused.value.problems} == set(INERT)


@pytest.mark.parametrize(
    "key", ["compile", "tensorboard", "flops_profiler", "disable_python_gc", "log_level"]
)
def test_sections_that_monitor_or_compile_do_not_stop_a_run(key: str) -> None:
    with pytest.warns(UserWarning, match=key):
        load_config({key: {"enabled": True}})


def test_expert_parallelism_has_the_documented_key() -> None:
    with pytest.warns(UserWarning, match=r"use_data_before_expert_parallelism \("):
        load_config({"use_data_before_expert_parallelism": True})


@pytest.mark.parametrize("path", RECOGNISED)
@pytest.mark.parametrize("value", [None, "auto"])
def test_recognised_key_that_asks_for_nothing_is_accepted(path: str, value: Any) -> None:
    assert load_config({path: value}).model_dump() == load_config({}).model_dump()


@pytest.mark.parametrize(
    "config",
    [
        {"tensorboard": {"enabled": False, "output_path": "logs"}},
        {"flops_profiler": {"enabled": False, "profile_step": 1}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"checkpoint": {"tag_validation": "Warn", "load_universal": False}},
        {"data_types": {"grad_accum_dtype": None}},
        {"vocabulary_size": None, "sequence_parallel_size": 1},
    ],
)
def test_section_that_is_switched_off_is_accepted(config: dict[str, Any]) -> None:
    assert load_config(config) == load_config({})


@pytest.mark.parametrize("table", [COMPUTED, PLANNED])
def test_tables_name_keys_that_exist(table: dict[str, str]) -> None:
    assert set(table) <= set(known_paths(TiermemConfig).values())


def test_every_dotted_refusal_names_a_key_that_exists() -> None:
    assert {path for path in REFUSED if "." in path} <= set(known_paths(TiermemConfig).values())


def test_no_model_has_a_key_that_is_only_recognised() -> None:
    assert not set(RECOGNISED) & set(TiermemConfig.model_fields)


def test_no_key_is_both_refused_and_computed() -> None:
    assert set(REFUSED) & (set(COMPUTED) | set(PLANNED)) == set()
