"""Lion (Chen et al. 2023): the sign of an interpolated momentum, with decoupled weight decay. torch has none."""

from __future__ import annotations

import math

import torch
from torch import nn

from tiermem.optim import rules
from tiermem.optim.arguments import check_betas, check_range
from tiermem.optim.base import NativeOptimizer, Params
from tiermem.optim.rules import Group, Rule
from tiermem.precision import Precision

__all__ = ["Lion"]


class Lion(NativeOptimizer):
    """Lion: one moment, `exp_avg`, a third of Adam's states less.

    Args:
        params, precision: as for Adam.
        lr: a third to a tenth of AdamW's.
        betas: of the interpolation that is stepped along, and of the moment.
        weight_decay: decoupled; three to ten times AdamW's.
        maximize: go up instead of down.

    Raises and owns as Adam does.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        precision: Precision | str | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": (betas[0], betas[1]), "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, {}, precision)

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.lion()

    def check_group(self, group: Group) -> None:
        check_range("lr", float(group["lr"]), 0.0, math.inf)
        check_betas(group["betas"])
        check_range("weight_decay", group["weight_decay"], 0.0, math.inf)
