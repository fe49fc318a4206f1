"""Choose: the fastest plan within budgets, by predicted time.

    axis           values                                                         fields of the policy
    activations    blocks keep them, or are recomputed with their inputs where    activations, activation_bytes, and the
                   the maths runs, on HOST or on NVMe: the caller's placements    budgets that each leaves
    states         on DEVICE, stepped there; on HOST or NVMe, all or but for      optim, optim_ratio
                   eighths that are on DEVICE. HOST keeps those that it has room
                   for
    weights        on DEVICE, HOST or NVMe, a part of these on HOST               params, host_param_numel
    units          none, some or all that fit stay on DEVICE                      device_bytes
    gradients      on DEVICE, HOST or NVMe                                        grads
    streamed       the part of the tiles elsewhere that DEVICE steps              streamed_ratio
    buffers        units fetched ahead; size and number of tiles                  unit_buffers, tile_numel, tile_buffers

What a policy names is no axis. It always names homes of states and weights: these are axes where
the caller says so. Each candidate is planned and forecast. The search begins with every combination
of homes, goes on from the fastest ones along one axis at a time, then along two at a time, and ends
where no such change is faster. Of plans that are as fast it takes one that writes less to disks. It
takes no random numbers and no time, so equal rates give equal choices on all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from tiermem.forecast.loads import CountedUses, Use, uses_of
from tiermem.forecast.phases import HOST_TO_NVME, Forecast, forecast_step
from tiermem.forecast.rates import Compute, Rates
from tiermem.plans.budget import make_plan
from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.topology import plan_topology, ranks_per_node
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.units.unit import Division, divide

if TYPE_CHECKING:
    from tiermem.run.shards import Shards

HOMES = ("params", "optim")
"""Fields of a policy that it always names, and that a caller may leave to the search."""
_LEAST_GAIN = 1.002  # a change must be faster by this factor
_CLEARLY_LESS = 0.95
_EIGHTHS = tuple(part / 8 for part in range(8, 0, -1))
_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TILES = (
    {"tile_numel": 1 << 20, "tile_buffers": 4},
    {"tile_numel": 1 << 18, "tile_buffers": 8},
)
_MOST_STARTS = 4
_START_EACH = 4  # values of a home of states
_MANY = 6  # values of an axis, of which every second one is tried, and those beside the best
_DAY_S = 86_400
_TOO_MUCH_S = 1e9

Fields = dict[str, Any]
Point = tuple[int, ...]
"""The number of a value on each axis."""


def forecast_shards(
    shards: Shards,
    compute: Compute,
    rates: Rates,
    num_micro: int = 1,
    input_bytes: int = 0,
    is_early: bool = True,
) -> Forecast:
    """Computes a step of a sharded model with its own division and plan; see `forecast_step`. Calls
    no collective.

    is_early: it begins under backward where the plan has room; False: it is one that History leaves
        alone.
    """
    plan = shards.plan if is_early else shards.plan.without_attempts("")
    return forecast_step(
        plan,
        shards.policy,
        shards.topology,
        uses_of(shards.model, plan.division, compute),
        rates,
        is_accelerator(shards.device),
        ranks_per_node(),
        num_micro,
        input_bytes,
    )


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


# ---- what is asked, and what is chosen -----------------------------------------------------------


class Placement(NamedTuple):
    """A way to keep activations, and the memory that a plan may take beside them.

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
    compute: Compute | None = None
    """The seconds of the maths, where they differ between placements."""
    input_bytes: int = 0
    """As in `forecast_step`: blocks are recomputed, if it is more than 0."""
    accumulation: str | None = None
    """As in a policy, which has another one where homes may move; None: the policy's."""
    host_room_bytes: int | None = None
    """What activations leave of a rank's host memory to a plan within the policy's own budget."""
    num_kept: int = 0
    """Blocks that keep their activations where the others are recomputed."""

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
        if self.accumulation is not None:
            found["accumulation"] = self.accumulation
        return found

    def __str__(self) -> str:
        if not self.input_bytes:
            return "blocks keep their activations"
        home = "where the maths runs" if self.activations is None else f"on {self.activations.name}"
        if self.num_kept:
            return f"all blocks but the last {self.num_kept} are recomputed"
        order = ", all micro-batches block by block" if self.accumulation == "layers" else ""
        return f"blocks are recomputed{order}, with their inputs {home}"


class Caps(NamedTuple):
    """What a plan may take of a rank besides its budgets of memory; None: no limit."""

    disk_bytes: int | None = None
    """On all NVMe paths together."""
    pinned_bytes: int | None = None
    """Of HOST memory that is registered with an accelerator's driver."""
    written_bytes_day: float | None = None
    """To the disks, in a day of steps."""

    def excess(self, plan: Plan, forecast: Forecast) -> float:
        """By what factor a plan takes more than it may, at most; 1 or less: it does not."""
        a_day = forecast.edge_bytes(HOST_TO_NVME) * _DAY_S / max(forecast.total_s, 1e-9)
        taken = (plan.disk_bytes, plan.link_bytes, a_day)
        limits = zip(taken, self, strict=True)
        parts = (size / max(most, 1) for size, most in limits if most is not None)
        return max(parts, default=0.0)


class Tried(NamedTuple):
    """A candidate."""

    policy: OffloadPolicy
    placement: Placement
    plan: Plan
    forecast: Forecast
    excess: float
    """See `Caps.excess`."""

    @property
    def cost(self) -> float:
        """Seconds of a step; of a plan that takes too much, more than of any that does not."""
        return self.total_s if self.excess <= 1 else _TOO_MUCH_S * self.excess

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return self.forecast.total_s


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest plan that was found."""

    chosen: Tried
    """The plan, its policy and its forecast."""
    reasons: tuple[str, ...]
    """For each axis a sentence: what is chosen, and what a step would take with the best of its
    other values."""
    num_tried: int
    """Plans that fit, and were forecast."""
    point: Point
    """The values on the axes."""

    @property
    def policy(self) -> OffloadPolicy:
        """For `tiermem.shard`."""
        return self.chosen.policy

    def __str__(self) -> str:
        if not self.reasons:
            return "planned by rule: no budget of memory was named, or nothing is left open"
        return (
            f"planned by predicted time: {self.chosen.total_s:.3g} s a step, the fastest of "
            f"{self.num_tried} plans"
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
    caps: Caps | None = None,
    moved: Collection[str] = (),
    searches: bool = True,
    near: Choice | None = None,
    free_bytes: int | None = None,
) -> Choice:
    """Chooses values for the open fields (None) of a policy by predicted time.

    Without a budget of host memory (`host_bytes`) or of an accelerator (`placements`), and with
    homes that do not move, the policy is planned as it is.

    Args:
        model: a model with the shapes and dtypes of the training; may be on the meta device.
        rates, compute: equal on all ranks; declared, or made equal by `agreed`.
        placements: the ways to keep activations, those that differ between blocks last; default:
            one that takes nothing.
        caps: limits besides the budgets of memory.
        moved: those of HOMES that may be changed, too; to NVME if there are paths.
        searches: False: the policy with the first placement that fits.
        near: the choice for a machine that differs little: the search goes on from it, one axis at
            a time.
        free_bytes: as in `make_plan`.

    Not collective; allocates no states. Raises ValueError when no plan fits.
    """
    topology = plan_topology(world, policy, ranks_on_node)
    division = divide(model, policy, topology.num_shards)
    placements = placements or [Placement()]
    limits = caps or Caps()
    if policy.most_disk_bytes is not None:
        most = policy.most_disk_bytes // ranks_on_node
        given = most if limits.disk_bytes is None else limits.disk_bytes
        limits = limits._replace(disk_bytes=min(most, given))
    counted = functools.cache(functools.partial(CountedUses, model, division))

    @functools.cache
    def uses(maths: Compute) -> list[Use]:
        return counted(maths.rest_forward_s is not None).timed(maths)

    @functools.cache
    def planned(changed: OffloadPolicy, keeps_units: bool = True) -> Plan:
        return make_plan(
            division,
            changed,
            topology,
            is_gpu,
            ranks_on_node,
            keeps_units=keeps_units,
            free_bytes=free_bytes,
        )

    def attempt(fields: Fields, placement: Placement) -> Tried:
        part = fields.get(_UNITS, 1.0)
        changed = _with_fields(policy, fields, placement)
        if changed.params is Tier.DEVICE:  # which stays there in any case
            part = 0.0
        room_bytes = placement.device_bytes
        if policy.device_bytes is None and room_bytes is not None and part < 1:
            given = dataclasses.replace(changed, device_bytes=None)
            if part > 0 or planned(given).device_bytes > room_bytes:
                least_bytes = planned(changed, keeps_units=False).device_bytes
                budget = least_bytes + int(part * (room_bytes - least_bytes))
                given = dataclasses.replace(changed, device_bytes=budget)
            changed = given
        plan = planned(changed)
        if room_bytes is not None and plan.device_bytes > room_bytes:
            raise ValueError(
                f"the plan needs {plan.device_bytes} bytes of the device, and activations leave "
                f"{room_bytes}"
            )
        on_host = placement.host_room_bytes
        if on_host is not None and plan.host_bytes > on_host:
            raise ValueError(
                f"the plan takes {plan.host_bytes} bytes of host memory, and activations leave "
                f"{on_host}"
            )
        if limits.disk_bytes is not None and plan.disk_bytes > limits.disk_bytes:
            plan = plan.without_attempts("the disk has no room")
        forecast = forecast_step(
            plan,
            changed,
            topology,
            uses(placement.compute or compute),
            rates,
            is_gpu,
            ranks_on_node,
            num_micro,
            placement.input_bytes,
        )
        return Tried(changed, placement, plan, forecast, limits.excess(plan, forecast))

    has_budget = policy.host_bytes is not None or any(
        size is not None for each in placements for size in (each.device_bytes, each.host_bytes)
    )
    axes = list(_axes_of(policy, division, is_gpu, moved, placements))
    search = _Search(attempt, axes, placements)
    if not searches or not (has_budget or moved):
        return Choice(search.first(), (), 1, ())
    best = search.best(() if near is None else near.point)
    if search.tried(best).excess > 1:
        raise ValueError(f"no plan was found that keeps to {limits}")
    return Choice(search.tried(best), tuple(search.reasons(best)), search.num_tried, best)


# ---- axes ----------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """Values of some fields that exclude each other."""

    name: str
    values: list[Fields]
    starts: list[int]
    """The numbers of values that a search begins with."""


_UNITS = "units"
"""The part of what a plan leaves of an accelerator that units take: gives `device_bytes`."""


def _with_fields(policy: OffloadPolicy, fields: Fields, placement: Placement) -> OffloadPolicy:
    given = placement.fields(policy) | fields
    given.pop(_UNITS, None)
    if given.get("optim", policy.optim) is Tier.DEVICE:  # and is stepped there
        given.pop("streamed_ratio", None)
    return dataclasses.replace(policy, **given)


def _axes_of(
    policy: OffloadPolicy,
    division: Division,
    is_gpu: bool,
    moved: Collection[str],
    placements: Sequence[Placement],
) -> Iterator[Axis]:
    """The axes of what a policy leaves open."""
    homes = [Tier.HOST, *([Tier.NVME] if policy.paths else [])]
    near = [Tier.DEVICE] if is_gpu else []
    if "optim" in moved:
        values: list[Fields] = [{"optim": Tier.DEVICE} for _ in near]
        starts = [0] if near else []
        for home in homes:
            parts = _EIGHTHS if is_gpu else (1.0,)
            starts += [len(values) + index for index in range(0, len(parts), _START_EACH)]
            values += [{"optim": home, "optim_ratio": part} for part in parts]
        yield Axis("states", values, starts)
    own = policy.params is Tier.NVME and policy.host_param_numel is None
    is_moved = "params" in moved and policy.stage == 3
    if is_moved or own:
        numel = sum(unit.full_numel for unit in division.units if not unit.is_resident)
        to_try = [*near, *homes] if is_moved else [Tier.NVME]
        values = [{"params": home} for home in to_try]
        starts = list(range(len(values)))
        if Tier.NVME in to_try and policy.host_param_numel is None:
            values += (
                {"params": Tier.NVME, "host_param_numel": int(part * numel)} for part in _PARTS[1:]
            )
        yield Axis("weights", values, starts)
    if policy.grads is None and not policy.step_in_backward:
        values = [{"grads": home} for home in (*near, *homes)]
        yield Axis("gradients", values, list(range(len(values))))
    if any(each.device_bytes is not None for each in placements) and policy.device_bytes is None:
        yield Axis(_UNITS, [{_UNITS: part} for part in reversed(_PARTS)], [0, len(_PARTS) - 1])
    if is_gpu and policy.streamed_ratio is None and not policy.step_in_backward:
        values = [{}, *({"streamed_ratio": part} for part in _PARTS[1:])]
        yield Axis("streamed", values, [0])
    if policy.unit_buffers is None and policy.gather_way != "single":
        yield Axis("buffers", [{}, {"unit_buffers": division.most_at_once + 1}], [0])
    values = [{}]
    for changes in _TILES:
        values.append(
            {name: size for name, size in changes.items() if getattr(policy, name) is None}
        )
    if values[1]:
        yield Axis("tiles", values, [0])


# ---- the search ----------------------------------------------------------------------------------


class _Search:
    """Tries points of the axes. Each plan is made and forecast once.

    Args:
        attempt: the plan with some fields and a placement; raises ValueError for one that does not
            fit.
    """

    def __init__(
        self,
        attempt: Callable[[Fields, Placement], Tried],
        axes: Sequence[Axis],
        placements: Sequence[Placement],
    ) -> None:
        self._attempt = attempt
        self._axes = axes
        self._placements = placements
        self._sizes = [len(placements), *(len(axis.values) for axis in axes)]
        self._tried: dict[Point, Tried | None] = {}  # None: it does not fit

    @property
    def num_tried(self) -> int:
        """Plans that fit."""
        return sum(each is not None for each in self._tried.values())

    def tried(self, point: Point) -> Tried:
        """The plan of a point that fits."""
        found = self._tried[point]
        assert found is not None
        return found

    def first(self) -> Tried:
        """The plan with nothing changed and the first placement that fits. Raises ValueError where
        none does."""
        *others, last = self._placements
        for placement in others:
            with contextlib.suppress(ValueError):
                return self._attempt({}, placement)
        return self._attempt({}, last)

    def best(self, near: Point) -> Point:
        """The point of the fastest plan. Raises ValueError where none fits.

        near: where to begin, if it fits and has all axes.
        """
        is_point = len(near) == len(self._sizes) and all(map(operator.lt, near, self._sizes))
        if is_point and self._try(near) is not None:
            return self._spared(self._descended(near))
        # all blocks alike, then some: else the search takes half as long again
        self._sizes[0] = sum(not each.num_kept for each in self._placements)
        starts = self._starts()
        if not starts:
            self.first()  # says what does not fit
            raise ValueError("no plan fits")
        found = [self._descended(start) for start in starts]
        best = self._paired(min(found, key=self._seconds))
        num_alike = self._sizes[0]
        self._sizes[0] = len(self._placements)
        # what blocks keep takes the room of states
        some = self._along(best, 0)[num_alike:] if self._axes else []
        together = (each for one in some for each in self._coarse(one, 1))
        more = self._descended(self._faster(best, together))
        if more != best:
            others = [self._descended(each) for each in starts]
            best = self._paired(min(more, *others, key=self._seconds))
        return self._spared(best)

    def reasons(self, best: Point) -> Iterator[str]:
        """A sentence for each axis."""
        for axis in range(len(best)):
            others = self._along(best, axis)
            seen = [each for each in others if each != best and each in self._tried]
            if not seen:
                continue
            other = min(seen, key=self._seconds)
            seconds = self._seconds(other)
            instead = "nothing else fits"
            if seconds < float("inf"):
                instead = f"a step takes {seconds:.3g} s where {self._words(other, axis)}"
            yield f"{self._words(best, axis)}: {instead}"

    # ---- moves -----------------------------------------------------------------------------------

    def _starts(self) -> list[Point]:
        """Combinations of homes, each with the first placement that fits: the fastest ones of those
        that are the best with one of their values."""
        found: dict[tuple[int, int], Point] = {}
        for values in itertools.product(*(axis.starts for axis in self._axes)):
            points = ((first, *values) for first in range(self._sizes[0]))
            point = next((each for each in points if self._try(each) is not None), None)
            if point is None:
                continue
            for key in enumerate(point):
                found[key] = min(found.get(key, point), point, key=self._seconds)
        return sorted(dict.fromkeys(found.values()), key=self._seconds)[:_MOST_STARTS]

    def _descended(self, best: Point) -> Point:
        """Changes one axis at a time, as long as that is faster."""
        before = None
        while before != best:
            before = best
            for axis in range(len(best)):
                best = self._faster(best, self._coarse(best, axis))
                best = self._faster(best, self._near(best, axis))
        return best

    def _paired(self, best: Point) -> Point:
        """Changes two axes at a time, by neighbouring values, as long as that is faster."""
        before = None
        while before != best:
            before = best
            for first, second in itertools.combinations(range(len(best)), 2):
                near = self._near(best, first)
                both = (each for one in near for each in self._near(one, second))
                best = self._faster(best, both)
            if best != before:
                best = self._descended(best)
        return best

    def _spared(self, best: Point) -> Point:
        """Of the plans that were tried and are as fast one that spares the disks."""
        most_s = self._seconds(best) * _LEAST_GAIN
        for point in self._tried:
            if self._seconds(point) <= most_s and self._is_sparer(point, best):
                best = point
        return best

    def _is_sparer(self, point: Point, other: Point) -> bool:
        """Whether a plan writes clearly less to disks, or no more and has no home there."""
        plans = self.tried(point), self.tried(other)
        written, more = (each.forecast.edge_bytes(HOST_TO_NVME) for each in plans)
        leaves_disk = plans[1].policy.uses_nvme and not plans[0].policy.uses_nvme
        return written < _CLEARLY_LESS * more or (written <= more and leaves_disk)

    def _faster(self, best: Point, points: Iterable[Point]) -> Point:
        for point in points:
            if self._seconds(point) * _LEAST_GAIN < self._seconds(best):
                best = point
        return best

    def _along(self, point: Point, axis: int) -> list[Point]:
        return [(*point[:axis], value, *point[axis + 1 :]) for value in range(self._sizes[axis])]

    def _coarse(self, point: Point, axis: int) -> list[Point]:
        every = self._along(point, axis)
        return every[:: 2 if len(every) > _MANY else 1]

    def _near(self, point: Point, axis: int) -> list[Point]:
        return [each for each in self._along(point, axis) if abs(each[axis] - point[axis]) == 1]

    def _seconds(self, point: Point) -> float:
        found = self._try(point)
        return float("inf") if found is None else found.cost

    def _try(self, point: Point) -> Tried | None:
        if point not in self._tried:
            self._tried[point] = None
            fields: Fields = {}
            for axis, value in zip(self._axes, point[1:], strict=True):
                fields |= axis.values[value]
            with contextlib.suppress(ValueError):
                self._tried[point] = self._attempt(fields, self._placements[point[0]])
        return self._tried[point]

    def _words(self, point: Point, axis: int) -> str:
        if axis == 0:
            return str(self._placements[point[0]])
        return _words(self._axes[axis - 1].name, self._axes[axis - 1].values[point[axis]])


def _words(axis: str, fields: Fields) -> str:
    if axis == "states":
        part = fields.get("optim_ratio", 1.0)
        much = "states rest" if part == 1 else f"{part:.0%} of the states rest"
        rest = "" if part == 1 else ", the others on DEVICE"
        return f"{much} on {fields['optim'].name}{rest}"
    if axis == "weights":
        numel = fields.get("host_param_numel")
        some = f", units of up to {numel} elements on HOST" if numel else ""
        return f"weights rest on {fields['params'].name}{some}"
    if axis == "gradients":
        return f"gradients rest on {fields['grads'].name}"
    if axis == _UNITS:
        part = fields[_UNITS]
        if part == 1:
            return "all units that fit stay on DEVICE"
        return f"units take {part:.0%} of what is left of DEVICE" if part else "no more units stay"
    if axis == "streamed":
        part = fields.get("streamed_ratio", 0.0)
        return f"DEVICE steps {part:.0%} of the tiles that rest elsewhere"
    if not fields:
        return f"{axis} are as the plan's rule has them"
    return " and ".join(f"{name} is {value}" for name, value in fields.items())
