"""The optimizer step of swap/kernels/torch_step.py as one Triton kernel, in one pass over memory,
on CUDA and ROCm.

    stored parts, each read once -> fp32 in registers -> the rule's formula -> stored parts, each
    written once

    rules              adamw, adam (both with amsgrad), adagrad, lion, sgd (momentum, nesterov), the two steps of a matrix rule
    weight             fp32, bf16, fp16, none
    master             fp32, split, none
    gradient           fp32, bf16, fp16
    moments            fp32, bf16, fp16, 8-bit blocks, in any mix
    rounding           to nearest, stochastic
    first step         moments that start, a master that starts from the weight

Torch operations (`step_in_torch`) do the rest: a matrix's products; devices of other kinds, such as
XPU, whose Triton does not promise exact quotients and roots; and a kernel that does not compile, or
whose bits differ, on this device.

Every operation rounds once. The compiler may not fuse a product with a sum (`enable_fp_fusion`);
quotients and roots are those of IEEE 754; subnormals are kept; scalars are fp32 numbers, which the
host rounded. So stored values equal those of torch operations to the bit, except the payload of a
NaN. The tests run the kernel in Triton's interpreter, and compile it without a GPU and read its
instructions; an H200 has run it. Other GPUs have not, so each variant of the kernel is tried when a
process first uses it on a device: on some thousand numbers, beside torch operations.

Triton compiles a variant in about a second, when it is first used, and keeps it on disk
(TRITON_CACHE_DIR). It needs a C compiler. This module imports triton, so only device_kernels.py
imports it, where triton is installed: torch for CUDA brings it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tiermem.swap.base.parts import (
    MOMENTS,
    Q8_BLOCK,
    Dither,
    Moment,
    Quantised,
    StepParts,
    StepRule,
    check_parts,
    num_scales,
    stored_of,
)
from tiermem.swap.kernels.torch_step import (
    narrow_in_torch,
    parts_between,
    rounded_scalars,
    salts_of,
    step_in_torch,
)

_logger = logging.getLogger("tiermem")

_ROWS = tl.constexpr(16)
_BLOCK = tl.constexpr(Q8_BLOCK)
"""Blocks that one program of the kernel steps, and elements of a block."""

_TRIED = ((0, 1024), (1024, 3300))
"""Elements on which a variant is tried: whole blocks, then a range that cuts one."""


def step_in_triton(
    rule: StepRule,
    parts: StepParts,
    dither: Dither | None = None,
    start_moments: bool = False,
) -> None:
    """Steps the parts in place, on their device, as `step_in_torch` in swap/kernels/torch_step.py,
    in one kernel on the current stream.

    Waits for the device when a variant is first used there, then no more. Raises ValueError for
    parts that do not fit together.
    """
    check_parts(rule, parts, parts.grad.device)
    dtypes = tuple(
        None if part is None else stored_of(part).dtype for part in (*parts[:3], *parts.moments)
    )
    variant = (rule.name, rule.nesterov, dtypes, dither is not None, start_moments)
    step = launch if _is_exact(parts.grad.device, *variant) else step_in_torch
    step(rule, parts, dither, start_moments)


def launch(
    rule: StepRule,
    parts: StepParts,
    dither: Dither | None = None,
    start_moments: bool = False,
) -> None:
    """Queues the kernel on parts that were checked. Raises what Triton raises where it cannot
    compile or start it."""
    numel = parts.grad.numel()
    left = numel if dither is None else (1 << 32) - dither.first_element % (1 << 32)
    # the upper half of an element's number is mixed into the salts
    if dither is not None and left < numel:
        rest = dither._replace(first_element=dither.first_element + left)
        if left % Q8_BLOCK and any(isinstance(moment, Quantised) for moment in parts.moments):
            return step_in_torch(rule, parts, dither, start_moments)
        launch(rule, parts_between(parts, 0, left), dither, start_moments)
        return launch(rule, parts_between(parts, left, numel), rest, start_moments)
    if numel == 0:
        return None
    rule, one_minus = rounded_scalars(rule, start_moments)
    scalars = _Scalars._make(
        [*(getattr(rule, name) for name in _Scalars._fields[: -len(one_minus)]), *one_minus]
    )
    with torch.accelerator.device_index(parts.grad.device.index):
        _step[(triton.cdiv(numel, _ROWS.value * Q8_BLOCK),)](
            *(pointer_to(part) for part in parts[:3]),
            tuple(
                (pointer_to(part), part.scales if isinstance(part, Quantised) else None)
                for part in parts.moments
            ),
            numel,
            scalars,
            *_words_of(dither),
            rule=rule.name,
            num_moments=len(parts.moments),
            nesterov=rule.nesterov,
            dithered=dither is not None,
            start_moments=start_moments,
            enable_fp_fusion=False,
        )
    return None


class _Scalars(NamedTuple):
    """Those of StepRule, then those of `OneMinus`; in fp32."""

    step_size: float
    decay: float
    grad_scale: float
    beta1: float
    beta2: float
    eps: float
    inv_sqrt_bias2: float
    momentum: float
    initial: float
    one_minus_beta1: float
    one_minus_beta2: float
    one_minus_dampening: float


def _words_of(dither: Dither | None) -> list[int]:
    """Start and salt of the two hashes, each of which serves two parts; then the offsets of the
    four parts."""
    parts = [(0, 0, 0) if dither is None else salts_of(dither, number) for number in range(4)]
    return [*parts[0][:2], *parts[2][:2], *(offset for _, _, offset in parts)]


def pointer_to(part: Moment | None) -> torch.Tensor | None:
    """A part as kernels take it: bf16 numbers and split masters as int16."""
    if part is None:
        return None
    stored = stored_of(part)
    return stored.view(torch.int16) if stored.dtype in (torch.bfloat16, torch.uint16) else stored


# ---- is it exact here? ---------------------------------------------------------------------------


@functools.cache
def _is_exact(
    device: torch.device,
    name: str,
    nesterov: bool,
    dtypes: tuple[torch.dtype | None, ...],
    is_dithered: bool,
    start_moments: bool,
) -> bool:
    """Whether this variant of the kernel runs on the device and gives the bits of torch operations.
    Waits for the device."""
    rule = StepRule(name, 0.03, 0.97, 0.37, 0.9, 0.95, 1e-8, 4.5, 0.8, 0.3, 0.1, nesterov=nesterov)
    dither = Dither(0xFEDCBA9876543210, 1234567, (1 << 32) - 2048) if is_dithered else None
    try:
        seen, wanted = (_parts_to_try(name, dtypes, device) for _ in "12")
        step_in_torch(rule, wanted, dither, start_moments)
        for begin, end in _TRIED:
            own = (
                None
                if dither is None
                else dither._replace(first_element=dither.first_element + begin)
            )
            launch(rule, parts_between(seen, begin, end), own, start_moments)
        fault = "its bits differ from those of torch operations"
        if all(map(torch.equal, _bytes_of(seen), _bytes_of(wanted))):
            return True
    # Triton's compiler, the C compiler, the driver: each raises its own kinds
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    _logger.warning(
        "Triton cannot step %s of %s on %s; torch operations do, to the same bits: %s",
        name,
        dtypes,
        device,
        fault,
    )
    return False


def _parts_to_try(
    name: str, dtypes: tuple[torch.dtype | None, ...], device: torch.device
) -> StepParts:
    """The same numbers, of many sizes, for the same dtypes; none overflows."""
    numel = _TRIED[-1][-1]
    generator = torch.Generator().manual_seed(1)
    kinds = MOMENTS[name]
    parts = list[Any]()
    for k, dtype in enumerate(dtypes):
        values = torch.randn(numel, generator=generator)
        values *= torch.exp2(torch.randint(-24, 4, (numel,), generator=generator))
        is_positive = k > 2 and kinds[k - 3].is_positive
        values = (values.abs() if is_positive else values).to(device)
        part: Any = None if dtype is None else torch.empty(numel, dtype=dtype, device=device)
        if dtype is torch.uint8:
            part = Quantised(part, torch.empty(num_scales(numel), dtype=dtype, device=device))
        if part is not None:
            narrow_in_torch(values, part, parts[0] if k == 1 else None, is_positive)
        parts.append(part)
    weight, master, grad, *moments = parts
    return StepParts(weight, master, grad, moments)


def _bytes_of(parts: StepParts) -> list[torch.Tensor]:
    held: list[Any] = [part for part in parts.stepped if part is not None]
    flat = [tensor for part in held for tensor in (part if isinstance(part, Quantised) else [part])]
    return [tensor.view(torch.uint8) for tensor in flat]


# ---- the kernel ----------------------------------------------------------------------------------
#
# A program steps ROWS blocks. `rows` are the blocks' numbers, `_at` the elements', a matrix.
# Pointers tell formats: float32; float16; int16 for bf16 and split masters; uint8 for codes. Bit
# patterns are int32 numbers. Rules and conversions are those of swap/kernels/torch_step.py,
# operation by operation, and so are their comments.


@triton.jit(
    do_not_specialize=[
        "start_0",
        "salt_0",
        "start_2",
        "salt_2",
        "offset_0",
        "offset_1",
        "offset_2",
        "offset_3",
    ]
)
def _step(
    weight: tl.tensor,
    master: tl.tensor,
    grad: tl.tensor,
    moments: tl.tuple,
    numel: tl.tensor,
    scalars: tl.tuple,
    start_0: tl.tensor,
    salt_0: tl.tensor,
    start_2: tl.tensor,
    salt_2: tl.tensor,
    offset_0: tl.tensor,
    offset_1: tl.tensor,
    offset_2: tl.tensor,
    offset_3: tl.tensor,
    rule: tl.constexpr,
    num_moments: tl.constexpr,
    nesterov: tl.constexpr,
    dithered: tl.constexpr,
    start_moments: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    p = _read_master(weight, master, rows, numel)
    g = _read((grad, None), rows, numel, False) * scalars.grad_scale
    m = None
    v = None
    w = None
    if start_moments:
        m = tl.zeros([_ROWS, _BLOCK], tl.float32) + scalars.initial
        v = m
        w = m
    else:
        if num_moments > 0:
            m = _read(moments[0], rows, numel, rule == "adagrad")
        if num_moments > 1:
            v = _read(moments[1], rows, numel, True)
        if num_moments > 2:
            w = _read(moments[2], rows, numel, True)
    if rule == "adamw" or rule == "adam":
        p, m, v, w = _adam(p, g, m, v, w, scalars, rule == "adamw", num_moments > 2)
    elif rule == "adagrad":
        p, m = _adagrad(p, g, m, scalars)
    elif rule == "lion":
        p, m = _lion(p, g, m, scalars)
    else:
        p, m = _sgd(p, g, m, scalars, num_moments > 0, nesterov)
    words = (
        ((start_0, start_2), (salt_0, salt_2), (offset_0, offset_1, offset_2, offset_3))
        if dithered
        else None
    )
    if num_moments > 0:
        _write(m, moments[0], rows, numel, words, 0, rule == "adagrad")
    if num_moments > 1:
        _write(v, moments[1], rows, numel, words, 1, True)
    if num_moments > 2:
        _write(w, moments[2], rows, numel, words, 3, True)
    _write_master(p, weight, master, rows, numel, words)


@triton.jit
def _at(rows: tl.tensor) -> tl.tensor:
    return rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]


@triton.jit
def _read_master(
    weight: tl.tensor, master: tl.tensor, rows: tl.tensor, numel: tl.tensor
) -> tl.tensor:
    if master is None:
        p = _read((weight, None), rows, numel, False)
    elif master.dtype.element_ty == tl.int16:
        low = tl.load(master + _at(rows), _at(rows) < numel, 0)
        upper = _bits(_read((weight, None), rows, numel, False))
        # from a weight that the user has overwritten by zero
        is_left = ((upper & 0x7FFFFFFF) == 0) & (low < 0)
        p = float_of(upper + tl.where(is_left, 0, low.to(tl.int32)))
    else:
        p = _read((master, None), rows, numel, False)
    return p


@triton.jit
def _write_master(
    p: tl.tensor,
    weight: tl.tensor,
    master: tl.tensor,
    rows: tl.tensor,
    numel: tl.tensor,
    words: tl.tuple,
) -> None:
    at = _at(rows)
    if master is None:
        _write(p, (weight, None), rows, numel, words, 2, False)
    elif master.dtype.element_ty == tl.int16:
        bits = tl.where(p != p, 0x7FC00000, _bits(p))  # a NaN that the weight shows
        tl.store(weight + at, ((bits + 0x8000) >> 16).to(tl.int16), at < numel)
        tl.store(master + at, bits.to(tl.int16), at < numel)
    else:
        tl.store(master + at, p, at < numel)
        if weight is not None:
            _write(p, (weight, None), rows, numel, None, 2, False)


# ---- the rules -----------------------------------------------------------------------------------


@triton.jit
def _adam(
    p: tl.tensor,
    g: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    w: tl.tensor,
    c: tl.tuple,
    is_decoupled: tl.constexpr,
    is_amsgrad: tl.constexpr,
) -> tl.tuple:
    if is_decoupled:
        p = p * c.decay
    else:
        g = g + p * c.decay
    m = m + (g - m) * c.one_minus_beta1
    v = v * c.beta2 + (g * g) * c.one_minus_beta2
    w = tl.where((v > w) | (v != v), v, w) if is_amsgrad else v
    p = p - tl.div_rn(m, tl.sqrt_rn(w) * c.inv_sqrt_bias2 + c.eps) * c.step_size
    return p, m, v, w


@triton.jit
def _adagrad(p: tl.tensor, g: tl.tensor, total: tl.tensor, c: tl.tuple) -> tl.tuple:
    g = g + p * c.decay
    total = total + g * g
    return p - tl.div_rn(g, tl.sqrt_rn(total) + c.eps) * c.step_size, total


@triton.jit
def _lion(p: tl.tensor, g: tl.tensor, m: tl.tensor, c: tl.tuple) -> tl.tuple:
    u = m * c.beta1 + g * c.one_minus_beta1
    one = float_of((_bits(u) & -0x80000000) | 0x3F800000)
    sign = tl.where((u == 0) | (u != u), u, one)
    return p * c.decay - sign * c.step_size, m * c.beta2 + g * c.one_minus_beta2


@triton.jit
def _sgd(
    p: tl.tensor,
    g: tl.tensor,
    m: tl.tensor,
    c: tl.tuple,
    has_moment: tl.constexpr,
    nesterov: tl.constexpr,
) -> tl.tuple:
    g = g + p * c.decay
    update = g
    if has_moment:
        m = m * c.momentum + g * c.one_minus_dampening
        update = g + m * c.momentum if nesterov else m
    else:
        m = g  # unused: Triton 3.6 returns no None
    return p - update * c.step_size, m


# ---- formats -------------------------------------------------------------------------------------


@triton.jit
def _bits(values: tl.tensor) -> tl.tensor:
    return values.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _shifted(bits: tl.tensor, count: tl.constexpr) -> tl.tensor:
    return (bits.to(tl.uint32, bitcast=True) >> count).to(tl.int32, bitcast=True)


@triton.jit
def _read(
    pair: tl.tuple, rows: tl.tensor, numel: tl.tensor, is_positive: tl.constexpr
) -> tl.tensor:
    part, scales = pair
    stored = tl.load(part + _at(rows), _at(rows) < numel, 0)
    if part.dtype.element_ty == tl.int16:
        values = float_of(stored.to(tl.int32) << 16)
    elif part.dtype.element_ty == tl.uint8:
        scale = tl.load(scales + rows, rows * _BLOCK < numel, 0).to(tl.int32)
        values = _decoded(stored.to(tl.int32), scale[:, None], is_positive)
    else:
        values = stored.to(tl.float32)
    return values


@triton.jit
def _write(
    values: tl.tensor,
    pair: tl.tuple,
    rows: tl.tensor,
    numel: tl.tensor,
    words: tl.tuple,
    number: tl.constexpr,
    is_positive: tl.constexpr,
) -> None:
    part, scales = pair
    at = _at(rows)
    word = None
    if words is not None and part.dtype.element_ty != tl.float32:
        word = _word(at, words, number)
    if part.dtype.element_ty == tl.uint8:
        codes, scale = _encoded(tl.where(at < numel, values, 0.0), word, is_positive)
        tl.store(part + at, codes.to(tl.uint8), at < numel)
        tl.store(scales + rows, scale.to(tl.uint8), rows * _BLOCK < numel)
    elif part.dtype.element_ty == tl.int16:
        tl.store(part + at, _bf16(values, word).to(tl.int16), at < numel)
    elif part.dtype.element_ty == tl.float16 and word is not None:
        half = _dithered_fp16(_bits(values), word).to(tl.int16)
        tl.store(part + at, half.to(tl.float16, bitcast=True), at < numel)
    else:
        tl.store(part + at, values.to(part.dtype.element_ty), at < numel)


@triton.jit
def _word(at: tl.tensor, words: tl.tuple, number: tl.constexpr) -> tl.tensor:
    x = at.to(tl.int32) * 0x7FEB352D + words[0][number // 2]
    x = (x ^ _shifted(x, 15)) + words[1][number // 2]
    x = x * (0x846CA68B - 0x100000000)
    x = x ^ _shifted(x, 16)
    return (x << 16 if number % 2 == 1 else x) + words[2][number]


@triton.jit
def _bf16(values: tl.tensor, word: tl.tensor) -> tl.tensor:
    bits = _bits(values)
    if word is None:
        bits = tl.where(values != values, 0x7FC00000, bits)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        size = (bits >> 16) & 0x7FFF
        limit = _shifted(word, 16)
        limit = tl.where(size >= 0x7F80, 0xFFFF, tl.where(size >= 0x7F7F, 0x7FFF, limit))
        half = (bits >> 16) + ((bits & 0xFFFF) > limit).to(tl.int32)
    return half


@triton.jit
def _dithered_fp16(bits: tl.tensor, word: tl.tensor) -> tl.tensor:
    size = bits & 0x7FFFFFFF
    share = tl.where(size >= 0x477FE000, 0x1000, _shifted(~word, 19))
    normal = (size - (112 << 23) + share) >> 13
    units = float_of(tl.where(size < (113 << 23), size, 0)) * 16777216.0
    whole = units.to(tl.int32)
    threshold = (_shifted(word, 16).to(tl.float32) + 0.5) * (1.0 / 65536.0)
    subnormal = whole + (threshold < units - whole.to(tl.float32)).to(tl.int32)
    half = tl.where(size < (113 << 23), subnormal, normal)
    half = tl.where(size > 0x7F800000, 0x7E00, tl.where(size >= (143 << 23), 0x7C00, half))
    return half | ((bits >> 31) << 15)


@triton.jit
def _decoded(codes: tl.tensor, scale: tl.tensor, is_positive: tl.constexpr) -> tl.tensor:
    if is_positive:
        bits = tl.where(codes == 0, 0, (codes << 20) + ((scale - 31) << 23))
    else:  # a subnormal is shifted by the adder; of the two readings of a code the smaller is right
        normal = ((codes & 0x7F) << 20) + ((scale - 15) << 23)
        subnormal = float_of(normal + (1 << 23)) - float_of((scale - 14) << 23)
        bits = tl.minimum(normal, _bits(subnormal)) | ((codes >> 7) << 31)
    return float_of(tl.where(scale == 0, 0, tl.where(scale == 255, 0x7FC00000, bits)))


@triton.jit
def _encoded(values: tl.tensor, word: tl.tensor, is_positive: tl.constexpr) -> tl.tuple:
    bits = _bits(values)
    size = bits & 0x7FFFFFFF
    if is_positive:  # negative numbers are not allowed, but -0
        size = tl.where((bits < 0) & (size != 0), 0x7F800000, size)
    largest = tl.max(size, 1)
    # a mantissa beyond the largest code's takes the next scale
    carry = 0x1FFFFF if is_positive else 0x0FFFFF
    scale = (tl.minimum(largest, 0x7F800000) + carry) >> 23
    scale = tl.where(largest == 0, 0, tl.where(scale >= 254, 255, tl.maximum(scale, 48)))
    base = (scale[:, None] - (31 if is_positive else 15)) << 23
    pattern = bits
    if not is_positive:  # the size as a normal number's; as in _decoded, with the larger
        pattern = tl.maximum(_bits(float_of(size) + float_of(base + (1 << 23))) - (1 << 23), size)
    if word is None:
        rounded = pattern + ((pattern >> 20) & 1) + (0x7FFFF - base)
    else:
        rounded = pattern - _shifted(word, 12) + (0xFFFFF - base)
    if is_positive:  # what is not 0 stays so
        codes = tl.where(size == 0, 0, tl.maximum(rounded, 1 << 20) >> 20)
    else:
        codes = ((rounded & 0x7FFFFFF) | ((bits >> 4) & 0x8000000)) >> 20
    return tl.where(((scale == 0) | (scale == 255))[:, None], 0, codes), scale
