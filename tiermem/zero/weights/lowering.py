"""Lowering: which weights torch.autocast would cast in every forward, so that they are cast once, before they are gathered.

Under autocast a Linear's fp32 weight is cast to bf16 where it is used, and autograd keeps that copy until backward. Where the
policy names the dtype (`gather_dtype`), each rank casts its fp32 part instead and the ranks gather the lower dtype: half the
bytes cross, the unit's buffer is half as large, and autograd keeps a view of that buffer, no copy. The values are the same to
the bit. At rest such a parameter is fp32 (so are masters, gradients and state dicts); while its unit is present its dtype is
the lower one.

It is done for parameters in a wider dtype that belong to nothing but modules of the classes that the policy names: a weight
tied to an Embedding, which autocast does not lower, stays as it is. With one shard nothing is gathered, and weights are read
straight into place: they stay as they are, too.

A module that runs outside that autocast after all (an island of fp32) computes with its parameters as they rest: they are
gathered for that call, beside the unit, and autograd keeps the copy until backward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.policy import OffloadPolicy
from tiermem.precision import DTYPES

logger = logging.getLogger("tiermem")


def lowered_parameters(model: nn.Module, policy: OffloadPolicy, num_shards: int) -> dict[nn.Parameter, torch.dtype]:
    """The parameters that are gathered in a lower dtype than they rest in, with that dtype."""
    if policy.gather_dtype is None or policy.stage != 3 or num_shards == 1:
        return {}
    if policy.quantised_gather or policy.quantised_frozen:
        return {}  # what crosses ranks is 8-bit blocks
    dtype = DTYPES[policy.gather_dtype]
    lowered = {p: dtype for m in _lowered_modules(model, policy) for p in m.parameters(recurse=False)}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if type(module) not in policy.lowered_modules or param.dtype.itemsize <= dtype.itemsize:
                lowered.pop(param, None)
    return {p: dtype for p in lowered if p.dtype.is_floating_point}


def serve_islands(
    model: nn.Module,
    lowered: Iterable[nn.Parameter],
    policy: OffloadPolicy,
    device: torch.device,
    whole: Callable[[nn.Parameter], torch.Tensor],
) -> Iterator[RemovableHandle]:
    """Puts hooks on every module with lowered parameters, which serve its forward where it runs outside autocast.

    whole: gathers a parameter's values as they rest. Collective; held weakly.
    """
    found = set(lowered)
    if not found or policy.gather_dtype is None:
        return
    islands = _Islands(found, device, DTYPES[policy.gather_dtype], whole)
    for module in _lowered_modules(model, policy):
        if not found.isdisjoint(module.parameters(recurse=False)):
            yield module.register_forward_pre_hook(islands.enter)
            yield module.register_forward_hook(islands.leave, always_call=True)


class _Islands:
    """Modules whose forward runs outside the autocast for which their parameters are lowered: see the module's docstring."""

    def __init__(
        self,
        lowered: set[nn.Parameter],
        device: torch.device,
        dtype: torch.dtype,
        whole: Callable[[nn.Parameter], torch.Tensor],
    ) -> None:
        self._lowered = lowered
        self._device = device
        self._dtype = dtype
        self._whole = weakref.WeakMethod(whole)
        self._replaced: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._has_warned = False

    def enter(self, module: nn.Module, args: Any) -> None:
        """Before forward: where it is an island, its parameters are replaced by their values as they rest."""
        kind = self._device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is self._dtype:
            return
        whole = self._whole()
        if whole is None or module in self._replaced:
            return
        self._warn(module)
        own = {name: p for name, p in module.named_parameters(recurse=False) if p in self._lowered}
        self._replaced[module] = own
        for name, param in own.items():
            module._parameters[name] = cast(Any, _AsItRests).apply(param, whole(param).to(self._device))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After forward, also one that raised: the parameters are back."""
        module._parameters.update(self._replaced.pop(module, {}))

    def _warn(self, module: nn.Module) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a %s runs outside torch.autocast(%r, %s), for which weights are gathered in that dtype: those of such modules "
                "are gathered a second time in every forward, as they rest, and kept until backward. In a config, "
                "lower_precision_safe_modules says which modules are gathered so",
                type(module).__name__,
                self._device.type,
                self._dtype,
            )


class _AsItRests(torch.autograd.Function):
    """Other values in place of a parameter's, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _lowered_modules(model: nn.Module, policy: OffloadPolicy) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module) in policy.lowered_modules)
