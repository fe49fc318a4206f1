"""Choice: the policy of a model that a training loop brings: given, read from a config, or computed
from the free memory (engine/room.py).

    OffloadPolicy    taken as it is
    config           a DeepSpeed-style dict or JSON file; "auto" and missing values are the training loop's
    "auto"           the fastest that the free memory of this machine holds, by predicted time; what activations take of it
                     is found by a run on tensors without values

The optimizer of the loop decides how many moments the plan makes room for.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tiermem.config.load import Given
from tiermem.engine.room import choose_policy
from tiermem.engine.sharding import shard
from tiermem.policy import OffloadPolicy, check_kind
from tiermem.run.shards import Shards
from tiermem.swap.memory.accelerator import is_accelerator

Asked = OffloadPolicy | Given
"""A policy, a DeepSpeed-style config (a dict, or the path of a JSON file), or "auto"."""

AUTO = "auto"


def shard_as_asked(
    model: nn.Module,
    asked: OffloadPolicy | None,
    num_moments: int,
    device: torch.device,
    is_trained: bool,
) -> Shards:
    """Shards a model with the policy that is asked for, else with "auto" where it is trained on an
    accelerator (num_moments above 0). Collective; blocks. Raises ValueError."""
    check_kind(asked)
    policy = with_moments(asked or OffloadPolicy(), num_moments, None)
    if asked is None and num_moments and is_accelerator(device):
        policy = choose_policy(model, policy, device=device)
    found = shard(model, policy, device=device, is_trained=is_trained)
    mark(found)
    return found


def with_moments(policy: OffloadPolicy, num_moments: int, keep: int | None) -> OffloadPolicy:
    """Returns a policy that makes room for these moments and keeps at least `keep` durable steps in
    the store's files."""
    return dataclasses.replace(policy, num_moments=num_moments, keep=max(policy.keep, keep or 1))


def mark(shards: Shards) -> None:
    """Sets the attributes of `_Marks`, once."""
    if shards.find_attached(_Marks) is None:
        shards.attach(_Marks(shards))


class _Marks:
    """What other libraries read from attributes of a sharded model; they go when it is closed.

    _is_fsdp_managed_module    on several ranks, which must call the model together: transformers' `generate` then goes
                               on until the last rank has ended; it was made for FSDP, which needs the same
    _is_accelerate_prepared    Accelerate sets it, and wraps the model in no DDP from then on
    """

    keeps_files = False

    def __init__(self, shards: Shards) -> None:
        self._modules = list(shards.model.modules())
        for module in self._modules if shards.topology.world > 1 else ():
            if hasattr(module, "generate"):
                module._is_fsdp_managed_module = True  # type: ignore[assignment]

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Removes the attributes."""
        for module in self._modules:
            for name in ("_is_fsdp_managed_module", "_is_accelerate_prepared"):
                vars(module).pop(name, None)
