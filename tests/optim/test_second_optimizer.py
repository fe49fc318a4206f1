"""Can a sharded model have another optimizer after the first is closed, on every tier, and does it
train as torch's?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import models
from programs.twins import loss_of, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

POLICIES: dict[str, dict[str, Any]] = {
    "HOST": {"params": Tier.HOST, "optim": Tier.HOST},
    "NVMe": {"params": Tier.NVME, "optim": Tier.NVME},
    "NVMe, under backward": {"params": Tier.NVME, "optim": Tier.NVME, "overlap": "backward"},
    "NVMe, under forward": {"params": Tier.NVME, "optim": Tier.NVME, "overlap": "forward"},
    "HOST, under backward": {"params": Tier.HOST, "optim": Tier.HOST, "overlap": "backward"},
    "second copies": {"params": Tier.HOST, "optim": Tier.NVME, "overlap": "backward"},
    "in backward": {
        "params": Tier.NVME,
        "optim": Tier.NVME,
        "step_in_backward": True,
        "on_nonfinite": "raise",
    },
    "durable": {"params": Tier.NVME, "optim": Tier.NVME, "durability": "step"},
}
Make = Callable[[Any, nn.Module], Any]


def adam(library: Any, model: nn.Module) -> Any:
    return library.Adam(model.parameters(), lr=1e-3)


def sgd(library: Any, model: nn.Module) -> Any:
    return library.SGD(model.parameters(), lr=1e-2)


def sgd_with_momentum(library: Any, model: nn.Module) -> Any:
    return library.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "makes",
    [(adam, sgd), (sgd, adam), (adam, adam, sgd_with_momentum)],
    ids=["adam, sgd", "sgd, adam", "three"],
)
def test_optimizers_in_turn_train_as_torchs(
    name: str, makes: tuple[Make, ...], tmp_path: Path
) -> None:
    model, twin = seeded(models.ShortTower), seeded(models.ShortTower)
    policy = OffloadPolicy(
        paths=[tmp_path], persistence_numel=50, tile_numel=4096, **POLICIES[name]
    )
    with tiermem.shard(model, policy) as shards:
        for turn, make in enumerate(makes):
            optim, theirs = make(tiermem, model), make(torch.optim, twin)
            batches = range(4 * turn, 4 * turn + 4)
            assert train_steps(model, optim, batches) == pytest.approx(
                train_steps(twin, theirs, batches), rel=1e-5
            )
            optim.close()
            with pytest.raises(RuntimeError, match="or the optimizer was closed"):
                optim.step()
        assert all(not shard.num_steps for _, shard in shards.parameters())


@pytest.mark.parametrize("make", [adam, sgd])
def test_a_second_optimizer_beside_the_first_is_told_the_way(make: Make) -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model, OffloadPolicy(persistence_numel=50)):
        first = make(tiermem, model)
        train_steps(model, first, range(1))
        with pytest.raises(ValueError, match=r"has an optimizer already: call its close\(\) first"):
            make(tiermem, model)
        train_steps(model, first, range(1))


def test_a_refused_optimizer_leaves_room_for_the_next() -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model, OffloadPolicy(persistence_numel=50)):
        with pytest.raises(
            ValueError, match="a policy was given, and every parameter belongs to a sharded model"
        ):
            tiermem.AdamW(model.parameters(), policy=OffloadPolicy(optim=Tier.HOST))
        train_steps(model, tiermem.AdamW(model.parameters()), range(1))


def test_closing_an_optimizer_after_its_model_does_nothing() -> None:
    model = seeded(models.ShortTower)
    with tiermem.shard(model, OffloadPolicy(persistence_numel=50)):
        optim = adam(tiermem, model)
        train_steps(model, optim, range(1))
    optim.close()


def test_gradients_wait_for_the_second_optimizer() -> None:
    model, twin = seeded(models.ShortTower), seeded(models.ShortTower)
    with tiermem.shard(model, OffloadPolicy(persistence_numel=50)):
        adam(tiermem, model).close()
        loss_of(model, 0).backward()
        loss_of(twin, 0).backward()
        sgd(tiermem, model).step()
        sgd(torch.optim, twin).step()
        torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))
