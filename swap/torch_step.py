"""The step in torch operations: the definition of the native kernel (native/tiermem.h) on tensors of any device.

    stored parts -> widen to fp32 -> the rule's formula, one torch operation for each of the kernel's -> narrow -> stored parts

Every operation rounds once: no addcdiv, no lerp, no alpha, nothing that fuses a product with a sum. Scalars are rounded to
fp32 as the kernel rounds them. What is stored has the kernel's bits for that reason, but for the payload of a NaN. It is the
reference of faster forms for one kind of device. The host never waits for the device (torch_parts.py says what that asks
for). Temporary memory is bounded: CHUNK elements are stepped at a time.

It is not for compilers: `torch.compile` may fuse products with sums and change bits. The device has to keep subnormals and
divide exactly, as CPUs (unless torch.set_flush_denormal(True)) and CUDA do, and to know float64.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tiermem.swap.native import NORM_BLOCK
from tiermem.swap.parts import (
    MOMENTS,
    Q8_BLOCK,
    SPLIT,
    Dither,
    Moment,
    Quantised,
    StepParts,
    StepRule,
    check_parts,
    num_scales,
)
from tiermem.swap.torch_parts import narrow_in_torch, random_words, widen_in_torch

CHUNK = 1 << 21
"""Elements that are stepped or measured at a time: a multiple of NORM_BLOCK, and that of Q8_BLOCK."""

SCRATCH_BYTES = 64 * CHUNK
"""What a step takes beside its parts at most, on their device."""

_DITHERED_MOMENTS, _DITHERED_MASTER = (0, 1, 3), 2  # the parts' numbers in native/rounding.h


@torch.no_grad()
def step_in_torch(
    rule: StepRule,
    parts: StepParts,
    dither: Dither | None = None,
    *,
    start_moments: bool = False,
    start_master: bool = False,
) -> None:
    """Steps master and moments in place, and writes the weight, on their device; as `optimizer_step` in swap/native.py.

    Does not wait for the device. Raises ValueError for parts that do not fit together or lie on several devices.
    """
    numel = parts.grad.numel()
    check_parts(rule, parts, start_master, parts.grad.device)
    scalars = _round_scalars(rule, start_moments)
    for begin in range(0, numel, CHUNK):
        end = min(begin + CHUNK, numel)
        weight, master = (None if part is None else part[begin:end] for part in (parts.weight, parts.master))
        moments = [_moment_at(moment, begin, end) for moment in parts.moments]
        chunk = StepParts(weight, master, parts.grad[begin:end], moments)
        own = None if dither is None else dither._replace(first_element=dither.first_element + begin)
        _step_chunk(rule, scalars, chunk, own, start_moments, start_master)


@torch.no_grad()
def block_sums_in_torch(grad: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the sum of squares, in float64 on the gradient's device, of each norm block that a flat gradient touches.

    first: the index of grad[0] in its whole parameter. The blocks are those of `store_gradient` in swap/native.py, and a sum is
    finite if and only if every element is. Squares are added as a binary tree over their places in the block, the kernel's
    in 16 lanes. So a sum may differ from the kernel's by a few units in its last place, but has the same bits on every
    device and however the parameter is cut at blocks. Does not wait for the device.
    """
    if grad.numel() == 0:
        return torch.empty(0, dtype=torch.float64, device=grad.device)
    last, sums = first + grad.numel(), []
    for begin in range(first // NORM_BLOCK * NORM_BLOCK, last, CHUNK):
        start, stop = max(begin, first), min(begin + CHUNK, last)
        wide = grad[start - first : stop - first].double()
        tree = pad(wide * wide, (start - begin, -stop % NORM_BLOCK)).view(-1, NORM_BLOCK)
        while tree.shape[1] > 1:
            lower, upper = tree.chunk(2, dim=1)
            tree = lower + upper
        sums.append(tree.view(-1))
    return torch.cat(sums)


# ---- one chunk --------------------------------------------------------------------------------------------------------


class _Scalars(NamedTuple):
    """The scalars of one step, each an fp32 number: tm_constants in native/loops.h."""

    grad_scale: float
    decay: float
    step_size: float
    eps: float
    inv_sqrt_bias2: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    momentum: float
    one_minus_dampening: float
    initial: float


def _round_scalars(rule: StepRule, start_moments: bool) -> _Scalars:
    doubles = _Scalars(
        grad_scale=-rule.grad_scale if rule.maximize else rule.grad_scale,
        decay=rule.decay,
        step_size=rule.step_size,
        eps=rule.eps,
        inv_sqrt_bias2=rule.inv_sqrt_bias2,
        beta1=rule.beta1,
        one_minus_beta1=1.0 - rule.beta1,
        beta2=rule.beta2,
        one_minus_beta2=1.0 - rule.beta2,
        momentum=rule.momentum,
        one_minus_dampening=1.0 if start_moments else 1.0 - rule.dampening,
        initial=rule.initial if rule.name == "adagrad" else 0.0,
    )
    return _Scalars(*(ctypes.c_float(value).value for value in doubles))


def _step_chunk(
    rule: StepRule, s: _Scalars, parts: StepParts, dither: Dither | None, start_moments: bool, start_master: bool
) -> None:
    weight, master, kinds = parts.weight, parts.master, MOMENTS[rule.name]
    is_split = master is not None and master.dtype in SPLIT
    held = weight if master is None or start_master else master
    assert held is not None
    p = widen_in_torch(held, weight if held.dtype in SPLIT else None)
    g = parts.grad.to(torch.float32) * s.grad_scale
    if start_moments:
        moments = [torch.full_like(p, s.initial) for _ in parts.moments]
    else:
        moments = [
            widen_in_torch(part, None, kind.is_positive) for part, kind in zip(parts.moments, kinds, strict=False)
        ]
    p, moments = _FORMULAS[rule.name](rule, s, p, g, moments)
    for number, part, kind, values in zip(_DITHERED_MOMENTS, parts.moments, kinds, moments, strict=False):
        narrow_in_torch(values, part, None, kind.is_positive, _words_for(part, number, dither))
    if master is None:
        narrow_in_torch(p, held, None, False, _words_for(held, _DITHERED_MASTER, dither))
    elif is_split:
        narrow_in_torch(p.masked_fill(p != p, math.nan), master, weight)  # a NaN that the weight shows
    else:
        narrow_in_torch(p, master)
        if weight is not None:
            narrow_in_torch(p, weight)


def _moment_at(moment: Moment, begin: int, end: int) -> Moment:
    if isinstance(moment, Quantised):
        return Quantised(moment.codes[begin:end], moment.scales[begin // Q8_BLOCK : num_scales(end)])
    return moment[begin:end]


def _words_for(part: Moment, number: int, dither: Dither | None) -> torch.Tensor | None:
    """The random words of a part that is rounded stochastically; None: it is not."""
    stored = part.codes if isinstance(part, Quantised) else part
    if dither is None or stored.dtype is torch.float32:
        return None
    return random_words(dither, number, stored.numel(), stored.device)


# ---- the rules: formulas and order of operations as in native/tiermem.h -----------------------------------------------


_Stepped = tuple[torch.Tensor, list[torch.Tensor]]


def _adam(rule: StepRule, s: _Scalars, p: torch.Tensor, g: torch.Tensor, moments: list[torch.Tensor]) -> _Stepped:
    m, v, *largest = moments
    if rule.name == "adamw":
        p = p * s.decay
    else:
        g = g + p * s.decay
    m = m + (g - m) * s.one_minus_beta1
    v = v * s.beta2 + (g * g) * s.one_minus_beta2
    w = v
    if largest:  # NaN wins, whichever of the two it is
        w = torch.where((v > largest[0]) | (v != v), v, largest[0])
    p = p - (m / (_sqrt(w) * s.inv_sqrt_bias2 + s.eps)) * s.step_size
    return p, [m, v, w][: len(moments)]


def _adagrad(rule: StepRule, s: _Scalars, p: torch.Tensor, g: torch.Tensor, moments: list[torch.Tensor]) -> _Stepped:
    g = g + p * s.decay
    total = moments[0] + g * g
    return p - (g / (_sqrt(total) + s.eps)) * s.step_size, [total]


def _lion(rule: StepRule, s: _Scalars, p: torch.Tensor, g: torch.Tensor, moments: list[torch.Tensor]) -> _Stepped:
    m = moments[0]
    u = m * s.beta1 + g * s.one_minus_beta1
    has_no_size = (u == 0) | (u != u)  # zeros keep their sign, NaN stays NaN
    sign = torch.where(has_no_size, u, torch.copysign(torch.ones_like(u), u))
    return p * s.decay - sign * s.step_size, [m * s.beta2 + g * s.one_minus_beta2]


def _sgd(rule: StepRule, s: _Scalars, p: torch.Tensor, g: torch.Tensor, moments: list[torch.Tensor]) -> _Stepped:
    g = g + p * s.decay
    if not moments:
        return p - g * s.step_size, []
    m = moments[0] * s.momentum + g * s.one_minus_dampening
    update = g + m * s.momentum if rule.nesterov else m
    return p - update * s.step_size, [m]


_FORMULAS: dict[str, Callable[[StepRule, _Scalars, torch.Tensor, torch.Tensor, list[torch.Tensor]], _Stepped]] = {
    "adamw": _adam,
    "adam": _adam,
    "adagrad": _adagrad,
    "lion": _lion,
    "sgd": _sgd,
}


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """Correctly rounded, which torch's in fp32 is not on every CPU (MKL's on AMD: a sixth are neighbours).

    No square root of an fp32 number lies within 4 units of float64 of where fp32 rounds up or down: 1 unit of error is no harm.
    """
    return x.double().sqrt().float()
