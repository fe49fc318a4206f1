"""TentativeStep: steps units while backward runs, on assumptions that the step then compares with
the facts.

    backward begins       is it the last one before a step, and did the last steps find what was assumed? If so:
    gradients come home   the unit's tiles are stepped beside what they replace, with the scalars that are assumed
    step                  if every assumption equals the facts to the bit, the results count. Else they are dropped, and every
                          tile is stepped again

What is assumed of a parameter (Assumption): no clipping, the loss scale of the last step, the
learning rate as it is now, and that its gradient stays as it is. The norm of all gradients is known
only at the step, which drops the results if it is not finite. Until the step every fetch, read and
save finds old weights, states and counts. Another backward drops the results; each change of a
state drops them, too.

Of weights that rest in memory a second copy is stepped, and of states that rest there beside an
accelerator, where the plan has room for it (`Plan.copied`); other tiles in memory wait for the
step. Gradients on an accelerator are copied to tiles, and stay there until the step. What a rank
attempts is its own affair: results are the same bits in any case, so ranks need not agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import NamedTuple

from tiermem.optim.tiles import StateTiles
from tiermem.optimizers.base import AnyStep
from tiermem.plans.budget import take_slot
from tiermem.plans.plan import Plan
from tiermem.run.shards import Shards
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.swap.store.entry import NoSlotError
from tiermem.units.unit import Shard, Unit
from tiermem.weights.step_run import overlap_of
from tiermem.weights.unit_state import LiveUnit

logger = logging.getLogger("tiermem")

StepOf = Callable[[Shard, float, int, dict[Hashable, AnyStep]], AnyStep | None]
"""(parameter, factor of the gradients, number of its step, earlier ones to share) -> its rule and
scalars; None: it is not stepped."""

_MOST_DUE = 64  # steps


class History:
    """Whether steps have found what was assumed. All ranks see the same steps, but for states that
    only some of them hold.

    A step is attempted after as many steps in a row that found it as are due: 1 at first, twice as
    many after each attempt that failed, at most 64, and half as many after one that held.
    """

    def __init__(self) -> None:
        self._num_backwards = 0  # of the last step
        self._num_held = 0  # steps in a row
        self._num_due = 1

    @property
    def is_due(self) -> bool:
        """Whether the next step is to be attempted."""
        return self._num_held >= self._num_due

    def is_last(self, num_backwards: int) -> bool:
        """Whether a step is expected after so many backwards."""
        return num_backwards == self._num_backwards

    def note(self, num_backwards: int, has_held: bool, was_attempted: bool) -> None:
        """Notes a step."""
        has_held = has_held and num_backwards == self._num_backwards
        self._num_backwards = num_backwards
        self._num_held = self._num_held + 1 if has_held else 0
        if was_attempted:
            self._num_due = (
                max(1, self._num_due // 2) if has_held else min(_MOST_DUE, 2 * self._num_due)
            )


class Assumption(NamedTuple):
    """What a speculative step assumes of one parameter: rule, scalars, step number, gradient
    version."""

    step: str  # the rule and its scalars: equal strings are equal bits
    num_steps: int
    moments: tuple[str, ...]
    has_moments: bool
    gradient: int  # its version


class TentativeStep:
    """The step that is made under backward, if there is one.

    Args:
        shards: the model.
        tiles: its states.
        step_of: the step of a parameter that has a gradient.
    """

    def __init__(self, shards: Shards, tiles: StateTiles, step_of: StepOf) -> None:
        self._shards = shards
        self._tiles = tiles
        self._step_of = step_of
        self._history = History()
        self._scale = 1.0  # of the losses, in the last step
        self._num_backwards = 0  # since the last step
        self._slot_of: Plan | None = None  # for which disk space has been taken, or was not found
        self._is_attempted = False  # units that come home in this backward are stepped
        self._was_attempted = False  # since the last step
        self._has_changed = False  # a gradient came home again after its unit was stepped
        self._steps: dict[Shard, AnyStep | None] = {}  # that are assumed
        self._assumed: dict[Shard, Assumption | None] = {}
        self._waiting: list[LiveUnit] = []  # units whose gradients are on their way to NVMe
        self._made: dict[Hashable, AnyStep] = {}  # of one moment, shared by parameters
        self._texts: dict[int, str] = {}  # by id of these

    def begin_backward(self) -> None:
        """Drops what an earlier backward has stepped. Reads the first tiles ahead if this step is
        not to be attempted."""
        if self._shards.program.attempted:
            self._shards.program.drop()
        self._forget()
        self._num_backwards += 1
        self._has_changed = False
        is_due = (
            self._is_possible
            and self._history.is_due
            and all(tile.is_started for tile in self._tiles.tiles)
        )
        is_due = is_due and self._has_slot()
        self._is_attempted = is_due and self._history.is_last(self._num_backwards)
        self._was_attempted |= self._is_attempted
        if not is_due:
            self._tiles.begin()

    def receive(self, unit: Unit) -> None:
        """Steps a unit whose gradients of this backward have come home. Does not block for
        transfers."""
        if not self._is_possible:
            return
        if any(shard in self._assumed for shard in unit.shards):
            self._has_changed = True
            self._is_attempted = False
        factor = 1.0 / self._scale / self._shards.homes.divisor  # if nothing is clipped
        for shard in unit.shards:
            number = shard.num_steps + 1
            self._steps[shard] = step = self._step(shard, factor, number, shard.gradient.takes_more)
            self._assumed[shard] = self._assumption(shard, step, number)
        if self._is_attempted:
            self._waiting.append(self._shards.units[unit.index])
            self._attempt()

    def end(self, scale: float, factor: float | None) -> bool:
        """At a step: whether all facts are as assumed, so that the results count. Parameters have
        counted the step.

        factor: that multiplies the gradients; None: they are not applied, and the results are
            dropped.
        """
        if factor is None and self._shards.program.attempted:
            self._shards.program.drop()
        has_held = factor is not None and not self._has_changed
        assumptions = dict(self._assumed)
        self._forget()
        if factor is not None:
            for shard, assumed in assumptions.items():
                step = self._step(shard, factor, shard.num_steps, shard.gradient.is_there)
                has_held = has_held and assumed == self._assumption(shard, step, shard.num_steps)
        self._history.note(self._num_backwards, has_held, self._was_attempted)
        self._scale = scale
        self._num_backwards = 0
        self._is_attempted = self._was_attempted = False
        return has_held

    def _forget(self) -> None:
        for each in (self._steps, self._assumed, self._waiting, self._made, self._texts):
            each.clear()

    @property
    def _is_possible(self) -> bool:
        """Whether the plan has room for it, which may come when parameters are unfrozen."""
        shards = self._shards
        return overlap_of(shards.policy, shards.plan, is_accelerator(shards.device)) == "backward"

    def _has_slot(self) -> bool:
        """Whether there is the disk space that the plan counts: it is taken before the first such
        step, so that a run without any takes none."""
        shards = self._shards
        if not shards.steps.has_slot and self._slot_of is not shards.plan:
            shards.steps.has_slot = take_slot(shards.plan, shards.store)
            self._slot_of = shards.plan
        return shards.steps.has_slot

    def _attempt(self) -> None:
        """Steps the units whose gradients are at home."""
        still = [live for live in self._waiting if not self._shards.homes.store.is_home(live.unit)]
        due = [live for live in self._waiting if live not in still]
        self._waiting = still
        try:
            for live in due:
                self._is_attempted &= self._tiles.attempt(live, self._steps.get)
        except (OSError, NoSlotError) as error:
            logger.warning("a step under backward stops early, and goes on after it: %s", error)
            self._is_attempted = False
        if not self._is_attempted:
            self._waiting.clear()

    def _step(
        self, shard: Shard, factor: float, num_steps: int, has_gradient: bool
    ) -> AnyStep | None:
        return self._step_of(shard, factor, num_steps, self._made) if has_gradient else None

    def _assumption(self, shard: Shard, step: AnyStep | None, num_steps: int) -> Assumption | None:
        if step is None:
            return None
        moments = self._tiles.names(shard)
        if (text := self._texts.get(id(step))) is None:
            text = self._texts[id(step)] = repr(step)
        return Assumption(text, num_steps, moments, shard.has_moments, shard.gradient.version)
