"""Do relative paths mean the folder where they were given, after the program has changed its
working directory?"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_by_hand import latest_of
from torch import nn

import tiermem
from tiermem.config import load_config
from tiermem.run.shards import Shards
from tiermem.swap.base.tier import Tier

NVME = {"device": "nvme", "nvme_path": "nvme"}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": NVME,
        "offload_optimizer": NVME,
    },
    "tiermem": {"durability": "step"},
}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The program starts in `start`, which has a folder `nvme`; the call goes to another folder."""
    for name in ("start/nvme", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "start" / "ds.json").write_text(json.dumps(CONFIG), "utf-8")
    monkeypatch.chdir(tmp_path / "start")
    return lambda: monkeypatch.chdir(tmp_path / "other")


def step(engine: tiermem.Engine) -> None:
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def test_an_engine_trains_saves_and_removes_its_files(
    elsewhere: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiermem.initialize(model=layers(), config="ds.json")[0]
    step(engine)
    engine.save_checkpoint("out", copy=True)
    elsewhere()
    engine.wait_checkpoint()
    step(engine)
    engine.save_checkpoint("out", copy=True)
    engine.wait_checkpoint()
    saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    assert [latest_of(tmp_path / each / "out") for each in ("start", "other")] == [
        "global_step1",
        "global_step2",
    ]
    again = tiermem.initialize(
        model=layers(), config={**CONFIG, "zero_optimization": {"stage": 3}, "tiermem": {}}
    )[0]
    again.load_checkpoint("out")
    assert all(torch.equal(value, saved[name]) for name, value in again.module.state_dict().items())
    again.close()
    assert [each.levelname for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("given", ["config", "policy", "zero.Init"])
def test_what_was_read_before_the_change_means_the_first_folder(
    given: str, elsewhere: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tiermem.OffloadPolicy(params=Tier.NVME, optim=Tier.NVME, paths=["nvme"])
    config = load_config({**CONFIG, "tiermem": {}})
    init = tiermem.zero.Init(config_dict_or_path="ds.json") if given == "zero.Init" else None
    elsewhere()
    model = layers()
    if init is not None:
        with init:
            model = layers()
    if given == "policy":
        owner: tiermem.Engine | Shards = tiermem.shard(model, policy)
    else:
        owner = tiermem.initialize(model=model, config=config)[0]
    assert len([*(tmp_path / "start" / "nvme").iterdir()]) == 1
    owner.close()
    assert [*(tmp_path / "start" / "nvme").iterdir()] == [*(tmp_path / "other").iterdir()] == []
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
