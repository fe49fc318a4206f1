"""All programs, by name, and the policies under which each is run."""

from __future__ import annotations

from pathlib import Path

import adapter_programs
import layer_programs
import loop_programs
import passing_programs
import transformers_programs
from faces import Program

from tiermem import OffloadPolicy, Tier

PROGRAMS: dict[str, Program] = {
    **layer_programs.PROGRAMS,
    **loop_programs.PROGRAMS,
    **passing_programs.PROGRAMS,
    **adapter_programs.PROGRAMS,
    **transformers_programs.PROGRAMS,
}
HOMES = {"device": Tier.DEVICE, "nvme": Tier.NVME}
TIERS = {"host": Tier.HOST, **HOMES}


def policy_of(home: str, nvme: Path) -> OffloadPolicy:
    """Parameters and optimizer states at a home; only what is tiny stays gathered."""
    tier = TIERS[home]
    return OffloadPolicy(params=tier, optim=tier, paths=[nvme], persistence_numel=20, timeout_s=60)
