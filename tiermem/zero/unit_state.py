"""LiveUnit: a unit of a living model: its state machine, its memory, and the transfers of its values."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tiermem.swap.accelerator import current_stream, is_accelerator, new_stream, on, record
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move
from tiermem.swap.native import NORMAL, URGENT
from tiermem.swap.ranges import round_up
from tiermem.swap.store import TensorStore
from tiermem.swap.tier import ALIGNMENT
from tiermem.zero import absent
from tiermem.zero.absent import ZeroParamStatus, absent_part, mark
from tiermem.zero.collectives import Pending
from tiermem.zero.compute import narrow_part, widen
from tiermem.zero.gather import Gather
from tiermem.zero.unit import Unit

# ---- shared buffers and streams --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Passage:
    """The buffers and streams that the units of a model share."""

    store: TensorStore  # holds shards on NVMe; its recorder gets an event for every gather
    device: torch.device  # runs the maths
    slots: Pool | None  # buffers for full layouts (CPU); None: torch's allocator
    stages: Pool | None  # buffers for shards on their way to a gather or to the accelerator
    may_swap: bool  # the result of `can_swap_pointers`, on a CPU
    owner: torch.Stream | None  # allocates and frees full layouts on an accelerator
    copies: torch.Stream | None  # copies whole units to the accelerator

    @staticmethod
    def through(store: TensorStore, device: torch.device, slots: Pool | None, stages: Pool | None) -> Passage:
        """The passage for a device: streams for an accelerator, swapped pointers on a CPU."""
        if is_accelerator(device):
            return Passage(store, device, None, stages, False, new_stream(device), new_stream(device))
        return Passage(store, device, slots, stages, can_swap_pointers(), None, None)


def can_swap_pointers() -> bool:
    """Whether this torch can put other memory under a storage; each call tries it on two small storages."""
    swap = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
    if swap is None:
        return False
    lender, borrower = torch.zeros(4, dtype=torch.uint8).untyped_storage(), torch.UntypedStorage(0)
    try:
        swap(borrower, lender)
    except (RuntimeError, TypeError):
        return False
    return borrower.nbytes() == 4 and lender.nbytes() == 0


# ---- a unit's memory -------------------------------------------------------------------------------------------------


class UnitMemory:
    """The memory of one unit's full layout: one storage for the unit's life, whose bytes come and go.

    Autograd saves views of weights (`weight.t()`) in forward and reads them in backward. They point at the storage, so the
    storage has to stay:

        CPU            arena memory is put under the storage (`UntypedStorage._swap_data_ptr_`: microseconds, views follow). The
                       call is private to torch, so it is tested first; without it the storage is resized and bytes are copied.
        accelerator    the storage is resized to fill and to free; torch's caching allocator keeps the pages

    torch's allocator gives freed memory to the next request on the stream that allocated it. So on an accelerator one stream,
    the *owner*, allocates and frees all units. A stream that fills a unit waits for the owner. Before the owner frees a unit,
    it waits for every stream that has used the unit (from `use` to `end_use`).
    """

    def __init__(self, unit: Unit, passage: Passage) -> None:
        self.unit = unit
        self._owner = passage.owner
        self._users: dict[int, torch.Stream] = {}  # by id; streams whose work reads or writes the memory
        self._ends: dict[int, torch.Event] = {}  # by id; the end of a stream's work, where it is known
        self._accumulating: dict[int, torch.Stream] = {}  # by id; streams that made gradients since the last join
        self._filled: torch.Event | None = None  # the layout on an accelerator holds its bytes
        self._slots = passage.slots
        self._slot: Slot | None = None  # the arena's buffer, while the unit occupies it
        self._may_swap = passage.may_swap
        self._lender: torch.UntypedStorage | None = None  # the buffer's storage, while the unit has its pointer
        full = torch.empty(unit.full_numel, dtype=unit.full_dtype, device=passage.device)  # allocates no page
        self.full = full
        self.travels = narrow_part(full, unit.dtype) if unit.is_widened else full  # what a gather fills
        self._storage = full.untyped_storage()
        self.views = [full[s.full_offset : s.full_offset + s.numel].view(s.shape) for s in unit.shards]
        self.absent = [absent_part(s.shape, unit.dtype, passage.device) for s in unit.shards]
        self._storage.resize_(0)
        if unit.full_dtype != unit.dtype and unit.is_trainable:
            for shard in unit.shards:
                shard.param.grad_dtype = unit.dtype  # autograd accumulates in it, whatever dtype forward saw

    @property
    def has_streams(self) -> bool:
        """Whether it is on an accelerator, where several streams may use it."""
        return self._owner is not None

    def take_slot(self) -> Slot:
        """The arena's buffer for the full layout (CPU). The unit keeps it until `free`."""
        if self._slot is None:
            assert self._slots is not None
            self._slot = self._slots.take()
            assert self._slot is not None
        return self._slot

    def allocate_slot(self) -> None:
        """Puts the arena's buffer under the unit (CPU), with its content, or else allocates torch's memory."""
        if self._slots is None:
            self.allocate()
            return
        data = self.take_slot().tensor[: self.unit.full_bytes]
        if self._may_swap:
            lender = torch.from_numpy(data.numpy()).untyped_storage()
            self._storage._swap_data_ptr_(lender)  # type: ignore[attr-defined]
            self._lender = lender
        else:
            self.allocate()
            self.full.view(torch.uint8).copy_(data)

    def hold(self, slot: Slot) -> None:
        """Makes an arena buffer the unit's memory for life, content undefined (CPU, resident units)."""
        data = slot.tensor[: self.unit.full_bytes].numpy()
        self.full = torch.from_numpy(data).view(self.unit.full_dtype)  # in a storage of its own: `leave_to_parent`
        self.views = [self.full[s.full_offset : s.full_offset + s.numel].view(s.shape) for s in self.unit.shards]

    def allocate(self, filled_on: torch.Stream | None = None) -> None:
        """Allocates the full layout in torch's own memory, content undefined.

        filled_on: the accelerator stream that fills it; default: the current one.
        """
        if self._owner is None:
            self._storage.resize_(self.unit.full_bytes)
            return
        stream = filled_on or current_stream(self._owner.device)
        with on(self._owner):
            self._storage.resize_(self.unit.full_bytes)
        stream.wait_stream(self._owner)
        self._users[stream.stream_id] = stream

    def end_filling(self, filled: torch.Event, stream: torch.Stream) -> None:
        """Sets the event after which `stream` has filled the memory."""
        self._filled = self._ends[stream.stream_id] = filled

    def use(self) -> None:
        """Registers the current stream as a user, from the time when the memory is filled. Does nothing on a CPU."""
        if self._owner is not None:
            stream = current_stream(self._owner.device)
            self._ends.pop(stream.stream_id, None)
            if stream.stream_id not in self._users:
                self._users[stream.stream_id] = stream
                if self._filled is not None:
                    stream.wait_event(self._filled)

    def end_use(self) -> None:
        """Ends the current stream's use, after the work that it has been given until now."""
        if self._owner is not None:
            stream = current_stream(self._owner.device)
            if stream.stream_id in self._users:
                self._ends[stream.stream_id] = record(stream)

    def note_gradient(self) -> None:
        """Notes that a gradient of the unit was accumulated on the current stream."""
        assert self._owner is not None
        stream = current_stream(self._owner.device)
        self._accumulating[stream.stream_id] = stream

    def join(self) -> None:
        """Lets the current stream wait for all other streams that use the memory or accumulated its gradients."""
        if self._owner is not None:
            stream = current_stream(self._owner.device)
            for other in (*self._users.values(), *self._accumulating.values()):
                if other.stream_id != stream.stream_id:
                    stream.wait_stream(other)
            self._accumulating.clear()

    def free(self) -> None:
        """Releases the bytes. Nothing is written to any tier."""
        if self._lender is not None:
            self._storage._swap_data_ptr_(self._lender)  # type: ignore[attr-defined]
            self._lender = None
        elif self._owner is None:
            self._storage.resize_(0)
        else:
            for number, stream in self._users.items():
                if number in self._ends:
                    self._owner.wait_event(self._ends[number])
                else:
                    self._owner.wait_stream(stream)
            self._users.clear()
            self._ends.clear()
            self._filled = None
            with on(self._owner):
                self._storage.resize_(0)
        if self._slot is not None:
            assert self._slots is not None
            self._slots.give_back(self._slot)
            self._slot = None

    def sees(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of this memory."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata == self._storage._cdata


# ---- the state machine -----------------------------------------------------------------------------------------------


class UnitState(enum.Enum):
    """The memory that a unit occupies beside its place at rest (its home); see the diagram of LiveUnit."""

    HOME = enum.auto()  # none
    READING = enum.auto()  # a buffer; the shard is being read into it from NVMe
    GATHERING = enum.auto()  # its full layout; the parts of all ranks are being received in it
    COPYING = enum.auto()  # its full layout on the accelerator; the shard is being copied into it
    PRESENT = enum.auto()  # its full layout, which the parameters show


_STATUS = {UnitState.HOME: ZeroParamStatus.NOT_AVAILABLE, UnitState.PRESENT: ZeroParamStatus.AVAILABLE}


class _Gathering(NamedTuple):
    """The exchange under way, and when it began."""

    pending: Pending
    start_ns: int


class LiveUnit:
    """One unit: its state, and the number of its users.

        parts on several ranks, or 8-bit blocks    HOME --read--> READING --gather--> GATHERING --land--> PRESENT
        one shard, CPU                             HOME --read--> READING --land--> PRESENT
        one shard, accelerator                     HOME --read--> READING --copy--> COPYING --land--> PRESENT
        one shard in memory, CPU, widened          HOME --copy--> COPYING --land--> PRESENT
        from any state                             --drop--> HOME

    A shard that rests in memory needs no `read`. `land` calls `copy` for a unit in READING. Ranks may call `read` at different
    times. `gather` is collective: every rank calls it for the same units in the same order, so it waits for the read if need
    be. It copies the shard into the full layout (in the dtype that the maths sees). On a CPU the shard's buffer is free before
    the exchange begins. After an error the caller has to drop the unit. The prefetcher decides which units are fetched.

    Outside PRESENT a parameter's data is a zero-stride NaN expanded to the true shape: shape and numel stay right, and writes
    raise (absent.py).

    On an accelerator `copy` runs on its own stream, which waits only for the memory that it fills. The stream that computes
    waits for the copy's event. The unit keeps the event of the last read from host memory until a writer asks (`await_home`). A
    buffer is given back when the copy out of it has ended.

    Args:
        entry: its shard's name in the store, when the shard rests on NVMe.
        shard: its shard, flat, when the shard rests in memory.
        gather: brings the parts together; None: the unit is present in the form in which it rests.
    """

    def __init__(
        self,
        unit: Unit,
        memory: UnitMemory,
        passage: Passage,
        entry: str | None,
        shard: torch.Tensor | None,
        gather: Gather | None = None,
    ) -> None:
        self.unit = unit
        self.memory = memory
        self.entry = entry
        self.shard = shard
        self._gather = gather
        self._passage = passage
        self.state = UnitState.PRESENT if unit.is_resident else UnitState.HOME
        self.num_users = 0  # modules in forward, and uses in backward, that need it now
        self._is_kept = False  # present outside the prefetcher's buffers
        self._stage: Slot | None = None  # holds the shard on its way to a gather or to the accelerator
        self._coming: Move | _Gathering | None = None  # the transfer of READING or GATHERING
        self._home_read: torch.Event | None = None  # the accelerator has read the shard in host memory
        self._params = [shard.param for shard in unit.shards]
        self._changing = [] if unit.is_resident else self._params  # their class shows whether the unit has users
        self._out: set[int] = set()  # parameters that hold their own copy (access.py)
        self._point()

    @property
    def is_streamed(self) -> bool:
        """Whether it is fetched and evicted."""
        return not (self.unit.is_resident or self._is_kept)

    @property
    def is_present(self) -> bool:
        """Whether the parameters show the full layout."""
        return self.state is UnitState.PRESENT

    @property
    def is_gathered(self) -> bool:
        """Whether it is gathered: from the shards of all ranks, or from 8-bit blocks."""
        return self._gather is not None

    @property
    def reads(self) -> bool:
        """Whether fetching it begins with a read from NVMe."""
        return self.entry is not None and (self._gather is None or self._gather.needs_shard)

    @property
    def is_staged(self) -> bool:
        """Whether its read goes into a stage rather than straight into the full layout."""
        return self._gather is not None or self._passage.slots is None

    @property
    def holds_stage(self) -> bool:
        """Whether it occupies a stage now."""
        return self._stage is not None

    @property
    def move(self) -> Move | None:
        """The read under way, or None."""
        return self._coming if isinstance(self._coming, Move) else None

    # ---- transitions -------------------------------------------------------------------------------------------------

    def read(self, is_urgent: bool) -> None:
        """HOME -> READING: starts the read of the shard. The caller ensures that a buffer is free."""
        self._check(UnitState.READING, UnitState.HOME)
        assert self.entry is not None
        into = self._take_stage() if self.is_staged else self.memory.take_slot()
        first = 0 if self.is_staged or not self.unit.is_widened else self.unit.full_bytes - self.unit.shard_bytes
        data = into.tensor[first : first + round_up(self.unit.shard_bytes, ALIGNMENT)]
        self._coming = self._passage.store.read([(self.entry, 0, data)], self.entry, URGENT if is_urgent else NORMAL)
        self._become(UnitState.READING)

    def use(self) -> None:
        """PRESENT: the current stream uses the unit from now on."""
        self.memory.use()

    def promote(self) -> None:
        """READING: raises the priority of the read, which is needed at once. Other states: does nothing."""
        if isinstance(self._coming, Move):
            self._coming.promote()

    def gather(self) -> None:
        """HOME or READING -> GATHERING: starts the exchange. Collective; waits only for the read. Raises OSError, RankLost."""
        self._check(UnitState.GATHERING, UnitState.HOME, UnitState.READING)
        assert self._gather is not None
        self._await_read()
        start_ns = time.monotonic_ns()
        self.memory.allocate_slot()
        self._gather.put(self.shard if self.shard is not None else self._staged())
        if self._passage.copies is not None:
            self._home_read = record(current_stream(self._passage.device))  # the stage is given back in `land`
        else:
            self.give_stage_back()
        self._coming = _Gathering(self._gather.start(), start_ns)
        self._become(UnitState.GATHERING)

    def copy(self) -> None:
        """HOME or READING -> COPYING: waits for the read, starts the copy of the unit to the accelerator. Raises OSError.

        On a CPU it widens a shard that rests in memory.
        """
        self._check(UnitState.COPYING, UnitState.HOME, UnitState.READING)
        self._await_read()
        shard, copies = self.shard if self.shard is not None else self._staged(), self._passage.copies
        assert shard is not None
        if copies is None:
            self.memory.allocate_slot()
            self.memory.full.copy_(shard)
        else:
            self.memory.allocate(filled_on=copies)
            with on(copies):
                self.memory.travels.copy_(shard, non_blocking=True)
                widen(self.memory.full, self.memory.travels)
            self._home_read = record(copies)
            self.memory.end_filling(self._home_read, copies)
        self._become(UnitState.COPYING)

    def land(self) -> None:
        """READING, GATHERING or COPYING -> PRESENT: waits for the bytes and shows them. Blocks; raises OSError, RankLost."""
        self._check(UnitState.PRESENT, UnitState.READING, UnitState.GATHERING, UnitState.COPYING)
        if isinstance(self._coming, _Gathering):
            gathering, self._coming = self._coming, None
            self._await_gather(gathering)
            widen(self.memory.full, self.memory.travels)
            if self._passage.copies is not None:
                stream = current_stream(self._passage.device)
                self.memory.end_filling(record(stream), stream)
        elif self.state is UnitState.READING and self._passage.copies is None:
            self._await_read()
            self.memory.allocate_slot()
            widen(self.memory.full, self.memory.travels)
        elif self.state is UnitState.READING:
            self.copy()
        self.memory.use()
        self.give_stage_back()
        self._show()

    def give_stage_back(self) -> None:
        """Gives the buffer of the shard back, after the accelerator has read it."""
        if self._stage is not None:
            self.await_home()
            assert self._passage.stages is not None
            self._passage.stages.give_back(self._stage)
            self._stage = None

    def drop(self) -> None:
        """Any state -> HOME. Cancels a read under way; waits for an exchange under way. Raises RankLost."""
        coming, self._coming = self._coming, None
        try:
            if isinstance(coming, _Gathering):
                self._await_gather(coming)
            elif coming is not None:
                coming.cancel()
        finally:
            before = self.state
            self._become(UnitState.HOME)
            if before is UnitState.PRESENT:
                self._point()
            self.give_stage_back()
            self.memory.free()

    def keep(self, fill: Callable[[UnitMemory], None]) -> None:
        """HOME -> PRESENT: `fill` fills it in torch's own memory. It is not streamed until `end_keeping`."""
        self._check(UnitState.PRESENT, UnitState.HOME)
        self.memory.allocate()
        fill(self.memory)
        self._is_kept = True
        self._show()

    def end_keeping(self) -> None:
        """Ends a `keep`, also one that failed: the unit returns to HOME."""
        self._is_kept = False
        self.drop()
        self.let_all_go()

    # ---- the place at rest -------------------------------------------------------------------------------------------

    def await_home(self) -> None:
        """Blocks until no copy to the accelerator reads the shard in host memory. Call it before the shard is written."""
        if self._home_read is not None:
            self._home_read.synchronize()
            self._home_read = None

    def outdate(self) -> None:
        """Notes that the weights are about to change where they rest: a second copy of them is not used again."""
        if self._gather is not None:
            self._gather.outdate()

    # ---- users -------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Adds a user. The parameters are ordinary ones until every `hold` is let go."""
        self.num_users += 1
        if self.num_users == 1:
            absent.wake(self._changing)
            self._widen_view()

    def let_go(self) -> None:
        """Removes a user."""
        if self.num_users > 1:
            self.num_users -= 1
        else:
            self.let_all_go()

    def let_all_go(self) -> None:
        """Removes all users: the parameters rest (absent.py)."""
        if self.num_users:
            self.memory.end_use()
        self.num_users = 0
        self._widen_view()
        absent.rest(self._changing)

    def take_out(self, index: int, value: torch.Tensor) -> None:
        """Gives one parameter its own copy of the values until `put_back`, whatever the state of the unit."""
        param = self._params[index]
        self._changing = [each for each in self._changing if each is not param]
        absent.wake([param])
        self._out.add(index)
        _point([param], [value])
        mark([param], ZeroParamStatus.AVAILABLE)

    def put_back(self, index: int) -> None:
        """Ends a `take_out`; does nothing for a parameter that was not taken out."""
        if index not in self._out:
            return
        param = self._params[index]
        self._out.remove(index)
        _point([param], [(self.memory.views if self._is_shown else self.memory.absent)[index]])
        self._mark([param])
        self._changing = [*self._changing, param]
        if not self.num_users:
            absent.rest([param])

    def part_with(self) -> None:
        """Makes the unit's parameters ordinary ones for good."""
        absent.wake(self._changing)
        self._changing = []

    def leave_to_parent(self) -> None:
        """PRESENT -> HOME in a forked child, which has no arena. In any state the parameters rest, so that calls are refused.

        A graph that the parent made reads zeros, which take no memory, until a hook refuses its backward.
        """
        self.shard = None
        if self.is_present:
            self._become(UnitState.HOME)
            self._point()
            if self._passage.may_swap:
                zeros = torch.from_numpy(np.zeros(self.unit.full_bytes, np.uint8)).untyped_storage()
                self.memory.full.untyped_storage()._swap_data_ptr_(zeros)  # type: ignore[attr-defined]
        absent.rest(self._params)

    # ---- steps of transitions ----------------------------------------------------------------------------------------

    def _check(self, to: UnitState, *states: UnitState) -> None:
        if self.state not in states:
            raise RuntimeError(f"unit {self.unit.name!r} cannot go from {self.state.name} to {to.name}")

    def _become(self, state: UnitState) -> None:
        self.state = state
        self._mark([p for i, p in enumerate(self._params) if i not in self._out] if self._out else self._params)

    def _mark(self, params: Sequence[nn.Parameter]) -> None:
        mark(params, _STATUS.get(self.state, ZeroParamStatus.INFLIGHT))

    def _show(self) -> None:
        """Makes the parameters show the full layout; its bytes are complete, on an accelerator in stream order."""
        self._become(UnitState.PRESENT)
        self._point()

    @property
    def _is_shown(self) -> bool:
        """Whether the parameters show the full layout. Widened ones do while a module holds them, else their dtype at rest."""
        return self.is_present and (not self.unit.is_widened or self._is_kept or self.num_users > 0)

    def _widen_view(self) -> None:
        """After a change of users: widened parameters that are present show the dtype of the maths, or that at rest."""
        if self.unit.is_widened and self.is_present:
            self._point()

    def _point(self) -> None:
        """Points the parameters at the full layout, or at NaN; skips parameters that hold their own copy."""
        params, tensors = self._params, self.memory.views if self._is_shown else self.memory.absent
        if self._out:
            inside = [i for i in range(len(params)) if i not in self._out]
            params, tensors = [params[i] for i in inside], [tensors[i] for i in inside]
        _point(params, tensors)

    def _await_read(self) -> None:
        if isinstance(self._coming, Move):
            move, self._coming = self._coming, None
            move.wait()

    def _await_gather(self, gathering: _Gathering) -> None:
        wait_ns = time.monotonic_ns()
        self.memory.join()  # this rank's part may have been copied on another stream
        gathering.pending.wait()
        self.memory.use()
        end_ns, name, recorder = time.monotonic_ns(), self.unit.name, self._passage.store.recorder
        recorder.add("wait", f"gather {name}", wait_ns, end_ns)
        recorder.add("gather", name, gathering.start_ns, end_ns, self.unit.full_bytes)

    def _take_stage(self) -> Slot:
        assert self._passage.stages is not None and self._stage is None
        self._stage = self._passage.stages.take()
        assert self._stage is not None
        return self._stage

    def _staged(self) -> torch.Tensor | None:
        return None if self._stage is None else self._stage.tensor[: self.unit.shard_bytes].view(self.unit.rests_as)


def _point(params: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # a resting parameter would ask its owner (absent.py)
        for param, tensor in zip(params, tensors, strict=True):
            param.data = tensor
