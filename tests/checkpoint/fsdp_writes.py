"""In each rank: FSDP2 trains and saves with torch.distributed.checkpoint, and goes on; so does what
tiermem made of it.

fsdp_writes.py FOLDER DCP     rank 0 writes {"states": what is in DCP, "losses": of the first, "again": of the second}
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from launch import as_rank

from tiermem.checkpoint.interchange.export import export_dcp
from tiermem.checkpoint.interchange.from_dcp import read_dcp
from tiermem.checkpoint.interchange.write import write_checkpoint
from tiermem.checkpoint.opening.source import Source


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.LayerNorm(5))
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    wide = [p for p in net.parameters() if p.dim() > 1]
    flat = [p for p in net.parameters() if p.dim() == 1]
    return net, torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 3e-3}], lr=1e-2
    )


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (
            net(torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank)))
            .square()
            .mean()
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def main(rank: int, out: Path, folder: Path) -> None:
    net, optimizer = build(0)
    train(net, optimizer, range(3), rank)
    model, optim = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    states = {}
    for name, param in net.named_parameters():
        states[name] = {"weight": whole(param.detach())}
        states[name] |= {
            key: whole(value) for key, value in optimizer.state[param].items() if key != "step"
        }
    losses = train(net, optimizer, range(3, 6), rank)
    if rank == 0:
        write_checkpoint(read_dcp(folder), folder.with_name("ours"))
        with Source.open(folder.with_name("ours")) as source:
            export_dcp(source, folder.with_name("again"))
    dist.barrier()
    other, optimizer = build(1)
    model, optim = get_state_dict(other, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=folder.with_name("again"))
    set_state_dict(other, optimizer, model_state_dict=model, optim_state_dict=optim)
    again = train(other, optimizer, range(3, 6), rank)
    ends = (
        [whole(p.detach()) for p in net.parameters()],
        [whole(p.detach()) for p in other.parameters()],
    )
    torch.save({"states": states, "losses": losses, "again": again, "ends": ends}, out)
    dist.barrier()


if __name__ == "__main__":
    with as_rank() as (rank, out, words):
        main(rank, out, Path(words[0]))
