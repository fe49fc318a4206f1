"""The hand-written twin: AdamW with clipping on fp32 masters of a model of any precision, in plain tensor operations.

Nothing of tiermem is in it. It rounds where a trainer with fp32 masters has to round: gradients as autograd leaves them (and
as they are added up before they come here), arithmetic in fp32, the weight as the rounded master.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class MasterTwin:
    """Steps a plain model from its `p.grad`."""

    def __init__(self, model: nn.Module, lr: float, decay: float, max_norm: float) -> None:
        self.model, self.lr, self.decay, self.max_norm = model, lr, decay, max_norm
        self.masters = {p: p.detach().float().clone() for p in model.parameters()}
        self.first = {p: torch.zeros_like(m) for p, m in self.masters.items()}
        self.second = {p: torch.zeros_like(m) for p, m in self.masters.items()}
        self.num_steps = 0
        self.norm = 0.0  # of the last step, before clipping

    @torch.no_grad()
    def step(self, divisor: float = 1.0, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        """One step; gradients are divided by `divisor` (loss scale x ranks) on the way."""
        self.num_steps += 1
        squares = [p.grad.double().square().sum().item() for p in self.masters]
        self.norm = math.sqrt(math.fsum(squares)) / divisor
        clip = min(1.0, self.max_norm / (self.norm + 1e-6))
        for p, master in self.masters.items():
            grad = p.grad.float() * (clip / divisor)
            first, second = self.first[p], self.second[p]
            master *= 1.0 - self.lr * self.decay
            first += (grad - first) * (1.0 - beta1)
            second.copy_(second * beta2 + grad * grad * (1.0 - beta2))
            root = second.double().sqrt().float()  # torch's own fp32 sqrt (MKL) is an ulp off in one of six
            denominator = root * (1.0 / math.sqrt(1.0 - beta2**self.num_steps)) + eps
            master -= (self.lr / (1.0 - beta1**self.num_steps)) * (first / denominator)
            p.copy_(master)
            p.grad = None
