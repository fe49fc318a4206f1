"""UnitMemory: the memory of one unit; the buffers, streams and threads that units share; reads that
a thread waits for."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

from tiermem.plans.plan import Buffers
from tiermem.swap.base.native import NORMAL, URGENT, Map
from tiermem.swap.base.side_threads import Result, SideThreads
from tiermem.swap.memory.accelerator import (
    activate,
    current_stream,
    is_accelerator,
    is_capturing,
    new_stream,
    on,
    record,
)
from tiermem.swap.memory.arena import Pool, Slot
from tiermem.swap.memory.device_memory import DeviceMemory, DevicePool
from tiermem.swap.program.run_read import RunRead
from tiermem.swap.store.move import Move
from tiermem.swap.store.store import TensorStore
from tiermem.units.compute import narrow_part
from tiermem.units.unit import Unit
from tiermem.weights.absent import absent_part
from tiermem.weights.step_run import StepRun

# ---- buffers for shards on their way -------------------------------------------------------------


class StagingBuffer(NamedTuple):
    """A buffer for a shard on its way to a gather or to the accelerator."""

    slot: Slot
    read: torch.Event | None
    """The end of the accelerator's last copy out of it, which the next read into it waits for."""


class StagingBuffers:
    """The buffers for shards on their way. Giving one back waits for nothing: each keeps the event
    of the last copy out of it.

    pool: the buffers; must outlive these.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._reads: dict[int, torch.Event] = {}  # by the buffer's offset

    def take(self) -> StagingBuffer:
        """A free buffer. The caller ensures that there is one."""
        slot = self.pool.take()
        assert slot is not None
        return StagingBuffer(slot, self._reads.pop(slot.offset, None))

    def give_back(self, buffer: StagingBuffer, read: torch.Event | None) -> None:
        """Takes a buffer back, out of which the accelerator copies until `read`; None: since its
        last event it did not."""
        read = read or buffer.read
        if read is not None:
            self._reads[buffer.slot.offset] = read
        self.pool.give_back(buffer.slot)

    def reset(self) -> None:
        """Takes every buffer back after an interrupt, when no read fills any of them. Blocks for
        copies out of them."""
        self.wait()
        self.pool.reset()

    def wait(self) -> None:
        """Blocks until the accelerator copies out of no buffer. Call it before their memory
        ends."""
        for read in list(self._reads.values()):
            read.synchronize()
        self._reads.clear()


LAYOUTS = "layout"
"""The kind of device memory that full layouts occupy whose bytes also rest elsewhere, as shards."""


class UnitSlots(DevicePool):
    """Equal slots for full layouts on an accelerator, carved from one slab, so that no piece of
    memory lies between them.

    owner: the stream that waits for the users of a slot before the slot is used again. Not for
        several threads.
    """

    def __init__(self, memory: DeviceMemory, buffers: Buffers, owner: torch.Stream) -> None:
        super().__init__(memory, *buffers, LAYOUTS)
        owner.wait_stream(current_stream(owner.device))  # in whose order the memory was freed

    def check_free(self) -> None:
        """Raises RuntimeError while a slot is in use: the memory cannot leave the device."""
        if (num_used := self.count - len(self._free)) > 0:
            raise RuntimeError(f"{num_used} units are in use: their memory cannot leave the device")


# ---- what units share ----------------------------------------------------------------------------


class Passage:
    """The buffers, streams and threads that the units of a model share.

    Args:
        store: holds shards on NVMe; its recorder gets an event for every gather.
        steps: the optimizer step that may be under way; shards are read through it.
        device: runs the maths.
        slots: buffers for full layouts (CPU); None: torch's allocator.
        staging: buffers for shards on their way to a gather or to the accelerator.
        wires: buffers of packed gathers.
        on_device: the plan's buffers for full layouts; used on an accelerator.
        nan_bytes: of the largest full layout whose memory comes and goes.
    """

    def __init__(
        self,
        store: TensorStore,
        steps: StepRun,
        device: torch.device,
        slots: Pool | None,
        staging: Pool | None,
        wires: Pool | None,
        on_device: Buffers,
        nan_bytes: int,
    ) -> None:
        is_accelerated = is_accelerator(device)
        self.store = store
        self.steps = steps
        self.device = device
        self.slots: Pool | None = None
        self.staging: StagingBuffers | None = None
        self._wires: Pool | None = None
        # the memory of shards that rest in the CPU's
        self.may_exchange = can_swap_pointers(torch.device("cpu"))
        self.may_swap = not is_accelerated and self.may_exchange  # that of full layouts
        # allocates and frees full layouts
        self.owner = new_stream(device) if is_accelerated else None
        self._may_carve = is_accelerated and can_swap_pointers(device)
        self.slab: UnitSlots | None = None
        # fills full layouts: copies and gathers
        self.copies = new_stream(device) if is_accelerated else None
        # One thread each, so that reads and copies keep their order.
        self.starter: SideThreads | None = None  # starts reads
        self.reader: SideThreads | None = None  # waits for reads
        self.use(slots, staging, wires, on_device)
        self._nan = Map(nan_bytes, is_nan=True).tensor() if self.may_swap and nan_bytes else None
        self.by_rows = False  # experts are expected to be used in part: reads leave their rows out
        self._is_outdated = True  # shards on the accelerator may have been written since `_written`
        self._written: torch.Event | None = None

    def use(
        self, slots: Pool | None, staging: Pool | None, wires: Pool | None, on_device: Buffers
    ) -> None:
        """Takes the buffers of a plan; those that the plan before had alone are free, and its
        `end_use` was called."""
        self.slots = slots if self.owner is None else None
        self._wires = wires
        if staging is None:
            self.staging = None
        elif self.staging is None or self.staging.pool is not staging:
            self.staging = StagingBuffers(staging)
        if self.slab is None and self._may_carve and on_device.num:
            assert self.owner is not None
            self.slab = UnitSlots(self.store.on_device, on_device, self.owner)
        if self.owner is not None and self.staging is not None and self.starter is None:
            self.starter, self.reader = (
                SideThreads(1, "tiermem-reads", functools.partial(activate, self.device))
                for _ in range(2)
            )

    def end_use(self, now: Buffers, on_device: Buffers) -> None:
        """Before buffers are given back: waits for copies out of them, and gives the slab back if
        another plan has another one. No unit is present. Blocks."""
        if self.staging is not None:
            self.staging.wait()
        if self.slab is not None and now != on_device:
            assert self.owner is not None
            current_stream(self.device).wait_stream(self.owner)
            self.slab.close()
            self.slab = None

    def filling(self) -> contextlib.AbstractContextManager[None]:
        """Inside, work on an accelerator goes to the stream that fills full layouts."""
        return on(self.copies)

    def nan_storage(self, num_bytes: int) -> torch.UntypedStorage | None:
        """Bytes of NaN, which take no memory, for views of weights that are not there (CPU). None:
        this torch has no way."""
        return (
            None
            if self._nan is None
            else torch.from_numpy(self._nan[:num_bytes].numpy()).untyped_storage()
        )

    def note_outdated(self) -> None:
        """Notes that weights are about to change where they rest."""
        self._is_outdated = True

    def await_written(self, shard: torch.Tensor) -> None:
        """Lets the stream that fills wait until the accelerator has written a shard, there or in
        host memory."""
        if self.copies is None:
            return
        if not is_accelerator(shard.device):
            if self.steps.copied is not None:
                self.copies.wait_event(self.steps.copied)
            return
        if self._is_outdated or self._written is None:
            self._written = record(current_stream(self.device))
            self._is_outdated = False
        self.copies.wait_event(self._written)

    def reset(self) -> None:
        """Takes every buffer back after an interrupt, when no unit has any of them. Blocks for
        transfers."""
        self.store.end_transfers()
        if self.owner is not None:
            for stream in (current_stream(self.device), self.copies):
                assert stream is not None
                self.owner.wait_stream(stream)
        for each in (self.slots, self.staging, self._wires, self.slab):
            if each is not None:
                each.reset()

    def close(self) -> None:
        """Ends the threads, and waits for copies out of the buffers. No read may be under way.
        Blocks."""
        for thread in (self.starter, self.reader):
            if thread is not None:
                thread.close()
        if self.staging is not None:
            self.staging.wait()
        if self.copies is not None:
            # before memory that it uses is freed
            current_stream(self.device).wait_stream(self.copies)


class StagedRead:
    """A shard's read from NVMe into a staging buffer, for an accelerator. It has the methods of a
    Move.

        starter    waits for the last copy out of the staging buffer -> starts the read
        reader     waits for the read -> starts the copy

    So no other thread waits for the accelerator before a read begins, and the copy begins when the
    bytes are there.

    Args:
        unit: whose shard it is, and `entry` the shard's name in the store.
        parts: bytes of the shard, which are read to the same places of the staging buffer.
        then: called on the reader's thread when the bytes have arrived; returns the end of the copy
            that it started, or None.
    """

    def __init__(
        self,
        passage: Passage,
        unit: int,
        entry: str,
        buffer: StagingBuffer,
        parts: Sequence[slice],
        is_urgent: bool,
        then: Callable[[], torch.Event | None],
    ) -> None:
        # the end of the copy; valid after `wait` or `cancel`
        self.copied: torch.Event | None = None
        ranges = [(entry, part.start, buffer.slot.tensor[part]) for part in parts]
        self._read = functools.partial(passage.steps.read, ranges, entry, unit)
        self._after = buffer.read
        self._then = then
        self._priority = URGENT if is_urgent else NORMAL
        self._is_cancelled = False
        self._move: Move | RunRead | None = None  # None until the read has been started
        self._lock = threading.Lock()  # guards the three above
        assert passage.starter is not None and passage.reader is not None
        self._reader = passage.reader
        self._ended = Result[None]()
        passage.starter.submit(self._begin)

    def wait(self) -> None:
        """Blocks until the bytes have arrived and `then` has returned. Raises OSError."""
        self._ended.result()
        if self._move is not None:
            self._move.wait()

    def promote(self) -> None:
        """Raises the priority of the read, which is needed at once. Does not block."""
        with self._lock:
            self._priority = URGENT
            move = self._move
        if move is not None:
            move.promote()

    def cancel(self) -> None:
        """Drops the read, unless it has ended, and waits until the helper threads have ended its
        work. Never raises OSError."""
        with self._lock:
            self._is_cancelled = True
            move = self._move
        if move is not None:
            move.cancel()
        self._ended.wait()

    def _begin(self) -> None:
        try:
            if self._after is not None:
                self._after.synchronize()
            with self._lock:
                if self._is_cancelled:
                    self._ended.end()
                    return
                self._move = self._read(self._priority)
            self._reader.submit(functools.partial(self._finish, self._move))
        except BaseException as error:
            self._ended.end(error=error)

    def _finish(self, move: Move | RunRead) -> None:
        try:
            if move.outcome() is None and not move.was_cancelled:
                self.copied = self._then()
            self._ended.end()
        except BaseException as error:
            self._ended.end(error=error)


def can_swap_pointers(device: torch.device) -> bool:
    """Whether this torch can put other memory under a storage on a device; each call tries it on
    small storages."""
    try:
        memory = torch.zeros(16, dtype=torch.uint8, device=device)
        borrower = torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
        lender = (
            _storage_at(memory.data_ptr(), device, 16)
            if is_accelerator(device)
            else memory.untyped_storage()
        )
        borrower._swap_data_ptr_(lender)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, TypeError):
        return False
    return borrower.nbytes() == 16 and lender.nbytes() == 0


def apart(data: torch.Tensor) -> torch.Tensor:
    """The same bytes of the CPU, in a storage of their own: other memory can be put under it
    alone."""
    return torch.from_numpy(data.view(torch.uint8).numpy()).view(data.dtype)


def _storage_at(address: int, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
    """A storage over memory that another object owns. The function is private to torch."""
    return cast(
        torch.UntypedStorage,
        torch._C._construct_storage_from_data_pointer(address, device, num_bytes),
    )


# ---- a unit's memory -----------------------------------------------------------------------------


class UnitMemory:
    """The memory of one unit's full layout: one storage for the unit's life, whose bytes come and
    go.

    Autograd saves views of weights (`weight.t()`) in forward and reads them in backward. They point
    at the storage, so the storage has to stay:

        CPU            arena memory is put under the storage (`UntypedStorage._swap_data_ptr_`: microseconds, views follow). The
                       call is private to torch, so it is tested first; without it the storage is
                       resized and bytes are copied. A view that a user has kept reads NaN after the
                       bytes have gone.
        accelerator    the same with slots of one slab. Without that call they have memory of torch's allocator: the storage is
                       resized.

    A unit that stays is given its memory for life (`held`): of the arena, or of a slab.

    Freed memory goes to the next unit, or request, at once. So on an accelerator one stream, the
    *owner*, stands for the memory of all units, and allocates what torch's allocator gives. A
    stream that fills a unit waits for the owner. Before a unit is freed, the owner waits for every
    stream that has used it (from `use` to `end_use`).
    """

    def __init__(self, unit: Unit, passage: Passage, held: torch.Tensor | None = None) -> None:
        self.unit = unit
        self._passage = passage
        self._owner = passage.owner
        self._allocated: torch.Event | None = None  # the owner may give the memory from here on
        # the accelerator has read the shard in host memory
        self._home_read: torch.Event | None = None
        # by id; streams whose work reads or writes the memory
        self._users: dict[int, torch.Stream] = {}
        # by id; the end of a stream's work, where it is known
        self._ends: dict[int, torch.Event] = {}
        # by id; streams that made gradients since the last join
        self._accumulating: dict[int, torch.Stream] = {}
        self._filled: torch.Event | None = None  # the layout on an accelerator holds its bytes
        self._slot: Slot | None = None  # the arena's buffer, while the unit occupies it
        self._slab_slot: Slot | None = None  # of the slab, while the unit occupies it
        self._may_swap = passage.may_swap
        self._is_held = held is not None  # its memory is there for life
        # the buffer's storage, while the unit has its pointer
        self._lender: torch.UntypedStorage | None = None
        self._nan: torch.UntypedStorage | None = None  # empty while its bytes are under the unit
        full = (
            torch.empty(0, dtype=unit.full_dtype, device=passage.device)
            if held is None
            else held.view(unit.full_dtype)
        )
        self.full = full
        self._storage = full.untyped_storage()
        if held is None:
            self.allocate()  # for the views; on a CPU no page is touched
            full.set_(self._storage, 0, (unit.full_numel,), (1,))
        # what a copy or a gather fills
        self.travels = narrow_part(full, unit.dtype) if unit.is_widened else full
        self.views = [
            full[s.full_offset : s.full_offset + s.numel].view(s.shape) for s in unit.shards
        ]
        self.absent = [absent_part(s.shape, unit.dtype, passage.device) for s in unit.shards]
        if unit.takes_buffer:
            self._nan = passage.nan_storage(unit.full_bytes)
        self.free()

    @property
    def slab(self) -> UnitSlots | None:
        """Carves its memory; None: torch's allocator does."""
        return None if self._is_held else self._passage.slab

    @property
    def _slots(self) -> Pool | None:
        return self._passage.slots

    @property
    def address(self) -> int:
        """Where it is now."""
        return self._storage.data_ptr()

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
        """Puts the arena's buffer under the unit (CPU), with its content, or else allocates torch's
        memory."""
        if self._slots is None or self._is_held:
            self.allocate()
            self.begin_filling()
            return
        data = self.take_slot().tensor[: self.unit.full_bytes]
        if self._may_swap:
            self._lender = torch.from_numpy(data.numpy()).untyped_storage()
            self._storage._swap_data_ptr_(self._lender)  # type: ignore[attr-defined]
        else:
            self.allocate()
            self.full.view(torch.uint8).copy_(data)

    def allocate(self, outside: bool = False) -> None:
        """Allocates the full layout, content undefined. On an accelerator `begin_filling` comes
        next.

        outside: in torch's own memory, beside the slab.
        """
        if self._is_held:
            return
        if self._owner is None:
            if self._nan is not None:
                self._storage._swap_data_ptr_(self._nan)  # type: ignore[attr-defined]
            self._storage.resize_(self.unit.full_bytes)
            return
        self._slab_slot = None if self.slab is None or outside else self.slab.take()
        if self._slab_slot is not None:
            memory = self._slab_slot.tensor
            self._lender = _storage_at(memory.data_ptr(), memory.device, self.unit.full_bytes)
            self._storage._swap_data_ptr_(self._lender)  # type: ignore[attr-defined]
        else:
            with on(self._owner):
                self._storage.resize_(self.unit.full_bytes)
        self._allocated = record(self._owner)

    def begin_filling(self) -> None:
        """Lets the current stream wait for the memory, which it fills. Does nothing on a CPU, and
        for memory for life."""
        if self._owner is not None and not self._is_held:
            assert self._allocated is not None
            stream = current_stream(self._owner.device)
            stream.wait_event(self._allocated)
            self._users[stream.stream_id] = stream

    def end_filling(self, filled: torch.Event) -> None:
        """Sets the event after which the stream that fills full layouts has filled the memory."""
        assert self._passage.copies is not None
        self._filled = self._ends[self._passage.copies.stream_id] = filled

    def await_filled(self) -> None:
        """Lets the current stream wait for the last event of `end_filling`."""
        assert self._owner is not None and self._filled is not None
        current_stream(self._owner.device).wait_event(self._filled)

    def note_home_read(self, read: torch.Event) -> None:
        """Notes the event after which the accelerator has read the shard where it rests."""
        self._home_read = read

    def await_home(self) -> None:
        """Blocks until the accelerator has read the shard where it rests. Call it before the shard
        is written."""
        if self._home_read is not None:
            if not self._home_read.query():
                self._home_read.synchronize()
            self._home_read = None

    def use(self) -> None:
        """Registers the current stream as a user, from the time when the memory is filled. Does
        nothing on a CPU.

        Raises RuntimeError while a graph is captured, if the memory comes and goes.
        """
        if self._owner is not None:
            if not self._is_held and is_capturing(self._owner.device):
                raise RuntimeError(
                    f"a graph is being captured with unit {self.unit.name!r}, whose weights have "
                    "another address after each "
                    "fetch: capture modules whose weights stay on the device (on one rank, without "
                    "offload_param), or none"
                )
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
        """Lets the current stream wait for all other streams that accumulated the unit's
        gradients."""
        if self._owner is not None:
            stream = current_stream(self._owner.device)
            for number, other in self._accumulating.items():
                if number != stream.stream_id:
                    stream.wait_stream(other)
            self._accumulating.clear()

    def free(self) -> None:
        """Releases the bytes. Nothing is written to any tier."""
        if self._is_held:
            self._users.clear()  # who uses it next waits until it is filled, or stepped, anew
            self._ends.clear()
            return
        if self._owner is None and self._lender is not None:
            self._end_loan()
        elif self._owner is None:
            if self._nan is None or self._nan.nbytes():
                self._storage.resize_(0)
                if self._nan is not None:
                    self._storage._swap_data_ptr_(self._nan)  # type: ignore[attr-defined]
        else:
            for number, stream in self._users.items():
                if number in self._ends:
                    self._owner.wait_event(self._ends[number])
                else:
                    self._owner.wait_stream(stream)
            self._users.clear()
            self._ends.clear()
            self._filled = self._allocated = None
            if self.slab is not None and self._slab_slot is not None:
                self._end_loan()
                self.slab.give_back(self._slab_slot)
                self._slab_slot = None
            else:
                with on(self._owner):
                    self._storage.resize_(0)
        if self._slot is not None:
            assert self._slots is not None
            slot = self._slot
            self._slot = None
            self._slots.give_back(slot)

    def reset(self) -> None:
        """Releases the bytes, also after an interrupt, whatever it has left; its buffers are the
        caller's to take back.

        Each statement may be the last one of a call, and the next call completes what is left.
        """
        if self._is_held:
            return
        if self._nan is not None:
            self._nan = torch.empty(0, dtype=torch.uint8).untyped_storage()
            under = self._passage.nan_storage(self.unit.full_bytes)
            self._storage._swap_data_ptr_(under)  # type: ignore[attr-defined]
        elif self._slab_slot is not None or self._lender is not None:
            empty = torch.empty(0, dtype=torch.uint8, device=self.full.device).untyped_storage()
            self._storage._swap_data_ptr_(empty)  # type: ignore[attr-defined]
        else:
            self._storage.resize_(0)
        self._lender = self._slot = self._slab_slot = self._filled = self._allocated = None
        self._users.clear()
        self._ends.clear()

    def _end_loan(self) -> None:
        self._storage._swap_data_ptr_(self._lender)  # type: ignore[attr-defined]
        self._lender = None

    def sees(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of this memory."""
        return (
            tensor.layout is torch.strided
            and tensor.untyped_storage()._cdata == self._storage._cdata
        )
