"""Does an engine save its weights whole, in one file that others read, with one parameter in memory
at a time?"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from programs import models
from programs.twins import assert_same_tensors, seeded, train_engine
from torch import nn

import tiermem

GATHER = "stage3_gather_16bit_weights_on_model_save"


class Odd(nn.Module):
    """Tied weights, buffers that are saved and one that is not, a frozen weight, a 0-dim and an
    empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = models.tied_tower()
        self.tower.layers[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 7))
        self.register_buffer("seen", torch.tensor([3, 1, 2]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(5), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tower(tokens) * self.scale


def started(folder: Path, stage: int = 3, device: str = "nvme", **keys: Any) -> tiermem.Engine:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 50} | keys
    if device != "none":
        zero["offload_optimizer"] = {"device": device, "nvme_path": str(folder / "nvme")}
    if device != "none" and stage == 3:
        zero["offload_param"] = {"device": device, "nvme_path": str(folder / "nvme")}
    (folder / "nvme").mkdir(exist_ok=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
    }
    engine, _, _, _ = tiermem.initialize(model=seeded(Odd), config=config)
    train_engine(engine, [0])
    return engine


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize(
    ("stage", "device"),
    [(0, "none"), (1, "nvme"), (2, "cpu"), (3, "none"), (3, "cpu"), (3, "nvme")],
)
def test_what_is_saved_is_the_state_dict(
    stage: int, device: str, name: str, tmp_path: Path
) -> None:
    engine = started(tmp_path, stage, device, **{GATHER: True})
    assert engine.save_16bit_model(tmp_path / "out", name)
    assert os.listdir(tmp_path / "out") == [name]
    expected = engine.module_state_dict()
    if name.endswith(".bin"):
        found = torch.load(tmp_path / "out" / name, weights_only=True)
        assert found["tower.head.weight"].data_ptr() == found["tower.embed.weight"].data_ptr()
    else:
        found = safetensors.torch.load_file(tmp_path / "out" / name)
        with safetensors.safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt", "tower.head.weight": "tower.embed.weight"}
        expected.pop("tower.head.weight")
    assert_same_tensors(found, expected)
    assert found["tower.layers.1.up.weight"].dtype == torch.bfloat16
    assert "cache" not in found
    assert engine._consolidated_16bit_state_dict().keys() == engine.module_state_dict().keys()
    engine.close()


def test_a_saved_model_loads_into_a_plain_one(tmp_path: Path) -> None:
    engine = started(tmp_path, **{GATHER: True})
    engine.save_16bit_model(tmp_path, "model.safetensors")
    engine.save_16bit_model(tmp_path)
    weights = engine.module_state_dict()
    engine.close()
    for load in (
        lambda model: tiermem.load_safetensors(model, tmp_path / "model.safetensors"),
        lambda model: model.load_state_dict(
            torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        ),
    ):
        plain = Odd().bfloat16()
        load(plain)
        assert_same_tensors(dict(plain.state_dict()), weights)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_frozen_parameters_can_be_left_out(name: str, tmp_path: Path) -> None:
    engine = started(tmp_path, **{GATHER: True})
    assert engine.save_16bit_model(tmp_path, name, exclude_frozen_parameters=True)
    load = torch.load if name.endswith(".bin") else safetensors.torch.load_file
    found = set(load(tmp_path / name))
    whole = engine.module_state_dict()
    assert {each for each in whole if each not in found} >= {
        each for each in whole if ".layers.0." in each
    }
    assert not [each for each in found if ".layers.0." in each]
    assert set(engine.module_state_dict(exclude_frozen_parameters=True)) == {
        e for e in whole if ".layers.0." not in e
    }
    engine.close()


def test_partitioned_weights_are_not_saved_unless_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = started(tmp_path)
    with caplog.at_level(logging.WARNING, "tiermem"):
        assert not engine.save_16bit_model(tmp_path / "out")
    assert f"is not written: {GATHER} is false" in caplog.text
    assert not (tmp_path / "out").exists()
    assert not engine.zero_gather_16bit_weights_on_model_save()
    found = engine._zero3_consolidated_16bit_state_dict()
    assert found is not None  # Accelerate asks for it by itself
    assert_same_tensors(found, engine.module_state_dict())
    engine.close()


def test_below_stage_3_there_is_nothing_to_consolidate(tmp_path: Path) -> None:
    engine = started(tmp_path, 2, "none")
    with pytest.raises(ValueError, match=r"not partitioned below stage 3: use module_state_dict"):
        engine._zero3_consolidated_16bit_state_dict()
    engine.close()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_disk_without_room_is_an_error_and_leaves_the_old_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(tmp_path, **{GATHER: True})
    (tmp_path / name).write_text("the old one")

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        engine.save_16bit_model(tmp_path, name)
    monkeypatch.undo()
    assert (tmp_path / name).read_text() == "the old one"
    assert not list(tmp_path.glob("*.new"))
    with pytest.raises(OSError, match="Not a directory"):
        engine.save_16bit_model(tmp_path / name / "inside", name)
    assert engine.save_16bit_model(tmp_path, name)
    assert (tmp_path / name).stat().st_size > 1000
    engine.close()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_one_parameter_is_in_memory_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every whole value dies before the one after the next is gathered."""
    engine = started(tmp_path, **{GATHER: True})
    shards, alive, most = engine.shards, 0, 0
    weight = shards.weight

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def watched(param: nn.Parameter) -> torch.Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return weight(param).as_subclass(Watched)

    monkeypatch.setattr(shards, "weight", watched)
    assert engine.save_16bit_model(tmp_path, name)
    monkeypatch.undo()
    assert most <= 4  # one, its views while it is written, and the one that takes its name
    engine.close()
