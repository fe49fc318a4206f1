"""Trains a model that keeps its own parallelism, DDP or FSDP2, beside torch's AdamW, and saves and
opens it with torch.distributed.checkpoint; run once per rank by test_drop_in_on_ranks.py.

drop_in_on_ranks.py OUT NVME SAVED train CASE...     trains every case, saves it in SAVED/<case>, goes on for two steps
drop_in_on_ranks.py OUT NVME SAVED open CASE...      opens every case in SAVED
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import as_rank
from programs.models import Tower
from programs.twins import decay_groups, loss_of, seeded
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import tiermem
from tiermem import OffloadPolicy, Precision, Tier

Make = Callable[..., torch.optim.Optimizer]

KINDS = ("ddp", "fsdp2")
HOMES = ("beside", "host", "nvme")
CASES = [f"{kind}, {home}" for kind in KINDS for home in HOMES]


def parallel(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = seeded(Tower, seed).to(dtype)
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def policy_of(home: str, nvme: Path, precision: Precision | None = None) -> OffloadPolicy | None:
    """None: states lie beside the parameters."""
    fields = {"tile_numel": 4096, "precision": precision or Precision()}
    if home == "host":
        return OffloadPolicy(optim=Tier.HOST, **fields)
    return OffloadPolicy(optim=Tier.NVME, paths=[nvme], **fields) if home == "nvme" else None


def train(
    model: nn.Module, optim: torch.optim.Optimizer, schedule: Any, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, 2 * step + dist.get_rank())
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        schedule.step()
        optim.zero_grad(set_to_none=step % 2 == 0)
        dist.all_reduce(loss.detach())
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> torch.Tensor:
    """Every weight, in one vector."""
    return torch.cat([full(p).reshape(-1) for p in model.parameters()])


def full(value: torch.Tensor) -> torch.Tensor:
    """A tensor, or the whole of a DTensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def states_of(optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    entries = optim.state_dict()["state"].items()
    return {
        f"{number}.{name}": full(value).clone()
        for number, entry in entries
        for name, value in entry.items()
    }


def begin(kind: str, make: Make, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = parallel(kind, seed)
    optim = make(decay_groups(model), lr=1e-3)
    return model, optim, torch.optim.lr_scheduler.CosineAnnealingLR(optim, 12)


def trained(kind: str, make: Make, saved: Path | None = None) -> dict[str, Any]:
    model, optim, schedule = begin(kind, make)
    losses, weights, states = (
        train(model, optim, schedule, range(10)),
        whole(model),
        states_of(optim),
    )
    if saved is not None:
        of_model, of_optim = get_state_dict(model, optim)
        dcp.save(
            {"model": of_model, "optim": of_optim, "schedule": schedule.state_dict()},
            checkpoint_id=saved,
        )
    train(model, optim, schedule, range(10, 12))
    return {"losses": losses, "weights": weights, "states": states, "went_on": whole(model)}


def opened(kind: str, make: Make, saved: Path) -> dict[str, Any]:
    model, optim, schedule = begin(kind, make, seed=1)
    of_model, of_optim = get_state_dict(model, optim)
    state = {"model": of_model, "optim": of_optim, "schedule": schedule.state_dict()}
    dcp.load(state, checkpoint_id=saved)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    schedule.load_state_dict(state["schedule"])
    return {"weights": whole(model), "states": states_of(optim)}


def loaded_whole(kind: str, policy: OffloadPolicy | None) -> bool:
    """Whether states that were gathered whole, by torch and by hand, come back as they were."""
    model = parallel(kind)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2, policy=policy)
    for step in range(2):
        loss_of(model, step).backward()
        optim.step()
        optim.zero_grad()
    before, groups = states_of(optim), optim.state_dict()["param_groups"]
    whole = {
        n: {k: full(v).clone() for k, v in entry.items()}
        for n, entry in optim.state_dict()["state"].items()
    }
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    gathered = get_optimizer_state_dict(model, optim, options=options)
    is_same = []
    for load in (
        lambda: optim.load_state_dict({"state": whole, "param_groups": groups}),
        lambda: set_optimizer_state_dict(model, optim, gathered, options=options),
    ):
        optim.load_state_dict({"state": {}, "param_groups": groups})
        assert not optim.state
        load()
        after = states_of(optim)
        is_same.append(
            before.keys() == after.keys()
            and all(torch.equal(v, after[k]) for k, v in before.items())
        )
    return all(is_same)


def clipped_in_step(kind: str) -> float:
    """The norm of a step that clips by itself, over all ranks."""
    model = parallel(kind)
    optim = tiermem.AdamW(model.parameters(), policy=OffloadPolicy(optim=Tier.HOST))
    loss_of(model, dist.get_rank()).backward()
    norm = clip_grad_norm_(model.parameters(), 1e9)
    optim.step(max_norm=1.0)
    return optim.grad_norm / float(full(norm))


def dithered(kind: str) -> torch.Tensor:
    """Weights of a low precision that is rounded stochastically, from equal batches on every
    rank."""
    model = parallel(kind, dtype=torch.bfloat16)
    policy = OffloadPolicy(optim=Tier.HOST, precision=Precision.preset("compact"))
    optim = tiermem.AdamW(model.parameters(), lr=1e-2, policy=policy)
    for step in range(2):
        loss_of(model, step).backward()
        optim.step()
        optim.zero_grad()
    return whole(model)


def refusal_of_muon() -> str:
    try:
        tiermem.Muon(parallel("fsdp2").parameters(), policy=OffloadPolicy(optim=Tier.HOST))
    except ValueError as error:
        return str(error)
    return "none"


if __name__ == "__main__":
    with as_rank() as (rank, out, (nvme, saved, word, *cases)):
        torch.set_num_threads(1)
        found: dict[str, Any] = {}
        for case in cases:
            kind, home = case.split(", ")
            policy, folder = policy_of(home, Path(nvme)), Path(saved, case)

            def make(
                groups: Any, policy: OffloadPolicy | None = policy, **options: Any
            ) -> tiermem.AdamW:
                return tiermem.AdamW(groups, policy=policy, **options)

            found[case] = (
                trained(kind, make, folder) if word == "train" else opened(kind, make, folder)
            )
        if word == "train":
            found |= {f"{kind}, torch": trained(kind, torch.optim.AdamW) for kind in KINDS}
            found |= {f"{kind}, norm": clipped_in_step(kind) for kind in KINDS} | {
                "muon": refusal_of_muon()
            }
            found |= {
                f"{kind}, whole": loaded_whole(kind, policy_of("host", Path(nvme)))
                for kind in KINDS
            }
            found["fsdp2, beside, whole"] = loaded_whole("fsdp2", None)
        found |= {f"{kind}, dithered": dithered(kind) for kind in KINDS}
        torch.save(found, out)
