"""Course: everything that determines the tasks of a rank's step, and what follows from it alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tiermem.forecast.loads import TileLoad, Use, still_buffered
from tiermem.forecast.rates import Rates
from tiermem.plans.plan import Plan
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.topology import Topology
from tiermem.units.unit import Unit
from tiermem.weights.step_run import overlap_of


@dataclasses.dataclass(frozen=True)
class Course:
    """Everything that determines the tasks of a rank's step."""

    uses: Sequence[Use]
    plan: Plan
    policy: OffloadPolicy
    topology: Topology
    rates: Rates  # this rank's part of the node's rates
    is_gpu: bool
    num_micro: int  # micro-batches of a step
    most_tiles: int  # above this number, neighbouring tiles are merged
    input_bytes: int = 0  # of the input of a checkpointed block; 0: nothing is recomputed

    @property
    def input_home(self) -> Tier | None:
        """Where inputs of checkpointed blocks rest between forward and backward; None: they stay
        where the maths runs."""
        home = self.policy.activations if self.input_bytes else None
        return None if home is Tier.HOST and not self.is_gpu else home

    @property
    def overlap(self) -> str:
        """What a step runs beside: see `overlap_of`."""
        return overlap_of(self.policy, self.plan, self.is_gpu)

    @property
    def at_once(self) -> int:
        """Micro-batches that one fetch of a unit serves."""
        return self.num_micro if self.policy.accumulation == "layers" else 1

    @functools.cached_property
    def buffered(self) -> set[int]:
        """The units whose gradients on NVMe are still in memory after backward."""
        return still_buffered(self.plan, self.uses, self.is_gpu)

    def early_load(self, load: TileLoad) -> TileLoad:
        """What a step of a tile under backward moves."""
        return load if self.is_gpu else load.without_gradients()

    def stepped_early(self, loads: Sequence[TileLoad]) -> tuple[set[int], set[int]]:
        """The units that the disk has time to step under the maths of the last backward, and those
        that it begins there.

        Weights that backward fetches and gradients that it writes go first, then the unit whose
        gradients came last, which the next forward needs first. Of states in memory, the CPU's
        kernels have the time. loads: the tiles.
        """
        stepped: list[int] = []
        if self.overlap != "backward":
            return set(), set()
        plan = self.plan
        busy_s = 0.0  # until then: the disk or kernels
        end_s = 0.0  # and the maths
        is_begun = False
        last = {
            index: place for place, use in enumerate(reversed(self.uses)) for index in use.units
        }
        # units that are home, and the seconds that each takes
        waiting: list[tuple[int, float]] = []
        for place, use in enumerate(reversed(self.uses)):
            of_use = [plan.division.units[index] for index in use.units if last[index] == place]
            end_s += use.backward_s * self.at_once
            busy_s += sum(self._firm_s(unit, use.reads_again) for unit in of_use)
            while waiting and busy_s < end_s:
                index, seconds = waiting.pop()
                busy_s += seconds
                stepped.append(index)
            is_begun = busy_s > end_s
            busy_s = max(busy_s, end_s)
            for unit in of_use:
                of_unit = [self.early_load(load) for load in loads if load.unit == unit.index]
                if of_unit and (
                    plan.unit_homes.get(unit.index) is Tier.NVME or unit.index in plan.drafted
                ):
                    waiting.append((unit.index, sum(map(self._step_s, of_unit))))
        begun = set(stepped[-1:]) if is_begun else set()
        return set(stepped) - begun, begun

    def _step_s(self, load: TileLoad) -> float:
        """Seconds of the disk for a tile; of the CPU's kernels, if its states rest in memory."""
        if self.plan.states is Tier.NVME:
            return self._disk_s(load.read_bytes, load.written_bytes)
        return load.memory_bytes / self.rates.kernel_bytes_s

    def shared_s(self, load: TileLoad) -> float:
        """Seconds of HOST's memory for a tile, where some are sent to an accelerator while the CPU
        steps others; else 0."""
        if not self.plan.streams.num:
            return 0.0
        crossing = load.down_bytes + load.up_bytes if load.num_sent else 0
        return (load.memory_bytes + crossing) / self.rates.host_memory_bytes_s

    def _firm_s(self, unit: Unit, reads_again: bool) -> float:
        """Seconds of a unit's transfers in backward, beside those of its step."""
        read_bytes = (
            unit.shard_bytes
            if reads_again and self.plan.unit_homes.get(unit.index) is Tier.NVME
            else 0
        )
        is_written = unit.is_trainable and self.plan.grads is Tier.NVME
        grad_bytes = unit.shard_numel * self.policy.precision.grad_dtype(unit.dtype).itemsize
        return self._disk_s(read_bytes, grad_bytes if is_written else 0)

    def _disk_s(self, read_bytes: int, written_bytes: int) -> float:
        each = (
            read_bytes / self.rates.disk_read_bytes_s,
            written_bytes / self.rates.disk_write_bytes_s,
        )
        return max(each) if self.rates.is_disk_duplex else sum(each)
