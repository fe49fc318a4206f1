"""shard: a plain PyTorch model becomes a sharded one, with its optimizer's states and its durable steps attached."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tiermem.checkpoint.saving.saver import Saver
from tiermem.policy import OffloadPolicy
from tiermem.zero.shards import Shards


def shard(
    model: nn.Module,
    policy: OffloadPolicy | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    is_trained: bool = True,
) -> Shards:
    """Partitions a model's parameters over the ranks of a group and sends each part to its home.

    Args:
        model: any module, built plainly or under `tiermem.zero.Init`; its parameters keep their identity.
        policy: where things rest; the default keeps everything in memory.
        group: data-parallel ranks, or a mesh of them (one dimension, or replicas and shards: MiCS); default: those of the
            zero.Init that it was built under, or the world. Ranks that a launcher has started (torchrun) make the process
            group here if there is none yet. Rank 0's weights win.
        device: where the maths runs, and where the model's parameters and buffers are from then on; default: this rank's
            accelerator, or the CPU of a machine without one.
        is_trained: False for inference: no room is made for gradients and optimizer states.

    Collective and blocking. Raises ValueError when the policy cannot be met (with the arithmetic) and OSError when a path is
    missing, not writable or too full, both before any weight has been moved.
    """
    shards = Shards(model, policy or OffloadPolicy(), group, device, is_trained)
    if shards.policy.durability == "step":
        shards.attach(Saver(shards, saves_each_step=True))
    return shards
