"""Shown: `optimizer.state` of parameters whose states rest elsewhere, and what the user makes of
it.

    optimizer.state[param]    {"step": tensor, "exp_avg": ShownState, ...} after the parameter's first step

A ShownState is read and written as a tensor; masters are not shown. Before a step, and before
states are read or saved, the optimizer looks at `state`:

    an entry that is missing or empty    the parameter begins anew: moments are zero, no step is counted, its master stays
    another step, another tensor         is taken over
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from tiermem.optim.at_rest import RestingTiles
from tiermem.optim.ordinary import STEP, num_steps_of, value_of
from tiermem.optimizers.base import Rule
from tiermem.units.unit import Shard
from tiermem.weights.resting_tensor import RestingTensor, resting_in

AtRest = tuple[Shard, RestingTiles[Any]]
"""A parameter whose states rest elsewhere."""


class ShownState(RestingTensor):
    """A moment that rests elsewhere: fp32, on the CPU."""

    @staticmethod
    def __new__(cls, home: RestingTiles[Any], shard: Shard, name: str) -> ShownState:
        shown: ShownState = torch.Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=torch.float32
        )
        return shown

    def __init__(self, home: RestingTiles[Any], shard: Shard, name: str) -> None:
        self._home = weakref.ref(home)
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

    def _at(self) -> RestingTiles[Any]:
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


class _Shown:
    """What `optimizer.state` shows of one parameter."""

    def __init__(self, home: RestingTiles[Any], shard: Shard, rule: Rule) -> None:
        self.moments = rule.moments
        step = torch.tensor(0.0)
        self.tensors = {
            STEP: step,
            **{name: ShownState(home, shard, name) for name in rule.moments},
        }
        self.step = step.numpy()  # the same memory: a step looks at that of each parameter
        self.num_steps = 0  # that `step` was set to

    def count(self, num_steps: int) -> None:
        """Sets the number of steps."""
        self.step[()] = self.num_steps = num_steps

    def is_in(self, entry: Mapping[str, Any] | None) -> bool:
        """Whether an entry holds these tensors, and the step is as it was set."""
        if not entry or self.step.item() != self.num_steps:
            return False
        return all(map(operator.is_, map(entry.get, self.tensors), self.tensors.values()))


class ShownStates:
    """What `optimizer.state` shows."""

    def __init__(self) -> None:
        self._shown: dict[Shard, _Shown] = {}
        self._moments: Sequence[Sequence[str]] = ()  # of each group
        self._contents: list[int] = []  # of `state` when it was last as it is shown

    def use_moments(self, moments: Sequence[Sequence[str]]) -> None:
        """Shows everything anew where a group's moments have other names than before."""
        if moments != self._moments:
            self._shown.clear()
            self._moments = moments

    def note(self, state: Mapping[Any, Any]) -> None:
        """Remembers the contents of `state`, which shows everything as it is."""
        self._contents = self._contents or _contents_of(state)

    def changed(
        self, state: MutableMapping[Any, Any], at_rest: Iterable[AtRest]
    ) -> Iterator[AtRest]:
        """The parameters whose entries are not as they were shown."""
        if self._has_shown(state):
            return
        self._contents.clear()
        for shard, home in at_rest:
            entry = state.get(shard.param)
            shown = self._shown.get(shard)
            if entry if shown is None else not shown.is_in(entry):
                yield shard, home

    def outdated(
        self, state: MutableMapping[Any, Any], at_rest: Iterable[AtRest], has_followed: bool
    ) -> Iterator[AtRest]:
        """Sets the numbers of steps. Yields the parameters whose states are not shown yet, or no
        more.

        has_followed: nobody has changed `state` since `changed` looked at it.
        """
        homes = dict(at_rest)
        has_states = [shard for shard in homes if shard.num_steps or shard.has_moments]
        is_noted = self._contents and (has_followed or self._has_shown(state))
        if is_noted and has_states == list(self._shown):
            for shard, shown in self._shown.items():
                shown.count(shard.num_steps)
            return
        self._contents.clear()
        for shard, home in homes.items():
            known = self._shown.get(shard)
            if (
                known is not None
                and (shard.num_steps or shard.has_moments)
                and known.is_in(state.get(shard.param))
            ):
                known.count(shard.num_steps)
            else:
                yield shard, home

    def _has_shown(self, state: Mapping[Any, Any]) -> bool:
        """Whether `state` is as it was noted."""
        steps = map(np.ndarray.item, [shown.step for shown in self._shown.values()])
        counts = [shown.num_steps for shown in self._shown.values()]
        return self._contents == _contents_of(state) != [] and [*steps] == counts

    def show(
        self, state: MutableMapping[Any, Any], shard: Shard, home: RestingTiles[Any], rule: Rule
    ) -> None:
        """Makes `state` show a parameter's states as they are; nothing of one that has none."""
        param = shard.param
        if not (shard.num_steps or shard.has_moments):
            state.pop(param, None)
            self._shown.pop(shard, None)
            return
        shown = self._shown.get(shard)
        if shown is None or shown.moments != rule.moments:
            shown = self._shown[shard] = _Shown(home, shard, rule)
        shown.count(shard.num_steps)
        state.setdefault(param, {}).update(shown.tensors)

    def follow(
        self, state: MutableMapping[Any, Any], shard: Shard, home: RestingTiles[Any], rule: Rule
    ) -> None:
        """Takes over what the user has made of a parameter's entry. Blocks; raises ValueError for
        another shape, OSError."""
        param = shard.param
        entry = state.get(param) or {}
        shown = self._shown.get(shard)
        for name in rule.moments:
            if entry and shown is not None and entry.get(name) is shown.tensors.get(name):
                continue
            home.write_state(
                shard, name, value_of(entry, name, param, shard.name) if entry else None
            )
        shard.set_steps(num_steps_of(entry, rule), bool(entry), False)
        self.show(state, shard, home, rule)


def _contents_of(state: Mapping[Any, Any]) -> list[int]:
    """The parameters, and the values of their entries in order: their addresses, since no tensor is
    compared so fast.

    Values that were shown stay alive, so that no other has their address. Empty: an entry is no
    dict.
    """
    try:
        return [*map(id, state), *map(id, chain.from_iterable(map(dict.values, state.values())))]
    except TypeError:
        return []
