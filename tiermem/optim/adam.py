"""Adam and AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019; amsgrad: Reddi et al. 2018), with torch's arguments."""

from __future__ import annotations

import math

import torch
from torch import nn

from tiermem.optim import rules
from tiermem.optim.arguments import check_betas, check_range
from tiermem.optim.base import NativeOptimizer, Params
from tiermem.optim.rules import Group, Rule
from tiermem.optim.sharded import NonFiniteGradients
from tiermem.precision import Precision

__all__ = ["Adam", "AdamW", "NonFiniteGradients"]


class Adam(NativeOptimizer):
    """Adam with weight decay as an L2 term of the gradient.

    Args:
        params: parameters, named parameters or groups, sharded or ordinary (those on the CPU).
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in torch.optim.Adam.
        foreach, capturable, differentiable, fused: torch's choice of implementation; only what asks for nothing is taken.
        precision: of ordinary parameters' states, a Precision or a preset's name (tiermem/precision.py); default: fp32
            moments, and an fp32 master for parameters of lower precision. Sharded ones follow their model's policy.

    Raises ValueError for values out of range, an empty list, and states that the plan has no room for. Owns the states of
    ordinary parameters; those of sharded ones belong to the model's store and go when it is closed.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        precision: Precision | str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": (betas[0], betas[1]),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        asked = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        super().__init__(params, defaults, asked, precision)

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.adam(group["decoupled_weight_decay"], group["amsgrad"])

    def check_group(self, group: Group) -> None:
        check_adam(group)


class AdamW(Adam):
    """AdamW: weight decay acts on the weight, times lr. Otherwise as Adam."""

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        precision: Precision | str | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            precision=precision,
        )

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.adam(True, group["amsgrad"])  # whatever a loaded group says, as in torch


def check_adam(group: Group) -> None:
    """Raises ValueError for values that Adam's groups may not hold."""
    check_range("lr", float(group["lr"]), 0.0, math.inf)
    check_betas(group["betas"])
    check_range("eps", group["eps"], 0.0, math.inf)
    check_range("weight_decay", group["weight_decay"], 0.0, math.inf)
