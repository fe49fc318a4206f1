"""Rules: what each optimizer keeps for a parameter, and the scalars of one step.

    rule      native    moments, under torch's own keys               first step
    adamw     adamw     exp_avg, exp_avg_sq [, max_exp_avg_sq]        zero
    adam      adam      the same                                      zero
    adagrad   adagrad   sum                                           initial_accumulator_value
    lion      lion      exp_avg                                       zero
    sgd       sgd       [momentum_buffer]                             the gradient
    matrix    sgd       momentum_buffer                               zero             Muon's, for whole matrices

A rule is a value; what its numbers are stands in the parameter group, which schedulers change, so `scalars` is asked anew
for every step. num_steps counts the parameter's own steps from 1: in step 1 its moments start without being read, whether or
not others beside it in a tile have been stepped before. Formulas: native/tiermem.h.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiermem.optim.stepping import AnyStep, MatrixStep
from tiermem.swap.parts import MOMENTS, StepRule

Group = Mapping[str, Any]
"""One of `optimizer.param_groups`."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one optimizer does to a parameter."""

    code: str
    """The native rule: a key of `swap.parts.MOMENTS`."""
    moments: tuple[str, ...]
    """What is kept, in the order of MOMENTS, under torch's keys."""
    make_scalars: Callable[[str, Group, int, float, Sequence[int]], AnyStep] = dataclasses.field(repr=False)
    is_matrix: bool = False
    """Whether a step needs the whole parameter at once, so that no tile may cut it."""

    @property
    def signed(self) -> tuple[bool, ...]:
        """Of each moment, whether it may be negative: 8-bit codes differ."""
        return tuple(not kind.is_positive for kind in MOMENTS[self.code][: len(self.moments)])

    def scalars(self, group: Group, num_steps: int, factor: float, shape: Sequence[int] = ()) -> AnyStep:
        """The scalars of a parameter's step number `num_steps`, from 1; gradients are multiplied by `factor` first.

        shape: the parameter's, for rules of whole matrices.
        """
        return self.make_scalars(self.code, group, num_steps, factor, shape)


def adam(is_decoupled: bool, amsgrad: bool = False) -> Rule:
    """Adam, or AdamW when weight decay is decoupled."""
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
    return Rule("adamw" if is_decoupled else "adam", moments, _adam_scalars)


def adagrad() -> Rule:
    """Adagrad."""
    return Rule("adagrad", ("sum",), _adagrad_scalars)


def lion() -> Rule:
    """Lion."""
    return Rule("lion", ("exp_avg",), _lion_scalars)


def sgd(has_momentum: bool) -> Rule:
    """SGD; without momentum it keeps nothing."""
    return Rule("sgd", ("momentum_buffer",) if has_momentum else (), _sgd_scalars)


def matrix() -> Rule:
    """Muon's rule for matrices."""
    return Rule("sgd", ("momentum_buffer",), _matrix_scalars, is_matrix=True)


def adamw_of_muon() -> Rule:
    """What Muon does to parameters that are no matrices: AdamW, with an eps of its own."""
    return Rule("adamw", ("exp_avg", "exp_avg_sq"), _adamw_of_muon_scalars)


def _adam_scalars(code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]) -> StepRule:
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


def _adamw_of_muon_scalars(code: str, group: Group, num_steps: int, factor: float, shape: Sequence[int]) -> StepRule:
    return _adam_scalars(code, {**group, "eps": group["adam_eps"], "maximize": False}, num_steps, factor, shape)


def _adagrad_scalars(code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]) -> StepRule:
    return StepRule(
        code,
        step_size=float(group["lr"]) / (1.0 + (num_steps - 1) * group["lr_decay"]),
        decay=group["weight_decay"],
        grad_scale=factor,
        eps=group["eps"],
        initial=group["initial_accumulator_value"],
        maximize=group["maximize"],
    )


def _lion_scalars(code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]) -> StepRule:
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


def _sgd_scalars(code: str, group: Group, num_steps: int, factor: float, _shape: Sequence[int]) -> StepRule:
    has_momentum = group["momentum"] != 0.0
    return StepRule(
        code,
        step_size=float(group["lr"]),
        decay=group["weight_decay"],
        grad_scale=factor,
        momentum=group["momentum"],
        # torch's buffer starts as the gradient, not dampened; a group without momentum knows no dampening
        dampening=group["dampening"] if num_steps > 1 and has_momentum else 0.0,
        maximize=group["maximize"],
        nesterov=group["nesterov"] and has_momentum,
    )


def _matrix_scalars(code: str, group: Group, _num_steps: int, factor: float, shape: Sequence[int]) -> MatrixStep:
    num_rows, num_columns = shape
    lr, momentum = float(group["lr"]), group["momentum"]
    step_size = lr * _MATRIX_LR[group["adjust_lr_fn"]](num_rows, num_columns)
    a, b, c = group["ns_coefficients"]
    return MatrixStep(
        # m * momentum + g * (1 - momentum); a step size of 0 leaves the weight
        momentum=StepRule(code, 0.0, 0.0, grad_scale=factor, momentum=momentum, dampening=momentum),
        # p - step_size * (u + decay * p), which is decoupled decay by lr
        update=StepRule(code, step_size, lr * group["weight_decay"] / step_size if step_size else 0.0),
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
"""What `adjust_lr_fn` may be."""
