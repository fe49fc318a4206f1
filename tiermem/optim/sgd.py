"""SGD with momentum (Sutskever et al. 2013, in torch's variant), with torch's arguments."""

from __future__ import annotations

import math

import torch
from torch import nn

from tiermem.optim import rules
from tiermem.optim.arguments import check_range
from tiermem.optim.base import NativeOptimizer, Params
from tiermem.optim.rules import Group, Rule
from tiermem.precision import Precision

__all__ = ["SGD"]


class SGD(NativeOptimizer):
    """SGD; without momentum it keeps no moment. Beside torch's `momentum_buffer` its states hold `step`.

    Args:
        params, precision, foreach, differentiable, fused: as for Adam.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.

    Raises and owns as Adam does.
    """

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
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(
            params, defaults, {"foreach": foreach, "differentiable": differentiable, "fused": fused}, precision
        )

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.sgd(has_momentum=group["momentum"] != 0.0)

    def check_group(self, group: Group) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check_range(name, float(group[name]), 0.0, math.inf)
        if group["nesterov"] and (group["momentum"] <= 0.0 or group["dampening"] != 0.0):
            raise ValueError(
                f"nesterov=True with momentum={group['momentum']} and dampening={group['dampening']}; it needs a momentum "
                "above 0 and a dampening of 0"
            )
