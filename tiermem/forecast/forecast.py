"""Forecast: what one step of one rank moves over each edge and how long each phase takes, once training is under way.

Two steps are played (steps.py, timeline.py) and the second is told: the first has nothing read ahead of it. A rank shares its
node's disks with the other ranks there, all doing the same at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tiermem.forecast.rates import Rates
from tiermem.forecast.steps import BACKWARD, FORWARD, MATHS, STEP, Course, build_steps
from tiermem.forecast.timeline import Timeline, play
from tiermem.forecast.uses import Use
from tiermem.policy import OffloadPolicy
from tiermem.zero.plan import Plan
from tiermem.zero.ranks.topology import Topology
from tiermem.zero.unit import Division

PHASES = (FORWARD, BACKWARD, STEP)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One training step of one rank."""

    seconds: Mapping[str, float]
    """Of each phase: "forward" and "backward" (all micro-batches together) and "step"."""
    moved_bytes: Mapping[str, Mapping[str, int]]
    """By edge ("NVME -> HOST", ...) and phase. What is read ahead counts in the phase that begins the read."""
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
) -> Forecast:
    """Plays a step of a planned model.

    Args:
        division, plan: what `divide` and `make_plan` returned for this policy and topology.
        uses: the modules of a forward (`uses_of`).
        rates: of the node and of a rank; see `Rates`.
        num_micro: micro-batches of a step (gradient accumulation).

    Raises ValueError for a forward in which a module needs more units at once than the plan has buffers for.
    """
    of_rank = rates.of_rank(ranks_on_node)
    course = Course(division.units, uses, plan, policy, topology, of_rank, is_gpu, num_micro)
    return _second_step(play(build_steps(course, 2)))


def _second_step(timeline: Timeline) -> Forecast:
    moved: dict[str, dict[str, int]] = {}
    busy: dict[str, dict[str, float]] = {}
    seconds = dict.fromkeys(PHASES, 0.0)
    before_s = 0.0
    for task, end_s in zip(timeline.tasks, timeline.end_s, strict=True):
        phase, _, number = task.phase.partition(" ")
        is_program = task.lane == MATHS  # which is what the program waits for, in the order of the tasks
        if number == "1":
            lane, edge = busy.setdefault(task.lane, {}), moved.setdefault(task.edge, {})
            lane[phase] = lane.get(phase, 0.0) + task.seconds
            edge[phase] = edge.get(phase, 0) + task.num_bytes
            if is_program:
                seconds[phase] += max(0.0, end_s - before_s)
        if is_program:
            before_s = max(before_s, end_s)
    moved.pop("", None)
    return Forecast(seconds, moved, busy)
