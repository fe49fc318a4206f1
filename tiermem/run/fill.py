"""Fill: units that stay present on an accelerator beyond the plan's buffers, where the memory that
steps have taken leaves room.

    a first step, and a forward with a larger input than any before   the plan's buffers
    after a step      what this process may have - a margin - the most that it ever had, in units

So the activations of a batch need not be known: the first step measures them. Weights that stay are
fetched once a step, not in each forward and backward. It is for one rank, where no gather depends
on what is present.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tiermem.plans.plan import Plan
from tiermem.swap.memory.accelerator import free_and_total, usage
from tiermem.weights.backward_marks import outside_graphs, tensors_in
from tiermem.weights.prefetcher import Prefetcher

logger = logging.getLogger("tiermem")

MARGIN = 0.08
"""Of an accelerator's memory: gaps between blocks of torch's allocator, workspaces of libraries."""


class Fill:
    """How many units may be present at once. It is an attachment of Shards, and sees the inputs of
    the model that it is made for.

    plan: has buffers for units on the device.
    """

    keeps_files = False

    def __init__(
        self, model: nn.Module, plan: Plan, prefetcher: Prefetcher[Any], device: torch.device
    ) -> None:
        self._unit_bytes, self._least = plan.units
        self._most = max(self._least, sum(unit.takes_buffer for unit in plan.division.units))
        self.num = self._least
        """Units that may be present at once."""
        self._prefetcher = prefetcher
        self._device = device
        self._largest = (0, 0)
        self._has_seen = False  # the model's inputs since the last step
        self._handle = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def after_step(self, _: object) -> None:
        """Takes what the steps so far have left, or gives back what others have taken. A step
        whose inputs were not seen, because other modules than the model were called, has the plan's
        buffers."""
        if not self._has_seen:
            self._allow(self._least)
            return
        self._has_seen = False
        free, total = free_and_total(self._device)
        now = usage(self._device)
        most = free + now.allocated_bytes - int(MARGIN * total)
        more = (most - now.peak_allocated_bytes) // self._unit_bytes
        self._allow(min(max(self._least, self.num + more), self._most))

    def close(self) -> None:
        """Sees no more inputs."""
        self._handle.remove()

    @outside_graphs
    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Before a forward: a larger input may take memory that no step has measured."""
        self._has_seen = True
        tensors = tensors_in([*args, *kwargs.values()])
        numel = sum(each.numel() for each in tensors)
        length = max((size for each in tensors for size in each.shape), default=0)
        if numel > self._largest[0] or length > self._largest[1]:
            self._largest = max(numel, self._largest[0]), max(length, self._largest[1])
            self._allow(self._least)

    def _allow(self, num: int) -> None:
        if num != self.num:
            logger.info("%d units may be present on %s at once", num, self._device)
        self.num = num
        self._prefetcher.allow(num)
