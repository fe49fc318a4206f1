"""Does the plan of an accelerator hold what its budget allows, and refuse what it does not?"""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tiermem import OffloadPolicy, Tier
from tiermem.plans.budget import check_room, make_plan
from tiermem.plans.plan import Plan
from tiermem.ranks.topology import Topology
from tiermem.swap.kernels.torch_step import step_scratch_bytes
from tiermem.units.unit import divide

GB = 10**9
NVME: dict[str, Any] = {"params": Tier.NVME, "optim": Tier.NVME, "paths": ["."]}


class Llama(nn.Module):
    """The sizes of a Llama, without memory."""

    def __init__(self, width: int, inner: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embed = nn.Embedding(vocabulary, width, dtype=torch.bfloat16)
            shapes = [(width, 4 * width), (width, 2 * inner), (inner, width)]
            blocks = [
                nn.Sequential(*(nn.Linear(*each, False, dtype=torch.bfloat16) for each in shapes))
                for _ in range(depth)
            ]
            self.layers = nn.ModuleList(blocks)
            self.head = nn.Linear(width, vocabulary, False, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def planned(
    model: nn.Module,
    num_shards: int = 1,
    context_bytes: int = 0,
    is_gpu: bool = True,
    **fields: Any,
) -> Plan:
    policy = OffloadPolicy(**fields)
    division = divide(model, policy, num_shards)
    return make_plan(
        division,
        policy,
        Topology(None, 0, num_shards, num_shards, 0),
        is_gpu,
        num_shards,
        context_bytes,
    )


def streamed(plan: Plan) -> list[str]:
    return [unit.name for unit in plan.division.units if not unit.is_resident]


def test_7b_on_a_card_of_24_gb_keeps_all_weights_there() -> None:
    """With 64 GB of RAM, states on NVMe: no weight is read from the disk or copied over the link in
    forward or backward."""
    plan = planned(Llama(4096, 11008, 32, 32000), device_bytes=16 * GB, host_bytes=64 * GB, **NVME)
    assert streamed(plan) == []
    assert 13.4 * GB < plan.device_bytes <= 16 * GB and plan.host_bytes <= 64 * GB
    assert plan.grads is Tier.HOST


def test_units_stay_as_far_as_the_budget_allows_at_even_distances() -> None:
    model = Llama(64, 128, 16, 512)
    least = planned(model, persistence_numel=0, **NVME)
    assert len(streamed(least)) == 18
    unit_bytes = max(
        unit.full_bytes for unit in least.division.units if unit.name.startswith("layers")
    )
    plan = planned(
        model, persistence_numel=0, device_bytes=least.device_bytes + 8 * unit_bytes, **NVME
    )
    assert plan.device_bytes <= least.device_bytes + 8 * unit_bytes
    stay = [
        unit.index
        for unit in plan.division.units
        if unit.is_resident and unit.name.startswith("layers")
    ]
    assert len(stay) >= 7
    gaps = [after - before for before, after in itertools.pairwise(stay)]
    assert max(gaps) - min(gaps) <= 1


def test_units_on_nvme_stay_before_those_in_memory() -> None:
    model = Llama(64, 128, 16, 512)
    fields = NVME | {"host_param_numel": 300_000, "persistence_numel": 0}
    least = planned(model, **fields)
    on_host = {index for index, home in least.unit_homes.items() if home is Tier.HOST}
    assert on_host
    plan = planned(model, device_bytes=least.device_bytes + 300_000, **fields)
    stay = {unit.index for unit in plan.division.units if unit.is_resident}
    assert stay and not stay & on_host


def test_staying_takes_room_on_host_too() -> None:
    """What a step writes of a unit that stays rests on HOST: with less of it, fewer units stay, and
    the plan still fits."""
    model = Llama(64, 128, 16, 512)
    all_of_them = planned(
        model, persistence_numel=0, device_bytes=GB, tile_numel=4096, resident_bytes=0, **NVME
    )
    assert streamed(all_of_them) == []
    budget = all_of_them.host_bytes - 500_000
    plan = planned(
        model,
        persistence_numel=0,
        device_bytes=GB,
        tile_numel=4096,
        resident_bytes=0,
        host_bytes=budget,
        **NVME,
    )
    assert plan.host_bytes <= budget


@pytest.mark.parametrize("num_shards", [1, 2])
def test_one_byte_less_than_the_smallest_plan_is_refused_with_the_arithmetic(
    num_shards: int,
) -> None:
    model = Llama(64, 128, 4, 512)
    smallest = planned(model, num_shards, unit_buffers=2, **NVME)
    kept = planned(model, num_shards, unit_buffers=2, device_bytes=smallest.device_bytes, **NVME)
    assert kept.device_bytes == smallest.device_bytes
    with pytest.raises(ValueError, match="device_bytes") as error:
        planned(model, num_shards, unit_buffers=2, device_bytes=smallest.device_bytes - 1, **NVME)
    assert f"the smallest plan needs {smallest.device_bytes} of each rank's accelerator" in str(
        error.value
    )
    parts = re.findall(r"([0-9.]+) MiB", str(error.value))
    assert sum(map(float, parts)) == pytest.approx(
        smallest.device_bytes / 2**20, abs=0.05 * len(parts)
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_byte_of_host_memory_less_than_the_smallest_plan_is_refused(num_ranks: int) -> None:
    """The budget is of all ranks on the node, and holds the accelerator's context and what torch
    pins by itself."""
    model, needed = Llama(64, 128, 4, 512), []
    for context_bytes in (0, 300 << 20):
        fields = NVME | {
            "resident_bytes": 0,
            "num_shards": num_ranks,
            "context_bytes": context_bytes,
        }
        with pytest.raises(ValueError, match=r"host_bytes=1 per node is \d for each of") as error:
            planned(model, host_bytes=1, **fields)
        found = re.search(
            r"the smallest plan needs (\d+) per rank, (\d+) per node", str(error.value)
        )
        assert found is not None
        per_rank, per_node = map(int, found.groups())
        assert per_node == num_ranks * per_rank
        plan = planned(model, host_bytes=per_node, **fields)
        assert (
            plan.host_bytes
            == per_rank
            == sum(row.num_bytes for row in plan.rows if row.tier is Tier.HOST)
        )
        assert per_rank - plan.arena_bytes == context_bytes + sum(
            r.num_bytes for r in plan.rows if r.what == "small copies"
        )
        with pytest.raises(
            ValueError, match=f"the smallest plan needs {per_rank} per rank, {per_node} per node"
        ):
            planned(model, host_bytes=per_node - 1, **fields)
        needed.append(per_rank)
    assert needed[1] - needed[0] == 300 << 20


def test_small_copies_are_counted_as_torch_rounds_them() -> None:
    # 902 parameters: norms take 7,216 bytes, which torch makes 8,192
    model = Llama(64, 128, 300, 512)
    (row,) = (row for row in planned(model, **NVME).rows if row.what == "small copies")
    assert row.num_bytes == 8192 + 2 * 4096
    (row,) = (row for row in planned(model).rows if row.what == "small copies")
    assert row.num_bytes == 8192 + 2 * 4096 + (16384 if 902 * 2 * 8 <= 16384 else 0)


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_states_that_stay_are_counted_and_refused_with_the_arithmetic(home: Tier) -> None:
    model = Llama(64, 128, 16, 512)
    fields = NVME | {"params": home, "optim": home, "tile_numel": 4096}
    plans = {ratio: planned(model, optim_ratio=ratio, **fields) for ratio in (0.0, 0.5, 1.0)}
    there = {
        ratio: sum(
            r.num_bytes
            for r in plan.rows
            if r.tier is Tier.DEVICE and r.what in ("kept tiles", "optimizer states")
        )
        for ratio, plan in plans.items()
    }
    states = 12 * sum(p.numel() for p in model.parameters())
    assert (
        there[1.0] == 0
        and there[0.5] == pytest.approx(states / 2, rel=0.01)
        and there[0.0] == states
    )
    assert plans[0.0].grads is Tier.DEVICE and plans[0.5].grads is Tier.HOST
    assert sum(plans[1.0].device_bytes < plans[ratio].device_bytes for ratio in (0.0, 0.5)) == 2
    with pytest.raises(
        ValueError, match=r"the smallest plan needs .*kept tiles .*optim_ratio=0\.5"
    ):
        planned(
            model,
            optim_ratio=0.5,
            device_bytes=plans[0.5].device_bytes - 1,
            unit_buffers=3,
            **fields,
        )


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_buffers_of_tiles_that_are_sent_are_counted_and_refused_with_the_arithmetic(
    home: Tier,
) -> None:
    """Three of one tile's states, weights and gradients; in exact precision 12, 2 and 2 bytes an
    element. States are pinned."""
    model, numel = Llama(64, 128, 16, 512), 4096
    fields = NVME | {"params": home, "optim": home, "tile_numel": numel}
    without, plan = (
        planned(model, streamed_ratio=0.0, **fields),
        planned(model, streamed_ratio=0.5, **fields),
    )
    assert without.streams.num == 0 and planned(model, **fields) == without
    assert plan.device_bytes - without.device_bytes == 3 * (
        12 + 2 + 2
    ) * numel + step_scratch_bytes(numel)
    assert plan.host_bytes == without.host_bytes and plan.disk_bytes == without.disk_bytes
    states = 12 * sum(p.numel() for p in model.parameters()) if home is Tier.HOST else 0
    grads = 2 * sum(p.numel() for p in model.parameters())
    assert plan.link_bytes - without.link_bytes >= states + grads
    with pytest.raises(
        ValueError, match=r"the smallest plan needs .*3 stream buffers .*streamed_ratio=0\.5"
    ):
        planned(
            model, streamed_ratio=0.5, device_bytes=plan.device_bytes - 1, unit_buffers=3, **fields
        )


def test_a_budget_beyond_the_card_and_a_card_without_room_are_refused() -> None:
    policy = OffloadPolicy(device_bytes=25 * GB, **NVME)
    plan = planned(Llama(64, 128, 4, 512), **NVME)
    with pytest.raises(
        ValueError, match="device_bytes=25000000000, and the accelerator has 24000000000"
    ):
        check_room(plan, policy, 20 * GB, 24 * GB)
    policy = dataclasses.replace(policy, device_bytes=None)
    check_room(plan, policy, plan.device_bytes, 24 * GB)
    with pytest.raises(
        ValueError, match=r"are free \(other processes may hold the rest\): .*resident parameters"
    ):
        check_room(plan, policy, plan.device_bytes - 1, 24 * GB)


def test_without_a_budget_nothing_stays_that_is_not_asked_to(tmp_path: Path) -> None:
    plan = planned(Llama(64, 128, 4, 512), persistence_numel=0, **NVME)
    assert len(streamed(plan)) == 6


def test_a_tile_is_as_large_as_a_unit_where_a_step_finds_everything_on_the_device() -> None:
    """Else a model of billions would be stepped by thousands of launches; where room is short tiles
    are smaller."""
    model = Llama(2048, 5504, 4, 32000)
    there = planned(model, stage=1)
    assert there.tile_numel == max(unit.shard_numel for unit in there.division.units) > 1 << 24
    assert there.tiles.num == 0 and planned(model, stage=1, tile_numel=4096).tile_numel == 4096
    short = planned(model, stage=1, device_bytes=there.device_bytes - (100 << 20))
    assert short.tile_numel < 1 << 20
    for homes in (
        {"params": Tier.HOST},
        {"optim": Tier.HOST},
        {"optim": Tier.HOST, "optim_ratio": 0.5},
        NVME,
    ):
        assert planned(model, **homes).tile_numel == 1 << 20


def test_without_an_accelerator_it_is_so_where_a_step_finds_everything_on_host(
    tmp_path: Path,
) -> None:
    model = Llama(2048, 5504, 4, 32000)
    for homes in ({}, {"optim": Tier.HOST}, {"params": Tier.HOST, "optim": Tier.HOST}):
        here = planned(model, is_gpu=False, **homes)
        assert here.tile_numel == max(unit.shard_numel for unit in here.division.units)
        assert here.tiles.num == 0
    for homes in (NVME, {"optim": Tier.HOST, "grads": Tier.NVME, "paths": [tmp_path]}):
        assert planned(model, is_gpu=False, **homes).tile_numel == 1 << 20
