"""Do frozen parameters that rest in blocks take the bytes of blocks, and compute with what the
blocks hold, on every tier?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_blocks import blocked, frozen, policy_of
from launch import launch
from programs import models
from programs.twins import loss_of, seeded
from test_compute_dtype import assert_equal, train
from torch import nn

import tiermem
from tiermem import Tier
from tiermem.config import load_config
from tiermem.policy import CombinedError
from tiermem.units.quantised import FORMATS, pack, unpack

FORMS = ["int8", "nf4"]
TIERS = [Tier.HOST, Tier.NVME]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [(torch.bfloat16, "storage"), (torch.bfloat16, "fp32"), (torch.float32, "storage")],
    ids=["bf16", "bf16 in fp32", "fp32"],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tier", [*TIERS, Tier.DEVICE])
def test_training_is_that_of_a_twin_with_the_same_blocks(
    tier: Tier, form: str, dtype: torch.dtype, compute_dtype: str, tmp_path: Path
) -> None:
    model = seeded(models.frozen_tower).to(dtype)
    twin, casts = blocked(model, form), compute_dtype == "fp32"
    expected = train(twin, casts)
    with tiermem.shard(
        model, policy_of(form, tier, tmp_path, compute_dtype=compute_dtype)
    ) as shards:
        resting = {shard.name for live, shard in shards.parameters() if live.unit.is_packed}
        assert resting == {name for name, _ in frozen(model)}
        assert train(model, casts=False) == expected
        assert_equal(model.state_dict(), twin)
        shards.close(materialize=True)
    assert_equal(model.state_dict(), twin)


@pytest.mark.slow
def test_two_ranks_are_a_twin_with_the_same_blocks_and_checkpoints_keep_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "out").mkdir()
    for found in launch(
        Path(__file__).with_name("frozen_on_ranks.py"), 2, tmp_path / "out", str(tmp_path)
    ):
        assert found["wrong"] == []
        assert found["cases"] == 2 * len(FORMS)


@pytest.mark.parametrize(
    ("field", "value", "share"),
    [
        ("frozen_quant_type", "int8", 8.5 / 16),
        ("frozen_quant_type", "nf4", 4.5 / 16),
        ("quantised_frozen", True, 8.5 / 16),
    ],
)
def test_a_fetch_reads_the_bits_of_blocks(
    field: str, value: Any, share: float, tmp_path: Path
) -> None:
    planned, read = [], []
    for fields in ({}, {field: value}):
        model = (
            seeded(lambda: models.Tower(width=256, inner=512))
            .to(torch.bfloat16)
            .requires_grad_(False)
        )
        policy = policy_of(
            None, Tier.NVME, tmp_path, persistence_numel=2000, unit_buffers=2, **fields
        )
        with tiermem.shard(model, policy) as shards:
            rows = shards.plan.rows
            whys = {r.why for r in rows if r.what == "parameters"}
            assert (
                whys
                == {
                    "rest on NVME, frozen matrices in "
                    + ("nf4" if share < 0.5 else "int8")
                    + " blocks"
                }
                or not fields
            )
            planned.append(
                sum(r.num_bytes for r in rows if (r.what, r.tier) == ("parameters", Tier.NVME))
            )
            before = shards.store.stats().nvme_read_bytes
            with torch.no_grad():
                for layer in model.layers:
                    layer(torch.zeros(1, 256, dtype=torch.bfloat16))
            shards.store.flush()
            read.append(shards.store.stats().nvme_read_bytes - before)
    assert planned[1] / planned[0] == pytest.approx(share, abs=0.01)  # whole pages
    assert read[1] / read[0] == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tier", TIERS)
def test_values_that_are_put_come_back_from_their_blocks(
    tier: Tier, form: str, tmp_path: Path
) -> None:
    model = seeded(models.frozen_tower)
    with tiermem.shard(model, policy_of(form, tier, tmp_path)) as shards:
        param = model.layers[2].up.weight
        value = torch.randn(param.shape, generator=torch.Generator().manual_seed(3))
        with tiermem.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
            param.copy_(value)
        flat, kind = value.reshape(-1), FORMATS[form]
        expected = unpack(pack(flat, kind), flat.numel(), torch.empty_like(flat), form=kind).view(
            value.shape
        )
        assert torch.equal(shards.weight(param), expected)
        assert torch.equal(param.clone(), expected)


@pytest.mark.parametrize("compute_dtype", ["storage", "fp32"])
def test_values_that_are_put_in_forward_are_seen_as_their_blocks_hold_them(
    compute_dtype: str, tmp_path: Path
) -> None:
    model = seeded(models.frozen_tower).bfloat16()
    with (
        tiermem.shard(model, policy_of("nf4", Tier.NVME, tmp_path, compute_dtype=compute_dtype)),
        torch.no_grad(),
    ):
        weight = model.layers[1].up.weight
        before = loss_of(model, 0)

        def put(*_: Any) -> None:
            with tiermem.zero.GatheredParameters(weight, modifier_rank=0):
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))

        handle = model.layers[1].register_forward_pre_hook(put)
        during = loss_of(model, 0)
        handle.remove()
        assert loss_of(model, 0) == during != before


@pytest.mark.parametrize("compute_dtype", ["storage", "fp32"])
@pytest.mark.parametrize("tier", TIERS)
def test_units_that_are_kept_for_generation_hold_values(
    tier: Tier, compute_dtype: str, tmp_path: Path
) -> None:
    model = seeded(models.frozen_tower).bfloat16()
    with (
        tiermem.shard(
            model, policy_of("nf4", tier, tmp_path, compute_dtype=compute_dtype)
        ) as shards,
        torch.no_grad(),
    ):
        expected = loss_of(model, 0)
        with tiermem.zero.unwrap_model_for_generation(model):
            assert all(live.is_present for live in shards.units)
            assert loss_of(model, 0) == expected
        assert loss_of(model, 0) == expected


def test_unfreezing_is_refused_with_the_alternative(tmp_path: Path) -> None:
    model = seeded(models.frozen_tower)
    with tiermem.shard(model, policy_of("nf4", Tier.NVME, tmp_path)):
        model.layers[1].up.weight.requires_grad_(True)
        with pytest.raises(
            RuntimeError, match=r"layers.1.up.weight .* rests in nf4 blocks, .* before sharding"
        ):
            loss_of(model, 0)
        model.layers[1].up.weight.requires_grad_(False)
        loss_of(model, 0).backward()


@pytest.mark.parametrize("tier", TIERS)
def test_a_model_for_inference_rests_in_blocks_whole(tier: Tier, tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    twin = blocked(copy.deepcopy(model).requires_grad_(False), "nf4")
    with (
        tiermem.shard(model, policy_of("nf4", tier, tmp_path), is_trained=False) as shards,
        torch.no_grad(),
    ):
        assert {shard.name for live, shard in shards.parameters() if live.unit.is_packed} == {
            n for n, _ in frozen(twin)
        }
        assert loss_of(model, 0) == loss_of(twin, 0)


def test_nothing_else_is_packed(tmp_path: Path) -> None:
    """Norms, biases, small matrices, integers and what is trained."""
    model = seeded(models.frozen_tower)
    model.table = nn.Parameter(torch.arange(3000).view(30, 100), requires_grad=False)
    policy = policy_of("nf4", Tier.NVME, tmp_path, persistence_numel=2000)  # of 31 x 61 and 31 x 97
    with tiermem.shard(model, policy) as shards:
        packed = {shard.name for live, shard in shards.parameters() if live.unit.is_packed}
        assert packed == {"layers.1.up.weight", "layers.1.down.weight", "layers.2.up.weight"}


def test_two_forms_are_refused() -> None:
    with pytest.raises(
        CombinedError, match='quantised_frozen=True means "int8", but frozen_quant_type is "nf4"'
    ):
        tiermem.OffloadPolicy(quantised_frozen=True, frozen_quant_type="nf4")
    with pytest.raises(
        ValueError, match="frozen_quant_type is 'fp4'; allowed are None, 'int8', 'nf4'"
    ):
        tiermem.OffloadPolicy(frozen_quant_type="fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="frozen_quant_type=nf4 with stage 2"):
        tiermem.OffloadPolicy(stage=2, frozen_quant_type="nf4")


def test_a_config_sets_it(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50},
        "tiermem": {"frozen_quant_type": "nf4"},
    }
    assert load_config(config).policy().frozen_blocks == "nf4"
    model = seeded(models.frozen_tower)
    twin = blocked(copy.deepcopy(model), "nf4")
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine, *_ = tiermem.initialize(model=model, config=config, model_parameters=model.parameters())
    with torch.no_grad():
        assert loss_of(engine, 0) == loss_of(twin, 0)
    engine.destroy()
