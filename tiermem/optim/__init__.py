"""Optimizers: the step of sharded models, whose states rest on a tier, and of ordinary tensors.

Files in order; each imports only files before it:

    rules        the moments and scalars of each optimizer, the step of one piece, the loss scale
    tile         a range of one unit's states that is read, stepped and written as one
    tile_step    a pass over tiles: the bytes to read and write, the work in a buffer
    tiles        all tiles of a sharded model
    ordinary     states of ordinary parameters
    sharded      the whole step of a sharded model
    base         one torch optimizer for sharded and ordinary parameters
    classes      Adam, AdamW, Adagrad, Lion, SGD, Muon: torch's arguments and checks

A class is imported when it is first used, so that importing the plan does not import the optimizers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiermem.optim.base import NativeOptimizer as NativeOptimizer
    from tiermem.optim.classes import SGD as SGD
    from tiermem.optim.classes import Adagrad as Adagrad
    from tiermem.optim.classes import Adam as Adam
    from tiermem.optim.classes import AdamW as AdamW
    from tiermem.optim.classes import Lion as Lion
    from tiermem.optim.classes import Muon as Muon
    from tiermem.optim.sharded import NonFiniteGradients as NonFiniteGradients

_HOMES = {
    **dict.fromkeys(("SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon"), "tiermem.optim.classes"),
    "NativeOptimizer": "tiermem.optim.base",
    "NonFiniteGradients": "tiermem.optim.sharded",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tiermem.optim' has no attribute {name!r}")
