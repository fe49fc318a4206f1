"""Is the plan of DEVICE what a model reserves there, with any budget, and are bits the same?"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from launch import launch
from programs.faces import Found
from programs.homes import HOMES
from programs.models import Tower
from programs.on_device import Place, plain
from programs.twins import seeded
from torch import nn

import tiermem
from accelerator.fixture import WHY_SKIPPED
from accelerator.reserved import check_reserved, large
from accelerator.test_parity import differences, on_cpu
from tiermem import OffloadPolicy, Tier
from tiermem.plans.plan import Plan

HERE = Path(__file__).parent
SLABS = {
    "host": ["layout"],  # full layouts of all units
    "nvme": ["layout"],
    "device": ["grad", "param", "state"],
    "states on host": ["layout"],
    "host, gradients on device": ["grad", "layout"],
    "host, states on device": [
        "grad",
        "layout",
        "param",
        "state",
        "stream",
    ],  # layouts of units that are streamed, weights that stay, those that come for steps
    "host, half of the states": ["layout", "state", "stream"],
    "host, most sent": ["layout", "stream"],  # buffers of tiles
    "nvme, widened": ["layout"],
    "nvme, in blocks": ["layout", "wires"],
}
POLICIES: dict[str, dict[str, Any]] = {
    **{home: fields for home, fields in HOMES.items() if home in SLABS},
    "nvme, widened": HOMES["nvme"] | {"compute_dtype": "fp32"},
    "nvme, in blocks": HOMES["nvme"] | {"quantised_gather": True},
}


def wide() -> nn.Module:
    return seeded(lambda: Tower(width=256, inner=1024, num_blocks=6))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("is_rounded", [False, True], ids=["", "segments of CUDA"])
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_reserved_is_the_plan(
    name: str, is_rounded: bool, sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_segments_like_cudas(is_rounded)
    policy = OffloadPolicy(paths=[tmp_path], persistence_numel=1100, **POLICIES[name])
    model = large() if is_rounded else wide()
    check_reserved(
        model.bfloat16() if policy.compute_dtype == "fp32" else model,
        policy,
        "sim",
        SLABS[name],
        is_rounded,
    )


@pytest.mark.slow
@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
@pytest.mark.parametrize("which", ["selected", pytest.param("all", marks=pytest.mark.slow)])
def test_what_two_ranks_reserve_is_the_plan(which: str, tmp_path: Path) -> None:
    """With the buffers of what passes between ranks: gradients in every stage, blocks of
    weights."""
    assert all(launch(HERE / "reserved.py", 2, tmp_path, "cpu:gloo,sim:simccl", which))


def shard_within(device_bytes: int | None, folder: Path) -> tuple[Plan, Found]:
    policy = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        paths=[folder],
        persistence_numel=0,
        device_bytes=device_bytes,
    )
    place = Place(policy, "sim", folder)
    model = seeded(Tower)
    with place.open(model) as shards:
        plan = shards.plan
    return plan, plain(place)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["at_once", "late", "random:3"])
def test_units_that_stay_change_no_bit(schedule: str, sim: ModuleType, tmp_path: Path) -> None:
    """With room for none, two and all units beside what passes; what stays is not read from the
    disk again."""
    sim.set_schedule(schedule)
    num_streamed, expected = [], on_cpu("plain")
    least, _ = shard_within(None, tmp_path)
    for extra in (0, 60_000, 1 << 20):
        plan, found = shard_within(least.device_bytes + extra, tmp_path)
        assert plan.device_bytes <= least.device_bytes + extra
        assert differences(found, expected) == []
        num_streamed.append(sum(not unit.is_resident for unit in plan.division.units))
    assert num_streamed[0] > num_streamed[1] > num_streamed[2] == 0


def test_a_budget_that_is_one_byte_too_small_is_refused_before_anything_is_allocated(
    sim: ModuleType, tmp_path: Path
) -> None:
    """Neither memory of the device, nor pinned memory, nor a folder on the path; a byte more
    trains."""
    fields = {
        "params": Tier.NVME,
        "optim": Tier.NVME,
        "paths": [tmp_path],
        "unit_buffers": 2,
        "resident_bytes": 0,
    }
    with pytest.raises(ValueError, match="host_bytes=1 per node") as error:
        tiermem.shard(seeded(Tower), OffloadPolicy(host_bytes=1, **fields), device="sim")
    needed = int(str(error.value).partition("the smallest plan needs ")[2].partition(" ")[0])
    with tiermem.shard(
        seeded(Tower), OffloadPolicy(host_bytes=needed, **fields), device="sim"
    ) as shards:
        assert shards.plan.host_bytes == needed
        device_bytes = shards.plan.device_bytes
    before = sim.memory_allocated("sim"), sim.registered(), list(tmp_path.iterdir())
    for budget in ({"host_bytes": needed - 1}, {"device_bytes": device_bytes - 1}):
        with pytest.raises(ValueError, match="the smallest plan needs"):
            tiermem.shard(seeded(Tower), OffloadPolicy(**fields, **budget), device="sim")
        assert (sim.memory_allocated("sim"), sim.registered(), list(tmp_path.iterdir())) == before


def test_the_context_that_sharding_makes_counts_in_the_budget(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST)
    monkeypatch.setattr("tiermem.run.shards.open_context", lambda device: 64 << 20)
    with tiermem.shard(seeded(Tower), policy, device="sim") as shards:
        plan = shards.plan
        assert [row.num_bytes for row in plan.rows if row.what == "context"] == [64 << 20]
        assert shards.store.arena.limit_bytes == plan.arena_bytes < plan.host_bytes - (64 << 20)


def test_a_plan_that_the_card_cannot_hold_is_refused_before_anything_is_allocated(
    sim: ModuleType, tmp_path: Path
) -> None:
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.DEVICE, persistence_numel=50)
    with tiermem.shard(seeded(Tower), policy, device="sim") as shards:
        needed = shards.plan.device_bytes
    sim.empty_cache()
    others = torch.empty(4096, dtype=torch.uint8, device="sim")  # another process's
    before = sim.memory_reserved("sim")
    sim.set_capacity(before + needed - 1)
    with pytest.raises(
        ValueError,
        match=f"the plan needs {needed} bytes of the accelerator, and {needed - 1} of its",
    ):
        tiermem.shard(seeded(Tower), policy, device="sim")
    assert sim.memory_reserved("sim") == before
    too_much = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST, device_bytes=2 * (before + needed))
    with pytest.raises(ValueError, match="and the accelerator has"):
        tiermem.shard(seeded(Tower), too_much, device="sim")
    del others


# ---- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("materialize", [False, True])
def test_what_fills_a_device_stays_there_when_its_shards_close(
    materialize: bool, sim: ModuleType
) -> None:
    model = seeded(lambda: Tower(256, 1024, 6, checkpoint=None))
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    weights_bytes = sum(value.nbytes for value in values.values())
    sim.set_capacity(int(1.5 * weights_bytes))
    policy = OffloadPolicy(params=Tier.DEVICE, optim=Tier.HOST)
    shards = tiermem.shard(model, policy, device="sim")
    assert torch.accelerator.memory_allocated() > 0.9 * weights_bytes
    shards.close(materialize)
    for name, param in model.named_parameters():
        assert param.device.type == "sim" and torch.equal(param.detach().cpu(), values[name])


@pytest.mark.parametrize("materialize", [False, True])
def test_buffers_and_states_go_back_when_shards_close(materialize: bool, sim: ModuleType) -> None:
    """Also while the user still has the optimizer."""
    model = wide()
    weights_bytes = sum(param.nbytes for param in model.parameters())
    policy = OffloadPolicy(
        params=Tier.HOST,
        optim=Tier.HOST,
        optim_ratio=0.5,
        streamed_ratio=0.5,
        persistence_numel=0,
    )
    shards = tiermem.shard(model, policy, device="sim")
    optim = tiermem.AdamW(model.parameters())
    model(torch.zeros(1, 2, dtype=torch.int64, device="sim")).square().mean().backward()
    optim.step()
    optim.zero_grad()
    sim.set_capacity(int(1.2 * weights_bytes))
    shards.close(materialize)
    kept_bytes = torch.accelerator.memory_allocated()
    assert kept_bytes < (weights_bytes if materialize else 0) + 0.02 * weights_bytes


def test_a_model_larger_than_its_device_comes_to_host_memory(sim: ModuleType) -> None:
    model = seeded(lambda: Tower(256, 1024, 6, checkpoint=None))
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    sim.set_capacity(int(0.8 * sum(value.nbytes for value in values.values())))
    shards = tiermem.shard(model, OffloadPolicy(params=Tier.HOST, optim=Tier.HOST), device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="in host memory"):
        shards.close(materialize=True)
    for name, param in model.named_parameters():
        assert param.device.type == "cpu" and torch.equal(param.detach(), values[name])
