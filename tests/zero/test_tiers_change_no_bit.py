"""Does anything about where and how bytes rest and move change a bit of what is computed?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import ShortTower, Tower
from programs.twins import Result, assert_same, seeded, train

from tiermem import IoSettings, OffloadPolicy, Tier
from tiermem.precision import PRESETS, Precision
from tiermem.swap.base.engines import ENGINES

ON_NVME: dict[str, Any] = {"params": Tier.NVME, "optim": Tier.NVME}
BASE = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, persistence_numel=100, tile_numel=1 << 20)
DTYPES = [torch.float32, torch.bfloat16]

WAYS: dict[str, dict[str, Any]] = {
    **{engine: {"io": IoSettings(engine)} for engine in ENGINES[1:]},
    "depth 1": {"io": IoSettings(depth=1)},
    "depth 32, blocks of 4096": {"io": IoSettings(depth=32, block_bytes=4096)},
    "smallest tiles": {"tile_numel": 1},
    "tiles of two pages": {"tile_numel": 8192},
    "a tile for each unit": {"tile_numel": 1 << 20},
    "one tile buffer": {"tile_buffers": 1},
    "two tile buffers": {"tile_buffers": 2},
    "three tile buffers": {"tile_buffers": 3},
    "four tile buffers": {"tile_buffers": 4},
    "no reading ahead": {"pipeline_read": False},
    "no writing behind": {"pipeline_write": False},
    "no pipeline": {"pipeline_read": False, "pipeline_write": False},
    "two unit buffers": {"unit_buffers": 2},
    "four unit buffers": {"unit_buffers": 4},
    "some tiles resident": {"resident_bytes": 100_000},
    "all tiles resident": {"resident_bytes": 1 << 30},
    "some units on HOST": {"host_param_numel": 10_000},
    "gradients on HOST": {"grads": Tier.HOST},
    "gradients on NVME": {"grads": Tier.NVME},
    "nothing fetched ahead": {"prefetch_numel": 0},
    "nothing kept": {"max_reuse_numel": 0},
    "few live": {"max_live_numel": 7000},
    "everything persistent": {"persistence_numel": 1 << 20},
    "nothing persistent": {"persistence_numel": 0},
}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def on_host(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, Result]:
    model = seeded(Tower).to(request.param)
    return model, train(model, BASE, max_norm=0.7)


def combined(ways: Iterable[str], others: Sequence[Any]) -> list[Any]:
    """Every way with everything else; every second combination is slow, so that `make test` has
    each at least once."""
    return [
        pytest.param(
            way, other, id=f"{way}, {other}", marks=[pytest.mark.slow] if (i + j) % 2 else []
        )
        for i, way in enumerate(ways)
        for j, other in enumerate(others)
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("way", "on_host"), combined(WAYS, DTYPES), indirect=["on_host"])
def test_everything_on_nvme_equals_everything_on_host(
    way: str, on_host: tuple[torch.nn.Module, Result], tmp_path: Path
) -> None:
    model, expected = on_host
    fields = ON_NVME | {"paths": [tmp_path], "tile_numel": 4096} | WAYS[way]
    result = train(model, dataclasses.replace(BASE, **fields), max_norm=0.7)
    assert_same(result, expected)
    assert result.read_bytes > 0 or way == "everything persistent" or way == "all tiles resident"
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "fields",
    [
        {"params": Tier.DEVICE, "optim": Tier.DEVICE},
        {"params": Tier.DEVICE, "optim": Tier.NVME},
        {"params": Tier.HOST, "optim": Tier.NVME},
        {"params": Tier.NVME, "optim": Tier.HOST},
        {"params": Tier.DEVICE, "optim": Tier.HOST, "stage": 2},
        {"params": Tier.DEVICE, "optim": Tier.NVME, "stage": 1},
        {"params": Tier.DEVICE, "optim": Tier.DEVICE, "stage": 0},
    ],
    ids=str,
)
def test_every_mixture_of_homes_equals_everything_on_host(
    fields: dict[str, Any], on_host: tuple[torch.nn.Module, Result], tmp_path: Path
) -> None:
    model, expected = on_host
    policy = dataclasses.replace(BASE, paths=[tmp_path], tile_numel=4096, **fields)
    result = train(model, policy, max_norm=0.7)
    assert_same(result, expected)
    assert (result.read_bytes > 0) == (Tier.NVME in fields.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_blocks_that_are_fetched_in_parts(
    reentrant: bool, tmp_path: Path
) -> None:
    model = seeded(lambda: ShortTower(checkpoint=reentrant))
    fields = ON_NVME | {"paths": [tmp_path], "gather_way": "single"}
    assert_same(train(model, dataclasses.replace(BASE, **fields)), train(model, BASE))


def test_one_rank_sends_no_blocks_and_rounds_nothing(
    on_host: tuple[torch.nn.Module, Result], tmp_path: Path
) -> None:
    model, expected = on_host
    fields = ON_NVME | {"paths": [tmp_path], "tile_numel": 4096, "quantised_gather": True}
    assert_same(train(model, dataclasses.replace(BASE, **fields), max_norm=0.7), expected)


@pytest.mark.sampled(2)
def test_two_paths_equal_one(on_host: tuple[torch.nn.Module, Result], tmp_path: Path) -> None:
    model, expected = on_host
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    assert_same(
        train(model, dataclasses.replace(BASE, paths=paths, **ON_NVME), max_norm=0.7), expected
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stepping_inside_backward_equals_stepping_after_it(
    home: Tier, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = seeded(Tower).to(dtype)
    policy = dataclasses.replace(BASE, params=home, optim=home, paths=[tmp_path], tile_numel=4096)
    expected = train(model, policy)
    assert_same(train(model, dataclasses.replace(policy, step_in_backward=True)), expected)


PRECISIONS = PRESETS | {
    "stochastic bf16": Precision("bf16", "bf16"),
    "fp32 gradients": Precision("split", "8bit", "fp32"),
}
ROUNDED = [name for name in PRECISIONS if name != "exact"]
SHORT = [
    "threads",
    "smallest tiles",
    "tiles of two pages",
    "a tile for each unit",
    "no pipeline",
    "some tiles resident",
]
SHORT += ["two unit buffers", "gradients on NVME", "everything persistent"]


@pytest.fixture(scope="module", params=ROUNDED)
def rounded_on_host(
    request: pytest.FixtureRequest,
) -> tuple[torch.nn.Module, OffloadPolicy, Result]:
    model, policy = (
        seeded(Tower).bfloat16(),
        dataclasses.replace(BASE, precision=PRECISIONS[request.param]),
    )
    return model, policy, train(model, policy, max_norm=0.7)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("way", "rounded_on_host"), combined(SHORT, ROUNDED), indirect=["rounded_on_host"]
)
def test_what_is_rounded_is_the_same_on_every_tier(
    way: str, rounded_on_host: tuple[torch.nn.Module, OffloadPolicy, Result], tmp_path: Path
) -> None:
    model, policy, expected = rounded_on_host
    fields = ON_NVME | {"paths": [tmp_path], "tile_numel": 4096} | WAYS[way]
    assert_same(train(model, dataclasses.replace(policy, **fields), max_norm=0.7), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["compact", "tiny", "bf16"])
def test_lower_precision_of_an_fp32_model_is_the_same_on_every_tier(
    precision: str, tmp_path: Path
) -> None:
    model, policy = seeded(Tower), dataclasses.replace(BASE, precision=PRESETS[precision])
    on_nvme = dataclasses.replace(
        policy, paths=[tmp_path], tile_numel=4096, grads=Tier.NVME, **ON_NVME
    )
    assert_same(train(model, on_nvme), train(model, policy))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ROUNDED)
def test_stepping_rounded_states_inside_backward_equals_stepping_after_it(
    precision: str, tmp_path: Path
) -> None:
    model = seeded(Tower).bfloat16()
    policy = dataclasses.replace(
        BASE, paths=[tmp_path], tile_numel=4096, precision=PRECISIONS[precision], **ON_NVME
    )
    assert_same(
        train(model, dataclasses.replace(policy, step_in_backward=True)), train(model, policy)
    )


def test_another_seed_rounds_otherwise_and_nearest_rounds_by_no_seed() -> None:
    def losses(**fields: Any) -> list[float]:
        precision = Precision("bf16", "bf16", **fields)
        return train(
            seeded(Tower).bfloat16(), dataclasses.replace(BASE, precision=precision)
        ).losses

    assert losses(seed=0) == losses()
    assert losses(seed=1) != losses()
    assert losses(rounding="nearest", seed=1) == losses(rounding="nearest") != losses()
