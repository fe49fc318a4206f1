"""Forecast: the bytes of one rank's step over each edge and the seconds of each phase; the choice
of a plan by them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from tiermem.forecast.course import Course
from tiermem.forecast.loads import MOST_TILES, Use, uses_of
from tiermem.forecast.rates import Compute, Rates, Task, Timeline, play
from tiermem.forecast.steps import (
    BACKWARD,
    FORWARD,
    KERNELS,
    MATHS,
    MEMORY,
    STEP,
    TILE,
    StepBuilder,
)
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.topology import Topology, plan_topology, ranks_per_node
from tiermem.swap.disk.queue import busiest
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.units.unit import Division, divide

if TYPE_CHECKING:
    from tiermem.run.shards import Shards


# ---- the forecast of a step ----------------------------------------------------------------------

PHASES = (FORWARD, BACKWARD, STEP)
_RESOURCES = {
    "disk": "disk",
    "disk read": "disk",
    "disk write": "disk",
    "network": "link",
    "near network": "link",
    "link down": "link",
    "link up": "link",
    KERNELS: "kernels",
    MEMORY: "kernels",
}
"""The resource of each lane but that of maths."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One training step of one rank, after the first step.

    The forecast simulates two steps (steps.py, rates.py) and reports the second, because nothing is
    read ahead of the first. A rank shares its node's disks with the other ranks of the node, which
    do the same at the same time.
    """

    seconds: Mapping[str, float]
    """Seconds of each phase: "forward" and "backward" (all micro-batches together) and "step", as
    the program sees them: what goes on under the next forward makes that longer."""
    moved_bytes: Mapping[str, Mapping[str, int]]
    """Bytes by edge ("NVME -> HOST", ...) and phase. A read ahead counts in the phase that begins
    it."""
    payload_bytes: Mapping[str, Mapping[str, int]]
    """Payload of collectives by ranks ("shard", "within", ...) and phase, as ranks/failures.py
    counts it."""
    busy_s: Mapping[str, Mapping[str, float]]
    """Seconds of work by lane ("disk", "maths", ...) and phase, where steps go on in the phase in
    which it takes place; the busiest lane bounds the phase."""
    limits_s: Mapping[str, float]
    """Seconds for which each resource works in a step: "compute", "disk", "link" and "kernels", as
    in swap/disk/queue.py. Lanes of one resource work at the same time: the busiest counts."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())

    def edge_bytes(self, edge: str) -> int:
        """Returns the bytes of a step over an edge."""
        return sum(self.moved_bytes.get(edge, {}).values())

    @property
    def limited_by(self) -> str:
        """The resource that works longest in a step."""
        return busiest(self.limits_s)

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
    input_bytes: int = 0,
) -> Forecast:
    """Simulates a step of a planned model.

    Args:
        division, plan: the results of `divide` and `make_plan` for this policy and topology.
        uses: the modules of a forward (`uses_of`).
        rates: the rates of the node and of a rank; see `Rates`.
        num_micro: micro-batches of a step (gradient accumulation).
        most_tiles: above this number, neighbouring tiles are merged: the simulation runs faster and
            predicts slightly more seconds.
        input_bytes: of the input of one checkpointed block of a micro-batch, which moves as the
            policy says; 0: nothing is recomputed, and activations stay where the maths runs.

    Raises ValueError when a module needs more units at once than the plan has buffers for.
    """
    of_rank = rates.of_rank(ranks_on_node)
    course = Course(
        uses, plan, policy, topology, of_rank, is_gpu, num_micro, most_tiles, input_bytes
    )
    return _second_step(play(StepBuilder(course).build(2)))


def forecast_shards(
    shards: Shards,
    compute: Compute,
    rates: Rates,
    num_micro: int = 1,
    input_bytes: int = 0,
    is_early: bool = True,
) -> Forecast:
    """Simulates a step of a sharded model with its own division and plan; see `forecast_step`.
    Calls no collective.

    is_early: it begins under backward where the plan has room; False: it is one that History leaves
        alone.
    """
    plan = shards.plan if is_early else shards.plan.without_attempts("")
    division = plan.division
    return forecast_step(
        division,
        plan,
        shards.policy,
        shards.topology,
        uses_of(shards.model, division, compute),
        rates,
        is_accelerator(shards.device),
        ranks_per_node(),
        num_micro,
        input_bytes=input_bytes,
    )


def _second_step(timeline: Timeline) -> Forecast:
    moved: dict[str, dict[str, int]] = {}
    payloads: dict[str, dict[str, int]] = {}
    busy: dict[str, dict[str, float]] = {}
    seconds = dict.fromkeys(PHASES, 0.0)
    goes_on = any(task.is_beside for task in timeline.tasks)
    begins_s: dict[str, float] = {}
    before_s = 0.0
    for task, end_s in zip(timeline.tasks, timeline.end_s, strict=True):
        phase, _, number = task.phase.partition(" ")
        # it runs these tasks in order and waits for each
        is_program = task.lane == MATHS and not task.is_beside
        if number == "1":
            lane = busy.setdefault(task.lane, {})
            edge = moved.setdefault(task.edge, {})
            among = payloads.setdefault(task.among, {})
            among[phase] = among.get(phase, 0) + task.payload_bytes
            lane[phase] = lane.get(phase, 0.0) + (0.0 if goes_on else task.seconds)
            edge[phase] = edge.get(phase, 0) + task.num_bytes
            if is_program:
                begins_s.setdefault(phase, before_s)
                seconds[phase] += max(0.0, end_s - before_s)
        if is_program:
            before_s = max(before_s, end_s)
    # lanes work in the phases under which steps go on
    for phase, begin_s in begins_s.items() if goes_on else ():
        for task, task_s, end_s in zip(
            timeline.tasks, timeline.begin_s, timeline.end_s, strict=True
        ):
            inside_s = min(end_s, begin_s + seconds[phase]) - max(task_s, begin_s)
            if inside_s > 0:
                busy[task.lane][phase] = busy[task.lane].get(phase, 0.0) + inside_s
    moved.pop("", None)
    payloads.pop("", None)
    return Forecast(seconds, moved, payloads, busy, _limits_of(timeline.tasks))


def _limits_of(tasks: Sequence[Task]) -> dict[str, float]:
    """Seconds of each resource in the second step."""
    limits_s = dict.fromkeys(("compute", *dict.fromkeys(_RESOURCES.values())), 0.0)
    lanes_s = dict[str, float]()
    for task in tasks:
        if task.phase.endswith(" 1"):
            # on a CPU they share the lane of maths
            lane = KERNELS if task.name == TILE else task.lane
            lanes_s[lane] = lanes_s.get(lane, 0.0) + task.seconds
    for lane, lane_s in lanes_s.items():
        resource = _RESOURCES.get(lane, "compute")
        limits_s[resource] = max(limits_s[resource], lane_s)
    return limits_s


# ---- the choice of a plan ------------------------------------------------------------------------
#
#     field that is None in the policy    the plan's rule                    alternative
#     home of gradients                   HOST when they fit                 NVME: frees memory for states or units
#     unit buffers                        two units fetched ahead            one
#     tiles                               2^20 elements, 8 buffers           smaller or fewer: frees memory, too
#     rest of the budget                  optimizer states stay on HOST      units stay on HOST, in all of it or in half
#     inputs of checkpointed blocks       where the maths runs, if they fit  HOST or NVMe: more units stay on the device, or
#                                                                            more states on HOST
#     budget of the device                what activations leave             none: no unit stays, HOST keeps more states, and a
#                                                                            step goes on under the
#                                                                            next forward
#     tiles that an accelerator steps     those of states that rest there    half or all of the others, too: the CPU's kernels
#                                                                            have less to do, and
#                                                                            the step ends before
#                                                                            forward
#
# With a slow disk and fast arithmetic, units on HOST save more: a step reads a byte of a weight
# twice and writes it once, and moves a byte of fp32 states twice. Where forward and backward hide
# the reads of units, states on HOST save more.

_LEAST_GAIN = 1.02  # a candidate must be faster by this factor
LEAST_FAR_GAIN = 1.1
"""So must one that sends tiles over a link, or leaves a device's memory unused: a forecast may be
that far from the truth."""
_MOST_TILES = 160  # simulated one by one; above this number, neighbouring tiles are merged
_ROUNDS = 2
_TILES = ((1 << 20, 4), (1 << 18, 8))
_SHARES = (0.5, 1.0)  # fractions of the rest of the budget that units get
_STREAMED = (0.5, 1.0)  # parts of the tiles on HOST or NVMe that an accelerator steps

Fields = dict[str, Any]


class Tried(NamedTuple):
    """One candidate: values of open fields, the plan and the forecast."""

    fields: Fields
    plan: Plan
    forecast: Forecast


class Placement(NamedTuple):
    """A home for the inputs of checkpointed blocks, and the memory that a plan may take beside the
    activations.

    Sizes are of a rank, but `host_bytes` of a node; None: no limit is known, or the policy's own is
    kept.
    """

    activations: Tier | None = None
    """As in a policy."""
    activation_bytes: int | None = None
    """As in a policy."""
    device_bytes: int | None = None
    """What activations leave of an accelerator's memory."""
    host_bytes: int | None = None
    """What activations leave of the budget of host memory."""

    def fields(self, policy: OffloadPolicy) -> Fields:
        """The fields of a policy that it changes: those that the policy leaves open, and the budget
        of host memory."""
        found: Fields = {"host_bytes": self.host_bytes} if self.host_bytes is not None else {}
        if policy.device_bytes is None and self.device_bytes is not None:
            found["device_bytes"] = self.device_bytes
        if policy.activations is None and self.activations is not None:
            found |= {"activations": self.activations, "activation_bytes": self.activation_bytes}
        elif policy.activations is not None and policy.activation_bytes is None:
            found["activation_bytes"] = self.activation_bytes
        return found


class Choice(NamedTuple):
    """The chosen policy and plan, and the rule's plan for comparison; num_tried: the number of
    plans that were played.

    The rule's plan has fields, too, where the memory of an accelerator is known: what it may take
    there.
    """

    policy: OffloadPolicy
    chosen: Tried
    rule: Tried
    num_tried: int

    @property
    def is_rule(self) -> bool:
        """Whether the rule's plan is the fastest."""
        return self.chosen.fields == self.rule.fields

    def __str__(self) -> str:
        if self.num_tried == 1:
            return "planned by rule: no budget of memory was named, or nothing is left open"
        others = f"of {self.num_tried} plans"
        words = ", ".join(_words(name, value) for name, value in self.chosen.fields.items())
        if self.is_rule:
            said = f"{words}, " if words else ""
            return (
                f"planned by rule: {said}predicted {self.rule.forecast.total_s:.3g} s a step, "
                f"the fastest {others}"
            )
        return (
            f"planned by predicted time: {words}: {self.chosen.forecast.total_s:.3g} s a step, "
            "where the rule's plan takes "
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
    placements: Sequence[Placement] = (),
    input_bytes: int = 0,
) -> Choice:
    """Chooses values for the open fields (None) of a policy by predicted time; `Choice.policy` is
    for `tiermem.shard`.

    It starts with the rule's plan, changes one field at a time, and keeps a change that is
    predicted to be faster; it repeats this once. With a budget of an accelerator it does so again
    from a plan that keeps no more units there, which must be 10 % faster, and so must be a plan
    that sends tiles to an accelerator (`streamed_ratio`). Every candidate is planned, so the chosen
    plan fits. Equal rates give equal choices on all ranks. Without a budget of host memory
    (`host_bytes`) or of an accelerator (`placements`) the rule's plan is chosen.

    Args:
        model: a model with the shapes and dtypes of the training; may be on the meta device.
        rates, compute: equal on all ranks; declared, or made equal by `agreed`.
        placements: what activations leave to the plan, for each home that inputs of checkpointed
            blocks may have. The rule's plan is that of the first placement that fits.
        input_bytes: see `forecast_step`.

    Not collective; allocates no states. Raises ValueError when not even the rule's plan fits.
    """
    topology = plan_topology(world, policy, ranks_on_node)
    division = divide(model, policy, topology.num_shards)
    uses = uses_of(model, division, compute)
    rooms = {each.activations: each.device_bytes for each in placements}

    def attempt(fields: Fields, most_tiles: int = _MOST_TILES) -> Tried:
        changed = dataclasses.replace(policy, **fields)
        plan = make_plan(division, changed, topology, is_gpu, ranks_on_node)
        room_bytes = rooms.get(changed.activations)
        if room_bytes is not None and plan.device_bytes > room_bytes:
            raise ValueError(
                f"the plan needs {plan.device_bytes} bytes of the device, and activations leave "
                f"{room_bytes}"
            )
        forecast = forecast_step(
            division,
            plan,
            changed,
            topology,
            uses,
            rates,
            is_gpu,
            ranks_on_node,
            num_micro,
            most_tiles,
            input_bytes,
        )
        return Tried(fields, plan, forecast)

    moves = [each.fields(policy) for each in placements]
    rule = _first_that_fits(attempt, moves)
    search = _Search(
        attempt, functools.partial(_changes, policy, division, topology.num_shards), rule
    )
    best = rule
    if policy.host_bytes is not None or any(each.device_bytes is not None for each in placements):
        best = search.improved(rule, moves)
        if (
            policy.device_bytes is None and "device_bytes" in rule.fields
        ):  # the same with host memory for states instead
            no_budget: Fields = {"device_bytes": None}
            best = search.far_better(
                best, [rule.fields | no_budget], [move | no_budget for move in moves]
            )
        sending = [{"streamed_ratio": part} for part in _STREAMED if _may_send(policy, best.plan)]
        best = search.far_better(
            best, [each.fields | sent for each in (rule, best) for sent in sending], moves
        )
    return Choice(dataclasses.replace(policy, **best.fields), best, rule, search.num_tried)


class _Search:
    """Tries values of the open fields of a policy. Each plan is made and played once.

    Args:
        attempt: plays the plan with these fields, tiles merged above a number; raises ValueError
            for one that does not fit.
        changes: what to try after the best plan so far.
        rule: the plan to begin with.
    """

    def __init__(
        self,
        attempt: Callable[..., Tried],
        changes: Callable[[Tried], Iterator[Fields]],
        rule: Tried,
    ) -> None:
        self._attempt = attempt
        self._changes = changes
        self._tried: dict[str, Tried | None] = {_key(rule.fields): rule}  # None: it does not fit

    @property
    def num_tried(self) -> int:
        """Plans that were played."""
        return sum(each is not None for each in self._tried.values())

    def improved(self, best: Tried, moves: Sequence[Fields]) -> Tried:
        """The best plan with one field at a time changed, to one of `moves` or otherwise, if that
        is faster."""
        for _ in range(_ROUNDS):
            before = best
            for change in (*moves, *self._changes(before)):
                found = self._try(best.fields | change)
                if (
                    found is not None
                    and found.forecast.total_s * _LEAST_GAIN < best.forecast.total_s
                ):
                    best = found
            if best is before:
                break
        return best

    def far_better(self, best: Tried, starts: Sequence[Fields], moves: Sequence[Fields]) -> Tried:
        """What is improved from the fastest of these starts, if it is far faster; else the best so
        far."""
        found = [other for fields in starts if (other := self._try(fields)) is not None]
        if found:
            other = self.improved(min(found, key=lambda each: each.forecast.total_s), moves)
            if _is_far_faster(other, best):  # merged tiles hide more than whole ones
                whole = [self._attempt(each.fields, MOST_TILES) for each in (other, best)]
                return other if _is_far_faster(*whole) else best
        return best

    def _try(self, fields: Fields) -> Tried | None:
        key = _key(fields)
        if key not in self._tried:
            self._tried[key] = None
            with contextlib.suppress(ValueError):
                self._tried[key] = self._attempt(fields)
        return self._tried[key]


def agreed(
    rates: Rates, compute: Compute, group: dist.ProcessGroup | None = None
) -> tuple[Rates, Compute]:
    """Returns rank 0's rates on every rank of the group (default: the world). Collective with a
    process group; blocks."""
    if not (dist.is_available() and dist.is_initialized()):
        return rates, compute
    values: list[Any] = [rates, compute]
    group = group or dist.group.WORLD
    assert group is not None
    dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group)
    return values[0], values[1]


def _may_send(policy: OffloadPolicy, plan: Plan) -> bool:
    """Whether tiles that rest elsewhere may be sent to an accelerator, and the policy leaves open
    how many."""
    is_open = policy.streamed_ratio is None and not policy.step_in_backward
    return is_open and bool(plan.on_device) and plan.states is not Tier.DEVICE


def _is_far_faster(other: Tried, best: Tried) -> bool:
    return other.forecast.total_s * LEAST_FAR_GAIN < best.forecast.total_s


def _first_that_fits(attempt: Callable[[Fields], Tried], starts: Sequence[Fields]) -> Tried:
    """The plan of the first of these fields that fits, else of the policy as it is. Raises
    ValueError if that does not fit."""
    for fields in starts:
        with contextlib.suppress(ValueError):
            return attempt(fields)
    return attempt({})


def _key(fields: Fields) -> str:
    return repr(sorted(fields.items()))


def _changes(
    policy: OffloadPolicy, division: Division, num_shards: int, best: Tried
) -> Iterator[Fields]:
    """Values to try for the open fields of a policy, after the best candidate so far."""
    if (
        policy.grads is None
        and policy.paths
        and not policy.step_in_backward
        and best.plan.grads is Tier.HOST
    ):
        yield {"grads": Tier.NVME}
    # units, instead of states, get the rest of the budget
    streamed = [unit.dtype.itemsize for unit in best.plan.division.units if not unit.is_resident]
    itemsize = max((unit.dtype.itemsize for unit in division.units), default=1)
    left = (
        best.plan.resident_bytes
        + int(best.fields.get("host_param_numel", 0)) * itemsize // num_shards
    )
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
        "activations": f"inputs of checkpointed blocks rest on {value.name if isinstance(value, Tier) else value}",
        "activation_bytes": f"{value} bytes for them",
        "device_bytes": f"{value} bytes of the device for the plan"
        if value
        else "no more units on the device",
        "host_bytes": f"{value} bytes of host memory",
        "streamed_ratio": f"the accelerator steps a part of {value} of the tiles that rest elsewhere",
    }
    return words[name]
