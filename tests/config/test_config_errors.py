"""Do errors say what was given, what is allowed and where, all at once?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiermem
from tiermem.config import ConfigError, load_config


def problems(config: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("config", "path", "nearest"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        (
            {"zero_optimization": {"sub_group_sizes": 1}},
            "zero_optimization.sub_group_sizes",
            "sub_group_size",
        ),
        (
            {"zero_optimization": {"nvme_path": "/a"}},
            "zero_optimization.nvme_path",
            "offload_param.nvme_path",
        ),
        ({"offload_optimizer": {}}, "offload_optimizer", "zero_optimization.offload_optimizer"),
        ({"aio": {"queue_dept": 8}}, "aio.queue_dept", "aio.queue_depth"),
        ({"bfloat16": {"enable": True}}, "bfloat16.enable", "bf16.enabled"),
        ({"tiermem": {"host_byte": 1}}, "tiermem.host_byte", "tiermem.host_bytes"),
        ({"tensorbord": {}}, "tensorbord", "tensorboard"),
        (
            {"optimizer": {"type": "Adam", "params": {"beta": 1}}},
            "optimizer.params.beta",
            "optimizer.params.betas",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "scheduler.params.warmup_steps",
            "warmup_num_steps",
        ),
    ],
)
def test_unknown_key_names_its_path_and_the_nearest_known(
    config: dict[str, Any], path: str, nearest: str
) -> None:
    found = problems(config)
    assert list(found) == [path]
    assert nearest in found[path]


def test_unknown_key_like_no_other_is_told_to_go() -> None:
    assert "remove it" in problems({"qqqq": 1})["qqqq"]


def test_a_comment_may_stand_in_every_object(tmp_path: Path) -> None:
    text = """{"//": "one", "//": "two", "_comment": {"stage": 9}, "train_batch_size": 8,
    "zero_optimization": {"_note": 1, "stage": 3, "offload_param": {"device": "nvme", "nvme_path": [{"path": "/a", "//": 1}]}},
    "optimizer": {"type": "AdamW", "params": {"_lr": "warm", "lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"_why": "", "warmup_num_steps": 3}}, "flops_profiler": {"_on": true}}"""
    (tmp_path / "ds.json").write_text(text, "utf-8")
    config = load_config(tmp_path / "ds.json")
    assert config.optimizer is not None and config.optimizer.params.lr == 0.5
    assert config.scheduler is not None and config.scheduler.params == {"warmup_num_steps": 3}
    assert config.zero_optimization.stage == 3


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes('{"train_batch_size": 1, "_": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"^{file}: not UTF-8 text: "):
        load_config(file)


def test_what_no_key_can_give_is_told_by_what_to_use_instead() -> None:
    assert 'use "bf16"' in problems({"fp8": {"enabled": True}})["fp8"]
    assert load_config({"fp8": {"enabled": False}}).precision == "fp32"


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu"])
def test_a_batch_size_that_a_trainer_would_fill_in_is_told(key: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({key: "auto", "gradient_accumulation_steps": "auto"}), "utf-8"
    )
    with pytest.raises(
        ConfigError,
        match=f'^{tmp_path}/ds.json: neither .* is given; .*; {key} "auto" is for a Trainer',
    ):
        tiermem.initialize(model=torch.nn.Linear(2, 2), config=tmp_path / "ds.json")
    with pytest.raises(ConfigError, match=r"^the config: neither [^']*are to be accumulated$"):
        tiermem.initialize(model=torch.nn.Linear(2, 2), config={})


def test_problems_are_found_all_at_once() -> None:
    found = problems(
        {
            "train_batch_size": 0,
            "gradient_clipping": "much",
            "zero_optimization": {
                "stage": 9,
                "zenflow": {"topk_ratio": 0.1},
                "offload_param": {"device": "disk"},
            },
            "optimizer": {"type": "Lamb", "params": {"max_coeff": 1}},
            "fp16": {"enabled": True, "loss_scale_window": 0},
            "typo": 1,
        }
    )
    assert set(found) == {
        "train_batch_size",
        "gradient_clipping",
        "zero_optimization.stage",
        "zero_optimization.zenflow",
        "zero_optimization.offload_param.device",
        "optimizer.type",
        "fp16.loss_scale_window",
        "typo",
    }


def test_wrong_value_is_shown_with_what_is_allowed() -> None:
    found = problems({"zero_optimization": {"offload_optimizer": {"device": "disk"}}})
    assert found == {
        "zero_optimization.offload_optimizer.device": "'disk' given; allowed is 'none', 'cpu' or 'nvme'; did you mean nvme?"
    }


def test_message_lists_every_problem_on_its_line() -> None:
    with pytest.raises(ConfigError, match=r"2 problems in the config:\n  a1: .*\n  b1: "):
        load_config({"a1": 1, "b1": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_batch_size", True),
        ("seed", False),
        ("steps_per_print", True),
        ("gradient_clipping", True),
    ],
)
def test_boolean_is_no_number(key: str, value: bool) -> None:
    assert "not a boolean" in problems({key: value})[key]


def test_keys_and_names_that_are_no_text_are_told() -> None:
    found = problems(
        {
            "optimizer": {"type": "Adam", "params": {1: 2}},
            "zero_optimization": {"leaf_module": {"classes": [["A"]]}},
        }
    )
    assert set(found) == {"optimizer.params.1", "zero_optimization.leaf_module.classes.0"}


def test_float_without_fraction_is_a_count() -> None:
    assert (
        load_config({"zero_optimization": {"sub_group_size": 5e8}}).zero_optimization.sub_group_size
        == 500_000_000
    )


def test_float_with_fraction_is_no_count() -> None:
    found = problems({"zero_optimization": {"stage3_prefetch_bucket_size": 0.9 * 4096 * 4096}})
    assert "such as 15099495" in found["zero_optimization.stage3_prefetch_bucket_size"]


def test_two_spellings_of_one_key_are_refused() -> None:
    found = problems(
        {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}}
    )
    assert "another spelling" in found["zero_optimization.prefetch_bucket_size"]


def test_section_that_is_no_object_is_refused() -> None:
    assert "allowed is an object" in problems({"zero_optimization": [3]})["zero_optimization"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_clipping_is_finite_and_not_negative(value: float) -> None:
    assert "gradient_clipping" in problems({"gradient_clipping": value})


def test_max_grad_norm_points_at_gradient_clipping() -> None:
    found = problems({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}})
    assert '"gradient_clipping": 0.5' in found["optimizer.params"]


@pytest.mark.parametrize(
    ("config", "path", "nearest"),
    [
        ({"optimizer": {"type": "adamx"}}, "optimizer.type", "Adam"),
        ({"tiermem": {"durability": "stp"}}, "tiermem.durability", "step"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvm"}}},
            "offload_param.device",
            "nvme",
        ),
    ],
)
def test_a_word_that_is_none_of_those_allowed_names_the_nearest(
    config: dict[str, Any], path: str, nearest: str
) -> None:
    ((where, said),) = problems(config).items()
    assert where.endswith(path)
    assert said.endswith(f"; did you mean {nearest}?")
