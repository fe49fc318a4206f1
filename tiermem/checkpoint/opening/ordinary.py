"""Ordinary: what the optimizer steps beside the sharded model is put back: tensors that every rank has for itself.

They are named `optimizer.<name>`, by the name that torch's optimizers know, else their number. Where ranks had different
values each takes its own again, if they are as many; else all take rank 0's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiermem.checkpoint.format.manifest import MASTER, WEIGHT
from tiermem.checkpoint.opening.fitting import shown
from tiermem.checkpoint.opening.source import Source
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.ordinary import STEP
from tiermem.zero import registry
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.shards import Shards

_ROLE = "ordinary"


def check_ordinary(source: Source, optimizer: NativeOptimizer) -> None:
    """Raises ValueError when other ordinary parameters were saved than the optimizer steps, with both lists."""
    own = dict(_ordinary(optimizer))
    saved = {each.name: each for each in source.manifest.parameters if each.role == _ROLE}
    missing, extra = [n for n in own if n not in saved], [n for n in saved if n not in own]
    if missing or extra:
        raise ValueError(
            f"{source.file} does not fit what the optimizer steps beside the sharded model. Missing in the checkpoint: "
            f"{shown(missing)}. Not in the optimizer: {shown(extra)}"
        )
    wrong = [name for name, param in own.items() if tuple(param.shape) != saved[name].shape]
    if wrong:
        raise ValueError(f"{source.file}: {shown(wrong)} has another shape than in the optimizer")


def put_ordinary(source: Source, optimizer: NativeOptimizer, topology: Topology) -> None:
    """Puts weights and states back. Blocks; raises OSError."""
    entries: dict[nn.Parameter, dict[str, Any]] = {}
    for name, param in _ordinary(optimizer):
        entries[param] = _entry(source, name, param, topology)
    optimizer.restore_ordinary(entries)


def _entry(source: Source, name: str, param: nn.Parameter, topology: Topology) -> dict[str, Any]:
    """A parameter's states as state dicts have them, its weight put in place."""
    states = source.states(name)
    variant = f".rank{topology.rank}" if source.manifest.world == topology.world else ""

    def values(state: str) -> torch.Tensor:
        own = state + variant if state + variant in states else state
        return source.fp32(name, own, 0, param.numel()).view(param.shape)

    if param.numel():
        with torch.no_grad():
            param.copy_(values(WEIGHT))
    num_steps = source.parameters[name].num_steps
    kept = [each for each in states if "." not in each and each not in (WEIGHT, MASTER)]
    found: dict[str, Any] = {STEP: torch.tensor(float(num_steps))} | {each: values(each) for each in kept}
    if MASTER in states:
        found[MASTER] = values(MASTER)
    return found if num_steps or kept else {}


def _ordinary(optimizer: NativeOptimizer) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"optimizer.{name}", param)
        for name, param in optimizer.named()
        if not isinstance(registry.keeper_of(param), Shards)
    ]
