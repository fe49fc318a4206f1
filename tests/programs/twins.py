"""Twins: small models, the same training loop for plain PyTorch and for sharded models, and how
their results are compared.

A *twin* is the plain model that a sharded one is held against: same seed, same data, same steps.
`train` returns what a run leaves behind (losses, weights, states, bytes read), `assert_same`
compares two of them to the bit.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Before there is a group, which it would hold: ranks/joining.py.
import torch.distributed.nn.functional
from torch import nn
from torch.nn import functional as F

import tiermem
from programs.models import VOCAB, logits_of
from tiermem import OffloadPolicy
from tiermem.units.state_layout import MASTER


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def batch(
    step: int, samples: int = 2, length: int = 11, vocab: int = VOCAB
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(
        0, vocab, (samples, length + 1), generator=torch.Generator().manual_seed(1000 + step)
    )
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(
    model: Callable[[torch.Tensor], Any], step: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    inputs, targets = (each.to(device) for each in batch(step))
    return F.cross_entropy(logits_of(model(inputs)).flatten(0, 1).float(), targets.flatten())


def train_steps(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    steps: Iterable[int],
    loss_of: Callable[[nn.Module, int], torch.Tensor] = loss_of,
    **of_step: Any,
) -> list[float]:
    """The plain loop: one forward, backward and step for each number in `steps`. Returns the
    losses.

    of_step: arguments of `optim.step`.
    """
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optim.step(**of_step)
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def train_engine(
    engine: tiermem.Engine, micros: Iterable[int], loss_of: Callable[..., torch.Tensor] = loss_of
) -> list[float]:
    """An engine's loop over micro-batches: it steps when it has seen enough of them. Returns the
    losses."""
    losses = []
    for micro in micros:
        loss = loss_of(engine, micro, engine.device)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@dataclasses.dataclass
class Result:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    read_bytes: int


def train(
    model: nn.Module,
    policy: OffloadPolicy,
    num_steps: int = 4,
    max_norm: float = 0.0,
    optimizer: type[tiermem.AdamW] | type[tiermem.Adam] = tiermem.AdamW,
    **settings: Any,
) -> Result:
    """Trains a copy of the model under a policy and returns all that the run computed."""
    model = copy.deepcopy(model)
    with tiermem.shard(model, policy) as shards:
        optim = optimizer(model.parameters(), **({"lr": 1e-2} | settings))
        losses = train_steps(model, optim, range(num_steps), max_norm=max_norm)
        return Result(
            losses,
            dict(model.state_dict()),
            states_of(shards, optim),
            shards.store.stats().nvme_read_bytes,
        )


def states_of(
    shards: tiermem.Shards, optim: tiermem.optim.NativeOptimizer
) -> dict[str, torch.Tensor]:
    """Every state of every parameter that is trained, whatever its optimizer keeps."""
    tiles = optim.tiles_of(shards)
    return {
        f"{shard.name}.{name}": tiles.state(shard, name)
        for live, shard in shards.parameters()
        if live.unit.is_trainable
        for name in (MASTER, *tiles.names(shard))
    }


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the values of its state dict."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without and with another rate."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 3e-3},
    ]


def flat_states(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The states in an optimizer's state dict, by number and name."""
    return {
        f"{number}.{name}": value
        for number, entry in state_dict["state"].items()
        for name, value in entry.items()
    }


def assert_same(a: Result, b: Result) -> None:
    """Equal to the bit: losses, weights and states."""
    assert a.losses == b.losses
    assert_same_tensors(a.weights, b.weights)
    assert_same_tensors(a.states, b.states)


def assert_near(
    mine: dict[str, list[float]], expected: dict[str, list[float]], rel: float, least: float
) -> None:
    """Numbers by name that differ by at most `rel` of what is expected, or by `least`
    (pytest.approx takes seconds)."""
    assert mine.keys() == expected.keys()
    for name, values in expected.items():
        a, b = (torch.tensor(each, dtype=torch.float64) for each in (mine[name], values))
        assert a.shape == b.shape, name
        allowed = (rel * b.abs()).clamp(min=least)
        assert ((a - b).abs() <= allowed).all(), f"{name}: up to {(a - b).abs().max():.3g} apart"


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    unequal = [name for name in a if not torch.equal(a[name], b[name])]
    assert not unequal, f"differ: {unequal}"


def is_absent(param: torch.nn.Parameter) -> bool:
    """Whether a parameter's memory is the placeholder for values that are elsewhere; reading it
    would lend the values."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(param.isnan().all())


class MasterTwin:
    """The hand-written twin: AdamW with clipping on fp32 masters of a model of any precision, in
    plain tensor operations.

    Nothing of tiermem is in it. It steps a plain model from its `p.grad` and rounds where a trainer
    with fp32 masters has to round: gradients as autograd leaves them (and as they are added up
    before they come here), arithmetic in fp32, the weight as the rounded master.
    """

    def __init__(self, model: nn.Module, lr: float, decay: float, max_norm: float) -> None:
        self.model, self.lr, self.decay, self.max_norm = model, lr, decay, max_norm
        self.masters = {p: p.detach().float().clone() for p in model.parameters()}
        self.first = {p: torch.zeros_like(m) for p, m in self.masters.items()}
        self.second = {p: torch.zeros_like(m) for p, m in self.masters.items()}
        self.num_steps = 0
        self.norm = 0.0  # of the last step, before clipping

    @torch.no_grad()
    def step(
        self, divisor: float = 1.0, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8
    ) -> None:
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
            # torch's own fp32 sqrt (MKL) is an ulp off in one of six
            root = second.double().sqrt().float()
            denominator = root * (1.0 / math.sqrt(1.0 - beta2**self.num_steps)) + eps
            master -= (self.lr / (1.0 - beta1**self.num_steps)) * (first / denominator)
            p.copy_(master)
            p.grad = None
