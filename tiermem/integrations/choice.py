"""Choice: the policy of a model that a training loop brings: given, read from a config, or computed
from the free memory.

    OffloadPolicy    taken as it is
    config           a DeepSpeed-style dict or JSON file; "auto" and missing values are the training loop's
    "auto"           the first of PLACES whose plan fits the free memory of this machine

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
from torch import nn

from tiermem.plans.budget import make_plan
from tiermem.policy import OffloadPolicy
from tiermem.ranks.topology import plan_topology, ranks_per_node
from tiermem.run.shards import Shards
from tiermem.swap.base.tier import Tier
from tiermem.swap.memory.accelerator import free_and_total, is_accelerator
from tiermem.units import registry
from tiermem.units.unit import divide

logger = logging.getLogger("tiermem")

Asked = OffloadPolicy | Mapping[str, Any] | str | os.PathLike[str]
"""A policy, a DeepSpeed-style config (a dict, or the path of a JSON file), or "auto"."""

AUTO = "auto"

PLACES = (
    (Tier.DEVICE, Tier.DEVICE),
    (Tier.DEVICE, Tier.HOST),
    (Tier.HOST, Tier.HOST),
    (Tier.HOST, Tier.NVME),
    (Tier.NVME, Tier.NVME),
)
"""Homes of the parameters and of the optimizer's states, fastest first."""

SHARE = 0.7
"""The part of the free memory that a computed plan may take; activations, batches and the
interpreter have the rest."""


class Room(NamedTuple):
    """Bytes that a computed plan may take."""

    host_bytes: int  # per node
    device_bytes: int  # per rank; 0 without an accelerator


def find_room(model: nn.Module, device: torch.device) -> Room:
    """Returns SHARE of the free memory. The weights of the model count as free: they move to the
    store."""
    weights = sum(
        param.nbytes
        for param in model.parameters()
        if param.device.type == "cpu" and not _is_virtual(param)
    )
    on_device = free_and_total(device)[0] if is_accelerator(device) else 0
    return Room(
        int(SHARE * (free_host_bytes() + weights * ranks_per_node())), int(SHARE * on_device)
    )


def compute_policy(
    model: nn.Module,
    num_moments: int,
    device: torch.device,
    world: int,
    folders: Sequence[str | os.PathLike[str]],
    room: Room,
    places: Sequence[tuple[Tier, Tier]] = PLACES,
    **fields: Any,
) -> OffloadPolicy:
    """Returns the policy of the first of `places` whose plan fits `room`. Allocates nothing; makes
    `folders` if a path is needed.

    Args:
        num_moments: moments per parameter that the optimizer keeps.
        world: ranks that share the model.
        folders: where the states rest if memory is too small.
        fields: of the policy, which are not to be chosen.

    Raises ValueError, with the arithmetic, when no plan fits.
    """
    is_gpu = is_accelerator(device)
    ranks = ranks_per_node()
    error = None
    for params, optim in places:
        uses_nvme = Tier.NVME in (params, optim)
        policy = OffloadPolicy(
            params=params,
            optim=optim,
            num_moments=num_moments,
            paths=folders if uses_nvme else (),
            host_bytes=room.host_bytes if uses_nvme else None,
            early_steps=True,
            **fields,
        )
        topology = plan_topology(world, policy, ranks)
        try:
            plan = make_plan(
                divide(model, policy, topology.num_shards), policy, topology, is_gpu, ranks
            )
        except ValueError as found:
            error = found
            continue
        if plan.host_bytes * ranks <= room.host_bytes and (
            not is_gpu or plan.device_bytes <= room.device_bytes
        ):
            if uses_nvme:
                for folder in folders:
                    Path(folder).mkdir(parents=True, exist_ok=True)
            logger.info(
                "auto: parameters on %s, optimizer states on %s: %.1f of %.1f MiB of host memory",
                params.name,
                optim.name,
                plan.host_bytes * ranks / 2**20,
                room.host_bytes / 2**20,
            )
            return policy
    raise ValueError(
        f"no plan fits {room.host_bytes} bytes of host memory and {room.device_bytes} bytes of "
        f"{device}, {SHARE:.0%} of those "
        f"free: give a policy. {error or ''}".rstrip()
    )


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
