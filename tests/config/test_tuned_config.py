"""Is what `tiermem tune` found laid over a config without taking anything else from it?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tiermem.config import ConfigError, load_config
from tiermem.config.load import with_tuned
from tiermem.policy import IoSettings, NvmePath

TUNED: dict[str, Any] = {
    "aio": {"block_size": 1 << 22, "queue_depth": 16, "intra_op_parallelism": 1},
    "tiermem": {
        "engine": "aio",
        "paths": [{"path": "/a"}],
        "measured": {"made_by": "tiermem tune", "engine": "auto"},
    },
}
BASE: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}},
    "aio": {"block_size": 8192, "thread_count": 4},
    "tiermem": {"host_bytes": "1GiB", "engine": "threads"},
}


def test_tuned_sections_replace_aio_and_leave_other_keys() -> None:
    policy = load_config(with_tuned(BASE, TUNED)).policy()
    assert policy.io == IoSettings("aio", 1 << 22, 16, 1)
    assert policy.host_bytes == 1 << 30
    assert policy.paths == (NvmePath(Path("/a")),)


def test_files_are_read_and_nothing_is_changed(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(json.dumps(BASE))
    (tmp_path / "tuned.json").write_text(json.dumps(TUNED))
    before = json.dumps([BASE, TUNED])
    assert with_tuned(tmp_path / "base.json", str(tmp_path / "tuned.json")) == with_tuned(
        BASE, TUNED
    )
    assert json.dumps([BASE, TUNED]) == before


def test_plain_merge_serves_a_config_without_these_sections() -> None:
    base = {"zero_optimization": BASE["zero_optimization"]}
    assert load_config({**base, **TUNED}) == load_config(with_tuned(base, TUNED))


def test_notes_act_on_nothing_but_whether_small_numbers_stand() -> None:
    without = {
        **TUNED,
        "tiermem": {key: value for key, value in TUNED["tiermem"].items() if key != "measured"},
    }
    tuned, other = (load_config(with_tuned(BASE, each)).policy() for each in (TUNED, without))
    assert (tuned.io.depth, other.io.depth) == (16, IoSettings.depth)
    assert tuned == dataclasses.replace(other, io=tuned.io)
    row = next(row for row in load_config(TUNED).report() if row.key == "tiermem.measured")
    assert row.how == "computed"


def test_folders_other_than_the_config_s_are_refused() -> None:
    tuned = {"tiermem": {"paths": ["/elsewhere"]}}
    with pytest.raises(
        ConfigError, match=r"/elsewhere given, but .*offload_optimizer\.nvme_path names /a"
    ):
        load_config(with_tuned(BASE, tuned))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON at line 1"),
        ("[]", "allowed is an object"),
        ('{"aio": 3}', "aio of .* is no object of keys"),
        ('{"train_batch_size": 1}', "holds train_batch_size"),
        ('{"tiermem": {"host_bytes": 1}}', "tiermem.host_bytes"),
    ],
)
def test_file_that_tune_did_not_write_is_refused_by_name(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        with_tuned({}, file)
    assert str(file) in str(caught.value)
