"""Accumulation: which micro-batch ends a step, and where gradients add up until then.

    stages 2 and 3   at home: every micro-batch's gradients are added up over ranks and then there, because only a rank's own
                     part of them has a place
    stages 0 and 1   in `p.grad`, on each rank by itself, and over ranks once, with the last micro-batch; at home, too, when
                     they are to be kept in another dtype than the parameters'

The boundary is counted (`gradient_accumulation_steps`), or set by the user from then on, or, not managed, wherever `step` is
called. What a step computes is the same in all of these; how often ranks talk is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tiermem.zero.shards import Shards


class Accumulation:
    """Knows the boundary and holds reductions back before it.

    Args:
        shards: whose gradients.
        num_micro_batches: of a step.
        is_managed: False: every step is a boundary, and no backward is.
    """

    def __init__(self, shards: Shards, num_micro_batches: int, is_managed: bool) -> None:
        self._shards = shards
        self.num_micro_batches = num_micro_batches
        self._is_managed = is_managed
        self._set_by_user: bool | None = None
        self._is_stepping = False
        self._block = ""  # no_sync or coalesce_grad_reduction, while in one
        self.micro_steps = 0  # micro-batches that have ended
        self.is_under_way = False  # some of them since the last step
        self._num_backwards = shards.hooks.num_backwards  # when the last step ended
        shards.hooks.may_receive = self._may_receive

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of a step."""
        if self._set_by_user is not None:
            return self._set_by_user
        if not self._is_managed:
            return self._is_stepping
        return (self.micro_steps + 1) % self.num_micro_batches == 0

    def set_boundary(self, is_boundary: bool) -> None:
        """Says from now on whether the micro-batch at hand is the last. Raises RuntimeError where nobody else may say so."""
        if not self._is_managed:
            raise RuntimeError(
                "set_gradient_accumulation_boundary with managed_gradient_accumulation false: every step() is the boundary. "
                "Remove the call, or the key"
            )
        if not is_boundary:
            self._check_holds_gradients("set_gradient_accumulation_boundary(False)")
        self._set_by_user = is_boundary

    def end_step(self) -> int:
        """A step has ended: gives its micro-batches. Where the user says where it ends, each backward counts as one."""
        started, self._num_backwards = self._num_backwards, self._shards.hooks.num_backwards
        is_counted = self._is_managed and self._set_by_user is None
        return self.num_micro_batches if is_counted else self._num_backwards - started

    def begin_anew(self, micro_steps: int | None = None) -> None:
        """The next micro-batch is the first of a step, after so many (default: those that have ended), in whole steps."""
        self.is_under_way = False
        self._num_backwards = self._shards.hooks.num_backwards
        ended = self.micro_steps if micro_steps is None else micro_steps
        self.micro_steps = -(-ended // self.num_micro_batches) * self.num_micro_batches

    @contextlib.contextmanager
    def hold_back(self, block: str) -> Iterator[None]:
        """Backwards in the block add up and are not reduced, where `p.grad` has a place for them; see the module."""
        if self._block:
            raise RuntimeError(f"{block} inside {self._block}: leave the one before you enter the other")
        self._check_holds_gradients(block)
        self._block = block
        try:
            yield
        finally:
            self._block = ""

    def reduce_now(self) -> None:
        """Adds up over ranks what backwards have left in `p.grad`. Collective; blocks."""
        if self._block:
            raise RuntimeError(f"gradients are not reduced inside {self._block}: leave it first")
        self._shards.receive_gradients()

    @contextlib.contextmanager
    def step(self) -> Iterator[bool]:
        """The end of a micro-batch: gives whether it ends a step. Raises RuntimeError where no step may be."""
        if self._block:
            raise RuntimeError(f"step() inside {self._block}: leave it first")
        self._is_stepping = True
        is_boundary = self.is_boundary
        try:
            yield is_boundary
        finally:
            self.is_under_way = not is_boundary
            self.micro_steps += 1
            self._is_stepping = False

    def _may_receive(self) -> bool:
        return self._shards.adds_at_home or (self.is_boundary and not self._block)

    def _check_holds_gradients(self, what: str) -> None:
        if self._shards.policy.step_in_backward:
            raise RuntimeError(
                f"{what} with step_in_backward: no gradient is held to add to, every backward steps. Set it to false"
            )
