"""Scalars: what is saved beside the states, as JSON: the optimizer's groups, generators, schedules.

optimizer   {"name": "AdamW", "groups": [{"params": [names], "values": {"lr": 0.1, ...}}]}
rng         {"python", "numpy", "torch" [, "cuda" or another accelerator's name]}: the generators of this rank
others      the `state_dict()` of a scheduler, a loss scale or a loader; null where there is none
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiermem.checkpoint.format.plain import Json, encode
from tiermem.swap.accelerator import is_accelerator, rng_state
from tiermem.zero.shards import Shards

if TYPE_CHECKING:
    from tiermem.optim.base import NativeOptimizer


def optimizer_json(shards: Shards, optimizer: NativeOptimizer | None) -> Json:
    """The optimizer's class and its groups, parameters by their names in the manifest."""
    if optimizer is None:
        return None
    names = {id(shard.param): shard.name for _, shard in shards.parameters()}
    names |= {id(param): f"optimizer.{name}" for name, param in optimizer.named() if id(param) not in names}
    groups = [
        {
            "params": [names[id(param)] for param in group["params"]],
            "values": encode(
                {key: value for key, value in group.items() if key not in ("params", "param_names")},
                f"optimizer.param_groups[{number}]",
            ),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    return {"name": type(optimizer).__name__, "groups": groups}


def rng_json(device: torch.device) -> Json:
    """This rank's generators."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if is_accelerator(device):
        found[device.type] = rng_state(device)
    return encode(found, "rng")


def state_json(owner: Any, where: str) -> Json:
    """What an object's `state_dict()` returns; null for None and for what has none. Raises TypeError, naming the place."""
    state = getattr(owner, "state_dict", None)
    return None if state is None else encode(state(), where)
