"""Does what the user does to `optimizer.state` count, wherever the states rest? Resets of RL and
ReLoRA do it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier, checkpoint
from tiermem.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

PLACES = ["beside", "HOST alone", "NVMe alone", "HOST", "NVMe", "NVMe, under backward"]
Change = Callable[[Any], object]


class Run(NamedTuple):
    model: nn.Module
    optim: Any
    shards: Any  # None: its parameters are ordinary


@pytest.fixture(params=PLACES)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """make(dtype, precision): a model whose states rest at the place of the test, and its
    optimizer."""
    made: list[Run] = []

    def run(dtype: torch.dtype = torch.float32, precision: Precision | None = None) -> Run:
        place, precision = request.param, precision or Precision()
        model = seeded(models.ShortTower).to(dtype)
        shards, how = None, dict[str, Any](precision=precision)
        tier = Tier.NVME if place.startswith("NVMe") else Tier.HOST
        fields: dict[str, Any] = {"precision": precision, "paths": [tmp_path], "tile_numel": 4096}
        if place.endswith("alone"):
            how = {"policy": OffloadPolicy(optim=tier, **fields)}
        elif place != "beside":
            overlap = "backward" if place.endswith("backward") else "none"
            policy = OffloadPolicy(
                params=tier, optim=tier, persistence_numel=50, overlap=overlap, **fields
            )
            shards, how = tiermem.shard(model, policy), {}
        made.append(Run(model, tiermem.AdamW(model.parameters(), lr=1e-2, **how), shards))
        return made[-1]

    yield run
    while made:
        _, optim, shards = made.pop()
        optim.close()
        if shards is not None:
            shards.close()


def clear(optim: Any) -> None:
    optim.state.clear()


def replace(optim: Any) -> None:
    optim.state = collections.defaultdict(dict)


def empty_entries(optim: Any) -> None:
    for group in optim.param_groups:
        for param in group["params"]:
            optim.state[param] = {}


def delete_entries(optim: Any) -> None:
    for param in list(optim.state):
        del optim.state[param]


def zero(optim: Any) -> None:
    for entry in optim.state.values():
        entry["exp_avg"].zero_()
        entry["exp_avg_sq"].mul_(0.0)
        entry["step"].zero_()


def assign_zeros(optim: Any) -> None:
    for param, entry in optim.state.items():
        entry["exp_avg"], entry["exp_avg_sq"] = torch.zeros(param.shape), torch.zeros(param.shape)
        entry["step"] = torch.tensor(0.0)


def prune(optim: Any) -> None:
    """ReLoRA's pruning by magnitude, with half of the first moment."""
    for entry in optim.state.values():
        moment = entry["exp_avg"]
        moment.mul_(moment.abs() > moment.abs().median())


def halve(optim: Any) -> None:
    for entry in optim.state.values():
        entry["exp_avg"] = entry["exp_avg"] * 0.5


def set_steps(optim: Any) -> None:
    for entry in optim.state.values():
        entry["step"].fill_(7)


CHANGES = [
    clear,
    replace,
    empty_entries,
    delete_entries,
    zero,
    assign_zeros,
    prune,
    halve,
    set_steps,
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_change_of_the_state_counts_as_torchs(make: Callable[..., Run], change: Change) -> None:
    run, twin = make(), seeded(models.ShortTower)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for optim, model in ((run.optim, run.model), (theirs, twin)):
        train_steps(model, optim, range(5))
        change(optim)
    for number in range(5, 9):
        assert train_steps(run.model, run.optim, [number]) == pytest.approx(
            train_steps(twin, theirs, [number]), rel=2e-4
        )
    for param, other in zip(run.model.parameters(), twin.parameters(), strict=True):
        assert set(run.optim.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        assert int(run.optim.state[param]["step"]) == int(theirs.state[other]["step"])
        torch.testing.assert_close(
            run.optim.state[param]["exp_avg"].clone(),
            theirs.state[other]["exp_avg"],
            atol=1e-4,
            rtol=1e-2,
        )


@pytest.mark.sampled(16)
@pytest.mark.parametrize("change", [clear, zero], ids=lambda each: each.__name__)
def test_a_change_between_backward_and_step_counts(
    make: Callable[..., Run], change: Change
) -> None:
    run, twin = make(), seeded(models.ShortTower)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for optim, model in ((run.optim, run.model), (theirs, twin)):
        train_steps(model, optim, range(6))
        optim.zero_grad()
        loss_of(model, 6).backward()
        change(optim)
        optim.step()
    assert loss_of(run.model, 7).item() == pytest.approx(loss_of(twin, 7).item(), rel=1e-4)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("preset", ["exact", "compact", "tiny"])
def test_masters_outlive_a_cleared_state_to_the_bit(make: Callable[..., Run], preset: str) -> None:
    run = make(torch.bfloat16, Precision.preset(preset))
    train_steps(run.model, run.optim, range(3))

    def masters() -> dict[str, torch.Tensor]:
        if run.shards is None:
            states = run.optim.state_dict()["state"]
            return {str(number): entry["master"].clone() for number, entry in states.items()}
        return {
            name: safe_get_full_fp32_param(param).clone()
            for name, param in run.model.named_parameters()
        }

    before = masters()
    run.optim.load_state_dict(run.optim.state_dict())
    run.optim.state.clear()
    for group in run.optim.param_groups:
        group["lr"] = 0.0
    train_steps(run.model, run.optim, [3])
    assert_same_tensors(masters(), before)
    assert any((value.bfloat16().float() != value).any() for value in before.values())


def test_a_saved_run_knows_what_was_cleared(make: Callable[..., Run]) -> None:
    run = make()
    train_steps(run.model, run.optim, range(3))
    run.optim.state.clear()
    assert run.optim.state_dict()["state"] == {}
    train_steps(run.model, run.optim, [3])
    assert all(int(entry["step"]) == 1 for entry in run.optim.state_dict()["state"].values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preset", ["exact", "tiny"])
def test_a_checkpoint_after_a_reset_opens_without_the_old_moments(
    preset: str, tmp_path: Path
) -> None:
    losses = []
    for opens in (False, True):
        model = seeded(models.ShortTower).bfloat16()
        folder = tmp_path / str(opens)
        folder.mkdir()
        policy = OffloadPolicy(
            params=Tier.NVME,
            optim=Tier.NVME,
            paths=[folder],
            persistence_numel=50,
            precision=Precision.preset(preset),
        )
        with tiermem.shard(model, policy) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            if opens:
                checkpoint.load(shards, optim, tmp_path / "out")
            else:
                train_steps(model, optim, range(3))
                optim.state.clear()
                checkpoint.save(shards, optim, tmp_path / "out", "a")
            losses.append(train_steps(model, optim, range(3, 6)))
    assert losses[0] == losses[1]


def test_a_state_cleared_right_after_a_checkpoint_was_opened_is_cleared(tmp_path: Path) -> None:
    model, policy = seeded(models.ShortTower), OffloadPolicy(persistence_numel=50)
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(3))
        checkpoint.save(shards, optim, tmp_path / "out", "a")
    model = seeded(models.ShortTower)
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        checkpoint.load(shards, optim, tmp_path / "out")
        assert {int(entry["step"]) for entry in optim.state.values()} == {3}
        optim.state.clear()
        train_steps(model, optim, [3])
        assert {int(entry["step"]) for entry in optim.state.values()} == {1}


def test_a_state_written_right_before_a_checkpoint_is_opened_is_replaced(tmp_path: Path) -> None:
    losses = []
    for change in (None, assign_zeros):
        model = seeded(models.ShortTower)
        with tiermem.shard(model, OffloadPolicy(persistence_numel=50)) as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            train_steps(model, optim, range(3))
            checkpoint.save(shards, optim, tmp_path / str(change), "a", copy=True)
            if change is not None:
                change(optim)
            checkpoint.load(shards, optim, tmp_path / str(change))
            losses.append(train_steps(model, optim, [3, 4]))
    assert losses[0] == losses[1]


def test_a_getter_sees_what_was_cleared() -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model, OffloadPolicy(persistence_numel=50)):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        train_steps(model, optim, range(2))
        for param in model.parameters():
            assert torch.equal(
                optim.state[param]["exp_avg"].clone(),
                safe_get_full_optimizer_state(param, "exp_avg"),
            )
        optim.state.clear()
        assert not any(
            safe_get_full_optimizer_state(param, "exp_avg").any() for param in model.parameters()
        )


def test_a_state_of_another_shape_is_refused(make: Callable[..., Run]) -> None:
    run = make()
    train_steps(run.model, run.optim, range(1))
    run.optim.state[next(run.model.parameters())]["exp_avg"] = torch.zeros(3)
    loss_of(run.model, 1).backward()
    with pytest.raises((ValueError, RuntimeError), match=r"shape|elements|numel"):
        run.optim.step()
