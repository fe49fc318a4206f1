"""Run once per rank by test_mesh_on_ranks.py: trains cases on four ranks, beside a
DistributedDataParallel twin.

mesh_on_ranks.py OUT NVME [CASE ...]     writes OUT/<rank>.json: {"twin": ..., case: {"losses", "weights", "payloads", ...}},
                                         and what `loaded_amid_gathers` gives

Every node has a folder of its own below NVME. On one host LOCAL_WORLD_SIZE is made to say that
there are two.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from mesh_cases import CASES, NUM_STEPS, RANKS_ON_NODE, policy_of
from programs import models
from programs.twins import loss_of, seeded

import tiermem
from tiermem.forecast import Rates, forecast_shards
from tiermem.forecast.rates import Compute


def main(out: Path, nvme: Path, *cases: str) -> None:
    dist.init_process_group("gloo")
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_ON_NODE)
    nvme = nvme / f"node{os.environ['GROUP_RANK']}"
    nvme.mkdir(exist_ok=True)
    found = {case: train(case, nvme) for case in cases or CASES} | {"twin": train_twin()}
    if not cases:
        found["loaded amid gathers"] = loaded_amid_gathers(nvme)
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def train_twin() -> dict[str, Any]:
    model = DistributedDataParallel(seeded(models.tied_tower))
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(batch_of(model, step))
        optim.step()
        optim.zero_grad()
    return {"losses": losses, "weights": numbers(model.module.state_dict())}


def train(case: str, nvme: Path) -> dict[str, Any]:
    model = models.tied_tower() if dist.get_rank() else seeded(models.tied_tower)
    if "bf16" in case:
        model = model.to(torch.bfloat16)
    losses, payloads = [], []
    with tiermem.shard(model, policy_of(case, nvme)) as shards:
        traffic = shards.topology.traffic
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        for step in range(NUM_STEPS):
            loss = loss_of(model, dist.get_rank() + 100 * step)
            losses.append(loss.item())
            payloads.append(taken(traffic))
            loss.backward()
            payloads.append(taken(traffic))
            optim.step()
            optim.zero_grad()
            payloads.append(taken(traffic))
        return {
            "losses": losses,
            "weights": numbers(model.state_dict()),
            "payloads": payloads,  # of forward, backward and step, in turn
            "forecast": forecast_shards(shards, Compute(1e-9, 2e-9), Rates(1e9, 1e9)).payload_bytes,
            "num_shards": shards.topology.num_shards,
            "ranks_on_node": int(os.environ["LOCAL_WORLD_SIZE"]),
            "mesh": None
            if shards.topology.mesh is None
            else list(shards.topology.mesh.mesh_dim_names or ()),
            "rows": [[row.what, row.tier.name, row.num_bytes] for row in shards.plan.rows],
            "units": {
                u.unit.name: [[s.numel, s.shard_numel] for s in u.unit.shards]
                for u in shards.units
                if not u.unit.is_resident
            },
        }


class Logged(torch.nn.Linear):
    """Rank 0 looks at the weight in forward, as a log of norms does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            self.weight.data.norm()
        return super().forward(x)


def loaded_amid_gathers(nvme: Path) -> list[float]:
    """With second copies: how far a forward is from a plain one after weights were loaded while
    their gathers were under way, and how far a step is after that."""
    plain = seeded(lambda: torch.nn.Sequential(*[Logged(64, 64, bias=False) for _ in range(6)]))
    weights = {name: 2 * value for name, value in plain.state_dict().items()}
    model = copy.deepcopy(plain)
    plain.load_state_dict(weights)
    x = torch.ones(2, 64)
    with tiermem.shard(model, policy_of("hpz 2 none", nvme)):
        with torch.no_grad():
            model[0](x)
            model.load_state_dict(weights)
            apart = [(model(x) - plain(x)).abs().max().item()]
        for each in (model, plain):
            optim = tiermem.AdamW(each.parameters(), lr=1e-2)
            each(x).square().sum().backward()
            optim.step()
            optim.zero_grad()
        theirs = plain.state_dict()
        mine = model.state_dict()
        return [*apart, max((mine[name] - theirs[name]).abs().max().item() for name in mine)]


def batch_of(model: torch.nn.Module, step: int) -> float:
    loss = loss_of(model, dist.get_rank() + 100 * step)
    loss.backward()
    return loss.item()


def taken(traffic: Any) -> list[Any]:
    """What was handed to collectives since the last time."""
    payloads = [list(payload) for payload in traffic.payloads]
    traffic.payloads.clear()
    return payloads


def numbers(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: value.double().flatten()[::7].tolist() for name, value in weights.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
