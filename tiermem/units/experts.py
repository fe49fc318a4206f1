"""Fused experts: parameters of transformers that hold all experts of a layer, a row for each; their
tokens choose rows.

    divide      `fused_experts` finds them; their unit knows where the rows lie (`Shard.num_rows`)
    shard       `serve_experts` registers an implementation with transformers' registry and chooses it
    forward     transformers calls it: the owner brings the rows that the tokens chose, then the
                implementation that was chosen before computes

So a fetch may leave all rows out, and the experts' module asks for those that it uses: hooks.py
says when. A parameter without its rows rests (absent.py), so any other code that reads it gets all
of them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from tiermem.units import registry

MOST_SHARE = 0.5
"""Tokens that are expected to use a larger part of the experts have all of them fetched, ahead of
use."""

_REGISTRY = "transformers.integrations.moe"
_BEFORE = "tiermem_"
_BASES = ("eager", "grouped_mm", "batched_mm")
"""Implementations that read no row but those that tokens use."""


class Fused(NamedTuple):
    """A parameter of a module with fused experts."""

    module: nn.Module
    num_rows: int
    num_chosen: int  # by each token


def fused_experts(model: nn.Module) -> dict[nn.Parameter, Fused]:
    """The parameters of a model that hold a matrix for each expert; none where PEFT adapts the
    parameter itself, which reads all of it."""
    if _REGISTRY not in sys.modules:
        return {}
    adapted = {
        inner
        for module in model.modules()
        if hasattr(module, "parameter_name")
        for inner in module.modules()
    }
    return {
        param: Fused(
            module, param.shape[0], getattr(module.config, "num_experts_per_tok", param.shape[0])
        )
        for module in model.modules()
        if hasattr(module, "is_transposed")
        and hasattr(module, "has_gate")
        and module not in adapted
        and _implementation_of(module) in _BASES
        for param in module.parameters(recurse=False)
        if param.dim() > 2
    }


def _implementation_of(module: nn.Module) -> str:
    """The name that transformers has for how a module computes its experts."""
    name = getattr(module.config, "_experts_implementation", None) or "eager"
    return str(name).removeprefix(_BEFORE)


def used_numel(param: nn.Parameter, fused: Mapping[nn.Parameter, Fused]) -> int:
    """The elements of a parameter that one token's maths reads."""
    of_experts = fused.get(param)
    if of_experts is None:
        return param.numel()
    return param.numel() * of_experts.num_chosen // of_experts.num_rows


def expected_share(num_tokens: int, num_chosen: int, num_experts: int) -> float:
    """The part of the experts that tokens use, if each chooses `num_chosen` of them by chance."""
    return 1.0 - (1.0 - min(1.0, num_chosen / num_experts)) ** num_tokens


def serve_experts(model: nn.Module) -> Callable[[], None]:
    """Lets transformers ask for the rows that tokens use, in each model that has fused experts.

    Returns a function that makes the implementations those of before.
    """
    if not fused_experts(model):
        return lambda: None
    functions: Any = sys.modules[_REGISTRY].ALL_EXPERTS_FUNCTIONS
    for base in _BASES:
        functions.register(_BEFORE + base, functools.partial(_forward, base))
    before: list[tuple[Any, dict[str, str | None]]] = []
    for each in model.modules():
        found: dict[str, str | None] = getattr(each, "get_experts_implementation", dict)()
        ours = {key: _BEFORE + name for key, name in found.items() if name in _BASES}
        if ours:
            before.append((each, found))
            before[-1][0].set_experts_implementation(found | ours)

    def undo() -> None:
        for each, found in before:
            each.set_experts_implementation(found)

    return undo


def _forward(
    base: str,
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The implementation that transformers calls: `base`, where the rows of the chosen experts
    are."""
    functions: Any = sys.modules[_REGISTRY].ALL_EXPERTS_FUNCTIONS
    # the class's own forward is behind the decorator that dispatches
    eager: Any = type(module).forward
    forward = functions.get_interface(base, eager.__wrapped__)
    param = next((each for each in module.parameters() if each.dim() > 2), None)
    owner: Any = None if param is None else registry.owner_of(param)
    with contextlib.ExitStack() as block:
        if param is not None and hasattr(owner, "with_experts"):  # Shards; zero.Init keeps no rows
            block.enter_context(owner.with_experts(param, top_k_index))
        output: torch.Tensor = forward(module, hidden_states, top_k_index, top_k_weights)
        return output
