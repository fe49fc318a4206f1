"""Paper: `tiermem plan --paper`: the ZeRO-Infinity paper's table of memory, and the estimators'
tables of a model."""

from __future__ import annotations

import math

from rich.console import Console

from tiermem.compat.estimate import (
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_live,
)
from tiermem.forecast.rates import PAPER_BATCH, PAPER_GPUS, PAPER_MODELS, PAPER_SEQ
from tiermem.tools.plan.planned import meta_model
from tiermem.tools.presets import ModelShape
from tiermem.tools.record.reports import table

ESTIMATED = "7b"
"""The preset whose model is estimated when no other is named."""


def print_paper(console: Console) -> None:
    """Prints the table of memory of the ZeRO-Infinity paper, by its own formulas
    (tiermem.forecast.rates)."""
    shown = table(
        f"memory that large models need, as arXiv 2104.07857 counts it ({PAPER_BATCH} sequences of "
        f"{PAPER_SEQ} tokens on a node of {PAPER_GPUS} GPUs; TB and GB are powers of 2)",
        "parameters",
        ">layers",
        ">hidden",
        ">heads",
        ">states TB",
        ">activations TB/node",
        ">checkpoints TB/node",
        ">state work GB/GPU",
        ">activation work GB/GPU",
    )
    for model in PAPER_MODELS:
        of_a_node = (
            model.activation_bytes(PAPER_BATCH, PAPER_SEQ),
            model.checkpoint_bytes(PAPER_BATCH, PAPER_SEQ),
        )
        of_a_gpu = (
            model.state_working_bytes,
            model.activation_working_bytes(PAPER_BATCH // PAPER_GPUS, PAPER_SEQ),
        )
        shown.add_row(
            f"{model.num_params / 1e12:.2f} T",
            str(model.num_layers),
            f"{model.hidden // 1024}K",
            str(model.num_heads),
            *(_half_up(num_bytes / (1 << 40)) for num_bytes in (model.state_bytes, *of_a_node)),
            *(_half_up(num_bytes / (1 << 30)) for num_bytes in of_a_gpu),
        )
    console.print(shown)


def print_estimates(name: str, shape: ModelShape, sizes: tuple[int, int], console: Console) -> None:
    """Prints the estimators' tables for ZeRO-3 and ZeRO-2: the reference's formulas, and this
    library's plan.

    name: of the model, to be shown; sizes: GPUs of a node, and nodes.
    """
    model = meta_model(shape, "bf16")
    console.print(
        f"model states of {name} (--preset or --model names another, --ranks and --nodes the GPUs)"
    )
    estimate_zero3_model_states_mem_needs_all_live(model, *sizes)
    estimate_zero2_model_states_mem_needs_all_live(model, *sizes)


def _half_up(number: float) -> str:
    """Two digits, 5 rounded up, as the paper has them."""
    return f"{math.floor(number * 100 + 0.5) / 100:.2f}"
