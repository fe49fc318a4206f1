"""Ways in which a user writes weights, and the yardstick: a plain loop over fp32 masters in which a
written element becomes the master and all others keep theirs (`Twin`).

    user_writes.py OUT CASE...     writes OUT/<rank>.pt: {case: losses}; every rank sees the same batches
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from launch import as_rank
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.zero import GatheredParameters

NUM_STEPS = 4
PRECISIONS = {
    "exact": Precision(),
    "split": Precision(master="split"),
    "compact": Precision(master="split", moments="bf16"),
    "tiny": Precision(master="split", moments="8bit"),
}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"params": Tier.HOST, "optim": Tier.HOST, "persistence_numel": 1 << 20},
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME, "persistence_numel": 1 << 20},
    "stage 2, states on nvme": {"stage": 2, "optim": Tier.NVME},
    "stage 0": {"stage": 0},
}


def model_of(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 41), nn.Tanh(), nn.Linear(41, 67)).to(dtype)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 67, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = batch(step, next(model.parameters()).dtype)
    loss: torch.Tensor = (model(x) - x).float().square().mean()
    return loss


class Twin:
    """Plain PyTorch over fp32 masters: elements of a weight that are no longer their master's
    rounding become the master."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        self.optim = torch.optim.AdamW(self.masters, lr=1e-2, weight_decay=0.0)

    def step(self) -> None:
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                is_written = master.to(param.dtype) != param
                master.copy_(torch.where(is_written, param.float(), master))
                master.grad = None if param.grad is None else param.grad.float()
            self.optim.step()
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
                param.grad = None


def zero_a_row(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[3] = 0.0


def zero_all(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.zero_()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.0625, 0.0625)


def clamp_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model[2].weight.clamp_(-0.0625, 0.0625)


def scale_together(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def scale_data(model: nn.Module) -> None:
    """Torch counts no version."""
    for param in model.parameters():
        param.data.mul_(0.5)


def put_other_memory(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone() * 0.5


def put_a_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def write_gathered(model: nn.Module) -> None:
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        for param in model.parameters():
            param.data.mul_(0.5)


def perturb_and_restore(model: nn.Module) -> None:
    """As published code of FGM and SAM does it."""
    old = {param: param.data.clone() for param in model.parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)
    model(batch(9, next(model.parameters()).dtype))
    for param in model.parameters():
        param.data = old[param]


def swap_and_put_back(model: nn.Module) -> None:
    """As averages are evaluated: other memory is shown for a while."""
    backup = {param: param.data for param in model.parameters()}
    for param in model.parameters():
        param.data = torch.full_like(param, 0.5)
    model(batch(9, next(model.parameters()).dtype))
    for param in model.parameters():
        param.data = backup[param]


WAYS: dict[str, Callable[[nn.Module], None]] = {
    way.__name__: way
    for way in (
        zero_a_row, zero_all, clamp, clamp_in_inference_mode, scale_together, scale_data, put_other_memory, put_a_vector, load,
        write_gathered, perturb_and_restore, swap_and_put_back,
    )
}  # fmt: skip


MOMENTS = ("before the first step", "before forward", "before the step")


def trained(
    policy: OffloadPolicy | None, way: Callable[[nn.Module], None], moment: str, dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and weights at the end. moment: when the way is taken."""
    model = model_of(dtype)
    shards = None if policy is None else tiermem.shard(model, policy)
    optim: Any = (
        Twin(model)
        if policy is None
        else tiermem.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    )
    losses = []
    for step in range(NUM_STEPS):
        if moment == "before forward" or (moment == "before the first step" and step == 0):
            way(model)
        loss = loss_of(model, step)
        loss.backward()
        if moment == "before the step":
            way(model)
        optim.step()
        if policy is not None:
            optim.zero_grad()
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if shards is not None:
        shards.close()
    return losses, weights


# ---- on ranks ------------------------------------------------------------------------------------


def write_on_rank_0(model: nn.Module) -> None:
    """Torch counts no version, and rank 1 writes nothing."""
    with GatheredParameters(list(model.parameters()), modifier_rank=0):
        is_writing = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        for param in model.parameters():
            param.data.mul_(0.5 if is_writing else 1.0)


ON_RANKS = (write_on_rank_0, clamp, scale_data, put_other_memory, load)
CASES = [
    f"{way.__name__}, stage {stage}, {dtype}"
    for way in ON_RANKS
    for stage in (0, 1, 2, 3)
    for dtype in ("float32", "bfloat16")
    if stage < 3 or way in (write_on_rank_0, load)
]


def losses_of(case: str, is_sharded: bool) -> list[float]:
    """The losses of a case, or of its plain twin."""
    way, stage, dtype = case.split(", ")
    policy = OffloadPolicy(stage=int(stage[-1]), timeout_s=60) if is_sharded else None
    ways = {each.__name__: each for each in ON_RANKS}
    return trained(policy, ways[way], "before forward", getattr(torch, dtype))[0]


if __name__ == "__main__":
    with as_rank() as (_, out, names):
        torch.save({case: losses_of(case, is_sharded=True) for case in CASES if case in names}, out)
