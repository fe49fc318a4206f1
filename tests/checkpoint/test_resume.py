"""Does a run that is opened again go on to the bit, in a new engine and in the one that saved?"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, loss_of, seeded
from torch import nn

import tiermem

Build = Callable[[], nn.Module]


def started(
    folder: Path, stage: int = 3, offload: str = "nvme", preset: str | None = None, build: Build = models.tied_tower,
    seed: int = 0, own: dict[str, Any] | None = None, loads_masters: bool = True, **keys: Any,
) -> tiermem.Engine:  # fmt: skip
    zero: dict[str, Any] = {
        "stage": stage,
        "stage3_param_persistence_threshold": 50,
        "sub_group_size": 8192,
    }
    zero["load_from_fp32_weights"] = loads_masters
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload, "nvme_path": str(folder)}
        if stage == 3:
            zero["offload_param"] = {"device": offload, "nvme_path": str(folder)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 3},
        },
        "zero_optimization": zero,
        "tiermem": {**(own or {}), "strict": True}
        | ({} if preset is None else {"precision": preset}),
    } | keys
    if preset is not None:
        config["bf16"] = {"enabled": True}
    torch.manual_seed(1000 + seed)
    return tiermem.initialize(model=seeded(build, seed), config=config)[0]


def train(engine: tiermem.Engine, steps: range) -> list[float]:
    losses = []
    for micro in range(
        steps.start * engine.gradient_accumulation_steps(),
        steps.stop * engine.gradient_accumulation_steps(),
    ):
        loss = loss_of(engine, micro)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def states(engine: tiermem.Engine) -> dict[str, torch.Tensor]:
    """Weights, masters and moments, whole."""
    assert engine.optimizer is not None
    found = {f"{name}.weight": value.clone() for name, value in engine.module.state_dict().items()}
    tiles = engine.optimizer.tiles_of(engine.shards)
    for live, shard in engine.shards.parameters():
        for name in ("master", *tiles.names(shard)) if live.unit.is_trainable else ():
            found[f"{shard.name}.{name}"] = tiles.state(shard, name)
    return found


def counters(engine: tiermem.Engine) -> list[Any]:
    names = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
    assert engine.lr_scheduler is not None
    return [
        *(getattr(engine, name) for name in names),
        engine.get_lr(),
        engine.lr_scheduler.state_dict(),
        engine.loss_scale(),
    ]


def check_goes_on(folder: Path, other: dict[str, Any] | None = None, **fields: Any) -> None:
    """Saves after three steps and goes on; a new engine, of other weights, goes on from there as
    the first one did."""
    first = started(folder, **fields)
    train(first, range(3))
    assert first.save_checkpoint(folder / "ck", client_state={"epoch": 7})
    saved = states(first), counters(first)
    losses, after = train(first, range(3, 5)), (states(first), counters(first))
    first.wait_checkpoint()
    second = started(folder, **(fields | {"seed": 3} | (other or {})))
    train(second, range(1))
    assert second.load_checkpoint(folder / "ck") == (
        str(folder / "ck" / "global_step3"),
        {"epoch": 7},
    )
    check_same(second, *saved)
    assert train(second, range(3, 5)) == losses
    check_same(second, *after)
    first.close()
    second.close()


def check_same(
    engine: tiermem.Engine, due_states: dict[str, torch.Tensor], due_counters: list[Any]
) -> None:
    assert_same_tensors(states(engine), due_states)
    assert counters(engine) == due_counters


# ---- the same arrangement ------------------------------------------------------------------------

ARRANGEMENTS = [*itertools.product((1, 2, 3), ("none", "cpu", "nvme")), (0, "none")]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("preset", ["exact", "tiny"])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "nvme"), (2, "cpu"), (3, "nvme")])
def test_a_new_engine_goes_on_to_the_bit(
    stage: int, offload: str, preset: str, tmp_path: Path
) -> None:
    check_goes_on(tmp_path, stage=stage, offload=offload, preset=preset)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("preset", [None, "exact", "compact", "bf16", "tiny"])
@pytest.mark.parametrize(("stage", "offload"), ARRANGEMENTS)
def test_every_arrangement_goes_on_to_the_bit(
    stage: int, offload: str, preset: str | None, accumulation: int, tmp_path: Path
) -> None:
    check_goes_on(
        tmp_path,
        stage=stage,
        offload=offload,
        preset=preset,
        gradient_accumulation_steps=accumulation,
    )


@pytest.mark.sampled(12)
@pytest.mark.parametrize("build", [models.frozen_tower, models.BareContainers, models.NanoGPT])
def test_frozen_bare_and_reinitialised_parameters_go_on(build: Build, tmp_path: Path) -> None:
    check_goes_on(tmp_path, build=build, gradient_accumulation_steps=2)


def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
    check_goes_on(tmp_path, fp16=fp16)


def test_dropout_goes_on_from_the_same_random_numbers(tmp_path: Path) -> None:
    check_goes_on(tmp_path, build=lambda: nn.Sequential(models.ShortTower(), nn.Dropout(0.3)))


def test_the_engine_that_saved_opens_it_right_away_and_later(tmp_path: Path) -> None:
    engine = started(tmp_path, preset="compact")
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "ck")
    saved = states(engine)
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_tensors(states(engine), saved)
    losses = train(engine, range(2, 5))
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_tensors(states(engine), saved)
    assert train(engine, range(2, 5)) == losses
    engine.close()


# ---- another arrangement -------------------------------------------------------------------------

OTHERS: dict[str, dict[str, Any]] = {
    "memory": {"offload": "none"},
    "host": {"offload": "cpu"},
    "stage 1 on NVMe": {"stage": 1},
    "stage 0": {"stage": 0, "offload": "none"},
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("preset", [None, "compact"])
@pytest.mark.parametrize("other", OTHERS)
def test_other_tiers_and_stages_go_on_to_the_bit(
    other: str, preset: str | None, tmp_path: Path
) -> None:
    check_goes_on(tmp_path, OTHERS[other], preset=preset)


def test_what_rested_in_memory_opens_on_nvme(tmp_path: Path) -> None:
    check_goes_on(tmp_path, {"offload": "nvme"}, offload="none", stage=2, preset="tiny")


def test_other_tile_sizes_and_paths_go_on_to_the_bit(tmp_path: Path) -> None:
    first = started(tmp_path, preset="compact")
    train(first, range(3))
    first.save_checkpoint(tmp_path / "ck")
    (tmp_path / "elsewhere").mkdir()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 3000, "sub_group_size": 4096}
    target = {"device": "nvme", "nvme_path": str(tmp_path / "elsewhere")}
    zero |= {"offload_param": target, "offload_optimizer": target}
    second = started(tmp_path, preset="compact", seed=4, zero_optimization=zero)
    second.load_checkpoint(tmp_path / "ck")
    assert_same_tensors(states(second), states(first))
    assert train(second, range(3, 5)) == train(first, range(3, 5))
    first.close()
    second.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("saved", "opened"),
    [("exact", "compact"), ("compact", "exact"), ("exact", "tiny"), ("tiny", "bf16")],
)
def test_another_precision_goes_through_fp32_and_says_so(
    saved: str, opened: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = started(tmp_path, preset=saved), started(tmp_path, preset=opened, seed=3)
    train(first, range(3))
    first.save_checkpoint(tmp_path / "ck")
    with caplog.at_level(logging.INFO, "tiermem"):
        second.load_checkpoint(tmp_path / "ck")
    told = [
        record.message for record in caplog.records if "restored in other formats" in record.message
    ]
    assert len(told) == 1
    assert "exp_avg" in told[0]
    before, after = states(first), states(second)
    for name, value in after.items():
        is_exact = name.endswith(".master") and "bf16" not in (saved, opened)
        if is_exact:
            assert torch.equal(value, before[name]), name
        else:
            close = 0.13 if "tiny" in (saved, opened) and "exp_avg" in name else 0.01
            assert torch.allclose(
                value.float(),
                before[name].float(),
                rtol=close,
                atol=close * before[name].abs().max().item(),
            ), name
    assert abs(train(second, range(3, 4))[0] - train(first, range(3, 4))[0]) < 0.02
    first.close()
    second.close()


def test_a_bf16_model_opens_in_fp32_and_back(tmp_path: Path) -> None:
    first, second = started(tmp_path, preset="exact"), started(tmp_path, seed=3)
    train(first, range(3))
    first.save_checkpoint(tmp_path / "bf16")
    second.load_checkpoint(tmp_path / "bf16")
    halves, wholes = states(first), states(second)
    for name in halves:
        own = (
            name
            if not name.endswith(".weight.weight") and not name.endswith(".bias.weight")
            else None
        )
        if own is not None and own.endswith((".master", ".exp_avg", ".exp_avg_sq")):
            assert torch.equal(wholes[own], halves[own]), own
    train(second, range(3, 4))
    second.save_checkpoint(tmp_path / "fp32")
    first.load_checkpoint(tmp_path / "fp32")
    halves, wholes = states(first), states(second)
    assert all(
        torch.equal(halves[name], wholes[name])
        for name in halves
        if name.endswith((".master", ".exp_avg"))
    )
    first.close()
    second.close()


# ---- other ways to keep states -------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("durability", ["none", "step"])
def test_every_durability_goes_on(durability: str, tmp_path: Path) -> None:
    check_goes_on(tmp_path, own={"durability": durability}, preset="compact")


@pytest.mark.parametrize(
    ("saved", "named", "kept"),
    [
        ("none", None, "none"),
        ("forward", None, "forward"),
        ("backward", None, "backward"),
        (None, None, "auto"),
        ("none", "forward", "forward"),
        ("forward", "none", "none"),
    ],
)
def test_what_runs_beside_steps_is_as_it_was_unless_it_is_named(
    saved: str | None, named: str | None, kept: str, tmp_path: Path
) -> None:
    """Nothing is clipped, so that this start would begin steps under backward by itself."""
    own = [{} if each is None else {"overlap": each} for each in (saved, named)]
    first = started(tmp_path, own=own[0], gradient_clipping=0.0)
    train(first, range(3))
    first.save_checkpoint(tmp_path / "ck")
    losses = train(first, range(3, 6))
    second = started(tmp_path, own=own[1], gradient_clipping=0.0, seed=3)
    second.load_checkpoint(tmp_path / "ck")
    assert second.shards.policy.overlap == kept
    assert train(second, range(3, 5)) == losses[:2]
    assert second.shards.program.is_running == (kept != "none")
    loss = loss_of(second, 5)
    second.backward(loss)
    assert bool(second.shards.program.attempted) == (kept in ("auto", "backward"))
    assert loss.item() == losses[2]
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("own", "lacks"),
    [
        (
            {},
            r"needs \d+ bytes \(.* MiB\) more on disk, for which not every rank has room: .*disk_bytes=",
        ),
        ({"overlap": "backward"}, r"needs \d+ bytes \(.* MiB\) more on disk"),
    ],
)
def test_a_start_that_cannot_begin_steps_under_backward_as_before_says_what_is_missing(
    own: dict[str, Any], lacks: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = started(tmp_path, own={"overlap": "backward"})
    plan = first.shards.plan
    train(first, range(3))
    first.save_checkpoint(tmp_path / "ck")
    losses = train(first, range(3, 6))
    first.close()
    own = own | {"disk_bytes": plan.disk_bytes - plan.attempt_disk_bytes}
    with caplog.at_level(logging.WARNING, "tiermem"):
        second = started(tmp_path, own=own, seed=3)
        second.load_checkpoint(tmp_path / "ck")
    [said] = [each.message for each in caplog.records if 'overlap "backward"' in each.message]
    assert re.search(lacks, said)
    assert train(second, range(3, 6)) == losses
    second.close()


def test_frozen_weights_in_8_bits_go_on(tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "zero_quantized_nontrainable_weights": True,
        "stage3_param_persistence_threshold": 50,
    }
    zero["offload_param"] = zero["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": str(tmp_path),
    }
    check_goes_on(tmp_path, build=models.frozen_tower, preset="exact", zero_optimization=zero)
