"""LiveUnit: a unit while the model lives: its state, its storage, and how its values come and go."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from tiermem.swap.accelerator import current_stream, is_accelerator, new_stream, on, record
from tiermem.swap.arena import Pool, Slot
from tiermem.swap.move import Move
from tiermem.swap.native import NORMAL, URGENT
from tiermem.swap.store import TensorStore
from tiermem.zero import absent
from tiermem.zero.absent import ZeroParamStatus, mark
from tiermem.zero.collectives import Pending
from tiermem.zero.gather import Gather
from tiermem.zero.unit import Unit

# ---- LiveUnit: a unit while the model lives: its state, what it occupies now, and who needs it -----------------------


class UnitState(enum.Enum):
    """What a unit occupies; see the diagram in unit_state.py."""

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
            absent.wake(self._streamed)
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
        absent.rest(self._streamed)

    def take_out(self, index: int, value: torch.Tensor) -> None:
        """One parameter holds a copy of its own, whatever becomes of the unit, until `put_back`."""
        param = self.unit.shards[index].param
        self._streamed = [each for each in self._streamed if each is not param]
        absent.wake([param])
        self.memory.take_out(index, value)

    def put_back(self, index: int) -> None:
        """Ends a `take_out`; does nothing for a parameter that was not taken out."""
        if not self.memory.is_out(index):
            return
        param = self.unit.shards[index].param
        self.memory.put_back(index)
        self._streamed.append(param)
        if not self.num_users:
            absent.rest([param])

    def part_with(self) -> None:
        """The unit's parameters are ordinary ones for good."""
        absent.wake(self._streamed)
        self._streamed = []


# ---- UnitMemory: the one storage that a unit has for life, filled and emptied under the views that see it ------------
#
# Autograd saves views of weights (`weight.t()`) in forward and reads them in backward. They point at the storage, so
# the storage stays and its bytes come and go:
#
#   CPU    warm arena memory is put under the storage (`UntypedStorage._swap_data_ptr_`: microseconds, views follow). The call
#            is private to torch, so it is probed; without it the storage is resized and the bytes are copied.
#     accelerator    the storage is resized to fill and to free; torch's caching allocator keeps the pages
#
# Torch's allocator gives what is freed to whoever asks next on the stream that it was allocated on. So on an
# accelerator one stream, the *owner*, allocates all units and frees them: whoever fills one waits for the owner, and
# the owner waits for every stream that has used it (from `use` to `end_use`) before it frees.
#
# While a unit is not present its parameters' data is a zero-stride NaN expanded to the true shape: shape and numel stay
# right, reads give NaN, writes raise, nothing crashes. (torch lets `fill_` and `zero_` through; they raise when the
# unit comes.)

_T = TypeVar("_T")


def can_swap_pointers() -> bool:
    """Whether this torch can put memory under a storage; tried once per call, on two small storages."""
    swap = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
    if swap is None:
        return False
    lender, borrower = torch.zeros(4, dtype=torch.uint8).untyped_storage(), torch.UntypedStorage(0)
    try:
        swap(borrower, lender)
    except (RuntimeError, TypeError):
        return False
    return borrower.nbytes() == 4 and lender.nbytes() == 0


class UnitMemory:
    """The full layout of one unit, present or not.

    Args:
        unit: whose parameters' data this becomes.
        device: where the maths runs.
        may_swap: what `can_swap_pointers` found.
        owner: the stream that allocates and frees on an accelerator; None on a CPU.
    """

    def __init__(self, unit: Unit, device: torch.device, may_swap: bool, owner: torch.Stream | None = None) -> None:
        self.unit = unit
        self._owner = owner
        self._users: dict[int, torch.Stream] = {}  # by id; whose work looks at the memory
        self._ends: dict[int, torch.Event] = {}  # by id; after which it looks no more, where that is known
        self._accumulating: dict[int, torch.Stream] = {}  # by id; on which gradients have come since the last join
        self.is_present = False
        self._out: dict[int, torch.Tensor] = {}  # parameters that hold a copy of their own (access.py)
        self._may_swap = may_swap and device.type == "cpu"
        self._lender: torch.UntypedStorage | None = None  # holds the slot's pointer while the unit does not
        full = torch.empty(unit.full_numel, dtype=unit.full_dtype, device=device)  # never touched: no page is resident
        self.full = full
        self._storage = full.untyped_storage()
        self.views = [full[s.full_offset : s.full_offset + s.numel].view(s.shape) for s in unit.shards]
        self._nan = torch.full((), _nothing(unit.dtype), dtype=unit.dtype, device=device)
        self._may_be_written = (
            device.type == "cpu" and unit.dtype.is_floating_point
        )  # where looking at it costs nothing
        self._absent = [self._nan.expand(s.shape) for s in unit.shards]
        self._params = [shard.param for shard in unit.shards]
        self._storage.resize_(0)
        if unit.full_dtype != unit.dtype and unit.is_trainable:
            for shard in unit.shards:
                shard.param.grad_dtype = unit.dtype  # autograd adds up in it, whatever dtype forward saw

    @property
    def has_streams(self) -> bool:
        """Whether it is an accelerator's, where several streams may use it."""
        return self._owner is not None

    def put_under(self, slot: Slot) -> None:
        """Puts an arena slot's memory under the unit (CPU). The slot belongs to the unit until it leaves.

        Whatever fills the unit has filled the slot before, or does so through `full` before `show`.
        """
        if self._may_swap:
            lender = torch.from_numpy(slot.tensor[: self.unit.full_bytes].numpy()).untyped_storage()
            self._storage._swap_data_ptr_(lender)  # type: ignore[attr-defined]
            self._lender = lender
        else:
            self.allocate()
            self.full.view(torch.uint8).copy_(slot.tensor[: self.unit.full_bytes])

    def hold(self, slot: Slot) -> None:
        """Makes an arena slot the unit's memory for good, content undefined (CPU, resident units)."""
        full = slot.tensor[: self.unit.full_bytes].view(self.unit.full_dtype)
        self.full = full
        self.views = [full[s.full_offset : s.full_offset + s.numel].view(s.shape) for s in self.unit.shards]

    def allocate(self, filled_on: torch.Stream | None = None) -> None:
        """Makes room for the full layout in torch's own memory, content undefined.

        filled_on: the stream that fills it on an accelerator; default: the current one.
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
        """The stream that fills the memory has done so when the event comes."""
        self._ends[stream.stream_id] = filled

    def use(self, filled: torch.Event | None = None) -> None:
        """The current stream looks at the memory from now on, once that has been `filled`; nothing to do on a CPU."""
        if self._owner is not None:
            stream = current_stream(self._owner.device)
            self._ends.pop(stream.stream_id, None)
            if stream.stream_id not in self._users:
                self._users[stream.stream_id] = stream
                if filled is not None:
                    stream.wait_event(filled)

    def end_use(self) -> None:
        """The current stream looks at the memory no more, once it has done what it was given until now."""
        if self._owner is not None:
            stream = current_stream(self._owner.device)
            if stream.stream_id in self._users:
                self._ends[stream.stream_id] = record(stream)

    def note_gradient(self) -> None:
        """A gradient of the unit has been accumulated on the current stream."""
        assert self._owner is not None
        stream = current_stream(self._owner.device)
        self._accumulating[stream.stream_id] = stream

    def join(self) -> None:
        """The current stream waits for all others that use the memory or made gradients of it: what they made is complete."""
        if self._owner is not None:
            stream = current_stream(self._owner.device)
            for other in (*self._users.values(), *self._accumulating.values()):
                if other.stream_id != stream.stream_id:
                    stream.wait_stream(other)
            self._accumulating.clear()

    def show(self) -> None:
        """Points the parameters at the full layout, once its bytes are (or will be, in stream order) right."""
        self._check_nothing_was_written()
        self.is_present = True
        self._point(self.views, ZeroParamStatus.AVAILABLE)

    def leave(self) -> None:
        """Gives the bytes up, shown or not; the parameters' data is NaN then. Nothing is written anywhere."""
        if self.is_present:
            self.hide()
        else:
            self.mark(ZeroParamStatus.NOT_AVAILABLE)
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
            with on(self._owner):
                self._storage.resize_(0)

    def hide(self) -> None:
        """Makes the parameters' data NaN; the bytes stay."""
        self.is_present = False
        self._point(self._absent, ZeroParamStatus.NOT_AVAILABLE)

    def mark(self, status: ZeroParamStatus) -> None:
        """Says where the parameters' values are; one that holds a copy of its own has them."""
        mark(self._params if not self._out else self._without_out(self._params), status)

    def sees(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of this memory."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata == self._storage._cdata

    def take_out(self, index: int, value: torch.Tensor) -> None:
        """Gives one parameter a copy of its own, which it keeps whether the unit is present or not."""
        self._out[index] = value
        _point([self.unit.shards[index].param], [value], ZeroParamStatus.AVAILABLE)

    def is_out(self, index: int) -> bool:
        """Whether a parameter holds a copy of its own."""
        return index in self._out

    def put_back(self, index: int) -> None:
        """The parameter sees the unit again, or NaN."""
        del self._out[index]
        status = ZeroParamStatus.AVAILABLE if self.is_present else ZeroParamStatus.NOT_AVAILABLE
        _point([self.unit.shards[index].param], [(self.views if self.is_present else self._absent)[index]], status)

    def _point(self, tensors: list[torch.Tensor], status: ZeroParamStatus) -> None:
        params = self._params
        if self._out:
            params, tensors = self._without_out(params), self._without_out(tensors)
        _point(params, tensors, status)

    def _without_out(self, of_each: list[_T]) -> list[_T]:
        return [each for i, each in enumerate(of_each) if i not in self._out]

    def _check_nothing_was_written(self) -> None:
        if self._may_be_written and not math.isnan(self._nan.item()):
            self._nan.fill_(float("nan"))
            raise RuntimeError(
                f"a parameter of {self.unit.name!r} was filled while its weights rested elsewhere, so the values were lost: "
                "write before sharding, or through Shards.replace or load_state_dict"
            )


def become(param: nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter another value, on another device too; the Parameter stays the same object.

    torch assigns `data` within a device alone (but from CPU to CUDA), so the tensors behind the two objects change places: what
    torch.utils.swap_tensors does once it has made sure that nobody holds weak references (ours stay right: they are of the
    Python object).
    """
    if param.device == value.device:
        param.data = value
    else:
        torch._C._swap_tensor_impl(param, nn.Parameter(value, param.requires_grad))


def _point(params: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor], status: ZeroParamStatus) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # a resting parameter would ask its keeper (resting.py)
        for param, tensor in zip(params, tensors, strict=True):
            param.data = tensor
    mark(params, status)


def _nothing(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 0


# ---- Arrival: how the full layout of a unit comes from where its shard rests, and how it leaves ----------------------
#
#     HOME       it occupies nothing
#     FETCHED    this rank's bytes are on their way, or there: from NVME into a buffer, or on the way to the accelerator
#     GATHERED   the full layout has its memory and the ranks' parts are on their way into it
#     PRESENT    the parameters see their bytes
#
#         one shard            HOME --fetch--> FETCHED --land--> PRESENT
#         several              HOME --fetch--> FETCHED --gather--> GATHERED --land--> PRESENT       (fetch: from NVME alone)
#         each of them         --drop--> HOME
#
# `fetch` is this rank's own business and may follow time and memory. `gather` is collective: every rank calls it for
# the same units in the same order, so it waits for the read there if need be. The shard goes into its place in the full
# layout (in the dtype that the maths sees) and its own buffer is given back before the exchange begins. After an error
# the unit is to be dropped. Nothing here decides who comes.
#
# On an accelerator a unit of one shard is copied by a stream of its own, behind nothing but the memory that it fills;
# the stream that computes waits for the copy's event. A unit remembers the last copy out of host memory until somebody
# writes there (`LiveUnit.await_home`), and a buffer is given back when the copy out of it has ended.


class Arrival:
    """Takes units through their states; the caller has found them a slot and a stage where they need one.

    Args:
        store: where shards on NVME are read from; its recorder gets an event for every gather.
        pool: whose slots hold full layouts (CPU); None on an accelerator, where torch's allocator is asked.
        stages: whose slots hold shards on their way; None when none are needed.
        device: where the maths runs.
    """

    def __init__(self, store: TensorStore, pool: Pool | None, stages: Pool | None, device: torch.device) -> None:
        self._store = store
        self._pool = pool
        self._stages = stages
        self._device = device
        self._copy_stream = new_stream(device) if is_accelerator(device) else None

    def fetch(self, live: LiveUnit, urgent: bool) -> None:
        """HOME -> FETCHED: starts this rank's bytes on their way, into the stage or slot that the unit has been given."""
        priority = URGENT if urgent else NORMAL
        if live.entry is not None:
            into = live.stage or live.slot
            assert into is not None
            live.move = self._store.fetch(live.entry, into=into, priority=priority)
        elif live.gather is None:
            self._copy_in(live, live.shard)
        live.state = UnitState.FETCHED
        live.memory.mark(ZeroParamStatus.INFLIGHT)

    def gather(self, live: LiveUnit) -> None:
        """HOME or FETCHED -> GATHERED: starts the exchange. Collective; waits for the read alone. Raises OSError, RankLost."""
        assert live.gather is not None
        self._await_read(live)
        live.start_ns = time.monotonic_ns()
        if self._pool is not None:
            assert live.slot is not None
            live.memory.put_under(live.slot)
        else:
            live.memory.allocate()
        live.state = UnitState.GATHERED
        live.memory.mark(ZeroParamStatus.INFLIGHT)
        live.gather.put(
            live.shard if live.shard is not None else self._staged(live) if live.stage is not None else None
        )
        if self._copy_stream is not None:
            live.home_read = record(current_stream(self._device))  # a buffer is given back when the unit lands
        elif live.stage is not None:
            self._drop_stage(live)
        live.pending = live.gather.start()

    def land(self, live: LiveUnit) -> None:
        """FETCHED or GATHERED -> PRESENT: waits for the bytes and shows them. Blocks; raises OSError, RankLost."""
        self._await_read(live)
        if live.pending is not None:
            self._await_gather(live)
            if self._copy_stream is not None:
                live.filled = record(current_stream(self._device))
        elif self._pool is not None:
            assert live.slot is not None
            live.memory.put_under(live.slot)
        else:
            self._await_copy(live)
        if live.stage is not None:
            self._drop_stage(live)
        live.memory.show()
        live.state = UnitState.PRESENT

    def drop(self, live: LiveUnit) -> None:
        """Any state -> HOME; what is under way is cancelled, or waited for where it cannot be. Raises RankLost."""
        if live.move is not None:
            move, live.move = live.move, None
            move.cancel()
        try:
            if live.pending is not None:
                self._await_gather(live)
        finally:
            live.filled = None
            live.memory.leave()
            self._give_back(live)
            live.state = UnitState.HOME

    # ---- waiting -------------------------------------------------------------------------------------------------------

    def _await_read(self, live: LiveUnit) -> None:
        if live.move is not None:
            move, live.move = live.move, None
            move.wait()

    def _await_gather(self, live: LiveUnit) -> None:
        assert live.pending is not None
        pending, live.pending = live.pending, None
        wait_ns = time.monotonic_ns()
        live.memory.join()  # this rank's part may have been put on another stream
        pending.wait()
        live.memory.use()
        end_ns, name = time.monotonic_ns(), live.unit.name
        self._store.recorder.add("wait", f"gather {name}", wait_ns, end_ns)
        self._store.recorder.add("gather", name, live.start_ns, end_ns, live.unit.full_bytes)

    def _await_copy(self, live: LiveUnit) -> None:
        if live.filled is None:
            self._copy_in(live, self._staged(live))
        live.memory.use(live.filled)

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    def _copy_in(self, live: LiveUnit, shard: torch.Tensor | None) -> None:
        """Starts the copy of a whole unit to the accelerator."""
        assert self._copy_stream is not None and shard is not None
        live.memory.allocate(filled_on=self._copy_stream)
        with on(self._copy_stream):
            live.memory.full.copy_(shard, non_blocking=True)
        live.filled = live.home_read = record(self._copy_stream)
        live.memory.end_filling(live.filled, self._copy_stream)

    def _staged(self, live: LiveUnit) -> torch.Tensor:
        assert live.stage is not None
        return live.stage.tensor[: live.unit.shard_bytes].view(live.unit.rests_as)

    def _drop_stage(self, live: LiveUnit) -> None:
        """Gives the buffer of a shard back, once the accelerator has read it."""
        live.await_home()
        assert self._stages is not None and live.stage is not None
        self._release_entry(live)
        self._stages.give_back(live.stage)
        live.stage = None

    def _give_back(self, live: LiveUnit) -> None:
        if live.stage is not None:
            self._drop_stage(live)
        if live.slot is not None:
            assert self._pool is not None
            if live.gather is None:
                self._release_entry(live)
            self._pool.give_back(live.slot)
            live.slot = None

    def _release_entry(self, live: LiveUnit) -> None:
        if live.entry is not None and self._store.is_present(live.entry):
            self._store.release(live.entry)
