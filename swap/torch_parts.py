"""Parts in torch operations: stored elements to fp32 and back, to the bit as native/parts.cpp does it, on any device.

    fp32, bf16, fp16    torch's own conversions to nearest even; stochastically by random words
    split               integer sums of the weight's pattern and the low half
    8-bit blocks        integer sums of codes and scale bytes, drawn in native/loops_q8.h

Patterns are int32 numbers, which wrap as the kernel's unsigned ones do: torch knows few operations on uint32. The host never
waits for the device, so a number is put among others by masked_fill: torch.where copies it there, and that copy waits. The
payload of a NaN may differ from the kernel's, except in a split master.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from tiermem.swap.parts import Q8_BLOCK, SPLIT, Dither, Moment, Quantised, check_moment, check_split

_INFINITE, _QUIET_NAN, _ONE_EXPONENT = 0x7F800000, 0x7FC00000, 1 << 23  # patterns of fp32
_HASH_STRIDE, _HASH_FACTOR = 0x7FEB352D, 0x846CA68B
_STEP_STRIDES = (0x9E3779B9, 0x6A09E667, 0xBB67AE85, 0xA54FF53B)


@torch.no_grad()
def widen_in_torch(stored: Moment, weight: torch.Tensor | None = None, is_positive: bool = False) -> torch.Tensor:
    """Returns a part in fp32, exactly, in memory of its own on its device; as `widen_part` in swap/native.py.

    Does not wait for the device. Scale bytes of 1 to 47, which are never written, may be read as other numbers.
    """
    _check_part(stored, weight)
    if isinstance(stored, Quantised):
        return _decode(stored, is_positive)
    if stored.dtype not in SPLIT:
        return stored.to(torch.float32, copy=True)
    assert weight is not None  # the low half, read as a signed number, is what rounding took away
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + stored.view(torch.int16)
    return bits.view(torch.float32)


@torch.no_grad()
def narrow_in_torch(
    values: torch.Tensor,
    stored: Moment,
    weight: torch.Tensor | None = None,
    is_positive: bool = False,
    words: torch.Tensor | None = None,
) -> None:
    """Writes fp32 values into a part on their device, to nearest even; as `narrow_part` in swap/native.py.

    A split master writes its bf16 weight too, and keeps every pattern. words: random ones, by which parts below fp32 that are
    not split are rounded stochastically instead. Does not wait for the device.
    """
    numel, device = _check_part(stored, weight)
    values = values.to(torch.float32)
    check_moment("values", values, numel, device)
    if isinstance(stored, Quantised):
        _encode(values, stored, is_positive, words)
    elif stored.dtype in SPLIT:
        assert weight is not None
        bits = values.view(torch.int32)
        weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
        stored.view(torch.int16).copy_(bits)  # its lower half
    elif words is None or stored.dtype is torch.float32:
        stored.copy_(values)
    else:
        dithered = _dithered_bf16 if stored.dtype is torch.bfloat16 else _dithered_fp16
        stored.view(torch.int16).copy_(dithered(values, words))


def random_words(dither: Dither, number: int, numel: int, device: torch.device) -> torch.Tensor:
    """The words, as int32, of so many elements from dither.first_element on: native/rounding.h.

    number: the part's, 0 and 1 for the first two moments, 2 for the master, 3 for the largest second moment.
    """
    first = dither.first_element
    left = (1 << 32) - first % (1 << 32)
    if numel > left:  # the upper half of an element's number is mixed into the salts
        rest = dither._replace(first_element=first + left)
        pieces = ((dither, left), (rest, numel - left))
        return torch.cat([random_words(part, number, length, device) for part, length in pieces])
    salt = _mix(_mix(dither.key + (number // 2 + 1) * 0x9E3779B97F4A7C15) + (first >> 32))
    x = torch.arange(numel, dtype=torch.int32, device=device) * _HASH_STRIDE + _signed(first * _HASH_STRIDE + salt)
    x = (x ^ _shifted(x, 15)) + _signed(salt >> 32)
    x = x * _signed(_HASH_FACTOR)
    x = x ^ _shifted(x, 16)
    return (x << 16 if number % 2 else x) + _signed(dither.step * _STEP_STRIDES[number])


def _mix(x: int) -> int:
    """The last part of splitmix64."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """The lower 32 bits as an int32 number."""
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def _check_part(stored: Moment, weight: torch.Tensor | None) -> tuple[int, torch.device]:
    held = stored.codes if isinstance(stored, Quantised) else stored
    if held.dtype in SPLIT:
        check_split(held, weight, held.numel(), held.device)
    else:
        check_moment("part", stored, held.numel(), held.device)
    return held.numel(), held.device


# ---- bf16 and fp16, stochastically ------------------------------------------------------------------------------------


def _dithered_bf16(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Up when the half that is cut off is above the word's upper half; next to infinity as to nearest."""
    bits = values.view(torch.int32)
    upper, cut, limit = bits >> 16, bits & 0xFFFF, _shifted(words, 16)
    size = upper & 0x7FFF
    limit = limit.masked_fill(size >= 0x7F7F, 0x7FFF).masked_fill(size >= 0x7F80, 0xFFFF)
    return upper + (cut > limit)


def _dithered_fp16(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """As bf16; a subnormal result is a whole number of units of 2^-24 and a share of one, compared with the word."""
    bits = values.view(torch.int32)
    size = bits & 0x7FFFFFFF
    share = _shifted(~words, 19).masked_fill(size >= 0x477FE000, 0x1000)
    normal = (size - (112 << 23) + share) >> 13
    is_subnormal = size < 113 << 23
    units = size.masked_fill(~is_subnormal, 0).view(torch.float32) * 16777216.0
    whole = units.trunc()
    threshold = (_shifted(words, 16).to(torch.float32) + 0.5) * (1.0 / 65536.0)
    half = torch.where(is_subnormal, whole.to(torch.int32) + (threshold < units - whole), normal)
    half = half.masked_fill(size >= 143 << 23, 0x7C00).masked_fill(size > _INFINITE, 0x7E00)
    return half | ((bits >> 31) << 15)


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Words shifted right as unsigned numbers."""
    return (words >> count) & ((1 << 32 - count) - 1)


# ---- 8-bit blocks -----------------------------------------------------------------------------------------------------


def _decode(stored: Quantised, is_positive: bool) -> torch.Tensor:
    numel = stored.codes.numel()
    codes = _in_blocks(stored.codes).to(torch.int32)
    scales = stored.scales.to(torch.int32)[:, None]
    base = _q8_base(scales, is_positive)
    if is_positive:
        bits = ((codes << 20) + base).masked_fill(codes == 0, 0)
    else:  # a subnormal is shifted by the adder; of the two readings of a code the smaller is right
        normal, least = ((codes & 0x7F) << 20) + base, base + _ONE_EXPONENT
        subnormal = (normal + _ONE_EXPONENT).view(torch.float32) - least.view(torch.float32)
        bits = torch.minimum(normal, subnormal.view(torch.int32)) | ((codes >> 7) << 31)
    bits = bits.masked_fill(scales == 0, 0).masked_fill(scales == 255, _QUIET_NAN)
    return bits.view(torch.float32).view(-1)[:numel]


def _encode(values: torch.Tensor, stored: Quantised, is_positive: bool, words: torch.Tensor | None) -> None:
    blocks = _in_blocks(values)
    bits = blocks.view(torch.int32)
    if is_positive:
        size = (blocks + 0.0).view(torch.int32)  # -0 counts as 0
        size = size.masked_fill(size < 0, _INFINITE)  # negative numbers are not allowed
    else:
        size = bits & 0x7FFFFFFF
    scales = _q8_scales(size.amax(dim=1, keepdim=True), is_positive)
    base = _q8_base(scales, is_positive)
    pattern = bits
    if not is_positive:  # the size as a normal number's; as in _decode, with the larger
        shifted = size.view(torch.float32) + (base + _ONE_EXPONENT).view(torch.float32)
        pattern = torch.maximum(shifted.view(torch.int32) - _ONE_EXPONENT, size)
    if words is None:
        rounded = pattern + ((pattern >> 20) & 1) + (0x7FFFF - base)
    else:
        rounded = pattern - _shifted(_in_blocks(words), 12) + (0xFFFFF - base)
    if is_positive:  # what is not 0 stays so
        codes = (rounded.clamp(min=1 << 20) >> 20).masked_fill(blocks == 0, 0)
    else:
        codes = ((rounded & 0x7FFFFFF) | ((bits >> 4) & 0x8000000)) >> 20
    codes = codes.masked_fill((scales == 0) | (scales == 255), 0)
    stored.codes.copy_(codes.view(-1)[: stored.codes.numel()])
    stored.scales.copy_(scales.view(-1))


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """One row for each block, zeros behind the last element."""
    return pad(values, (0, -values.numel() % Q8_BLOCK)).view(-1, Q8_BLOCK)


def _q8_base(scales: torch.Tensor, is_positive: bool) -> torch.Tensor:
    return (scales - (31 if is_positive else 15)) << 23


def _q8_scales(largest: torch.Tensor, is_positive: bool) -> torch.Tensor:
    """The scale bytes, as int32, of blocks by the pattern of their largest size."""
    carry = 0x1FFFFF if is_positive else 0x0FFFFF  # a mantissa beyond the largest code's takes the next scale
    scales = ((largest.clamp(max=_INFINITE) + carry) >> 23).clamp(min=48)
    return scales.masked_fill(scales >= 254, 255).masked_fill(largest == 0, 0)
