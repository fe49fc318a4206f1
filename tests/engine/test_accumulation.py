"""Does a step take the gradients of all its micro-batches, whoever says where it ends?"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded
from torch import nn

import tiermem
from tiermem.utils import (
    safe_get_full_grad,
    safe_get_local_grad,
    safe_set_full_grad,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)

STAGES = [0, 1, 2, 3]
NUM_MICRO = 3
NUM_STEPS = 2


class Runs:
    """An engine, and a plain twin that has taken the same steps; `same` compares them."""

    def __init__(self, stage: int, folder: Path, **keys: Any) -> None:
        model = seeded(models.ShortTower)
        self.plain = copy.deepcopy(model)
        zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 50}
        if stage:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
        base: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
            "zero_optimization": zero,
        }
        self.engine, _, _, _ = tiermem.initialize(model=model, config=base | keys)
        optim = tiermem.AdamW(self.plain.parameters(), lr=1e-2, weight_decay=0.01)
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                (loss_of(self.plain, step * NUM_MICRO + micro) / NUM_MICRO).backward()
            optim.step()
            optim.zero_grad()

    def backward(self, step: int, micro: int) -> None:
        self.engine.backward(loss_of(self.engine, step * NUM_MICRO + micro))

    def assert_same(self) -> None:
        assert self.engine.global_steps == NUM_STEPS
        assert_same_tensors(dict(self.engine.module.state_dict()), dict(self.plain.state_dict()))


@contextlib.contextmanager
def runs(stage: int, folder: Path, **keys: Any) -> Iterator[Runs]:
    both = Runs(stage, folder, **({"gradient_accumulation_steps": NUM_MICRO} | keys))
    try:
        yield both
    finally:
        both.engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_the_engine_counts_micro_batches(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path) as each:
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                each.backward(step, micro)
                assert each.engine.is_gradient_accumulation_boundary() == (micro == NUM_MICRO - 1)
                each.engine.step()
        assert each.engine.micro_steps == NUM_STEPS * NUM_MICRO
        each.assert_same()


@pytest.mark.parametrize("stage", STAGES)
def test_the_user_sets_the_boundary_and_steps_only_there(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path) as each:
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                each.engine.set_gradient_accumulation_boundary(micro == NUM_MICRO - 1)
                each.backward(step, micro)
            each.engine.step()
        each.assert_same()


@pytest.mark.parametrize("stage", STAGES)
def test_a_boundary_set_to_false_makes_step_do_nothing(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path) as each:
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                each.engine.set_gradient_accumulation_boundary(is_boundary=micro == NUM_MICRO - 1)
                each.backward(step, micro)
                each.engine.step()
        each.assert_same()


@pytest.mark.parametrize("stage", STAGES)
def test_not_managed_every_step_is_the_boundary(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path, managed_gradient_accumulation=False) as each:
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                each.backward(step, micro)
                assert not each.engine.is_gradient_accumulation_boundary()
            each.engine.step()
        each.assert_same()
        with pytest.raises(
            RuntimeError,
            match=r"managed_gradient_accumulation false: every step\(\) is the boundary",
        ):
            each.engine.set_gradient_accumulation_boundary(True)


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_accumulates_in_every_stage(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path) as each:
        for step in range(NUM_STEPS):
            with each.engine.no_sync():
                for micro in range(NUM_MICRO - 1):
                    each.backward(step, micro)
            each.engine.set_gradient_accumulation_boundary(True)
            each.backward(step, NUM_MICRO - 1)
            each.engine.step()
        each.assert_same()


@pytest.mark.parametrize("stage", STAGES)
def test_reductions_are_coalesced_over_backwards(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path) as each:
        each.engine.set_gradient_accumulation_boundary(True)
        for step in range(NUM_STEPS):
            with each.engine.coalesce_grad_reduction():
                for micro in range(NUM_MICRO):
                    each.backward(step, micro)
            assert each.engine.shards.gradient(each.engine.module.head.weight) is not None
            each.engine.step()
        each.assert_same()


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_reduced_when_asked_before_the_step(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path, managed_gradient_accumulation=False) as each:
        each.backward(0, 0)
        each.engine.allreduce_gradients()
        weight = each.engine.module.head.weight
        # not at a boundary yet
        assert (each.engine.shards.gradient(weight) is not None) == (stage >= 2)
    with runs(stage, tmp_path) as each:
        each.engine.set_gradient_accumulation_boundary(True)
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                each.backward(step, micro)
            each.engine.allreduce_gradients(bucket_size=1000)
            each.engine.step()
        each.assert_same()


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_forgets_what_was_accumulated(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path) as each:
        each.engine.set_gradient_accumulation_boundary(False)
        each.backward(7, 0)
        each.engine.zero_grad()
        for step in range(NUM_STEPS):
            for micro in range(NUM_MICRO):
                each.engine.set_gradient_accumulation_boundary(micro == NUM_MICRO - 1)
                each.backward(step, micro)
            each.engine.step()
        each.assert_same()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("inner", ["step", "no_sync", "coalesce_grad_reduction"])
@pytest.mark.parametrize("outer", ["no_sync", "coalesce_grad_reduction"])
def test_neither_a_step_nor_another_block_is_allowed_in_a_block(
    outer: str, inner: str, stage: int, tmp_path: Path
) -> None:
    said = rf"{inner}.* inside {outer}"
    with (
        runs(stage, tmp_path) as each,
        getattr(each.engine, outer)(),
        pytest.raises(RuntimeError, match=said),
    ):
        use(each.engine, inner)


def use(engine: tiermem.Engine, name: str) -> None:
    """Enters a block, steps, or says that the micro-batch is not the last."""
    given = (False,) if name == "set_gradient_accumulation_boundary" else ()
    block = getattr(engine, name)(*given)
    if block is not None:
        with block:
            pass


@pytest.mark.parametrize(
    "name", ["no_sync", "coalesce_grad_reduction", "set_gradient_accumulation_boundary"]
)
def test_with_step_in_backward_nothing_accumulates(name: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "tiermem": {"step_in_backward": True},
    }
    engine, _, _, _ = tiermem.initialize(model=seeded(models.ShortTower), config=config)
    with pytest.raises(RuntimeError, match=f"{name}.* with step_in_backward"):
        use(engine, name)
    with (
        pytest.raises(RuntimeError, match="no_sync with step_in_backward"),
        engine.shards.no_sync(),
    ):
        pass
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_of_a_bf16_model_add_up_in_the_dtype_that_is_asked_for(stage: int) -> None:
    """Also below stage 2, where autograd would add them up in bf16."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).to(torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    for gradient in (256.0, 0.5):  # together no bf16 number
        loss = engine(torch.full((1, 1), gradient, dtype=torch.bfloat16)).sum()
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
    found = engine.shards.gradient(model[0].weight)
    assert found is not None
    assert found.item() == 256.5
    engine.close()


# ---- gradients between the last backward and the step --------------------------------------------


def own_backward(each: Runs, loss: torch.Tensor) -> None:
    loss.backward()


def scaled_backward(each: Runs, loss: torch.Tensor) -> None:
    each.engine.scale(loss).backward()


def engine_backward(each: Runs, loss: torch.Tensor) -> None:
    each.engine.backward(loss)


@contextlib.contextmanager
def at_the_boundary(
    stage: int, backward: Any, folder: Path, **keys: Any
) -> Iterator[tuple[Runs, list[tuple[nn.Parameter, nn.Parameter]]]]:
    """An engine after the last backward of its first step, and its parameters beside those of a
    twin with the mean gradient."""
    model = seeded(models.ShortTower)
    twin = copy.deepcopy(model)
    for micro in range(NUM_MICRO):
        (loss_of(twin, micro) / NUM_MICRO).backward()
    with runs(stage, folder, **keys) as each:
        for micro in range(NUM_MICRO):
            backward(each, loss_of(each.engine, micro))
            if micro < NUM_MICRO - 1:
                each.engine.step()
        yield each, list(zip(each.engine.module.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("backward", [own_backward, scaled_backward, engine_backward])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_at_the_boundary_are_the_mean(stage: int, backward: Any, tmp_path: Path) -> None:
    with at_the_boundary(stage, backward, tmp_path) as (_, pairs):
        for mine, other in pairs:
            assert other.grad is not None
            torch.testing.assert_close(safe_get_full_grad(mine), other.grad)
            if stage:
                torch.testing.assert_close(safe_get_local_grad(mine), other.grad.flatten())
        mine, other = zip(*pairs, strict=True)
        clipped = nn.utils.clip_grad_norm_(mine, 1e-3)
        torch.testing.assert_close(clipped, nn.utils.clip_grad_norm_(other, 1e-3))
        torch.testing.assert_close(safe_get_full_grad(mine[0]), other[0].grad)


def put_full(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    for mine, _ in pairs:
        found = safe_get_full_grad(mine)
        assert found is not None
        safe_set_full_grad(mine, 2 * found)


def put_local(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    for mine, _ in pairs:
        found = safe_get_local_grad(mine)
        assert found is not None
        safe_set_local_grad(mine, 2 * found)


def put_vectorised(pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
    safe_update_full_grad_vectorized([mine for mine, _ in pairs], lambda grad, param: 2 * grad)


@pytest.mark.parametrize("backward", [own_backward, engine_backward])
@pytest.mark.parametrize("put", [put_full, put_local, put_vectorised])
def test_a_gradient_put_at_the_boundary_is_the_one_that_is_stepped(
    put: Any, backward: Any, tmp_path: Path
) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    with at_the_boundary(3, backward, tmp_path, optimizer=sgd) as (each, pairs):
        put(pairs)
        each.engine.step()
        for name, value in each.engine.module.state_dict().items():
            twin = dict(zip(each.engine.module.state_dict(), pairs, strict=True))[name][1]
            torch.testing.assert_close(value, twin.detach() - 0.5 * 2 * twin.grad)


@pytest.mark.parametrize("stage", [0, 3])
def test_samples_are_counted_of_the_micro_batches_that_ran(stage: int, tmp_path: Path) -> None:
    with runs(stage, tmp_path, managed_gradient_accumulation=False) as each:
        for num_micro in (1, 2):  # the config says NUM_MICRO
            for micro in range(num_micro):
                own_backward(each, loss_of(each.engine, micro))
            each.engine.step()
        assert (each.engine.global_steps, each.engine.global_samples) == (2, (1 + 2) * 2)
    with runs(stage, tmp_path) as each:
        each.engine.set_gradient_accumulation_boundary(True)
        each.backward(0, 0)
        each.engine.step()
        assert (each.engine.global_steps, each.engine.global_samples) == (1, 2)
    with runs(stage, tmp_path) as each:
        for micro in range(NUM_MICRO):
            each.backward(0, micro)
            each.engine.step()
        assert (each.engine.global_steps, each.engine.global_samples) == (1, NUM_MICRO * 2)
