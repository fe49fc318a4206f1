"""Does a file of a checkpoint name others so that they are found from anywhere, and after both have
moved?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.checkpoint import save
from tiermem.checkpoint.format.finding import written
from tiermem.checkpoint.opening.source import Source


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize(
    ("path", "base"),
    [("a", "a"), ("a/x", "a"), ("x", "a"), ("b/x", "a"), ("b/c/x", "a/d"), ("b/x", "a/d")],
)
def test_what_is_written_is_found_from_the_folder_it_is_written_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, base: str, is_linked: bool
) -> None:
    (tmp_path / "real" / base).mkdir(parents=True)
    (tmp_path / "real" / path).mkdir(parents=True, exist_ok=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "deeper").symlink_to(tmp_path / "real")
    root = tmp_path / "link" / "deeper" if is_linked else tmp_path / "real"
    monkeypatch.chdir(root)
    for each in (Path(path), root / path):
        found = written(each, Path(base))
        assert (root / base / found).resolve() == (tmp_path / "real" / path).resolve()


def test_a_step_saved_with_relative_paths_is_opened_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "nvme").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(33, 17)
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=["run/nvme"], host_bytes=64 << 20
    )
    with tiermem.shard(model, policy) as shards:
        optimizer = tiermem.AdamW(model.parameters())
        model(torch.randn(3, 33)).sum().backward()
        optimizer.step()
        save(shards, optimizer, "run/checkpoints")
    for where in (tmp_path, tmp_path / "run", Path("/")):
        monkeypatch.chdir(where)
        with Source.open(tmp_path / "run" / "checkpoints") as source:
            assert source.manifest.step == 1
    (folder,) = (tmp_path / "run" / "nvme").iterdir()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
