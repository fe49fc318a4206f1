"""Steps: the training steps of one rank as tasks, in the order in which the library issues them.

    forward    per use:  read shard (disk) -> gather (network) -> copy to the GPU (link) -> maths
               per checkpointed block whose input moves: copy from the GPU (link) -> write (disk).
               The maths of the block after the next one waits for it
    backward   per use:  the same as in forward; a block's input comes back (disk, link) while the block behind it computes.
               Then per bucket: pack -> reduce (network), while backward continues. At most two
               buckets are in flight: the oldest ends before a third begins. Then: add -> copy to
               the host -> accumulate at home -> write (disk)
    step       per tile: read -> gradients, where they rest on a GPU (link) -> kernel -> write, through a fixed number of
               buffers; a tile that a GPU steps: read -> copy to the GPU (link) -> maths -> copy
               back (link). The first reads begin with backward, behind all other transfers. After
               the tiles, the first units of the next forward are read. With step_in_backward a
               unit's tiles are stepped when its gradients arrive, and backward waits for them
    overlap    with "forward", the program waits for the tiles of resident units alone. The others follow in the order of the
               next forward, behind its reads; a unit waits for its tiles and takes its weights from
               memory, and backward waits for all writes. (In a run, a unit whose weights are
               written before they are wanted reads them.) With "backward" units are stepped when
               their gradients are home, as many of them as the disk, or the kernels of states in
               memory, have time for under the maths of backward; the next forward reads their
               weights

With accumulation "layers" the maths of a use, and the adding of its gradients, come once for each
micro-batch between one fetch and the next; blocks are computed again in backward
(run/layerwise.py).

Lanes: `disk` (or `disk read` and `disk write` for a duplex disk), `network`, `near network` within
    a node, `link down`,
`link up`, `maths`, and with a GPU `kernels`. On a CPU, kernels and maths share the cores and so the
lane `maths`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tiermem.forecast.course import Course
from tiermem.forecast.loads import (
    Send,
    TileLoad,
    Use,
    gathers,
    gradient_traffic,
    reductions,
    tile_loads,
    updates,
)
from tiermem.forecast.rates import Task
from tiermem.plans.plan import keeps_secondary
from tiermem.policy import Tier
from tiermem.units.state_layout import keeps_sums
from tiermem.units.unit import Unit
from tiermem.weights.prefetcher import Order, Prefetcher, limits_of
from tiermem.weights.unit_state import UnitState
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
MATHS = "maths"
KERNELS = "kernels"
MEMORY = "host memory"
TILE = "tile"
"""The name of the tasks that are kernels of steps."""

_BEHIND = 1  # priority of the head start's reads
_GRAD_BUFFERS = 2
# fraction of the bytes read whose checksums are computed
_CHECKED = {"always": 1.0, "sample": 1 / 16, "resume": 0.0}


class _Reducing(NamedTuple):
    """A bucket of gradients that is being reduced."""

    bucket: Bucket
    sent: int  # the last task of its reduction
    is_first: bool  # whether this is the first micro-batch of the step
    is_last: bool  # whether this is the last bucket of its unit


class StepBuilder:
    """Adds tasks to a list and keeps the numbers of those that later tasks wait for."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._rates = course.rates
        self._kernels = KERNELS if course.is_gpu else MATHS  # their lane
        self._units = course.plan.division.units
        self._tasks: list[Task] = []
        self._phase = ""
        self._last = -1  # the program's latest task: its next tasks come after it
        self._arrivals: dict[int, int] = {}  # unit -> the task after which the unit is present
        self._loads = tile_loads(
            self._units, course.plan, course.policy, course.topology.shard_rank, course.most_tiles
        )
        self._played = [_PlayedUnit(unit, self, course) for unit in self._units]
        again = [use.units for use in reversed(course.uses) if use.reads_again]
        order = Order(self._streamed([use.units for use in course.uses]), self._streamed(again))
        self._prefetcher = Prefetcher(self._played, order, limits_of(course.plan, course.policy))
        self._begun: list[int] = []  # the head start's tasks, which read the first tiles
        self._grad_writes: list[int] = []
        self._unchecked: set[int] = set()  # units that were read and not used yet
        self._under_way: list[_Reducing] = []  # oldest first
        blocks = [use.block for use in course.uses if use.block]
        self._blocks = list(dict.fromkeys(blocks)) if course.input_home is not None else []
        self._away: dict[str, int] = {}  # block -> the task after which its input is at its home
        self._coming: dict[str, int] = {}  # block -> the task after which its input is back
        self._taken: set[str] = set()  # blocks whose inputs are back
        # unit -> the last kernel of its step, which the next fetch waits for
        self._stepping: dict[int, int] = {}
        self._step_writes: list[int] = []  # of a step that goes on, which backward waits for
        self._whole, begun = course.stepped_early(self._loads)
        self._early = self._whole | begun  # units that are stepped in backward, or begun there
        self._parts = dict(each for use in course.uses for each in use.parts.items())
        self._written: dict[int, int] = {}  # unit -> the last write of its step in backward

    def build(self, num_steps: int) -> list[Task]:
        """Returns the tasks of num_steps steps in a row. A phase's name ends with the number of its
        step: "forward 0"."""
        for number in range(num_steps):
            for micro in range(self._course.num_micro // self._course.at_once):
                self._forward(number)
                self._backward(number, micro)
            self._step(number)
        return self._tasks

    # ---- forward and backward --------------------------------------------------------------------

    def _forward(self, number: int) -> None:
        self._phase = f"{FORWARD} {number}"
        self._prefetcher.order.begin("training", has_backward=True)
        self._prefetcher.acquire()
        self._away.clear()
        *uses, last = self._course.uses
        for use in uses:
            self._pass(use)
        for use in uses if self._course.policy.accumulation == "layers" else ():
            if not use.reads_again:  # the tail's forward begins with the head's
                self._run(use.name, use.units, 0.0)
        self._pass(last)

    def _pass(self, use: Use) -> None:
        """Adds a use's forward. A block's input leaves before it."""
        if use.block in self._blocks and use.block not in self._away:
            self._send_input(use.block)
        self._run(use.name, use.units, use.forward_s * self._course.at_once)

    def _backward(self, number: int, micro: int) -> None:
        self._phase = f"{BACKWARD} {number}"
        self._is_last = micro == self._course.num_micro // self._course.at_once - 1
        self._end_step()
        left = collections.Counter(index for use in self._course.uses for index in use.units)
        self._taken.clear()
        self._begin_tiles()
        for use in reversed(self._course.uses):
            if use.block in self._blocks and use.block not in self._taken:
                self._take_input(use.block)
            self._run(
                use.name,
                use.units if use.reads_again else (),
                use.backward_s * self._course.at_once,
            )
            for index in use.units:
                left[index] -= 1
                if not left[index] and self._units[index].is_trainable:
                    self._receive(self._units[index], is_first=micro == 0)
        for unit in self._units:
            # small resident units: at the end of backward
            if unit.is_trainable and unit.index not in left:
                self._receive(unit, is_first=micro == 0)
        while self._under_way:
            self._arrive()

    def _run(self, name: str, units: Sequence[int], seconds: float) -> None:
        """Adds one module's maths after its units are present. The prefetcher begins reads ahead
        before the maths."""
        needed = [self._played[index] for index in units]
        try:
            for played in needed:
                self._prefetcher.acquire(played)
        except RuntimeError as error:  # too few buffers
            raise ValueError(str(error)) from error
        for played in needed:
            self._prefetcher.release(played)
        arrivals = [self._arrivals[index] for index in units if index in self._arrivals]
        landing = [self._units[index].shard_bytes for index in units if index in self._unchecked]
        self._unchecked.difference_update(units)
        seconds += self._rates.use_s + self._sum_s(sum(landing), 0)
        self._last = self._add(name, MATHS, seconds, [self._last, *arrivals])

    # ---- inputs of checkpointed blocks -----------------------------------------------------------

    def _send_input(self, block: str) -> None:
        """Begins to send a block's input home. The program waits until the input before it is
        away."""
        course = self._course
        num_bytes = self._course.input_bytes
        before = next(reversed(self._away.values()), -1)
        self._last = self._add("input away", MATHS, 0.0, [self._last, before])
        away = self._last
        if course.is_gpu:
            away = self._cross(f"input of {block}", "link up", DEVICE_TO_HOST, num_bytes, away)
        if course.input_home is Tier.NVME:
            away = self._write(f"input of {block}", num_bytes, [away])
        self._away[block] = away

    def _take_input(self, block: str) -> None:
        """Makes the program wait for a block's input, and begins to bring the input of the block
        before. The last block's input has not been let go."""
        self._taken.add(block)
        self._last = self._add("input there", MATHS, 0.0, [self._last, self._coming.pop(block, -1)])
        place = self._blocks.index(block)
        if place:
            before = self._blocks[place - 1]
            num_bytes = self._course.input_bytes
            come = self._last
            if self._course.input_home is Tier.NVME:
                come = self._read(f"input of {before}", num_bytes, [come])
            if self._course.is_gpu:
                come = self._cross(
                    f"input of {before}", "link down", HOST_TO_DEVICE, num_bytes, come
                )
            self._coming[before] = come

    # ---- transitions of units --------------------------------------------------------------------

    def read_unit(self, unit: Unit) -> int:
        """Adds the read of a unit's shard, or the copy of it from the buffers of the step."""
        if stepped := self._stepped(unit):
            return self._put(
                f"new {unit.name}", 2 * unit.shard_bytes, [self._last, *stepped], is_beside=True
            )
        self._unchecked.add(unit.index)
        before = [self._last, self._written.pop(unit.index, -1)]
        return self._read(unit.name, self._fetched_bytes(unit), before)

    def _fetched_bytes(self, unit: Unit) -> int:
        return int(unit.shard_bytes * self._parts.get(unit.index, 1.0))

    def gather_unit(self, unit: Unit, read: int | None, has_second: bool) -> None:
        """Adds a unit's gather. The program waits for the unit's read first."""
        if before := [*self._stepped(unit), *([] if read is None else [read])]:
            self._last = self._add("read", MATHS, 0.0, [self._last, *before])
        sends = gathers(unit, self._course.policy, self._course.topology, has_second)
        self.copy_unit(unit, self._send(f"gather {unit.name}", sends, self._last))

    def copy_unit(self, unit: Unit, after: int | None = None) -> None:
        """Adds the copy of a unit to the GPU; without a GPU, the unit is present after `after`."""
        stepped = self._stepped(unit)
        after = self._last if after is None else after
        if not self._course.is_gpu and stepped:
            after = self._add("stepped", MATHS, 0.0, [after, *stepped], is_beside=True)
        self._arrivals[unit.index] = self._to_gpu(unit, after, *stepped)

    def _stepped(self, unit: Unit) -> list[int]:
        """The task after which a unit's new weights are in memory, once: what follows it waits for
        it, too."""
        return [self._stepping.pop(unit.index)] if unit.index in self._stepping else []

    def _to_gpu(self, unit: Unit, *after: int) -> int:
        """Adds the copy of a shard to the GPU; returns the first of `after` without a GPU, and for
        a shard that rests there."""
        if not self._course.is_gpu or self._course.plan.unit_homes.get(unit.index) is Tier.DEVICE:
            return after[0]
        return self._cross(
            f"to GPU {unit.name}", "link down", HOST_TO_DEVICE, self._fetched_bytes(unit), *after
        )

    def _cross(self, name: str, lane: str, edge: str, num_bytes: int, *after: int) -> int:
        """Adds a copy between HOST and the GPU."""
        return self._add(
            name, lane, num_bytes / self._rates.link_bytes_s, after, edge=edge, num_bytes=num_bytes
        )

    def _streamed(self, uses: Iterable[Sequence[int]]) -> list[int]:
        return [index for units in uses for index in units if self._played[index].is_streamed]

    # ---- gradients -------------------------------------------------------------------------------

    def _receive(self, unit: Unit, is_first: bool) -> None:
        """Starts the reductions of a unit's gradients. On a single rank they are accumulated at
        home at once."""
        course = self._course
        if course.topology.world == 1:
            self._bring_home(unit, is_first, self._last)
            return
        buckets = cut(unit, course.topology.num_shards, course.policy.reduce_bucket_numel)
        for number, bucket in enumerate(buckets):
            while len(self._under_way) >= MOST_UNDER_WAY:
                self._arrive()
            packed = (
                self._last
                if course.is_gpu
                else self._put(f"pack {unit.name}", 2 * bucket.num_bytes, [self._last])
            )
            self._goes_on(packed)
            sends = reductions(bucket, course.topology) * self._course.at_once
            sent = self._send(f"reduce {unit.name}", sends, packed)
            self._under_way.append(_Reducing(bucket, sent, is_first, number == len(buckets) - 1))

    def _arrive(self) -> None:
        """Ends the oldest reduction. After a unit's last bucket, its gradients are accumulated at
        home."""
        oldest = self._under_way.pop(0)
        unit = oldest.bucket.unit
        after = self._last
        if self._course.is_gpu:
            after = oldest.sent
        else:
            after = self._put(f"add up {unit.name}", oldest.bucket.num_bytes, [after, oldest.sent])
            self._goes_on(after)
        if oldest.is_last:
            self._bring_home(unit, oldest.is_first, after)

    def _bring_home(self, unit: Unit, is_first: bool, after: int) -> None:
        """Copies or adds this rank's part of a unit's gradients to its home; with step_in_backward,
        steps its tiles."""
        course = self._course
        if course.plan.grads is Tier.DEVICE:  # they are added up there
            each = gradient_traffic(
                course.policy.precision.grad_dtype(unit.dtype), self._rates.step_passes
            )
            seconds = each * unit.shard_numel * course.at_once / self._rates.device_memory_bytes_s
            after = self._add(f"add {unit.name}", MATHS, seconds, [after])
            self._grad_writes.append(after)
            if self._is_last and unit.index in self._early:
                self._step_early(unit, [after])
            return
        if course.is_gpu:
            crossing = unit.shard_bytes * self._course.at_once
            after = self._cross(f"from GPU {unit.name}", "link up", DEVICE_TO_HOST, crossing, after)
        grad_bytes = unit.shard_numel * course.policy.precision.grad_dtype(unit.dtype).itemsize
        streamed = unit.shard_bytes + grad_bytes * (1 if is_first else 2)
        # of further micro-batches
        streamed += (self._course.at_once - 1) * (unit.shard_bytes + 2 * grad_bytes)
        if course.plan.grads is not Tier.NVME:
            after = self._put(f"add {unit.name}", streamed, [after])
        else:
            free = (
                self._grad_writes[-_GRAD_BUFFERS:][:1]
                if len(self._grad_writes) >= _GRAD_BUFFERS
                else []
            )
            if not is_first:
                after = self._read(f"gradients {unit.name}", grad_bytes, [after, *free])
            after = self._put(f"add {unit.name}", streamed, [after, *free])
            self._grad_writes.append(self._write(f"gradients {unit.name}", grad_bytes, [after]))
        self._goes_on(after)
        if course.policy.step_in_backward:
            self._prefetcher.outdate(self._played[unit.index])
            writes = self._tiles(
                [load for load in self._loads if load.unit == unit.index], [], [after]
            )
            self._last = self._add(f"stepped {unit.name}", MATHS, 0.0, [self._last, after, *writes])
        elif self._is_last and unit.index in self._early:
            self._step_early(unit, [after, *(self._grad_writes[-1:] if course.is_gpu else [])])

    def _step_early(self, unit: Unit, at_home: list[int]) -> None:
        """Steps a unit whose gradients are home while backward goes on."""
        before = self._phase
        self._phase = self._phase.replace(BACKWARD, STEP)
        loads = [self._course.early_load(load) for load in self._loads if load.unit == unit.index]
        writes = self._tiles(loads, [], at_home, self._step_writes)
        if unit.index in self._whole and self._course.plan.unit_homes[unit.index] is Tier.NVME:
            self._stepping.pop(unit.index)
            self._written[unit.index] = writes[-1]
        self._step_writes += writes
        self._phase = before

    def _goes_on(self, after: int) -> None:
        """Makes the program wait for a task on the CPU; with a GPU it does not wait."""
        if not self._course.is_gpu:
            self._last = after

    # ---- the step --------------------------------------------------------------------------------

    def _begin_tiles(self) -> None:
        """Adds the head start: reads of the first tiles' states and weights, after all other
        reads."""
        course = self._course
        has_none = self._begun or self._early or not course.plan.tiles.num
        if has_none or not course.policy.pipeline_read or course.policy.step_in_backward:
            return
        lasting = [load.lasting_bytes for load in self._in_order() if load.lasting_bytes]
        for num_bytes in lasting[: course.plan.tiles.num]:
            self._begun.append(self._read("tile", num_bytes, [self._last], _BEHIND))

    def _step(self, number: int) -> None:
        course = self._course
        waited = [self._last, *self._grad_writes, *self._arrivals.values()]
        self._phase = f"{STEP} {number}"
        self._grad_writes = []
        self._arrivals.clear()
        self._last = self._add("norm", MATHS, 0.0, waited)
        begun = self._begun
        self._begun = []
        if not course.policy.step_in_backward:
            self._prefetcher.empty()
            self._step_writes += self._tiles(
                self._in_order(), begun, [self._last], self._step_writes
            )
            if course.overlap == "none":
                self._end_step()
        if course.topology.num_shards > 1 or course.is_gpu:
            for unit in self._units:
                if unit.is_resident and unit.is_trainable:  # every rank's copy of it is updated
                    sends = updates(unit, course.policy, course.topology)
                    self._last = self._send(f"update {unit.name}", sends, self._last)
                    if course.plan.states is not Tier.DEVICE:  # else it is stepped where it is used
                        self._last = self._to_gpu(unit, self._last)
            self._last = self._add("gathered", MATHS, 0.0, [self._last])
        if not course.policy.step_in_backward:
            self._prefetcher.end_pass(may_gather=course.is_gpu)

    def _end_step(self) -> None:
        """Makes the program wait for the step that goes on, if there is one."""
        if self._step_writes:
            self._last = self._add("written", MATHS, 0.0, [self._last, *self._step_writes])
        self._step_writes = []
        self._stepping = {}

    def _in_order(self) -> list[TileLoad]:
        """The tiles that are stepped after backward: of resident units first, then in the order of
        the next forward."""
        expected = {unit: place for place, unit in enumerate(self._prefetcher.order.first_uses())}

        def place(load: TileLoad) -> int:
            return (
                -1 if self._units[load.unit].is_resident else expected.get(load.unit, len(expected))
            )

        loads = (load for load in self._loads if load.unit not in self._early)
        return sorted(
            (
                each.without_gradients() if each.unit in self._course.buffered else each
                for each in loads
            ),
            key=place,
        )

    def _tiles(
        self,
        loads: Sequence[TileLoad],
        begun: list[int],
        first: Sequence[int],
        earlier: Sequence[int] = (),
    ) -> list[int]:
        """Adds read, kernel and write of each tile after the tasks `first`. Returns the writes.

        earlier: the writes of tiles that had the buffers before.
        """
        policy = self._course.policy
        num_buffers = max(1, self._course.plan.tiles.num)
        goes_on = self._course.overlap != "none"
        if goes_on:  # the program gives all tiles to the run before it returns
            planning_s = sum(load.num_tiles for load in loads) * self._rates.tile_s
            self._last = self._add("plan of tiles", MATHS, planning_s, [self._last])
        kernels = list[int]()
        writes = list(earlier)
        pending = list(begun)
        # of tiles that were sent: each has its turn of the accelerator's buffers
        returns: list[int] = []
        for place, load in enumerate(loads, len(earlier)):
            after = list(first)
            is_awaited = not goes_on or self._units[load.unit].is_resident
            priority = 0 if is_awaited else _BEHIND
            if self._course.plan.tiles.num:
                after += (
                    writes[place - num_buffers : place - num_buffers + 1]
                    if place >= num_buffers
                    else []
                )
                after += [] if policy.pipeline_read else kernels[-1:]
            if pending and load.lasting_bytes:
                late_bytes = load.read_bytes - load.lasting_bytes
                come = [pending.pop(0), self._read("tile gradients", late_bytes, after, priority)]
            else:
                come = [self._read("tile", load.read_bytes, after, priority)]
            if load.brought_bytes:
                come = [
                    self._cross("to tile", "link up", DEVICE_TO_HOST, load.brought_bytes, *come)
                ]
            come += [] if policy.pipeline_write else writes[-1:]
            chain, num = (returns, self._course.plan.streams.num) if load.num_sent else (kernels, 1)
            turn = chain[-num:][:1] if len(chain) >= num else []
            chain.append(self._kernel(load, [*come, *turn], goes_on))
            ended = chain[-1]
            if load.down_bytes and not load.device_bytes:
                ended = self._cross(
                    "from tile", "link down", HOST_TO_DEVICE, load.down_bytes, ended
                )
            writes.append(self._write("tile", load.written_bytes, [ended]))
            if goes_on and self._units[load.unit].is_resident:
                self._last = self._add("stepped", MATHS, 0.0, [self._last, kernels[-1]])
            elif goes_on:
                self._stepping[load.unit] = kernels[-1]
        return writes[len(earlier) :]

    # ---- tasks -----------------------------------------------------------------------------------

    def _read(self, name: str, num_bytes: int, after: list[int], priority: int = 0) -> int:
        lane = "disk read" if self._rates.is_disk_duplex else "disk"
        seconds = num_bytes / self._rates.disk_read_bytes_s
        return self._add(
            f"read {name}",
            lane,
            seconds,
            after,
            edge=NVME_TO_HOST,
            num_bytes=num_bytes,
            priority=priority,
        )

    def _write(self, name: str, num_bytes: int, after: list[int]) -> int:
        lane = "disk write" if self._rates.is_disk_duplex else "disk"
        seconds = num_bytes / self._rates.disk_write_bytes_s
        return self._add(
            f"write {name}", lane, seconds, after, edge=HOST_TO_NVME, num_bytes=num_bytes
        )

    def _send(self, name: str, sends: Sequence[Send], after: int) -> int:
        """Adds collectives one after the other. Returns the last task, or `after` when there are
        none."""
        for send in sends:
            is_near = send.among == "within" and self._rates.near_bytes_s is not None
            rate = (self._rates.near_bytes_s if is_near else None) or self._rates.network_bytes_s
            edge = RANK_TO_NEAR if send.among == "within" else RANK_TO_RANK
            lane = "near network" if is_near else "network"
            sent = {"num_bytes": send.crossing_bytes, "payload_bytes": send.payload_bytes}
            after = self._add(
                name, lane, send.crossing_bytes / rate, [after], edge=edge, among=send.among, **sent
            )
        return after

    def _kernel(self, load: TileLoad, after: list[int], goes_on: bool) -> int:
        if shared_s := self._course.shared_s(load):
            after = [*after, self._add("memory of tile", MEMORY, shared_s, after)]
        if load.device_bytes:
            down = self._cross("to step", "link down", HOST_TO_DEVICE, load.down_bytes, *after)
            moved = (
                load.torch_bytes
                if self._rates.step_passes is None
                else load.device_bytes * self._rates.step_passes
            )
            issuing_s = load.num_tiles * self._rates.tile_s  # by Python, while the device works
            seconds = max(moved / self._rates.device_memory_bytes_s, issuing_s)
            stepped = self._add("tile on GPU", MATHS, seconds, [down])
            return self._cross("from step", "link up", DEVICE_TO_HOST, load.up_bytes, stepped)
        seconds = load.memory_bytes / self._rates.kernel_bytes_s
        seconds += 0.0 if goes_on else load.num_tiles * self._rates.tile_s
        seconds += self._sum_s(load.lasting_bytes, load.written_bytes)
        return self._add(TILE, self._kernels, seconds, after, is_beside=goes_on)

    def _sum_s(self, read_bytes: int, written_bytes: int) -> float:
        """Returns the seconds of checksums of bytes read (as often as the policy verifies) and
        written (if it keeps any)."""
        if self._rates.sum_bytes_s is None:
            return 0.0
        policy = self._course.policy
        num_bytes = read_bytes * _CHECKED[policy.verify] + written_bytes * keeps_sums(policy)
        return num_bytes / self._rates.sum_bytes_s

    def _put(self, name: str, memory_bytes: int, after: list[int], is_beside: bool = False) -> int:
        rate = self._rates.gradient_bytes_s or self._rates.kernel_bytes_s
        return self._add(name, self._kernels, memory_bytes / rate, after, is_beside=is_beside)

    def _add(self, name: str, lane: str, seconds: float, after: Sequence[int], **more: Any) -> int:
        """Adds a task after others; `more` are further fields of Task. Returns its number."""
        earlier = tuple(number for number in after if number >= 0)
        self._tasks.append(Task(name, lane, seconds, earlier, self._phase, **more))
        return len(self._tasks) - 1


class _PlayedUnit:
    """A unit for the real prefetcher, whose transitions add tasks instead of moving bytes."""

    def __init__(self, unit: Unit, builder: StepBuilder, course: Course) -> None:
        self.unit = unit
        self.state = UnitState.PRESENT if unit.is_resident else UnitState.HOME
        self.num_users = 0
        self.is_streamed = not unit.is_resident
        self.is_gathered = course.topology.num_shards > 1 or gathers_packed(unit, course.policy)
        self.is_staged = self.is_gathered or course.is_gpu
        self.is_stepped = True  # what is added waits for its step
        self._builder = builder
        self._is_on_nvme = course.plan.unit_homes.get(unit.index) is Tier.NVME
        self._keeps_second = keeps_secondary(course.policy, course.topology.num_shards)
        self._has_second = False  # whether there is a secondary copy in the node (hpZ)
        self._read: int | None = None  # the task of the read in flight

    @property
    def reads(self) -> bool:
        """Whether fetching the unit begins with a read."""
        return self._is_on_nvme and not self._has_second

    @property
    def holds_stage(self) -> bool:
        """Whether it occupies a shard buffer."""
        return self._read is not None and self.is_staged

    def read(self, is_urgent: bool) -> None:
        """HOME -> READING. For a unit that is not gathered, adds the copy to the GPU, too."""
        self.state, self._read = UnitState.READING, self._builder.read_unit(self.unit)
        if not self.is_gathered:
            self._builder.copy_unit(self.unit, self._read)

    def gather(self) -> None:
        """HOME or READING -> GATHERING."""
        self._builder.gather_unit(self.unit, self._read, self._has_second)
        self.state = UnitState.GATHERING
        self._read = None
        self._has_second = self._keeps_second

    def copy(self) -> None:
        """HOME -> COPYING."""
        self._builder.copy_unit(self.unit)
        self.state = UnitState.COPYING

    def land(self) -> None:
        """-> PRESENT."""
        self.state = UnitState.PRESENT
        self._read = None

    def drop(self) -> None:
        """-> HOME."""
        self.state = UnitState.HOME
        self._read = None

    def outdate(self) -> None:
        """Drops the secondary copy: the weights are about to change."""
        self._has_second = False

    def promote(self) -> None:
        """Does nothing: the simulation does not speed up urgent reads."""

    def use(self) -> None:
        """Does nothing: the maths is a separate task."""

    def hold(self) -> None:
        """Adds a user."""
        self.num_users += 1

    def let_go(self) -> None:
        """Removes a user."""
        self.num_users -= 1

    def let_all_go(self) -> None:
        """Does nothing: between uses a unit has no users."""
