"""Agreed: what all ranks must have given an engine alike, compared before anything is sharded (zero/ranks/agreement)."""

from __future__ import annotations

import torch
from torch import nn

from tiermem import __version__
from tiermem.config import TiermemConfig
from tiermem.config.batch import BatchSizes
from tiermem.engine.choice import OptimizerChoice
from tiermem.zero.ranks.agreement import agree
from tiermem.zero.ranks.topology import find_topology


def agree_on_engine(
    config: TiermemConfig, sizes: BatchSizes, choice: OptimizerChoice | None, model: nn.Module, device: torch.device
) -> None:
    """Compares versions, the config, sizes of batches, the optimizer and its groups. Collective; blocks.

    Raises ValueError on every rank, naming what differs.
    """
    policy = config.policy()
    facts = {"tiermem": __version__, "torch": torch.__version__, **config.shared_by_ranks()}
    facts |= {"train_batch_size": sizes.total, "train_micro_batch_size_per_gpu": sizes.micro}
    facts["gradient_accumulation_steps"] = sizes.accumulation
    facts |= choice.facts(model) if choice is not None else {"optimizer": "none"}
    agree(find_topology(policy.stage, None, policy.timeout_s, device), facts, "tiermem.initialize")
