"""Diffusion tables: plans training of three models on four cards, and writes the tables of
docs/diffusion.md.

    python docs/diffusion_tables.py        takes minutes: `tiermem plan` plays steps of each plan

A test plans one row again and compares.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import diffusers

from tiermem.policy import Tier
from tiermem.tools.options import PlanOptions
from tiermem.tools.plan.plan import scenario_of
from tiermem.tools.plan.planned import Planned, plan_scenario

PAGE = Path(__file__).parent / "diffusion.md"
BEGIN = "<!-- plan: written by docs/diffusion_tables.py -->"
END = "<!-- /plan -->"
GIB = 1 << 30
SYSTEM_GIB = 6
"""Of a machine's memory, for others."""
NUM_PICTURES = 8
"""Of a step, one at a time."""
RANK = 16


class Card(NamedTuple):
    """A machine."""

    gpu_gib: int
    memory_gib: int
    teraflops: int
    """Operations a second that training reaches in 16 bits, in 1e12."""


class Model(NamedTuple):
    """A model, and what its transformer or UNet is given for a picture of 1024 px."""

    words: str
    folder: str
    kind: str
    seq: int
    """Tokens of the picture with its text; of a UNet the places of the latents."""
    config: Mapping[str, object] | None = None
    """As it was published, beside the defaults of its class."""


CARDS = (Card(12, 32, 50), Card(16, 64, 80), Card(24, 64, 150), Card(32, 128, 200))
_SDXL = {
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
MODELS = (
    Model("Flux, 12B", "FLUX.1-dev", "FluxTransformer2DModel", 4608, {"guidance_embeds": True}),
    Model("Qwen-Image, 20B", "Qwen-Image", "QwenImageTransformer2DModel", 4352),
    Model("SDXL, 2.6B", "stable-diffusion-xl", "UNet2DConditionModel", 128 * 128, _SDXL),
)
WAYS = ("full", "LoRA")


class Cell(NamedTuple):
    """What `tiermem plan` says."""

    seconds: float
    limited_by: str
    memory_gib: float
    disk_gib: float
    written_tb_day: float
    command: str

    def __str__(self) -> str:
        disk = f", {self.disk_gib:.0f} GB NVMe" if self.disk_gib >= 1 else ""
        wear = f", {self.written_tb_day:.0f} TB a day" if self.written_tb_day >= 1 else ""
        seconds = f"{self.seconds:.0f}" if self.seconds >= 10 else f"{self.seconds:.1f}"
        return f"{seconds} s ({self.limited_by}{wear}), {self.memory_gib:.0f} GB RAM{disk}"


def published(model: Model) -> dict[str, object]:
    """The config of a model as it was published."""
    given = inspect.signature(getattr(diffusers, model.kind).__init__).parameters.values()
    defaults = {each.name: each.default for each in given if each.default is not each.empty}
    return {**defaults, "_class_name": model.kind, **(model.config or {})}


def options_of(card: Card, way: str) -> dict[str, str]:
    """The options of `tiermem plan` after the model's."""
    found = {
        "--gpu-memory": f"{card.gpu_gib}GiB",
        "--host-memory": f"{card.memory_gib - SYSTEM_GIB}GiB",
        "--flops": f"{card.teraflops}T",
        "--accumulation": f"{NUM_PICTURES}",
    }
    return found | ({"--lora": f"{RANK}"} if way == "LoRA" else {})


def planned(card: Card, model: Model, way: str) -> Planned:
    """What the command plans."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(published(model)), "utf-8")
        options = PlanOptions(
            model=file,
            gpu_bytes=card.gpu_gib * GIB,
            host_bytes=(card.memory_gib - SYSTEM_GIB) * GIB,
            flops=card.teraflops * 1e12,
            seq=model.seq,
            accumulation=NUM_PICTURES,
            lora=RANK if way == "LoRA" else None,
        )
        return plan_scenario(scenario_of(options)[0])


def cell(card: Card, model: Model, way: str) -> Cell | None:
    """On the fastest homes; None: it does not fit."""
    found = planned(card, model, way)
    if found.problems:
        return None
    words = {"--model": model.folder, "--seq": f"{model.seq}", **options_of(card, way)}
    return Cell(
        found.forecast.total_s,
        found.forecast.limited_by,
        found.tier_bytes(Tier.HOST) / GIB,
        found.tier_bytes(Tier.NVME) / GIB,
        found.written_bytes_day / 1e12,
        " ".join(["tiermem plan", *itertools.chain(*words.items())]),
    )


def tables(cells: Mapping[tuple[str, Card, str], Cell | None]) -> list[str]:
    """The lines of a table for each model, and the command of one cell."""
    lines = []
    for model in MODELS:
        lines += [f"| {model.words} | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
        for card in CARDS:
            said = [str(cells[model.words, card, way] or "does not fit") for way in WAYS]
            lines.append(f"| {card.gpu_gib} GB, {card.memory_gib} GB RAM | {' | '.join(said)} |")
        lines.append("")
    shown = cells[MODELS[0].words, Card(24, 64, 150), WAYS[0]]
    assert shown is not None
    return [
        *lines,
        "The first cell of Flux on 24 GB is what this prints:",
        "",
        "<!-- not run: the model is a download of 24 GB -->",
        "```sh\n" + shown.command.replace(" --flops", " \\\n    --flops") + "\n```",
    ]


def main() -> None:
    """Plans, and writes the page's table."""
    keys = list(itertools.product(CARDS, MODELS, WAYS))
    with concurrent.futures.ProcessPoolExecutor() as pool:
        found = list(pool.map(cell, *zip(*keys, strict=True)))
    names = [(model.words, card, way) for card, model, way in keys]
    lines = "\n".join(tables(dict(zip(names, found, strict=True))))
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}", "utf-8")


if __name__ == "__main__":
    main()
