"""Homes: where weights, gradients and states lie, by name, as fields of OffloadPolicy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiermem import OffloadPolicy, Tier

HOMES: dict[str, dict[str, Any]] = {
    "nvme": {"params": Tier.NVME, "optim": Tier.NVME},
    "host": {"params": Tier.HOST, "optim": Tier.HOST},
    "device": {"params": Tier.DEVICE, "optim": Tier.DEVICE},
    "states on host": {"params": Tier.DEVICE, "optim": Tier.HOST},
    "mixed": {"params": Tier.NVME, "optim": Tier.HOST, "host_param_numel": 9000, "persistence_numel": 0},
    "host, states on device": {"params": Tier.HOST, "optim": Tier.DEVICE},
    "host, half of the states": {"params": Tier.HOST, "optim": Tier.HOST, "optim_ratio": 0.5},
    "nvme, half of the states": {"params": Tier.NVME, "optim": Tier.NVME, "optim_ratio": 0.5},
    "host, gradients on device": {"params": Tier.HOST, "optim": Tier.HOST, "grads": Tier.DEVICE},
    "nvme, gradients on device": {"params": Tier.NVME, "optim": Tier.NVME, "grads": Tier.DEVICE},
    "host, most sent": {"params": Tier.HOST, "optim": Tier.HOST, "streamed_ratio": 0.8},
    "nvme, sent": {"params": Tier.NVME, "optim": Tier.NVME, "streamed_ratio": 1.0},
    (EARLY := "nvme, stepped early"): {"params": Tier.NVME, "optim": Tier.NVME, "overlap": "backward"},
    (UNDONE := "host, stepped early"): {
        "params": Tier.HOST, "optim": Tier.HOST, "grads": Tier.DEVICE, "overlap": "backward",
    },
}  # fmt: skip
MAIN = ("device", "nvme")
"""The homes that differ most: with a program at both, little is left that only another would show."""


def policy_of(home: str, folder: Path, **fields: Any) -> OffloadPolicy:
    """The policy of a home whose disk is `folder`. What the home says wins over `fields`; by default
    only what is tiny stays gathered."""
    usual = {"paths": [folder], "persistence_numel": 20, "timeout_s": 60}
    return OffloadPolicy(**(usual | fields | HOMES[home]))


def overlapped(folder: Path, overlap: str, **fields: Any) -> OffloadPolicy:
    """All states on NVMe, in few buffers and small tiles, stepped as `overlap` says."""
    sizes = {"persistence_numel": 100, "tile_numel": 4096, "tile_buffers": 3, "unit_buffers": 2}
    usual = HOMES["nvme"] | {"paths": [folder], "overlap": overlap}
    return OffloadPolicy(**(sizes | usual | fields))


def all_at(home: Tier, folder: Path, **fields: Any) -> OffloadPolicy:
    """Weights and states at one tier."""
    usual = {"params": home, "optim": home, "paths": [folder], "persistence_numel": 50}
    return OffloadPolicy(**(usual | fields))


def all_on_nvme(folder: Path, **fields: Any) -> OffloadPolicy:
    """Weights and states on NVMe, however small they are."""
    return all_at(Tier.NVME, folder, **({"persistence_numel": 0} | fields))
