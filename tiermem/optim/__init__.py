"""Optimizers: the step of sharded models, whose states rest on a tier, and of ordinary tensors.

Files in order; each imports only files before it:

    rules        the moments and scalars of each optimizer, the step of one piece, the loss scale
    tile         a range of one unit's states that is read, stepped and written as one
    tile_stream  an accelerator's buffers for tiles that rest elsewhere and are stepped there
    tile_work    the work on a tile: a step, a visit, a fill
    tile_step    a pass over tiles: the bytes to read and write, the work in a buffer
    tiles        all tiles of a sharded model
    tentative    steps units while backward runs, on assumptions that the step compares
    local        this rank's part of an ordinary parameter: the whole, or a DTensor's shard
    ordinary     states of ordinary parameters, as tensors beside them
    shown        `optimizer.state` of parameters whose states rest elsewhere
    resting      states of ordinary parameters that rest on a tier
    sharded      the whole step of a sharded model
    base         one torch optimizer for sharded and ordinary parameters
    classes      Adam, AdamW, Adagrad, Lion, SGD, Muon: torch's arguments and checks
"""

from __future__ import annotations

from tiermem.optim.base import NativeOptimizer
from tiermem.optim.classes import SGD, Adagrad, Adam, AdamW, Lion, Muon
from tiermem.optim.sharded import NonFiniteGradients

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Muon",
    "NativeOptimizer",
    "NonFiniteGradients",
]
