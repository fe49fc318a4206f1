"""Does every key of `aio` act, and is what the queue does not take refused?"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from tiermem.config import AioConfig, ConfigError, io, load_config
from tiermem.policy import IoSettings


def io_of(**aio: Any) -> IoSettings:
    return load_config({"aio": aio, "tiermem": {"strict": True}}).policy().io


def test_every_key_becomes_an_io_setting() -> None:
    config = load_config(
        {
            "aio": {
                "block_size": 8192,
                "queue_depth": 64,
                "thread_count": 3,
                "single_submit": True,
                "overlap_events": False,
            },
            "tiermem": {"engine": "aio", "strict": True},
        }
    )
    expected = IoSettings(
        "aio", 8192, depth=192, threads=3, single_submit=True, overlap_events=False
    )
    assert config.policy().io == expected


def test_section_that_sets_nothing_is_the_queue_s_own() -> None:
    assert io_of() == IoSettings()


@pytest.mark.parametrize("key", ["intra_op_parallelism", "thread_count", "num_threads"])
def test_thread_count_has_three_spellings(key: str) -> None:
    assert io_of(**{key: 5}).threads == 5


def test_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="thread_count 2, num_threads 3"):
        io_of(thread_count=2, num_threads=3)


def test_spellings_that_agree_are_one() -> None:
    assert io_of(thread_count=2, num_threads=2, intra_op_parallelism=2).threads == 2


@pytest.mark.parametrize(
    ("aio", "depth"),
    [
        ({"queue_depth": 8}, 8),
        ({"queue_depth": 8, "intra_op_parallelism": 0}, 8),
        ({"queue_depth": 8, "intra_op_parallelism": 1}, 8),
        ({"queue_depth": 8, "intra_op_parallelism": 6}, 48),
        ({"queue_depth": 4096, "intra_op_parallelism": 1}, 4096),
        ({"intra_op_parallelism": 2}, 64),
        ({"intra_op_parallelism": 12}, 96),
        ({}, 64),
    ],
)
def test_each_thread_keeps_queue_depth_requests_in_flight(aio: dict[str, int], depth: int) -> None:
    assert io_of(**aio).depth == depth


def test_more_in_flight_than_a_queue_takes_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        ConfigError, match=r"queue_depth 128 \* intra_op_parallelism 33 = 4224 .* at most 4096"
    ):
        io_of(queue_depth=128, num_threads=33)
    with pytest.raises(ConfigError, match=r"aio\.queue_depth: queue_depth 5000 requests in flight"):
        io_of(queue_depth=5000)


@pytest.mark.parametrize(
    "aio",
    [
        {"block_size": 1000},
        {"block_size": 2 << 30},
        {"queue_depth": 1, "num_threads": 1025},
        {"queue_depth": 0},
    ],
)
def test_value_that_the_queue_does_not_take_is_refused(aio: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="aio"):
        io_of(**aio)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 8192),
        ("queue_depth", 3),
        ("intra_op_parallelism", 2),
        ("thread_count", 2),
        ("num_threads", 2),
        ("single_submit", True),
        ("overlap_events", False),
    ],
)
def test_key_that_is_set_is_reported_as_honoured(key: str, value: Any) -> None:
    rows = {row.key: row for row in load_config({"aio": {key: value}}).report()}
    assert rows[f"aio.{key}"][1:4] == (value, "honoured", "")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermem.config.io.find_device", lambda: torch.device("cuda"))


def kvikio(monkeypatch: pytest.MonkeyPatch, is_compat: bool, is_direct: bool) -> None:
    """A kvikio that says what it is told."""
    package = types.ModuleType("kvikio")
    package.__spec__ = types.SimpleNamespace(name="kvikio")  # type: ignore[assignment]
    defaults, driver = types.ModuleType("kvikio.defaults"), types.ModuleType("kvikio.cufile_driver")
    defaults.is_compat_mode_preferred = lambda: is_compat  # type: ignore[attr-defined]
    driver.get = {"is_gds_available": is_direct}.__getitem__  # type: ignore[attr-defined]
    for module in (package, defaults, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        io_of(use_gds=True)
    (problem,) = caught.value.problems
    assert problem.path == "aio.use_gds"
    return problem.message


def test_gds_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermem.config.io.find_device", lambda: torch.device("cpu"))
    assert "there is no GPU here" in refusal()


@pytest.mark.usefixtures("a_gpu")
def test_gds_without_kvikio_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "kvikio is not installed" in refusal()


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("is_compat", "is_direct", "reason"),
    [
        (True, False, "kvikio runs in compatibility mode"),
        (False, False, "the cuFile driver runs in compatibility mode"),
        (False, True, "GPUDirect is not used yet"),
    ],
)
def test_gds_names_the_first_thing_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, is_compat: bool, is_direct: bool, reason: str
) -> None:
    kvikio(monkeypatch, is_compat, is_direct)
    assert reason in refusal()


@pytest.mark.usefixtures("a_gpu")
def test_gds_with_a_kvikio_that_fails_gives_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio(monkeypatch, False, False)
    monkeypatch.delattr(sys.modules["kvikio.cufile_driver"], "get")
    assert "kvikio cannot reach the cuFile driver (AttributeError" in refusal()


def test_gds_that_is_not_asked_for_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "why_not", lambda: pytest.fail("looked"))
    assert AioConfig(use_gds=False).use_gds is False
    assert load_config({"aio": {"use_gds": "auto"}}).aio.use_gds is False
