"""Muon (Jordan et al. 2024): matrices by momentum made orthogonal, everything else by AdamW, in one optimizer.

    group                  parameters of two dimensions     others
    use_muon=True          matrix rule (stepping.py)        AdamW
    use_muon=False         AdamW                            AdamW

Embeddings and output heads are matrices that Muon is not for: put them in a group with use_muon=False. Of a sharded model
no tile cuts a matrix, which therefore has to fit in one, and in one rank: a matrix step needs all of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tiermem.optim import rules
from tiermem.optim.adam import check_adam
from tiermem.optim.arguments import check_range
from tiermem.optim.base import NativeOptimizer, Params
from tiermem.optim.rules import MATRIX_LR_NAMES, Group, Rule
from tiermem.precision import Precision

__all__ = ["Muon"]

_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_MOST_ITERATIONS = 99


class Muon(NativeOptimizer):
    """Muon for matrices, AdamW for the rest.

    Args:
        params, precision: as for Adam. A group may hold use_muon=False; there `eps` is AdamW's.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in torch.optim.Muon.
        use_muon: whether matrices are stepped by Muon, of groups that do not say.
        betas, adam_eps: of what AdamW steps; it shares lr and weight_decay.
        ns_dtype: of the Newton-Schulz iteration's products: bfloat16 as in torch, or float32.

    While a matrix is stepped it takes some 16 bytes of memory per element beside its states. Raises and owns as Adam does.
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
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": use_muon,
            "betas": (betas[0], betas[1]),
            "adam_eps": adam_eps,
            "ns_dtype": ns_dtype,
        }
        super().__init__(params, defaults, {}, precision)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch; in one with use_muon=False `eps` is AdamW's."""
        if not param_group.get("use_muon", self.defaults["use_muon"]) and "eps" in param_group:
            param_group = {**param_group, "adam_eps": param_group["eps"]}
        super().add_param_group(param_group)

    def rule_of(self, group: Group, param: nn.Parameter) -> Rule:
        return rules.matrix() if group["use_muon"] and param.ndim == 2 else rules.adamw_of_muon()

    def check_group(self, group: Group) -> None:
        check_adam({**group, "eps": group["adam_eps"]})
        check_range("momentum", group["momentum"], 0.0, math.inf)
        check_range("eps", group["eps"], 0.0, math.inf)
        check_range("ns_steps", group["ns_steps"], 0, _MOST_ITERATIONS)
        if len(group["ns_coefficients"]) != len(_COEFFICIENTS):
            raise ValueError(
                f"ns_coefficients is {group['ns_coefficients']}; three numbers are due, such as {_COEFFICIENTS}"
            )
        if group["adjust_lr_fn"] not in (None, *MATRIX_LR_NAMES):
            raise ValueError(
                f"adjust_lr_fn is {group['adjust_lr_fn']!r}; allowed are None, {', '.join(MATRIX_LR_NAMES)}"
            )
        if group["ns_dtype"] not in (torch.bfloat16, torch.float32):
            raise ValueError(f"ns_dtype is {group['ns_dtype']}; allowed are torch.bfloat16 and torch.float32")
