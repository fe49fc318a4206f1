"""The options of every instrument, as tools/options.py has those of the product."""

# ruff: noqa: RUF009   (option is dataclasses.field)

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tiermem.tools.memory_limit import parse_memory
from tiermem.tools.options import (
    CORES,
    LEAST_MEMORY_BYTES,
    OVERLAPS,
    POSITIVE,
    PRECISIONS,
    STATES,
    TrainOptions,
)
from tiermem.tools.words import (
    OneOf,
    Options,
    at_least,
    folders,
    memory_of,
    option,
    program,
)


@dataclasses.dataclass(frozen=True)
class OverlapBenchOptions(Options):
    """Time an iteration whose step goes on under the next forward, beside the same maths and a bare
    loop of its least bytes.

    Exit status: 0 it moves at most 1.02 of the least bytes, and takes at most 1.1 of the maths
    beside the loop or 0.70 of an iteration with overlap=none; 1 it does not.
    """

    MADE_BY = "bench overlap"

    paths: Sequence[Path] = option(
        ..., "folders on the NVMe disks: all states are dealt over them", "--path", check=folders
    )
    preset: str = option(
        "419m", "151m, 419m, 1b, 1.3b, 3b, 7b, 8b, 14b, 32b or 70b: a Llama of that size"
    )
    model: Path | None = option(None, "a Hugging Face config.json, instead of a preset")
    data: Sequence[Path] = option(
        (), "text files or folders [default: Python's own sources and documentation]"
    )
    seq: int = option(128, "tokens of a sequence", check=POSITIVE)
    batch: int = option(1, "sequences of a micro-batch", check=POSITIVE)
    states: str = option(
        "exact",
        "precision of masters and moments: exact, compact, bf16 or tiny",
        check=OneOf(*STATES),
    )
    precision: str = option("auto", "of weights: as in `train`", check=OneOf(*PRECISIONS))
    memory_bytes: int = option(
        "1300MiB",
        "hard limit of each training's memory",
        "--memory",
        parse_memory,
        memory_of(LEAST_MEMORY_BYTES),
    )
    is_checkpointing: bool = option(False, "recompute activations in backward", "--checkpointing")
    overlap: str = option(
        "forward", "what the steps run beside: forward or backward", check=OneOf(*OVERLAPS[2:])
    )
    clipping: float | None = option(
        None,
        "most norm of the gradients [default: that of `train`; 0, none, with backward]",
        check=at_least(0),
    )
    rounds: int = option(3, "turns of each, one after the other", check=POSITIVE)
    iterations: int = option(2, "timed in each turn", check=POSITIVE)
    threads: int | None = option(
        None, "of everybody's maths [default: what torch takes]", check=CORES
    )
    yardstick: Path | None = option(
        None, "build/yardsticks/bare_loop, from `make yardsticks`", check=program
    )


@dataclasses.dataclass(frozen=True)
class RanksBenchOptions(Options):
    """Time a step on several ranks with everything in memory beside FSDP2's, and the Python around
    a unit."""

    MADE_BY = "bench ranks"

    num_ranks: int = option(2, "processes, gloo between them", "--ranks", check=at_least(2))
    loops: int = option(15, "steps of each, in turn", check=POSITIVE)
    num_blocks: int = option(8, "of the model", "--blocks", check=POSITIVE)
    width: int = option(512, "of a block; it holds 8 x width^2 parameters", check=POSITIVE)
    num_samples: int = option(512, "rows of each rank's batch", "--samples", check=POSITIVE)
    num_empty: int = option(
        64, "units that compute next to nothing, for the overhead", "--empty", check=POSITIVE
    )


@dataclasses.dataclass(frozen=True)
class CurvesOptions(Options):
    """Train a small model with its states in several precisions and compare the losses."""

    MADE_BY = "bench curves"

    steps: int = option(300, "optimizer steps under each preset", check=POSITIVE)
    presets: Sequence[str] = option(
        "exact,compact,tiny,bf16",
        "of states, to be compared with the first",
        parse=lambda text: tuple(text.split(",")),
    )
    data: Sequence[Path] = option(
        (), "text files or folders [default: Python's own sources and documentation]"
    )
    seed: int = option(0, "of weights, data and rounding: the first")
    repeats: int = option(3, "seeds whose means are compared", check=POSITIVE)
    plot_file: Path | None = option(None, "draw the losses, as a PNG", "--plot")

    def check_together(self) -> None:
        if (
            not self.presets
            or not set(self.presets) <= set(STATES)
            or len(set(self.presets)) < len(self.presets)
        ):
            given = ",".join(self.presets)
            raise ValueError(
                f"--presets is {given!r}; allowed are some of {', '.join(STATES)}, each once"
            )


@dataclasses.dataclass(frozen=True)
class PeersOptions(TrainOptions):
    """Train as `tiermem train` with the same options, then with plain PyTorch, FSDP2 (with a GPU)
    and DeepSpeed."""

    MADE_BY = "bench peers"

    peer_python: Path | None = option(None, "an interpreter that has DeepSpeed")
