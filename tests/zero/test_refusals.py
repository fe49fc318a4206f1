"""Is bad input refused with one clear error, before a byte is written?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from programs import models
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

ON_NVME: dict[str, Any] = {"params": Tier.NVME, "optim": Tier.NVME}


def refused(error: type[Exception], match: str, folder: Path, **fields: Any) -> None:
    model = models.ShortTower()
    with pytest.raises(error, match=match):
        tiermem.shard(model, OffloadPolicy(**fields))
    assert not list(folder.rglob("tiermem-*"))
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"stage": 4}, "stage is 4; allowed are 0, 1, 2 and 3"),
        (
            {"params": "nvme"},
            "params is 'nvme'; allowed are Tier.DEVICE, Tier.HOST, Tier.NVME",
        ),
        ({"params": Tier.NVME}, "params rest on NVME but no path is given"),
        (
            {"params": Tier.NVME, "optim": Tier.NVME},
            "params and optim rest on NVME but no path is given",
        ),
        ({"grads": Tier.NVME}, "grads rest on NVME but no path is given"),
        (
            {"params": Tier.HOST, "stage": 2},
            "params=cpu with stage 2, but it acts in stage 3 alone",
        ),
        ({"optim": Tier.HOST, "stage": 0}, "offload needs stage 1, 2 or 3"),
        ({"host_bytes": 0}, "host_bytes is 0; it must be at least 1"),
        ({"tile_buffers": 0}, "tile_buffers is 0; it must be at least 1"),
        ({"unit_buffers": -1}, "unit_buffers is -1; it must be at least 1"),
        ({"resident_bytes": -1}, "resident_bytes is -1; it must be 0 or more"),
        ({"master_from": "file"}, "master_from is 'file'; allowed are"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite is 'ignore'; allowed are"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0; it must be more than 0"),
    ],
)
def test_a_policy_that_contradicts_itself(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        OffloadPolicy(**fields)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    refused(FileNotFoundError, "nowhere", tmp_path, paths=[tmp_path / "nowhere"], **ON_NVME)


def test_a_second_path_that_does_not_exist_leaves_nothing_on_the_first(tmp_path: Path) -> None:
    refused(
        FileNotFoundError, "nowhere", tmp_path, paths=[tmp_path, tmp_path / "nowhere"], **ON_NVME
    )


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(OSError, "file", tmp_path, paths=[tmp_path / "file"], **ON_NVME)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_path_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(PermissionError, "cannot write here", tmp_path, paths=[tmp_path / "closed"], **ON_NVME)


def test_a_disk_with_too_little_room(tmp_path: Path) -> None:
    refused(
        OSError, "disk_bytes|No space", tmp_path, paths=[tmp_path], disk_bytes=100_000, **ON_NVME
    )


def test_a_unit_larger_than_its_buffer_is_named_with_what_helps(tmp_path: Path) -> None:
    match = r"unit 'layers\.0\.up' holds \d+ elements, more than the 2000 .*TiledLinear"
    refused(
        ValueError,
        match,
        tmp_path,
        paths=[tmp_path],
        unit_numel=2000,
        persistence_numel=50,
        **ON_NVME,
    )


def test_a_model_without_parameters_runs() -> None:
    with tiermem.shard(nn.Sequential(nn.ReLU()), OffloadPolicy()) as shards:
        assert shards.plan.host_bytes == 0


def test_an_optimizers_settings_are_checked() -> None:
    params = list(models.ShortTower().parameters())
    for name, value in (("lr", -1.0), ("eps", -1.0), ("weight_decay", -0.1), ("betas", (1.0, 0.9))):
        with pytest.raises(ValueError, match=name):
            tiermem.AdamW(params, **{name: value})
