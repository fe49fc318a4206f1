"""Do states that an accelerator steps end with the CPU kernel's bits: every optimizer, precision,
stage?

They rest on it, all of them or a part; or they rest on HOST or NVMe, and all of their tiles or a
part are sent to it.

The twin trains on the CPU with everything in memory. What is compared: losses, weights, and every
state in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from programs.models import Tower
from programs.twins import loss_of, seeded
from torch import nn

import tiermem
from accelerator import device
from accelerator.test_parity import differences
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.optim import rules
from tiermem.precision import PRESETS
from tiermem.swap.kernels.device_kernels import DeviceKernels
from tiermem.swap.kernels.torch_step import step_in_torch

Found = dict[str, Any]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adam(**fields: Any) -> Make:
    return lambda model: tiermem.AdamW(model.parameters(), lr=1e-2, **fields)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    apart = [model.embed.weight, model.head.weight]
    hidden = [p for p in model.parameters() if all(p is not other for other in apart)]
    return tiermem.Muon(
        [{"params": hidden}, {"params": apart, "use_muon": False, "eps": 1e-6}], lr=1e-2
    )


OPTIMIZERS: dict[str, Make] = {
    "AdamW": adam(),
    "AdamW amsgrad": adam(amsgrad=True),
    "Adam": lambda model: tiermem.Adam(model.parameters(), lr=1e-2, weight_decay=0.1),
    "Adagrad": lambda model: tiermem.Adagrad(
        model.parameters(), 1e-2, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "Lion": lambda model: tiermem.Lion(model.parameters(), lr=1e-3, weight_decay=0.1),
    "SGD": lambda model: tiermem.SGD(model.parameters(), lr=1e-2, weight_decay=0.1),
    "SGD momentum": lambda model: tiermem.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, dampening=0.2
    ),
    "SGD nesterov": lambda model: tiermem.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, nesterov=True
    ),
    "Muon": muon,
}
PRECISIONS = PRESETS | {
    "stochastic bf16": Precision("bf16", "bf16"),
    "fp32 gradients": Precision("split", "8bit", "fp32"),
    "nearest": Precision("split", "bf16", rounding="nearest"),
    "8-bit blocks": Precision("fp32", "8bit"),
    "fp16": Precision("fp16", "fp16"),
}
ALL_THERE = {"params": Tier.DEVICE, "optim": Tier.DEVICE}
THERE: dict[str, dict[str, Any]] = {
    "all there": ALL_THERE,
    "sent from host": {"params": Tier.HOST, "optim": Tier.HOST, "streamed_ratio": 0.5},
    "sent from nvme": {"params": Tier.NVME, "optim": Tier.NVME, "streamed_ratio": 1.0},
}
FEW = {
    ("AdamW", "tiny"),
    ("AdamW amsgrad", "8-bit blocks"),
    ("Adam", "exact"),
    ("Adagrad", "bf16"),
    ("Lion", "compact"),
}
FEW |= {
    ("SGD", "stochastic bf16"),
    ("SGD momentum", "fp16"),
    ("SGD nesterov", "fp32 gradients"),
    ("Muon", "nearest"),
}


def policy_of(precision: str, folder: Path, **fields: Any) -> OffloadPolicy:
    fields = {
        "persistence_numel": 50,
        "tile_numel": 4096,
        "num_moments": 3,
        "paths": [folder],
    } | fields
    return OffloadPolicy(precision=PRECISIONS[precision], **fields)


def build(precision: str) -> nn.Module:
    return seeded(lambda: Tower(num_blocks=2)).to(
        torch.float16 if precision == "fp16" else torch.bfloat16
    )


def take_steps(
    model: nn.Module, optim: Any, steps: range, where: str, micros: int = 2
) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        for micro in range(micros):
            losses.append(loss_of(model, 10 * step + micro, where))
            (losses[-1] / micros).backward()
        optim.step(max_norm=0.5)
        optim.zero_grad()
    return [loss.detach() for loss in losses]


def found(model: nn.Module, optim: Any, losses: list[torch.Tensor]) -> Found:
    states = {
        f"{number}.{name}": value
        for number, each in optim.state_dict()["state"].items()
        for name, value in each.items()
    }
    weights = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    return {"losses": [loss.item() for loss in losses], "weights": weights, "states": states}


def train(
    make: Make, precision: str, where: str, policy: OffloadPolicy, num_steps: int = 3
) -> Found:
    model = build(precision)
    with tiermem.shard(model, policy, device=where):
        optim = make(model)
        return found(model, optim, take_steps(model, optim, range(num_steps), where))


@functools.cache
def on_cpu(optimizer: str, precision: str, num_steps: int = 3) -> Found:
    policy = policy_of(precision, Path("."), params=Tier.HOST, optim=Tier.HOST)
    return train(OPTIMIZERS[optimizer], precision, "cpu", policy, num_steps)


# ---- every optimizer, precision and stage --------------------------------------------------------


SCHEDULES = ("late", "random:2")


def cases() -> Iterator[Any]:
    """All; but for one precision of an optimizer, and one schedule of a home there, they are
    slow."""
    every = itertools.product(enumerate(OPTIMIZERS), PRECISIONS, enumerate(THERE), SCHEDULES)
    for (i, optimizer), precision, (j, home), schedule in every:
        is_quick = (optimizer, precision) in FEW and schedule == SCHEDULES[(i + j) % 2]
        marks = [] if is_quick else [pytest.mark.slow]
        yield pytest.param(optimizer, precision, home, schedule, marks=marks)


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("optimizer", "precision", "home", "schedule"), cases())
def test_states_on_the_device_have_the_cpu_kernels_bits(
    optimizer: str, precision: str, home: str, schedule: str, sim: ModuleType, tmp_path: Path
) -> None:
    # which holds a whole matrix
    size = {"tile_numel": 16384} if optimizer == "Muon" and "sent" in home else {}
    sim.set_schedule(schedule)
    policy = policy_of(precision, tmp_path, **THERE[home], **size)
    mine = train(OPTIMIZERS[optimizer], precision, "sim", policy)
    assert differences(mine, on_cpu(optimizer, precision)) == []


@pytest.mark.parametrize(
    ("stage", "home"),
    [*((stage, Tier.DEVICE) for stage in range(4)), (3, Tier.HOST), (3, Tier.NVME)],
)
def test_every_stage_steps_on_the_device(
    stage: int, home: Tier, sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_schedule("late")
    policy = policy_of("tiny", tmp_path, stage=stage, params=home)
    assert (
        differences(train(OPTIMIZERS["AdamW"], "tiny", "sim", policy), on_cpu("AdamW", "tiny"))
        == []
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["exact", "tiny"])
def test_masters_of_init_reach_the_device(precision: str, sim: ModuleType, tmp_path: Path) -> None:
    """fp32 values that the model had before it was built in bf16: the first step on the device
    makes masters of them."""

    def run(where: str, **fields: Any) -> Found:
        policy = policy_of(precision, tmp_path, master_from="init", **fields)
        with tiermem.zero.Init(policy=policy, dtype=torch.bfloat16):
            model = seeded(lambda: Tower(num_blocks=1))
        with tiermem.shard(model, policy, device=where):
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            return found(model, optim, take_steps(model, optim, range(2), where))

    sim.set_schedule("late")
    expected = run("cpu", params=Tier.HOST, optim=Tier.HOST)
    assert differences(run("sim", **ALL_THERE), expected) == []
    nvme = {"params": Tier.NVME, "optim": Tier.NVME}
    assert differences(run("sim", **nvme, optim_ratio=0.5), expected) == []
    assert differences(run("sim", **nvme, streamed_ratio=0.5), expected) == []
    assert (
        differences(run("sim", params=Tier.HOST, optim=Tier.HOST, streamed_ratio=1.0), expected)
        == []
    )


# ---- a part of the states ------------------------------------------------------------------------

HOMES: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME},
    "gradients on nvme": {"params": Tier.HOST, "optim": Tier.NVME, "grads": Tier.NVME},
    "weights on the device": {"params": Tier.DEVICE, "optim": Tier.HOST},
    "weights on nvme": {"params": Tier.NVME, "optim": Tier.HOST, "persistence_numel": 0},
    "gradients on the device": {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.DEVICE},
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("field", ["optim_ratio", "streamed_ratio"])
@pytest.mark.parametrize(
    ("ratio", "home"),
    [
        pytest.param(
            ratio, home, marks=[] if ratio == 0.5 or home == "host" else [pytest.mark.slow]
        )
        for ratio in (0.0, 0.5, 1.0)
        for home in HOMES
    ],
)
def test_bits_are_equal_whatever_the_ratio(
    ratio: float, home: str, field: str, sim: ModuleType, tmp_path: Path
) -> None:
    for schedule in ("late", "random:1"):
        sim.set_schedule(schedule)
        policy = policy_of("compact", tmp_path, **HOMES[home], **{field: ratio})
        mine = train(OPTIMIZERS["AdamW"], "compact", "sim", policy)
        assert differences(mine, on_cpu("AdamW", "compact")) == [], schedule


@pytest.mark.parametrize("home", [Tier.HOST, Tier.NVME])
def test_the_ratio_is_the_part_of_the_states_that_rests_elsewhere(
    home: Tier, sim: ModuleType, tmp_path: Path
) -> None:
    model, policy = (
        build("exact"),
        policy_of("exact", tmp_path, params=home, optim=home, num_moments=2),
    )
    for ratio in (0.0, 0.25, 0.5, 1.0):
        with tiermem.shard(
            model, dataclasses.replace(policy, optim_ratio=ratio), device="sim"
        ) as shards:
            tiles = tiermem.AdamW(model.parameters()).tiles_of(shards).tiles
            total = sum(tile.state_bytes for tile in tiles)
            there = sum(tile.state_bytes for tile in tiles if tile.state_home is Tier.DEVICE)
            largest = max(tile.state_bytes for tile in tiles)
            assert total * (1 - ratio) - largest <= there <= total * (1 - ratio)
            assert {tile.state_home for tile in tiles if tile.state_home is not Tier.DEVICE} <= {
                home
            }
            planned = sum(
                row.num_bytes
                for row in shards.plan.rows
                if row.what in ("kept tiles", "optimizer states") and row.tier is Tier.DEVICE
            )
            assert there <= planned <= there + largest
        model = build("exact")


def test_without_an_accelerator_the_rest_is_in_memory(tmp_path: Path) -> None:
    model = build("compact")
    policy = policy_of(
        "compact", tmp_path, params=Tier.NVME, optim=Tier.NVME, optim_ratio=0.5, resident_bytes=0
    )
    with tiermem.shard(model, policy, device="cpu") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        homes = [tile.state_home for tile in optim.tiles_of(shards).tiles]
        assert {Tier.HOST, Tier.NVME} == set(homes)
        assert (
            differences(
                found(model, optim, take_steps(model, optim, range(3), "cpu")),
                on_cpu("AdamW", "compact"),
            )
            == []
        )


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["AdamW", pytest.param("Muon", marks=pytest.mark.slow)])
def test_checkpoints_open_across_device_and_nvme(
    optimizer: str, sim: ModuleType, tmp_path: Path
) -> None:
    """DEVICE, NVMe, half of each, NVMe sent to the device, the CPU's memory and DEVICE again: each
    opens what the one before has saved."""
    sim.set_schedule("late")
    make, losses, places = (
        OPTIMIZERS[optimizer],
        list[torch.Tensor](),
        list[tuple[str, dict[str, Any]]](),
    )
    nvme = {"params": Tier.NVME, "optim": Tier.NVME}
    places += [("sim", ALL_THERE), ("sim", nvme), ("sim", nvme | {"optim_ratio": 0.5})]
    places += [("sim", nvme | {"streamed_ratio": 0.5})]
    places += [("cpu", {"params": Tier.HOST, "optim": Tier.HOST}), ("sim", ALL_THERE)]
    for number, (where, fields) in enumerate(places):
        model = build("tiny") if number == 0 else seeded(lambda: Tower(num_blocks=2), 9).bfloat16()
        # which holds a whole matrix
        policy = policy_of("tiny", tmp_path, tile_numel=16384, **fields)
        with tiermem.shard(model, policy, device=where) as shards:
            optim = make(model)
            if number:
                tiermem.checkpoint.load(shards, optim, tmp_path / f"saved {number - 1}")
            losses += take_steps(model, optim, range(number, number + 1), where)
            tiermem.checkpoint.save(shards, optim, tmp_path / f"saved {number}", copy=True)
            last = found(model, optim, losses)
    assert differences(last, on_cpu(optimizer, "tiny", len(places))) == []


def test_a_checkpoint_holds_the_part_that_was_sent(
    sim: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that does not say which part it is warns of another one; the same part, and one that
    is said, does not."""
    host, told = {"params": Tier.HOST, "optim": Tier.HOST}, []
    for ratio in (0.5, None, 0.5, 0.0):
        model, policy = build("exact"), policy_of("exact", tmp_path, **host, streamed_ratio=ratio)
        with tiermem.shard(model, policy, device="sim") as shards:
            optim = tiermem.AdamW(model.parameters(), lr=1e-2)
            if told:
                tiermem.checkpoint.load(shards, optim, tmp_path / "saved")
            else:
                take_steps(model, optim, range(1), "sim")
                tiermem.checkpoint.save(shards, optim, tmp_path / "saved", copy=True)
        told.append("was trained with streamed_ratio 0.5, and this start with 0.0" in caplog.text)
        caplog.clear()
    assert told == [False, True, False, False]


# ---- failures ------------------------------------------------------------------------------------


STEPPED_THERE: dict[str, dict[str, Any]] = {
    "host, a part there": {"params": Tier.HOST, "optim": Tier.HOST, "optim_ratio": 0.1},
    "sent from host": {"params": Tier.HOST, "optim": Tier.HOST, "streamed_ratio": 0.9},
    "sent from nvme": {"params": Tier.NVME, "optim": Tier.NVME, "streamed_ratio": 0.9},
}


@pytest.mark.parametrize("home", STEPPED_THERE)
@pytest.mark.parametrize("error", [ZeroDivisionError, torch.OutOfMemoryError])
def test_a_step_that_fails_half_way_ends_its_copies(
    error: type[Exception],
    home: str,
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The model says that it is torn, and closing it unregisters no memory that the device still
    writes."""
    sim.set_schedule("late")
    model, calls = build("compact"), list[None]()

    def fail_late(*args: Any, **settings: Any) -> None:
        calls.append(None)
        if len(calls) == 12:
            raise error
        step_in_torch(*args, **settings)

    before = sim.registered()
    policy = policy_of("compact", tmp_path, persistence_numel=0, **STEPPED_THERE[home])
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0, "sim").backward()
        monkeypatch.setattr(rules, "kernels_of", lambda _: DeviceKernels(fail_late))
        with pytest.raises(error):
            optim.step()
        with pytest.raises(RuntimeError, match="a mixture of two steps"):
            shards.check_whole()
    assert sim.registered() == before


def test_a_read_that_fails_beside_tiles_that_are_sent_ends_their_copies(
    sim: ModuleType, tmp_path: Path
) -> None:
    sim.set_schedule("late")
    model, before = build("compact"), sim.registered()
    policy = policy_of(
        "compact", tmp_path, streamed_ratio=0.9, persistence_numel=0, **HOMES["nvme"]
    )
    with tiermem.shard(model, policy, device="sim") as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        take_steps(model, optim, range(1), "sim")
        loss_of(model, 1, "sim").backward()
        shards.drop_head_start()
        (file,) = tmp_path.glob("tiermem-*/segment.bin")
        os.truncate(file, 4096)
        with pytest.raises(OSError, match=re.escape(str(file))):
            optim.step()
        with pytest.raises(RuntimeError, match="a mixture of two steps"):
            shards.check_whole()
    assert sim.registered() == before


# ---- waits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "num_waits"),
    [
        ({"optim_ratio": 0.0}, 1),
        ({"optim_ratio": 0.5}, 0),
        ({"streamed_ratio": 0.5}, 1),
        ({"streamed_ratio": 1.0, "params": Tier.NVME, "optim": Tier.NVME}, 1),
        ({"streamed_ratio": 0.5, "params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.DEVICE}, 2),
    ],
)
def test_an_iteration_waits_for_the_device_at_most_so_often(
    fields: dict[str, Any], num_waits: int, sim: ModuleType, tmp_path: Path
) -> None:
    """For the norm, where sums of squares are there, and for tiles that were sent; not for every
    tile. No copy is pageable."""
    sim.set_schedule("late")
    model = build("compact")
    policy = policy_of("compact", tmp_path, **{"params": Tier.HOST, "optim": Tier.HOST} | fields)
    with tiermem.shard(model, policy, device="sim"):
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            tokens = torch.zeros(1, 4, dtype=torch.int64).pin_memory().to("sim", non_blocking=True)
            device.reset_counts()
            model(tokens).float().square().mean().backward()
            optim.step(max_norm=0.5)
            optim.zero_grad()
            if step:
                waits = device.host_waits()
                assert (waits["main"], waits["autograd"]) == (num_waits, 0)
                assert device.copies()["num_pageable"] == 0
