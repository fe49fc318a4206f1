"""Prediction: predicts the seconds and bytes of a training from measurements of a few blocks of its
own model."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

import tiermem
from tiermem.config import load_config, resolve_auto
from tiermem.forecast import Forecast, Rates, forecast_shards
from tiermem.forecast.rates import Compute
from tiermem.policy import OffloadPolicy, Precision, Tier
from tiermem.precision import DTYPES
from tiermem.run.shards import Shards
from tiermem.swap.base.native import Workers
from tiermem.swap.base.tile_program import cache_bytes
from tiermem.swap.disk.queue import Event
from tiermem.swap.memory.accelerator import find_device, is_accelerator
from tiermem.swap.store.checksum import crc32c
from tiermem.tools.job.launcher import Job, compute_of
from tiermem.tools.job.train_job import Config, precision_of, with_key
from tiermem.tools.measure.gpu_link import (
    measure_beside_copies,
    measure_link,
    measure_memory,
    step_passes,
)
from tiermem.tools.plan.budget import ActivationBytes, has_chunked_loss
from tiermem.tools.plan.planned import hf_config, meta_model, transformers
from tiermem.tools.presets import ModelShape, ModelSizes, with_layers
from tiermem.tools.record.run_record import PHASES, Figures, Span, covered, within
from tiermem.units.compute import (
    FAR_SLOWER,
    ComputeChoice,
    choose_compute,
    measure_products,
)
from tiermem.units.experts import fused_experts, used_numel
from tiermem.weights.step_run import overlap_of

# ---- the trained model ---------------------------------------------------------------------------
#
#     seed -> zero.Init -> AutoModelForCausalLM of a shape -> activation checkpointing, if the job
#     says so
#


def build_model(job: Job, **placed: Any) -> nn.Module:
    """A job's model with weights from its seed, built under `zero.Init(**placed)`: each module goes
    to its home at once."""
    torch.manual_seed(job.seed)
    with tiermem.zero.Init(**placed):
        model = transformers().AutoModelForCausalLM.from_config(hf_config(job.shape))
    return made_ready(model, job)


def made_ready(model: Any, job: Job) -> nn.Module:
    """The model in training mode, with checkpointing, and a loss in chunks where a forward has many
    tokens."""
    _set_training(model, job)
    if has_chunked_loss(ModelSizes.of(job.shape), job.batch * job.seq):
        chunk_loss(model)
    return cast("nn.Module", model)


def chunk_loss(model: Any) -> None:
    """Makes a Llama compute its loss in chunks: the head passes hidden states on, the loss
    multiplies them by its weight."""
    head = model.get_output_embeddings()

    def loss_of(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]  # tokens before n predict n
        return tiermem.chunked_cross_entropy(logits, head.weight, targets, head.bias)

    head.forward = lambda hidden: hidden
    model.loss_function = loss_of


def _set_training(model: Any, job: Job) -> None:
    """Training mode, with activation checkpointing by the name that the model's version of
    transformers has for it. Where its blocks have no flags of their own all are recomputed."""
    model.train()
    if job.is_checkpointing:
        (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )()
    whole = transformers().PreTrainedModel
    blocks: list[Any] = [
        each
        for each in model.modules()
        if getattr(each, "gradient_checkpointing", False) and not isinstance(each, whole)
    ]
    for block in blocks[max(0, len(blocks) - job.num_kept) :]:
        block.gradient_checkpointing = False


@contextlib.contextmanager
def timed(device: torch.device, seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of a block to those of a name. Waits for the device."""
    started = time.monotonic()
    yield
    # a phase's time is its own; a tool may wait for the device
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
    seconds[name] += time.monotonic() - started


# ---- on a GPU: two small copies of the model in plain PyTorch ------------------------------------
#
#     time of a block      = (copy of 3 blocks - copy of 1 block) / 2        at the real width, sequence and batch
#     time of the rest     = copy of 1 block - a block                       embedding, head and loss
#
# The copies' weights are noise; gradients are dropped as they appear. The CPU's way below uses the
# library's recorder; on a GPU the recorder has the times of submission, not of execution.

_FEW = 1
_MORE = 3
_NUM_TIMED_COPIES = 3


def time_plain_copies(job: Job) -> Compute:
    """Seconds of a micro-batch's maths, per parameter of a block and of the rest. Blocks.

    Raises ValueError for a model whose number of layers cannot be changed.
    """
    few_numel, few_forward_s, few_backward_s = _time_copy(_with_layers(job, _FEW))
    numel, more_forward_s, more_backward_s = _time_copy(_with_layers(job, _MORE))
    forward_s = max(1e-12, (more_forward_s - few_forward_s) / (_MORE - _FEW))
    backward_s = max(1e-12, (more_backward_s - few_backward_s) / (_MORE - _FEW))
    block_numel = max(1, (numel - few_numel) // (_MORE - _FEW))
    return Compute(
        forward_s / block_numel,
        backward_s / block_numel,
        max(0.0, few_forward_s - forward_s),
        max(0.0, few_backward_s - backward_s),
    )


def _time_copy(job: Job) -> tuple[int, float, float]:
    """(elements of matrices in blocks and elsewhere, seconds of a forward, seconds of a backward)
    of a copy."""
    device = find_device()
    model: Any = meta_model(job.shape, job.precision).to_empty(device=device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.02)
    _set_training(model, job)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_drop)
    tokens = _tokens(job).to(device)
    passes = []
    for _ in range(_NUM_WARM_UP + _NUM_TIMED_COPIES):
        seconds = dict.fromkeys(PHASES[:2], 0.0)
        with timed(device, seconds, "forward"):
            loss = _loss_of(model, tokens)
        with timed(device, seconds, "backward"):
            loss.backward()
        passes.append(seconds)
    fused = fused_experts(model)
    numel = sum(used_numel(p, fused) for p in model.parameters() if p.dim() > 1)
    del model, loss
    gc.collect()
    forward_s, backward_s = (
        statistics.median(each[phase] for each in passes[_NUM_WARM_UP:]) for phase in PHASES[:2]
    )
    return numel, forward_s, backward_s


def _with_layers(job: Job, num_layers: int) -> Job:
    return dataclasses.replace(job, shape=with_layers(job.shape, num_layers))


def _tokens(job: Job) -> torch.Tensor:
    size = (job.batch, job.seq)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, int(job.shape["vocab_size"]), size, generator=generator)


def _loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _drop(param: torch.Tensor) -> None:
    param.grad = None


# ---- on a CPU: a few blocks of the model, trained for a moment by the library --------------------
#
# The copy has the real width, sequence, batch, embedding, head and loss, but few blocks. It is
# built and sharded like the run: its blocks are read from the disk into two buffers, and its
# gradients move to their home. So the same causes slow its maths: weights that are not in a cache,
# new gradients, transfers of the disk, hooks. It makes no step and no checksum. Each figure comes
# from the recorder's spans, without waits for the disk (the forecast simulates those itself):
#
#     |-wait-|--block 0--|use|--block 1--|use| ... |rest|            forward
#     |rest|--block n--|reduce|use|--block n-1--|reduce|use| ...     backward
#
#     a block      the time of its spans                       the rest    the rest of a pass: embedding, head, loss
#     a use        the gaps between blocks' spans              gradients   bytes of a reduce span, from autograd's to home's
#     kernels      an AdamW step of some Mi bf16 parameters with fp32 states, in bytes of memory traffic a second
#     sums         checksums of some MiB, in bytes a second
#
# Its memory is that of the run with few blocks. On a machine that does other things the figures are
# of what is left of it.

# more than a processor's cache holds the activations of, as in the run
_LAYERS = 6
_FEWEST_LAYERS = 3
_MANY_BLOCK_NUMEL = 1 << 26  # of blocks as large as this, few do
_USUAL_ROOM_BYTES = 64 << 20  # of weights on their way home while the copy is built
_NUM_WARM_UP = 1
_NUM_TIMED = 4
_LONG_S = 15.0  # of all passes: after that one that was timed is enough
_KERNEL_BYTES = 28  # of memory traffic per parameter: 12 of states both ways, weight and gradient
_KERNEL_ROOM_BYTES = 16  # of memory per parameter that is stepped to measure
_KERNEL_NUMEL = 1 << 24
_LEAST_KERNEL_NUMEL = 1 << 20
_SUMMED_BYTES = 32 << 20
_GPU_USE_S = 150e-6


Phase = tuple[int, int]
"""When a forward or a backward began and ended, in nanoseconds."""


class Maths(NamedTuple):
    """What a rank takes for a model's maths; see `forecast.rates.Rates` for the last two."""

    compute: Compute
    use_s: float
    gradient_bytes_s: float | None

    def shared_by(self, num_ranks: int) -> Maths:
        """The time per rank when `num_ranks` ranks share the measured processor."""
        gradients = None if self.gradient_bytes_s is None else self.gradient_bytes_s / num_ranks
        return Maths(self.compute.shared_by(num_ranks), self.use_s, gradients)


def measure_maths(job: Job) -> Maths:
    """Times a small copy of a job's model; its parameters and gradients rest in the job's folders
    on NVMe if it has any, else in memory. Blocks.

    Raises ValueError for a model whose number of layers cannot be changed, OSError when a folder is
    missing or too full.
    """
    if is_accelerator(find_device()):
        return Maths(time_plain_copies(job), _GPU_USE_S, None)
    policy = _policy(job)
    few = _with_layers(job, _num_layers(ModelSizes.of(job.shape)))
    model = build_model(few, policy=policy, dtype=DTYPES[job.precision])
    tokens = _tokens(job)
    passes: list[tuple[Phase, Phase]] = []
    with tiermem.shard(model, policy) as shards:
        first = time.monotonic()
        while len(passes) < _NUM_WARM_UP + _NUM_TIMED:
            if len(passes) > _NUM_WARM_UP and time.monotonic() - first > _LONG_S:
                break
            start = time.monotonic_ns()
            loss = _loss_of(model, tokens)
            middle = time.monotonic_ns()
            loss.backward()
            passes.append(((start, middle), (middle, time.monotonic_ns())))
            model.zero_grad()
        shards.store.flush()
        events = shards.store.recorder.events
    return maths_of(events, passes[_NUM_WARM_UP:], *_lists_of_blocks(model))


def copy_bytes(job: Job) -> int:
    """Memory that the copy takes beside its activations and gradients in autograd. Raises
    ValueError for a shape without sizes."""
    sizes = ModelSizes.of(job.shape)
    rest = DTYPES[job.precision].itemsize
    wide = DTYPES[job.compute].itemsize
    buffers = 2 * sizes.unit_numel * (rest + wide)  # two units, and gradients of two
    layers = _num_layers(sizes) * sizes.block_numel + 2 * sizes.vocabulary * sizes.hidden
    return buffers + (0 if job.nvme_paths else 2 * layers * rest) + _USUAL_ROOM_BYTES


def copy_s(job: Job, flops: float) -> float:
    """The least seconds to time the copy, at so many operations a second. Raises ValueError for a
    shape without sizes."""
    sizes = ModelSizes.of(job.shape)
    numel = _num_layers(sizes) * sizes.block_numel + sizes.vocabulary * sizes.hidden
    return (_NUM_WARM_UP + 1) * 6 * numel * job.batch * job.seq / flops


def measure_flops(job: Job) -> float:
    """Operations a second of products with matrices of a model's width on the CPU, all threads of
    this process. Blocks for less than a second."""
    sizes = ModelSizes.of(job.shape)
    products = measure_products([(sizes.intermediate, sizes.hidden)], DTYPES[job.compute])
    return products.rest_flops * torch.get_num_threads()


def measure_kernels(room_bytes: int | None = None) -> float:
    """Bytes of memory traffic a second of an optimizer step on the CPU, all threads of this
    process. Blocks.

    Takes at most half of the room; None: there is no limit.
    """
    step, num_bytes = _small_step(_KERNEL_NUMEL, room_bytes, _KERNEL_ROOM_BYTES)
    return num_bytes / _median_s(step)


def measure_host_memory(room_bytes: int | None = None) -> float | None:
    """`Rates.host_memory_bytes_s` of this machine; None: it has no accelerator. Takes at most half
    of the room; blocks.

    What is stepped and what is copied are together nearly twice as large as the processor's cache.
    """
    if not is_accelerator(device := find_device()):
        return None
    numel = max(_KERNEL_NUMEL, cache_bytes() // _KERNEL_ROOM_BYTES)
    step, num_bytes = _small_step(numel, room_bytes, 2 * _KERNEL_ROOM_BYTES)
    return measure_beside_copies(device, step, num_bytes, num_bytes // 4)


def _small_step(
    numel: int, room_bytes: int | None, param_bytes: int
) -> tuple[Callable[[], object], int]:
    """A step of so many parameters, or of those that half of the room holds, and the bytes that it
    moves."""
    if room_bytes is not None:
        numel = max(_LEAST_KERNEL_NUMEL, min(numel, room_bytes // (2 * param_bytes)))
    param = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    optim = tiermem.AdamW([param], lr=1e-3)
    param.grad = torch.full_like(param, 1e-3)
    return optim.step, numel * _KERNEL_BYTES


def measure_sums() -> float:
    """Bytes a second that are summed for checksums, by all threads of this process. Takes 32 MiB;
    blocks."""
    pieces = list(torch.ones(_SUMMED_BYTES, dtype=torch.uint8).split(1 << 20))
    workers = Workers(torch.get_num_threads())
    try:
        return _SUMMED_BYTES / _median_s(lambda: crc32c(pieces, workers))
    finally:
        workers.close()


def _median_s(work: Callable[[], object]) -> float:
    """The median seconds of a few calls, the first left out."""
    return statistics.median(
        timeit.repeat(work, number=1, repeat=_NUM_WARM_UP + _NUM_TIMED)[_NUM_WARM_UP:]
    )


def maths_of(
    events: Iterable[Event],
    passes: Sequence[tuple[Phase, Phase]],
    prefixes: tuple[str, ...],
    num_numel: int,
) -> Maths:
    """Reads the figures off the events of some passes.

    Args:
        passes: when each forward and each backward began and ended, in nanoseconds.
        prefixes: what the names of units inside lists of blocks begin with.
        num_numel: elements of the matrices in those blocks, all together.
    """
    spans = [Span(*event) for event in events]
    forward = [_Parts.of(spans, each[0], prefixes) for each in passes]
    backward = [_Parts.of(spans, each[1], prefixes) for each in passes]
    use_s = statistics.median(part.use_ns for part in (*forward, *backward)) * 1e-9
    rates = [part.reduced_bytes / part.reduce_ns * 1e9 for part in backward if part.reduce_ns]

    def block_s(parts: list[_Parts]) -> float:
        return (
            max(1e-3, statistics.median(part.block_ns for part in parts)) * 1e-9 / max(1, num_numel)
        )

    def rest_s(parts: list[_Parts]) -> float:
        return max(
            0.0,
            statistics.median(part.rest_ns for part in parts) * 1e-9 - use_s * parts[0].num_uses,
        )

    compute = Compute(block_s(forward), block_s(backward), rest_s(forward), rest_s(backward))
    return Maths(compute, use_s, statistics.median(rates) if rates else None)


class _Parts(NamedTuple):
    """What the time of one forward or backward was spent on."""

    block_ns: float  # inside blocks
    # neither there, nor waiting for the disk, nor with gradients; bookkeeping is in it
    rest_ns: float
    use_ns: float  # of bookkeeping, for each use of a unit
    num_uses: int
    reduce_ns: float  # gradients of blocks on their way home
    reduced_bytes: int  # of those, read and written

    @staticmethod
    def of(spans: Sequence[Span], phase: Phase, prefixes: tuple[str, ...]) -> _Parts:
        inside = [span for span in spans if phase[0] <= span.start_ns < phase[1]]
        units = [span for span in inside if span.lane == "unit"]
        blocks = [span for span in units if span.name.partition(" ")[2].startswith(prefixes)]
        waits = [span for span in inside if span.lane == "wait"]
        aside = [span for span in inside if span.lane in ("wait", "reduce", "gather")]
        reduced = [
            span for span in inside if span.lane == "reduce" and span.name.startswith(prefixes)
        ]
        if not blocks:
            raise ValueError(
                "the model runs no list of blocks that could be timed: it is not predicted"
            )
        window = min(span.start_ns for span in blocks), max(span.end_ns for span in blocks)
        gaps_ns = (window[1] - window[0]) - covered(within([*units, *aside], *window))
        return _Parts(
            block_ns=covered([*blocks, *aside]) - covered(aside),
            rest_ns=phase[1] - phase[0] - covered(within([*aside, *blocks], *phase)),
            use_ns=gaps_ns / max(1, len(blocks) - 1),
            num_uses=len(units),
            reduce_ns=covered([*reduced, *waits]) - covered(waits),
            reduced_bytes=2 * sum(span.num_bytes for span in reduced),
        )


def _num_layers(sizes: ModelSizes) -> int:
    return _LAYERS if sizes.block_numel < _MANY_BLOCK_NUMEL else _FEWEST_LAYERS


def _policy(job: Job) -> OffloadPolicy:
    """Everything streams through two buffers; the states that no step will make take as little room
    as can be."""
    home = Tier.NVME if job.nvme_paths else Tier.HOST
    precision: Any = job.precision
    masters = Precision() if precision == "fp32" else Precision(precision, precision)
    return OffloadPolicy(
        params=home,
        optim=Tier.HOST,
        grads=home,
        precision=masters,
        compute_dtype="storage" if job.compute == precision else "fp32",
        num_moments=0,
        paths=job.nvme_paths,
        unit_buffers=2,
        tile_buffers=1,
        tile_numel=1 << 12,
        persistence_numel=0,
        durability="none",
        verify="resume",
    )


def _lists_of_blocks(model: nn.Module) -> tuple[tuple[str, ...], int]:
    """What the names in lists of blocks begin with, and the elements of the matrices there."""
    lists = {
        f"{name}.": module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    params = {param for each in lists.values() for param in each.parameters() if param.dim() > 1}
    fused = fused_experts(model)
    return tuple(lists), sum(used_numel(param, fused) for param in params)


# ---- the dtype of products, and warnings ---------------------------------------------------------


def settle_compute(config: Config, shape: ModelShape) -> tuple[Config, ComputeChoice]:
    """The config with the dtype of products chosen here, where it asks for a measurement; and the
    choice. Blocks for that."""
    loaded = resolve_auto(load_config(config), ModelSizes.of(shape).hidden)
    policy = loaded.policy()
    choice = choose_compute(meta_model(shape, loaded.precision), policy, find_device())
    if policy.compute_dtype == "measured":
        config = with_key(config, ("tiermem", "compute_dtype"), choice.dtype)
    return config, choice


def warn_of_compute(config: Config, shape: ModelShape) -> str | None:
    """One sentence where products as the config asks for them are far slower here than in fp32,
    with the way out."""
    if compute_of(config, precision := precision_of(config)) == "fp32" or is_accelerator(
        find_device()
    ):
        return None
    measured = with_key(config, ("tiermem", "compute_dtype"), "measured")
    _, choice = settle_compute(measured, shape)
    if choice.products is None or choice.products.ratio < FAR_SLOWER:
        return None
    return (
        f"{precision} products are {choice.products.ratio:.0f} times slower here than fp32 "
        "products, and so is this run: stop it with Ctrl-C and give --precision auto, which "
        'multiplies the same weights in fp32 (in a config "tiermem": {"compute_dtype": "measured"})'
    )


def warn_of_disk(predicted: Figures) -> str | None:
    """One sentence where a step of `predict` waits for the disk far longer than all else takes, with
    the way out."""
    others = dict(predicted.get("limits_s", {}))
    disk_s = others.pop("disk", 0.0)
    most_s = max(others.values(), default=0.0) or 1e-9
    if disk_s <= _ABSURD * most_s:
        return None
    return (
        f"the disk is predicted to take {disk_s:.3g} s of each step, {disk_s / most_s:.0f} times as "
        "long as anything else: stop the run with Ctrl-C and give --offload auto, which takes the "
        "fastest homes that the memory holds, or name a faster disk with --nvme"
    )


# ---- predicting ----------------------------------------------------------------------------------
#
#     maths     a small copy of the model, trained for a moment in the trainer's own process before the model is built
#               (prediction.py), where the cap leaves room for it
#     disk      the rates measured at the start, summed over the file systems that the paths lie on (files.py)
#     bytes     the plan and the forecast: nothing is measured
#     memory    resident after the imports (measured) + the store (planned) + activations (planned.py's arithmetic); of an
#               accelerator: what the plan keeps there, units present at once, activations
#
# The trainer sends it as JSON. If a prediction is not possible, `not_made` says why.

_ABSURD = 20.0  # times as long: a disk that is warned of
_NO_DISK = 1e12  # bytes a second: nothing is read or written


class MeasuredRates(NamedTuple):
    """What this machine takes for the model's maths, and its rates."""

    compute: Compute
    rates: Rates


def measure(job: Job, room_bytes: int | None, disk: Figures | None) -> MeasuredRates | str:
    """Times the maths within `room_bytes` of memory (None: no limit); returns why not, where it
    cannot. Blocks.

    `disk` holds the measured rates of the paths' disks in bytes per second; None: nothing rests
    there.
    """
    if job.nvme_paths and disk is None:
        return "the disk was not measured"
    try:
        copy = copy_bytes(job)
        if room_bytes is not None and copy > room_bytes:
            return f"a small copy of the model takes {copy} bytes and the cap leaves {room_bytes}"
        maths = measure_maths(job)
        rates = Rates(
            disk_read_bytes_s=disk["read_bytes_s"] if disk else _NO_DISK,
            disk_write_bytes_s=disk["write_bytes_s"] if disk else _NO_DISK,
            link_bytes_s=measure_link(find_device()) or Rates.link_bytes_s,
            kernel_bytes_s=measure_kernels(room_bytes),
            host_memory_bytes_s=measure_host_memory(room_bytes) or Rates.host_memory_bytes_s,
            device_memory_bytes_s=measure_memory(find_device()) or Rates.device_memory_bytes_s,
            step_passes=step_passes(find_device(), load_config(job.config).policy().precision),
            gradient_bytes_s=maths.gradient_bytes_s,
            sum_bytes_s=measure_sums(),
            use_s=maths.use_s,
        )
    except ValueError as error:
        return str(error)
    except torch.OutOfMemoryError:
        return (
            "what is measured, such as a small copy of the model, does not fit the "
            "accelerator's memory"
        )
    return MeasuredRates(maths.compute, rates)


def predict(
    shards: Shards,
    num_micro: int,
    job: Job,
    measured: MeasuredRates | str,
    disk: Figures | None,
    process_bytes: int,
) -> Figures:
    """The figures of a step of `num_micro` micro-batches and of memory, as JSON takes them; `disk`
    holds rates in bytes per second. Where nothing was measured: bytes alone, and why."""
    compute, rates = _NOMINAL if isinstance(measured, str) else measured
    is_gpu = is_accelerator(shards.device)
    plan = shards.plan
    of_job = ActivationBytes.of(job, is_gpu)
    forecast = forecast_shards(shards, compute, rates, num_micro, of_job.input_bytes)
    activations = sum(row.num_bytes for row in of_job.rows(shards.policy.activations))
    # whether steps write beside what a checkpoint holds; it takes its room with the first step
    # after one
    freezes = job.save_every is not None or shards.policy.durability == "step"
    disk_bytes = plan.disk_bytes - (0 if freezes else plan.durable_disk_bytes)
    on_device = plan.device_bytes + activations
    late: Figures | None = None
    if overlap_of(shards.policy, plan, is_gpu) == "backward":
        later = forecast_shards(
            shards, compute, rates, num_micro, of_job.input_bytes, is_early=False
        )
        late = {**_figures_of(later), "disk_bytes": disk_bytes - plan.attempt_disk_bytes}
    held = {
        "resident_bytes": process_bytes,
        "host_bytes": plan.host_bytes,
        "activation_bytes": activations,
        "disk_bytes": disk_bytes,
        "peak_bytes": None if is_gpu else process_bytes + plan.host_bytes + activations,
        "device_bytes": on_device if is_gpu else None,
    }
    if isinstance(measured, str):
        return {"not_made": measured, **_moved_of(forecast), **held}
    return {
        **_figures_of(forecast),
        "late": late,  # where most steps are not begun under backward: what they are then
        **held,
        "rates": {"compute": compute._asdict(), **dataclasses.asdict(rates), "disk": disk},
    }


_NOMINAL = MeasuredRates(Compute.of_peak(1e9, 1), Rates(1e9, 1e9))
"""Where nothing was measured: bytes do not depend on rates."""


def without_frozen(measured: MeasuredRates | str, model: nn.Module) -> MeasuredRates | str:
    """What was measured of a model that is trained as a whole, for one with frozen weights: their
    gradients are not computed."""
    if isinstance(measured, str):
        return measured
    numel = sum(each.numel() for each in model.parameters())
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad) / numel
    return measured._replace(compute=measured.compute.recomputing(-frozen))


def _figures_of(forecast: Forecast) -> Figures:
    return {
        **{f"{phase}_s": seconds for phase, seconds in forecast.seconds.items()},
        **_moved_of(forecast),
        **limits_of(forecast),
    }


def _moved_of(forecast: Forecast) -> Figures:
    return {
        "nvme_read_bytes": forecast.edge_bytes("NVME -> HOST"),
        "nvme_written_bytes": forecast.edge_bytes("HOST -> NVME"),
    }


def limits_of(forecast: Forecast) -> Figures:
    """The seconds for which each lane and each resource is busy, and the resource that limits, as
    JSON takes them."""
    return {
        "busy_s": {lane: dict(by) for lane, by in forecast.busy_s.items()},
        "limits_s": dict(forecast.limits_s),
        "limited_by": forecast.limited_by,
    }
