"""Run once per rank by test_reduced_dtypes.py: reduces gradients of two ranks and says what came of
them.

reduce_on_ranks.py OUT CASE...    writes OUT/<rank>.pt: {case: {parameter: whether its gradient is the sum in each dtype}}
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from programs import models
from programs.twins import loss_of, seeded
from torch import nn

import tiermem

AUTOCAST = {"enabled": True, "dtype": "bf16"}
CASES: dict[str, dict[str, Any]] = {
    "nothing asked": {},
    "communication fp16": {"communication_data_type": "fp16"},
    "communication bf16": {"communication_data_type": "bf16"},
    "autocast": {"torch_autocast": AUTOCAST},
    "autocast, safe norms": {
        "torch_autocast": {**AUTOCAST, "lower_precision_safe_modules": ["torch.nn.LayerNorm"]},
    },
    "autocast, communication fp32": {"torch_autocast": AUTOCAST, "communication_data_type": "fp32"},
    "autocast, fp32_allreduce": {"torch_autocast": AUTOCAST, "fp32_allreduce": True},
}
STAGES = (0, 1, 3)


def sums(keys: dict[str, Any], stage: int) -> dict[str, list[str]]:
    """Of each parameter: the dtypes in which the ranks' own gradients add up to the one that
    came."""
    model = seeded(models.ShortTower)
    everyones = gradients_of_ranks(copy.deepcopy(model), "torch_autocast" in keys)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 50}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "zero_optimization": zero,
    } | keys
    engine, _, _, _ = tiermem.initialize(model=model, config=config)
    engine.backward(loss_of(engine, dist.get_rank()))
    found = {}
    for _, shard in engine.shards.parameters():
        mine = engine.shards.gradient(shard.param)
        parts = [grads[shard.name] for grads in everyones]
        found[shard.name] = [
            str(dtype).removeprefix("torch.")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            if mine is not None
            and torch.equal(mine, (parts[0].to(dtype) + parts[1].to(dtype)).float() / 2)
        ]
    engine.close()
    return found


def gradients_of_ranks(model: nn.Module, is_autocast: bool) -> list[dict[str, torch.Tensor]]:
    found = []
    for rank in range(dist.get_world_size()):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            loss = loss_of(model, rank)
        loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    return found


if __name__ == "__main__":
    with as_rank() as (_, out, names):
        torch.save(
            {
                f"{case}, stage {stage}": sums(keys, stage)
                for case, keys in CASES.items()
                for stage in STAGES
                if f"{case}, stage {stage}" in names
            },
            out,
        )
