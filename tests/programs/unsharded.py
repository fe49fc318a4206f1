"""Programs: small models trained in plain PyTorch, on any device, which the simulated device must
compute as the CPU does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from programs.models import VOCAB, NanoGPT

WIDTH = 16


def transformer(checkpoint: bool | None = None) -> nn.Module:
    """Two blocks with two heads and dropout. A move to another device would untie what is tied."""
    return NanoGPT(
        WIDTH, num_layers=2, num_heads=2, dropout=0.1, is_tied=False, checkpoint=checkpoint
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 40), nn.SiLU(), nn.Linear(40, VOCAB)
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A training run. Two runs of one program that differ in the device leave the same bits."""

    build: Callable[[], nn.Module] = transformer
    autocast: torch.dtype | None = None
    num_steps: int = 5
    num_micro: int = 2


class Trained(NamedTuple):
    losses: list[float]
    # parameters, the last gradients, and optimizer states, on the CPU
    tensors: dict[str, torch.Tensor]


def train(program: Program, device: str) -> Trained:
    torch.manual_seed(0)
    model = program.build().to(device)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(1)
    losses = []
    for step in range(program.num_steps):
        optim.zero_grad()
        for micro in range(program.num_micro):
            tokens = torch.randint(
                0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(100 * step + micro)
            ).to(device)
            with torch.autocast(
                torch.device(device).type, program.autocast, enabled=program.autocast is not None
            ):
                logits = model(tokens[:, :-1])
            loss = (
                F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                / program.num_micro
            )
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optim.step()
    tensors = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors[f"{name}.grad"] = parameter.grad.cpu()
        tensors |= {f"{name}.{key}": value.cpu() for key, value in optim.state[parameter].items()}
    return Trained([loss.item() for loss in losses], tensors)


def assert_same(found: Trained, expected: Trained) -> None:
    """Equal to the bit."""
    assert found.losses == expected.losses
    different = [
        name
        for name, tensor in expected.tensors.items()
        if not torch.equal(found.tensors[name], tensor)
    ]
    assert found.tensors.keys() == expected.tensors.keys() and not different
