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
    set_called_together(model, found.topology.world > 1)
    return found


def with_moments(policy: OffloadPolicy, num_moments: int, keep: int | None) -> OffloadPolicy:
    """Returns a policy that makes room for these moments and keeps at least `keep` durable steps in
    the store's files."""
    return dataclasses.replace(policy, num_moments=num_moments, keep=max(policy.keep, keep or 1))


def set_called_together(model: nn.Module, is_so: bool) -> None:
    """Says whether all ranks must call a model together: transformers' `generate` then goes on
    until the last rank has ended.

    transformers asks for it by this attribute; it was made for FSDP, which needs the same.
    """
    for module in model.modules():
        if is_so and hasattr(module, "generate"):
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
        else:
            module.__dict__.pop("_is_fsdp_managed_module", None)
