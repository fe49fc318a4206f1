"""Quantised: blocks of values as 8-bit integers with one scale each, for transfers and for frozen weights at rest.

    values   any floating dtype, n elements             x
    codes    int8, n elements, padded to whole blocks   round(x / scale), -127 to 127
    scales   fp32, one per block of BLOCK elements      the block's largest |x| / 127
    packed   uint8: the codes, then the scales          sent or stored: 1.0625 bytes per element

An unpacked value differs by at most half a scale of its block, plus the rounding of the output dtype. A block of zeros unpacks
to zeros. A block that holds NaN or infinity unpacks to NaN, so non-finite values are never hidden. BLOCK divides the alignment
of parameters in a unit's layouts, so no block holds values of two parameters.

All functions use vectorised torch calls on pieces of PIECE elements, so no fp32 copy of a whole tensor is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 64  # elements
PIECE = 1 << 18  # elements
_SCALE_BYTES = 4
_LARGEST_CODE = 127


def packed_bytes(numel: int) -> int:
    """Bytes of `numel` packed elements, with the last block padded."""
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK + _SCALE_BYTES)


def pack(values: torch.Tensor) -> torch.Tensor:
    """Packs flat floating-point values; returns uint8. Blocks on a CPU; in stream order on a GPU."""
    packed = torch.empty(packed_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    pack_into(packed, values.numel(), values)
    return packed


def pack_into(packed: torch.Tensor, numel: int, values: torch.Tensor, start: int = 0) -> None:
    """Packs values over elements `start` and following of a packed tensor of `numel` elements.

    Args:
        packed: uint8, `packed_bytes(numel)` long; the blocks of the values are overwritten, the last one padded with zeros.
        values: flat, floating point, on the device of `packed`; not changed.
        start: a multiple of BLOCK.
    """
    assert start % BLOCK == 0
    codes, scales = _parts(packed, numel)
    for first, last in _pieces(0, values.numel()):
        block = values[first:last].to(torch.float32, copy=True)
        filled = -(-block.numel() // BLOCK) * BLOCK
        if filled != block.numel():
            block = torch.nn.functional.pad(block, (0, filled - block.numel()))
        rows = block.view(-1, BLOCK)
        scale = rows.abs().amax(dim=1).div_(_LARGEST_CODE)
        place = start + first
        scales[place // BLOCK : place // BLOCK + rows.shape[0]] = scale
        rows.div_(scale.unsqueeze(1)).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
        codes[place : place + filled].copy_(block)


def unpack(packed: torch.Tensor, numel: int, out: torch.Tensor, start: int = 0, add: bool = False) -> torch.Tensor:
    """Unpacks elements `start` to `start + out.numel()` of a packed tensor of `numel` elements.

    Args:
        packed: uint8, as `pack` returns it.
        numel: how many elements were packed.
        out: flat, any floating dtype; overwritten, or with `add` added to.
        start: a multiple of BLOCK.

    Returns `out`. Blocks on a CPU; in stream order on a GPU.
    """
    assert start % BLOCK == 0
    codes, scales = _parts(packed, numel)
    for first, last in _pieces(start, start + out.numel()):
        filled = -(-(last - first) // BLOCK) * BLOCK
        rows = codes[first : first + filled].view(-1, BLOCK)
        values = torch.mul(rows, scales[first // BLOCK : first // BLOCK + rows.shape[0]].unsqueeze(1)).view(-1)
        target = out[first - start : last - start]
        if add:
            target.add_(values[: last - first])
        else:
            target.copy_(values[: last - first])
    return out


def byte_ranges(numel: int, start: int, stop: int) -> tuple[slice, slice]:
    """The byte ranges of the codes and of the scales of elements `start` to `stop` in the packed bytes of `numel` elements.

    The two ranges one after the other are these elements packed by themselves. `start` is a multiple of BLOCK.
    """
    assert start % BLOCK == 0
    first, last, filled = start // BLOCK, -(-stop // BLOCK), -(-numel // BLOCK) * BLOCK
    return slice(first * BLOCK, last * BLOCK), slice(filled + first * _SCALE_BYTES, filled + last * _SCALE_BYTES)


def _parts(packed: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes (int8) and the scales (fp32) in packed bytes; views."""
    filled = -(-numel // BLOCK) * BLOCK
    return packed[:filled].view(torch.int8), packed[filled : packed_bytes(numel)].view(torch.float32)


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, PIECE):
        yield first, min(first + PIECE, stop)
