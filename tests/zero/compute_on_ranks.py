"""Run once per rank by test_compute_dtype.py: weights in bf16, products in fp32, on two ranks.

compute_on_ranks.py OUT NVME     writes OUT/<rank>.pt: what differed, the bytes gathered, the dtype agreed on
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from test_compute_dtype import loss_of, policy_of, tower

import tiermem
from tiermem import Tier
from tiermem.units import compute
from tiermem.units.compute import Products


def train(nvme: Path, tier: Tier, wrong: list[str], **fields: Any) -> int:
    """Trains beside a twin that casts, whose gradients are averaged; returns the bytes gathered."""
    model, plain = tower(), tower()
    adam = tiermem.AdamW(plain.parameters(), lr=1e-2)
    with tiermem.shard(model, policy_of(tier, nvme, persistence_numel=0, **fields)) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            mine = 10 * step + dist.get_rank()
            loss, twin = (
                loss_of(model, mine, False),
                loss_of(plain, mine, shards.compute.dtype == "fp32"),
            )
            if loss.item() != twin.item():
                wrong.append(f"{tier} {fields} step {step}: {loss.item()} {twin.item()}")
            loss.backward()
            twin.backward()
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= 2
            for each in (optim, adam):
                each.step()
                each.zero_grad()
        return shards.topology.traffic.bytes_of("gathering ")


def main() -> None:
    with as_rank() as (rank, out, [nvme]):
        wrong: list[str] = []
        gathered = {
            name: train(Path(nvme), Tier.NVME, wrong, compute_dtype=name)
            for name in ("storage", "fp32")
        }
        train(Path(nvme), Tier.HOST, wrong)
        slow = 1e9 if rank else 60e9
        compute.measure_products = lambda shapes, dtype: Products(dtype, slow, 60e9)
        with tiermem.shard(
            tower(), policy_of(Tier.HOST, Path(nvme), compute_dtype="measured")
        ) as shards:
            agreed = shards.compute.dtype
        found = {"wrong": wrong, "agreed": agreed, "gathered": gathered["fp32"]}
        torch.save(found | {"gathered as it rests": gathered["storage"]}, out)


if __name__ == "__main__":
    sys.exit(main())
