"""shard: makes a plain PyTorch model a sharded one, and attaches the saver of durable steps where
the policy asks for it."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tiermem.checkpoint.saving.saver import Saver
from tiermem.engine.room import choose_policy
from tiermem.engine.second_plan import follow_memory
from tiermem.policy import OffloadPolicy, check_kind, check_model
from tiermem.run.init_params import built_with
from tiermem.run.shards import Shards
from tiermem.swap.memory.accelerator import find_device, is_accelerator


def shard(
    model: nn.Module,
    policy: OffloadPolicy | Literal["auto"] | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    is_trained: bool = True,
) -> Shards:
    """Partitions a model's parameters over the ranks of a group and moves each part to its home
    tier.

    Args:
        model: any module, built plainly or under `tiermem.zero.Init`; its parameters keep their
            identity.
        policy: the tiers of all states. "auto": those with the fastest plan that the free memory
            holds (`choose_policy`, which can be told the batch), for ranks of one group. Default:
            "auto" where a model is trained on an accelerator, else all states in memory.
        group: data-parallel ranks, or a mesh of them (one dimension, or replicas and shards: MiCS).
            Default: the group of the zero.Init that built the model, else the world. Ranks that a
            launcher (torchrun) started make the process group here if there is none yet. All ranks
            take rank 0's weights.
        device: the device that computes and holds the model's parameters and buffers from now on;
            default: this rank's accelerator, else the CPU.
        is_trained: False for inference: the plan leaves no memory for gradients and optimizer
            states.

    Collective; blocks. Raises ValueError, with the arithmetic, when the policy cannot be met, and
    OSError when a path is missing, not writable or too full; both before any weight is moved.
    """
    check_model(model)
    is_one_group = not isinstance(group, DeviceMesh)
    if policy is None and is_trained and is_one_group and is_accelerator(find_device(device)):
        policy = "auto"
    if policy == "auto":
        if isinstance(group, DeviceMesh):
            raise ValueError('policy "auto" is for ranks in one group: give an OffloadPolicy')
        policy = choose_policy(model, device=device, group=group or built_with(model).group)
    check_kind(policy)
    if policy is not None and policy.accumulation == "layers":
        raise ValueError(
            "accumulation \"layers\" is the engine's and TiermemTrainer's, which see all "
            "micro-batches of a step: use "
            'tiermem.initialize and engine.train_batch, or set it to "batches"'
        )
    return shard_for_passes(model, policy or OffloadPolicy(), group, device, is_trained)


def shard_for_passes(
    model: nn.Module,
    policy: OffloadPolicy,
    group: dist.ProcessGroup | DeviceMesh | None,
    device: torch.device | str | None,
    is_trained: bool,
) -> Shards:
    """`shard` for a caller that runs the micro-batches of accumulation "layers" itself
    (run/layerwise.py)."""
    shards = Shards(model, policy, group, device, is_trained)
    if shards.policy.durability == "step":
        shards.attach(Saver(shards, saves_each_step=True))
    follow_memory(shards)
    return shards
