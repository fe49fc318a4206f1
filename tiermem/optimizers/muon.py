"""Muon: a step of whole matrices, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import pydantic
import torch
from torch import nn

from tiermem.optimizers.adam import adamw_scalars
from tiermem.optimizers.base import (
    Beta,
    Group,
    MatrixStep,
    OptimizerFace,
    OptimizerParams,
    Params,
    Rule,
    arguments_in,
    check_range,
)
from tiermem.policy import OffloadPolicy
from tiermem.precision import Precision
from tiermem.section import Number, PositiveCount
from tiermem.swap.base.parts import StepRule

# ---- the section ---------------------------------------------------------------------------------


class MuonParams(OptimizerParams):
    """`optimizer.params` of Muon."""

    no_arguments = ("ns_method",)
    marks = ("ns_steps",)
    averages_squares = True

    lr: Number = 0.02
    """Learning rate. The default is that of matrices alone."""
    momentum: Beta = 0.95
    """Decay rate of a matrix's momentum."""
    nesterov: bool = True
    """Step along the momentum after next."""
    ns_steps: PositiveCount = 5
    """Iterations that make an update orthogonal."""
    ns_method: Literal["gram", "standard"] = "gram"
    """How they are computed."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW, for what is no matrix of a hidden layer."""
    eps: Number = 1e-10
    """Added to the root of AdamW's second moment."""
    muon_lr: Number | None = None
    """Learning rate of matrices. Not set: lr."""
    adam_lr: Number | None = None
    """Learning rate of the rest. Not set: lr, or 3e-4 where lr is not set."""

    @pydantic.model_validator(mode="after")
    def _have_a_rate_of_the_rest(self) -> MuonParams:
        if self.adam_lr is None and not self.is_set("lr"):
            object.__setattr__(self, "adam_lr", 3e-4)
        return self

    @classmethod
    def most_moments(cls, group: Group) -> int:
        """Two: a group without Muon is stepped by AdamW."""
        return 2


# ---- the rules -----------------------------------------------------------------------------------


class MatrixRule(Rule):
    """Muon's rule for matrices."""

    def scalars(
        self, group: Group, num_steps: int, factor: float, shape: Sequence[int] = ()
    ) -> MatrixStep:
        num_rows, num_columns = shape
        lr = float(group["lr"])
        step_size = lr * _MATRIX_LR[group["adjust_lr_fn"]](num_rows, num_columns)
        # p - step_size * (u + decay * p), which is decoupled decay by lr
        decay = lr * group["weight_decay"] / step_size if step_size else 0.0
        a, b, c = group["ns_coefficients"]
        return MatrixStep(
            momentum=self.make_scalars(group, num_steps)._replace(grad_scale=factor),
            update=StepRule("sgd", step_size, decay),
            shape=(num_rows, num_columns),
            nesterov=group["nesterov"],
            coefficients=(a, b, c),
            num_iterations=group["ns_steps"],
            eps=group["eps"],
            dtype=group["ns_dtype"],
        )


def _momentum_scalars(group: Group, _num_steps: int) -> StepRule:
    """Of m * momentum + g * (1 - momentum); a step size of 0 leaves the weight."""
    momentum = group["momentum"]
    return StepRule("sgd", 0.0, 0.0, momentum=momentum, dampening=momentum)


def _keep_norm(num_rows: int, num_columns: int) -> float:
    return math.sqrt(max(1.0, num_rows / num_columns)) if num_columns else 1.0


def _match_adamw(num_rows: int, num_columns: int) -> float:
    return 0.2 * math.sqrt(max(num_rows, num_columns))


_MATRIX_LR = {None: _keep_norm, "original": _keep_norm, "match_rms_adamw": _match_adamw}
"""The factor of the learning rate, by `adjust_lr_fn`."""


def _adamw_of_muon_scalars(group: Group, num_steps: int) -> StepRule:
    return adamw_scalars({**group, "eps": group["adam_eps"], "maximize": False}, num_steps)


MATRIX = MatrixRule("sgd", ("momentum_buffer",), _momentum_scalars, is_matrix=True)
ADAMW_OF_MUON = Rule("adamw", ("exp_avg", "exp_avg_sq"), _adamw_of_muon_scalars)
"""Muon's rule for other parameters: AdamW with its own eps."""


# ---- torch's face --------------------------------------------------------------------------------


_COEFFICIENTS = (3.4445, -4.775, 2.0315)


class MuonFace(OptimizerFace):
    """Muon (Jordan et al. 2024) for matrices, AdamW for other parameters.

        group                  parameters of two dimensions     others
        use_muon=True          MATRIX                    AdamW
        use_muon=False         AdamW                            AdamW

    Muon does not suit embeddings and output heads: put them in a group with use_muon=False. A
    matrix step needs the whole matrix. In a sharded model a matrix must therefore fit into one tile
    and lie whole on one rank.

    Args:
        params, precision, policy: as for Adam. In a group with use_muon=False `eps` is AdamW's.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            torch.optim.Muon.
        use_muon: default for groups without their own use_muon.
        betas, adam_eps: of AdamW, which shares lr and weight_decay with Muon.
        ns_dtype: dtype of the Newton-Schulz iteration's products: bfloat16 as in torch, or float32.

    A matrix step takes about 16 bytes of memory per element of the matrix beside its states. Errors
    and ownership: as Adam.
    """

    _not_negative = ("lr", "eps", "adam_eps", "weight_decay", "momentum")

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        ns_dtype: torch.dtype = torch.bfloat16,
        precision: Precision | str | None = None,
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch. In a group with use_muon=False `eps` is AdamW's."""
        if not param_group.get("use_muon", self.defaults["use_muon"]) and "eps" in param_group:
            param_group["adam_eps"] = param_group["eps"]
        super().add_param_group(param_group)

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return MATRIX if group["use_muon"] and param.ndim == 2 else ADAMW_OF_MUON

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        check_range("ns_steps", group["ns_steps"], 0, 99)
        if len(group["ns_coefficients"]) != len(_COEFFICIENTS):
            raise ValueError(
                f"ns_coefficients is {group['ns_coefficients']}; three numbers are due, such as "
                f"{_COEFFICIENTS}"
            )
        if group["adjust_lr_fn"] not in list(_MATRIX_LR):
            raise ValueError(
                f"adjust_lr_fn is {group['adjust_lr_fn']!r}; allowed are "
                f"{', '.join(map(str, _MATRIX_LR))}"
            )
        if group["ns_dtype"] not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"ns_dtype is {group['ns_dtype']}; allowed are torch.bfloat16 and torch.float32"
            )
