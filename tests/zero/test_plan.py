"""Is the plan what is allocated, and does it refuse what cannot fit with a budget that does?"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import models
from programs.twins import loss_of, seeded, train

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.precision import PRESETS, Precision

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
        "precision": st.sampled_from([*PRESETS.values(), Precision("split", "fp16", "fp32")]),
        "num_moments": st.sampled_from([2, 3]),
    }
)
PROPERTY = settings(
    max_examples=drawn(25), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def one_step(policy: OffloadPolicy, dtype: torch.dtype) -> tiermem.swap.store.store.StoreStats:
    with tiermem.shard(seeded(models.tied_tower).to(dtype), policy) as shards:
        optim = tiermem.AdamW(shards.model.parameters())
        for step in range(2):
            loss_of(shards.model, step).backward()
            optim.step()
            optim.zero_grad()
        stats = shards.store.stats()
        assert stats.host_peak_bytes <= shards.plan.host_bytes
        assert stats.nvme_bytes <= shards.plan.disk_bytes
        return stats


@PROPERTY
@given(fields=POLICIES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_allocated_is_within_the_plan(
    fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    one_step(OffloadPolicy(paths=[tmp_path], **fields), dtype)


@PROPERTY
@given(fields=POLICIES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_refused_budget_names_the_smallest_which_works(
    fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = OffloadPolicy(paths=[tmp_path], **fields, host_bytes=4096)
    with pytest.raises(ValueError, match=r"needs \d+ per rank") as refusal:
        tiermem.shard(models.tied_tower().to(dtype), policy)
    assert not list(tmp_path.iterdir())
    smallest = int(re.search(r"(\d+) per node: ", str(refusal.value)).group(1))
    assert (
        one_step(dataclasses.replace(policy, host_bytes=smallest), dtype).host_peak_bytes
        <= smallest
    )
    with pytest.raises(ValueError, match=f"needs {smallest} per rank"):
        tiermem.shard(
            models.tied_tower().to(dtype), dataclasses.replace(policy, host_bytes=smallest - 1)
        )


def test_a_tighter_budget_changes_no_bit(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=50
    )
    with pytest.raises(ValueError, match="per node: ") as refusal:
        tiermem.shard(models.ShortTower(), dataclasses.replace(policy, host_bytes=1))
    smallest = int(re.search(r"(\d+) per node: ", str(refusal.value)).group(1))
    ample, tight = (
        train(model, policy),
        train(model, dataclasses.replace(policy, host_bytes=smallest)),
    )
    assert ample.losses == tight.losses


def test_refusal_lists_every_row_with_its_reason(tmp_path: Path) -> None:
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], host_bytes=10_000, persistence_numel=50
    )
    with pytest.raises(
        ValueError, match="host_bytes=10000 per node is 10000 for each of 1 ranks"
    ) as refusal:
        tiermem.shard(models.ShortTower(), policy)
    for what in (
        "resident parameters",
        "unit buffers",
        "tile buffers",
        "bounce buffer",
        "Raise the budget",
    ):
        assert what in str(refusal.value)


NUMEL = 3 << 17  # of one unit; in tiles of 2^17 elements no part of the states is padded
PER_ELEMENT = {"exact": 12, "compact": 6, "bf16": 4, "tiny": 4 + 2 / 64}


def rows_of(tmp_path: Path, **fields: Any) -> dict[str, int]:
    model = torch.nn.ModuleList([torch.nn.Linear(512, NUMEL // 512, bias=False)]).bfloat16()
    settings = {
        "params": Tier.NVME,
        "optim": Tier.NVME,
        "paths": [tmp_path],
        "persistence_numel": 0,
        "tile_buffers": 3,
    }
    with tiermem.shard(
        model, OffloadPolicy(**(settings | {"tile_numel": 1 << 17} | fields))
    ) as shards:
        return {f"{row.what} on {row.tier.name}": row.num_bytes for row in shards.plan.rows}


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_states_take_their_bytes_per_element(name: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, precision=Precision.preset(name))
    assert rows["optimizer states on NVME"] == PER_ELEMENT[name] * NUMEL
    # and weights, and gradients
    assert rows["3 tile buffers on HOST"] == 3 * (PER_ELEMENT[name] + 2 + 2) * NUMEL / 3
    assert rows["gradients on HOST"] == 2 * NUMEL


def test_gradients_and_more_moments_are_in_the_plan(tmp_path: Path) -> None:
    precision = Precision("split", "bf16", grads="fp32")
    rows = rows_of(tmp_path, precision=precision, num_moments=3, grads=Tier.NVME)
    assert rows["optimizer states on NVME"] == (2 + 3 * 2) * NUMEL
    assert rows["gradients on NVME"] == 4 * NUMEL
    assert rows["2 gradient buffers on HOST"] == 2 * 4 * NUMEL
    assert rows["3 tile buffers on HOST"] == 3 * (8 + 2 + 4) * NUMEL / 3


@pytest.mark.parametrize(("resident_bytes", "copies"), [(0, True), (None, False)])
def test_weights_have_second_copies_where_states_are_on_nvme(
    resident_bytes: int | None, copies: bool, tmp_path: Path
) -> None:
    """With None the budget keeps all states in memory."""
    fields = {"params": Tier.HOST, "overlap": "backward", "host_bytes": 1 << 30}
    rows = rows_of(tmp_path, resident_bytes=resident_bytes, **fields)
    assert ("second copies of weights, for steps under backward on HOST" in rows) is copies


def test_initial_values_of_a_split_master_have_room_in_a_tile_and_those_of_no_master_none(
    tmp_path: Path,
) -> None:
    tiny = rows_of(tmp_path, precision=Precision.preset("tiny"), master_from="init")
    assert tiny["initial masters on NVME"] == 4 * NUMEL
    assert tiny["3 tile buffers on HOST"] == 3 * (2 + 4 + 2 + 2) * NUMEL / 3  # 2 + 4 > 4.03
    assert "initial masters on NVME" not in rows_of(
        tmp_path, precision=Precision.preset("bf16"), master_from="init"
    )


@pytest.mark.parametrize(
    ("precision", "dtype", "reason"),
    [
        (
            Precision("split"),
            torch.float16,
            "master is 'split' and parameter '0.weight' is torch.float16",
        ),
        (
            Precision("bf16"),
            torch.float16,
            "master is 'bf16' and parameter '0.weight' is torch.float16",
        ),
        (
            Precision("fp16"),
            torch.bfloat16,
            "master is 'fp16' and parameter '0.weight' is torch.bfloat16",
        ),
        (Precision(), torch.float64, "parameter '0.weight' is torch.float64; an optimizer steps"),
        (Precision(), torch.float8_e4m3fn, "torch.float16: convert it, or freeze it"),
    ],
)
def test_a_precision_that_a_parameter_cannot_have_is_refused(
    precision: Precision, dtype: torch.dtype, reason: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5)).to(dtype)
    with pytest.raises(ValueError, match=re.escape(reason)):
        tiermem.shard(model, OffloadPolicy(precision=precision))
    model.requires_grad_(False)
    # what is not trained has no states
    tiermem.shard(model, OffloadPolicy(precision=precision)).close()
