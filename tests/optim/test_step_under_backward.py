"""A step under backward: does it count when all is as assumed, is it dropped when not, and does
nobody see it before?"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mounts import mount
from programs.homes import overlapped
from programs.models import Tower
from programs.twins import assert_same_tensors, loss_of, seeded, train_engine
from test_overlap import states_of
from torch import nn

import tiermem
import tiermem.checkpoint
from tiermem import OffloadPolicy, Tier
from tiermem.optim.tentative import History
from tiermem.plans import budget
from tiermem.ranks.topology import Topology
from tiermem.state_access import (
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from tiermem.swap.base.errors import CorruptionError
from tiermem.swap.disk import files
from tiermem.swap.store.store import TensorStore
from tiermem.weights.step_run import overlap_of

__all__ = ["mount"]
NUM_STEPS = 6


class Run:
    """A model that is trained, and a log of what became of the steps under backward.

    frozen: modules that are frozen when it is sharded; "" is the model.
    """

    def __init__(
        self, folder: Path, overlap: str, monkeypatch: pytest.MonkeyPatch, **fields: Any
    ) -> None:
        self.model = seeded(Tower).to(fields.pop("dtype", torch.bfloat16))
        for name in fields.pop("frozen", ()):
            self.model.get_submodule(name).requires_grad_(False)
        self.shards = tiermem.shard(self.model, overlapped(folder, overlap, **fields))
        self.optim = tiermem.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []
        self.log: list[str] = []
        for verb in ("attempt", "commit"):
            self._note(monkeypatch, verb)

    def _note(self, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
        do = getattr(self.shards.program, verb)

        def noted(*args: Any) -> Any:
            self.log += [verb] if self.log[-1:] != [verb] else []
            return do(*args)

        monkeypatch.setattr(self.shards.program, verb, noted)

    def micro(self, number: int, scale: float = 1.0) -> None:
        loss = loss_of(self.model, number)
        (loss * scale).backward()
        self.losses.append(loss.item())

    def step(self, **how: Any) -> None:
        self.optim.step(**how)
        self.optim.zero_grad()

    def end(self) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        found = self.losses, dict(self.model.state_dict()), states_of(self.shards, self.optim)
        self.shards.close()
        return found


Train = Callable[[Run], None]


def both(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> tuple[list[str], int, dict[str, list[int]]]:
    """Trains with and without; compares all bits.

    Returns what became of the steps, how many were redone, and the bytes of tiles read and of all
    writes.
    """
    ended, num_bytes = [], dict[str, list[int]]()
    for overlap in ("none", "backward"):
        run = Run(folder, overlap, monkeypatch, **fields)
        train(run)
        run.shards.check_whole()
        run.shards.drop_head_start()
        stats, events = run.shards.store.stats(), run.shards.store.recorder.events
        num_read = sum(
            event.num_bytes
            for event in events
            if event.lane == "read" and event.name.startswith("tile")
        )
        num_bytes[overlap] = [num_read, stats.nvme_written_bytes - run.shards.program.dropped_bytes]
        num_bytes["dropped"] = [run.shards.program.dropped_bytes]
        assert stats.host_peak_bytes <= run.shards.plan.host_bytes
        assert stats.nvme_bytes <= run.shards.plan.disk_bytes
        log, num_redone = run.log, run.shards.steps.num_redone
        ended.append(run.end())
    (losses, weights, states), (mine, my_weights, my_states) = ended
    assert mine == losses
    assert_same_tensors(my_weights, weights)
    assert_same_tensors(my_states, states)
    return log, num_redone, num_bytes


def plainly(run: Run) -> None:
    for number in range(NUM_STEPS):
        run.micro(number)
        run.step()


HOMES: dict[str, dict[str, Any]] = {
    "exact": {},
    "fp32": {"dtype": torch.float32},
    "compact": {"precision": tiermem.Precision.preset("compact")},
    "gradients on nvme": {"grads": Tier.NVME},
    "gradients on nvme, buffers that are used again at once": {
        "grads": Tier.NVME,
        "tile_buffers": 2,
        "tile_numel": 640,
    },
    "weights in memory": {"params": Tier.HOST},
    "fp32 weights in memory": {"params": Tier.HOST, "dtype": torch.float32},
    "weights and a part of the states in memory": {"params": Tier.HOST, "resident_bytes": 99_000},
    "compact, weights in memory, half of them on nvme": {
        "params": Tier.NVME,
        "host_param_numel": 12_000,
        "precision": tiermem.Precision.preset("compact"),
    },
    "a part in memory": {"resident_bytes": 99_000},
    "each step durable": {"durability": "step"},
    "no durability": {"durability": "none"},
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("home", HOMES)
def test_a_step_counts_when_all_is_as_assumed(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third step on: the first makes states, the second finds what was assumed."""
    log, num_redone, num_bytes = both(plainly, tmp_path, monkeypatch, **HOMES[home])
    assert log == ["attempt", "commit"] * (NUM_STEPS - 2)
    assert num_redone == num_bytes["dropped"][0] == 0
    (read, written), (read_by_none, written_by_none) = num_bytes["backward"], num_bytes["none"]
    assert written == written_by_none
    # memory still has gradients
    assert read < read_by_none if "grads" in HOMES[home] else read == read_by_none


def test_micro_batches_are_stepped_with_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(5):
            for micro in range(3):
                run.micro(3 * number + micro)
                is_last = run.shards.policy.overlap == "backward" and number > 1 and micro == 2
                assert bool(run.shards.program.attempted) == is_last
            run.step()

    log, num_redone, num_bytes = both(train, tmp_path, monkeypatch)
    assert (log, num_redone) == (["attempt", "commit"] * 3, 0)
    assert num_bytes["backward"] == num_bytes["none"]


def test_a_run_that_always_clips_attempts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(NUM_STEPS):
            run.micro(number)
            run.step(max_norm=1e-3)

    log, num_redone, num_bytes = both(train, tmp_path, monkeypatch)
    assert (log, num_redone) == ([], 0)
    assert num_bytes["backward"] == num_bytes["none"]


def test_a_run_that_sometimes_clips_redoes_these_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(18):
            run.micro(number)
            run.step(max_norm=1e-3 if number in (3, 7, 14) else 1e9)

    log, num_redone, num_bytes = both(train, tmp_path, monkeypatch)
    assert num_redone == 3
    assert num_bytes["backward"][1] == num_bytes["none"][1] and num_bytes["dropped"][0] > 0
    # of steps 2, 6, 10 to 13, 17: one that holds is waited for, after a failure two
    assert log.count("commit") == 7


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", [Tier.NVME, Tier.HOST])
def test_a_parameter_without_a_gradient_keeps_its_values(
    params: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the second copy of its unit, which becomes the unit, and is written again two steps
    later."""

    def train(run: Run) -> None:
        param = list(run.model.parameters())[7]
        for number in range(9):
            param.requires_grad_(number not in (4, 5, 6))
            run.micro(number)
            run.step()

    log, num_redone, _ = both(train, tmp_path, monkeypatch, params=params)
    assert (log, num_redone) == (["attempt", "commit"] * 7, 0)


def clip(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)


def edit(run: Run) -> None:
    param = next(run.model.parameters())
    safe_set_full_grad(param, torch.full(param.shape, 1e-3))


def clamp(run: Run) -> None:
    for param in run.model.parameters():
        assert param.grad is not None
        param.grad.clamp_(-1e-4, 1e-4)


def zero_one(run: Run) -> None:
    param = list(run.model.parameters())[5]
    assert param.grad is not None
    param.grad.zero_()


def drop_one(run: Run) -> None:
    list(run.model.parameters())[5].grad = None


def replace_one(run: Run) -> None:
    param = list(run.model.parameters())[5]
    param.grad = torch.full(param.shape, 1e-3, dtype=param.dtype)


def more(run: Run) -> None:
    run.micro(99)


def rate(run: Run) -> None:
    run.optim.set_lr(1e-3)


def decay(run: Run) -> None:
    run.optim.param_groups[0]["weight_decay"] = 0.3


def write_master(run: Run) -> None:
    param = list(run.model.parameters())[5]
    safe_set_full_fp32_param(param, torch.full(param.shape, 1e-2))


def load(run: Run) -> None:
    run.model.load_state_dict(seeded(Tower, seed=5).bfloat16().state_dict())


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    "change",
    [clip, edit, clamp, zero_one, drop_one, replace_one, more, rate, decay, write_master, load],
    ids=lambda each: each.__name__,
)
def test_a_fact_that_is_not_as_assumed_drops_the_step(
    change: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(5):
            run.micro(number)
            if number == 4:
                change(run)
            run.step()

    log, num_redone, _ = both(train, tmp_path, monkeypatch)
    assert log == ["attempt", "commit", "attempt", "commit", "attempt"]
    assert num_redone == (change not in (write_master, load, more))  # these drop it before the step


def look(run: Run) -> None:
    """Every look at what rests finds the step before."""
    run.losses.append(float(loss_of(run.model, 50).detach()))
    param = list(run.model.parameters())[7]
    state = safe_get_full_optimizer_state(param, "exp_avg")
    assert state is not None
    run.losses += [float(state.sum()), float(run.shards.weight(param).sum())]
    run.losses += [float(value.float().sum()) for value in run.model.state_dict().values()]


@pytest.mark.slow
def test_looks_before_the_step_see_nothing_of_it_and_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(NUM_STEPS):
            run.micro(number)
            if number:
                look(run)
            run.step()
            look(run)

    log, num_redone, _ = both(train, tmp_path, monkeypatch)
    assert (log, num_redone) == (["attempt", "commit"] * (NUM_STEPS - 2), 0)


def test_a_save_before_the_step_holds_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        saved = tmp_path / f"saved {run.shards.policy.overlap}"
        for number in range(5):
            run.micro(number)
            if number == 4:
                tiermem.checkpoint.save(run.shards, run.optim, saved)
                tiermem.checkpoint.wait(run.shards)
            run.step()
        tiermem.checkpoint.load(run.shards, run.optim, saved)
        run.micro(7)
        run.step()

    (tmp_path / "disk").mkdir()
    log, _, _ = both(train, tmp_path / "disk", monkeypatch)
    assert log[:6] == ["attempt", "commit"] * 3


def test_steps_that_are_skipped_or_forgotten_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(NUM_STEPS):
            run.micro(number, scale=float("nan") if number == 3 else 1.0)
            if number == 4:
                run.optim.zero_grad()  # the step is forgotten
                continue
            run.step()
            assert run.optim.was_skipped == (number == 3)

    both(train, tmp_path, monkeypatch)


def test_a_step_without_a_backward_counts_nothing_of_a_step_that_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(NUM_STEPS):
            run.micro(number, scale=float("nan") if number == 3 else 1.0)
            run.step()
            if number == 3:
                run.step()

    log, num_redone, num_bytes = both(train, tmp_path, monkeypatch)
    assert (log, num_redone) == (["attempt", "commit", "attempt"], 0)
    assert num_bytes["dropped"][0] > 0


def test_a_loss_scale_is_assumed_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(run: Run) -> None:
        for number in range(NUM_STEPS):
            scale = 128.0 if number < 4 else 64.0
            run.micro(number, scale)
            run.step(scale=scale)

    log, num_redone, _ = both(train, tmp_path, monkeypatch)
    assert (log, num_redone) == (["attempt", "commit"] * 2 + ["attempt"], 1)


def test_a_backward_that_fails_drops_what_it_has_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        def fail(*_: Any) -> None:
            raise InterruptedError

        for number in range(NUM_STEPS):
            if number == 3:
                handle = run.model.embed.weight.register_hook(fail)  # type: ignore[union-attr]
                with pytest.raises(InterruptedError):
                    loss_of(run.model, 9).backward()
                handle.remove()
                run.optim.zero_grad()
            run.micro(number)
            run.step()

    both(train, tmp_path, monkeypatch)


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, verb: str) -> list[str]:
    """A list that grows with each call."""
    do, calls = getattr(owner, verb), list[str]()

    def noted(*args: Any) -> Any:
        calls.append(verb)
        return do(*args)

    monkeypatch.setattr(owner, verb, noted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("num_micros", [1, 4])
def test_an_engine_whose_loss_scale_overflows_and_grows_trains_the_same(
    num_micros: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for overlap in ("none", "backward"):
        nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
        config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": num_micros, "gradient_clipping": 1e9,
            "fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {
                "stage": 3, "offload_param": nvme, "offload_optimizer": nvme, "sub_group_size": 4096,
                "stage3_param_persistence_threshold": 100,
            },
            "tiermem": {"overlap": overlap, "strict": True},
        }  # fmt: skip
        engine, optim, *_ = tiermem.initialize(model=seeded(Tower), config=config)
        losses, scales, commits = (
            list[float](),
            list[float](),
            counted(monkeypatch, engine.shards.program, "commit"),
        )
        for step in range(14):
            losses += train_engine(engine, range(num_micros * step, num_micros * (step + 1)))
            scales.append(optim.loss_scale)
        weights = {
            name: engine.shards.weight(param) for name, param in engine.module.named_parameters()
        }
        found.append((losses, scales, weights, states_of(engine.shards, optim)))
        engine.destroy()
    (losses, scales, *tensors), (my_losses, my_scales, *mine) = found
    assert (my_losses, my_scales) == (losses, scales)
    assert any(before < after for before, after in itertools.pairwise(scales))
    assert any(before > after for before, after in itertools.pairwise(scales))
    for one, other in zip(mine, tensors, strict=True):
        assert_same_tensors(one, other)
    assert commits


def engine_with(
    folder: Path, clipping: float, own: dict[str, Any], params: str = "nvme"
) -> tiermem.Engine:
    """An engine that says nothing of what runs beside its steps, unless `own` does."""
    homes = {"nvme": {"device": "nvme", "nvme_path": str(folder)}, "cpu": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": clipping, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3, "offload_param": homes[params], "offload_optimizer": homes["nvme"], "sub_group_size": 4096,
            "stage3_param_persistence_threshold": 100,
        },
        "tiermem": {**own, "strict": True},
    }  # fmt: skip
    return tiermem.initialize(model=seeded(Tower), config=config)[0]


def opened_engine(*args: Any) -> contextlib.closing[tiermem.Engine]:
    return contextlib.closing(engine_with(*args))


def overlap_in(engine: tiermem.Engine) -> str:
    return overlap_of(engine.shards.policy, engine.shards.plan, is_gpu=False)


class Ended(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]
    num_early: int  # steps that took what backward had stepped
    num_redone: int
    file_bytes: int


def train_clipped(engine: tiermem.Engine, folder: Path, period: int = 0) -> Ended:
    """Trains; gradients of one step of each `period` are large."""
    losses = []
    for number in range(21):
        loss = loss_of(engine, number) * (1e4 if period and number % period == period - 1 else 1.0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    steps, file_bytes = (
        engine.shards.steps,
        sum(file.stat().st_size for file in folder.glob("*/segment.bin")),
    )
    ended = Ended(
        losses, dict(engine.module.state_dict()), steps.num_early, steps.num_redone, file_bytes
    )
    engine.close()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clipping", "period", "num_early", "num_redone"),
    [
        (1e-3, 0, 0, 0),  # always: none is attempted, so that none is made twice
        (1e9, 0, 19, 0),  # never: the first makes states, the second finds what was assumed
        (0.0, 0, 19, 0),
        (100.0, 5, 8, 4),
    ],
)
def test_an_engine_begins_under_backward_where_history_says_that_it_pays(
    clipping: float, period: int, num_early: int, num_redone: int, tmp_path: Path
) -> None:
    """Whatever its gradient_clipping. What it never writes, it takes no disk for."""
    plain = train_clipped(engine_with(tmp_path, clipping, {"overlap": "none"}), tmp_path, period)
    engine = engine_with(tmp_path, clipping, {})
    plan = engine.shards.plan
    assert overlap_in(engine) == "backward"
    ended = train_clipped(engine, tmp_path, period)
    assert ended.losses == plain.losses
    assert_same_tensors(ended.weights, plain.weights)
    assert (ended.num_early, ended.num_redone) == (num_early, num_redone)
    assert ended.file_bytes == plan.disk_bytes - (0 if num_early else plan.attempt_disk_bytes)


# ---- unfreezing ----------------------------------------------------------------------------------

BODY = ("embed", "layers.0", "layers.2")


def test_units_that_are_unfrozen_are_stepped_under_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first step with them, which makes their states."""

    def train(run: Run) -> None:
        for number in range(8):
            if number == 4:
                run.model.requires_grad_(True)
            run.micro(number)
            is_attempted = run.shards.policy.overlap == "backward" and number in (2, 3, 5, 6, 7)
            assert bool(run.shards.program.attempted) == is_attempted
            run.step()

    log, num_redone, _ = both(train, tmp_path, monkeypatch, frozen=BODY)
    assert (log, num_redone) == (["attempt", "commit"] * 5, 0)


@pytest.mark.slow
def test_a_model_that_was_frozen_whole_is_stepped_under_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        assert run.shards.plan.attempt_disk_bytes == 0
        run.model.requires_grad_(True)
        plainly(run)
        assert bool(run.shards.plan.attempt_disk_bytes) == (run.shards.policy.overlap == "backward")

    log, num_redone, num_bytes = both(train, tmp_path, monkeypatch, frozen=[""])
    assert (log, num_redone) == (["attempt", "commit"] * (NUM_STEPS - 2), 0)
    assert num_bytes["backward"] == num_bytes["none"]


def test_unfreezing_before_the_step_drops_what_backward_has_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        for number in range(NUM_STEPS):
            run.micro(number)
            if number == 4:
                param = run.model.get_parameter("layers.0.up.weight").requires_grad_(True)
                param.grad = torch.full(param.shape, 1e-3, dtype=param.dtype)
                run.shards.enable_training()
                assert not run.shards.program.attempted
            run.step()

    log, num_redone, _ = both(train, tmp_path, monkeypatch, frozen=BODY)
    # the second attempt is dropped, the third counts
    assert (log, num_redone) == (["attempt", "commit"] * 3, 0)


def unfrozen_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, frozen: tuple[str, ...], overlap: str
) -> int:
    """Bytes on disk that a model takes when all of it is unfrozen."""
    run = Run(folder, overlap, monkeypatch, frozen=frozen)
    run.model.requires_grad_(True)
    run.shards.enable_training()
    num_bytes = int(run.shards.plan.disk_bytes)
    run.shards.close()
    return num_bytes


def test_without_room_an_unfrozen_model_steps_under_the_next_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def train(run: Run) -> None:
        run.model.requires_grad_(True)
        plainly(run)
        assert run.shards.plan.attempt_disk_bytes == 0

    room = unfrozen_disk(tmp_path, monkeypatch, ("",), "forward")
    with caplog.at_level(logging.WARNING, "tiermem"):
        log, _, _ = both(train, tmp_path, monkeypatch, frozen=[""], disk_bytes=room)
    assert log == []
    assert [
        record.message for record in caplog.records if "not every rank has room" in record.message
    ]


def test_a_slot_that_no_step_uses_is_left_out_where_unfreezing_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that clips has taken nothing for it."""

    def train(run: Run) -> None:
        is_wanted = run.shards.policy.overlap == "backward"
        for number in range(NUM_STEPS):
            if number == 4:
                assert bool(run.shards.plan.attempt_disk_bytes) == is_wanted
                run.model.requires_grad_(True)
            run.micro(number)
            run.step(max_norm=1e-3)
        assert run.shards.plan.attempt_disk_bytes == 0

    room = unfrozen_disk(tmp_path, monkeypatch, BODY, "backward") - 4096
    log, num_redone, _ = both(train, tmp_path, monkeypatch, frozen=BODY, disk_bytes=room)
    assert (log, num_redone) == ([], 0)


def test_a_slot_that_steps_under_backward_use_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes cannot be given back, so the model is not unfrozen, and goes on as it was."""

    def train(run: Run) -> None:
        for number in range(NUM_STEPS):
            if number == 4 and run.shards.policy.overlap == "backward":
                run.model.requires_grad_(True)
                with pytest.raises(OSError, match="disk_bytes"):
                    run.micro(number)
                for name in BODY:
                    run.model.get_submodule(name).requires_grad_(False)
            run.micro(number)
            run.step()

    room = unfrozen_disk(tmp_path, monkeypatch, BODY, "backward") - 4096
    log, num_redone, _ = both(train, tmp_path, monkeypatch, frozen=BODY, disk_bytes=room)
    assert (log, num_redone) == (["attempt", "commit"] * (NUM_STEPS - 2), 0)


# ---- errors and ends -----------------------------------------------------------------------------


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Run:
    run = Run(folder, "backward", monkeypatch, **fields)
    for number in range(3):
        run.micro(number)
        run.step()
    run.shards.check_whole()
    return run


@pytest.mark.parametrize("verify", ["always", "sample"])
def test_damage_that_backward_finds_is_raised_by_the_step_or_the_fetch(
    verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path, monkeypatch, verify=verify)
    table = run.shards.store.sums.of("state/5/head/0")  # the first that backward steps
    assert table is not None
    table.crcs[0] ^= 1
    table._num_reads[:] = -table._serial - 1  # the attempt is the next read
    run.micro(5)
    assert run.shards.program.attempted
    run.shards.program._program().quiet()
    assert run.shards.program.has_failed

    def step_and_fetch() -> None:
        run.step()
        run.micro(6)

    with pytest.raises(CorruptionError):
        step_and_fetch()
    with pytest.raises((RuntimeError, CorruptionError)):
        run.optim.step()
    with contextlib.suppress(OSError):
        run.shards.close()


@pytest.mark.parametrize("materialize", [False, True])
def test_closing_drops_what_backward_has_stepped(
    materialize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path, monkeypatch)
    expected = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.micro(5)
    assert run.shards.program.attempted
    run.shards.close(materialize)
    assert not list(tmp_path.iterdir())
    if materialize:
        assert_same_tensors(dict(run.model.state_dict()), expected)


# ---- room ----------------------------------------------------------------------------------------


def plan_of(folder: Path, overlap: str, **fields: Any) -> Any:
    with tiermem.shard(seeded(Tower).bfloat16(), overlapped(folder, overlap, **fields)) as shards:
        return shards.plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["exact", "compact"])
@pytest.mark.parametrize(
    ("durability", "keep"),
    [("none", 1), ("checkpoint", 1), ("checkpoint", 3), ("step", 1), ("step", 2)],
)
def test_it_takes_one_more_slot_which_the_plan_counts(
    tmp_path: Path, precision: str, durability: str, keep: int
) -> None:
    fields = {
        "precision": tiermem.Precision.preset(precision),
        "durability": durability,
        "keep": keep,
        "persistence_numel": 0,
    }
    less, plan = (plan_of(tmp_path, overlap, **fields) for overlap in ("forward", "backward"))
    num_bytes = {"exact": 14, "compact": 8}[precision]
    numel = sum(unit.shard_numel for unit in plan.division.units)
    assert plan.attempt_disk_bytes == plan.disk_bytes - less.disk_bytes
    assert (
        num_bytes * numel
        <= plan.attempt_disk_bytes
        <= num_bytes * numel + 4096 * 4 * len(plan.division.units)
    )
    assert plan.host_bytes == less.host_bytes


def test_weights_in_memory_take_a_second_copy_which_the_plan_counts(tmp_path: Path) -> None:
    fields = {"params": Tier.HOST, "persistence_numel": 0}
    less, plan = (plan_of(tmp_path, overlap, **fields) for overlap in ("forward", "backward"))
    weights = sum(-(-unit.shard_bytes // 4096) * 4096 for unit in plan.division.units)
    states = 12 * sum(unit.shard_numel for unit in plan.division.units)
    assert plan.host_bytes - less.host_bytes == weights
    assert states <= plan.attempt_disk_bytes == plan.disk_bytes - less.disk_bytes < states + weights


def test_without_room_for_a_second_copy_it_is_left_out_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"params": Tier.HOST, "resident_bytes": 0}
    less = plan_of(tmp_path, "forward", **fields)
    with caplog.at_level(logging.WARNING, "tiermem"):
        plan = plan_of(tmp_path, "backward", host_bytes=less.host_bytes + 4096, **fields)
    assert (plan.host_bytes, plan.disk_bytes, plan.attempt_disk_bytes) == (
        less.host_bytes,
        less.disk_bytes,
        0,
    )
    [said] = [record.message for record in caplog.records if "room for twice" in record.message]
    enough = int(re.findall(r"host_bytes, which is \d+, and (\d+)", said)[0])
    assert plan_of(tmp_path, "backward", host_bytes=enough, **fields).may_attempt


def test_weights_in_memory_rest_between_their_uses(tmp_path: Path) -> None:
    """They are used where they rest, and nobody sees them while a step may change them."""
    model = seeded(Tower).bfloat16()
    expected = model.layers[0].up.weight.detach().clone()  # type: ignore[index,union-attr]
    with tiermem.shard(model, overlapped(tmp_path, "backward", params=Tier.HOST)) as shards:
        param, seen = model.layers[0].up.weight, list[int]()  # type: ignore[index,union-attr]
        model.layers[0].register_forward_pre_hook(lambda *_: seen.append(param.data_ptr()))  # type: ignore[index,union-attr]
        assert not shards.find(param)[0].is_present
        loss_of(model, 0)
        assert seen == [param.ds_tensor.data_ptr()]
        assert torch.equal(shards.weight(param), expected)
        assert (shards.plan.units.num, shards.plan.staging.num) == (0, 0)


def test_without_room_it_is_left_out_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = plan_of(tmp_path, "forward").disk_bytes
    with caplog.at_level(logging.WARNING, "tiermem"):
        plan = plan_of(tmp_path, "backward", disk_bytes=room)
    assert (plan.disk_bytes, plan.attempt_disk_bytes) == (room, 0)
    assert [
        record.message for record in caplog.records if "not every rank has room" in record.message
    ]


def room_of(plan: Any) -> tuple[int, int, Any]:
    return plan.host_bytes, plan.disk_bytes, plan.grads


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", ["nvme", "cpu"])
def test_an_engine_that_clips_starts_where_disk_bytes_leaves_no_room(
    params: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it would with "forward", and says so to those who look."""
    own = {"host_bytes": 1 << 30, "resident_bytes": 0}
    with opened_engine(tmp_path, 1.0, own | {"overlap": "forward"}, params) as engine:
        less = engine.shards.plan
    own["disk_bytes"] = less.disk_bytes
    with (
        caplog.at_level(logging.INFO, "tiermem"),
        opened_engine(tmp_path, 1.0, own, params) as engine,
    ):
        assert overlap_in(engine) == "forward"
        assert room_of(engine.shards.plan) == room_of(less)
        losses = train_engine(engine, range(3))
    [record] = [each for each in caplog.records if "not every rank has room" in each.message]
    assert record.levelno == logging.INFO and f"disk_bytes={less.disk_bytes}" in record.message
    with opened_engine(tmp_path, 1.0, {"overlap": "none"}, params) as engine:
        assert train_engine(engine, range(3)) == losses


def free_bytes(folder: Path) -> int:
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize


def test_an_engine_that_clips_starts_on_a_disk_without_room(
    tmp_path: Path, mount: Callable[..., Path]
) -> None:
    """The file system has what "forward" takes, and less than a slot more."""
    folder = mount("ext4", 64 << 20)
    empty = free_bytes(folder)
    with opened_engine(folder, 1.0, {"overlap": "backward"}) as engine:
        plan = engine.shards.plan
    assert plan.attempt_disk_bytes
    deadline = time.monotonic() + 60
    # the kernel frees files in its own time
    while (free := free_bytes(folder)) < empty - plan.attempt_disk_bytes // 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with open(folder / "others", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - plan.disk_bytes + plan.attempt_disk_bytes // 2)
    with opened_engine(folder, 1.0, {}) as engine:
        assert overlap_in(engine) == "forward"
        losses = train_engine(engine, range(4))
    with opened_engine(tmp_path, 1.0, {"overlap": "none"}) as engine:
        assert train_engine(engine, range(4)) == losses


def test_ranks_that_share_a_disk_leave_one_another_what_each_must_have(
    tmp_path: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for both, and for the slot of one."""
    folder, plan = mount("ext4", 64 << 20), plan_of(tmp_path, "backward")
    free = free_bytes(folder)
    least, slot = (free // 2) // 4096 * 4096 - (1 << 20), 8 << 20
    plan = dataclasses.replace(plan, disk_bytes=least + slot, attempt_disk_bytes=slot)
    meeting, told, found = threading.Barrier(2, timeout=60), dict[int, str](), dict[int, Any]()

    def exchange(topology: Topology, said: str) -> list[str]:
        told[topology.rank] = said
        meeting.wait()
        both = [told[0], told[1]]
        meeting.wait()
        return both

    def start(rank: int) -> None:
        (folder / str(rank)).mkdir()
        with TensorStore([folder / str(rank)], 1 << 20) as store:
            topology = dataclasses.replace(alone, rank=rank)
            found[rank] = budget.take_disk(
                plan, overlapped(folder, "auto", early_steps=True), store, topology
            )
            meeting.wait()

    monkeypatch.setattr(budget, "exchange", exchange)
    with tiermem.shard(seeded(Tower), OffloadPolicy()) as shards:
        alone = shards.topology
    ranks = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [found[rank].disk_bytes for rank in range(2)] == [least, least]


@pytest.mark.slow
def test_a_disk_that_fills_up_before_the_first_step_under_backward_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(tmp_path, 1e9, {})
    assert overlap_in(engine) == "backward"

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full", "disk")

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING, "tiermem"):
        full.setattr(files, "take_room", fail)
        ended = train_clipped(engine, tmp_path)
    told = [
        each.message for each in caplog.records if "do not begin under backward" in each.message
    ]
    assert len(told) == 1 and "the disk has filled up" in told[0]
    plain = train_clipped(engine_with(tmp_path, 1e9, {"overlap": "none"}), tmp_path)
    assert (ended.losses, ended.num_early, ended.num_redone) == (plain.losses, 0, 0)


@pytest.mark.parametrize("named", ["host_bytes", "free memory"])
@pytest.mark.parametrize("is_enough", [False, True])
def test_weights_in_memory_have_second_copies_where_there_is_room(
    named: str,
    is_enough: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In host_bytes, or else in half of what is free; where room is short, nothing else makes room
    for them."""
    own: dict[str, Any] = {"resident_bytes": 0}
    with opened_engine(tmp_path, 1.0, own | {"overlap": "forward"}, "cpu") as engine:
        less = engine.shards.plan
    with opened_engine(tmp_path, 1.0, own | {"overlap": "backward"}, "cpu") as engine:
        more = engine.shards.plan.host_bytes
    room = more - 4096 * (not is_enough)
    if named == "host_bytes":
        own["host_bytes"] = room
    else:
        monkeypatch.setattr("tiermem.run.shards.free_host_bytes", lambda: 2 * room)
    with (
        caplog.at_level(logging.INFO, "tiermem"),
        opened_engine(tmp_path, 1.0, own, "cpu") as engine,
    ):
        assert overlap_in(engine) == ("backward" if is_enough else "forward")
        if not is_enough:
            assert room_of(engine.shards.plan) == room_of(less)
    said = [each for each in caplog.records if "host_bytes, which is" in each.message]
    assert [f" and {more} (" in each.message for each in said] == [True] * (not is_enough)
    assert all(each.levelno == logging.INFO for each in said)


def test_without_tiles_on_disk_it_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tiermem"):
        assert plan_of(tmp_path, "backward", optim=Tier.HOST).attempt_disk_bytes == 0
    assert [record.message for record in caplog.records if "there are none" in record.message]


# ---- history -------------------------------------------------------------------------------------


def attempts_of(period: int) -> tuple[int, int]:
    """Attempts that held, and that failed, where one step of each `period` is not as assumed."""
    history, held, failed = History(), 0, 0
    for step in range(400):
        is_due, has_held = history.is_due and history.is_last(1), step % period != 0
        held, failed = held + (is_due and has_held), failed + (is_due and not has_held)
        history.note(1, has_held, is_due)
    return held, failed


def test_history_attempts_where_it_pays() -> None:
    assert attempts_of(1) == (0, 0)  # a run that clips every step
    assert attempts_of(2)[1] <= 1
    assert attempts_of(3)[1] <= 2
    held, failed = attempts_of(8)
    assert held >= 4 * failed > 0


@given(st.lists(st.booleans(), max_size=500), st.integers(0, 100))
def test_history_makes_few_steps_twice_whatever_comes(steps: list[bool], num_clipped: int) -> None:
    """After six failures that no success follows a step is attempted after 64 that held; a run that
    clips pays once."""
    history, held, failed = History(), 0, 0
    for has_held in [*steps, *[False] * num_clipped]:
        is_due = history.is_due and history.is_last(1)
        held, failed = held + (is_due and has_held), failed + (is_due and not has_held)
        history.note(1, has_held, is_due)
    assert failed <= held + 6 + len(steps) // 64
    for number in range(100):
        assert not history.is_due or (not number and not num_clipped)
        history.note(1, has_held=False, was_attempted=history.is_due)


def test_history_expects_as_many_backwards_as_before() -> None:
    history = History()
    for _ in range(9):
        history.note(2, has_held=True, was_attempted=False)
    assert history.is_due and history.is_last(2) and not history.is_last(1)
    history.note(3, has_held=True, was_attempted=True)
    assert not history.is_due
