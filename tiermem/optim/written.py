"""Written: what the master of a weight becomes when the user has written the weight.

fp32     elements whose weight is not the master's rounding take the weight; all others keep their bits
split    a low half makes, of any weight, a number that rounds to this weight, so a written element is found by the weight
         before. Without it, the low halves of zeros become 0, and those that make NaN of infinity; the master of another
         written element is the weight to within half of bf16's spacing
"""

from __future__ import annotations

import torch

_BLOCK_NUMEL = 1 << 18

Mark = tuple[int, int, torch.dtype]
"""What changes when a tensor is written or replaced, apart from writes through `.data` in place."""


def mark_of(tensor: torch.Tensor) -> Mark:
    """The mark of a tensor as it is now."""
    return tensor._version, tensor.data_ptr(), tensor.dtype


def adopt(weight: torch.Tensor, master: torch.Tensor, before: torch.Tensor | None = None) -> None:
    """Makes a master, in place, that of its weight. Both are flat, on the CPU, and hold the same elements.

    master: fp32, or int16, the low half of a split master. before: the weight that the split master was made with.
    """
    if master.dtype != torch.int16:
        for own, kept in zip(weight.split(_BLOCK_NUMEL), master.split(_BLOCK_NUMEL), strict=True):
            is_written = _bits(kept.to(own.dtype)) != _bits(own)
            kept[is_written] = own[is_written].float()
        return
    if before is not None:
        master[_bits(weight) != _bits(before)] = 0
        return
    for own, low in zip(weight.split(_BLOCK_NUMEL), master.split(_BLOCK_NUMEL), strict=True):
        number = ((_bits(own).int() << 16) + low).view(torch.float32)
        low[(number.isnan() & ~own.isnan()) | (own == 0)] = 0


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16)
