"""Lowering: which weights torch.autocast would cast in every forward, so that they are cast once, before they are gathered.

Under autocast a Linear's fp32 weight is cast to bf16 where it is used, and autograd keeps that copy until backward. Where the
policy names the dtype (`gather_dtype`), each rank casts its fp32 part instead and the ranks gather the lower dtype: half the
bytes cross, the unit's buffer is half as large, and autograd keeps a view of that buffer, no copy. The values are the same to
the bit. At rest such a parameter is fp32 (so are masters, gradients and state dicts); while its unit is present its dtype is
the lower one.

It is done for parameters in a wider dtype that belong to nothing but modules of the classes that the policy names: a weight
tied to an Embedding, which autocast does not lower, stays as it is. With one shard nothing is gathered, and weights are read
straight into place: they stay as they are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tiermem.policy import OffloadPolicy
from tiermem.precision import DTYPES


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


def watch_autocast(
    model: nn.Module, lowered: Iterable[nn.Parameter], policy: OffloadPolicy, device: torch.device
) -> Iterator[RemovableHandle]:
    """Puts a hook on every module with lowered parameters that raises when its forward runs without autocast."""
    found = set(lowered)
    for module in _lowered_modules(model, policy) if found else ():
        if not found.isdisjoint(module.parameters(recurse=False)):
            assert policy.gather_dtype is not None
            yield module.register_forward_pre_hook(_check_of(device.type, DTYPES[policy.gather_dtype]))


def _lowered_modules(model: nn.Module, policy: OffloadPolicy) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module) in policy.lowered_modules)


def _check_of(device: str, dtype: torch.dtype) -> Callable[[nn.Module, Any], None]:
    def check(module: nn.Module, args: Any) -> None:
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) is not dtype:
            raise RuntimeError(
                f"a {type(module).__name__} runs outside torch.autocast({device!r}, {dtype}), for which its weights are "
                "gathered in that dtype: call the model through the engine or under that autocast, or let weights be gathered "
                "as they rest (OffloadPolicy(gather_dtype=None); in a config: lower_precision_safe_modules [])"
            )

    return check
