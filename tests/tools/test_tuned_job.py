"""Does `tiermem train --tuned` put what was tuned into the job, and refuse folders that contradict
it?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiermem.config import load_config
from tiermem.policy import IoSettings, NvmePath
from tiermem.tools.job.launcher import Job
from tiermem.tools.job.train_job import make_job
from tiermem.tools.options import TrainOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    tuned = {
        "aio": {"block_size": 1 << 22, "queue_depth": 8, "intra_op_parallelism": 1},
        "tiermem": {
            "engine": "aio",
            "paths": [
                {"path": str(tmp_path / "a"), "weight": 1.0},
                {"path": str(tmp_path / "b"), "weight": 2.5},
            ],
            "measured": {"made_by": "tiermem tune"},
        },
    }
    (tmp_path / "tiermem.json").write_text(json.dumps(tuned))
    return tmp_path


def job_of(folder: Path, **fields: Any) -> Job:
    options = TrainOptions(preset="151m", tuned=folder / "tiermem.json", **fields)
    return make_job(options, "name", folder / "run")


def test_tuned_settings_and_paths_are_the_job_s(folder: Path) -> None:
    job = job_of(folder, resident_bytes=4096)
    policy = load_config(job.config).policy()
    assert policy.io == IoSettings("aio", 1 << 22, 8, 1)
    assert policy.paths == (NvmePath(folder / "a", weight=1.0), NvmePath(folder / "b", weight=2.5))
    assert policy.resident_bytes == 4096
    assert job.nvme_paths == [str(folder / "a"), str(folder / "b")]


def test_the_same_folders_may_be_named_again(folder: Path) -> None:
    job = job_of(folder, nvme=(folder / "b" / ".." / "b", folder / "a"))
    assert [path.weight for path in load_config(job.config).policy().paths] == [1.0, 2.5]


def test_other_folders_are_refused_with_both(folder: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"--nvme is .*/a, but .*tiermem\.json was made for .*/a, .*/b: leave --nvme out",
    ):
        job_of(folder, nvme=(folder / "a",))


@pytest.mark.parametrize("config", [{}, {"optimizer": None}, {"optimizer": "auto"}])
def test_a_config_without_an_optimizer_is_refused(folder: Path, config: dict[str, Any]) -> None:
    (folder / "ds.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"ds\.json names no optimizer, which train steps: add"):
        job_of(folder, config=folder / "ds.json")


def test_a_config_s_own_aio_gives_way(folder: Path) -> None:
    offload = {"device": "nvme", "nvme_path": [str(folder / "a"), str(folder / "b")]}
    config = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "aio": {"thread_count": 7},
        "tiermem": {"host_bytes": "1GiB"},
    }
    (folder / "ds.json").write_text(json.dumps(config))
    job = job_of(folder, config=folder / "ds.json")
    policy = load_config(job.config).policy()
    assert (policy.io.threads, policy.host_bytes) == (1, 1 << 30)
    assert job.nvme_paths == [str(folder / "a"), str(folder / "b")]


def test_without_nvme_only_the_queue_is_tuned(folder: Path) -> None:
    job = job_of(folder, offload="cpu")
    policy = load_config(job.config).policy()
    assert (policy.paths, policy.io.engine, job.nvme_paths) == ((), "aio", [])
