"""With step_in_backward gradients are used while backward runs: is everything refused that would
need them afterwards?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier


class Run(NamedTuple):
    model: nn.Module
    optim: Any


@pytest.fixture(params=["HOST", "NVMe", "resident"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """A model after one backward, before its step."""
    home = Tier.NVME if request.param == "NVMe" else Tier.HOST
    numel = 1 << 20 if request.param == "resident" else 50
    policy = OffloadPolicy(
        params=home,
        optim=home,
        paths=[tmp_path],
        persistence_numel=numel,
        step_in_backward=True,
        on_nonfinite="raise",
    )
    model = seeded(models.ShortTower)
    with tiermem.shard(model, policy):
        optim = tiermem.SGD(model.parameters(), lr=0.1)
        loss_of(model, 0).backward()
        yield Run(model, optim)


def first_grad(run: Run) -> torch.Tensor:
    found = next(run.model.parameters()).grad
    assert found is not None
    return found


NEEDING: list[Callable[[Run], object]] = [
    lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3),
    lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3, foreach=False),
    lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 1e-3),
    lambda run: nn.utils.get_total_norm(
        [p.grad for p in run.model.parameters() if p.grad is not None]
    ),
    lambda run: first_grad(run).norm(),
    lambda run: first_grad(run).mul_(0.5),
    lambda run: first_grad(run).clone(),
    lambda run: first_grad(run).tolist(),
    lambda run: first_grad(run).zero_(),
    lambda run: next(run.model.children()).zero_grad(set_to_none=False),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("need", NEEDING)
def test_what_needs_gradients_after_backward_is_refused(
    run: Run, need: Callable[[Run], object]
) -> None:
    with pytest.raises(
        RuntimeError, match="was used while backward ran, by step_in_backward: it cannot be read"
    ):
        need(run)


def test_dropping_a_part_of_the_gradients_is_refused_at_the_step(run: Run) -> None:
    next(run.model.children()).zero_grad()
    with pytest.raises(RuntimeError, match=r"by step_in_backward: it cannot be dropped"):
        run.optim.step()


def test_a_second_step_is_refused(run: Run) -> None:
    run.optim.step()
    with pytest.raises(RuntimeError, match="it cannot be stepped with again"):
        run.optim.step()


@pytest.mark.parametrize("how", [{"scale": 2.0}, {"max_norm": 1.0}], ids=str)
def test_a_step_that_scales_or_clips_is_refused(run: Run, how: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="neither scaled nor clipped"):
        run.optim.step(**how)


@pytest.mark.parametrize("sets_to_none", [True, False, None])
def test_training_goes_on_however_gradients_are_zeroed_after_a_step(
    run: Run, sets_to_none: bool | None
) -> None:
    twin = seeded(models.ShortTower)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(3):
        theirs.zero_grad()
        loss_of(twin, number).backward()
        theirs.step()
        if number:
            loss_of(run.model, number).backward()
        run.optim.step()
        if sets_to_none is not None:
            run.optim.zero_grad(set_to_none=sets_to_none)
    torch.testing.assert_close(
        dict(run.model.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-6
    )


def test_a_step_without_gradients_does_nothing_as_torchs(run: Run) -> None:
    run.optim.step()
    run.optim.zero_grad()
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.optim.step()
    assert_same_tensors(dict(run.model.state_dict()), before)


def test_a_backward_without_an_optimizer_is_refused() -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(
        model, OffloadPolicy(step_in_backward=True, persistence_numel=50, on_nonfinite="raise")
    ):
        with pytest.raises(
            RuntimeError, match="there is no optimizer yet: build it before backward"
        ):
            loss_of(model, 0).backward()
        optim = tiermem.SGD(model.parameters(), lr=0.1)
        loss_of(model, 0).backward()
        optim.step()
