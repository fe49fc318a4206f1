"""The process group of device tensors, "simccl", which torch.distributed makes where NCCL would be
made for CUDA.

    dist.init_process_group("cpu:gloo,sim:simccl")      or "simccl" alone; new_group and DeviceMesh follow

Collectives run when their stream gets there; `work.wait()` makes the current stream wait, not the
host. The bytes travel by gloo. simulator/group.h says how ranks that are late wait for one another.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist


def register(sim: Any) -> None:
    """Makes torch.distributed know the backend; `sim` is the C++ module."""
    if not dist.is_available() or not dist.is_gloo_available():
        return

    def create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("simccl-gloo", store), rank, size, timeout=timeout
        )
        made = sim.Group(gloo, store, rank, size, timeout)
        world = dist.group.WORLD  # None while it is made
        if world is not None and world.bound_device_id is not None:
            world._get_backend(world.bound_device_id).split()
        return made

    dist.Backend.register_backend("simccl", create, devices=["sim"])
