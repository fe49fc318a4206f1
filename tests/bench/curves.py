"""Curves: one small model trained with its states in several precisions, the losses beside each
other.

    the demo's data, byte by byte --> a Llama of 0.9 M parameters in bf16 --> 300 steps of AdamW,
    warmed up, cosine to nothing
                                  --> under each preset, for each seed    --> table, JSON, picture

Weights, data and their order are the same for every preset and differ between seeds. Curves of one
seed differ by what the states lose, and by chance: a change of one bit moves the final loss by some
tenths of a per cent. Several seeds and their standard error show how much is chance. The final loss
is the mean of the last tenth of the steps. Speed is not measured here.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tiermem
from bench.options import CurvesOptions
from tiermem.precision import PRESETS
from tiermem.tools.corpus import Corpus
from tiermem.tools.measure.machine import caption, machine_facts
from tiermem.tools.plan.planned import hf_config, transformers
from tiermem.tools.presets import llama
from tiermem.tools.record.plots import new_figure, save_figure
from tiermem.tools.record.reports import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn


SHAPE = llama(128, 384, layers=4, heads=4, vocabulary=256)
_SEQ, _BATCH, _LR, _WARMUP_STEPS = 128, 8, 1e-3, 20
_SMOOTHED = 15  # steps of the moving mean in the picture
_COLOURS = {"exact": "#4c78a8", "compact": "#54a24b", "tiny": "#f58518", "bf16": "#e45756"}


def bench_curves(options: CurvesOptions, console: Console) -> int:
    """Trains under every preset, reports, and returns the exit status. Raises ValueError and
    OSError for the options."""
    seeds = range(options.seed, options.seed + options.repeats)
    corpora = {seed: Corpus(options.data, _SEQ, seed) for seed in seeds}
    losses: dict[str, list[list[float]]] = {name: [] for name in options.presets}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(
            "training", total=options.steps * len(options.presets) * len(seeds)
        )
        for seed, name in itertools.product(seeds, options.presets):
            progress.update(task, description=f"training, states {name}, seed {seed}")
            curve = train_curve(
                name, corpora[seed], options.steps, seed, lambda: progress.advance(task)
            )
            losses[name].append(curve)
    figures = {
        "machine": machine_facts(),
        "model": SHAPE,
        "tokens_per_step": _BATCH * _SEQ,
        "lr": _LR,
        "steps": options.steps,
        "seeds": list(seeds),
        "rows": rows_of(losses),
    }
    console.print(_table(figures))
    options.save_json(figures)
    if options.plot_file is not None:
        save_figure(draw_curves(figures), options.plot_file, options.MADE_BY)
    return 0


def train_curve(
    name: str, corpus: Corpus, steps: int, seed: int, on_step: Any = lambda: None
) -> list[float]:
    """The loss of every step of a fresh model whose states are kept as a preset says."""
    engine, _, _, _ = tiermem.initialize(model=_build(seed), config=_config(name, steps, seed))
    device = torch.device("cpu")
    losses = []
    try:
        for step in range(steps):
            loss = engine(**corpus.batch(step, _BATCH, device)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            on_step()
    finally:
        engine.close()
    return losses


def rows_of(losses: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    """A row per preset: its parts, its mean curve, and how its final losses stand to the first
    preset's, seed by seed."""
    finals = {
        name: [statistics.fmean(curve[-max(1, len(curve) // 10) :]) for curve in own]
        for name, own in losses.items()
    }
    first = next(iter(finals.values()))
    apart = {
        name: [mine / other - 1.0 for mine, other in zip(own, first, strict=True)]
        for name, own in finals.items()
    }
    return [
        {
            "preset": name,
            **{
                part: getattr(PRESETS[name], part)
                for part in ("master", "moments", "grads", "rounding")
            },
            "final_loss": statistics.fmean(finals[name]),
            "against_first": statistics.fmean(apart[name]),
            "standard_error": statistics.stdev(apart[name]) / len(own) ** 0.5
            if len(own) > 1
            else None,
            "against_first_by_seed": apart[name],
            "losses": [statistics.fmean(at_step) for at_step in zip(*own, strict=True)],
            "losses_by_seed": own,
        }
        for name, own in losses.items()
    ]


def draw_curves(figures: dict[str, Any]) -> Figure:
    """Losses over steps, and below them how far each is from the first; moving means."""
    figure, (top, bottom) = new_figure(9, 6.4, heights=(2, 1))
    first = _smoothed(figures["rows"][0]["losses"])
    for row in figures["rows"]:
        curve = _smoothed(row["losses"])
        colour = _COLOURS[row["preset"]]
        states = (
            f"{row['preset']} (master {row['master']}, moments {row['moments']}, {row['rounding']})"
        )
        label = f"{states}: {row['final_loss']:.4f} ({_apart(row)})"
        top.plot(range(1, len(curve) + 1), curve, color=colour, label=label, linewidth=1.4)
        apart = [100.0 * (mine / other - 1.0) for mine, other in zip(curve, first, strict=True)]
        bottom.plot(range(1, len(curve) + 1), apart, color=colour, linewidth=1.4)
    top.set_ylabel("loss")
    top.legend(fontsize=9)
    bottom.set_ylabel(f"% above {figures['rows'][0]['preset']}")
    bottom.set_xlabel("step")
    for ax in (top, bottom):
        ax.grid(alpha=0.25)
    sizes = (
        f"{figures['steps']} steps of {figures['tokens_per_step']} tokens, mean of "
        f"{len(figures['seeds'])} seeds"
    )
    top.set_title(
        f"states in several precisions: {sizes}, moving mean of {_SMOOTHED} steps", fontsize=11
    )
    figure.supxlabel(caption(figures["machine"]), fontsize=7, color="#666666")
    return figure


def _build(seed: int) -> nn.Module:
    transformers().logging.set_verbosity_error()
    torch.manual_seed(seed)
    model: nn.Module = transformers().AutoModelForCausalLM.from_config(hf_config(SHAPE))
    return model.train()


def _config(preset: str, steps: int, seed: int) -> dict[str, Any]:
    warmup = {
        "warmup_num_steps": min(_WARMUP_STEPS, steps),
        "total_num_steps": max(steps, _WARMUP_STEPS + 1),
    }
    return {
        "train_micro_batch_size_per_gpu": _BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": _LR, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupCosineLR", "params": {**warmup, "cos_min_ratio": 0.0}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "tiermem": {"precision": {"preset": preset, "seed": seed}},
        "steps_per_print": None,
    }


def _smoothed(curve: Sequence[float]) -> list[float]:
    """The mean of each step and those before it, at most _SMOOTHED."""
    sums = [0.0, *itertools.accumulate(curve)]
    return [
        (sums[i] - sums[max(0, i - _SMOOTHED)]) / min(i, _SMOOTHED) for i in range(1, len(sums))
    ]


def _apart(row: dict[str, Any]) -> str:
    """Such as "+0.12 % ± 0.08"."""
    error = "" if row["standard_error"] is None else f" ± {row['standard_error']:.2%}"
    return f"{row['against_first']:+.2%}{error}"


def _table(figures: dict[str, Any]) -> Table:
    title = (
        f"{figures['steps']} steps of {figures['tokens_per_step']} tokens, means over "
        f"{len(figures['seeds'])} seeds"
    )
    numbers = (">first loss", ">final loss", ">against the first row")
    shown = table(title, "states", "master", "moments", "rounding", *numbers)
    for row in figures["rows"]:
        parts = [row[name] for name in ("preset", "master", "moments", "rounding")]
        shown.add_row(*parts, f"{row['losses'][0]:.4f}", f"{row['final_loss']:.4f}", _apart(row))
    return shown
