"""Looks at and changes states on several ranks; run once per rank by test_state_access_on_ranks.py.
Every rank sees the same batches, so that values are the same on any number of ranks, but for the
rounding of sums over them.

state_access_on_ranks.py OUT NVME CASE...     writes OUT/<rank>.pt: {case: what that case found}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from programs.models import Tower
from programs.twins import loss_of, seeded
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
    safe_update_local_states_vectorized,
)

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}

# stage, where things rest, precision of a bf16 model; "" for fp32
CASES: dict[str, tuple[int, str, str]] = {
    "stage 0": (0, "none", "exact"),
    "stage 1": (1, "none", ""),
    "stage 1 nvme": (1, "nvme", "exact"),
    "stage 2 cpu": (2, "cpu", "compact"),
    "stage 3": (3, "none", ""),
    "stage 3 cpu": (3, "cpu", "exact"),
    "stage 3 nvme": (3, "nvme", "compact"),
    "stage 3 nvme tiny": (3, "nvme", "tiny"),
}
KEY = "exp_avg"


def built() -> nn.Module:
    return seeded(lambda: Tower(num_blocks=1))


def look_and_put(case: str, nvme: Path) -> dict[str, Any]:
    stage, tier, preset = CASES[case]
    policy = OffloadPolicy(
        stage=stage,
        params=TIERS[tier] if stage == 3 else Tier.DEVICE,
        optim=TIERS[tier],
        grads=Tier.NVME if case == "stage 3 nvme" else None,
        paths=[nvme],
        persistence_numel=100,
        tile_numel=4096,
        precision=Precision.preset(preset or "exact"),
    )
    model: nn.Module = built().to(torch.bfloat16 if preset else torch.float32)
    found: dict[str, Any] = {}
    with tiermem.shard(model, policy) as shards:
        torch.set_num_threads(1)
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, 0).backward()
        optim.step()
        optim.zero_grad()
        loss_of(model, 1).backward()
        found["full"], found["local"] = full_states(model), local_states(model, stage)
        put(model)
        found["put"] = full_states(model)
        put_local(model, stage)
        found["put locally"] = full_states(model)
        found["shown"] = {name: value.clone() for name, value in model.state_dict().items()}
        safe_update_full_grad_vectorized(model.parameters(), lambda grad, param: grad + 0.5)
        safe_update_local_states_vectorized(model.parameters(), count_up)
        found["visited"] = full_states(model)
        optim.step()
        optim.zero_grad()
        found["norm"] = optim.grad_norm
        found["loss"] = loss_of(model, 2).item()
        found["weights"] = dict(model.state_dict())
        if not preset:
            twin, batch = built(), 3 + dist.get_rank()
            twin.load_state_dict(found["weights"])
            loss_of(twin, batch).backward()
            found["of this rank"] = [param.grad for param in twin.parameters()]
            optim.zero_grad()
            with shards.no_sync():
                loss_of(model, batch).backward()
                found["in no_sync"] = [safe_get_full_grad(param) for param in model.parameters()]
    return found


def full_states(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[f"{name} fp32"] = safe_get_full_fp32_param(param)
        found[f"{name} grad"] = safe_get_full_grad(param)
        found[f"{name} state"] = safe_get_full_optimizer_state(param, KEY)
    return found


def local_states(model: nn.Module, stage: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters() if stage else ():
        found[f"{name} fp32"] = safe_get_local_fp32_param(param)
        found[f"{name} grad"] = safe_get_local_grad(param)
        found[f"{name} state"] = safe_get_local_optimizer_state(param, KEY)
    return found


def value_for(param: nn.Parameter, seed: int) -> torch.Tensor:
    """Values that every precision of the ladder keeps exactly: small powers of two."""
    exponents = torch.randint(
        -3, 3, param.shape, generator=torch.Generator().manual_seed(seed + param.numel())
    )
    return torch.ldexp(torch.ones(param.shape), exponents)


def put(model: nn.Module) -> None:
    for param in model.parameters():
        safe_set_full_fp32_param(param, value_for(param, 1))
        safe_set_full_grad(param, value_for(param, 2))
        safe_set_full_optimizer_state(param, value_for(param, 3), KEY)


def put_local(model: nn.Module, stage: int) -> None:
    """The document's loop: every rank sets its own part."""
    for param in model.parameters() if stage else ():
        for set_it, get, seed in (
            (safe_set_local_fp32_param, safe_get_local_fp32_param, 4),
            (safe_set_local_grad, safe_get_local_grad, 5),
            (
                lambda p, value: safe_set_local_optimizer_state(p, value, KEY),
                lambda p: safe_get_local_optimizer_state(p, KEY),
                6,
            ),
        ):
            mine = torch.zeros_like(get(param))
            part = value_for(param, seed).flatten().split(mine.numel())
            if dist.get_rank() < len(part):
                mine[: part[dist.get_rank()].numel()] = part[dist.get_rank()]
            set_it(param, mine)


def count_up(states: dict[str, torch.Tensor], param: nn.Parameter, elements: slice) -> None:
    states["fp32_param"].copy_(torch.arange(elements.start, elements.stop) % 2 + 1)
    states[KEY].mul_(0.5)


if __name__ == "__main__":
    with as_rank() as (_, out, (nvme, *names)):
        torch.save({case: look_and_put(case, Path(nvme)) for case in names}, out)
