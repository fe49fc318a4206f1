"""Ordinary parameters: tensors and DTensors on the CPU. Their states lie beside them in a chosen
precision, under torch's keys.

    optimizer.state[param]     step, the rule's moments [, master], in their stored formats:
        a moment               fp32, bf16 or fp16, in the parameter's shape; 8bit: uint8 codes, and `<name>_scales`
        master                 fp32; split: int16, the 16 bits that the bf16 parameter lacks
    optimizer.state_dict()     the same keys, all fp32 and in the parameter's shape, as in torch's optimizers

Every stored format converts to fp32 exactly, and back to the same numbers, so a state dict restores
every state bit by bit. A parameter that is not contiguous is stepped in a contiguous copy, which
costs one more pass over memory. Gradients are used as autograd leaves them. Of a DTensor each rank
steps its local shard (local.py), and keeps the states of that shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tiermem.optim.local import as_dtensor, as_placed, check_kind, first_element, local_of, part_of
from tiermem.optim.rules import step_parts
from tiermem.optimizers.base import AnyStep, Rule
from tiermem.precision import DTYPES, Precision
from tiermem.swap.base.native import Workers, narrow_part, widen_part
from tiermem.swap.base.parts import STORED, Dither, Moment, Quantised, StepParts, num_scales
from tiermem.units.state_layout import MASTER, is_positive
from tiermem.units.written import adopt

STEP = "step"

State = dict[str, Any]


def check_parameter(param: nn.Parameter, precision: Precision, name: str) -> None:
    """Raises ValueError for a parameter that is never stepped here, and for one that a precision
    does not apply to."""
    check_kind(param, name)
    precision.check_dtype(param.dtype, name)
    if precision.grads == "fp32" and param.dtype != torch.float32:
        raise ValueError(
            f"precision: grads is 'fp32' and the ordinary parameter {name!r} is {param.dtype}; "
            "autograd accumulates its "
            "gradient in its own dtype. Leave grads at None, or shard the model"
        )


def check_gradient(param: nn.Parameter, name: str, is_moved: bool = False) -> torch.Tensor:
    """This rank's part of a parameter's gradient. Raises ValueError when the gradient or the
    parameter cannot be stepped here.

    is_moved: whether the caller copies gradients from an accelerator to the CPU, and weights there
        and back.
    """
    assert param.grad is not None
    if param.grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name!r} is {param.grad.layout}; dense ones are stepped. Build its "
            "embedding with sparse=False, or give the parameter to torch.optim.SparseAdam"
        )
    placed = as_dtensor(param)
    of_grad = as_dtensor(param.grad)
    here, there = (
        "an ordinary tensor" if each is None else str(each.placements) for each in (placed, of_grad)
    )
    if here != there:
        raise ValueError(
            f"the parameter {name!r} is placed as {here} and its gradient as {there}: redistribute "
            "the gradient first"
        )
    local = local_of(param)
    grad = local_of(param.grad)
    if not is_moved and (local.device.type != "cpu" or grad.device.type != "cpu"):
        raise ValueError(
            f"the ordinary parameter {name!r} is on {local.device}; such are stepped on the CPU if "
            "their states lie beside them. Give policy=OffloadPolicy(optim=Tier.HOST), shard the "
            "model, or give it to torch's own optimizer"
        )
    if any(
        stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)
    ):
        raise ValueError(
            f"the ordinary parameter {name!r} has strides {local.stride()} for shape "
            f"{tuple(local.shape)}: several of its elements are one number in memory. Make it "
            "contiguous: nn.Parameter(p.detach().contiguous())"
        )
    if grad.dtype not in STORED:
        raise ValueError(
            f"the gradient of {name!r} is {grad.dtype}; allowed are {', '.join(map(str, STORED))}"
        )
    return grad


def check_rule(param: nn.Parameter, rule: Rule, name: str) -> None:
    """Raises ValueError for a rule of whole matrices when this rank holds a part of one."""
    if rule.is_matrix and local_of(param).shape != param.shape:
        raise ValueError(
            f"the parameter {name!r} is a DTensor of which this rank holds "
            f"{tuple(local_of(param).shape)}, and Muon steps "
            "whole matrices: put it in a group with use_muon=False"
        )


def adopt_weight(param: nn.Parameter, state: State, precision: Precision, name: str) -> None:
    """Makes a state's master that of a weight which has been written, or was given another dtype.
    Raises ValueError."""
    precision.check_dtype(param.dtype, name)
    local = local_of(param).detach()
    kept = state.pop(MASTER, None)
    master = new_master(param, precision)
    if master is None:
        return
    if kept is None or kept.dtype is not master.dtype:
        kept = master if master.dtype is torch.int16 else master.copy_(local)
    adopt(local.contiguous().view(-1), kept.view(-1))
    state[MASTER] = kept


def new_master(param: nn.Parameter, precision: Precision) -> torch.Tensor | None:
    """An empty master, which the first step fills; None where the weight is its own."""
    master = precision.master_of(param.dtype)
    if master is None:
        return None
    return torch.zeros(
        local_of(param).shape, dtype=torch.int16 if master == "split" else torch.float32
    )


def new_state(param: nn.Parameter, rule: Rule, precision: Precision) -> State:
    """An empty state. The first step fills it without reading it."""
    state: State = {STEP: torch.tensor(0.0)}
    shape = local_of(param).shape
    is_8bit = precision.moments == "8bit"
    for moment in rule.moments:
        state[moment] = torch.zeros(
            shape, dtype=torch.uint8 if is_8bit else DTYPES[precision.moments]
        )
        if is_8bit:
            state[_scales(moment)] = torch.zeros(num_scales(shape.numel()), dtype=torch.uint8)
    if (master := new_master(param, precision)) is not None:
        state[MASTER] = master
    return state


def step_parameter(
    workers: Workers,
    param: nn.Parameter,
    state: State,
    rule: Rule,
    step: AnyStep,
    precision: Precision,
    name: str,
) -> None:
    """Steps a parameter that has a gradient. `step` in the state already counts this step. Blocks.
    The master is that of the weight (`adopt_weight`). Raises ValueError."""
    grad = check_gradient(param, name)
    num_steps = int(state[STEP])
    local = local_of(param)
    weight = local.contiguous()
    master = state[MASTER].view(-1) if MASTER in state else None
    moments = tuple(_moment(state, moment) for moment in rule.moments)
    parts = StepParts(weight.view(-1), master, grad.contiguous().view(-1), moments)
    dither = (
        Dither(precision.key(name), num_steps, first_element(param))
        if precision.is_stochastic
        else None
    )
    is_first = num_steps == 1 and not any(state[moment].any() for moment in rule.moments)
    step_parts(workers, step, parts, dither, start_moments=is_first)
    if not local.is_contiguous():
        local.copy_(weight)


def export_state(workers: Workers, param: nn.Parameter, state: State, rule: Rule) -> State:
    """A state in the format of torch's state dicts: fp32, placed as the parameter. fp32 states are
    not copied."""
    found: State = {STEP: state[STEP]}
    for moment in rule.moments:
        kept = _moment(state, moment)
        found[moment] = state[moment]
        if isinstance(kept, Quantised) or kept.dtype != torch.float32:
            found[moment] = widen_part(workers, kept, is_positive=is_positive(moment)).view(
                state[moment].shape
            )
    if MASTER in state:
        master = state[MASTER]
        weight = local_of(param).contiguous().view(-1)
        found[MASTER] = (
            master
            if master.dtype == torch.float32
            else widen_part(workers, master.view(-1), weight).view(master.shape)
        )
    return {key: value if key == STEP else as_placed(value, param) for key, value in found.items()}


def restore_state(
    workers: Workers,
    param: nn.Parameter,
    given: Mapping[str, Any],
    rule: Rule,
    precision: Precision,
    name: str,
) -> State:
    """A state from an entry of a state dict. Raises ValueError for a moment that is missing or has
    another shape.

    Without `master` in the entry, the master is made from the parameter. Restoring a split master
    also sets its parameter.
    """
    state = new_state(param, rule, precision)
    state[STEP] = torch.tensor(float(num_steps_of(given, rule)))
    for moment in rule.moments if has_moments_of(given, rule) else ():
        values = value_of(given, moment, param, name).reshape(-1)
        narrow_part(workers, values, _moment(state, moment), is_positive=is_positive(moment))
    if MASTER in state:
        master = state[MASTER].view(-1)
        local = local_of(param)
        values = value_of(given, MASTER, param, name) if MASTER in given else local.float()
        weight = local.contiguous()
        narrow_part(workers, values.reshape(-1), master, weight.view(-1))
        if master.dtype != torch.float32 and not local.is_contiguous():
            local.copy_(weight)
    return state


def num_steps_of(given: Mapping[str, Any], rule: Rule) -> int:
    """The number of steps in an entry. torch's SGD saves no count: an entry with a momentum counts
    as one step."""
    if STEP in given:
        return int(given[STEP])
    return int(has_moments_of(given, rule))


def has_moments_of(given: Mapping[str, Any], rule: Rule) -> bool:
    """Whether an entry has moments. One with steps has them, or lacks them by mistake."""
    has_steps = int(given.get(STEP, 0)) > 0
    return has_steps or any(given.get(moment) is not None for moment in rule.moments)


def value_of(given: Mapping[str, Any], key: str, param: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's part of one state of an entry, fp32 on the CPU. Raises ValueError when it is
    missing or has another shape.

    Collective where the entry has a DTensor that is placed otherwise than the parameter.
    """
    value = _found(given, key, param, name)
    return part_of(value.detach(), param).to("cpu", torch.float32)


def check_entry(given: Mapping[str, Any], rule: Rule, param: torch.Tensor, name: str) -> None:
    """Raises ValueError for an entry that cannot be restored: a state is missing or has another
    shape."""
    moments = rule.moments if has_moments_of(given, rule) else ()
    for key in (*moments, MASTER) if MASTER in given else moments:
        _found(given, key, param, name)


def _found(given: Mapping[str, Any], key: str, param: torch.Tensor, name: str) -> torch.Tensor:
    value = given.get(key)
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"the state dict has no {key!r} for parameter {name!r}, only "
            f"{', '.join(map(repr, given)) or 'nothing'}: it comes from another optimizer"
        )
    if value.shape != param.shape:
        raise ValueError(
            f"the state dict's {key!r} for parameter {name!r} has shape {tuple(value.shape)}; the "
            f"parameter has {tuple(param.shape)}"
        )
    return value


def _moment(state: State, moment: str) -> Moment:
    flat: torch.Tensor = state[moment].view(-1)
    return Quantised(flat, state[_scales(moment)]) if _scales(moment) in state else flat


def _scales(moment: str) -> str:
    return f"{moment}_scales"
