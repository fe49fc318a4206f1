"""Optimizers: the step over states that rest on a tier, and over ordinary tensors.

adam adagrad lion sgd muon    what users build: torch's arguments, groups, checks
base                          what they share: one torch optimizer over sharded and ordinary parameters
rules, stepping               what each keeps and the scalars of a step; one step of one parameter
ordinary, state_dicts         states of ordinary parameters; torch's own format, of both kinds
sharded                       a sharded model's step as a whole
tiles, tile, tile_step        the states of sharded parameters, cut into tiles: read, stepped, written
layout                        where the parts of a tile's states lie
scaling                       the loss scale of fp16

The classes are imported when first asked for: what the plan needs of the layout shall not need the machinery.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiermem.optim.adagrad import Adagrad as Adagrad
    from tiermem.optim.adam import Adam as Adam
    from tiermem.optim.adam import AdamW as AdamW
    from tiermem.optim.base import NativeOptimizer as NativeOptimizer
    from tiermem.optim.lion import Lion as Lion
    from tiermem.optim.muon import Muon as Muon
    from tiermem.optim.sgd import SGD as SGD
    from tiermem.optim.sharded import NonFiniteGradients as NonFiniteGradients

_HOMES = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "Adam": "adam",
    "AdamW": "adam",
    "Lion": "lion",
    "Muon": "muon",
    "NativeOptimizer": "base",
    "NonFiniteGradients": "sharded",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tiermem.optim.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tiermem.optim' has no attribute {name!r}")
