"""Written: what the master of a weight becomes when the user has written the weight.

fp32     elements whose weight is not the master's rounding take the weight; all others keep their bits
split    a low half makes, of any weight, a number that rounds to this weight, so a written element is found by the weight
         before. Without it, the low halves of zeros become 0, and those that make NaN of infinity;
         the master of another written element is the weight to within half of bf16's spacing
"""

from __future__ import annotations

import torch

_BLOCK_NUMEL = 1 << 18
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Mark = tuple[int, int, torch.dtype]
"""What changes when a tensor is written or replaced, apart from writes through `.data` in place."""


def mark_of(tensor: torch.Tensor) -> Mark:
    """The mark of a tensor as it is now."""
    return tensor._version, tensor.data_ptr(), tensor.dtype


def adopt(weight: torch.Tensor, master: torch.Tensor, before: torch.Tensor | None = None) -> bool:
    """Makes a master, in place, that of its weight. All are flat, on the CPU, of the same elements.

    master: fp32, or int16, the low half of a split master. before: the weight that the master was
        made with, in the dtype of
    `weight`; None: an fp32 master's rounding. Returns whether an element of the master was written.
    """
    changed = False
    olds = (
        [None] * len(master.split(_BLOCK_NUMEL)) if before is None else before.split(_BLOCK_NUMEL)
    )
    for own, kept, old in zip(
        weight.split(_BLOCK_NUMEL), master.split(_BLOCK_NUMEL), olds, strict=True
    ):
        if old is None and kept.dtype == torch.int16:
            number = ((_bits(own).int() << 16) + kept).view(torch.float32)
            is_written = (number.isnan() & ~own.isnan()) | (own == 0)
        else:
            is_written = _bits(kept.to(own.dtype) if old is None else old) != _bits(own)
        if is_written.any():
            kept[is_written] = 0 if kept.dtype == torch.int16 else own[is_written].float()
            changed = True
    return changed


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_INTEGERS[values.dtype.itemsize])
