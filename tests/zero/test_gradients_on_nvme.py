"""Are gradients that rest on NVMe read back only once they are there?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier


def test_a_micro_batch_waits_for_the_write_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    policy = OffloadPolicy(
        params=Tier.HOST, optim=Tier.HOST, grads=Tier.NVME, paths=[tmp_path], persistence_numel=0
    )
    log: list[str] = []
    with tiermem.shard(model, policy) as shards:
        write, read = shards.store.write, shards.store.read

        def logged_write(ranges: Any, name: str) -> Any:
            move = write(ranges, name)
            wait = move.wait
            monkeypatch.setattr(move, "wait", lambda: (log.append(f"{name} written"), wait())[1])
            return move

        def logged_read(ranges: Any, name: str, **given: Any) -> Any:
            log.append(f"{name} read")
            return read(ranges, name, **given)

        monkeypatch.setattr(shards.store, "write", logged_write)
        monkeypatch.setattr(shards.store, "read", logged_read)
        first, second = shards.units
        for live in (first, second, second, first):
            for shard in live.unit.shards:
                shard.param.grad = torch.ones(shard.shape)
            shards.homes.receive(live.unit)
            shards.homes.show(live.unit)
        names = [f"grad {live.unit.name}" for live in (first, second)]
        assert log == [
            f"{names[0]} written",  # to give its buffer to the next
            f"{names[1]} written",
            f"{names[1]} read",
            f"{names[0]} read",
        ]
        for param in model.parameters():
            gradient = shards.gradient(param)
            assert gradient is not None
            assert torch.equal(gradient, torch.full(param.shape, 2.0))
