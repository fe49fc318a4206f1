"""The table of docs/absent.md: calls on an absent parameter, and their outcome outside and inside a
forward.

A row runs on the absent parameter and on the same parameter of a plain twin; `outcome` says in the
table's words how the two compare. test_absent_calls.py runs it on one rank, touch_on_ranks.py on
several.
"""

from __future__ import annotations

import contextlib
import copy
import io  # noqa: F401 -- the calls use these names
import pickle  # noqa: F401
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: F401
from torch.nn.utils import parameters_to_vector, vector_to_parameters  # noqa: F401

# call: outside a forward on one rank, outside on several ranks, inside a forward or backward of
# other modules
READS = {
    "p.shape, p.dtype, p.device, p.requires_grad, p.numel()": "same | same | same",
    "torch.ones_like(p)": "same | same | same",
    "x.to(p), x.view_as(p)": "same | same | same",
    "p.float() is p, p.cpu() is p, p.to(p.device) is p": "same | same | same",
    "p.type()": "same | same | same",
    "p.grad": "same | same | same",
    "model.state_dict()['layers.0.up.weight']": "same | same | same",
    "p.sum()": "same | raises | same",
    "p.norm()": "same | raises | same",
    "p.data.norm()": "same | raises | same",
    "p.detach().abs().max()": "same | raises | same",
    "p.view(-1)[5:9].sum()": "same | raises | same",
    "p.pow(2).sum()": "same | raises | same",
    "[row.sum() for row in p[:3]]": "same | raises | same",
    "p[3, 4].item()": "same | raises | same",
    "p.tolist()": "same | raises | same",
    "repr(p)": "same | raises | same",
    "p == x": "same | raises | same",
    "torch.allclose(p, x)": "same | raises | same",
    "torch.zeros_like(x).copy_(p)": "same | raises | same",
    "torch.zeros_like(x).lerp_(p, 0.1)": "same | raises | same",
    "torch._foreach_norm([p])": "same | raises | same",
    "F.linear(x, p)": "same | raises | same",
    "parameters_to_vector(model.parameters())": "same | raises | same",
    "p.clone(), p.half(), p.double()": "same | raises | same",
    "copy.deepcopy(p.data)": "same | raises | same",
    "pickle.loads(pickle.dumps(p.data))": "same | raises | same",
    "torch.save(p.data, io.BytesIO())": "same | raises | same",
    "p.detach().numpy(), np.asarray(p.data)": "same | raises | same",
    "torch.as_tensor(p)": "same | same | same",
    "p.stride(), p.is_contiguous()": "placeholder | placeholder | placeholder",
    "torch.Tensor(p)": "placeholder | placeholder | placeholder",
    "torch.vmap(torch.sum)(p)": "placeholder | placeholder | placeholder",
    "copy.deepcopy(p)": "raises | raises | raises",
    "pickle.dumps(p)": "raises | raises | raises",
    "torch.save(p, io.BytesIO())": "raises | raises | raises",
    "p.data_ptr()": "raises | raises | raises",
    "p.untyped_storage()": "raises | raises | raises",
    "torch.from_dlpack(p.detach())": "raises | raises | raises",
}
WRITES = {
    "p.grad = x": "same | same | same",
    "p.requires_grad_(False).requires_grad_(True)": "same | same | same",
    "p.copy_(p)": "same | same | same",
    "model.float()": "same | same | same",
    "model.load_state_dict(model.state_dict())": "same | same | same",
    "p.fill_(1)": "raises | raises | raises",
    "p.data.fill_(1)": "raises | raises | raises",
    "p.data.add_(1)": "raises | raises | raises",
    "p.data[3] = 1": "raises | raises | raises",
    "p.detach().zero_()": "raises | raises | raises",
    "p.view(-1)[5:9].zero_()": "raises | raises | raises",
    "p[3] = 1": "raises | raises | raises",
    "p += 1": "raises | raises | raises",
    "p.data = x": "raises | raises | raises",
    "p.set_(x)": "raises | raises | raises",
    "torch.add(x, 1, out=p)": "raises | raises | raises",
    "torch._foreach_mul_([p], 2)": "raises | raises | raises",
    "torch.ops.aten.mul_.Scalar(p, 2)": "raises | raises | raises",
    "F.relu(p, inplace=True)": "raises | raises | raises",
    "F.embedding(torch.tensor([1]), p, max_norm=0.001)": "raises | raises | raises",
    "p.detach().numpy()[3] = 1": "raises | raises | raises",
    "p.detach().requires_grad_()": "raises | raises | raises",
    "nn.init.normal_(p)": "raises | raises | raises",
    "nn.init.xavier_uniform_(p)": "raises | raises | raises",
    "vector_to_parameters(x.view(-1), [p])": "raises | raises | raises",
    "model.half()": "raises | raises | raises",
    "model.to(torch.float64)": "raises | raises | raises",
}
COLUMNS = [
    "outside a forward",
    "the same, several ranks",
    "inside a forward or backward of other modules",
]
WHOLE = "layers.0.up.weight"


def table(rows: dict[str, str]) -> str:
    """Rows as the documents show them."""
    head = ["| call | " + " | ".join(COLUMNS) + " |", "|---|---|---|---|"]
    return "\n".join(head + [f"| `{call}` | {outcomes} |" for call, outcomes in rows.items()])


def outcome(call: str, model: nn.Module, plain: nn.Module) -> str:
    """The word of the table for a call on a parameter of a sharded model; the plain model has the
    same values."""
    with torch.no_grad() if call in WRITES else contextlib.nullcontext():
        mine, theirs = _result(call, model), _result(call, copy.deepcopy(plain))
    if isinstance(mine, Exception):
        is_ours = "whose values rest elsewhere" in str(mine) or "read-only" in str(mine)
        return "raises" if is_ours else f"{type(mine).__name__}: {mine}"
    if mine is model.get_parameter(WHOLE) and isinstance(theirs, nn.Parameter):
        return "same"  # several ranks may not read it
    if not isinstance(theirs, Exception) and _is_equal(mine, theirs):
        return "same"
    return (
        "placeholder"
        if (torch.is_tensor(mine) and mine.isnan().all()) or mine == ((0, 0), False)
        else f"{mine}"
    )


def _result(call: str, model: nn.Module) -> Any:
    names = {"model": model, "p": model.get_parameter(WHOLE), "x": torch.ones(97, 31)}
    try:
        return eval(call, globals(), names)
    except SyntaxError:
        try:
            return exec(call, globals(), names)
        except Exception as error:
            return error
    except Exception as error:
        return error


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_is_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return (
            a.requires_grad == b.requires_grad
            and a.dtype == b.dtype
            and torch.equal(a.detach(), b.detach())
        )
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    return isinstance(a, nn.Module) or type(a).__name__ == "_IncompatibleKeys" or bool(a == b)
