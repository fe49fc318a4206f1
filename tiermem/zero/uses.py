"""Uses: what forward has made of every unit, and backward has not answered yet.

Each forward with gradients makes a *use*, held by the autograd graph alone: a graph that is thrown away (an exception, an
evaluation without backward) takes its uses with it. Reentrant checkpointing runs forward without gradients first; that is
a *promise* of a use, made when backward computes forward again. When no use of a unit is left unanswered, and none promised,
its gradients are final.

Backward reads the weights of a use again, except those of an Embedding: where its gradient goes is said by the indices alone.
So the unit of an embedding table, often the largest of all, is brought once in a step and not twice.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

from torch import nn

from tiermem.zero.order import Order
from tiermem.zero.unit import Division
from tiermem.zero.weights.live import LiveUnit

_HOOKS_OF_A_MODULE = 1  # that hooks.py puts before its forward, and behind it


class Use:
    """One forward of a module with gradients: which units took part, and whether backward has asked for them.

    Args:
        units: whose parameters get gradients through it.
        reads_again: whether its backward reads their weights.
    """

    def __init__(self, units: Sequence[LiveUnit], reads_again: bool = True) -> None:
        self.units = list(units)
        self.reads_again = reads_again
        self.is_held = False
        self.answered_in = 0  # the number of a backward
        self.entered = 0  # by the clock of forwards that begin and end
        self.left = 0
        self.start_ns = time.monotonic_ns()  # of the forward, then of the backward

    @property
    def needed_again(self) -> Sequence[LiveUnit]:
        """The units that are to be present in its backward."""
        return self.units if self.reads_again else ()


class Uses:
    """The uses that are left unanswered, unit by unit."""

    def __init__(self, units: Sequence[LiveUnit]) -> None:
        self._open: dict[int, weakref.WeakSet[Use]] = {live.unit.index: weakref.WeakSet() for live in units}
        self._promised: dict[int, int] = dict.fromkeys(self._open, 0)

    def add(self, use: Use) -> None:
        """A use is to be answered, perhaps once more."""
        for live in use.units:
            self._open[live.unit.index].add(use)

    def extend(self, use: Use, live: LiveUnit) -> None:
        """A use turns out to need one more unit, by a function whose backward may read it."""
        if live not in use.units:
            use.units.append(live)
            use.reads_again = True
            self._open[live.unit.index].add(use)

    def answer(self, use: Use) -> None:
        """Backward is through with a use."""
        for live in use.units:
            self._open[live.unit.index].discard(use)

    def promise(self, needed: Sequence[LiveUnit], change: int) -> None:
        """A use of each of these units will be made (1), or has been (-1)."""
        for live in needed:
            self._promised[live.unit.index] = max(0, self._promised[live.unit.index] + change)

    def forget_promises(self) -> None:
        """Backward has ended: what was promised and not made never will be."""
        self._promised = dict.fromkeys(self._promised, 0)

    def is_final(self, live: LiveUnit) -> bool:
        """Whether a unit's gradients are all there."""
        index = live.unit.index
        return not self._open[index] and not self._promised[index]


def first_order(division: Division) -> Order:
    """What a model's first pass is expected to need, by definition: forward, and then what backward reads again."""
    forward, backward = division.order(), division.order(reads_weights_again)
    return Order([unit.index for unit in forward], [unit.index for unit in reversed(backward)])


def reads_weights_again(module: nn.Module) -> bool:
    """Whether a module's backward may read its weights: always, but for a plain Embedding without hooks of the user's.

    A hook may use the weights in any way.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return type(module) is not nn.Embedding or any(len(each) > _HOOKS_OF_A_MODULE for each in hooks)
