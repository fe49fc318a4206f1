"""Compute: multiplying in another dtype than the one that weights rest, travel and are counted in.

    at rest, on disk, between ranks      bf16 or fp16           p.dtype outside forward, p.grad, state_dict(), masters
    while a module holds the unit        fp32                   p.dtype inside forward and backward

A fetched unit is widened once, in place: its bytes arrive in the upper half of its buffer, and are
spread from there. The maths sees fp32 weights and makes fp32 activations. autograd rounds each
gradient to the dtype at rest, to nearest even, when it reaches its parameter, so all that comes
after (sums over ranks and micro-batches, homes, steps) is as without widening. A plain PyTorch
model that calls `weight.float()` in each forward has the same bits.

The dtype can affect bits: ranks agree on it, a checkpoint holds it, and training that goes on from
there keeps it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from tiermem.policy import OffloadPolicy, against_widening
from tiermem.ranks.collectives import exchange
from tiermem.ranks.topology import Topology
from tiermem.swap.memory.accelerator import is_accelerator

# ---- the choice ----------------------------------------------------------------------------------
#
# "measured" times the three products of a training step (x @ w.t(), grad @ w, grad.t() @ x) with
# weights of the model's own shapes, no dimension longer than _MOST_SIDE or shorter than
# _LEAST_SIDE, where calls take longer than products: on one thread and in CPU time, so that other
# programs change little. CPUs without instructions for 16-bit products are slower by factors of ten
# to hundreds, others by less than _SLOWER. An accelerator computes in the dtype at rest.

logger = logging.getLogger("tiermem")

_HALVES = (torch.bfloat16, torch.float16)
_SLOWER = 3.0
FAR_SLOWER = 10.0
"""Products at rest that are so many times slower than in fp32 are warned of."""
_LEAST_SIDE = 256
_MOST_SIDE = 1024
_NUM_SHAPES = 2
_ROWS = (8, 64)
_QUICK_S = 0.04
_REPEATS = 3


class Products(NamedTuple):
    """Operations a second, one thread of this CPU, in a dtype at rest and in fp32."""

    at_rest: torch.dtype
    rest_flops: float
    fp32_flops: float

    @property
    def ratio(self) -> float:
        """How many times slower products in the dtype at rest are."""
        return self.fp32_flops / self.rest_flops

    @property
    def is_slow(self) -> bool:
        """Whether products in the dtype at rest are so slow that widened weights pay."""
        return self.ratio >= _SLOWER

    def __str__(self) -> str:
        rest = str(self.at_rest).removeprefix("torch.")
        than = (
            f"{self.ratio:.3g} times slower"
            if self.ratio > 1
            else f"{1 / self.ratio:.3g} times faster"
        )
        return (
            f"products of one thread reach {self.rest_flops / 1e9:.1f} GFLOP/s in {rest} and "
            f"{self.fp32_flops / 1e9:.1f} GFLOP/s in float32, so {rest} is {than}"
        )


class ComputeChoice(NamedTuple):
    """The dtype of products, and the reason."""

    dtype: Literal["storage", "fp32"]
    why: str
    is_measured: bool = False  # another start may choose otherwise
    products: Products | None = None  # what this process measured


def measure_products(shapes: Iterable[tuple[int, ...]], at_rest: torch.dtype) -> Products:
    """Times products with weights of some shapes, the most frequent first. Blocks for less than a
    second."""
    sides = [
        tuple(max(_LEAST_SIDE, min(side, _MOST_SIDE)) for side in shape)
        for shape in shapes
        if len(shape) == 2
    ]
    common = [shape for shape, _ in Counter(sides).most_common(_NUM_SHAPES)] or [
        (_MOST_SIDE, _MOST_SIDE)
    ]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Products(at_rest, *(_flops(common, dtype) for dtype in (at_rest, torch.float32)))
    finally:
        torch.set_num_threads(num_threads)


def _flops(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> float:
    """Operations a second, with as many rows of inputs as are quick."""
    for num_rows in _ROWS:
        seconds = sum(_time(shape, num_rows, dtype) for shape in shapes)
        if seconds > _QUICK_S:
            break
    return sum(3 * 2 * num_rows * shape[0] * shape[1] for shape in shapes) / seconds


def _time(shape: tuple[int, ...], num_rows: int, dtype: torch.dtype) -> float:
    """CPU seconds of the three products, the least of a few."""
    weight = torch.ones(shape, dtype=dtype)
    inputs = torch.ones(num_rows, shape[1], dtype=dtype)
    grads = torch.ones(num_rows, shape[0], dtype=dtype)
    least = float("inf")
    for _ in range(_REPEATS):
        start = time.thread_time()
        inputs @ weight.t(), grads @ weight, grads.t() @ inputs
        least = min(least, time.thread_time() - start)
        if least > _QUICK_S:
            break
    return max(least, 1e-9)


def choose_compute(model: nn.Module, policy: OffloadPolicy, device: torch.device) -> ComputeChoice:
    """What this process would choose; for "measured" it measures, where a model's weights rest in
    16 bits. May be on meta."""
    if policy.compute_dtype != "measured":
        return ComputeChoice(policy.compute_dtype, "given")
    numels = Counter[torch.dtype]()
    for param in model.parameters():
        numels[param.dtype] += whole_shape(param).numel()
    common = max(numels, key=lambda dtype: numels[dtype], default=torch.float32)
    if common not in _HALVES or is_accelerator(device) or any(against_widening(policy)):
        return ComputeChoice("storage", "products in the dtype at rest")
    shapes = [tuple(whole_shape(p)) for p in model.parameters() if p.dtype is common]
    if all(len(shape) < 2 for shape in shapes):
        return ComputeChoice("storage", "no weight is a matrix")
    products = measure_products(shapes, common)
    if products.is_slow:
        return ComputeChoice(
            "fp32",
            f"weights rest in 16 bits and are multiplied in float32: {products}",
            True,
            products,
        )
    return ComputeChoice(
        "storage", f"weights are multiplied as they rest: {products}", True, products
    )


def agree_on_compute(
    model: nn.Module, policy: OffloadPolicy, topology: Topology, device: torch.device
) -> tuple[ComputeChoice, OffloadPolicy]:
    """The choice of all ranks, fp32 as soon as one rank's products are slow; and the policy with
    it. Collective; blocks."""
    choice = choose_compute(model, policy, device)
    if policy.compute_dtype == "storage":
        _warn_of_slow_products(model, policy, device)
    if policy.compute_dtype == "measured":
        said = exchange(topology, (choice.dtype, choice.why))
        fp32 = next((why for dtype, why in said if dtype == "fp32"), None)
        if fp32 is not None:
            choice = ComputeChoice("fp32", fp32, True)
        logger.info("%s", choice.why)
    return choice, dataclasses.replace(policy, compute_dtype=choice.dtype)


def _warn_of_slow_products(model: nn.Module, policy: OffloadPolicy, device: torch.device) -> None:
    """Measures, where the CPU may be slow, products as the weights rest, and warns where they are
    far slower than in fp32."""
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return
    products = choose_compute(
        model, dataclasses.replace(policy, compute_dtype="measured"), device
    ).products
    if products is not None and products.ratio >= FAR_SLOWER:
        logger.warning(
            '%s; compute_dtype "measured" (in a config "tiermem": {"compute_dtype": "measured"}) '
            "multiplies the same weights in fp32 on such a machine",
            products,
        )


def whole_shape(param: nn.Parameter) -> torch.Size:
    """A parameter's shape, also while zero.Init holds its parts."""
    return torch.Size(getattr(param, "ds_shape", param.shape))


# ---- widening ------------------------------------------------------------------------------------
#
#     0                    n elements x 2 bytes            n x 4 bytes
#     |       free         |  16-bit values, in order       |            fp32 value i takes bytes 4i to 4i + 4, and
#     |-fp32-|             |read|                           |            value j is read from byte 2n + 2j on: for all
#     |-----fp32-----|          |read|                      |            j >= i these are above it, so a prefix of half
#     |-------fp32--------|         |read|                  |            of what is free can be written at a time

_LEAST_SPREAD = 4096


def widened_dtype(param: nn.Parameter, policy: OffloadPolicy) -> torch.dtype:
    """The dtype in which the maths sees a parameter."""
    return (
        torch.float32 if policy.compute_dtype == "fp32" and param.dtype in _HALVES else param.dtype
    )


def narrow_part(full: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The upper half of a flat fp32 tensor's bytes, as values of a dtype of 2 bytes."""
    return full.view(dtype)[full.numel() :]


def widen(full: torch.Tensor, narrow: torch.Tensor) -> None:
    """Widens values in place: `narrow` is `narrow_part(full)`, or `full` itself, of which nothing
    is widened.

    On an accelerator in the order of the current stream.
    """
    done = 0
    numel = 0 if narrow is full else narrow.numel()
    while done < numel:
        stop = (numel + done) // 2
        if stop - done < _LEAST_SPREAD:
            full[done:].copy_(narrow[done:].clone())
            return
        full[done:stop].copy_(narrow[done:stop])
        done = stop


def widen_inputs(model: nn.Module, dtypes: Iterable[torch.dtype]) -> Iterator[RemovableHandle]:
    """Makes the model's forward see arguments of these dtypes in fp32; yields the hook's handle, if
    there are any."""
    found = frozenset(dtypes)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in found else tensor

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, widened, (args, kwargs))

    if found:
        yield model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
