"""Launched by test_mesh_keys.py: trains by configs on four ranks of two nodes and says what was
handed to collectives.

mesh_keys_on_ranks.py FOLDER      every rank writes {case: {"losses", "phases", "num_shards", "units"}}
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from programs import models
from programs.twins import loss_of, seeded

import tiermem

NUM_STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, frozen": {},
    "mics": {"mics_shard_size": 2},
    "mics in two stages": {"mics_shard_size": 4, "mics_hierarchical_params_gather": True},
    "hpz": {"zero_hpz_partition_size": 2},
    "qwz": {"zero_quantized_weights": True},
    "qgz": {"zero_quantized_gradients": True},
    "quantised, frozen": {"zero_quantized_nontrainable_weights": True},
    "stage 2": {"stage": 2},
    "stage 2, updates of 2000": {"stage": 2, "allgather_bucket_size": 2000},
}


def main() -> None:
    with as_rank() as (_, out, _):
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        torch.save({case: train(case) for case in CASES}, out)


def train(case: str) -> dict[str, Any]:
    model = seeded(models.ShortTower)
    if "frozen" in case:
        model.layers.requires_grad_(False)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 50} | CASES[case]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "zero_optimization": zero,
    }
    engine, _, _, _ = tiermem.initialize(
        model=model, config=config | {"tiermem": {"timeout_s": 60}}
    )
    losses, phases = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(engine, dist.get_rank() + 10 * step)
        phases.append(taken(engine))
        engine.backward(loss)
        phases.append(taken(engine))
        engine.step()
        phases.append(taken(engine))
        losses.append(loss.item())
    found = {"losses": losses, "phases": phases, "num_shards": engine.shards.topology.num_shards}
    units = {
        live.unit.name: sum(s.shard_numel for s in live.unit.shards) for live in engine.shards.units
    }
    engine.close()
    return found | {"units": units}


def taken(engine: tiermem.Engine) -> list[tuple[str, str, int, str]]:
    """What was handed to collectives since the last time."""
    payloads = [tuple(payload) for payload in engine.shards.topology.traffic.payloads]
    engine.shards.topology.traffic.payloads.clear()
    return payloads


if __name__ == "__main__":
    main()
