"""Run once by test_disagreeing_ranks.py: three ranks that agree about everything but one thing,
case after case.

disagree_ranks.py OUT     writes OUT/found.json: {world: [how each rank ended]}, with {case: what it raised} for a result
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import World, run_worlds
from programs import models
from programs.twins import seeded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tiermem
from tiermem import OffloadPolicy, Tier
from tiermem.zero import Init

NUM_RANKS, ODD = 3, 1  # the rank that differs

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


class Pair(nn.Module):
    """Two layers, in one order or the other."""

    def __init__(self, width: int = 97, is_swapped: bool = False) -> None:
        super().__init__()
        layers = {"first": nn.Linear(31, width), "second": nn.Linear(width, 31)}
        for name in reversed(layers) if is_swapped else layers:
            setattr(self, name, layers[name])


def shard(nvme: Path, model: nn.Module, **fields: Any) -> None:
    settings = {
        "params": Tier.NVME,
        "optim": Tier.NVME,
        "paths": [nvme],
        "persistence_numel": 50,
        "timeout_s": 60.0,
    }
    tiermem.shard(model, OffloadPolicy(**(settings | fields))).close()


def initialize(given: Any = None, model: nn.Module | None = None, **keys: Any) -> None:
    engine, _, _, _ = tiermem.initialize(
        model=model or seeded(models.ShortTower), config=CONFIG | keys, optimizer=given
    )
    engine.close()


def build(nvme: Path, make: Callable[[], nn.Module], is_under_init: bool = True) -> None:
    """Builds under zero.Init and shards."""
    policy = OffloadPolicy(
        params=Tier.NVME, optim=Tier.NVME, paths=[nvme], persistence_numel=50, timeout_s=60.0
    )
    with Init(policy=policy, enabled=is_under_init):
        model = make()
    tiermem.shard(model, policy).close()


def groups(is_odd: bool) -> None:
    model = seeded(models.ShortTower)
    head = list(model.head.parameters())
    if is_odd:
        head += list(model.embed.parameters())
    rest = [param for param in model.parameters() if all(param is not each for each in head)]
    initialize(torch.optim.AdamW([{"params": rest}, {"params": head, "lr": 0.1}]), model)


def cases(is_odd: bool, nvme: Path) -> dict[str, Callable[[], None]]:
    """What each rank does; the odd one a little differently."""
    frozen = seeded(models.ShortTower)
    frozen.head.requires_grad_(not is_odd)
    return {
        "another policy": lambda: shard(
            nvme, seeded(models.ShortTower), persistence_numel=51 if is_odd else 50
        ),
        "another stage": lambda: shard(
            nvme,
            seeded(models.ShortTower),
            params=Tier.DEVICE,
            optim=Tier.DEVICE,
            stage=2 if is_odd else 3,
        ),
        "another model": lambda: shard(
            nvme, seeded(models.NanoGPT if is_odd else models.ShortTower)
        ),
        "other shapes": lambda: shard(nvme, Pair(96 if is_odd else 97)),
        "another order": lambda: shard(nvme, Pair(is_swapped=is_odd)),
        "another dtype": lambda: shard(
            nvme, seeded(models.ShortTower).to(torch.bfloat16 if is_odd else torch.float32)
        ),
        "other frozen parameters": lambda: shard(nvme, frozen),
        "another MiCS group": lambda: shard(
            nvme, seeded(models.ShortTower), shard_group_size=1 if is_odd else None
        ),
        "another mesh": lambda: tiermem.shard(
            seeded(models.ShortTower), OffloadPolicy(), mesh_of(is_odd)
        ),
        "a second copy": lambda: shard(
            nvme, seeded(models.ShortTower), secondary_group_size=3 if is_odd else 1
        ),
        "another way to gather": lambda: shard(
            nvme, seeded(models.ShortTower), quantised_gather=is_odd
        ),
        "another MiCS group in the config": lambda: initialize(
            zero_optimization={"stage": 3, "mics_shard_size": 1 if is_odd else 3}
        ),
        "another number of ranks on its node": lambda: elsewhere(is_odd, nvme),
        "another accumulation": lambda: initialize(gradient_accumulation_steps=2 if is_odd else 1),
        "another clipping": lambda: initialize(gradient_clipping=0.5 if is_odd else 1.0),
        "another learning rate": lambda: initialize(
            optimizer={"type": "AdamW", "params": {"lr": 0.1 if is_odd else 1e-3}}
        ),
        "another schedule": lambda: initialize(
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9 if is_odd else 10}}
        ),
        "other parameter groups": lambda: groups(is_odd),
        "other shapes under Init": lambda: build(nvme, lambda: Pair(96 if is_odd else 97)),
        "fewer layers under Init": lambda: build(
            nvme, lambda: nn.Linear(31, 97) if is_odd else Pair()
        ),
        "no Init": lambda: build(nvme, Pair, is_under_init=not is_odd),
    }


def mesh_of(is_odd: bool) -> DeviceMesh:
    """Three shards, or three copies."""
    meshes = [DeviceMesh("cpu", [[0, 1, 2]], mesh_dim_names=("replica", "shard"))]
    meshes.append(DeviceMesh("cpu", [[0], [1], [2]], mesh_dim_names=("replica", "shard")))
    return meshes[is_odd]


def other_groups(rank: int, nvme: Path) -> None:
    """The odd rank shares its model with rank 0 alone, which shares it with all."""
    pair = dist.new_group([0, ODD])
    tiermem.shard(
        seeded(models.ShortTower), OffloadPolicy(timeout_s=60.0), pair if rank == ODD else None
    )


def one_is_late(rank: int, nvme: Path) -> None:
    """Two models on different groups, one after the other, with a rank that keeps the others
    waiting."""
    pair = dist.new_group([0, ODD])
    if rank == 0:
        time.sleep(3.5)
    for group in (pair, None):
        if group is None or rank in (0, ODD):
            tiermem.shard(seeded(models.ShortTower), OffloadPolicy(timeout_s=60.0), group).close()


def elsewhere(is_odd: bool, nvme: Path) -> None:
    """A node with fewer ranks would have more memory for each, and plan otherwise."""
    if is_odd:
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        shard(nvme, seeded(models.ShortTower))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)


def body(rank: int, nvme: Path) -> dict[str, str]:
    found = {}
    for name, case in cases(rank == ODD, nvme).items():
        try:
            case()
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


if __name__ == "__main__":
    out = Path(sys.argv[1])
    bodies = {"disagreeing": body, "other groups": other_groups, "one is late": one_is_late}
    found = run_worlds({name: World(each, NUM_RANKS) for name, each in bodies.items()}, out)
    (out / "found.json").write_text(
        json.dumps({name: [rank._asdict() for rank in ranks] for name, ranks in found.items()})
    )
