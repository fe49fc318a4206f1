"""Does the optimizer alone keep what the user writes into a weight that has a master beside it?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.precision import PRESETS

WITH_MASTER = [name for name in PRESETS if name != "bf16"]
PLACES = ["beside", "HOST", "NVMe"]
Write = Callable[[nn.Module], object]


def options(place: str, preset: str, folder: Path) -> dict[str, Any]:
    if place == "beside":
        return {"precision": preset}
    fields: dict[str, Any] = {"precision": PRESETS[preset], "tile_numel": 4096}
    if place == "NVMe":
        return {
            "policy": OffloadPolicy(optim=Tier.NVME, paths=[folder], resident_bytes=0, **fields)
        }
    return {"policy": OffloadPolicy(optim=Tier.HOST, **fields)}


def train(
    model: nn.Module, optimizer: Any, num_steps: int, after: Write = lambda model: None
) -> None:
    data = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(num_steps):
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            after(model)


def fresh() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96)).bfloat16()


def load(model: nn.Module) -> None:
    model.load_state_dict(
        {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    )


def copy(model: nn.Module) -> None:
    for param in model.parameters():
        param.copy_(torch.full_like(param, 0.5))


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = torch.full_like(param, 0.5)


def through_views(model: nn.Module) -> None:
    for param in model.parameters():
        param.detach().view(-1).fill_(0.5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("preset", WITH_MASTER)
@pytest.mark.parametrize(
    "write", [load, copy, replace, through_views], ids=lambda each: each.__name__
)
def test_a_written_weight_is_stepped_from_what_was_written(
    place: str, preset: str, write: Write, tmp_path: Path
) -> None:
    model = fresh()
    optimizer = tiermem.AdamW(
        model.parameters(), lr=1e-6, weight_decay=0.0, **options(place, preset, tmp_path)
    )
    train(model, optimizer, 2)
    with torch.no_grad():
        write(model)
    train(model, optimizer, 2)
    for param in model.parameters():
        torch.testing.assert_close(
            param.detach().float(), torch.full(param.shape, 0.5), atol=2e-3, rtol=0
        )
    optimizer.close()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("preset", WITH_MASTER)
def test_unwritten_elements_keep_their_masters_to_the_bit(
    place: str, preset: str, tmp_path: Path
) -> None:
    """Rows are zeroed after each step. Without weight decay a row's step does not depend on another
    row's weight."""

    def masters(after: Write) -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Linear(96, 96, bias=False).bfloat16()
        optimizer = tiermem.AdamW(
            model.parameters(), lr=1e-3, weight_decay=0.0, **options(place, preset, tmp_path)
        )
        train(model, optimizer, 4, after)
        found: torch.Tensor = optimizer.state_dict()["state"][0]["master"].clone()
        assert torch.equal(found.bfloat16()[8:], model.weight.detach()[8:])
        optimizer.close()
        return found

    def zero_rows(model: Any) -> None:
        model.weight[:8] = 0.0

    plain, zeroed = masters(lambda model: None), masters(zero_rows)
    assert torch.equal(zeroed[8:], plain[8:])
    assert torch.equal(zeroed[:8], torch.zeros(8, 96))
    assert (plain.bfloat16().float() != plain).any()  # masters have bits that weights lack


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("preset", WITH_MASTER)
def test_weights_clamped_at_every_step_follow_torch(
    place: str, preset: str, tmp_path: Path
) -> None:
    """Steps of 1e-5 are below the spacing of bf16 near the bound, 2.4e-4: only masters add them
    up."""
    start, grad = (
        torch.linspace(-0.06, 0.06, 96 * 96).view(96, 96).bfloat16(),
        torch.ones(96, 96, dtype=torch.bfloat16),
    )
    grad[::2] = -1.0
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizer = tiermem.AdamW([ours], lr=1e-5, weight_decay=0.0, **options(place, preset, tmp_path))
    for param, optim in (
        (ours, optimizer),
        (theirs, torch.optim.AdamW([theirs], lr=1e-5, weight_decay=0.0)),
    ):
        for _ in range(40):
            param.grad = grad.to(param.dtype)
            optim.step()
            with torch.no_grad():
                param.clamp_(-0.05, 0.05)
    master = optimizer.state_dict()["state"][0]["master"]
    optimizer.close()
    torch.testing.assert_close(master, theirs.detach(), atol=2e-4, rtol=0)
    is_inside = start.abs() < 0.049
    # of 4e-4
    torch.testing.assert_close(master[is_inside], theirs.detach()[is_inside], atol=5e-5, rtol=0)


@pytest.mark.parametrize("preset", WITH_MASTER)
def test_weights_loaded_after_the_optimizer_keep_masters_that_fit(preset: str) -> None:
    model = fresh()
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3, precision=preset)
    train(model, optimizer, 3)
    weights, states = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    other = fresh()
    again = tiermem.AdamW(other.parameters(), lr=1e-3, precision=preset)
    again.load_state_dict(states)
    other.load_state_dict(weights)
    train(model, optimizer, 2)
    train(other, again, 2)
    for mine, due in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, due)


def test_another_dtype_gets_a_master_of_its_own() -> None:
    model = fresh().float()
    optimizer = tiermem.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(5, 96)
    for dtype, has_master in (
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float16, True),
        (torch.float32, False),
    ):
        model.to(dtype)
        model(data.to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert ("master" in optimizer.state[next(model.parameters())]) == has_master
        assert all(param.isfinite().all() for param in model.parameters())


def test_another_dtype_of_resting_states_is_refused(tmp_path: Path) -> None:
    model = fresh()
    optimizer = tiermem.AdamW(model.parameters(), **options("HOST", "exact", tmp_path))
    train(model, optimizer, 1)
    model.half()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(
        ValueError, match=r"is torch.float16 of shape .*its states are of torch.bfloat16"
    ):
        optimizer.step()
    optimizer.close()
