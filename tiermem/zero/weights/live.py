"""LiveUnit: a unit while the model lives: its state, what it occupies now, and who needs it."""

from __future__ import annotations

import enum

import torch

from tiermem.swap.arena import Slot
from tiermem.swap.move import Move
from tiermem.zero.ranks.collectives import Pending
from tiermem.zero.unit import Unit
from tiermem.zero.weights import resting
from tiermem.zero.weights.gather import Gather
from tiermem.zero.weights.memory import UnitMemory


class UnitState(enum.Enum):
    """What a unit occupies; see the diagram in arrival.py."""

    HOME = enum.auto()
    FETCHED = enum.auto()
    GATHERED = enum.auto()
    PRESENT = enum.auto()


class LiveUnit:
    """One unit and what it occupies now."""

    def __init__(
        self,
        unit: Unit,
        memory: UnitMemory,
        entry: str | None,
        shard: torch.Tensor | None,
        gather: Gather | None = None,
    ) -> None:
        self.unit = unit
        self.memory = memory
        self.entry = entry  # its shard's name in the store, when it rests on NVME
        self.shard = shard  # its shard, flat, when that rests in memory
        self.gather = gather  # None: it rests as it is present
        self.state = UnitState.PRESENT if unit.is_resident else UnitState.HOME
        self.num_users = 0  # modules in forward and passes of backward that need it now
        self.slot: Slot | None = None  # holds the full layout (CPU)
        self.stage: Slot | None = None  # holds the shard on its way to a gather or to the GPU
        self.move: Move | None = None  # the read under way
        self.filled: torch.Event | None = None  # comes when the full layout on the accelerator holds its bytes
        self.home_read: torch.Event | None = None  # comes when the accelerator has read the shard in host memory
        self.pending: Pending | None = None  # the gather under way
        self.start_ns = 0  # of that gather
        self._streamed = [] if unit.is_resident else [shard.param for shard in unit.shards]

    @property
    def reads(self) -> bool:
        """Whether bringing the unit begins with a read from NVMe."""
        return self.entry is not None and (self.gather is None or self.gather.needs_shard)

    def await_home(self) -> None:
        """Waits until no copy to the accelerator reads the shard in host memory: whoever writes it calls this. Blocks."""
        if self.home_read is not None:
            self.home_read.synchronize()
            self.home_read = None

    def outdate(self) -> None:
        """The weights are about to change at home: what has been kept of them elsewhere is not gathered from again."""
        if self.gather is not None:
            self.gather.outdate()

    def hold(self) -> None:
        """Somebody needs the unit from now on: its parameters are ordinary ones until the last has let go."""
        if not self.num_users:
            resting.wake(self._streamed)
        self.num_users += 1

    def let_go(self) -> None:
        """The opposite of one `hold`."""
        if self.num_users > 1:
            self.num_users -= 1
        else:
            self.let_all_go()

    def let_all_go(self) -> None:
        """Nobody needs the unit any more, whoever held it: its parameters rest (resting.py)."""
        if self.num_users:
            self.memory.end_use()
        self.num_users = 0
        resting.rest(self._streamed)

    def take_out(self, index: int, value: torch.Tensor) -> None:
        """One parameter holds a copy of its own, whatever becomes of the unit, until `put_back`."""
        param = self.unit.shards[index].param
        self._streamed = [each for each in self._streamed if each is not param]
        resting.wake([param])
        self.memory.take_out(index, value)

    def put_back(self, index: int) -> None:
        """Ends a `take_out`; does nothing for a parameter that was not taken out."""
        if not self.memory.is_out(index):
            return
        param = self.unit.shards[index].param
        self.memory.put_back(index)
        self._streamed.append(param)
        if not self.num_users:
            resting.rest([param])

    def part_with(self) -> None:
        """The unit's parameters are ordinary ones for good."""
        resting.wake(self._streamed)
        self._streamed = []
