"""Are the activations that a run without values predicts those that torch allocates?"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs.models import Tower
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tiermem import zero
from tiermem.plans.activations import PredictedActivations, activations_of


class Checkpointed(nn.Module):
    """A tower whose blocks are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(64, 256)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.tower.embed(tokens)
        for layer in self.tower.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.tower.head(x)


class Looking(nn.Module):
    """A model whose code needs a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if float(x.sum()) > 0 else x


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(batch)
    logits = output[0] if isinstance(output, tuple) else output
    return torch.as_tensor(logits).square().mean()


def allocated(model: nn.Module, batch: Any) -> int:
    """The peak of what torch's own allocator counts, beside gradients of weights."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss_of(model, batch).backward()
    moves = [
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    total = peak = 0
    for _, num_bytes in sorted(moves, key=lambda each: each[0]):
        total += num_bytes
        peak = max(peak, total)
    return peak


def check(build: Callable[[], nn.Module]) -> None:
    model = build()
    tokens = torch.randint(0, 61, (7, 33))
    before = torch.get_rng_state()
    found = activations_of(model, loss_of, tokens, torch.device("cpu"))
    assert found is not None
    assert found.kept_bytes <= found.peak_bytes
    assert found.peak_bytes == pytest.approx(allocated(model, tokens), rel=0.05)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.slow
def test_a_run_without_values_predicts_what_torch_allocates() -> None:
    # in a process of its own: torch's profiler leaves a thread
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, check=False)
    assert done.returncode == 0


def test_a_batch_of_twice_the_size_keeps_twice_the_bytes() -> None:
    def kept(size: int) -> int:
        found = activations_of(
            Tower(), loss_of, torch.zeros(size, 16, dtype=torch.long), torch.device("cpu")
        )
        assert found is not None
        return found.kept_bytes - 4  # of the loss

    assert kept(6) == 2 * kept(3)


@pytest.mark.parametrize("place", ["meta", "init"])
def test_weights_need_no_memory(place: str) -> None:
    tokens = torch.zeros(3, 16, dtype=torch.long)
    plain = activations_of(Tower(), loss_of, tokens, torch.device("cpu"))
    with torch.device("meta") if place == "meta" else zero.Init():
        model = Tower()
    found = activations_of(model, loss_of, tokens, torch.device("cpu"))
    assert isinstance(found, PredictedActivations) and found == plain


class Caching(nn.Module):
    """A model that keeps a table of the longest input, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(1))
        self.longest = 1
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(x) > self.longest:
            self.longest = len(x)
            self.register_buffer("table", torch.arange(float(len(x))))
        return self.linear(x) + self.table[: len(x), None]


def test_what_a_forward_keeps_on_its_modules_is_as_before() -> None:
    model = Caching()
    before = {**model.state_dict()}
    assert activations_of(model, loss_of, torch.ones(7, 4), torch.device("cpu")) is not None
    assert (model.longest, model.calls) == (1, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model(torch.ones(7, 4)).shape == (7, 4)


class Grouped(nn.Linear):
    """Takes a kernel that torch runs in fp32, but not without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([2], dtype=torch.int32)
        found: torch.Tensor = torch._grouped_mm(x, self.weight[None], ends)
        return found


@pytest.mark.parametrize("kind", [Looking, lambda: Grouped(4, 4)])
def test_a_model_that_needs_values_has_no_prediction(
    kind: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """Torch logs no traceback of it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    try:
        assert activations_of(kind(), loss_of, torch.ones(2, 4), torch.device("cpu")) is None
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.records
