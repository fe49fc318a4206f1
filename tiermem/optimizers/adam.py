"""Adam and AdamW."""

from __future__ import annotations

import functools
import math

import pydantic
import torch
from torch import nn

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
from tiermem.section import Number
from tiermem.swap.base.parts import StepRule

# ---- the section ---------------------------------------------------------------------------------


class AdamParams(OptimizerParams):
    """`optimizer.params` of Adam and AdamW."""

    no_arguments = (
        "adam_w_mode",
        "fp32_optimizer_states",
        "bias_correction",
        "torch_adam",
    )
    marks = ("exp_avg_sq",)
    averages_squares = True

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: Number = 1e-8
    """Added to the root of the second moment."""
    amsgrad: bool = False
    """Divide by the root of the largest second moment so far, which is a third moment to keep."""
    maximize: bool = False
    """Climb instead of descending."""
    adam_w_mode: bool = True
    """Whether weight decay is decoupled."""
    fp32_optimizer_states: bool = True
    """Keep moments in fp32; false: in the master's dtype (config/root.py)."""
    bias_correction: bool = True
    """Divide the moments by 1 - beta**step; always so here."""
    torch_adam: bool = False
    """Decay by 0.01 where weight_decay is decoupled and not set, as torch's AdamW does; the step is
    tiermem's own, of the same mathematics."""

    @pydantic.model_validator(mode="after")
    def _decay_as_torch(self) -> AdamParams:
        if self.torch_adam and self.adam_w_mode and not self.is_set("weight_decay"):
            object.__setattr__(self, "weight_decay", 1e-2)
        return self

    @classmethod
    def most_moments(cls, group: Group) -> int:
        """Two, and a third with amsgrad."""
        return 3 if group.get("amsgrad") else 2


# ---- the rule ------------------------------------------------------------------------------------


@functools.cache
def adam(is_decoupled: bool, amsgrad: bool = False) -> Rule:
    """Adam, or AdamW when weight decay is decoupled."""
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
    if is_decoupled:
        return Rule("adamw", moments, adamw_scalars)
    return Rule("adam", moments, _adam_scalars)


def _adam_scalars(group: Group, num_steps: int) -> StepRule:
    beta1, beta2 = group["betas"]
    return StepRule(
        "adam",
        step_size=float(group["lr"]) / (1.0 - beta1**num_steps),
        decay=group["weight_decay"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        inv_sqrt_bias2=1.0 / math.sqrt(1.0 - beta2**num_steps),
        maximize=group["maximize"],
    )


def adamw_scalars(group: Group, num_steps: int) -> StepRule:
    """As Adam's, but weight decay acts on the weight, times lr."""
    decay = 1.0 - float(group["lr"]) * group["weight_decay"]
    return _adam_scalars(group, num_steps)._replace(name="adamw", decay=decay)


# ---- torch's face --------------------------------------------------------------------------------


class AdamFace(OptimizerFace):
    """Adam (Kingma & Ba 2015; amsgrad: Reddi et al. 2018): weight decay is an L2 term of the
    gradient.

    Args:
        params: parameters, named parameters or groups; sharded, or ordinary: on the CPU, or with a
            policy anywhere.
        lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in
            torch.optim.Adam.
        foreach, capturable, differentiable, fused: torch's implementation options; only their
            defaults, or False, are accepted.
        precision: of ordinary parameters' states: a Precision or a preset's name
            (tiermem/precision.py). Default: fp32 moments, and an fp32 master for parameters of
            lower precision. Sharded parameters follow their model's policy.
        policy: of ordinary parameters' states: their tier (`optim`), precision, paths and budgets.
            Default: they are tensors beside the parameters. Parameters stay where they are: tensors
                and DTensors, on the CPU or an accelerator.

    Raises ValueError for values out of range, an empty list, and states that the plan has no room
    for, BudgetError for a budget of the policy that does not suffice. The optimizer owns the states
    of ordinary parameters. The states of sharded parameters belong to the model's store and are
    freed with it.
    """

    _not_negative = ("lr", "eps", "weight_decay")

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
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()))

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return adam(group["decoupled_weight_decay"], group["amsgrad"])


class AdamWFace(AdamFace):
    """AdamW (Loshchilov & Hutter 2019): weight decay acts on the weight, times lr. Otherwise as
    Adam."""

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
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()), decoupled_weight_decay=True)

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        # ignores decoupled_weight_decay of a loaded group, as torch does
        return adam(True, group["amsgrad"])
