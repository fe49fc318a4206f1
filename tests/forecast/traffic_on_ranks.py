"""Launched by test_traffic.py: trains the cases of traffic_cases.py and says what a step handed to
collectives and to the disk.

traffic_on_ranks.py FOLDER NVME CASE...     every rank writes {case: {"said": ..., "sent": ...}}, by rank edge and disk edge
"""

from __future__ import annotations

import collections
from pathlib import Path

import torch
import torch.distributed as dist
from launch import as_rank
from programs import models
from programs.twins import loss_of, seeded
from traffic_cases import CASES, NUM_STEPS, Case

import tiermem
from tiermem import OffloadPolicy
from tiermem.forecast import Rates, forecast_shards
from tiermem.forecast.phases import HOST_TO_NVME, NVME_TO_HOST
from tiermem.forecast.rates import Compute

Bytes = dict[str, int]


def measured(case: Case, nvme: Path) -> tuple[Bytes, Bytes]:
    """What was said of a step, and what the last one took."""
    model = seeded(models.tied_tower).to(torch.bfloat16)
    if case.is_frozen:
        model.requires_grad_(False)
        model.layers[0].requires_grad_(True)
    policy = OffloadPolicy(
        paths=[nvme], overlap="none", persistence_numel=50, tile_numel=4096, **case.fields
    )
    with tiermem.shard(model, policy) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        counts = []
        for step in range(NUM_STEPS):
            shards.topology.traffic.payloads.clear()
            for micro in range(case.num_micro):
                loss_of(model, dist.get_rank() + 100 * (step * case.num_micro + micro)).backward()
            optim.step()
            optim.zero_grad()
            shards.store.flush()
            while any(live.move is not None and not live.move.is_done() for live in shards.units):
                pass
            stats = shards.store.stats()
            counts.append((stats.nvme_read_bytes, stats.nvme_written_bytes))
        sent: collections.Counter[str] = collections.Counter()
        for payload in shards.topology.traffic.payloads:
            if payload.what.startswith(("gathering", "reducing")):
                sent[payload.among] += payload.num_bytes
        sent["read"], sent["written"] = (counts[-1][i] - counts[-2][i] for i in (0, 1))
        forecast = forecast_shards(shards, Compute(1e-9, 2e-9), Rates(1e9, 1e9), case.num_micro)
    said = {among: sum(phases.values()) for among, phases in forecast.payload_bytes.items()}
    said |= {
        "read": forecast.edge_bytes(NVME_TO_HOST),
        "written": forecast.edge_bytes(HOST_TO_NVME),
    }
    return said, dict(sent)


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme, *names)):
        torch.save({name: measured(CASES[name], Path(nvme)) for name in names}, out)
