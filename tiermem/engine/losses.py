"""Losses: by what the losses of a step were multiplied and divided, so that gradients are the mean, whoever called backward.

    engine.backward(loss)           divided by the micro-batches of a step, times the loss scale
    engine.scale(loss).backward()   times the loss scale: the gradients are divided by the micro-batches
    loss.backward()                 neither; without fp16 alone

Gradients at home are divided when they are looked at, measured or stepped (GradientHomes.divisor). All micro-batches of one
step go the same way.
"""

from __future__ import annotations

import torch

from tiermem.optim.scaling import LossScaler
from tiermem.zero.gradients.grads import GradientHomes


class Losses:
    """Counts the losses of a step by the way they went.

    Args:
        scaler: the loss scale.
        homes: of the gradients; told what to divide by.
        num_micro_batches: of a step.
    """

    def __init__(self, scaler: LossScaler, homes: GradientHomes, num_micro_batches: int) -> None:
        self._scaler = scaler
        self._homes = homes
        self._num_divided = 0  # since the last step, by the engine's backward
        self._num_scaled = 0  # since the last step; the engine's backward scales, too
        self.begin_step(num_micro_batches)

    def begin_step(self, num_micro_batches: int) -> None:
        """The next loss is the first of a step."""
        self._num_divided = self._num_scaled = 0
        self._homes.num_micro_batches = num_micro_batches

    @property
    def num_undivided(self) -> int:
        """What the gradients of the step at hand have to be divided by to be the mean over its micro-batches."""
        return self._homes.num_micro_batches

    def divided(self, loss: torch.Tensor, by: int) -> torch.Tensor:
        """The loss by a number of micro-batches; 1 leaves it as it is. Counts it as the engine's either way."""
        self._num_divided += 1
        self._homes.num_micro_batches = 1
        return loss / by if by > 1 else loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale."""
        self._num_scaled += 1
        return loss * self._scaler.scale if self._scaler.scale != 1.0 else loss

    def check_one_way(self) -> None:
        """Raises RuntimeError for losses that went different ways, and for some that were not scaled where all have to be."""
        divided, scaled = self._num_divided, self._num_scaled
        if divided and scaled > divided:
            raise RuntimeError(
                f"{divided} losses of this step went through engine.backward, which divides by the micro-batches of a step, "
                f"and {scaled - divided} through engine.scale, which does not: use one of them for all micro-batches of a step"
            )
        if self._scaler.scale != 1.0 and not scaled:
            raise RuntimeError(
                "fp16 scales the loss, and the gradients of this step come from a backward of an unscaled one: use "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
