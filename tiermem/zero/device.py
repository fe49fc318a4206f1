"""Device: where the maths of a model runs, and what a policy may not ask of it."""

from __future__ import annotations

import torch
from torch import nn

from tiermem.policy import OffloadPolicy, Tier


def device_of(model: nn.Module) -> torch.device:
    """Where the maths of a model runs unless it is told otherwise: where its parameters are, or the GPU for those on meta."""
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_device(policy: OffloadPolicy, device: torch.device, is_trained: bool) -> None:
    """Raises ValueError for optimizer states that should stay on a GPU."""
    if device.type == "cuda" and policy.optim is Tier.DEVICE and is_trained:
        raise ValueError(
            "optim=DEVICE on a GPU: optimizer states step on the CPU here. Set optim=Tier.HOST or Tier.NVME (in a config: "
            'offload_optimizer: {"device": "cpu"})'
        )
