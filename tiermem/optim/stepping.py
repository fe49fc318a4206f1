"""Stepping: one step of one parameter, or of a piece of it, by whichever rule.

    StepRule      elementwise: one pass of a native kernel on the CPU, torch operations with the same bits on other
                  devices; a piece may be any range of the parameter
    MatrixStep    the whole matrix: momentum elementwise, the update made orthogonal by torch and applied elementwise

The matrix step is Muon's (Jordan et al. 2024): five steps of a Newton-Schulz iteration turn the momentum into nearly the
orthogonal matrix next to it. Beside the states it takes, while it runs, some 16 bytes per element of the one matrix. Its
products are torch's, so their last bits may depend on torch's number of threads and on the device. What the moment's
format rounds away is not seen by the step that rounds it (elementwise rules use moments before they are rounded).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiermem.swap.native import Workers, optimizer_step, widen_part
from tiermem.swap.parts import Dither, Quantised, StepParts, StepRule
from tiermem.swap.torch_parts import widen_in_torch
from tiermem.swap.torch_step import step_in_torch


class MatrixStep(NamedTuple):
    """The scalars of one step of a matrix."""

    momentum: StepRule  # sgd that moves nothing: the moment alone
    update: StepRule  # sgd without a moment, along the orthogonal update
    shape: tuple[int, int]
    nesterov: bool
    coefficients: tuple[float, float, float]
    num_iterations: int
    eps: float
    dtype: torch.dtype  # of the products


AnyStep = StepRule | MatrixStep
"""The rule and scalars of one step."""


def step_parts(
    workers: Workers,
    step: AnyStep,
    parts: StepParts,
    dither: Dither | None = None,
    start_moments: bool = False,
    start_master: bool = False,
) -> None:
    """Steps the parts in place where they lie; as `optimizer_step` in swap/native.py.

    A MatrixStep takes those of a whole matrix. Blocks on the CPU; on other devices it queues the step on their current
    stream and returns, and `workers` do nothing.
    """
    if isinstance(step, MatrixStep):
        _step_matrix(workers, step, parts, dither, start_moments, start_master)
    elif parts.grad.device.type == "cpu":
        optimizer_step(workers, step, parts, dither, start_moments=start_moments, start_master=start_master)
    else:
        step_in_torch(step, parts, dither, start_moments=start_moments, start_master=start_master)


def orthogonalise(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_iterations: int, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Nearly the orthogonal matrix next to this one, in `dtype`: its singular values end between 0.5 and 1.5.

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
    start_master: bool,
) -> None:
    moment = parts.moments[0]
    if start_moments:
        for stored in moment if isinstance(moment, Quantised) else (moment,):
            stored.zero_()
    own = parts._replace(moments=(moment,))
    step_parts(workers, step.momentum, own, dither, start_master=start_master)
    update = widen_part(workers, moment) if parts.grad.device.type == "cpu" else widen_in_torch(moment)
    if step.nesterov:
        update = torch.lerp(parts.grad.float() * step.momentum.grad_scale, update, step.momentum.momentum)
    near = orthogonalise(update.view(step.shape), step.coefficients, step.num_iterations, step.eps, step.dtype)
    step_parts(workers, step.update, parts._replace(grad=near.contiguous().view(-1), moments=()), dither)
