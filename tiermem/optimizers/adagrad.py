"""Adagrad."""

from __future__ import annotations

import torch

from tiermem.optimizers.base import (
    Group,
    OptimizerFace,
    OptimizerParams,
    Params,
    Rule,
    arguments_in,
)
from tiermem.policy import OffloadPolicy
from tiermem.precision import Precision
from tiermem.section import Number
from tiermem.swap.base.parts import StepRule

# ---- the section ---------------------------------------------------------------------------------


class AdagradParams(OptimizerParams):
    """`optimizer.params` of Adagrad."""

    marks = ("sum", "lr_decay")

    lr: Number = 1e-2
    """Learning rate."""
    lr_decay: Number = 0.0
    """The rate is divided by 1 + step * lr_decay."""
    initial_accumulator_value: Number = 0.0
    """What the sum of squares starts from."""
    eps: Number = 1e-10
    """Added to the root of the sum."""
    maximize: bool = False
    """Climb instead of descending."""


# ---- the rule ------------------------------------------------------------------------------------


def _adagrad_scalars(group: Group, num_steps: int) -> StepRule:
    return StepRule(
        "adagrad",
        step_size=float(group["lr"]) / (1.0 + (num_steps - 1) * group["lr_decay"]),
        decay=group["weight_decay"],
        eps=group["eps"],
        initial=group["initial_accumulator_value"],
        maximize=group["maximize"],
    )


ADAGRAD = Rule("adagrad", ("sum",), _adagrad_scalars)


# ---- torch's face --------------------------------------------------------------------------------


class AdagradFace(OptimizerFace):
    """Adagrad (Duchi et al. 2011). A parameter's first step creates its state `sum`.

    Args:
        params, precision, policy, foreach, differentiable, fused: as for Adam.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in
            torch.optim.Adagrad.

    Errors and ownership: as Adam.
    """

    _rule = ADAGRAD
    _not_negative = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: Precision | str | None = None,
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()))
