"""The options of every command: a dataclass for each, whose docstring is its help and whose fields
the command works with.

    preset: str | None = optional("a Llama of that size")                        --preset TEXT
    size_bytes: int = size("2GiB", "of the file", "--size")                      --size TEXT [default: 2GiB], 2147483648 for us

cli.py makes typer's parameters and `--help` from the fields. The dataclass checks its values when
it is made, so a caller in Python gets the same errors: ValueError or OSError, one line, before any
measurement. This file imports no large package.
"""

# ruff: noqa: RUF009   (option is dataclasses.field)

from __future__ import annotations

import dataclasses
import errno
import math
import operator
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiermem.swap.base.engines import ENGINES
from tiermem.tools.measure.machine import num_cores, parse_tbw
from tiermem.tools.memory_limit import parse_memory
from tiermem.tools.words import (
    Mistake,
    OneOf,
    Options,
    above_zero,
    at_least,
    ends_in,
    folders,
    format_bytes,
    from_to,
    memory_of,
    option,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_share,
    program,
    read_json,
    several,
    size,
    value_of,
)

OFFLOADS = ("auto", "none", "cpu", "nvme")
CARDS = ("h100", "h200", "a100", "l40s", "5090", "4090", "3090", "4060ti")
"""The rows of forecast/cards.py."""
PRECISIONS = ("auto", "bf16", "fp32", "fp16")
COMPUTES = ("auto", "storage", "fp32")
# the presets of tiermem/precision.py, which imports torch
STATES = ("exact", "compact", "bf16", "tiny")
DURABILITIES = ("checkpoint", "step", "none")
OVERLAPS = ("auto", "none", "forward", "backward")
ISAS = ("plain", "avx2", "avx512")
"""Instruction sets of the kernels, as tm_isa_choose numbers them."""
SEQUENTIAL = ("read", "write", "mixed")
RANDOM = ("random", "random-write")
MODES = (*SEQUENTIAL, *RANDOM, "tensors", "sustained")

LEAST_MEMORY_BYTES = 32 << 20
YAML = (".yaml", ".yml")
"""Endings of files of TRL's arguments."""
# parameters
_LEAST_STEPPED = 4096
_LEAST_ADAM = 1024
_PAGE_BYTES = 4096

DECIDED_BY_CONFIG = (
    "offload",
    "nvme",
    "precision",
    "compute",
    "states",
    "lr",
    "batch",
    "resident_bytes",
    "durability",
    "keep",
    "overlap",
)
"""The options of `train` that a config has keys for."""
MADE_OF = ("offload", "precision", "states", "batch", "overlap")
"""The options that `plan` makes a config of, where none is given."""
_OF_A_MACHINE = memory_of(1 << 20)


def _card(name: str, value: str) -> None:
    if value.upper().rstrip("IB").endswith("G"):
        raise Mistake(f"{name} is {value!r}, a size", {name: f"--gpu-memory {shlex.quote(value)}"})
    OneOf(*CARDS)(name, value)


def leave_to_config(options: Any, *fields: str) -> None:
    """Raises Mistake where options are given beside --config, which decides them."""
    given = options.given(*fields)
    if options.config is not None and given:
        raise Mistake(
            f"{', '.join(given)}: --config decides this; change {options.config} instead",
            dict.fromkeys(given, ""),
        )


def check_one_model(options: Any, example: str) -> None:
    """Raises Mistake where --preset and --model are both given, or none is."""
    if (options.preset is None) == (options.model is None):
        said = "both are given" if options.preset else "none is given"
        instead = {"--model": ""} if options.preset else {"--preset": f"--preset {example}"}
        raise Mistake(f"a model is named by exactly one of --preset and --model; {said}", instead)


def _none_or_of_a_machine(name: str, value: Any) -> None:
    if value:
        _OF_A_MACHINE(name, value)


_OF_OTHERS = {
    "__load_in_4bit": ("is bitsandbytes'; tiermem packs frozen weights itself", "--frozen nf4"),
    "__load_in_8bit": ("is bitsandbytes'; tiermem packs frozen weights itself", "--frozen int8"),
    "__max_seq_length": ("is --max_length in this TRL", "--max_length {}"),
    "__device_map": ("is not needed: tiermem places the weights, by --offload", ""),
}
"""Arguments that people bring for `sft`: what is wrong with them, and what to write instead."""
POSITIVE = at_least(1)
CORES = from_to(1, num_cores, ", the cores of this process")
ENGINE = OneOf(*ENGINES)

# ---- options of several commands -----------------------------------------------------------------

optional = partial(option, None)
"""A field that is None where its option is not given."""
_preset = partial(
    optional, "151m, 419m, 1b, 1.3b, 3b, 7b, 8b, 14b, 32b or 70b: a Llama of that size"
)
_states = partial(
    optional,
    "precision of masters and moments: exact, compact, bf16 or tiny [default: exact]",
    check=OneOf(*STATES),
)
_offload = partial(
    optional,
    "slowest home of weights and states: none, cpu or nvme, where memory that is left over is filled "
    "first; auto: the fastest mix that fits [default: auto]",
    check=OneOf(*OFFLOADS),
)
_frozen = partial(
    optional,
    "blocks in which frozen weights rest: nf4 (QLoRA) or int8",
    check=OneOf("nf4", "int8"),
)
_tbw = partial(
    optional, "what the drive may be written in its life, such as 600TB", "--tbw", parse_tbw
)
_sustained = partial(
    optional,
    "measure the disks past their fast caches: write until the rate has fallen, or this part of "
    "what is free, such as 20%",
    parse=parse_share,
)
_checkpointing = partial(
    optional,
    "recompute blocks in backward [default: none, some or all, as a step is predicted to be "
    "fastest]",
    "--checkpointing/--no-checkpointing",
)
_bare_loop = partial(optional, "build/yardsticks/bare_loop, from `make yardsticks`", check=program)

# ---- the commands --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """The options of every command that trains."""

    memory_bytes: int | None = optional(
        "hard limit of host memory of each rank, such as 24GiB; auto: nine tenths of what is free",
        "--memory",
        parse_memory,
        memory_of(LEAST_MEMORY_BYTES, ", which Python alone exceeds"),
    )
    tbw_bytes: int | None = _tbw()
    runs: Path = option(Path("runs"), "folder that keeps a folder per run")
    tensorboard: Path | None = optional(
        "also write every step's figures into this folder, for TensorBoard"
    )
    is_verbose: bool = option(False, "show every phase and step, and all tables", "--verbose")


@dataclasses.dataclass(frozen=True)
class TrainOptions(RunOptions):
    """Train a model under a memory cap, with its states on any tier."""

    MADE_BY = "tiermem train"

    preset: str | None = _preset()
    model: Path | None = optional(
        "a Hugging Face config.json, or a local checkpoint: config.json and safetensors"
    )
    config: Path | None = optional("a DeepSpeed-style JSON config")
    data: Sequence[Path] = option(
        (), "text files or folders [default: Python's own sources and documentation]"
    )
    offload: str | None = _offload()
    nvme: Sequence[Path] = option((), "folders on NVMe disks [default: the run's folder]")
    deepspeed_config: Path | None = optional("the old name of --config")
    tuned: Path | None = optional("what `tiermem tune` wrote: queue, engine, paths")
    sustained: float | None = _sustained()
    steps: int | None = optional(
        "optimizer steps, with those before a resume [default: 10]", check=POSITIVE
    )
    # each token but the first is predicted: without one the mean of the losses is a NaN
    seq: int | None = optional("tokens of a sequence [default: 128]", check=at_least(2))
    batch: int | None = optional("sequences of a micro-batch [default: 1]", check=POSITIVE)
    seed: int | None = optional(
        "of weights and of the order of data [default: 0]", check=from_to(0, (1 << 63) - 1)
    )
    lr: float | None = optional("learning rate of AdamW [default: 0.0001]")
    precision: str | None = optional(
        "of weights: bf16, fp32 or fp16; auto: bf16, with --compute auto [default: auto]",
        check=OneOf(*PRECISIONS),
    )
    compute: str | None = optional(
        "what 16-bit weights are multiplied in: storage (as they rest), fp32, or auto (fp32 where "
        "16-bit products are slow) [default: storage]",
        check=OneOf(*COMPUTES),
    )
    states: str | None = _states()
    is_checkpointing: bool | None = _checkpointing()
    layers: int | None = optional("another number of layers", check=POSITIVE)
    resident_bytes: int | None = size(
        None,
        "optimizer states kept in memory, such as 200MiB [default: what the cap leaves]",
        "--resident",
    )
    threads: int | None = optional("of the maths [default: what torch takes]", check=CORES)
    resume: Path | None = optional(
        "go on from what --save wrote, or from a run; what is not given is as it was; without a "
        "value: list them",
    )
    save: Path | None = optional(
        "folder of checkpoints [default, with --save-every or where a resumed run had a --save: in "
        "the run's folder]"
    )
    save_every: int | None = optional(
        "steps between two checkpoints [default: one at the end]", check=POSITIVE
    )
    durability: str | None = optional(
        "checkpoint, step (each is durable) or none (half the disk) [default: checkpoint]",
        check=OneOf(*DURABILITIES),
    )
    keep: int | None = optional(
        "checkpoints that stay where states rest [default: 1]", check=POSITIVE
    )
    overlap: str | None = optional(
        "what runs beside the tiles of an optimizer step: none, forward (the next one), backward, "
        "or auto [default: auto]",
        check=OneOf(*OVERLAPS),
    )

    def check_together(self) -> None:
        if self.lr is not None and not 0 <= self.lr < math.inf:
            raise ValueError(f"--lr is {self.lr}; it must be a number of 0 or more")
        if self.config is not None and self.config.is_file():
            content = read_json(self.config)
            if isinstance(content, dict) and "model_type" in content:
                self.take_old(
                    "config", "model", f"{self.config} is a model's: name it with --model"
                )
        self.take_old("deepspeed_config", "config", "it is --config now")
        leave_to_config(self, *DECIDED_BY_CONFIG)


@dataclasses.dataclass(frozen=True)
class SftOptions(RunOptions):
    """Fine-tune a model on text or chats: TRL's script and arguments, with states on any tier.

    All other arguments are TRL's: `trl sft --help` lists them. In front are --model_name_or_path,
    --dataset_name (a folder, a name on the hub, or a file such as chats.jsonl) and --output_dir.
    """

    MADE_BY = "tiermem sft"
    TAKES_MORE = True

    config: Path | None = optional(
        "a DeepSpeed-style JSON config; a .yaml file is one of TRL's arguments"
    )
    offload: str | None = _offload()
    nvme: Sequence[Path] = option((), "folders on NVMe disks [default: --output_dir]")
    states: str | None = _states()
    frozen: str | None = _frozen()
    arguments: Sequence[str] = ()
    """TRL's."""

    def check_together(self) -> None:
        words = {word.partition("=")[0] for word in self.arguments}
        known = {word.replace("-", "_") for word in words}  # TRL takes either
        has_file = self.config is not None and self.config.suffix in YAML
        for names, example in (
            (("__model_name_or_path",), "FOLDER"),
            (("__dataset_name", "__datasets"), "chats.jsonl"),
        ):
            if known.isdisjoint(names) and not has_file:
                name = names[0].replace("__", "--")
                short = next((word for word in words if name.startswith(word)), name)
                given = shlex.quote(value_of(short, self.arguments) or example)
                raise Mistake(f"{name} is missing", {short: f"{name} {given}"})
        if self.config is not None and not self.config.is_file():
            raise FileNotFoundError(errno.ENOENT, "--config: no such file", str(self.config))
        if "--deepspeed" in words:
            file = shlex.quote(value_of("--deepspeed", self.arguments) or "ds.json")
            raise Mistake(
                "--deepspeed is DeepSpeed's engine; here --config takes its file",
                {"--deepspeed": f"--config {file}"},
            )
        for typed in sorted(words):
            if typed.replace("-", "_") in _OF_OTHERS:
                said, instead = _OF_OTHERS[typed.replace("-", "_")]
                value = shlex.quote(value_of(typed, self.arguments) or "2048")
                raise Mistake(f"{typed} {said}", {typed: instead.format(value)})
        if self.frozen is not None and "__use_peft" not in known and not has_file:
            raise Mistake(
                "--frozen packs frozen weights, and without --use_peft none are",
                {"--frozen": f"--frozen {self.frozen} --use_peft true"},
            )
        if not has_file:
            leave_to_config(self, "offload", "nvme", "states", "frozen")
        if self.nvme and self.offload not in (None, "auto", "nvme"):
            raise Mistake(
                f"--nvme names folders, but with --offload {self.offload} nothing rests there",
                {"--offload": "--offload nvme"},
            )
        if self.nvme:
            folders("--nvme", self.nvme)


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """Say what a training would take of every tier and how long a step would last, without the
    machine for it."""

    MADE_BY = "tiermem plan"

    config: Path | None = optional("a DeepSpeed-style JSON config [default: made of the options]")
    preset: str | None = _preset()
    model: Path | None = optional(
        "a config.json of transformers or diffusers, or the folder it lies in; a pipeline's folder: "
        "its transformer or unet",
    )
    shows_paper: bool = option(
        False,
        "show the ZeRO-Infinity paper's table and the estimators of a model (7b), and plan nothing",
        "--paper",
    )
    offload: str | None = _offload()
    precision: str | None = optional(
        "of weights: as in `train` [default: auto]", check=OneOf(*PRECISIONS)
    )
    states: str | None = _states()
    lora: int | None = optional(
        "rank of adapters (PEFT) beside every Linear but a language model's head, which alone are trained",
        check=POSITIVE,
    )
    frozen: str | None = _frozen()
    batch: int | None = optional("sequences of a micro-batch [default: 1]", check=POSITIVE)
    accumulation: int | None = optional("micro-batches of a step [default: 1]", check=POSITIVE)
    overlap: str | None = optional("as in `train` [default: auto]", check=OneOf(*OVERLAPS))
    ranks: int = option(1, "ranks (GPUs) on each node", check=POSITIVE)
    nodes: int = option(1, "nodes", check=POSITIVE)
    gpu: str | None = optional(
        f"a card by its name: its memory, link and speed ({', '.join(CARDS)})",
        check=_card,
    )
    gpu_bytes: int | None = size(
        None,
        "of each rank's GPU, such as 80GiB [default: of this machine's; without one the maths "
        "runs on the CPU]",
        "--gpu-memory",
        _OF_A_MACHINE,
    )
    host_bytes: int | None = size(
        None, "of each node, such as 512GiB [default: no limit]", "--host-memory", _OF_A_MACHINE
    )
    nvme_bytes: int | None = size(
        None,
        "of each node, such as 7TB; 0: it has none [default: no limit]",
        "--nvme-size",
        _none_or_of_a_machine,
    )
    pinned_bytes: int | None = size(
        None,
        "of each node's memory that drivers may register [default: no limit]",
        "--pinned-memory",
        _OF_A_MACHINE,
    )
    written_bytes_day: int | None = size(
        None,
        "most to be written to a node's disks in a day, such as 50TB [default: no limit]",
        "--wear",
        above_zero,
    )
    nvme_rate: str | None = optional(
        "GB/s read and written by a node's disks, such as 3.6,7.0 [default: measured]"
    )
    is_duplex: bool = option(False, "the disks read and write at full speed at once", "--duplex")
    rates: Path | None = optional(
        "what `tiermem tune` wrote: its measured rates, and those seen in runs"
    )
    sustained: float | None = _sustained()
    flops: float | None = optional(
        "operations a second that a rank reaches, such as 150T [default: measured here; 150T is "
        "assumed of a GPU]",
        parse=parse_flops,
        check=above_zero,
    )
    link_bytes_s: float | None = size(
        None,
        "bytes a second between memory and GPU, each way [default: measured where there is a GPU, "
        "else 25GB]",
        "--link",
        above_zero,
    )
    gpu_memory_bytes_s: float | None = size(
        None,
        "bytes a second of a GPU's memory [default: measured where there is a GPU, else 800GB]",
        "--gpu-bandwidth",
        above_zero,
    )
    network_bytes_s: float = size(
        "10GB", "bytes a second that a rank sends to others", "--network", above_zero
    )
    near_bytes_s: float | None = size(
        None,
        "bytes a second that it sends within its node; as --network when left out",
        "--near-network",
        above_zero,
    )
    seq: int | None = optional(
        "tokens of a sequence [default: 2048], picture or clip", check=POSITIVE
    )
    is_checkpointing: bool | None = _checkpointing()

    def check_together(self) -> None:
        if self.shows_paper and self.json_file is not None:
            raise Mistake("--paper prints tables, which have no JSON", {"--json": ""})
        if self.shows_paper:
            return
        check_one_model(self, "7b")
        if self.frozen is not None and self.lora is None:
            raise Mistake(
                "--frozen packs frozen weights, and without --lora none are",
                {"--frozen": f"--frozen {self.frozen} --lora 16"},
            )
        leave_to_config(self, *MADE_OF, "accumulation", "frozen")
        if self.nvme_rate is not None and self.rates is not None:
            raise ValueError(
                "--nvme-rate and --rates both say how fast the disks are; give one of them"
            )
        if self.sustained is not None and (self.nvme_rate is not None or self.rates is not None):
            raise ValueError(
                "--sustained measures the disks; --nvme-rate and --rates say how fast they are: "
                "give one of them"
            )


@dataclasses.dataclass(frozen=True)
class CheckOptions(Options):
    """Say what this machine offers: engines, direct I/O, limits, kernels, GPU, disk. Or what
    becomes of a config's keys."""

    MADE_BY = "tiermem check"

    paths: Sequence[Path] = option((), "folders whose disks are measured [default: this]", "--path")
    seconds: float = option(5.0, "of each disk measurement", check=above_zero)
    config: Path | None = optional("a DeepSpeed-style JSON config: look at its keys instead")
    shows_all: bool = option(False, "with --config: keys that are not set, too", "--all")


@dataclasses.dataclass(frozen=True)
class TuneOptions(Options):
    """Find the block size, depth, engine and path weights that suit these disks, and write them as
    a config section.

    Use it with `tiermem train --tuned tiermem.json`, or in Python with
    tiermem.initialize(model=model, config=tiermem.with_tuned("ds.json", "tiermem.json")).
    DeepSpeed reads its "aio" section as it stands.
    """

    MADE_BY = "tiermem tune"

    paths: Sequence[Path] = option(..., "a folder on each NVMe disk", "--path", check=folders)
    out: Path = option(Path("tiermem.json"), "the config section to write")
    seconds: float = option(50.0, "for all of it, about", check=above_zero)
    size_bytes: int = size(
        "1GiB",
        "of the file to measure on, in each folder",
        "--size",
        at_least(8 << 20, format_bytes),
    )
    engines: Sequence[str] = several(
        "auto",
        f"those to try: auto (all that run), or some of {','.join(ENGINES[1:])}",
        "--engine",
        check=ENGINE,
    )
    sustained: float | None = _sustained()


@dataclasses.dataclass(frozen=True)
class IoBenchOptions(Options):
    """Measure a folder's disk: GB/s, latencies and CPU time of every engine, block size, depth and
    pattern."""

    MADE_BY = "tiermem bench io"

    paths: Sequence[Path] = option(
        ..., "folders on the disks: each alone, then all at once", "--path", check=folders
    )
    size_bytes: int = size("2GiB", "of the file in each folder, for each rank", "--size")
    blocks: Sequence[int] = several("256KiB,1MiB,4MiB", "block sizes", "--block", parse_bytes)
    depths: Sequence[int] = several("1,8,32", "blocks in flight", "--depth", int, from_to(1, 4096))
    engines: Sequence[str] = several(
        "auto", f"some of {','.join(ENGINES)}", "--engine", check=ENGINE
    )
    modes: Sequence[str] = several(
        "read,write,mixed,random",
        "some of read,write,mixed,random,random-write,tensors,sustained",
        "--mode",
        check=OneOf(*MODES),
    )
    ranks: Sequence[int] = several(
        "1", "processes at once, such as 1,4", "--ranks", int, from_to(1, 1024)
    )
    loops: int = option(5, "passes of each setting, turn and turn about", check=POSITIVE)
    random_block_bytes: int = size("4KiB", "block size of the random modes", "--random-block")
    sync: bool = option(False, "end each writing pass with a sync", "--fsync")
    threads: int = option(
        0,
        "of the threads engine [default: it chooses]",
        check=from_to(0, 1024),
        shows_default=False,
    )
    sustained_bytes: int = size("64GiB", "that sustained writes", "--bytes")
    sustained_s: float | None = optional(
        "after which sustained stops", "--seconds", check=above_zero
    )
    csv_file: Path | None = optional("write the rows here", "--csv", check=ends_in(".csv"))
    plot_file: Path | None = optional("draw heat maps, as a PNG", "--plot", check=ends_in(".png"))
    has_fio: bool = option(False, "fio on the same file, when it is installed", "--fio")
    yardstick: Path | None = _bare_loop()
    peer_python: Path | None = optional(
        "an interpreter that has DeepSpeed: its aio_handle", check=program
    )

    def check_together(self) -> None:
        used = [*self.blocks, *([self.random_block_bytes] if set(RANDOM) & set(self.modes) else [])]
        for each in (self.size_bytes, *used):
            if each < _PAGE_BYTES or each % _PAGE_BYTES:
                raise ValueError(
                    f"a size or block of {each} bytes is given; allowed are multiples of "
                    f"{_PAGE_BYTES}"
                )
        if max(used) > self.size_bytes:
            raise ValueError(
                f"--block {format_bytes(max(used))} is larger than --size "
                f"{format_bytes(self.size_bytes)}"
            )
        if "sustained" in self.modes and self.sustained_bytes < max(self.blocks):
            raise ValueError(
                f"--bytes {self.sustained_bytes} is less than a block of {max(self.blocks)} bytes"
            )


@dataclasses.dataclass(frozen=True)
class AdamBenchOptions(Options):
    """Time AdamW in every precision, beside the memory's own speed, torch's fused AdamW and
    DeepSpeedCPUAdam."""

    MADE_BY = "tiermem bench adam"

    num_params: int = option(
        "128M", "parameters to step, such as 128M", "--params", parse_count, at_least(_LEAST_ADAM)
    )
    loops: int = option(9, "of each row, everybody in turn", check=POSITIVE)
    threads: int | None = optional("of everybody's maths [default: the cores]", check=CORES)
    rows: Sequence[str] = option((), "part of the names of rows to measure [default: all]", "--row")
    isa: str | None = optional(
        "hold our kernels down to plain, avx2 or avx512 [default: the best]",
        check=OneOf(*ISAS),
    )
    yardstick: Path | None = optional(
        "build/yardsticks/bare_stream, from `make yardsticks`", check=program
    )
    peer_python: Path | None = optional(
        "an interpreter that has DeepSpeed: its CPU Adam", check=program
    )


@dataclasses.dataclass(frozen=True)
class StepBenchOptions(Options):
    """Time optimizer steps over states on NVMe, beside the disk's roofline for the same bytes."""

    MADE_BY = "tiermem bench step"

    paths: Sequence[Path] = option(
        ..., "folders on the NVMe disks: the states are dealt over them", "--path", check=folders
    )
    num_params: int = option(
        "256M",
        "parameters to step, such as 256M",
        "--params",
        parse_count,
        at_least(_LEAST_STEPPED),
    )
    precision: str = option(
        "bf16", "of parameters and gradients: fp32 or bf16", check=OneOf("bf16", "fp32")
    )
    preset: str = option(
        "exact", "of states: exact, compact, bf16, tiny; several with commas are compared"
    )
    loops: int = option(5, "steps to time", check=POSITIVE)
    resident: str = option("0", "states kept in memory; several such as 0,25%,1GiB are compared")
    only_states: bool = option(False, "keep parameters and gradients in memory", "--only-states")
    verify: str = option(
        "always", "checksums: always, sample, resume (none); several with commas are compared"
    )
    compares: bool = option(False, "also with either half of the pipeline off", "--compare")
    pipelines: bool = option(
        False, "read, compute and write in turn", "--no-pipeline", operator.not_
    )
    yardstick: Path | None = _bare_loop()
    engine: str = option("auto", f"one of {','.join(ENGINES)}", check=ENGINE)
    tbw_bytes: int | None = _tbw()
    plot_file: Path | None = optional("draw a step tile by tile, as a PNG", "--plot")

    def check_together(self) -> None:
        if self.compares and not self.pipelines:
            raise ValueError("--compare switches the pipeline on and off; leave --no-pipeline out")


@dataclasses.dataclass(frozen=True)
class FsckOptions(Options):
    """Say what is in a store: runs live or dead, which steps are durable and whole, space, what is
    not ours.

    Exit status: 0 nothing is wrong, 1 a killed run has left its folder or a removal was cut short,
    2 not all could be looked at, 3 something durable is broken or damaged.
    """

    MADE_BY = "tiermem fsck"

    where: Path = option(
        ..., "a store's path, a run's folder, a folder of checkpoints", "", metavar="DIR"
    )
    verifies: bool = option(False, "read everything and compare checksums", "--verify")
    removes: bool = option(
        False, "remove what killed runs left; only files that runs make", "--remove"
    )
    repairs: bool = option(
        False, "end removals and saves that were cut short, restore a lost `latest`", "--repair"
    )


@dataclasses.dataclass(frozen=True)
class InspectOptions(Options):
    """List a durable step's tensors like `ls -l`: shapes, states and their formats, bytes,
    files."""

    MADE_BY = "tiermem inspect"

    where: Path = option(
        ..., "a folder of checkpoints, a tag's, or a run's folder", "", metavar="DIR"
    )
    tag: str | None = optional("which of the folder's [default: its latest]")
    patterns: Sequence[str] = option(
        (), "only names that a pattern matches, such as '*.weight'", "--match"
    )


@dataclasses.dataclass(frozen=True)
class ImportOptions(Options):
    """Make a tiermem checkpoint of another system's: weights, masters, moments, steps, loss
    scale."""

    MADE_BY = "tiermem import"

    source: Path = option(..., "a DeepSpeed ZeRO-3 or DCP folder, a torch file, safetensors", "")
    out: Path = option(..., "the folder of checkpoints to write into", "")
    tag: str | None = optional("which of a DeepSpeed folder's [default: its latest]")
    new_tag: str | None = optional("of what is written [default: global_step<N>]")
    optimizer: Path | None = optional("a file with a torch optimizer's state dict")
    model: Path | None = optional(
        "the model's config.json, for train --resume [default: beside the weights]"
    )
    config: Path | None = optional("the old name of --model")

    def check_together(self) -> None:
        self.take_old("config", "model", "it is --model now")


@dataclasses.dataclass(frozen=True)
class ExportOptions(Options):
    """Write a checkpoint's weights as Hugging Face or torch files, or all of it for
    torch.distributed.checkpoint."""

    MADE_BY = "tiermem export"

    where: Path = option(
        ..., "a folder of checkpoints, a tag's, or a run's folder", "", metavar="DIR"
    )
    out: Path = option(..., "the folder to write into", "")
    tag: str | None = optional("which of the folder's [default: its latest]")
    dtype: str | None = optional("of floats: fp32, bf16 or fp16 [default: as stored]")
    is_fp32: bool = option(False, "the fp32 masters", "--fp32")
    is_pytorch: bool = option(False, "pytorch_model.bin instead of safetensors", "--pytorch")
    is_dcp: bool = option(
        False, "a torch.distributed.checkpoint folder, optimizer states included", "--dcp"
    )
    is_whole: bool = option(
        False, "a tiermem checkpoint that holds all of its bytes, to move or archive", "--whole"
    )
    max_shard_bytes: int | None = size("5GB", "of a file", "--max-shard-size")
    exclude_frozen: bool = option(False, "leave frozen parameters out", "--exclude-frozen")
    model: Path | None = optional("the model's config.json, to lie beside the weights")
    config: Path | None = optional("the old name of --model")

    def check_together(self) -> None:
        self.take_old("config", "model", "it is --model now")
        if self.is_fp32 and self.dtype is not None:
            raise ValueError("--fp32 and --dtype are given; --fp32 is --dtype fp32")
        if sum((self.is_pytorch, self.is_dcp, self.is_whole)) > 1:
            raise ValueError("two of --pytorch, --dcp and --whole are given; choose one")
        if self.is_whole and (self.is_fp32 or self.dtype or self.exclude_frozen or self.model):
            raise ValueError(
                "--whole copies every byte as it is: leave --fp32, --dtype, --exclude-frozen and "
                "--model out"
            )
        if self.is_dcp and (self.exclude_frozen or self.model):
            raise ValueError(
                "--dcp writes all parameters and no config: leave --exclude-frozen and --model out"
            )
        if self.max_shard_bytes is not None and self.max_shard_bytes < 1:
            raise ValueError(
                f"--max-shard-size is {self.max_shard_bytes}; give a size of 1 byte or more, such "
                "as 5GB"
            )
