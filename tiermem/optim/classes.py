"""The optimizers Adam, AdamW, Adagrad, Lion, SGD and Muon, with torch's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiermem.optim import rules
from tiermem.optim.base import NativeOptimizer, Params, arguments_in
from tiermem.optim.rules import (
    MATRIX_LR_NAMES,
    Group,
    Rule,
    check_betas,
    check_not_negative,
    check_range,
)
from tiermem.policy import OffloadPolicy
from tiermem.precision import Precision

# ---- Adam and AdamW ------------------------------------------------------------------------------


class Adam(NativeOptimizer):
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
        betas = (betas[0], betas[1])
        super().__init__(**arguments_in(locals()))

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.adam(group["decoupled_weight_decay"], group["amsgrad"])

    def check_group(self, group: Group) -> None:
        check_adam(group)


class AdamW(Adam):
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
        return rules.adam(True, group["amsgrad"])


def check_adam(group: Group) -> None:
    """Raises ValueError for values that Adam's groups must not have."""
    check_betas(group["betas"])
    check_not_negative(group, "lr", "eps", "weight_decay")


# ---- Adagrad -------------------------------------------------------------------------------------


class Adagrad(NativeOptimizer):
    """Adagrad (Duchi et al. 2011). A parameter's first step creates its state `sum`.

    Args:
        params, precision, policy, foreach, differentiable, fused: as for Adam.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in
            torch.optim.Adagrad.

    Errors and ownership: as Adam.
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
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()))

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.ADAGRAD

    def check_group(self, group: Group) -> None:
        check_not_negative(
            group, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"
        )


# ---- Lion ----------------------------------------------------------------------------------------


class Lion(NativeOptimizer):
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
        betas = (betas[0], betas[1])
        super().__init__(**arguments_in(locals()))

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.LION

    def check_group(self, group: Group) -> None:
        check_betas(group["betas"])
        check_not_negative(group, "lr", "weight_decay")


# ---- SGD -----------------------------------------------------------------------------------------


class SGD(NativeOptimizer):
    """SGD with momentum (Sutskever et al. 2013, torch's variant). Without momentum it keeps no
    moment. Unlike torch's SGD, its states also hold `step`.

    Args:
        params, precision, policy, foreach, differentiable, fused: as for Adam.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD.

    Errors and ownership: as Adam.
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
        policy: OffloadPolicy | None = None,
    ) -> None:
        super().__init__(**arguments_in(locals()))

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.sgd(has_momentum=group["momentum"] != 0.0)

    def check_group(self, group: Group) -> None:
        check_not_negative(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and (group["momentum"] <= 0.0 or group["dampening"] != 0.0):
            raise ValueError(
                f"nesterov=True with momentum={group['momentum']} and "
                f"dampening={group['dampening']}; it needs a momentum "
                "above 0 and a dampening of 0"
            )


# ---- Muon ----------------------------------------------------------------------------------------

_COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Muon(NativeOptimizer):
    """Muon (Jordan et al. 2024) for matrices, AdamW for other parameters.

        group                  parameters of two dimensions     others
        use_muon=True          matrix rule (rules.py)           AdamW
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
        betas = (betas[0], betas[1])
        super().__init__(**arguments_in(locals()) | {"ns_coefficients": tuple(ns_coefficients)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch. In a group with use_muon=False `eps` is AdamW's."""
        if not param_group.get("use_muon", self.defaults["use_muon"]) and "eps" in param_group:
            param_group["adam_eps"] = param_group["eps"]
        super().add_param_group(param_group)

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.MATRIX if group["use_muon"] and param.ndim == 2 else rules.ADAMW_OF_MUON

    def check_group(self, group: Group) -> None:
        check_adam({**group, "eps": group["adam_eps"]})
        check_not_negative(group, "momentum", "eps")
        check_range("ns_steps", group["ns_steps"], 0, 99)
        if len(group["ns_coefficients"]) != len(_COEFFICIENTS):
            raise ValueError(
                f"ns_coefficients is {group['ns_coefficients']}; three numbers are due, such as "
                f"{_COEFFICIENTS}"
            )
        if group["adjust_lr_fn"] not in (None, *MATRIX_LR_NAMES):
            raise ValueError(
                f"adjust_lr_fn is {group['adjust_lr_fn']!r}; allowed are None, "
                f"{', '.join(MATRIX_LR_NAMES)}"
            )
        if group["ns_dtype"] not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"ns_dtype is {group['ns_dtype']}; allowed are torch.bfloat16 and torch.float32"
            )
