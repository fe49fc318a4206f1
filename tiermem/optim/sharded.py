"""ShardedModel: one optimizer step of a sharded model.

    gradients of all ranks -> their norm -> finite? -> every tile, with one factor -> gather
    resident weights again
                                            no: the states stay unchanged, and the policy decides

With `step_in_backward` a unit is stepped inside backward, as soon as its gradients are reduced;
`step` then only ends the step. With overlap "backward" tiles are stepped before the norm is known;
`step` makes the results count, or steps them again (tentative.py). The optimizer gives the rule of
each parameter (base.py). tiles.py does the work in a tile.

Ranks make one exchange in a step, for the norm; meanwhile each plans a step that does not clip, if
all rests in memory. Between CPUs the next forward's gathers begin with that forward.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable

import torch
from torch import nn

from tiermem.optim.at_rest import FindRule
from tiermem.optim.tentative import TentativeStep
from tiermem.optim.tile_work import RuleOf
from tiermem.optim.tiles import StateTiles
from tiermem.optimizers.base import AnyStep, Group, Rule
from tiermem.run.shards import Shards
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.units.unit import Shard
from tiermem.weights.unit_state import LiveUnit

logger = logging.getLogger("tiermem")


class NonFiniteGradients(RuntimeError):
    """The gradients hold NaN or infinity, and the policy makes this an error. `step` changed no
    state."""


class ShardedModel:
    """A sharded model and its optimizer states, which rest in the model's store and live as long as
    the store.

    find_scale: the loss scale, of gradients that are stepped in backward.
    """

    def __init__(
        self, shards: Shards, find_rule: FindRule, find_scale: Callable[[], float]
    ) -> None:
        self._shards = shards
        self._find_scale = find_scale
        self._find_rule = find_rule
        self.tiles = StateTiles(shards, find_rule)
        shards.homes.store.on_reuse = shards.program.forget
        self._ruled: dict[Shard, tuple[Group, Rule] | None] = {}  # found in the step under way
        self._tentative: TentativeStep | None = None
        if (
            shards.policy.wanted_overlap(shards.plan.states, is_accelerator(shards.device))
            == "backward"
        ):
            self._tentative = TentativeStep(
                shards,
                self.tiles,
                lambda shard, *rest: _step_of(shard, find_rule(shard.param), *rest),
            )
            shards.homes.on_arrival = self._tentative.receive
        begin = self.tiles.begin if self._tentative is None else self._tentative.begin_backward
        shards.attach_states(
            self.tiles, shards.take_writes if shards.policy.step_in_backward else begin
        )
        if shards.policy.step_in_backward:
            shards.homes.store.consume = lambda unit, grads: self._step_unit(
                shards.units[unit.index], grads
            )

    def close(self) -> None:
        """Gives up the states; the weights stay. Another optimizer may follow. Collective;
        blocks."""
        if not self._shards.is_closed:
            self._shards.drop_head_start()
            self.tiles.close()
            self._shards.detach_states()

    def step(self, scale: float, max_norm: float) -> float | None:
        """Steps every parameter that has a gradient, unless `is_refused(norm)`. Collective; blocks;
        raises OSError.

        Returns the norm of the gradients of all parameters that the optimizer has, together, before
        clipping; None with `step_in_backward`, which used the gradients.

        Args:
            scale: the loss scale; gradients are divided by it.
            max_norm: maximum of the gradients' global norm; 0: no clipping.

        Raises ValueError for scaling and clipping with `step_in_backward`, RuntimeError for
        gradients dropped after their use.
        """
        shards = self._shards
        self._ruled.clear()
        shards.check_may_change(is_step=True)
        trainable = [live for live in shards.units if live.unit.is_trainable]
        shards.end_gathers(trainable)
        shards.steps.check_loaded()
        with shards.store.recorder.span("step", "step"):
            shards.hooks.check_backward_ended()
            if shards.policy.step_in_backward:
                if scale != self._find_scale() or max_norm:
                    raise ValueError(
                        "step_in_backward has used the gradients: they are neither scaled nor "
                        "clipped in step"
                    )
                shards.homes.check_used_once()
                shards.receive_gradients()
                shards.homes.check_all_used()
                shards.homes.begin_step()
                self._regather(trainable)
                return None
            with torch._C.DisableTorchFunctionSubclass():
                shards.homes.forget_replaced()
            with shards.homes.changing():  # from the norm on other ranks make the step
                norm = shards.receive_gradients(shards.prefetcher.empty, self._is_held)
                assert norm is not None
                norm /= scale
                shards.homes.check_all_used()
                shards.prefetcher.empty()
                if self.is_refused(norm):
                    if self._tentative is not None:
                        self._tentative.end(scale, None)
                    return norm
                factor = clip_factor(norm, max_norm) / scale / shards.homes.divisor
                with shards.steps.changing_all():
                    for live in trainable:
                        self._count_steps(live)
                    commits = self._tentative is not None and self._tentative.end(scale, factor)
                    self.tiles.step(self._next_steps(factor), commits=commits)
                    self._regather(trainable)
            shards.prefetcher.end_pass(may_gather=is_accelerator(shards.device))
        return norm

    def is_refused(self, norm: float) -> bool:
        """Whether this norm is not finite and the policy does not apply such gradients."""
        return not math.isfinite(norm) and self._shards.policy.on_nonfinite != "apply"

    def _step_unit(self, live: LiveUnit, grads: torch.Tensor) -> torch.Event | None:
        """Inside backward: steps a unit with gradients that are not stored. Returns the end of an
        accelerator's reads."""
        shards = self._shards
        held = [shard for shard in live.unit.shards if self._find_rule(shard.param) is not None]
        if any(self.is_refused(each) for each in shards.homes.sums_of_squares(held)):
            raise NonFiniteGradients(
                f"the gradients of unit {live.unit.name!r} hold NaN or infinity"
            )
        shards.end_gathers([live])
        shards.steps.check_loaded()
        shards.prefetcher.outdate(live)
        with shards.steps.changing_all():
            self._ruled.clear()
            self._count_steps(live)
            factor = 1.0 / self._find_scale() / shards.homes.divisor
            self.tiles.step(self._next_steps(factor), live, grads)
            shards.steps.is_partial = True  # until the backward ends
        for shard in live.unit.shards:
            shard.gradient.forget()
        return shards.steps.copied

    def _rule_of(self, shard: Shard) -> tuple[Group, Rule] | None:
        """The group and the rule of a parameter, which stay the same in a step."""
        if shard not in self._ruled:
            self._ruled[shard] = self._find_rule(shard.param)
        return self._ruled[shard]

    def _is_held(self, shard: Shard) -> bool:
        """Whether the optimizer has a parameter."""
        return self._rule_of(shard) is not None

    def _count_steps(self, live: LiveUnit) -> None:
        """Counts this step for every parameter that has a gradient and a rule."""
        stepped = [
            shard for shard in live.unit.shards if shard.gradient.is_there and self._is_held(shard)
        ]
        for shard in stepped:
            shard.count_step()
        live.note_change([shard.param for shard in stepped])

    def _next_steps(self, factor: float) -> RuleOf:
        """The next step of each parameter that has a gradient."""
        made: dict[Hashable, AnyStep] = {}

        def next_step(shard: Shard) -> AnyStep | None:
            found = self._rule_of(shard) if shard.gradient.is_there else None
            return _step_of(shard, found, factor, shard.num_steps, made)

        return next_step

    def _regather(self, trainable: list[LiveUnit]) -> None:
        for live in trainable:
            if (
                live.unit.is_resident
                and live.shard is not None
                and live.shard is not live.memory.full
            ):
                self._shards.values.regather(live.unit, live.shard, live.memory)
            live.note_step()


def _step_of(
    shard: Shard,
    found: tuple[Group, Rule] | None,
    factor: float,
    num_steps: int,
    made: dict[Hashable, AnyStep],
) -> AnyStep | None:
    """The step of a parameter that has a gradient, of that number; None: no rule was found. made:
    earlier ones, shared in a group."""
    if found is None:
        return None
    group, rule = found
    factor *= shard.gradient.factor
    like = id(group), rule, num_steps, factor, rule.is_matrix and shard.shape
    if (step := made.get(like)) is None:
        step = made[like] = rule.scalars(group, num_steps, factor, shard.shape)
    return step


def check_room(shards: Shards, rule: Rule, optimizer: str) -> None:
    """Raises ValueError when the plan lacks room for a rule's moments, or when ranks hold parts of
    a matrix to be stepped.

    optimizer: its name, for the error.
    """
    if rule.is_matrix and shards.topology.num_shards > 1:
        raise ValueError(
            f"{optimizer} steps whole matrices, and this model's are cut into "
            f"{shards.topology.num_shards} shards, one per rank: no rank has a whole one. Use "
            "stage 0 or one rank, or groups with use_muon=False"
        )
    planned = shards.policy.num_moments
    needed = len(rule.moments)
    if needed > planned:
        numel = sum(live.unit.shard_numel for live in shards.units if live.unit.is_trainable)
        raise ValueError(
            f"{optimizer} keeps {needed} moments for a parameter ({', '.join(rule.moments)}) and "
            f"the plan made room for num_moments={planned} of each of {numel} elements: {needed} x "
            f"{numel} = {needed * numel} numbers where {planned * numel} have a place. Shard with "
            f"OffloadPolicy(num_moments={needed})"
        )


def enable_training_of(shards: Shards, saved: Collection[nn.Parameter], where: str) -> None:
    """Takes room for parameters that are unfrozen, and for frozen ones whose saved states are about
    to be loaded.

    Without room for the latter their states are left, with a warning. where: what holds the states.
    Collective; blocks.
    """
    shards.enable_training()
    frozen = [
        param
        for param in saved
        if not (unit := shards.find(param)[0].unit).is_trainable and unit.blocks is None
    ]
    try:
        shards.enable_training(frozen)
    except (ValueError, OSError) as error:
        text = "%s: the saved states of %d parameters that are frozen here are not loaded: %s"
        logger.warning(text, where, len(frozen), error)


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips gradients of a norm to max_norm; 1 for max_norm=0 and for norms that
    are not finite."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm and math.isfinite(norm) else 1.0
