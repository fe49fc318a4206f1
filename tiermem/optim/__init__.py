"""Optimizers: the step over states that rest on a tier, and over ordinary tensors.

Files in order: each imports only files before it.

    rules        what each optimizer keeps for a parameter, the scalars of a step, the step of one piece, the loss scale
    tile         a range of one unit's states that is read, stepped and written as one
    tile_step    a pass over tiles: which bytes are read and written, what is done to each in a buffer
    tiles        all tiles of a sharded model
    ordinary     states of ordinary parameters
    sharded      a sharded model's step as a whole
    base         one torch optimizer over sharded and ordinary parameters
    classes      Adam, AdamW, Adagrad, Lion, SGD, Muon: torch's arguments and checks

The classes are imported when they are first used, so that the plan does not import the machinery.
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
