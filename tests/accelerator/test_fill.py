"""Do units stay on an accelerator as far as the measured memory of steps leaves room, and no
further?"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from programs.models import Tower
from programs.twins import seeded
from torch import nn

import tiermem
from tiermem.run.fill import Fill, Inputs
from tiermem.weights.unit_state import LiveUnit

MIB = 1 << 20
HOST = tiermem.Tier.HOST


class Seen(NamedTuple):
    """What each step did."""

    losses: list[list[float]]
    fetched: list[int]
    """Units; those of the next step among them, as far as they come ahead of it."""
    peak_bytes: list[int]
    """So far."""
    num_units: int


def loss_of(model: nn.Module, num_tokens: int) -> torch.Tensor:
    tokens = torch.arange(num_tokens, device="sim")[None] % 7
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def trained(
    fills: bool, steps: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> Seen:
    """Trains a tower whose weights and states rest on HOST. steps: the tokens of each micro-batch
    of a step."""
    fetched: list[LiveUnit] = []
    copy = LiveUnit.copy
    monkeypatch.setattr(LiveUnit, "copy", lambda live: fetched.append(live) or copy(live))
    model = seeded(lambda: Tower(256, 1024, 6, checkpoint=None))
    given = {"params": HOST, "optim": HOST, "persistence_numel": 0, "unit_buffers": 2, **fields}
    policy = tiermem.OffloadPolicy(fills_device=fills, **given)
    losses, counts, peaks = [], [], []
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for sizes in steps:
            fetched.clear()
            losses.append([])
            for size in sizes:
                loss = loss_of(model, size)
                loss.backward()
                losses[-1].append(float(loss.detach()))
            optim.step()
            optim.zero_grad()
            counts.append(len(fetched))
            peaks.append(torch.accelerator.max_memory_allocated())
        num_units = sum(live.unit.takes_buffer for live in shards.units)
    monkeypatch.undo()
    del model, optim, shards
    gc.collect()  # the next training measures what is left
    torch.accelerator.reset_peak_memory_stats()
    return Seen(losses, counts, peaks, num_units)


def test_units_are_fetched_once_a_step_where_memory_has_room(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [(8, 8, 8)] * 6
    plain = trained(False, steps, monkeypatch)
    filled = trained(True, steps, monkeypatch)
    assert filled.losses == plain.losses
    assert filled.fetched[0] > 3 * plain.num_units  # the plan's buffers
    assert 4 * filled.num_units <= sum(filled.fetched[1:]) <= 6 * filled.num_units
    assert sum(plain.fetched[1:]) > 5 * 4 * plain.num_units


def test_memory_has_a_margin_and_what_fits_stays(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [(64, 64)] * 6
    plain = trained(False, steps, monkeypatch)
    unit_bytes = 4 * 2 * 256 * 1024
    capacity = int((plain.peak_bytes[-1] + 3.5 * unit_bytes) / 0.92)
    sim.set_capacity(capacity)
    filled = trained(True, steps, monkeypatch)
    assert filled.losses == plain.losses
    assert 6 * filled.num_units < sum(filled.fetched[1:]) < sum(plain.fetched[1:])
    assert plain.peak_bytes[-1] + 2 * unit_bytes < filled.peak_bytes[-1] < 0.93 * capacity


@pytest.mark.slow
def test_a_larger_input_begins_with_the_plans_buffers(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [*[(8, 8)] * 5, (2048,), (2048,), (8,), (2048,)]
    plain = trained(False, steps, monkeypatch)
    sim.set_capacity(int(plain.peak_bytes[-1] / 0.9))
    filled = trained(True, steps, monkeypatch)
    assert filled.losses == plain.losses
    assert sum(filled.fetched[1:5]) <= 5 * filled.num_units
    assert sum(filled.fetched[6:]) > 4 * filled.num_units  # all beside this input is too much
    assert filled.peak_bytes[-1] < plain.peak_bytes[-1] / 0.9


@pytest.mark.slow
def test_a_step_whose_inputs_are_not_seen_has_the_plans_buffers(sim: ModuleType) -> None:
    model = seeded(lambda: Tower(256, 1024, 6, checkpoint=None))
    policy = tiermem.OffloadPolicy(params=HOST, optim=HOST, unit_buffers=2, fills_device=True)
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        fill = shards.find_attached(Fill)
        assert fill is not None
        num = []
        for is_whole in (True, False):
            tokens = torch.zeros(1, 8, dtype=torch.long, device="sim")
            hidden = model(tokens) if is_whole else next(model.children())(tokens)
            hidden.float().square().mean().backward()
            optim.step()
            num.append(fill.num)
        assert num[0] > num[1] == 2


def test_an_input_with_gradients_is_compared_with_such_inputs() -> None:
    """Also one without tensors, after which every other one is larger."""
    growths: list[float] = []
    model = nn.Identity()
    inputs = Inputs(model, growths.append)
    for has_grad, size in ((True, 0), (True, 4), (True, 0), (False, 12), (True, 8), (False, 10)):
        with torch.set_grad_enabled(has_grad):
            model(torch.zeros(size) if size else "no tensor")
    assert growths == [math.inf, 3, 2]
    assert inputs.take() == (4, 0)


def test_auto_fills_where_it_knows_no_batch(sim: ModuleType) -> None:
    sim.set_capacity(12 * MIB)
    model = seeded(lambda: Tower(256, 1024, 6, checkpoint=None))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    known = tiermem.choose_policy(
        model, loss_of=lambda each, size: loss_of(each, 8), batch=tokens, device="sim"
    )
    assert not known.fills_device
    assert not tiermem.choose_policy(
        model, tiermem.OffloadPolicy(device_bytes=8 * MIB), device="sim"
    ).fills_device
    with tiermem.shard(model, device="sim") as shards:
        assert shards.policy.fills_device
