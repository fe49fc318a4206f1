"""Run by test_ranks.py on each rank: training on devices and CPUs.

    parity_on_ranks.py FOLDER BACKEND NAMES WAY ...

NAMES: a mutant, all, or "on four": those that need four ranks. WAY: the schedule of each step, as
    late,late,random:3. All ways
have as many steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import as_rank
from programs.models import ShortTower, Tower
from programs.twins import batch, seeded
from torch import nn
from torch.nn import functional as F

import tiermem
from accelerator import device
from accelerator.mutants import ON_RANKS, applied
from tiermem import OffloadPolicy, Precision, Tier
from tiermem.optim.tentative import History

sim = device.load()
# imports what Meta kernels in Python need, once before the ranks are forked
torch.ones(1, device="meta").add(1)

_HOST = {"params": Tier.HOST, "optim": Tier.HOST}
_NVME = {"params": Tier.NVME, "optim": Tier.NVME}
_TINY = Precision.preset("tiny")
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **{
        f"stage {stage}, states on host": {"stage": stage, "optim": Tier.HOST}
        for stage in (1, 2, 3)
    },
    "stage 3, host": _HOST,
    "stage 3, nvme": _NVME,
    "stage 3, host, by Init": _HOST,
    "stage 3, nvme, by Init": _NVME,
    "stage 3, nvme, stepped in backward": {**_NVME, "step_in_backward": True},
    "stage 3, nvme, widened": {**_NVME, "compute_dtype": "fp32"},
    # no gather of resident weights stands before those of forward
    "stage 3, all streamed": {"persistence_numel": 0},
    "stage 3, host, activations there": {**_HOST, "activations": Tier.HOST},
    "stage 3, host, activations on nvme": {**_HOST, "activations": Tier.NVME},
    "stage 3, host, one parameter at a time": {**_HOST, "gather_way": "single"},
    "stage 3, host, all_reduce": {**_HOST, "gather_way": "all_reduce"},
    "stage 3, host, cut": {**_HOST, "reduce_bucket_numel": 1000},
    "stage 1, gathers cut": {"stage": 1, "allgather_bucket_numel": 1000},
    "stage 2, gathers cut, states on host": {
        "stage": 2,
        "optim": Tier.HOST,
        "allgather_bucket_numel": 1000,
    },
    "stage 2, tiny": {"stage": 2, "precision": _TINY},
    "stage 3, host, stepped early": {
        **_HOST,
        "grads": Tier.DEVICE,
        "overlap": "backward",
        "precision": _TINY,
    },
    "stage 3, half of the states": {
        **_HOST,
        "precision": Precision.preset("compact"),
        "optim_ratio": 0.5,
    },
    "stage 3, states move after the first step": {
        **_HOST,
        "precision": Precision.preset("compact"),
        "optim_ratio": 0.75,
        "rehomes_states": True,
    },
    "stage 3, weights move": {**_HOST, "precision": Precision.preset("compact")},
    "stage 3, host, half sent": {
        **_HOST,
        "precision": Precision.preset("tiny"),
        "streamed_ratio": 0.5,
    },
    "stage 2, states on nvme, sent": {"stage": 2, "optim": Tier.NVME, "streamed_ratio": 1.0},
    "MiCS": {**_HOST, "shard_group_size": 2},
    "hpZ": {**_HOST, "secondary_group_size": 2},
    "two-stage gathers": {
        **_HOST,
        "shard_group_size": 4,
        "secondary_group_size": 2,
        "two_stage_gather": True,
    },
    "two-stage gathers, one parameter at a time": {
        **_HOST,
        "shard_group_size": 4,
        "secondary_group_size": 2,
        "two_stage_gather": True,
        "gather_way": "single",
    },
    "MiCS, gathers cut": {
        "shard_group_size": 2,
        "persistence_numel": 1 << 20,
        "allgather_bucket_numel": 1000,
    },
    "qgZ in two stages": {**_HOST, "secondary_group_size": 2, "quantised_reduction": True},
    "qwZ": {**_HOST, "quantised_gather": True},
    "qgZ": {**_HOST, "quantised_reduction": True},
    "qwZ and qgZ, nvme": {**_NVME, "quantised_gather": True, "quantised_reduction": True},
}

MOVES: dict[str, list[dict[str, Any]]] = {
    "stage 3, weights move": [
        {"params": Tier.DEVICE},
        {"params": Tier.NVME, "host_param_numel": 9000},
        {"params": Tier.HOST, "optim_ratio": 0.5},
        {"params": Tier.DEVICE, "optim_ratio": 1.0},
    ]
}
"""What moves before each step, in turns."""

CHANGE_NO_BIT = {
    *("stage", "params", "optim", "activations", "optim_ratio", "streamed_ratio"),
    "rehomes_states",
    *("persistence_numel", "gather_way", "allgather_bucket_numel", "reduce_bucket_numel"),
    *("shard_group_size", "secondary_group_size", "two_stage_gather"),
}
"""Cases that differ in these fields alone have one twin: devices must have the same bits wherever
things rest.

On four ranks the last three change the order of sums, and CPUs are up to 1e-5 apart there.
"""


ON_FOUR = {
    "MiCS",
    "hpZ",
    "two-stage gathers",
    "two-stage gathers, one parameter at a time",
    "MiCS, gathers cut",
    "qgZ in two stages",
}
"""On two ranks these are what other cases are."""


ASIDE = "closed aside"
"""See `overwritten_after_close`."""


ON_DEVICES_ALONE = ["stage 1", "stage 3, nvme", "stage 3, host, by Init", "qwZ", "qgZ"]
"""What is tried where the group takes no tensors of the CPU, as one of NCCL alone."""


def twin_of(name: str, policy: OffloadPolicy) -> str:
    """Names what a case computes: cases with one name are compared with one training."""
    is_quantised = policy.quantised_reduction
    kinds = {
        key: value for key, value in CASES[name].items() if is_quantised or key not in CHANGE_NO_BIT
    }
    return f"{kinds}, {policy.stage == 0}, {policy.activations is None}, {'by Init' in name}"


def batches_of(
    policy: OffloadPolicy, num: int, rank: int, device: torch.device
) -> list[list[torch.Tensor]]:
    """Tokens and targets of every step, and of what follows, on the device.

    A copy from pageable memory would wait for the step before.
    Where activations move there are more of them: small ones stay.
    """
    size = {} if policy.activations is None else {"samples": 16, "length": 40}
    return [[each.to(device) for each in batch(10 * step + rank, **size)] for step in range(num)]


def loss_on(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def train(
    where: str,
    policy: OffloadPolicy,
    way: list[str],
    rank: int,
    by_init: bool,
    moves: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """What is computed in steps under these schedules, of which CPUs have none; the first is that
    of the start, too."""
    schedule_by(way[0], where)
    with tiermem.zero.Init(policy=policy, enabled=by_init):
        checkpoint = None if policy.activations is None else False
        model = seeded(lambda: ShortTower(checkpoint=checkpoint)).to(
            torch.bfloat16
            if policy.compute_dtype == "fp32" or policy.precision != Precision()
            else torch.float32
        )
    if by_init:
        with tiermem.zero.GatheredParameters(list(model.parameters())):
            pass
        with tiermem.zero.GatheredParameters(model.head.weight, modifier_rank=0):
            if rank == 0:
                model.head.weight.data.add_(0.125)
    with tiermem.shard(model, policy, device=where) as shards:
        # Where a gradient's terms cancel, what is left is rounding, of which AdamW with its usual
        # eps makes a whole step.
        optim = tiermem.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        losses, norms, is_early = [], [], policy.overlap == "backward"
        *batches, last = batches_of(policy, len(way) + 1, rank, shards.device)
        for step, given in enumerate(batches):
            if way[step] != way[max(0, step - 1)]:
                schedule_by(way[step], where)
            if moves:
                move = moves[step % len(moves)]
                shards.rehome(dataclasses.replace(shards.policy, **move))
            loss = loss_on(model, *given)
            loss.backward()
            assert bool(shards.program.attempted) == (is_early and where != "cpu" and step > 0)
            if not (policy.step_in_backward or is_early or step % 2):
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
            with torch.no_grad():
                losses.append(loss_on(model, *given))
            optim.step()  # while the device may still read the old weights
            optim.zero_grad()
            with torch.no_grad():
                losses.append(loss_on(model, *given))
                if rank:
                    # this rank asks for the others' weights while their steps may be pending
                    losses[-1].item()
            losses.append(loss.detach())
        assert not is_early or shards.steps.num_redone == 0
        losses += replaced_while_read(model, last)
        weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return {"losses": [each.item() for each in losses], "norms": norms, **weights}


def schedule_by(schedule: str, where: str) -> None:
    if where != "cpu":
        sim.set_schedule(schedule)


def replaced_while_read(model: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Losses before and after one weight is replaced, which the device may still read then."""
    name = next(name for name, _ in model.named_parameters() if name.endswith("layers.1.up.weight"))
    with torch.no_grad():
        before = loss_on(model, *given)
        model.load_state_dict({name: torch.full((97, 31), 0.25)}, strict=False)
        return [before, loss_on(model, *given)]


def overwritten_after_close(own: str) -> float:
    """How many tensors lose their values to a model that was trained and closed on a stream beside,
    whose memory they got."""
    model, num = seeded(Tower), 0
    tokens, targets = (each.to(own) for each in batch(0))
    shards = tiermem.shard(model, OffloadPolicy(stage=2), device=own)
    optim = tiermem.AdamW(model.parameters(), lr=1e-2)
    sim.synchronize(own)
    with torch.Stream(own):
        loss_on(model, tokens, targets).backward()
        shards.close()
    del optim
    later = [torch.ones(numel, device=own) for numel in (40_000, 20_000, 10_000, 100_000) * 4]
    sim.synchronize(own)
    for each in later:
        num += not bool((each.cpu() == 1.0).all())
    return float(num)


def apart(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference between two trainings."""
    assert mine.keys() == theirs.keys()
    pairs = ((torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])) for name in mine)
    return (
        torch.tensor([0.0, *((a - b).abs().max().item() for a, b in pairs if a.numel())])
        .max()
        .item()
    )  # NaN if any is


def main() -> None:
    backend, names, *words = sys.argv[2:]
    ways = [word.split(",") for word in words]
    History.is_due, History.is_last = True, lambda *_: True  # type: ignore[assignment,method-assign]
    with as_rank(backend) as (rank, out, _):
        own, found, twins = f"sim:{rank % 2}", dict[str, float](), dict[str, dict[str, Any]]()
        sim.set_device(rank % 2)

        def mutation() -> contextlib.AbstractContextManager[None]:
            return applied(ON_RANKS[names]) if names in ON_RANKS else contextlib.nullcontext()

        for name in cases_of(backend, names, dist.get_world_size()):
            if name == ASIDE:
                for schedule in dict.fromkeys(each for way in ways for each in way):
                    sim.set_schedule(schedule)
                    with mutation():
                        found[f"{name}; {schedule}"] = overwritten_after_close(own)
                continue
            place = Path(out.parent, f"{name}-{rank}".replace(" ", "_"))
            place.mkdir()
            usual = {"persistence_numel": 50, "paths": [place], "timeout_s": 60, "tile_numel": 8192}
            policy = OffloadPolicy(**usual | CASES[name])
            by_init = "by Init" in name
            there = "cpu" if "cpu" in backend and not by_init else own
            at_once = ["at_once"] * len(ways[0])
            grads = None if there == "cpu" else policy.grads
            same = twin_of(name, policy)
            if same not in twins:
                twins[same] = train(
                    there, dataclasses.replace(policy, grads=grads), at_once, rank, by_init
                )
            expected = twins[same]
            if dist.get_world_size() > 2:  # whose sums have another order on CPUs
                on_device = train(own, policy, at_once, rank, by_init)
                found[f"{name}; at once, beside CPUs"] = apart(on_device, expected)
                expected = on_device
            for way in ways:
                with mutation():
                    found[f"{name}; {','.join(way)}"] = apart(
                        train(own, policy, way, rank, by_init, MOVES.get(name, ())), expected
                    )
                if names in ON_RANKS and is_seen(found):
                    break
        torch.save(found, out)


def is_seen(found: dict[str, float]) -> bool:
    """Whether any rank has found a difference. Collective."""
    seen = [False] * dist.get_world_size()
    dist.all_gather_object(seen, any(each != 0.0 for each in found.values()))
    return any(seen)


def cases_of(backend: str, names: str, world: int) -> list[str]:
    """On four ranks every stage, and those that need so many."""
    if names == "on four":
        return sorted(ON_FOUR)
    if names != "all":
        return [ON_RANKS[names].home or "stage 3, host"]
    if "cpu" not in backend:
        return ON_DEVICES_ALONE
    stages = [f"stage {stage}" for stage in range(4)]
    return (
        [*stages, "stage 3, nvme", "qwZ", "qgZ", "qwZ and qgZ, nvme", *sorted(ON_FOUR)]
        if world == 4
        # first, while its memory is new
        else [ASIDE, *(name for name in CASES if name not in ON_FOUR)]
    )


if __name__ == "__main__":
    main()
