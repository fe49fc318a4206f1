"""Programs: torch.compile of blocks or of the model, before and after sharding.

Backends are eager (what is traced, run as it is) and aot_eager (backward is traced too): all of
torch.compile but the code that it would write, for which a test would need a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from programs import models
from programs.faces import Face, Found, Program
from programs.twins import loss_of

Compile = Callable[[nn.Module, Any], None]
BACKENDS = ("eager", "aot_eager")


def by_forward(model: nn.Module, backend: Any) -> None:
    """The inside of each block, in one graph: nothing of sharding is in it."""
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def by_call(model: nn.Module, backend: Any) -> None:
    for block in model.layers:
        block.compile(backend=backend)


def by_wrapping(model: nn.Module, backend: Any) -> None:
    for index in range(len(model.layers)):
        model.layers[index] = torch.compile(model.layers[index], backend=backend)


def by_calling_the_model(model: nn.Module, backend: Any) -> None:
    model.compile(backend=backend)


WAYS: dict[str, Compile] = {
    "by forward": by_forward,
    "by call": by_call,
    "by wrapping": by_wrapping,
    "the model": by_calling_the_model,
}


def train_compiled(
    face: Face, way: str, is_before: bool, backend: str | Callable[..., Any]
) -> Found:
    """Three steps, each with an evaluation after it. A backend of one's own is called for every
    graph."""
    torch.compiler.reset()
    model = models.ShortTower(num_blocks=10)
    if is_before:
        WAYS[way](model, backend)
    model = face.shard(model)
    if not is_before:
        WAYS[way](model, backend)
    optim = face.adamw(model.parameters())
    losses = []
    for step in range(3):
        loss = loss_of(model, face.sample(step))
        loss.backward()
        face.step(optim)
        losses.append(loss.item())
        with torch.no_grad():
            losses.append(loss_of(model, 90 + step).item())
    torch.compiler.reset()
    return {"losses": losses, "weights": face.weights(model)}


PROGRAMS: dict[str, Program] = {
    f"{way}, {'before' if is_before else 'after'} sharding, {backend}": functools.partial(
        train_compiled, way=way, is_before=is_before, backend=backend
    )
    for way in WAYS
    for is_before in (True, False)
    for backend in BACKENDS
}
