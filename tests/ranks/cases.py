"""The cases that the rank tests run: ZeRO stage and where things rest. Shared by the tests and the script under torchrun."""

from __future__ import annotations

from pathlib import Path

from tiermem import OffloadPolicy, Tier

NUM_STEPS = 3
DTYPES = ("float32", "bfloat16")
TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
CASES = [
    "stage 0 none",
    *(f"stage {stage} {tier}" for stage in (1, 2, 3) for tier in TIERS),
    "stage 3 nvme, gradients too",
    "stage 3 nvme, two unit buffers",
    "init stage 3 cpu",
    "init stage 3 nvme",
]


def policy_of(case: str, nvme: Path) -> OffloadPolicy:
    words = case.replace(",", "").removeprefix("init ").split()
    stage, tier = int(words[1]), TIERS[words[2]]
    return OffloadPolicy(
        stage=stage,
        params=tier if stage == 3 else Tier.DEVICE,
        optim=tier,
        grads=Tier.NVME if "gradients" in words else None,
        unit_buffers=2 if "two" in words else None,
        paths=[nvme],
        persistence_numel=50,
        tile_numel=4096,
    )
