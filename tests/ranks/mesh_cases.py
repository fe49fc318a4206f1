"""The cases of MiCS, hpZ and quantised communication that four ranks run: two nodes of two, told by
LOCAL_WORLD_SIZE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiermem import OffloadPolicy, Tier

NUM_STEPS = 3
RANKS = 4
RANKS_ON_NODE = 2
TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}

MICS: dict[str, dict[str, Any]] = {
    **{f"mics 2 {tier}": {"shard_group_size": 2, "tier": tier} for tier in TIERS},
    "mics 1 none": {"shard_group_size": 1, "tier": "none"},
    "mics 4 two stages nvme": {"shard_group_size": 4, "two_stage_gather": True, "tier": "nvme"},
}
HPZ: dict[str, dict[str, Any]] = {
    f"hpz 2 {tier}": {"secondary_group_size": 2, "tier": tier} for tier in ("none", "nvme")
}
QUANTISED: dict[str, dict[str, Any]] = {
    "qwz none": {"quantised_gather": True, "tier": "none"},
    "qwz bf16 nvme": {"quantised_gather": True, "tier": "nvme"},
    "qgz none": {"quantised_reduction": True, "tier": "none"},
    "qwz qgz hpz cpu": {
        "quantised_gather": True,
        "quantised_reduction": True,
        "secondary_group_size": 2,
        "tier": "cpu",
    },
}
ON_TWO_HOSTS: dict[str, dict[str, Any]] = {
    "all ranks nvme": {"tier": "nvme"},
    "mics 1 nvme": {"shard_group_size": 1, "tier": "nvme"},
}
CASES = (
    {"all ranks none": {"tier": "none"}, "all ranks bf16 nvme": {"tier": "nvme"}}
    | MICS
    | HPZ
    | QUANTISED
)


def policy_of(case: str, nvme: Path) -> OffloadPolicy:
    fields = dict((CASES | ON_TWO_HOSTS)[case])
    tier = TIERS[fields.pop("tier")]
    return OffloadPolicy(
        params=tier, optim=tier, paths=[nvme], persistence_numel=50, tile_numel=4096, **fields
    )
