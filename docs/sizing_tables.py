"""Sizing tables: plans training of six models on nine machines, and writes docs/sizing.md and the table of the README.

    python docs/sizing_tables.py        takes minutes of every core: `tiermem plan` plays a step of each model

A test plans some of the rows again and compares.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tiermem.forecast import Rates
from tiermem.tools.card import Card
from tiermem.tools.options import TrainOptions
from tiermem.tools.planned import Cluster, Planned, Scenario, plan_scenario
from tiermem.tools.presets import ModelShape, llama
from tiermem.tools.train_job import make_config

PAGE = Path(__file__).with_name("sizing.md")
README = Path(__file__).parent.parent / "README.md"
GIB, TB = 1 << 30, 10**12
SEQ, NUM_SEQUENCES = 2048, 8
BEGIN, END = "<!-- sizing: written by docs/sizing_tables.py -->", "<!-- /sizing -->"


class Machine(NamedTuple):
    """A machine, as its owner would describe it; sizes in GiB, rates as `tiermem plan` takes them."""

    gpu: str
    memory_gib: int
    disks: int
    """NVMe drives of 2 TB that read 7 and write 5 GB/s."""
    flops: float
    """Operations a second that training reaches in 16 bits."""
    link_bytes_s: float = 25e9
    gpu_memory_bytes_s: float = Rates.device_memory_bytes_s

    @property
    def words(self) -> str:
        disks = {0: "no NVMe", 1: "1 NVMe"}.get(self.disks, f"{self.disks} NVMe")
        return f"{self.gpu}, {self.memory_gib} GB RAM, {disks}"

    def cluster(self) -> Cluster:
        """All of the GPU, of which `plan` leaves a part to its driver and torch; 6 GiB of the host are left to the system."""
        size = re.match(r"(\d+) GB", self.gpu)
        host_bytes, disk_bytes = (self.memory_gib - 6) * GIB, self.disks * 2 * TB
        if size is None:
            return Cluster(1, 1, None, host_bytes, disk_bytes)
        card = Card.elsewhere(int(size[1]) * GIB)
        return Cluster(1, 1, card.total_bytes, host_bytes, disk_bytes, card.others)

    def rates(self) -> Rates:
        read, write = max(1, self.disks) * 7e9, max(1, self.disks) * 5e9
        rates = Rates(read, write, self.link_bytes_s, is_disk_duplex=True)
        return dataclasses.replace(rates, device_memory_bytes_s=self.gpu_memory_bytes_s)


MACHINES = (
    Machine("no GPU (1 TFLOPS)", 32, 1, 1e12),
    Machine("12 GB GPU", 32, 1, 50e12),
    Machine("16 GB GPU", 64, 1, 80e12),
    Machine("24 GB GPU", 64, 0, 150e12),
    Machine("24 GB GPU", 64, 1, 150e12),
    Machine("24 GB GPU", 128, 0, 150e12),
    Machine("24 GB GPU", 128, 2, 150e12),
    Machine("80 GB GPU", 256, 0, 400e12, 50e9, 2000e9),
    Machine("80 GB GPU", 512, 2, 400e12, 50e9, 2000e9),
)


def gqa(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int, key_value_heads: int) -> ModelShape:
    """A Llama whose keys and values serve several heads."""
    return {**llama(hidden, intermediate, layers, heads, vocabulary), "num_key_value_heads": key_value_heads}


MODELS: dict[str, ModelShape] = {
    "1B": {**gqa(2048, 8192, 16, 32, 128256, 8), "tie_word_embeddings": True},
    "3B": {**gqa(3072, 8192, 28, 24, 128256, 8), "tie_word_embeddings": True},
    "8B": gqa(4096, 14336, 32, 32, 128256, 8),
    "14B": gqa(5120, 13824, 48, 40, 152064, 8),
    "32B": gqa(5120, 27648, 64, 40, 152064, 8),
    "70B": gqa(8192, 28672, 80, 64, 128256, 8),
}
"""Shapes of today's language models with these numbers of parameters, as a Llama has them."""


def plan(machine: Machine, model: str, states: str, offload: str, batch: int, chooses: bool) -> Planned:
    """One step of NUM_SEQUENCES sequences, `batch` at a time, with recomputed activations."""
    options = TrainOptions(
        preset="151m", offload=offload, precision="bf16", states=states, batch=batch, overlap="forward"
    )
    config = make_config(options, [Path("/mnt/nvme0")]) | {"gradient_accumulation_steps": NUM_SEQUENCES // batch}
    compute = Scenario(MODELS[model], config, machine.cluster(), machine.rates(), machine.flops, SEQ, True)
    return plan_scenario(compute, chooses)


def best(machine: Machine, model: str, states: str) -> Planned | None:
    """The fastest plan that fits: states on the GPU, in memory or on NVMe, as many sequences at a time as fit; None where none
    does."""
    found: list[Planned] = []
    is_gpu = machine.cluster().gpu_bytes is not None
    for offload in ("none", "cpu", "nvme")[not is_gpu : 2 + bool(machine.disks)]:
        for batch in (8, 4, 2, 1):
            if not plan(machine, model, states, offload, batch, chooses=False).problems:
                found.append(plan(machine, model, states, offload, batch, chooses=True))
                break
    return max((each for each in found if not each.problems), key=lambda each: each.tokens_per_s, default=None)


class Cell(NamedTuple):
    """What a table shows of a plan."""

    tokens_per_s: float
    limited_by: str

    def __str__(self) -> str:
        return f"{self.tokens_per_s:,.0f}" if self.tokens_per_s >= 10 else f"{self.tokens_per_s:.1f}"


def cell(machine: Machine, model: str, states: str) -> Cell | None:
    """Tokens a second and what limits an iteration; None for a model that does not fit."""
    planned = best(machine, model, states)
    return None if planned is None else Cell(planned.tokens_per_s, planned.forecast.limited_by)


Figures = dict[tuple[str, Machine], dict[str, Cell | None]]


def row(states: str, machine: Machine) -> dict[str, Cell | None]:
    """The cells of a machine."""
    found: dict[str, Cell | None] = {}
    for model in MODELS:  # where a model does not fit, no larger one does
        found[model] = None if None in found.values() else cell(machine, model, states)
    print(states, machine.words, {model: str(each) for model, each in found.items()}, file=sys.stderr)
    return found


def figures() -> Figures:
    """Every cell of every table. Takes minutes of every core."""
    keys = list(itertools.product(("exact", "compact", "tiny"), MACHINES))
    with concurrent.futures.ProcessPoolExecutor() as pool:
        return dict(zip(keys, pool.map(row, *zip(*keys, strict=True)), strict=True))


# ---- pages -----------------------------------------------------------------------------------------------------------


def largest_table(found: Figures) -> Iterator[str]:
    """A row for each machine: the largest model that fits, exact and with compact states, and its speed."""
    yield "| your machine | largest model | with compact states |"
    yield "|---|---|---|"
    for machine in MACHINES:
        cells = []
        for states in ("exact", "compact"):
            fitting = [(model, each) for model, each in found[states, machine].items() if each is not None]
            cells.append(f"{fitting[-1][0]}, {fitting[-1][1]} tokens/s" if fitting else "none of these")
        yield f"| {machine.words} | {' | '.join(cells)} |"


def matrix(found: Figures, states: str) -> Iterator[str]:
    """Tokens a second of every model on every machine."""
    yield f"| {states}: tokens/s | {' | '.join(MODELS)} |"
    yield "|---" * (len(MODELS) + 1) + "|"
    for machine in MACHINES:
        row = found[states, machine]
        cells = ["does not fit" if each is None else f"{each} ({each.limited_by})" for each in row.values()]
        yield f"| {machine.words} | {' | '.join(cells)} |"


HEAD = """<!-- Written by `python docs/sizing_tables.py`. Do not edit it. -->

# Will it fit, how fast

`tiermem plan` answers before you own the machine: it computes the library's own plan of every byte, and plays a step on a
simulated clock. Nothing of it is measured, and no GPU has run a model of these sizes yet, so read the speeds as what the
arithmetic of the plan gives when nothing else is slow.

    tiermem plan --preset 7b --gpu-memory 24GiB --host-memory 58GiB

## The largest model

"""
MIDDLE = f"""
- A step is {NUM_SEQUENCES} sequences of {SEQ} tokens ({NUM_SEQUENCES * SEQ:,} tokens), full fine-tuning in bf16 with AdamW and
  clipping, activations recomputed, as many sequences at a time as fit.
- 512 MiB and 5 % of a GPU and 6 GiB of the host's memory are left to others. A drive has 2 TB, and reads 7 and writes 5 GB/s
  at once. Training reaches 50, 80, 150 and 400 TFLOPS on the GPUs of 12, 16, 24 and 80 GB. Their memory moves 800 GB/s, 2,000
  of the 80 GB GPU; the link 25 GB/s each way, 50 of the 80 GB GPU. The CPU's kernels move 50 GB/s of memory.
- States on NVMe take twice their bytes, because the last checkpoint stays whole while steps write the next
  (`"durability": "none"` takes them once).
- States are `exact` (fp32 master and moments), `compact` (the same master, moments in bf16) or `tiny` (moments in blocks of
  8 bits): [precision](precision.md). A model has a Llama's shape and the number of parameters that its name says.
- `plan` takes your own model (`--model config.json`), batch, rates (`--rates`, from `tiermem tune`) and ranks:
  [commands](commands.md#plan). How well predictions were met on one machine: [measured](measured.md#predictions).

## Every model on every machine

The word in brackets is what an iteration uses longest: compute, the link to the GPU, the disk, or the CPU's kernels, which
step the states. A step goes on under the next forward, and a larger one hides more of the link and of the disk. The figures are
of steps that are clipped. One that is not may begin under backward, where there is room for it (`--overlap`,
[commands](commands.md#train)).
"""


def page(found: Figures) -> str:
    """docs/sizing.md."""
    parts = [HEAD + "\n".join(largest_table(found)), MIDDLE]
    parts += ["\n".join(matrix(found, states)) + "\n" for states in ("exact", "compact", "tiny")]
    return "\n".join(parts)


def with_table(readme: str, lines: Sequence[str]) -> str:
    """The README with its table replaced."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}"


def main() -> None:
    found = figures()
    PAGE.write_text(page(found), "utf-8")
    README.write_text(with_table(README.read_text("utf-8"), list(largest_table(found))), "utf-8")


if __name__ == "__main__":
    main()
