"""Does an engine answer what trainers ask, and do its small methods do what they say?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import loss_of, seeded, train_engine

import tiermem


def started(tmp_path: Path, **keys: Any) -> tiermem.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.1}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    engine, _, _, _ = tiermem.initialize(model=seeded(models.ShortTower), config=config | keys)
    return engine


def test_the_answers_are_the_configs(tmp_path: Path) -> None:
    engine = started(tmp_path, bf16={"enabled": True})
    assert engine.get_batch_info() == (6, 2, 3)
    assert engine.gradient_clipping() == 0.5
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 3)
    assert engine.zero_optimization_partition_gradients()
    assert engine.zero_optimization_partition_weights()
    assert engine.zero_offload_param() is None
    assert engine.zero_offload_optimizer().device == "nvme"
    assert (engine.zero_cpu_offload(), engine.zero_nvme_offload_optimizer()) == (False, True)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled(), engine.torch_autocast_enabled()) == (
        True,
        False,
        False,
    )
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", "WarmupLR")
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (1.0, False)
    assert (engine.get_data_parallel_rank(), engine.dp_world_size) == (0, 1)
    assert engine.get_mom() == [(0.8, 0.9)]
    assert engine.get_type() == [None]
    assert engine.steps_per_print() == 10
    engine.close()


def test_tools_find_the_optimizer_and_its_scale(tmp_path: Path) -> None:
    engine = started(tmp_path, fp16={"enabled": True, "loss_scale": 8.0})
    assert engine.optimizer is not None
    assert engine.optimizer.optimizer is engine.basic_optimizer is engine.optimizer
    assert (engine.optimizer.loss_scale, engine.optimizer.cur_scale) == (8.0, 8.0)
    assert engine.zero_overlap_comm() is True
    engine.close()


def test_counters_count_steps_samples_and_micro_batches(tmp_path: Path) -> None:
    engine = started(tmp_path)
    applied = []
    for number in range(7):
        train_engine(engine, [number])
        applied.append(engine.was_step_applied())
    assert applied == [False, False, True, False, False, True, False]
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (2, 12, 7)
    engine.close()


def test_a_skipped_step_was_not_applied_and_shows_as_overflow(tmp_path: Path) -> None:
    engine = started(
        tmp_path, gradient_accumulation_steps=1, fp16={"enabled": True, "initial_scale_power": 8}
    )
    optimizer = engine.optimizer
    assert (
        optimizer.loss_scaler.loss_scale
        == optimizer.loss_scaler.cur_scale
        == engine.loss_scale()
        == 256.0
    )
    engine.backward(loss_of(engine, 0) * float("inf"))
    engine.step()
    assert (engine.was_step_applied(), optimizer.overflow, engine.skipped_steps) == (False, True, 1)
    train_engine(engine, [0])
    assert (engine.was_step_applied(), optimizer.overflow, engine.skipped_steps) == (True, False, 1)
    engine.close()


def test_the_learning_rate_is_set_on_the_optimizer(tmp_path: Path) -> None:
    engine = started(tmp_path, gradient_accumulation_steps=1)
    engine.optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25]
    assert engine.optimizer.get_lr() == 0.25
    engine.close()


def test_lr_kwargs_go_to_the_schedules_step(tmp_path: Path) -> None:
    engine = started(tmp_path, gradient_accumulation_steps=1)
    engine.backward(loss_of(engine, 0))
    with pytest.warns(UserWarning, match="epoch parameter"):  # torch's own
        engine.step(lr_kwargs={"epoch": 4})
    assert engine.lr_scheduler.last_epoch == 4
    engine.close()


def test_the_batch_size_changes_by_micro_batches(tmp_path: Path) -> None:
    engine = started(tmp_path)
    engine.set_train_batch_size(4)
    assert engine.get_batch_info() == (4, 2, 2)
    for number in range(4):
        train_engine(engine, [number])
    assert engine.global_steps == 2
    with pytest.raises(
        ValueError, match="train_batch_size 5 is not a multiple of train_micro_batch_size_per_gpu 2"
    ):
        engine.set_train_batch_size(5)
    engine.close()


def test_a_step_after_a_change_of_batch_size_has_all_its_micro_batches(tmp_path: Path) -> None:
    engine = started(tmp_path, gradient_accumulation_steps=1)
    train_engine(engine, range(2))
    engine.set_train_batch_size(6)
    steps = []
    for number in range(6):
        train_engine(engine, [number])
        steps.append(engine.global_steps)
    assert steps == [2, 2, 3, 3, 3, 4]
    engine.set_train_batch_size(4)
    train_engine(engine, [6])
    assert engine.global_steps == 4
    assert engine.micro_steps == 9
    engine.close()


def test_training_mode_reaches_the_model(tmp_path: Path) -> None:
    engine = started(tmp_path)
    engine.eval()
    assert not engine.module.layers[0].training
    engine.train()
    assert engine.module.layers[0].training
    engine.close()


def test_destroy_ends_the_engine_and_can_be_repeated(tmp_path: Path) -> None:
    engine = started(tmp_path)
    engine.destroy()
    engine.destroy()
    assert not list(tmp_path.glob("tiermem-*"))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("own", ["scale", "plain"])
def test_the_users_own_backward_trains_as_the_engines(
    own: str, accumulation: int, tmp_path: Path
) -> None:
    losses = []
    for is_own in (False, True):
        keys = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 0.0}
        engine = started(tmp_path, **keys)
        losses.append([])
        for number in range(4 * accumulation):
            loss = loss_of(engine, number)
            if not is_own:
                engine.backward(loss)
            else:
                (engine.scale(loss) if own == "scale" else loss).backward()
            engine.step()
            losses[-1].append(loss.item())
        losses[-1].append(engine.get_global_grad_norm())
        engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_fp16_wants_a_scaled_loss(tmp_path: Path) -> None:
    engine = started(
        tmp_path, gradient_accumulation_steps=1, fp16={"enabled": True, "initial_scale_power": 8}
    )
    loss_of(engine, 0).backward()
    with pytest.raises(
        RuntimeError, match=r"use engine.backward\(loss\), or engine.scale\(loss\).backward\(\)"
    ):
        engine.step()
    engine.optimizer.zero_grad()
    engine.scale(loss_of(engine, 0)).backward()
    engine.step()
    assert engine.was_step_applied()
    engine.close()


def test_both_ways_in_one_step_are_an_error(tmp_path: Path) -> None:
    engine = started(tmp_path, gradient_accumulation_steps=2)
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.scale(loss_of(engine, 1)).backward()
    with pytest.raises(
        RuntimeError,
        match=r"1 losses of this step went through engine.backward.*and 1 through engine.scale",
    ):
        engine.step()
    engine.close()


def test_the_models_own_attributes_are_reached_through_the_engine(tmp_path: Path) -> None:
    engine = started(tmp_path)
    assert engine.used_layers() == list(engine.module.layers)
    assert isinstance(engine.head, torch.nn.Linear)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = engine.nowhere
    engine.close()
