"""The command line: `tiermem train`, `check`, `tune` and `bench`.

A mistake of the user's is one line on stderr and exit status 2; --debug shows the traceback. Nothing heavy is imported
before a command needs it: torch belongs to the trainer's process.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tiermem.tools.byte_size import parse_bytes, parse_count
from tiermem.tools.endurance import parse_tbw

EXIT_USER, EXIT_INTERRUPTED = 2, 130
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


bench = typer.Typer(help="Measure what this machine reaches.", no_args_is_help=True)
app.add_typer(bench, name="bench")


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
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 10,
    seq: Annotated[int, typer.Option(help="tokens of a sequence")] = 128,
    batch: Annotated[int | None, typer.Option(help="sequences of a micro-batch [default: 1]")] = None,
    seed: Annotated[int, typer.Option(help="of weights and of the order of data")] = 0,
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
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    runs: Annotated[Path, typer.Option(help="folder that keeps a folder per run")] = Path("runs"),
    peers: Annotated[bool, typer.Option("--peers", help="also train with plain PyTorch, and DeepSpeed")] = False,
    peer_python: Annotated[Path | None, typer.Option(help="an interpreter that has DeepSpeed")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks and what the trainer prints")] = False,
) -> None:
    """Train a model under a memory cap, with its states on any tier."""
    from tiermem.tools.reports import open_console
    from tiermem.tools.train import TrainOptions, UserError
    from tiermem.tools.train import train as run_training

    try:
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
            json_file=json_file,
            runs=runs,
            has_peers=peers,
            peer_python=peer_python,
            is_debug=debug,
            command=["tiermem", *sys.argv[1:]],
        )
        status = run_training(options, open_console())
    except (UserError, ValueError, OSError) as error:
        raise typer.Exit(_refuse("train", error, debug)) from None
    raise typer.Exit(status)


@app.command()
def check(
    path: Annotated[list[Path] | None, typer.Option(help="folders whose disks are measured [default: this]")] = None,
    seconds: Annotated[float, typer.Option(help="of each disk measurement")] = 5.0,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Say what this machine offers: engines, direct I/O, limits, kernels, GPU, and how fast its disk is."""
    from tiermem.tools.check import check_machine
    from tiermem.tools.reports import open_console

    try:
        status = check_machine(path or [Path()], seconds, open_console())
    except (ValueError, OSError) as error:
        raise typer.Exit(_refuse("check", error, debug)) from None
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

    try:
        options = TuneOptions(path, out, seconds, parse_bytes(size), tuple(engine.split(",")))
        status = run_tuning(options, open_console())
    except (ValueError, OSError) as error:
        raise typer.Exit(_refuse("tune", error, debug)) from None
    except KeyboardInterrupt:
        print("tiermem tune: stopped by Ctrl-C; nothing was written", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(status)


@bench.command("io")
def bench_io(
    path: Annotated[list[Path], typer.Option(help="folders on the disks: each alone, then all at once")],
    size: Annotated[str, typer.Option(help="of the file in each folder, for each rank")] = "2GiB",
    block: Annotated[str, typer.Option(help="block sizes")] = "256KiB,1MiB,4MiB",
    depth: Annotated[str, typer.Option(help="blocks in flight")] = "1,8,32",
    engine: Annotated[str, typer.Option(help="some of auto,uring,aio,threads")] = "auto",
    mode: Annotated[
        str, typer.Option(help="some of read,write,mixed,random,tensors,sustained")
    ] = "read,write,mixed,random",
    ranks: Annotated[str, typer.Option(help="processes at once, such as 1,4")] = "1",
    loops: Annotated[int, typer.Option(help="passes of each setting, turn and turn about")] = 5,
    random_block: Annotated[str, typer.Option(help="block size of random")] = "4KiB",
    fsync: Annotated[bool, typer.Option("--fsync", help="end each writing pass with a sync")] = False,
    threads: Annotated[int, typer.Option(help="of the threads engine [default: it chooses]", show_default=False)] = 0,
    most_bytes: Annotated[str, typer.Option("--bytes", help="that sustained writes")] = "64GiB",
    seconds: Annotated[float | None, typer.Option(help="after which sustained stops")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write machine, rows and best here")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="write the rows here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw heat maps, as a PNG")] = None,
    fio: Annotated[bool, typer.Option("--fio", help="fio on the same file, when it is installed")] = False,
    yardstick: Annotated[Path | None, typer.Option(help="build/yardsticks/bare_loop, from `make yardsticks`")] = None,
    peer_python: Annotated[Path | None, typer.Option(help="an interpreter that has DeepSpeed: its aio_handle")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Measure a folder's disk: GB/s, latencies and CPU time of every engine, block size, depth and pattern."""
    from tiermem.tools.bench_io import IoBenchOptions, parse_list
    from tiermem.tools.bench_io import bench_io as run_benchmark
    from tiermem.tools.reports import open_console

    try:
        options = IoBenchOptions(
            paths=path,
            size_bytes=parse_bytes(size),
            blocks=parse_list(block, "--block", parse_bytes),
            depths=parse_list(depth, "--depth", int),
            engines=parse_list(engine, "--engine"),
            modes=parse_list(mode, "--mode"),
            ranks=parse_list(ranks, "--ranks", int),
            loops=loops,
            random_block_bytes=parse_bytes(random_block),
            sync=fsync,
            threads=threads,
            sustained_bytes=parse_bytes(most_bytes),
            sustained_s=seconds,
            json_file=json_file,
            csv_file=csv_file,
            plot_file=plot_file,
            has_fio=fio,
            yardstick=yardstick,
            peer_python=peer_python,
        )
        status = run_benchmark(options, open_console())
    except (ValueError, OSError) as error:
        raise typer.Exit(_refuse("bench io", error, debug)) from None
    except KeyboardInterrupt:
        print("tiermem bench io: stopped; nothing is left on the paths", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(status)


@bench.command("adam")
def bench_adam(
    params: Annotated[str, typer.Option(help="parameters to step, such as 128M")] = "128M",
    loops: Annotated[int, typer.Option(help="of each row, everybody in turn")] = 9,
    threads: Annotated[int | None, typer.Option(help="of everybody's maths [default: the cores]")] = None,
    row: Annotated[list[str] | None, typer.Option(help="part of the names of rows to measure [default: all]")] = None,
    yardstick: Annotated[Path | None, typer.Option(help="build/yardsticks/bare_stream, from `make yardsticks`")] = None,
    peer_python: Annotated[Path | None, typer.Option(help="an interpreter that has DeepSpeed: its CPU Adam")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write machine and rows here")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Time AdamW in every precision, beside the memory's own speed, torch's fused AdamW and DeepSpeedCPUAdam."""
    from tiermem.tools.bench_adam import AdamBenchOptions
    from tiermem.tools.bench_adam import bench_adam as run_benchmark
    from tiermem.tools.reports import open_console

    try:
        options = AdamBenchOptions(
            num_params=parse_count(params),
            loops=loops,
            threads=threads,
            rows=tuple(row or ()),
            json_file=json_file,
            yardstick=yardstick,
            peer_python=peer_python,
        )
        status = run_benchmark(options, open_console())
    except (ValueError, OSError) as error:
        raise typer.Exit(_refuse("bench adam", error, debug)) from None
    except KeyboardInterrupt:
        print("tiermem bench adam: stopped; nothing was written", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(status)


@bench.command("step")
def bench_step(
    path: Annotated[list[Path], typer.Option(help="folders on the NVMe disks: the states are dealt over them")],
    params: Annotated[str, typer.Option(help="parameters to step, such as 256M")] = "256M",
    precision: Annotated[str, typer.Option(help="of parameters and gradients: fp32 or bf16")] = "bf16",
    preset: Annotated[
        str, typer.Option(help="of states: exact, compact, bf16, tiny; several with commas are compared")
    ] = "exact",
    loops: Annotated[int, typer.Option(help="steps to time")] = 5,
    resident: Annotated[str, typer.Option(help="states kept in memory; several such as 0,25%,1GiB are compared")] = "0",
    only_states: Annotated[bool, typer.Option("--only-states", help="keep parameters and gradients in memory")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="also with either half of the pipeline off")] = False,
    no_pipeline: Annotated[bool, typer.Option("--no-pipeline", help="read, compute and write in turn")] = False,
    yardstick: Annotated[Path | None, typer.Option(help="build/yardsticks/bare_loop, from `make yardsticks`")] = None,
    engine: Annotated[str, typer.Option(help="auto, uring, aio or threads")] = "auto",
    tbw: Annotated[str | None, typer.Option(help="what the drive may be written in its life, such as 600TB")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw a step tile by tile, as a PNG")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Time optimizer steps over states on NVMe, beside the disk's roofline for the same bytes."""
    from tiermem.tools.bench_step import StepBenchOptions
    from tiermem.tools.bench_step import bench_step as run_benchmark
    from tiermem.tools.reports import open_console

    try:
        options = StepBenchOptions(
            paths=path,
            num_params=parse_count(params),
            precision=precision,
            preset=preset,
            loops=loops,
            resident=resident,
            compares=compare,
            pipelines=not no_pipeline,
            only_states=only_states,
            yardstick=yardstick,
            engine=engine,
            tbw_bytes=parse_tbw(tbw) if tbw is not None else None,
            json_file=json_file,
            plot_file=plot_file,
        )
        status = run_benchmark(options, open_console())
    except (ValueError, OSError) as error:
        raise typer.Exit(_refuse("bench step", error, debug)) from None
    except KeyboardInterrupt:
        print("tiermem bench step: stopped; nothing is left on the paths", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(status)


@bench.command("curves")
def bench_curves(
    steps: Annotated[int, typer.Option(help="optimizer steps under each preset")] = 300,
    presets: Annotated[str, typer.Option(help="of states, to be compared with the first")] = "exact,compact,tiny,bf16",
    data: Annotated[
        list[Path] | None, typer.Option(help="text files or folders [default: Python's own sources and documentation]")
    ] = None,
    seed: Annotated[int, typer.Option(help="of weights, data and rounding: the first")] = 0,
    repeats: Annotated[int, typer.Option(help="seeds whose means are compared")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the losses here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw the losses, as a PNG")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Train a small model with its states in several precisions and compare the losses."""
    from tiermem.tools.curves import CurvesOptions
    from tiermem.tools.curves import bench_curves as run_benchmark
    from tiermem.tools.reports import open_console

    try:
        options = CurvesOptions(steps, presets.split(","), tuple(data or ()), seed, repeats, json_file, plot_file)
        status = run_benchmark(options, open_console())
    except (ValueError, OSError) as error:
        raise typer.Exit(_refuse("bench curves", error, debug)) from None
    except KeyboardInterrupt:
        print("tiermem bench curves: stopped by Ctrl-C; nothing was written", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    raise typer.Exit(status)


def _refuse(command: str, error: Exception, is_debug: bool) -> int:
    """One line for the user, and the traceback when asked for."""
    if is_debug:
        traceback.print_exception(error)
    message = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror or error}"
    print(f"tiermem {command}: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USER


if __name__ == "__main__":
    main()
