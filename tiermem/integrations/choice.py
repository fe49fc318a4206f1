"""Choice: the policy of a model that a training loop brings: given, read from a config, or computed
from the free memory.

    OffloadPolicy    taken as it is
    config           a DeepSpeed-style dict or JSON file; "auto" and missing values are the training loop's
    "auto"           the fastest that the free memory of this machine holds, by predicted time; what activations take of it
                     is found by a run on tensors without values

The optimizer of the loop decides how many moments the plan makes room for.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tiermem.forecast.cards import assumed_speed
from tiermem.forecast.choose import Placement, choose
from tiermem.forecast.rates import Compute
from tiermem.plans.activations import PredictedActivations
from tiermem.policy import OffloadPolicy
from tiermem.ranks.topology import ranks_per_node
from tiermem.run.shards import Shards
from tiermem.swap.base.tier import Tier
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.units import registry

logger = logging.getLogger("tiermem")

Asked = OffloadPolicy | Mapping[str, Any] | str | os.PathLike[str]
"""A policy, a DeepSpeed-style config (a dict, or the path of a JSON file), or "auto"."""

AUTO = "auto"

_SHARE = 0.7
"""The part of the free memory that a computed plan may take where activations are not known; these,
batches and the interpreter have the rest."""
_SHARE_WITH_ACTIVATIONS = 0.92
"""The part of the free memory that plan and activations may take together: gaps between blocks of
the allocator and workspaces of libraries have the rest."""
_USUAL_TOKENS = 4096


class Room(NamedTuple):
    """Bytes that a computed plan may take."""

    host_bytes: int  # per node
    device_bytes: int  # per rank; 0 without an accelerator
    forward_flops: int = 0  # of a micro-batch's forward; 0: unknown


def find_room(
    model: nn.Module, device: torch.device, activations: PredictedActivations | None = None
) -> Room:
    """Returns what a plan may take of the free memory: _SHARE of it, or what activations leave. The
    weights of the model count as free: they move to the store. Collective where there are ranks,
    which all get the least of their numbers."""
    weights = sum(
        param.nbytes
        for param in model.parameters()
        if param.device.type == "cpu" and not _is_virtual(param)
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
    else:
        part = _SHARE_WITH_ACTIVATIONS
        peak = activations.peak_bytes
        room = Room(
            int((_SHARE if is_gpu else part) * on_host) - (0 if is_gpu else peak * ranks),
            int(part * on_device) - (peak if is_gpu else 0),
            activations.forward_flops,
        )
    if dist.is_initialized():
        least = torch.tensor(room, dtype=torch.int64, device=device if is_gpu else None)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        room = Room(*least.tolist())
    host_bytes = max(1, room.host_bytes)
    return room._replace(host_bytes=host_bytes, device_bytes=max(int(is_gpu), room.device_bytes))


def compute_policy(
    model: nn.Module,
    num_moments: int,
    device: torch.device,
    world: int,
    folders: Sequence[str | os.PathLike[str]],
    room: Room,
    num_micro: int = 1,
    home: Tier | None = None,
    **fields: Any,
) -> OffloadPolicy:
    """Returns the policy with the fastest plan that `room` holds, by predicted time. Allocates
    nothing; makes `folders` if a path is needed.

    Args:
        num_moments: moments per parameter that the optimizer keeps.
        world: ranks that share the model.
        folders: where states rest if memory is too small.
        room: without `forward_flops` a micro-batch is assumed to have 4,096 tokens.
        num_micro: micro-batches of a step.
        home: of weights and states; None: it is chosen.
        fields: of the policy, which are not to be chosen.

    Raises ValueError, with the arithmetic, when no plan fits.
    """
    is_gpu = is_accelerator(device)
    flops, rates = assumed_speed(device)
    numel = sum(param.numel() for param in model.parameters())
    compute = Compute.of_peak(flops, 1)
    num_tokens = room.forward_flops / (2 * numel) or _USUAL_TOKENS
    compute = Compute(compute.forward_s * num_tokens, compute.backward_s * num_tokens)
    usual = OffloadPolicy(
        params=home or Tier.HOST,
        optim=home or Tier.HOST,
        num_moments=num_moments,
        paths=folders if home in (None, Tier.NVME) else (),
        host_bytes=room.host_bytes,
        early_steps=True,
        **fields,
    )
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
            moves_homes=home is None,
        )
    except ValueError as error:
        raise ValueError(
            f"no plan fits {room.host_bytes} bytes of host memory and {room.device_bytes} bytes of "
            f"{device}, which are free beside activations: give a policy. {error}"
        ) from error
    policy = choice.policy
    if Tier.NVME in (policy.params, policy.optim, policy.grads):
        for folder in folders:
            Path(folder).mkdir(parents=True, exist_ok=True)
    else:
        policy = dataclasses.replace(
            policy, paths=(), host_bytes=policy.host_bytes if is_gpu else None
        )
    logger.info("auto: %s. %s", choice, " ".join(f"{reason}." for reason in choice.reasons))
    return policy


def with_moments(policy: OffloadPolicy, num_moments: int, keep: int | None) -> OffloadPolicy:
    """Returns a policy that makes room for these moments and keeps at least `keep` durable steps in
    the store's files."""
    return dataclasses.replace(policy, num_moments=num_moments, keep=max(policy.keep, keep or 1))


def owner_of(model: nn.Module) -> Shards | None:
    """The Shards of a sharded model, else None."""
    owners = (registry.owner_of(param) for param in model.parameters())
    return next((owner for owner in owners if isinstance(owner, Shards)), None)


def set_called_together(model: nn.Module, is_so: bool) -> None:
    """Says whether all ranks must call a model together: transformers' `generate` then goes on
    until the last rank has ended.

    transformers asks for it by this attribute; it was made for FSDP, which needs the same.
    """
    for module in model.modules():
        if is_so and hasattr(module, "generate"):
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
        else:
            module.__dict__.pop("_is_fsdp_managed_module", None)


def free_host_bytes() -> int:
    """Bytes of memory that this process may still take: of the machine, and of its control
    group."""
    with open("/proc/meminfo", encoding="ascii") as file:
        table = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in file}
    found = [table["MemAvailable"]]
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        numbers = [_number(Path(each)) for each in (most, used)]
        if None not in numbers:
            found.append(max(0, numbers[0] - numbers[1]))  # type: ignore[operator]  # neither is None
    return min(found)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):  # missing, or "max"
        return None


def _is_virtual(param: nn.Parameter) -> bool:
    """Whether a parameter has no memory of its own: built under zero.Init, or on the meta
    device."""
    return param.is_meta or 0 in param.stride()
