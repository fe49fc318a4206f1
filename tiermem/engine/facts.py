"""EngineFacts: what launchers, trainers and monitors ask of an engine: plain answers, under the reference's names.

None of them does anything; all but the counters come from the config. Hugging Face's Trainer and Accelerate, TRL and
Lightning ask for most of these.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tiermem.config import OffloadOptimizerConfig, OffloadParamConfig, TiermemConfig
from tiermem.config.batch import BatchSizes
from tiermem.config.offload import OffloadDevice
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.scaling import LossScaler
from tiermem.zero.shards import Shards


class EngineFacts:
    """The questions; `Engine` has the attributes."""

    config: TiermemConfig
    shards: Shards
    optimizer: NativeOptimizer | None
    lr_scheduler: LRScheduler | None
    _sizes: BatchSizes
    _scaler: LossScaler
    _was_step_applied: bool

    # ---- sizes ---------------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per step, over all ranks."""
        return self._sizes.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward of one rank."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one rank per step."""
        return self._sizes.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes: of a step, of a micro-batch, and micro-batches per step."""
        return self._sizes.total, self._sizes.micro, self._sizes.accumulation

    # ---- the last step -------------------------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` changed parameters: not between micro-batches, nor when it was skipped."""
        return self._was_step_applied

    def get_global_grad_norm(self) -> float:
        """Norm of the last step's gradients over all ranks, before clipping, without the loss scale."""
        return self.optimizer.grad_norm if self.optimizer is not None else 0.0

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(value) for value in self._of_groups("lr")]

    def get_mom(self) -> list[Any]:
        """The momentum of every parameter group: `betas` of Adam and its kin, else `momentum`."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[Any]:
        """What kind of group each parameter group says it is; None of one that does not."""
        return self._of_groups("type")

    def loss_scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes by itself."""
        return self.config.scales_loss and self.config.fp16.is_dynamic

    # ---- the config ----------------------------------------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        """Largest global norm of the gradients in a step; 0 does not clip."""
        return float(self.config.gradient_clipping)

    def steps_per_print(self) -> int | None:
        """Optimizer steps between two lines of progress."""
        return self.config.steps_per_print

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.config.bf16.enabled

    def torch_autocast_enabled(self) -> bool:
        """Whether forward runs under torch.autocast."""
        return self.config.torch_autocast.enabled

    def optimizer_name(self) -> str | None:
        """The optimizer of the config."""
        return self.config.optimizer.name if self.config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """The schedule of the config."""
        return self.config.scheduler.type if self.config.scheduler is not None else None

    def zero_optimization(self) -> bool:
        """Whether anything is partitioned."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return int(self.config.zero_optimization.stage)

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are partitioned."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are partitioned."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_param(self) -> OffloadParamConfig | None:
        """The section that says where parameters rest."""
        return self.config.zero_optimization.offload_param

    def zero_offload_optimizer(self) -> OffloadOptimizerConfig | None:
        """The section that says where optimizer states rest."""
        return self.config.zero_optimization.offload_optimizer

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states rest in host memory."""
        return self.config.zero_optimization.optimizer_device is OffloadDevice.cpu

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer states rest on NVMe."""
        return self.config.zero_optimization.optimizer_device is OffloadDevice.nvme

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` gathers partitioned weights."""
        return self.config.zero_optimization.gather_16bit_weights_on_model_save

    @property
    def basic_optimizer(self) -> NativeOptimizer | None:
        """The optimizer; the reference's name for what it wraps."""
        return self.optimizer

    def zero_overlap_comm(self) -> bool:
        """Whether reductions go on while backward does."""
        return self.shards.policy.overlap_reduce

    @property
    def device(self) -> torch.device:
        """Where the maths runs: batches go there."""
        return self.shards.device

    @property
    def local_rank(self) -> int:
        """This rank among those of its node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This rank among all that train together."""
        return self.shards.topology.rank

    @property
    def world_size(self) -> int:
        """Ranks that train together."""
        return self.shards.topology.world

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share the model's states."""
        return self.shards.topology.rank

    @property
    def dp_world_size(self) -> int:
        """Ranks that train together."""
        return self.shards.topology.world

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key) for group in self.optimizer.param_groups] if self.optimizer is not None else []
