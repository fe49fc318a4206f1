"""In each rank: FSDP2 trains three steps and saves with torch.distributed.checkpoint; rank 0 says what is in it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from launch import as_rank


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


with as_rank() as (rank, out, words):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.LayerNorm(5))
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=words[0])
    expected = {}
    for name, param in net.named_parameters():
        expected[name] = {"weight": whole(param.detach())}
        expected[name] |= {key: whole(value) for key, value in optimizer.state[param].items() if key != "step"}
    torch.save(expected, out)
    dist.barrier()
