"""Quantised: blocks of values as 8-bit or 4-bit codes with one scale each, for transfers and for
frozen weights at rest.

    values   any floating dtype, n elements                          x
    scales   fp32, one per block of BLOCK elements                   INT8: the block's largest |x| / 127; NF4: the largest |x|
    codes    INT8: int8, n elements, padded to whole blocks          round(x / scale), -127 to 127
             NF4: two per byte, the first in the upper half          the number of the level nearest to x / scale
    packed   uint8: the codes, then the scales                       sent or stored: 1.0625 (INT8) or 0.5625 bytes per element

The levels of NF4 are 16 quantiles of a normal distribution (Dettmers et al. 2023, QLoRA). An INT8
value differs by at most half a scale of its block, an NF4 value by at most 0.152 scales, plus the
rounding of the output dtype. A block of zeros unpacks to zeros. A block that holds NaN or infinity
unpacks to NaN, so non-finite values are never hidden. BLOCK divides the alignment of parameters in
a unit's layouts, so no block holds values of two parameters.

On a CPU native kernels pack and unpack (native/blocks.cpp). Elsewhere, and for other dtypes, torch
calls on pieces of PIECE elements give the same bits, and no fp32 copy of a whole tensor is made. On
an accelerator pieces are larger, since each costs a few launches, and no call waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tiermem.swap.base.native import Workers, pack_blocks, unpack_blocks
from tiermem.swap.base.parts import STORED, Packed
from tiermem.swap.memory.accelerator import is_accelerator, to_device

BLOCK = 64  # elements
PIECE = 1 << 18  # elements
_PIECE_ON_DEVICE = 1 << 22  # elements
# of torch's memory for each element of a piece, at most: fp32 copies, and codes
_SCRATCH_BYTES = 13
_SCALE_BYTES = 4
_LARGEST_CODE = 127
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels of NF4, ascending, as QLoRA's appendix E has them."""
_PAIRS = [(a, b) for a in LEVELS for b in LEVELS]  # the levels of both codes of a byte


class BlockFormat(NamedTuple):
    """How blocks are packed: the name, as policies and manifests have it, and the bits of a
    code."""

    name: str
    code_bits: int

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of `numel` elements, with the last block padded."""
        return -(-numel // BLOCK) * BLOCK * self.code_bits // 8

    def packed_bytes(self, numel: int) -> int:
        """Bytes of `numel` packed elements, with the last block padded."""
        return self.code_bytes(numel) + -(-numel // BLOCK) * _SCALE_BYTES


INT8 = BlockFormat("int8", 8)
NF4 = BlockFormat("nf4", 4)
FORMATS = {each.name: each for each in (INT8, NF4)}


def pack(
    values: torch.Tensor, form: BlockFormat = INT8, workers: Workers | None = None
) -> torch.Tensor:
    """Packs flat floating-point values; returns uint8. Blocks on a CPU; in stream order on a
    GPU."""
    packed = torch.empty(form.packed_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    pack_into(packed, values.numel(), values, 0, form, workers)
    return packed


def pack_into(
    packed: torch.Tensor,
    numel: int,
    values: torch.Tensor,
    start: int = 0,
    form: BlockFormat = INT8,
    workers: Workers | None = None,
) -> None:
    """Packs values over elements `start` and following of a packed tensor of `numel` elements.

    Args:
        packed: uint8, `form.packed_bytes(numel)` long; the values' blocks are overwritten, the last
            one padded with zeros.
        values: flat, floating point, on the device of `packed`; not changed.
        start: a multiple of BLOCK.
        workers: threads of a CPU; None: the caller alone.
    """
    blocks = _blocks(packed, numel, start, values.numel(), form)
    if values.device.type == "cpu" and values.dtype in STORED:
        pack_blocks(workers, form.code_bits, values.contiguous(), blocks)
        return
    for first, last in _pieces(values):
        block = values[first:last].to(torch.float32, copy=True)
        block = torch.nn.functional.pad(block, (0, -block.numel() % BLOCK))
        rows = block.view(-1, BLOCK)
        scale = rows.abs().amax(dim=1)
        if form == INT8:
            scale.div_(_LARGEST_CODE)
        blocks.scales[first // BLOCK : -(-last // BLOCK)] = scale
        rows.div_(scale.unsqueeze(1)).nan_to_num_(0.0, 0.0, 0.0)
        blocks.codes[form.code_bytes(first) : form.code_bytes(last)] = _codes(block, form)


def unpack(
    packed: torch.Tensor,
    numel: int,
    out: torch.Tensor,
    start: int = 0,
    add: bool = False,
    form: BlockFormat = INT8,
    workers: Workers | None = None,
) -> torch.Tensor:
    """Unpacks elements `start` to `start + out.numel()` of a packed tensor of `numel` elements.

    Args:
        packed: uint8, as `pack` returns it.
        numel: how many elements were packed.
        out: flat, any floating dtype; overwritten, or with `add` added to.
        start: a multiple of BLOCK.
        workers: threads of a CPU; None: the caller alone.

    Returns `out`. Blocks on a CPU; in stream order on a GPU.
    """
    blocks = _blocks(packed, numel, start, out.numel(), form)
    if out.device.type == "cpu" and out.dtype in STORED and not add:
        unpack_blocks(workers, form.code_bits, blocks, out)
        return out
    pairs = _table(_PAIRS, out.device) if form == NF4 else None
    for first, last in _pieces(out):
        rows = _values(blocks.codes[form.code_bytes(first) : form.code_bytes(last)], pairs).view(
            -1, BLOCK
        )
        values = torch.mul(
            rows, blocks.scales[first // BLOCK : -(-last // BLOCK)].unsqueeze(1)
        ).view(-1)[: last - first]
        target = out[first:last]
        if add:
            target.add_(values)
        else:
            target.copy_(values)
    return out


def scratch_bytes(numel: int) -> int:
    """Most bytes of an accelerator that packing or unpacking `numel` elements takes beside what it
    reads and writes."""
    return min(numel, _PIECE_ON_DEVICE) * _SCRATCH_BYTES


def byte_ranges(numel: int, start: int, stop: int, form: BlockFormat = INT8) -> tuple[slice, slice]:
    """The byte ranges of the codes and of the scales of elements `start` to `stop` in the packed
    bytes of `numel` elements.

    The two ranges one after the other are these elements packed by themselves. `start` is a
    multiple of BLOCK.
    """
    assert start % BLOCK == 0
    first = start // BLOCK
    last = -(-stop // BLOCK)
    scales = form.code_bytes(numel)
    codes = slice(form.code_bytes(start), form.code_bytes(stop))
    return codes, slice(scales + first * _SCALE_BYTES, scales + last * _SCALE_BYTES)


def _blocks(packed: torch.Tensor, numel: int, start: int, count: int, form: BlockFormat) -> Packed:
    """The blocks of `count` elements in packed bytes; views."""
    codes, scales = byte_ranges(numel, start, start + count, form)
    return Packed(packed[codes], packed[scales].view(torch.float32))


def _codes(quotients: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """The codes of whole blocks of x / scale, as uint8."""
    if form == INT8:
        return (
            quotients.round_()
            .clamp_(-_LARGEST_CODE, _LARGEST_CODE)
            .to(torch.int8)
            .view(torch.uint8)
        )
    levels = _table(LEVELS, quotients.device)
    numbers = torch.bucketize(quotients, (levels[:-1] + levels[1:]) * 0.5).to(torch.uint8)
    return numbers[::2] * 16 + numbers[1::2]


def _values(codes: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
    """The values of codes in scales: int8, or fp32 from a table of the levels of every byte."""
    if pairs is None:
        return codes.view(torch.int8)
    return pairs.index_select(0, codes.to(torch.int32)).view(-1)


def _table(values: Sequence[object], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.float32, device="cpu"), device)


def _pieces(values: torch.Tensor) -> Iterator[tuple[int, int]]:
    numel = values.numel()
    step = _PIECE_ON_DEVICE if is_accelerator(values.device) else PIECE
    for first in range(0, numel, step):
        yield first, min(first + step, numel)
