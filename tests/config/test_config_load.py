"""Where configs come from: dicts, files, text; "auto"; deprecated keys; keys given twice."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tiermem.config import ConfigError, OffloadDevice, TiermemConfig, load_config, resolve_auto

FULL: dict[str, Any] = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme_data"},
    },
}


def test_dict_text_and_file_give_the_same_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FULL))
    configs = [load_config(c) for c in (FULL, json.dumps(FULL), path, str(path))]
    assert all(c == configs[0] for c in configs)
    assert configs[0].optimizer is not None
    assert configs[0].optimizer.params.betas == (0.8, 0.999)


def test_config_that_is_read_already_is_returned() -> None:
    config = load_config(FULL)
    assert load_config(config) is config


def test_given_dict_is_not_changed() -> None:
    given = {
        "zero_optimization": {"cpu_offload": True, "stage": 2},
        "tensorboard": {"enabled": False},
    }
    before = json.dumps(given)
    with pytest.warns(DeprecationWarning, match="cpu_offload"):
        load_config(given)
    assert json.dumps(given) == before


def test_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage: appears twice"):
        load_config('{"zero_optimization": {"stage": 1, "stage": 3}}')


def test_broken_json_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{\n  "seed": 1,\n  "bf16": {,}\n}')
    with pytest.raises(ConfigError, match=r"broken\.json: not JSON at line 3, column 12"):
        load_config(path)


def test_hjson_is_read_where_its_package_is_installed(tmp_path: Path) -> None:
    file = tmp_path / "ds.hjson"
    file.write_text("{\n  # a comment\n  train_batch_size: 4\n  zero_optimization: {stage: 2}\n}\n")
    assert load_config(file) == load_config(
        {"train_batch_size": 4, "zero_optimization": {"stage": 2}}
    )
    file.write_text("{\n  # a comment\n  train_batch_size: 4\n  train_batch_size: 5\n}\n")
    with pytest.raises(ConfigError, match="train_batch_size: appears twice"):
        load_config(file)


def test_without_the_package_of_hjson_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match=r"not JSON at line 1, column 3.*pip install hjson"):
        load_config("{ train_batch_size: 4 }")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"gradient_allreduce_op": "SUM"}, {"gradient_allreduce_op": "sum"}),
        ({"checkpoint": {"tag_validation": "FAIL"}}, {"checkpoint": {"tag_validation": "Fail"}}),
        ({"communication_data_type": "BF16"}, {"communication_data_type": "bf16"}),
        ({"tiermem": {"verify": "Sample"}}, {"tiermem": {"verify": "sample"}}),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "CPU"}}},
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        ),
    ],
    ids=str,
)
def test_words_may_be_written_in_any_case(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert load_config(given) == load_config(meant)


def test_overlap_is_read_as_it_acts() -> None:
    for given in ({}, {"overlap_comm": None}, {"overlap_comm": "auto"}):
        assert load_config({"zero_optimization": given}).zero_optimization.overlap_comm is True
    assert (
        load_config({"zero_optimization": {"overlap_comm": False}}).zero_optimization.overlap_comm
        is False
    )


def test_lists_of_leaf_modules_stay_lists() -> None:
    leaf = {"classes": ["A", "B"], "names": "layers.0", "name_suffixes": []}
    found = load_config(
        {"zero_optimization": {"stage": 3, "leaf_module": leaf}}
    ).zero_optimization.leaf_module
    assert (found.classes, found.names, found.name_suffixes) == (["A", "B"], ["layers.0"], [])


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="allowed is an object"):
        load_config(path)


def test_file_that_is_not_there_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        load_config("nowhere.json")


def test_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="a int given"):
        load_config(3)  # type: ignore[arg-type]


def test_auto_is_as_if_the_key_were_absent_anywhere() -> None:
    config = load_config(
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "offload_param": {"device": "auto"},
            },
        }
    )
    assert config.train_batch_size is None
    assert config.gradient_clipping == 1.0
    assert config.scheduler is not None
    assert config.scheduler.params == {}
    assert not config.zero_optimization.is_set("reduce_bucket_size")
    assert "zero_optimization.offload_param.device" in config.auto_keys


def test_hidden_size_computes_the_auto_keys_alone() -> None:
    config = load_config(
        {
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": 5,
            }
        }
    )
    policy = resolve_auto(config, hidden_size=4096).policy()
    assert policy.reduce_bucket_numel == 4096 * 4096
    assert policy.prefetch_numel == 15_099_494
    assert policy.persistence_numel == 5
    assert config.policy().prefetch_numel is None


def test_hidden_size_computes_persistence_as_ten_times_itself() -> None:
    config = load_config({"zero_optimization": {"stage3_param_persistence_threshold": "auto"}})
    assert resolve_auto(config, hidden_size=100).policy().persistence_numel == 1000


def test_hidden_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size is 0"):
        resolve_auto(load_config({}), 0)


@pytest.mark.parametrize(
    ("zero", "new"),
    [
        ({"stage": 2, "cpu_offload": True}, "offload_optimizer"),
        ({"stage": 3, "cpu_offload_param": True}, "offload_param"),
        (
            {"stage3_gather_fp16_weights_on_model_save": True},
            "stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_deprecated_key_names_its_successor(zero: dict[str, Any], new: str) -> None:
    with pytest.warns(DeprecationWarning, match=new):
        load_config({"zero_optimization": zero})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_deprecated_keys_act_as_their_successors() -> None:
    zero = load_config(
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_param": True,
                "cpu_offload_use_pin_memory": False,
                "stage3_gather_fp16_weights_on_model_save": True,
            }
        }
    ).zero_optimization
    assert (zero.optimizer_device, zero.param_device) == (OffloadDevice.cpu, OffloadDevice.cpu)
    assert zero.offload_optimizer is not None
    assert zero.offload_optimizer.is_set("pin_memory")
    assert zero.gather_16bit_weights_on_model_save is True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "cpu_offload_param": False, "offload_param": {"device": "cpu"}},
        {"stage": 2, "cpu_offload_use_pin_memory": True, "offload_optimizer": {"device": "cpu"}},
        {
            "stage3_gather_fp16_weights_on_model_save": True,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    ],
)
def test_deprecated_key_beside_its_successor_is_refused(zero: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="deprecated key"):
        load_config({"zero_optimization": zero})


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0)])
def test_boolean_zero_optimization_is_stage_one_or_zero(value: bool, stage: int) -> None:
    with pytest.warns(DeprecationWarning, match="stage"):
        assert load_config({"zero_optimization": value}).zero_optimization.stage == stage
    with pytest.warns(DeprecationWarning, match="stage"):
        assert load_config({"zero_optimization": {"stage": value}}).zero_optimization.stage == stage


def test_current_keys_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(FULL)


def test_infinite_steps_per_print_prints_never() -> None:
    assert load_config({"steps_per_print": float("inf")}).steps_per_print is None


def test_config_is_frozen() -> None:
    config = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    assert isinstance(config, TiermemConfig)


@pytest.mark.parametrize("beside", [{}, {"cpu_offload": False}])
def test_deprecated_pinning_of_nothing_is_accepted_and_says_so(beside: dict[str, Any]) -> None:
    with pytest.warns(
        DeprecationWarning, match="use pin_memory in offload_optimizer and offload_param"
    ):
        config = load_config(
            {"zero_optimization": {"stage": 2, "cpu_offload_use_pin_memory": True, **beside}}
        )
    (row,) = (
        row for row in config.report() if row.key == "zero_optimization.cpu_offload_use_pin_memory"
    )
    assert row.note == "matters with cpu_offload or cpu_offload_param, and neither is on"


@pytest.mark.parametrize(("stage", "number"), [(True, 1), (False, 0)])
def test_stage_as_a_boolean_is_its_number_with_a_warning(stage: bool, number: int) -> None:
    for zero in ({"stage": stage}, stage):
        with pytest.warns(DeprecationWarning, match=f"write {number}"):
            assert load_config({"zero_optimization": zero}).zero_optimization.stage == number


@pytest.mark.parametrize("value", ["5e8", "5E+8", 5e8, 500_000_000, "500000000"])
def test_numbers_may_be_text_as_yaml_leaves_them(value: Any) -> None:
    config = load_config({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": value}})
    assert config.policy().prefetch_numel == 500_000_000


@pytest.mark.parametrize(("value", "rate"), [("1e-4", 1e-4), (1e-4, 1e-4), ("0.01", 0.01)])
def test_rates_may_be_text_as_yaml_leaves_them(value: Any, rate: float) -> None:
    config = load_config({"optimizer": {"type": "AdamW", "params": {"lr": value}}})
    assert config.optimizer is not None
    assert config.optimizer.params.lr == rate


@pytest.mark.parametrize("value", ["1e", "e8", "five", "5e8x", "1.5e0"])
def test_text_that_is_no_whole_number_is_no_count(value: str) -> None:
    with pytest.raises(ConfigError, match="sub_group_size"):
        load_config({"zero_optimization": {"sub_group_size": value}})
