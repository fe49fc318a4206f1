"""Models whose frozen matrices rest in blocks, and the plain twin that holds the same values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiermem import OffloadPolicy, Tier
from tiermem.units.quantised import FORMATS, pack, unpack

SMALL = 50  # elements of parameters that stay gathered


def policy_of(form: str | None, tier: Tier, path: Path, **fields: Any) -> OffloadPolicy:
    settings = {
        "params": tier,
        "optim": tier,
        "paths": [path],
        "persistence_numel": SMALL,
        "frozen_quant_type": form,
    }
    return OffloadPolicy(**(settings | fields))


def frozen(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that rest in blocks under `policy_of`."""
    for name, param in model.named_parameters():
        if not param.requires_grad and param.dim() > 1 and param.numel() > SMALL:
            yield name, param


def blocked(model: nn.Module, form: str) -> nn.Module:
    """A copy whose frozen matrices hold what their blocks do."""
    twin, kind = copy.deepcopy(model), FORMATS[form]
    for _, param in frozen(twin):
        flat = param.detach().reshape(-1)
        param.data = unpack(pack(flat, kind), flat.numel(), torch.empty_like(flat), form=kind).view(
            param.shape
        )
    return twin
