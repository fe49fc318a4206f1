"""Run by test_ranks.py on each rank: training on devices and CPUs. Words: a backend; a mutant, none or on four; schedules."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zoo
from launch import as_rank
from torch import nn
from torch.nn import functional as F
from twins import Tower, batch, seeded

import tiermem
from accelerator import device
from accelerator.mutants import ON_RANKS, applied
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.optim.tentative import History

sim = device.load()
torch.ones(1, device="meta").add(1)  # imports what Meta kernels in Python need, once before the ranks are forked

_HOST = {"params": Tier.HOST, "optim": Tier.HOST}
_NVME = {"params": Tier.NVME, "optim": Tier.NVME}
_TINY = Precision.preset("tiny")
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **{f"stage {stage}, states on host": {"stage": stage, "optim": Tier.HOST} for stage in (1, 2, 3)},
    "stage 3, host": _HOST,
    "stage 3, nvme": _NVME,
    "stage 3, host, by Init": _HOST,
    "stage 3, nvme, by Init": _NVME,
    "stage 3, nvme, stepped in backward": {**_NVME, "step_in_backward": True},
    "stage 3, nvme, widened": {**_NVME, "compute_dtype": "fp32"},
    "stage 3, all streamed": {"persistence_numel": 0},  # no gather of resident weights stands before those of forward
    "stage 3, host, activations there": {**_HOST, "activations": Tier.HOST},
    "stage 3, host, activations on nvme": {**_HOST, "activations": Tier.NVME},
    "stage 3, host, one parameter at a time": {**_HOST, "gather_way": "single"},
    "stage 3, host, all_reduce": {**_HOST, "gather_way": "all_reduce"},
    "stage 3, host, cut": {**_HOST, "reduce_bucket_numel": 1000},
    "stage 1, gathers cut": {"stage": 1, "allgather_bucket_numel": 1000},
    "stage 2, gathers cut, states on host": {"stage": 2, "optim": Tier.HOST, "allgather_bucket_numel": 1000},
    "stage 2, tiny": {"stage": 2, "precision": _TINY},
    "stage 3, host, stepped early": {**_HOST, "grads": Tier.DEVICE, "overlap": "backward", "precision": _TINY},
    "stage 3, half of the states": {**_HOST, "precision": Precision.preset("compact"), "optim_ratio": 0.5},
    "stage 3, host, half sent": {**_HOST, "precision": Precision.preset("tiny"), "streamed_ratio": 0.5},
    "stage 2, states on nvme, sent": {"stage": 2, "optim": Tier.NVME, "streamed_ratio": 1.0},
    "MiCS": {**_HOST, "shard_group_size": 2},
    "hpZ": {**_HOST, "secondary_group_size": 2},
    "two-stage gathers": {**_HOST, "shard_group_size": 4, "secondary_group_size": 2, "two_stage_gather": True},
    "two-stage gathers, one parameter at a time": {
        **_HOST,
        "shard_group_size": 4,
        "secondary_group_size": 2,
        "two_stage_gather": True,
        "gather_way": "single",
    },
    "MiCS, gathers cut": {"shard_group_size": 2, "persistence_numel": 1 << 20, "allgather_bucket_numel": 1000},
    "qgZ in two stages": {**_HOST, "secondary_group_size": 2, "quantised_reduction": True},
    "qwZ": {**_HOST, "quantised_gather": True},
    "qgZ": {**_HOST, "quantised_reduction": True},
    "qwZ and qgZ, nvme": {**_NVME, "quantised_gather": True, "quantised_reduction": True},
}

CHANGE_NO_BIT = {"stage", "params", "optim", "persistence_numel", "gather_way"}
"""With these fields alone stages 1 to 3 are trained once on CPUs: devices must have the same bits wherever things rest."""


ON_FOUR = {
    "MiCS",
    "hpZ",
    "two-stage gathers",
    "two-stage gathers, one parameter at a time",
    "MiCS, gathers cut",
    "qgZ in two stages",
}
"""On two ranks these are what other cases are."""


ON_DEVICES_ALONE = ["stage 1", "stage 3, nvme", "stage 3, host, by Init", "qgZ"]
"""What is tried where the group takes no tensors of the CPU, as one of NCCL alone."""


def batches_of(policy: OffloadPolicy, rank: int, device: torch.device) -> list[list[torch.Tensor]]:
    """Tokens and targets of every step, on the device: a copy from pageable memory would wait for the step before.

    Where activations move there are more of them: small ones stay.
    """
    size = {} if policy.activations is None else {"samples": 16, "length": 40}
    return [[each.to(device) for each in batch(10 * step + rank, **size)] for step in range(3)]


def loss_on(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def train(where: str, policy: OffloadPolicy, rank: int, by_init: bool) -> dict[str, Any]:
    with tiermem.zero.Init(policy=policy, enabled=by_init):
        model = seeded(Tower if policy.activations is None else lambda: zoo.Tower(checkpoint=False)).to(
            torch.bfloat16 if policy.compute_dtype == "fp32" or policy.precision != Precision() else torch.float32
        )
    with tiermem.shard(model, policy, device=where) as shards:
        optim = tiermem.AdamW(model.parameters(), lr=1e-2)
        losses, norms, is_early = [], [], policy.overlap == "backward"
        for step, given in enumerate(batches_of(policy, rank, shards.device)):
            loss = loss_on(model, *given)
            loss.backward()
            assert bool(shards.program.attempted) == (is_early and where != "cpu" and step > 0)
            if not (policy.step_in_backward or is_early):
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
            with torch.no_grad():
                losses.append(loss_on(model, *given))
            optim.step()  # while the device may still read the old weights
            optim.zero_grad()
            with torch.no_grad():
                losses.append(loss_on(model, *given))
                if rank:
                    losses[-1].item()  # this rank asks for the others' weights while their steps may be pending
            losses.append(loss.detach())
        assert not is_early or shards.steps.num_redone == 0
        weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return {"losses": [each.item() for each in losses], "norms": norms, **weights}


def apart(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference between two trainings."""
    assert mine.keys() == theirs.keys()
    pairs = ((torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])) for name in mine)
    return (
        torch.tensor([0.0, *((a - b).abs().max().item() for a, b in pairs if a.numel())]).max().item()
    )  # NaN if any is


def main() -> None:
    backend, mutant, *schedules = sys.argv[2:]
    History.is_due, History.is_last = True, lambda *_: True  # type: ignore[assignment,method-assign]
    with as_rank(backend) as (rank, out, _):
        own, found, on_cpus = f"sim:{rank % 2}", {}, dict[str, dict[str, Any]]()
        for name in cases_of(backend, mutant, dist.get_world_size()):
            place = Path(out.parent, f"{name}-{rank}".replace(" ", "_"))
            place.mkdir()
            usual = {"persistence_numel": 50, "paths": [place], "timeout_s": 60, "tile_numel": 8192}
            policy = OffloadPolicy(**usual | CASES[name])
            sim.set_schedule("at_once")
            by_init = "by Init" in name
            there = "cpu" if "cpu" in backend and not by_init else own
            grads = None if there == "cpu" else policy.grads
            same = "plain" if there == "cpu" and CASES[name].keys() <= CHANGE_NO_BIT and policy.stage else name
            if same not in on_cpus:
                on_cpus[same] = train(there, dataclasses.replace(policy, grads=grads), rank, by_init)
            expected = on_cpus[same]
            if dist.get_world_size() > 2:  # whose sums have another order on CPUs
                at_once = train(own, policy, rank, by_init)
                found[f"{name}; at once, beside CPUs"] = apart(at_once, expected)
                expected = at_once
            for schedule in schedules:
                sim.set_schedule(schedule)
                with applied(ON_RANKS[mutant]) if mutant in ON_RANKS else contextlib.nullcontext():
                    found[f"{name}; {schedule}"] = apart(train(own, policy, rank, by_init), expected)
                if mutant in ON_RANKS and is_seen(found):
                    break
        torch.save(found, out)


def is_seen(found: dict[str, float]) -> bool:
    """Whether any rank has found a difference. Collective."""
    seen = [False] * dist.get_world_size()
    dist.all_gather_object(seen, any(each != 0.0 for each in found.values()))
    return any(seen)


def cases_of(backend: str, mutant: str, world: int) -> list[str]:
    """On four ranks every stage, and those that need so many."""
    if mutant == "on four":
        return sorted(ON_FOUR)
    if mutant != "none":
        return [ON_RANKS[mutant].home or "stage 3, host"]
    if "cpu" not in backend:
        return ON_DEVICES_ALONE
    stages = [f"stage {stage}" for stage in range(4)]
    return (
        [*stages, "stage 3, nvme", "qwZ", "qgZ", "qwZ and qgZ, nvme", *sorted(ON_FOUR)]
        if world == 4
        else [name for name in CASES if name not in ON_FOUR]
    )


if __name__ == "__main__":
    main()
