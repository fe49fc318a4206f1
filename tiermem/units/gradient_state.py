"""GradientState: the content of the home (the place at rest) of a parameter's gradient, and the
factors that scale it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class GradientState(enum.Enum):
    """The content of the home of a parameter's reduced gradient; see the diagram of Gradient."""

    NONE = enum.auto()  # no valid content
    # the sum of this backward; it is not known yet whether any rank had a gradient
    ARRIVED = enum.auto()
    HOME = enum.auto()  # the gradient
    ZERO = enum.auto()  # any content: the gradient is zero


_THERE = (GradientState.HOME, GradientState.ZERO)


class Factor(NamedTuple):
    """A number that scales gradients, also one that an accelerator is still computing."""

    number: Callable[[], float]
    """Returns it. Blocks until its copy to the host has ended, if an accelerator computes it."""
    there: torch.Tensor | None
    """It, in float64, on the accelerator that computes it; None: `number` does not block."""

    def inverse(self) -> Factor:
        """One divided by it."""
        number, there = self
        return Factor(lambda: 1.0 / number(), None if there is None else there.reciprocal())


class Gradient:
    """The reduced gradient of a parameter; this rank's part is at its home.

    NONE --arrive--> ARRIVED --confirm--> HOME      another micro-batch: HOME --arrive--> HOME
    HOME --clear--> ZERO --arrive--> HOME           any state --forget--> NONE
    """

    def __init__(self) -> None:
        self.state = GradientState.NONE
        self.known_factor = 1.0
        """The product of the factors, from clip_grad_norm_ and GradScaler, whose numbers the CPU
        has."""
        self._pending: list[Factor] = []  # the others, in their order
        self.block_sums: Sequence[float] | torch.Tensor = ()  # sums of squares of its blocks
        self.version = 0  # counts changes of the content; factors change none

    @property
    def factor(self) -> float:
        """The product of all factors. Blocks for those that an accelerator computes: once, as their
        copies end in order."""
        for each in reversed(self._pending):
            each.number()
        while self._pending:
            self.known_factor *= self._pending.pop(0).number()
        return self.known_factor

    @property
    def factors_there(self) -> tuple[torch.Tensor, ...]:
        """The factors that are not in `known_factor`, on the accelerator that computes them."""
        return tuple(each.there for each in self._pending if each.there is not None)

    @property
    def is_there(self) -> bool:
        """Whether the parameter has a gradient."""
        return self.state in _THERE

    @property
    def is_zero(self) -> bool:
        """Whether it is zero, whatever its home contains."""
        return self.state is GradientState.ZERO

    @property
    def takes_more(self) -> bool:
        """Whether the next gradient is added to the content of its home."""
        return self.state in (GradientState.ARRIVED, GradientState.HOME)

    def arrive(self, block_sums: Sequence[float] | torch.Tensor, factor: float = 1.0) -> None:
        """HOME or ZERO -> HOME, else -> ARRIVED: all of this rank's part is stored, with these sums
        of squares."""
        self._put(
            GradientState.HOME if self.state in _THERE else GradientState.ARRIVED,
            factor,
            block_sums,
        )

    def bring_sums(self, block_sums: Sequence[float]) -> None:
        """Replaces the sums of squares on an accelerator by the same numbers on the CPU."""
        self.block_sums = block_sums

    def confirm(self) -> None:
        """ARRIVED or NONE (a parameter without elements) -> HOME: some rank had a gradient."""
        if self.state not in _THERE:
            self.state = GradientState.HOME

    def scale(self, factor: Factor) -> None:
        """HOME: multiplies the gradient by a factor; the stored values do not change. Does not
        block."""
        if factor.there is None:
            self.known_factor *= factor.number()
        else:
            self._pending.append(factor)

    def clear(self) -> None:
        """HOME -> ZERO: the next gradient, or the step, overwrites the stored values."""
        if self.is_there:
            self._put(GradientState.ZERO)

    def forget(self) -> None:
        """-> NONE."""
        self._put(GradientState.NONE)

    def _put(
        self,
        state: GradientState,
        factor: float = 1.0,
        block_sums: Sequence[float] | torch.Tensor = (),
    ) -> None:
        self.state = state
        self.known_factor = factor
        self.block_sums = block_sums
        self.version += 1
        self._pending.clear()
