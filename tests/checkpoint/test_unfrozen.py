"""Does training go on to the bit from a checkpoint that was taken before, or after, parameters were
unfrozen?"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from programs.models import Tower
from programs.twins import assert_same_tensors, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.checkpoint import load, save
from tiermem.gradients.gradients import GradientHomes

HOMES: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME, "tile_numel": 4096},
}
GROUPS = ("head", "layers", "embed")


def sharded(model: nn.Module, home: str, nvme: Path, **fields: Any) -> tiermem.Shards:
    return tiermem.shard(
        model,
        OffloadPolicy(paths=[nvme], persistence_numel=50, **HOMES[home], **fields),
        device="cpu",
    )


def head_only(seed: int = 0) -> nn.Module:
    model = seeded(Tower, seed).requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def grouped(model: nn.Module) -> tiermem.AdamW:
    """One group for each part, frozen or not."""
    rates = zip(GROUPS, (1e-2, 5e-3, 2e-3), strict=True)
    return tiermem.AdamW(
        [{"params": model.get_submodule(name).parameters(), "lr": lr} for name, lr in rates]
    )


def expected() -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Plain training: the head for 2 steps, then the first blocks too. The losses, and the weights
    after steps 2, 4 and 7."""
    model = head_only()
    optim = grouped(model)
    losses, weights = train_steps(model, optim, range(2)), []
    weights.append({name: value.clone() for name, value in model.state_dict().items()})
    model.layers[:2].requires_grad_(True)
    for steps in (range(2, 4), range(4, 7)):
        losses += train_steps(model, optim, steps)
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    return losses, weights


def saved(home: str, folder: Path) -> None:
    model = head_only()
    with sharded(model, home, folder, keep=3) as shards:
        optim = grouped(model)
        train_steps(model, optim, range(2))
        save(shards, optim, folder / "saved", "before")
        model.layers[:2].requires_grad_(True)
        save(shards, optim, folder / "saved", "between")  # unfrozen, and no forward has run
        train_steps(model, optim, range(2, 4))
        save(shards, optim, folder / "saved", "after")
        tiermem.checkpoint.wait(shards)


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
def test_a_checkpoint_opens_on_either_side_of_unfreezing(home: str, tmp_path: Path) -> None:
    losses, weights = expected()
    saved(home, tmp_path)
    for tag, number in (("before", 0), ("between", 0), ("after", 1)):
        for when in ("at sharding", "before opening", "after opening"):
            model, other = head_only(seed=1), "nvme" if home == "host" else "host"
            if when == "at sharding":
                model.layers[:2].requires_grad_(True)
            with sharded(model, other, tmp_path) as shards:
                optim = grouped(model)
                if when == "before opening":
                    model.layers[:2].requires_grad_(True)
                load(shards, optim, tmp_path / "saved", tag)
                model.layers[:2].requires_grad_(True)
                assert_same_tensors(dict(model.state_dict()), weights[number])
                first = 2 if number == 0 else 4
                assert train_steps(model, optim, range(first, 7)) == losses[first:], (tag, when)
                assert_same_tensors(dict(model.state_dict()), weights[2])


def test_without_room_states_of_frozen_parameters_are_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, weights = expected()
    saved("nvme", tmp_path)
    with sharded(head_only(), "nvme", tmp_path) as shards:
        needed = shards.plan.disk_bytes
    with sharded(head_only(), "nvme", tmp_path, disk_bytes=needed) as shards:
        load(shards, grouped(shards.model), tmp_path / "saved", "after")
        assert "states of 12 parameters that are frozen here are not loaded: " in caplog.text
        assert_same_tensors(dict(shards.model.state_dict()), weights[1])


def test_states_that_the_optimizer_does_not_hold_take_no_room(tmp_path: Path) -> None:
    saved("nvme", tmp_path)
    with sharded(head_only(), "nvme", tmp_path) as shards:
        plan = shards.plan
        load(shards, tiermem.AdamW(shards.model.head.parameters()), tmp_path / "saved", "after")
        assert shards.plan is plan


def test_a_state_dict_of_an_unfrozen_model_is_loaded(tmp_path: Path) -> None:
    losses, weights = expected()
    plain = head_only()
    optim = grouped(plain)
    train_steps(plain, optim, range(2))
    plain.layers[:2].requires_grad_(True)
    train_steps(plain, optim, range(2, 4))
    for is_first in (True, False):
        model = head_only(seed=1)
        shards = sharded(model, "nvme", tmp_path)
        mine = grouped(model)
        model.layers[:2].requires_grad_(is_first)
        model.load_state_dict(plain.state_dict())
        mine.load_state_dict(optim.state_dict())
        model.layers[:2].requires_grad_(True)
        assert train_steps(model, mine, range(4, 7)) == losses[4:]
        assert_same_tensors(dict(model.state_dict()), weights[2])
        shards.close()


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KILLS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "while room is taken": lambda patch: patch.setattr(GradientHomes, "allocate", _die),
    "in the step that follows": lambda patch: patch.setattr(GradientHomes, "norm", _die),
}


def train_and_die(moment: str, folder: str) -> None:
    """In a process of its own: saves two steps, unfreezes, and is killed."""
    model, place = head_only(), Path(folder)
    with sharded(model, "nvme", place, durability="step") as shards:
        optim = grouped(model)
        train_steps(model, optim, range(2))
        save(shards, optim, place / "saved", "two")
        with pytest.MonkeyPatch.context() as patch:
            model.layers[:2].requires_grad_(True)
            KILLS[moment](patch)
            train_steps(model, optim, range(2, 3))


@pytest.mark.parametrize(
    "moment",
    [next(iter(KILLS)), *(pytest.param(each, marks=pytest.mark.slow) for each in list(KILLS)[1:])],
)
def test_a_kill_around_unfreezing_leaves_the_last_durable_step(moment: str, tmp_path: Path) -> None:
    losses, weights = expected()
    code = (
        f"import sys; sys.path[:0] = {sys.path}; import test_unfrozen; "
        "test_unfrozen.train_and_die(*sys.argv[1:])"
    )
    killed = fork_server.run(["-c", code, moment, str(tmp_path)], 120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    model = head_only(seed=1)
    model.layers[:2].requires_grad_(True)
    with sharded(model, "nvme", tmp_path) as shards:
        optim = grouped(model)
        load(shards, optim, tmp_path / "saved")
        assert_same_tensors(dict(model.state_dict()), weights[0])
        assert train_steps(model, optim, range(2, 7)) == losses[2:]
    for left in tmp_path.glob("tiermem-*"):  # of the killed run
        shutil.rmtree(left)


def test_groups_that_were_set_are_those_whose_states_are_opened(tmp_path: Path) -> None:
    """Lightning's callbacks set `param_groups` before a checkpoint is opened."""
    losses, weights = expected()
    saved("nvme", tmp_path)
    model = head_only(seed=1)
    with sharded(model, "nvme", tmp_path) as shards:
        optim, whole = tiermem.AdamW(model.head.parameters()), grouped(head_only())
        groups = zip(whole.param_groups, GROUPS, strict=True)
        optim.param_groups = [
            {**group, "params": list(model.get_submodule(name).parameters())}
            for group, name in groups
        ]
        load(shards, optim, tmp_path / "saved", "after")
        model.layers[:2].requires_grad_(True)
        assert train_steps(model, optim, range(4, 7)) == losses[4:]
        assert_same_tensors(dict(model.state_dict()), weights[2])
