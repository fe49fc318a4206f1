"""Uses: the modules that a forward runs one after another, with the units each needs and how long its maths takes.

Taken from a division (zero/unit.py), in the order in which modules are defined: the first guess that `zero/order.py` makes too.
A module's maths is counted by its parameters that multiply: those of two dimensions or more, outside embeddings, which only
look up. A mixture of experts counts every expert, so its time is an upper bound.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from tiermem.forecast.rates import Compute
from tiermem.zero.unit import Division
from tiermem.zero.uses import reads_weights_again


class Use(NamedTuple):
    """One module's part in a forward and a backward."""

    name: str
    units: tuple[int, ...]  # indices of the units it needs, streamed or not
    forward_s: float
    backward_s: float
    reads_again: bool = True  # whether its backward needs the units as well


def uses_of(model: nn.Module, division: Division, compute: Compute) -> list[Use]:
    """The uses of one forward. The model may be on the meta device."""
    names = {module: name for name, module in model.named_modules()}
    in_list = {
        m for each in model.modules() if isinstance(each, nn.ModuleList) for m in each.modules() if m is not each
    }
    has_rest = compute.rest_forward_s is not None
    uses: list[Use] = []
    counted: set[nn.Parameter] = set()
    for module, units in division.triggers.items():
        matrices = _matrices(module) & {shard.param for unit in units for shard in unit.shards}
        counted |= matrices
        numel = 0 if has_rest and module not in in_list else sum(param.numel() for param in matrices)
        forward_s, backward_s = numel * compute.forward_s, numel * compute.backward_s
        indices = tuple(unit.index for unit in units)
        uses.append(Use(names[module], indices, forward_s, backward_s, reads_weights_again(module)))
    left = sum(param.numel() for param in _left(in_list if has_rest else set(model.modules())) - counted)
    if left or not uses:
        uses.append(Use("what is always present", (), left * compute.forward_s, left * compute.backward_s))
    last, rest = uses[-1], (compute.rest_forward_s or 0.0, compute.rest_backward_s or 0.0)
    uses[-1] = last._replace(forward_s=last.forward_s + rest[0], backward_s=last.backward_s + rest[1])
    return uses


def _matrices(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that a module and those below it multiply by: of two dimensions, not those of its embeddings."""
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    looked_up = {param for each in embeddings for param in each.parameters(recurse=False)}
    return {param for param in module.parameters() if param.dim() > 1} - looked_up


def _left(modules: set[nn.Module]) -> set[nn.Parameter]:
    """Matrices that these modules own themselves."""
    owned = (module.parameters(recurse=False) for module in modules if not isinstance(module, nn.Embedding))
    return {param for params in owned for param in params if param.dim() > 1}
