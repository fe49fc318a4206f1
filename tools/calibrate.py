"""Calibrate: how long this machine takes for a model's own maths, from a few of its blocks trained for a moment by the library.

The copy has the real width, sequence and batch, embedding, head and loss, but few blocks. It is built and sharded as the run
will be, its blocks coming from the disk into two buffers and its gradients leaving for their home, so that what slows the
maths there slows it here: cold weights, fresh gradients, the disk's transfers, the hooks. No step is taken, no checksum. Each
figure is read off the recorder's spans, waits for the disk left out (the forecast plays those itself):

    |-wait-|--block 0--|use|--block 1--|use| ... |rest|            forward
    |rest|--block n--|reduce|use|--block n-1--|reduce|use| ...     backward

    a block      what its spans cover                        the rest    what is left of a pass: embedding, head, loss
    a use        the gaps between blocks' spans              gradients   bytes of a reduce span, from autograd's to home's
    kernels      an AdamW step of some Mi bf16 parameters with fp32 states, in bytes of memory traffic a second
    sums         checksums of some MiB, in bytes a second

Its memory is that of the run with few blocks. On a machine that does other things the figures are of what is left of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiermem.tools.budget import ELEMENT_BYTES, ModelSizes
from tiermem.tools.plain_copies import time_plain_copies
from tiermem.tools.presets import ModelShape, with_layers

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tiermem.forecast.rates import Compute
    from tiermem.policy import OffloadPolicy
    from tiermem.swap.record import Event

_LAYERS, _FEWEST_LAYERS = 6, 3  # more than a processor's cache holds the activations of, as in the run
_MANY_BLOCK_NUMEL = 1 << 26  # of blocks as large as this, few do
_USUAL_ROOM_BYTES = 64 << 20  # of weights on their way home while the copy is built
_NUM_WARM_UP, _NUM_TIMED = 1, 4
_KERNEL_BYTES = 28  # of memory traffic per parameter: 12 of states both ways, weight and gradient
MOST_KERNEL_NUMEL = 1 << 24
_SUMMED_BYTES = 32 << 20
_GPU_USE_S = 150e-6

Span = tuple[float, float]


class Maths(NamedTuple):
    """What a rank takes for a model's maths; see `forecast.rates.Rates` for the last two."""

    compute: Compute
    use_s: float
    gradient_bytes_s: float | None

    def shared_by(self, num_ranks: int) -> Maths:
        """What it takes each of so many ranks that share the processor on which it was measured."""
        gradients = None if self.gradient_bytes_s is None else self.gradient_bytes_s / num_ranks
        return Maths(self.compute.shared_by(num_ranks), self.use_s, gradients)


def measure_maths(
    shape: ModelShape,
    precision: str,
    batch: int,
    seq: int,
    is_checkpointing: bool = False,
    folders: Sequence[Path] = (),
) -> Maths:
    """Times a small copy of a model; with `folders` its parameters and gradients rest there, else in memory. Blocks.

    Raises ValueError for a model whose number of layers cannot be changed, OSError when a folder is missing or too full.
    """
    import torch

    from tiermem.swap.accelerator import find_device, is_accelerator

    if is_accelerator(find_device()):
        compute = time_plain_copies(shape, precision, batch, seq, is_checkpointing)
        return Maths(compute, _GPU_USE_S, None)
    import tiermem

    policy = _policy(precision, folders)
    model = _noise_model(with_layers(shape, _num_layers(shape)), precision, policy, is_checkpointing)
    tokens = torch.randint(0, int(shape["vocab_size"]), (batch, seq), generator=torch.Generator().manual_seed(0))
    passes: list[tuple[Span, Span]] = []
    with tiermem.shard(model, policy) as shards:
        for _ in range(_NUM_WARM_UP + _NUM_TIMED):
            start = time.monotonic_ns()
            loss = model(input_ids=tokens, labels=tokens).loss
            middle = time.monotonic_ns()
            loss.backward()
            passes.append(((start, middle), (middle, time.monotonic_ns())))
            model.zero_grad()
        shards.store.settle()
        events = list(shards.store.recorder.events)
    return maths_of(events, passes[_NUM_WARM_UP:], _in_lists(model), _block_numel(model))


def copy_bytes(shape: ModelShape, precision: str, is_on_disk: bool) -> int:
    """Memory that the copy takes beside its activations and gradients in autograd. Raises ValueError for a shape without
    sizes."""
    sizes = ModelSizes.of(shape)
    buffers = 4 * sizes.unit_numel  # two units, and gradients of two
    layers = _num_layers(shape) * sizes.block_numel + 2 * sizes.vocabulary * sizes.hidden
    numel = buffers if is_on_disk else 2 * layers + buffers
    return numel * ELEMENT_BYTES[precision] + _USUAL_ROOM_BYTES


def measure_kernels(num_params: int = MOST_KERNEL_NUMEL) -> float:
    """Bytes of memory traffic a second of an optimizer step on the CPU, all threads of this process. Blocks.

    Takes 16 bytes of memory for each parameter.
    """
    import torch

    import tiermem

    param = torch.nn.Parameter(torch.zeros(num_params, dtype=torch.bfloat16))
    optim = tiermem.AdamW([param], lr=1e-3)
    param.grad = torch.full_like(param, 1e-3)
    times = []
    for _ in range(_NUM_WARM_UP + _NUM_TIMED):
        start = time.monotonic()
        optim.step()
        times.append(time.monotonic() - start)
    return num_params * _KERNEL_BYTES / statistics.median(times[_NUM_WARM_UP:])


def measure_sums() -> float:
    """Bytes a second that are summed for checksums, by all threads of this process. Takes 32 MiB; blocks."""
    import torch

    from tiermem.swap.checksum import crc32c
    from tiermem.swap.native import Workers

    memory = torch.ones(_SUMMED_BYTES, dtype=torch.uint8)
    pieces = list(memory.split(1 << 20))
    workers = Workers(torch.get_num_threads())
    times = []
    try:
        for _ in range(_NUM_WARM_UP + _NUM_TIMED):
            start = time.monotonic()
            crc32c(pieces, workers)
            times.append(time.monotonic() - start)
    finally:
        workers.close()
    return _SUMMED_BYTES / statistics.median(times[_NUM_WARM_UP:])


def maths_of(
    events: Iterable[Event], passes: Sequence[tuple[Span, Span]], prefixes: tuple[str, ...], num_numel: int
) -> Maths:
    """Reads the figures off the events of some passes.

    Args:
        passes: when each forward and each backward began and ended, in nanoseconds.
        prefixes: what the names of units inside lists of blocks begin with.
        num_numel: elements of the matrices in those blocks, all together.
    """
    from tiermem.forecast.rates import Compute

    spans = list(events)
    forward = [_Parts.of(spans, each[0], prefixes) for each in passes]
    backward = [_Parts.of(spans, each[1], prefixes) for each in passes]
    use_s = statistics.median(part.use_ns for part in (*forward, *backward)) * 1e-9
    rates = [part.reduced_bytes / part.reduce_ns * 1e9 for part in backward if part.reduce_ns]

    def block_s(parts: list[_Parts]) -> float:
        return max(1e-3, statistics.median(part.block_ns for part in parts)) * 1e-9 / max(1, num_numel)

    def rest_s(parts: list[_Parts]) -> float:
        return max(0.0, statistics.median(part.rest_ns for part in parts) * 1e-9 - use_s * parts[0].num_uses)

    compute = Compute(block_s(forward), block_s(backward), rest_s(forward), rest_s(backward))
    return Maths(compute, use_s, statistics.median(rates) if rates else None)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What the time of one forward or backward was spent on."""

    block_ns: float  # inside blocks
    rest_ns: float  # neither there, nor waiting for the disk, nor with gradients; bookkeeping is in it
    use_ns: float  # of bookkeeping, for each use of a unit
    num_uses: int
    reduce_ns: float  # gradients of blocks on their way home
    reduced_bytes: int  # of those, read and written

    @staticmethod
    def of(events: Sequence[Event], phase: Span, prefixes: tuple[str, ...]) -> _Parts:
        inside = [event for event in events if phase[0] <= event.start_ns < phase[1]]
        units = [event for event in inside if event.lane == "unit"]
        blocks = [event for event in units if event.name.partition(" ")[2].startswith(prefixes)]
        aside = [_span(event) for event in inside if event.lane in ("wait", "reduce", "gather")]
        waits = [_span(event) for event in inside if event.lane == "wait"]
        reduced = [event for event in inside if event.lane == "reduce" and event.name.startswith(prefixes)]
        if not blocks:
            raise ValueError("the model runs no list of blocks that could be timed: it is not predicted")
        block_spans = [_span(event) for event in blocks]
        block_ns = _covered([*block_spans, *aside]) - _covered(aside)
        window = min(s for s, _ in block_spans), max(e for _, e in block_spans)
        in_window = [_span(event) for event in units] + aside
        gaps_ns = (window[1] - window[0]) - _covered(_clipped(in_window, window))
        return _Parts(
            block_ns=block_ns,
            rest_ns=phase[1] - phase[0] - _covered(_clipped([*aside, *block_spans], phase)),
            use_ns=gaps_ns / max(1, len(blocks) - 1),
            num_uses=len(units),
            reduce_ns=_covered([*map(_span, reduced), *waits]) - _covered(waits),
            reduced_bytes=2 * sum(event.num_bytes for event in reduced),
        )


def _num_layers(shape: ModelShape) -> int:
    sizes = ModelSizes.of(shape)
    return _LAYERS if sizes.block_numel < _MANY_BLOCK_NUMEL else _FEWEST_LAYERS


def _policy(precision: str, folders: Sequence[Path]) -> OffloadPolicy:
    """Everything streams through two buffers; the states that no step will make take as little room as can be."""
    from tiermem.policy import OffloadPolicy, Precision, Tier

    home = Tier.NVME if folders else Tier.HOST
    masters = Precision() if precision == "fp32" else Precision(precision, precision)  # type: ignore[arg-type]
    return OffloadPolicy(
        params=home,
        optim=Tier.HOST,
        grads=home,
        precision=masters,
        num_moments=0,
        paths=[str(folder) for folder in folders],
        unit_buffers=2,
        tile_buffers=1,
        tile_numel=1 << 12,
        persistence_numel=0,
        durability="none",
        verify="resume",
    )


def _noise_model(shape: ModelShape, precision: str, policy: OffloadPolicy, is_checkpointing: bool) -> Any:
    """A model of the shape with random weights, each module at home as it stands."""
    import torch

    import tiermem
    from tiermem.precision import DTYPES
    from tiermem.tools.trained_model import enable_checkpointing, hf_config

    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    with tiermem.zero.Init(policy=policy, dtype=DTYPES[precision]):
        model = transformers.AutoModelForCausalLM.from_config(hf_config(shape))
    model.train()
    if is_checkpointing:
        enable_checkpointing(model)
    return model


def _in_lists(model: nn.Module) -> tuple[str, ...]:
    from torch import nn

    return tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


def _block_numel(model: nn.Module) -> int:
    """Elements of the matrices in lists of blocks."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    params: set[torch.Tensor] = {param for each in lists for param in each.parameters() if param.dim() > 1}
    return sum(param.numel() for param in params)


def _span(event: Event) -> Span:
    return event.start_ns, event.end_ns


def _clipped(spans: Iterable[Span], bounds: Span) -> list[Span]:
    return [(max(s, bounds[0]), min(e, bounds[1])) for s, e in spans if s < bounds[1] and e > bounds[0]]


def _covered(spans: Iterable[Span]) -> float:
    """How much of time some spans cover together."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
