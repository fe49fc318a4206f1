"""Start: `initialize`, from a config to an engine.

config -> torchrun's ranks join, unless a process group is there -> Engine -> a loader of micro-batches, if asked for
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from tiermem.config import load_config
from tiermem.data import build_loader
from tiermem.engine.choice import OptimizerFactory, Parameters
from tiermem.engine.engine import Engine, SchedulerFactory
from tiermem.optim.base import NativeOptimizer
from tiermem.swap.accelerator import find_device
from tiermem.zero.ranks.joining import join_ranks


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Engine, NativeOptimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Shards a model by a config and returns (engine, optimizer, loader, scheduler).

    Args:
        args: a namespace whose `deepspeed_config` names the config file, when `config` is not given. A model may stand here:
            `initialize(model, config=...)`.
        model: built plainly or under `tiermem.zero.Init`.
        optimizer: one of ours, or torch's of the same name, or a function of the parameters; its groups and settings are
            kept, the step becomes ours. Default: what the config says; with neither, the engine is for inference.
        model_parameters: what the optimizer steps, parameters or groups; default: all that require gradients.
        training_data: a dataset, for which a loader of micro-batches (each rank its own) is returned.
        lr_scheduler: a scheduler or a function of the optimizer; default: what the config says.
        distributed_port: taken for compatibility; the port is MASTER_PORT's.
        mpu: says by get_data_parallel_group() which ranks share the model; model-parallel ranks are refused.
        dist_init_required: False: there has to be a process group already.
        mesh_param: (data-parallel, sequence-parallel) ranks; the second has to be 1.
        config: a DeepSpeed-style dict or the path of a JSON file; `config_params` is its older name.
        device: where the maths runs, and where the model is from then on; default: this rank's accelerator, else the CPU.

    Collective and blocking. Raises ConfigError (a ValueError) for a config that is wrong, ValueError when the plan does not
    fit, OSError when a path is missing, not writable or too full; all before any weight is moved.
    """
    if isinstance(args, nn.Module):
        if model is not None:
            raise ValueError("two models are given: initialize(model, config=...), or initialize(args, model, ...)")
        args, model = None, args
    if model is None:
        raise ValueError("initialize needs a model")
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ValueError("initialize needs a config: a dict or the path of a JSON file")
    loaded = load_config(given)
    on, policy = find_device(device), loaded.policy()
    if dist_init_required is False and not dist.is_initialized():
        raise RuntimeError("dist_init_required is False and there is no process group: make one, or leave it out")
    join_ranks(policy.timeout_s, on, policy.join_timeout_s)
    group = _sharing(mpu, mesh_param)
    engine = Engine(model, loaded, optimizer, model_parameters, lr_scheduler, on, group)
    loader = None
    if training_data is not None:
        topology = engine.shards.topology
        loader = build_loader(
            training_data,
            engine.train_micro_batch_size_per_gpu(),
            topology.rank,
            topology.world,
            collate_fn,
            loaded.seed,
            loaded.dataloader_drop_last,
        )
        engine.training_dataloader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _sharing(mpu: Any, mesh_param: Sequence[int] | None) -> dist.ProcessGroup | None:
    """The ranks that share the model; None: nobody says. Raises ValueError for ranks that share its layers or sequences."""
    if mesh_param is not None and list(mesh_param[1:]) != [1]:
        raise ValueError(
            f"mesh_param is {tuple(mesh_param)}: sequence parallelism does not exist here; give (data-parallel ranks, 1), or "
            "leave it out"
        )
    if mpu is None:
        return None
    names = ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    size = next((getattr(mpu, name)() for name in names if hasattr(mpu, name)), 1)
    if size != 1:
        raise ValueError(
            f"mpu has {size} model-parallel ranks: a layer is not divided here, so give one of a single rank"
        )
    return cast(dist.ProcessGroup, mpu.get_data_parallel_group())
