"""The step of one piece of a parameter, by the rule of its optimizer; the loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tiermem.config.precision import Fp16Config
from tiermem.optimizers.base import AnyStep, MatrixStep
from tiermem.swap.base.native import Workers, optimizer_step, widen_part
from tiermem.swap.base.parts import Dither, Quantised, StepParts
from tiermem.swap.kernels.device_kernels import kernels_of
from tiermem.swap.kernels.torch_step import widen_in_torch

# ---- one step of a parameter, or of a piece of it ------------------------------------------------


def step_parts(
    workers: Workers,
    step: AnyStep,
    parts: StepParts,
    dither: Dither | None = None,
    start_moments: bool = False,
) -> None:
    """Steps the parts in place, as `optimizer_step` in swap/base/native.py.

    A MatrixStep takes the parts of a whole matrix. On the CPU it blocks. On other devices it queues
    the step on the current stream and returns, and does not use `workers`.
    """
    if isinstance(step, MatrixStep):
        _step_matrix(workers, step, parts, dither, start_moments)
    elif parts.grad.device.type == "cpu":
        optimizer_step(workers, step, parts, dither, start_moments)
    else:
        kernels_of(parts.grad.device).step(step, parts, dither, start_moments)


def orthogonalise(
    matrix: torch.Tensor,
    coefficients: tuple[float, float, float],
    num_iterations: int,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Nearly the orthogonal matrix closest to `matrix`, in `dtype`: its singular values end between
    0.5 and 1.5.

    Newton-Schulz: X <- a X + b (X X^T) X + c (X X^T)^2 X, from X of norm 1 at most.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if is_tall else x  # the smaller Gram matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _step_matrix(
    workers: Workers,
    step: MatrixStep,
    parts: StepParts,
    dither: Dither | None,
    start_moments: bool,
) -> None:
    moment = parts.moments[0]
    if start_moments:
        for stored in moment if isinstance(moment, Quantised) else (moment,):
            stored.zero_()
    own = parts._replace(moments=(moment,))
    step_parts(workers, step.momentum, own, dither)
    update = (
        widen_part(workers, moment) if parts.grad.device.type == "cpu" else widen_in_torch(moment)
    )
    if step.nesterov:
        update = torch.lerp(
            parts.grad.float() * step.momentum.grad_scale, update, step.momentum.momentum
        )
    near = orthogonalise(
        update.view(step.shape), step.coefficients, step.num_iterations, step.eps, step.dtype
    )
    step_parts(
        workers, step.update, parts._replace(grad=near.contiguous().view(-1), moments=()), dither
    )


# ---- the loss scale ------------------------------------------------------------------------------


class LossScaler:
    """The loss scale of an fp16 run. Gradients are multiplied by it, so that small values do not
    become zero, and the step divides them again.

        static    the configured scale
        dynamic   halved at an overflow, after `hysteresis` overflows; doubled after each `window` steps without overflow;
                  an overflow that would halve the least scale is an error

    The optimizer skips a step that overflows. This class only computes the next scale.

    Args:
        config: the section `fp16`.
        is_on: whether gradients are fp16; if not, the scale is always 1.
    """

    def __init__(self, config: Fp16Config, is_on: bool) -> None:
        self._config = config
        self._is_dynamic = is_on and config.is_dynamic
        self.scale = 1.0
        if is_on:
            self.scale = (
                float(2**config.initial_scale_power)
                if config.is_dynamic
                else float(config.loss_scale)
            )
        self._hysteresis_left = config.hysteresis
        self._num_good = 0  # steps since the last overflow

    @property
    def loss_scale(self) -> float:
        """The scale, under the reference's name."""
        return self.scale

    cur_scale = loss_scale

    def state_dict(self) -> dict[str, float | int]:
        """The values that determine the next scales."""
        return {
            "scale": self.scale,
            "hysteresis_left": self._hysteresis_left,
            "num_good": self._num_good,
        }

    def load_state_dict(self, state_dict: Mapping[str, float | int]) -> None:
        """Continues from a `state_dict`. A static scale stays as configured.

        Raises ValueError for a dict with other values.
        """
        scale, left, good = (
            state_dict.get(name) for name in ("scale", "hysteresis_left", "num_good")
        )
        if (
            not isinstance(scale, float)
            or not 0 < scale < math.inf
            or type(left) is not int
            or type(good) is not int
        ):
            raise ValueError(
                "a loss scale's state has scale, hysteresis_left and num_good; given "
                f"{dict(state_dict)}"
            )
        if self._is_dynamic:
            self.scale = scale
            self._hysteresis_left = left
            self._num_good = good

    def update(self, has_overflowed: bool) -> None:
        """Records whether a step has overflowed, and sets the scale of the next step.

        Raises FloatingPointError, and records nothing, when no smaller scale is left.
        """
        if not self._is_dynamic:
            return
        if has_overflowed:
            least = float(self._config.min_loss_scale)
            if self._hysteresis_left <= 1 and self.scale <= least:
                raise FloatingPointError(
                    f"gradients hold NaN or infinity at the least loss scale, {least:g} "
                    "(fp16.min_loss_scale): no smaller scale is left, so every further step would "
                    "be skipped. The run has probably diverged: load an earlier checkpoint and "
                    "lower the learning rate, or train in bf16"
                )
            self._num_good = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale / 2, least)
            self._hysteresis_left = max(self._hysteresis_left, 1)
            return
        self._num_good += 1
        if self._config.consecutive_hysteresis:
            self._hysteresis_left = self._config.hysteresis
        if self._num_good % self._config.loss_scale_window == 0:
            self.scale *= 2
            self._hysteresis_left = self._config.hysteresis
