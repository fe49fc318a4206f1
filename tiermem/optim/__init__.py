"""Optimizers: the step of sharded models, whose states rest on a tier, and of ordinary tensors.

Files in order; each imports only files before it:

    rules         the step of one piece by the rule of its optimizer, the loss scale
    local         this rank's part of an ordinary parameter: the whole, or a DTensor's shard
    ordinary      states of ordinary parameters, as tensors beside them
    tile          a range of one unit's states that is read, stepped and written as one
    at_rest       states in tiles that rest on a tier, read and written parameter by parameter
    tile_stream   an accelerator's buffers for what it steps and what rests elsewhere
    tile_work     the work on a tile: a step, a visit, a fill
    tile_step     a pass over tiles: the bytes to read and write, the work in a buffer
    tiles         all tiles of a sharded model
    tentative     steps units while backward runs, on assumptions that the step compares
    resting       the tiles of ordinary parameters, whose states rest on a tier
    shown         `optimizer.state` of parameters whose states rest elsewhere
    sharded       the whole step of a sharded model
    base          one torch optimizer for sharded and ordinary parameters

The package itself holds the class of every optimizer: its face (optimizers/) before the steps of
all.
"""

from __future__ import annotations

from tiermem.optim.base import NativeOptimizer
from tiermem.optim.sharded import NonFiniteGradients
from tiermem.optimizers.adagrad import AdagradFace
from tiermem.optimizers.adam import AdamFace, AdamWFace
from tiermem.optimizers.lion import LionFace
from tiermem.optimizers.muon import MuonFace
from tiermem.optimizers.sgd import SGDFace

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


class Adam(AdamFace, NativeOptimizer):
    __doc__ = AdamFace.__doc__


class AdamW(AdamWFace, Adam):
    __doc__ = AdamWFace.__doc__


class Adagrad(AdagradFace, NativeOptimizer):
    __doc__ = AdagradFace.__doc__


class Lion(LionFace, NativeOptimizer):
    __doc__ = LionFace.__doc__


class SGD(SGDFace, NativeOptimizer):
    __doc__ = SGDFace.__doc__


class Muon(MuonFace, NativeOptimizer):
    __doc__ = MuonFace.__doc__
