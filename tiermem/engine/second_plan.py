"""SecondPlan: the states on an accelerator, the tiles that it steps, and on several ranks the
weights there, follow the memory that steps have taken.

    the first step           by a plan with next to no states on the accelerator: its peak is measured
    the end of the step      of the parts that the measured memory has room for, the fastest by the forecast: Shards.rehome
    a larger input           before its forward: as many states leave as its activations are expected to need, on one rank

So nobody has to predict the activations of a batch. Ranks go over together, by the least room.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tiermem.engine.room import USUAL_TOKENS
from tiermem.forecast.cards import assumed_speed
from tiermem.forecast.loads import uses_of
from tiermem.forecast.phases import forecast_step
from tiermem.forecast.rates import Compute
from tiermem.plans.budget import plan_after
from tiermem.plans.plan import Buffers, Plan
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import ranks_per_node
from tiermem.run.fill import Fill, Inputs, most_bytes
from tiermem.run.shards import Shards
from tiermem.swap.memory.accelerator import is_accelerator, usage

logger = logging.getLogger("tiermem")

_PARTS = 32
_COARSE = 4  # of them
_LEAST_MORE_BYTES = 1 << 20
_STREAMED = (0.0, 0.25, 0.5, 0.75, 1.0)


def follow_memory(shards: Shards) -> None:
    """Attaches a SecondPlan where the policy of a model wants one (`rehomes_states`)."""
    if shards.policy.rehomes_states and is_accelerator(shards.device):
        shards.attach(SecondPlan(shards))


class _DeviceParts(NamedTuple):
    """What a plan has on the accelerator, and what it steps there."""

    states: float  # the part of them
    streamed: float  # the part of the other tiles that it steps
    params: Tier
    """Where weights rest. On one rank `Fill` keeps them there without a home."""

    @staticmethod
    def of(policy: OffloadPolicy) -> _DeviceParts:
        """Those of a policy."""
        return _DeviceParts(1 - policy.optim_ratio, policy.streamed_ratio or 0.0, policy.params)


class _Candidate(NamedTuple):
    """Parts on the accelerator, and what they make of a step."""

    seconds: float
    policy: OffloadPolicy
    plan: Plan
    num_units: int  # that may be present at once


class SecondPlan:
    """It is an attachment of a sharded model on an accelerator."""

    keeps_files = False

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._homes = [shards.policy.params]
        if shards.topology.num_shards > 1 and shards.plan.unit_homes:
            self._homes.append(Tier.DEVICE)
        self._inputs = Inputs(shards.model, self._expect)
        self._activation_bytes = 0  # of the largest inputs so far; 0: not measured yet
        self._least_bytes = 0  # of a plan here, where no plan is smaller; 0: not found
        # the next step has inputs that were not measured before; the same on all ranks
        self._is_due = True
        self._speed = assumed_speed(shards.device)  # rank 0's, once ranks have gone over

    def after_step(self, _: object) -> None:
        """After the first step, and one with larger inputs: goes over to the fastest plan that its
        memory has room for. Collective then; blocks."""
        shards = self._shards
        num_micro, num_tokens = self._inputs.take()
        if not self._is_due:
            return
        now = usage(shards.device)
        # at most: an earlier plan may have had this peak
        of_plan = min(now.allocated_bytes, shards.plan.device_bytes)
        activation_bytes = max(1, now.peak_allocated_bytes - of_plan)
        room = most_bytes(shards.device) - activation_bytes
        said = exchange(shards.topology, (room, num_micro, num_tokens, self._speed))
        rooms, micros, tokens, speeds = zip(*said, strict=True)
        if not any(micros):
            return
        self._is_due = False
        self._activation_bytes = activation_bytes
        self._speed = speeds[0]
        self._go_over(min(rooms), max(micros), max(tokens))

    def close(self) -> None:
        """Sees no more inputs."""
        self._inputs.close()

    def _expect(self, growth: float) -> None:
        """Before a forward whose input is so many times as large as any before."""
        shards = self._shards
        may_move = not (shards.may_lend or shards.is_held)
        if not self._activation_bytes or shards.topology.world > 1 or not may_move:
            return
        self._is_due = True
        most = most_bytes(shards.device)
        self._activation_bytes = int(min(self._activation_bytes * growth, most))
        room = most - self._activation_bytes
        if shards.plan.device_bytes > max(room, self._least_bytes):
            shards.hooks.abandon_backward()  # as the forward does
            self._go_over(room, 1, USUAL_TOKENS)
            self._least_bytes = shards.plan.device_bytes if shards.plan.device_bytes > room else 0

    def _go_over(self, room_bytes: int, num_micro: int, num_tokens: int) -> None:
        """Goes over to the fastest plan within a room on the accelerator."""
        shards = self._shards
        best = self._best(room_bytes, num_micro, num_tokens)
        if best is None or _DeviceParts.of(best.policy) == _DeviceParts.of(shards.policy):
            return
        logger.info(
            "a step's memory leaves %d MiB of %s to the plan: %.0f %% of the states rest there, "
            "weights on %s",
            room_bytes >> 20,
            shards.device,
            100 * (1 - best.policy.optim_ratio),
            best.policy.params.name,
        )
        try:
            shards.rehome(best.policy)
        except (ValueError, OSError) as error:
            more = (best.plan.device_bytes - shards.plan.device_bytes) // 2
            if isinstance(error, ValueError) and more > _LEAST_MORE_BYTES:  # memory is in pieces
                self._go_over(shards.plan.device_bytes + more, num_micro, num_tokens)
            else:
                logger.warning("states stay where they rest: %s", error)
            return
        if (fill := shards.find_attached(Fill)) is not None:
            fill.allow(best.num_units)

    def _best(self, room_bytes: int, num_micro: int, num_tokens: int) -> _Candidate | None:
        """The fastest plan within a room: coarse parts of the states there with each part of the
        other tiles that it steps, then fine ones with the best of these."""
        room = room_bytes, num_micro, num_tokens
        own = _DeviceParts.of(self._shards.policy)
        coarse = [
            _DeviceParts(part / _PARTS, streamed, params)
            for part in range(0, _PARTS, _COARSE)
            for streamed in _STREAMED
            for params in self._homes
        ]
        best = self._fastest([own, *coarse], room)
        if best is None:
            return None
        parts = _DeviceParts.of(best.policy)
        fine = [parts._replace(states=part / _PARTS) for part in range(_PARTS)]
        return self._fastest([parts, *fine], room)

    def _fastest(
        self, parts: Iterable[_DeviceParts], room: tuple[int, int, int]
    ) -> _Candidate | None:
        found = self._candidates(dict.fromkeys(parts), *room)
        return min(found, key=lambda each: (each.seconds, each.plan.device_bytes), default=None)

    def _candidates(
        self,
        parts: Iterable[_DeviceParts],
        room_bytes: int,
        num_micro: int,
        num_tokens: int,
    ) -> Iterator[_Candidate]:
        """The plans with these parts; those that the room does not hold take infinitely long."""
        shards = self._shards
        flops, rates = self._speed
        compute = Compute.of_peak(flops, num_tokens or USUAL_TOKENS)
        now = shards.plan
        uses = uses_of(shards.model, now.division, compute)
        fills = shards.find_attached(Fill) is not None
        most_units = sum(unit.takes_buffer for unit in now.division.units)
        keeps_grads = not shards.homes.is_empty
        for states, streamed, params in parts:
            policy = dataclasses.replace(
                shards.policy,
                optim_ratio=1 - states,
                streamed_ratio=streamed,
                params=params,
                device_bytes=None,  # the first plan's budget was a guess
            )
            try:
                plan = plan_after(
                    now,
                    policy,
                    shards.topology,
                    True,
                    ranks_per_node(),
                    keeps_grads,
                    moves_weights=params is not shards.policy.params,
                )
            except ValueError:
                continue
            left = room_bytes - plan.device_bytes
            more = left // plan.units.slot_bytes if fills and plan.units.slot_bytes else 0
            num_units = max(plan.units.num, min(plan.units.num + more, most_units))
            filled = dataclasses.replace(plan, units=Buffers(plan.units.slot_bytes, num_units))
            forecast = forecast_step(
                filled, policy, shards.topology, uses, rates, True, ranks_per_node(), num_micro
            )
            seconds = forecast.total_s if left >= 0 else float("inf")
            yield _Candidate(seconds, policy, plan, num_units)
