"""The command line: `tiermem train`, `plan`, `check`, `tune`, `bench` (cli.py), and checkpoints (cli_checkpoint.py).

A mistake of the user's is one line on stderr and exit status 2; --debug shows the traceback. Nothing heavy is imported
before a command needs it: torch belongs to the trainer's process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tiermem.tools.bench.cli import bench
from tiermem.tools.cli_checkpoint import checkpoints
from tiermem.tools.machine import parse_tbw
from tiermem.tools.words import EXIT_INTERRUPTED, EXIT_USER, parse_bytes, parse_flops, refusing

__all__ = ["EXIT_INTERRUPTED", "EXIT_USER", "app", "main", "spread_lists"]

_LISTS = ("--nvme", "--data", "--path")

app = typer.Typer(
    help="Train models whose states do not fit in memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `tiermem` program; ends the process with its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    app(args=spread_lists(given), prog_name="tiermem")


def spread_lists(arguments: Sequence[str]) -> list[str]:
    """`--nvme A B` as `--nvme A --nvme B`: words after an option that takes several belong to it."""
    spread: list[str] = []
    option: str | None = None
    has_value = False
    for word in arguments:
        if word.startswith("-"):
            option = word if word in _LISTS else None
            has_value = False
        elif option is not None:
            if has_value:
                spread.append(option)
            has_value = True
        spread.append(word)
    return spread


app.add_typer(bench, name="bench")
app.add_typer(checkpoints)


@app.callback()
def _root() -> None:
    """Keeps `train` a sub-command."""


@app.command()
def train(
    preset: Annotated[str | None, typer.Option(help="151m, 419m, 1.3b, 3b or 7b: a Llama of that size")] = None,
    config: Annotated[Path | None, typer.Option(help="a Hugging Face config.json")] = None,
    model: Annotated[Path | None, typer.Option(help="a local checkpoint: config.json and safetensors")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="text files or folders [default: Python's own sources and documentation]")
    ] = None,
    offload: Annotated[str | None, typer.Option(help="home of all states: none, cpu or nvme [default: nvme]")] = None,
    nvme: Annotated[list[Path] | None, typer.Option(help="folders on NVMe disks [default: the run's folder]")] = None,
    memory: Annotated[str | None, typer.Option(help="hard limit of host memory, such as 1250MiB")] = None,
    deepspeed_config: Annotated[Path | None, typer.Option(help="a DeepSpeed-style JSON config")] = None,
    tuned: Annotated[Path | None, typer.Option(help="what `tiermem tune` wrote: queue, engine, paths")] = None,
    tbw: Annotated[str | None, typer.Option(help="what the drive may be written in its life, such as 600TB")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps, with those before a resume [default: 10]")] = None,
    seq: Annotated[int | None, typer.Option(help="tokens of a sequence [default: 128]")] = None,
    batch: Annotated[int | None, typer.Option(help="sequences of a micro-batch [default: 1]")] = None,
    seed: Annotated[int | None, typer.Option(help="of weights and of the order of data [default: 0]")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate of AdamW [default: 0.0001]")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32 or fp16 [default: bf16]")] = None,
    states: Annotated[
        str | None, typer.Option(help="precision of masters and moments: exact, compact, bf16 or tiny [default: exact]")
    ] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="recompute activations in backward")] = False,
    layers: Annotated[int | None, typer.Option(help="another number of layers")] = None,
    resident: Annotated[
        str | None, typer.Option(help="optimizer states kept in memory, such as 200MiB [default: what the cap leaves]")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="of the maths [default: what torch takes]")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="go on from what --save wrote, or from a run; what is not given is as it was")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="folder of checkpoints [default, with --save-every: in the run's folder]")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="steps between two checkpoints [default: one at the end]")
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(help="checkpoint, step (each is durable) or none (half the disk) [default: checkpoint]"),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="checkpoints that stay where states rest [default: 1]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    runs: Annotated[Path, typer.Option(help="folder that keeps a folder per run")] = Path("runs"),
    peers: Annotated[bool, typer.Option("--peers", help="also train with plain PyTorch, and DeepSpeed")] = False,
    peer_python: Annotated[Path | None, typer.Option(help="an interpreter that has DeepSpeed")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks and what the trainer prints")] = False,
) -> None:
    """Train a model under a memory cap, with its states on any tier."""
    from tiermem.tools.reports import open_console
    from tiermem.tools.train import UserError
    from tiermem.tools.train import train as run_training
    from tiermem.tools.train_options import TrainOptions

    with refusing("train", debug, errors=(UserError, ValueError, OSError)):
        options = TrainOptions(
            preset=preset,
            config=config,
            model=model,
            data=tuple(data or ()),
            offload=offload,
            nvme=tuple(nvme or ()),
            memory_bytes=parse_bytes(memory) if memory is not None else None,
            deepspeed_config=deepspeed_config,
            tuned=tuned,
            tbw_bytes=parse_tbw(tbw) if tbw is not None else None,
            steps=steps,
            seq=seq,
            batch=batch,
            seed=seed,
            lr=lr,
            precision=precision,
            states=states,
            is_checkpointing=checkpointing,
            layers=layers,
            resident_bytes=parse_bytes(resident) if resident is not None else None,
            threads=threads,
            resume=resume,
            save=save,
            save_every=save_every,
            durability=durability,
            keep=keep,
            json_file=json_file,
            runs=runs,
            has_peers=peers,
            peer_python=peer_python,
            is_debug=debug,
            command=["tiermem", *sys.argv[1:]],
        )
        status = run_training(options, open_console())
    raise typer.Exit(status)


@app.command()
def plan(
    config: Annotated[Path | None, typer.Option(help="a DeepSpeed-style JSON config")] = None,
    preset: Annotated[str | None, typer.Option(help="151m, 419m, 1.3b, 3b or 7b: a Llama of that size")] = None,
    model: Annotated[Path | None, typer.Option(help="a Hugging Face config.json, or the folder it lies in")] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="show the ZeRO-Infinity paper's table of memory, and plan nothing")
    ] = False,
    ranks: Annotated[int, typer.Option(help="ranks (GPUs) on each node")] = 1,
    nodes: Annotated[int, typer.Option(help="nodes")] = 1,
    gpu_memory: Annotated[
        str | None, typer.Option(help="of each rank's GPU, such as 80GiB [default: the maths runs on the CPU]")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(help="of each node, such as 512GiB [default: no limit]")] = None,
    nvme_size: Annotated[str | None, typer.Option(help="of each node, such as 7TB [default: no limit]")] = None,
    nvme_rate: Annotated[
        str | None, typer.Option(help="GB/s read and written by a node's disks, such as 3.6,7.0 [default: measured]")
    ] = None,
    duplex: Annotated[bool, typer.Option("--duplex", help="the disks read and write at full speed at once")] = False,
    rates: Annotated[Path | None, typer.Option(help="what `tiermem tune` wrote: its measured rates")] = None,
    flops: Annotated[
        str | None, typer.Option(help="operations a second that a rank reaches, such as 150T [default: measured here]")
    ] = None,
    link: Annotated[str, typer.Option(help="bytes a second between memory and GPU, each way")] = "25GB",
    network: Annotated[str, typer.Option(help="bytes a second that a rank sends to others")] = "10GB",
    near_network: Annotated[
        str | None, typer.Option(help="bytes a second that it sends within its node; as --network when left out")
    ] = None,
    seq: Annotated[int, typer.Option(help="tokens of a sequence")] = 2048,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="recompute activations in backward")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Say what a training would take of every tier and how long a step would last, without the machine for it."""
    from tiermem.tools.plan import PlanOptions
    from tiermem.tools.plan import plan as run_planning
    from tiermem.tools.reports import open_console

    with refusing("plan", debug, "stopped by Ctrl-C; nothing was written"):
        if paper:
            from tiermem.tools.plan_report import print_paper

            print_paper(open_console())
            raise typer.Exit()
        if config is None:
            raise ValueError("--config is missing: give the config to plan for, or --paper for the paper's table alone")
        options = PlanOptions(
            config=config,
            preset=preset,
            model=model,
            ranks=ranks,
            nodes=nodes,
            gpu_bytes=parse_bytes(gpu_memory) if gpu_memory is not None else None,
            host_bytes=parse_bytes(host_memory) if host_memory is not None else None,
            nvme_bytes=parse_bytes(nvme_size) if nvme_size is not None else None,
            nvme_rate=nvme_rate,
            is_duplex=duplex,
            rates=rates,
            flops=parse_flops(flops) if flops is not None else None,
            link_bytes_s=parse_bytes(link),
            network_bytes_s=parse_bytes(network),
            near_bytes_s=parse_bytes(near_network) if near_network is not None else None,
            seq=seq,
            is_checkpointing=checkpointing,
            json_file=json_file,
        )
        status = run_planning(options, open_console())
    raise typer.Exit(status)


@app.command()
def check(
    path: Annotated[list[Path] | None, typer.Option(help="folders whose disks are measured [default: this]")] = None,
    seconds: Annotated[float, typer.Option(help="of each disk measurement")] = 5.0,
    config: Annotated[Path | None, typer.Option(help="a DeepSpeed-style JSON config: look at its keys instead")] = None,
    shows_all: Annotated[bool, typer.Option("--all", help="with --config: keys that are not set, too")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Say what this machine offers: engines, direct I/O, limits, kernels, GPU, disk. Or what becomes of a config's keys."""
    from tiermem.tools.check import check_config, check_machine
    from tiermem.tools.reports import open_console

    with refusing("check", debug):
        if config is not None:
            status = check_config(config, open_console(), shows_all)
        else:
            status = check_machine(path or [Path()], seconds, open_console())
    raise typer.Exit(status)


@app.command()
def tune(
    path: Annotated[list[Path], typer.Option(help="a folder on each NVMe disk")],
    out: Annotated[Path, typer.Option(help="the config section to write")] = Path("tiermem.json"),
    seconds: Annotated[float, typer.Option(help="for all of it, about")] = 50.0,
    size: Annotated[str, typer.Option(help="of the file to measure on, in each folder")] = "1GiB",
    engine: Annotated[
        str, typer.Option(help="those to try: auto (all that run), or some of uring,aio,threads")
    ] = "auto",
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Find the block size, depth, engine and path weights that suit these disks, and write them as a config section.

    Use it with `tiermem train --tuned tiermem.json`, or in Python with
    tiermem.initialize(model=model, config=tiermem.with_tuned("ds.json", "tiermem.json")).
    DeepSpeed reads its "aio" section as it stands.
    """
    from tiermem.tools.reports import open_console
    from tiermem.tools.tune import TuneOptions
    from tiermem.tools.tune import tune as run_tuning

    with refusing("tune", debug, "stopped by Ctrl-C; nothing was written"):
        options = TuneOptions(path, out, seconds, parse_bytes(size), tuple(engine.split(",")))
        status = run_tuning(options, open_console())
    raise typer.Exit(status)


if __name__ == "__main__":
    main()
