"""UnitMemory: the one storage that a unit has for life, filled and emptied under the views that see it.

Autograd saves views of weights (`weight.t()`) in forward and reads them in backward. They point at the storage, so the
storage stays and its bytes come and go:

    CPU    warm arena memory is put under the storage (`UntypedStorage._swap_data_ptr_`: microseconds, views follow). The call
           is private to torch, so it is probed; without it the storage is resized and the bytes are copied.
    CUDA   the storage is resized to fill and to free; torch's caching allocator keeps the pages.

While a unit is not present its parameters' data is a zero-stride NaN expanded to the true shape: shape and numel stay
right, reads give NaN, writes raise, nothing crashes. (torch lets `fill_` and `zero_` through; they raise when the unit comes.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

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
    """

    def __init__(self, unit: Unit, device: torch.device, may_swap: bool) -> None:
        self.unit = unit
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

    def allocate(self) -> None:
        """Makes room for the full layout in torch's own memory, content undefined."""
        self._storage.resize_(self.unit.full_bytes)

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
        else:
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


def _point(params: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor], status: ZeroParamStatus) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # a resting parameter would ask its keeper (resting.py)
        for param, tensor in zip(params, tensors, strict=True):
            param.data = tensor
    mark(params, status)


def _nothing(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 0
