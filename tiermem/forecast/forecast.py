"""Forecast: what one step of one rank moves over each edge and how long each phase takes; plans chosen by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from tiermem.forecast.loads import MOST_TILES, Use, uses_of
from tiermem.forecast.rates import Compute, Rates, Timeline, play
from tiermem.forecast.steps import BACKWARD, FORWARD, MATHS, STEP, Course, build_steps
from tiermem.policy import OffloadPolicy, Tier
from tiermem.swap.accelerator import is_accelerator
from tiermem.zero.plan import Plan, make_plan
from tiermem.zero.topology import Topology, plan_topology, ranks_per_node
from tiermem.zero.unit import Division, divide

if TYPE_CHECKING:
    from tiermem.zero.shards import Shards


# ---- Forecast: what one step of one rank moves over each edge and how long each phase takes, once training is --------
# under way
#
# Two steps are played (steps.py, rates.py) and the second is told: the first has nothing read ahead of it. A rank
# shares its node's disks with the other ranks there, all doing the same at the same time.

PHASES = (FORWARD, BACKWARD, STEP)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One training step of one rank."""

    seconds: Mapping[str, float]
    """Of each phase: "forward" and "backward" (all micro-batches together) and "step"."""
    moved_bytes: Mapping[str, Mapping[str, int]]
    """By edge ("NVME -> HOST", ...) and phase. What is read ahead counts in the phase that begins the read."""
    payload_bytes: Mapping[str, Mapping[str, int]]
    """What is handed to collectives, by who takes part ("shard", "within", ...) and phase; as zero/failures.py counts."""
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
    course = Course(plan.division.units, uses, plan, policy, topology, of_rank, is_gpu, num_micro, most_tiles)
    return _second_step(play(build_steps(course, 2)))


def forecast_shards(shards: Shards, compute: Compute, rates: Rates, num_micro: int = 1) -> Forecast:
    """Plays a step of a model that is sharded, as it was divided and planned; see `forecast_step`. Calls no collective."""
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


# ---- Choice: what a budget leaves open in a plan, settled by predicted time instead of by rules ----------------------
#
#     open to choice (None in the policy)     the plan's rule                      tried instead
#     home of gradients                       HOST when they fit                   NVME: its memory keeps states or units
#     unit buffers                            two units fetched ahead              one
#     tiles                                   2^20 elements, 8 buffers             smaller, or fewer: likewise
#     what is left of the budget              optimizer states stay on HOST        whole units, or half of each
#
# A slow disk with fast arithmetic wants units to stay (a byte of a weight is read twice and written once in a step, one
# of fp32 states moves twice); where forward and backward hide the fetches, it wants states. From the rule's plan one
# thing is changed at a time, what is predicted to be faster is kept, and what is left is tried once more. Nothing
# random, no clock: from the same rates every rank chooses the same. Each candidate is planned and forecast, so all fit.
# Without a budget nothing is scarce, and without rates nothing is known: then the rule stands.

_LEAST_GAIN = 1.02  # for less the rule is not left
_MOST_TILES = 160  # played one by one
_ROUNDS = 2
_TILES = ((1 << 20, 4), (1 << 18, 8))
_SHARES = (0.5, 1.0)  # of what is left of the budget, for units

Fields = dict[str, Any]


class Tried(NamedTuple):
    """One way to settle what is open."""

    fields: Fields
    plan: Plan
    forecast: Forecast


class Choice(NamedTuple):
    """What was chosen, and what the rule would have taken."""

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
    """Settles what a policy leaves open for a model, as the module says; `Choice.policy` is for `tiermem.shard`.

    Args:
        model: of the shapes and dtypes that will be trained; may be on the meta device.
        rates, compute: equal on all ranks, declared or by `agreed`.

    Not collective; allocates nothing. Raises ValueError when not even the rule's plan fits.
    """
    topology = plan_topology(world, policy, ranks_on_node)
    division = divide(model, policy, topology.num_shards)
    uses = uses_of(model, division, compute)

    def play(fields: Fields) -> Tried:
        changed = dataclasses.replace(policy, **fields)
        plan = make_plan(division, changed, topology, is_gpu, ranks_on_node)
        forecast = forecast_step(
            division, plan, changed, topology, uses, rates, is_gpu, ranks_on_node, num_micro, _MOST_TILES
        )
        return Tried(fields, plan, forecast)

    return _Search(policy, division, topology.num_shards, play).run()


def agreed(rates: Rates, compute: Compute, group: dist.ProcessGroup | None = None) -> tuple[Rates, Compute]:
    """Rank 0's rates, on every rank of the group (default: the world). Collective when there are several ranks; blocks."""
    if not (dist.is_available() and dist.is_initialized()):
        return rates, compute
    values: list[Any] = [rates, compute]
    group = group or dist.group.WORLD
    assert group is not None
    dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group)
    return values[0], values[1]


class _Search:
    """Tries one change after the other; what was tried is remembered."""

    def __init__(
        self, policy: OffloadPolicy, division: Division, num_shards: int, play: Callable[[Fields], Tried]
    ) -> None:
        self._policy = policy
        self._division = division
        self._num_shards = num_shards
        self._play = play
        self._tried: dict[str, Tried | None] = {}

    def run(self) -> Choice:
        rule = best = self._play({})
        self._tried[repr({})] = rule
        for _ in range(_ROUNDS if self._policy.host_bytes is not None else 0):
            before = best
            for changes in (self._homes(best), self._residency(best), self._units(), self._tiles()):
                for change in list(changes):
                    tried = self._try(best.fields | change)
                    if tried is not None and tried.forecast.total_s * _LEAST_GAIN < best.forecast.total_s:
                        best = tried
            if best is before:
                break
        settled = dataclasses.replace(self._policy, **best.fields)
        return Choice(settled, best, rule, sum(each is not None for each in self._tried.values()))

    # ---- candidates ----------------------------------------------------------------------------------------------------

    def _homes(self, best: Tried) -> Iterator[Fields]:
        policy = self._policy
        if policy.grads is None and policy.paths and not policy.step_in_backward and best.plan.grads is Tier.HOST:
            yield {"grads": Tier.NVME}

    def _residency(self, best: Tried) -> Iterator[Fields]:
        """Units in place of states, within what is left of the budget."""
        policy, units = self._policy, [unit for unit in best.plan.division.units if not unit.is_resident]
        left = best.plan.resident_bytes + self._host_units_bytes(best)
        is_open = policy.host_param_numel is None and policy.resident_bytes is None
        if policy.params is not Tier.NVME or not is_open or not units or not left:
            return
        itemsize = max(unit.dtype.itemsize for unit in units)
        for share in _SHARES:
            yield {"host_param_numel": int(share * left) // itemsize * self._num_shards}

    def _host_units_bytes(self, best: Tried) -> int:
        itemsize = max((unit.dtype.itemsize for unit in self._division.units), default=1)
        return int(best.fields.get("host_param_numel", 0)) * itemsize // self._num_shards

    def _units(self) -> Iterator[Fields]:
        if self._policy.unit_buffers is None and self._policy.gather_way != "single":
            yield {"unit_buffers": self._division.most_at_once + 1}

    def _tiles(self) -> Iterator[Fields]:
        is_open = {"tile_numel": self._policy.tile_numel is None, "tile_buffers": self._policy.tile_buffers is None}
        for numel, count in _TILES:
            settled = {"tile_numel": numel, "tile_buffers": count}
            yield {name: value for name, value in settled.items() if is_open[name]}

    # ---- trying --------------------------------------------------------------------------------------------------------

    def _try(self, fields: Fields) -> Tried | None:
        """A candidate's plan and forecast, or None when it does not fit."""
        key = repr(sorted(fields.items()))
        if key not in self._tried:
            try:
                self._tried[key] = self._play(fields) if fields else None
            except ValueError:
                self._tried[key] = None
        return self._tried[key]


def _words(name: str, value: Any) -> str:
    words = {
        "grads": f"gradients rest on {value.name if isinstance(value, Tier) else value}",
        "unit_buffers": f"{value} unit buffers",
        "tile_numel": f"tiles of {value} elements",
        "tile_buffers": f"{value} tile buffers",
        "host_param_numel": f"units of up to {value} elements stay in memory",
    }
    return words[name]
