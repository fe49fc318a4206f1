"""Do tiles that are filled from elsewhere hold what was given, and go on as what it was taken
from?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, seeded, states_of, train_steps

import tiermem
from tiermem import OffloadPolicy, Shards, Tier
from tiermem.optim.tile_work import ParamViews
from tiermem.precision import Precision
from tiermem.swap.base.native import narrow_part
from tiermem.units.state_layout import is_positive


def started(folder: Path, preset: str, home: Tier, tile_numel: int) -> tuple[Shards, tiermem.AdamW]:
    model = seeded(Tower).bfloat16()
    fields = {
        "params": home,
        "optim": home,
        "paths": [folder],
        "persistence_numel": 100,
        "tile_numel": tile_numel,
    }
    shards = tiermem.shard(model, OffloadPolicy(precision=Precision.preset(preset), **fields))
    return shards, tiermem.AdamW(model.parameters(), lr=1e-2)


def count_steps(shards: Shards, num_steps: int) -> None:
    for live in shards.units:
        shards.refresh(live.unit.shards[0].param)
        for shard in live.unit.shards:
            shard.num_steps = num_steps


def put_from(
    shards: Shards,
    states: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    views: ParamViews,
) -> None:
    name, part = views.shard.name, slice(views.first, views.first + views.numel)
    views.weight.copy_(weights[name].view(-1)[part])
    if views.master is not None:
        is_split = views.master.dtype == torch.int16
        narrow_part(
            shards.workers,
            states[f"{name}.master"][part],
            views.master,
            views.weight if is_split else None,
        )
    for moment, target in views.moments.items():
        narrow_part(
            shards.workers,
            states[f"{name}.{moment}"][part],
            target,
            is_positive=is_positive(moment),
        )


@pytest.mark.sampled(16)
@pytest.mark.parametrize("preset", ["exact", "compact", "bf16", "tiny"])
@pytest.mark.parametrize(
    ("home", "tile_numel"), [(Tier.HOST, 1 << 20), (Tier.NVME, 4096), (Tier.NVME, 12288)]
)
def test_filled_tiles_train_on_as_those_they_were_filled_from(
    home: Tier, tile_numel: int, preset: str, tmp_path: Path
) -> None:
    source, first = started(tmp_path, preset, Tier.NVME, 8192)
    other, second = started(tmp_path, preset, home, tile_numel)
    with source, other:
        train_steps(source.model, first, range(3))
        train_steps(other.model, second, range(5, 6))
        states, weights = states_of(source, first), dict(source.model.state_dict())
        second.tiles_of(other).fill(lambda views: put_from(other, states, weights, views))
        count_steps(other, 3)
        assert_same_tensors(states_of(other, second), states)
        assert_same_tensors(dict(other.model.state_dict()), weights)
        assert train_steps(other.model, second, range(3, 5)) == train_steps(
            source.model, first, range(3, 5)
        )
        assert_same_tensors(states_of(other, second), states_of(source, first))


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_what_the_filler_leaves_alone_is_the_state_before_the_first_step(
    home: Tier, tmp_path: Path
) -> None:
    shards, optim = started(tmp_path, "exact", home, 4096)
    with shards:
        train_steps(shards.model, optim, range(2))
        optim.tiles_of(shards).fill(lambda views: None)
        count_steps(shards, 0)
        assert not any(values.any() for values in states_of(shards, optim).values())


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_what_is_kept_stays_as_it_was(home: Tier, tmp_path: Path) -> None:
    def double(views: ParamViews) -> None:
        if views.shard.name == "head.weight":
            moment = views.moments["exp_avg"]
            assert isinstance(moment, torch.Tensor)
            moment.mul_(2)

    shards, optim = started(tmp_path, "exact", home, 4096)
    with shards:
        train_steps(shards.model, optim, range(2))
        before = states_of(shards, optim)
        optim.tiles_of(shards).fill(double, keeps=True)
        before["head.weight.exp_avg"].mul_(2)
        assert_same_tensors(states_of(shards, optim), before)
