"""Phases: the bytes and the seconds of each lane in each phase of a training step, by arithmetic.

A *lane* moves bytes or computes: the maths, the CPU's kernels, a disk's reads and its writes, each
direction of the link to an accelerator, the network, host memory. A *part* of a step is the forward
or the backward of a micro-batch, or the step of the optimizer. The busiest lane decides how long a
part lasts:

    seconds = busiest + (all lanes - busiest) / items

Items pass through the lanes one after another (units of a forward, tiles of a step), so that the
first one fills the lanes and the last one empties them. Lanes that share something add up: maths
and kernels the cores of a CPU, reads and writes a disk that does one at a time, kernels and copies
the memory beside an accelerator.

    forward    maths; weights read, gathered and copied (fetches.py), or waited for; inputs of blocks on their way home.
               In the first one, tiles of the step that go on under it
    backward   the same, inputs on their way back, gradients reduced, added up and sent home; a head start of the tiles' reads,
               or the tiles that are stepped under it: as many as their lanes have time for
    step       tiles: read, over the link, stepped, written. With an overlap those of resident units alone
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence

from tiermem.forecast.fetches import (
    MOST_PASSES,
    Fetch,
    FetchedUnit,
    Played,
    PlayedUse,
    StepFetches,
    fetches_of,
)
from tiermem.forecast.loads import (
    Send,
    TileLoad,
    Use,
    gathers,
    gradient_traffic,
    reductions,
    still_buffered,
    tile_loads,
    updates,
)
from tiermem.forecast.rates import Rates
from tiermem.plans.plan import Plan, keeps_secondary
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.topology import Topology
from tiermem.swap.disk.queue import busiest
from tiermem.units.state_layout import keeps_sums
from tiermem.units.unit import Unit
from tiermem.weights.prefetcher import limits_of
from tiermem.weights.step_run import overlap_of
from tiermem.wires.packed import gathers_packed
from tiermem.wires.reduce import MOST_UNDER_WAY, Bucket, cut

NVME_TO_HOST = "NVME -> HOST"
HOST_TO_NVME = "HOST -> NVME"
HOST_TO_DEVICE = "HOST -> DEVICE"
DEVICE_TO_HOST = "DEVICE -> HOST"
RANK_TO_RANK = "rank -> rank"
RANK_TO_NEAR = "rank -> rank of its node"
FORWARD = "forward"
BACKWARD = "backward"
STEP = "step"
PHASES = (FORWARD, BACKWARD, STEP)
MATHS = "maths"
KERNELS = "kernels"
MEMORY = "host memory"
DOWN = "link down"
UP = "link up"
READ = "disk read"
WRITE = "disk write"
DISK = "disk"
NETWORK = "network"
NEAR = "near network"

_RESOURCES = {
    DISK: "disk",
    READ: "disk",
    WRITE: "disk",
    NETWORK: "link",
    NEAR: "link",
    DOWN: "link",
    UP: "link",
    KERNELS: "kernels",
    MEMORY: "kernels",
}
"""The resource of each lane but that of maths."""

# fraction of the bytes read whose checksums are computed
_CHECKED = {"always": 1.0, "sample": 1 / 16, "resume": 0.0}


# ---- what is said of a step ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Forecast:
    """One training step of one rank, after the first step.

    A rank shares its node's disks with the other ranks of the node, which do the same at the same
    time.
    """

    seconds: Mapping[str, float]
    """Seconds of each phase: "forward" and "backward" (all micro-batches together) and "step", as
    the program sees them: what goes on under the next forward makes that longer."""
    moved_bytes: Mapping[str, Mapping[str, int]]
    """Bytes by edge ("NVME -> HOST", ...) and phase. A read ahead counts in the phase that begins
    it, a tile in "step"."""
    payload_bytes: Mapping[str, Mapping[str, int]]
    """Payload of collectives by ranks ("shard", "within", ...) and phase, as ranks/failures.py
    counts it."""
    busy_s: Mapping[str, Mapping[str, float]]
    """Seconds of work by lane ("disk", "maths", ...) and phase, where steps go on in the phase in
    which it takes place; the busiest lane bounds the phase. Kernels of a CPU that computes are in
    "maths"."""
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
        found = busiest(self.limits_s)
        links = (NETWORK, NEAR, DOWN, UP)
        lane = max(links, key=lambda each: sum(self.busy_s.get(each, {}).values()))
        return NETWORK if found == "link" and lane in (NETWORK, NEAR) else found

    def bound_of(self, phase: str) -> str:
        """Returns the lane that works longest in a phase and so bounds it."""
        return max(self.busy_s, key=lambda lane: self.busy_s[lane].get(phase, 0.0), default="")


def forecast_step(
    plan: Plan,
    policy: OffloadPolicy,
    topology: Topology,
    uses: Sequence[Use],
    rates: Rates,
    is_gpu: bool = False,
    ranks_on_node: int = 1,
    num_micro: int = 1,
    input_bytes: int = 0,
) -> Forecast:
    """Computes a step of a planned model.

    Args:
        plan: the result of `make_plan` for this policy and topology.
        uses: the modules of a forward (`uses_of`).
        rates: the rates of the node and of a rank; see `Rates`.
        num_micro: micro-batches of a step (gradient accumulation).
        input_bytes: of the input of one checkpointed block of a micro-batch, which moves as the
            policy says; 0: nothing is recomputed, and activations stay where the maths runs.

    Raises ValueError when a module needs more units at once than the plan has buffers for.
    """
    of_rank = rates.of_rank(ranks_on_node)
    return _Count(uses, plan, policy, topology, of_rank, is_gpu, num_micro, input_bytes).forecast()


@dataclasses.dataclass
class Course:
    """Everything that determines a rank's step."""

    uses: Sequence[Use]
    plan: Plan
    policy: OffloadPolicy
    topology: Topology
    rates: Rates  # this rank's part of the node's rates
    is_gpu: bool
    num_micro: int  # micro-batches of a step
    input_bytes: int  # of the input of a checkpointed block; 0: nothing is recomputed

    @functools.cached_property
    def overlap(self) -> str:
        """What a step runs beside: see `overlap_of`."""
        return overlap_of(self.policy, self.plan, self.is_gpu)

    @property
    def at_once(self) -> int:
        """Micro-batches that one fetch of a unit serves."""
        return self.num_micro if self.policy.accumulation == "layers" else 1

    @property
    def num_passes(self) -> int:
        """Forwards, and backwards, of a step."""
        return self.num_micro // self.at_once

    def grad_bytes(self, unit: Unit) -> int:
        """Bytes of this rank's part of a unit's gradients, where they rest."""
        return unit.shard_numel * self.policy.precision.grad_dtype(unit.dtype).itemsize

    def buckets(self, unit: Unit) -> list[Bucket]:
        """What of a unit's gradients is reduced at once."""
        return cut(unit, self.topology.num_shards, self.policy.reduce_bucket_numel)

    def _num_reductions(self, unit: Unit) -> int:
        if not unit.is_trainable:
            return 0
        return len(self.buckets(unit)) if self.topology.world > 1 else 1

    def is_on_nvme(self, unit: Unit) -> bool:
        """Whether a unit's weights rest on NVMe."""
        return self.plan.unit_homes.get(unit.index) is Tier.NVME

    def fetches(self) -> StepFetches:
        """What the prefetcher does in this step."""
        num_shards = self.topology.num_shards
        units = (
            FetchedUnit(
                unit.index,
                not unit.is_resident,
                self.is_on_nvme(unit),
                num_shards > 1 or gathers_packed(unit, self.policy, num_shards),
                self._num_reductions(unit),
                unit.takes_buffer,
                unit.full_numel,
            )
            for unit in self.plan.division.units
        )
        played = Played(
            tuple(PlayedUse(use.units, use.reads_again) for use in self.uses),
            tuple(units),
            limits_of(self.plan, self.policy),
            min(self.num_passes, MOST_PASSES),
            self.is_gpu,
            self.policy.accumulation == "layers",
            self.policy.step_in_backward,
            MOST_UNDER_WAY if self.topology.world > 1 else 0,
            keeps_secondary(self.policy, self.topology.num_shards),
        )
        return fetches_of(played)


# ---- steps under backward ------------------------------------------------------------------------


def _stepped_early(
    course: Course, loads: Mapping[int, Sequence[TileLoad]]
) -> tuple[set[int], set[int]]:
    """The units that the disk, or the CPU's kernels, have time to step under the maths of the last
    backward, and the one that is begun there.

    Weights that backward fetches and gradients that it writes go first, then the unit whose
    gradients came last, which the next forward needs first. loads: the tiles of each unit.
    """
    stepped: list[int] = []
    plan = course.plan
    if course.overlap != "backward":
        return set(), set()
    busy_s = 0.0  # until then: the disk or kernels
    end_s = 0.0  # and the maths
    is_begun = False
    last = {
        index: number for number, use in enumerate(reversed(course.uses)) for index in use.units
    }
    waiting: list[tuple[int, float]] = []  # units that are home, and the seconds that each takes
    for number, use in enumerate(reversed(course.uses)):
        of_use = [plan.division.units[index] for index in use.units if last[index] == number]
        end_s += use.backward_s * course.at_once
        busy_s += sum(_firm_s(course, unit, use.reads_again) for unit in of_use)
        while waiting and busy_s < end_s:
            index, seconds = waiting.pop()
            busy_s += seconds
            stepped.append(index)
        is_begun = busy_s > end_s
        busy_s = max(busy_s, end_s)
        for unit in of_use:
            may_step = course.is_on_nvme(unit) or unit.index in plan.copied
            if may_step and unit.index in loads:
                seconds = sum(_early_s(course, load) for load in loads[unit.index])
                waiting.append((unit.index, seconds))
    begun = set(stepped[-1:]) if is_begun else set()
    return set(stepped) - begun, begun


def _early_load(course: Course, load: TileLoad) -> TileLoad:
    """What a step of tiles under backward moves."""
    return load if course.is_gpu else load.without_gradients()


def _early_s(course: Course, load: TileLoad) -> float:
    """Seconds of the disk for tiles that are stepped under backward; of the CPU's kernels, if their
    states rest in memory."""
    load = _early_load(course, load)
    if course.plan.states is Tier.NVME:
        return _disk_s(course.rates, load.read_bytes, load.written_bytes)
    return load.memory_bytes / course.rates.kernel_bytes_s


def _firm_s(course: Course, unit: Unit, reads_again: bool) -> float:
    """Seconds of a unit's transfers in backward, beside those of its step."""
    read_bytes = unit.shard_bytes if reads_again and course.is_on_nvme(unit) else 0
    is_written = unit.is_trainable and course.plan.grads is Tier.NVME
    return _disk_s(course.rates, read_bytes, course.grad_bytes(unit) if is_written else 0)


def _disk_s(rates: Rates, read_bytes: float, written_bytes: float) -> float:
    each = read_bytes / rates.disk_read_bytes_s, written_bytes / rates.disk_write_bytes_s
    return max(each) if rates.is_disk_duplex else sum(each)


# ---- lanes of a part -----------------------------------------------------------------------------


@dataclasses.dataclass
class _PhasePart:
    """The seconds of each lane in a forward, a backward or the optimizer's step."""

    phase: str
    num_items: int
    times: int = 1  # parts of a step that are alike
    lanes: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )
    waited_s: float = 0.0  # of fetches that the program waits for
    shared_bytes: float = 0.0  # that kernels and copies move in host memory


@dataclasses.dataclass
class _Count(Course):
    """Counts the parts of a step."""

    def __post_init__(self) -> None:
        self._units = self.plan.division.units
        self._moved = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
        self._payloads = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
        self._part = _PhasePart(STEP, 1)
        self._label = STEP  # the phase that bytes are counted in
        self._loads: dict[int, list[TileLoad]] = {}
        for load in tile_loads(self.plan, self.policy, self.topology.shard_rank):
            self._loads.setdefault(load.unit, []).append(load)
        self._whole, begun = _stepped_early(self, self._loads)
        self._early = self._whole | begun  # units that are stepped in backward, or begun there
        self._goes_on = self.overlap != "none"
        # units whose new weights are in memory, until they are fetched
        self._new: set[int] = set()
        # of units whose experts come by rows
        self._fetched = dict(each for use in self.uses for each in use.parts.items())
        blocks = {use.block for use in self.uses if use.block}
        home = self.policy.activations if self.input_bytes else None
        self._input_home = None if home is Tier.HOST and not self.is_gpu else home
        self._num_inputs = len(blocks) if self._input_home is not None else 0

    def forecast(self) -> Forecast:
        """The step."""
        passes = self.fetches()
        num = len(passes.forward)
        parts = []
        stepped = set(self._loads)
        resident = {index for index in stepped if self._units[index].is_resident}
        streamed = stepped - resident
        if self._goes_on:
            # what was stepped under backward is read again
            self._new = streamed - {u for u in self._whole if self.is_on_nvme(self._units[u])}
        head_start = self._head_start()
        # the fetches after a step are the first of the next one
        after = _PhasePart(STEP, self._num_tiles(resident if self._goes_on else stepped))
        self._part = after
        self._fetch(passes.after)
        for number in range(num):
            is_last = number == num - 1
            times = self.num_passes - (MOST_PASSES - 1) if 0 < number < num - 1 else 1
            self._begin(FORWARD, times)
            self._forward(passes.forward[number])
            if number == 0 and self._goes_on:
                self._label = STEP
                self._disk(READ, -head_start)
                self._tiles(streamed - self._early)
            parts.append(self._part)
            self._new.clear()  # the step has ended
            self._begin(BACKWARD, times)
            self._backward(passes.backward[number], is_first=number == 0)
            self._label = BACKWARD
            if number == 0:
                self._disk(READ, head_start)
            if is_last and self._early:
                self._label = STEP
                self._tiles(self._early, is_early=True)
            parts.append(self._part)
        self._part = after
        self._label = STEP
        if not self.policy.step_in_backward:
            if self._goes_on:
                self._add(MATHS, self._num_tiles(stepped) * self.rates.tile_s)
                self._tiles(resident)
            else:
                self._disk(READ, -head_start)
                self._tiles(stepped)
        parts.append(after)
        self._part = _PhasePart(STEP, 1)
        self._update()
        parts.append(self._part)
        return self._said(parts)

    # ---- forward and backward --------------------------------------------------------------------

    def _begin(self, phase: str, times: int) -> None:
        self._part = _PhasePart(phase, len(self.uses), times)
        self._label = phase

    def _forward(self, fetches: Sequence[Fetch]) -> None:
        self._fetch(fetches)
        self._maths(sum(use.forward_s for use in self.uses))
        if self._num_inputs:
            num_bytes = self._num_inputs * self.input_bytes
            if self.is_gpu:
                self._cross(UP, num_bytes)
            if self._input_home is Tier.NVME:
                self._disk(WRITE, num_bytes)

    def _backward(self, fetches: Sequence[Fetch], is_first: bool) -> None:
        self._fetch(fetches)
        self._maths(sum(use.backward_s for use in self.uses))
        if self._num_inputs > 1:  # the last one has not been let go
            num_bytes = (self._num_inputs - 1) * self.input_bytes
            if self._input_home is Tier.NVME:
                self._disk(READ, num_bytes)
            if self.is_gpu:
                self._cross(DOWN, num_bytes)
        for unit in self._units:
            if unit.is_trainable:
                self._receive(unit, is_first)
        if self.policy.step_in_backward:
            self._step_in_backward()

    def _maths(self, seconds: float) -> None:
        self._add(MATHS, seconds * self.at_once + len(self.uses) * self.rates.use_s)

    def _step_in_backward(self) -> None:
        """The program waits for the tiles of each unit, but beside an accelerator."""
        backward = self._part
        if not self.is_gpu:
            self._part = _PhasePart(BACKWARD, 1)
        self._tiles(self._loads)
        if self._part is not backward:
            backward.waited_s += self._total_s(self._part)
            backward.waited_s -= self._part.lanes[KERNELS]
            for lane, lane_s in self._part.lanes.items():
                backward.lanes[lane] += lane_s
            self._part = backward

    def _fetch(self, fetches: Sequence[Fetch]) -> None:
        """Counts what is fetched. Weights that have been stepped and not fetched since come from
        memory."""
        before_s = sum(self._part.lanes.values())
        for fetch in fetches:
            unit = self._units[fetch.unit]
            num_bytes = int(unit.shard_bytes * self._fetched.get(fetch.unit, 1.0))
            if fetch.kind == "read":
                if fetch.unit in self._new:
                    self._put(2 * unit.shard_bytes)
                else:
                    self._disk(READ, num_bytes)
                    self._add(MATHS, self._sum_s(num_bytes, 0))
            elif fetch.kind == "gather":
                self._send(gathers(unit, self.policy, self.topology, fetch.is_second))
            elif self.is_gpu and self.plan.unit_homes.get(fetch.unit) is not Tier.DEVICE:
                self._cross(DOWN, num_bytes)
            self._new.discard(fetch.unit)
            after_s = sum(self._part.lanes.values())
            if fetch.is_awaited:
                self._part.waited_s += after_s - before_s
            before_s = after_s

    # ---- gradients -------------------------------------------------------------------------------

    def _receive(self, unit: Unit, is_first: bool) -> None:
        """Gradients of a unit: reduced, and added up at home."""
        if self.topology.world > 1:
            for bucket in self.buckets(unit):
                if not self.is_gpu:  # packed, and added up
                    self._put(3 * bucket.num_bytes)
                self._send(reductions(bucket, self.topology) * self.at_once)
        grad_bytes = self.grad_bytes(unit)
        if self.plan.grads is Tier.DEVICE:  # they are added up there
            dtype = self.policy.precision.grad_dtype(unit.dtype)
            moved = gradient_traffic(dtype, self.rates.step_passes) * unit.shard_numel
            self._add(MATHS, moved * self.at_once / self.rates.device_memory_bytes_s)
            return
        if self.is_gpu:
            self._cross(UP, unit.shard_bytes * self.at_once)
        num_added = self.at_once - is_first  # to what has come before
        self._put(self.at_once * (unit.shard_bytes + grad_bytes) + num_added * grad_bytes)
        if self.plan.grads is Tier.NVME:
            if not is_first:
                self._disk(READ, grad_bytes)
            self._disk(WRITE, grad_bytes)

    # ---- tiles -----------------------------------------------------------------------------------

    def _num_tiles(self, units: set[int]) -> int:
        return sum(load.num_tiles for each in units for load in self._loads[each])

    def _head_start(self) -> int:
        """Bytes of the first tiles, which are read in backward."""
        policy = self.policy
        if self._early or not policy.pipeline_read or policy.step_in_backward:
            return 0
        loads = [load for each in self._loads.values() for load in each if load.lasting_bytes]
        num = sum(load.num_tiles for load in loads)
        total = sum(load.lasting_bytes for load in loads)
        return int(total * min(1.0, self.plan.tiles.num / num)) if num else 0

    def _tiles(self, units: Collection[int], is_early: bool = False) -> None:
        buffered = still_buffered(self.plan, self.uses, self.is_gpu)
        policy = self.policy
        for index in sorted(units):
            for load in self._loads[index]:
                if is_early:
                    self._tile(_early_load(self, load))
                elif index in buffered and not policy.step_in_backward:
                    self._tile(load.without_gradients())
                else:
                    self._tile(load)
        if not (policy.pipeline_read and policy.pipeline_write):
            self._part.num_items = 1  # lanes work in turns

    def _tile(self, load: TileLoad) -> None:
        rates = self.rates
        self._disk(READ, load.read_bytes)
        self._disk(WRITE, load.written_bytes)
        self._cross(UP, load.brought_bytes)
        self._cross(DOWN, load.down_bytes)
        self._cross(UP, load.up_bytes)
        if load.device_bytes:
            moved: float = load.torch_bytes
            if rates.step_passes is not None:  # a kernel steps
                moved = load.device_bytes * rates.step_passes
            # Python issues them, while the device works
            issuing_s = load.num_tiles * rates.tile_s
            self._add(MATHS, max(moved / rates.device_memory_bytes_s, issuing_s))
            return
        seconds = load.memory_bytes / rates.kernel_bytes_s
        seconds += 0.0 if self._goes_on else load.num_tiles * rates.tile_s
        self._add(KERNELS, seconds + self._sum_s(load.lasting_bytes, load.written_bytes))
        self._part.shared_bytes += load.memory_bytes

    def _update(self) -> None:
        """Sends new weights of resident units to where they are used, after the tiles."""
        for unit in self._units:
            if unit.is_resident and unit.is_trainable:
                self._send(updates(unit, self.policy, self.topology))
                if self.is_gpu and self.plan.states is not Tier.DEVICE:
                    self._cross(DOWN, unit.shard_bytes)

    # ---- lanes -----------------------------------------------------------------------------------

    def _disk(self, lane: str, num_bytes: int) -> None:
        is_read = lane == READ
        rates = self.rates
        rate = rates.disk_read_bytes_s if is_read else rates.disk_write_bytes_s
        self._add(lane, num_bytes / rate)
        self._count(NVME_TO_HOST if is_read else HOST_TO_NVME, num_bytes)

    def _cross(self, lane: str, num_bytes: int) -> None:
        """A copy between HOST and the accelerator."""
        if num_bytes:
            self._add(lane, num_bytes / self.rates.link_bytes_s)
            self._count(HOST_TO_DEVICE if lane == DOWN else DEVICE_TO_HOST, num_bytes)
            self._part.shared_bytes += num_bytes

    def _send(self, sends: Sequence[Send]) -> None:
        """Collectives."""
        rates = self.rates
        for send in sends:
            is_within = send.among == "within"
            near_bytes_s = rates.near_bytes_s if is_within else None
            rate = near_bytes_s or rates.network_bytes_s
            self._add(NEAR if near_bytes_s else NETWORK, send.crossing_bytes / rate)
            self._count(RANK_TO_NEAR if is_within else RANK_TO_RANK, send.crossing_bytes)
            self._payloads[send.among][self._label] += send.payload_bytes * self._part.times

    def _put(self, memory_bytes: int) -> None:
        """The CPU moves gradients or weights in memory."""
        rate = self.rates.gradient_bytes_s or self.rates.kernel_bytes_s
        self._add(KERNELS, memory_bytes / rate)
        self._part.shared_bytes += memory_bytes

    def _sum_s(self, read_bytes: int, written_bytes: int) -> float:
        """Seconds of checksums of bytes read (as often as the policy verifies) and written (if it
        keeps any)."""
        if self.rates.sum_bytes_s is None:
            return 0.0
        num_bytes = read_bytes * _CHECKED[self.policy.verify]
        num_bytes += written_bytes if keeps_sums(self.policy) else 0
        return num_bytes / self.rates.sum_bytes_s

    def _add(self, lane: str, seconds: float) -> None:
        self._part.lanes[lane] += seconds

    def _count(self, edge: str, num_bytes: int) -> None:
        self._moved[edge][self._label] += num_bytes * self._part.times

    # ---- sums ------------------------------------------------------------------------------------

    def _total_s(self, part: _PhasePart) -> float:
        """Seconds of a part."""
        lanes = part.lanes
        together = [lanes[each] for each in (DOWN, UP, NETWORK, NEAR)]
        disk = [lanes[READ], lanes[WRITE]]
        together += disk if self.rates.is_disk_duplex else [sum(disk)]
        program_s = lanes[MATHS] + part.waited_s
        together += [program_s, lanes[KERNELS]] if self.is_gpu else [program_s + lanes[KERNELS]]
        longest = max(together)
        filling_s = (sum(together) - longest) / max(1, part.num_items)
        return max(longest + filling_s, self._memory_s(part))

    def _memory_s(self, part: _PhasePart) -> float:
        """Seconds of host memory beside an accelerator, whose copies and kernels share it."""
        return part.shared_bytes / self.rates.host_memory_bytes_s if self.is_gpu else 0.0

    def _said(self, parts: Sequence[_PhasePart]) -> Forecast:
        seconds = dict.fromkeys(PHASES, 0.0)
        busy: dict[str, dict[str, float]] = {}
        limits_s = dict.fromkeys(("compute", *_RESOURCES.values()), 0.0)
        lanes_s = collections.defaultdict[str, float](float)
        for part in parts:
            seconds[part.phase] += part.times * self._total_s(part)
            for lane, lane_s in self._lanes_of(part):
                lanes_s[lane] += part.times * lane_s
                shown = (
                    MATHS if lane == KERNELS and not self.is_gpu else lane
                )  # they share the cores
                by_phase = busy.setdefault(shown, {})
                by_phase[part.phase] = by_phase.get(part.phase, 0.0) + part.times * lane_s
        for lane, lane_s in lanes_s.items():
            resource = _RESOURCES.get(lane, "compute")
            limits_s[resource] = max(limits_s[resource], lane_s)
        moved = {edge: dict(by_phase) for edge, by_phase in self._moved.items()}
        payloads = {among: dict(by_phase) for among, by_phase in self._payloads.items()}
        return Forecast(seconds, moved, payloads, busy, limits_s)

    def _lanes_of(self, part: _PhasePart) -> Iterator[tuple[str, float]]:
        """The lanes of a part, reads and writes as one where the disk does one at a time."""
        is_duplex = self.rates.is_disk_duplex
        for lane, lane_s in part.lanes.items():
            yield (DISK if lane in (READ, WRITE) and not is_duplex else lane), lane_s
        if part.lanes[KERNELS] and (memory_s := self._memory_s(part)):
            yield MEMORY, memory_s
