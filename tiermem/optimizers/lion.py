"""Lion."""

from __future__ import annotations

import torch

from tiermem.optimizers.base import (
    Beta,
    Group,
    OptimizerFace,
    OptimizerParams,
    Params,
    Rule,
    arguments_in,
)
from tiermem.policy import OffloadPolicy
from tiermem.precision import Precision
from tiermem.swap.base.parts import StepRule

# ---- the section ---------------------------------------------------------------------------------


class LionParams(OptimizerParams):
    """`optimizer.params` of Lion."""

    marks = ("exp_avg",)

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rate of the moment in the update, and of the moment that is kept."""
    maximize: bool = False
    """Climb instead of descending."""


# ---- the rule ------------------------------------------------------------------------------------


def _lion_scalars(group: Group, _num_steps: int) -> StepRule:
    lr = float(group["lr"])
    beta1, beta2 = group["betas"]
    return StepRule(
        "lion",
        step_size=lr,
        decay=1.0 - lr * group["weight_decay"],
        beta1=beta1,
        beta2=beta2,
        maximize=group["maximize"],
    )


LION = Rule("lion", ("exp_avg",), _lion_scalars)


# ---- torch's face --------------------------------------------------------------------------------


class LionFace(OptimizerFace):
    """Lion (Chen et al. 2023): steps along the sign of an interpolated momentum, with decoupled
    weight decay.

    torch has no Lion. It keeps one moment, `exp_avg`; with an fp32 master its states take a third
    less memory than Adam's.

    Args:
        params, precision, policy: as for Adam.
        lr: a third to a tenth of the lr for AdamW.
        betas: (factor of the interpolation, decay of the moment).
        weight_decay: decoupled; three to ten times the weight_decay for AdamW.
        maximize: maximizes instead of minimizing.

    Errors and ownership: as Adam.
    """

    _rule = LION

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        precision: Precision | str | None = None,
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()))
