"""Run once per rank by test_init_on_ranks.py: builds models under zero.Init, which makes the
process group itself.

init_on_ranks.py OUT CASE...    writes OUT/<rank>.json: what every case leaves, and how far large models raised the peak
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from programs.models import Tower
from torch import nn
from torch.nn import functional as F

import tiermem
from tiermem import OffloadPolicy
from tiermem.zero import Init

SIZES = ((1024, 32), (4096, 5))
"""(width, blocks) of models whose peak is measured: matrices of 4 MiB and of 64 MiB."""
RANK = int(os.environ.get("RANK", "0"))


class InitialisesItself(Tower):
    """As a library's model does it: a method of the model, applied from its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.uniform_(module.bias)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)


class Large(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(num_blocks):
            self.layers.append(Block(width))
        self.apply(
            lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None
        )


def applied() -> nn.Module:
    def fill(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            param.data.fill_(1 + RANK)

    return Tower().apply(fill)


def written() -> nn.Module:
    model = Tower()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.full(param.shape, 1.0 + RANK))
            param.mul_(2 + RANK)
            param.data = param.data + F.relu(param)
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "unseeded": InitialisesItself,
    "apply": applied,
    "written": written,
}


def main(out: Path, names: list[str]) -> None:
    found: dict[str, object] = {}
    for name, build in CASES.items():
        for persistence_numel in (0, 50, 1 << 20):
            if f"{name}, {persistence_numel}" in names:
                policy = OffloadPolicy(persistence_numel=persistence_numel)
                found[f"{name}, {persistence_numel}"] = values_of(build, policy)
    for width, num_blocks in SIZES:
        found[f"peak {width}"] = peak_of_building(width, num_blocks)
    (out / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def values_of(build: Callable[[], nn.Module], policy: OffloadPolicy) -> dict[str, list[float]]:
    """What a model that was built with a seed of each rank's own holds once it is sharded."""
    torch.manual_seed(RANK)
    with Init(policy=policy):
        model = build()
    with tiermem.shard(model, policy):
        return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def peak_of_building(width: int, num_blocks: int) -> int:
    """Growth of peak resident memory in bytes while a model of `num_blocks` matrices is built.

    The growth is over what this process holds before: libraries, the process group, hooks.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = status("VmRSS")
    with Init(policy=OffloadPolicy()):
        model = Large(width, num_blocks)
    peak = status("VmHWM") - before
    del model
    return peak


def status(key: str) -> int:
    found = re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
