"""Is the forecast true? In simulated time: iterations of random mixes of homes beside what the
forecast says of them, by the same rates.

The graph is what the library asked of the device, the CPU's steps of tiles and its additions to
gradients. Products and steps share the device's lane; a copy takes the link for its bytes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from accelerator import clock
from accelerator.clock import Rate
from accelerator.iteration import Marks
from tiermem import OffloadPolicy, Tier
from tiermem.engine.sharding import shard_for_passes
from tiermem.forecast import Rates
from tiermem.forecast.choose import forecast_shards
from tiermem.forecast.rates import Compute
from tiermem.gradients.gradient_link import GradientLink
from tiermem.precision import PRESETS

WIDTH, LAYERS, TILE_NUMEL = 256, 12, 16_384
ROWS = 251
"""Of the activations: no tile's bytes are a multiple of it."""
NUM_BEFORE, NUM_RECORDED = 2, 3
PRODUCTS_S, COPIED_S, KERNELS_S, MOVED_S = 1e9, 4e6, 20e6, 400e6
"""Operations of the device, bytes of the link each way, of the CPU's kernels and of the device's
memory, in a second: each decides in some mix."""


class Chain(nn.Module):
    """Blocks of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def mixes() -> Iterator[dict[str, Any]]:
    """Twenty mixes that differ; every second step goes on under the next forward."""
    rng = random.Random(48)
    seen: list[dict[str, Any]] = []
    while len(seen) < 20:
        fields = {
            "params": rng.choice([Tier.HOST, Tier.DEVICE]),
            "optim": rng.choice([Tier.HOST, Tier.HOST, Tier.HOST, Tier.DEVICE]),
            "grads": rng.choice([Tier.HOST, Tier.DEVICE]),
            "overlap": ("none", "forward")[len(seen) % 2],
        }
        if fields["optim"] is Tier.HOST:
            fields["optim_ratio"] = rng.choice([1.0, 0.75, 0.5, 0.25])
            fields["streamed_ratio"] = rng.choice([0.0, 0.0, 0.5, 1.0])
        if fields not in seen:
            seen.append(fields)
            yield fields


def note_additions(sim: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Adds to the recording: additions to gradients at home on the lane "cpu", and the wait for
    them before a step."""
    take, join = GradientLink._take, GradientLink.join
    adds: list[int] = []

    def taken(link: GradientLink, slot: Any, copied: Any, hosted: Any, store: Any) -> None:
        def noted(parts: Any) -> None:
            store(parts)
            num_bytes = 2 * sum(part.data.nbytes for part in parts)
            adds.append(sim.mark("add gradients", "cpu", num_bytes, blocks=True))

        take(link, slot, copied, hosted, noted)

    def joined(link: GradientLink) -> None:
        join(link)
        sim.mark("await gradients", needs=adds, blocks=True)

    patch.setattr(GradientLink, "_take", taken)
    patch.setattr(GradientLink, "join", joined)


def seconds_of(sim: ModuleType, patch: pytest.MonkeyPatch, fields: dict[str, Any]) -> list[float]:
    """Of an iteration: what is forecast, and by the clock."""
    marks = Marks(sim, patch)
    note_additions(sim, patch)
    sim.set_schedule("late")
    torch.manual_seed(0)
    model = Chain().bfloat16()
    policy = OffloadPolicy(
        precision=PRESETS["exact"], persistence_numel=0, tile_numel=TILE_NUMEL, tile_buffers=4,
        unit_buffers=3, **fields,
    )  # fmt: skip
    with shard_for_passes(model, policy, None, "sim", True) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(ROWS, WIDTH).bfloat16().to("sim")
        for number in range(NUM_BEFORE + NUM_RECORDED):
            if number == NUM_BEFORE:
                shards.check_whole()
                sim.synchronize()
                marks.starts.clear()
                sim.record(True)
            model(x).backward()
            optim.step(max_norm=1e-3)
            optim.zero_grad()
        shards.check_whole()
        sim.synchronize()
        sim.record(False)
        rates = Rates(
            1e9, 1e9, link_bytes_s=COPIED_S, kernel_bytes_s=KERNELS_S, host_memory_bytes_s=1e12,
            device_memory_bytes_s=MOVED_S, tile_s=0.0, use_s=0.0,
        )  # fmt: skip
        compute = Compute(2 * ROWS / PRODUCTS_S, 4 * ROWS / PRODUCTS_S)
        forecast = forecast_shards(shards, compute, rates)
    entries = list(sim.recording())

    def size_of(entry: Any) -> tuple[float, float]:
        # what a model does beside products is no part of the forecast
        is_small = entry["lane"] == "compute" and entry["bytes"] % ROWS == 0
        num_bytes = (
            0 if is_small or (entry["flops"] and entry["lane"] == "compute") else entry["bytes"]
        )
        return num_bytes, entry["flops"] if entry["lane"] == "compute" else 0.0

    lanes = {
        "compute": Rate(bytes_per_s=MOVED_S, flops_per_s=PRODUCTS_S),
        "to device": Rate(bytes_per_s=COPIED_S),
        "to host": Rate(bytes_per_s=COPIED_S),
        "cpu": Rate(bytes_per_s=KERNELS_S),
    }
    replay = clock.replay(entries, lanes, size_of=size_of)
    products = [n for n, entry in enumerate(entries) if entry.get("name") == "aten::mm"]
    begins = [replay.spans[n][0] for n in products[:: len(products) // NUM_RECORDED]]
    return [forecast.total_s, begins[2] - begins[1]]


MIXES = list(mixes())


@pytest.mark.parametrize(
    "fields",
    MIXES[:2],
    ids=lambda mix: " ".join(str(getattr(value, "name", value)) for value in mix.values()),
)
def test_an_iteration_takes_what_is_forecast(
    fields: dict[str, Any], sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecast, real = seconds_of(sim, monkeypatch, fields)
    assert forecast == pytest.approx(real, rel=0.1)


@pytest.mark.slow
def test_twenty_mixes_take_what_is_forecast_in_that_order(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that differ by 5 % or more are in the order of the forecast."""
    found = []
    for fields in MIXES:
        with monkeypatch.context() as patch:
            found.append(seconds_of(sim, patch, fields))
    for forecast, real in found:
        assert forecast == pytest.approx(real, rel=0.1)
    for (forecast, real), (other_forecast, other) in itertools.permutations(found, 2):
        assert other < 1.05 * real or other_forecast > forecast
