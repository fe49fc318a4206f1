"""UnitMemory: the one storage that a unit has for life, filled and emptied under the views that see it.

Autograd saves views of weights (`weight.t()`) in forward and reads them in backward. They point at the storage, so the
storage stays and its bytes come and go:

    CPU    warm arena memory is put under the storage (`UntypedStorage._swap_data_ptr_`: microseconds, views follow). The call
           is private to torch, so it is probed; without it the storage is resized and the bytes are copied.
    accelerator    the storage is resized to fill and to free; torch's caching allocator keeps the pages

Torch's allocator gives what is freed to whoever asks next on the stream that it was allocated on. So on an accelerator one
stream, the *owner*, allocates all units and frees them: whoever fills one waits for the owner, and the owner waits for every
stream that has used it (from `use` to `end_use`) before it frees.

While a unit is not present its parameters' data is a zero-stride NaN expanded to the true shape: shape and numel stay
right, reads give NaN, writes raise, nothing crashes. (torch lets `fill_` and `zero_` through; they raise when the unit comes.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from tiermem.swap.accelerator import current_stream, on, record
from tiermem.swap.arena import Slot
from tiermem.zero.unit import Unit
from tiermem.zero.weights.attributes import ZeroParamStatus, mark

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
        self._out: dict[int, torch.Tensor] = {}  # parameters that hold a copy of their own (gathered.py)
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
