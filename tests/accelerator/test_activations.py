"""Do inputs of checkpointed blocks leave the device, and come back in time? (Their bits:
test_parity.py.)"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import batch, seeded
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.forecast import Rates, forecast_shards
from tiermem.forecast.rates import Compute

INPUT_BYTES = 40 * 50 * 31 * 4  # samples x tokens x width x fp32
CHUNK = 1 << 20


def train(
    folder: Path, num_blocks: int = 4, num_steps: int = 3, reentrant: bool = False, **fields: Any
) -> Any:
    """Trains a tower; yields the shards after each step."""
    policy = OffloadPolicy(
        **{
            "params": Tier.HOST,
            "optim": Tier.HOST,
            "paths": [folder],
            "persistence_numel": 0,
            "unit_buffers": 2,
        }
        | fields
    )
    model = seeded(lambda: models.ShortTower(checkpoint=reentrant, num_blocks=num_blocks))
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(num_steps):
            tokens, targets = (
                each.pin_memory().to("sim", non_blocking=True) for each in batch(step, 40, 50)
            )
            logits = model(tokens)
            yield "forward", shards
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            del logits
            loss.backward()
            yield "backward", shards
            optim.step()
            optim.zero_grad()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["at_once", "late"])
@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=[pytest.mark.slow])])
def test_the_peak_of_the_device_is_flat_in_depth(
    reentrant: bool, home: Tier, schedule: str, sim: ModuleType, tmp_path: Path
) -> None:
    """Between forward and backward the device has one input beside what a model of two blocks has;
    at the peak, too."""
    peaks: dict[tuple[Tier | None, int], tuple[int, int]] = {}
    sim.set_schedule(schedule)
    for activations, num_blocks in [(None, 3), (None, 7), (home, 3), (home, 7)]:
        gc.collect()  # what the model before has left
        sim.synchronize()
        sim.reset_peak_memory_stats("sim")
        before, between = sim.memory_allocated("sim"), 0
        for phase, _ in train(tmp_path, num_blocks, 2, reentrant, activations=activations):
            if phase == "forward":
                between = sim.memory_allocated("sim")
        peaks[activations, num_blocks] = sim.max_memory_allocated("sim") - before, between - before
    grows = [peaks[None, 7][i] - peaks[None, 3][i] for i in (0, 1)]
    assert grows[1] >= 4 * INPUT_BYTES  # without a home every block adds one
    for i in (0, 1):
        assert peaks[home, 7][i] - peaks[home, 3][i] <= 0.1 * INPUT_BYTES, peaks
        assert peaks[home, 3][i] <= peaks[None, 3][i], peaks


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_every_input_crosses_the_link_once_each_way_and_none_waits(
    home: Tier, sim: ModuleType, tmp_path: Path
) -> None:
    """And the forecast counts the bytes of every edge."""
    sim.set_schedule("late")
    edges = {"to_host_bytes": "DEVICE -> HOST", "to_device_bytes": "HOST -> DEVICE"}
    edges |= {"nvme_written_bytes": "HOST -> NVME", "nvme_read_bytes": "NVME -> HOST"}
    moved, foretold = [], []
    for activations in (None, home):
        before, counts = dict.fromkeys(edges, 0), dict[str, dict[str, int]]()
        for phase, shards in train(tmp_path, activations=activations):
            waits = sim.host_waits()
            shards.store.flush()
            copies, stats = sim.copies(), shards.store.stats()
            sim.reset_counts()
            assert copies["num_pageable"] == 0 or phase == "forward"  # nothing is pageable
            # the step waits before it
            assert (waits["main"], waits["autograd"]) == (0, 0) or phase == "forward", waits
            now = copies | {name: getattr(stats, name) for name in edges if name.startswith("nvme")}
            counts[phase] = {
                name: now[name] - before[name] * name.startswith("nvme") for name in edges
            }
            before = now
            forecast = forecast_shards(
                shards, Compute(1e-9, 2e-9), Rates(1e9, 1e9), input_bytes=INPUT_BYTES
            )
        moved.append({name: counts["forward"][name] + counts["backward"][name] for name in edges})
        foretold.append({name: forecast.edge_bytes(edge) for name, edge in edges.items()})
    more, expected = (
        {name: after[name] - first[name] for name in edges} for first, after in (moved, foretold)
    )
    on_disk = home is Tier.NVME
    assert expected == {
        "to_host_bytes": 4 * INPUT_BYTES,
        "to_device_bytes": 3 * INPUT_BYTES,  # the last block's input is still there
        "nvme_written_bytes": on_disk * 4 * INPUT_BYTES,
        "nvme_read_bytes": on_disk * 3 * INPUT_BYTES,
    }
    whole = -(-INPUT_BYTES // 4096) * 4096 / INPUT_BYTES  # the disk moves whole pages
    assert more == {
        name: round(size * (whole if name.startswith("nvme") else 1))
        for name, size in expected.items()
    }


def test_a_room_that_is_too_small_keeps_inputs_on_the_device(
    sim: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tiermem"):
        for _, shards in train(
            tmp_path, num_steps=1, activations=Tier.HOST, activation_bytes=2 * CHUNK
        ):
            [row] = [row for row in shards.plan.rows if row.what == "activations"]
            assert (row.tier, row.num_bytes) == (Tier.HOST, 2 * CHUNK)
    assert caplog.text.count("stays on sim:0, and so do others") == 1
    assert "Raise activation_bytes" in caplog.text


def test_a_budget_leaves_its_rest_to_activations(sim: ModuleType, tmp_path: Path) -> None:
    for _, shards in train(tmp_path, num_steps=1, activations=Tier.HOST, host_bytes=64 << 20):
        plan = shards.plan
        assert 40 * CHUNK < plan.activation_bytes <= (64 << 20) - CHUNK
        assert plan.host_bytes <= 64 << 20


def test_a_tensor_that_several_blocks_share_stays(sim: ModuleType, tmp_path: Path) -> None:
    """Masks: one tensor whatever the depth."""

    class Masked(models.ShortTower):
        def through(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            mask = self.mask if layer is not self.layers[0] else self.new_mask(x)
            return models.recompute(
                lambda y, m: models.logits_of(layer(y)) * m, x, mask, use_reentrant=False
            )

        def new_mask(self, x: torch.Tensor) -> torch.Tensor:
            self.mask = torch.ones_like(x).detach()
            return self.mask

    model = seeded(lambda: Masked(checkpoint=False, num_blocks=4))
    policy = OffloadPolicy(params=Tier.DEVICE, optim=Tier.HOST, activations=Tier.HOST)
    with tiermem.shard(model, policy, device="sim"):
        tokens = batch(0, 40, 50)[0].to("sim")
        for _ in range(2):
            sim.reset_counts()
            model(tokens).sum().backward()
            sim.synchronize()
        assert sim.copies()["to_device_bytes"] <= 3 * INPUT_BYTES


def test_cpu_checkpointing_sends_inputs_of_checkpointed_blocks_to_host(sim: ModuleType) -> None:
    """From a config as DeepSpeed's users have it; partition_activations is accepted, and
    computed."""
    moved = []
    for section in ({}, {"cpu_checkpointing": True, "partition_activations": True}):
        config = {
            "train_micro_batch_size_per_gpu": 40,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
            },
            "activation_checkpointing": section,
        }
        model = seeded(lambda: models.ShortTower(checkpoint=False, num_blocks=4))
        engine, *_ = tiermem.initialize(model=model, config=config)
        with engine.shards:
            tokens, targets = (each.to(engine.device) for each in batch(0, 40, 50))
            logits = engine(tokens)
            sim.reset_counts()
            engine.backward(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
            moved.append(sim.copies()["to_device_bytes"])
            engine.step()
            engine.close()
    assert moved[1] - moved[0] == 3 * INPUT_BYTES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loss_in_chunks_takes_the_gradient_of_its_weight_once(
    dtype: torch.dtype, sim: ModuleType
) -> None:
    hidden, weight = (
        torch.randn(n, 96, generator=torch.Generator().manual_seed(n)).to(dtype)
        for n in (300, 5000)
    )
    targets = torch.arange(300) * 7
    leaves = [each.to("sim").requires_grad_() for each in (hidden, weight)]
    sim.synchronize()
    before = sim.memory_allocated("sim")
    sim.reset_peak_memory_stats("sim")
    tiermem.chunked_cross_entropy(*leaves, targets.to("sim"), chunk_tokens=7).backward()
    chunk_bytes = 7 * 5000 * (2 * dtype.itemsize + 12)
    most = before + weight.nbytes + 2 * hidden.nbytes + chunk_bytes + (64 << 10)
    assert (
        before + weight.nbytes < sim.max_memory_allocated("sim") < most < before + 2 * weight.nbytes
    )
    on_cpu = [each.clone().requires_grad_() for each in (hidden, weight)]
    tiermem.chunked_cross_entropy(*on_cpu, targets, chunk_tokens=7).backward()
    for here, there in zip(on_cpu, leaves, strict=True):
        assert (
            here.grad is not None
            and there.grad is not None
            and torch.equal(here.grad, there.grad.cpu())
        )
