"""Engine: a sharded model with DeepSpeed's interface; it uses the same machinery as
`tiermem.shard`.

    forward     under autocast if the config says so; units are gathered and dropped while it runs
    backward    divides the loss by the micro-batches of a step and multiplies it by the loss scale
    step        at the last micro-batch of a step: optimizer, loss scale, schedule

Users may also differentiate the loss themselves: `engine.scale(loss).backward(); engine.step()`,
and without fp16 `loss.backward()` is enough. Then the gradients are divided by the micro-batches:
see Losses in facts.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from tiermem.checkpoint.format.finding import named_folder
from tiermem.checkpoint.format.kinds import name_of
from tiermem.config import OffloadDevice, OffloadState, TiermemConfig
from tiermem.config.optimizer import solve_batch
from tiermem.engine.checkpoints import EngineCheckpoints, consolidated, save_weights
from tiermem.engine.choice import OptimizerFactory, Parameters, agree_on_engine, choose_optimizer
from tiermem.engine.facts import (
    Accumulation,
    Losses,
    LossFunction,
    PhaseTimes,
    loss_of_micro_batch,
    offload,
    reload,
    states_to_offload,
)
from tiermem.engine.room import choose_policy
from tiermem.engine.second_plan import follow_memory
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.rules import LossScaler
from tiermem.precision import DTYPES
from tiermem.run.access import apply_gathered
from tiermem.run.init import keep_buffers_in_fp32
from tiermem.run.init_params import built_with
from tiermem.run.layerwise import LayerwisePasses, Loss
from tiermem.run.shards import Shards
from tiermem.schedule import build_scheduler
from tiermem.swap.memory.accelerator import is_accelerator
from tiermem.units import registry

R = TypeVar("R")

# ---- casts of the model and its inputs -----------------------------------------------------------
#
#     once, before the model is sharded     parameters to bf16 or fp16; buffers to data_types.buffer_dtype, but for those of
#                                           data_types.keep_in_fp32_modules
#     in every forward                      inputs to fp16 (fp16.auto_cast); torch.autocast (torch_autocast)


def cast_model(model: nn.Module, config: TiermemConfig, device: torch.device) -> None:
    """Casts floating-point parameters to bf16 or fp16, and buffers to the config's buffer_dtype;
    without those, none.

    Parameters and buffers keep their identity. Those of a model that zero.Init built keep their
    dtype, as in DeepSpeed, also adapters that were added in another. Raises ValueError when
    zero.Init built none in the config's dtype, and for a batch norm whose statistics the device
    cannot take beside its weights.
    """
    # None: parameters keep the user's dtype
    dtype = None if config.precision == "fp32" else DTYPES[config.precision]
    of_buffers = DTYPES[name] if (name := config.data_types.buffer_dtype) is not None else None
    floating = [
        param for param in model.parameters() if dtype is not None and param.dtype.is_floating_point
    ]
    built = {param.dtype for param in floating if registry.owner_of(param) is not None}
    if built and dtype not in built:
        said = ", ".join(sorted(str(each) for each in built))
        raise ValueError(
            f"zero.Init built parameters as {said}, the config asks for {dtype}: give zero.Init "
            f"dtype={dtype}, or change bf16 or fp16 in the config"
        )
    for param in floating if dtype is not None and not built else ():
        param.data = param.data.to(dtype)
    fp32_buffers = {
        id(each)
        for each in keep_buffers_in_fp32(model, dtype, config.data_types.keep_in_fp32_modules)
    }
    # else rotary frequencies stay in fp32
    for buffer in model.buffers() if of_buffers is not None else ():
        if buffer.dtype.is_floating_point and id(buffer) not in fp32_buffers:
            buffer.data = buffer.data.to(of_buffers)
    for name, module in model.named_modules() if device.type == "cpu" and dtype is not None else ():
        if (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.affine
            and module.running_mean is not None
        ):
            weights = module.weight.dtype
            kept = module.running_mean.dtype
            if weights != kept:
                raise ValueError(
                    f"module {name or 'model'!r}: torch's batch norm on the CPU takes no {kept} "
                    f"statistics beside {weights} weights. Set data_types.buffer_dtype to "
                    f'"{config.precision}", which casts all buffers, or leave {config.precision} '
                    "out"
                )


class Autocast(NamedTuple):
    """torch.autocast as a config asks for it, on one type of device.

    The weights of lowered modules are gathered in autocast's dtype, and their gradients are reduced
    in it.
    """

    device: str
    dtype: torch.dtype | None
    """The dtype that forward is lowered to; None: no autocast."""
    classes: tuple[type[nn.Module], ...]
    """Classes of modules that compute safely in that dtype."""

    @classmethod
    def of(cls, config: TiermemConfig, device: str) -> Autocast:
        """Reads the section torch_autocast. Without a dtype there, it takes torch's default for the
        device."""
        section = config.torch_autocast
        if not section.enabled:
            return cls(device, None, ())
        dtype = (
            DTYPES[section.dtype] if section.dtype is not None else torch.get_autocast_dtype(device)
        )
        return cls(device, dtype, section.safe_classes)

    def policy_fields(self) -> dict[str, Any]:
        """Returns the policy's fields that make lowered modules be gathered in autocast's dtype."""
        if self.dtype is None:
            return {}
        return {"gather_dtype": name_of(self.dtype), "lowered_modules": self.classes}

    def set_reduced_dtypes(self, model: nn.Module, shards: Shards) -> None:
        """Makes gradients of lowered modules be reduced in autocast's dtype."""
        if self.dtype is None:
            return
        by_param = {state.param: state for _, state in shards.parameters()}
        for module in model.modules():
            for param in module.parameters(recurse=False) if type(module) in self.classes else ():
                by_param[param].reduce_dtype = self.dtype

    def call(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Calls a function of a forward: the config decides, also where the caller has
        torch.autocast on, with a warning.

        It turns torch's weight cache off, which would keep a copy of every weight. Each `finally`
        begins with a call of C code, as swap/base/grad_mode.py explains: an interrupt leaves
        autocast as it was.
        """
        is_available = torch.amp.is_autocast_available(self.device)
        was_enabled = is_available and torch.is_autocast_enabled(self.device)
        if self.dtype is None and not was_enabled:
            return function(*args, **kwargs)
        was_dtype = torch.get_autocast_dtype(self.device)
        was_cached = torch.is_autocast_cache_enabled()
        if was_enabled and was_dtype != self.dtype:
            said = "without autocast" if self.dtype is None else f"in {self.dtype}"
            warnings.warn(
                "the caller's torch.autocast does not reach into the engine's forward, which "
                f"computes {said} as the config says: set torch_autocast there",
                stacklevel=6,  # the caller of the engine
            )
        try:
            torch.set_autocast_cache_enabled(False)
            try:
                torch.set_autocast_dtype(self.device, self.dtype or was_dtype)
                try:
                    torch.set_autocast_enabled(self.device, self.dtype is not None)
                    return function(*args, **kwargs)
                finally:
                    torch.set_autocast_enabled(self.device, was_enabled)
            finally:
                torch.set_autocast_dtype(self.device, was_dtype)
        finally:
            torch.set_autocast_cache_enabled(was_cached)


def _to_half(value: Any) -> Any:
    """Returns a floating-point tensor in fp16; another value does not change."""
    return value.half() if torch.is_tensor(value) and value.is_floating_point() else value


# ---- compiled forwards ---------------------------------------------------------------------------


def refuse_graphs(backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ValueError where torch.compile would capture CUDA graphs."""
    mode = options.get("mode")
    inductor = options.get("options") or {}
    asks = {
        f"backend={backend!r}": backend == "cudagraphs",
        f"mode={mode!r}": mode in ("reduce-overhead", "max-autotune"),
        "triton.cudagraphs": inductor.get("triton.cudagraphs", False),
    }
    for asked in (what for what, is_asked in asks.items() if is_asked):
        raise ValueError(
            f"compile: {asked} captures CUDA graphs, which read weights at the addresses of the "
            "capture; streamed weights have another address after each fetch. Leave it out, take "
            'mode="max-autotune-no-cudagraphs", or keep all weights on the device (no '
            "offload_param, on one rank)"
        )


class CompiledForwards:
    """Runs the forward of each unit's module through torch.compile, until `restore`.

        hooks: gather the unit | compiled forward of its module | hooks: release the unit

    Hooks use files, queues and other ranks, and a compiler cannot trace those. `nn.Module.compile`
    would include the hooks, so this class replaces the `forward` of the module instances
    themselves. Modules of one class share one compiled graph. Code around the units is not
    compiled.

    Args:
        modules: candidates; a candidate that contains another candidate is not compiled.
        backend: torch.compile's.
        options: further arguments of torch.compile.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        backend: str | Callable[..., Any],
        options: Mapping[str, Any],
    ) -> None:
        candidates = set(modules)
        innermost = [each for each in modules if candidates.intersection(each.modules()) == {each}]
        # of the instance, not its class
        self._own = {module: module.__dict__.get("forward") for module in innermost}
        for module in self._own:
            module.forward = torch.compile(module.forward, **{**options, "backend": backend})

    def restore(self) -> None:
        """Restores the modules' own forwards. A second call does nothing."""
        while self._own:
            module, own = self._own.popitem()
            if own is None:
                del module.forward
            else:
                module.forward = own


# ---- the engine ----------------------------------------------------------------------------------

logger = logging.getLogger("tiermem")

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


class Engine(EngineCheckpoints, nn.Module):
    """A sharded model with its optimizer, loss scale and schedule. `initialize` makes it; `close`
    ends it."""

    def __init__(
        self,
        model: nn.Module,
        config: TiermemConfig,
        optimizer: torch.optim.Optimizer | OptimizerFactory | None,
        parameters: Parameters | None,
        scheduler: LRScheduler | SchedulerFactory | None,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.module = model
        self.global_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self._was_step_applied = False
        self._compiled: CompiledForwards | None = None
        self._away = None
        sharing = group if group is not None else built_with(model).group
        self._sizes = config.batch(dist.get_world_size(sharing) if dist.is_initialized() else 1)
        choice = choose_optimizer(config, model, optimizer, parameters)
        cast_model(model, config, device)
        agree_on_engine(config, self._sizes, choice, model, device)
        self._autocast = Autocast.of(config, device.type)
        fields = self._autocast.policy_fields() | (
            {"num_moments": choice.num_moments} if choice else {}
        )
        policy = config.policy(**fields)
        if config.moved:
            policy = choose_policy(
                model,
                policy,
                config.moved,
                device=device,
                num_micro=self._sizes.accumulation,
                group=sharing,
                rehomes=choice is None or choice.name != "Muon",
            )
        self.shards = Shards(model, policy, group, device, is_trained=choice is not None)
        self._times = PhaseTimes(config.wall_clock_breakdown, device)
        self._scaler = LossScaler(
            config.fp16, config.fp16.enabled or self._autocast.dtype is torch.float16
        )
        self._losses = Losses(self._scaler, self.shards.homes, self._sizes.accumulation)
        try:
            if config.reduced_in is None:  # a communication_data_type wins
                self._autocast.set_reduced_dtypes(model, self.shards)
            self.optimizer = choice.build() if choice else None
            if choice:
                choice.warn_of_stalling(policy.precision)
            if self.optimizer is not None:
                self.optimizer.scale_losses_with(self._scaler)
            self.lr_scheduler = self._build_scheduler(scheduler)
            follow_memory(self.shards)
        except BaseException:
            self.shards.close()
            raise
        # a checkpoint saves its position; `initialize` sets the loader it builds
        self.training_dataloader: Any = None
        self.step_client_state = {}
        self._by_layer = None
        if policy.accumulation == "layers" and choice is not None:
            self._by_layer = LayerwisePasses(self.shards, self._autocast.call)
        self._accumulation = Accumulation(
            self.shards, self._sizes.accumulation, config.managed_gradient_accumulation
        )
        if config.dump_state and self.shards.topology.rank == 0:
            for row in config.report():
                logger.info("%s", row)

    @property
    def micro_steps(self) -> int:
        """Number of micro-batches that this rank has ended."""
        return self._accumulation.micro_steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward, under torch.autocast if the config says so; units are gathered
        and dropped meanwhile.

        The caller's torch.autocast is off inside, with a warning: see Autocast.block. Collective
        where units are gathered. Raises RuntimeError while `offload_states` keeps parameters from
        the device.
        """
        self._check_here()
        with self._phase("forward"):
            return self._forward(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Computes gradients of the loss divided by the micro-batches of a step; returns the
        divided loss, detached.

        With scale_wrt_gas=False it does not divide. It multiplies the loss by fp16's loss scale for
        the backward pass only. Raises ValueError unless the loss is a tensor of one element,
        RuntimeError for an engine without optimizer.
        """
        if not torch.is_tensor(loss) or loss.numel() != 1:
            raise ValueError(
                f"backward takes a loss of one element; given {tuple(getattr(loss, 'shape', ()))}"
            )
        self._check_trains()
        if self._by_layer is not None:
            raise RuntimeError(
                'accumulation is "layers", where all micro-batches of a step go through a block '
                "before the next block runs: "
                'call engine.train_batch(micro_batches), or set it to "batches"'
            )
        with self._phase("backward"):
            return self._differentiate(loss, retain_graph, scale_wrt_gas)

    def train_batch(
        self, data_iter: Iterable[Any], loss_fn: LossFunction | None = None
    ) -> torch.Tensor:
        """Trains one step on the next micro-batches of an iterator: forward, backward and step.
        Returns their mean loss.

        With accumulation "layers" the micro-batches go through the model block by block
        (run/layerwise.py), else one after the other.

        Args:
            data_iter: gives at least `gradient_accumulation_steps` micro-batches, on the engine's
                device: mappings (the model's keyword arguments), tuples or lists (its positional
                    ones), or its one argument.
            loss_fn: computes the loss from output and labels. A micro-batch is then a pair (inputs,
                labels), as in DeepSpeed's pipelines, or a mapping, which is given in place of
                labels. Without it, the loss is the model's output, its `loss`, its key "loss" or
                the first of a tuple.

        The loss is this rank's, in fp32, detached, without scale. Collective; blocks. Raises
        StopIteration when no micro-batch is left, ValueError when some are missing, RuntimeError in
        the middle of a step, NoChainError where accumulation "layers" needs a chain of blocks; the
        gradients are then forgotten.
        """
        self._check_trains()
        if not isinstance(data_iter, Iterable):
            raise ValueError(
                f"train_batch takes an iterator of micro-batches; given {data_iter!r:.60}"
            )
        micros = list(itertools.islice(data_iter, self._sizes.accumulation))
        if not micros:
            raise StopIteration("train_batch: no micro-batch is left")
        if len(micros) < self._sizes.accumulation:
            raise ValueError(
                f"train_batch takes {self._sizes.accumulation} micro-batches "
                f"(gradient_accumulation_steps), and only {len(micros)} are left"
            )
        compute = [
            functools.partial(loss_of_micro_batch, self._forward, micro, loss_fn)
            for micro in micros
        ]
        losses = []
        if self._by_layer is not None:
            losses = self._run_by_layer(self._by_layer, compute)
            self.step()
        for each in compute if self._by_layer is None else ():
            losses.append(each())
            self.backward(losses[-1])
            self.step()
        return torch.stack([loss.detach().float() for loss in losses]).mean()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the loss scale, for users who call `.backward()` themselves."""
        return self._losses.scaled(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the last one of a step, steps optimizer and schedule. Collective;
        blocks.

        For gradients with NaN or infinity the policy decides: the step is skipped (fp16 lowers its
        loss scale), raises NonFiniteGradients, or applies them. A skipped step changes no bit of
        any state. lr_kwargs go to the schedule's step. Raises FloatingPointError when gradients
        overflow at fp16's least loss scale, RuntimeError when fp16 scales the loss and the user's
        own backward ran without `scale`.
        """
        optimizer = self._check_trains()
        self._check_here()
        self._was_step_applied = False
        with self._accumulation.step() as is_boundary:
            if is_boundary:
                self._step(optimizer, lr_kwargs or {})
            else:
                # the units that the next micro-batch uses first stay gathered
                self.shards.prefetcher.end_pass()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last of a step. With managed_gradient_accumulation false:
        True inside `step` only."""
        return self._accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether this micro-batch is the last of a step, until the next call. The engine
        stops counting then.

        Call it before the micro-batch's forward. Raises RuntimeError with
        managed_gradient_accumulation false, and for False with step_in_backward.
        """
        self._accumulation.set_boundary(is_boundary)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulates the gradients of backwards in the block. In the block, `step` and a second
        such block raise RuntimeError.

        In stages 0 and 1 no gradient is reduced in the block. In stages 2 and 3 a rank has memory
        for its own part of the gradients only, so each backward still reduces; the result is the
        same (DeepSpeed refuses no_sync there).
        """
        return self._accumulation.hold_back("no_sync")

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As `no_sync`, with one reduction when the block ends. Collective. Call `step` after the
        block."""
        with self._accumulation.hold_back("coalesce_grad_reduction"):
            yield
        self._accumulation.reduce_now()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduces unreduced gradients at a boundary, before `step` would. Collective; blocks.
        `bucket_size` has no effect."""
        if self._accumulation.is_boundary:
            self._accumulation.reduce_now()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per step by changing the number of micro-batches; their size stays.
        Call it between steps.

        Raises ValueError, with the arithmetic, unless it is a multiple of micro-batch size times
        number of ranks.
        """
        if not isinstance(train_batch_size, int):
            raise ValueError(f"train_batch_size is {train_batch_size!r}; it must be a whole number")
        self._sizes = solve_batch(
            train_batch_size, self._sizes.micro, None, self.shards.topology.world
        )
        self._accumulation.num_micro_batches = self._sizes.accumulation
        self._losses.begin_step(self._sizes.accumulation)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples of a micro-batch, of which the caller's loader gives so many; their
        number in a step stays.

        Raises ValueError below 1.
        """
        if not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise ValueError(
                f"micro_batch_size is {micro_batch_size!r}; it must be a whole number, at least 1"
            )
        self._sizes = solve_batch(
            None, micro_batch_size, self._sizes.accumulation, self.shards.topology.world
        )

    # ---- weights, whole --------------------------------------------------------------------------

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the model's weights to one file: safetensors if its name ends in `.safetensors`,
        else torch's format.

        Returns whether it wrote. With partitioned parameters it writes only if
        `stage3_gather_16bit_weights_on_model_save` is on. Collective; blocks. Raises OSError on all
        ranks when rank 0 cannot write; then no file is changed.
        """
        path = named_folder("save_dir", save_dir) / save_filename
        if (
            self.zero_optimization_partition_weights()
            and not self.zero_gather_16bit_weights_on_model_save()
        ):
            logger.warning(
                "%s is not written: stage3_gather_16bit_weights_on_model_save is false", path
            )
            return False
        save_weights(self.shards, path, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Returns the model's full state dict on every rank's CPU. Collective; blocks."""
        state: dict[str, Any] = self.module.state_dict()
        for name, param in (
            self.module.named_parameters(remove_duplicate=False)
            if exclude_frozen_parameters
            else ()
        ):
            if not param.requires_grad:
                state.pop(name, None)
        return state

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Returns every full weight on rank 0's CPU, and None on the other ranks. Collective;
        blocks."""
        return consolidated(self.shards, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Does the same under the name that Accelerate and Transformers call. Raises ValueError
        below stage 3."""
        if not self.zero_optimization_partition_weights():
            raise ValueError(
                "parameters are not partitioned below stage 3: use module_state_dict()"
            )
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    # ---- compiling -------------------------------------------------------------------------------

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the forward of every unit's module with torch.compile when it first runs: see
        CompiledForwards.

        A second call does nothing. Raises ValueError for a schedule of passes and for compiled
        autograd, which tiermem has not, and for CUDA graphs where weights are streamed: a graph
        needs the addresses that it was captured with.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise ValueError(
                "compile: there is no schedule of passes and no compiled autograd here; leave both "
                "out"
            )
        options = compile_kwargs or {}
        if is_accelerator(self.device) and any(live.is_streamed for live in self.shards.units):
            refuse_graphs(backend, options)
        if self._compiled is None:
            self._compiled = CompiledForwards(self.shards.triggers, backend, options)

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._compiled is not None

    # ---- memory ----------------------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Drops every gathered unit that no module uses now. The next use gathers it again."""
        self.shards.prefetcher.empty()

    def offload_states(
        self,
        include: Iterable[OffloadState | str] | None = None,
        device: OffloadDevice | str = OffloadDevice.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Gives device memory back until `reload_states`. facts.py has a table of the states and
        their places. Blocks.

        Between the two the engine runs, steps, saves and loads nothing.

        Args:
            include: states to offload; default: all.
            device: cpu; none does nothing; nvme is refused.
            pin_memory, non_blocking: accepted for compatibility, without effect: the policy decides
                about pinned memory.

        Raises ValueError for unknown states, for nvme and for a budget of host memory that is too
        small; RuntimeError for an engine without optimizer, and before `reload_states`.
        """
        self._check_trains()
        self._check_here()
        self._away = offload(self.shards, states_to_offload(include, device))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back to the device what `offload_states` took off it. Collective; blocks. Raises
        torch's OutOfMemoryError."""
        if self._away is not None:
            reload(self.shards, self._away)
            self._away = None

    # ---- the end ---------------------------------------------------------------------------------

    def apply(self, fn: Callable[[nn.Module], Any]) -> Engine:
        """Calls a function on every module, children first, as nn.Module.apply does; gathers each
        module's own parameters.

        Rank 0's changes are kept. With override_module_apply false the function must gather
        parameters itself. Collective.
        """
        if not self.config.zero_optimization.override_module_apply:
            return super().apply(fn)
        apply_gathered(self, fn)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Engine:
        """Serves `to`, `cuda`, `half`, `float` and the like. Weights rest on tiers, so these cannot
        move or cast them.

        Does nothing when the call would change nothing, else raises RuntimeError that names the
        right setting.
        """
        kinds = {(p.dtype, p.device) for p in self.module.parameters()}
        for dtype, device in kinds:
            changed = fn(torch.empty(0, dtype=dtype, device=device))
            if (changed.dtype, changed.device) != (dtype, device):
                raise RuntimeError(
                    f"an engine's weights rest on tiers, and are not made {changed.dtype} on "
                    f"{changed.device} of {dtype} on {device}: ask for a dtype in the config "
                    "(bf16, fp16), for a device in initialize(device=...), and for copies by "
                    "module_state_dict()"
                )
        return self

    def close(self) -> None:
        """Closes the store and removes its files, unless they hold a checkpoint. Waits for a
        checkpoint copy under way.

        Raises the error of that copy, or the first error of a write-back.
        """
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
        """Returns the optimizer. Raises RuntimeError when there is none."""
        if self.optimizer is None:
            raise RuntimeError(
                "this engine is for inference: neither the config nor the call names an optimizer"
            )
        return self.optimizer

    def _step(self, optimizer: NativeOptimizer, lr_kwargs: Mapping[str, Any]) -> None:
        with self._times.phase("step"):
            try:
                self._losses.check_one_way()
                optimizer.step(
                    scale=self._scaler.scale,
                    max_norm=self.config.gradient_clipping,
                    num_undivided=self.shards.homes.num_micro_batches,
                )
            finally:
                self._losses.begin_step(self._sizes.accumulation)
        optimizer.zero_grad()
        self._scaler.update(optimizer.was_skipped)
        self.global_steps += 1
        num_samples = self._sizes.micro * self.shards.topology.world
        self.global_samples += num_samples * self._accumulation.end_step()
        self._was_step_applied = not optimizer.was_skipped
        if optimizer.was_skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._end_step()
        self._report_progress()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        span = self.shards.store.recorder.span(name, f"micro-batch {self.micro_steps}")
        explained = self.shards.hooks.memory_errors.explained(name)
        with self._times.phase(name), span, explained:
            yield

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = tree_map(_to_half, (args, kwargs))
        return self._autocast.call(self.module, *args, **kwargs)

    def _differentiate(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        loss = self._losses.divided(loss, self._sizes.accumulation if scale_wrt_gas else 1)
        self.scale(loss).backward(retain_graph=retain_graph)
        return loss.detach()

    def _run_by_layer(self, passes: LayerwisePasses, compute: Sequence[Loss]) -> list[torch.Tensor]:
        """Computes the gradients of all micro-batches of a step; returns their losses."""
        self._check_here()
        try:
            with self._accumulation.all_but_step(), passes.step(compute):
                with self._phase("forward"):
                    passes.forward()
                with self._phase("backward"):
                    return passes.backward(self._differentiate)
        except BaseException:
            self._losses.begin_step(self._sizes.accumulation)
            raise

    def _build_scheduler(self, given: LRScheduler | SchedulerFactory | None) -> LRScheduler | None:
        if self.optimizer is None:
            return None
        if isinstance(given, LRScheduler):
            # it was built for the user's optimizer, which ours replaces
            given.optimizer = self.optimizer
            return given
        if given is not None:
            return given(self.optimizer)
        section = self.config.scheduler
        if section is None:
            return None
        return build_scheduler(section.type, section.params, self.optimizer)

    def _report_progress(self) -> None:
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.shards.topology.rank == 0:
            logger.info(
                "step %d, lr %s, gradient norm %.4g%s",
                self.global_steps,
                self.get_lr(),
                self.get_global_grad_norm(),
                self._times.line(every),
            )
