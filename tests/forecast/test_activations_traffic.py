"""Does a forecast count the inputs of checkpointed blocks and steps on a device, and does a choice
place them by cost?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import batch, seeded
from sent_bytes import sent_bytes
from test_choice import FAST_MATHS, SLOW_MATHS, policy, tall
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.forecast import (
    Choice,
    Forecast,
    Placement,
    Rates,
    choose,
    forecast_shards,
    forecast_step,
    uses_of,
)
from tiermem.forecast.loads import gradient_traffic, torch_traffic
from tiermem.forecast.phases import DEVICE_TO_HOST, HOST_TO_DEVICE, HOST_TO_NVME, NVME_TO_HOST
from tiermem.forecast.rates import Compute
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import Plan
from tiermem.precision import Precision
from tiermem.ranks.topology import Topology
from tiermem.units.state_layout import StateLayout
from tiermem.units.unit import divide

# master, gradient, its scale, moments; moments, master, weight
WIDEN, NARROW = 8 + 6 + 8 + 8 + 8, 8 + 8 + 8 + 6
FIRST, SECOND = 12 + 8 + 12, 8 + 8 + 8 + 12  # m + (g - m) x; v x + g g x
# decay; a square root in float64; p - m / (... x + eps) x
UPDATE = 8 + (12 + 16 + 12) + 8 + 8 + 12 + 8 + 12
EXACT = WIDEN + FIRST + SECOND + UPDATE + NARROW
NORM = 10 + 16 + 16 + 24  # to float64, squared, padded, and added as a tree
EDGES = (DEVICE_TO_HOST, HOST_TO_DEVICE, HOST_TO_NVME, NVME_TO_HOST)
INPUT, BLOCKS = 16 << 20, 12
RATES = Rates(disk_read_bytes_s=2e9, disk_write_bytes_s=1e9, link_bytes_s=10e9)
MIB = 1 << 20


def played(
    home: Tier | None,
    is_gpu: bool,
    compute: Compute = SLOW_MATHS,
    rates: Rates = RATES,
    **fields: Any,
) -> tuple[Plan, Forecast]:
    own = policy(activations=home, host_bytes=None, **fields)
    model, topology = tall(), Topology(None, 0, 1, 1, 0)
    division = divide(model, own, 1)
    plan = make_plan(division, own, topology, is_gpu, 1)
    uses = uses_of(model, division, compute)
    return plan, forecast_step(
        plan, own, topology, uses, rates, is_gpu, num_micro=2, input_bytes=INPUT
    )


@pytest.mark.parametrize("is_gpu", [True, False])
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_every_input_leaves_and_all_but_the_last_come_back(home: Tier, is_gpu: bool) -> None:
    away, back = 2 * BLOCKS * INPUT, 2 * (BLOCKS - 1) * INPUT  # of two micro-batches
    stayed, moved = played(None, is_gpu)[1], played(home, is_gpu)[1]
    more = {edge: moved.edge_bytes(edge) - stayed.edge_bytes(edge) for edge in EDGES}
    link, disk = is_gpu, home is Tier.NVME
    assert more == dict(
        zip(EDGES, (link * away, link * back, disk * away, disk * back), strict=True)
    )
    assert moved.moved_bytes.get(DEVICE_TO_HOST, {}).get("step", 0) == stayed.moved_bytes.get(
        DEVICE_TO_HOST, {}
    ).get("step", 0)


def test_long_blocks_hide_inputs_and_short_ones_wait_for_the_slowest_of_link_and_disk() -> None:
    by_home = {home: played(home, True)[1] for home in (None, Tier.HOST, Tier.NVME)}
    assert by_home[Tier.HOST].total_s == pytest.approx(by_home[None].total_s, rel=0.03)
    short = {
        home: played(home, True, FAST_MATHS, params=Tier.HOST, overlap="none")[1].seconds["forward"]
        for home in (None, Tier.HOST, Tier.NVME)
    }
    waited = 2 * (BLOCKS - 1) * INPUT  # backward does not wait for the last one
    assert 1 <= short[Tier.HOST] / (waited / RATES.link_bytes_s) < 1.15
    assert 1 <= short[Tier.NVME] / (waited / RATES.disk_write_bytes_s) < 1.2


def test_a_step_on_the_device_takes_its_time_and_crosses_no_link() -> None:
    rates = Rates(1e9, 1e9, device_memory_bytes_s=50e9)
    there = {"params": Tier.DEVICE, "optim": Tier.DEVICE, "grads": None}
    plan, forecast = played(None, True, rates=rates, **there)
    numel = sum(param.numel() for param in tall().parameters())
    assert plan.steps_there and plan.grads is Tier.DEVICE
    assert forecast.busy_s["maths"]["step"] == pytest.approx(numel * EXACT / 50e9, rel=0.01)
    once = played(None, True, rates=dataclasses.replace(rates, step_passes=1, tile_s=0), **there)[1]
    assert once.busy_s["maths"]["step"] == pytest.approx(numel * (24 + 2 + 2) / 50e9, rel=0.01)
    # of Python, which issues a tile's step
    slow = dataclasses.replace(rates, step_passes=1, tile_s=1e-3)
    num_tiles = sum(-(-unit.shard_numel // (1 << 16)) for unit in plan.division.units)
    assert played(None, True, rates=slow, **there)[1].busy_s["maths"]["step"] == pytest.approx(
        num_tiles * 1e-3
    )
    on_host = played(None, True, rates=rates, params=Tier.DEVICE, optim=Tier.HOST, grads=Tier.HOST)[
        1
    ]
    added = forecast.busy_s["maths"]["backward"] - on_host.busy_s["maths"]["backward"]
    # of two micro-batches: copied, summed
    assert added == pytest.approx(2 * numel * (4 + NORM) / 50e9, rel=0.02)
    assert not any(forecast.edge_bytes(edge) for edge in EDGES)
    plan, from_host = played(
        None, True, rates=rates, **there | {"params": Tier.HOST, "grads": Tier.HOST}
    )
    ahead = plan.units.num * plan.units.slot_bytes  # of the next forward
    assert from_host.moved_bytes[HOST_TO_DEVICE]["step"] == pytest.approx(
        numel * 4 + ahead, rel=0.01
    )
    assert from_host.moved_bytes[DEVICE_TO_HOST]["step"] == pytest.approx(numel * 2, rel=0.01)
    on_cpu = played(None, True, rates=rates, params=Tier.DEVICE, optim=Tier.HOST)[1]
    assert not on_cpu.busy_s["maths"].get("step") and on_cpu.busy_s["kernels"]["step"] > 0


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_gradients_on_the_device_cross_the_link_once_when_the_cpu_steps_them(overlap: str) -> None:
    """In the step, after two micro-batches, and never in backward."""
    plan, forecast = played(
        None, True, params=Tier.HOST, optim=Tier.HOST, grads=Tier.DEVICE, overlap=overlap
    )
    num_bytes = 2 * sum(unit.shard_numel for unit in plan.division.units)
    assert plan.brings_gradients
    assert {
        phase: moved for phase, moved in forecast.moved_bytes[DEVICE_TO_HOST].items() if moved
    } == {"step": num_bytes}


def test_a_step_that_the_device_takes_part_in_ends_before_the_next_forward() -> None:
    """As it is run: Python steps the device's tiles."""
    homes = {"params": Tier.HOST, "optim": Tier.HOST, "grads": Tier.HOST}
    in_part = {
        overlap: played(None, True, overlap=overlap, optim_ratio=0.5, **homes)[1]
        for overlap in ("none", "forward")
    }
    assert in_part["forward"] == in_part["none"]
    assert in_part["none"].busy_s["maths"]["step"] > 0
    on_cpu = {
        overlap: played(None, True, overlap=overlap, **homes)[1] for overlap in ("none", "forward")
    }
    assert on_cpu["forward"].total_s < on_cpu["none"].total_s


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_inputs_move_as_many_bytes_beside_a_step_that_goes_on(home: Tier) -> None:
    for edge in EDGES:
        moved = {
            (overlap, tier): played(tier, True, overlap=overlap)[1].edge_bytes(edge)
            for overlap in ("none", "forward")
            for tier in (None, home)
        }
        assert (
            moved["forward", home] - moved["forward", None]
            == moved["none", home] - moved["none", None]
        )


def test_a_step_and_a_norm_move_the_bytes_of_their_operations() -> None:
    """Counted by hand from swap/kernels/torch_step.py: what each operation reads and writes of an
    element."""
    bf16, fp32 = torch.bfloat16, torch.float32
    assert torch_traffic(StateLayout(bf16, Precision(), 2), bf16) == EXACT
    scaled = 3 * 8 + 4 * 12 + 8 + 12  # sgd with a momentum: its sums and products
    assert torch_traffic(StateLayout(fp32, Precision(), 1), fp32) > scaled
    assert gradient_traffic(bf16) == pytest.approx(4 + NORM, rel=1e-3)
    tiny = StateLayout(bf16, Precision.preset("tiny"), 2)
    # blocks of 8 bits and random words take many operations on 32 bits
    assert torch_traffic(tiny, bf16) > 3 * EXACT


# ---- the choice ----------------------------------------------------------------------------------

WORKING = 40 * MIB


def chosen(
    card_mib: int, compute: Compute = SLOW_MATHS, rates: Rates = RATES, **fields: Any
) -> Choice:
    """The choice on a card: activations take WORKING and all 12 inputs of 16 MiB, or two where the
    others leave."""
    card = card_mib * MIB
    kept, few = card - WORKING - BLOCKS * INPUT, card - WORKING - 2 * INPUT
    placements = [Placement(None, None, max(1, kept), input_bytes=INPUT)]
    placements += [
        Placement(home, BLOCKS * INPUT, max(1, few), input_bytes=INPUT)
        for home in (Tier.HOST, Tier.NVME)
    ]
    own = policy(**{"host_bytes": 1 << 30} | fields)
    return choose(tall(), own, rates, compute, is_gpu=True, placements=placements)


def test_a_card_with_room_keeps_inputs() -> None:
    choice = chosen(400, FAST_MATHS, overlap="none")
    assert choice.policy.activations is None
    assert choice.chosen.plan.device_bytes <= 400 * MIB - WORKING - BLOCKS * INPUT


def test_units_stream_where_that_hides_the_step_of_them_under_the_next_forward() -> None:
    """A step waits for the units that stay. Where the maths is slow, the link is free to bring the
    others."""
    choice, in_turn = (
        chosen(300, host_bytes=90 * MIB, **more) for more in ({}, {"overlap": "none"})
    )
    num_there = sum(unit.is_resident for unit in choice.chosen.plan.division.units)
    assert num_there < len(choice.chosen.plan.division.units)
    assert 1.1 * choice.chosen.total_s < in_turn.chosen.total_s


def test_inputs_leave_a_card_that_has_no_room_for_them() -> None:
    choice = chosen(100)
    assert choice.policy.activations is Tier.HOST
    assert choice.policy.activation_bytes == BLOCKS * INPUT
    assert choice.chosen.plan.activation_bytes == BLOCKS * INPUT
    assert choice.chosen.plan.device_bytes <= 100 * MIB - WORKING - 2 * INPUT
    assert choice.reasons[0].startswith("blocks are recomputed, with their inputs on HOST: ")


def test_inputs_go_to_the_disk_where_host_memory_is_short_too() -> None:
    choice = chosen(100, host_bytes=100 * MIB)
    assert choice.policy.activations is Tier.NVME
    assert choice.chosen.plan.host_bytes <= 100 * MIB


def test_inputs_leave_when_weights_pay_more_for_the_room() -> None:
    """A card that has room for the inputs, or for the weights: a slow disk reads weights twice a
    step."""
    slow = Rates(disk_read_bytes_s=0.2e9, disk_write_bytes_s=8e9, link_bytes_s=50e9)
    choice = chosen(245, FAST_MATHS, slow, host_param_numel=0)
    assert choice.policy.activations is Tier.HOST
    assert "with their inputs where the maths runs" in choice.reasons[0]  # slower


@pytest.mark.parametrize("compute", [FAST_MATHS, SLOW_MATHS])
@pytest.mark.parametrize("host_mib", [90, 150, 400])
def test_a_card_to_fill_makes_no_plan_slower(host_mib: int, compute: Compute) -> None:
    """What a step writes of units that stay takes host memory, which states may need more."""
    own = policy(host_bytes=host_mib * MIB)
    kept = [Placement(input_bytes=INPUT)]
    without = choose(tall(), own, RATES, compute, is_gpu=True, placements=kept)
    choice = chosen(300, compute, host_bytes=host_mib * MIB)
    assert choice.chosen.total_s <= 1.02 * without.chosen.total_s


FAST_LINK = dataclasses.replace(
    RATES, link_bytes_s=50e9, kernel_bytes_s=10e9, host_memory_bytes_s=1e12, tile_s=0.0
)


def on_host(rates: Rates, compute: Compute = FAST_MATHS, **fields: Any) -> Choice:
    return chosen(400, compute, rates, **{"params": Tier.HOST, "optim": Tier.HOST} | fields)


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_tiles_are_sent_to_the_device_where_that_is_faster(home: Tier) -> None:
    """With kernels that are slower than the link; and not where the link is slow, or the policy
    says how many."""
    rates = dataclasses.replace(FAST_LINK, disk_read_bytes_s=1e12, disk_write_bytes_s=1e12)
    choice, kept = (on_host(rates, optim=home, **own) for own in ({}, {"streamed_ratio": 0.0}))
    part = choice.policy.streamed_ratio
    assert part and choice.chosen.plan.streamed_part == part
    assert 1.1 * choice.chosen.total_s < kept.chosen.total_s
    assert choice.chosen.plan.device_bytes <= 400 * MIB - WORKING - 2 * INPUT
    said = f"DEVICE steps {part:.0%} of the tiles that rest elsewhere: a step takes "
    assert any(reason.startswith(said) for reason in choice.reasons)
    assert kept.policy.streamed_ratio == 0.0
    slow = dataclasses.replace(rates, link_bytes_s=1e9, kernel_bytes_s=50e9)
    assert on_host(slow, optim=home).policy.streamed_ratio is None


def test_kernels_and_copies_share_the_memory_of_the_host() -> None:
    """A tile moves as many bytes of it when it is copied both ways as when the CPU steps it."""
    memory = FAST_LINK.kernel_bytes_s
    shared = dataclasses.replace(FAST_LINK, host_memory_bytes_s=1.1 * memory)
    half, alone = (
        on_host(rates, streamed_ratio=0.5).chosen.forecast for rates in (shared, FAST_LINK)
    )
    none = on_host(shared, streamed_ratio=0.0).chosen.forecast
    assert half.seconds["step"] > 1.5 * alone.seconds["step"]
    assert none.seconds["step"] < 1.1 * half.seconds["step"]
    assert half.limits_s["kernels"] == pytest.approx(sum(half.busy_s["host memory"].values()))


def test_no_tiles_are_sent_where_the_device_steps_all() -> None:
    assert on_host(FAST_LINK, params=Tier.DEVICE, optim=Tier.DEVICE).policy.streamed_ratio is None


def test_what_a_policy_names_is_kept() -> None:
    choice = chosen(400, activations=Tier.NVME, device_bytes=60 * MIB)
    assert (choice.policy.activations, choice.policy.device_bytes) == (Tier.NVME, 60 * MIB)


def test_a_card_without_room_for_any_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="device"):
        chosen(75)


# ---- what a run moves ----------------------------------------------------------------------------


def test_a_forecast_counts_the_inputs_that_a_step_writes_and_reads(tmp_path: Path) -> None:
    """On the CPU, with inputs on NVMe."""
    input_bytes = 40 * 50 * 31 * 4  # samples x tokens x width x fp32
    model = seeded(lambda: models.ShortTower(checkpoint=False, num_blocks=4))
    own = OffloadPolicy(
        params=Tier.HOST,
        optim=Tier.HOST,
        paths=[tmp_path],
        persistence_numel=0,
        activations=Tier.NVME,
    )
    with tiermem.shard(model, own) as shards:
        optim, counts = tiermem.AdamW(model.parameters(), lr=1e-2), []
        for step in range(2):
            tokens, targets = batch(step, 40, 50)
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            optim.step()
            optim.zero_grad()
            shards.store.flush()
            stats = shards.store.stats()
            counts.append((stats.nvme_read_bytes, stats.nvme_written_bytes))
        rested = -(-input_bytes // 4096) * 4096
        forecast = forecast_shards(shards, Compute(1e-9, 2e-9), Rates(1e9, 1e9), input_bytes=rested)
    moved = tuple(after - before for before, after in zip(*counts, strict=True))
    assert (
        moved
        == (forecast.edge_bytes(NVME_TO_HOST), forecast.edge_bytes(HOST_TO_NVME))
        == (3 * rested, 4 * rested)
    )


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_tiles_that_are_sent_cross_the_link_both_ways(home: Tier) -> None:
    """Their states, weights and gradients; on lanes that are busy at the same time, not one after
    the other."""
    fields = {"params": home, "optim": home, "overlap": "none", "tile_numel": 1 << 16}
    rates = dataclasses.replace(
        RATES, disk_read_bytes_s=1e12, disk_write_bytes_s=1e12, device_memory_bytes_s=1e12
    )
    kept = played(None, True, FAST_MATHS, rates, **fields)[1]
    sent_plan, sent = played(None, True, FAST_MATHS, rates, streamed_ratio=1.0, **fields)
    own = policy(host_bytes=None, **fields)
    each = [sent_bytes(unit, unit.shard_numel, sent_plan, own) for unit in sent_plan.division.units]
    more = {edge: sent.edge_bytes(edge) - kept.edge_bytes(edge) for edge in EDGES}
    assert (more[HOST_TO_DEVICE], more[DEVICE_TO_HOST]) == tuple(map(sum, zip(*each, strict=True)))
    assert more[NVME_TO_HOST] == more[HOST_TO_NVME] == 0
    crossing_s = max(more[HOST_TO_DEVICE], more[DEVICE_TO_HOST]) / rates.link_bytes_s
    assert crossing_s <= sent.seconds["step"] < 1.3 * crossing_s
    assert sent.limits_s["kernels"] < kept.limits_s["kernels"]
