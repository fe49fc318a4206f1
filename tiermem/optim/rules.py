"""Rules: the moments and scalars of each optimizer, the step of one piece, the loss scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tiermem.config.precision import Fp16Config
from tiermem.swap.base.native import Workers, optimizer_step, widen_part
from tiermem.swap.base.parts import Dither, Quantised, StepParts, StepRule
from tiermem.swap.kernels.device_kernels import kernels_of
from tiermem.swap.kernels.torch_step import widen_in_torch

# ---- checks of a parameter group -----------------------------------------------------------------

IMPLEMENTATION: Mapping[str, tuple[Any, str]] = {
    "foreach": (
        None,
        "there is one implementation here, a native pass over every parameter; leave it out",
    ),
    "fused": (None, "there is one implementation here, and it is fused; leave it out"),
    "capturable": (
        False,
        "steps run on the CPU, where there is no CUDA graph to capture them; leave it out",
    ),
    "differentiable": (
        False,
        (
            "a native step leaves no graph behind; use torch's own optimizer to differentiate "
            "through "
            "it"
        ),
    ),
}
"""torch's implementation options: the value that requests nothing, and the reason in the error for
other values."""


def check_range(name: str, value: float, low: float, high: float, is_open: bool = False) -> None:
    """Raises ValueError unless low <= value <= high (< high when open); NaN is never in range."""
    if not low <= value <= high or (is_open and value == high):
        raise ValueError(
            f"{name} is {value}; allowed are {low} to {high}" + (" (excluded)" if is_open else "")
        )


def check_not_negative(group: Group, *names: str) -> None:
    """Raises ValueError unless each of these values is 0 or more."""
    for name in names:
        check_range(name, float(group[name]), 0.0, math.inf)


def check_betas(betas: tuple[float, float]) -> None:
    """Raises ValueError unless both decay rates are in [0, 1)."""
    for i, beta in enumerate(betas):
        check_range(f"betas[{i}]", beta, 0.0, 1.0, is_open=True)


def check_implementation(group: Group) -> None:
    """Raises ValueError when a group requests one of torch's implementations."""
    for name, (nothing, why) in IMPLEMENTATION.items():
        if group.get(name, nothing) not in (nothing, False):
            raise ValueError(
                f"{name}={group[name]} asks for something that does not exist here: {why}"
            )


# ---- one step of a parameter, or of a piece of it ------------------------------------------------
#
#     StepRule      elementwise: one pass of a native kernel on the CPU; on other devices a Triton kernel or torch
#                   operations with the same bits. A piece may be any range of the parameter
#     MatrixStep    a whole matrix: elementwise momentum, an update that torch makes orthogonal, an elementwise step along it


class MatrixStep(NamedTuple):
    """The scalars of one step of a whole matrix, Muon's (Jordan et al. 2024).

    A Newton-Schulz iteration, by default of five steps, turns the momentum into nearly the closest
    orthogonal matrix. While it runs, it takes about 16 bytes per element of the matrix beside the
    states. torch computes its products, so their last bits may depend on torch's number of threads
    and on the device. The iteration reads the momentum after it was rounded to its stored format;
    elementwise rules use moments before rounding.
    """

    momentum: StepRule  # sgd with a step size of 0: updates the moment only
    update: StepRule  # sgd without a moment: steps along the orthogonal update
    shape: tuple[int, int]
    nesterov: bool
    coefficients: tuple[float, float, float]
    num_iterations: int
    eps: float
    dtype: torch.dtype  # of the products


AnyStep = StepRule | MatrixStep
"""The rule and the scalars of one step."""


def step_parts(
    workers: Workers,
    step: AnyStep,
    parts: StepParts,
    dither: Dither | None = None,
    start_moments: bool = False,
    start_master: bool = False,
) -> None:
    """Steps the parts in place, as `optimizer_step` in swap/base/native.py.

    A MatrixStep takes the parts of a whole matrix. On the CPU it blocks. On other devices it queues
    the step on the current stream and returns, and does not use `workers`.
    """
    if isinstance(step, MatrixStep):
        _step_matrix(workers, step, parts, dither, start_moments, start_master)
    elif parts.grad.device.type == "cpu":
        optimizer_step(
            workers, step, parts, dither, start_moments=start_moments, start_master=start_master
        )
    else:
        kernels_of(parts.grad.device).step(
            step, parts, dither, start_moments=start_moments, start_master=start_master
        )


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
    start_master: bool,
) -> None:
    moment = parts.moments[0]
    if start_moments:
        for stored in moment if isinstance(moment, Quantised) else (moment,):
            stored.zero_()
    own = parts._replace(moments=(moment,))
    step_parts(workers, step.momentum, own, dither, start_master=start_master)
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


# ---- the rule of each optimizer ------------------------------------------------------------------
#
#     rule      native    moments, under torch's own keys               value before the first step
#     adamw     adamw     exp_avg, exp_avg_sq [, max_exp_avg_sq]        zero
#     adam      adam      the same                                      zero
#     adagrad   adagrad   sum                                           initial_accumulator_value
#     lion      lion      exp_avg                                       zero
#     sgd       sgd       [momentum_buffer]                             the first gradient
#     matrix    sgd       momentum_buffer                               zero             Muon's, for whole matrices
#
# Formulas: native/tiermem.h.

Group = Mapping[str, Any]
"""One of `optimizer.param_groups`."""


@dataclasses.dataclass(frozen=True, eq=False)  # each is made once
class Rule:
    """The update of one optimizer. Its numbers are in the parameter group.

    Schedulers change the group, so `scalars` is called for every step. A parameter counts its own
    steps from 1. In step 1 its moments are not read, even if other parameters of the same tile have
    been stepped before.
    """

    code: str
    """The native rule: a key of `swap.parts.MOMENTS`."""
    moments: tuple[str, ...]
    """The moments that are kept, under torch's keys, in the order of MOMENTS."""
    make_scalars: Callable[[str, Group, int, float, Sequence[int]], AnyStep] = dataclasses.field(
        repr=False
    )
    is_matrix: bool = False
    """Whether a step needs the whole parameter at once. Then no tile may cut it."""

    def scalars(
        self, group: Group, num_steps: int, factor: float, shape: Sequence[int] = ()
    ) -> AnyStep:
        """The scalars of a parameter's step `num_steps`, counted from 1. Gradients are multiplied
        by `factor` first.

        shape: the parameter's shape; used by rules for whole matrices.
        """
        step = self.make_scalars(self.code, group, num_steps, factor, shape)
        return step._replace(moments=self.moments) if isinstance(step, StepRule) else step


@functools.cache
def adam(is_decoupled: bool, amsgrad: bool = False) -> Rule:
    """Adam, or AdamW when weight decay is decoupled."""
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
    return Rule("adamw" if is_decoupled else "adam", moments, _adam_scalars)


@functools.cache
def sgd(has_momentum: bool) -> Rule:
    """SGD; without momentum it keeps no moment."""
    return Rule("sgd", ("momentum_buffer",) if has_momentum else (), _sgd_scalars)


def _adam_scalars(
    code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]
) -> StepRule:
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    return StepRule(
        code,
        step_size=lr / (1.0 - beta1**num_steps),
        decay=1.0 - lr * decay if code == "adamw" else decay,
        grad_scale=factor,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        inv_sqrt_bias2=1.0 / math.sqrt(1.0 - beta2**num_steps),
        maximize=group["maximize"],
    )


def _adamw_of_muon_scalars(
    code: str, group: Group, num_steps: int, factor: float, shape: Sequence[int]
) -> StepRule:
    return _adam_scalars(
        code, {**group, "eps": group["adam_eps"], "maximize": False}, num_steps, factor, shape
    )


def _adagrad_scalars(
    code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]
) -> StepRule:
    return StepRule(
        code,
        step_size=float(group["lr"]) / (1.0 + (num_steps - 1) * group["lr_decay"]),
        decay=group["weight_decay"],
        grad_scale=factor,
        eps=group["eps"],
        initial=group["initial_accumulator_value"],
        maximize=group["maximize"],
    )


def _lion_scalars(
    code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]
) -> StepRule:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return StepRule(
        code,
        step_size=lr,
        decay=1.0 - lr * group["weight_decay"],
        grad_scale=factor,
        beta1=beta1,
        beta2=beta2,
        maximize=group["maximize"],
    )


def _sgd_scalars(
    code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]
) -> StepRule:
    has_momentum = group["momentum"] != 0.0
    return StepRule(
        code,
        step_size=float(group["lr"]),
        decay=group["weight_decay"],
        grad_scale=factor,
        momentum=group["momentum"],
        # torch's buffer starts as the first gradient without dampening; a group without momentum
        # has no dampening
        dampening=group["dampening"] if num_steps > 1 and has_momentum else 0.0,
        maximize=group["maximize"],
        nesterov=group["nesterov"] and has_momentum,
    )


def _matrix_scalars(
    code: str, group: Group, _num_steps: int, factor: float, shape: Sequence[int]
) -> MatrixStep:
    num_rows, num_columns = shape
    lr = float(group["lr"])
    momentum = group["momentum"]
    step_size = lr * _MATRIX_LR[group["adjust_lr_fn"]](num_rows, num_columns)
    a, b, c = group["ns_coefficients"]
    return MatrixStep(
        # m * momentum + g * (1 - momentum); a step size of 0 leaves the weight
        momentum=StepRule(code, 0.0, 0.0, grad_scale=factor, momentum=momentum, dampening=momentum),
        # p - step_size * (u + decay * p), which is decoupled decay by lr
        update=StepRule(
            code, step_size, lr * group["weight_decay"] / step_size if step_size else 0.0
        ),
        shape=(num_rows, num_columns),
        nesterov=group["nesterov"],
        coefficients=(a, b, c),
        num_iterations=group["ns_steps"],
        eps=group["eps"],
        dtype=group["ns_dtype"],
    )


def _keep_norm(num_rows: int, num_columns: int) -> float:
    return math.sqrt(max(1.0, num_rows / num_columns)) if num_columns else 1.0


def _match_adamw(num_rows: int, num_columns: int) -> float:
    return 0.2 * math.sqrt(max(num_rows, num_columns))


_MATRIX_LR = {None: _keep_norm, "original": _keep_norm, "match_rms_adamw": _match_adamw}
MATRIX_LR_NAMES = tuple(name for name in _MATRIX_LR if name is not None)
"""Allowed names for `adjust_lr_fn`."""

ADAGRAD = Rule("adagrad", ("sum",), _adagrad_scalars)
LION = Rule("lion", ("exp_avg",), _lion_scalars)
MATRIX = Rule("sgd", ("momentum_buffer",), _matrix_scalars, is_matrix=True)
"""Muon's rule for matrices."""
ADAMW_OF_MUON = Rule("adamw", ("exp_avg", "exp_avg_sq"), _adamw_of_muon_scalars)
"""Muon's rule for other parameters: AdamW with its own eps."""


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
        is_on: whether gradients are fp16; if not, the scale is always 1. Default: `config.enabled`.
    """

    def __init__(self, config: Fp16Config, is_on: bool | None = None) -> None:
        is_on = config.enabled if is_on is None else is_on
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
                    "(fp16.min_loss_scale): no smaller "
                    "scale is left, so every further step would be skipped. The run has probably "
                    "diverged: load an earlier "
                    "checkpoint and lower the learning rate, or train in bf16"
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
