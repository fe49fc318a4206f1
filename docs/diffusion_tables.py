"""Diffusion tables: plans training of two models on four cards, and writes the table of
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
from collections.abc import Sequence
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
    """A model, and the tokens of a picture of 1024 px with its text."""

    words: str
    folder: str
    kind: str
    tokens: int


CARDS = (Card(12, 32, 50), Card(16, 64, 80), Card(24, 64, 150), Card(32, 128, 200))
MODELS = (
    Model("Flux, 12B", "FLUX.1-dev", "FluxTransformer2DModel", 4608),
    Model("Qwen-Image, 20B", "Qwen-Image", "QwenImageTransformer2DModel", 4352),
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
        return f"{self.seconds:.0f} s ({self.limited_by}{wear}), {self.memory_gib:.0f} GB RAM{disk}"


def published(kind: str) -> dict[str, object]:
    """The config of a model as it was published: the defaults of its class."""
    given = inspect.signature(getattr(diffusers, kind).__init__).parameters.values()
    defaults = {each.name: each.default for each in given if each.default is not each.empty}
    return {**defaults, "_class_name": kind, "guidance_embeds": kind.startswith("Flux")}


def options_of(card: Card, way: str, offload: str) -> dict[str, str]:
    """The options of `tiermem plan` after the model's."""
    found = {
        "--gpu-memory": f"{card.gpu_gib}GiB",
        "--host-memory": f"{card.memory_gib - SYSTEM_GIB}GiB",
        "--flops": f"{card.teraflops}T",
        "--accumulation": f"{NUM_PICTURES}",
        "--offload": offload,
    }
    return found | ({"--lora": f"{RANK}"} if way == "LoRA" else {})


def planned(card: Card, model: Model, way: str, offload: str) -> Planned:
    """What the command plans."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(published(model.kind)), "utf-8")
        options = PlanOptions(
            model=file,
            gpu_bytes=card.gpu_gib * GIB,
            host_bytes=(card.memory_gib - SYSTEM_GIB) * GIB,
            flops=card.teraflops * 1e12,
            seq=model.tokens,
            accumulation=NUM_PICTURES,
            offload=offload,
            lora=RANK if way == "LoRA" else None,
            is_checkpointing=True,
        )
        return plan_scenario(scenario_of(options)[0])


def cell(card: Card, model: Model, way: str) -> Cell | None:
    """LoRA in memory alone if that fits, else with NVMe; None: it does not fit."""
    for offload in ("cpu", "nvme") if way == "LoRA" else ("nvme",):
        found = planned(card, model, way, offload)
        if not found.problems:
            words = {"--model": model.folder, "--seq": f"{model.tokens}"}
            words |= options_of(card, way, offload)
            return Cell(
                found.forecast.total_s,
                found.forecast.limited_by,
                found.tier_bytes(Tier.HOST) / GIB,
                found.tier_bytes(Tier.NVME) / GIB,
                found.written_bytes_day / 1e12,
                " ".join(["tiermem plan", *itertools.chain(*words.items()), "--checkpointing"]),
            )
    return None


def table(cells: Sequence[Cell | None]) -> list[str]:
    """The lines of the table, and the command of one cell."""
    columns = [f"{model.words}: {way}" for model in MODELS for way in WAYS]
    lines = [f"| your card | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for number, card in enumerate(CARDS):
        row = cells[number * len(columns) : (number + 1) * len(columns)]
        said = [str(each) if each is not None else "does not fit" for each in row]
        lines.append(f"| {card.gpu_gib} GB, {card.memory_gib} GB RAM | {' | '.join(said)} |")
    shown = cells[CARDS.index(Card(24, 64, 150)) * len(columns)]
    assert shown is not None
    return [
        *lines,
        "",
        "The first cell of the row of 24 GB is what this prints:",
        "",
        "<!-- not run: the model is a download of 24 GB -->",
        "```sh\n" + shown.command.replace(" --flops", " \\\n    --flops") + "\n```",
    ]


def main() -> None:
    """Plans, and writes the page's table."""
    keys = list(itertools.product(CARDS, MODELS, WAYS))
    with concurrent.futures.ProcessPoolExecutor() as pool:
        cells = list(pool.map(cell, *zip(*keys, strict=True)))
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    lines = "\n".join(table(cells))
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}", "utf-8")


if __name__ == "__main__":
    main()
