"""Does an Accelerator drive a sharded model as it drives a plain one: losses, norms, rates, states
saved and loaded?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerated import run
from launch import launch
from torch import nn

from tiermem import OffloadPolicy
from tiermem.integrations.accelerate import prepare
from tiermem.run.shards import owner_of

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def assert_equal(found: dict[str, list[float]]) -> None:
    plain = found.pop("plain")
    for name, values in found.items():
        assert values == pytest.approx(plain[-len(values) :], rel=1e-6), name
        assert len(values) == (5 if "resumed" in name else len(plain))


def test_losses_norms_and_rates_equal_plain_ones_also_when_loaded(tmp_path: Path) -> None:
    assert_equal(run(tmp_path))
    files = {each.name for each in (tmp_path / "sharded").iterdir()}
    assert "tiermem" in files and not any("safetensors" in name for name in files)
    assert (tmp_path / "sharded" / "optimizer.bin").stat().st_size < 5000


def test_two_ranks_equal_ddp(tmp_path: Path) -> None:
    for folder in ("out", "work"):
        (tmp_path / folder).mkdir()
    for found in launch(HERE / "accelerated.py", 2, tmp_path / "out", str(tmp_path / "work")):
        assert_equal(found)


def test_each_model_that_an_accelerator_drives_is_saved_and_opened(tmp_path: Path) -> None:
    """Also where one of them is prepared twice, and another was closed."""
    accelerator = Accelerator(cpu=True)
    models, optimizers = [], []
    for _ in range(3):
        model = nn.Linear(2, 1)
        model, optimizer = prepare(
            accelerator, model, torch.optim.AdamW(model.parameters()), policy=OffloadPolicy()
        )
        models.append(model)
        optimizers.append(optimizer)
    owner_of(models.pop(0)).close()
    prepare(accelerator, models[0])

    def train() -> list[dict[str, torch.Tensor]]:
        for model, optimizer in zip(models, optimizers[1:], strict=True):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return [{name: each.clone() for name, each in m.state_dict().items()} for m in models]

    train()
    accelerator.save_state(str(tmp_path))
    after = train()
    accelerator.load_state(str(tmp_path))
    assert all(map(torch.equal, *([w["weight"] for w in each] for each in (train(), after))))
    for model in models:
        owner_of(model).close()
        assert not hasattr(model, "_is_accelerate_prepared")


def test_several_models_are_refused() -> None:
    with pytest.raises(ValueError, match="2 models; give one"):
        prepare(Accelerator(cpu=True), nn.Linear(2, 2), nn.Linear(2, 2))


def test_several_optimizers_are_refused() -> None:
    model = nn.Linear(2, 2)
    two = [torch.optim.AdamW([param]) for param in model.parameters()]
    with pytest.raises(ValueError, match="2 optimizers; a sharded model has one"):
        prepare(Accelerator(cpu=True), model, *two)


def test_a_config_in_place_of_a_policy_is_refused() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match="policy is a dict; give an OffloadPolicy"):
        prepare(Accelerator(cpu=True), nn.Linear(2, 2), policy=config)  # type: ignore[arg-type]


def test_an_optimizer_that_cannot_be_taken_over_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="cannot step states"):
        prepare(Accelerator(cpu=True), model, torch.optim.RMSprop(model.parameters()))


def test_a_scaled_loss_steps_as_one_that_is_not() -> None:
    weights = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = scaler  # as mixed_precision="fp16" does where there is a GPU
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        # Adam's steps would be those of any scale
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = prepare(accelerator, model, given, policy=OffloadPolicy())
        skipped = []
        for value in (1.0, math.inf, 2.0):
            accelerator.backward(model(torch.full((2, 4), value)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        assert skipped == [False, scaler is not None, False]
        owner_of(model).close(materialize=True)
        weights.append(dict(model.state_dict()))
    torch.testing.assert_close(*weights)
