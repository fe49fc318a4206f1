"""Resting parameters: what a streamed parameter is while no module that holds it runs, so that every use of it is seen.

                     hold: the first module that needs its unit begins
        Resting  ------------------------------------------------------->  Parameter
                 <-------------------------------------------------------
                     let go: the last one has ended

A resting parameter is the same object with another class (as torch's lazy modules do it when they come to life), a Parameter
whose calls come here first: `F.linear(x, self.embed.weight)` in a module that does not own the embedding, or `bias` that a
module has returned. While a forward or a backward is at work its keeper lends it (external.py). Elsewhere nobody may wait for
the other ranks, so reading gives NaN, and writing in place, copying and pickling raise. While it is held a parameter is an
ordinary one again, and torch's calls on it cost what they always do.

Only plain parameters change: a subclass of Parameter keeps its class, and is lent to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from tiermem.zero import registry
from tiermem.zero.weights.touch import needs_values, parameters_in, replaces_data, writes_in_place


class Lender(Protocol):
    """Who looks after resting parameters."""

    @property
    def may_lend(self) -> bool:
        """Whether a forward or a backward is at work, on every rank."""

    def lend(self, params: list[nn.Parameter], func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function with the parameters' values in place."""


@runtime_checkable
class Adopter(Protocol):
    """Keeps the parameters of a model that is not sharded yet, and takes more of them."""

    def adopt(self, params: Iterable[nn.Parameter]) -> None:
        """Partitions parameters that were made after building. Collective; blocks."""


class RestingParameter(nn.Parameter):
    """A parameter whose unit nobody holds; see above."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if needs_values(func):
            params = [p for p in parameters_in(args, kwargs) if type(p) is RestingParameter]
            lender: Lender | None = registry.keeper_of(params[0]) if params else None
            if lender is not None and lender.may_lend:
                return lender.lend([p for p in params if registry.keeper_of(p) is lender], func, args, kwargs)
            written = (
                args[:1] if replaces_data(func) and args[0] is not args[1] else writes_in_place(func, args, kwargs)
            )
            for param in written:
                if type(param) is RestingParameter:
                    _refuse_write("setting data" if replaces_data(func) else func.__name__, param)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Partitions ordinary parameters, such as adapters that were added after zero.Init, beside this one.

        They keep their dtype; those that are partitioned already stay as they are. Collective; blocks. Raises RuntimeError once
        the model is sharded.
        """
        keeper = registry.keeper_of(self)
        if not isinstance(keeper, Adopter):
            raise RuntimeError(
                "convert_to_zero_parameters on a sharded model, whose parameters are planned: add modules before "
                "tiermem.initialize or tiermem.shard"
            )
        keeper.adopt(param_list)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(self)


def rest(params: Iterable[nn.Parameter]) -> None:
    """Nobody holds these any more."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = RestingParameter


def wake(params: Iterable[nn.Parameter]) -> None:
    """Somebody holds these: they are ordinary parameters."""
    for param in params:
        if type(param) is RestingParameter:
            param.__class__ = nn.Parameter  # type: ignore[assignment]


def _refuse_copy(param: nn.Parameter) -> NoReturn:
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(param.shape)
    raise RuntimeError(
        f"a parameter of shape {shape} whose values rest elsewhere cannot be copied or pickled: what it shows is NaN. Do it "
        "under tiermem.zero.GatheredParameters(parameter), or take its value from state_dict() or Shards.weight(parameter)"
    )


def _refuse_write(what: str, param: nn.Parameter) -> NoReturn:
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(param.shape)
    raise RuntimeError(
        f"{what} writes a parameter of shape {shape} whose values rest elsewhere, so what it writes would be lost. "
        "Write under tiermem.zero.GatheredParameters(parameter, modifier_rank=0), through Shards.replace or load_state_dict, "
        "or before sharding; step with tiermem.AdamW and its like"
    )
