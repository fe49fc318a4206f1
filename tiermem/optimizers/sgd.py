"""SGD."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn

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


class SgdParams(OptimizerParams):
    """`optimizer.params` of SGD."""

    marks = ("momentum_buffer", "momentum")

    momentum: Number = 0.0
    """Decay rate of the momentum; 0 keeps none."""
    dampening: Number = 0.0
    """Part of the gradient that does not reach the momentum."""
    nesterov: bool = False
    """Step along the momentum after next; needs momentum and no dampening."""
    maximize: bool = False
    """Climb instead of descending."""

    @classmethod
    def most_moments(cls, group: Group) -> int:
        """One with momentum, else none."""
        return 1 if group.get("momentum") else 0

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            given = f"momentum {self.momentum} and dampening {self.dampening}"
            yield "nesterov", f"true with {given}; it needs momentum above 0 and dampening 0"


# ---- the rule ------------------------------------------------------------------------------------


@functools.cache
def sgd(has_momentum: bool) -> Rule:
    """SGD; without momentum it keeps no moment."""
    return Rule("sgd", ("momentum_buffer",) if has_momentum else (), _sgd_scalars)


def _sgd_scalars(group: Group, num_steps: int) -> StepRule:
    has_momentum = group["momentum"] != 0.0
    return StepRule(
        "sgd",
        step_size=float(group["lr"]),
        decay=group["weight_decay"],
        momentum=group["momentum"],
        # torch's buffer starts as the first gradient without dampening; a group without momentum
        # has no dampening
        dampening=group["dampening"] if num_steps > 1 and has_momentum else 0.0,
        maximize=group["maximize"],
        nesterov=group["nesterov"] and has_momentum,
    )


# ---- torch's face --------------------------------------------------------------------------------


class SGDFace(OptimizerFace):
    """SGD with momentum (Sutskever et al. 2013, torch's variant). Without momentum it keeps no
    moment. Unlike torch's SGD, its states also hold `step`.

    Args:
        params, precision, policy, foreach, differentiable, fused: as for Adam.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.

    Errors and ownership: as Adam.
    """

    _not_negative = ("lr", "momentum", "weight_decay")

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: Precision | str | None = None,
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()))

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return sgd(has_momentum=group["momentum"] != 0.0)

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0.0 or group["dampening"] != 0.0):
            raise ValueError(
                f"nesterov=True with momentum={group['momentum']} and "
                f"dampening={group['dampening']}; it needs a momentum above 0 and a dampening of 0"
            )
