"""Do options and config files say one thing each?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiermem.config import load_config
from tiermem.tools.job.train_job import (
    make_config,
    micro_batch_of,
    nvme_folders,
    own_folders,
    precision_of,
    read_config,
    with_host_bytes,
)
from tiermem.tools.options import TrainOptions


def test_options_become_a_config() -> None:
    config = make_config(
        TrainOptions(lr=1e-3, batch=2, resident_bytes=1024), [Path("/a"), Path("/b")]
    )
    target = {"device": "nvme", "nvme_path": ["/a", "/b"]}
    assert config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": target, "offload_optimizer": target},
        "bf16": {"enabled": True},
        "tiermem": {"resident_bytes": 1024, "compute_dtype": "measured"},
    }


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_precision_of_a_config_is_read_back(precision: str) -> None:
    assert precision_of(make_config(TrainOptions(offload="cpu", precision=precision))) == precision


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_the_library_accepts_every_config(offload: str, tmp_path: Path) -> None:
    from tiermem.config import load_config

    config = make_config(
        TrainOptions(offload=offload, resident_bytes=4096 if offload == "nvme" else 0), [tmp_path]
    )
    assert load_config(with_host_bytes(config, 1 << 30)).policy().host_bytes == 1 << 30


@pytest.mark.parametrize("states", ["exact", "compact", "bf16", "tiny"])
def test_states_become_a_precision(states: str) -> None:
    from tiermem.config import load_config
    from tiermem.precision import Precision

    config = make_config(TrainOptions(offload="cpu", states=states))
    assert config["tiermem"] == {"precision": states, "compute_dtype": "measured"}
    assert load_config(config).policy().precision == Precision.preset(states)


@pytest.mark.parametrize(
    ("precision", "compute", "computed"),
    [
        (None, None, "measured"),
        ("auto", None, "measured"),
        ("auto", "fp32", "fp32"),
        ("auto", "storage", None),
        ("bf16", None, None),
        ("bf16", "fp32", "fp32"),
        ("fp16", "auto", "measured"),
        ("fp32", "auto", None),
    ],
)
def test_precision_and_compute_become_keys(
    precision: str | None, compute: str | None, computed: str | None
) -> None:
    config = make_config(TrainOptions(offload="cpu", precision=precision, compute=compute))
    assert config.get("tiermem", {}).get("compute_dtype") == computed
    assert precision_of(config) == (precision if precision in ("fp16", "fp32") else "bf16")


def test_unknown_states_are_refused() -> None:
    with pytest.raises(
        ValueError, match="--states is 'compac'; allowed are exact, compact, bf16, tiny"
    ):
        make_config(TrainOptions(offload="cpu", states="compac"))


def test_a_budget_in_the_file_stands() -> None:
    assert with_host_bytes({"tiermem": {"host_bytes": 5}}, 7) == {"tiermem": {"host_bytes": 5}}
    assert with_host_bytes({}, 7) == {"tiermem": {"host_bytes": 7}}


def test_folders_are_found_in_every_form_of_them() -> None:
    def config(
        param: object, optim: object, device: str = "nvme", **top: object
    ) -> dict[str, object]:
        sections = {
            "offload_param": {"device": device, "nvme_path": param},
            "offload_optimizer": optim,
        }
        return {"zero_optimization": sections, **top}

    optim = {"device": "nvme", "nvme_path": ["/b", {"path": "/a", "weight": 2}, {"path": "/c"}]}
    assert nvme_folders(config("/a", optim)) == ["/a", "/b", "/c"]
    assert nvme_folders(config("/a", None)) == ["/a"]
    assert nvme_folders(config("/a", optim, device="cpu")) == ["/b", "/a", "/c"]
    assert nvme_folders(config("/a", {"device": "cpu"}, device="cpu")) == []
    own = {"paths": [{"path": "/d", "weight": 1}, "/e"]}
    assert (
        nvme_folders(config(None, optim, tiermem=own))
        == ["/d", "/e"]
        == own_folders({"tiermem": own})
    )
    assert nvme_folders(config("/a", {"device": "cpu"}, device="cpu", tiermem=own)) == []


@pytest.mark.parametrize(
    "config", [{}, {"zero_optimization": True}, {"zero_optimization": {"offload_param": None}}]
)
def test_a_config_without_offload_has_no_folders(config: dict[str, object]) -> None:
    assert nvme_folders(config) == []


@pytest.mark.parametrize(
    ("offload", "precision", "resident", "reason"),
    [
        ("disk", "bf16", 0, "none, cpu, nvme"),
        ("nvme", "int8", 0, "auto, bf16, fp32, fp16"),
        ("cpu", "bf16", 4096, "--resident"),
    ],
)
def test_a_wrong_option_names_what_is_allowed(
    offload: str, precision: str, resident: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        make_config(TrainOptions(offload=offload, precision=precision, resident_bytes=resident))


def test_two_sources_for_one_thing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--offload, --lr: --config decides this"):
        TrainOptions(config=tmp_path / "ds.json", lr=1e-3, offload="cpu")


def test_a_batch_is_added_only_where_the_file_names_none(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}}))
    assert read_config(file, 4)["train_micro_batch_size_per_gpu"] == 4
    file.write_text(json.dumps({"train_batch_size": 8}))
    assert read_config(file, 4) == {"train_batch_size": 8}


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "micro"),
    [
        ({"train_micro_batch_size_per_gpu": 3, "train_batch_size": 6}, 1, 3),
        ({"train_batch_size": 8}, 1, 8),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, 2, 2),
        ({"train_batch_size": 8, "gradient_accumulation_steps": "auto"}, 2, 4),
        ({"train_micro_batch_size_per_gpu": "auto"}, 1, 5),
        ({}, 1, 5),
    ],
)
def test_the_micro_batch_is_that_of_the_engine(
    sizes: dict[str, Any], num_ranks: int, micro: int
) -> None:
    assert micro_batch_of(sizes, 5, num_ranks) == micro
    if "auto" not in sizes.values() and sizes:
        assert load_config(sizes).batch(num_ranks).micro == micro


@pytest.mark.parametrize("section", [True, None, "bf16", []])
def test_a_section_that_the_engine_refuses_is_no_precision(section: Any) -> None:
    assert precision_of({"bf16": section}) == "fp32"


@pytest.mark.parametrize("value", ["auto", True, False, 1, 0, "on", "True", "no"])
def test_the_precision_is_that_of_the_engine(value: Any) -> None:
    config = {"bf16": {"enabled": value}, "train_batch_size": 1}
    assert (precision_of(config) == "bf16") is load_config(config).bf16.enabled


def test_a_key_that_is_there_twice_is_refused_but_for_comments(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"//": "a", "//": "b", "train_batch_size": 8}')
    assert read_config(file, 1)["train_batch_size"] == 8
    file.write_text('{"bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ValueError, match=r"enabled appears twice in one object"):
        read_config(file, 1)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=str(file)):
        read_config(file, 1)
