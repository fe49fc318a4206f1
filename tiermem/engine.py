"""The engine: the face that DeepSpeed users know, over the same machinery as `tiermem.shard`.

    engine, optimizer, loader, scheduler = tiermem.initialize(model=model, config=cfg)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The engine casts the parameters to the precision of the config, shards the model by the config's policy, divides the loss by
the micro-batches of a step and multiplies it by the loss scale, and at the last micro-batch steps optimizer and schedule.
Everything else happens below, or beside it:

    engine_facts   what trainers and monitors ask                saving          save_16bit_model and whole state dicts
    phases         offload_states, reload_states                 zero/present    generation with all units in memory
    compiled       torch.compile, unit by unit

The loss may also be the user's own to differentiate: `engine.scale(loss).backward(); engine.step()`, and without fp16
`loss.backward()` will do. Then gradients are divided by the micro-batches inside the step.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from tiermem import __version__
from tiermem.accumulation import Accumulation
from tiermem.choice import OptimizerChoice, OptimizerFactory, Parameters, choose_optimizer
from tiermem.compiled import CompiledForwards
from tiermem.config import OffloadDevice, OffloadState, TiermemConfig, load_config
from tiermem.config.batch import solve_batch
from tiermem.data import build_loader
from tiermem.engine_facts import EngineFacts
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.scaling import LossScaler
from tiermem.phase_times import PhaseTimes
from tiermem.phases import bring_back, offload, states_to_offload
from tiermem.precision import DTYPES
from tiermem.saving import consolidated, save_weights
from tiermem.schedule import build_scheduler
from tiermem.zero import registry
from tiermem.zero.ranks.agreement import agree
from tiermem.zero.ranks.topology import find_topology
from tiermem.zero.shards import Shards, device_of, shard
from tiermem.zero.weights.gathered import apply_gathered
from tiermem.zero.weights.residency import LiveUnit

logger = logging.getLogger("tiermem")

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]

_CAST_TO = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, NativeOptimizer | None, DataLoader[Any] | None, LRScheduler | None]:
    """Shards a model by a config and returns (engine, optimizer, loader, scheduler).

    Args:
        args: a namespace whose `deepspeed_config` names the config file, when `config` is not given.
        model: built plainly or under `tiermem.zero.Init`.
        optimizer: one of ours, or torch's of the same name, or a function of the parameters; its groups and settings are
            kept, the step becomes ours. Default: what the config says; with neither, the engine is for inference.
        model_parameters: what the optimizer steps, parameters or groups; default: all that require gradients.
        training_data: a dataset, for which a loader of micro-batches (each rank its own) is returned.
        lr_scheduler: a scheduler or a function of the optimizer; default: what the config says.
        config: a DeepSpeed-style dict or the path of a JSON file; `config_params` is its older name.

    Collective and blocking. Raises ConfigError (a ValueError) for a config that is wrong, ValueError when the plan does not
    fit, OSError when a path is missing, not writable or too full; all before any weight is moved.
    """
    if model is None:
        raise ValueError("initialize needs a model")
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    if given is None:
        raise ValueError("initialize needs a config: a dict or the path of a JSON file")
    loaded = load_config(given)
    _join_ranks(loaded)
    engine = Engine(model, loaded, optimizer, model_parameters, lr_scheduler)
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
    return engine, engine.optimizer, loader, engine.lr_scheduler


class Engine(EngineFacts, nn.Module):
    """A sharded model with its optimizer, loss scale and schedule. Made by `initialize`; ended by `close`."""

    def __init__(
        self,
        model: nn.Module,
        config: TiermemConfig,
        optimizer: torch.optim.Optimizer | OptimizerFactory | None,
        parameters: Parameters | None,
        scheduler: LRScheduler | SchedulerFactory | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.module = model
        self.global_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self._was_step_applied = False
        self._num_divided = 0  # backwards since the last step whose loss was divided by the micro-batches of a step
        self._num_scaled = 0  # losses since the last step that `scale` has seen
        self._compiled: CompiledForwards | None = None
        self._away: list[LiveUnit] = []  # resident units that offload_states took from the device
        self._sizes = config.batch(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)
        choice = choose_optimizer(config, model, optimizer, parameters)
        _cast(model, _CAST_TO[config.precision])
        _cast_buffers(model, config.data_types.buffer_dtype)
        self._agree(choice)
        device = device_of(model)
        self._autocast_dtype = _autocast_dtype(config, device.type)
        fields = _lowering(config, self._autocast_dtype) | ({"num_moments": choice.num_moments} if choice else {})
        policy = config.policy(**fields)
        self.shards: Shards = shard(model, policy, device=device, is_trained=choice is not None)
        self._times = PhaseTimes(config.wall_clock_breakdown, self.shards.device.type == "cuda")
        self._scaler = LossScaler(config.fp16, config.fp16.enabled or self._autocast_dtype is torch.float16)
        try:
            self._set_reduced_dtypes()
            self.optimizer = choice.build() if choice else None
            if choice:
                choice.warn_of_stalling(policy.precision)
            if self.optimizer is not None:
                self.optimizer.loss_scaler = self._scaler
            self.lr_scheduler = self._build_scheduler(scheduler)
        except BaseException:
            self.shards.close()
            raise
        self._accumulation = Accumulation(self.shards, self._sizes.accumulation, config.managed_gradient_accumulation)
        self._dump_state()

    @property
    def micro_steps(self) -> int:
        """Micro-batches of this rank that have ended."""
        return self._accumulation.micro_steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; units come and go while it runs. Under torch.autocast if the config says so."""
        self._check_here()
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = tree_map(_to_half, (args, kwargs))
        span = self.shards.store.recorder.span("forward", f"micro-batch {self.micro_steps}")
        with self._times.phase("forward"), span, self._autocast():
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Computes gradients of the loss divided by the micro-batches of a step, and returns that quotient.

        With scale_wrt_gas=False it is not divided. The loss scale of fp16 is applied on the way.
        """
        if not torch.is_tensor(loss) or loss.numel() != 1:
            raise ValueError(f"backward takes a loss of one element; given {tuple(getattr(loss, 'shape', ()))}")
        self._check_trains()
        self._num_divided += 1
        if scale_wrt_gas and self._sizes.accumulation > 1:
            loss = loss / self._sizes.accumulation
        span = self.shards.store.recorder.span("backward", f"micro-batch {self.micro_steps}")
        with self._times.phase("backward"), span:
            self.scale(loss).backward(retain_graph=retain_graph)
        return loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss times the loss scale, for users who call `.backward()` themselves."""
        self._num_scaled += 1
        return loss * self._scaler.scale if self._scaler.scale != 1.0 else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the last one of a step, steps optimizer and schedule. Collective; blocks.

        Gradients with NaN or infinity skip the step (fp16 lowers its scale), raise NonFiniteGradients or are applied as they
        are, as the policy says. A step that is skipped leaves every state as it is, to the bit. lr_kwargs go to the schedule's
        step. Raises RuntimeError when fp16 scales the loss and the user's own backward was computed without `scale`.
        """
        optimizer = self._check_trains()
        self._check_here()
        self._was_step_applied = False
        with self._accumulation.step() as is_boundary:
            if is_boundary:
                self._step(optimizer, lr_kwargs or {})

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of a step; with managed_gradient_accumulation false: in `step` only."""
        return self._accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says, from now on and instead of counting, whether the micro-batch at hand is the last of a step.

        Call it before the micro-batch's forward. Raises RuntimeError with managed_gradient_accumulation false, and for False
        with step_in_backward.
        """
        self._accumulation.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in the block add up; `step` raises RuntimeError in it, and so does another block like it.

        In stages 0 and 1 nothing is reduced in it. In stages 2 and 3, where a rank has room for its own part of the gradients
        alone, they are reduced as ever: the result is the same (the reference refuses).
        """
        return self._accumulation.hold_back("no_sync")

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards, one reduction when the block ends; as `no_sync`. Collective; `step` comes after the block."""
        with self._accumulation.hold_back("coalesce_grad_reduction"):
            yield
        self._accumulation.reduce_now()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduces what backwards have left, at a boundary; `step` would. Collective; blocks. `bucket_size` has no effect."""
        if self._accumulation.is_boundary:
            self._accumulation.reduce_now()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per step by changing the micro-batches of a step; their size stays. Between steps.

        Raises ValueError, with the arithmetic, when the number is not a multiple of what all ranks take at once.
        """
        self._sizes = solve_batch(train_batch_size, self._sizes.micro, None, self.shards.topology.world)
        self._accumulation.num_micro_batches = self._sizes.accumulation

    # ---- weights, whole --------------------------------------------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the model's weights to one file, safetensors where its name ends so, else torch's format; see saving.py.

        Returns whether it did: with partitioned parameters only if `stage3_gather_16bit_weights_on_model_save` is on.
        Collective; blocks. Raises OSError when rank 0 cannot write; then no file is changed.
        """
        path = Path(save_dir) / save_filename
        if self.zero_optimization_partition_weights() and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning("%s is not written: stage3_gather_16bit_weights_on_model_save is false", path)
            return False
        save_weights(self.shards, path, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state dict, whole, on every rank's CPU. Collective; blocks."""
        state: dict[str, Any] = self.module.state_dict()
        for name, param in self.module.named_parameters(remove_duplicate=False) if exclude_frozen_parameters else ():
            if not param.requires_grad:
                state.pop(name, None)
        return state

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Every weight, whole, on rank 0's CPU; None on the other ranks. Collective; blocks."""
        return consolidated(self.shards, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The same, under the name that Accelerate and Transformers call. Raises ValueError below stage 3."""
        if not self.zero_optimization_partition_weights():
            raise ValueError("parameters are not partitioned below stage 3: use module_state_dict()")
        return consolidated(self.shards, exclude_frozen_parameters)

    # ---- compiling -------------------------------------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the forward of every unit's module with torch.compile, when it first runs: see compiled.py.

        Calling it again does nothing. Raises ValueError for a schedule of passes and for compiled autograd, which do not exist.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError("compile: there is no schedule of passes and no compiled autograd here; leave both out")
        if self._compiled is None:
            self._compiled = CompiledForwards(self.shards.triggers, backend, compile_kwargs or {})

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled is not None

    # ---- memory ----------------------------------------------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Lets every gathered unit go that nobody uses. They come again when they are needed."""
        self.shards.residency.empty()

    def offload_states(
        self,
        include: Iterable[OffloadState | str] | None = None,
        device: OffloadDevice | str = OffloadDevice.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Gives device memory back until `reload_states`: see phases.py for what lies where.

        Args:
            include: states to offload; default: all.
            device: cpu; none does nothing; nvme is refused.
            pin_memory, non_blocking: taken for compatibility: host memory is pinned when the policy says so.

        Raises ValueError for what cannot be offloaded, RuntimeError for an engine without optimizer. Blocks.
        """
        self._check_trains()
        self._away += offload(self.shards, states_to_offload(include, device))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what `offload_states` took from the device. Collective; blocks in stream order."""
        away, self._away = self._away, []
        bring_back(self.shards, away)

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def apply(self, fn: Callable[[nn.Module], Any]) -> Engine:
        """As nn.Module's: calls a function on every module, children first; each with its own parameters gathered.

        What rank 0 writes is kept. With override_module_apply false the function gathers what it touches itself. Collective.
        """
        if not self.config.zero_optimization.override_module_apply:
            return super().apply(fn)
        apply_gathered(self, fn)
        return self

    def close(self) -> None:
        """Ends the store; what it kept on paths is removed. Raises the first error of a write-back."""
        if self._compiled is not None:
            self._compiled.restore()
        self.shards.close()

    destroy = close

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _check_trains(self) -> NativeOptimizer:
        """The optimizer. Raises RuntimeError where there is none."""
        if self.optimizer is None:
            raise RuntimeError("this engine is for inference: neither the config nor the call names an optimizer")
        return self.optimizer

    def _check_here(self) -> None:
        """Raises RuntimeError while the model is not on its device."""
        if self._away:
            raise RuntimeError("offload_states took parameters from the device: call reload_states first")

    def _gradient_scale(self) -> float:
        """What the gradients of a step have to be divided by, whoever computed them. Raises RuntimeError."""
        divided, scaled, self._num_divided, self._num_scaled = self._num_divided, self._num_scaled, 0, 0
        if divided and scaled > divided:  # `backward` scales, too
            raise RuntimeError(
                f"{divided} losses of this step went through engine.backward, which divides by the micro-batches of a step, "
                f"and {scaled - divided} through engine.scale, which does not: use one of them for all micro-batches of a step"
            )
        if self._scaler.scale != 1.0 and not scaled:
            raise RuntimeError(
                "fp16 scales the loss, and the gradients of this step come from a backward of an unscaled one: use "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        return self._scaler.scale * (1 if divided else self._sizes.accumulation)

    def _autocast(self) -> AbstractContextManager[Any]:
        """torch.autocast as the config asks for; without its cache, which would keep a copy of every weight."""
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.shards.device.type, dtype=self._autocast_dtype, cache_enabled=False)

    def _set_reduced_dtypes(self) -> None:
        """Under autocast, gradients of modules that it lowers cross ranks in its dtype; a communication_data_type wins."""
        if self._autocast_dtype is None or self.config.reduced_in is not None:
            return
        classes, by_param = self.config.torch_autocast.safe_classes, {s.param: s for _, s in self.shards.parameters()}
        for module in self.module.modules():
            for param in module.parameters(recurse=False) if type(module) in classes else ():
                by_param[param].reduce_dtype = self._autocast_dtype

    def _agree(self, choice: OptimizerChoice | None) -> None:
        """Raises ValueError on every rank when what the engine itself was given differs between ranks."""
        policy = self.config.policy()
        sizes = self._sizes
        facts = {"tiermem": __version__, "torch": torch.__version__, **self.config.shared_by_ranks()}
        facts |= {"train_batch_size": sizes.total, "train_micro_batch_size_per_gpu": sizes.micro}
        facts["gradient_accumulation_steps"] = sizes.accumulation
        facts |= choice.facts(self.module) if choice is not None else {"optimizer": "none"}
        agree(find_topology(policy.stage, None, policy.timeout_s), facts, "tiermem.initialize")

    def _step(self, optimizer: NativeOptimizer, lr_kwargs: Mapping[str, Any]) -> None:
        with self._times.phase("step"):
            optimizer.step(scale=self._gradient_scale(), max_norm=self.config.gradient_clipping)
        optimizer.zero_grad()
        self._scaler.update(optimizer.was_skipped)
        self.global_steps += 1
        self.global_samples += self._sizes.total
        self._was_step_applied = not optimizer.was_skipped
        if optimizer.was_skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._report_progress()

    def _build_scheduler(self, given: LRScheduler | SchedulerFactory | None) -> LRScheduler | None:
        if self.optimizer is None:
            return None
        if isinstance(given, LRScheduler):
            given.optimizer = self.optimizer  # built for the optimizer that ours has taken the place of
            return given
        if given is not None:
            return given(self.optimizer)
        return build_scheduler(self.config.scheduler, self.optimizer) if self.config.scheduler is not None else None

    def _report_progress(self) -> None:
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.shards.topology.rank == 0:
            figures = self.global_steps, self.get_lr(), self.get_global_grad_norm(), self._times.line(every)
            logger.info("step %d, lr %s, gradient norm %.4g%s", *figures)

    def _dump_state(self) -> None:
        """Logs what became of every key, if the config asks for it."""
        if self.config.dump_state and self.shards.topology.rank == 0:
            for row in self.config.report():
                logger.info("%s", row)


def _autocast_dtype(config: TiermemConfig, device: str) -> torch.dtype | None:
    """What forward is lowered to; None when it is not."""
    if not config.torch_autocast.enabled:
        return None
    name = config.torch_autocast.dtype
    return DTYPES[name] if name is not None else torch.get_autocast_dtype(device)


def _lowering(config: TiermemConfig, dtype: torch.dtype | None) -> dict[str, Any]:
    """The policy's fields for a forward under autocast: what it lowers is gathered in its dtype."""
    if dtype is None:
        return {}
    name = next(name for name, each in DTYPES.items() if each is dtype)
    return {"gather_dtype": name, "lowered_modules": config.torch_autocast.safe_classes}


def _cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Casts floating-point parameters; buffers keep their dtype (rotary frequencies need fp32)."""
    for param in model.parameters():
        is_resting = registry.keeper_of(param) is not None
        if dtype is not None and param.dtype.is_floating_point and param.dtype != dtype:
            if is_resting:
                raise ValueError(
                    f"zero.Init built parameters as {param.dtype}, the config asks for {dtype}: give both the same"
                )
            param.data = param.data.to(dtype)


def _cast_buffers(model: nn.Module, dtype: str | None) -> None:
    """Casts floating-point buffers, if the config asks for it; in place, so that they keep their identity."""
    if dtype is None:
        return
    for buffer in model.buffers():
        if buffer.dtype.is_floating_point:
            buffer.data = buffer.data.to(DTYPES[dtype])


def _to_half(value: Any) -> Any:
    """A floating-point tensor in fp16; anything else as it is."""
    return value.half() if torch.is_tensor(value) and value.is_floating_point() else value


def _join_ranks(config: TiermemConfig) -> None:
    """Under torchrun, makes the process group if nobody has."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=config.policy().timeout_s))
