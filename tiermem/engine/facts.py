"""What an engine counts: micro-batches, losses, phase times; offloaded states; the answers for
launchers and trainers."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tiermem.config import OffloadOptimizerConfig, OffloadParamConfig, TiermemConfig
from tiermem.config.io import OffloadDevice, OffloadState
from tiermem.config.optimizer import BatchSizes
from tiermem.gradients.gradients import GradientHomes
from tiermem.optim.base import NativeOptimizer
from tiermem.optim.rules import LossScaler
from tiermem.ranks.topology import ranks_per_node
from tiermem.run.shards import Shards
from tiermem.swap.memory.accelerator import (
    current_stream,
    give_back_cached,
    is_accelerator,
    new_event,
)
from tiermem.weights.unit_memory import LAYOUTS
from tiermem.weights.unit_state import LiveUnit

# ---- accumulation of micro-batches ---------------------------------------------------------------


class Accumulation:
    """Decides which micro-batch ends a step (the boundary), and delays reductions until then where
    gradients have a place.

        stages 2 and 3    every micro-batch's gradients are reduced over ranks and accumulated at home, because a rank has
                          memory for its own part only
        stages 0 and 1    each rank accumulates in `p.grad`, and ranks reduce once, at the last micro-batch; at home like
                          stages 2 and 3 when gradients rest in another dtype than the parameters'

    The boundary is counted (`gradient_accumulation_steps`), or set by the user, or, if not managed,
    every call of `step`. A step computes the same in all three cases; only the number of
    collectives differs.

    Args:
        shards: the model whose gradients accumulate.
        num_micro_batches: micro-batches of a step.
        is_managed: False: every `step` is a boundary, and no backward is.
    """

    def __init__(self, shards: Shards, num_micro_batches: int, is_managed: bool) -> None:
        self._shards = shards
        self.num_micro_batches = num_micro_batches
        self._is_managed = is_managed
        self._set_by_user: bool | None = None
        self._is_stepping = False
        self._block = ""  # "no_sync" or "coalesce_grad_reduction" inside such a block
        self.micro_steps = 0  # micro-batches that have ended
        self._step_start = 0  # of those, the ones of steps that have ended
        self.is_under_way = False  # whether a micro-batch has ended since the last step
        self._num_backwards = shards.hooks.num_backwards  # the count at the end of the last step
        shards.hooks.receive_if(self._may_receive)

    @property
    def is_boundary(self) -> bool:
        """Whether this micro-batch is the last of a step."""
        if self._set_by_user is not None:
            return self._set_by_user
        if not self._is_managed:
            return self._is_stepping
        return self.micro_steps + 1 - self._step_start >= self.num_micro_batches

    def set_boundary(self, is_boundary: bool) -> None:
        """Sets whether this micro-batch and the next ones end a step, until the next call.

        Raises RuntimeError with managed_gradient_accumulation false, and for False with
        step_in_backward.
        """
        if not self._is_managed:
            raise RuntimeError(
                "set_gradient_accumulation_boundary with managed_gradient_accumulation false: "
                "every step() is the boundary. Remove the call, or the key"
            )
        if not is_boundary:
            self._check_holds_gradients("set_gradient_accumulation_boundary(False)")
        self._set_by_user = is_boundary

    @property
    def num_held(self) -> int:
        """Backwards since the last step."""
        return self._shards.hooks.num_backwards - self._num_backwards

    def end_step(self) -> int:
        """Ends a step; returns its number of micro-batches. Where the user sets the boundary, each
        backward counts as one."""
        num_held = self.num_held
        self._num_backwards = self._shards.hooks.num_backwards
        is_counted = self._is_managed and self._set_by_user is None
        return self.num_micro_batches if is_counted else num_held

    @contextlib.contextmanager
    def all_but_step(self) -> Iterator[None]:
        """A block that computes the gradients of all micro-batches of a step; `step` then ends the
        last one of them.

        Raises RuntimeError inside another block, in the middle of a step, and where the engine does
        not count micro-batches.
        """
        if (
            self._block
            or self.is_under_way
            or not self._is_managed
            or self._set_by_user is not None
        ):
            raise RuntimeError(
                "train_batch runs all micro-batches of a step: call it between steps, outside "
                "no_sync, with "
                "managed_gradient_accumulation and without set_gradient_accumulation_boundary"
            )
        yield
        self.micro_steps += self.num_micro_batches - 1

    def begin_anew(self, micro_steps: int | None = None) -> None:
        """Makes the next micro-batch the first of a step.

        micro_steps: micro-batches ended so far (default: the present count); rounded up to whole
            steps.
        """
        self.is_under_way = False
        self._num_backwards = self._shards.hooks.num_backwards
        ended = self.micro_steps if micro_steps is None else micro_steps
        self.micro_steps = -(-ended // self.num_micro_batches) * self.num_micro_batches
        self._step_start = self.micro_steps

    @contextlib.contextmanager
    def hold_back(self, block: str) -> Iterator[None]:
        """Delays reductions in the block where gradients accumulate in `p.grad`; see the class.
        Raises RuntimeError in a block.

        block: the name of the calling method, for errors.
        """
        if self._block:
            raise RuntimeError(
                f"{block} inside {self._block}: leave the one before you enter the other"
            )
        self._check_holds_gradients(block)
        self._block = block
        try:
            yield
        finally:
            self._block = ""

    def reduce_now(self) -> None:
        """Reduces the gradients in `p.grad` over ranks. Collective; blocks. Raises RuntimeError
        inside a block."""
        if self._block:
            raise RuntimeError(f"gradients are not reduced inside {self._block}: leave it first")
        self._shards.hooks.check_backward_ended()
        self._shards.receive_gradients()

    @contextlib.contextmanager
    def step(self) -> Iterator[bool]:
        """Ends a micro-batch; the context's value says whether it ends a step. Raises RuntimeError
        inside a block."""
        if self._block:
            raise RuntimeError(f"step() inside {self._block}: leave it first")
        self._is_stepping = True
        is_boundary = self.is_boundary
        try:
            yield is_boundary
        finally:
            self.is_under_way = not is_boundary
            self.micro_steps += 1
            if is_boundary:
                self._step_start = self.micro_steps
            self._is_stepping = False

    def _may_receive(self) -> bool:
        return self._shards.adds_at_home or (self.is_boundary and not self._block)

    def _check_holds_gradients(self, what: str) -> None:
        if self._shards.policy.step_in_backward:
            raise RuntimeError(
                f"{what} with step_in_backward: no gradient is held to add to, every backward "
                "steps. Set it to false"
            )


# ---- scaling and division of losses --------------------------------------------------------------


class Losses:
    """Counts how the losses of a step were scaled and divided, so that gradients are the mean over
    its micro-batches.

        engine.backward(loss)           divides the loss by the micro-batches of a step, multiplies it by the loss scale
        engine.scale(loss).backward()   multiplies it by the loss scale; the gradients are divided by the micro-batches
        loss.backward()                 does neither; allowed only without fp16; the gradients are divided, too

    Gradients at home are divided when they are read, measured or stepped (GradientHomes.divisor).
    All micro-batches of one step must use the same way.

    Args:
        scaler: the loss scale.
        homes: the homes of gradients; this class sets their divisor.
        num_micro_batches: micro-batches of a step.
    """

    def __init__(self, scaler: LossScaler, homes: GradientHomes, num_micro_batches: int) -> None:
        self._scaler = scaler
        self._homes = homes
        self._num_divided = 0  # losses of this step through the engine's backward
        # losses of this step that were scaled; the engine's backward scales, too
        self._num_scaled = 0
        self.begin_step(num_micro_batches)

    def begin_step(self, num_micro_batches: int) -> None:
        """Resets the counts: the next loss is the first of a step."""
        self._num_divided = self._num_scaled = 0
        self._homes.num_micro_batches = num_micro_batches

    def divided(self, loss: torch.Tensor, by: int) -> torch.Tensor:
        """Returns the loss divided by a number of micro-batches. Counts it as a loss of
        engine.backward, also with 1."""
        self._num_divided += 1
        self._homes.num_micro_batches = 1
        return loss / by if by > 1 else loss

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss times the loss scale, and counts it."""
        self._num_scaled += 1
        return loss * self._scaler.scale if self._scaler.scale != 1.0 else loss

    def check_one_way(self) -> None:
        """Raises RuntimeError when the losses of a step used both ways, and when fp16 needs the
        scale and no loss has it."""
        divided = self._num_divided
        scaled = self._num_scaled
        if divided and scaled > divided:
            raise RuntimeError(
                f"{divided} losses of this step went through engine.backward, which divides by the "
                f"micro-batches of a step, and {scaled - divided} through engine.scale, which does "
                "not: use one of them for all micro-batches of a step"
            )
        if self._scaler.scale != 1.0 and not scaled:
            raise RuntimeError(
                "fp16 scales the loss, and the gradients of this step come from a backward of an "
                "unscaled one: use engine.backward(loss), or engine.scale(loss).backward()"
            )


# ---- the loss of a micro-batch -------------------------------------------------------------------


LossFunction = Callable[[Any, Any], torch.Tensor]
"""Computes the loss of a model's output and the labels, or the micro-batch, that belong to it."""


def loss_of_micro_batch(
    model: Callable[..., Any], micro: Any, loss_fn: LossFunction | None
) -> torch.Tensor:
    """The loss of one micro-batch: see `Engine.train_batch`. Raises TypeError for an output without
    one."""
    inputs, labels = (
        micro if loss_fn is not None and isinstance(micro, (tuple, list)) else (micro, micro)
    )
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    if loss_fn is not None:
        return loss_fn(output, labels)
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not torch.is_tensor(output):
        loss = output[0] if isinstance(output, (tuple, list)) else getattr(output, "loss", None)
    if not torch.is_tensor(loss) or loss.numel() != 1:
        raise TypeError(
            f"the model's output, a {type(output).__name__}, has no loss of one element: give "
            "train_batch a loss_fn(output, labels)"
        )
    return loss


# ---- times of phases -----------------------------------------------------------------------------

_PHASES = ("forward", "backward", "step")
_Moment = float | torch.Event


class PhaseTimes:
    """Times forward, backward and step between two lines of progress (`wall_clock_breakdown`).

    On a CPU the host's clock is used. On an accelerator the host only submits work, so two events
    on the stream mark each phase, and `line` waits for those events only.

    Args:
        is_on: False: nothing is measured and the line is empty.
        device: the device that computes.
    """

    def __init__(self, is_on: bool, device: torch.device) -> None:
        self._is_on = is_on
        self._device = device
        self._spans: list[tuple[str, _Moment, _Moment]] = []  # phase, start and end

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of its body to a phase: "forward", "backward" or "step"."""
        if not self._is_on:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._now()))

    def line(self, num_steps: int) -> str:
        """Returns ", forward 12.0 ms, backward 30.1 ms, step 4.0 ms", the average of num_steps
        steps, and resets the times.

        Empty when off. Blocks until an accelerator has ended these phases.
        """
        spans = self._spans
        self._spans = []
        totals = {
            name: sum(_seconds(start, end) for phase, start, end in spans if phase == name)
            for name in _PHASES
        }
        return "".join(
            f", {name} {1e3 * total / num_steps:.1f} ms" for name, total in totals.items() if total
        )

    def _now(self) -> _Moment:
        if not is_accelerator(self._device):
            return time.perf_counter()
        event = new_event(self._device, enable_timing=True)
        event.record(current_stream(self._device))
        return event


def _seconds(start: _Moment, end: _Moment) -> float:
    """The time between two moments. Blocks until an accelerator has reached the second."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start


# ---- offload_states and reload_states ------------------------------------------------------------
#
# They free device memory while another program uses the device (another engine, an inference
# server):
#
#     optim_states, hp_params             states on the accelerator; both names mean all of them, because they lie together
#     lp_grads, contiguous_grad_buffer    gradients on the accelerator
#     lp_params                           streamed units leave their buffers, and the buffers the accelerator; so do resident
#                                         units and weights at home there. On a CPU resident units
#                                         lie in their home and stay
#
# What has no other home is copied to host memory until then, outside the plan: with a budget
# (host_bytes) it must fit what the plan leaves of it. What torch's allocator then has cached goes
# back to the driver, where the other program can take it.
#
# The home of a state does not change during a run. What rests in host memory or on NVMe stays
# there. States that must also leave host memory need NVMe as their home (`offload_optimizer`,
# `offload_param`).

logger = logging.getLogger("tiermem")


def states_to_offload(
    include: Iterable[OffloadState | str] | None, device: OffloadDevice | str
) -> Collection[OffloadState]:
    """Returns the states to offload; empty when the device is none. Raises ValueError for unknown
    names and for nvme."""
    device = OffloadDevice(device)
    known = [state.value for state in OffloadState]
    if device is OffloadDevice.nvme:
        raise ValueError(
            "offload_states to nvme: states have one home for a whole run. Set offload_optimizer "
            'or offload_param to {"device": "nvme"}, or offload to cpu'
        )
    if device is OffloadDevice.none:
        logger.warning("offload_states: device is none, so nothing is offloaded; allowed is cpu")
        return ()
    if include is None:
        return tuple(OffloadState)
    if isinstance(include, str):
        raise ValueError(
            f"offload_states: include is {include!r}; give a list of {', '.join(known)}"
        )
    try:
        return tuple(OffloadState(state) for state in include)
    except ValueError as error:
        raise ValueError(
            f"offload_states: include holds {error}; allowed are {', '.join(known)}"
        ) from None


_KINDS: Mapping[OffloadState, tuple[str, ...]] = {
    OffloadState.optim_states: ("state",),
    OffloadState.hp_params: ("state",),
    OffloadState.lp_grads: ("grad",),
    OffloadState.contiguous_grad_buffer: ("grad",),
    OffloadState.lp_params: ("param", "secondary"),
}
"""What the names of entries that rest on the device begin with."""


def offload(shards: Shards, states: Collection[OffloadState]) -> list[LiveUnit] | None:
    """Takes states off the device; returns the resident units that have left, None when nothing
    has. Blocks.

    Full layouts that shards in another place make again leave without a copy. Work of other streams
    in them is not waited for: nothing reads what it writes, and giving memory back to the driver
    waits for the device.

    Raises ValueError, before anything moves, when the budget of host memory has no room for what
    has no other home.
    """
    takes_params = OffloadState.lp_params in states
    if takes_params:
        shards.prefetcher.empty()
    if not is_accelerator(shards.device) or not states:
        return None
    memory = shards.store.on_device
    kinds = {kind for state in states for kind in _KINDS[state]}
    present = [
        live for live in shards.units if takes_params and live.unit.is_resident and live.is_present
    ]
    shards.steps.finish()
    shards.program.drop()  # what backward has stepped reads gradients there
    _check_host(shards, memory.num_bytes(kinds))
    for slots in {
        live.memory.slab for live in shards.units if takes_params and live.memory.slab is not None
    }:
        slots.check_free()
    memory.leave(kinds, [LAYOUTS, "wires", "sums"] if takes_params else ())
    for live in present:
        live.drop()
    give_back_cached(shards.device)
    return present


def reload(shards: Shards, away: Sequence[LiveUnit]) -> None:
    """Brings back what `offload` has taken off the device. Collective; blocks. Raises torch's
    OutOfMemoryError."""
    shards.store.on_device.come_back()
    for live in away:
        if live.shard is live.memory.full:
            live.keep(lambda memory: None)  # it has its bytes
        else:
            shards.values.keep_present(live)


def _check_host(shards: Shards, num_bytes: int) -> None:
    """Raises ValueError when so many bytes do not fit what the plan leaves of host memory."""
    budget = shards.policy.host_bytes
    ranks = ranks_per_node()
    if budget is not None and num_bytes > budget // ranks - shards.plan.host_bytes:
        raise ValueError(
            f"offload_states takes {num_bytes} bytes of host memory, for what rests on "
            f"{shards.device} alone; of host_bytes {budget} // {ranks} ranks the plan leaves "
            f"{budget // ranks - shards.plan.host_bytes}: raise it, or include less"
        )


# ---- facts for launchers, trainers and monitors --------------------------------------------------


class EngineFacts:
    """Answers under DeepSpeed's names; `Engine` inherits them and has the attributes.

    They change nothing. All but the counters come from the config. Hugging Face's Trainer and
    Accelerate, TRL and Lightning call most of them.
    """

    config: TiermemConfig
    shards: Shards
    optimizer: NativeOptimizer | None
    lr_scheduler: LRScheduler | None
    _sizes: BatchSizes
    _scaler: LossScaler
    _was_step_applied: bool
    _away: Sequence[LiveUnit] | None  # what offload_states has taken off the device

    # ---- sizes -----------------------------------------------------------------------------------

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

    # ---- the last step ---------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed parameters. False before the last micro-batch and for a
        skipped step."""
        return self._was_step_applied

    def get_global_grad_norm(self) -> float:
        """Norm of the last step's gradients over all ranks, before clipping, with the loss scale
        divided out."""
        return self.optimizer.grad_norm if self.optimizer is not None else 0.0

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._groups]

    def get_mom(self) -> list[Any]:
        """The momentum of every parameter group: `betas` of Adam and its kin, else `momentum`."""
        return [group.get("betas", group.get("momentum")) for group in self._groups]

    def get_type(self) -> list[Any]:
        """The value "type" of each parameter group; None where a group has none."""
        return [group.get("type") for group in self._groups]

    def loss_scale(self) -> float:
        """The factor that the loss is multiplied by."""
        return self._scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts to overflows."""
        return self.config.scales_loss and self.config.fp16.is_dynamic

    # ---- the config ------------------------------------------------------------------------------

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
        """The config section about the tier of parameters."""
        return self.config.zero_optimization.offload_param

    def zero_offload_optimizer(self) -> OffloadOptimizerConfig | None:
        """The config section about the tier of optimizer states."""
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
        """The optimizer. DeepSpeed calls the optimizer that it wraps so."""
        return self.optimizer

    def zero_overlap_comm(self) -> bool:
        """The config's overlap_comm, true when not set. Reductions overlap backward with either
        value."""
        return self.config.zero_optimization.overlap_comm

    @property
    def device(self) -> torch.device:
        """The device that computes; batches belong there."""
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

    dp_world_size = world_size

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share the model's states."""
        return self.shards.topology.rank

    def _check_here(self) -> None:
        """Raises RuntimeError while states are not on the device."""
        if self._away is not None:
            raise RuntimeError(
                "offload_states took states off the device: call reload_states first"
            )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []
