"""Forecast: the bytes of one rank's step over each edge and the seconds of each phase; the choice of a plan by them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from tiermem.forecast.loads import MOST_TILES, Use, uses_of
from tiermem.forecast.rates import Compute, Rates, Timeline, play
from tiermem.forecast.steps import BACKWARD, FORWARD, MATHS, STEP, Course, StepBuilder
from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.accelerator import is_accelerator
from tiermem.zero.budget import make_plan
from tiermem.zero.plan import Plan
from tiermem.zero.topology import Topology, plan_topology, ranks_per_node
from tiermem.zero.unit import Division, divide

if TYPE_CHECKING:
    from tiermem.zero.shards import Shards


# ---- the forecast of a step ------------------------------------------------------------------------------------------

PHASES = (FORWARD, BACKWARD, STEP)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One training step of one rank, after the first step.

    The forecast simulates two steps (steps.py, rates.py) and reports the second, because nothing is read ahead of the first.
    A rank shares its node's disks with the other ranks of the node, which do the same at the same time.
    """

    seconds: Mapping[str, float]
    """Seconds of each phase: "forward" and "backward" (all micro-batches together) and "step"."""
    moved_bytes: Mapping[str, Mapping[str, int]]
    """Bytes by edge ("NVME -> HOST", ...) and phase. A read ahead counts in the phase that begins it."""
    payload_bytes: Mapping[str, Mapping[str, int]]
    """Payload of collectives by ranks ("shard", "within", ...) and phase, as zero/failures.py counts it."""
    busy_s: Mapping[str, Mapping[str, float]]
    """Seconds of work by lane ("disk", "maths", ...) and phase; the busiest lane bounds the phase."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())

    def edge_bytes(self, edge: str) -> int:
        """Returns the bytes of a step over an edge."""
        return sum(self.moved_bytes.get(edge, {}).values())

    def bound_of(self, phase: str) -> str:
        """Returns the lane that works longest in a phase and so bounds it."""
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
    """Simulates a step of a planned model.

    Args:
        division, plan: the results of `divide` and `make_plan` for this policy and topology.
        uses: the modules of a forward (`uses_of`).
        rates: the rates of the node and of a rank; see `Rates`.
        num_micro: micro-batches of a step (gradient accumulation).
        most_tiles: above this number, neighbouring tiles are merged: the simulation runs faster and predicts slightly more
            seconds.

    Raises ValueError when a module needs more units at once than the plan has buffers for.
    """
    of_rank = rates.of_rank(ranks_on_node)
    course = Course(uses, plan, policy, topology, of_rank, is_gpu, num_micro, most_tiles)
    return _second_step(play(StepBuilder(course).build(2)))


def forecast_shards(shards: Shards, compute: Compute, rates: Rates, num_micro: int = 1) -> Forecast:
    """Simulates a step of a sharded model with its own division and plan; see `forecast_step`. Calls no collective."""
    division = shards.plan.division
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
        is_program = task.lane == MATHS  # the program runs these tasks in order and waits for each
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


# ---- the choice of a plan --------------------------------------------------------------------------------------------
#
#     field that is None in the policy    the plan's rule                    alternative
#     home of gradients                   HOST when they fit                 NVME: frees memory for states or units
#     unit buffers                        two units fetched ahead            one
#     tiles                               2^20 elements, 8 buffers           smaller or fewer: frees memory, too
#     rest of the budget                  optimizer states stay on HOST      units stay on HOST, in all of it or in half
#
# With a slow disk and fast arithmetic, units on HOST save more: a step reads a byte of a weight twice and writes it once, and
# moves a byte of fp32 states twice. Where forward and backward hide the reads of units, states on HOST save more.

_LEAST_GAIN = 1.02  # a candidate must be faster by this factor
_MOST_TILES = 160  # simulated one by one; above this number, neighbouring tiles are merged
_ROUNDS = 2
_TILES = ((1 << 20, 4), (1 << 18, 8))
_SHARES = (0.5, 1.0)  # fractions of the rest of the budget that units get

Fields = dict[str, Any]


class Tried(NamedTuple):
    """One candidate: values of open fields, the plan and the forecast."""

    fields: Fields
    plan: Plan
    forecast: Forecast


class Choice(NamedTuple):
    """The chosen policy and plan, and the rule's plan for comparison; num_tried: the number of plans that were played."""

    policy: OffloadPolicy
    chosen: Tried
    rule: Tried
    num_tried: int

    @property
    def is_rule(self) -> bool:
        """Whether the rule's plan is the fastest."""
        return not self.chosen.fields

    def __str__(self) -> str:
        if self.num_tried == 1:
            return "planned by rule: no budget of host memory was named, or nothing is left open"
        others = f"of {self.num_tried} plans"
        if self.is_rule:
            return f"planned by rule: predicted {self.rule.forecast.total_s:.3g} s a step, the fastest {others}"
        words = ", ".join(_words(name, value) for name, value in self.chosen.fields.items())
        return (
            f"planned by predicted time: {words}: {self.chosen.forecast.total_s:.3g} s a step, where the rule's plan takes "
            f"{self.rule.forecast.total_s:.3g} s; the fastest {others}"
        )


def choose(
    model: nn.Module,
    policy: OffloadPolicy,
    rates: Rates,
    compute: Compute,
    world: int = 1,
    ranks_on_node: int = 1,
    is_gpu: bool = False,
    num_micro: int = 1,
) -> Choice:
    """Chooses values for the open fields (None) of a policy by predicted time; `Choice.policy` is for `tiermem.shard`.

    It starts with the rule's plan, changes one field at a time, and keeps a change that is predicted to be faster; it repeats
    this once. Every candidate is planned, so the chosen plan fits. Equal rates give equal choices on all ranks. Without
    a budget of host memory (`host_bytes`) the rule's plan is chosen.

    Args:
        model: a model with the shapes and dtypes of the training; may be on the meta device.
        rates, compute: equal on all ranks; declared, or made equal by `agreed`.

    Not collective; allocates no states. Raises ValueError when not even the rule's plan fits.
    """
    topology = plan_topology(world, policy, ranks_on_node)
    division = divide(model, policy, topology.num_shards)
    uses = uses_of(model, division, compute)

    def attempt(fields: Fields) -> Tried:
        changed = dataclasses.replace(policy, **fields)
        plan = make_plan(division, changed, topology, is_gpu, ranks_on_node)
        forecast = forecast_step(
            division, plan, changed, topology, uses, rates, is_gpu, ranks_on_node, num_micro, _MOST_TILES
        )
        return Tried(fields, plan, forecast)

    best = rule = attempt({})
    tried: dict[str, Tried | None] = {repr([]): rule}  # by the fields, as text; None: it does not fit
    for _ in range(_ROUNDS if policy.host_bytes is not None else 0):
        before = best
        for change in _changes(policy, division, topology.num_shards, before):
            fields = best.fields | change
            key = repr(sorted(fields.items()))
            if key not in tried:
                tried[key] = None
                with contextlib.suppress(ValueError):
                    tried[key] = attempt(fields)
            found = tried[key]
            if found is not None and found.forecast.total_s * _LEAST_GAIN < best.forecast.total_s:
                best = found
        if best is before:
            break
    num_tried = sum(each is not None for each in tried.values())
    return Choice(dataclasses.replace(policy, **best.fields), best, rule, num_tried)


def agreed(rates: Rates, compute: Compute, group: dist.ProcessGroup | None = None) -> tuple[Rates, Compute]:
    """Returns rank 0's rates on every rank of the group (default: the world). Collective with a process group; blocks."""
    if not (dist.is_available() and dist.is_initialized()):
        return rates, compute
    values: list[Any] = [rates, compute]
    group = group or dist.group.WORLD
    assert group is not None
    dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group)
    return values[0], values[1]


def _changes(policy: OffloadPolicy, division: Division, num_shards: int, best: Tried) -> Iterator[Fields]:
    """Values to try for the open fields of a policy, after the best candidate so far."""
    if policy.grads is None and policy.paths and not policy.step_in_backward and best.plan.grads is Tier.HOST:
        yield {"grads": Tier.NVME}
    # units, instead of states, get the rest of the budget
    streamed = [unit.dtype.itemsize for unit in best.plan.division.units if not unit.is_resident]
    itemsize = max((unit.dtype.itemsize for unit in division.units), default=1)
    left = best.plan.resident_bytes + int(best.fields.get("host_param_numel", 0)) * itemsize // num_shards
    is_open = policy.host_param_numel is None and policy.resident_bytes is None
    if policy.params is Tier.NVME and is_open and streamed and left:
        for share in _SHARES:
            yield {"host_param_numel": int(share * left) // max(streamed) * num_shards}
    if policy.unit_buffers is None and policy.gather_way != "single":
        yield {"unit_buffers": division.most_at_once + 1}
    for numel, count in _TILES:
        changes = {"tile_numel": numel, "tile_buffers": count}
        yield {name: value for name, value in changes.items() if getattr(policy, name) is None}


def _words(name: str, value: Any) -> str:
    words = {
        "grads": f"gradients rest on {value.name if isinstance(value, Tier) else value}",
        "unit_buffers": f"{value} unit buffers",
        "tile_numel": f"tiles of {value} elements",
        "tile_buffers": f"{value} tile buffers",
        "host_param_numel": f"units of up to {value} elements stay in memory",
    }
    return words[name]
