"""The work on a tile: functions of the `ParamViews` of each parameter in it.

a step     one pass of a native kernel per parameter; padding between parameters is not stepped (`Stepping`)
a visit    a function of the user changes states of chosen parameters, in fp32 (`visiting`)
a fill     a function writes states of another source, in their stored formats
nothing    the first states are made and written
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tiermem.optim.rules import step_parts
from tiermem.optim.tile import PIECE_NUMEL, StateTile
from tiermem.optimizers.base import AnyStep, MatrixStep
from tiermem.swap.base.native import StepNumbers, Workers, narrow_part, step_struct, widen_part
from tiermem.swap.base.parts import Dither, Moment, StepParts, StepRule
from tiermem.swap.program.table import NativeStep
from tiermem.units.state_layout import StateViews, is_positive
from tiermem.units.unit import Shard, Unit

FP32_PARAM = "fp32_param"

RuleOf = Callable[[Shard], AnyStep | None]
"""Returns the rule and the scalars of a parameter's next step, or None if the parameter is not
stepped."""

Visitor = Callable[[dict[str, torch.Tensor], Shard, slice], None]
"""Changes states in place: (states by name, their parameter, the range of elements in the whole
parameter)."""


class ParamViews(NamedTuple):
    """The elements of one parameter in a tile: its weight, gradient and states, as views."""

    tile: StateTile
    shard: Shard
    first: int  # index in the whole parameter of the first element
    weight: torch.Tensor
    grad: torch.Tensor | None  # None except in a step
    states: StateViews
    names: Sequence[str]  # of the moments, as in torch
    # the weight and states that a step reads; None: these
    source: tuple[torch.Tensor, StateViews] | None = None
    is_unread: bool = False  # the weight is written back without having been read

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.weight.numel()

    @property
    def master(self) -> torch.Tensor | None:
        """The master: fp32; or int16, the low bits of a split master; or None if the weight is the
        master."""
        return self.states.master

    @property
    def moments(self) -> Mapping[str, Moment]:
        """The moments by name. The tile may have room for more."""
        return dict(zip(self.names, self.states.moments, strict=False))

    def cut(self, most_numel: int) -> Iterator[ParamViews]:
        """The same elements in pieces of at most `most_numel`, a multiple of 64. `grad` is not
        cut."""
        for start in range(0, self.numel, most_numel):
            weight = self.weight[start : start + most_numel]
            states = self.states.piece(start, weight.numel())
            yield self._replace(first=self.first + start, weight=weight, states=states)


Act = Callable[[ParamViews], None]
"""Works on a parameter's elements in a tile, in place."""


class LastSteps(NamedTuple):
    """What steps leave to the next ones."""

    numbers: dict[Shard, StepNumbers]  # of native steps, which point at them from step to step
    kinds: dict[Unit, Hashable]  # of each unit's parameters: see `Stepping.kinds`


class Stepping:
    """The work of one optimizer step.

    Stochastic rounding depends on the parameter's name, its own count of steps and the element's
    index in the whole parameter, so the bits do not depend on the tiles or on the number of ranks.

    is_counted: whether parameters have counted this step already.
    last: kept from step to step; None: there is no next one.
    """

    def __init__(
        self,
        workers: Workers,
        rule_of: RuleOf,
        is_counted: bool = True,
        last: LastSteps | None = None,
    ) -> None:
        self._workers = workers
        self._rule_of = functools.cache(rule_of)  # a parameter has several tiles
        self._ahead = 1 - is_counted
        self._last = LastSteps({}, {}) if last is None else last

    def __call__(self, views: ParamViews) -> None:
        """Steps the elements of a parameter."""
        planned = self.plan(views)
        if planned is not None:
            step_parts(self._workers, *planned)
        elif views.is_unread:
            assert views.master is not None
            views.weight.copy_(views.master)

    def plan(self, views: ParamViews) -> PlannedStep | None:
        """The arguments of the step; None: this parameter is not stepped. Raises ValueError when
        the plan lacks room."""
        shard = views.shard
        rule = self._rule_of(shard)
        precision = views.tile.layout.precision
        num_steps = shard.num_steps + self._ahead
        if rule is None:
            return None
        moments = views.states.moments
        dither = None
        if len(views.names) > len(moments):
            num = len(views.names)
            room = views.tile.layout.num_moments
            raise ValueError(
                f"this optimizer keeps {num} moments of a parameter ({', '.join(views.names)}) "
                "and the plan made room for "
                f"num_moments={room}: {num} > {room}. Shard the model with "
                f"OffloadPolicy(num_moments={num})"
            )
        if precision.is_stochastic:
            dither = Dither(precision.key(shard.name), num_steps, views.first)
        assert views.grad is not None
        parts = StepParts(views.weight, views.master, views.grad, moments[: len(views.names)])
        if views.source is not None:
            weight, states = views.source
            source = parts._replace(
                weight=weight, master=states.master, moments=states.moments[: len(views.names)]
            )
            parts = parts._replace(source=source)
        return PlannedStep(rule, parts, dither, self._starts(shard))

    def native(self, shard: Shard, planned: PlannedStep) -> NativeStep:
        """A parameter's step by a native rule, which points at its numbers."""
        rule, parts, dither, starts = planned
        assert isinstance(rule, StepRule)
        self._kind(shard)
        numbers = self._last.numbers[shard]
        return NativeStep(step_struct(rule, parts, numbers, dither, starts), numbers, parts)

    def _starts(self, shard: Shard) -> bool:
        """Whether moments are not read: it is the parameter's first step. Its tile may have been
        stepped before."""
        return shard.num_steps + self._ahead == 1 and not shard.has_moments

    def kinds(self, unit: Unit) -> Hashable:
        """What the steps of a unit's parameters depend on beside views and numbers, which this
        sets. Where it is as in the last step it is the same object, so that each tile of the unit
        compares it at once."""
        found = tuple([self._kind(shard) for shard in unit.shards])
        if self._last.kinds.get(unit) != found:
            self._last.kinds[unit] = found
        return self._last.kinds[unit]

    def _kind(self, shard: Shard) -> Hashable:
        """Of one parameter; None: it is not stepped."""
        rule: AnyStep | None = self._rule_of(shard)
        if not isinstance(rule, StepRule):
            return None if rule is None else MatrixStep
        number = shard.num_steps + self._ahead
        numbers = self._last.numbers
        if shard in numbers:
            numbers[shard].set(rule, number)
        else:
            numbers[shard] = StepNumbers(rule, number)
        return rule.name, rule.maximize, rule.nesterov, rule.moments, self._starts(shard)


class PlannedStep(NamedTuple):
    """The arguments of a step; see `step_parts`."""

    rule: AnyStep
    parts: StepParts
    dither: Dither | None
    start_moments: bool


def visiting(workers: Workers, chosen: Collection[Shard], visitor: Visitor) -> Act:
    """The work of a visit: shows the states of chosen parameters to a function and stores its
    changes.

    The function gets flat fp32 tensors, {"fp32_param": ..., "exp_avg": ..., ...}, and changes them
    in place. Values that it does not change keep their bits in every precision. The parameter is
    set from its master.
    """

    def visit(views: ParamViews) -> None:
        for piece in views.cut(PIECE_NUMEL) if views.shard in chosen else ():
            _visit(workers, visitor, piece)

    return visit


def _visit(workers: Workers, visitor: Visitor, views: ParamViews) -> None:
    """Shows the states of some elements of a parameter, and stores what has changed."""
    shard = views.shard
    weight = views.weight
    stored = views.master
    moments = views.moments
    is_split = stored is not None and stored.dtype == torch.int16
    master = widen_part(workers, weight if stored is None else stored, weight if is_split else None)
    values = {FP32_PARAM: master}
    for name, moment in moments.items():
        values[name] = widen_part(workers, moment, is_positive=is_positive(name))
    visitor(values, shard, slice(views.first, views.first + views.numel))
    for name, moment in moments.items():
        narrow_part(workers, values[name], moment, is_positive=is_positive(name))
        shard.note_loaded(moments=not shard.num_steps and bool(values[name].any()))
    if is_split:
        assert stored is not None
        narrow_part(workers, values[FP32_PARAM], stored, weight)
        return
    weight.copy_(values[FP32_PARAM])
    if stored is not None:
        stored.copy_(values[FP32_PARAM])
