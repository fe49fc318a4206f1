"""What does a forecast say of a step that goes on under the next forward: its seconds, its bytes
and what limits it?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import seeded
from torch import nn

from tiermem import OffloadPolicy, Tier
from tiermem.forecast import Forecast, Rates, forecast_step, uses_of
from tiermem.forecast.phases import HOST_TO_NVME, NVME_TO_HOST
from tiermem.forecast.rates import Compute
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import Plan
from tiermem.precision import Precision
from tiermem.ranks.topology import Topology
from tiermem.units.unit import divide

HOMES: dict[str, Any] = {
    "params": Tier.NVME,
    "optim": Tier.NVME,
    "persistence_numel": 50,
    "tile_numel": 4096,
}
RATES = Rates(1e9, 2e9, kernel_bytes_s=1e12, use_s=0.0, tile_s=0.0)


def planned(overlap: str, folder: Path, is_gpu: bool, num_blocks: int, **fields: Any) -> Plan:
    policy = OffloadPolicy(paths=[folder], overlap=overlap, **(HOMES | fields))
    model: nn.Module = seeded(lambda: Tower(num_blocks=num_blocks)).to(torch.bfloat16)
    return make_plan(divide(model, policy, 1), policy, Topology(None, 0, 1, 1, 0), is_gpu, 1)


def forecast(
    overlap: str,
    seconds: float,
    folder: Path,
    rates: Rates = RATES,
    is_gpu: bool = False,
    num_micro: int = 1,
    num_blocks: int = 4,
    **fields: Any,
) -> tuple[Forecast, int]:
    """The forecast, and the bytes of weights on NVMe. seconds: of a parameter's forward; its
    backward takes as many."""
    policy = OffloadPolicy(paths=[folder], overlap=overlap, **(HOMES | fields))
    model: nn.Module = seeded(lambda: Tower(num_blocks=num_blocks)).to(torch.bfloat16)
    topology = Topology(None, 0, 1, 1, 0)
    division = divide(model, policy, 1)
    plan = make_plan(division, policy, topology, is_gpu, 1)
    weights = sum(
        unit.shard_bytes
        for unit in plan.division.units
        if plan.unit_homes.get(unit.index) is Tier.NVME
    )
    uses = uses_of(model, division, Compute(seconds, seconds))
    return forecast_step(plan, policy, topology, uses, rates, is_gpu, num_micro=num_micro), weights


@pytest.mark.parametrize("states", ["exact", "compact"])
def test_new_weights_are_not_read_from_the_disk(states: str, tmp_path: Path) -> None:
    given = {"precision": Precision.preset(states)}
    none, weights = forecast("none", 1e-9, tmp_path, **given)
    window, _ = forecast("forward", 1e-9, tmp_path, **given)
    assert none.edge_bytes(NVME_TO_HOST) - window.edge_bytes(NVME_TO_HOST) == weights > 0
    assert window.moved_bytes[NVME_TO_HOST].get("forward", 0) == 0
    assert none.edge_bytes(HOST_TO_NVME) == window.edge_bytes(HOST_TO_NVME)


def test_only_the_first_micro_batch_takes_them_from_memory(tmp_path: Path) -> None:
    none, weights = forecast("none", 1e-9, tmp_path, num_micro=3, unit_buffers=2)
    window, _ = forecast("forward", 1e-9, tmp_path, num_micro=3, unit_buffers=2)
    assert none.edge_bytes(NVME_TO_HOST) - window.edge_bytes(NVME_TO_HOST) == weights


def test_by_layer_the_forwards_of_all_micro_batches_hide_the_step(tmp_path: Path) -> None:
    given: dict[str, Any] = {"num_micro": 4, "accumulation": "layers"}
    none, weights = forecast("none", 2e-9, tmp_path, **given)
    window, _ = forecast("forward", 2e-9, tmp_path, **given)
    assert none.edge_bytes(NVME_TO_HOST) - window.edge_bytes(NVME_TO_HOST) == weights
    assert none.edge_bytes(HOST_TO_NVME) == window.edge_bytes(HOST_TO_NVME)
    assert none.total_s > 1.2 * window.total_s


def test_an_iteration_takes_what_its_longest_resource_takes(tmp_path: Path) -> None:
    """Where a forward takes as long as the step's bytes, the step is hidden; where the maths is
    short, the disk limits."""
    none, _ = forecast("none", 8e-9, tmp_path)
    window, _ = forecast("forward", 8e-9, tmp_path)
    assert none.total_s > 1.2 * window.total_s
    for seconds in (0.0, 1e-9, 8e-9, 64e-9):
        found, _ = forecast("forward", seconds, tmp_path)
        assert found.total_s >= found.limits_s[found.limited_by] * 0.999
        assert found.limited_by == ("disk" if seconds < 8e-9 else found.limited_by)
    assert found.limited_by == "compute"
    assert found.total_s == pytest.approx(found.limits_s["compute"], rel=0.15)


def test_a_forward_is_bound_by_the_step_under_it(tmp_path: Path) -> None:
    found, _ = forecast("forward", 1e-9, tmp_path)
    assert found.bound_of("forward") == "disk"
    assert (
        0.9 * found.seconds["forward"]
        <= found.busy_s["disk"]["forward"]
        <= 1.001 * found.seconds["forward"]
    )


def test_kernels_share_the_cores_with_the_maths(tmp_path: Path) -> None:
    """On a CPU an iteration is no shorter than both together; with a GPU the kernels have the cores
    for themselves."""
    slow = dataclasses.replace(
        RATES, disk_read_bytes_s=1e12, disk_write_bytes_s=1e12, kernel_bytes_s=1e9
    )
    window, _ = forecast("forward", 64e-9, tmp_path, slow)
    assert window.total_s >= 0.999 * (window.limits_s["compute"] + window.limits_s["kernels"])
    on_gpu, _ = forecast("forward", 64e-9, tmp_path, slow, is_gpu=True)
    assert on_gpu.total_s < on_gpu.limits_s["compute"] + on_gpu.limits_s["kernels"]


def test_auto_is_played_as_it_is_run(tmp_path: Path) -> None:
    auto, _ = forecast("auto", 8e-9, tmp_path)
    window, _ = forecast("forward", 8e-9, tmp_path)
    assert auto == window
    durable, _ = forecast("auto", 8e-9, tmp_path, durability="step")
    assert durable == window


def test_states_in_memory_go_on_beside_a_gpu(tmp_path: Path) -> None:
    homes = {"params": Tier.HOST, "optim": Tier.HOST, "is_gpu": True}
    rates = dataclasses.replace(RATES, kernel_bytes_s=1e9)
    none, _ = forecast("none", 8e-9, tmp_path, rates, **homes)
    window, _ = forecast("forward", 8e-9, tmp_path, rates, **homes)
    assert window.limited_by == none.limited_by == "kernels"
    assert window.total_s < none.total_s
    assert window.total_s >= window.limits_s["kernels"] * 0.999


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("grads", [Tier.HOST, Tier.NVME])
def test_a_step_under_backward_takes_the_disk_when_it_is_free(
    grads: Tier, num_micro: int, tmp_path: Path
) -> None:
    """It writes the same bytes. The next forward reads weights that are stepped there, whose
    gradients were in memory."""
    given: dict[str, Any] = {"grads": grads, "num_micro": num_micro, "num_blocks": 40}
    window, weights = forecast("forward", 16e-9, tmp_path, **given)
    early, _ = forecast("backward", 16e-9, tmp_path, **given)
    assert early.total_s < (0.97 if num_micro == 1 else 0.99) * window.total_s
    more = early.edge_bytes(NVME_TO_HOST) - window.edge_bytes(NVME_TO_HOST)
    assert 0 < more <= weights if grads is Tier.HOST else abs(more) < weights / 10
    assert early.edge_bytes(HOST_TO_NVME) == window.edge_bytes(HOST_TO_NVME)
    assert early.total_s >= early.limits_s[early.limited_by] * 0.999


def test_without_time_under_backward_all_is_stepped_after_it(tmp_path: Path) -> None:
    window, early = (
        forecast(overlap, 0.0, tmp_path, num_blocks=40)[0] for overlap in ("forward", "backward")
    )
    assert early.edge_bytes(NVME_TO_HOST) == window.edge_bytes(NVME_TO_HOST)
    assert early.total_s == pytest.approx(window.total_s, rel=0.02)


@pytest.mark.parametrize("grads", [Tier.DEVICE, Tier.HOST])
def test_states_in_memory_are_stepped_under_backward_by_kernels_that_have_time(
    grads: Tier, tmp_path: Path
) -> None:
    """Beside an accelerator, those of units that have a second copy: half of them take more of the
    next forward."""
    given: dict[str, Any] = {
        "params": Tier.HOST,
        "optim": Tier.HOST,
        "grads": grads,
        "num_blocks": 40,
        "is_gpu": True,
    }
    rates = dataclasses.replace(RATES, kernel_bytes_s=2e9)
    times = {}
    for share in (0.0, 0.5, 1.0):
        least = planned("forward", tmp_path, **given).host_bytes
        most = planned("backward", tmp_path, **given).host_bytes
        budget = round(least + share * (most - least)) + 8192
        times[share] = forecast("backward", 4e-9, tmp_path, rates, host_bytes=budget, **given)[
            0
        ].total_s
    assert times[1.0] <= times[0.5] < 0.97 * times[0.0]
