"""Parts: the tensors and the rule of one optimizer step, checked before native code gets them.

    weight    what the model sees: fp32, bf16, fp16, or None
    master    fp32; int16 or uint16: *split*, the 16 bits that an fp32 number lacks beside its bf16 weight; or None: the weight
              itself is the master
    grad      fp32, bf16, fp16
    moments   fp32, bf16, fp16, or Quantised: 8-bit codes and one scale byte for 64 of them

All are flat contiguous tensors of one length on one device; native code takes CPU tensors.
native/tiermem.h describes formulas, formats and roundings. These values do not name the parameter
or the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

Q8_BLOCK = 64
"""Elements that share a scale byte in 8-bit moments; tiles start at multiples of it."""

STORED = (torch.float32, torch.bfloat16, torch.float16)
SPLIT = (torch.int16, torch.uint16)
CPU = torch.device("cpu")


class Quantised(NamedTuple):
    """A moment in 8 bits: `codes` holds a byte per element, `scales` one for Q8_BLOCK of them; both
    uint8."""

    codes: torch.Tensor
    scales: torch.Tensor


class Packed(NamedTuple):
    """Weights in blocks of 64: codes of 8 or 4 bits (uint8), and one fp32 scale for each block."""

    codes: torch.Tensor
    scales: torch.Tensor


Moment = torch.Tensor | Quantised


class StepParts(NamedTuple):
    """The tensors of one step. Moments in the order of MOMENTS; those that are optional may be
    missing.

    source: what the step reads in their place, in the same dtypes; its gradient is not looked at. A
        tensor that is also one of the parts is stepped in place. None: all are. Native code alone
        steps parts with a source.
    """

    weight: torch.Tensor | None
    master: torch.Tensor | None
    grad: torch.Tensor
    moments: Sequence[Moment] = ()
    source: StepParts | None = None

    @property
    def stepped(self) -> list[Moment | None]:
        """All but the gradient: the weight, the master and the moments."""
        return [self.weight, self.master, *self.moments]


class StepRule(NamedTuple):
    """The rule of one step and its scalars, in double; which rule looks at what: tm_step_scalars in
    native/tiermem.h."""

    name: str  # a key of MOMENTS
    step_size: float
    decay: float  # adamw, lion: 1 - lr * weight_decay; else weight_decay
    grad_scale: float = 1.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    inv_sqrt_bias2: float = 1.0
    momentum: float = 0.0
    dampening: float = 0.0
    initial: float = 0.0
    maximize: bool = False
    nesterov: bool = False
    # those that are kept, under torch's keys; no kernel looks at them
    moments: tuple[str, ...] = ()


class Dither(NamedTuple):
    """All inputs of stochastic rounding beside the value."""

    key: int  # the seed mixed with a hash of the parameter's full name; 64 bits
    step: int  # number of this step
    first_element: int  # index of the tensors' first element in the whole parameter


class MomentKind(NamedTuple):
    """One moment of a rule. A moment that is never negative (`is_positive`) has 8-bit codes without
    sign."""

    name: str
    is_positive: bool
    is_optional: bool = False


_ADAM = (MomentKind("m", False), MomentKind("v", True), MomentKind("largest v", True, True))
MOMENTS: dict[str, tuple[MomentKind, ...]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "adagrad": (MomentKind("sum", True),),
    "lion": (MomentKind("m", False),),
    "sgd": (MomentKind("momentum", False, True),),
}


def num_scales(num_elements: int) -> int:
    """Scale bytes of so many 8-bit elements."""
    return -(-num_elements // Q8_BLOCK)


def moment_between(moment: Moment, begin: int, end: int) -> Moment:
    """A view of the elements [begin, end). begin: a multiple of Q8_BLOCK where it is in 8 bits."""
    if isinstance(moment, Quantised):
        scales = moment.scales[num_scales(begin) : num_scales(end)]
        return Quantised(moment.codes[begin:end], scales)
    return moment[begin:end]


def stored_of(part: Moment) -> torch.Tensor:
    """The tensor that has an entry for each element."""
    return part.codes if isinstance(part, Quantised) else part


def check_parts(rule: StepRule, parts: StepParts, device: torch.device = CPU) -> None:
    """Raises ValueError, naming the part, when these parts cannot be stepped by this rule on this
    device."""
    if rule.name not in MOMENTS:
        raise ValueError(f"the rule is {rule.name!r}; allowed are {', '.join(MOMENTS)}")
    numel = parts.grad.numel()
    _check_tensor("grad", parts.grad, numel, STORED, device)
    if parts.weight is not None:
        _check_tensor("weight", parts.weight, numel, STORED, device)
    elif parts.master is None:
        raise ValueError("neither weight nor master was given; one of them holds the parameter")
    if parts.master is not None and parts.master.dtype in SPLIT:
        check_split(parts.master, parts.weight, numel, device)
    elif parts.master is not None:
        _check_tensor("master", parts.master, numel, (torch.float32, *SPLIT), device)
    _check_moments(rule, parts.moments, numel, device)
    if rule.nesterov and not (rule.name == "sgd" and parts.moments):
        raise ValueError(
            f"nesterov needs sgd with a momentum; the rule is {rule.name!r} with "
            f"{len(parts.moments)} moments"
        )
    if parts.source is not None:
        check_parts(rule, parts.source._replace(grad=parts.grad), device)
        written, read = (
            [getattr(p, "dtype", None) for p in each.stepped] for each in (parts, parts.source)
        )
        if written != read:
            raise ValueError(
                f"a step reads {read} and writes {written}: a source has the dtypes of the parts"
            )


def check_moment(name: str, moment: Moment, numel: int, device: torch.device = CPU) -> None:
    """Raises ValueError when this is no moment of so many elements on this device."""
    if not isinstance(moment, Quantised):
        _check_tensor(name, moment, numel, STORED, device)
        return
    _check_tensor(f"{name} codes", moment.codes, numel, (torch.uint8,), device)
    _check_tensor(f"{name} scales", moment.scales, num_scales(numel), (torch.uint8,), device)


def check_split(
    master: torch.Tensor, weight: torch.Tensor | None, numel: int, device: torch.device
) -> None:
    """Raises ValueError when this is no split master of so many elements beside its bf16 weight on
    this device."""
    _check_tensor("split master", master, numel, SPLIT, device)
    if weight is None or weight.dtype is not torch.bfloat16:
        given = "none" if weight is None else weight.dtype
        raise ValueError(
            f"a split master is kept beside a bf16 weight; the weight given is {given}"
        )
    _check_tensor("weight", weight, numel, STORED, device)


def check_part(part: Moment, weight: torch.Tensor | None, device: torch.device | None = CPU) -> int:
    """Returns the number of elements of a moment, or of a split master beside its weight; raises
    ValueError.

    device: where it must lie; None: where it does.
    """
    stored = stored_of(part)
    numel = stored.numel()
    device = device or stored.device
    if stored.dtype in SPLIT:
        check_split(stored, weight, numel, device)
    else:
        check_moment("part", part, numel, device)
    return numel


def _check_moments(
    rule: StepRule, moments: Sequence[Moment], numel: int, device: torch.device
) -> None:
    kinds = MOMENTS[rule.name]
    fewest = sum(not kind.is_optional for kind in kinds)
    if not fewest <= len(moments) <= len(kinds):
        names = ", ".join(
            f"{kind.name} (optional)" if kind.is_optional else kind.name for kind in kinds
        )
        raise ValueError(f"{len(moments)} moments given for {rule.name}, which keeps {names}")
    for kind, moment in zip(kinds, moments, strict=False):
        check_moment(kind.name, moment, numel, device)


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    numel: int,
    allowed: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(
            f"{name} is {tensor.dtype}; allowed are {', '.join(str(dtype) for dtype in allowed)}"
        )
    if tensor.device != device or not tensor.is_contiguous() or tensor.dim() != 1:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} on "
            f"{tensor.device}; a step takes flat contiguous tensors on {device}: pass .view(-1)"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements where {numel} are due")
