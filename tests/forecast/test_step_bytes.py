"""Does a forecast step move the bytes that a real one moves, to the byte, whatever the policy?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.forecast import Forecast, Rates, forecast_step, uses_of
from tiermem.forecast.phases import HOST_TO_NVME, NVME_TO_HOST
from tiermem.forecast.rates import Compute
from tiermem.plans.budget import make_plan
from tiermem.precision import Precision
from tiermem.ranks.topology import Topology
from tiermem.units.unit import divide

RATES = Rates(disk_read_bytes_s=1e9, disk_write_bytes_s=2e9)
ALL_ON_NVME = {
    "overlap": "none",
    "params": Tier.NVME,
    "optim": Tier.NVME,
    "persistence_numel": 50,
    "tile_numel": 4096,
}


def forecast_of(model: nn.Module, policy: OffloadPolicy, num_micro: int = 1) -> Forecast:
    topology = Topology(None, 0, 1, 1, 0)
    division = divide(model, policy, 1)
    plan = make_plan(division, policy, topology, False, 1)
    uses = uses_of(model, division, Compute(1e-9, 2e-9))
    return forecast_step(plan, policy, topology, uses, RATES, num_micro=num_micro)


def measured(model: nn.Module, policy: OffloadPolicy, num_micro: int = 1) -> tuple[int, int]:
    """NVMe bytes read and written by the third step, from settled store to settled store."""
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters())
        counts = []
        for step in range(3):
            for micro in range(num_micro):
                loss_of(model, step * num_micro + micro).backward()
            optim.step()
            optim.zero_grad()
            shards.store.flush()
            while any(live.move is not None and not live.move.is_done() for live in shards.units):
                pass
            stats = shards.store.stats()
            counts.append((stats.nvme_read_bytes, stats.nvme_written_bytes))
    return counts[2][0] - counts[1][0], counts[2][1] - counts[1][1]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two unit buffers": {"unit_buffers": 2},
    "many unit buffers": {"unit_buffers": 8},
    "short look ahead": {"prefetch_numel": 1},
    "units leave at once": {"max_reuse_numel": 0},
    "few live": {"max_live_numel": 9000},
    "gradients on NVMe": {"grads": Tier.NVME},
    "a part resident": {"resident_bytes": 200_000},
    "no pipeline": {"pipeline_read": False, "pipeline_write": False},
    "compact": {"precision": Precision.preset("compact")},
    "master is the weight": {"precision": Precision.preset("bf16")},
    "parameters in memory": {"params": Tier.DEVICE},
    "optimizer in memory": {"optim": Tier.HOST},
    "stepped in backward": {"step_in_backward": True},
    "stepped in backward, two unit buffers": {"step_in_backward": True, "unit_buffers": 2},
    "nothing fetched ahead": {"prefetch_numel": 0},
    "some parameters on the host": {"host_param_numel": 9000},
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_a_real_step(name: str, tmp_path: Path) -> None:
    policy = OffloadPolicy(paths=[tmp_path], **(ALL_ON_NVME | CASES[name]))
    model = seeded(models.tied_tower).to(torch.bfloat16)
    said = forecast_of(model, policy)
    assert (said.edge_bytes(NVME_TO_HOST), said.edge_bytes(HOST_TO_NVME)) == measured(model, policy)


@pytest.mark.parametrize("grads", [Tier.HOST, Tier.NVME])
def test_bytes_of_three_micro_batches(grads: Tier, tmp_path: Path) -> None:
    policy = OffloadPolicy(paths=[tmp_path], **ALL_ON_NVME, grads=grads)
    model = seeded(models.ShortTower)
    said = forecast_of(model, policy, num_micro=3)
    assert (said.edge_bytes(NVME_TO_HOST), said.edge_bytes(HOST_TO_NVME)) == measured(
        model, policy, num_micro=3
    )


def test_a_resident_share_takes_its_bytes_off_both_edges(tmp_path: Path) -> None:
    policy = OffloadPolicy(paths=[tmp_path], **ALL_ON_NVME)
    model = seeded(models.ShortTower)
    without = forecast_of(model, policy)
    with_some = forecast_of(model, dataclasses.replace(policy, resident_bytes=12 * 4096 * 2))
    saved = [
        without.edge_bytes(edge) - with_some.edge_bytes(edge)
        for edge in (NVME_TO_HOST, HOST_TO_NVME)
    ]
    assert saved[0] == saved[1] > 0


def test_what_is_stepped_in_backward_moves_there(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    held = forecast_of(model, OffloadPolicy(paths=[tmp_path], **ALL_ON_NVME))
    stepped = forecast_of(
        model, OffloadPolicy(paths=[tmp_path], **ALL_ON_NVME, step_in_backward=True)
    )
    assert held.moved_bytes[HOST_TO_NVME].get("backward", 0) == 0
    assert stepped.moved_bytes[HOST_TO_NVME].get("step", 0) == 0
    assert stepped.edge_bytes(HOST_TO_NVME) == held.edge_bytes(HOST_TO_NVME)
    assert stepped.seconds["step"] == 0 < held.seconds["step"]
    assert stepped.seconds["backward"] > held.seconds["backward"]


def test_checksums_take_their_time_as_often_as_they_are_taken(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)

    def maths_s(**fields: Any) -> float:
        policy = OffloadPolicy(paths=[tmp_path], **ALL_ON_NVME, **fields)
        division, topology = divide(model, policy, 1), Topology(None, 0, 1, 1, 0)
        plan = make_plan(division, policy, topology, False, 1)
        uses, rates = (
            uses_of(model, division, Compute(1e-9, 2e-9)),
            dataclasses.replace(RATES, sum_bytes_s=1e6),
        )
        said = forecast_step(plan, policy, topology, uses, rates)
        return sum(said.busy_s["maths"].values())

    none = maths_s(verify="resume", durability="none")
    moved = forecast_of(model, OffloadPolicy(paths=[tmp_path], **ALL_ON_NVME))
    written, read = moved.edge_bytes(HOST_TO_NVME), moved.edge_bytes(NVME_TO_HOST)
    assert maths_s(verify="resume") - none == pytest.approx(written / 1e6)
    assert maths_s() - none == pytest.approx((written + read) / 1e6)
    assert maths_s(verify="sample") - none == pytest.approx((written + read / 16) / 1e6)


def test_by_layer_a_further_micro_batch_moves_no_byte_and_takes_its_maths(tmp_path: Path) -> None:
    model = seeded(lambda: models.ShortTower(num_blocks=12))
    by_layer = OffloadPolicy(
        paths=[tmp_path], **ALL_ON_NVME, grads=Tier.NVME, accumulation="layers"
    )
    once, often = (forecast_of(model, by_layer, num) for num in (1, 6))
    for edge in (HOST_TO_NVME, NVME_TO_HOST):
        assert often.edge_bytes(edge) == once.edge_bytes(edge)
    of_one = sum(
        use.forward_s for use in uses_of(model, divide(model, by_layer, 1), Compute(1e-9, 2e-9))
    )
    assert often.busy_s["maths"]["forward"] - once.busy_s["maths"]["forward"] == pytest.approx(
        5 * of_one
    )
    batches = forecast_of(model, dataclasses.replace(by_layer, accumulation="batches"), 6)
    assert often.total_s < 0.5 * batches.total_s
