"""Shown: `optimizer.state` of parameters whose states rest elsewhere, and what the user makes of it.

    optimizer.state[param]    {"step": tensor, "exp_avg": ShownState, ...} after the parameter's first step

A ShownState is read and written as a tensor; masters are not shown. Before a step, and before states are read or saved, the
optimizer looks at `state`:

    an entry that is missing or empty    the parameter begins anew: moments are zero, no step is counted, its master stays
    another step, another tensor         is taken over
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from torch import nn

from tiermem.optim.ordinary import STEP, num_steps_of, value_of
from tiermem.optim.rules import Rule
from tiermem.zero.resting_tensor import RestingTensor, resting_in
from tiermem.zero.unit import Shard


class StateHome(Protocol):
    """Where states rest."""

    def read_state(self, shard: Shard, name: str) -> torch.Tensor:
        """A copy of a moment, fp32. Blocks; raises OSError, and RuntimeError where ranks hold parts."""

    def write_state(self, shard: Shard, name: str, value: torch.Tensor | None) -> None:
        """Replaces a moment; None: by zeros. Every rank gives the whole value. Blocks; raises OSError."""


class ShownState(RestingTensor):
    """A moment that rests elsewhere: fp32, on the CPU."""

    _home: weakref.ref[StateHome]

    @staticmethod
    def __new__(cls, home: StateHome, shard: Shard, name: str) -> ShownState:
        shown: ShownState = torch.Tensor._make_wrapper_subclass(cls, shard.shape, dtype=torch.float32)
        shown._home, shown._shard, shown._name = weakref.ref(home), shard, name
        return shown

    def __init__(self, home: StateHome, shard: Shard, name: str) -> None:
        super().__init__()
        self._shard = shard
        self._name = name

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShownState({self._name} of {self._shard.name!r}, shape={tuple(self.shape)})"

    @property
    def what(self) -> str:
        """The state, in an error."""
        return f"{self._name} of {self._shard.name}"

    def read(self) -> torch.Tensor:
        """A copy of the values. Blocks; raises OSError, and RuntimeError where ranks hold parts."""
        return self._at().read_state(self._shard, self._name)

    def replace(self, value: torch.Tensor | None) -> None:
        """Replaces the values; None: by zeros. Blocks; raises OSError."""
        self._at().write_state(self._shard, self._name, value)

    def _at(self) -> StateHome:
        if (home := self._home()) is None:
            raise RuntimeError(f"{self.what} is gone with its optimizer")
        return home

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name in ("aten::zero_", "aten::_foreach_zero_"):
            for each in resting_in(args):
                each.replace(None)
            return args[0] if isinstance(args[0], ShownState) else None
        return super().__torch_dispatch__(func, types, args, kwargs)


class ShownStates:
    """What `optimizer.state` shows, by parameter."""

    def __init__(self) -> None:
        self._shown: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        self._steps: dict[nn.Parameter, int] = {}  # shown

    def show(self, state: MutableMapping[Any, Any], shard: Shard, home: StateHome, rule: Rule) -> None:
        """Makes `state` show a parameter's states as they are; nothing of one that has none."""
        param = shard.param
        if not (shard.num_steps or shard.has_moments):
            state.pop(param, None)
            self._shown.pop(param, None)
            return
        shown = self._shown.get(param, {})
        if tuple(shown) != (STEP, *rule.moments):
            moments = {name: ShownState(home, shard, name) for name in rule.moments}
            shown = self._shown[param] = {STEP: torch.tensor(0.0), **moments}
        shown[STEP].fill_(shard.num_steps)
        self._steps[param] = shard.num_steps
        state.setdefault(param, {}).update(shown)

    def follow(self, state: MutableMapping[Any, Any], shard: Shard, home: StateHome, rule: Rule) -> None:
        """Takes over what the user has made of a parameter's entry. Blocks; raises ValueError for another shape, OSError."""
        param = shard.param
        entry, shown = state.get(param) or {}, self._shown.get(param, {})
        is_as_shown = all(entry.get(name) is value for name, value in shown.items())
        if is_as_shown and (int(shown[STEP]) == self._steps[param] if shown else not entry):
            return
        for name in rule.moments:
            if entry and shown and entry.get(name) is shown.get(name):
                continue
            home.write_state(shard, name, value_of(entry, name, param, shard.name) if entry else None)
        shard.set_steps(num_steps_of(entry, rule), bool(entry), False)
        self.show(state, shard, home, rule)
