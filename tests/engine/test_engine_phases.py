"""Does an engine give memory back between phases, generate with everything in memory, and live
beside another?"""

from __future__ import annotations

import copy
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded, train_engine

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.utils import safe_set_full_fp32_param
from tiermem.zero import OffloadDeviceEnum, OffloadStateTypeEnum, unwrap_model_for_generation

DEVICES = ["none", "cpu", "nvme"]


def started(
    folder: Path, model: torch.nn.Module, device: str = "nvme", **keys: Any
) -> tiermem.Engine:
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 50}
    if device != "none":
        for section in ("offload_optimizer", "offload_param"):
            zero[section] = {"device": device, "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    engine, _, _, _ = tiermem.initialize(model=model, config=config | keys)
    return engine


def num_present(engine: tiermem.Engine) -> int:
    return sum(live.is_present and not live.unit.is_resident for live in engine.shards.units)


# ---- giving memory back --------------------------------------------------------------------------


def test_empty_partition_cache_lets_every_unit_go(tmp_path: Path) -> None:
    engine, twin = (started(tmp_path, seeded(models.ShortTower)) for _ in range(2))
    for number in range(3):
        assert train_engine(engine, [number]) == train_engine(twin, [number])
        loss_of(engine, number)
        assert num_present(engine) > 0
        engine.empty_partition_cache()
        assert num_present(engine) == 0
    engine.close()
    twin.close()


@pytest.mark.parametrize("device", DEVICES)
def test_states_are_offloaded_and_training_goes_on(device: str, tmp_path: Path) -> None:
    engine, twin = (started(tmp_path, seeded(models.ShortTower), device) for _ in range(2))
    for number in range(3):
        assert train_engine(engine, [number]) == train_engine(twin, [number])
        engine.eval()
        loss_of(engine, number)
        engine.offload_states()
        assert num_present(engine) == 0
        engine.reload_states()
        engine.train()
    engine.close()
    twin.close()


def test_what_cannot_be_offloaded_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(tmp_path, seeded(models.ShortTower))
    with pytest.raises(
        ValueError, match="offload_states to nvme: states have one home for a whole run"
    ):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(
        ValueError, match=r"'activations'.*allowed are optim_states, hp_params, lp_params, lp_grads"
    ):
        engine.offload_states(include=["activations"])
    with pytest.raises(ValueError, match="include is 'lp_params'; give a list"):
        engine.offload_states(include="lp_params")
    with caplog.at_level(logging.WARNING, "tiermem"):
        engine.offload_states(device=OffloadDeviceEnum.none)
    assert "device is none, so nothing is offloaded" in caplog.text
    engine.offload_states(
        include=[OffloadStateTypeEnum.optim_states, "lp_grads"], pin_memory=False, non_blocking=True
    )
    engine.reload_states(non_blocking=True)
    engine.close()


# ---- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_generation_reads_every_unit_once(device: str, tmp_path: Path) -> None:
    model = seeded(models.llama)
    plain = copy.deepcopy(model)
    engine = started(tmp_path, model, device)
    prompt = torch.randint(1, 61, (2, 5), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    engine.empty_partition_cache()
    before = engine.shards.store.stats().nvme_read_bytes
    with unwrap_model_for_generation(engine) as unwrapped:
        assert unwrapped is engine
        assert torch.equal(engine.generate(prompt, **settings), plain.generate(prompt, **settings))
        read = engine.shards.store.stats().nvme_read_bytes - before
        at_home = sum(
            live.unit.shard_bytes for live in engine.shards.units if live.entry is not None
        )
        assert at_home <= read <= 2 * at_home  # and what shares 4096-byte blocks
    assert num_present(engine) == 0
    twin = started(tmp_path, plain, device)
    assert train_engine(engine, range(2)) == train_engine(twin, range(2))
    assert_same_tensors(dict(engine.module.state_dict()), dict(twin.module.state_dict()))
    engine.close()
    twin.close()


def test_units_are_streamed_again_after_an_error_in_the_block(tmp_path: Path) -> None:
    engine = started(tmp_path, seeded(models.ShortTower))
    try:
        with unwrap_model_for_generation(engine):
            assert all(live.is_present for live in engine.shards.units)
            raise KeyError("the user's own")
    except KeyError:
        pass
    assert num_present(engine) == 0
    assert not all(live.unit.is_resident for live in engine.shards.units)
    train_engine(engine, [0])
    engine.close()


def test_weights_do_not_change_while_all_are_present(tmp_path: Path) -> None:
    engine = started(tmp_path, seeded(models.ShortTower))
    engine.backward(loss_of(engine, 0))
    with unwrap_model_for_generation(engine):
        for change in (
            engine.step,
            lambda: safe_set_full_fp32_param(engine.module.head.weight, torch.zeros(61, 31)),
            lambda: engine.module.load_state_dict(engine.module.state_dict()),
        ):
            with pytest.raises(
                RuntimeError, match="inside unwrap_model_for_generation: leave its block first"
            ):
                change()
    engine.step()
    engine.close()


def test_a_model_larger_than_what_the_budget_leaves_is_streamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(models.ShortTower)
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[tmp_path], persistence_numel=50
    )
    with tiermem.shard(copy.deepcopy(model), policy) as probe:
        needed = probe.plan.host_bytes
    tight = OffloadPolicy(
        params=Tier.NVME,
        optim=Tier.NVME,
        paths=[tmp_path],
        persistence_numel=50,
        resident_bytes=0,
        host_bytes=needed + 9000,
    )
    with tiermem.shard(model, tight) as shards, caplog.at_level(logging.WARNING, "tiermem"):
        with unwrap_model_for_generation(model):
            assert loss_of(model, 0).isfinite()
            assert not all(live.is_present for live in shards.units)
        assert "does not fit on rank 0" in caplog.text
        assert (
            f"host_bytes {needed + 9000} // 1 ranks - {shards.plan.host_bytes} planned"
            in caplog.text
        )


def test_a_model_that_is_not_sharded_is_yielded_as_it_is() -> None:
    model = seeded(models.ShortTower)
    with unwrap_model_for_generation(model) as unwrapped:
        assert unwrapped is model


# ---- several engines -----------------------------------------------------------------------------


def test_closing_one_engine_leaves_the_other(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = (
        started(tmp_path / "a", seeded(models.ShortTower)),
        started(tmp_path / "b", seeded(models.tied_tower, 1)),
    )
    same_path = started(tmp_path / "a", seeded(models.ShortTower))
    for number in range(2):
        assert train_engine(one, [number]) == train_engine(same_path, [number])
        train_engine(other, [number])
    one.close()
    assert len(list(tmp_path.rglob("tiermem-*"))) == 2
    for number in range(2, 4):
        train_engine(other, [number])
        train_engine(same_path, [number])
    with pytest.raises(RuntimeError):
        train_engine(one, [2])
    same_path.close()
    other.close()


@pytest.mark.parametrize("after", ["building", "backward", "a step", "an error"])
def test_an_engine_that_is_forgotten_leaves_nothing(after: str, tmp_path: Path) -> None:
    engine = started(tmp_path, seeded(models.ShortTower))
    loss = loss_of(engine, 0) if after != "building" else None
    if loss is not None:
        engine.backward(loss)
    if after == "a step":
        engine.step()
    if after == "an error":
        with pytest.raises(TypeError):
            engine.module(1, 2, 3)
    assert list(tmp_path.glob("tiermem-*"))
    del engine, loss
    gc.collect()
    assert not list(tmp_path.glob("tiermem-*"))
