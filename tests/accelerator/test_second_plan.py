"""Do states go to an accelerator as far as the measured memory of the first step leaves room, and
leave again before a larger input needs it?"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from launch import launch
from programs.models import Tower
from programs.twins import seeded
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import tiermem
from accelerator.fixture import WHY_SKIPPED
from tiermem import OffloadPolicy, Tier
from tiermem.engine.second_plan import SecondPlan

HERE = Path(__file__).parent
MIB = 1 << 20
NUM_BLOCKS = 8


def build() -> nn.Module:
    return seeded(lambda: Tower(512, 2048, NUM_BLOCKS, checkpoint=None)).bfloat16()


def loss_of(model: nn.Module, both: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(both[0]).flatten(0, 1), both[1].flatten())


def trained(policy: Any, tokens: Sequence[int]) -> tuple[list[float], list[float], int]:
    """Losses; the part of the states on the accelerator before each step, by tiles; the peak."""
    model = build()
    losses, parts = [], []
    generator = torch.Generator().manual_seed(0)
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-3)
        for count in tokens:
            homes = [tile.state_home for tile in optim.tiles_of(shards).tiles]
            parts.append(homes.count(Tier.DEVICE) / len(homes))
            both = torch.randint(0, 61, (2, 1, count), generator=generator).to("sim")
            loss = loss_of(model, both)
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(float(loss.detach()))
    peak = torch.accelerator.max_memory_allocated()
    del model, optim, shards, loss
    gc.collect()  # the next training measures what is left
    torch.accelerator.reset_peak_memory_stats()
    return losses, parts, peak


def test_states_take_the_room_that_the_first_step_leaves(sim: ModuleType) -> None:
    tokens = [8, 8, 8]
    plain = trained(OffloadPolicy(params=Tier.HOST, optim=Tier.HOST), tokens)
    sim.set_capacity(260 * MIB)
    policy = tiermem.choose_policy(build(), device="sim")
    assert policy.rehomes_states
    found = trained(policy, tokens)
    assert found[0] == plain[0]
    assert found[1][0] == 0 < found[1][1] == found[1][2] < 1
    assert plain[2] < found[2] < 0.93 * 260 * MIB


@pytest.mark.slow
def test_states_leave_before_a_larger_input(sim: ModuleType) -> None:
    tokens = [8, 8, 2048, 8]
    plain = trained(OffloadPolicy(params=Tier.HOST, optim=Tier.HOST), tokens)
    capacity = int(plain[2] / 0.85)
    sim.set_capacity(capacity)
    policy = OffloadPolicy(
        params=Tier.HOST, optim=Tier.HOST, tile_numel=1 << 16, rehomes_states=True
    )
    found = trained(policy, tokens)
    assert found[0] == plain[0]
    assert found[1][1] > 0.2
    states_bytes = 12 * sum(param.numel() for param in build().parameters())
    assert plain[2] + found[1][1] * states_bytes > capacity  # all would not have fitted
    assert found[1][3] < 0.5 * found[1][1]
    assert found[2] < capacity


def begun(sim: ModuleType) -> tuple[nn.Module, tiermem.Shards, torch.optim.Optimizer]:
    """A model whose states have gone to the accelerator after a step with 8 tokens."""
    sim.set_capacity(42 * MIB)
    model = seeded(lambda: Tower(256, 1024, NUM_BLOCKS, checkpoint=None)).bfloat16()
    fields: Any = {"params": Tier.HOST, "optim": Tier.HOST, "tile_numel": 1 << 16}
    policy = OffloadPolicy(**fields, rehomes_states=True)
    shards = tiermem.shard(model, policy, device="sim")
    optim = tiermem.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, tokens_of(8)).backward()
    optim.step()
    assert shards.policy.optim_ratio < 0.7
    return model, shards, optim


def tokens_of(count: int) -> torch.Tensor:
    return torch.zeros(2, 1, count, dtype=torch.long, device="sim")


def test_states_leave_before_a_larger_evaluation(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also where each input is a token longer, as in generation."""
    model, shards, _ = begun(sim)
    with shards, torch.no_grad():
        loss_of(model, tokens_of(3000))
        assert shards.policy.optim_ratio == 1
        monkeypatch.setattr(SecondPlan, "_go_over", None)
        for count in (3001, 3002):
            model(tokens_of(count)[0])


def test_states_leave_after_a_backward_that_failed(sim: ModuleType) -> None:
    model, shards, optim = begun(sim)
    with shards:
        output = model(tokens_of(8)[0])
        output.register_hook(lambda grad: torch.empty(1 << 40, device="sim"))
        with pytest.raises(torch.OutOfMemoryError):
            output.float().sum().backward()
        optim.zero_grad()
        loss_of(model, tokens_of(40)).backward()
        assert shards.policy.optim_ratio > 0.6
        optim.step()


def test_states_stay_where_a_larger_input_is_computed_again(sim: ModuleType) -> None:
    model, shards, optim = begun(sim)
    with shards:
        start = torch.zeros(1, device="sim", requires_grad=True)
        recompute(lambda _: loss_of(model, tokens_of(40)), start, use_reentrant=True).backward()
        optim.step()


@pytest.mark.parametrize(
    ("capacity_mib", "count"),
    [
        pytest.param(
            capacity, count, marks=[] if (capacity, count) == (180, 8) else pytest.mark.slow
        )
        for capacity, count in itertools.product((120, 180, 260), (8, 512))
    ],
)
def test_as_many_states_go_there_as_where_the_batch_is_known(
    capacity_mib: int, count: int, sim: ModuleType
) -> None:
    """To one block."""
    sim.set_capacity(capacity_mib * MIB)
    base = OffloadPolicy(tile_numel=1 << 16)  # as small beside the model as in large ones
    batch = torch.zeros(2, 1, count, dtype=torch.long)
    known = tiermem.choose_policy(build(), base, loss_of=loss_of, batch=batch, device="sim")
    unknown = tiermem.choose_policy(build(), base, device="sim")
    assert unknown.rehomes_states and not known.rehomes_states
    parts = [trained(policy, [count] * 3)[1][-1] for policy in (known, unknown)]
    assert parts[0] > 0.2
    assert abs(parts[0] - parts[1]) <= 1 / NUM_BLOCKS


def test_whole_matrices_stay_where_the_first_plan_has_them(sim: ModuleType) -> None:
    sim.set_capacity(260 * MIB)
    assert not tiermem.choose_policy(build(), device="sim", rehomes=False).rehomes_states
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "auto"},
            "offload_param": {"device": "auto"},
        },
        "bf16": {"enabled": True},
    }
    engine, *_ = tiermem.initialize(model=build(), config=config, device="sim")
    assert not engine.shards.policy.rehomes_states
    engine.close()


@pytest.mark.skipif(WHY_SKIPPED is not None, reason=str(WHY_SKIPPED))
def test_ranks_with_other_cards_and_inputs_choose_and_go_over_together(tmp_path: Path) -> None:
    one, other = launch(HERE / "second_plan_on_ranks.py", 2, tmp_path)
    assert one["chosen"] == other["chosen"]
    assert one["parts"][0] != 0.25
    assert one["parts"] == other["parts"]
    assert torch.equal(one["weight"], other["weight"])
