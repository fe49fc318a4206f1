"""Local: the part of an ordinary parameter that this rank holds and steps.

    a tensor, also under DDP     the whole parameter
    a DTensor                    its local shard, as FSDP2's `fully_shard` or tensor parallelism places it

States have the placements of their parameter. In a state dict they are DTensors where the parameter
is one, so that torch.distributed.checkpoint saves each part once and opens the whole on any number
of ranks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tiermem.swap.base.grad_mode import call_with_grad


def as_dtensor(tensor: torch.Tensor) -> Any | None:
    """The tensor if it is a DTensor, else None. A program that has not imported DTensor has none,
    and does not import it."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter or a gradient, detached: the same memory."""
    found = as_dtensor(tensor)
    if found is None:
        return tensor.detach()
    part = call_with_grad(False, found.to_local)
    wait = getattr(part, "wait", None)  # a collective may still be under way
    local: torch.Tensor = part if wait is None else wait()
    return local.detach()


def check_kind(param: torch.Tensor, name: str) -> None:
    """Raises ValueError for a parameter that has no values of its own: another subclass of Tensor,
    or a part of a sum."""
    found = as_dtensor(param)
    if found is None:
        if type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ValueError(
                f"the parameter {name!r} is a {type(param).__name__}, a subclass of Tensor that "
                "holds its values elsewhere; "
                "tensors and DTensors are stepped: freeze it, or give it to an optimizer of its own"
            )
        return
    if any(placement.is_partial() for placement in found.placements):
        raise ValueError(
            f"the parameter {name!r} is placed as {found.placements}: a part of a sum, which has "
            "no value to step; redistribute it first"
        )


def first_element(param: torch.Tensor) -> int:
    """The index in the whole parameter, row by row, of the first local element. Stochastic rounding
    counts from it."""
    found = as_dtensor(param)
    if found is None:
        return 0
    offsets = _span(found)[1]
    return sum(offset * math.prod(found.shape[dim + 1 :]) for dim, offset in enumerate(offsets))


def as_placed(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A local part of a state as the user sees it: a DTensor placed as its parameter, else the part
    itself. No copy."""
    found = as_dtensor(param)
    if found is None:
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(found.shape, found.stride(), local.dtype)
    # DTensor.from_local would copy a part on the CPU to the device of the mesh.
    placed: torch.Tensor = DTensor(
        local, DTensorSpec(found.device_mesh, found.placements, meta), requires_grad=False
    )
    return placed


def part_of(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a state with the parameter's whole shape, given whole or as a DTensor.

    Collective where a DTensor has other placements than the parameter.
    """
    given = as_dtensor(value)
    found = as_dtensor(param)
    if found is None:
        return value if given is None else local_of(given.full_tensor())
    if given is not None:
        is_alike = given.placements == found.placements and given.device_mesh == found.device_mesh
        return local_of(
            given if is_alike else given.redistribute(found.device_mesh, found.placements)
        )
    if any(type(placement).__name__ == "_StridedShard" for placement in found.placements):
        raise ValueError(
            f"a whole tensor for a parameter that is placed as {found.placements}, whose parts are "
            "not contiguous: give DTensors, as torch.distributed.checkpoint does"
        )
    return value[
        tuple(slice(first, first + size) for size, first in zip(*_span(found), strict=True))
    ]


def sum_over_ranks(sums: Mapping[nn.Parameter, float]) -> float:
    """The sum over parameters, and over the ranks that hold their parts. Collective where
    parameters are DTensors.

    sums: a number for this rank's part of each parameter; every rank gives the same parameters in
        the same order.
    """
    total = 0.0
    of_meshes = dict[tuple[Any, tuple[int, ...]], float]()
    for param, value in sums.items():
        found = as_dtensor(param)
        if found is None:
            total += value
            continue
        cut = tuple(
            i for i, placement in enumerate(found.placements) if not placement.is_replicate()
        )
        of_meshes[found.device_mesh, cut] = of_meshes.get((found.device_mesh, cut), 0.0) + value
    for (mesh, cut), value in of_meshes.items():
        on_mesh = torch.tensor(value, dtype=torch.float64, device=mesh.device_type)
        for dim in cut:
            dist.all_reduce(on_mesh, group=mesh.get_group(dim))
        total += float(on_mesh)
    return total


def _span(param: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a DTensor's local part, and the index of its first element in every
    dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
