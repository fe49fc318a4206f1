"""A parameter group that was saved and is now several: are they refused where they differ, and
opened where they do not?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import model, policy, train
from torch import nn

import tiermem
from tiermem import checkpoint

DECAYS = {"weight_decay": 0.1}, {"weight_decay": 0.0}


def groups(made: nn.Module, *values: dict[str, Any]) -> list[dict[str, Any]]:
    """Matrices and the other parameters, each with its values."""
    params = list(made.parameters())
    kinds = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return [{"params": kind, **each} for kind, each in zip(kinds, values, strict=True)]


def save(folder: Path, *values: dict[str, Any]) -> None:
    made = model(dtype=torch.bfloat16)
    with tiermem.shard(made, policy("nvme", folder / "run")) as shards:
        given = groups(made, *values) if values else made.parameters()
        optimizer = tiermem.AdamW(given, lr=0.02, weight_decay=0.05)  # type: ignore[arg-type]
        train(made, optimizer, 1)
        checkpoint.save(shards, optimizer, folder / "out", "a")


def opened(folder: Path, *values: dict[str, Any], **how: Any) -> list[float]:
    """The weight decays of the groups into which a save was opened."""
    made = model(dtype=torch.bfloat16)
    with tiermem.shard(made, policy("nvme", folder / "again")) as shards:
        given = groups(made, *values) if values else made.parameters()
        optimizer = tiermem.AdamW(given, lr=0.01, weight_decay=0.01)  # type: ignore[arg-type]
        checkpoint.load(shards, optimizer, folder / "out", **how)
        return [group["weight_decay"] for group in optimizer.param_groups]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("run", "again"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_groups_that_differ_and_were_one_are_refused(folder: Path) -> None:
    save(folder)
    with pytest.raises(
        ValueError,
        match=r"groups 0 and 1 of the optimizer differ in weight_decay.*one saved group, 0",
    ):
        opened(folder, *DECAYS)


def test_their_weights_alone_are_opened(folder: Path) -> None:
    save(folder)
    assert opened(folder, *DECAYS, load_optimizer_states=False) == [0.1, 0.0]


def test_groups_that_are_alike_take_the_values_of_the_one(folder: Path) -> None:
    save(folder)
    assert opened(folder, {}, {}) == [0.05, 0.05]


def test_groups_that_were_saved_so_are_opened(folder: Path) -> None:
    save(folder, *DECAYS)
    assert opened(folder, {}, {}) == [0.1, 0.0]


def test_a_group_that_merges_saved_ones_is_refused(folder: Path) -> None:
    save(folder, *DECAYS)
    with pytest.raises(ValueError, match="which may differ in lr and the rest"):
        opened(folder)
