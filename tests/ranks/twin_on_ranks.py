"""Launched by test_twins.py: trains cases of the matrix on all ranks, beside their twins.

twin_on_ranks.py FOLDER NVME CASE...     every rank writes {case: {"ours": Run, "twin": Run, "ddp": Run}}

Twins have the same weights, batches and settings, and keep everything in memory:

    twin   the model in the case's precision on every rank, gradients added up over ranks and micro-batches in their own
           dtype, fp32 masters (programs/twins.py); ranks are added first where the stage reduces
           every micro-batch
    ddp    fp32 only: DistributedDataParallel with torch's own AdamW and clipping
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from programs import models
from programs.twins import MasterTwin, loss_of, seeded
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twin_cases import (
    ALL,
    DECAY,
    LOSS_SCALE,
    LR,
    MAX_NORM,
    NUM_STEPS,
    Case,
    Run,
    config_of,
)

import tiermem
from tiermem.zero import Init

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Twins:
    """Trains twins once for all the cases that share them."""

    def __init__(self) -> None:
        self._trained: dict[Any, Run] = {}

    def beside(self, case: Case) -> dict[str, Run]:
        ranks_first = case.stage >= 2
        key = (case.precision, case.accumulation, ranks_first)
        if key not in self._trained:
            self._trained[key] = train_twin(case.precision, case.accumulation, ranks_first)
        found = {"twin": self._trained[key]}
        if case.precision == "fp32":
            if case.accumulation not in self._trained:
                self._trained[case.accumulation] = train_ddp(case.accumulation)
            found["ddp"] = self._trained[case.accumulation]
        return found


def train_all(cases: list[Case], nvme: Path) -> dict[str, dict[str, Run]]:
    """Trains cases and their twins. Collective."""
    twins = Twins()
    return {str(case): {"ours": train(case, nvme)} | twins.beside(case) for case in cases}


def train(case: Case, nvme: Path) -> Run:
    config = config_of(case, nvme)
    torch.manual_seed(_rank())  # rank 0's weights win
    inside = Init(config_dict_or_path=config) if case.is_built_by_init else contextlib.nullcontext()
    with inside:
        model = models.tied_tower() if _rank() else seeded(models.tied_tower)
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    run = Run([], [], {})
    for micro in range(NUM_STEPS * case.accumulation):
        loss = loss_of(engine, _sample(micro))
        engine.backward(loss)
        run.losses.append(loss.item())
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_last:
            run.norms.append(engine.get_global_grad_norm())
    run.weights = {name: value.clone() for name, value in model.state_dict().items()}
    run.read_bytes = engine.shards.store.stats().nvme_read_bytes
    engine.close()
    return run


def train_twin(precision: str, accumulation: int, ranks_first: bool) -> Run:
    model = seeded(models.tied_tower).to(_DTYPES[precision])
    twin = MasterTwin(model, LR, DECAY, MAX_NORM)
    scale = LOSS_SCALE if precision == "fp16" else 1.0
    run = Run([], [], {})
    for step in range(NUM_STEPS):
        added: dict[nn.Parameter, torch.Tensor] = {}
        for micro in range(accumulation):
            loss = loss_of(model, _sample(step * accumulation + micro))
            (loss / accumulation * scale if accumulation > 1 else loss * scale).backward()
            run.losses.append(loss.item())
            if ranks_first or micro == accumulation - 1:
                for param in model.parameters():
                    _add_up(param.grad)
                    added[param] = param.grad if param not in added else added[param] + param.grad
                    param.grad = None
        for param, grad in added.items():
            param.grad = grad
        twin.step(scale * _world())
        run.norms.append(twin.norm)
    run.weights = dict(model.state_dict())
    return run


def train_ddp(accumulation: int) -> Run:
    plain = seeded(models.tied_tower)
    model = DistributedDataParallel(plain) if dist.is_initialized() else plain
    optim = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    run = Run([], [], {})
    for step in range(NUM_STEPS):
        for micro in range(accumulation):
            model.require_backward_grad_sync = micro == accumulation - 1
            loss = loss_of(model, _sample(step * accumulation + micro))
            (loss / accumulation).backward()
            run.losses.append(loss.item())
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optim.step()
        optim.zero_grad()
    run.weights = dict(plain.state_dict())
    return run


def _add_up(grad: torch.Tensor) -> None:
    """Adds a gradient up over ranks, in its own dtype and in the order of ranks."""
    if dist.is_initialized():
        every = [torch.empty_like(grad) for _ in range(_world())]
        dist.all_gather(every, grad.contiguous())
        grad.copy_(functools.reduce(torch.add, every))


def _sample(micro: int) -> int:
    return _rank() + 10 * micro


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def main() -> None:
    with as_rank() as (_, out, (nvme, *names)):
        cases = [case for case in ALL if str(case) in names]
        torch.save(train_all(cases, Path(nvme)), out)


if __name__ == "__main__":
    main()
