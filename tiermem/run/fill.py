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
import math
from collections.abc import Callable, Mapping
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


def most_bytes(device: torch.device) -> int:
    """What this process may have of an accelerator."""
    free, total = free_and_total(device)
    return free + usage(device).allocated_bytes - int(MARGIN * total)


class Inputs:
    """Sees the inputs of a model: how many with gradients since the last step, and whether one is
    larger than any before; one with gradients, than any with gradients.

    on_larger: called before the forward of a larger input, with the factor by which it is larger;
        for the first one with infinity.
    """

    def __init__(self, model: nn.Module, on_larger: Callable[[float], None]) -> None:
        self._on_larger = on_larger
        # elements and length of all inputs, and of those with gradients
        self._largest = {False: (0, 0), True: (0, 0)}
        self._num_calls = 0
        self._num_tokens = 0
        self._handle = model.register_forward_pre_hook(self._see, prepend=True, with_kwargs=True)

    def take(self) -> tuple[int, int]:
        """The inputs with gradients since the last call; the elements of the largest tensor of
        integers among them so far, as of tokens."""
        num_calls = self._num_calls
        self._num_calls = 0
        return num_calls, self._num_tokens

    def close(self) -> None:
        """Sees no more inputs."""
        self._handle.remove()

    @outside_graphs
    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        has_grad = torch.is_grad_enabled()
        tensors = tensors_in([*args, *kwargs.values()])
        numel = sum(each.numel() for each in tensors)
        length = max((size for each in tensors for size in each.shape), default=0)
        if has_grad:
            self._num_calls += 1
            tokens = [each.numel() for each in tensors if each.dtype == torch.long]
            self._num_tokens = max([self._num_tokens, *tokens])
        sizes = numel, length
        pairs = list(zip(sizes, self._largest[has_grad], strict=True))
        growth = max((new / old if old else math.inf for new, old in pairs if new > old), default=1)
        for kind in {has_grad, False}:
            most_numel, most_length = self._largest[kind]
            self._largest[kind] = max(numel, most_numel), max(length, most_length)
        if growth > 1:
            self._on_larger(growth)


class Fill:
    """How many units may be present at once. It is an attachment of Shards, and sees the inputs of
    the model that it is made for.

    plan: has buffers for units on the device.
    """

    keeps_files = False

    def __init__(
        self, model: nn.Module, plan: Plan, prefetcher: Prefetcher[Any], device: torch.device
    ) -> None:
        self.use(plan)
        self._prefetcher = prefetcher
        self._device = device
        # a larger input may take memory that no step has measured
        self._inputs = Inputs(model, lambda growth: self.allow(self._least))

    def use(self, plan: Plan) -> None:
        """Begins with the buffers of a plan."""
        self._unit_bytes, self._least = plan.units
        self._most = max(self._least, sum(unit.takes_buffer for unit in plan.division.units))
        self.num = self._least
        """Units that may be present at once."""

    def after_step(self, optimizer: object) -> None:
        """Takes what the steps so far have left, or gives back what others have taken. A step
        whose inputs were not seen, because other modules than the model were called, has the plan's
        buffers."""
        num_calls, _ = self._inputs.take()
        if not num_calls:
            self.allow(self._least)
            return
        left = most_bytes(self._device) - usage(self._device).peak_allocated_bytes
        self.allow(min(max(self._least, self.num + left // self._unit_bytes), self._most))

    def close(self) -> None:
        """Sees no more inputs."""
        self._inputs.close()

    def allow(self, num: int) -> None:
        """Sets how many units may be present at once until the next step."""
        if num != self.num:
            logger.info("%d units may be present on %s at once", num, self._device)
        self.num = num
        self._prefetcher.allow(num)
