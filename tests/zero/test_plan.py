"""Is the plan what is allocated, and does it refuse what cannot fit with a budget that does?"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twins import seeded, train

import tiermem
from tiermem import OffloadPolicy, Tier

TIERS = st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.NVME])
POLICIES = st.fixed_dictionaries(
    {
        "params": TIERS,
        "optim": TIERS,
        "grads": st.sampled_from([None, Tier.HOST, Tier.NVME]),
        "tile_numel": st.none() | st.integers(1, 20_000),
        "tile_buffers": st.none() | st.integers(1, 5),
        "unit_buffers": st.none() | st.integers(2, 8),
        "resident_bytes": st.integers(0, 400_000),
        "host_param_numel": st.none() | st.integers(1, 30_000),
        "persistence_numel": st.sampled_from([0, 100, 2000, 1 << 20]),
        "model_persistence_numel": st.none() | st.integers(0, 9_000),
        "step_in_backward": st.booleans(),
        "pipeline_read": st.booleans(),
        "pipeline_write": st.booleans(),
        "master_from": st.sampled_from(["param", "init"]),
    }
)
PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def one_step(policy: OffloadPolicy, dtype: torch.dtype) -> tiermem.swap.store.StoreStats:
    with tiermem.shard(seeded(zoo.tied_tower).to(dtype), policy) as shards:
        optim = tiermem.AdamW(shards.model.parameters())
        for step in range(2):
            zoo.loss_of(shards.model, step).backward()
            optim.step()
            optim.zero_grad()
        stats = shards.store.stats()
        assert stats.host_peak_bytes <= shards.plan.host_bytes
        assert stats.nvme_bytes <= shards.plan.disk_bytes
        return stats


@PROPERTY
@given(fields=POLICIES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_allocated_is_within_the_plan(fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    one_step(OffloadPolicy(paths=[tmp_path], **fields), dtype)


@PROPERTY
@given(fields=POLICIES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_refused_budget_names_the_smallest_which_works(
    fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = OffloadPolicy(paths=[tmp_path], **fields, host_bytes=4096)
    with pytest.raises(ValueError, match=r"needs \d+ per rank") as refusal:
        tiermem.shard(zoo.tied_tower().to(dtype), policy)
    assert not list(tmp_path.iterdir())
    smallest = int(re.search(r"(\d+) per node: ", str(refusal.value)).group(1))
    assert one_step(dataclasses.replace(policy, host_bytes=smallest), dtype).host_peak_bytes <= smallest
    with pytest.raises(ValueError, match=f"needs {smallest} per rank"):
        tiermem.shard(zoo.tied_tower().to(dtype), dataclasses.replace(policy, host_bytes=smallest - 1))


def test_a_tighter_budget_changes_no_bit(tmp_path: Path) -> None:
    model = seeded(zoo.Tower)
    policy = OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=50)
    with pytest.raises(ValueError, match="per node: ") as refusal:
        tiermem.shard(zoo.Tower(), dataclasses.replace(policy, host_bytes=1))
    smallest = int(re.search(r"(\d+) per node: ", str(refusal.value)).group(1))
    ample, tight = train(model, policy), train(model, dataclasses.replace(policy, host_bytes=smallest))
    assert ample.losses == tight.losses


def test_refusal_lists_every_row_with_its_reason(tmp_path: Path) -> None:
    policy = OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], host_bytes=10_000, persistence_numel=50)
    with pytest.raises(ValueError, match="host_bytes=10000 per node is 10000 for each of 1 ranks") as refusal:
        tiermem.shard(zoo.Tower(), policy)
    for what in ("resident parameters", "unit buffers", "tile buffers", "bounce buffer", "Raise the budget"):
        assert what in str(refusal.value)
