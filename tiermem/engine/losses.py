"""Losses: by what the losses of a step were multiplied and divided, so that the step can undo it, whoever called backward.

    engine.backward(loss)           divided by the micro-batches of a step, times the loss scale
    engine.scale(loss).backward()   times the loss scale: the step divides by the micro-batches
    loss.backward()                 neither; without fp16 alone

All micro-batches of one step go the same way.
"""

from __future__ import annotations

import torch

from tiermem.optim.scaling import LossScaler


class Losses:
    """Counts the losses of a step by the way they went."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        self._num_divided = 0  # since the last step, by the engine's backward
        self._num_scaled = 0  # since the last step; the engine's backward scales, too

    def divided(self, loss: torch.Tensor, by: int) -> torch.Tensor:
        """The loss by a number of micro-batches; 1 leaves it as it is. Counts it as the engine's either way."""
        self._num_divided += 1
        return loss / by if by > 1 else loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale."""
        self._num_scaled += 1
        return loss * self._scaler.scale if self._scaler.scale != 1.0 else loss

    def gradient_scale(self, num_micro_batches: int) -> float:
        """What the gradients of a step have to be divided by; begins the next step. Raises RuntimeError for mixed ways."""
        divided, scaled, self._num_divided, self._num_scaled = self._num_divided, self._num_scaled, 0, 0
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
        return self._scaler.scale * (1 if divided else num_micro_batches)
