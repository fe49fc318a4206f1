"""Room: the memory that is free on this machine, and the policy with the fastest plan that it
holds.

    free memory - activations of a batch, where they are known  ->  Room  ->  forecast/choose.py  ->  OffloadPolicy
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tiermem.forecast.cards import assumed_speed
from tiermem.forecast.choose import HOMES, Placement, agreed, choose
from tiermem.forecast.rates import Compute
from tiermem.plans.activations import LossOf, PredictedActivations, activations_of
from tiermem.plans.budget import make_plan
from tiermem.policy import LEAST_STAGES, OffloadPolicy, check_kind, check_model
from tiermem.ranks.joining import join_ranks
from tiermem.ranks.topology import plan_topology, ranks_per_node
from tiermem.run.fill import MARGIN
from tiermem.swap.base.tier import Tier
from tiermem.swap.disk.paths import as_paths
from tiermem.swap.memory.accelerator import (
    activate,
    find_device,
    free_and_total,
    is_accelerator,
)
from tiermem.swap.memory.free import free_host_bytes
from tiermem.units.unit import divide

logger = logging.getLogger("tiermem")

_SHARE = 0.7
"""The part of the free memory that a computed plan may take where activations are not known; these,
batches and the interpreter have the rest."""
_SHARE_WITH_ACTIVATIONS = 1 - MARGIN
"""The part of the free memory that plan and activations may take together."""
USUAL_TOKENS = 4096
_BARELY = 1 - 2**-10
"""The `optim_ratio` of a first plan: steps on the accelerator are prepared for, and next to no
states rest there."""


class Room(NamedTuple):
    """Bytes that a computed plan may take."""

    host_bytes: int  # per node
    device_bytes: int  # per rank; 0 without an accelerator
    forward_flops: int = 0  # of a micro-batch's forward; 0: unknown


def find_room(
    model: nn.Module,
    device: torch.device,
    activations: PredictedActivations | None = None,
    group: dist.ProcessGroup | None = None,
) -> Room:
    """Returns what a plan may take of the free memory: _SHARE of it, or what activations leave. The
    weights of the model count as free: they move to the store. Collective where there are ranks,
    which all get the least of their numbers."""
    weights = sum(
        param.nbytes
        for param in model.parameters()
        # not those without memory of their own, such as zero.Init builds
        if param.device.type == "cpu" and 0 not in param.stride()
    )
    is_gpu = is_accelerator(device)
    ranks = ranks_per_node()
    on_host = free_host_bytes() + weights * ranks
    on_device = free_and_total(device)[0] if is_gpu else 0
    if activations is None:
        logger.info(
            "auto: the activations of a batch are not known: %.0f %% is planned", 100 * _SHARE
        )
        room = Room(int(_SHARE * on_host), int(_SHARE * on_device))
    elif is_gpu:
        left = int(_SHARE_WITH_ACTIVATIONS * on_device) - activations.peak_bytes
        room = Room(int(_SHARE * on_host), left, activations.forward_flops)
    else:
        left = int(_SHARE_WITH_ACTIVATIONS * on_host) - activations.peak_bytes * ranks
        room = Room(left, 0, activations.forward_flops)
    if dist.is_initialized():
        least = torch.tensor(room, dtype=torch.int64, device=device if is_gpu else None)
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        room = Room(*least.tolist())
    host_bytes = max(1, room.host_bytes)
    return room._replace(host_bytes=host_bytes, device_bytes=max(int(is_gpu), room.device_bytes))


def choose_policy(
    model: nn.Module,
    policy: OffloadPolicy | None = None,
    moved: Collection[str] = HOMES,
    loss_of: LossOf | None = None,
    batch: Any = None,
    device: torch.device | str | None = None,
    num_micro: int = 1,
    group: dist.ProcessGroup | None = None,
    rehomes: bool = True,
) -> OffloadPolicy:
    """Returns the policy with the fastest plan that the free memory of this machine holds, by
    predicted time.

    Args:
        model: not sharded; it is not changed, and may be on the meta device.
        policy: what is not to be chosen: all fields that are set, but those of `moved`. With
            `paths` states may rest on NVMe where memory is too small. Default: OffloadPolicy().
        moved: the fields that are chosen though they are set: "params" and "optim", or one of
            them.
        loss_of, batch: (model, batch) -> loss, and the largest micro-batch: it is run on tensors
            without values, to predict what activations take. Without them 30 % of the free memory
            is left to activations.
        device: as in `shard`.
        num_micro: micro-batches of a step.
        group: the ranks that share the model; default: the world.
        rehomes: whether states may move after the first step, which measures the activations where
            no batch is given (`rehomes_states`). False for Muon, whose matrices may not.

    Collective; blocks for seconds. Allocates no states; makes the folders of `paths` that are used.
    Raises ValueError, with the arithmetic, when no plan fits, and for a batch without `loss_of`.
    """
    check_model(model)
    check_kind(policy)
    if unknown := [each for each in moved if each not in HOMES]:
        raise ValueError(f"moved names {unknown}; allowed are {', '.join(map(repr, HOMES))}")
    if batch is not None and loss_of is None:
        raise ValueError(
            "a batch is given and no loss_of, which computes its loss, (model, batch) -> loss: "
            "give both, or none"
        )
    if num_micro < 1:
        raise ValueError(f"num_micro is {num_micro}; a step has 1 micro-batch or more")
    on = find_device(device)
    activate(on)
    base = policy or OffloadPolicy()
    join_ranks(base.timeout_s, on, base.join_timeout_s)
    predicted = None if loss_of is None else activations_of(model, loss_of, batch, on)
    room = find_room(model, on, predicted, group)
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    return compute_policy(model, base, on, world, room, num_micro, moved, rehomes, group)


def compute_policy(
    model: nn.Module,
    policy: OffloadPolicy,
    device: torch.device,
    world: int,
    room: Room,
    num_micro: int = 1,
    moved: Collection[str] = HOMES,
    rehomes: bool = True,
    group: dist.ProcessGroup | None = None,
) -> OffloadPolicy:
    """`choose_policy` in a room that the caller has found, or limited.

    room: without `forward_flops` a micro-batch is assumed to have 4,096 tokens. A budget that the
    policy names comes before it. Ranks may have other cards: the speed is that of rank 0's.
    """
    is_gpu = is_accelerator(device)
    flops, rates = assumed_speed(device)
    numel = sum(param.numel() for param in model.parameters())
    rates, compute = agreed(rates, Compute.of_peak(flops, 1), group)
    num_tokens = room.forward_flops / (2 * numel) or USUAL_TOKENS
    compute = Compute(compute.forward_s * num_tokens, compute.backward_s * num_tokens)
    moved = [each for each in moved if policy.stage >= LEAST_STAGES[each]]
    start: dict[str, Any] = dict.fromkeys(moved, Tier.HOST)
    host_bytes = policy.host_bytes or room.host_bytes
    usual = dataclasses.replace(policy, host_bytes=host_bytes, early_steps=True, **start)
    placements = [Placement(device_bytes=room.device_bytes)] if is_gpu else ()
    try:
        choice = choose(
            model,
            usual,
            rates,
            compute,
            world,
            ranks_per_node(),
            is_gpu,
            num_micro,
            placements,
            moved=moved,
        )
    except ValueError as error:
        raise ValueError(
            f"no plan fits {host_bytes} bytes of host memory and {room.device_bytes} bytes of "
            f"{device}, which are free beside activations: give a policy. {error}"
        ) from error
    chosen = choice.policy
    if is_gpu and not room.forward_flops and policy.device_bytes is None:
        chosen = dataclasses.replace(chosen, fills_device=True)
        is_open = "optim" in moved and policy.streamed_ratio is None
        if rehomes and is_open and chosen.optim is not Tier.DEVICE:
            chosen = _measured(model, chosen, world)
    if chosen.uses_nvme:
        for each in as_paths(policy.paths):
            Path(each.path).mkdir(parents=True, exist_ok=True)
    else:
        budget = chosen.host_bytes if is_gpu else policy.host_bytes
        chosen = dataclasses.replace(chosen, paths=(), host_bytes=budget)
    logger.info("auto: %s. %s", choice, " ".join(f"{reason}." for reason in choice.reasons))
    return chosen


def _measured(model: nn.Module, chosen: OffloadPolicy, world: int) -> OffloadPolicy:
    """A policy whose first step takes the least memory of an accelerator, and whose states go
    there as far as that step leaves room; where HOST and NVMe cannot hold all of them, the policy
    that was chosen."""
    follows = dataclasses.replace(chosen, rehomes_states=True)
    least = dataclasses.replace(follows, optim_ratio=max(_BARELY, chosen.optim_ratio))
    ranks_on_node = ranks_per_node()
    topology = plan_topology(world, least, ranks_on_node)
    try:
        make_plan(divide(model, least, topology.num_shards), least, topology, True, ranks_on_node)
    except ValueError:
        return follows
    return least
