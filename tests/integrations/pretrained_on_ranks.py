"""Launched by test_from_pretrained.py: opens models on all ranks.

pretrained_on_ranks.py FOLDER SAVED     every rank writes {name: (weights, the part of the elements that it keeps)}
"""

from __future__ import annotations

from pathlib import Path

import torch
from launch import as_rank

import tiermem
from tiermem import OffloadPolicy
from tiermem.integrations import models  # noqa: F401  # imported before the ranks are forked


def main() -> None:
    with as_rank() as (_, out, (saved,)):
        found = {}
        for name in ("gpt2", "mixtral"):
            policy = OffloadPolicy(persistence_numel=50)
            model = tiermem.from_pretrained(Path(saved) / name, policy=policy)
            kept = sum(param.ds_tensor.numel() for param in model.parameters())
            share = kept / sum(param.ds_numel for param in model.parameters())
            with tiermem.shard(model, policy, is_trained=False):
                found[name] = {key: each.clone() for key, each in model.state_dict().items()}, share
        torch.save(found, out)


if __name__ == "__main__":
    main()
