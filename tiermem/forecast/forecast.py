"""Forecast: what one step of one rank moves over each edge and how long each phase takes, once training is under way.

Two steps are played (steps.py, timeline.py) and the second is told: the first has nothing read ahead of it. A rank shares its
node's disks with the other ranks there, all doing the same at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tiermem.forecast.rates import Compute, Rates
from tiermem.forecast.steps import BACKWARD, FORWARD, MATHS, STEP, Course, build_steps
from tiermem.forecast.tile_loads import MOST_TILES
from tiermem.forecast.timeline import Timeline, play
from tiermem.forecast.uses import Use, uses_of
from tiermem.policy import OffloadPolicy
from tiermem.swap.accelerator import is_accelerator
from tiermem.zero.plan import Plan
from tiermem.zero.ranks.topology import Topology, ranks_per_node
from tiermem.zero.unit import Division, divide

if TYPE_CHECKING:
    from tiermem.zero.shards import Shards

PHASES = (FORWARD, BACKWARD, STEP)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One training step of one rank."""

    seconds: Mapping[str, float]
    """Of each phase: "forward" and "backward" (all micro-batches together) and "step"."""
    moved_bytes: Mapping[str, Mapping[str, int]]
    """By edge ("NVME -> HOST", ...) and phase. What is read ahead counts in the phase that begins the read."""
    payload_bytes: Mapping[str, Mapping[str, int]]
    """What is handed to collectives, by who takes part ("shard", "within", ...) and phase; as zero/ranks/traffic.py counts."""
    busy_s: Mapping[str, Mapping[str, float]]
    """By lane ("disk", "maths", ...) and phase: how long it works; the busiest bounds the phase."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())

    def edge_bytes(self, edge: str) -> int:
        """Bytes of a step over an edge."""
        return sum(self.moved_bytes.get(edge, {}).values())

    def bound_of(self, phase: str) -> str:
        """The lane that works longest in a phase, and so bounds it."""
        return max(self.busy_s, key=lambda lane: self.busy_s[lane].get(phase, 0.0), default="")


def forecast_step(
    division: Division,
    plan: Plan,
    policy: OffloadPolicy,
    topology: Topology,
    uses: Sequence[Use],
    rates: Rates,
    is_gpu: bool = False,
    ranks_on_node: int = 1,
    num_micro: int = 1,
    most_tiles: int = MOST_TILES,
) -> Forecast:
    """Plays a step of a planned model.

    Args:
        division, plan: what `divide` and `make_plan` returned for this policy and topology.
        uses: the modules of a forward (`uses_of`).
        rates: of the node and of a rank; see `Rates`.
        num_micro: micro-batches of a step (gradient accumulation).
        most_tiles: of more, neighbours are played as one: quicker, and a little too slow.

    Raises ValueError for a forward in which a module needs more units at once than the plan has buffers for.
    """
    of_rank = rates.of_rank(ranks_on_node)
    course = Course(division.units, uses, plan, policy, topology, of_rank, is_gpu, num_micro, most_tiles)
    return _second_step(play(build_steps(course, 2)))


def forecast_shards(shards: Shards, compute: Compute, rates: Rates, num_micro: int = 1) -> Forecast:
    """Plays a step of a model that is sharded, as it was divided and planned; see `forecast_step`. Calls no collective."""
    division = divide(shards.model, shards.policy, shards.topology.num_shards)
    for unit, live in zip(division.units, shards.units, strict=True):
        unit.is_resident = live.unit.is_resident
    return forecast_step(
        division,
        shards.plan,
        shards.policy,
        shards.topology,
        uses_of(shards.model, division, compute),
        rates,
        is_accelerator(shards.device),
        ranks_per_node(),
        num_micro,
    )


def _second_step(timeline: Timeline) -> Forecast:
    moved: dict[str, dict[str, int]] = {}
    payloads: dict[str, dict[str, int]] = {}
    busy: dict[str, dict[str, float]] = {}
    seconds = dict.fromkeys(PHASES, 0.0)
    before_s = 0.0
    for task, end_s in zip(timeline.tasks, timeline.end_s, strict=True):
        phase, _, number = task.phase.partition(" ")
        is_program = task.lane == MATHS  # which is what the program waits for, in the order of the tasks
        if number == "1":
            lane, edge = busy.setdefault(task.lane, {}), moved.setdefault(task.edge, {})
            among = payloads.setdefault(task.among, {})
            among[phase] = among.get(phase, 0) + task.payload_bytes
            lane[phase] = lane.get(phase, 0.0) + task.seconds
            edge[phase] = edge.get(phase, 0) + task.num_bytes
            if is_program:
                seconds[phase] += max(0.0, end_s - before_s)
        if is_program:
            before_s = max(before_s, end_s)
    moved.pop("", None)
    payloads.pop("", None)
    return Forecast(seconds, moved, payloads, busy)
