"""The optimizer step in torch operations: the same definition as the native kernel's
(native/tiermem.h), on any device.

    stored parts -> widen to fp32 -> the rule's formula, one torch operation for each of the
    kernel's -> narrow -> stored parts

Every operation rounds once: it uses no addcdiv, lerp or alpha, which fuse a product with a sum.
Scalars are rounded to fp32 as in the kernel. So the stored values equal the kernel's to the bit,
except the payload of a NaN. Temporary memory is bounded: it steps CHUNK elements at a time.

Stored elements are converted to and from fp32 as in native/loops_element.h and native/loops_q8.h,
to the bit:

    fp32, bf16, fp16    torch's own conversions to nearest even; stochastically by random words
    split               integer sums of the weight's pattern and the low half
    8-bit blocks        integer sums of codes and scale bytes, drawn in native/loops_q8.h

Bit patterns are int32 numbers, which wrap like the kernel's unsigned numbers: torch has few
operations on uint32. The host never waits for the device. So masked_fill inserts scalars:
torch.where would copy them to the device and wait. The payload of a NaN may differ from the
kernel's, except in a split master.

Do not use torch.compile here: it may fuse products with sums and change bits. The device must keep
subnormals, divide exactly and support float64, as CPUs (unless torch.set_flush_denormal(True)) and
CUDA do.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiermem.swap.base.grad_mode import without_grad
from tiermem.swap.base.native import NORM_BLOCK, SCALARS
from tiermem.swap.base.parts import (
    MOMENTS,
    Q8_BLOCK,
    SPLIT,
    Dither,
    Moment,
    Quantised,
    StepParts,
    StepRule,
    check_moment,
    check_part,
    check_parts,
    moment_between,
    stored_of,
)

# patterns of fp32
_INFINITE = 0x7F800000
_QUIET_NAN = 0x7FC00000
_ONE_EXPONENT = 1 << 23
_HASH_STRIDE = 0x7FEB352D
_HASH_FACTOR = 0x846CA68B
_STEP_STRIDES = (0x9E3779B9, 0x6A09E667, 0xBB67AE85, 0xA54FF53B)


@without_grad
def widen_in_torch(
    stored: Moment, weight: torch.Tensor | None = None, is_positive: bool = False
) -> torch.Tensor:
    """Returns a part in fp32, exactly, in memory of its own on its device; as `widen_part` in
    swap/base/native.py.

    Does not wait for the device. Scale bytes of 1 to 47, which are never written, may be read as
    other numbers.
    """
    check_part(stored, weight, device=None)
    if isinstance(stored, Quantised):
        return _decode(stored, is_positive)
    if stored.dtype not in SPLIT:
        return stored.to(torch.float32, copy=True)
    assert weight is not None  # the low half, read as a signed number, is what rounding took away
    upper = weight.view(torch.int16)
    low = stored.view(torch.int16)
    # from a weight that the user has overwritten by zero
    is_left = ((upper & 0x7FFF) == 0) & (low < 0)
    bits = (upper.to(torch.int32) << 16) + low.masked_fill(is_left, 0)
    return bits.view(torch.float32)


@without_grad
def narrow_in_torch(
    values: torch.Tensor,
    stored: Moment,
    weight: torch.Tensor | None = None,
    is_positive: bool = False,
    words: torch.Tensor | None = None,
) -> None:
    """Writes fp32 values into a part on their device, to nearest even; as `narrow_part` in
    swap/base/native.py.

    A split master writes its bf16 weight too, and keeps every pattern, but NaNs that would round to
    zero lose a bit. words: random ones, by which parts below fp32 that are not split are rounded
    stochastically instead. Does not wait for the device.
    """
    numel = check_part(stored, weight, device=None)
    values = values.to(torch.float32)
    check_moment("values", values, numel, stored_of(stored).device)
    if isinstance(stored, Quantised):
        _encode(values, stored, is_positive, words)
    elif stored.dtype in SPLIT:
        assert weight is not None
        bits = values.view(torch.int32)
        bits = torch.where((bits & 0x7FFFFFFF) >= 0x7FFF8000, bits & ~0x8000, bits)
        weight.view(torch.int16).copy_((bits + 0x8000) >> 16)
        stored.view(torch.int16).copy_(bits)  # its lower half
    elif words is None or stored.dtype is torch.float32:
        stored.copy_(values)
    else:
        dithered = _dithered_bf16 if stored.dtype is torch.bfloat16 else _dithered_fp16
        stored.view(torch.int16).copy_(dithered(values, words))


def random_words(dither: Dither, number: int, numel: int, device: torch.device) -> torch.Tensor:
    """The words, as int32, of so many elements from dither.first_element on: native/rounding.h.

    number: the part's, 0 and 1 for the first two moments, 2 for the master, 3 for the largest
        second moment.
    """
    first = dither.first_element
    left = (1 << 32) - first % (1 << 32)
    if numel > left:  # the upper half of an element's number is mixed into the salts
        rest = dither._replace(first_element=first + left)
        pieces = ((dither, left), (rest, numel - left))
        return torch.cat([random_words(part, number, length, device) for part, length in pieces])
    start, salt, offset = salts_of(dither, number)
    x = torch.arange(numel, dtype=torch.int32, device=device) * _HASH_STRIDE + start
    x = (x ^ _shifted(x, 15)) + salt
    x = x * _signed(_HASH_FACTOR)
    x = x ^ _shifted(x, 16)
    return (x << 16 if number % 2 else x) + offset


def salts_of(dither: Dither, number: int) -> tuple[int, int, int]:
    """Start, salt and offset of a part's words, as int32 numbers, up to the next multiple of 2^32:
    native/rounding.h."""
    first = dither.first_element
    salt = _mix(_mix(dither.key + (number // 2 + 1) * 0x9E3779B97F4A7C15) + (first >> 32))
    return (
        _signed(first * _HASH_STRIDE + salt),
        _signed(salt >> 32),
        _signed(dither.step * _STEP_STRIDES[number]),
    )


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


# ---- bf16 and fp16, stochastically ---------------------------------------------------------------


def _dithered_bf16(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Up when the half that is cut off is above the word's upper half; next to infinity as to
    nearest."""
    bits = values.view(torch.int32)
    upper = bits >> 16
    cut = bits & 0xFFFF
    limit = _shifted(words, 16)
    size = upper & 0x7FFF
    limit = limit.masked_fill(size >= 0x7F7F, 0x7FFF).masked_fill(size >= 0x7F80, 0xFFFF)
    return upper + (cut > limit)


def _dithered_fp16(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """As bf16; a subnormal result is a whole number of units of 2^-24 and a share of one, compared
    with the word."""
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


# ---- 8-bit blocks --------------------------------------------------------------------------------


def _decode(stored: Quantised, is_positive: bool) -> torch.Tensor:
    numel = stored.codes.numel()
    codes = _in_blocks(stored.codes).to(torch.int32)
    scales = stored.scales.to(torch.int32)[:, None]
    base = _q8_base(scales, is_positive)
    if is_positive:
        bits = ((codes << 20) + base).masked_fill(codes == 0, 0)
    else:  # a subnormal is shifted by the adder; of the two readings of a code the smaller is right
        normal = ((codes & 0x7F) << 20) + base
        least = base + _ONE_EXPONENT
        subnormal = (normal + _ONE_EXPONENT).view(torch.float32) - least.view(torch.float32)
        bits = torch.minimum(normal, subnormal.view(torch.int32)) | ((codes >> 7) << 31)
    bits = bits.masked_fill(scales == 0, 0).masked_fill(scales == 255, _QUIET_NAN)
    return bits.view(torch.float32).view(-1)[:numel]


def _encode(
    values: torch.Tensor, stored: Quantised, is_positive: bool, words: torch.Tensor | None
) -> None:
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
    # a mantissa beyond the largest code's takes the next scale
    carry = 0x1FFFFF if is_positive else 0x0FFFFF
    scales = ((largest.clamp(max=_INFINITE) + carry) >> 23).clamp(min=48)
    return scales.masked_fill(scales >= 254, 255).masked_fill(largest == 0, 0)


CHUNK = 1 << 21
"""Elements that are stepped or measured at a time: a multiple of NORM_BLOCK, and that of
Q8_BLOCK."""

SCRATCH_BYTES = 64
"""What a step takes for an element of a chunk beside its parts at most, on their device."""

_SUM_BYTES = 24  # the same, of `block_sums_in_torch`


def step_scratch_bytes(numel: int) -> int:
    """What an accelerator takes beside a tile that it steps, at most: fp32 values of a chunk."""
    return min(numel, CHUNK) * SCRATCH_BYTES


def sum_scratch_bytes(numel: int) -> int:
    """What an accelerator takes at most beside so many elements whose squares `block_sums_in_torch`
    adds up."""
    return min(numel, CHUNK) * _SUM_BYTES


# the parts' numbers in native/rounding.h
_DITHERED_MOMENTS = (0, 1, 3)
_DITHERED_MASTER = 2


@without_grad
def step_in_torch(
    rule: StepRule,
    parts: StepParts,
    dither: Dither | None = None,
    start_moments: bool = False,
) -> None:
    """Steps master and moments in place, and writes the weight, on their device; as
    `optimizer_step` in swap/base/native.py.

    Does not wait for the device. Raises ValueError for parts that do not fit together or lie on
    several devices.
    """
    numel = parts.grad.numel()
    check_parts(rule, parts, parts.grad.device)
    rule, one_minus = rounded_scalars(rule, start_moments)
    for begin in range(0, numel, CHUNK):
        end = min(begin + CHUNK, numel)
        chunk = parts_between(parts, begin, end)
        own = (
            None if dither is None else dither._replace(first_element=dither.first_element + begin)
        )
        _step_chunk(rule, one_minus, chunk, own, start_moments)


def parts_between(parts: StepParts, begin: int, end: int) -> StepParts:
    """Views of the elements [begin, end) of all parts. begin: a multiple of Q8_BLOCK where a moment
    is in 8 bits."""
    weight, master = (
        None if part is None else part[begin:end] for part in (parts.weight, parts.master)
    )
    moments = [moment_between(moment, begin, end) for moment in parts.moments]
    return StepParts(weight, master, parts.grad[begin:end], moments)


@without_grad
def block_sums_in_torch(grad: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the sum of squares, in float64 on the gradient's device, of each norm block that a
    flat gradient touches.

    first: the index of grad[0] in its whole parameter. The blocks are those of `store_gradient` in
        swap/base/native.py, and a sum is finite if and only if every element is. Squares are added
        as a binary tree over their places in the block, the kernel's in 16 lanes. So a sum may
        differ from the kernel's by a few units in its last place, but has the same bits on every
        device and however the parameter is cut at blocks. Does not wait for the device.
    """
    if grad.numel() == 0:
        return torch.empty(0, dtype=torch.float64, device=grad.device)
    last = first + grad.numel()
    sums = []
    for begin in range(first // NORM_BLOCK * NORM_BLOCK, last, CHUNK):
        start = max(begin, first)
        stop = min(begin + CHUNK, last)
        wide = grad[start - first : stop - first].double()
        tree = pad(wide * wide, (start - begin, -stop % NORM_BLOCK)).view(-1, NORM_BLOCK)
        while tree.shape[1] > 1:
            lower, upper = tree.chunk(2, dim=1)
            tree = lower + upper
        sums.append(tree.view(-1))
    return torch.cat(sums)


def memory_traffic(work: Callable[[], object]) -> int:
    """Runs torch operations and returns the bytes of memory that they read and write: of every
    tensor of each, once.

    Operations that make views move nothing.
    """
    traffic = _Traffic()
    with traffic:
        work()
    return traffic.num_bytes


class _Traffic(TorchDispatchMode):
    """Adds up what operations move."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = {
                id(each): each.nbytes
                for each in tree_leaves((args, result))
                if isinstance(each, torch.Tensor)
            }
            self.num_bytes += sum(moved.values())
        return result


# ---- one chunk -----------------------------------------------------------------------------------


class OneMinus(NamedTuple):
    """One minus these scalars: computed in double, then rounded to fp32."""

    beta1: float
    beta2: float
    dampening: float


def rounded_scalars(rule: StepRule, start_moments: bool) -> tuple[StepRule, OneMinus]:
    """Returns a rule whose scalars are fp32 numbers (tm_constants in native/loops.h), and one minus
    some of them."""
    one_minus = OneMinus(
        1.0 - rule.beta1, 1.0 - rule.beta2, 1.0 if start_moments else 1.0 - rule.dampening
    )
    rule = rule._replace(
        grad_scale=-rule.grad_scale if rule.maximize else rule.grad_scale,
        initial=rule.initial if rule.name == "adagrad" else 0.0,
    )
    single: dict[str, Any] = {name: ctypes.c_float(getattr(rule, name)).value for name in SCALARS}
    return rule._replace(**single), OneMinus(*(ctypes.c_float(value).value for value in one_minus))


def _step_chunk(
    rule: StepRule,
    one_minus: OneMinus,
    parts: StepParts,
    dither: Dither | None,
    start_moments: bool,
) -> None:
    weight = parts.weight
    master = parts.master
    kinds = MOMENTS[rule.name]
    is_split = master is not None and master.dtype in SPLIT
    held = weight if master is None else master
    assert held is not None
    p = widen_in_torch(held, weight if is_split else None)
    g = parts.grad.to(torch.float32) * rule.grad_scale
    if start_moments:
        moments = [torch.full_like(p, rule.initial) for _ in parts.moments]
    else:
        moments = [
            widen_in_torch(part, None, kind.is_positive)
            for part, kind in zip(parts.moments, kinds, strict=False)
        ]
    p, moments = _FORMULAS[rule.name](rule, one_minus, p, g, moments)
    for number, part, kind, values in zip(
        _DITHERED_MOMENTS, parts.moments, kinds, moments, strict=False
    ):
        narrow_in_torch(values, part, None, kind.is_positive, _words_for(part, number, dither))
    if master is None:
        narrow_in_torch(p, held, None, False, _words_for(held, _DITHERED_MASTER, dither))
    elif is_split:
        # a NaN that the weight shows
        narrow_in_torch(p.masked_fill(p != p, math.nan), master, weight)
    else:
        narrow_in_torch(p, master)
        if weight is not None:
            narrow_in_torch(p, weight)


def _words_for(part: Moment, number: int, dither: Dither | None) -> torch.Tensor | None:
    """The random words of a part that is rounded stochastically; None: it is not."""
    stored = stored_of(part)
    if dither is None or stored.dtype is torch.float32:
        return None
    return random_words(dither, number, stored.numel(), stored.device)


# ---- the rules: formulas and order of operations as in native/tiermem.h --------------------------


_Tensors = list[torch.Tensor]
_Stepped = tuple[torch.Tensor, _Tensors]


def _adam(
    rule: StepRule, one_minus: OneMinus, p: torch.Tensor, g: torch.Tensor, moments: _Tensors
) -> _Stepped:
    m, v, *largest = moments
    if rule.name == "adamw":
        p = p * rule.decay
    else:
        g = g + p * rule.decay
    m = m + (g - m) * one_minus.beta1
    v = v * rule.beta2 + (g * g) * one_minus.beta2
    w = v
    if largest:  # NaN wins, whichever of the two it is
        w = torch.where((v > largest[0]) | (v != v), v, largest[0])
    p = p - (m / (_sqrt(w) * rule.inv_sqrt_bias2 + rule.eps)) * rule.step_size
    return p, [m, v, w][: len(moments)]


def _adagrad(
    rule: StepRule, one_minus: OneMinus, p: torch.Tensor, g: torch.Tensor, moments: _Tensors
) -> _Stepped:
    g = g + p * rule.decay
    total = moments[0] + g * g
    return p - (g / (_sqrt(total) + rule.eps)) * rule.step_size, [total]


def _lion(
    rule: StepRule, one_minus: OneMinus, p: torch.Tensor, g: torch.Tensor, moments: _Tensors
) -> _Stepped:
    m = moments[0]
    u = m * rule.beta1 + g * one_minus.beta1
    has_no_size = (u == 0) | (u != u)  # zeros keep their sign, NaN stays NaN
    sign = torch.where(has_no_size, u, torch.copysign(torch.ones_like(u), u))
    return p * rule.decay - sign * rule.step_size, [m * rule.beta2 + g * one_minus.beta2]


def _sgd(
    rule: StepRule, one_minus: OneMinus, p: torch.Tensor, g: torch.Tensor, moments: _Tensors
) -> _Stepped:
    g = g + p * rule.decay
    if not moments:
        return p - g * rule.step_size, []
    m = moments[0] * rule.momentum + g * one_minus.dampening
    update = g + m * rule.momentum if rule.nesterov else m
    return p - update * rule.step_size, [m]


_FORMULAS = {
    "adamw": _adam,
    "adam": _adam,
    "adagrad": _adagrad,
    "lion": _lion,
    "sgd": _sgd,
}


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch's in fp32 is not on every CPU (MKL's on AMD: a sixth are
    neighbours).

    No square root of an fp32 number lies within 4 units of float64 of where fp32 rounds up or down:
    1 unit of error is no harm.
    """
    return x.double().sqrt().float()
