"""Does an engine stand the sequence of calls that Hugging Face's Accelerate and Trainer make?

Accelerate's own wrappers of the reference's engine, optimizer and scheduler are used as they are.
What is called is written down in the order in which the Trainer calls it: prepare, train, clip,
save.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded

import tiermem
from tiermem.utils import safe_get_full_grad


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[None]:
    """Accelerate's wrappers ask for one."""
    Accelerator(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def prepare(model: torch.nn.Module, folder: Path, **keys: Any) -> tuple[Any, ...]:
    """As Accelerate prepares: the batch sizes filled in, the parameters given, 'auto' left where it
    is."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)},
            "offload_param": {"device": "nvme", "nvme_path": str(folder)},
            "stage3_param_persistence_threshold": 50,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    return tiermem.initialize(
        model=model,
        config_params=config | keys,
        model_parameters=(p for p in model.parameters() if p.requires_grad),
    )


def test_a_training_loop_of_accelerate_trains_as_plain_torch(tmp_path: Path) -> None:
    model = seeded(models.ShortTower)
    plain = copy.deepcopy(model)
    engine, optimizer, _, _ = prepare(model, tmp_path)
    wrapped, wrapped_optimizer = (
        DeepSpeedEngineWrapper(engine),
        DeepSpeedOptimizerWrapper(optimizer),
    )
    twin = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    engine.train()
    for number in range(8):  # the last step has two micro-batches, as at the end of an epoch
        is_last = number % 3 == 2 or number == 7
        loss = loss_of(engine, number)
        wrapped.backward(loss, sync_gradients=is_last)
        wrapped_optimizer.step()
        assert not wrapped_optimizer.step_was_skipped
        wrapped_optimizer.zero_grad()
        other = loss_of(plain, number)
        assert loss.item() == pytest.approx(other.item(), rel=1e-5)
        (other / 3).backward()
        if is_last:
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
            assert wrapped.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
            twin.step()
            twin.zero_grad()
    assert engine.global_steps == 3
    for mine, other_weight in zip(
        engine.module_state_dict().values(), plain.state_dict().values(), strict=True
    ):
        assert torch.allclose(mine, other_weight, rtol=1e-4, atol=1e-6)
    engine.destroy()


def test_a_trainer_saves_through_the_engine(tmp_path: Path) -> None:
    engine, _, _, _ = prepare(seeded(models.tied_tower), tmp_path)
    assert engine.zero_optimization_stage() == 3
    assert engine.zero_gather_16bit_weights_on_model_save()
    state = engine._zero3_consolidated_16bit_state_dict()
    assert_same_tensors(state, dict(engine.module.state_dict()))
    assert engine.save_16bit_model(str(tmp_path / "checkpoint-1"), "pytorch_model.bin")
    assert_same_tensors(
        torch.load(tmp_path / "checkpoint-1" / "pytorch_model.bin", weights_only=True), state
    )
    engine.destroy()


def test_a_step_that_overflows_is_told(tmp_path: Path) -> None:
    engine, optimizer, _, _ = prepare(
        seeded(models.ShortTower),
        tmp_path,
        fp16={"enabled": True, "initial_scale_power": 4},
        gradient_accumulation_steps=1,
    )
    wrapped, wrapped_optimizer = (
        DeepSpeedEngineWrapper(engine),
        DeepSpeedOptimizerWrapper(optimizer),
    )
    wrapped.backward(loss_of(engine, 0) * float("inf"))
    assert wrapped_optimizer.step_was_skipped
    wrapped.backward(loss_of(engine, 0))
    assert not wrapped_optimizer.step_was_skipped
    assert optimizer.loss_scaler.loss_scale == engine.loss_scale()
    engine.destroy()


def test_reinforcement_learners_call_these_too(tmp_path: Path) -> None:
    engine, _, _, _ = prepare(seeded(models.llama), tmp_path, gradient_accumulation_steps=1)
    engine.backward(loss_of(engine, 0), scale_wrt_gas=False)
    assert engine.is_gradient_accumulation_boundary()
    assert all(safe_get_full_grad(p) is not None for p in engine.module.parameters())
    engine.step()
    engine.offload_states()
    engine.reload_states()
    with tiermem.zero.unwrap_model_for_generation(engine) as unwrapped:
        tokens = unwrapped.module.generate(
            torch.ones(1, 3, dtype=torch.long), max_new_tokens=4, do_sample=False
        )
    assert tokens.shape[0] == 1
    engine.destroy()
