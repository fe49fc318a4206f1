"""External parameters: those that are used outside their own module's forward.

    F.linear(x, self.embed.weight)        another module's weight           both are seen when they happen, because a
    output, bias = self.layer(x)          a parameter that was returned     parameter that nobody holds says so (resting.py)

A call that is given resting parameters is treated as a small module: their units are made present before it and let go after
it, and backward asks for them again when the gradient of its result arrives. When the result sees a parameter's own bytes
(`weight.t()`, `weight[3:]`) the module that is running holds the unit until it ends, in forward and in backward. Nothing is
remembered from pass to pass but the order of units, so a program may do otherwise every time; the next pass fetches ahead.

`register_external_parameter` says it beforehand: the module then holds the parameter's unit whenever it runs. It is needed only
where the unit should be there earlier, or where no call of torch's sees the parameter (a kernel that takes its address).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tiermem.zero import registry
from tiermem.zero.shards import Shards


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Says that a module needs a parameter of another one in its forward and backward.

    Before or after sharding; the parameter's unit is then present whenever `module` runs. Not collective. Raises RuntimeError
    for what is no Parameter.
    """
    _check(module, parameter)
    known: list[nn.Parameter] = module.__dict__.setdefault(registry.EXTERNAL, [])
    if all(each is not parameter for each in known):
        known.append(parameter)
    keeper = registry.keeper_of(parameter)
    if isinstance(keeper, Shards):
        keeper.add_need(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Takes a registration back. Raises RuntimeError for what is no Parameter, or was not registered with this module."""
    _check(module, parameter)
    known: list[nn.Parameter] = module.__dict__.get(registry.EXTERNAL, [])
    if all(each is not parameter for each in known):
        raise RuntimeError("this parameter is not registered with this module")
    known[:] = [each for each in known if each is not parameter]
    keeper = registry.keeper_of(parameter)
    if isinstance(keeper, Shards):
        keeper.drop_need(module, parameter)


def _check(module: Any, parameter: Any) -> None:
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"the module is a {type(module).__name__}; give a torch.nn.Module")
    if not isinstance(parameter, nn.Parameter):
        what = "a tensor, perhaps a view or a copy of one" if isinstance(parameter, torch.Tensor) else type(parameter)
        raise RuntimeError(f"the parameter is {what}; give the torch.nn.Parameter itself")
