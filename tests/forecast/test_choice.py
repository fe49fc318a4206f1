"""Does predicted time choose another plan on another machine, a better one, and the same on every
rank?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs.models import Layers
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.forecast import Rates, choose
from tiermem.forecast.rates import Compute
from tiermem.plans.budget import make_plan
from tiermem.ranks.topology import Topology
from tiermem.units.unit import divide

SLOW_DISK = Rates(disk_read_bytes_s=0.5e9, disk_write_bytes_s=4e9)
FAST_DISK = Rates(disk_read_bytes_s=40e9, disk_write_bytes_s=5e9)
FAST_MATHS, SLOW_MATHS = Compute(1e-12, 2e-12), Compute(2e-8, 4e-8)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(2 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(x).relu())
        return x + hidden


def tall() -> nn.Module:
    """Twelve blocks of 540,800 elements."""
    with torch.device("meta"):
        return Layers(*(Block(520) for _ in range(12))).bfloat16()


def policy(**fields: Any) -> OffloadPolicy:
    settings: dict[str, Any] = {
        "params": Tier.NVME,
        "optim": Tier.NVME,
        "paths": ["/tmp"],
        "host_bytes": 60 << 20,
    }
    return OffloadPolicy(
        **(settings | {"tile_numel": 1 << 16, "tile_buffers": 4, "grads": Tier.HOST} | fields)
    )


def test_a_slow_disk_keeps_units_and_slow_maths_keeps_states() -> None:
    on_slow_disk = choose(tall(), policy(), SLOW_DISK, FAST_MATHS, num_micro=4)
    on_fast_disk = choose(tall(), policy(), FAST_DISK, SLOW_MATHS, num_micro=4)
    assert on_slow_disk.policy.host_param_numel
    assert not on_fast_disk.policy.host_param_numel
    assert on_fast_disk.chosen.plan.resident_bytes > on_slow_disk.chosen.plan.resident_bytes


def test_what_is_chosen_is_no_slower_than_the_policy_as_it_is_or_what_another_machine_chose() -> (
    None
):
    here = choose(tall(), policy(), SLOW_DISK, FAST_MATHS, num_micro=4)
    as_it_is = choose(tall(), policy(), SLOW_DISK, FAST_MATHS, num_micro=4, searches=False)
    assert as_it_is.policy == policy()
    assert here.chosen.total_s < 0.9 * as_it_is.chosen.total_s
    there = choose(tall(), here.policy, FAST_DISK, SLOW_MATHS, num_micro=4)
    own = choose(tall(), policy(), FAST_DISK, SLOW_MATHS, num_micro=4)
    assert own.chosen.total_s < 1.001 * there.chosen.total_s


def test_gradients_leave_memory_where_backward_hides_their_writes_and_states_need_the_room() -> (
    None
):
    """Backward lasts longer than its transfers; of the step, a byte of states moves twice, one of
    gradients once."""
    slow = Rates(disk_read_bytes_s=0.5e9, disk_write_bytes_s=0.5e9)
    hidden = choose(tall(), policy(grads=None, params=Tier.HOST), slow, SLOW_MATHS)
    assert hidden.chosen.plan.grads is Tier.NVME
    seen = choose(tall(), policy(grads=None, params=Tier.HOST), slow, FAST_MATHS, num_micro=4)
    assert seen.chosen.plan.grads is Tier.HOST
    assert hidden.chosen.plan.resident_bytes > seen.chosen.plan.resident_bytes


def test_every_rank_chooses_the_same() -> None:
    wide = policy(host_bytes=120 << 20)
    first = choose(tall(), wide, SLOW_DISK, FAST_MATHS, world=2, ranks_on_node=2)
    again = choose(tall(), wide, SLOW_DISK, FAST_MATHS, world=2, ranks_on_node=2)
    assert first.policy == again.policy
    assert str(first) == str(again)


def test_what_the_policy_says_is_left_as_it_is() -> None:
    said = policy(unit_buffers=2, host_param_numel=0, resident_bytes=0)
    choice = choose(tall(), said, SLOW_DISK, FAST_MATHS, num_micro=4)
    assert choice.policy == said
    assert choice.num_tried == 1


def test_without_a_budget_the_rule_stands() -> None:
    choice = choose(tall(), policy(host_bytes=None), SLOW_DISK, FAST_MATHS)
    assert choice.policy == policy(host_bytes=None)
    assert "no budget" in str(choice)


def test_what_is_chosen_fits_the_budget() -> None:
    choice = choose(tall(), policy(), SLOW_DISK, FAST_MATHS, num_micro=4)
    division = divide(tall(), choice.policy, 1)
    plan = make_plan(division, choice.policy, Topology(None, 0, 1, 1, 0), False, 1)
    assert plan.host_bytes <= 60 << 20
    assert plan.host_bytes == choice.chosen.plan.host_bytes


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="the smallest plan needs"):
        choose(tall(), policy(host_bytes=1 << 20), SLOW_DISK, FAST_MATHS)


def test_a_sentence_says_what_is_chosen_and_what_the_next_best_would_take() -> None:
    choice = choose(tall(), policy(), SLOW_DISK, FAST_MATHS, num_micro=4)
    assert str(choice).startswith(f"planned by predicted time: {choice.chosen.total_s:.3g} s a ")
    (weights,) = [reason for reason in choice.reasons if reason.startswith("weights rest on NVME")]
    assert "elements on HOST: a step takes " in weights and " s where weights rest on " in weights


def test_a_chosen_policy_trains(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Layers(*(Block(520) for _ in range(12))).bfloat16()
    choice = choose(model, policy(paths=[tmp_path]), SLOW_DISK, FAST_MATHS, num_micro=4)
    with tiermem.shard(model, choice.policy) as shards:
        assert shards.plan == choice.chosen.plan
        optim = tiermem.AdamW(model.parameters())
        model(torch.ones(2, 520, dtype=torch.bfloat16)).sum().backward()
        optim.step()
        assert shards.store.stats().host_peak_bytes <= 60 << 20
