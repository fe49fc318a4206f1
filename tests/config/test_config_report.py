"""Does the report name every key and say what became of it?"""

from __future__ import annotations

from tiermem.config import ReportRow, TiermemConfig, load_config, resolve_auto


def rows_of(config: TiermemConfig) -> dict[str, ReportRow]:
    return {row.key: row for row in config.report()}


def test_key_that_is_set_is_honoured() -> None:
    row = rows_of(load_config({"zero_optimization": {"stage": 3}}))["zero_optimization.stage"]
    assert (row.value, row.how, row.note) == (3, "honoured", "")


def test_key_that_is_not_set_is_its_default() -> None:
    assert rows_of(load_config({}))["gradient_clipping"] == (
        "gradient_clipping",
        1.0,
        "default",
        "",
        False,
    )


def test_key_that_is_always_on_is_computed_whatever_its_value() -> None:
    key = "zero_optimization.parameter_alignment"
    row = rows_of(load_config({"zero_optimization": {"parameter_alignment": True}}))[key]
    assert (row.value, row.how) == (True, "computed")
    assert "64-byte boundary" in row.note


def test_planned_key_is_computed_until_it_is_set() -> None:
    key = "zero_optimization.sub_group_size"
    assert rows_of(load_config({}))[key].how == "computed"
    assert (
        rows_of(load_config({"zero_optimization": {"sub_group_size": 10}}))[key].how == "honoured"
    )


def test_auto_key_says_so() -> None:
    config = load_config({"zero_optimization": {"reduce_bucket_size": "auto"}})
    key = "zero_optimization.reduce_bucket_size"
    assert rows_of(config)[key].note.startswith("auto")
    resolved = rows_of(resolve_auto(config, hidden_size=8))[key]
    assert (resolved.value, resolved.how, resolved.note) == (
        64,
        "computed",
        "auto: from the hidden size",
    )


def test_nvme_key_on_another_device_says_that_it_does_not_matter() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "buffer_count": 3}}
    row = rows_of(load_config({"zero_optimization": zero}))[
        "zero_optimization.offload_optimizer.buffer_count"
    ]
    assert row.note == "matters with device nvme; device is cpu"


def test_every_key_appears_once() -> None:
    keys = [row.key for row in load_config({}).report()]
    assert len(keys) == len(set(keys))
    assert {"bf16.enabled", "aio.block_size", "tiermem.host_bytes", "seed"} <= set(keys)
