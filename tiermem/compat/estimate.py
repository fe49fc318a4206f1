"""Estimators: bytes of parameters, gradients and optimizer states before there is a model, under
the documented names.

    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live        there
    from tiermem.zero import estimate_zero3_model_states_mem_needs_all_live                         here

There are two kinds of figures, and the printed tables name them:

    the reference's   closed formulas for its settings, exact to the digit, for machines that were sized with them.
                      They hold a safety factor of 1.5 for host memory, know no NVMe, and count no
                      buffer
    tiermem's         the sum of the rows that `plans/plan.py` would allocate for such a model: storage and buffers, exact
                      for this library, without a factor; on NVMe with room for a checkpoint there
                      ("keep")

Neither counts activations, the interpreter or the GPU's own kernels; `tiermem plan` does. Sizes are
printed in units of 2^30 bytes. Nothing is allocated: an imagined model is made of meta tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from tiermem.plans.budget import make_plan
from tiermem.policy import OffloadPolicy, Tier
from tiermem.ranks.topology import Topology
from tiermem.units.unit import divide

_GIB = 1 << 30
# bytes of an element: 16-bit weights, 16-bit gradients, 32-bit values
_PARAM = 2
_GRAD = 2
_FP32 = 4
_STATES = 4 * _FP32  # master, gradient, momentum, variance
_MOST_LAYERS = 10_000  # in an imagined model


class MemoryNeeds(NamedTuple):
    """Bytes that tiermem takes for model states: host memory and disks per node, device memory per
    GPU."""

    host_bytes: int
    device_bytes: int
    nvme_bytes: int


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """The reference's figures for ZeRO-3, in bytes: host memory per node, memory per GPU, and the
    largest layer's share of it.

    The GPU holds the weights and gradients of the largest layer, and its part of the states that
    are not offloaded. Host memory holds the offloaded states: 16 bytes per parameter, 18 with the
    16-bit weights. Without `zero.Init` it holds a whole fp32 copy of the model per GPU while the
    model is built.
    """
    largest = (_PARAM + _GRAD) * largest_layer_params
    num_gpus = num_nodes * num_gpus_per_node
    building = _FP32 * num_gpus_per_node  # bytes per parameter, a copy for each process
    if cpu_offload:
        resting = (_STATES + _PARAM if cpu_offload_params else _STATES) * (1 / num_nodes)
        host = total_params * (resting if zero_init else max(building, resting))
        device = largest + (0 if cpu_offload_params else int(_PARAM * total_params / num_gpus))
    else:
        host = (largest_layer_params if zero_init else total_params) * building
        device = largest + int((_STATES + _PARAM) * total_params / num_gpus)
    return int(host * additional_buffer_factor), int(device), largest


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """The reference's figures for ZeRO-2, in bytes: host memory per node, and memory per GPU with
    every 16-bit weight."""
    num_gpus = num_nodes * num_gpus_per_node
    device = _PARAM * total_params
    if cpu_offload:
        host = total_params * max(_FP32 * num_gpus, _STATES) * additional_buffer_factor
    else:
        device += int((_STATES + _GRAD) * total_params / num_gpus)
        host = total_params * _FP32 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(device)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints both tables for a model; each parameter counts once, and the model is not changed."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *_counted(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints both tables for a model of which only sizes are known: the reference's offload
    options, and tiermem's plan."""
    size = (
        f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest "
        "layer params"
    )
    lines = _heading(size, num_gpus_per_node, num_nodes)
    for cpu_offload, cpu_offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, cpu_offload, cpu_offload_params,
                zero_init, additional_buffer_factor,
            )  # fmt: skip
            lines.append(
                f" {_column(host, 7)} | {_column(device, 6)} | "
                f"offload_param={_device(cpu_offload_params)}, "
                f"offload_optimizer={_device(cpu_offload)}, zero_init={int(zero_init)}"
            )
    lines += _own_rows(3, total_params, largest_layer_params, num_gpus_per_node, num_nodes)
    _print(lines)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints both tables for ZeRO-2 and a model; each parameter counts once, and the model is not
    changed."""
    _print_zero2(*_counted(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints both tables for ZeRO-2 and a model of which only the size is known."""
    _print_zero2(total_params, total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    policy: OffloadPolicy | None = None,
    is_gpu: bool = True,
) -> MemoryNeeds:
    """Bytes that tiermem's own plan takes for a bf16 model made of layers of the given size.

    Args:
        policy: which tiers states rest on; the default sends parameters and optimizer states to
            NVMe.
        is_gpu: whether GPUs compute; else whole units pass through host memory.

    Raises ValueError, with the arithmetic, when the policy's budget cannot hold the model.
    """
    policy = policy or _policy(3, Tier.NVME, Tier.NVME)
    num_ranks = num_gpus_per_node * num_nodes
    num_shards = 1 if policy.stage == 0 else num_ranks
    division = divide(_imagined(int(total_params), int(largest_layer_params)), policy, num_shards)
    topology = Topology(None, 0, num_ranks, num_shards, 0)
    plan = make_plan(division, policy, topology, is_gpu, num_gpus_per_node)
    gradients = max(
        (unit.full_bytes for unit in plan.division.units if unit.is_trainable), default=0
    )
    device = plan.device_bytes + gradients if is_gpu else 0
    return MemoryNeeds(
        plan.host_bytes * num_gpus_per_node, device, plan.disk_bytes * num_gpus_per_node
    )


def _print_zero2(
    total: int, largest: int, num_gpus_per_node: int, num_nodes: int, factor: float
) -> None:
    lines = _heading(f"{int(total / 1e6)}M total params", num_gpus_per_node, num_nodes)
    for cpu_offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total, num_gpus_per_node, num_nodes, cpu_offload, factor
        )
        lines.append(
            f" {_column(host, 7)} | {_column(device, 6)} | offload_optimizer={_device(cpu_offload)}"
        )
    _print([*lines, *_own_rows(2, total, largest, num_gpus_per_node, num_nodes)])


def _own_rows(
    stage: int, total: int, largest: int, num_gpus_per_node: int, num_nodes: int
) -> Iterator[str]:
    """The table of tiermem's needs, for every pair of tiers that the stage allows."""
    yield "tiermem, from its own plan (bf16 weights, fp32 states, zero_init=1; no factor):"
    yield "  per CPU  |  per GPU |  per NVMe | Options"
    homes = (Tier.HOST, Tier.NVME) if stage == 3 else ()
    pairs = [
        (params, optim) for optim in (Tier.HOST, Tier.NVME) for params in (*homes, Tier.DEVICE)
    ]
    for params, optim in pairs:
        if params is Tier.NVME and optim is Tier.HOST:
            continue  # parameters, the smaller part, would rest on the slower tier
        policy = _policy(stage, params, optim)
        needs = estimate_mem_needs(total, largest, num_gpus_per_node, num_nodes, policy)
        first = f"offload_param={_NAMES[params]}, " if stage == 3 else ""
        yield (
            f" {_column(needs.host_bytes, 7)} | {_column(needs.device_bytes, 6)} | "
            f"{_column(needs.nvme_bytes, 7)} | {first}offload_optimizer={_NAMES[optim]}"
        )


def _policy(stage: int, params: Tier, optim: Tier) -> OffloadPolicy:
    return OffloadPolicy(
        stage=stage, params=params, optim=optim, paths=["."] if Tier.NVME in (params, optim) else ()
    )


def _imagined(total: int, largest: int) -> nn.Module:
    """Layers of `largest` elements on the meta device until the total is reached. Raises ValueError
    for impossible sizes."""
    if not 0 < largest <= total:
        raise ValueError(
            f"largest_layer_params is {largest} and total_params {total}; the largest layer must "
            "be more than 0 and at most the total"
        )
    largest = max(largest, -(-total // _MOST_LAYERS))
    numels = [largest] * (total // largest) + [total % largest] * (total % largest > 0)
    layers = nn.ModuleList()
    for numel in numels:
        layer = nn.Identity()
        layer.weight = nn.Parameter(torch.empty(numel, dtype=torch.bfloat16, device="meta"))
        layers.append(layer)
    return layers


def _counted(model: nn.Module) -> tuple[int, int]:
    """The number of all parameters, each counted once, and that of the module that owns most."""
    owned = (sum(_numel(p) for p in module.parameters(recurse=False)) for module in model.modules())
    return sum(_numel(p) for p in model.parameters()), max(owned, default=0)


def _numel(param: nn.Parameter) -> int:
    """Elements of the whole parameter, also while it is partitioned."""
    return int(getattr(param, "ds_numel", param.numel()))


def _heading(size: str, num_gpus_per_node: int, num_nodes: int) -> list[str]:
    nodes = "nodes" if num_nodes > 1 else "node"
    gpus = "GPUs" if num_gpus_per_node > 1 else "GPU"
    return [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.",
        f"SW: Model with {size}.",
        "  per CPU  |  per GPU |   Options",
    ]


_NAMES = {Tier.DEVICE: "none", Tier.HOST: "cpu ", Tier.NVME: "nvme"}


def _device(is_offloaded: bool) -> str:
    return "cpu " if is_offloaded else "none"


def _column(num_bytes: int, width: int) -> str:
    return f"{num_bytes / _GIB:{width}.2f}GB"


def _print(lines: list[str]) -> None:
    """Prints lines: the documented behaviour of these functions. No other function of the library
    prints."""
    sys.stdout.write("\n".join(lines) + "\n")
