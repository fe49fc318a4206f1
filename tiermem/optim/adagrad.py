"""Adagrad (Duchi et al. 2011), with torch's arguments."""

from __future__ import annotations

import math

import torch
from torch import nn

from tiermem.optim import rules
from tiermem.optim.arguments import check_range
from tiermem.optim.base import NativeOptimizer, Params
from tiermem.optim.rules import Group, Rule
from tiermem.precision import Precision

__all__ = ["Adagrad"]


class Adagrad(NativeOptimizer):
    """Adagrad; the state `sum` is made by a parameter's first step.

    Args:
        params, precision, foreach, differentiable, fused: as for Adam.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.optim.Adagrad.

    Raises and owns as Adam does.
    """

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
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(
            params, defaults, {"foreach": foreach, "differentiable": differentiable, "fused": fused}, precision
        )

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.adagrad()

    def check_group(self, group: Group) -> None:
        check_range("lr", float(group["lr"]), 0.0, math.inf)
        for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            check_range(name, group[name], 0.0, math.inf)
