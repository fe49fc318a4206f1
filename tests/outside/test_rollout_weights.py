"""Are the weights that a program for rollouts gets the current ones, unit by unit, also while the
engine sleeps?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_engine, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

WHERE: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME},
    "resident": {"stage": 1},
}


@pytest.mark.parametrize("where", WHERE)
def test_they_are_the_current_ones_between_steps(where: str, tmp_path: Path) -> None:
    model = seeded(Tower).bfloat16()
    model.register_buffer("seen", torch.ones(3))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    with tiermem.shard(
        model, OffloadPolicy(paths=[tmp_path], persistence_numel=50, **WHERE[where]), device="cpu"
    ):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            train_steps(model, optim, range(step, step + 1))
            assert_same_tensors(dict(tiermem.export_weights(model)), dict(model.state_dict()))
            wide = dict(tiermem.export_weights(model, torch.float32))
            assert {value.dtype for value in wide.values()} == {torch.float32}
            next(iter(tiermem.export_weights(model)))  # one that is not taken to its end
        part = dict(tiermem.export_weights(model.layers[0]))
        assert set(part) == set(dict(model.layers[0].named_parameters()))


def test_exports_change_nothing_of_a_training(tmp_path: Path) -> None:
    policy = OffloadPolicy(paths=[tmp_path], persistence_numel=50, **WHERE["nvme"])
    losses = []
    for exports in (False, True):
        model = seeded(Tower)
        with tiermem.shard(model, policy, device="cpu"):
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            losses.append([])
            for step in range(3):
                losses[-1] += train_steps(model, optim, range(step, step + 1))
                if exports:
                    assert all(
                        torch.isfinite(value).all() for _, value in tiermem.export_weights(model)
                    )
    assert losses[0] == losses[1]


def test_tied_parameters_come_once_and_plain_models_alike() -> None:
    model = models.tied_tower()
    names = [name for name, _ in tiermem.export_weights(model)]
    with tiermem.shard(model, OffloadPolicy(params=Tier.HOST, optim=Tier.HOST), device="cpu"):
        assert sorted(name for name, _ in tiermem.export_weights(model)) == sorted(names)
        assert len(names) == len(list(model.parameters()))


def test_inside_a_forward_it_is_refused() -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = seeded(Tower)

        def forward(self, tokens: torch.Tensor) -> Any:
            next(iter(tiermem.export_weights(self)))
            return self.inner(tokens)

    model = Asking()
    policy = OffloadPolicy(params=Tier.HOST, optim=Tier.HOST)
    with (
        tiermem.shard(model, policy, device="cpu"),
        pytest.raises(RuntimeError, match="inside a forward"),
    ):
        loss_of(model, 0)


def test_an_engine_that_sleeps_gives_its_weights_and_wakes(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    losses = []
    for sleeps in (False, True):
        engine, *_ = tiermem.initialize(model=seeded(Tower), config=config)
        losses.append(train_engine(engine, range(2)))
        if sleeps:
            engine.offload_states()
            assert_same_tensors(dict(tiermem.export_weights(engine)), engine.module_state_dict())
            engine.reload_states()
        losses[-1] += train_engine(engine, range(2, 4))
        engine.close()
    assert losses[0] == losses[1]
