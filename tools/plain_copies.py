"""Plain copies: how long a GPU takes for a model's own maths, from two small copies of it in plain PyTorch.

    time of a block      = (copy of 3 blocks - copy of 1 block) / 2        at the real width, sequence and batch
    time of the rest     = copy of 1 block - a block                       embedding, head and loss

The copies hold noise for weights; gradients are dropped as they appear. For a CPU see calibrate.py, which reads the library's
own clock: on a GPU that would tell when work was handed over, not when it was done.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from typing import TYPE_CHECKING, Any

from tiermem.tools.presets import ModelShape, with_layers

if TYPE_CHECKING:
    import torch

    from tiermem.forecast.rates import Compute

_FEW, _MORE = 1, 3
_NUM_TIMED = 3


def time_plain_copies(shape: ModelShape, precision: str, batch: int, seq: int, is_checkpointing: bool) -> Compute:
    """Seconds of a micro-batch's maths, per parameter of a block and of the rest. Blocks.

    Raises ValueError for a model whose number of layers cannot be changed.
    """
    from tiermem.forecast.rates import Compute

    few = _time_copy(with_layers(shape, _FEW), precision, batch, seq, is_checkpointing)
    more = _time_copy(with_layers(shape, _MORE), precision, batch, seq, is_checkpointing)
    forward_s = max(1e-12, (more[1] - few[1]) / (_MORE - _FEW))
    backward_s = max(1e-12, (more[2] - few[2]) / (_MORE - _FEW))
    block_numel = max(1, (more[0] - few[0]) // (_MORE - _FEW))
    rest = max(0.0, few[1] - forward_s), max(0.0, few[2] - backward_s)
    return Compute(forward_s / block_numel, backward_s / block_numel, *rest)


def _time_copy(
    shape: ModelShape, precision: str, batch: int, seq: int, is_checkpointing: bool
) -> tuple[int, float, float]:
    """(elements of matrices in blocks and elsewhere, seconds of a forward, seconds of a backward) of a copy."""
    import torch

    from tiermem.swap.accelerator import find_device, is_accelerator

    device = find_device()
    wait = torch.accelerator.synchronize if is_accelerator(device) else _nothing
    model = _noise_model(shape, precision, is_checkpointing, device)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_drop)
    tokens = torch.randint(0, int(shape["vocab_size"]), (batch, seq), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device)
    forward, backward = [], []
    for _ in range(_NUM_TIMED + 1):
        start = time.monotonic()
        loss = model(input_ids=tokens, labels=tokens).loss
        wait()
        middle = time.monotonic()
        loss.backward()
        wait()
        forward.append(middle - start)
        backward.append(time.monotonic() - middle)
    numel = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    del model, loss
    gc.collect()
    return numel, statistics.median(forward[1:]), statistics.median(backward[1:])


def _noise_model(shape: ModelShape, precision: str, is_checkpointing: bool, device: torch.device) -> Any:
    """A model of the shape with small random weights, in the precision."""
    import torch

    from tiermem.precision import DTYPES

    transformers = importlib.import_module("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape))
    model = model.to(DTYPES[precision]).to_empty(device=device)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(std=0.02)
    model.train()
    if is_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model


def _nothing() -> None:
    """Maths on a CPU is over when it returns."""


def _drop(param: torch.Tensor) -> None:
    param.grad = None
