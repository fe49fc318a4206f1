"""Do models with difficult habits train as they do unsharded?

The twin is the same model, unsharded, with the same optimizer: losses and weights are equal to the
bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import models
from programs.twins import assert_same_tensors, is_absent, seeded, train_steps
from torch import nn

import tiermem
from tiermem import OffloadPolicy, Tier

HOMES = [Tier.HOST, Tier.NVME]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": models.NanoGPT,
    "llama": models.llama,
    "llama, tied": functools.partial(models.llama, tied=True),
    "llama, checkpointed": functools.partial(models.checkpointed_llama, False),
    "llama, checkpointed reentrantly": functools.partial(models.checkpointed_llama, True),
    "bare containers": models.BareContainers,
    "tied": models.tied_tower,
    "frozen": models.frozen_tower,
    "frozen, tied": lambda: models.tied_tower().requires_grad_(True),
    "unused blocks": functools.partial(models.ShortTower, skips=True),
}
for _outputs in ("tensor", "dict", "dataclass"):
    for _checkpoint in (None, False, True):
        for _rounds in (1, 2):
            MODELS[f"{_outputs}, checkpoint {_checkpoint}, {_rounds} rounds"] = functools.partial(
                models.ShortTower, outputs=_outputs, checkpoint=_checkpoint, rounds=_rounds
            )


# Each pair of any two values is in `make test`, all combinations in `make test-all`.
COMBINATIONS = [
    pytest.param(
        kind, home, in_backward, marks=[pytest.mark.slow] if (i + j + in_backward) % 2 else []
    )
    for i, kind in enumerate(MODELS)
    for j, home in enumerate(HOMES)
    for in_backward in (False, True)
]


@pytest.mark.parametrize(("kind", "home", "step_in_backward"), COMBINATIONS)
def test_model_trains_as_its_plain_twin(
    kind: str, home: Tier, step_in_backward: bool, tmp_path: Path
) -> None:
    model = seeded(MODELS[kind])
    plain = copy.deepcopy(model)
    expected = steps(plain)
    policy = OffloadPolicy(
        params=home,
        optim=home,
        paths=[tmp_path],
        persistence_numel=50,
        step_in_backward=step_in_backward,
    )
    with tiermem.shard(model, policy) as shards:
        assert steps(model) == expected
        assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
        assert (shards.store.stats().nvme_read_bytes > 0) == (home is Tier.NVME)


def test_a_nan_that_was_never_fetched_would_show(tmp_path: Path) -> None:
    """The tests above would fail if a unit were missing: released weights are NaN."""
    model = seeded(models.ShortTower)
    with tiermem.shard(
        model, OffloadPolicy(params=Tier.NVME, paths=[tmp_path], persistence_numel=50)
    ):
        assert all(
            is_absent(p)
            for p in model.layers[0].up.parameters()
            if p.numel() > 50 and not p.is_contiguous()
        )


def steps(model: nn.Module) -> list[float]:
    losses = train_steps(
        model, tiermem.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), range(4)
    )
    assert all(torch.isfinite(torch.tensor(losses)))
    return losses
