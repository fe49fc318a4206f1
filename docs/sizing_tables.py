"""Sizing tables: plans training of six models on nine machines, and writes docs/sizing.md, the
table of the README, and the lines "Predicted: ..." below the commands of other pages.

    python docs/sizing_tables.py              takes minutes of every core: a search for each cell
    python docs/sizing_tables.py predicted    the lines "Predicted: ..." alone

A test plans some of the rows again and compares.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tiermem.tools.measure.machine import USUAL_TBW_BYTES
from tiermem.tools.options import PlanOptions
from tiermem.tools.plan.plan import scenario_of
from tiermem.tools.plan.planned import Planned, plan_scenario
from tiermem.tools.plan.speed import ASSUMED_DISK
from tiermem.tools.words import options_of

PAGE = Path(__file__).with_name("sizing.md")
README = Path(__file__).parent.parent / "README.md"
TB = 10**12
SEQ, NUM_SEQUENCES = 2048, 8
BEGIN, END = "<!-- sizing: written by docs/sizing_tables.py -->", "<!-- /sizing -->"
Words = dict[str, str]
"""Options of `tiermem plan` and their values; a flag has none."""


class Machine(NamedTuple):
    """A machine, as its owner would describe it; sizes in GiB, rates as `tiermem plan` takes
    them."""

    gpu: str
    memory_gib: int
    disks: int
    """NVMe drives of 2 TB."""
    flops: str
    """Operations a second that training reaches in 16 bits."""
    link: str | None = None
    """Bytes a second, each way; None: what `plan` assumes."""
    gpu_bandwidth: str | None = None

    @property
    def words(self) -> str:
        disks = {0: "no NVMe", 1: "1 NVMe"}.get(self.disks, f"{self.disks} NVMe")
        return f"{self.gpu}, {self.memory_gib} GB RAM, {disks}"

    def options(self) -> Words:
        """The machine in the words of `tiermem plan`: all of the GPU, of which `plan` leaves a part
        to its driver and torch.

        6 GiB of the host are left to the system."""
        size, (read, write) = re.match(r"(\d+) GB", self.gpu), ASSUMED_DISK
        found = {"--flops": self.flops, "--host-memory": f"{self.memory_gib - 6}GiB"}
        found |= {"--gpu-memory": f"{size[1]}GiB"} if size is not None else {}
        found |= {"--nvme-size": f"{2 * self.disks}TB" if self.disks else "0"}
        if self.disks > 1 or size is None:  # else it is what `plan` assumes
            rates = f"{self.disks * read / 1e9:g},{self.disks * write / 1e9:g}"
            found |= {"--nvme-rate": rates, "--duplex": ""}
        more = {"--link": self.link, "--gpu-bandwidth": self.gpu_bandwidth}
        return found | {name: value for name, value in more.items() if value is not None}


MACHINES = (
    Machine("no GPU (1 TFLOPS)", 32, 1, "1T"),
    Machine("12 GB GPU", 32, 1, "50T"),
    Machine("16 GB GPU", 64, 1, "80T"),
    Machine("24 GB GPU", 64, 0, "150T"),
    Machine("24 GB GPU", 64, 1, "150T"),
    Machine("24 GB GPU", 128, 0, "150T"),
    Machine("24 GB GPU", 128, 2, "150T"),
    Machine("80 GB GPU", 256, 0, "400T", "50GB", "2000GB"),
    Machine("80 GB GPU", 512, 2, "400T", "50GB", "2000GB"),
)


MODELS = ("1b", "3b", "8b", "14b", "32b", "70b")
"""Presets: today's language models with these numbers of parameters, as a Llama has them."""
STATES = ("exact", "compact", "tiny")
SHOWN = MACHINES[4], "8b", "compact"
"""The cell whose command the page shows."""


PREDICTED = re.compile(
    r"^(tiermem plan (?:[^\n]*\\\n)*[^\n]*)\n```\n\nPredicted: ([^\n]*)$", re.MULTILINE
)
"""A command of a page, and the line below its block."""


def words_of(machine: Machine, model: str, states: str, batch: int) -> Words:
    """One step of NUM_SEQUENCES sequences, `batch` at a time: the options of `tiermem plan`."""
    found = {"--preset": model, "--states": states, "--precision": "bf16", **machine.options()}
    sizes = {"--seq": SEQ, "--batch": batch, "--accumulation": NUM_SEQUENCES // batch}
    return found | {name: str(size) for name, size in sizes.items()} | {"--overlap": "forward"}


def command_of(words: Words) -> str:
    """The command, without what it takes by itself."""
    usual = {
        "--seq": "2048",
        "--accumulation": "1",
        "--flops": "150T",
        "--states": "exact",
    }
    needed = [
        f"{name} {value}".rstrip() for name, value in words.items() if usual.get(name) != value
    ]
    return " ".join(["tiermem plan", *needed])


def plan(words: Words) -> Planned:
    """What the command plans."""
    given: dict[str, Any] = {}
    for field, said in options_of(PlanOptions).items():
        text = words.get(said.name.partition("/")[0])
        if text is not None:
            given[field] = (
                said.parse(text) if said.parse else int(text) if text.isdigit() else text or True
            )
    options = PlanOptions(**given)
    return plan_scenario(scenario_of(options)[0])


def best(machine: Machine, model: str, states: str) -> tuple[Words, Planned] | None:
    """The fastest plan that fits, two sequences at a time or one where two do not fit; None where
    none does."""
    for batch in (2, 1):
        words = words_of(machine, model, states, batch)
        planned = plan(words)
        if not planned.problems:
            return words, planned
    return None


class Cell(NamedTuple):
    """What a table shows of a plan."""

    tokens_per_s: float
    limited_by: str
    written_bytes_day: float
    command: str

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_s:,.0f}" if self.tokens_per_s >= 10 else f"{self.tokens_per_s:.1f}"
        )

    @property
    def full(self) -> str:
        """With what limits it, and the TB written a day."""
        written = f", {_tb(self.written_bytes_day)} TB a day" if self.written_bytes_day else ""
        return f"{self} ({self.limited_by}{written})"

    def wear(self, disks: int) -> str:
        """TB written a day, and how many days drives of 600 TBW last."""
        if not self.written_bytes_day:
            return "none"
        days = disks * USUAL_TBW_BYTES / self.written_bytes_day
        return (
            f"{_tb(self.written_bytes_day)} TB, {days:,.0f} days"
            if days >= 10
            else f"{_tb(self.written_bytes_day)} TB, {days:.1f} days"
        )


def _tb(num_bytes: float) -> str:
    size = num_bytes / TB
    return f"{size:,.0f}" if size >= 10 else f"{size:.1f}"


def cell(machine: Machine, model: str, states: str) -> Cell | None:
    """Tokens a second, what limits an iteration and what is written; None for a model that does not
    fit."""
    found = best(machine, model, states)
    if found is None:
        return None
    words, planned = found
    forecast = planned.forecast
    return Cell(
        planned.tokens_per_s, forecast.limited_by, planned.written_bytes_day, command_of(words)
    )


Figures = dict[tuple[str, Machine], dict[str, Cell | None]]


def row(states: str, machine: Machine) -> dict[str, Cell | None]:
    """The cells of a machine."""
    found: dict[str, Cell | None] = {}
    for model in MODELS:  # where a model does not fit, no larger one does
        found[model] = None if None in found.values() else cell(machine, model, states)
    print(
        states, machine.words, {model: str(each) for model, each in found.items()}, file=sys.stderr
    )
    return found


def figures() -> Figures:
    """Every cell of every table. Takes minutes of every core."""
    keys = list(itertools.product(STATES, MACHINES))
    with concurrent.futures.ProcessPoolExecutor() as pool:
        return dict(zip(keys, pool.map(row, *zip(*keys, strict=True)), strict=True))


# ---- pages ---------------------------------------------------------------------------------------


def largest_table(found: Figures) -> Iterator[str]:
    """A row for each machine: the largest model that fits, exact and with compact states, its
    speed, and the drives' wear."""
    yield (
        "| your machine | largest model | written a day, drives of 600 TBW last | with compact "
        "states | written a day |"
    )
    yield "|---" * 5 + "|"
    for machine in MACHINES:
        cells = []
        for states in ("exact", "compact"):
            fitting = [
                (model, each) for model, each in found[states, machine].items() if each is not None
            ]
            model, each = fitting[-1]
            cells += [f"{model.upper()}, {each} tokens/s", each.wear(machine.disks)]
        yield f"| {machine.words} | {' | '.join(cells)} |"


def matrix(found: Figures, states: str) -> Iterator[str]:
    """Tokens a second of every model on every machine."""
    yield f"| {states}: tokens/s | {' | '.join(model.upper() for model in MODELS)} |"
    yield "|---" * (len(MODELS) + 1) + "|"
    for machine in MACHINES:
        row = found[states, machine]
        cells = ["does not fit" if each is None else each.full for each in row.values()]
        yield f"| {machine.words} | {' | '.join(cells)} |"


def shown_command(found: Figures) -> str:
    """The command of one cell, and what it prints."""
    machine, model, states = SHOWN
    each = found[states, machine][model]
    assert each is not None
    return (
        f"```sh\n{each.command}\n```\n\nprints {each} tokens/s: the cell of {model.upper()} in the row "
        f"of {machine.words}, {states}."
    )


HEAD = """<!-- Written by `python docs/sizing_tables.py`. Do not edit it. -->

# Will it fit, how fast

`tiermem plan` answers before you own the machine: it searches the library's own plans for the fastest mix of homes, and adds up
what each moves and computes. Nothing in these tables is measured: read the speeds as what the arithmetic of the plan gives when
nothing else is slow. One row was measured elsewhere: 8B compact with everything on the card of an H200 trains 7,923 tokens/s
([measured](measured.md#how-fast-is-an-8b-on-an-h200)). The command of a cell stands below the last table.

## The largest model

"""
MIDDLE = f"""
- "Written a day" is what goes to the NVMe drives in a day without a pause, and how long drives that may be written 600 TB each
  (usual for 1 TB) would last. Checkpoints that are copies come on top. `tiermem plan` says it for your plan.
- A step is {NUM_SEQUENCES} sequences of {SEQ} tokens ({NUM_SEQUENCES * SEQ:,} tokens), full fine-tuning in bf16 with AdamW and
  clipping, two sequences at a time, or one where two do not fit. Where weights, gradients, states and activations are
  kept, who steps the states, whether activations are recomputed, and whether micro-batches go block by block
  is what the search found fastest.
- 512 MiB and 5 % of a GPU and 6 GiB of the host's memory are left to others. A drive has 2 TB, and reads 7 and writes 5 GB/s
  at once. Training reaches 50, 80, 150 and 400 TFLOPS on the GPUs of 12, 16, 24 and 80 GB. Their memory moves 800 GB/s, 2,000
  of the 80 GB GPU; the link 25 GB/s each way, 50 of the 80 GB GPU. The CPU's kernels move 50 GB/s of memory. A GPU's kernel
  steps an element as fast as an H200's does, in proportion to the memory's rate. `plan` assumes the same of a machine with
  a 24 GB GPU and one drive.
- States on NVMe take twice their bytes, because the last checkpoint stays whole while steps write the next
  (`"durability": "none"` takes them once).
- States are `exact` (fp32 master and moments), `compact` (the same master, moments in bf16) or `tiny` (moments in blocks of
  8 bits): [precision](precision.md). A model has a Llama's shape and the number of parameters that its name says.
- `plan` takes your own model (`--model config.json`), batch, rates (`--rates`, from `tiermem tune`) and ranks:
  [commands](commands.md#plan). How well predictions were met on one machine: [measured](measured.md#are-predictions-met).

## Every model on every machine

In brackets: what an iteration uses longest (compute, the link to the GPU, the disk, or the CPU's kernels, which step the
states), and the TB written to NVMe in a day. A step goes on under the next forward, and a larger one hides more of the link
and of the disk. The figures are of steps that are clipped. One that is not may begin under backward, where there is room for
it (`--overlap`, [commands](commands.md#train)).
"""


def page(found: Figures) -> str:
    """docs/sizing.md."""
    parts = [HEAD + "\n".join(largest_table(found)), MIDDLE]
    parts += ["\n".join(matrix(found, states)) + "\n" for states in STATES]
    return "\n".join([*parts, shown_command(found), ""])


def with_table(readme: str, lines: Sequence[str]) -> str:
    """The README with its table replaced."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}"


def predicted(command: str) -> str:
    """What a line says of a command's plan."""
    words: Words = {}
    name = ""
    for word in command.replace("\\\n", " ").split()[2:]:
        name = word if word.startswith("--") else name
        words[name] = "" if word == name else word
    cells = plan(words)
    if cells.problems:
        raise ValueError(f"{command}: {cells.problems}")
    written = cells.written_bytes_day
    wear = f"{_tb(written)} TB written a day" if written else "nothing written to a drive"
    return f"{cells.tokens_per_s:,.0f} tokens/s, limited by {cells.forecast.limited_by}, {wear}."


def predict_again() -> None:
    """Writes the lines of every page anew."""
    for file in PAGE.parent.glob("*.md"):
        text = file.read_text("utf-8")
        for command, said in PREDICTED.findall(text):
            text = text.replace(f"Predicted: {said}", f"Predicted: {predicted(command)}", 1)
        file.write_text(text, "utf-8")


def main() -> None:
    if sys.argv[1:] != ["predicted"]:
        found = figures()
        PAGE.write_text(page(found), "utf-8")
        table = list(largest_table(found))
        README.write_text(with_table(README.read_text("utf-8"), table), "utf-8")
    predict_again()


if __name__ == "__main__":
    main()
