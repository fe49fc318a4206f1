"""Does to `optimizer.state` what resets do, and closes optimizers; run once per rank by
test_state_face_on_ranks.py.

state_face_on_ranks.py OUT NVME CASE...     writes OUT/<rank>.pt: {case: {"losses", "twin's"}, "refused": the error's text}

Every rank sees the same batches, so that a plain model on one rank has the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from launch import as_rank
from programs.models import Tower
from programs.twins import seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier


def clear(optim: Any) -> None:
    optim.state.clear()


def zero(optim: Any) -> None:
    for entry in optim.state.values():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            entry[name].zero_()


def assign(optim: Any) -> None:
    numbers = torch.Generator().manual_seed(5)
    for group in optim.param_groups:
        for param in group["params"]:
            moment = torch.rand(param.shape, generator=numbers)
            optim.state[param] |= {"exp_avg": 0.01 * moment, "exp_avg_sq": 0.01 * moment}


CHANGES: dict[str, Callable[[Any], None]] = {"clear": clear, "zero": zero, "assign": assign}
STAGES = (1, 3)
CASES = [
    f"{name}, stage {stage}" for name in (*CHANGES, "second optimizer", "jvp") for stage in STAGES
]


def adam(library: Any, model: nn.Module) -> Any:
    return library.AdamW(model.parameters(), lr=1e-2)


def run(case: str, nvme: Path) -> dict[str, Any]:
    name, _, stage = case.partition(", stage ")
    params = Tier.NVME if stage == "3" else Tier.DEVICE
    policy = OffloadPolicy(
        stage=int(stage),
        params=params,
        optim=Tier.NVME,
        paths=[nvme],
        persistence_numel=50,
        tile_numel=4096,  # type: ignore[arg-type]
    )
    model, twin = seeded(Tower), seeded(Tower)
    found: dict[str, Any] = {}
    with tiermem.shard(model, policy):
        optims = [adam(tiermem, model), adam(torch.optim, twin)]
        losses = [
            train_steps(each, optim, range(3))
            for each, optim in zip((model, twin), optims, strict=True)
        ]
        if name in CHANGES:
            for optim in optims:
                CHANGES[name](optim)
        if name == "second optimizer":
            optims[0].close()
            optims = [
                library.SGD(each.parameters(), lr=0.1)
                for library, each in ((tiermem, model), (torch.optim, twin))
            ]
        if name == "jvp":
            for each, of in zip((model, twin), losses, strict=True):
                hidden = torch.ones(4, each.head.weight.shape[1])
                of.append(torch.func.jvp(each.layers[0], (hidden,), (hidden,))[1].sum().item())
        if case == "clear, stage 3":
            train_steps(model, optims[0], [7])
            train_steps(twin, optims[1], [7])
            try:
                optims[0].state[model.head.weight]["exp_avg"].norm()
            except RuntimeError as error:
                found["refused"] = str(error)
        for each, optim, of in zip((model, twin), optims, losses, strict=True):
            of += train_steps(each, optim, range(3, 6))
    return found | {"losses": losses[0], "twin's": losses[1]}


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme, *names)):
        torch.save({case: run(case, Path(nvme)) for case in CASES if case in names}, out)
