"""Run by test_second_plan.py on each of two ranks, which have other cards: what "auto" chooses, and
a training in which each rank holds everything, and one has a larger input in the third step.

second_plan_on_ranks.py FOLDER      writes FOLDER/<rank>.pt: {"chosen", "parts", "weight"}
"""

from __future__ import annotations

from unittest import mock

import torch
from launch import as_rank
from torch import nn

import tiermem
from accelerator import device
from tiermem import OffloadPolicy, Tier
from tiermem.forecast import cards

sim = device.load()
# imports what Meta kernels in Python need, once before the ranks are forked
torch.ones(1, device="meta").add(1)
NAMES = ("NVIDIA H200", "NVIDIA GeForce RTX 4060 Ti")


def main() -> None:
    with as_rank("cpu:gloo,sim:simccl") as (rank, out, _):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
        own = f"sim:{rank}"
        sim.set_device(rank)
        sim.set_capacity(28 << 20)
        parts = []
        with mock.patch.object(cards, "facts_of", return_value={"name": NAMES[rank]}):
            chosen = tiermem.choose_policy(model, OffloadPolicy(timeout_s=20), device=own)
            policy = OffloadPolicy(
                params=Tier.HOST, optim=Tier.HOST, optim_ratio=0.75, rehomes_states=True,
                tile_numel=1 << 14, shard_group_size=1, timeout_s=20,
            )  # fmt: skip
            with tiermem.shard(model, policy, device=own) as shards:
                optim = tiermem.AdamW(model.parameters(), lr=1e-3)
                for count in (8, 8, 64 if rank else 8):
                    model(torch.ones(count, 512, device=own)).square().mean().backward()
                    optim.step()
                    optim.zero_grad()
                    parts.append(1 - shards.policy.optim_ratio)
                weight = model.state_dict()["0.weight"].cpu()
        torch.save({"chosen": str(chosen), "parts": parts, "weight": weight}, out)


if __name__ == "__main__":
    main()
