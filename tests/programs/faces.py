"""One program, two faces: a training loop as a user writes it, run on plain PyTorch and on sharded
models.

    expected = run(program, Plain());  assert compare(run(program, Sharded(policy)), expected) == []

    def program(face: Face) -> Found:
        model = face.shard(build())
        optim = face.adamw(model.parameters(), lr=1e-2)
        ...
        face.step(optim)

A Plain face leaves models as they are and, on several ranks, adds gradients up as
DistributedDataParallel does. What a program returns is compared to the bit: numbers, tensors, and
containers of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tiermem
from tiermem import OffloadPolicy

Found = dict[str, Any]
Program = Callable[["Face"], Found]


class Face:
    """What a program may ask for. `step` ends a step: gradients of all ranks, the optimizer,
    zeroing."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    def shard(self, model: nn.Module, **fields: Any) -> nn.Module:
        """The model, ready to be trained; `fields` are a policy's."""
        raise NotImplementedError

    def reduce(self, params: Iterable[nn.Parameter]) -> None:
        """Before anything looks at gradients of all ranks."""
        raise NotImplementedError

    def gradient(self, model: nn.Module, param: nn.Parameter) -> torch.Tensor | None:
        """The mean gradient over ranks, after `reduce`."""
        raise NotImplementedError

    def adamw(self, params: Any, **settings: Any) -> tiermem.AdamW:
        return tiermem.AdamW(params, **({"lr": 1e-2} | settings))

    def step(self, optim: torch.optim.Optimizer) -> None:
        self.reduce(p for group in optim.param_groups for p in group["params"])
        optim.step()
        optim.zero_grad()

    def sample(self, step: int) -> int:
        """A seed for this rank's data of a step."""
        return self.rank + 10 * step

    def weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def close(self) -> None:
        pass


class Plain(Face):
    def shard(self, model: nn.Module, **fields: Any) -> nn.Module:
        return model

    def reduce(self, params: Iterable[nn.Parameter]) -> None:
        if self.world > 1:
            for param in params:
                if param.grad is not None and param.grad.numel():
                    dist.all_reduce(param.grad)
                    param.grad /= self.world

    def gradient(self, model: nn.Module, param: nn.Parameter) -> torch.Tensor | None:
        return None if param.grad is None else param.grad.clone()


class Sharded(Face):
    """Shards every model under one policy.

    device: where it computes; default: the accelerator, or the CPU. folder: for what a program
    saves.
    """

    def __init__(
        self, policy: OffloadPolicy, device: str | None = None, folder: Path | None = None
    ) -> None:
        super().__init__()
        self.policy, self.device, self.folder = policy, device, folder
        self.read_bytes = 0
        """Bytes that were read from disks; known when it is closed."""
        self._shards: list[tiermem.Shards] = []

    def shard(self, model: nn.Module, **fields: Any) -> nn.Module:
        self._shards.append(self.open(model, **fields))
        return model

    def open(self, model: nn.Module, is_trained: bool = True, **fields: Any) -> tiermem.Shards:
        """As `shard`, for the caller to close."""
        policy = dataclasses.replace(self.policy, **fields)
        return tiermem.shard(model, policy, device=self.device, is_trained=is_trained)

    def reduce(self, params: Iterable[nn.Parameter]) -> None:
        pass

    def gradient(self, model: nn.Module, param: nn.Parameter) -> torch.Tensor | None:
        return self.shards_of(model).gradient(param)

    def shards_of(self, model: nn.Module) -> tiermem.Shards:
        return next(shards for shards in self._shards if shards.model is model)

    def close(self) -> None:
        while self._shards:
            shards = self._shards.pop()
            self.read_bytes += shards.store.stats().nvme_read_bytes
            shards.close()


def run(program: Program, face: Face) -> Found:
    """Runs a program from a fixed seed and ends what it has sharded."""
    torch.manual_seed(0)
    try:
        return program(face)
    finally:
        face.close()


def fit(
    face: Face,
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    num_steps: int = 3,
    **settings: Any,
) -> Found:
    """The loop that most programs are: everything that requires gradients is trained by one
    AdamW."""
    model = face.shard(model)
    optim = face.adamw([p for p in model.parameters() if p.requires_grad], **settings)
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
    return {"losses": losses, "weights": face.weights(model)}


def compare(found: Any, expected: Any, name: str = "") -> list[str]:
    """What differs, by name; values of no kind that is known here are compared by ==."""
    if isinstance(expected, torch.Tensor):
        return [] if same_tensor(found, expected) else [f"{name}: {off(found, expected)}"]
    if isinstance(expected, Mapping):
        if list(found) != list(expected):
            return [f"{name}: {list(found)} instead of {list(expected)}"]
        return [
            each for key in expected for each in compare(found[key], expected[key], f"{name}.{key}")
        ]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{name}: {len(found)} instead of {len(expected)}"]
        return [
            e
            for i, pair in enumerate(zip(found, expected, strict=True))
            for e in compare(*pair, f"{name}[{i}]")
        ]
    return [] if found == expected else [f"{name}: {found} instead of {expected}"]


def same_tensor(a: Any, b: torch.Tensor) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a, b)
    )


def off(a: Any, b: torch.Tensor) -> str:
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return (
            f"{type(a).__name__} {getattr(a, 'shape', '')} {getattr(a, 'dtype', '')} instead of "
            f"{b.shape} {b.dtype}"
        )
    return (
        f"{int((a != b).sum())} of {b.numel()} elements differ, by up to "
        f"{(a.double() - b.double()).abs().max():.3g}"
    )
